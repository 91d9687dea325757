// Rows of the QUANTIZED layout (gpu-layout/quantized.h) back to dense ones.
#include "cuda/sparse/dense-values.cuh"
#include "cuda/sparse/product.cuh"
#include "cuda/sparse/quantized-groups.cuh"

#include <algorithm>

namespace macko::cuda {

struct densify_quantized_params {
    quantized_layout m;
    int64_t          row_begin, row_end;
    void *           dst;
    int64_t          ld;
    int32_t          pitch;  // elements of a row in shared memory, a multiple of 8
    bool             vector; // rows of dst are aligned to 16 bytes and take a multiple of 16 bytes
};

// A warp per 32 / lanes rows: zeros in shared memory, the entries of each run scattered to their columns there, then
// the outliers, over whose columns the walk may have written 0, then all of it to dst.
template <typename V, int BITS, typename D>
__global__ void __launch_bounds__(32) densify_quantized_kernel(const __grid_constant__ densify_quantized_params p) {
    extern __shared__ __align__(16) uint4 shared_rows[];
    const quantized_layout &              m = p.m;
    const int lanes = m.lanes, rows = 32 / lanes, lane = threadIdx.x % lanes, sub = threadIdx.x / lanes,
              width = m.width;
    D * mine        = reinterpret_cast<D *>(shared_rows) + sub * p.pitch;
    cuda_wait_for_previous();
    cuda_allow_next();

    for (int64_t row0 = p.row_begin + static_cast<int64_t>(blockIdx.x) * rows; row0 < p.row_end;
         row0 += static_cast<int64_t>(gridDim.x) * rows) {
        const int64_t            row    = row0 + sub;
        const uint8_t *          record = m.row_heads + row * quantized_row_nbytes(lanes);
        const cuda_quantized_row head =
            row < p.row_end ? *reinterpret_cast<const cuda_quantized_row *>(record) : cuda_quantized_row{};
        const int           groups    = head.n_groups;
        const quantized_run run       = quantized_run_of(groups, lane, quantized_lane_bits(lanes));
        const int           copy      = static_cast<int>(row % rows) * lanes * width; // x_slot of column 0
        const auto          column_of = [&](int word) { // negative: entries of another row in front of this one's
            const int column = word % 32 * width + word / 32 - copy;
            return column < lanes * width ? column : column - (32 * width - 1);
        };
        for (int i = threadIdx.x; i < rows * p.pitch * static_cast<int>(sizeof(D)) / 16; i += 32) {
            shared_rows[i] = make_uint4(0, 0, 0, 0);
        }
        __syncwarp();
        int        column  = groups ? column_of(reinterpret_cast<const uint16_t *>(record + sizeof(head))[lane]) : 0;
        const auto scatter = [&](float d, uint32_t q, uint32_t c) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                column += static_cast<int>(c >> 8 * k & 0xff);
                const int value = static_cast<int8_t>(q >> 8 * k);
                if (value != 0) {
                    to_dense(mine + column, d * static_cast<float>(value));
                }
                column++;
            }
        };
        for (int s = 0; s < run.groups; s++) {
            loaded_group<V, BITS> g;
            g.load(m.groups, static_cast<unsigned>(quantized_group(head, lanes, s, run.slot)));
            const float d     = g.scale() * V::UNIT;
            const auto  quads = [&](auto i) {
                constexpr int I = decltype(i)::value;
                scatter(d, V::template quad<I>(g.values.w),
                         quad_deltas<BITS, I>(g.deltas.w) >> (BITS < 8 && I % 2 ? BITS : 0));
            };
            quads(std::integral_constant<int, 0>()), quads(std::integral_constant<int, 1>()),
                quads(std::integral_constant<int, 2>()), quads(std::integral_constant<int, 3>());
            quads(std::integral_constant<int, 4>()), quads(std::integral_constant<int, 5>()),
                quads(std::integral_constant<int, 6>()), quads(std::integral_constant<int, 7>());
        }
        if (BITS < 8 && lane < quantized_segments(head, lanes)) {
            quantized_segment s;
            s.load(m.groups_end, static_cast<int>(head.rest >> 8) + lane);
            column = column_of(static_cast<int>(s.word()));
            scatter(s.scale() * V::UNIT, s.values(0), s.deltas<BITS>(0));
            scatter(s.scale() * V::UNIT, s.values(1), s.deltas<BITS>(1) >> BITS);
        }
        __syncwarp();
        if (row < p.row_end) {
            for (int e = head.first_outlier + lane; e < head.first_outlier + head.n_outliers; e += lanes) {
                to_dense(mine + column_of(static_cast<int>(m.outliers[e].word)), m.outliers[e].value);
            }
        }
        __syncwarp();
        for (int r = 0; r < rows && row0 + r < p.row_end; r++) {
            D *       out = static_cast<D *>(p.dst) + (row0 + r - p.row_begin) * p.ld;
            const D * in  = reinterpret_cast<const D *>(shared_rows) + r * p.pitch;
            if (p.vector) {
#pragma unroll 4
                for (int i = threadIdx.x; i < m.cols * static_cast<int>(sizeof(D)) / 16; i += 32) {
                    reinterpret_cast<uint4 *>(out)[i] = reinterpret_cast<const uint4 *>(in)[i];
                }
            } else {
                for (int i = threadIdx.x; i < m.cols; i += 32) {
                    out[i] = in[i];
                }
            }
        }
        __syncwarp();
    }
}

template <typename V, int BITS, typename D>
static cudaError_t launch_densify(densify_quantized_params & p, cudaStream_t stream) {
    cuda_device_info device;
    CUDA_TRY(cuda_current_device(&device));
    const auto kernel = densify_quantized_kernel<V, BITS, D>;
    const int  rows   = 32 / p.m.lanes;
    p.pitch           = static_cast<int32_t>((p.m.cols + 7) & ~int64_t(7));
    p.vector =
        reinterpret_cast<uintptr_t>(p.dst) % 16 == 0 && p.ld * sizeof(D) % 16 == 0 && p.m.cols * sizeof(D) % 16 == 0;
    // at most what x takes in the product
    const int64_t nbytes = static_cast<int64_t>(rows) * p.pitch * static_cast<int64_t>(sizeof(D));
    CUDA_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_nbytes));
    const int64_t resident = std::max<int64_t>(1, device.shared_nbytes / (nbytes + 1024));
    const int64_t blocks =
        std::min<int64_t>((p.row_end - p.row_begin + rows - 1) / rows, resident * device.multiprocessors);
    kernel<<<static_cast<unsigned>(blocks), 32, static_cast<size_t>(nbytes), stream>>>(p);
    return cudaGetLastError();
}

template <typename V, typename D>
static cudaError_t launch_densify_bits(densify_quantized_params & p, cudaStream_t stream) {
    switch (p.m.delta_bits) {
        case 3:  return launch_densify<V, 3, D>(p, stream);
        case 4:  return launch_densify<V, 4, D>(p, stream);
        default: return launch_densify<V, 8, D>(p, stream);
    }
}

template <typename V> static cudaError_t launch_densify_type(densify_quantized_params & p, cudaStream_t stream) {
    switch (p.m.type) {
        case GGML_MACKO_TYPE_F16:  return launch_densify_bits<V, __half>(p, stream);
        case GGML_MACKO_TYPE_BF16: return launch_densify_bits<V, __nv_bfloat16>(p, stream);
        default:                   return launch_densify_bits<V, float>(p, stream);
    }
}

cudaError_t densify(const quantized_layout & w, const dense_rows & to) {
    densify_quantized_params p = { w, to.row_begin, to.row_end, to.dst, to.ld, 0, false };
    return w.value_type == GGML_MACKO_TYPE_Q8_0 ? launch_densify_type<q8_0_values>(p, to.stream)
                                                : launch_densify_type<q4_0_values>(p, to.stream);
}

} // namespace macko::cuda
