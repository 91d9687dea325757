// Headers of model files: structure, keys, and the description of sparse tensors. An input is a header; its last four
// bytes are the number of data bytes, which are not stored.
#include "gguf.h"
#include "load/thresholds.h"
#include "model-check.h"

#include <cfloat>

using namespace fuzz;

static constexpr size_t   TAIL      = sizeof(uint32_t);
static constexpr uint32_t MAX_ZEROS = 0xfffff; // a header may continue in them: its memory grows with the file

static uint32_t tail_of(const uint8_t * data, size_t size) {
    uint32_t n;
    memcpy(&n, data + size - TAIL, TAIL);
    return n & MAX_ZEROS;
}

static bool run(const uint8_t * data, size_t size) {
    if (size < TAIL) {
        return false;
    }
    macko::model_file file;
    const int         status = vet_header(memory_source(data, size - TAIL, tail_of(data, size)), &file);
    check_status(status);
    if (status != GGML_MACKO_STATUS_OK) {
        return false;
    }
    check_dense_header(file);
    const char * none = nullptr;
    const int    set  = macko::set_thresholds(&file, &none);
    FUZZ_CHECK(set == GGML_MACKO_STATUS_OK || set == GGML_MACKO_STATUS_BAD_KEY_VALUE, "thresholds: %d", set);
    for (const macko::sparse_tensor_info & m : file.sparse) {
        FUZZ_CHECK(m.threshold >= 0 && m.threshold <= FLT_MAX && (m.threshold == 0 || !none), "%s: threshold %g",
                   m.name.c_str(), static_cast<double>(m.threshold));
    }
    return true;
}

static bytes header_of(const builder::file & f) {
    builder::layout where;
    uint64_t        file_size   = 0;
    bytes           b           = builder::serialize_header(f, &where, &file_size);
    const uint64_t  data_nbytes = file_size > b.size() ? file_size - b.size() : 0;
    builder::put<uint32_t>(&b, static_cast<uint32_t>(std::min<uint64_t>(data_nbytes, MAX_ZEROS)));
    return b;
}

static std::vector<bytes> seeds() {
    std::vector<bytes> all;
    for (const auto & files : { small_sparse_files(), small_dense_files(), whole_models() }) {
        for (const builder::file & f : files) {
            all.push_back(header_of(f));
        }
    }
    return all;
}

static size_t mutate(uint8_t * data, size_t size, size_t max_size, uint64_t seed) {
    rng           r(seed);
    builder::file f;
    if (size < TAIL || r.one_in(4) || !parse(data, size - TAIL, false, size - TAIL + tail_of(data, size), &f)) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    mutate_file(r, false, &f);
    const bytes b = header_of(f);
    if (b.size() > max_size) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    std::copy(b.begin(), b.end(), data);
    return b.size();
}

const target fuzz::TARGET = { "header", 8192, 16 << 20, 1, run, seeds, mutate };
