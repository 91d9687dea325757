// Compression on load: dense weights of a model become sparse without a sparse file. The non-zeros are counted when the
// model is opened, because llama.cpp needs sizes before it loads. The weights are encoded in blocks of rows when a
// device fetches them (read_payload), so only a few blocks are in memory beside the result.
#pragma once

#include "load/model-file.h"

#include <string_view>

namespace macko {

// How llama.cpp uses a weight with a given name: enum ggml_macko_weight_use. Allocates nothing, so it cannot fail.
int weight_use(std::string_view name, int n_dims);

// Fills sparse and tensor_sparse_index of a dense model. The sparse weights are those multiplied weights of type F16,
// BF16 or F32 that are finite and need fewer bytes as MACKO; each gets the best delta_bits, as in `macko convert IN OUT
// macko`. A -0.0 counts as zero unless bit_exact. NOT_SPARSE if no weight qualifies. Reads each weight once; a second
// call for an unchanged file reuses the result of the first.
[[nodiscard]] int compress_weights(model_file * file, bool bit_exact);

} // namespace macko
