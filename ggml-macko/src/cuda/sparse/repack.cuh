// Surveys and makes row-split layouts on the GPU; see survey_step (gpu-layout/plan.h). Also makes FRAGMENTS and the
// MACKO rows of packed matrices. Internal to cuda/sparse. Functions that return a ggml_macko_status synchronize with
// the stream.
#pragma once

#include "codec/packed/packed.h"
#include "cuda/lib/common.cuh"
#include "gpu-layout/survey.h"

namespace macko::cuda {

// Results of the kernels, in device memory.
struct repack_counts {
    int64_t groups;
    int64_t unused_groups;
    int32_t impossible; // whether some row has outliers that the layout cannot store
    int32_t overshoot;
    int32_t exponents[N_EXPONENTS + 1];
};

struct repacker {
    macko_layout     raw;  // the matrix of the file, in device memory
    macko_desc       desc; // of the file
    cuda_device_info device;
    repack_counts *  counts;
    cudaStream_t     stream;
};

// Steps of the survey of a row-split layout M, inline_delta_layout or exp_coded_layout.
// EXPONENT
template <typename M> [[nodiscard]] int find_exponent(const repacker & r, const M & m, shape_survey * found);
// GROUPS, with m.exponent. Writes m.row_ptr and m.trailing.
template <typename M> [[nodiscard]] int count_groups(const repacker & r, const M & m, shape_survey * found);
// OVERSHOOT, right after count_groups(). Writes the matrix.
template <typename M> [[nodiscard]] int make_groups(const repacker & r, const M & m, shape_survey * found);

// The arrays of a checked matrix in device memory.
struct fragments_source {
    quantized_arrays arrays; // levels: in host memory
    int8_t           level_of[256];
};
// Writes the tiles and factors of m, whose starts are there.
cudaError_t pack_fragments(const fragments_source & source, const fragments_layout & m, cudaStream_t stream);

// The arrays of a checked packed matrix in device memory.
struct packed_source {
    const uint8_t *  bitmap;
    const int32_t *  row_ptr; // of values
    const void *     plain;   // values; or null, and these are for coded ones (coded_view):
    coded_widths     widths;
    const uint32_t * blocks;
    const void *     outliers;
    const int64_t *  outliers_before;
};
// Writes the values and deltas of m, whose row_ptr is there. Its deltas are zero.
cudaError_t unpack_rows(const packed_source & source, const macko_layout & m, cudaStream_t stream);

} // namespace macko::cuda
