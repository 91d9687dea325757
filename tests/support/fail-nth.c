// Makes the N-th call of a kind fail: memory, reads, writes, and so on. It is loaded with LD_PRELOAD and controlled by
// tests/stress/inject_failures.py through ctypes. Until fail_nth_arm is called, it only forwards calls.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum kind { NONE, ALLOC, READ, WRITE, FSYNC, RENAME, RESIZE, OPEN, THREAD, SHORT_READ, SHORT_WRITE };

static atomic_int         armed_kind;
static atomic_long        n_calls;
static long               failing_call; // counted from 1; 0: none
static bool               fails_from_there_on;
static char *             record; // buffer for the names of the modules that made the failing call
static size_t             record_nbytes;
static _Thread_local bool is_inside; // our own calls are not counted

// glibc's own names of these functions, so that dlsym, which allocates, does not run before the first allocation
extern void * __libc_malloc(size_t);
extern void * __libc_calloc(size_t, size_t);
extern void * __libc_realloc(void *, size_t);
extern void * __libc_memalign(size_t, size_t);

static void note_caller(void) {
    void *    frames[24];
    const int n         = backtrace(frames, 24);
    Dl_info   own       = { 0 };
    size_t    used      = 0;
    char      last[160] = "";
    dladdr((void *)note_caller, &own);
    for (int i = 0; i < n && record != NULL; i++) {
        Dl_info info = { 0 };
        if (!dladdr(frames[i], &info) || info.dli_fname == NULL || info.dli_fbase == own.dli_fbase) {
            continue;
        }
        const char * slash = strrchr(info.dli_fname, '/');
        const char * name  = slash != NULL ? slash + 1 : info.dli_fname;
        const char * stop  = info.dli_sname != NULL ? info.dli_sname : "";
        char         entry[160];
        snprintf(entry, sizeof entry, "%s(%s)", name, stop);
        if (strcmp(last, entry) == 0 || used + strlen(entry) + 2 > record_nbytes) {
            continue;
        }
        used += (size_t)snprintf(record + used, record_nbytes - used, "%s%s", used ? " " : "", entry);
        memcpy(last, entry, sizeof last);
    }
}

static bool fails(enum kind kind) {
    if (atomic_load_explicit(&armed_kind, memory_order_relaxed) != (int)kind || is_inside) {
        return false;
    }
    const long n = atomic_fetch_add(&n_calls, 1) + 1;
    if (failing_call == 0 || n < failing_call || (n > failing_call && !fails_from_there_on)) {
        return false;
    }
    if (n == failing_call) {
        is_inside       = true;
        const int saved = errno;
        note_caller();
        errno     = saved;
        is_inside = false;
    }
    return true;
}

EXPORT void fail_nth_arm(int kind, long n, bool from_there_on, char * where, size_t where_nbytes) {
    void * frames[4];
    backtrace(frames, 4); // loads libgcc_s now, not in the middle of an allocation
    record              = where;
    record_nbytes       = where_nbytes;
    failing_call        = n;
    fails_from_there_on = from_there_on;
    atomic_store(&n_calls, 0);
    atomic_store(&armed_kind, kind);
}

// Returns the number of calls of the kind.
EXPORT long fail_nth_disarm(void) {
    atomic_store(&armed_kind, NONE);
    return atomic_load(&n_calls);
}

// ---- memory ----

EXPORT void * malloc(size_t n) {
    if (fails(ALLOC)) {
        errno = ENOMEM;
        return NULL;
    }
    return __libc_malloc(n);
}

EXPORT void * calloc(size_t n, size_t size) {
    if (fails(ALLOC)) {
        errno = ENOMEM;
        return NULL;
    }
    return __libc_calloc(n, size);
}

EXPORT void * realloc(void * p, size_t n) {
    if (n != 0 && fails(ALLOC)) {
        errno = ENOMEM;
        return NULL;
    }
    return __libc_realloc(p, n);
}

EXPORT int posix_memalign(void ** out, size_t alignment, size_t n) {
    void * p = fails(ALLOC) ? NULL : __libc_memalign(alignment, n);
    if (p == NULL) {
        return ENOMEM;
    }
    *out = p;
    return 0;
}

EXPORT void * aligned_alloc(size_t alignment, size_t n) {
    if (fails(ALLOC)) {
        errno = ENOMEM;
        return NULL;
    }
    return __libc_memalign(alignment, n);
}

// ---- everything else: the next definition, found before anything is armed ----

#define NEXT(result, name, ...) static result (*next_##name)(__VA_ARGS__)
NEXT(void *, mmap, void *, size_t, int, int, int, off_t);
NEXT(ssize_t, read, int, void *, size_t);
NEXT(ssize_t, pread, int, void *, size_t, off_t);
NEXT(ssize_t, preadv, int, const struct iovec *, int, off_t);
NEXT(ssize_t, preadv2, int, const struct iovec *, int, off_t, int);
NEXT(size_t, fread, void *, size_t, size_t, FILE *);
NEXT(ssize_t, write, int, const void *, size_t);
NEXT(ssize_t, pwrite, int, const void *, size_t, off_t);
NEXT(int, fsync, int);
NEXT(int, fdatasync, int);
NEXT(int, rename, const char *, const char *);
NEXT(int, renameat, int, const char *, int, const char *);
NEXT(int, link, const char *, const char *);
NEXT(int, linkat, int, const char *, int, const char *, int);
NEXT(int, ftruncate, int, off_t);
NEXT(int, posix_fallocate, int, off_t, off_t);
NEXT(int, open, const char *, int, ...);
NEXT(int, openat, int, const char *, int, ...);
NEXT(FILE *, fopen, const char *, const char *);
NEXT(int, pthread_create, pthread_t *, const pthread_attr_t *, void * (*)(void *), void *);

#define FIND(name) *(void **)&next_##name = dlsym(RTLD_NEXT, #name)
__attribute__((constructor)) static void find_next(void) {
    FIND(mmap);
    FIND(read);
    FIND(pread);
    FIND(preadv);
    FIND(preadv2);
    FIND(fread);
    FIND(write);
    FIND(pwrite);
    FIND(fsync);
    FIND(fdatasync);
    FIND(rename);
    FIND(renameat);
    FIND(link);
    FIND(linkat);
    FIND(ftruncate);
    FIND(posix_fallocate);
    FIND(open);
    FIND(openat);
    FIND(fopen);
    FIND(pthread_create);
}

// The value that a function returns if its call is the one that fails.
#define FAIL_AS(kind, code, result) \
    if (fails(kind)) {              \
        errno = (code);             \
        return (result);            \
    }

EXPORT void * mmap(void * at, size_t n, int protection, int flags, int fd, off_t offset) {
    FAIL_AS(ALLOC, ENOMEM, MAP_FAILED);
    return next_mmap(at, n, protection, flags, fd, offset);
}

// Calls on standard streams never fail: the tests are about files.
static bool is_standard(int fd) { return fd <= 2; }

static size_t shorter(enum kind kind, size_t n) { return n > 1 && fails(kind) ? n / 2 : n; }

EXPORT ssize_t read(int fd, void * data, size_t n) {
    FAIL_AS(READ, EIO, -1);
    return next_read(fd, data, shorter(SHORT_READ, n));
}

EXPORT ssize_t pread(int fd, void * data, size_t n, off_t offset) {
    FAIL_AS(READ, EIO, -1);
    return next_pread(fd, data, shorter(SHORT_READ, n), offset);
}

EXPORT ssize_t preadv(int fd, const struct iovec * parts, int n, off_t offset) {
    FAIL_AS(READ, EIO, -1);
    if (n != 1) {
        return next_preadv(fd, parts, n, offset);
    }
    const struct iovec part = { parts[0].iov_base, shorter(SHORT_READ, parts[0].iov_len) };
    return next_preadv(fd, &part, 1, offset);
}

EXPORT ssize_t preadv2(int fd, const struct iovec * parts, int n, off_t offset, int flags) {
    FAIL_AS(READ, EIO, -1);
    if (n != 1) {
        return next_preadv2(fd, parts, n, offset, flags);
    }
    const struct iovec part = { parts[0].iov_base, shorter(SHORT_READ, parts[0].iov_len) };
    return next_preadv2(fd, &part, 1, offset, flags);
}

EXPORT size_t fread(void * data, size_t size, size_t n, FILE * stream) {
    if (fails(READ)) {
        stream->_flags |= 0x20; // glibc's bit behind ferror()
        errno = EIO;
        return 0;
    }
    return next_fread(data, size, n, stream);
}

EXPORT ssize_t write(int fd, const void * data, size_t n) {
    if (is_standard(fd)) {
        return next_write(fd, data, n);
    }
    FAIL_AS(WRITE, ENOSPC, -1);
    return next_write(fd, data, shorter(SHORT_WRITE, n));
}

EXPORT ssize_t pwrite(int fd, const void * data, size_t n, off_t offset) {
    FAIL_AS(WRITE, ENOSPC, -1);
    return next_pwrite(fd, data, shorter(SHORT_WRITE, n), offset);
}

EXPORT int fsync(int fd) {
    FAIL_AS(FSYNC, EIO, -1);
    return next_fsync(fd);
}

EXPORT int fdatasync(int fd) {
    FAIL_AS(FSYNC, EIO, -1);
    return next_fdatasync(fd);
}

EXPORT int rename(const char * from, const char * to) {
    FAIL_AS(RENAME, EIO, -1);
    return next_rename(from, to);
}

EXPORT int renameat(int from_fd, const char * from, int to_fd, const char * to) {
    FAIL_AS(RENAME, EIO, -1);
    return next_renameat(from_fd, from, to_fd, to);
}

EXPORT int link(const char * from, const char * to) {
    FAIL_AS(RENAME, EIO, -1);
    return next_link(from, to);
}

EXPORT int linkat(int from_fd, const char * from, int to_fd, const char * to, int flags) {
    FAIL_AS(RENAME, EIO, -1);
    return next_linkat(from_fd, from, to_fd, to, flags);
}

EXPORT int ftruncate(int fd, off_t n) {
    FAIL_AS(RESIZE, ENOSPC, -1);
    return next_ftruncate(fd, n);
}

EXPORT int posix_fallocate(int fd, off_t offset, off_t n) {
    return fails(RESIZE) ? ENOSPC : next_posix_fallocate(fd, offset, n);
}

static mode_t mode_of(int flags, va_list arguments) {
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
}

EXPORT int open(const char * path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = mode_of(flags, arguments);
    va_end(arguments);
    FAIL_AS(OPEN, EMFILE, -1);
    return next_open(path, flags, mode);
}

EXPORT int openat(int folder, const char * path, int flags, ...) {
    va_list arguments;
    va_start(arguments, flags);
    const mode_t mode = mode_of(flags, arguments);
    va_end(arguments);
    FAIL_AS(OPEN, EMFILE, -1);
    return next_openat(folder, path, flags, mode);
}

EXPORT FILE * fopen(const char * path, const char * mode) {
    FAIL_AS(OPEN, EMFILE, NULL);
    return next_fopen(path, mode);
}

EXPORT int pthread_create(pthread_t * thread, const pthread_attr_t * attributes, void * (*run)(void *), void * data) {
    if (fails(THREAD)) {
        return EAGAIN;
    }
    return next_pthread_create(thread, attributes, run, data);
}

// ---- the names of the same functions in programs with 64-bit offsets ----

#define ALIAS(name) EXPORT __attribute__((alias(#name)))
ALIAS(mmap) void * mmap64(void *, size_t, int, int, int, off_t);
ALIAS(pread) ssize_t pread64(int, void *, size_t, off_t);
ALIAS(preadv) ssize_t preadv64(int, const struct iovec *, int, off_t);
ALIAS(preadv2) ssize_t preadv64v2(int, const struct iovec *, int, off_t, int);
ALIAS(pwrite) ssize_t pwrite64(int, const void *, size_t, off_t);
ALIAS(ftruncate) int ftruncate64(int, off_t);
ALIAS(posix_fallocate) int posix_fallocate64(int, off_t, off_t);
ALIAS(open) int open64(const char *, int, ...);
ALIAS(openat) int openat64(int, const char *, int, ...);
ALIAS(fopen) FILE * fopen64(const char *, const char *);
