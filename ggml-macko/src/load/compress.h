// Compress on load: dense weights of a model become sparse matrices without a sparse file. They are counted when the
// model is opened, so that sizes are known before
// llama.cpp asks for them, and encoded in blocks of rows when a device fetches them (read_payload): never more than a
// few blocks are in memory beside the result.
#pragma once

#include "load/model-file.h"

namespace macko {

// What llama.cpp does with a weight, by its name: enum ggml_macko_weight_use. Weights of no use known here stay as they
// are.
int weight_use(const std::string & name, int n_dims);

// Fills sparse and tensor_sparse_index of a dense model: each multiplied weight of F16, BF16 or F32 that takes fewer
// bytes as MACKO (the best delta_bits of it, as `macko convert`
// chooses) and is finite. NOT_SPARSE if there is none. Reads all those weights once; a second call for a file that did
// not change remembers what the first one found.
[[nodiscard]] int compress_weights(model_file * file);

} // namespace macko
