// The inputs of choose(): the header of a matrix, and the GPU. Plain C++: no ggml, no CUDA.
#pragma once

#include "codec/codec.h"

namespace macko::cuda {

struct gpu_matrix {
    macko_desc desc;       // as MACKO rows, which a matrix of any format can become
    int64_t    n_padded;   // entries of those rows with their padding, or an upper bound
    int32_t    value_type; // of the stored values: desc.type, a quantized type, or CODED
    // values at most that do not have one of three exponents and 8 significant bits, as the size of coded values on
    // file tells; -1: the header does not tell
    int64_t max_outliers = -1;
    bool    in_blocks    = false; // the file has it in blocks of rows, which are not those of stacked matrices
};
// nbytes_values: of the first component on file, or 0
gpu_matrix gpu_matrix_of(const codec & format, const macko_desc & desc, int64_t n_padded, int32_t value_type,
                         int64_t nbytes_values);

struct gpu_device {
    int64_t shared_nbytes;    // shared memory that a block may use
    bool    exp_coded = true; // whether the layout EXP_CODED may be chosen
};
// With the choices of the environment: GGML_MACKO_DISABLE=exp-coded leaves EXP_CODED out, to compare layouts.
gpu_device gpu_device_of(int64_t shared_nbytes);

// words of x that a block can hold in its shared memory
constexpr int64_t room_of_x(const gpu_device & device) { return device.shared_nbytes / 4 - 32; }

} // namespace macko::cuda
