#include "rpc/graph.h"
#include "abi/op-numbers.h"
#include "backend/log.h"

#include <algorithm>
#include <cstring>

namespace macko {

namespace {

bool is_product(const ggml_tensor * node) {
    return op_of(node) == GGML_OP_MUL_MAT || op_of(node) == GGML_OP_MUL_MAT_ID;
}

// Whether a product has the shapes of ggml_mul_mat or ggml_mul_mat_id and operands inside their buffers. Expert ids are
// checked when they are read.
bool is_sound_product(const ggml_tensor * dst, const rpc_place & place) {
    const ggml_tensor * w = dst->src[0];
    const ggml_tensor * x = dst->src[1];
    if (!place.weight || w->data != place.at || w->view_src || w->type != place.type ||
        memcmp(w->ne, place.ne, sizeof(place.ne)) != 0 || !rpc_is_f32(x) || !rpc_is_f32(dst) || x->ne[0] != w->ne[0] ||
        dst->ne[0] != w->ne[1] || !ggml_is_contiguous(dst)) {
        return false;
    }
    if (op_of(dst) == GGML_OP_MUL_MAT) {
        return dst->ne[1] == x->ne[1] && dst->ne[2] == x->ne[2] && dst->ne[3] == x->ne[3] && x->ne[2] % w->ne[2] == 0 &&
               x->ne[3] % w->ne[3] == 0;
    }
    const ggml_tensor * ids = dst->src[2];
    return w->ne[3] == 1 && ids && ids->type == GGML_TYPE_I32 && ids->nb[0] == sizeof(int32_t) &&
           rpc_lies_in_buffer(ids) && ids->ne[2] == 1 && ids->ne[3] == 1 && x->ne[3] == 1 && dst->ne[3] == 1 &&
           dst->ne[1] == ids->ne[0] && dst->ne[2] == ids->ne[1] && x->ne[2] == ids->ne[1] &&
           (x->ne[1] == 1 || x->ne[1] == ids->ne[0]);
}

// Whether a node reads or writes a weight's addresses, except through operands before src[first].
bool touches_place(const ggml_tensor * node, int first) {
    const auto is_at_place = [](const ggml_tensor * t) { return t && rpc_place_at(t); };
    return is_at_place(node) || std::any_of(node->src + first, node->src + GGML_MAX_SRC, is_at_place);
}

// Bytes from the first to the last element of a tensor; false if the result overflows.
bool extent(const ggml_tensor * tensor, size_t * nbytes) {
    *nbytes = ggml_row_size(tensor->type, tensor->ne[0]); // of a row; rows are contiguous
    for (int d = 1; d < GGML_MAX_DIMS; d++) {
        size_t stride = 0;
        if (!checked_mul(static_cast<size_t>(tensor->ne[d] - 1), tensor->nb[d], &stride) ||
            !checked_add(*nbytes, stride, nbytes)) {
            return false;
        }
    }
    return true;
}

// Name of a node's operation, or nullptr for a number without an operation.
const char * op_name(const ggml_tensor * node) {
    return op_number(node) <= static_cast<size_t>(running_op(GGML_OP_GLU)) ? ggml_op_name(node->op) : nullptr;
}

bool is_foreign(const ggml_tensor * node) {
    return op_of(node) == GGML_OP_COUNT && (!op_name(node) || strstr(op_name(node), "CUSTOM"));
}

} // namespace

size_t rpc_nbytes(const ggml_tensor * tensor) {
    size_t nbytes = 0;
    return extent(tensor, &nbytes) ? nbytes : 0;
}

bool rpc_lies_in_buffer(const ggml_tensor * tensor) {
    size_t nbytes = 0;
    if (!tensor->buffer || !tensor->data || ggml_is_empty(tensor) || !extent(tensor, &nbytes)) {
        return false;
    }
    const auto at   = reinterpret_cast<uintptr_t>(tensor->data);
    const auto base = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(tensor->buffer));
    const auto size = ggml_backend_buffer_get_size(tensor->buffer);
    return at >= base && at - base <= size && nbytes <= size - (at - base);
}

bool rpc_is_f32(const ggml_tensor * tensor) {
    constexpr size_t size = sizeof(float);
    return tensor && tensor->type == GGML_TYPE_F32 && tensor->nb[0] == size &&
           reinterpret_cast<uintptr_t>(tensor->data) % size == 0 && tensor->nb[1] % size == 0 &&
           tensor->nb[2] % size == 0 && tensor->nb[3] % size == 0 && rpc_lies_in_buffer(tensor);
}

rpc_verdict rpc_vet(const ggml_tensor * node) {
    if (!node) {
        return rpc_verdict::ABSENT;
    }
    if (ggml_is_empty(node) || ggml_op_is_empty(op_of(node)) || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) {
        return rpc_verdict::SKIPPED;
    }
    const ggml_tensor * w     = is_product(node) ? node->src[0] : nullptr;
    const rpc_place *   place = w ? rpc_place_at(w) : nullptr;
    if (place && is_sound_product(node, *place) && !touches_place(node, 1)) {
        return rpc_verdict::PRODUCT;
    }
    return touches_place(node, 0) ? rpc_verdict::REFUSED : is_foreign(node) ? rpc_verdict::FOREIGN : rpc_verdict::OTHER;
}

rpc_refusals::~rpc_refusals() {
    if (n_ > 1) {
        log_error("ggml-macko: and %d other nodes of that graph\n", n_ - 1);
    }
}

void rpc_refusals::add(const ggml_tensor * node, const char * why) {
    if (n_++ == 0) {
        log_error("ggml-macko: refused a node from an RPC client: %s (%s) %s\n", printable(node->name).text,
                  op_name(node) ? op_name(node) : "no operation", why);
    }
    rpc_memory * memory = rpc_memory_of(node->buffer);
    if (!memory || !rpc_is_f32(node) || rpc_place_at(node)) {
        return;
    }
    constexpr uint8_t NAN_BYTE = 0xff; // four such bytes are a NaN
    const size_t      nbytes   = static_cast<size_t>(node->ne[0]) * sizeof(float);
    if (ggml_is_contiguous(node)) {
        memory->fill(node->data, NAN_BYTE, ggml_nbytes(node));
        return;
    }
    for (int64_t r = 0; r < ggml_nrows(node); r++) {
        const int64_t i1 = r % node->ne[1], i2 = r / node->ne[1] % node->ne[2], i3 = r / (node->ne[1] * node->ne[2]);
        memory->fill(static_cast<char *>(node->data) + i1 * node->nb[1] + i2 * node->nb[2] + i3 * node->nb[3], NAN_BYTE,
                     nbytes);
    }
}

ggml_cgraph rpc_stretch(const ggml_cgraph * graph, int begin, int end) {
    ggml_cgraph part = *graph; // same as ggml_graph_view(), which no plugin header declares
    part.nodes += begin;
    part.n_nodes = end - begin;
    part.n_leafs = 0;
    part.uid     = 0;
    return part;
}

} // namespace macko
