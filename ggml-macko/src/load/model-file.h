// Opens a GGUF model, with all checks of its header.
#pragma once

#include "load/file-parts.h"

namespace macko {

// Opens one file. require_model: see ggml_macko_file_open.
[[nodiscard]] int model_file_open(const char * path, bool require_model, std::unique_ptr<model_file> * out);

// Whether dense weights that shrink become sparse ones while a model is loaded (compress.h). A -0.0 counts as zero if
// it is on, and is kept like any other value if it is bit_exact.
enum class compression { off, on, bit_exact };

// Opens a model for loading, with the checks of require_model; split models are opened as a whole. NOT_SPARSE leaves a
// file to llama.cpp: one that is not sparse, or a broken one that does not even claim to be; with compression also one
// in which no weight shrinks, or that fails the checks. strict: see check_model_keys.
[[nodiscard]] int model_file_open_sparse(const char * path, compression how, bool strict,
                                         std::unique_ptr<model_file> * out);

} // namespace macko
