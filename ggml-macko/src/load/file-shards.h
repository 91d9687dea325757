// The files of a model, open for reading. One descriptor per file from vetting to the last read (no second open), and
// pread only: a file that shrinks gives an error, not SIGBUS.
#pragma once

#include "load/sparse-header.h"
#include "platform/files.h"

namespace macko {

// A file of a model. Most models have one; split models have several. Offsets in a model count through its files in
// order.
struct file_shard {
    std::string           path;
    int64_t               begin = 0;
    platform::file        file;
    platform::file_status opened;
};

struct model_file : byte_source {
    std::string                     path; // path of the first file
    std::vector<file_shard>         shards;
    gguf_header                     header;            // split model: the first file's, with the tensors of all files
    std::string                     arch;              // general.architecture of a model that passed the checks
    bool                            has_rules = false; // rules exist for its architecture (gguf/model-keys.h)
    bool                            is_sparse = false;
    std::vector<sparse_tensor_info> sparse;
    std::vector<int64_t>            tensor_sparse_index; // per table entry: the matrix that it belongs to, or -1

    int64_t           size() const override;
    [[nodiscard]] int read(int64_t offset, void * dst, int64_t n) const override; // handles EINTR and short reads
    [[nodiscard]] int check_unchanged() const;      // FILE_CHANGED if inode, size or mtime differ from `opened`
    [[nodiscard]] int open(const char * file_path); // the first file; regular files only (and symlinks to them)
    // Opens the other files of a split model, if the header declares one, and appends their tensors to the header.
    [[nodiscard]] int append_shards();
};
// Compares inode, size and mtime.
bool is_same_file(const platform::file_status & a, const platform::file_status & b);
// *count = 1 for a model that is not split
[[nodiscard]] int split_count(const gguf_header & header, int64_t * count);

} // namespace macko
