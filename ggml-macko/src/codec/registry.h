// The formats of this library. A new format is one folder beside macko/ and one row in registry.cpp. Uses neither ggml
// nor CUDA.
#pragma once

#include "codec/codec.h"

#include <string_view>

namespace macko {

// The newest format version that this library reads (macko.version).
constexpr int64_t FORMAT_VERSION = 1;
// Maximum length of a component's suffix with its dot; FORMAT.md section 2 derives the longest matrix name from it.
constexpr size_t MAX_SUFFIX = 8;

// All formats, in the order of their addition.
const std::vector<const codec *> & all_codecs();
// nullptr if there is no format with that name.
const codec * find_codec(std::string_view name);
// The same for a name from a caller; BAD_ARGUMENT if there is none, and for a null pointer.
[[nodiscard]] int find_format(const char * name, const codec ** format);
// The format with streamed rows; matrices are recoded to it for devices without a layout for their own format.
const codec & rows_codec();

// Adds a format, which must live as long as the process. For programs with formats of their own; call it before any
// other function of the library, because it takes no lock. BAD_ARGUMENT for a duplicate name, and beyond the limits on
// components and options.
[[nodiscard]] int register_codec(const codec & format);

} // namespace macko
