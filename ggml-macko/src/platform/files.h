// Files and folders. A function that fails sets errno. Paths are UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace macko::platform {

// seconds since 1970, and nanoseconds
using file_time = std::pair<int64_t, int64_t>;

struct file_status {
    uint64_t  device = 0, inode = 0;
    int64_t   size = 0;           // bytes
    file_time written;            // the content
    file_time changed;            // the content, or owner, permissions and names
    bool      is_regular = false; // not a folder, device, pipe or socket
    bool      is_private = false; // this user owns it, and no other user may write it
};

// An open file or folder, which the destructor closes.
class file {
public:
    file() = default;
    explicit file(intptr_t handle) : handle_(handle) {}
    file(file && other) noexcept { swap(other); }
    file & operator=(file && other) noexcept {
        file old;
        swap(old);
        swap(other);
        return *this;
    }
    ~file();
    explicit operator bool() const { return handle_ != NONE; }
    intptr_t handle() const { return handle_; }

private:
    static constexpr intptr_t NONE = -1;
    void                      swap(file & other) noexcept { std::swap(handle_, other.handle_); }
    intptr_t                  handle_ = NONE;
};

// Opens a file for reading. A pipe does not block. An empty file means failure; with errno ENXIO, path is a socket.
file open_file(const char * path, file_status * status);
bool get_status(const file & f, file_status * status);
// Returns the number of bytes, which is less than n only at the end of the file, or -1.
int64_t read_file(const file & f, void * to, size_t n, int64_t offset);

// ---- only the plugin calls the functions below; windows.cpp lacks them ----

// The status of a descriptor that other code opened, and of what a path names.
bool get_descriptor_status(int fd, file_status * status);
bool get_path_status(const std::string & path, file_status * status);
bool write_file(const file & f, const void * from, size_t n, int64_t offset);
// The path without symbolic links; path itself if there is none.
std::string real_path(const std::string & path);
// Makes a folder for this user alone if nothing has that name.
void make_folder(const std::string & path);
// Opens a folder, but not through a symbolic link.
file open_folder(const std::string & path, file_status * status);
// Opens a file of a folder for reading, but not through a symbolic link.
file open_in(const file & folder, const std::string & name, file_status * status);
// Makes a file for this user alone. It is an error if it exists.
file create_in(const file & folder, const std::string & name);
bool rename_in(const file & folder, const std::string & from, const std::string & to); // replaces `to`
void remove_in(const file & folder, const std::string & name);
// Names of what lies in a folder, with their status. Reports nothing if the system refuses.
void for_each_in(const file & folder, const std::function<void(const char * name, const file_status & status)> & f);

} // namespace macko::platform
