// The codecs: dense matrices to the arrays of any format and back. Same order and names as ggml-macko.h, which
// documents them.
#define GGML_MACKO_MAX_ARRAYS  8
#define GGML_MACKO_MAX_OPTIONS 8

struct ggml_macko_array {
    const void * data;
    int64_t      nbytes;
    int32_t      type;
};

struct ggml_macko_matrix {
    int64_t                 struct_size;
    const char *            format;
    int64_t                 rows;
    int64_t                 cols;
    int32_t                 type;
    int32_t                 value_type;
    int32_t                 index_bits;
    int64_t                 nnz;
    int32_t                 n_arrays;
    struct ggml_macko_array arrays[8];
};

struct ggml_macko_option {
    const char * name;
    int64_t      value;
};

struct ggml_macko_codec_info {
    int64_t                  struct_size;
    const char *             name;
    int32_t                  n_arrays;
    const char *             suffixes[8];
    int32_t                  n_options;
    struct ggml_macko_option options[8];
};
int32_t ggml_macko_codec_count(void);
int     ggml_macko_codec_at(int32_t i, struct ggml_macko_codec_info * info);

struct ggml_macko_encoded;
int  ggml_macko_encode(const char * format, const void * dense, int32_t type, int64_t rows, int64_t cols,
                       const struct ggml_macko_option * options, int32_t n_options, int n_threads,
                       struct ggml_macko_encoded ** out);
int  ggml_macko_encoded_matrix(const struct ggml_macko_encoded * e, struct ggml_macko_matrix * m);
void ggml_macko_encoded_free(struct ggml_macko_encoded * e);
int  ggml_macko_validate(const struct ggml_macko_matrix * m, int n_threads);
int  ggml_macko_decode(const struct ggml_macko_matrix * m, void * dense, int n_threads);

enum ggml_macko_fault {
    GGML_MACKO_FAULT_NONE      = 0,
    GGML_MACKO_FAULT_NNZ       = 1,
    GGML_MACKO_FAULT_NOT_ZERO  = 2,
    GGML_MACKO_FAULT_TOO_LARGE = 3,
};

struct ggml_macko_error {
    int64_t struct_size;
    bool    is_equal;
    int32_t fault;
    int64_t row;
    int64_t col;
    int64_t n_nonzero;
    double  max_error;
    double  rms_relative;
    double  rms_relative_max;
    double  weighted_error;
    double  weighted_power;
};
int ggml_macko_measure_error(const struct ggml_macko_matrix * m, const void * dense, const float * weights,
                             int64_t n_weights, int n_threads, struct ggml_macko_error * out);

struct ggml_macko_layout {
    int64_t      struct_size;
    int64_t      nbytes;
    int64_t      own_nbytes;
    const char * name;
    bool         is_settled;
    int32_t      delta_bits;
    int32_t      lanes;
    bool         bank_order;
    char         reason[1024];
};
int     ggml_macko_gpu_layout(const struct ggml_macko_matrix * m, bool stacked, int64_t shared_nbytes, int n_threads,
                              struct ggml_macko_layout * layout);
int     ggml_macko_cpu_layout(const struct ggml_macko_matrix * m, struct ggml_macko_layout * layout);
int64_t ggml_macko_n_padded(int64_t n_stored);
int64_t ggml_macko_deltas_nbytes(int64_t n_stored, int32_t delta_bits);

struct ggml_macko_count {
    int64_t nnz;
    int64_t n_stored[4];
    int64_t n_nonfinite;
};
int ggml_macko_count_dense(const void * dense, int32_t type, int64_t rows, int64_t cols, int n_threads,
                           struct ggml_macko_count * count);
int ggml_macko_drop_negative_zeros(void * values, int32_t type, int64_t n, int n_threads, int64_t * count);
int ggml_macko_quantize_q4_nl(const void * values, int32_t value_type, const float * weights, int64_t n, int n_threads,
                              void * blocks);
int ggml_macko_round_to_scales(const void * values, int32_t value_type, int64_t n, int32_t type, int n_threads,
                               void * blocks);
