#include "load/compress.h"
#include "codec/macko/encode.h"
#include "codec/negative-zeros.h"
#include "codec/registry.h"
#include "codec/team.h"
#include "gguf/names.h"

#include <algorithm>
#include <cinttypes>
#include <mutex>
#include <string_view>

namespace macko {

// ---- which weights ----

static bool is_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

// Extracts X from blk.N.X.weight. The encoder and decoder of one model have prefixes of their own.
static bool block_part(std::string_view name, std::string_view * part) {
    constexpr std::string_view suffix = ".weight";
    for (const std::string_view prefix : { "enc.", "dec." }) {
        if (starts_with(name, prefix)) {
            name.remove_prefix(prefix.size());
            break;
        }
    }
    if (!starts_with(name, "blk.") || !ends_with(name, suffix)) {
        return false;
    }
    name                = name.substr(4, name.size() - 4 - suffix.size());
    const size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
    if (digits == 0 || digits == name.size() || name[digits] != '.') {
        return false;
    }
    *part = name.substr(digits + 1);
    return true;
}

// Large matrices of state-space models, RWKV, short convolutions and the vision experts of CogVLM.
static constexpr std::string_view OTHER_MATRICES[] = { "ssm_in",
                                                       "ssm_out",
                                                       "time_mix_key",
                                                       "time_mix_value",
                                                       "time_mix_receptance",
                                                       "time_mix_gate",
                                                       "time_mix_output",
                                                       "channel_mix_key",
                                                       "channel_mix_value",
                                                       "channel_mix_receptance",
                                                       "shortconv.in_proj",
                                                       "shortconv.out_proj",
                                                       "vis_attn_qkv",
                                                       "vis_attn_output",
                                                       "vis_gate",
                                                       "vis_up",
                                                       "vis_down" };

// Name parts of attn_ and ffn_ tensors that are not matrices, are small, or that llama.cpp uses through a view.
static constexpr std::string_view NO_MATRICES[] = {
    "norm", "_rel_b", "_sinks", "_exp_probs", "_inp_", "_compressor", "_conv", "_res_score", "_rot_embd", "_tid2eid",
};

// Weights that stay dense: norms and biases, which have one dimension; embeddings of positions, which may be read in
// other ways than by row; routers (ffn_gate_inp), which are small and choose the experts of a token; and the small
// gates and decays of state-space models and RWKV.
int weight_use(std::string_view name, int n_dims) {
    if (name == "output.weight" || name == "token_embd.weight") {
        return n_dims == 2 ? GGML_MACKO_WEIGHT_HEAD : GGML_MACKO_WEIGHT_OTHER;
    }
    std::string_view part;
    if (!block_part(name, &part)) {
        return GGML_MACKO_WEIGHT_OTHER;
    }
    const auto is_one_of = [&](std::string_view matrix) { return part == matrix; };
    if (std::any_of(std::begin(OTHER_MATRICES), std::end(OTHER_MATRICES), is_one_of)) {
        return n_dims == 2 ? GGML_MACKO_WEIGHT_BLOCK : GGML_MACKO_WEIGHT_OTHER;
    }
    const auto is_kind = [&](std::string_view kind) { return part.size() > kind.size() && starts_with(part, kind); };
    const auto has     = [&](std::string_view text) { return part.find(text) != std::string_view::npos; };
    if (!(is_kind("attn_") || is_kind("cross_attn_") || is_kind("ffn_")) || ends_with(part, "_inp") ||
        !std::all_of(part.begin(), part.end(), is_word) ||
        std::any_of(std::begin(NO_MATRICES), std::end(NO_MATRICES), has)) {
        return GGML_MACKO_WEIGHT_OTHER;
    }
    const bool is_experts = ends_with(part, "_exps") || ends_with(part, "_chexps");
    return n_dims == 2 || (n_dims == 3 && is_experts) ? GGML_MACKO_WEIGHT_BLOCK : GGML_MACKO_WEIGHT_OTHER;
}

// ---- counting ----

constexpr int64_t SLAB_NBYTES = 16 << 20;

namespace {

struct tensor_count {
    ggml_macko_count       total = {};
    std::vector<row_count> rows;
    int64_t                n_negative_zeros = 0; // negative zeros that were counted as zeros
};

} // namespace

static int count_tensor(const model_file & file, const gguf_tensor & t, const macko_desc & desc, bool bit_exact,
                        std::vector<uint8_t> & slab, tensor_count * count) {
    const int64_t row_nbytes = desc.cols * value_nbytes(desc.type);
    const int64_t rows_slab  = std::max<int64_t>(1, SLAB_NBYTES / row_nbytes);
    count->total             = {};
    count->rows.resize(static_cast<size_t>(desc.rows));
    slab.resize(std::max(slab.size(), static_cast<size_t>(std::min(rows_slab, desc.rows) * row_nbytes)));
    for (int64_t row = 0; row < desc.rows; row += rows_slab) {
        const int64_t    n = std::min(rows_slab, desc.rows - row);
        ggml_macko_count c = {};
        TRY(file.read(t.offset + row * row_nbytes, slab.data(), n * row_nbytes));
        const int n_threads = threads_for(0, n * desc.cols);
        if (!bit_exact) {
            count->n_negative_zeros += drop_negative_zeros(slab.data(), desc.type, n * desc.cols, n_threads);
        }
        TRY(count_dense(slab.data(), desc.type, n, desc.cols, n_threads, &c, &count->rows[static_cast<size_t>(row)]));
        add(count->total, c);
    }
    return GGML_MACKO_STATUS_OK;
}

// Bytes of the three components in a file, each padded to the alignment (FORMAT.md section 3).
static int64_t file_nbytes(const macko_desc & desc, int64_t n_stored, int32_t bits, int64_t alignment) {
    const auto align = [&](int64_t n) { return (n + alignment - 1) & ~(alignment - 1); };
    return align(n_padded(n_stored) * value_nbytes(desc.type)) + align(deltas_nbytes(n_padded(n_stored), bits)) +
           align(4 * (desc.rows + 1));
}

// Index of the delta_bits that needs the fewest bytes, or -1 if no choice is smaller than the dense tensor.
static int best_width(const macko_desc & desc, const ggml_macko_count & total, int64_t nbytes_dense,
                      int64_t alignment) {
    int     best   = -1;
    int64_t nbytes = (nbytes_dense + alignment - 1) & ~(alignment - 1);
    for (int i = 0; i < 4; i++) {
        const int64_t n = file_nbytes(desc, total.n_stored[i], 1 << i, alignment);
        if (total.n_stored[i] <= MAX_STORED && n < nbytes) {
            best   = i;
            nbytes = n;
        }
    }
    return best;
}

// Describes the compressed tensor in *m; m->format is nullptr if compression would not make the tensor smaller.
static int plan_tensor(const model_file & file, const gguf_tensor & t, bool bit_exact, std::vector<uint8_t> & slab,
                       sparse_tensor_info * m) {
    // The number of rows cannot overflow: read_gguf_header has checked the number of elements.
    macko_desc desc = { t.ne[1] * t.ne[2] * t.ne[3], t.ne[0], t.type, 4, 0 };
    m->format       = nullptr;
    if (!is_value_type(t.type) || weight_use(t.name, t.n_dims) == GGML_MACKO_WEIGHT_OTHER ||
        check_desc(desc) != GGML_MACKO_STATUS_OK) {
        return GGML_MACKO_STATUS_OK;
    }
    tensor_count count;
    TRY(count_tensor(file, t, desc, bit_exact, slab, &count));
    const int width = best_width(desc, count.total, t.nbytes, file.header.alignment);
    if (width < 0 || count.total.n_nonfinite > 0) {
        return GGML_MACKO_STATUS_OK;
    }
    auto row_ptr = std::make_shared<std::vector<int32_t>>(static_cast<size_t>(desc.rows) + 1, 0);
    for (size_t r = 0; r < count.rows.size(); r++) {
        (*row_ptr)[r + 1] = (*row_ptr)[r] + count.rows[r].n_stored[width];
    }
    desc.delta_bits = 1 << width;
    desc.nnz        = count.total.nnz;
    *m              = { t.name,
                        &rows_codec(),
                        desc,
                        desc.type,
                        desc.delta_bits,
                        t.n_dims,
                        { t.ne[0], t.ne[1], t.ne[2], t.ne[3] },
                        n_padded(count.total.n_stored[width]),
                        t.nbytes,
                        0,
                        1,
                        std::move(row_ptr),
                        count.n_negative_zeros };
    return GGML_MACKO_STATUS_OK;
}

static int find_matrices(const model_file & file, bool bit_exact, std::vector<sparse_tensor_info> * out) {
    std::vector<uint8_t> slab;
    for (size_t t = 0; t < file.header.tensors.size(); t++) {
        sparse_tensor_info m = {};
        if (const int status = plan_tensor(file, file.header.tensors[t], bit_exact, slab, &m)) {
            prefix_error(file.header.tensors[t].name.c_str());
            return status;
        }
        if (m.format != nullptr) {
            m.first = t;
            out->push_back(std::move(m));
        }
    }
    return file.check_unchanged();
}

// ---- cache of the last result, because llama.cpp opens a model several times to find what fits into memory ----

namespace {

struct found_matrices {
    std::mutex                         mutex;
    std::vector<platform::file_status> files; // the shards of the model that matrices was computed from
    bool                               bit_exact = false;
    std::vector<sparse_tensor_info>    matrices;
};

} // namespace

int compress_weights(model_file * file, bool bit_exact) {
    static found_matrices             last;
    const std::lock_guard<std::mutex> lock(last.mutex);
    const bool                        known = last.bit_exact == bit_exact && last.files.size() == file->shards.size() &&
                       std::equal(last.files.begin(), last.files.end(), file->shards.begin(),
                                  [](const platform::file_status & a, const file_shard & shard) {
                                      return is_same_file(a, shard.opened);
                                  });
    if (!known) {
        last.files.clear();
        last.matrices.clear();
        TRY(find_matrices(*file, bit_exact, &last.matrices));
        for (const file_shard & shard : file->shards) {
            last.files.push_back(shard.opened);
        }
        last.bit_exact = bit_exact;
    }
    if (last.matrices.empty()) {
        return fail(GGML_MACKO_STATUS_NOT_SPARSE, "no weight would shrink, so the model stays dense");
    }
    file->sparse    = last.matrices;
    file->is_sparse = true;
    for (size_t i = 0; i < file->sparse.size(); i++) {
        file->tensor_sparse_index[file->sparse[i].first] = static_cast<int64_t>(i);
    }
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
