// The model metadata that llama.cpp would abort or misbehave on (FORMAT.md section 5): a table of key, type and range
// per architecture. No ggml.
#pragma once

#include "gguf/header.h"

namespace macko {

[[nodiscard]] int check_model_keys(const gguf_header & header);
// the same for the types of the tensors that llama.cpp gets to see (dense_tensors)
[[nodiscard]] int check_model_tensors(const std::vector<gguf_tensor> & tensors);

} // namespace macko
