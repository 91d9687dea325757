#include "platform/files.h"

#include <cerrno>
#include <cstdlib>
#include <dirent.h>
#include <fcntl.h>
#include <memory>
#include <sys/stat.h>
#include <unistd.h>

namespace macko::platform {

static int fd_of(const file & f) { return static_cast<int>(f.handle()); }

file::~file() {
    if (handle_ != NONE) {
        close(fd_of(*this));
    }
}

static file_status from(const struct stat & s) {
    file_status status;
    status.device     = s.st_dev;
    status.inode      = s.st_ino;
    status.size       = s.st_size;
    status.written    = { s.st_mtim.tv_sec, s.st_mtim.tv_nsec };
    status.changed    = { s.st_ctim.tv_sec, s.st_ctim.tv_nsec };
    status.is_regular = S_ISREG(s.st_mode);
    status.is_private = s.st_uid == geteuid() && (s.st_mode & (S_IWGRP | S_IWOTH)) == 0;
    return status;
}

bool get_descriptor_status(int fd, file_status * status) {
    struct stat s  = {};
    const bool  ok = fstat(fd, &s) == 0;
    *status        = from(s);
    return ok;
}

bool get_status(const file & f, file_status * status) { return get_descriptor_status(fd_of(f), status); }

bool get_path_status(const std::string & path, file_status * status) {
    struct stat s  = {};
    const bool  ok = stat(path.c_str(), &s) == 0;
    *status        = from(s);
    return ok;
}

static file open_at(int folder, const char * name, int flags, file_status * status) {
    file f(openat(folder, name, O_RDONLY | O_CLOEXEC | O_NOCTTY | flags));
    return f && get_status(f, status) ? std::move(f) : file();
}

// Without O_NONBLOCK, opening a FIFO that has no writer would block.
file open_file(const char * path, file_status * status) { return open_at(AT_FDCWD, path, O_NONBLOCK, status); }

file open_folder(const std::string & path, file_status * status) {
    return open_at(AT_FDCWD, path.c_str(), O_DIRECTORY | O_NOFOLLOW, status);
}

file open_in(const file & folder, const std::string & name, file_status * status) {
    return open_at(fd_of(folder), name.c_str(), O_NONBLOCK | O_NOFOLLOW, status);
}

file create_in(const file & folder, const std::string & name) {
    return file(openat(fd_of(folder), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
}

// Calls transfer(done) until n bytes are done or it returns 0; -1 on failure.
template <typename F> static int64_t transfer_all(size_t n, F && transfer) {
    size_t done = 0;
    while (done < n) {
        const ssize_t got = transfer(done);
        if (got < 0 && errno != EINTR) {
            return -1;
        }
        if (got == 0) {
            break;
        }
        done += got > 0 ? static_cast<size_t>(got) : 0;
    }
    return static_cast<int64_t>(done);
}

int64_t read_file(const file & f, void * to, size_t n, int64_t offset) {
    return transfer_all(n, [&](size_t done) {
        return pread(fd_of(f), static_cast<uint8_t *>(to) + done, n - done, offset + static_cast<int64_t>(done));
    });
}

bool write_file(const file & f, const void * from, size_t n, int64_t offset) {
    return transfer_all(n, [&](size_t done) {
               return pwrite(fd_of(f), static_cast<const uint8_t *>(from) + done, n - done,
                             offset + static_cast<int64_t>(done));
           }) == static_cast<int64_t>(n);
}

std::string real_path(const std::string & path) {
    const std::unique_ptr<char, void (*)(void *)> real(realpath(path.c_str(), nullptr), free);
    return real ? real.get() : path;
}

void make_folder(const std::string & path) { (void)mkdir(path.c_str(), 0700); }

bool rename_in(const file & folder, const std::string & from, const std::string & to) {
    return renameat(fd_of(folder), from.c_str(), fd_of(folder), to.c_str()) == 0;
}

void remove_in(const file & folder, const std::string & name) { (void)unlinkat(fd_of(folder), name.c_str(), 0); }

void for_each_in(const file & folder, const std::function<void(const char * name, const file_status & status)> & f) {
    const int fd     = openat(fd_of(folder), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *     listed = fd < 0 ? nullptr : fdopendir(fd);
    if (!listed) {
        const file unused(fd);
        return;
    }
    const std::unique_ptr<DIR, int (*)(DIR *)> owner(listed, closedir);
    while (const dirent * found = readdir(listed)) {
        struct stat s = {};
        if (fstatat(fd_of(folder), found->d_name, &s, AT_SYMLINK_NOFOLLOW) == 0) {
            f(found->d_name, from(s));
        }
    }
}

} // namespace macko::platform
