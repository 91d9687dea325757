// The products with weights in host memory that a GPU computes, and the work that it queues for them: cuda/graph with
// fake kernels, so no GPU is needed.
#include "abi/op-numbers.h"
#include "backend/host-weights.h"
#include "backend/offload.h"
#include "cuda-graphs.h"
#include "test.h"

using namespace macko;
using namespace macko::cuda;

namespace {

using names = std::vector<std::string>;

// ---- sparse weights in host memory ----

struct dense_call {
    const ggml_tensor * w;
    int64_t             begin, end;
};
std::vector<dense_call> dense_calls;
bool                    loaded = true;

const char *             buft_name(ggml_backend_buffer_type_t) { return "host"; }
ggml_backend_buffer_type host_buft = { { buft_name, nullptr, nullptr, nullptr, nullptr, nullptr }, nullptr, nullptr };
constexpr int64_t        ROW_STEP  = 128;
const host_weights       weights   = {
    &host_buft, [](const ggml_tensor *) { return loaded; }, [](const ggml_tensor *) { return ROW_STEP; },
    [](const ggml_tensor * w, int64_t begin, int64_t end, void *) { dense_calls.push_back({ w, begin, end }); }
};

struct host_graph : graph_builder {
    ggml_backend_buffer host = {};

    host_graph() {
        host.buft  = &host_buft;
        host.usage = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    }
    ggml_tensor * host_weight(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2 = 1) {
        ggml_tensor * t = input(type, ne0, ne1, ne2);
        t->buffer       = &host;
        note_host_weight(t);
        return t;
    }
    ggml_tensor * product(ggml_type type, int64_t ne0, int64_t ne1, int64_t n) {
        return ggml_mul_mat(ctx, host_weight(type, ne0, ne1), input(GGML_TYPE_F32, ne0, n));
    }
    ggml_tensor * experts(ggml_type type, int64_t ne0, int64_t ne1, int64_t n_experts, int64_t n_used, int64_t n) {
        return ggml_mul_mat_id(ctx, host_weight(type, ne0, ne1, n_experts), input(GGML_TYPE_F32, ne0, n_used, n),
                               input(GGML_TYPE_I32, n_used, n));
    }
    // Every node must be computed, in its own memory.
    void finish(ggml_tensor * result) {
        expand(result);
        for (int i = 0; i < graph->n_nodes; i++) {
            graph->nodes[i]->flags |= GGML_TENSOR_FLAG_COMPUTE;
        }
        place();
    }
};

constexpr size_t PANEL_NBYTES = size_t(1) << 20;

panel_buffers  panels;
host_staging * staging_address = reinterpret_cast<host_staging *>(64); // never read: its copy() is fake

op_context make_context() {
    op_context ctx;
    panels.nbytes    = PANEL_NBYTES;
    panels.staging   = staging_address;
    panels.n_threads = 3;
    ctx.panels       = &panels;
    return ctx;
}

cudaError_t enqueue(const op_context & ctx, const ggml_cgraph * graph, names * launches) {
    const ggml_tensor * failed = nullptr;
    fake::log.clear();
    dense_calls.clear();
    const cudaError_t error = graph_enqueue(ctx, graph, true, &failed);
    for (const fake::launch & launch : fake::log) {
        launches->push_back(launch.name);
    }
    return error;
}

// ---- the decision ----

TEST(the_least_batch_is_that_of_ggml) {
    CHECK(offload_min_columns(nullptr, false) == 32, "without a variable");
    CHECK(offload_min_columns("1", false) == 1, "1");
    CHECK(offload_min_columns("100", false) == 100, "100");
    CHECK(offload_min_columns(nullptr, true) == NEVER_OFFLOAD, "switched off");
    CHECK(offload_min_columns("1", true) == NEVER_OFFLOAD, "switched off, for any batch");
}

TEST(many_columns_of_large_matrices_pay) {
    CHECK(pays_to_offload({ { 4096, 4096 }, 1, 32 }, 32), "32 columns");
    CHECK(!pays_to_offload({ { 4096, 4096 }, 1, 31 }, 32), "31 columns");
    CHECK(!pays_to_offload({ { 4096, 4096 }, 1, 1 }, 32), "one token");
    CHECK(pays_to_offload({ { 256, 256 }, 1, 32 }, 32), "the smallest matrix");
    CHECK(!pays_to_offload({ { 255, 4096 }, 1, 512 }, 32), "few columns of the matrix");
    CHECK(!pays_to_offload({ { 4096, 255 }, 1, 512 }, 32), "few rows");
    CHECK(!pays_to_offload({ { 4096, 4096 }, 1, INT64_MAX }, NEVER_OFFLOAD), "switched off");
    // 8 experts, two per token: 128 tokens are 32 columns for each
    CHECK(pays_to_offload({ { 4096, 4096 }, 8, 256 }, 32), "experts of 32 columns");
    CHECK(!pays_to_offload({ { 4096, 4096 }, 8, 255 }, 32), "experts of less than 32 columns");
}

TEST(only_products_with_host_weights_are_taken) {
    host_graph b;
    set_offload_columns(NEVER_OFFLOAD);
    CHECK(!wants_offload(b.product(GGML_TYPE_F16, 256, 512, 512)), "no GPU is enabled");
    set_offload_columns(32);
    CHECK(wants_offload(b.product(GGML_TYPE_F16, 256, 512, 512)), "a prompt");
    CHECK(!wants_offload(b.product(GGML_TYPE_F16, 256, 512, 1)), "a token");
    CHECK(wants_offload(b.experts(GGML_TYPE_F16, 256, 512, 4, 2, 64)), "experts");
    CHECK(!wants_offload(b.experts(GGML_TYPE_F16, 256, 512, 4, 2, 63)), "experts with few tokens");
    ggml_tensor * x = b.input(GGML_TYPE_F32, 256, 512);
    CHECK(!wants_offload(ggml_mul_mat(b.ctx, b.dense_weight(GGML_TYPE_F16, 256, 512), x)), "a dense weight");
    CHECK(!wants_offload(ggml_mul_mat(b.ctx, b.sparse_weight("w", 256, 512), x)), "a weight on the GPU");
    CHECK(!wants_offload(b.product(GGML_TYPE_F32, 256, 512, 512)), "F32");
    CHECK(!wants_offload(b.host_weight(GGML_TYPE_F16, 256, 512)), "the weight itself");
    CHECK(!wants_offload(ggml_silu(b.ctx, x)), "another op");
}

TEST(columns_of_dense_ops_are_those_of_ggml) {
    host_graph    b;
    ggml_tensor * x = b.input(GGML_TYPE_F32, 256, 48);
    CHECK(offload_columns(ggml_mul_mat(b.ctx, b.dense_weight(GGML_TYPE_F16, 256, 512), x)) == 48, "MUL_MAT");
    CHECK(offload_columns(ggml_mul(b.ctx, x, b.dense_weight(GGML_TYPE_F32, 256))) == 48, "MUL");
    CHECK(offload_columns(b.experts(GGML_TYPE_F16, 256, 512, 4, 2, 40)) == 40, "MUL_MAT_ID");
    CHECK(offload_columns(ggml_get_rows(b.ctx, x, b.input(GGML_TYPE_I32, 40))) == 0, "GET_ROWS");
}

TEST(what_the_gpu_can_multiply) {
    host_graph b;
    const auto fits = [](const ggml_tensor * op, size_t nbytes = PANEL_NBYTES) {
        return graph_supports_host_weight(op, nbytes, 90);
    };
    CHECK(fits(b.product(GGML_TYPE_F16, 256, 512, 64)), "F16");
    CHECK(fits(b.product(GGML_TYPE_BF16, 256, 512, 64)), "BF16");
    CHECK(fits(b.experts(GGML_TYPE_F16, 256, 512, 4, 2, 64)), "experts");
    CHECK(!fits(b.product(GGML_TYPE_F32, 256, 512, 64)), "F32, for which only the sparse kernels are exact");
    CHECK(!fits(b.product(GGML_TYPE_F16, 256, 512, 64), 0), "no panels");
    CHECK(!fits(b.product(GGML_TYPE_F16, 1 << 20, 2, 64)), "a row that fits no panel");
    CHECK(!fits(b.product(GGML_TYPE_F16, 4 << 20, 2, 64), size_t(64) << 20),
          "a row that fits no piece of pinned memory");
    ggml_tensor * w = b.host_weight(GGML_TYPE_F16, 256, 512);
    CHECK(!fits(ggml_get_rows(b.ctx, w, b.input(GGML_TYPE_I32, 64))), "rows of the weight");
    ggml_tensor * part = ggml_view_2d(b.ctx, w, 256, 256, w->nb[1], 0);
    part->buffer       = w->buffer;
    CHECK(!fits(ggml_mul_mat(b.ctx, part, b.input(GGML_TYPE_F32, 256, 64))), "a view of the weight");
}

// ---- the queued work ----

TEST(panels_are_made_by_the_host_while_the_gpu_multiplies) {
    host_graph    b;
    ggml_tensor * x = b.input(GGML_TYPE_F32, 256, 64);
    ggml_tensor * k = b.host_weight(GGML_TYPE_F16, 256, 512);
    ggml_tensor * v = b.host_weight(GGML_TYPE_F16, 256, 512);
    b.expand(ggml_mul_mat(b.ctx, k, x));
    b.expand(ggml_mul_mat(b.ctx, b.sparse_weight("q", 256, 512), x));
    b.finish(ggml_mul_mat(b.ctx, v, x));
    names got;
    CHECK(graph_has_host_weights(b.graph), "the graph has host weights");
    CHECK(enqueue(make_context(), b.graph, &got) == cudaSuccess, "products of weights of both kinds");
    const names want = {
        "x16",    "record",    "wait",   "stage",                                      //
        "record", "densify q", "record", "wait",       "mul_mat_16", "record", "wait", //
        "stage",  "record",    "wait",   "mul_mat_16", "record",     "wait",   "mul_mat_16", "record"
    };
    CHECK(got == want, "launches differ");
    CHECK(dense_calls.size() == 2 && dense_calls[0].w == k && dense_calls[1].w == v && dense_calls[1].begin == 0 &&
              dense_calls[1].end == 512,
          "the host expanded other rows");
}

TEST(rows_of_a_panel_have_their_distance) {
    host_graph b;
    b.finish(b.product(GGML_TYPE_BF16, 260, 512, 64)); // 260 columns are 264 in a panel
    names got;
    CHECK(enqueue(make_context(), b.graph, &got) == cudaSuccess, "a product");
    for (const fake::launch & launch : fake::log) {
        if (launch.name == "stage") {
            CHECK(launch.params.find(" 520 528 512 128 3 ") != std::string::npos, "%s", launch.params.c_str());
        }
    }
}

TEST(large_weights_are_sent_in_panels) {
    host_graph b;
    b.finish(b.product(GGML_TYPE_F16, 1024, 1500, 64)); // 512 rows are 1 MiB
    names got;
    CHECK(enqueue(make_context(), b.graph, &got) == cudaSuccess, "a product");
    CHECK(dense_calls.size() == 3 && dense_calls[1].begin == 512 && dense_calls[2].end == 1500,
          "other panels: %d of them", static_cast<int>(dense_calls.size()));
}

TEST(experts_are_sent_together) {
    host_graph b;
    b.finish(b.experts(GGML_TYPE_F16, 256, 512, 4, 2, 64));
    names got;
    CHECK(enqueue(make_context(), b.graph, &got) == cudaSuccess, "experts");
    CHECK(dense_calls.size() == 1 && dense_calls[0].begin == 0 && dense_calls[0].end == 4 * 512, "rows of all experts");
    CHECK(std::count(got.begin(), got.end(), "mul_mat_id_16") == 1, "one product");
}

TEST(without_memory_the_graph_fails_and_the_gpu_lives) {
    host_graph b;
    b.finish(b.product(GGML_TYPE_F16, 256, 512, 64));
    op_context ctx = make_context();
    ctx.panels     = nullptr;
    names got;
    CHECK(enqueue(ctx, b.graph, &got) == cudaErrorMemoryAllocation, "a product without panels");
    host_graph e;
    e.finish(e.experts(GGML_TYPE_F16, 256, 512, 4, 2, 64));
    CHECK(enqueue(ctx, e.graph, &got) == cudaErrorMemoryAllocation, "experts without panels");
}

TEST(a_weight_that_was_not_read_fails) {
    host_graph b;
    b.finish(b.product(GGML_TYPE_F16, 256, 512, 64));
    loaded = false;
    names got;
    CHECK(enqueue(make_context(), b.graph, &got) == cudaErrorInvalidValue && dense_calls.empty(), "no payload");
    loaded = true;
}

TEST(the_largest_weight_decides_on_the_panels) {
    host_graph b;
    b.host_weight(GGML_TYPE_F16, 2048, 768, 32);
    CHECK(largest_host_weight() == size_t(32) << 20, "%zu bytes for several small experts", largest_host_weight());
    b.host_weight(GGML_TYPE_F16, 4097, 1 << 14);
    b.host_weight(GGML_TYPE_F16, 256, 256);
    b.host_weight(GGML_TYPE_F32, 4096, 1 << 20);
    CHECK(largest_host_weight() == size_t(4104 * 2) << 14, "%zu bytes", largest_host_weight());
}

} // namespace

int main(int argc, char ** argv) {
    if (const int code = begin_tests(argc, argv); code >= 0) {
        return code;
    }
    int last = 0;
    if (find_last_op(&last) || resolve_ops(last)) {
        fprintf(stderr, "%s\n", ggml_macko_last_error());
        return 1;
    }
    CHECK(largest_host_weight() == 0 && !host_weights_of(nullptr), "before any model");
    set_host_weights(&weights);
    run_tests();
    return test_summary("test-offload");
}
