// MACKO rows on the GPU, from the arrays of a packed matrix (FORMAT.md sections 7 and 8). A warp has a row at a time,
// and a lane a byte of its bitmap.
#include "cuda/sparse/repack.cuh"

#include <algorithm>

namespace macko::cuda {

namespace {

constexpr int WARPS   = 4; // of a block
constexpr int LONGEST = (1 << RECODED_BITS) - 1;

struct unpack_params {
    packed_source source;
    macko_layout  m;
    int64_t       row_nbytes;    // of the bitmap
    int           mantissa_bits; // of the dense type
};

// ---- values ----

// Coded values; the words of a block are those of masks_of() (codec/packed/coded.cpp).
struct coded_block {
    const uint32_t *     words;
    const coded_widths & w;

    // bit i of a word behind the bytes
    __device__ uint32_t bit(int word, int i) const { return words[8 + word] >> i & 1; }
    // the values that have a code, as a mask
    __device__ uint32_t has_code() const {
        uint32_t mask = words[9] | (w.exponent_bits == 3 ? words[10] : 0);
        for (int i = 0; i < 8; i++) {
            mask |= ((words[i] >> 7 & 0x01010101u) * 0x10204080u >> 28) << (4 * i);
        }
        return mask;
    }
};

template <typename T> __device__ T coded_value(const unpack_params & p, int64_t k) {
    const coded_widths & w     = p.source.widths;
    const int64_t        at    = k / CODED_BLOCK;
    const int            i     = static_cast<int>(k % CODED_BLOCK);
    const auto           nth   = [&](int64_t b) { return coded_block{ p.source.blocks + b * w.bits(), w }; };
    const coded_block    block = nth(at);
    const uint32_t       byte  = reinterpret_cast<const uint8_t *>(block.words)[i];
    const uint32_t       code  = byte >> 7 | block.bit(1, i) << 1 | (w.exponent_bits == 3 ? block.bit(2, i) << 2 : 0);
    if (code == 0) {
        int64_t rank = p.source.outliers_before[at / CODED_RANK_BLOCKS];
        for (int64_t b = at / CODED_RANK_BLOCKS * CODED_RANK_BLOCKS; b < at; b++) {
            rank += __popc(~nth(b).has_code());
        }
        rank += __popc(~block.has_code() & ((1u << i) - 1));
        return static_cast<const T *>(p.source.outliers)[rank];
    }
    uint32_t mantissa = byte & 127;
    for (int j = 0; j < w.mantissa_bits - 7; j++) {
        mantissa = mantissa << 1 | block.bit(w.exponent_bits + j, i);
    }
    const uint32_t exponent = code + static_cast<uint32_t>(w.base);
    return static_cast<T>(block.bit(0, i) << (8 * sizeof(T) - 1) | exponent << p.mantissa_bits |
                          mantissa << (p.mantissa_bits - w.mantissa_bits));
}

template <typename T> __device__ T value_at(const unpack_params & p, int64_t k) {
    return p.source.plain ? static_cast<const T *>(p.source.plain)[k] : coded_value<T>(p, k);
}

// ---- rows ----

// Writes n codes of RECODED_BITS at an entry; lanes share words, whose bits are zero.
__device__ void put_codes(uint8_t * deltas, int64_t entry, uint32_t codes, int n) {
    uint32_t * const word  = reinterpret_cast<uint32_t *>(deltas) + entry * RECODED_BITS / 32;
    const int        shift = static_cast<int>(entry * RECODED_BITS % 32);
    atomicOr(word, codes << shift);
    if (shift + n * RECODED_BITS > 32) {
        atomicOr(word + 1, codes >> (32 - shift));
    }
}

// Writes the entries of a byte of the bitmap, whose first column is `column`. before: the last non-zero before it
template <typename T>
__device__ void put_byte(const unpack_params & p, uint32_t byte, int column, int before, int64_t entry, int64_t k) {
    T * const values = reinterpret_cast<T *>(p.m.values);
    int       gap    = column + __ffs(byte) - 2 - before;
    for (; gap > LONGEST; gap -= LONGEST + 1, entry++) {
        values[entry] = 0;
        put_codes(p.m.deltas, entry, LONGEST, 1);
    }
    uint32_t codes = static_cast<uint32_t>(gap);
    int      last = __ffs(byte) - 1, n = 1;
    values[entry] = value_at<T>(p, k);
    for (uint32_t rest = byte & (byte - 1); rest; rest &= rest - 1, n++) {
        const int next = __ffs(rest) - 1;
        codes |= static_cast<uint32_t>(next - last - 1) << (n * RECODED_BITS);
        last              = next;
        values[entry + n] = value_at<T>(p, k + n);
    }
    put_codes(p.m.deltas, entry, codes, n);
}

template <typename T>
__global__ void __launch_bounds__(WARPS * 32) packed_rows_kernel(const __grid_constant__ unpack_params p) {
    const int     lane = threadIdx.x % 32;
    const int64_t step = static_cast<int64_t>(gridDim.x) * WARPS;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32; row < p.m.rows; row += step) {
        const uint8_t * bits  = p.source.bitmap + row * p.row_nbytes;
        int64_t         entry = p.m.row_ptr[row], k = p.source.row_ptr[row];
        int             last = -1; // the last non-zero
        for (int64_t first = 0; first < p.row_nbytes; first += 32) {
            const int64_t  i      = first + lane;
            const uint32_t byte   = i < p.row_nbytes ? bits[i] : 0;
            const int      column = static_cast<int>(8 * i), mine = column + 31 - __clz(byte); // its last non-zero
            const unsigned filled = __ballot_sync(FULL_WARP, byte != 0), below = filled & ((1u << lane) - 1);
            const int      nearest = __shfl_sync(FULL_WARP, mine, 31 - __clz(below | 1));
            const int      before  = below ? nearest : last;
            const int      n       = __popc(byte);
            const int      fillers = byte ? (column + __ffs(byte) - 2 - before) >> RECODED_BITS : 0;
            const int      n_below = warp_prefix_sum(n), all_below = warp_prefix_sum(n + fillers);
            if (byte) {
                put_byte<T>(p, byte, column, before, entry + all_below - n - fillers, k + n_below - n);
            }
            entry += __shfl_sync(FULL_WARP, all_below, 31);
            k += __shfl_sync(FULL_WARP, n_below, 31);
            last = __shfl_sync(FULL_WARP, byte ? mine : before, 31);
        }
    }
}

} // namespace

cudaError_t unpack_rows(const packed_source & source, const macko_layout & m, cudaStream_t stream) {
    const unpack_params p      = { source, m, bitmap_row_nbytes(m.cols), coded_dense_mantissa_bits(m.type) };
    const auto          blocks = static_cast<unsigned>(std::min<int64_t>((m.rows + WARPS - 1) / WARPS, 1 << 16));
    const auto kernel = m.type == GGML_MACKO_TYPE_F32 ? packed_rows_kernel<uint32_t> : packed_rows_kernel<uint16_t>;
    kernel<<<blocks, WARPS * 32, 0, stream>>>(p);
    return cudaGetLastError();
}

} // namespace macko::cuda
