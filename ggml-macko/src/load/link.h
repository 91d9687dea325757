// A link (FORMAT.md section 11): a GGUF that names a sparse model in its folder. It has the dense tensors of that
// model, and holes in the place of its sparse tensors.
#pragma once

#include "load/file-shards.h"

namespace macko {

// The type of the tensors in the place of sparse ones. No device but this plugin's multiplies with I8, so no program
// computes with a hole.
constexpr int32_t LINK_TYPE = 24;

// Whether the file begins like a link. It reads a few bytes.
bool is_link(const model_file & file);
// Replaces an open link by the model that it names, which must have the size and time that the link states. path: of
// the link.
[[nodiscard]] int follow_link(const char * path, std::unique_ptr<model_file> * file);

} // namespace macko
