// Checks the keys macko.act.*, which name the neurons that may be skipped for a token (FORMAT.md section 10).
#pragma once

#include "gguf/header.h"

#include <string_view>

namespace macko {

bool is_activation_key(std::string_view name);

// Checks that either all of these keys exist, with values in their ranges, or none of them.
[[nodiscard]] int check_activation_keys(const gguf_header & header);

} // namespace macko
