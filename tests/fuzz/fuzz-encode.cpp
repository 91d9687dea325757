// Encodes matrices of all formats and types, changes them in a few places, then validates and decodes them.
#include "matrix-input.h"

using namespace fuzz;

static bool run(const uint8_t * data, size_t size) {
    encoded_input in;
    if (!encode_input({ data, size }, -1, 4096, &in)) {
        return false;
    }
    const ggml_macko_matrix & m      = in.encoded.matrix;
    const int                 status = ggml_macko_validate(&m, 1);
    check_status(status);
    FUZZ_CHECK(status == GGML_MACKO_STATUS_OK || in.patched, "the encoder's matrix is refused: %s",
               ggml_macko_last_error());
    bytes     dense(in.dense.size(), 0xee);
    const int decoded = ggml_macko_decode(&m, dense.data(), 1);
    FUZZ_CHECK(decoded == status, "validate says %d, decode %d", status, decoded);
    if (status != GGML_MACKO_STATUS_OK) {
        return false;
    }
    const bool coded = m.value_type == GGML_MACKO_TYPE_CODED, quantized = m.value_type != m.type && !coded;
    FUZZ_CHECK(in.patched || quantized || dense == in.dense, "decoded to another matrix");
    if (quantized || strcmp(m.format, "ec-csr") == 0) { // these formats can store an equal matrix in several ways
        return true;
    }
    // Any accepted matrix of the other formats equals the encoder's result for its elements.
    const auto *            values    = static_cast<const uint8_t *>(m.arrays[0].data);
    const ggml_macko_option options[] = { { "index_bits", m.index_bits },
                                          { "value_type", m.value_type },
                                          { "mantissa_bits", values[0] },
                                          { "exponent_bits", values[1] } };
    ggml_macko_encoded *    e         = nullptr;
    auto                    again     = macko::sized<ggml_macko_matrix>();
    FUZZ_CHECK(ggml_macko_encode(m.format, dense.data(), m.type, m.rows, m.cols, options, coded ? 4 : 1, 1, &e) == 0 &&
                   ggml_macko_encoded_matrix(e, &again) == 0,
               "%s", ggml_macko_last_error());
    FUZZ_CHECK(again.nnz == m.nnz && again.index_bits == m.index_bits, "accepted, but not canonical");
    for (int i = 0; i < m.n_arrays; i++) {
        FUZZ_CHECK(again.arrays[i].nbytes == m.arrays[i].nbytes &&
                       !memcmp(again.arrays[i].data, m.arrays[i].data, static_cast<size_t>(m.arrays[i].nbytes)),
                   "accepted, but component %d is not canonical", i);
    }
    ggml_macko_encoded_free(e);
    return true;
}

const target fuzz::TARGET = { "encode", 2048, 4 << 20, 1, run, encode_seeds, nullptr };
