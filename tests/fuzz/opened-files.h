// Inputs that go through the file system: unnamed files in memory behind names of a temporary folder.
#pragma once

#include "fuzz.h"

namespace fuzz {

// Opens the parts of a model for loading, weights compressed (with -0.0 as a zero, and as a value) or not, and compares
// its matrices with the bytes. True if it is accepted with at least one matrix.
bool open_and_check(const std::vector<bytes> & parts, bool compress);

} // namespace fuzz
