// CPU kernels on plain arrays. Same order and names as ggml-macko.h, which documents them.
struct ggml_macko_cpu_matrix;
int  ggml_macko_cpu_matrix_init(const struct ggml_macko_matrix * m, int n_threads, struct ggml_macko_cpu_matrix ** out);
void ggml_macko_cpu_matrix_free(struct ggml_macko_cpu_matrix * m);
int64_t      ggml_macko_cpu_matrix_nbytes(const struct ggml_macko_cpu_matrix * m);
int          ggml_macko_cpu_mul_mat(const struct ggml_macko_cpu_matrix * m, const float * x, float * y, int64_t n,
                                    int n_threads);
const char * ggml_macko_cpu_kernels(void);
