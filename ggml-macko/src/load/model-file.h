// A GGUF model that passed all header checks, open for reading; and the dense file that a sparse one stands for.
// One descriptor per file from vetting to the last read (no second open), pread only: a file that shrinks gives an
// error, not SIGBUS.
#pragma once

#include "codec/ec-csr/ec-csr.h"
#include "codec/packed/packed.h"
#include "gguf/header.h"

#include <memory>
#include <sys/stat.h>

namespace macko {

// components of a matrix, in the order of the tensor table
enum macko_component : size_t { MACKO_VALUES, MACKO_DELTAS, MACKO_ROW_PTR };
enum packed_component : size_t { PACKED_VALUES, PACKED_INDEX, PACKED_ROW_PTR };
enum ec_csr_component : size_t { EC_VALUES, EC_DELTAS, EC_BASES, EC_BLK_PTR, EC_ROWS, EC_SETS };

struct sparse_format {
    const char *         name;    // in macko.tensor.format
    int64_t              version; // readers older than that do not know it
    size_t               n_components;
    const char * const * components; // suffixes, with their dot
};
extern const sparse_format FORMAT_MACKO, FORMAT_EC_CSR, FORMAT_PACKED;
extern const sparse_format FORMAT_DENSE; // not on file: a dense tensor that is encoded while it is read (compress.h)

struct sparse_tensor_info { // FORMAT.md section 2
    std::string           name;
    const sparse_format * format;
    macko_desc            desc;       // of packed: what recode() makes of it
    int32_t               value_type; // desc.type, or of packed a quantized type
    int32_t               index_bits; // of packed
    int32_t               n_dims;
    int64_t               ne[4];
    int64_t               n_padded; // of the MACKO arrays that a consumer gets; of the others an upper bound
    int64_t               nbytes_dense;
    size_t                first; // component in gguf_header::tensors; the others follow it
    std::shared_ptr<const std::vector<int32_t>> row_ptr = nullptr; // of FORMAT_DENSE, as counted

    packed_desc packed() const { return { desc, value_type, index_bits }; }
};

// A file of a model: most have one, split models several. Offsets in a model count through its files, one behind the
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
    gguf_header                     header; // of a split model: the first file's, with the tensors of all
    bool                            is_sparse = false;
    std::vector<sparse_tensor_info> sparse;
    std::vector<int64_t>            tensor_sparse_index; // per table entry: matrix it is a component of, or -1

    ~model_file() override;
    int64_t           size() const override;
    [[nodiscard]] int read(int64_t offset, void * dst, int64_t n) const override; // EINTR and short reads handled
    [[nodiscard]] int check_unchanged() const;      // FILE_CHANGED if inode, size or mtime differ from `opened`
    [[nodiscard]] int open(const char * file_path); // the first file. Regular files only (symlinks to one are followed)
    // the other files of a split model, if header says that it is one: their tensors join header's
    [[nodiscard]] int append_parts();
};
// *count = 1 for a model that is not split
[[nodiscard]] int split_count(const gguf_header & header, int64_t * count);

// one file. require_model: see ggml_macko_file_open
[[nodiscard]] int model_file_open(const char * path, bool require_model, std::unique_ptr<model_file> * out);

// for loads: as with require_model, but NOT_SPARSE for what is llama.cpp's to judge, good or bad: every file that is
// not sparse, and
// broken ones that do not even claim to be. Split models are opened as a whole. compress: dense weights that would be
// smaller become sparse ones (compress.h); NOT_SPARSE
// if there are none, or if the file is not what require_model asks for.
[[nodiscard]] int model_file_open_sparse(const char * path, bool compress, std::unique_ptr<model_file> * out);

// the same checks on bytes in memory (fuzzing, tests): fills is_sparse, sparse, tensor_sparse_index from header
[[nodiscard]] int check_sparse_tensors(model_file * file);
// the tensor table of the dense file: each sparse matrix as one tensor at the place of its first component. Offsets are
// 0.
std::vector<gguf_tensor> dense_tensors(const model_file & file);
// the metadata that llama.cpp would abort or misbehave on (model-keys.cpp): table of key -> type, min, max per
// architecture
[[nodiscard]] int check_model_keys(const gguf_header & header);
// the same for the types of the tensors that llama.cpp gets to see (dense_tensors)
[[nodiscard]] int check_model_tensors(const std::vector<gguf_tensor> & tensors);

// Payload of one matrix. MACKO: in blocks of rows of about 512 KiB, in parallel: each block is read into private
// memory, validated, and
// handed to consume(view, first_value) (first_value = non-zeros in earlier rows, if the consumer wants it); consume may
// be called from several threads at once,
// not in order. Checks row_ptr, padding and nnz as well. EC-CSR and packed: the whole matrix is read and checked, and
// handed to
// consume_blocks or consume_packed at once; for a consumer that does not take it so it is recoded to MACKO first
// (dequantized, too).
struct payload_consumer {
    virtual ~payload_consumer()                                                     = default;
    [[nodiscard]] virtual int consume(const macko_view & view, int64_t first_value) = 0;
    virtual bool wants_first_value() const { return false; } // then a block waits until all before it are validated
    virtual bool takes_blocks() const { return false; }
    [[nodiscard]] virtual int consume_blocks(const ec_csr_view &) { return GGML_MACKO_STATUS_OK; }
    virtual bool              takes_packed() const { return false; }
    [[nodiscard]] virtual int consume_packed(const packed_view &) { return GGML_MACKO_STATUS_OK; }
};
[[nodiscard]] int read_payload(const model_file & file, const sparse_tensor_info & matrix, int n_threads,
                               payload_consumer & consumer);
// n bytes from offset on, by a team of threads: one copies no faster than 6 GB/s, and fresh memory costs as much again
[[nodiscard]] int read_by_all(const byte_source & source, int64_t offset, uint8_t * dst, int64_t n, int n_team);
// the same without the file system (fuzzing, tests); tensors are those of header
[[nodiscard]] int read_payload(const byte_source & source, const gguf_header & header,
                               const sparse_tensor_info & matrix, int n_threads, payload_consumer & consumer);

} // namespace macko
