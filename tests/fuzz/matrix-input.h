// Matrices as inputs, through the C API: encoded from dense elements in the input, then changed in a few places
// (patches), so that most are valid or nearly valid.
#pragma once

#include "capi/struct-size.h"
#include "fuzz.h"

#include <memory>

namespace fuzz {

// A matrix with arrays of exactly their size, so that a sanitizer detects each read past them.
struct owned_matrix {
    ggml_macko_matrix          matrix = macko::sized<ggml_macko_matrix>();
    std::unique_ptr<uint8_t[]> memory[GGML_MACKO_MAX_ARRAYS];

    void set(int i, const void * data, int64_t nbytes, int32_t type);
};

struct encoded_input {
    int32_t      type;
    int64_t      rows, cols;
    bytes        dense;
    owned_matrix encoded;
    bool         patched;
};

// Reads a description, patches and elements. plain_type: -1, or the only dense type. Returns false if the elements
// cannot be encoded because some are not finite.
bool encode_input(input in, int32_t plain_type, int64_t max_elements, encoded_input * out);
// Inputs of every format and dense type, each with this many choices of options.
constexpr int      SEED_OPTIONS = 6;
std::vector<bytes> encode_seeds();

} // namespace fuzz
