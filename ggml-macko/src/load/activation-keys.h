// Checks and reads the keys macko.act.*: which neurons of a model may be skipped for a token (FORMAT.md section 9).
#pragma once

#include "gguf/header.h"

#include <string_view>

namespace macko {

bool is_activation_key(std::string_view name);

// That all of these keys are there, with values in their ranges, or none of them.
[[nodiscard]] int check_activation_keys(const gguf_header & header);

// The share of zeros in what the weight of this name is multiplied by, 0 ... 1; 0 if the keys or the name in them are
// missing. The header has passed check_activation_keys().
float activation_zeros(const gguf_header & header, std::string_view down);

} // namespace macko
