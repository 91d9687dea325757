// Finds the weights of a model whose inputs contain many exact zeros: the weights after a ReLU. A device may also keep
// such a weight by columns, so it can skip the columns of zero inputs.
#pragma once

#include <string_view>

namespace macko {

// arch: general.architecture. True for the weights that llama.cpp multiplies by the result of a ReLU, squared or times
// another vector: the feed-forward down matrices, experts included, of the few architectures that have one.
bool has_zero_inputs(std::string_view arch, std::string_view tensor_name);

} // namespace macko
