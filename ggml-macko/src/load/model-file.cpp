// Opens GGUF models. Decides which checks a file must pass for each purpose, and which errors leave a file to
// llama.cpp.
#include "load/model-file.h"
#include "gguf/model-keys.h"
#include "load/compress.h"
#include "load/link.h"

#include <algorithm>
#include <cinttypes>
#include <string_view>

namespace macko {

// How many bytes of a file with an invalid header are searched for the keys of a sparse file. Headers of published
// models have at most 20 MB.
constexpr int64_t CLAIM_SEARCH_NBYTES = 64 << 20;

static int check_not_split(const gguf_header & header) {
    int64_t count = 0;
    TRY(split_count(header, &count));
    return count == 1
               ? GGML_MACKO_STATUS_OK
               : fail(GGML_MACKO_STATUS_SPLIT_FILE,
                      "one of %" PRId64 " files of a split model: merge them first (llama-gguf-split --merge)", count);
}

static int check_model(model_file * file, bool strict) {
    TRY(check_model_keys(file->header, strict));
    file->has_rules = has_model_rules(file->header, &file->arch);
    return check_model_tensors(dense_tensors(*file), file->has_rules);
}

int model_file_open(const char * path, bool require_model, std::unique_ptr<model_file> * out) {
    auto file   = std::make_unique<model_file>();
    int  status = file->open(path);
    if (status == GGML_MACKO_STATUS_OK) {
        status = read_gguf_header(*file, &file->header);
    }
    // The header of one shard of a split sparse model does not describe the whole model.
    if (status == GGML_MACKO_STATUS_OK && (require_model || file->header.find("macko.version") != nullptr)) {
        status = check_not_split(file->header);
    }
    if (status == GGML_MACKO_STATUS_OK) {
        status = check_sparse_tensors(file.get());
    }
    if (status == GGML_MACKO_STATUS_OK && require_model) {
        status = check_model(file.get(), false);
    }
    if (status != GGML_MACKO_STATUS_OK) {
        prefix_error(path);
        return status;
    }
    *out = std::move(file);
    return GGML_MACKO_STATUS_OK;
}

// Whether a file with an invalid header contains the name of a key that only sparse files have.
static bool claims_to_be_sparse(const model_file & file) {
    static constexpr std::string_view keys[] = { "macko.version", "macko.tensor." };
    constexpr int64_t                 chunk  = 1 << 20;
    constexpr int64_t overlap                = 16; // at least the length of a name, so that no chunk boundary hides one
    const int64_t     end                    = std::min(file.size(), CLAIM_SEARCH_NBYTES);
    std::vector<char> buffer(static_cast<size_t>(std::min(end, chunk + overlap)));
    for (int64_t at = 0; at < end; at += chunk) {
        const int64_t n = std::min(end - at, chunk + overlap);
        if (file.read(at, buffer.data(), n) != GGML_MACKO_STATUS_OK) {
            return false;
        }
        const std::string_view bytes(buffer.data(), static_cast<size_t>(n));
        if (std::any_of(std::begin(keys), std::end(keys),
                        [&](std::string_view key) { return bytes.find(key) != std::string_view::npos; })) {
            return true;
        }
    }
    return false;
}

// Reads the header and the description of the sparse tensors of a model that may be split.
static int open_for_load(const char * path, compression how, model_file * file) {
    TRY(read_gguf_header(*file, &file->header));
    const bool compress = how != compression::off;
    if (compress || file->header.find("macko.version") != nullptr) { // llama.cpp itself opens the parts of dense models
        TRY(file->append_shards());
    }
    TRY(check_sparse_tensors(file));
    return file->is_sparse || compress
               ? GGML_MACKO_STATUS_OK
               : fail(GGML_MACKO_STATUS_NOT_SPARSE, "%s: not a sparse GGUF (no key macko.version)", path);
}

int model_file_open_sparse(const char * path, compression how, bool strict, std::unique_ptr<model_file> * out) {
    auto file   = std::make_unique<model_file>();
    int  status = file->open(path);
    if (status != GGML_MACKO_STATUS_OK) {
        prefix_error(path); // a FIFO or device is not left to llama.cpp, which would wait for its data or its end
        return status == GGML_MACKO_STATUS_NOT_A_FILE ? status : static_cast<int>(GGML_MACKO_STATUS_NOT_SPARSE);
    }
    const bool linked = is_link(*file);
    if (linked) {
        how    = compression::off;
        status = follow_link(path, &file);
        path   = file->path.c_str();
    }
    if (status == GGML_MACKO_STATUS_OK) {
        status = open_for_load(path, how, file.get());
    }
    bool ours = linked || file->is_sparse;
    if (status == GGML_MACKO_STATUS_NOT_SPARSE) {
        return linked ? fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "%s: not a sparse GGUF, but a link names it", path)
                      : status;
    }
    if (status == GGML_MACKO_STATUS_OK) {
        status = check_model(file.get(), strict);
    } else if (!ours) {
        const std::string text = ggml_macko_last_error();
        ours                   = claims_to_be_sparse(*file);
        status                 = fail(status, "%s", text.c_str());
    }
    if (status == GGML_MACKO_STATUS_OK && !file->is_sparse) {
        status = compress_weights(file.get(), how == compression::bit_exact);
    }
    if (status != GGML_MACKO_STATUS_OK) {
        prefix_error(path);
        return ours ? status : GGML_MACKO_STATUS_NOT_SPARSE;
    }
    *out = std::move(file);
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
