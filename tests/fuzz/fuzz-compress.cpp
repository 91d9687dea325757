// Dense models whose weights are compressed on load. An input is a file.
#include "gguf.h"
#include "opened-files.h"

using namespace fuzz;

static bool run(const uint8_t * data, size_t size) { return open_and_check({ bytes(data, data + size) }, true); }

static std::vector<bytes> seeds() {
    std::vector<bytes> all;
    for (const builder::file & f : small_dense_files()) {
        all.push_back(builder::serialize(f));
    }
    return all;
}

const target fuzz::TARGET = { "compress", 8192, 4 << 20, 1, run, seeds, mutate_gguf };
