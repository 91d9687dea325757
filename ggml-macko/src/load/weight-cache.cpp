#include "load/weight-cache.h"
#include "codec/team.h"
#include "platform/platform.h"

#include <cerrno>
#include <cinttypes>
#include <cstring>
#include <ctime>

#define XXH_INLINE_ALL
#include <xxhash/xxhash.h>

namespace macko {

namespace {

struct cache_header {
    char     magic[8];
    uint64_t index_begin, index_nbytes, index_checksum, key_nbytes;
};
constexpr char MAGIC[8] = { 'm', 'a', 'c', 'k', 'o', 'w', 'c', '1' };
// limit for names and key, with ample margin; a longer index is damaged
constexpr uint64_t MAX_INDEX_NBYTES = 64 << 20;
constexpr time_t   OLD_PARTIAL      = 24 * 3600; // seconds; no process writes a cache for that long
constexpr time_t   TOO_YOUNG        = 2;         // seconds; longer than the time resolution of any file system

// Whether a name belongs to a file that is being written: .STEM-HASH.weights.RANDOM.partial
bool is_partial(std::string_view name) {
    const std::string_view pattern = "-################.weights.################.partial"; // #: a hexadecimal digit
    const auto             matches = [](char p, char c) {
        return p == '#' ? (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') : p == c;
    };
    return name.size() > pattern.size() && name[0] == '.' &&
           std::equal(pattern.begin(), pattern.end(), name.end() - static_cast<int64_t>(pattern.size()), matches);
}

int64_t to_whole(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

template <typename T> void put(std::vector<uint8_t> & to, T value) {
    const auto * bytes = reinterpret_cast<const uint8_t *>(&value);
    to.insert(to.end(), bytes, bytes + sizeof(value));
}

std::string text_of(const platform::file_status & file) {
    char text[200];
    snprintf(text, sizeof(text),
             "%" PRIu64 " %" PRIu64 " %" PRId64 " bytes, written %" PRId64 ".%09" PRId64 ", changed %" PRId64
             ".%09" PRId64 "\n",
             file.device, file.inode, file.size, file.written.first, file.written.second, file.changed.first,
             file.changed.second);
    return text;
}

constexpr int64_t CHUNK = 1 << 20; // bytes per thread and step

} // namespace

static uint64_t checksum_by_all(const void * data, int64_t nbytes) {
    std::vector<uint64_t> chunks(static_cast<size_t>((nbytes + CHUNK - 1) / CHUNK));
    parallel_parts(threads_for(0, nbytes), nbytes, CHUNK, [&](int64_t begin, int64_t end, int) {
        chunks[static_cast<size_t>(begin / CHUNK)] =
            XXH3_64bits(static_cast<const uint8_t *>(data) + begin, static_cast<size_t>(end - begin));
    });
    return XXH3_64bits(chunks.data(), chunks.size() * sizeof(uint64_t));
}

int weight_cache::failed(const char * what) const {
    return fail(GGML_MACKO_STATUS_IO, "%s: %s: %s", path_.c_str(), what, strerror(errno));
}

int weight_cache::open(const model_file & model, const std::string & made_for, std::unique_ptr<weight_cache> * out) {
    std::unique_ptr<weight_cache> cache(new weight_cache());
    cache->folder_ = platform::user_cache_folder();
    if (cache->folder_.empty()) {
        return fail(GGML_MACKO_STATUS_IO, "neither XDG_CACHE_HOME nor HOME is an absolute path");
    }
    platform::make_folder(cache->folder_); // open_folder() below detects all failures
    cache->folder_ += "/ggml-macko";
    platform::make_folder(cache->folder_);
    platform::file_status folder;
    cache->opened_folder_ = platform::open_folder(cache->folder_, &folder);
    if (!cache->opened_folder_) {
        return fail(GGML_MACKO_STATUS_IO, "%s: %s", cache->folder_.c_str(), strerror(errno));
    }
    if (!folder.is_private) {
        return fail(GGML_MACKO_STATUS_BAD_ARGUMENT, "%s: another user owns or may write the folder",
                    cache->folder_.c_str());
    }

    const std::string library = platform::build_id();
    if (library.empty()) {
        return fail(GGML_MACKO_STATUS_IO, "this library was linked without a build id");
    }
    cache->key_      = "library " + library + "\n" + made_for + "\n";
    const time_t now = time(nullptr);
    for (const file_shard & shard : model.shards) {
        cache->key_ += "model " + text_of(shard.opened);
        cache->too_young_ = cache->too_young_ || shard.opened.changed.first + TOO_YOUNG >= now;
    }

    const std::string path = platform::real_path(model.path) + "\n" + made_for;
    std::string       stem = model.path.substr(model.path.find_last_of('/') + 1);
    stem                   = stem.substr(0, std::min<size_t>(stem.find_last_of('.'), 100));
    char number[32];
    snprintf(number, sizeof(number), "-%016" PRIx64 ".weights", XXH3_64bits(path.data(), path.size()));
    cache->name_ = stem + number;
    cache->path_ = cache->folder_ + "/" + cache->name_;
    cache->read_index();
    *out = std::move(cache);
    return GGML_MACKO_STATUS_OK;
}

weight_cache::~weight_cache() {
    if (partial_) {
        platform::remove_in(opened_folder_, partial_name_);
    }
}

// ---- the existing file ----

static bool read_all(const platform::file & file, void * dst, size_t n, uint64_t offset) {
    return platform::read_file(file, dst, n, static_cast<int64_t>(offset)) == static_cast<int64_t>(n);
}

// Leaves entries_ empty if there is no usable cache file.
void weight_cache::read_index() {
    platform::file_status found;
    cache_header          h = {};
    file_                   = platform::open_in(opened_folder_, name_, &found);
    if (!file_ || !found.is_regular || !found.is_private || !read_all(file_, &h, sizeof(h), 0) ||
        memcmp(h.magic, MAGIC, sizeof(MAGIC)) != 0) {
        return;
    }
    const auto size = static_cast<uint64_t>(found.size);
    if (h.index_nbytes > MAX_INDEX_NBYTES || h.index_begin > size || h.index_nbytes != size - h.index_begin ||
        h.key_nbytes != key_.size() || h.key_nbytes > h.index_nbytes) {
        return;
    }
    std::vector<uint8_t> index(static_cast<size_t>(h.index_nbytes));
    if (!read_all(file_, index.data(), index.size(), h.index_begin) ||
        XXH3_64bits(index.data(), index.size()) != h.index_checksum || !parse_index(index, h.index_begin)) {
        entries_.clear();
    }
}

bool weight_cache::parse_index(const std::vector<uint8_t> & index, uint64_t end_of_weights) {
    const uint8_t *at = index.data(), *end = at + index.size();
    const auto     get = [&](void * to, size_t n) {
        if (static_cast<size_t>(end - at) < n) {
            return false;
        }
        memcpy(to, at, n);
        at += n;
        return true;
    };
    if (memcmp(at, key_.data(), key_.size()) != 0) {
        return false;
    }
    at += key_.size();
    while (at < end) {
        uint32_t length = 0;
        if (!get(&length, sizeof(length)) || static_cast<size_t>(end - at) < length) {
            return false;
        }
        std::string name(reinterpret_cast<const char *>(at), length);
        at += length;
        entry e = {};
        if (!get(&e, sizeof(e)) || e.begin % platform::page_size() != 0 || e.begin > end_of_weights ||
            e.nbytes > end_of_weights - e.begin) {
            return false;
        }
        entries_[std::move(name)] = e;
    }
    return true;
}

bool weight_cache::map(const std::string & name, void * memory, int64_t nbytes) noexcept {
    const auto it = entries_.find(name);
    if (it == entries_.end()) {
        return false;
    }
    const entry e = it->second;
    if (e.nbytes == 0 || e.nbytes > static_cast<uint64_t>(nbytes)) {
        entries_.erase(it);
        return false;
    }
    if (reinterpret_cast<uintptr_t>(memory) % platform::page_size() != 0 ||
        !platform::map_file(memory, e.nbytes, file_, static_cast<int64_t>(e.begin))) {
        return false;
    }
    bool      is_good = false;
    const int status  = c_boundary([&] {
        is_good = checksum_by_all(memory, static_cast<int64_t>(e.nbytes)) == e.checksum;
        return GGML_MACKO_STATUS_OK;
    });
    if (!is_good) {
        platform::unmap_file(memory, e.nbytes);
        if (status == GGML_MACKO_STATUS_OK) {
            entries_.erase(it); // it is damaged
        }
        return false;
    }
    n_mapped_++;
    nbytes_mapped_ += static_cast<int64_t>(e.nbytes);
    return true;
}

// ---- the new file ----

int weight_cache::write(int64_t offset, const void * data, size_t n) {
    return platform::write_file(partial_, data, n, offset) ? static_cast<int>(GGML_MACKO_STATUS_OK)
                                                           : failed("cannot write");
}

// Removes files of processes that were killed while they wrote.
void weight_cache::remove_old_partials() const {
    platform::for_each_in(opened_folder_, [&](const char * name, const platform::file_status & found) {
        if (is_partial(name) && found.is_regular && found.written.first + OLD_PARTIAL < time(nullptr)) {
            platform::remove_in(opened_folder_, name);
        }
    });
}

int weight_cache::begin_file() {
    remove_old_partials();
    uint64_t random = 0;
    if (!platform::random_bytes(&random, sizeof(random))) {
        return failed("no random bytes");
    }
    char number[32];
    snprintf(number, sizeof(number), ".%016" PRIx64, random);
    partial_name_ = "." + name_ + number + ".partial";
    partial_      = platform::create_in(opened_folder_, partial_name_);
    if (!partial_) {
        return failed("cannot create it");
    }
    end_ = static_cast<int64_t>(platform::page_size());
    // keep the weights of the old file: weights of layers that are on a GPU this time were not requested
    for (const auto & [name, e] : entries_) {
        void * copy = platform::map_memory(static_cast<size_t>(to_whole(static_cast<int64_t>(e.nbytes), end_)), true);
        if (!copy) {
            continue;
        }
        const bool is_good = platform::map_file(copy, e.nbytes, file_, static_cast<int64_t>(e.begin)) &&
                             checksum_by_all(copy, static_cast<int64_t>(e.nbytes)) == e.checksum;
        const int status = is_good ? append(name, copy, e) : static_cast<int>(GGML_MACKO_STATUS_OK);
        platform::unmap_memory(copy, e.nbytes);
        if (status) {
            return status;
        }
    }
    return GGML_MACKO_STATUS_OK;
}

int weight_cache::append(const std::string & name, const void * memory, const entry & e) {
    TRY(write(end_, memory, static_cast<size_t>(e.nbytes)));
    added_[name] = { static_cast<uint64_t>(end_), e.nbytes, e.checksum };
    end_         = to_whole(end_ + static_cast<int64_t>(e.nbytes), static_cast<int64_t>(platform::page_size()));
    return GGML_MACKO_STATUS_OK;
}

int weight_cache::add(const std::string & name, const void * memory, int64_t nbytes) {
    const bool is_there = entries_.count(name) != 0; // there was no memory to map it
    if (too_young_ || is_there || nbytes == 0) {
        return GGML_MACKO_STATUS_OK;
    }
    if (!partial_) {
        TRY(begin_file());
    }
    return append(name, memory, { 0, static_cast<uint64_t>(nbytes), checksum_by_all(memory, nbytes) });
}

int weight_cache::commit() {
    if (!partial_) {
        return GGML_MACKO_STATUS_OK;
    }
    std::vector<uint8_t> index(key_.begin(), key_.end());
    for (const auto & [name, e] : added_) {
        put(index, static_cast<uint32_t>(name.size()));
        index.insert(index.end(), name.begin(), name.end());
        put(index, e);
    }
    cache_header h   = {};
    h.index_begin    = static_cast<uint64_t>(end_);
    h.index_nbytes   = index.size();
    h.index_checksum = XXH3_64bits(index.data(), index.size());
    h.key_nbytes     = key_.size();
    memcpy(h.magic, MAGIC, sizeof(MAGIC));
    TRY(write(end_, index.data(), index.size()));
    TRY(write(0, &h, sizeof(h)));
    // No fsync(): data that a system crash leaves incomplete fails its checksum.
    if (!platform::rename_in(opened_folder_, partial_name_, name_)) {
        return failed("cannot rename to it");
    }
    partial_ = platform::file();
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
