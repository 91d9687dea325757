// Whole model files, payload included. An input is a file.
#include "gguf.h"
#include "model-check.h"

using namespace fuzz;

static bool run(const uint8_t * data, size_t size) {
    const memory_source source(data, size);
    macko::model_file   file;
    const int           status = vet_header(source, &file);
    check_status(status);
    if (status != GGML_MACKO_STATUS_OK) {
        return false;
    }
    bool accepted = true;
    for (const macko::sparse_tensor_info & m : file.sparse) {
        accepted = check_matrix(source, file, m) && accepted;
    }
    return accepted;
}

static std::vector<bytes> seeds() {
    std::vector<bytes> all;
    for (const builder::file & f : small_sparse_files()) {
        all.push_back(builder::serialize(f));
    }
    return all;
}

const target fuzz::TARGET = { "model", 8192, 1 << 20, 1, run, seeds, mutate_gguf };
