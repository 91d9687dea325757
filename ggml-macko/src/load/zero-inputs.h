// Which weights of a model are multiplied by vectors with many exact zeros: those behind a ReLU. A device may keep such
// a weight by columns, too, so that it need not read the columns that a zero meets.
#pragma once

#include <string_view>

namespace macko {

// arch: general.architecture. True for the weights that llama.cpp multiplies by the result of a ReLU, squared or times
// another vector: feed-forward parts, experts included, of the few architectures that have one.
bool has_zero_inputs(std::string_view arch, std::string_view tensor_name);

} // namespace macko
