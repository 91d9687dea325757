#include "platform/files.h"
#include "platform/platform.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace macko::platform {

void unmap_memory(void * memory, size_t nbytes) { munmap(memory, nbytes); }

static void * map_pages(void * at, size_t nbytes, int flags) {
    void * memory = mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

size_t page_size() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

bool map_file(void * at, size_t nbytes, const file & f, int64_t offset) {
    const int fd = static_cast<int>(f.handle());
    return mmap(at, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, offset) != MAP_FAILED;
}

void unmap_file(void * at, size_t nbytes) {
    if (!map_pages(at, nbytes, MAP_FIXED)) {
        memset(at, 0, nbytes); // the file's pages are private
    }
}

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

char ** environment_entries() { return environ; }

int64_t process_id() { return getpid(); }

static_assert(sizeof(pthread_key_t) <= sizeof(uintptr_t));

thread_pointer::thread_pointer() {
    pthread_key_t key = {};
    exists_           = pthread_key_create(&key, nullptr) == 0;
    key_              = key;
}

void * thread_pointer::get() const { return exists_ ? pthread_getspecific(static_cast<pthread_key_t>(key_)) : nullptr; }

void thread_pointer::set(void * value) const {
    if (exists_) {
        (void)pthread_setspecific(static_cast<pthread_key_t>(key_), value);
    }
}

std::string build_id() {
    Dl_info found = {};
    if (!dladdr(reinterpret_cast<const void *>(&build_id), &found)) {
        return "";
    }
    const auto * library  = static_cast<const uint8_t *>(found.dli_fbase);
    const auto * header   = reinterpret_cast<const ElfW(Ehdr) *>(library);
    const auto * segments = reinterpret_cast<const ElfW(Phdr) *>(library + header->e_phoff);
    for (const auto * s = segments; s < segments + header->e_phnum; s++) {
        constexpr size_t word = 4; // segments with another alignment hold other notes
        if (s->p_type != PT_NOTE || s->p_align != word) {
            continue;
        }
        for (const uint8_t *at = library + s->p_vaddr, *end = at + s->p_memsz; at < end;) {
            const auto *    note = reinterpret_cast<const ElfW(Nhdr) *>(at);
            const uint8_t * name = at + sizeof(*note);
            const uint8_t * data = name + (note->n_namesz + word - 1) / word * word;
            if (note->n_type == NT_GNU_BUILD_ID && strcmp(reinterpret_cast<const char *>(name), ELF_NOTE_GNU) == 0) {
                return { data, data + note->n_descsz };
            }
            at = data + (note->n_descsz + word - 1) / word * word;
        }
    }
    return "";
}

std::string user_cache_folder() {
    const char * folder = getenv("XDG_CACHE_HOME");
    const char * home   = getenv("HOME");
    return folder && *folder == '/' ? folder : home && *home == '/' ? std::string(home) + "/.cache" : "";
}

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

bool is_on_stack(const void * at, size_t n) {
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes)) {
        return false;
    }
    void *     lowest = nullptr;
    size_t     size   = 0;
    const bool found  = pthread_attr_getstack(&attributes, &lowest, &size) == 0;
    pthread_attr_destroy(&attributes);
    const auto address = reinterpret_cast<uintptr_t>(at);
    const auto end     = reinterpret_cast<uintptr_t>(lowest) + size;
    return found && address > reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) && address < end &&
           n <= end - address;
}

bool same_library(const void * a, const void * b) {
    Dl_info of_a = {}, of_b = {};
    return dladdr(a, &of_a) && dladdr(b, &of_b) && of_a.dli_fbase == of_b.dli_fbase;
}

void * open_library(const char * name, int version) {
    return dlopen(("lib" + std::string(name) + ".so." + std::to_string(version)).c_str(), RTLD_NOW | RTLD_LOCAL);
}

void * function_of(void * library, const char * name) { return dlsym(library, name); }

#if defined(__aarch64__)
arm64_extensions find_arm64_extensions() {
    const unsigned long has = getauxval(AT_HWCAP);
    return { (has & HWCAP_ASIMDDP) != 0, (has & HWCAP_FPHP) && (has & HWCAP_ASIMDHP) && (has & HWCAP_ASIMDFHM) };
}
#endif

} // namespace macko::platform
