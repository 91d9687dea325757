// Packs matrices as BITMAP and CODED_BITMAP.
#include "cpu/layout/bitmap.h"
#include "codec/team.h"

#include <algorithm>
#include <cstring>

namespace macko::cpu {

// Writes the mask of stored values first ... last - 1, which are one row. Fillers (zeros) advance the column without
// setting a bit.
template <int BITS, typename T>
static void pack_mask(const uint8_t * deltas, const T * values, int64_t first, int64_t last, uint64_t * mask,
                      int64_t words) {
    int64_t  col  = -1;
    int64_t  at   = 0; // the word of the mask in `bits`
    uint64_t bits = 0;
    for (int64_t k = first; k < last; k++) {
        col += delta_code(deltas, k, BITS) + 1;
        if (col >> 6 != at) { // at most once in 64 columns
            mask[at++] = bits;
            bits       = 0;
            for (; at < col >> 6; at++) {
                mask[at] = 0;
            }
        }
        bits |= static_cast<uint64_t>(values[k] != 0) << (col & 63);
    }
    for (; at < words; at++) {
        mask[at] = bits;
        bits     = 0;
    }
}

// Copies the non-zeros of n stored values to dst; returns their number.
template <typename T> static int64_t pack_values(const T * values, int64_t n, T * dst) {
    int64_t n_zero = 0;
    for (int64_t k = 0; k < n; k++) {
        n_zero += values[k] == 0;
    }
    if (n_zero == 0) {
        memcpy(dst, values, static_cast<size_t>(n) * sizeof(T));
        return n;
    }
    // No branch: the next value overwrites a filler, and the last value of a row is a non-zero, because rows are
    // canonical.
    int64_t m = 0;
    for (int64_t k = 0; k < n; k++) {
        dst[m] = values[k];
        m += values[k] != 0;
    }
    return m;
}

template <int BITS, typename T>
static void pack(const macko_view & view, int64_t first_value, const bitmap_layout & dst) {
    const macko_rows & rows   = view.rows();
    const int64_t      words  = mask_words(dst.cols);
    const T *          values = static_cast<const T *>(rows.values);
    T *                out    = reinterpret_cast<T *>(dst.values) + first_value;
    for (int64_t r = rows.row_begin; r < rows.row_end; r++) {
        const int64_t first = rows.row_ptr[r] - rows.base;
        const int64_t last  = rows.row_ptr[r + 1] - rows.base;
        dst.row_off[r]      = static_cast<uint32_t>(out - reinterpret_cast<T *>(dst.values));
        pack_mask<BITS>(rows.deltas, values, first, last, dst.masks + r * words, words);
        if (last > first) {
            out += pack_values(values + first, last - first, out);
        }
    }
    if (rows.row_end == dst.rows) {
        dst.row_off[dst.rows] = static_cast<uint32_t>(out - reinterpret_cast<T *>(dst.values));
        memset(out, 0, VALUES_SLACK);
    }
}

template <typename T> static void pack_type(const macko_view & view, int64_t first_value, const bitmap_layout & dst) {
    switch (view.rows().desc.delta_bits) {
        case 1:  pack<1, T>(view, first_value, dst); break;
        case 2:  pack<2, T>(view, first_value, dst); break;
        case 4:  pack<4, T>(view, first_value, dst); break;
        default: pack<8, T>(view, first_value, dst); break;
    }
}

void bitmap_pack(const macko_view & view, int64_t first_value, const bitmap_layout & dst) {
    if (value_nbytes(dst.dense_type) == 4) {
        pack_type<uint32_t>(view, first_value, dst);
    } else {
        pack_type<uint16_t>(view, first_value, dst);
    }
}

// ---- coded values ----

// Appends the coded values of a row to a bitmap.
struct coded_writer {
    uint8_t * values;
    uint8_t * signs;
    uint8_t * highs;
    bool      odd;                // base is odd: the lowest bit of an exponent is the inverse of its code's
    uint64_t  sign = 0, high = 0; // bits that are not stored yet
    int       n_bits = 0;         // number of bits in each

    coded_writer(const coded_bitmap_layout & dst, int64_t first, int32_t base)
        : values(dst.values + first), signs(dst.signs + first / 8), highs(dst.highs + first / 8), odd(base % 2) {}

    void put_bits(uint32_t sign_bits, uint32_t high_bits, int n) {
        sign |= static_cast<uint64_t>(sign_bits) << n_bits;
        high |= static_cast<uint64_t>(high_bits) << n_bits;
        for (n_bits += n; n_bits >= 8; n_bits -= 8) {
            *signs++ = static_cast<uint8_t>(sign);
            *highs++ = static_cast<uint8_t>(high);
            sign >>= 8;
            high >>= 8;
        }
    }
    // appends the values of a block at the set bits of `places`
    void put(const coded_block_view & b, uint32_t places) {
        // Exponents are high * 2 + 0 ... 3, with an even `high * 2`. With an even base these offsets are the codes 1,
        // 2, 3; with an odd base they are the codes minus one, whose lowest bit is inverted.
        const uint32_t highs_of = odd ? b.code[1] & b.code[0] : b.code[1];
        const uint8_t  flip     = odd ? 0x80 : 0;
        if (places == ~uint32_t(0)) {
            for (int i = 0; i < CODED_BLOCK; i++) {
                values[i] = b.bytes[i] ^ flip;
            }
            values += CODED_BLOCK;
            put_bits(b.sign, highs_of, CODED_BLOCK);
            return;
        }
        for (; places; places &= places - 1) {
            const int i = __builtin_ctz(places);
            *values++   = b.bytes[i] ^ flip;
            put_bits(b.sign >> i & 1, highs_of >> i & 1, 1);
        }
    }
    void finish() { put_bits(0, 0, n_bits == 0 ? 0 : 8 - n_bits); }
};

// Calls f(block, its first value, places) for the blocks of values begin ... end - 1; places: mask of these values.
template <typename F> static void for_each_block(int64_t begin, int64_t end, F && f) {
    for (int64_t k = begin; k < end;) {
        const int64_t block = k / CODED_BLOCK, first = k % CODED_BLOCK, n = std::min(CODED_BLOCK - first, end - k);
        f(block, block * CODED_BLOCK, static_cast<uint32_t>(((uint64_t(1) << n) - 1) << first));
        k += n;
    }
}

// Packs a row with a complete mask: removes the outliers from the mask.
static void pack_coded_row(const packed_view & view, int64_t row, const coded_bitmap_layout & dst) {
    const packed_arrays & a       = view.arrays();
    const coded_view &    coded   = view.coded();
    uint64_t *            mask    = dst.masks + row * mask_words(dst.cols);
    int64_t               outlier = dst.outlier_off[row];
    int64_t               word = 0, before = a.row_ptr[row]; // values before the word
    uint64_t              bits = mask[0];                    // mask word, including outliers
    coded_writer          out(dst, dst.row_off[row], coded.widths().base);
    const auto            take_out = [&](int64_t k) {
        for (; k - before >= __builtin_popcountll(bits); bits = mask[++word]) {
            before += __builtin_popcountll(bits);
        }
        uint64_t rest = bits;
        for (int64_t skip = k - before; skip > 0; skip--) {
            rest &= rest - 1;
        }
        mask[word] &= ~(rest & -rest);
        const int64_t col   = word * 64 + __builtin_ctzll(rest);
        uint32_t      value = 0;
        coded.expand(k, 1, &value);
        dst.outlier_cols[outlier] = static_cast<uint16_t>(col);
        dst.outliers[outlier++]   = value_nbytes(dst.dense_type) == 4
                                                   ? float_of_bits(value)
                                                   : float_of_value(static_cast<uint16_t>(value), dst.dense_type);
    };
    for_each_block(a.row_ptr[row], a.row_ptr[row + 1], [&](int64_t block, int64_t first, uint32_t places) {
        const coded_block_view b = coded.block(block);
        out.put(b, places & b.has_code());
        for (uint32_t rest = places & ~b.has_code(); rest; rest &= rest - 1) {
            take_out(first + __builtin_ctz(rest));
        }
    });
    out.finish();
}

// Computes where each row's values and outliers begin.
static void place_coded_rows(const packed_view & view, int n_threads, const coded_bitmap_layout & dst) {
    const int32_t * row_ptr     = view.arrays().row_ptr;
    uint32_t *      outlier_off = dst.outlier_off;
    parallel_ranges(n_threads, dst.rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            int n = 0;
            for_each_block(row_ptr[r], row_ptr[r + 1], [&](int64_t block, int64_t, uint32_t places) {
                n += __builtin_popcount(places & ~view.coded().block(block).has_code());
            });
            outlier_off[r + 1] = static_cast<uint32_t>(n);
        }
    });
    outlier_off[0] = dst.row_off[0] = 0;
    for (int64_t r = 0; r < dst.rows; r++) {
        const auto n = static_cast<uint32_t>(row_ptr[r + 1] - row_ptr[r]) - outlier_off[r + 1];
        dst.row_off[r + 1] =
            static_cast<uint32_t>((dst.row_off[r] + n + CODED_ROW_ALIGNMENT - 1) & -CODED_ROW_ALIGNMENT);
        outlier_off[r + 1] += outlier_off[r];
    }
}

static void pack_coded(const packed_view & view, int n_threads, const coded_bitmap_layout & dst) {
    // exponent of a float with the exponent base + 1
    const int bias = dst.dense_type == GGML_MACKO_TYPE_F16 ? 127 - 15 : 0;
    *dst.high      = static_cast<uint32_t>(view.coded().widths().base + 1 + bias) / 2;
    parallel_ranges(n_threads, dst.rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            pack_coded_row(view, r, dst);
        }
    });
    const int64_t n = dst.row_off[dst.rows];
    memset(dst.values + n, 0, VALUES_SLACK);
    memset(dst.signs + n / 8, 0, CODED_BITS_SLACK);
    memset(dst.highs + n / 8, 0, CODED_BITS_SLACK);
}

static void pack_masks(const packed_view & view, int n_threads, const masked_layout & dst) {
    const packed_arrays & a     = view.arrays();
    const int64_t         words = mask_words(dst.cols);
    parallel_ranges(n_threads, dst.rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            uint64_t * mask = dst.masks + r * words;
            mask[words - 1] = 0;
            if (a.desc.index_bits == INDEX_BITMAP) {
                const int64_t nbytes = bitmap_row_nbytes(dst.cols);
                memcpy(mask, a.index + r * nbytes, static_cast<size_t>(nbytes)); // little-endian words
            } else {
                memset(mask, 0, static_cast<size_t>(words) * 8);
                view.for_each_column(r, [&](int64_t col) { mask[col / 64] |= uint64_t(1) << (col % 64); });
            }
        }
    });
}

void bitmap_pack(const packed_view & view, int n_threads, const bitmap_layout & dst) {
    const int64_t nnz = view.desc().nnz, nbytes = value_nbytes(dst.dense_type);
    std::copy(view.arrays().row_ptr, view.arrays().row_ptr + view.arrays().n_row_ptr, dst.row_off);
    pack_masks(view, n_threads, dst);
    parallel_ranges(n_threads, nnz, [&](int64_t begin, int64_t end) {
        view.copy_values(begin, end - begin, dst.values + begin * nbytes);
    });
    memset(dst.values + nnz * nbytes, 0, VALUES_SLACK);
}

void bitmap_pack(const packed_view & view, int n_threads, const coded_bitmap_layout & dst) {
    pack_masks(view, n_threads, dst);
    place_coded_rows(view, n_threads, dst);
    pack_coded(view, n_threads, dst);
}

} // namespace macko::cpu
