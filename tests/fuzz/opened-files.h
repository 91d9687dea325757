// Inputs through the file system: unnamed files in memory with names in a temporary folder.
#pragma once

#include "fuzz.h"

namespace fuzz {

// Opens the parts of a model for loading, with or without compressed weights (with -0.0 as a zero, and as a value), and
// compares its matrices with the bytes. Returns true if it is accepted with at least one matrix.
bool open_and_check(const std::vector<bytes> & parts, bool compress);

} // namespace fuzz
