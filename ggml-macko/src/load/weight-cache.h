// A cache file with weights in a device's memory layout, in the user's cache folder. The next load of the same model
// maps the file instead of reading, checking and repacking the model. GGML_MACKO_LOAD_CACHE enables it.
//
// Kernels use mapped weights without the checks of a payload, so a cache file is used only if
//   * it and its folder belong to this user, and no other user may write them;
//   * a library with the same build id made it, for the same kernels, from files with the same inode, size and times
//     as the model's (key, below), which passed the checks at that time;
//   * the checksum of each weight is correct, at each load.
//
// A cache file, in the byte order of the machine. It is replaced as a whole when any part of it no longer matches:
//
//   header     cache_header, at 0
//   weights    each at a multiple of the page size
//   index      key, then for each weight: length of its name (uint32), name, offset, bytes, checksum (uint64 each)
#pragma once

#include "load/model-file.h"

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace macko {

class weight_cache {
public:
    // The cache of a model. made_for: everything else that its bytes depend on, besides model and library. IO or
    // BAD_ARGUMENT, with a message, if there is no folder for it, or if another user could write in that folder. A
    // missing or outdated cache file is not an error; a new file will be written, unless the model changed within the
    // last two seconds: then a later change might leave its times the same.
    [[nodiscard]] static int open(const model_file & model, const std::string & made_for,
                                  std::unique_ptr<weight_cache> * out);
    // Maps a weight of at most nbytes at memory: whole pages of platform::map_memory() that read as zeros. Returns
    // false if the cache lacks the weight, or on out-of-memory; the pages then still read as zero.
    [[nodiscard]] bool map(const std::string & name, void * memory, int64_t nbytes) noexcept;
    // Adds a weight that the cache lacks to the new file; the memory may change afterwards.
    [[nodiscard]] int add(const std::string & name, const void * memory, int64_t nbytes);
    // Gives the new file its final name. Has no effect without add(). Without commit(), the added weights are
    // discarded.
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
    platform::file               opened_folder_, file_; // file_: the existing file, if it may be used
    bool                         too_young_ = false;
    std::map<std::string, entry> entries_;

    std::string                  partial_name_;
    platform::file               partial_; // the new file
    int64_t                      end_ = 0; // end of its weights; a whole number of pages
    std::map<std::string, entry> added_;

    int     n_mapped_      = 0;
    int64_t nbytes_mapped_ = 0;
};

} // namespace macko
