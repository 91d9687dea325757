"""What only one operating system has is named in one place: ggml-macko/src/platform/. src/cuda, the GPU device, is for
Linux alone.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import generators

SOURCES = generators.ROOT / "ggml-macko" / "src"

# outside of POSIX, or newer there than macOS
HEADERS = """
    endian error execinfo features link malloc sched syscall ucontext linux/.* mach/.* mach-o/.* malloc/.* sys/auxv
    sys/epoll sys/eventfd sys/inotify sys/mman sys/prctl sys/random sys/sendfile sys/statfs sys/syscall sys/sysctl
    sys/sysinfo sys/sysmacros sys/vfs
"""
NAMES = r"""
    __linux__ __gnu_linux__ __APPLE__ __MACH__ __GLIBC__ _GNU_SOURCE _DEFAULT_SOURCE _DARWIN_C_SOURCE
    getrandom getentropy arc4random\w* fopencookie funopen off64_t l?seek64 stat64 fstat64
    fseeko64 ftello64 pread64 open64
    malloc_\w+ mallopt mallinfo2? memalign pvalloc valloc reallocarray
    mmap munmap mremap mprotect madvise posix_madvise mlock\w* MAP_\w+ MADV_\w+ memfd_create
    st_[acm]tim st_[acm]timespec ENXIO EOPNOTSUPP ENOTSUP
    RTLD_NEXT RTLD_NOLOAD RTLD_DEEPBIND RTLD_NODELETE RTLD_FIRST dlmopen dlvsym dladdr1? dlinfo
    dl_iterate_phdr _dyld_\w+
    sched_\w+ gettid syscall prctl getauxval secure_getenv get_nprocs\w* sysinfo pthread_\w+_np pthread_yield
    posix_fadvise fallocate posix_fallocate sync_file_range copy_file_range sendfile splice fdatasync
    preadv2? pwritev2?
    pipe2 accept4 dup3 eventfd epoll_\w+ inotify_\w+ timerfd_\w+ signalfd O_TMPFILE O_PATH O_DIRECT
    O_LARGEFILE O_NOATIME
    mempcpy memrchr rawmemchr strchrnul strverscmp qsort_r explicit_bzero canonicalize_file_name program_invocation_\w+
    backtrace\w* target_clones ifunc weak_import
"""
OF_ONE_SYSTEM = re.compile(
    rf"^\s*#\s*include\s*<(?:{'|'.join(HEADERS.split())})(?:\.h)?>"
    rf"|\b(?:{'|'.join(NAMES.split())})\b"
    r'|"[^"\n]*(?:/proc/|/sys/|\.so\b|\.dylib\b)[^"\n]*"',
    re.MULTILINE,
)


def of_one_system(path: Path) -> list[str]:
    """What a source file has of it, besides comments."""
    return OF_ONE_SYSTEM.findall(re.sub(r"//.*|/\*(?s:.*?)\*/", "", path.read_text()))


def sources() -> list[Path]:
    return [
        p for p in sorted(SOURCES.rglob("*")) if p.suffix in (".h", ".c", ".cpp") and SOURCES / "cuda" not in p.parents
    ]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(SOURCES)))
def test_only_the_platform_room_names_what_one_system_has(path):
    found = of_one_system(path)
    if path.parent == SOURCES / "platform" and path.suffix == ".cpp":
        assert {"getrandom", "fopencookie", "MADV_HUGEPAGE", "malloc_trim"} <= set(found)  # the search finds such names
    elif path.parent != SOURCES / "platform":
        assert not found
