#include "backend/offload.h"
#include "abi/op-numbers.h"
#include "backend/host-weights.h"

#include <atomic>

namespace macko {

static std::atomic<int64_t> min_columns{ NEVER_OFFLOAD };

void set_offload_columns(int64_t n) { min_columns = n; }

int64_t offload_columns_in_use() { return min_columns; }

int64_t offload_columns(const ggml_tensor * op) {
    switch (op_of(op)) {
        case GGML_OP_GET_ROWS:   return 0; // reads few of the rows
        case GGML_OP_MUL_MAT:    return op->ne[1];
        case GGML_OP_MUL_MAT_ID: return op->ne[2];
        default:                 return ggml_nrows(op);
    }
}

bool wants_offload(const ggml_tensor * op) {
    const ggml_tensor * w          = op->src[0];
    const bool          is_product = op_of(op) == GGML_OP_MUL_MAT || op_of(op) == GGML_OP_MUL_MAT_ID;
    if (!is_product || !host_weights_of(w) || w->type == GGML_TYPE_F32) { // only sparse kernels are exact for F32
        return false;
    }
    // with several matrices: an expert gets its share of the columns, and each stacked matrix has columns of its own
    return pays_to_offload({ { w->ne[0], w->ne[1] }, w->ne[2] * w->ne[3], ggml_nrows(op) }, min_columns);
}

} // namespace macko
