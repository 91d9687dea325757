// Sparse weights from C: encodes a 2 x 4 matrix, multiplies it with a vector and checks the result. docs/guide/c.md
// has the commands.
#include "ggml-macko.h"

#include <stdio.h>

static int failed(const char * step) {
    fprintf(stderr, "%s: %s\n", step, ggml_macko_last_error());
    return 1;
}

int main(void) {
    const float W[2][4] = { { 1, 0, 0, 2 }, { 0, 0, 3, 0 } }; // 2 rows of 4 columns
    const float x[4]    = { 1, 10, 100, 1000 };
    float       y[2]    = { 0, 0 };

    if (ggml_macko_api_version() != GGML_MACKO_API_VERSION) {
        fprintf(stderr, "compiled for version %d of the API\n", GGML_MACKO_API_VERSION);
        return 1;
    }
    struct ggml_macko_encoded * encoded = NULL;
    if (ggml_macko_encode("macko", W, GGML_MACKO_TYPE_F32, 2, 4, NULL, 0, 0, &encoded)) {
        return failed("encode");
    }
    struct ggml_macko_matrix       matrix  = { .struct_size = sizeof(matrix) };
    struct ggml_macko_cpu_matrix * weights = NULL;
    if (ggml_macko_encoded_matrix(encoded, &matrix) || ggml_macko_cpu_matrix_init(&matrix, 0, &weights)) {
        return failed("prepare");
    }
    ggml_macko_encoded_free(encoded); // the weights have a copy
    if (ggml_macko_cpu_mul_mat(weights, x, y, 1, 0)) {
        return failed("multiply");
    }
    ggml_macko_cpu_matrix_free(weights);
    printf("%lld non-zeros, y = %g %g\n", (long long)matrix.nnz, y[0], y[1]);
    return y[0] == 2001 && y[1] == 300 ? 0 : 1;
}
