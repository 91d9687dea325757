// Opens the files of a model and reads across them. A model that was split by llama-gguf-split consists of N files
// NAME-00001-of-0000N.gguf; the first file has the metadata.
#include "load/file-shards.h"
#include "gguf/names.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <string_view>

namespace macko {

int64_t model_file::size() const { return shards.empty() ? 0 : shards.back().begin + shards.back().opened.size; }

static int read_shard(const file_shard & shard, int64_t offset, uint8_t * out, int64_t n) {
    const int64_t got = platform::read_file(shard.file, out, static_cast<size_t>(n), offset);
    if (got < 0) {
        return fail(GGML_MACKO_STATUS_IO, "read at %" PRId64 ": %s", offset, strerror(errno));
    }
    if (got < n) {
        return fail(GGML_MACKO_STATUS_TRUNCATED, "short read: the file shrank (ends at %" PRId64 " vs %" PRId64 ")",
                    offset + got, shard.opened.size);
    }
    return GGML_MACKO_STATUS_OK;
}

int model_file::read(int64_t offset, void * dst, int64_t n) const {
    uint8_t * out = static_cast<uint8_t *>(dst);
    auto      it  = std::upper_bound(shards.begin(), shards.end(), offset,
                                     [](int64_t at, const file_shard & shard) { return at < shard.begin; });
    for (--it; n > 0; ++it) { // upper_bound never finds the first shard, which begins at 0
        const bool    last = it + 1 == shards.end();
        const int64_t len  = last ? n : std::min(n, (it + 1)->begin - offset);
        if (const int status = read_shard(*it, offset - it->begin, out, len)) {
            if (shards.size() > 1) {
                prefix_error(it->path.c_str());
            }
            return status;
        }
        out += len;
        offset += len;
        n -= len;
    }
    return GGML_MACKO_STATUS_OK;
}

bool is_same_file(const platform::file_status & a, const platform::file_status & b) {
    return a.device == b.device && a.inode == b.inode && a.size == b.size && a.written == b.written;
}

int model_file::check_unchanged() const {
    for (const file_shard & shard : shards) {
        platform::file_status now;
        if (!platform::get_status(shard.file, &now)) {
            return fail(GGML_MACKO_STATUS_IO, "%s: %s", shard.path.c_str(), strerror(errno));
        }
        if (!is_same_file(now, shard.opened)) {
            return fail(GGML_MACKO_STATUS_FILE_CHANGED, "%s: the file changed while it was read", shard.path.c_str());
        }
    }
    return GGML_MACKO_STATUS_OK;
}

int model_file::open(const char * file_path) {
    path = file_path;
    shards.emplace_back();
    file_shard & shard = shards.back();
    shard.path         = file_path;
    shard.file         = platform::open_file(file_path, &shard.opened);
    if (!shard.file && errno != ENXIO) {
        return fail(GGML_MACKO_STATUS_IO, "%s", strerror(errno));
    }
    if (!shard.opened.is_regular) {
        return fail(GGML_MACKO_STATUS_NOT_A_FILE, "not a regular file");
    }
    return GGML_MACKO_STATUS_OK;
}

// ---- split models ----

// *value is -1 if the key is missing.
static int find_split_key(const gguf_header & header, const char * name, gguf_type type, int64_t * value) {
    const gguf_key * key = header.find(name);
    *value               = -1;
    if (key != nullptr && (key->type != type || !header.get_int(*key, 0, value))) {
        return fail(GGML_MACKO_STATUS_BAD_KEY_TYPE, "key %s is not %s", name, type == GGUF_U16 ? "a u16" : "an i32");
    }
    return GGML_MACKO_STATUS_OK;
}

int split_count(const gguf_header & header, int64_t * count) {
    const int status = find_split_key(header, "split.count", GGUF_U16, count);
    *count           = std::max<int64_t>(*count, 1); // llama-gguf-split writes 0 when it merges the shards again
    return status;
}

// Opens shard i of n, checks its header, and appends its tensors to those of the model.
static int append_shard(model_file * file, const std::string & path, int64_t i, int64_t n) {
    model_file shard;
    int64_t    no = 0, count = 0;
    TRY(shard.open(path.c_str()));
    TRY(read_gguf_header(shard, &shard.header));
    TRY(find_split_key(shard.header, "split.no", GGUF_U16, &no));
    TRY(split_count(shard.header, &count));
    if (no != i || count != n) {
        return fail(GGML_MACKO_STATUS_SPLIT_FILE, "is not shard %" PRId64 " of %" PRId64, i + 1, n);
    }
    for (const gguf_key & key : shard.header.keys) {
        if (starts_with(key.name, "macko.")) {
            return fail(GGML_MACKO_STATUS_SPLIT_FILE, "has the key %s, which belongs in the first shard",
                        printable(key.name.c_str()).text);
        }
    }
    if (shard.header.alignment != file->header.alignment) {
        return fail(GGML_MACKO_STATUS_BAD_ALIGNMENT,
                    "general.alignment differs from the first shard's (%" PRId64 " vs %" PRId64 ")",
                    shard.header.alignment, file->header.alignment);
    }
    const int64_t begin = file->size();
    for (gguf_tensor & t : shard.header.tensors) {
        t.offset += begin;
        file->header.tensors.push_back(std::move(t));
    }
    file->header.file_size += shard.header.file_size;
    shard.shards[0].begin = begin;
    file->shards.push_back(std::move(shard.shards[0]));
    return GGML_MACKO_STATUS_OK;
}

static int check_tensor_names(const gguf_header & header) {
    std::vector<std::string_view> names;
    for (const gguf_tensor & t : header.tensors) {
        names.push_back(t.name);
    }
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    return twice == names.end()
               ? GGML_MACKO_STATUS_OK
               : fail(GGML_MACKO_STATUS_DUPLICATE_TENSOR, "tensor %s is in two shards", std::string(*twice).c_str());
}

int model_file::append_shards() {
    int64_t n = 0, no = 0, n_tensors = 0;
    TRY(split_count(header, &n));
    if (n == 1) {
        return GGML_MACKO_STATUS_OK;
    }
    TRY(find_split_key(header, "split.no", GGUF_U16, &no));
    TRY(find_split_key(header, "split.tensors.count", GGUF_I32, &n_tensors));
    char suffix[32];
    snprintf(suffix, sizeof(suffix), "-00001-of-%05d.gguf", static_cast<int>(n));
    const size_t n_suffix = strlen(suffix);
    if (no != 0 || path.size() < n_suffix || path.compare(path.size() - n_suffix, n_suffix, suffix) != 0) {
        return fail(GGML_MACKO_STATUS_SPLIT_FILE, "shard of a split model: give its first shard, NAME%s", suffix);
    }
    for (int64_t i = 1; i < n; i++) {
        snprintf(suffix, sizeof(suffix), "-%05d-of-%05d.gguf", static_cast<int>(i + 1), static_cast<int>(n));
        const std::string shard = path.substr(0, path.size() - n_suffix) + suffix;
        if (const int status = append_shard(this, shard, i, n)) {
            prefix_error(shard.c_str());
            return status;
        }
    }
    if (n_tensors >= 0 && static_cast<size_t>(n_tensors) != header.tensors.size()) {
        return fail(GGML_MACKO_STATUS_SPLIT_FILE, "the shards have %zu tensors, but split.tensors.count is %" PRId64,
                    header.tensors.size(), n_tensors);
    }
    if (header.tensors.size() > MAX_TENSORS) {
        return fail(GGML_MACKO_STATUS_LIMIT, "too many tensors (%zu vs %" PRIu64 ")", header.tensors.size(),
                    MAX_TENSORS);
    }
    return check_tensor_names(header);
}

} // namespace macko
