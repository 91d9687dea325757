// Weights as a device keeps them in memory, in a file in the user's cache folder, so that the next load of the same
// model maps them instead of reading, checking and repacking the model. Asked for by GGML_MACKO_LOAD_CACHE.
//
// What is mapped goes to kernels without the checks that a payload gets, so a cache file is used only if
//   * it and its folder belong to this user, and nobody else may write them;
//   * it was made by this very library, for the same kernels, from files of the same inode, size and times as the
//     model's: those passed the checks then (key, below);
//   * the checksum of each weight is right, each time it is loaded.
//
// A cache file, in the byte order of the machine; all of it is replaced when something of it does not fit any more:
//
//   header     cache_header, at 0
//   weights    each from a multiple of the page size on
//   index      key, then for each weight: length of its name (uint32), name, where it is, bytes, checksum (uint64 each)
#pragma once

#include "load/model-file.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace macko {

class weight_cache {
public:
    // The cache of a model. made_for: what else its bytes depend on, besides model and library. IO or BAD_ARGUMENT,
    // with a message: there is no folder for it, or somebody else could write in it. A cache file that does not fit, or
    // none at all, is no error; it will be written, unless the model was changed within the last two seconds: then its
    // times may be those of another content.
    [[nodiscard]] static int open(const model_file & model, const std::string & made_for,
                                  std::unique_ptr<weight_cache> * out);
    // Bytes that a weight's memory has to be aligned to.
    static size_t page_size();
    // Maps a weight of at most nbytes at memory, which are whole pages of platform::map_memory() that read as zeros.
    // False if the cache does not have it, or if memory is missing; then they read as zeros still.
    [[nodiscard]] bool map(const std::string & name, void * memory, int64_t nbytes) noexcept;
    // Takes a weight that the cache does not have into the file that replaces this one; it may change after that.
    [[nodiscard]] int add(const std::string & name, const void * memory, int64_t nbytes);
    // The new file gets its name. Without add(), nothing happens. Without commit(), what was added is gone.
    [[nodiscard]] int commit();
    ~weight_cache();
    weight_cache(const weight_cache &)             = delete;
    weight_cache & operator=(const weight_cache &) = delete;

    const std::string & path() const { return path_; }
    int                 n_mapped() const { return n_mapped_; }
    int64_t             nbytes_mapped() const { return nbytes_mapped_; }
    int64_t             nbytes_written() const { return end_; } // 0: nothing was added

private:
    struct entry {
        uint64_t begin, nbytes, checksum;
    };

    weight_cache() = default;
    void              read_index();
    bool              parse_index(const std::vector<uint8_t> & index, uint64_t end_of_weights);
    [[nodiscard]] int begin_file();
    [[nodiscard]] int append(const std::string & name, const void * memory, const entry & e);
    [[nodiscard]] int write(int64_t offset, const void * data, size_t n);
    [[nodiscard]] int failed(const char * what) const;
    void              remove_old_partials() const;

    std::string                  folder_, name_, path_, key_;
    int                          folder_fd_ = -1, file_ = -1; // file_: what is there, and may be used
    bool                         too_young_ = false;
    std::map<std::string, entry> entries_;

    std::string                  partial_name_;
    int                          partial_ = -1; // the new file
    int64_t                      end_     = 0;  // of its weights; a whole number of pages
    std::map<std::string, entry> added_;

    int     n_mapped_      = 0;
    int64_t nbytes_mapped_ = 0;
};

// A checksum against accidents, not against people; some 20 GB/s.
uint64_t checksum(const void * data, size_t nbytes);

} // namespace macko
