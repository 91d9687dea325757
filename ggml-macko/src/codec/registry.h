// The formats that this library knows. A new format is one folder beside macko/ and one row in registry.cpp. No ggml,
// no CUDA.
#pragma once

#include "codec/codec.h"

#include <string_view>

namespace macko {

// the newest format version that this library reads (macko.version)
constexpr int64_t FORMAT_VERSION = 1;
// of a component's suffix with its dot; FORMAT.md section 2 derives the longest name of a matrix from it
constexpr size_t MAX_SUFFIX = 8;

// in the order in which they were added
const std::vector<const codec *> & all_codecs();
// nullptr if there is none of that name
const codec * find_codec(std::string_view name);
// the format whose rows are streamed, and that matrices are recoded to for devices without anything of their own
const codec & rows_codec();

// Adds a format; it must live as long as the process. For programs that bring their own, before anything else of the
// library is used: no lock is taken. BAD_ARGUMENT for a second one of the same name, and beyond the limits on
// components and options.
[[nodiscard]] int register_codec(const codec & format);

} // namespace macko
