// The codec: dense <-> MACKO arrays. Same order and names as ggml-macko.h, which says what each does.
struct ggml_macko_matrix {
    int64_t         rows;
    int64_t         cols;
    int32_t         type;
    int32_t         delta_bits;
    int64_t         nnz;
    int64_t         n_stored;
    const void    * values;
    const uint8_t * deltas;
    const int32_t * row_ptr;
};

int64_t ggml_macko_n_padded(int64_t n_stored);
int64_t ggml_macko_deltas_nbytes(int64_t n_stored, int32_t delta_bits);

struct ggml_macko_count {
    int64_t nnz;
    int64_t n_stored[4];
    int64_t n_nonfinite;
};
int ggml_macko_count_dense(const void * dense, int32_t type, int64_t rows, int64_t cols, int n_threads, struct ggml_macko_count * count);
int ggml_macko_encode(const void * dense, const struct ggml_macko_matrix * m, int n_threads);
int ggml_macko_validate(const struct ggml_macko_matrix * m, int64_t n_values, int64_t n_deltas, int64_t n_row_ptr, int n_threads);
int ggml_macko_decode(const struct ggml_macko_matrix * m, int64_t n_values, int64_t n_deltas, int64_t n_row_ptr, void * dense, int n_threads);
