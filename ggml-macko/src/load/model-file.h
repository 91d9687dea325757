// Opens a GGUF model, with all checks of its header.
#pragma once

#include "load/file-shards.h"

namespace macko {

// Opens one file. require_model: see ggml_macko_file_open.
[[nodiscard]] int model_file_open(const char * path, bool require_model, std::unique_ptr<model_file> * out);

// Whether weights of a dense model that shrink become sparse during loading (compress.h). A -0.0 counts as zero with
// `on`, and is kept like any other value with `bit_exact`.
enum class compression { off, on, bit_exact };

// Opens a model for loading, with the checks of require_model. A split model is opened as a whole. NOT_SPARSE means
// that llama.cpp must handle the file: it is not sparse, or it is broken and has no sign of a sparse file. With
// compression, NOT_SPARSE also means that no weight shrinks, or that the file fails the checks. strict: see
// check_model_keys.
[[nodiscard]] int model_file_open_sparse(const char * path, compression how, bool strict,
                                         std::unique_ptr<model_file> * out);

} // namespace macko
