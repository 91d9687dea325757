// A probe is an object whose words are addresses of functions, and each function records the index of its word. The
// running ggml can call any word as a callback. If it returns a word as a plain member, the address reveals the index
// of the word.
#include "abi/struct-check.h"
#include "abi/buffer-type.h"
#include "abi/context.h"
#include "platform/platform.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

namespace macko {

namespace {

constexpr size_t N_WORDS = 64; // more than any ggml object used here has, in any version

size_t called = N_WORDS;

// Result of every callback: a name, a non-zero size, an address, and "true" in its lowest byte.
alignas(256) char answer[512] = "\0probe";

using word = void * (*)();

template <size_t I> void * callback() {
    called = I;
    return answer + 1;
}

template <size_t... I> constexpr std::array<word, sizeof...(I)> all_callbacks(std::index_sequence<I...>) {
    return { { callback<I>... } };
}

// OBJECT: a struct of ggml
template <typename OBJECT> struct probe {
    std::array<word, N_WORDS> words = all_callbacks(std::make_index_sequence<N_WORDS>());
    static_assert(sizeof(OBJECT) < sizeof(words), "a callback after the object must still be a word of the probe");

    OBJECT * get() { return reinterpret_cast<OBJECT *>(words.data()); }
    // Value of a member of type T at an offset.
    template <typename T> T at(size_t offset) const {
        T value;
        memcpy(&value, reinterpret_cast<const char *>(words.data()) + offset, sizeof(value));
        return value;
    }
};

bool was_called(size_t offset) {
    const bool same = called * sizeof(word) == offset;
    called          = N_WORDS;
    return same;
}

// Returns the member's name from the enclosing function if `call` invokes a different callback.
#define CHECK_CALLBACK(object, member, call)         \
    do {                                             \
        static_cast<void>(call);                     \
        if (!was_called(offsetof(object, member))) { \
            return #object "." #member;              \
        }                                            \
    } while (0)

// Returns the member's name from the enclosing function if `value` differs from the member in probe p.
#define CHECK_VALUE(p, object, member, value)                                        \
    do {                                                                             \
        if ((value) != (p).at<decltype(object::member)>(offsetof(object, member))) { \
            return #object "." #member;                                              \
        }                                                                            \
    } while (0)

#define CHECK_MEMBER(object, member, condition) \
    do {                                        \
        if (!(condition)) {                     \
            return #object "." #member;         \
        }                                       \
    } while (0)

// ---- tensors and graphs ----

constexpr size_t GRAPH_SIZE = 8;

const char * check_tensor(ggml_context * ctx) {
    const size_t before = ggml_used_mem(ctx);
    ggml_new_buffer(ctx, GGML_MEM_ALIGN);
    const size_t object = ggml_used_mem(ctx) - before - GGML_MEM_ALIGN;
    if (ggml_tensor_overhead() != object + sizeof(ggml_tensor)) {
        return "sizeof(ggml_tensor)";
    }
    ggml_tensor * a = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 32, 3);
    CHECK_MEMBER(ggml_tensor, name, ggml_get_name(a) == a->name);
    CHECK_MEMBER(ggml_tensor, type, a->type == GGML_TYPE_F16);
    CHECK_MEMBER(ggml_tensor, ne, a->ne[0] == 32 && a->ne[1] == 3 && a->ne[2] == 1 && a->ne[3] == 1);
    CHECK_MEMBER(ggml_tensor, nb, a->nb[0] == 2 && a->nb[1] == 64 && a->nb[2] == 192 && a->nb[3] == 192);
    CHECK_MEMBER(ggml_tensor, data, (a->data = answer) == ggml_get_data(a));
    ggml_set_output(a);
    CHECK_MEMBER(ggml_tensor, flags, a->flags == GGML_TENSOR_FLAG_OUTPUT);
    const ggml_tensor * view = ggml_view_1d(ctx, a, 2, 4);
    CHECK_MEMBER(ggml_tensor, view_src, view->view_src == a);
    CHECK_MEMBER(ggml_tensor, view_offs, view->view_offs == 4);
    const float         eps = 0.25f;
    const ggml_tensor * x   = ggml_rms_norm(ctx, ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 32), eps);
    CHECK_MEMBER(ggml_tensor, op_params, memcmp(x->op_params, &eps, sizeof(eps)) == 0);
    CHECK_MEMBER(ggml_tensor, op, strcmp(ggml_op_name(x->op), "RMS_NORM") == 0);
    const ggml_tensor * product = ggml_mul_mat(ctx, a, const_cast<ggml_tensor *>(x));
    CHECK_MEMBER(ggml_tensor, src, product->src[0] == a && product->src[1] == x && !product->src[2]);
    CHECK_MEMBER(ggml_tensor, op, strcmp(ggml_op_name(product->op), "MUL_MAT") == 0);
    return nullptr;
}

const char * check_graph(ggml_context * ctx) {
    ggml_tensor * a     = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 4);
    ggml_tensor * sum   = ggml_add(ctx, a, a);
    ggml_tensor * last  = ggml_mul(ctx, sum, sum);
    ggml_cgraph * graph = ggml_new_graph_custom(ctx, GRAPH_SIZE, false);
    ggml_build_forward_expand(graph, last);
    CHECK_MEMBER(ggml_cgraph, size,
                 graph->size == static_cast<int>(GRAPH_SIZE) && ggml_graph_size(graph) == graph->size);
    CHECK_MEMBER(ggml_cgraph, n_nodes, graph->n_nodes == 2 && ggml_graph_n_nodes(graph) == 2);
    CHECK_MEMBER(ggml_cgraph, n_leafs, graph->n_leafs == 1);
    CHECK_MEMBER(ggml_cgraph, nodes, ggml_graph_nodes(graph) == graph->nodes);
    const auto in_context = [&](const void * p) {
        const char * begin = static_cast<const char *>(ggml_get_mem_buffer(ctx));
        return p >= begin && p < begin + ggml_get_mem_size(ctx);
    };
    // ggml places a graph's arrays directly after the struct, so the address of the first array reveals its size
    if (reinterpret_cast<const char *>(graph->nodes) != reinterpret_cast<const char *>(graph) + sizeof(ggml_cgraph)) {
        return "sizeof(ggml_cgraph)";
    }
    CHECK_MEMBER(ggml_cgraph, leafs, in_context(graph->leafs) && graph->leafs[0] == a);
    CHECK_MEMBER(ggml_cgraph, use_counts, in_context(graph->use_counts));
    const ggml_hash_set & set = graph->visited_hash_set;
    CHECK_MEMBER(ggml_cgraph, visited_hash_set, in_context(set.keys) && in_context(set.used) && set.size >= GRAPH_SIZE);
    CHECK_MEMBER(ggml_cgraph, visited_hash_set,
                 static_cast<const void *>(set.keys + set.size) == static_cast<const void *>(set.used));
    CHECK_MEMBER(ggml_cgraph, use_counts, ggml_node_get_use_count(graph, 0) == 2);
    CHECK_MEMBER(ggml_cgraph, uid, graph->uid == 0);
    return nullptr;
}

// ---- buffers ----

// Functions on several tensors, which newer versions export, and then also have in the struct.
template <typename RESULT> using of_tensors = RESULT (*)(ggml_backend_buffer_type_t, ggml_tensor **, int);
template <typename RESULT> of_tensors<RESULT> find_of_tensors(const char * name) {
    return reinterpret_cast<of_tensors<RESULT>>(platform::find_function("ggml-base", name));
}

// Returns the member's name from the enclosing function unless `call` invokes the word at `place`.
#define FIND_CALLBACK(member, place, call)                    \
    do {                                                      \
        static_cast<void>(call);                              \
        if (!was_called((place) * sizeof(word))) {            \
            return "ggml_backend_buffer_type.iface." #member; \
        }                                                     \
    } while (0)

// Finds the places of all functions, in the order of the struct.
const char * find_buffer_type_layout(ggml_tensor * t) {
    probe<ggml_backend_buffer_type> p;
    ggml_backend_buffer_type_t      b     = p.get();
    size_t                          place = 2;
    CHECK_CALLBACK(ggml_backend_buffer_type, iface.get_name, ggml_backend_buft_name(b));
    CHECK_CALLBACK(ggml_backend_buffer_type, iface.alloc_buffer, ggml_backend_buft_alloc_buffer(b, 64));
    if (const auto alloc = find_of_tensors<ggml_backend_buffer_t>("ggml_backend_buft_alloc_buffer_n")) {
        FIND_CALLBACK(alloc_buffer_n, place++, alloc(b, &t, 1));
    }
    running_buffer_type.get_alignment = place++;
    FIND_CALLBACK(get_alignment, running_buffer_type.get_alignment, ggml_backend_buft_get_alignment(b));
    FIND_CALLBACK(get_max_size, place++, ggml_backend_buft_get_max_size(b));
    running_buffer_type.get_alloc_size = place++;
    FIND_CALLBACK(get_alloc_size, running_buffer_type.get_alloc_size, ggml_backend_buft_get_alloc_size(b, t));
    if (const auto get_size = find_of_tensors<size_t>("ggml_backend_buft_get_alloc_size_n")) {
        FIND_CALLBACK(get_alloc_size_n, place++, get_size(b, &t, 1));
    }
    running_buffer_type.is_host = place++;
    FIND_CALLBACK(is_host, running_buffer_type.is_host, ggml_backend_buft_is_host(b));
    running_buffer_type.device = place;
    CHECK_MEMBER(ggml_backend_buffer_type, device,
                 ggml_backend_buft_get_device(b) == p.at<ggml_backend_dev_t>(place * sizeof(word)));
    return nullptr;
}

const char * check_buffer(ggml_tensor * t) {
    probe<ggml_backend_buffer> p;
    ggml_backend_buffer_t      b = p.get();
    CHECK_CALLBACK(ggml_backend_buffer, iface.clear, ggml_backend_buffer_clear(b, 0));
    CHECK_CALLBACK(ggml_backend_buffer, iface.reset, ggml_backend_buffer_reset(b));
    CHECK_CALLBACK(ggml_backend_buffer, iface.get_base, ggml_backend_buffer_get_base(b));
    CHECK_CALLBACK(ggml_backend_buffer, iface.init_tensor, ggml_backend_buffer_init_tensor(b, t));
    CHECK_VALUE(p, ggml_backend_buffer, buft, ggml_backend_buffer_get_type(b));
    CHECK_VALUE(p, ggml_backend_buffer, size, ggml_backend_buffer_get_size(b));
    CHECK_VALUE(p, ggml_backend_buffer, usage, ggml_backend_buffer_get_usage(b));
    uint8_t bytes[4] = {};
    t->buffer        = b;
    CHECK_CALLBACK(ggml_backend_buffer, iface.set_tensor, ggml_backend_tensor_set(t, bytes, 0, sizeof(bytes)));
    CHECK_CALLBACK(ggml_backend_buffer, iface.get_tensor, ggml_backend_tensor_get(t, bytes, 0, sizeof(bytes)));
    CHECK_CALLBACK(ggml_backend_buffer, iface.memset_tensor, ggml_backend_tensor_memset(t, 0, 0, sizeof(bytes)));
    CHECK_CALLBACK(ggml_backend_buffer, iface.cpy_tensor, ggml_backend_buffer_copy_tensor(t, t));
    t->buffer = nullptr;
    // ggml makes this buffer, as it does for each of our buffers
    probe<ggml_backend_buffer_type> type;
    const ggml_backend_buffer_i     iface = b->iface;
    ggml_backend_buffer_t           made  = ggml_backend_buffer_init(type.get(), iface, answer, sizeof(answer));
    const bool same = made->buft == type.get() && made->context == answer && made->size == sizeof(answer) &&
                      memcmp(&made->iface, &iface, sizeof(iface)) == 0;
    CHECK_CALLBACK(ggml_backend_buffer, iface.free_buffer, ggml_backend_buffer_free(made));
    CHECK_MEMBER(ggml_backend_buffer, context, same);
    return nullptr;
}

// ---- backends ----

const char * check_backend(ggml_tensor * t, ggml_cgraph * graph) {
    probe<ggml_backend> p;
    ggml_backend_t      b = p.get();
    CHECK_VALUE(p, ggml_backend, guid, ggml_backend_guid(b));
    CHECK_CALLBACK(ggml_backend, iface.get_name, ggml_backend_name(b));
    CHECK_CALLBACK(ggml_backend, iface.free, ggml_backend_free(b));
    uint8_t bytes[4] = {};
    CHECK_CALLBACK(ggml_backend, iface.set_tensor_async, ggml_backend_tensor_set_async(b, t, bytes, 0, sizeof(bytes)));
    CHECK_CALLBACK(ggml_backend, iface.get_tensor_async, ggml_backend_tensor_get_async(b, t, bytes, 0, sizeof(bytes)));
    CHECK_CALLBACK(ggml_backend, iface.synchronize, ggml_backend_synchronize(b));
    CHECK_CALLBACK(ggml_backend, iface.graph_plan_create, ggml_backend_graph_plan_create(b, graph));
    CHECK_CALLBACK(ggml_backend, iface.graph_plan_free, ggml_backend_graph_plan_free(b, answer));
    CHECK_CALLBACK(ggml_backend, iface.graph_plan_compute, ggml_backend_graph_plan_compute(b, answer));
    CHECK_CALLBACK(ggml_backend, iface.graph_compute, ggml_backend_graph_compute_async(b, graph));
    probe<ggml_backend_event> event;
    CHECK_CALLBACK(ggml_backend, iface.event_record, ggml_backend_event_record(event.get(), b));
    CHECK_CALLBACK(ggml_backend, iface.event_wait, ggml_backend_event_wait(b, event.get()));
    // no exported function calls graph_optimize, which lies between event_wait and this member
    CHECK_VALUE(p, ggml_backend, device, ggml_backend_get_device(b));
    return nullptr;
}

const char * check_device_properties() {
    probe<ggml_backend_device> p;
    uint8_t                    bytes[4 * sizeof(ggml_backend_dev_props)];
    memset(bytes, 0xa5, sizeof(bytes));
    // ggml clears the properties before it requests them
    CHECK_CALLBACK(ggml_backend_device, iface.get_props,
                   ggml_backend_dev_get_props(p.get(), reinterpret_cast<ggml_backend_dev_props *>(bytes)));
    size_t n = 0;
    while (n < sizeof(bytes) && bytes[n] == 0) {
        n++;
    }
    return n == sizeof(ggml_backend_dev_props) ? nullptr : "sizeof(ggml_backend_dev_props)";
}

const char * check_device(const ggml_tensor * t) {
    probe<ggml_backend_device> p;
    ggml_backend_dev_t         d = p.get();
    size_t                     free, total;
    CHECK_CALLBACK(ggml_backend_device, iface.get_name, ggml_backend_dev_name(d));
    CHECK_CALLBACK(ggml_backend_device, iface.get_description, ggml_backend_dev_description(d));
    CHECK_CALLBACK(ggml_backend_device, iface.get_memory, ggml_backend_dev_memory(d, &free, &total));
    CHECK_CALLBACK(ggml_backend_device, iface.get_type, ggml_backend_dev_type(d));
    CHECK_CALLBACK(ggml_backend_device, iface.init_backend, ggml_backend_dev_init(d, nullptr));
    CHECK_CALLBACK(ggml_backend_device, iface.get_buffer_type, ggml_backend_dev_buffer_type(d));
    CHECK_CALLBACK(ggml_backend_device, iface.get_host_buffer_type, ggml_backend_dev_host_buffer_type(d));
    CHECK_CALLBACK(ggml_backend_device, iface.buffer_from_host_ptr,
                   ggml_backend_dev_buffer_from_host_ptr(d, answer, sizeof(answer), sizeof(answer)));
    CHECK_CALLBACK(ggml_backend_device, iface.supports_op, ggml_backend_dev_supports_op(d, t));
    probe<ggml_backend_buffer_type> type;
    CHECK_CALLBACK(ggml_backend_device, iface.supports_buft, ggml_backend_dev_supports_buft(d, type.get()));
    CHECK_CALLBACK(ggml_backend_device, iface.offload_op, ggml_backend_dev_offload_op(d, t));
    CHECK_CALLBACK(ggml_backend_device, iface.event_new, ggml_backend_event_new(d));
    ggml_backend_event event = { d, nullptr };
    CHECK_CALLBACK(ggml_backend_device, iface.event_free, ggml_backend_event_free(&event));
    CHECK_CALLBACK(ggml_backend_device, iface.event_synchronize, ggml_backend_event_synchronize(&event));
    CHECK_VALUE(p, ggml_backend_device, reg, ggml_backend_dev_backend_reg(d));
    return check_device_properties();
}

const char * check_registry() {
    probe<ggml_backend_reg> p;
    ggml_backend_reg_t      r = p.get();
    CHECK_CALLBACK(ggml_backend_reg, iface.get_name, ggml_backend_reg_name(r));
    CHECK_CALLBACK(ggml_backend_reg, iface.get_device_count, ggml_backend_reg_dev_count(r));
    CHECK_CALLBACK(ggml_backend_reg, iface.get_device, ggml_backend_reg_dev_get(r, 0));
    CHECK_CALLBACK(ggml_backend_reg, iface.get_proc_address, ggml_backend_reg_get_proc_address(r, ""));
    return nullptr;
}

} // namespace

const char * first_different_member() {
    const context ctx = make_context(16, ggml_graph_overhead_custom(GRAPH_SIZE, false) + 1024);
    if (!ctx) {
        return "ggml_init, which returned null";
    }
    const char * different = check_tensor(ctx.get());
    different              = different ? different : check_graph(ctx.get());
    if (different) {
        return different;
    }
    ggml_tensor * t     = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, 4);
    t->data             = answer;
    ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), 1, false);
    different           = find_buffer_type_layout(t);
    different           = different ? different : check_buffer(t);
    different           = different ? different : check_backend(t, graph);
    different           = different ? different : check_device(t);
    return different ? different : check_registry();
}

} // namespace macko
