// Checks and reads the keys macko.act.*: which neurons of a model may be skipped for a token (FORMAT.md section 9).
#pragma once

#include "gguf/header.h"

#include <string_view>

namespace macko {

bool is_activation_key(std::string_view name);

// That all of these keys are there, with values in their ranges, or none of them.
[[nodiscard]] int check_activation_keys(const gguf_header & header);

} // namespace macko
