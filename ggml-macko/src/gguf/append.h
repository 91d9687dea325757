// Appends numbers and strings in GGUF's encoding to a new header.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

namespace macko {

template <typename T> void gguf_append(std::vector<uint8_t> * out, T value) {
    const size_t n = out->size();
    out->resize(n + sizeof(T));
    memcpy(out->data() + n, &value, sizeof(T));
}

inline void gguf_append(std::vector<uint8_t> * out, std::string_view text) {
    gguf_append<uint64_t>(out, text.size());
    out->insert(out->end(), text.begin(), text.end());
}

} // namespace macko
