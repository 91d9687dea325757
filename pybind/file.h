// GGUF files, dense or sparse, whose header passed all checks. Same order and names as ggml-macko.h, which documents
// them.
struct ggml_macko_file;

int     ggml_macko_file_open(const char * path, bool require_model, struct ggml_macko_file ** out);
void    ggml_macko_file_close(struct ggml_macko_file * file);
bool    ggml_macko_file_is_sparse(const struct ggml_macko_file * file);
int64_t ggml_macko_file_size(const struct ggml_macko_file * file);
int64_t ggml_macko_file_alignment(const struct ggml_macko_file * file);

struct ggml_macko_tensor_info {
    int64_t      struct_size;
    const char * name;
    int32_t      type;
    int32_t      n_dims;
    int64_t      ne[4];
    int64_t      offset;
    int64_t      nbytes;
    int64_t      sparse_index;
};
int64_t ggml_macko_file_n_tensors(const struct ggml_macko_file * file);
int     ggml_macko_file_tensor(const struct ggml_macko_file * file, int64_t i, struct ggml_macko_tensor_info * info);

struct ggml_macko_sparse_info {
    int64_t      struct_size;
    const char * name;
    const char * format;
    int32_t      type;
    int32_t      value_type;
    int32_t      index_bits;
    int32_t      n_dims;
    int64_t      ne[4];
    int64_t      nnz;
    int64_t      nbytes;
    int64_t      nbytes_dense;
    int64_t      first_tensor;
    int64_t      n_components;
};
int64_t ggml_macko_file_n_sparse(const struct ggml_macko_file * file);
int     ggml_macko_file_sparse(const struct ggml_macko_file * file, int64_t i, struct ggml_macko_sparse_info * info);
int     ggml_macko_file_check_payload(const struct ggml_macko_file * file, int64_t i, int n_threads);

enum ggml_macko_weight_use {
    GGML_MACKO_WEIGHT_OTHER = 0,
    GGML_MACKO_WEIGHT_BLOCK = 1,
    GGML_MACKO_WEIGHT_HEAD  = 2,
};
int ggml_macko_weight_use_of(const char * name, int32_t n_dims);
