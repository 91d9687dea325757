// An RPC server's handling of messages and graphs of a client, with a fake for the memory of a device (rpc/buffer.h,
// rpc/graph.h): the weights that exist at any time, and the nodes that may use them. tests/rpc/test_rpc_messages.py
// tests the devices.
#include "abi/op-numbers.h"
#include "gguf-builder.h"
#include "rpc/graph.h"
#include "rpc/message.h"
#include "test.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

using namespace macko;

namespace {

constexpr int64_t ROWS = 6, COLS = 64;
constexpr size_t  NBYTES = 1 << 16, DENSE = ROWS * COLS * 2, X_AT = 1 << 14, Y_AT = 1 << 15;

// ---- the fake ----

struct fake_memory : rpc_memory {
    std::vector<char>      bytes = std::vector<char>(NBYTES);
    std::set<rpc_weight *> weights; // existing weights
    bool                   full = false;

    struct fake_weight : rpc_weight {
        fake_memory & memory;
        explicit fake_weight(fake_memory & m) : memory(m) { memory.weights.insert(this); }
        ~fake_weight() override { memory.weights.erase(this); }
        void densify(size_t offset, void * data, size_t n) const override {
            CHECK(offset + n <= DENSE, "%zu bytes at %zu of a weight of %zu", n, offset, DENSE);
            memset(data, 'w', n);
        }
    };

    ~fake_memory() override { CHECK(weights.empty(), "%zu weights outlive their memory", weights.size()); }
    void check(const void * at, size_t n) const {
        const auto * p = static_cast<const char *>(at);
        CHECK(p >= bytes.data() && n <= NBYTES && p + n <= bytes.data() + NBYTES, "%zu bytes outside", n);
    }
    void * base() const override { return const_cast<char *>(bytes.data()); }
    void   write(void * at, const void * data, size_t n) override {
        check(at, n);
        memcpy(at, data, n);
    }
    void fill(void * at, uint8_t value, size_t n) override {
        check(at, n);
        memset(at, value, n);
    }
    void read(const void * at, void * data, size_t n) override {
        check(at, n);
        memcpy(data, at, n);
    }
    void copy(void * at, rpc_memory & from, const void * source, size_t n) override {
        check(at, n);
        static_cast<fake_memory &>(from).check(source, n);
        memmove(at, source, n);
    }
    void clear(uint8_t value) override { memset(bytes.data(), value, NBYTES); }
    int  make_weight(const received_file & file, std::unique_ptr<rpc_weight> * out) override {
        if (full) {
            return fail(GGML_MACKO_STATUS_OUT_OF_MEMORY, "%s: full", file.sparse[0].name.c_str());
        }
        *out = std::make_unique<fake_weight>(*this);
        return GGML_MACKO_STATUS_OK;
    }
};

// ---- a client ----

ggml_backend_buffer_type type = {}, other_type = {};

builder::bytes matrix_file() {
    std::mt19937_64 random(1);
    builder::model  m;
    const auto      data = builder::random_data(random, builder::TYPE_F16, ROWS * COLS, COLS, 0.3);
    m.dense.tensors.push_back({ "w", { COLS, ROWS }, builder::TYPE_F16, data, 0 });
    m.sparse.push_back({ "w", { COLS, ROWS }, builder::TYPE_F16, data });
    m.bits.push_back(4);
    return builder::serialize(builder::sparse_file(m));
}

struct client {
    ggml_backend_buffer_t buffer;
    fake_memory *         memory;
    ggml_context *        ctx;

    explicit client(ggml_backend_buffer_type_t buft = &type) {
        auto made = std::make_unique<fake_memory>();
        memory    = made.get();
        buffer    = rpc_buffer_init(buft, NBYTES, std::move(made));
        ctx       = ggml_init({ 64 * ggml_tensor_overhead(), nullptr, true });
    }
    ~client() {
        ggml_free(ctx);
        ggml_backend_buffer_free(buffer);
    }
    client(const client &) = delete;

    ggml_tensor * place(ggml_tensor * t, size_t at) {
        t->buffer = buffer;
        t->data   = static_cast<char *>(memory->base()) + at;
        t->flags |= GGML_TENSOR_FLAG_COMPUTE;
        return t;
    }
    ggml_tensor * bytes(size_t at, int64_t n) { return place(ggml_new_tensor_1d(ctx, GGML_TYPE_I8, n), at); }
    ggml_tensor * weight(size_t at, int64_t rows = ROWS) {
        return place(ggml_new_tensor_2d(ctx, GGML_TYPE_F16, COLS, rows), at);
    }
    ggml_tensor * floats(size_t at, int64_t ne0, int64_t ne1 = 1) {
        return place(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, ne0, ne1), at);
    }
    ggml_tensor * product(ggml_tensor * w) { return place(ggml_mul_mat(ctx, w, floats(X_AT, COLS, 2)), Y_AT); }

    int send(size_t at, const builder::bytes & file = matrix_file(), size_t step = 100) {
        const ggml_tensor * w = weight(at);
        for (size_t i = 0; i < file.size(); i += step) {
            const size_t n     = std::min(step, file.size() - i);
            rpc_message  chunk = rpc_make_message(rpc_kind::CHUNK);
            chunk.offset       = i;
            chunk.total        = file.size();
            ggml_tensor t      = rpc_message_tensor(w, chunk, n);
            buffer->iface.set_tensor(buffer, &t, file.data() + i, 0, n);
        }
        return result(at);
    }
    int result(size_t at) {
        rpc_result          r = {};
        const ggml_tensor * w = weight(at);
        ggml_tensor         t = rpc_message_tensor(w, rpc_make_message(rpc_kind::RESULT), sizeof(r));
        buffer->iface.get_tensor(buffer, &t, &r, 0, sizeof(r));
        return r.status;
    }
    std::string read(size_t at, size_t n) {
        std::string out(n, 0);
        buffer->iface.get_tensor(buffer, bytes(at, static_cast<int64_t>(n)), out.data(), 0, n);
        return out;
    }
};

// ---- weights ----

TEST(weight_is_read_and_its_place_is_left_alone) {
    client c;
    CHECK(c.send(512) == GGML_MACKO_STATUS_OK, "refused: %s", ggml_macko_last_error());
    CHECK(c.memory->weights.size() == 1, "%zu weights", c.memory->weights.size());
    CHECK(c.memory->bytes == std::vector<char>(NBYTES), "the weight's address range was written");
    CHECK(c.read(512, DENSE) == std::string(DENSE, 'w'), "not the weight's elements");
    CHECK(c.read(512 + DENSE - 2, 4) == std::string("ww\0\0", 4), "not the bytes behind it");
}

TEST(what_overwrites_a_weight_drops_it) {
    const char byte = 'x';
    for (const size_t at : { size_t(512), 512 + DENSE - 1 }) {
        for (int how = 0; how < 4; how++) {
            client c, source;
            CHECK(c.send(512) == GGML_MACKO_STATUS_OK, "refused");
            ggml_tensor * t = c.bytes(at, 1);
            switch (how) {
                case 0:  c.buffer->iface.set_tensor(c.buffer, t, &byte, 0, 1); break;
                case 1:  c.buffer->iface.memset_tensor(c.buffer, t, 'x', 0, 1); break;
                case 2:  CHECK(c.buffer->iface.cpy_tensor(c.buffer, source.bytes(0, 1), t), "no copy"); break;
                default: c.buffer->iface.clear(c.buffer, 'x'); break;
            }
            CHECK(c.memory->weights.empty(), "the weight still exists after write %d", how);
            CHECK(c.result(512) != GGML_MACKO_STATUS_OK, "write %d: the weight has a result", how);
        }
    }
}

TEST(what_lies_beside_a_weight_does_not) {
    client c;
    CHECK(c.send(512) == GGML_MACKO_STATUS_OK, "refused");
    c.buffer->iface.set_tensor(c.buffer, c.bytes(511, 1), "x", 0, 1);
    c.buffer->iface.set_tensor(c.buffer, c.bytes(512 + DENSE, 1), "x", 0, 1);
    CHECK(c.memory->weights.size() == 1 && c.result(512) == GGML_MACKO_STATUS_OK, "the weight is gone");
}

TEST(sparse_and_foreign_sources_are_not_copied) {
    client c, other(&other_type);
    CHECK(c.send(512) == GGML_MACKO_STATUS_OK, "refused");
    CHECK(!c.buffer->iface.cpy_tensor(c.buffer, c.weight(512), c.weight(8192)), "a weight was copied");
    CHECK(!c.buffer->iface.cpy_tensor(c.buffer, other.bytes(0, 1), c.bytes(0, 1)), "a foreign buffer was read");
}

TEST(refused_weight_is_no_weight) {
    client c;
    c.memory->full = true;
    CHECK(c.send(512) == GGML_MACKO_STATUS_OUT_OF_MEMORY, "status %d", c.result(512));
    CHECK(rpc_vet(c.product(c.weight(512))) == rpc_verdict::REFUSED, "its product is computed");
    c.memory->full = false;
    CHECK(c.send(512) == GGML_MACKO_STATUS_OK, "refused again");
    builder::bytes file = matrix_file();
    file.resize(file.size() - 1);
    CHECK(c.send(512, file) != GGML_MACKO_STATUS_OK && c.memory->weights.empty(), "a truncated file became a weight");
}

TEST(weights_lie_in_the_buffer_and_apart) {
    client c;
    CHECK(c.send(NBYTES - DENSE) == GGML_MACKO_STATUS_OK, "refused at the end");
    CHECK(c.send(NBYTES - DENSE - 64) != GGML_MACKO_STATUS_OK, "overlaps the next one");
    CHECK(c.memory->weights.size() == 1, "%zu weights", c.memory->weights.size());
    CHECK(c.send(NBYTES - DENSE + 64) != GGML_MACKO_STATUS_OK, "reaches past the end");
}

// ---- graphs ----

TEST(only_the_exact_product_is_computed) {
    client c;
    CHECK(c.send(512) == GGML_MACKO_STATUS_OK && c.send(4096) == GGML_MACKO_STATUS_OK, "refused");
    CHECK(rpc_vet(c.product(c.weight(512))) == rpc_verdict::PRODUCT, "the product is refused");
    CHECK(rpc_vet(c.product(c.weight(512, ROWS - 1))) == rpc_verdict::REFUSED, "fewer rows");
    CHECK(rpc_vet(c.product(c.weight(512 + 128, ROWS - 2))) == rpc_verdict::REFUSED, "some of its rows");
    CHECK(rpc_vet(c.product(c.weight(8192))) == rpc_verdict::OTHER, "a dense product was changed");
    CHECK(rpc_vet(c.place(ggml_cont(c.ctx, c.weight(512)), Y_AT)) == rpc_verdict::REFUSED, "a copy of the weight");
    CHECK(rpc_vet(c.place(ggml_scale(c.ctx, c.floats(X_AT, 8), 2), 512)) == rpc_verdict::REFUSED, "a result there");

    ggml_tensor * y = c.product(c.weight(512));
    c.place(y->src[1], 4096);
    CHECK(rpc_vet(y) == rpc_verdict::REFUSED, "the other factor overlaps a weight");
    y = c.product(c.weight(512));
    c.place(y, 4096);
    CHECK(rpc_vet(y) == rpc_verdict::REFUSED, "the result overlaps a weight");
    y = c.product(c.weight(512));
    c.place(y->src[1], NBYTES - 64);
    CHECK(rpc_vet(y) == rpc_verdict::REFUSED, "the other factor ends outside");
    y                = c.product(c.weight(512));
    y->src[1]->nb[1] = size_t(1) << 63;
    CHECK(rpc_vet(y) == rpc_verdict::REFUSED, "strides overflow");
}

TEST(strange_nodes_are_vetted) {
    client c;
    CHECK(c.send(512) == GGML_MACKO_STATUS_OK, "refused");
    CHECK(rpc_vet(nullptr) == rpc_verdict::ABSENT, "no node");
    ggml_tensor * y = c.product(c.weight(512));
    y->flags        = 0;
    CHECK(rpc_vet(y) == rpc_verdict::SKIPPED, "a node that is switched off");
    y->flags              = GGML_TENSOR_FLAG_COMPUTE;
    const unsigned number = 12345;
    memcpy(&y->op, &number, sizeof(number));
    y->src[3] = y; // a cycle
    CHECK(rpc_vet(y) == rpc_verdict::REFUSED, "an operation that does not exist");
    rpc_refusals().add(y, RPC_NEEDS_WEIGHT);
    y->src[0] = nullptr;
    CHECK(rpc_vet(y) == rpc_verdict::FOREIGN, "the same without a sparse operand");
    ggml_tensor * x = c.floats(X_AT, COLS);
    CHECK(rpc_vet(c.place(ggml_norm(c.ctx, x, 1e-5f), Y_AT)) == rpc_verdict::OTHER, "a norm");
    const auto call = [](ggml_tensor *, const ggml_tensor *, int, int, void *) {};
    CHECK(rpc_vet(c.place(ggml_map_custom1(c.ctx, x, call, 1, nullptr), Y_AT)) == rpc_verdict::FOREIGN,
          "the function of a client is called");
}

TEST(refused_results_are_nan_and_nothing_else_is) {
    client c;
    c.buffer->iface.clear(c.buffer, 0);
    ggml_tensor * y = c.floats(Y_AT, 4, 3);
    y->nb[1]        = 32; // rows with gaps
    y->nb[2] = y->nb[3] = 96;
    rpc_refusals().add(y, RPC_NEEDS_WEIGHT);
    const auto * f = reinterpret_cast<const float *>(c.memory->bytes.data() + Y_AT);
    for (int i = 0; i < 24; i++) {
        CHECK(std::isnan(f[i]) == (i % 8 < 4), "float %d is %g", i, static_cast<double>(f[i]));
    }
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
    run_tests();
    return test_summary("test-rpc-server");
}
