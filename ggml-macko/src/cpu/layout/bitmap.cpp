// Fills a bitmap_matrix from encoded weights, and converts its rows back to dense rows (bitmap.h).
#include "cpu/layout/bitmap.h"
#include "codec/team.h"

#include <algorithm>
#include <cstring>

namespace macko::cpu {

constexpr int64_t CODED_SLACK    = 16; // bytes that kernels read past the last bit
constexpr int64_t MAX_CODED_COLS = int64_t(UINT16_MAX) + 1;

static int64_t align_to(int64_t n, int64_t multiple) { return (n + multiple - 1) & ~(multiple - 1); }
static int64_t align_part(int64_t n) { return align_to(n, BITMAP_ALIGNMENT); }

static int64_t masks_nbytes(const macko_desc & desc) { return align_part(desc.rows * mask_words(desc.cols) * 8); }
static int64_t row_off_nbytes(const macko_desc & desc) { return align_part((desc.rows + 1) * 4); }
static int64_t row_sums_nbytes(const macko_desc & desc, int32_t value_type) {
    return is_quant_type(value_type) ? align_part(desc.rows * 4) : 0;
}

// ---- sizes ----

// Number of coded values with space for the alignment of each row.
static int64_t n_coded(const macko_desc & desc) { return desc.nnz + desc.rows * (CODED_ROW_ALIGNMENT - 1); }
static int64_t bits_nbytes(const macko_desc & desc) { return align_part((n_coded(desc) + 7) / 8 + CODED_SLACK); }

static int64_t max_outliers(const macko_desc & desc, int64_t coded_nbytes) {
    return max_short_outliers(desc.nnz, desc.type, coded_nbytes);
}

bool bitmap_takes_coded(const macko_desc & desc, int64_t coded_nbytes) {
    return desc.cols <= MAX_CODED_COLS && n_coded(desc) <= UINT32_MAX && max_outliers(desc, coded_nbytes) >= 0;
}

static int64_t n_groups(const macko_desc & desc) { return (desc.nnz + QUANT_GROUP - 1) / QUANT_GROUP; }

static int64_t stored_nbytes(const macko_desc & desc, int32_t value_type) {
    return is_quant_type(value_type) ? n_groups(desc) * quant_group_nbytes(value_type)
                                     : values_nbytes(desc.type, desc.nnz);
}

static int64_t group_off_nbytes(const macko_desc & desc) { return align_part((n_bundle_groups(desc.rows) + 1) * 8); }
static int64_t bundles_room(const macko_desc & desc, const bitmap_form & form) {
    return form.bundles ? align_part(bundles_nbytes(desc, form.value_type)) : 0;
}

int64_t bitmap_nbytes(const macko_desc & desc, const bitmap_form & form) {
    const int64_t masks = masks_nbytes(desc), row_off = row_off_nbytes(desc);
    if (form.value_type == GGML_MACKO_TYPE_CODED) {
        const int64_t outliers = max_outliers(desc, form.coded_nbytes);
        return masks + row_off + align_part(n_coded(desc) + VALUES_SLACK) + 2 * bits_nbytes(desc) + BITMAP_ALIGNMENT +
               row_off + align_part(outliers * 4) + align_part(outliers * 2);
    }
    const int64_t room   = bundles_room(desc, form);
    const int64_t bitmap = masks + align_part(stored_nbytes(desc, form.value_type) + VALUES_SLACK);
    return row_off + row_sums_nbytes(desc, form.value_type) + (room > 0 ? group_off_nbytes(desc) : 0) +
           std::max(bitmap, room);
}

bitmap_matrix bitmap_bind(const macko_desc & desc, const bitmap_form & form, void * memory) {
    uint8_t *  next = static_cast<uint8_t *>(memory);
    const auto take = [&next](int64_t nbytes) {
        uint8_t * part = next;
        next += nbytes;
        return part;
    };
    bitmap_matrix m = {};
    m.rows          = desc.rows;
    m.cols          = desc.cols;
    m.type          = form.value_type;
    m.dense_type    = desc.type;
    m.row_off       = reinterpret_cast<uint32_t *>(take(row_off_nbytes(desc)));
    if (is_quant_type(m.type)) {
        m.row_sums = reinterpret_cast<float *>(take(row_sums_nbytes(desc, m.type)));
    }
    m.bundles_nbytes = bundles_room(desc, form);
    if (m.bundles_nbytes > 0) {
        m.group_off = reinterpret_cast<uint64_t *>(take(group_off_nbytes(desc)));
        m.bundles   = next; // same place as the bitmap, if the matrix must be one
    }
    m.masks = reinterpret_cast<uint64_t *>(take(masks_nbytes(desc)));
    if (m.type == GGML_MACKO_TYPE_CODED) {
        const int64_t outliers = max_outliers(desc, form.coded_nbytes);
        m.values               = take(align_part(n_coded(desc) + VALUES_SLACK));
        m.coded.signs          = take(bits_nbytes(desc));
        m.coded.highs          = take(bits_nbytes(desc));
        m.coded.high           = reinterpret_cast<uint32_t *>(take(BITMAP_ALIGNMENT));
        m.coded.outlier_off    = reinterpret_cast<uint32_t *>(take(row_off_nbytes(desc)));
        m.coded.outliers       = reinterpret_cast<float *>(take(align_part(outliers * 4)));
        m.coded.outlier_cols   = reinterpret_cast<uint16_t *>(take(align_part(outliers * 2)));
    } else {
        m.values = next;
    }
    return m;
}

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
static void pack(const macko_view & view, int64_t first_value, const bitmap_matrix & dst) {
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

template <typename T> static void pack_type(const macko_view & view, int64_t first_value, const bitmap_matrix & dst) {
    switch (view.rows().desc.delta_bits) {
        case 1:  pack<1, T>(view, first_value, dst); break;
        case 2:  pack<2, T>(view, first_value, dst); break;
        case 4:  pack<4, T>(view, first_value, dst); break;
        default: pack<8, T>(view, first_value, dst); break;
    }
}

void bitmap_pack(const macko_view & view, int64_t first_value, const bitmap_matrix & dst) {
    if (value_nbytes(dst.type) == 4) {
        pack_type<uint32_t>(view, first_value, dst);
    } else {
        pack_type<uint16_t>(view, first_value, dst);
    }
}

// ---- groups of quantized values ----

// Stores block `half` of a group; nullptr means a block of zeros, for an odd number of blocks.
static void put_block(const uint8_t * block, int32_t type, int half, uint8_t * group) {
    uint8_t *      q                          = group + GROUP_SCALES_NBYTES;
    const uint32_t d                          = block ? bits_of_float(float_of_f16(quant_scale_bits(block))) : 0;
    reinterpret_cast<uint32_t *>(group)[half] = block && type == GGML_MACKO_TYPE_Q4_NL ? d | (block[0] & 1) : d;
    if (type == GGML_MACKO_TYPE_Q8_0) {
        for (int64_t i = 0; i < QUANT_BLOCK; i++) {
            q[half * QUANT_BLOCK + i] = block ? block[2 + i] : 0;
        }
        return;
    }
    const uint8_t * nibbles = block ? block + quant_block_nbytes(type) - 16 : nullptr;
    for (int64_t i = 0; i < 16; i++) {
        const unsigned both = nibbles ? nibbles[i] : 0;
        q[i]                = static_cast<uint8_t>(half ? q[i] | (both & 15) << 4 : both & 15);
        q[i + 16]           = static_cast<uint8_t>(half ? q[i + 16] | (both & 0xf0) : both >> 4);
    }
    for (int64_t i = 0; type == GGML_MACKO_TYPE_Q5_0 && i < 4; i++) {
        q[32 + half * 4 + i] = block ? block[2 + i] : 0;
    }
}

static void pack_groups(const packed_arrays & a, int n_threads, uint8_t * values) {
    const int32_t   type     = a.desc.value_type;
    const int64_t   n_blocks = a.n_values / QUANT_BLOCK, nbytes = quant_block_nbytes(type), n = n_groups(a.desc.dense);
    const uint8_t * blocks = static_cast<const uint8_t *>(a.values);
    parallel_ranges(n_threads, n, [&](int64_t begin, int64_t end) {
        for (int64_t g = begin; g < end; g++) {
            for (int half = 0; half < 2; half++) {
                const int64_t block = 2 * g + half;
                put_block(block < n_blocks ? blocks + block * nbytes : nullptr, type, half,
                          values + g * quant_group_nbytes(type));
            }
        }
    });
}

template <int32_t TYPE> static int sum_of_values(const uint8_t * block, int64_t first, int64_t last) {
    int q = 0;
    for (int64_t i = first; i < last; i++) {
        q += quant_at(block, TYPE, i);
    }
    return q;
}

template <int32_t TYPE> static double sum_of_row(const packed_arrays & a, int64_t row) {
    const uint8_t * blocks = static_cast<const uint8_t *>(a.values);
    double          sum    = 0;
    for (int64_t k = a.row_ptr[row], end = a.row_ptr[row + 1]; k < end;) {
        const uint8_t * block = blocks + k / QUANT_BLOCK * quant_block_nbytes(TYPE);
        const int64_t   first = k % QUANT_BLOCK, n = std::min(end - k, QUANT_BLOCK - first);
        const int       q = n == QUANT_BLOCK ? sum_of_values<TYPE>(block, 0, QUANT_BLOCK) // vector instructions
                                             : sum_of_values<TYPE>(block, first, first + n);
        sum += static_cast<double>(float_of_f16(quant_scale_bits(block))) * q;
        k += n;
    }
    return sum;
}

// Value k of the matrix, as bits of the dense type.
template <typename T> static T group_value(const bitmap_matrix & m, int64_t k, int32_t dense_type) {
    const int64_t   i = k % QUANT_GROUP, half = i / QUANT_BLOCK;
    uint8_t *       group  = m.values + k / QUANT_GROUP * quant_group_nbytes(m.type);
    const uint8_t * q      = group + GROUP_SCALES_NBYTES;
    const uint32_t  d      = reinterpret_cast<const uint32_t *>(group)[half];
    const int       nibble = m.type == GGML_MACKO_TYPE_Q8_0 ? 0 : (q[i % QUANT_BLOCK] >> (4 * half)) & 15;
    const int       value  = m.type == GGML_MACKO_TYPE_Q8_0    ? static_cast<int8_t>(q[i])
                             : m.type == GGML_MACKO_TYPE_Q4_NL ? Q4_NL_LEVELS[d & 1][nibble]
                             : m.type == GGML_MACKO_TYPE_Q4_0  ? nibble - 8
                                                               : nibble + ((q[32 + i / 8] >> (i % 8)) & 1) * 16 - 16;
    return dense_of_quant<T>(float_of_bits(d & ~1u), value, dense_type);
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

    coded_writer(const bitmap_matrix & dst, int64_t first, int32_t base)
        : values(dst.values + first),
          signs(dst.coded.signs + first / 8),
          highs(dst.coded.highs + first / 8),
          odd(base % 2) {}

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
            for (int i = 0; i < QUANT_BLOCK; i++) {
                values[i] = b.bytes[i] ^ flip;
            }
            values += QUANT_BLOCK;
            put_bits(b.sign, highs_of, QUANT_BLOCK);
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
        const int64_t block = k / QUANT_BLOCK, first = k % QUANT_BLOCK, n = std::min(QUANT_BLOCK - first, end - k);
        f(block, block * QUANT_BLOCK, static_cast<uint32_t>(((uint64_t(1) << n) - 1) << first));
        k += n;
    }
}

// Packs a row with a complete mask: removes the outliers from the mask.
static void pack_coded_row(const packed_view & view, int64_t row, const bitmap_matrix & dst) {
    const packed_arrays & a       = view.arrays();
    const coded_view &    coded   = view.coded();
    uint64_t *            mask    = dst.masks + row * mask_words(dst.cols);
    int64_t               outlier = dst.coded.outlier_off[row];
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
        dst.coded.outlier_cols[outlier] = static_cast<uint16_t>(col);
        dst.coded.outliers[outlier++]   = value_nbytes(dst.dense_type) == 4
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
static void place_coded_rows(const packed_view & view, int n_threads, const bitmap_matrix & dst) {
    const int32_t * row_ptr     = view.arrays().row_ptr;
    uint32_t *      outlier_off = dst.coded.outlier_off;
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
        const auto n       = static_cast<uint32_t>(row_ptr[r + 1] - row_ptr[r]) - outlier_off[r + 1];
        dst.row_off[r + 1] = static_cast<uint32_t>(align_to(dst.row_off[r] + n, CODED_ROW_ALIGNMENT));
        outlier_off[r + 1] += outlier_off[r];
    }
}

static void pack_coded(const packed_view & view, int n_threads, const bitmap_matrix & dst) {
    // exponent of a float with the exponent base + 1
    const int bias  = dst.dense_type == GGML_MACKO_TYPE_F16 ? 127 - 15 : 0;
    *dst.coded.high = static_cast<uint32_t>(view.coded().widths().base + 1 + bias) / 2;
    parallel_ranges(n_threads, dst.rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            pack_coded_row(view, r, dst);
        }
    });
    const int64_t n = dst.row_off[dst.rows];
    memset(dst.values + n, 0, VALUES_SLACK);
    memset(dst.coded.signs + n / 8, 0, CODED_SLACK);
    memset(dst.coded.highs + n / 8, 0, CODED_SLACK);
}

// Value k of the matrix as a float (exact).
static float coded_value(const bitmap_matrix & m, int64_t k) {
    const auto bit = [k](const uint8_t * bits) { return static_cast<uint32_t>(bits[k / 8] >> (k % 8)) & 1; };
    return float_of_bits(bit(m.coded.signs) << 31 | (*m.coded.high + bit(m.coded.highs)) << 24 |
                         static_cast<uint32_t>(m.values[k]) << 16);
}

static void pack_masks(const packed_view & view, int n_threads, const bitmap_matrix & dst) {
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

static void pack_row_sums(const packed_arrays & a, int n_threads, const bitmap_matrix & dst) {
    const auto sum_of = dst.type == GGML_MACKO_TYPE_Q8_0   ? sum_of_row<GGML_MACKO_TYPE_Q8_0>
                        : dst.type == GGML_MACKO_TYPE_Q5_0 ? sum_of_row<GGML_MACKO_TYPE_Q5_0>
                        : dst.type == GGML_MACKO_TYPE_Q4_0 ? sum_of_row<GGML_MACKO_TYPE_Q4_0>
                                                           : sum_of_row<GGML_MACKO_TYPE_Q4_NL>;
    parallel_ranges(n_threads, dst.rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            dst.row_sums[r] = static_cast<float>(sum_of(a, r));
        }
    });
}

void bitmap_pack(const packed_view & view, int n_threads, const bitmap_matrix & dst) {
    const packed_arrays & a = view.arrays();
    if (dst.type == GGML_MACKO_TYPE_CODED) {
        pack_masks(view, n_threads, dst);
        place_coded_rows(view, n_threads, dst);
        pack_coded(view, n_threads, dst);
        return;
    }
    for (int64_t r = 0; r <= dst.rows; r++) {
        dst.row_off[r] = static_cast<uint32_t>(a.row_ptr[r]);
    }
    if (dst.row_sums) {
        pack_row_sums(a, n_threads, dst);
    }
    if (dst.group_off) {
        if (bundles_pack(view, n_threads, dst)) {
            return;
        }
        dst.group_off[n_bundle_groups(dst.rows)] = 0;
    }
    pack_masks(view, n_threads, dst);
    const auto nbytes = static_cast<size_t>(stored_nbytes(a.desc.dense, dst.type));
    if (is_quant_type(dst.type)) {
        pack_groups(a, n_threads, dst.values);
    } else {
        parallel_ranges(n_threads, a.desc.dense.nnz, [&](int64_t begin, int64_t end) {
            view.copy_values(begin, end - begin, dst.values + begin * value_nbytes(dst.type));
        });
    }
    memset(dst.values + nbytes, 0, VALUES_SLACK);
}

// ---- dense rows ----

// Converts a float that was made from a value of the dense type back to bits of that type.
template <typename T> static T dense_of_float(float v, int32_t dense_type) {
    if constexpr (sizeof(T) == 4) {
        return bits_of_float(v);
    } else {
        return dense_type == GGML_MACKO_TYPE_F16 ? f16_of_float(v) : static_cast<T>(bits_of_float(v) >> 16);
    }
}

template <typename T>
static void densify_bundles(const bitmap_matrix & m, int32_t dense_type, int64_t row_begin, int64_t row_end,
                            T * dense) {
    memset(dense, 0, static_cast<size_t>((row_end - row_begin) * m.cols) * sizeof(T));
    for (int64_t group = row_begin / BUNDLE_ROWS; group * BUNDLE_ROWS < row_end; group++) {
        for_each_in_group(m.bundles + m.group_off[group], m.bundles + m.group_off[group + 1], m.type,
                          [&](int row, int64_t col, float d, int value) {
                              const int64_t r = group * BUNDLE_ROWS + row;
                              if (r >= row_begin && r < row_end) {
                                  dense[(r - row_begin) * m.cols + col] = is_quant_type(m.type)
                                                                              ? dense_of_quant<T>(d, value, dense_type)
                                                                              : static_cast<T>(value);
                              }
                          });
    }
}

template <typename T>
static void densify(const bitmap_matrix & m, int32_t dense_type, int64_t row_begin, int64_t row_end, T * dense) {
    if (in_bundles(m)) {
        return densify_bundles(m, dense_type, row_begin, row_end, dense);
    }
    const int64_t words     = mask_words(m.cols);
    const bool    quantized = is_quant_type(m.type), coded = m.type == GGML_MACKO_TYPE_CODED;
    for (int64_t r = row_begin; r < row_end; r++, dense += m.cols) {
        const uint64_t * mask = m.masks + r * words;
        int64_t          k    = m.row_off[r];
        memset(dense, 0, static_cast<size_t>(m.cols) * sizeof(T));
        for (int64_t word = 0; word < words; word++) {
            for (uint64_t bits = mask[word]; bits; bits &= bits - 1, k++) {
                dense[word * 64 + __builtin_ctzll(bits)] = quantized ? group_value<T>(m, k, dense_type)
                                                           : coded   ? dense_of_float<T>(coded_value(m, k), dense_type)
                                                                     : reinterpret_cast<const T *>(m.values)[k];
            }
        }
        for (int64_t i = coded ? m.coded.outlier_off[r] : 0; coded && i < m.coded.outlier_off[r + 1]; i++) {
            dense[m.coded.outlier_cols[i]] = dense_of_float<T>(m.coded.outliers[i], dense_type);
        }
    }
}

static void expand_rows(expand_row_fn expand_row, const bitmap_matrix & m, int64_t row_begin, int64_t row_end,
                        uint16_t * dense) {
    for (int64_t r = row_begin; r < row_end; r++, dense += m.cols) {
        expand_row(m.masks + r * mask_words(m.cols), m.values + int64_t(m.row_off[r]) * 2, m.cols, dense);
    }
}

void bitmap_densify_with(expand_row_fn expand_row, const bitmap_matrix & m, int32_t dense_type, int64_t row_begin,
                         int64_t row_end, void * dense) {
    const bool is_16_bits = m.type == GGML_MACKO_TYPE_F16 || m.type == GGML_MACKO_TYPE_BF16;
    if (value_nbytes(dense_type) == 4) {
        densify(m, dense_type, row_begin, row_end, static_cast<uint32_t *>(dense));
    } else if (expand_row && is_16_bits && !in_bundles(m)) {
        expand_rows(expand_row, m, row_begin, row_end, static_cast<uint16_t *>(dense));
    } else {
        densify(m, dense_type, row_begin, row_end, static_cast<uint16_t *>(dense));
    }
}

void bitmap_densify(const bitmap_matrix & m, int32_t dense_type, int64_t row_begin, int64_t row_end, void * dense) {
    bitmap_densify_with(expand_row_in_use(), m, dense_type, row_begin, row_end, dense);
}

} // namespace macko::cpu
