#include "load/link.h"
#include "gguf/append.h"

#include <cinttypes>
#include <cstring>

namespace macko {

static constexpr char    KEY[]           = "macko.link.file"; // the first key, so that one read recognizes a link
static constexpr int64_t NSEC            = 1000000000;
static constexpr size_t  MAX_NAME_NBYTES = 255;

bool is_link(const model_file & file) {
    std::vector<uint8_t> begin(24); // magic, version, and two counts, which do not matter
    memcpy(begin.data(), "GGUF\3\0\0", 8);
    gguf_append(&begin, std::string_view(KEY));
    std::vector<uint8_t> found(begin.size());
    const auto           n = static_cast<int64_t>(found.size());
    if (file.size() < n || file.read(0, found.data(), n)) {
        return false;
    }
    memcpy(found.data() + 8, begin.data() + 8, 16);
    return found == begin;
}

static int read_u64(const gguf_header & header, const char * name, int64_t * value) {
    const gguf_key * key = header.find(name);
    if (!key || key->type != GGUF_U64 || !header.get_int(*key, 0, value)) {
        return fail(GGML_MACKO_STATUS_BAD_KEY_TYPE, "key %s is not a u64 below 2^63", name);
    }
    return GGML_MACKO_STATUS_OK;
}

int follow_link(const char * path, std::unique_ptr<model_file> * file) {
    gguf_header header;
    std::string name;
    int64_t     size = 0, time = 0;
    TRY(read_gguf_header(**file, &header));
    const gguf_key * key = header.find(KEY);
    if (!key || !header.get_string(*key, 0, &name)) {
        return fail(GGML_MACKO_STATUS_BAD_KEY_TYPE, "key %s is not a string", KEY);
    }
    // a name without folders, so that a link from a stranger opens no file but one beside it
    if (name.empty() || name.size() > MAX_NAME_NBYTES || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos || name == "." || name == "..") {
        return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "key %s is not the name of a file in the folder of the link", KEY);
    }
    TRY(read_u64(header, "macko.link.size", &size));
    TRY(read_u64(header, "macko.link.mtime", &time));
    const std::string of     = path;
    const std::string folder = of.substr(0, of.rfind('/') + 1); // "" without a slash
    auto              target = std::make_unique<model_file>();
    if (const int status = target->open((folder + name).c_str())) {
        prefix_error(("links to " + std::string(printable(name.c_str(), name.size()).text)).c_str());
        return status;
    }
    const platform::file_status & found = target->shards[0].opened;
    if (found.size != size || found.written != platform::file_time(time / NSEC, time % NSEC)) {
        return fail(GGML_MACKO_STATUS_FILE_CHANGED,
                    "links to %s, which has changed since (its size or its time): macko link --force writes the link "
                    "again",
                    printable(name.c_str(), name.size()).text);
    }
    if (is_link(*target)) {
        return fail(GGML_MACKO_STATUS_BAD_KEY_VALUE, "links to %s, which is a link",
                    printable(name.c_str(), name.size()).text);
    }
    *file = std::move(target);
    return GGML_MACKO_STATUS_OK;
}

} // namespace macko
