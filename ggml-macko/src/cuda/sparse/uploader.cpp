// Uploads a sparse matrix to the GPU in the layout that settle() chooses. The arrays of MACKO rows are copied to device
// staging memory, where kernels make the layout (repack.cu). So are the arrays of packed matrices, which first become
// MACKO rows (unpack.cu), and those of FRAGMENTS (fragments-tiles.cu); the host makes ROW_BLOCKS.
#include "codec/macko/encode.h"
#include "codec/team.h"
#include "cuda/sparse/mul-mat.cuh"
#include "cuda/sparse/repack.cuh"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <initializer_list>

namespace macko::cuda {

constexpr int64_t PINNED_NBYTES = int64_t(512) << 10; // about the rows that a thread passes at a time
constexpr int     N_PINNED      = 16;                 // pinning more takes too long; a load has two uploaders

// one chunk of pinned memory, on its own stream
struct pinned_buffer {
    void *       data      = nullptr;
    cudaStream_t stream    = nullptr;
    bool         in_flight = false; // a copy may still read it
};

struct cuda_sparse_uploader::impl {
    int                         device         = 0;
    cuda_device_info            info           = {};
    uint8_t *                   staging        = nullptr; // device memory
    int64_t                     staging_nbytes = 0;
    repack_counts *             counts         = nullptr; // device memory
    pinned_buffer               pinned[N_PINNED];
    std::mutex                  mutex;
    std::condition_variable     freed;
    std::deque<pinned_buffer *> unused; // buffers that no thread fills, the oldest first
    fragments_sizes             sizes;

    // the current matrix
    struct matrix_state {
        gpu_plan           plan         = {};
        void *             dst          = nullptr; // plan.nbytes bytes
        macko_layout       raw          = {};      // in staging memory
        bool               have_row_ptr = false;
        const codec_view * whole        = nullptr; // if it was passed as a whole
        int                n_threads    = 1;
        layout_survey      survey       = {};
        int                counted      = -1; // the candidate whose groups are counted
        int                made         = -1; // the candidate whose layout is in memory
        gpu_layout         layout       = {};
        layout_verdict     verdict      = { survey_step::EXPONENT, 0, {}, 0, {} }; // settled: needs NOTHING
        cuda_memory        own; // separate memory, if dst is too small
    };
    matrix_state at;

    ~impl() {
        cudaSetDevice(device);
        for (pinned_buffer & p : pinned) {
            if (p.stream) {
                cudaStreamSynchronize(p.stream);
                cudaStreamDestroy(p.stream);
            }
            cudaFreeHost(p.data);
        }
        cudaFree(staging);
        cudaFree(counts);
    }

    // Copies host memory to the device; several threads may call it. `from` may be reused after the call. The copy is
    // complete after arrived().
    int copy(void * to, const void * from, int64_t nbytes) {
        CUDA_OK(cudaSetDevice(device));
        for (int64_t at = 0; at < nbytes; at += PINNED_NBYTES) {
            const cudaError_t copied =
                copy_chunk(static_cast<uint8_t *>(to) + at, static_cast<const uint8_t *>(from) + at,
                           static_cast<size_t>(std::min(PINNED_NBYTES, nbytes - at)));
            CUDA_OK(copied);
        }
        return GGML_MACKO_STATUS_OK;
    }

    cudaError_t copy_chunk(void * to, const void * from, size_t nbytes) {
        pinned_buffer * p = nullptr;
        {
            std::unique_lock<std::mutex> lock(mutex);
            freed.wait(lock, [&] { return !unused.empty(); });
            p = unused.front();
            unused.pop_front();
        }
        cudaError_t error = cudaStreamSynchronize(p->stream);
        if (error == cudaSuccess) {
            memcpy(p->data, from, nbytes);
            p->in_flight = true;
            error        = cudaMemcpyAsync(to, p->data, nbytes, cudaMemcpyHostToDevice, p->stream);
        }
        {
            const std::lock_guard<std::mutex> lock(mutex);
            unused.push_back(p);
        }
        freed.notify_one();
        return error;
    }

    // Waits for all copies. No thread may be copying.
    int arrived() {
        for (pinned_buffer & p : pinned) {
            if (p.in_flight) {
                CUDA_OK(cudaStreamSynchronize(p.stream));
                p.in_flight = false;
            }
        }
        return GGML_MACKO_STATUS_OK;
    }

    // Makes staging memory of at least nbytes.
    int reserve(int64_t nbytes) {
        if (nbytes > staging_nbytes) {
            CUDA_OK(cudaFree(staging));
            staging        = nullptr;
            staging_nbytes = 0;
            CUDA_OK(cudaMalloc(&staging, static_cast<size_t>(nbytes)));
            staging_nbytes = nbytes;
        }
        return GGML_MACKO_STATUS_OK;
    }
    // Makes staging memory for the arrays of MACKO rows.
    int stage() {
        const gpu_matrix & m = at.plan.matrix;
        TRY(reserve(bind_macko(m.desc, m.n_padded, nullptr).nbytes));
        at.raw = bind_macko(m.desc, m.n_padded, staging);
        return GGML_MACKO_STATUS_OK;
    }

    struct transfer {
        uint8_t *       to;
        const uint8_t * from;
        int64_t         nbytes;
    };
    template <typename T> static transfer array(T * to, const T * from, int64_t n) {
        return { reinterpret_cast<uint8_t *>(to), reinterpret_cast<const uint8_t *>(from),
                 n * static_cast<int64_t>(sizeof(T)) };
    }
    // copy() of arrays, in one team of threads
    int copy_arrays(std::initializer_list<transfer> arrays) {
        std::vector<transfer> pieces;
        for (const transfer & a : arrays) {
            for (int64_t begin = 0; begin < a.nbytes; begin += PINNED_NBYTES) {
                pieces.push_back({ a.to + begin, a.from + begin, std::min(PINNED_NBYTES, a.nbytes - begin) });
            }
        }
        std::atomic<int> failed{ GGML_MACKO_STATUS_OK };
        parallel_parts(at.n_threads, static_cast<int64_t>(pieces.size()), 1, [&](int64_t i, int64_t, int) {
            const transfer & t      = pieces[static_cast<size_t>(i)];
            const int        status = failed ? failed.load() : copy(t.to, t.from, t.nbytes);
            if (status) {
                failed = status;
            }
        });
        return failed;
    }

    // Returns the memory of a candidate: the reserved memory, or separate memory.
    int memory_of(int64_t nbytes, void ** memory) {
        if (nbytes > at.plan.nbytes && !at.own) {
            CUDA_OK(cudaMalloc(memory, static_cast<size_t>(nbytes)));
            at.own.reset(*memory);
        }
        *memory = nbytes > at.plan.nbytes ? at.own.get() : at.dst;
        return GGML_MACKO_STATUS_OK;
    }

    // ---- one step of the survey, or the layout itself ----
    // m: the candidate of v, bound to its memory

    int step(const macko_layout & m, const layout_verdict &, shape_survey *) {
        CUDA_OK(cudaMemcpyAsync(m.values, staging, static_cast<size_t>(m.nbytes), cudaMemcpyDeviceToDevice,
                                pinned[0].stream));
        CUDA_OK(cudaStreamSynchronize(pinned[0].stream));
        return GGML_MACKO_STATUS_OK;
    }

    template <typename M> int row_split(M & m, const layout_verdict & v, shape_survey * found) {
        const repacker r         = { at.raw, at.plan.matrix.desc, info, counts, pinned[0].stream };
        const int      candidate = static_cast<int>(v.candidate);
        if (v.needs == survey_step::EXPONENT) {
            return find_exponent(r, m, found);
        }
        m.exponent = found->exponent;
        if (v.needs == survey_step::GROUPS || (at.counted != candidate && at.made != candidate)) {
            at.counted = candidate;
            at.made    = -1;
            TRY(count_groups(r, m, found));
        }
        if (v.needs != survey_step::GROUPS && at.made != candidate) {
            at.made = candidate;
            TRY(make_groups(r, m, found));
        }
        m.overshoot = found->overshoot;
        return GGML_MACKO_STATUS_OK;
    }
    int step(inline_delta_layout & m, const layout_verdict & v, shape_survey * found) { return row_split(m, v, found); }
    int step(exp_coded_layout & m, const layout_verdict & v, shape_survey * found) { return row_split(m, v, found); }

    int step(fragments_layout & m, const layout_verdict & v, shape_survey * found) {
        const quantized_arrays & a = static_cast<const quantized_view &>(*at.whole).arrays();
        if (v.needs == survey_step::NBYTES) {
            sizes             = size_fragments(a, m, at.n_threads);
            found->nbytes     = sizes.nbytes;
            found->most_words = sizes.most_words;
            return GGML_MACKO_STATUS_OK;
        }
        const int64_t negative = int64_t(1) << (a.bits - 1); // the first negative level
        for (int64_t i = 0; i < 2 * negative && m.code_bits == 4; i++) {
            m.magnitudes[fragments_nibble(static_cast<uint32_t>(i), a.bits)] =
                static_cast<uint8_t>(std::abs(a.levels[i]));
        }
        fragments_source source = { a, {} };
        std::copy_n(a.levels, 2 * negative, source.level_of);
        // the arrays, side by side in staging memory
        const int64_t n_codes = codes_nbytes(a.row_ptr[a.dense.rows], a.bits), n_scales = a.dense.rows * a.windows(),
                      n_bitmap = bitmap_nbytes(a.dense.rows, a.dense.cols);
        uint8_t *  codes = nullptr, *bitmap = nullptr, *scales = nullptr;
        uint16_t * factors = nullptr;
        int32_t *  row_ptr = nullptr;
        const auto bind    = [&](void * begin) {
            memory_parts parts(begin);
            parts.take(&codes, n_codes);
            parts.take(&bitmap, n_bitmap);
            parts.take(&scales, n_scales);
            parts.take(&factors, a.dense.rows);
            parts.take(&row_ptr, a.dense.rows + 1);
            return parts.nbytes();
        };
        TRY(reserve(bind(nullptr)));
        bind(staging);
        TRY(copy_arrays({ array(codes, a.codes, n_codes), array(bitmap, a.bitmap, n_bitmap),
                          array(scales, a.scales, n_scales), array(factors, a.factors, a.dense.rows),
                          array(row_ptr, a.row_ptr, a.dense.rows + 1),
                          array(m.starts, sizes.starts.data(), static_cast<int64_t>(sizes.starts.size())) }));
        TRY(arrived());
        source.arrays = { a.dense, a.bits, a.window, codes, bitmap, scales, factors, row_ptr, nullptr };
        CUDA_OK(pack_fragments(source, m, pinned[0].stream));
        CUDA_OK(cudaStreamSynchronize(pinned[0].stream));
        return GGML_MACKO_STATUS_OK;
    }

    // Makes the rows of a packed matrix in the staging memory.
    int unpack(const packed_view & view) {
        const packed_arrays & a        = view.arrays();
        const bool            is_coded = a.desc.value_type == GGML_MACKO_TYPE_CODED;
        std::vector<uint8_t>  made;
        std::vector<int32_t>  row_ptr;
        const uint8_t * const bits = view.bitmap(at.n_threads, &made);
        TRY(view.count_entries(bits, at.n_threads, &row_ptr));
        const int64_t n_bitmap              = a.desc.dense.rows * bitmap_row_nbytes(a.desc.dense.cols),
                      n_values              = a.n_values * (is_coded ? 4 : value_nbytes(a.desc.dense.type));
        const std::vector<int64_t> & before = view.coded().outliers_before();
        // behind the rows
        uint8_t *  values = nullptr, *bitmap = nullptr;
        int32_t *  of_values       = nullptr;
        int64_t *  outliers_before = nullptr;
        const auto bind            = [&](uint8_t * rows) {
            at.raw = bind_macko(at.plan.matrix.desc, at.plan.matrix.n_padded, rows);
            memory_parts parts(rows ? rows + at.raw.nbytes : nullptr);
            parts.take(&values, n_values);
            parts.take(&bitmap, n_bitmap);
            parts.take(&of_values, a.n_row_ptr);
            parts.take(&outliers_before, static_cast<int64_t>(before.size()));
            return at.raw.nbytes + parts.nbytes();
        };
        TRY(reserve(bind(nullptr)));
        bind(staging);
        TRY(copy_arrays({ array(values, static_cast<const uint8_t *>(a.values), n_values),
                          array(bitmap, bits, n_bitmap), array(of_values, a.row_ptr, a.n_row_ptr),
                          array(at.raw.row_ptr, row_ptr.data(), static_cast<int64_t>(row_ptr.size())),
                          array(outliers_before, before.data(), static_cast<int64_t>(before.size())) }));
        TRY(arrived());
        packed_source source = { bitmap, of_values, values, {}, nullptr, nullptr, nullptr };
        if (is_coded) {
            source.plain           = nullptr;
            source.widths          = view.coded().widths();
            source.blocks          = reinterpret_cast<const uint32_t *>(values) + CODED_HEADER_WORDS;
            source.outliers        = source.blocks + source.widths.blocks_words(packed_n_values(a.desc.dense.nnz));
            source.outliers_before = outliers_before;
        }
        const int64_t n_deltas = deltas_nbytes(at.plan.matrix.n_padded, at.raw.delta_bits);
        CUDA_OK(cudaMemsetAsync(at.raw.deltas, 0, static_cast<size_t>(n_deltas), pinned[0].stream));
        CUDA_OK(unpack_rows(source, at.raw, pinned[0].stream));
        return GGML_MACKO_STATUS_OK;
    }

    int step(row_blocks_layout & m, const layout_verdict & v, shape_survey * found) {
        const ec_csr_view &     view  = static_cast<const ec_csr_view &>(*at.whole);
        const row_blocks_layout sizes = bind_row_blocks(view, nullptr);
        if (v.needs == survey_step::NBYTES) {
            found->nbytes = sizes.nbytes;
            return GGML_MACKO_STATUS_OK;
        }
        void * memory = nullptr;
        TRY(memory_of(v.nbytes, &memory));
        std::vector<uint8_t> arrays(static_cast<size_t>(sizes.nbytes_arrays), 0);
        fill_row_blocks(view, at.n_threads, bind_row_blocks(view, arrays.data()));
        m = bind_row_blocks(view, memory);
        return copy_arrays({ array(static_cast<uint8_t *>(memory), arrays.data(), m.nbytes_arrays) });
    }

    int advance(const layout_verdict & v, gpu_layout * out) {
        shape_survey & found  = at.survey.of[at.plan.candidates[v.candidate].survey];
        void *         memory = nullptr;
        TRY(memory_of(v.nbytes, &memory));
        *out = bind_layout(at.plan.matrix, v.shape, v.nbytes, memory);
        TRY(std::visit([&](auto & m) { return step(m, v, &found); }, *out));
        found.done = std::max(found.done, v.needs);
        return GGML_MACKO_STATUS_OK;
    }

    // Makes the layout, after all rows or the whole have arrived.
    int make() {
        do {
            at.verdict = settle(at.plan, at.survey);
            if (at.verdict.candidate == at.plan.candidates.size()) { // only with a forced plan
                return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "no layout fits the matrix%s", at.verdict.reason.c_str());
            }
            TRY(advance(at.verdict, &at.layout));
        } while (at.verdict.needs != survey_step::NOTHING);
        return GGML_MACKO_STATUS_OK;
    }
};

cuda_sparse_uploader::cuda_sparse_uploader(std::unique_ptr<impl> p) : impl_(std::move(p)) {}
cuda_sparse_uploader::~cuda_sparse_uploader() = default;

int cuda_sparse_uploader::create(int device, std::unique_ptr<cuda_sparse_uploader> * out) {
    auto p    = std::make_unique<impl>();
    p->device = device;
    CUDA_OK(cudaSetDevice(device));
    CUDA_OK(cuda_current_device(&p->info));
    for (pinned_buffer & buffer : p->pinned) {
        CUDA_OK(cudaMallocHost(&buffer.data, static_cast<size_t>(PINNED_NBYTES)));
        CUDA_OK(cudaStreamCreateWithFlags(&buffer.stream, cudaStreamNonBlocking));
        p->unused.push_back(&buffer);
    }
    CUDA_OK(cudaMalloc(&p->counts, sizeof(repack_counts)));
    out->reset(new cuda_sparse_uploader(std::move(p)));
    return GGML_MACKO_STATUS_OK;
}

int cuda_sparse_uploader::begin(const gpu_plan & plan, void * dst) {
    impl & s = *impl_;
    CUDA_OK(cudaSetDevice(s.device));
    TRY(s.arrived()); // copies of an abandoned matrix
    s.at      = {};
    s.at.plan = plan;
    s.at.dst  = dst;
    return arrives_whole(plan) ? GGML_MACKO_STATUS_OK : s.stage();
}

int cuda_sparse_uploader::rows(const macko_view & view) {
    impl &             s     = *impl_;
    const macko_rows & r     = view.rows();
    bool               first = false;
    {
        std::lock_guard<std::mutex> lock(s.mutex);
        first             = !s.at.have_row_ptr;
        s.at.have_row_ptr = true;
    }
    if (first) {
        TRY(s.copy(s.at.raw.row_ptr, r.row_ptr, (s.at.raw.rows + 1) * 4));
    }
    const int64_t begin = r.row_ptr[r.row_begin], end = r.row_ptr[r.row_end], b = s.at.raw.delta_bits;
    const int64_t value = value_nbytes(s.at.raw.type);
    if (begin == end) {
        return GGML_MACKO_STATUS_OK;
    }
    TRY(s.copy(s.at.raw.values + begin * value, static_cast<const uint8_t *>(r.values) + (begin - r.base) * value,
               (end - begin) * value));
    // The first and the last byte may hold deltas of neighboring rows. The neighbor writes the same bytes of the file.
    const int64_t byte_begin = begin * b / 8, byte_end = (end * b + 7) / 8;
    return s.copy(s.at.raw.deltas + byte_begin, r.deltas + byte_begin - r.base * b / 8, byte_end - byte_begin);
}

// Copies the arrays of a matrix that was recoded to MACKO to the staging memory, from several threads.
static int upload_rows(cuda_sparse_uploader & uploader, const macko_matrix & m, int n_threads) {
    constexpr int64_t ROWS = 256; // at a time
    std::atomic<int>  failed{ GGML_MACKO_STATUS_OK };
    parallel_parts(n_threads, m.desc.rows, ROWS, [&](int64_t begin, int64_t end, int) {
        macko_view view;
        int        status = failed.load();
        if (!status) {
            status = validate({ m.desc, begin, end, m.row_ptr.data(), 0, m.values.data(), m.deltas.data() }, &view);
            status = status ? status : uploader.rows(view);
        }
        if (status) {
            failed = status;
        }
    });
    return failed ? fail(failed, "a matrix could not be copied to the GPU") : GGML_MACKO_STATUS_OK;
}

bool cuda_sparse_uploader::takes(const codec & format) const {
    return arrives_whole(impl_->at.plan) || &format == &packed_codec();
}

int cuda_sparse_uploader::whole(const codec_view & view, int n_threads) {
    impl & s       = *impl_;
    s.at.n_threads = n_threads;
    CUDA_OK(cudaSetDevice(s.device));
    if (&view.format() == &packed_codec()) {
        return s.unpack(static_cast<const packed_view &>(view));
    }
    s.at.whole = &view;
    if (!s.at.plan.matrix.in_blocks) {
        return s.make();
    }
    // blocks remain blocks, or become rows whose width of deltas is chosen here
    layout_verdict v = settle(s.at.plan, s.at.survey);
    if (v.needs == survey_step::NBYTES) {
        gpu_layout blocks;
        TRY(s.advance(v, &blocks));
        v = settle(s.at.plan, s.at.survey);
    }
    if (std::holds_alternative<row_blocks_shape>(v.shape)) {
        return s.make();
    }
    gpu_matrix   rows = {};
    macko_matrix recoded;
    TRY(smallest_rows(static_cast<const ec_csr_view &>(view), n_threads, &rows));
    TRY(recode(view, rows.desc.delta_bits, n_threads, &recoded));
    TRY(begin(choose(rows, s.at.plan.device), s.at.dst));
    return upload_rows(*this, recoded, n_threads);
}

int cuda_sparse_uploader::finish(gpu_layout * out, layout_verdict * verdict, cuda_memory * outgrown) {
    impl & s = *impl_;
    CUDA_OK(cudaSetDevice(s.device));
    TRY(s.arrived());
    if (s.at.verdict.needs != survey_step::NOTHING) { // not made by whole()
        TRY(s.make());
    }
    *out     = s.at.layout;
    *verdict = s.at.verdict;
    if (verdict->nbytes > s.at.plan.nbytes) {
        *outgrown = std::move(s.at.own);
    }
    s.at.own.reset();
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko::cuda
