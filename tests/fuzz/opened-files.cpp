#include "opened-files.h"
#include "codec/negative-zeros.h"
#include "model-check.h"

#include <memory>
#include <sys/mman.h>
#include <unistd.h>

namespace fuzz {

constexpr size_t MAX_PARTS = 3;
constexpr int    FIRST_FD  = 900; // fixed descriptors of the parts, so that their names never change

// A folder with a symbolic link to the descriptor of each part, for each number of parts. It exists until the process
// ends.
struct folder {
    std::string path = "/tmp/macko-fuzz.XXXXXX";
    folder() {
        FUZZ_CHECK(mkdtemp(path.data()) != nullptr, "mkdtemp");
        for_each([](const std::string & name, size_t part) {
            const std::string to = "/proc/self/fd/" + std::to_string(FIRST_FD + static_cast<int>(part));
            FUZZ_CHECK(symlink(to.c_str(), name.c_str()) == 0, "symlink");
        });
    }
    ~folder() {
        for_each([](const std::string & name, size_t) { unlink(name.c_str()); });
        rmdir(path.c_str());
    }
    std::string name(size_t part, size_t n) const {
        char text[64];
        snprintf(text, sizeof(text), "/m-%05zu-of-%05zu.gguf", part + 1, n);
        return path + text;
    }
    template <typename F> void for_each(F && f) const {
        for (size_t n = 1; n <= MAX_PARTS; n++) {
            for (size_t part = 0; part < n; part++) {
                f(name(part, n), part);
            }
        }
    }
};

// New files each time, so that cached results for an earlier compressed file do not apply.
struct memory_files {
    size_t n;
    explicit memory_files(const std::vector<bytes> & parts) : n(parts.size()) {
        for (size_t i = 0; i < n; i++) {
            const int fd = memfd_create("part", MFD_CLOEXEC);
            FUZZ_CHECK(fd >= 0 &&
                           write(fd, parts[i].data(), parts[i].size()) == static_cast<ssize_t>(parts[i].size()) &&
                           dup2(fd, FIRST_FD + static_cast<int>(i)) >= 0,
                       "memfd");
            close(fd);
        }
    }
    ~memory_files() {
        for (size_t i = 0; i < n; i++) {
            close(FIRST_FD + static_cast<int>(i));
        }
    }
};

static bool open_once(const std::vector<bytes> & parts, macko::compression how) {
    static const folder                dir;
    const memory_files                 files(parts);
    std::unique_ptr<macko::model_file> file;
    const int status = macko::model_file_open_sparse(dir.name(0, parts.size()).c_str(), how, false, &file);
    check_status(status);
    if (status != GGML_MACKO_STATUS_OK) {
        return false;
    }
    bool accepted = !file->sparse.empty();
    for (const macko::sparse_tensor_info & m : file->sparse) {
        if (!m.is_encoded_on_load()) {
            accepted = check_matrix(*file, *file, m) && accepted;
            continue;
        }
        const bytes dense = read_dense(*file, *file, m);
        bytes       stored(dense.size());
        FUZZ_CHECK(file->read(file->header.tensors[m.first].offset, stored.data(), m.nbytes_dense) == 0, "%s",
                   ggml_macko_last_error());
        if (how == macko::compression::on) {
            macko::drop_negative_zeros(stored.data(), m.desc.type, m.desc.rows * m.desc.cols, 1);
        }
        FUZZ_CHECK(dense == stored, "%s: compressed to another matrix", m.name.c_str());
    }
    return accepted;
}

bool open_and_check(const std::vector<bytes> & parts, bool compress) {
    return compress ? open_once(parts, macko::compression::on) && open_once(parts, macko::compression::bit_exact)
                    : open_once(parts, macko::compression::off);
}

} // namespace fuzz
