// The C API over format, cpu and file (ggml-macko.h). Checks arguments, calls one function, keeps exceptions inside.
// What needs ggml (loading) is in backend/load.cpp.
#include "codec/ec-csr/cost.h"
#include "codec/ec-csr/extract.h"
#include "codec/macko/encode.h"
#include "codec/quantize.h"
#include "cpu/kernels.h"
#include "load/compress.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <omp.h>

using namespace macko;
using namespace macko::cpu;

// all cores for n_threads <= 0, but no more than there is work for: starting a thread costs as much as some 64 Ki
// elements
static int threads(int n_threads, int64_t elements) {
    return n_threads > 0 ? n_threads : static_cast<int>(std::min<int64_t>(omp_get_max_threads(), 1 + elements / 65536));
}

// ---- library ----

const char * ggml_macko_version(void) { return GGML_MACKO_VERSION; }

// ---- MACKO codec ----

int64_t ggml_macko_n_padded(int64_t n_stored) { return n_padded(n_stored); }

int64_t ggml_macko_deltas_nbytes(int64_t n_stored, int32_t delta_bits) {
    return deltas_nbytes(n_padded(n_stored), delta_bits);
}

static macko_desc desc_of(const ggml_macko_matrix & m) { return { m.rows, m.cols, m.type, m.delta_bits, m.nnz }; }

int ggml_macko_count_dense(const void * dense, int32_t type, int64_t rows, int64_t cols, int n_threads,
                           ggml_macko_count * count) {
    return c_boundary([&]() -> int {
        if (!dense || !count) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        if (const int status = check_desc({ rows, cols, type, 4, 0 })) {
            return status;
        }
        return count_dense(dense, type, rows, cols, threads(n_threads, rows * cols), count);
    });
}

int ggml_macko_encode(const void * dense, const ggml_macko_matrix * m, int n_threads) {
    return c_boundary([&]() -> int {
        if (!dense || !m || !m->values || !m->deltas || !m->row_ptr) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        if (const int status = check_desc(desc_of(*m))) {
            return status;
        }
        if (m->n_stored < m->nnz || m->n_stored > MAX_STORED) {
            return fail(GGML_MACKO_STATUS_LIMIT, "%lld stored entries (limit %lld)",
                        static_cast<long long>(m->n_stored), static_cast<long long>(MAX_STORED));
        }
        return encode(dense, *m, threads(n_threads, m->rows * m->cols));
    });
}

// Validates all rows of m in ranges of rows, one range per thread, and hands each view to consume(view).
template <typename F>
static int validate_matrix(const ggml_macko_matrix & m, int64_t n_values, int64_t n_deltas, int64_t n_row_ptr,
                           int n_threads, F && consume) {
    const macko_desc desc = desc_of(m);
    if (!m.values || !m.deltas || !m.row_ptr) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
    }
    if (const int status = check_desc(desc)) {
        return status;
    }
    if (n_row_ptr != desc.rows + 1) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "row_ptr has %lld elements, not %lld",
                    static_cast<long long>(n_row_ptr), static_cast<long long>(desc.rows + 1));
    }
    if (n_values < 8 || n_values > n_padded(MAX_STORED) || n_deltas != deltas_nbytes(n_values, desc.delta_bits)) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "%lld values with %lld bytes of deltas",
                    static_cast<long long>(n_values), static_cast<long long>(n_deltas));
    }
    if (const int status = check_row_ptr(desc, m.row_ptr, n_values)) {
        return status;
    }
    if (const int status = check_padding(desc, m.row_ptr[desc.rows], m.values, m.deltas, 0, n_values, n_deltas)) {
        return status;
    }
    const int                n_tasks = threads(n_threads, desc.rows * desc.cols);
    std::vector<int>         status(static_cast<size_t>(n_tasks), GGML_MACKO_STATUS_OK);
    std::vector<std::string> text(static_cast<size_t>(n_tasks)); // messages are per thread: carried over
    int64_t                  nnz = 0;
#pragma omp parallel for schedule(static) num_threads(n_tasks) reduction(+ : nnz)
    for (int t = 0; t < n_tasks; t++) {
        const macko_rows rows = {
            desc, desc.rows * t / n_tasks, desc.rows * (t + 1) / n_tasks, m.row_ptr, 0, m.values, m.deltas
        };
        int & result = status[static_cast<size_t>(t)];
        result       = c_boundary([&]() -> int {
            macko_view view;
            const int  bad = validate(rows, &view);
            nnz += view.nnz();
            return bad ? bad : consume(view);
        });
        if (result) {
            text[static_cast<size_t>(t)] = ggml_macko_last_error();
        }
    }
    for (size_t t = 0; t < status.size(); t++) { // the first bad row is reported, whatever the number of threads
        if (status[t]) {
            return fail(status[t], "%s", text[t].c_str());
        }
    }
    if (nnz != desc.nnz) {
        return fail(GGML_MACKO_STATUS_BAD_NNZ, "%lld non-zeros, but nnz says %lld", static_cast<long long>(nnz),
                    static_cast<long long>(desc.nnz));
    }
    return GGML_MACKO_STATUS_OK;
}

int ggml_macko_validate(const ggml_macko_matrix * m, int64_t n_values, int64_t n_deltas, int64_t n_row_ptr,
                        int n_threads) {
    return c_boundary([&]() -> int {
        if (!m) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        return validate_matrix(*m, n_values, n_deltas, n_row_ptr, n_threads, [](const macko_view &) { return 0; });
    });
}

int ggml_macko_decode(const ggml_macko_matrix * m, int64_t n_values, int64_t n_deltas, int64_t n_row_ptr, void * dense,
                      int n_threads) {
    return c_boundary([&]() -> int {
        if (!m || !dense) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        return validate_matrix(*m, n_values, n_deltas, n_row_ptr, n_threads, [&](const macko_view & view) {
            decode(view, static_cast<uint8_t *>(dense) + view.rows().row_begin * m->cols * value_nbytes(m->type));
            return 0;
        });
    });
}

// the non-zeros of a matrix that has no Inf and no NaN: the codecs below have no place for them
static int count_finite(const void * dense, int32_t type, int64_t rows, int64_t cols, int n_team, int64_t * nnz) {
    ggml_macko_count count = {};
    if (const int status = count_dense(dense, type, rows, cols, n_team, &count)) {
        return status;
    }
    if (count.n_nonfinite) {
        return fail(GGML_MACKO_STATUS_NOT_FINITE, "%lld values are Inf or NaN",
                    static_cast<long long>(count.n_nonfinite));
    }
    *nnz = count.nnz;
    return GGML_MACKO_STATUS_OK;
}

// ---- EC-CSR codec ----

struct ggml_macko_ec_csr_matrix {
    ec_csr_matrix matrix;
};

// the smallest extracted block that takes fewer bytes than its elements in blocks of one row: half of its deltas
// against its bases
static int32_t paying_columns(int32_t delta_bits) { return delta_bits == 8 ? 128 : 256; }

static int encode_blocks(const macko_desc & desc, const void * dense, const extract_options & options, int n_team,
                         ec_csr_matrix * out) {
    ec_csr_blocks blocks;
    const int     status = extract_blocks(desc, dense, options, n_team, &blocks);
    return status ? status : assemble(desc, dense, blocks, n_team, out);
}

int ggml_macko_ec_csr_encode(const void * dense, int32_t type, int64_t rows, int64_t cols, int32_t delta_bits,
                             const ggml_macko_ec_csr_options * options, int n_threads,
                             ggml_macko_ec_csr_matrix ** out) {
    return c_boundary([&]() -> int {
        if (!dense || !out) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        macko_desc desc = { rows, cols, type, delta_bits, 0 };
        if (const int status = check_ec_csr_desc(desc)) {
            return status;
        }
        const ggml_macko_ec_csr_options o = options ? *options : ggml_macko_ec_csr_options{ 16, 0, true, 0 };
        const extract_options extract = { o.max_granularity, o.min_columns ? o.min_columns : paying_columns(delta_bits),
                                          o.clip, o.seed };
        const int             n_team  = threads(n_threads, rows * cols);
        if (const int status = count_finite(dense, type, rows, cols, n_team, &desc.nnz)) {
            return status;
        }
        if (const int status = check_desc(desc)) { // nnz
            return status;
        }
        auto m = std::make_unique<ggml_macko_ec_csr_matrix>();
        if (const int status = encode_blocks(desc, dense, extract, n_team, &m->matrix)) {
            return status;
        }
        // What blocks save, the fillers may cost that they leave behind in their rows: the whole matrix tells
        if (o.min_columns == 0 && m->matrix.sets[0].granularity > 1) {
            ec_csr_matrix plain;
            if (const int status =
                    encode_blocks(desc, dense, { 1, extract.min_columns, extract.clip, 0 }, n_team, &plain)) {
                return status;
            }
            if (plain.nbytes() < m->matrix.nbytes()) {
                m->matrix = std::move(plain);
            }
        }
        *out = m.release();
        return GGML_MACKO_STATUS_OK;
    });
}

int ggml_macko_ec_csr_arrays(const ggml_macko_ec_csr_matrix * m, ggml_macko_ec_csr * arrays) {
    if (!m || !arrays) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
    }
    const ec_csr_arrays a = m->matrix.arrays();
    *arrays               = { a.desc.rows,
                              a.desc.cols,
                              a.desc.type,
                              a.desc.delta_bits,
                              a.desc.nnz,
                              a.n_values,
                              a.n_deltas,
                              a.n_bases,
                              a.n_blk_ptr,
                              a.n_rows,
                              4 * a.n_sets,
                              a.values,
                              a.deltas,
                              a.bases,
                              a.blk_ptr,
                              a.rows,
                              reinterpret_cast<const int32_t *>(a.sets) };
    return GGML_MACKO_STATUS_OK;
}

void ggml_macko_ec_csr_free(ggml_macko_ec_csr_matrix * m) { delete m; }

// the view points into m's arrays
static int check_blocks(const ggml_macko_ec_csr * m, ec_csr_view * view) {
    if (!m || !m->values || !m->deltas || !m->bases || !m->blk_ptr || !m->block_rows || !m->sets) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
    }
    if (m->n_sets % 4) {
        return fail(GGML_MACKO_STATUS_BAD_COMPONENT, "sets has %lld elements, not a multiple of 4",
                    static_cast<long long>(m->n_sets));
    }
    return check_ec_csr({ { m->rows, m->cols, m->type, m->delta_bits, m->nnz },
                          reinterpret_cast<const ec_csr_set *>(m->sets),
                          m->n_sets / 4,
                          m->block_rows,
                          m->n_block_rows,
                          m->blk_ptr,
                          m->n_blk_ptr,
                          m->bases,
                          m->n_bases,
                          m->deltas,
                          m->n_deltas,
                          m->values,
                          m->n_values },
                        view);
}

int ggml_macko_ec_csr_validate(const ggml_macko_ec_csr * m, int n_threads) {
    return c_boundary([&]() -> int {
        ec_csr_view view;
        const int   status = check_blocks(m, &view);
        return status ? status : each_row(view, threads(n_threads, m->rows * m->cols), [](int64_t, const void *) {});
    });
}

int ggml_macko_ec_csr_decode(const ggml_macko_ec_csr * m, void * dense, int n_threads) {
    return c_boundary([&]() -> int {
        ec_csr_view view;
        if (!dense) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        if (const int status = check_blocks(m, &view)) {
            return status;
        }
        const int64_t nbytes = m->cols * value_nbytes(m->type);
        return each_row(view, threads(n_threads, m->rows * m->cols), [&](int64_t row, const void * elements) {
            memcpy(static_cast<uint8_t *>(dense) + row * nbytes, elements, static_cast<size_t>(nbytes));
        });
    });
}

// ---- packed codec ----

struct ggml_macko_packed_matrix {
    packed_matrix matrix;
};

int ggml_macko_packed_encode(const void * dense, int32_t type, int64_t rows, int64_t cols, int32_t value_type,
                             int32_t index_bits, int n_threads, ggml_macko_packed_matrix ** out) {
    return c_boundary([&]() -> int {
        if (!dense || !out) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        const packed_desc desc = { { rows, cols, type, 4, 0 }, value_type, index_bits };
        if (const int status =
                check_packed_desc({ desc.dense, value_type, index_bits < 0 ? INDEX_BITMAP : index_bits })) {
            return status;
        }
        const int n_team = threads(n_threads, rows * cols);
        int64_t   nnz    = 0;
        if (const int status = count_finite(dense, type, rows, cols, n_team, &nnz)) {
            return status;
        }
        auto m = std::make_unique<ggml_macko_packed_matrix>();
        if (const int status = pack(dense, desc, n_team, &m->matrix)) {
            return status;
        }
        *out = m.release();
        return GGML_MACKO_STATUS_OK;
    });
}

int ggml_macko_quantize_q4_nl(const float * values, const float * weights, int64_t n, int n_threads, void * blocks) {
    return c_boundary([&]() -> int {
        if (!values || !blocks || n < 0) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer, or %lld values", static_cast<long long>(n));
        }
        return quantize(values, weights, n, GGML_MACKO_TYPE_Q4_NL, threads(n_threads, n),
                        static_cast<uint8_t *>(blocks));
    });
}

int ggml_macko_packed_arrays(const ggml_macko_packed_matrix * m, ggml_macko_packed * arrays) {
    if (!m || !arrays) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
    }
    const packed_arrays a = m->matrix.arrays();
    const macko_desc &  d = a.desc.dense;
    *arrays               = { d.rows,     d.cols,    d.type,      a.desc.value_type, a.desc.index_bits, d.nnz,
                              a.n_values, a.n_index, a.n_row_ptr, a.values,          a.index,           a.row_ptr };
    return GGML_MACKO_STATUS_OK;
}

void ggml_macko_packed_free(ggml_macko_packed_matrix * m) { delete m; }

// the view points into m's arrays
static int check_packed_matrix(const ggml_macko_packed * m, int n_threads, packed_view * view) {
    if (!m || !m->values || !m->index || !m->row_ptr) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
    }
    return check_packed({ { { m->rows, m->cols, m->type, 4, m->nnz }, m->value_type, m->index_bits },
                          m->values,
                          m->n_values,
                          m->index,
                          m->n_index,
                          m->row_ptr,
                          m->n_row_ptr },
                        threads(n_threads, m->rows * m->cols), view);
}

int ggml_macko_packed_validate(const ggml_macko_packed * m, int n_threads) {
    return c_boundary([&]() -> int {
        packed_view view;
        return check_packed_matrix(m, n_threads, &view);
    });
}

int ggml_macko_packed_decode(const ggml_macko_packed * m, void * dense, int n_threads) {
    return c_boundary([&]() -> int {
        packed_view view;
        if (!dense) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        if (const int status = check_packed_matrix(m, n_threads, &view)) {
            return status;
        }
        const int64_t nbytes = m->cols * value_nbytes(m->type);
#pragma omp parallel for schedule(dynamic, 16) num_threads(threads(n_threads, m->rows * m->cols))
        for (int64_t r = 0; r < m->rows; r++) {
            view.decode_row(r, static_cast<uint8_t *>(dense) + r * nbytes);
        }
        return GGML_MACKO_STATUS_OK;
    });
}

// ---- CPU kernels ----

struct ggml_macko_cpu_matrix {
    std::unique_ptr<void, void (*)(void *)> memory = { nullptr, free };
    int64_t                                 nbytes = 0;
    bitmap_matrix                           bitmap = {};
};

static std::unique_ptr<void, void (*)(void *)> aligned_memory(int64_t nbytes) {
    void * memory = nullptr;
    if (posix_memalign(&memory, 64, static_cast<size_t>(nbytes))) {
        throw std::bad_alloc();
    }
    return { memory, free };
}

static ggml_macko_cpu_matrix empty_matrix(const macko_desc & desc, int32_t value_type) {
    ggml_macko_cpu_matrix m;
    m.nbytes = bitmap_nbytes(desc, value_type);
    m.memory = aligned_memory(m.nbytes);
    m.bitmap = bitmap_bind(desc, value_type, m.memory.get());
    return m;
}

int ggml_macko_cpu_matrix_init(const ggml_macko_matrix * m, int64_t n_values, int64_t n_deltas, int64_t n_row_ptr,
                               int n_threads, ggml_macko_cpu_matrix ** out) {
    return c_boundary([&]() -> int {
        if (!m || !out) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        if (const int status = check_desc(desc_of(*m))) {
            return status;
        }
        const char * kernels = nullptr;
        if (const int status = cpu_kernels_select(&kernels)) {
            return status;
        }
        // Where a range of rows starts among the values is known only when the ranges before it are counted: first pass
        // count, second pass pack.
        const int n_tasks = threads(n_threads, m->rows * m->cols);
        // at a range's first row: non-zeros of the range
        std::vector<int64_t> first(static_cast<size_t>(m->rows) + 1, 0);
        int status = validate_matrix(*m, n_values, n_deltas, n_row_ptr, n_tasks, [&](const macko_view & view) {
            if (view.rows().row_begin < view.rows().row_end) {
                first[static_cast<size_t>(view.rows().row_begin)] = view.nnz();
            }
            return 0;
        });
        if (status) {
            return status;
        }
        int64_t sum = 0;
        for (int64_t & n : first) {
            const int64_t here = n;
            n                  = sum;
            sum += here;
        }
        auto matrix = std::make_unique<ggml_macko_cpu_matrix>();
        *matrix     = empty_matrix(desc_of(*m), m->type);
        status      = validate_matrix(*m, n_values, n_deltas, n_row_ptr, n_tasks, [&](const macko_view & view) {
            bitmap_pack(view, first[static_cast<size_t>(view.rows().row_begin)], matrix->bitmap);
            return 0;
        });
        if (status) {
            return status; // the caller changed the arrays meanwhile
        }
        *out = matrix.release();
        return GGML_MACKO_STATUS_OK;
    });
}

int ggml_macko_ec_csr_gpu_us(const ggml_macko_ec_csr * m, int n_threads, double * blocks_us, double * rows_us) {
    return c_boundary([&]() -> int {
        if (!blocks_us || !rows_us) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        ec_csr_view view;
        if (const int status = check_blocks(m, &view)) {
            return status;
        }
        gpu_times times;
        if (const int status = gpu_times_of(view, threads(n_threads, m->rows * m->cols), &times)) {
            return status;
        }
        *blocks_us = times.blocks_us;
        *rows_us   = times.rows_us;
        return GGML_MACKO_STATUS_OK;
    });
}
int ggml_macko_cpu_matrix_init_ec_csr(const ggml_macko_ec_csr * m, int n_threads, ggml_macko_cpu_matrix ** out) {
    macko_matrix recoded;
    const int    status = c_boundary([&]() -> int {
        ec_csr_view view;
        const int   bad = check_blocks(m, &view);
        return bad ? bad : recode(view, threads(n_threads, m->rows * m->cols), &recoded);
    });
    if (status) {
        return status;
    }
    const int64_t           n_stored = recoded.row_ptr.back();
    const ggml_macko_matrix macko    = { m->rows,
                                         m->cols,
                                         m->type,
                                         m->delta_bits,
                                         m->nnz,
                                         n_stored,
                                         recoded.values.data(),
                                         recoded.deltas.data(),
                                         recoded.row_ptr.data() };
    return ggml_macko_cpu_matrix_init(&macko, n_padded(n_stored), deltas_nbytes(n_padded(n_stored), m->delta_bits),
                                      m->rows + 1, n_threads, out);
}

int ggml_macko_cpu_matrix_init_packed(const ggml_macko_packed * m, int n_threads, ggml_macko_cpu_matrix ** out) {
    return c_boundary([&]() -> int {
        if (!out) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        const char * kernels = nullptr;
        if (const int status = cpu_kernels_select(&kernels)) {
            return status;
        }
        packed_view view;
        if (const int status = check_packed_matrix(m, n_threads, &view)) {
            return status;
        }
        auto matrix = std::make_unique<ggml_macko_cpu_matrix>(empty_matrix(view.arrays().desc.dense, m->value_type));
        bitmap_pack(view, threads(n_threads, m->rows * m->cols), matrix->bitmap);
        *out = matrix.release();
        return GGML_MACKO_STATUS_OK;
    });
}

void ggml_macko_cpu_matrix_free(ggml_macko_cpu_matrix * m) { delete m; }

int64_t ggml_macko_cpu_matrix_nbytes(const ggml_macko_cpu_matrix * m) { return m ? m->nbytes : 0; }

int ggml_macko_cpu_mul_mat(const ggml_macko_cpu_matrix * m, const float * x, float * y, int64_t n, int n_threads) {
    return c_boundary([&]() -> int {
        if (!m || !x || !y || n < 0) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer or negative count");
        }
        if (n == 0) {
            return GGML_MACKO_STATUS_OK;
        }
        const bitmap_matrix &      w = m->bitmap;
        std::vector<const float *> xs(static_cast<size_t>(n));
        std::vector<float *>       ys(static_cast<size_t>(n));
        for (int64_t j = 0; j < n; j++) {
            xs[static_cast<size_t>(j)] = x + j * w.cols;
            ys[static_cast<size_t>(j)] = y + j * w.rows;
        }
        const auto           scratch = aligned_memory(mul_mat_scratch_nbytes(w.cols, n));
        const mul_mat_params p       = { w, 0, w.rows, n, xs.data(), ys.data(), false, scratch.get() };
#pragma omp parallel num_threads(threads(n_threads, w.rows * w.cols))
        mul_mat_thread(p, omp_get_thread_num(), omp_get_num_threads());
        return GGML_MACKO_STATUS_OK;
    });
}

const char * ggml_macko_cpu_kernels(void) {
    const char * name = "";
    return cpu_kernels_select(&name) ? "" : name;
}

// ---- files ----

int ggml_macko_weight_use_of(const char * name, int32_t n_dims) {
    int       use    = GGML_MACKO_WEIGHT_OTHER;
    const int status = c_boundary([&] { // no status to return: a name that does not fit into memory has no use
        use = name ? weight_use(name, n_dims) : use;
        return GGML_MACKO_STATUS_OK;
    });
    return status ? GGML_MACKO_WEIGHT_OTHER : use;
}

struct ggml_macko_file {
    std::unique_ptr<model_file> model;
};

int ggml_macko_file_open(const char * path, bool require_model, ggml_macko_file ** out) {
    return c_boundary([&]() -> int {
        if (!path || !out) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "null pointer");
        }
        auto file = std::make_unique<ggml_macko_file>();
        if (const int status = model_file_open(path, require_model, &file->model)) {
            return status;
        }
        *out = file.release();
        return GGML_MACKO_STATUS_OK;
    });
}

void ggml_macko_file_close(ggml_macko_file * file) { delete file; }

bool ggml_macko_file_is_sparse(const ggml_macko_file * file) { return file->model->is_sparse; }

int64_t ggml_macko_file_size(const ggml_macko_file * file) { return file->model->header.file_size; }

int64_t ggml_macko_file_alignment(const ggml_macko_file * file) { return file->model->header.alignment; }

int64_t ggml_macko_file_n_tensors(const ggml_macko_file * file) {
    return static_cast<int64_t>(file->model->header.tensors.size());
}

int64_t ggml_macko_file_n_sparse(const ggml_macko_file * file) {
    return static_cast<int64_t>(file->model->sparse.size());
}

int ggml_macko_file_tensor(const ggml_macko_file * file, int64_t i, ggml_macko_tensor_info * info) {
    if (!file || !info || i < 0 || i >= ggml_macko_file_n_tensors(file)) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "no tensor %lld", static_cast<long long>(i));
    }
    const gguf_tensor & t = file->model->header.tensors[static_cast<size_t>(i)];
    *info                 = { t.name.c_str(),
                              t.type,
                              t.n_dims,
                              { t.ne[0], t.ne[1], t.ne[2], t.ne[3] },
                              t.offset,
                              t.nbytes,
                              file->model->tensor_sparse_index[static_cast<size_t>(i)] };
    return GGML_MACKO_STATUS_OK;
}

int ggml_macko_file_sparse(const ggml_macko_file * file, int64_t i, ggml_macko_sparse_info * info) {
    if (!file || !info || i < 0 || i >= ggml_macko_file_n_sparse(file)) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "no sparse matrix %lld", static_cast<long long>(i));
    }
    const sparse_tensor_info & s      = file->model->sparse[static_cast<size_t>(i)];
    int64_t                    nbytes = 0;
    for (size_t c = 0; c < s.format->n_components; c++) {
        nbytes += file->model->header.tensors[s.first + c].nbytes;
    }
    *info = { s.name.c_str(),
              s.format->name,
              s.desc.type,
              s.value_type,
              s.format == &FORMAT_PACKED ? s.index_bits : s.desc.delta_bits,
              s.n_dims,
              { s.ne[0], s.ne[1], s.ne[2], s.ne[3] },
              s.desc.nnz,
              nbytes,
              s.nbytes_dense,
              static_cast<int64_t>(s.first),
              static_cast<int64_t>(s.format->n_components) };
    return GGML_MACKO_STATUS_OK;
}

int ggml_macko_file_check_payload(const ggml_macko_file * file, int64_t i, int n_threads) {
    struct discard : payload_consumer {
        int  consume(const macko_view &, int64_t) override { return GGML_MACKO_STATUS_OK; }
        bool takes_blocks() const override { return true; }
        bool takes_packed() const override { return true; }
    };
    return c_boundary([&]() -> int {
        if (!file || i < 0 || i >= ggml_macko_file_n_sparse(file)) {
            return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "no sparse matrix %lld", static_cast<long long>(i));
        }
        discard                    consumer;
        const sparse_tensor_info & m = file->model->sparse[static_cast<size_t>(i)];
        if (const int status = read_payload(*file->model, m, threads(n_threads, m.desc.rows * m.desc.cols), consumer)) {
            return status;
        }
        return file->model->check_unchanged();
    });
}
