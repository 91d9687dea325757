// The inputs of choose(): the header of a matrix, and the GPU. Plain C++: no ggml, no CUDA.
#pragma once

#include "codec/codec.h"

namespace macko::cuda {

struct gpu_matrix {
    macko_desc desc;       // as MACKO rows; a matrix of any format can become MACKO rows
    int64_t    n_padded;   // entries of those rows with their padding, or an upper bound
    int32_t    value_type; // of the stored values: desc.type, a quantized type, or CODED
    // maximum number of values without one of three exponents and 8 significant bits, computed from the size of coded
    // values in the file; -1: unknown
    int64_t max_outliers = -1;
    bool    in_blocks    = false; // the file stores blocks of rows, and these are not blocks of stacked matrices
    int64_t window       = 0;     // codec::window()
};
// nbytes_values: of the first component in the file, or 0; window: codec::window()
gpu_matrix gpu_matrix_of(const codec & format, const macko_desc & desc, int64_t n_padded, int32_t value_type,
                         int64_t nbytes_values, int64_t window);

struct gpu_device {
    int64_t shared_nbytes;    // shared memory that a block may use
    bool    exp_coded = true; // whether the layout EXP_CODED may be chosen
};
// Reads the environment: GGML_MACKO_DISABLE=exp-coded excludes EXP_CODED, to compare layouts.
gpu_device gpu_device_of(int64_t shared_nbytes);

// Words of x that fit the shared memory of a block.
constexpr int64_t room_of_x(const gpu_device & device) { return device.shared_nbytes / 4 - 32; }

} // namespace macko::cuda
