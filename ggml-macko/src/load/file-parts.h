// The files of a model, open for reading. One descriptor per file from vetting to the last read (no second open), and
// pread only: a file that shrinks gives an error, not SIGBUS.
#pragma once

#include "load/sparse-header.h"

#include <sys/stat.h>

namespace macko {

// A file of a model: most have one, split models several. Offsets in a model count through its files, one after the
// other.
struct file_part {
    std::string path;
    int64_t     begin  = 0;
    int         fd     = -1;
    struct stat opened = {};
};

struct model_file : byte_source {
    std::string                     path; // of the first file
    std::vector<file_part>          parts;
    gguf_header                     header;            // of a split model: the first file's, with the tensors of all
    std::string                     arch;              // general.architecture, of a model that passed the checks
    bool                            has_rules = false; // those of its architecture (gguf/model-keys.h)
    bool                            is_sparse = false;
    std::vector<sparse_tensor_info> sparse;
    std::vector<int64_t>            tensor_sparse_index; // per table entry: matrix it is a component of, or -1

    ~model_file() override;
    int64_t           size() const override;
    [[nodiscard]] int read(int64_t offset, void * dst, int64_t n) const override; // EINTR and short reads handled
    [[nodiscard]] int check_unchanged() const;      // FILE_CHANGED if inode, size or mtime differ from `opened`
    [[nodiscard]] int open(const char * file_path); // the first file. Regular files only (symlinks to one are followed)
    // opens the other files of a split model, if header says that it is one; their tensors join header's
    [[nodiscard]] int append_parts();
};
// inode, size and mtime
bool is_same_file(const struct stat & a, const struct stat & b);
// *count = 1 for a model that is not split
[[nodiscard]] int split_count(const gguf_header & header, int64_t * count);

} // namespace macko
