// The model metadata that llama.cpp would abort or misbehave on (FORMAT.md section 5): a table of key, type and range
// per architecture, and of what all architectures have. No ggml.
#pragma once

#include "gguf/header.h"

namespace macko {

// strict: an architecture without rules of its own is UNSUPPORTED_ARCH; else its general keys are checked.
[[nodiscard]] int check_model_keys(const gguf_header & header, bool strict);
// whether the architecture has rules of its own; *arch: its name
bool has_model_rules(const gguf_header & header, std::string * arch);
// the same for the types of the tensors that llama.cpp gets to see (dense_tensors)
[[nodiscard]] int check_model_tensors(const std::vector<gguf_tensor> & tensors, bool has_rules);

} // namespace macko
