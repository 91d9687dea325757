#include "platform/platform.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <new>
#include <string>
#include <sys/mman.h>
#include <sys/random.h>

#if defined(__linux__)
#include <malloc.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif
#elif defined(__APPLE__)
#include <mach-o/dyld.h>
#include <malloc/malloc.h>
#include <sys/sysctl.h>
#else
#error "ggml-macko knows Linux and macOS: see platform.h for what another system has to provide"
#endif

namespace macko::platform {

void unmap_memory(void * memory, size_t nbytes) { munmap(memory, nbytes); }

static void * map_pages(void * at, size_t nbytes, int flags) {
    void * memory = mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

bool map_file(void * at, size_t nbytes, int fd, off_t offset) {
    return mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, offset) != MAP_FAILED;
}

void unmap_file(void * at, size_t nbytes) {
    if (!map_pages(at, nbytes, MAP_FIXED)) {
        memset(at, 0, nbytes); // the file's pages are private
    }
}

bool stat_this_library(struct stat * out) {
    Dl_info found = {};
    return dladdr(reinterpret_cast<const void *>(&stat_this_library), &found) != 0 && found.dli_fname &&
           stat(found.dli_fname, out) == 0;
}

// `variable` if it is an absolute path, else a folder in HOME
static std::string folder_of(const char * variable, const char * in_home) {
    const char * folder = variable ? getenv(variable) : nullptr;
    const char * home   = getenv("HOME");
    return folder && *folder == '/' ? folder : home && *home == '/' ? std::string(home) + in_home : "";
}

#if defined(__linux__)

bool random_bytes(void * out, size_t n) {
    for (auto * at = static_cast<uint8_t *>(out); n > 0;) {
        const ssize_t got = getrandom(at, n, 0);
        if (got < 0) {
            if (errno == EINTR) {
                continue;
            }
            return false;
        }
        at += got;
        n -= static_cast<size_t>(got);
    }
    return true;
}

timespec modification_time(const struct stat & file) { return file.st_mtim; }

timespec change_time(const struct stat & file) { return file.st_ctim; }

std::string user_cache_folder() { return folder_of("XDG_CACHE_HOME", "/.cache"); }

bool is_socket_error(int error) { return error == ENXIO; }

FILE * open_stream(void * context, const stream_functions & functions) {
    cookie_io_functions_t hooks = {};
    hooks.read                  = functions.read;
    hooks.seek                  = functions.seek;
    hooks.close                 = functions.close;
    return fopencookie(context, "rb", hooks);
}

void * map_memory(size_t nbytes, bool reserve) { return map_pages(nullptr, nbytes, reserve ? 0 : MAP_NORESERVE); }

void discard_memory(void * memory, size_t nbytes) { madvise(memory, nbytes, MADV_DONTNEED); }

void use_huge_pages(void * memory, size_t nbytes) { madvise(memory, nbytes, MADV_HUGEPAGE); }

void use_small_pages(void * memory, size_t nbytes) { madvise(memory, nbytes, MADV_NOHUGEPAGE); }

void trim_heap() {
#if defined(__GLIBC__) // other C libraries retain little
    malloc_trim(0);
#endif
}

void * find_function(const char * library, const char * name) {
    void * function = dlsym(RTLD_DEFAULT, name);
    if (!function) {
        const std::string soname = "lib" + std::string(library) + ".so.0";
        if (void * handle = dlopen(soname.c_str(), RTLD_NOW | RTLD_NOLOAD)) {
            function = dlsym(handle, name);
            dlclose(handle); // the process keeps the library loaded
        }
    }
    return function;
}

#if defined(__aarch64__)
arm64_extensions find_arm64_extensions() {
    const unsigned long has = getauxval(AT_HWCAP);
    return { (has & HWCAP_ASIMDDP) != 0, (has & HWCAP_FPHP) && (has & HWCAP_ASIMDHP) && (has & HWCAP_ASIMDFHM) };
}
#endif

#elif defined(__APPLE__)

bool random_bytes(void * out, size_t n) {
    constexpr size_t most = 256; // getentropy() returns at most this many bytes
    for (auto * at = static_cast<uint8_t *>(out); n > 0;) {
        const size_t now = std::min(n, most);
        if (getentropy(at, now) != 0) {
            return false;
        }
        at += now;
        n -= now;
    }
    return true;
}

timespec modification_time(const struct stat & file) { return file.st_mtimespec; }

timespec change_time(const struct stat & file) { return file.st_ctimespec; }

std::string user_cache_folder() { return folder_of(nullptr, "/Library/Caches"); }

bool is_socket_error(int error) { return error == EOPNOTSUPP; }

namespace {

struct stream {
    void *           context;
    stream_functions functions;
};

int stream_read(void * s, char * buffer, int n) noexcept {
    const auto * self = static_cast<const stream *>(s);
    return static_cast<int>(self->functions.read(self->context, buffer, static_cast<size_t>(n)));
}

fpos_t stream_seek(void * s, fpos_t offset, int whence) noexcept {
    const auto * self     = static_cast<const stream *>(s);
    int64_t      position = offset;
    return self->functions.seek(self->context, &position, whence) == 0 ? position : -1;
}

int stream_close(void * s) noexcept {
    const std::unique_ptr<stream> self(static_cast<stream *>(s));
    return self->functions.close(self->context);
}

// The path of a loaded library. A file with a version in its name is preferred.
const char * loaded_image(const char * library) {
    const std::string start   = "lib" + std::string(library);
    const char *      without = nullptr;
    for (uint32_t i = 0; i < _dyld_image_count(); i++) {
        const char * path = _dyld_get_image_name(i);
        const char * file = path ? strrchr(path, '/') : nullptr;
        if (!file || strncmp(++file, start.c_str(), start.size()) != 0) {
            continue;
        }
        const char * version = file + start.size(); // ".0.", or "." without a version
        const size_t n       = strspn(version, ".0123456789");
        if (n > 0 && strcmp(version + n, "dylib") == 0) {
            if (n > 1) {
                return path;
            }
            without = without ? without : path;
        }
    }
    return without;
}

} // namespace

FILE * open_stream(void * context, const stream_functions & functions) {
    std::unique_ptr<stream> s(new (std::nothrow) stream{ context, functions });
    if (!s) {
        errno = ENOMEM;
        return nullptr;
    }
    FILE * file = funopen(s.get(), stream_read, nullptr, stream_seek, stream_close);
    if (file) {
        s.release(); // stream_close deletes it from now on
    }
    return file;
}

void * map_memory(size_t nbytes, bool) { return map_pages(nullptr, nbytes, 0); }

// MADV_DONTNEED does not guarantee zeros on macOS, but new pages mapped over the old ones read as zeros.
void discard_memory(void * memory, size_t nbytes) {
    if (!map_pages(memory, nbytes, MAP_FIXED)) {
        memset(memory, 0, nbytes);
    }
}

void use_huge_pages(void *, size_t) {}

void use_small_pages(void *, size_t) {}

void trim_heap() { malloc_zone_pressure_relief(nullptr, 0); }

void * find_function(const char * library, const char * name) {
    const char * path     = loaded_image(library);
    void *       handle   = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) : nullptr;
    void *       function = dlsym(handle ? handle : RTLD_DEFAULT, name);
    if (handle) {
        dlclose(handle); // the process keeps the library loaded
    }
    return function;
}

#if defined(__aarch64__)
arm64_extensions find_arm64_extensions() {
    const auto has = [](const char * name) {
        int    value = 0;
        size_t size  = sizeof(value);
        return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0; // older systems lack some of the names
    };
    return { has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_FP16") && has("hw.optional.arm.FEAT_FHM") };
}
#endif

#endif

} // namespace macko::platform
