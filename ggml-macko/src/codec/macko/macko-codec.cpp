// The registry entry of MACKO (FORMAT.md section 3).
#include "codec/macko/encode.h"
#include "codec/macko/matrix-view.h"
#include "codec/team.h"

#include <algorithm>
#include <atomic>
#include <string>

namespace macko {

// ---- a matrix in memory ----

macko_matrix_view::macko_matrix_view() : codec_view(macko_codec()) {}

int open_macko(const ggml_macko_matrix & m, macko_matrix_view * view) {
    const macko_desc desc     = rows_desc(macko_codec(), m);
    const int64_t    n_values = array_length(m.arrays[MACKO_VALUES]), n_row_ptr = array_length(m.arrays[MACKO_ROW_PTR]);
    const int64_t    n_deltas = m.arrays[MACKO_DELTAS].nbytes;
    const auto *     row_ptr  = static_cast<const int32_t *>(m.arrays[MACKO_ROW_PTR].data);
    const auto *     deltas   = static_cast<const uint8_t *>(m.arrays[MACKO_DELTAS].data);
    if (n_row_ptr != desc.rows + 1) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "row_ptr has %lld elements, not %lld",
                    static_cast<long long>(n_row_ptr), static_cast<long long>(desc.rows + 1));
    }
    if (n_values < 8 || n_values > n_padded(MAX_STORED) || n_deltas != deltas_nbytes(n_values, desc.delta_bits)) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%lld values with %lld bytes of deltas",
                    static_cast<long long>(n_values), static_cast<long long>(n_deltas));
    }
    TRY(check_row_ptr(desc, row_ptr, n_values));
    TRY(check_padding(desc, row_ptr[desc.rows], m.arrays[MACKO_VALUES].data, deltas, 0, n_values, n_deltas));
    view->desc_    = desc;
    view->row_ptr_ = row_ptr;
    view->values_  = m.arrays[MACKO_VALUES].data;
    view->deltas_  = deltas;
    return GGML_MACKO_STATUS_OK;
}

int macko_matrix_view::for_each_range(int n_threads, const std::function<int(const macko_view &)> & f) const {
    std::vector<int>         status(static_cast<size_t>(n_threads), GGML_MACKO_STATUS_OK);
    std::vector<std::string> text(static_cast<size_t>(n_threads)); // messages belong to threads: copy them
    std::atomic<int64_t>     nnz{ 0 };
    parallel_parts(n_threads, n_threads, 1, [&](int64_t t, int64_t, int) {
        const macko_rows rows = {
            desc_, desc_.rows * t / n_threads, desc_.rows * (t + 1) / n_threads, row_ptr_, 0, values_, deltas_
        };
        int & result = status[static_cast<size_t>(t)];
        result       = c_boundary([&]() -> int {
            macko_view view;
            const int  bad = validate(rows, &view);
            nnz += view.nnz();
            return bad ? bad : f(view);
        });
        if (result) {
            text[static_cast<size_t>(t)] = ggml_macko_last_error();
        }
    });
    for (size_t t = 0; t < status.size(); t++) {
        if (status[t]) {
            return fail(status[t], "%s", text[t].c_str());
        }
    }
    if (nnz != desc_.nnz) {
        return fail(GGML_MACKO_STATUS_BAD_NNZ, "%lld non-zeros, but nnz is %lld", static_cast<long long>(nnz),
                    static_cast<long long>(desc_.nnz));
    }
    return GGML_MACKO_STATUS_OK;
}

int macko_matrix_view::check_rows(int n_threads) const {
    return for_each_range(n_threads, [](const macko_view &) { return 0; });
}

int macko_matrix_view::for_each_row(int n_threads, const std::function<void(int64_t, const void *)> & f) const {
    return for_each_range(n_threads, [&](const macko_view & view) {
        std::vector<uint8_t> row(static_cast<size_t>(desc_.cols * value_nbytes(desc_.type)));
        for (int64_t r = view.rows().row_begin; r < view.rows().row_end; r++) {
            macko_rows one = view.rows();
            one.row_begin  = r;
            one.row_end    = r + 1;
            macko_view single;
            TRY(validate(one, &single));
            macko::decode(single, row.data());
            f(r, row.data());
        }
        return static_cast<int>(GGML_MACKO_STATUS_OK);
    });
}

int macko_matrix_view::decode(void * dense, int n_threads) const {
    return for_each_range(n_threads, [&](const macko_view & view) {
        macko::decode(view,
                      static_cast<uint8_t *>(dense) + view.rows().row_begin * desc_.cols * value_nbytes(desc_.type));
        return 0;
    });
}

// ---- the format ----

namespace {

class encoded_macko : public encoded_matrix {
public:
    macko_matrix arrays;

    ggml_macko_matrix matrix() const override {
        const macko_desc & d    = arrays.desc;
        const int64_t      n    = n_padded(arrays.row_ptr.back());
        ggml_macko_matrix  m    = describe(d, d.type, d.delta_bits, 3);
        m.arrays[MACKO_VALUES]  = { arrays.values.data(), n * value_nbytes(d.type), d.type };
        m.arrays[MACKO_DELTAS]  = { arrays.deltas.data(), deltas_nbytes(n, d.delta_bits), GGML_MACKO_TYPE_I8 };
        m.arrays[MACKO_ROW_PTR] = whole(arrays.row_ptr, GGML_MACKO_TYPE_I32);
        return m;
    }
};

class macko_format final : public codec {
public:
    macko_format() : codec({ "macko", { ".values", ".deltas", ".row_ptr" }, { { "index_bits", SMALLEST } }, true }) {}

    int check_desc(const ggml_macko_matrix & m) const override { return macko::check_desc(rows_desc(*this, m)); }

    void component_rules(const ggml_macko_matrix & m, component_rule * rules) const override {
        const int64_t n = array_length(m.arrays[MACKO_VALUES]);
        // each dense element is stored at most once
        rules[MACKO_VALUES]  = { m.type, n_padded(std::min(m.rows * m.cols, MAX_STORED)), 8 };
        rules[MACKO_DELTAS]  = { GGML_MACKO_TYPE_I8, deltas_nbytes(n, m.index_bits), 0 };
        rules[MACKO_ROW_PTR] = { GGML_MACKO_TYPE_I32, m.rows + 1, 0 };
    }

    int check_nnz(const ggml_macko_matrix & m) const override {
        return check_room(m, array_length(m.arrays[MACKO_VALUES]), "entries");
    }

    int64_t max_entries(const ggml_macko_matrix & m) const override { return array_length(m.arrays[MACKO_VALUES]); }

    int open(const ggml_macko_matrix & m, int, std::unique_ptr<codec_view> * view) const override {
        auto v = std::make_unique<macko_matrix_view>();
        TRY(open_macko(m, v.get()));
        *view = std::move(v);
        return GGML_MACKO_STATUS_OK;
    }

    int encode(const void * dense, const macko_desc & shape, const int64_t * options, int n_threads,
               std::unique_ptr<encoded_matrix> * out) const override {
        macko_desc desc = { shape.rows, shape.cols, shape.type, int32_option(options[0]), 0 };
        TRY(macko::check_desc(options[0] == SMALLEST ? macko_desc{ desc.rows, desc.cols, desc.type, 4, 0 } : desc));
        ggml_macko_count       count = {};
        std::vector<row_count> rows(static_cast<size_t>(desc.rows));
        TRY(count_finite(dense, desc, n_threads, &count, rows.data()));
        if (options[0] == SMALLEST) {
            desc.delta_bits = smallest_delta_bits(count, desc.type);
        }
        desc.nnz    = count.nnz;
        auto result = std::make_unique<encoded_macko>();
        TRY(macko::encode(dense, desc, rows, n_threads, &result->arrays));
        *out = std::move(result);
        return GGML_MACKO_STATUS_OK;
    }

private:
    static constexpr int64_t SMALLEST = 0; // option delta_bits: the width with the fewest bytes

    static int32_t smallest_delta_bits(const ggml_macko_count & count, int32_t type) {
        int32_t best   = 0;
        int64_t nbytes = 0;
        for (int i = 0; i < 4; i++) {
            const int64_t n     = n_padded(count.n_stored[i]);
            const int64_t bytes = n * value_nbytes(type) + deltas_nbytes(n, 1 << i);
            if (best == 0 || bytes < nbytes) {
                best   = 1 << i;
                nbytes = bytes;
            }
        }
        return best;
    }
};

} // namespace

const codec & macko_codec() {
    static const macko_format format;
    return format;
}

} // namespace macko
