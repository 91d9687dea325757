// Checks the model metadata on which llama.cpp would abort or misbehave (SECURITY.md): a table of keys, types
// and ranges for each architecture, and for all architectures. Does not use ggml.
#pragma once

#include "gguf/header.h"

namespace macko {

// strict: UNSUPPORTED_ARCH for an architecture without rules; otherwise its general keys are checked.
[[nodiscard]] int check_model_keys(const gguf_header & header, bool strict);
// Whether the architecture has rules of its own; *arch is its name.
bool has_model_rules(const gguf_header & header, std::string * arch);
// Checks the types of the tensors that llama.cpp sees (dense_tensors).
[[nodiscard]] int check_model_tensors(const std::vector<gguf_tensor> & tensors, bool has_rules);

} // namespace macko
