// Chooses the kernel set, chooses the layout of x for each multiplication, and divides the rows among threads. This
// file is compiled for any CPU.
#include "cpu/kernels/dispatch.h"
#include "platform/environment.h"
#include "platform/platform.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if !defined(_OPENMP)
#error "compile with OpenMP: without its barriers, threads would read x before it has been copied"
#endif

namespace macko::cpu {

// ---- kernel set ----

struct candidate {
    const kernel_set * set;
    bool               supported; // by the CPU and by the operating system, which must save its registers
};

#if defined(__x86_64__)
// __builtin_cpu_supports("f16c") needs a newer compiler than this project requires
static bool cpu_has_f16c() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

#if defined(GGML_MACKO_AVX2_VNNI)
// __builtin_cpu_supports("avxvnni") needs a newer compiler, too
static bool cpu_has_avx_vnni() {
    constexpr unsigned AVX_VNNI = 1 << 4;
    unsigned           eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & AVX_VNNI);
}

static const kernel_set & avx2_vnni() {
    static const kernel_set set = [] {
        kernel_set s = kernels_avx2;
        s.name       = "avx2-vnni";
        s.quantized  = kernels_avx2_vnni;
        return s;
    }();
    return set;
}
#endif

#if defined(__x86_64__)
// AVX2 makes quantized rows dense as fast as 16 threads can send them to a GPU.
static const kernel_set & avx512_with_expander() {
    static const kernel_set set = [] {
        kernel_set s       = kernels_avx512;
        s.expand.quantized = kernels_avx2.expand.quantized;
        return s;
    }();
    return set;
}
#endif

// Zen 4 CPUs, the only CPUs of AMD's family 25 with VBMI2, split 512-bit operations into two halves. On them, bundles
// are faster than expanded rows at all densities that allow bundles, and faster than coded values (lab/kernels-cpu.md).
static bool cpu_is_zen4() {
#if defined(__x86_64__)
    constexpr unsigned FAMILY_25 = 0xf + 0xa; // base and extended
    unsigned           eax, ebx, ecx, edx;
    return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512vbmi2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) &&
           (eax >> 8 & 0xf) + (eax >> 20 & 0xff) == FAMILY_25;
#else
    return false;
#endif
}

static const candidate * candidates(int * n) {
#if defined(__x86_64__)
    static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c() &&
                             __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                             __builtin_cpu_supports("popcnt");
    static const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    static const bool vbmi2 = avx512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
                              __builtin_cpu_supports("avx512vnni"); // all CPUs with VBMI2 have it
    static const candidate all[] = {
        { &kernels_avx512_vbmi2, vbmi2 },
        { &avx512_with_expander(), avx512 },
#if defined(GGML_MACKO_AVX2_VNNI)
        { &avx2_vnni(), avx2 && cpu_has_avx_vnni() },
#endif
        { &kernels_avx2, avx2 },
        { &kernels_portable, true },
    };
#elif defined(__aarch64__)
    static const platform::arm64_extensions has   = platform::find_arm64_extensions();
    static const candidate                  all[] = {
        { &kernels_neon_fhm, has.dot_product && has.f16_products },
        { &kernels_neon_dotprod, has.dot_product },
        { &kernels_neon, true },
        { &kernels_portable, true },
    };
#else
    static const candidate all[] = { { &kernels_portable, true } };
#endif
    *n = static_cast<int>(sizeof(all) / sizeof(all[0]));
    return all;
}

const kernel_set * supported_kernel_set(int i) {
    int               n;
    const candidate * all = candidates(&n);
    for (int k = 0; k < n; k++) {
        if (all[k].supported && i-- == 0) {
            return all[k].set;
        }
    }
    return nullptr;
}

int find_kernel_set(const char * name, const kernel_set ** set) {
    int               n;
    const candidate * all   = candidates(&n);
    bool              known = false;
    std::string       names;
    *set = *name ? nullptr : supported_kernel_set(0);
    for (int k = n - 1; k >= 0; k--) {
        names += std::string(names.empty() ? "" : ", ") + all[k].set->name;
        if (strcmp(name, all[k].set->name) == 0) {
            known = true;
            *set  = all[k].supported ? all[k].set : nullptr;
        }
    }
    return *set ? GGML_MACKO_STATUS_OK
                : fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%s=%s: %s; valid names: %s", environment::CPU_KERNELS,
                       printable(name).text, known ? "not supported by this CPU" : "no such kernel set", names.c_str());
}

// The environment is read once, so that all matrices of a process use the same set.
struct selection {
    const kernel_set * set = nullptr; // nullptr if there is no set `forced`, or if this CPU does not support it
    std::string        forced;
};

static const selection & select_once() {
    static const selection chosen = [] {
        selection s;
        s.forced = environment::value_of(environment::CPU_KERNELS);
        (void)find_kernel_set(s.forced.c_str(), &s.set);
        return s;
    }();
    return chosen;
}

int select_kernels(const char ** name) {
    const selection & chosen = select_once();
    if (!chosen.set) {
        const kernel_set * none = nullptr;
        return find_kernel_set(chosen.forced.c_str(), &none); // for the message
    }
    *name = chosen.set->name;
    return GGML_MACKO_STATUS_OK;
}

// ---- multiplication ----

bool has_rows16(const kernel_set & set, int32_t type) {
    return type != GGML_MACKO_TYPE_F32 && set.costs.rows16_below > 0;
}

// The function of a layout.
static auto function_of(const kernel_set & s, const bitmap_layout &) { return s.multiply.bitmap; }
static auto function_of(const kernel_set & s, const coded_bitmap_layout &) { return s.multiply.coded_bitmap; }
static auto function_of(const kernel_set & s, const bundles_layout &) { return s.multiply.bundles; }
static auto function_of(const kernel_set & s, const quantized_layout &) { return s.quantized.multiply; }

bool multiplies_with(const kernel_set & set, const cpu_matrix & w) {
    return std::visit([&](const auto & layout) { return function_of(set, layout) != nullptr; }, w);
}

void prepare_with(const kernel_set & set, const mul_mat_params & p, x_layout layout, int ith, int nth) {
    const int64_t words = mask_words(base_of(p.w).cols), begin = words * ith / nth * 64,
                  end = words * (ith + 1) / nth * 64;
    if (layout == x_layout::blocks) {
        set.quantized.prepare(std::get<quantized_layout>(p.w), p, begin, end);
    } else {
        set.prepare(base_of(p.w), p, layout, begin, end);
    }
}

void multiply_with(const kernel_set & set, const mul_mat_params & p, x_layout layout, int64_t begin, int64_t end) {
    std::visit([&](const auto & w) { function_of(set, w)(w, p, layout, begin, end); }, p.w);
}

constexpr int64_t COUNTER_NBYTES = 64;
static_assert(MAX_SAME_X * sizeof(int) <= COUNTER_NBYTES, "a counter for each product");

// n x as floats, in whole vectors of tokens.
static int64_t n_x_floats(int64_t cols, int64_t n) {
    constexpr int64_t widest = 16; // floats in the widest vector
    return mask_words(cols) * 64 * ((n + widest - 1) / widest * widest);
}

int64_t mul_mat_scratch_nbytes(int64_t cols, int64_t n) {
    const int64_t scales = n_x_floats(cols, n) / block_columns(MIN_WINDOW); // of quantized matrices
    return (n_x_floats(cols, n) + scales) * static_cast<int64_t>(sizeof(float)) + COUNTER_NBYTES;
}

static int64_t n_cols(const mul_mat_params & p) { return base_of(p.w).cols; }

static int64_t n_zeros(const mul_mat_params & p) {
    const float * x    = p.x[0];
    const int64_t cols = n_cols(p);
    int           n    = 0;
    for (int64_t c = 0; c < cols; c++) {
        n += x[c] == 0;
    }
    return n;
}

// Number of chunks of the columns whose sums fit in the scratch memory, after x.
static int64_t max_column_chunks(const mul_mat_params & p) {
    return (n_x_floats(n_cols(p), 1) - mask_words(n_cols(p)) * 64) / (mask_words(p.columns.cols) * 64);
}

// Whether x has enough zeros for the kernel `columns`. Each thread counts them, which is faster than a barrier.
static bool takes_columns(const kernel_set & set, const mul_mat_params & p) {
    return p.columns.masks && p.n == 1 && max_column_chunks(p) > 0 &&
           static_cast<float>(n_zeros(p)) >= static_cast<float>(n_cols(p)) * set.costs.columns_from;
}

// Non-zeros of the rows to multiply, with the padding of quantized rows.
static uint32_t n_values(const mul_mat_params & p) {
    const uint32_t * row_off = base_of(p.w).row_off;
    return (row_off[p.row_end] - row_off[p.row_begin]) * (is_quantized(p.w) ? uint32_t(CODE_GROUP) : 1);
}

static x_layout choose_layout(const kernel_set & set, const mul_mat_params & p) {
    if (takes_columns(set, p)) {
        return x_layout::columns;
    }
    if (is_quantized(p.w)) {
        return x_layout::blocks;
    }
    const kernel_costs & cost = set.costs;
    if (in_bundles(p.w)) {
        return p.n <= MAX_PLANES && p.round_x ? x_layout::planes : x_layout::panels;
    }
    const float density =
        static_cast<float>(n_values(p)) / (static_cast<float>(p.row_end - p.row_begin) * static_cast<float>(n_cols(p)));
    const bool     coded        = std::holds_alternative<coded_bitmap_layout>(p.w);
    const x_layout rows_of_type = coded ? x_layout::coded : x_layout::rows;
    if (p.n == 1) {
        const bool faster = density < cost.rows16_below && has_rows16(set, base_of(p.w).dense_type);
        return faster && p.round_x && !coded ? x_layout::rows16 : rows_of_type;
    }
    const float groups  = static_cast<float>((p.n + 7) / 8);
    const float vectors = static_cast<float>((p.n + cost.vector_width - 1) / cost.vector_width);
    const float rows    = groups * cost.x_batch + static_cast<float>(p.n) * cost.x;
    const float panels  = cost.column + density * (cost.entry + vectors * cost.vector);
    return rows <= panels ? rows_of_type : x_layout::panels;
}

// For each product with the same x, the next chunk of rows to compute; shared by all threads. At the end of the scratch
// memory.
static int * chunk_counters(const mul_mat_params & p) {
    return reinterpret_cast<int *>(static_cast<uint8_t *>(p.scratch) + mul_mat_scratch_nbytes(n_cols(p), p.n) -
                                   COUNTER_NBYTES);
}

static void wait_for_all(const mul_mat_params & p) {
    if (p.barrier) {
        p.barrier->wait();
        return;
    }
#pragma omp barrier
}

static bool is_nothing(const mul_mat_params & p) { return p.n <= 0 || p.row_begin >= p.row_end; }

static void prepare_chunks(const kernel_set & set, const mul_mat_params & p, int ith, int nth) {
    if (ith == 0) {
        std::fill_n(chunk_counters(p), MAX_SAME_X, 0);
    }
    prepare_with(set, p, choose_layout(set, p), ith, nth);
}

// Whether rows with a closed gate are skipped. If only few are closed, memory streams them anyway: skipping half of the
// rows gained nothing (lab/activation-sparsity.md).
static bool leaves_rows_out(const mul_mat_params & p) {
    const int64_t rows   = p.row_end - p.row_begin;
    const int64_t closed = p.gate ? std::count_if(p.gate, p.gate + rows, [](float g) { return !(g > 0); }) : 0;
    return closed * 5 >= rows * 3;
}

// Computes rows begin ... end - 1, without the rows whose gate is closed if single rows can be skipped.
static void multiply_open_rows(const kernel_set & set, const mul_mat_params & p, x_layout layout, int64_t begin,
                               int64_t end) {
    const int64_t group   = in_bundles(p.w) ? BUNDLE_ROWS : 1;
    const auto    is_open = [&](int64_t row) {
        const float * gate = p.gate + (row - p.row_begin);
        return std::any_of(gate, gate + std::min(group, end - row), [](float g) { return g > 0; });
    };
    for (int64_t row = begin; row < end;) {
        const int64_t first = row;
        while (row < end && is_open(row)) {
            row = std::min(row + group, end);
        }
        if (row > first) {
            multiply_with(set, p, layout, first, row);
        }
        const int64_t closed = row;
        while (row < end && !is_open(row)) {
            row = std::min(row + group, end);
        }
        std::fill(p.y[0] + (closed - p.row_begin), p.y[0] + (row - p.row_begin), 0.0f);
    }
}

// Number of chunks of the columns with sums of their own, limited by the columns per chunk and by the scratch memory.
// It determines the order of the additions to y, so it may depend only on p.
static int64_t n_column_chunks(const mul_mat_params & p) {
    constexpr int64_t max_chunks = 16, min_columns = 32;
    return std::clamp<int64_t>(std::min((n_cols(p) - n_zeros(p)) / min_columns, max_column_chunks(p)), 1, max_chunks);
}

// Threads process whole columns, because memory is faster in long sequential reads: with half of the rows each, two
// threads took as long as one. So each chunk has sums for all rows; y is the sum over the chunks, in order.
static void multiply_columns(const kernel_set & set, const mul_mat_params & p, int * counter, int ith, int nth) {
    const int64_t chunks = n_column_chunks(p), words = mask_words(n_cols(p)), stride = mask_words(p.columns.cols) * 64;
    float *       sums = static_cast<float *>(p.scratch) + words * 64;
    for (int64_t chunk; (chunk = __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED)) < chunks;) {
        set.add_columns(base_of(p.w), p, words * chunk / chunks * 64,
                        std::min(words * (chunk + 1) / chunks * 64, n_cols(p)), sums + chunk * stride);
    }
    wait_for_all(p);
    const int64_t rows = p.columns.cols, begin = rows * ith / nth, end = rows * (ith + 1) / nth;
    float *       y = p.y[0];
    std::copy(sums + begin, sums + end, y + begin);
    for (int64_t chunk = 1; chunk < chunks; chunk++) {
        const float * more = sums + chunk * stride;
        for (int64_t r = begin; r < end; r++) {
            y[r] += more[r];
        }
    }
}

// There are more chunks than threads, and each thread takes the next chunk when it has finished one, because cores are
// not equally fast and rows have different numbers of non-zeros. Chunks are larger with panels, because each chunk
// reads all panels once. A small matrix has few chunks, because distributing them would take longer than computing
// them.
static void multiply_chunks(const kernel_set & set, const mul_mat_params & p, int number, int ith, int nth) {
    const x_layout layout = choose_layout(set, p);
    if (layout == x_layout::columns) {
        return multiply_columns(set, p, chunk_counters(p) + number, ith, nth);
    }
    const bool        only_open    = leaves_rows_out(p);
    int *             counter      = chunk_counters(p) + number;
    constexpr int64_t chunk_nbytes = 16384;
    const int64_t     n_rows       = p.row_end - p.row_begin;
    const int64_t     nbytes       = n_rows * mask_words(n_cols(p)) * 8 + static_cast<int64_t>(n_values(p)) * 2;
    const bool        many         = layout == x_layout::panels || (layout == x_layout::blocks && p.n > FEW_X);
    const int64_t     max_chunks   = nth * (many ? 4 : 16);
    const int64_t     n_chunks     = nth == 1 ? 1 : std::clamp<int64_t>(nbytes * p.n / chunk_nbytes, nth, max_chunks);
    int64_t           step         = (n_rows + n_chunks - 1) / n_chunks;
    if (in_bundles(p.w)) { // whole groups
        step = (step + BUNDLE_ROWS - 1) / BUNDLE_ROWS * BUNDLE_ROWS;
    } else if (layout == x_layout::blocks) { // whole tiles
        const int64_t tile = many ? ROW_TILE : ROWS_PER_PASS;
        step               = (step + tile - 1) / tile * tile;
    }
    for (int64_t begin; (begin = p.row_begin + __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED) * step) < p.row_end;) {
        const int64_t end = std::min(begin + step, p.row_end);
        only_open ? multiply_open_rows(set, p, layout, begin, end) : multiply_with(set, p, layout, begin, end);
    }
}

void mul_mat_thread_with(const kernel_set & set, const mul_mat_params & p, int ith, int nth) {
    if (is_nothing(p)) {
        return; // on all threads, because all have the same params; so no thread waits at a barrier
    }
    prepare_chunks(set, p, ith, nth);
    wait_for_all(p);
    multiply_chunks(set, p, 0, ith, nth);
    wait_for_all(p);
}

static bool has_own_layouts(const kernel_set & set) { return set.layouts.coded && cpu_is_zen4(); }

// The portable set after an invalid GGML_MACKO_CPU_KERNELS, which the loading of a model reports.
static const kernel_set & set_in_use() {
    static const kernel_set set = [] {
        const kernel_set * selected = select_once().set;
        kernel_set         tuned    = selected ? *selected : kernels_portable;
        if (has_own_layouts(tuned)) {
            tuned.layouts.bundles_below = tuned.layouts.short_bundles_below;
            tuned.layouts.coded_from    = 1.0f; // F32 stays coded, because there are no bundles for it
        }
        return tuned;
    }();
    return set;
}

const char * cpu_with_own_layouts() { return has_own_layouts(set_in_use()) ? "Zen 4" : ""; }

void mul_mat_thread(const mul_mat_params & p, int ith, int nth) { mul_mat_thread_with(set_in_use(), p, ith, nth); }

void mul_mat_prepare(const mul_mat_params & p, int ith, int nth) {
    if (!is_nothing(p)) {
        prepare_chunks(set_in_use(), p, ith, nth);
    }
}

void mul_mat_multiply(const mul_mat_params & p, int number, int ith, int nth) {
    if (!is_nothing(p)) {
        multiply_chunks(set_in_use(), p, number, ith, nth);
    }
}

// Columns of a block of x; 0 if the matrix is not quantized.
static int64_t x_block_of(const cpu_matrix & m) {
    const auto * quantized = std::get_if<quantized_layout>(&m);
    return quantized ? block_columns(quantized->window) : 0;
}

// Different dense types may round x differently, and each layout is a different copy. With the kernel `columns`, the
// sums of one product follow x.
bool same_prepared_x(const mul_mat_params & p, const mul_mat_params & q) {
    return !p.columns.masks && !q.columns.masks && base_of(p.w).dense_type == base_of(q.w).dense_type &&
           x_block_of(p.w) == x_block_of(q.w) && n_cols(p) == n_cols(q) && p.n == q.n && p.round_x == q.round_x &&
           std::equal(p.x, p.x + p.n, q.x) && !is_nothing(p) && !is_nothing(q) &&
           choose_layout(set_in_use(), p) == choose_layout(set_in_use(), q);
}

const layout_traits & layout_traits_in_use() { return set_in_use().layouts; }

const row_ops & row_ops_in_use() { return set_in_use().rows; }

const span_ops & span_ops_in_use() { return *set_in_use().spans; }

expanders expanders_in_use() { return set_in_use().expand; }

} // namespace macko::cpu
