// Checks the keys macko.act.*, which name the neurons that may be skipped for a token (FORMAT.md section 10).
#pragma once

#include "gguf/header.h"

#include <string_view>

namespace macko {

bool is_activation_key(std::string_view name);

// Whether the file has these keys in a version that this build reads.
bool has_activation_keys(const gguf_header & header);

// Checks that either all of these keys exist, with values in their ranges, or none of them. Keys of a later version are
// not checked.
[[nodiscard]] int check_activation_keys(const gguf_header & header);

} // namespace macko
