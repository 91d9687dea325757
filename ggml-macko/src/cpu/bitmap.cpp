// Fills a bitmap_matrix from encoded weights, and turns its rows back into dense ones (bitmap.h).
#include "cpu/bitmap.h"
#include "codec/team.h"

#include <algorithm>
#include <cstring>

namespace macko::cpu {

static int64_t align_part(int64_t n) { return (n + BITMAP_ALIGNMENT - 1) & ~(BITMAP_ALIGNMENT - 1); }

static int64_t masks_nbytes(const macko_desc & desc) { return align_part(desc.rows * mask_words(desc.cols) * 8); }
static int64_t row_off_nbytes(const macko_desc & desc) { return align_part((desc.rows + 1) * 4); }
static int64_t row_sums_nbytes(const macko_desc & desc, int32_t value_type) {
    return is_quant_type(value_type) ? align_part(desc.rows * 4) : 0;
}

static int64_t n_groups(const macko_desc & desc) { return (desc.nnz + QUANT_GROUP - 1) / QUANT_GROUP; }

static int64_t stored_nbytes(const macko_desc & desc, int32_t value_type) {
    return is_quant_type(value_type) ? n_groups(desc) * quant_group_nbytes(value_type)
                                     : values_nbytes(desc.type, desc.nnz);
}

int64_t bitmap_nbytes(const macko_desc & desc, int32_t value_type) {
    return masks_nbytes(desc) + row_off_nbytes(desc) + row_sums_nbytes(desc, value_type) +
           align_part(stored_nbytes(desc, value_type) + VALUES_SLACK);
}

bitmap_matrix bitmap_bind(const macko_desc & desc, int32_t value_type, void * memory) {
    uint8_t *     base = static_cast<uint8_t *>(memory);
    bitmap_matrix m;
    m.rows    = desc.rows;
    m.cols    = desc.cols;
    m.type    = is_quant_type(value_type) ? value_type : desc.type; // coded values are expanded
    m.masks   = reinterpret_cast<uint64_t *>(base);
    m.row_off = reinterpret_cast<uint32_t *>(base + masks_nbytes(desc));
    base += masks_nbytes(desc) + row_off_nbytes(desc);
    m.row_sums = is_quant_type(value_type) ? reinterpret_cast<float *>(base) : nullptr;
    m.values   = base + row_sums_nbytes(desc, value_type);
    return m;
}

// The mask of stored values first ... last - 1, which are a row. Fillers (zeros) advance the column and set no bit.
template <int BITS, typename T>
static void pack_mask(const uint8_t * deltas, const T * values, int64_t first, int64_t last, uint64_t * mask,
                      int64_t words) {
    int64_t  col  = -1;
    int64_t  at   = 0; // the word of the mask that `bits` is
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
    // No branch: the next value overwrites a filler, and the last one of a row is a non-zero, since rows are canonical.
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

// Block `half` of a group; nullptr stands for a block of zeros, where the number of blocks is odd.
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

static double sum_of_row(const packed_arrays & a, int64_t row) {
    const uint8_t * blocks = static_cast<const uint8_t *>(a.values);
    double          sum    = 0;
    for (int64_t k = a.row_ptr[row], end = a.row_ptr[row + 1]; k < end;) {
        const uint8_t * block = blocks + k / QUANT_BLOCK * quant_block_nbytes(a.desc.value_type);
        const int64_t   stop  = std::min(end, (k / QUANT_BLOCK + 1) * QUANT_BLOCK);
        int             q     = 0;
        for (; k < stop; k++) {
            q += quant_at(block, a.desc.value_type, k % QUANT_BLOCK);
        }
        sum += static_cast<double>(float_of_f16(quant_scale_bits(block))) * q;
    }
    return sum;
}

// value k of the matrix, as bits of the dense type
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

void bitmap_pack(const packed_view & view, int n_threads, const bitmap_matrix & dst) {
    const packed_arrays & a     = view.arrays();
    const int64_t         words = mask_words(dst.cols);
    parallel_ranges(n_threads, dst.rows, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            uint64_t * mask = dst.masks + r * words;
            dst.row_off[r]  = static_cast<uint32_t>(a.row_ptr[r]);
            mask[words - 1] = 0;
            if (a.desc.index_bits == INDEX_BITMAP) {
                const int64_t nbytes = bitmap_row_nbytes(dst.cols);
                memcpy(mask, a.index + r * nbytes, static_cast<size_t>(nbytes)); // little-endian words
            } else {
                memset(mask, 0, static_cast<size_t>(words) * 8);
                view.for_each_column(r, [&](int64_t col) { mask[col / 64] |= uint64_t(1) << (col % 64); });
            }
            if (dst.row_sums) {
                dst.row_sums[r] = static_cast<float>(sum_of_row(a, r));
            }
        }
    });
    dst.row_off[dst.rows] = static_cast<uint32_t>(a.row_ptr[dst.rows]);
    const auto nbytes     = static_cast<size_t>(stored_nbytes(a.desc.dense, dst.type));
    if (is_quant_type(dst.type)) {
        pack_groups(a, n_threads, dst.values);
    } else {
        parallel_ranges(n_threads, a.desc.dense.nnz, [&](int64_t begin, int64_t end) {
            view.copy_values(begin, end - begin, dst.values + begin * value_nbytes(dst.type));
        });
    }
    memset(dst.values + nbytes, 0, VALUES_SLACK);
}

template <typename T>
static void densify(const bitmap_matrix & m, int32_t dense_type, int64_t row_begin, int64_t row_end, T * dense) {
    const int64_t words     = mask_words(m.cols);
    const bool    quantized = is_quant_type(m.type);
    for (int64_t r = row_begin; r < row_end; r++, dense += m.cols) {
        const uint64_t * mask = m.masks + r * words;
        int64_t          k    = m.row_off[r];
        memset(dense, 0, static_cast<size_t>(m.cols) * sizeof(T));
        for (int64_t word = 0; word < words; word++) {
            for (uint64_t bits = mask[word]; bits; bits &= bits - 1, k++) {
                dense[word * 64 + __builtin_ctzll(bits)] =
                    quantized ? group_value<T>(m, k, dense_type) : reinterpret_cast<const T *>(m.values)[k];
            }
        }
    }
}

void bitmap_densify(const bitmap_matrix & m, int32_t dense_type, int64_t row_begin, int64_t row_end, void * dense) {
    if (value_nbytes(dense_type) == 4) {
        densify(m, dense_type, row_begin, row_end, static_cast<uint32_t *>(dense));
    } else {
        densify(m, dense_type, row_begin, row_end, static_cast<uint16_t *>(dense));
    }
}

} // namespace macko::cpu
