// Dense matrix to the canonical MACKO arrays. Arguments were checked by the caller (capi.cpp).
#pragma once

#include "format/macko.h"

namespace macko {

[[nodiscard]] int count_dense(const void * dense, int32_t type, int64_t rows, int64_t cols, int n_threads, ggml_macko_count * count);
// m's arrays have the sizes that follow from its counts; BAD_ARGUMENT if the counts are not those of dense
[[nodiscard]] int encode(const void * dense, const ggml_macko_matrix & m, int n_threads);

} // namespace macko
