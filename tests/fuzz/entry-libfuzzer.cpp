// A target for libFuzzer. On request, the program writes the seeds of its target to a folder first:
//
//     fuzz-header --write-seeds=FOLDER
#include "fuzz.h"

#include <fstream>

using namespace fuzz;

extern "C" int LLVMFuzzerInitialize(int * argc, char *** argv) {
    const std::string option = "--write-seeds=";
    for (int i = 1; i < *argc; i++) {
        const std::string arg = (*argv)[i];
        if (arg.compare(0, option.size(), option) != 0) {
            continue;
        }
        size_t n = 0;
        for (const bytes & seed : TARGET.seeds()) {
            const std::string path = arg.substr(option.size()) + "/seed-" + std::to_string(n++);
            std::ofstream     out(path, std::ios::binary);
            out.write(reinterpret_cast<const char *>(seed.data()), static_cast<std::streamsize>(seed.size()));
            FUZZ_CHECK(out.flush(), "cannot write %s", path.c_str());
        }
        exit(0);
    }
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size <= TARGET.max_nbytes) {
        TARGET.run(data, size);
    }
    return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned seed) {
    return TARGET.mutate ? TARGET.mutate(data, size, std::min(max_size, TARGET.max_nbytes), seed)
                         : LLVMFuzzerMutate(data, size, std::min(max_size, TARGET.max_nbytes));
}
