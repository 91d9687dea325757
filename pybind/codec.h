// The codecs: dense <-> MACKO, EC-CSR and packed arrays. Same order and names as ggml-macko.h, which says what each does.
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

struct ggml_macko_ec_csr {
    int64_t         rows;
    int64_t         cols;
    int32_t         type;
    int32_t         delta_bits;
    int64_t         nnz;
    int64_t         n_values, n_deltas, n_bases, n_blk_ptr, n_block_rows, n_sets;
    const void    * values;
    const uint8_t * deltas;
    const void    * bases;
    const int32_t * blk_ptr;
    const int32_t * block_rows;
    const int32_t * sets;
};

struct ggml_macko_ec_csr_options {
    int32_t  max_granularity;
    int32_t  min_columns;
    bool     clip;
    uint64_t seed;
};

struct ggml_macko_ec_csr_matrix;
int  ggml_macko_ec_csr_encode(const void * dense, int32_t type, int64_t rows, int64_t cols, int32_t delta_bits, const struct ggml_macko_ec_csr_options * options, int n_threads, struct ggml_macko_ec_csr_matrix ** out);
int  ggml_macko_ec_csr_arrays(const struct ggml_macko_ec_csr_matrix * m, struct ggml_macko_ec_csr * arrays);
void ggml_macko_ec_csr_free(struct ggml_macko_ec_csr_matrix * m);
int  ggml_macko_ec_csr_validate(const struct ggml_macko_ec_csr * m, int n_threads);
int  ggml_macko_ec_csr_decode(const struct ggml_macko_ec_csr * m, void * dense, int n_threads);
int  ggml_macko_ec_csr_gpu_us(const struct ggml_macko_ec_csr * m, int n_threads, double * blocks_us, double * rows_us);

struct ggml_macko_packed {
    int64_t         rows;
    int64_t         cols;
    int32_t         type;
    int32_t         value_type;
    int32_t         index_bits;
    int64_t         nnz;
    int64_t         n_values, n_index, n_row_ptr;
    const void    * values;
    const uint8_t * index;
    const int32_t * row_ptr;
};

struct ggml_macko_packed_matrix;
int  ggml_macko_packed_encode(const void * dense, int32_t type, int64_t rows, int64_t cols, int32_t value_type, int32_t index_bits, int n_threads, struct ggml_macko_packed_matrix ** out);
int  ggml_macko_packed_arrays(const struct ggml_macko_packed_matrix * m, struct ggml_macko_packed * arrays);
void ggml_macko_packed_free(struct ggml_macko_packed_matrix * m);
int  ggml_macko_packed_validate(const struct ggml_macko_packed * m, int n_threads);
int  ggml_macko_packed_decode(const struct ggml_macko_packed * m, void * dense, int n_threads);
int  ggml_macko_quantize_q4_nl(const float * values, const float * weights, int64_t n, int n_threads, void * blocks);
