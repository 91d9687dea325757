// The sparse tensors of a model, as described by its header.
#pragma once

#include "codec/codec.h"
#include "gguf/header.h"

namespace macko {

struct model_file;

// A sparse tensor of a model, as described by the header (FORMAT.md section 2).
struct sparse_tensor_info {
    std::string   name;
    const codec * format;
    macko_desc    desc;       // of the MACKO rows that a consumer may get; the format chooses delta_bits
    int32_t       value_type; // desc.type, or a quantized or coded type
    int32_t       index_bits; // macko.tensor.index_bits
    int32_t       n_dims;
    int64_t       ne[4];
    int64_t       n_padded; // entries of the MACKO rows with padding, or an upper bound
    int64_t       nbytes_dense;
    size_t        first;     // its first tensor in gguf_header::tensors; the others follow
    size_t        n_tensors; // number of components; one dense tensor if the matrix is encoded on load
    std::shared_ptr<const std::vector<int32_t>> row_ptr = nullptr;    // counted, if it is encoded on load (compress.h)
    int64_t                                     n_negative_zeros = 0; // become +0.0 when it is encoded on load
    int64_t nbytes_values = 0; // bytes of its first component in the file; 0 if the matrix is encoded on load
    int64_t window        = 0; // codec::window()
    // The inputs of this matrix contain many zeros (zero-inputs.h), so a device should also keep it by columns. Set
    // only while a model is loaded, and never with GGML_MACKO_DISABLE=csc, which saves memory.
    bool by_columns = false;
    // Embeddings beside an output head, which no product uses. Set only while a model is loaded.
    bool is_only_looked_up = false;
    // With LOAD_ACT_THRESHOLDS and an input of one token, an element counts as zero if its magnitude, or its magnitude
    // times the norm of its column, is less than this (thresholds.h). 0: no threshold.
    float threshold         = 0;
    bool  threshold_of_norm = false;

    bool is_encoded_on_load() const { return row_ptr != nullptr; }
    // The description for the checks of a format. component_tensors: its n_tensors tensors, or nullptr for a
    // description without arrays.
    ggml_macko_matrix matrix(const gguf_tensor * component_tensors = nullptr) const;
};

// Runs only the checks of sparse tensors: fills is_sparse, sparse and tensor_sparse_index from the header.
[[nodiscard]] int check_sparse_tensors(model_file * file);
// The tensor table of the dense file: each sparse tensor is one tensor at the position of its first component. All
// offsets are 0.
std::vector<gguf_tensor> dense_tensors(const model_file & file);

} // namespace macko
