// Models in two or three files, sparse ones and dense ones that are compressed on load. An input is one byte, the
// length of each part (two bytes), and the parts.
#include "gguf.h"
#include "opened-files.h"

using namespace fuzz;

namespace {

struct parts_input {
    bool               compress;
    std::vector<bytes> parts;
};

parts_input take_parts(const uint8_t * data, size_t size) {
    input         in    = { data, size };
    const uint8_t first = in.take<uint8_t>();
    parts_input   p     = { (first & 1) != 0, std::vector<bytes>(2 + (first >> 1) % 2) };
    size_t        lengths[3];
    for (size_t i = 0; i < p.parts.size(); i++) {
        lengths[i] = in.take<uint16_t>();
    }
    for (size_t i = 0; i < p.parts.size(); i++) {
        p.parts[i] = in.take_bytes(lengths[i]);
    }
    return p;
}

bytes put_parts(const parts_input & p) {
    bytes b = { static_cast<uint8_t>((p.compress ? 1 : 0) | (p.parts.size() - 2) << 1) };
    for (const bytes & part : p.parts) {
        builder::put<uint16_t>(&b, static_cast<uint16_t>(part.size()));
    }
    for (const bytes & part : p.parts) {
        b.insert(b.end(), part.begin(), part.end());
    }
    return b;
}

bool run(const uint8_t * data, size_t size) {
    const parts_input p = take_parts(data, size);
    return open_and_check(p.parts, p.compress);
}

std::vector<bytes> seeds() {
    std::vector<bytes> all;
    for (const bool compress : { false, true }) {
        const auto files = compress ? small_dense_files() : small_sparse_files();
        for (size_t i = 0; i < files.size(); i++) {
            parts_input p = { compress, {} };
            for (const builder::file & part : split(files[i], 2 + i % 2)) {
                p.parts.push_back(builder::serialize(part));
            }
            all.push_back(put_parts(p));
        }
    }
    return all;
}

// One of the parts as a separate file.
size_t mutate(uint8_t * data, size_t size, size_t max_size, uint64_t seed) {
    rng         r(seed);
    parts_input p = take_parts(data, size);
    if (r.one_in(8)) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    bytes &      part = p.parts[r.pick(p.parts.size())];
    const size_t n    = part.size();
    part.resize(n + 256);
    part.resize(mutate_gguf(part.data(), n, part.size(), r.bits()));
    const bytes b = put_parts(p);
    if (b.size() > max_size) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    std::copy(b.begin(), b.end(), data);
    return b.size();
}

} // namespace

const target fuzz::TARGET = { "split", 8192, 4 << 20, 1, run, seeds, mutate };
