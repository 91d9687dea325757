// The sparse tensors of a model, as its header describes them.
#pragma once

#include "codec/codec.h"
#include "gguf/header.h"

namespace macko {

struct model_file;

// A sparse tensor of a model: what the header says of it (FORMAT.md section 2).
struct sparse_tensor_info {
    std::string   name;
    const codec * format;
    macko_desc    desc;       // of the MACKO rows that a consumer may get: delta_bits is the format's choice
    int32_t       value_type; // desc.type, or a type that only packed values have
    int32_t       bits;       // macko.tensor.delta_bits
    int32_t       n_dims;
    int64_t       ne[4];
    int64_t       n_padded; // entries of those rows with their padding, or an upper bound
    int64_t       nbytes_dense;
    size_t        first;     // of its tensors in gguf_header::tensors; the others follow it
    size_t        n_tensors; // its components; one dense tensor if it is encoded on load
    std::shared_ptr<const std::vector<int32_t>> row_ptr = nullptr; // as counted, if it is encoded on load (compress.h)
    int64_t                                     n_negative_zeros = 0; // that become +0.0 when it is encoded on load
    int64_t nbytes_values = 0; // of its first component on file; 0 if it is encoded on load
    // A model is loaded, and multiplies this by vectors with many zeros (zero-inputs.h): a device is to keep it by
    // columns, too. Never with GGML_MACKO_NO_COLUMNS, for whom memory matters more.
    bool by_columns = false;
    // A model is loaded with GGML_MACKO_SKIP=1: an input of one token counts as zero if its magnitude, or its magnitude
    // times the norm of its column, is less than this (thresholds.h). 0: none does.
    float threshold         = 0;
    bool  threshold_of_norm = false;

    bool is_encoded_on_load() const { return row_ptr != nullptr; }
    // as a format's checks take it; component_tensors: its n_tensors tensors, or nullptr for a description without
    // arrays
    ggml_macko_matrix matrix(const gguf_tensor * component_tensors = nullptr) const;
};

// The checks on sparse tensors alone: fills is_sparse, sparse and tensor_sparse_index from header.
[[nodiscard]] int check_sparse_tensors(model_file * file);
// The tensor table of the dense file: each sparse tensor as one tensor at the place of its first component. Offsets are
// 0.
std::vector<gguf_tensor> dense_tensors(const model_file & file);

} // namespace macko
