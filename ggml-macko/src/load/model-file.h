// A GGUF model that passed all header checks, open for reading. One descriptor per file from vetting to the last read
// (no second open), and pread only: a file that shrinks gives an error, not SIGBUS.
#pragma once

#include "codec/codec.h"
#include "gguf/header.h"

#include <sys/stat.h>

namespace macko {

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
    bool  by_columns = false;
    float zeros      = 0; // their share in those vectors, as macko.act.part.zeros says; 0 if nothing says it
    // A model is loaded with GGML_MACKO_SKIP=1: an input of one token counts as zero if its magnitude, or its magnitude
    // times the norm of its column, is less than this (thresholds.h). 0: none does.
    float threshold         = 0;
    bool  threshold_of_norm = false;

    bool is_encoded_on_load() const { return row_ptr != nullptr; }
    // as a format's checks take it; component_tensors: its n_tensors tensors, or nullptr for a description without
    // arrays
    ggml_macko_matrix matrix(const gguf_tensor * component_tensors = nullptr) const;
};

// A file of a model: most have one, split models several. Offsets in a model count through its files, one after the
// other.
struct file_part {
    std::string path;
    int64_t     begin  = 0;
    int         fd     = -1;
    struct stat opened = {};
};

struct model_file : byte_source {
    std::string                     path; // of the first file
    std::vector<file_part>          parts;
    gguf_header                     header;            // of a split model: the first file's, with the tensors of all
    std::string                     arch;              // general.architecture, of a model that passed the checks
    bool                            has_rules = false; // those of its architecture (gguf/model-keys.h)
    bool                            is_sparse = false;
    std::vector<sparse_tensor_info> sparse;
    std::vector<int64_t>            tensor_sparse_index; // per table entry: matrix it is a component of, or -1

    ~model_file() override;
    int64_t           size() const override;
    [[nodiscard]] int read(int64_t offset, void * dst, int64_t n) const override; // EINTR and short reads handled
    [[nodiscard]] int check_unchanged() const;      // FILE_CHANGED if inode, size or mtime differ from `opened`
    [[nodiscard]] int open(const char * file_path); // the first file. Regular files only (symlinks to one are followed)
    // opens the other files of a split model, if header says that it is one; their tensors join header's
    [[nodiscard]] int append_parts();
};
// inode, size and mtime
bool is_same_file(const struct stat & a, const struct stat & b);
// *count = 1 for a model that is not split
[[nodiscard]] int split_count(const gguf_header & header, int64_t * count);

// Opens one file. require_model: see ggml_macko_file_open.
[[nodiscard]] int model_file_open(const char * path, bool require_model, std::unique_ptr<model_file> * out);

// Whether dense weights that shrink become sparse ones while a model is loaded (compress.h). A -0.0 counts as zero if
// it is on, and is kept like any other value if it is bit_exact.
enum class compression { off, on, bit_exact };

// Opens a model for loading, with the checks of require_model; split models are opened as a whole. NOT_SPARSE leaves a
// file to llama.cpp: one that is not sparse, or a broken one that does not even claim to be; with compression also one
// in which no weight shrinks, or that fails the checks. strict: see check_model_keys.
[[nodiscard]] int model_file_open_sparse(const char * path, compression how, bool strict,
                                         std::unique_ptr<model_file> * out);

// The checks on sparse tensors alone: fills is_sparse, sparse and tensor_sparse_index from header.
[[nodiscard]] int check_sparse_tensors(model_file * file);
// The tensor table of the dense file: each sparse tensor as one tensor at the place of its first component. Offsets are
// 0.
std::vector<gguf_tensor> dense_tensors(const model_file & file);

} // namespace macko
