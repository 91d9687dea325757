"""One place names the parts of Linux that POSIX lacks: ggml-macko/src/platform/ for C and C++, system.py for Python.
src/cuda, the GPU device, is exempt.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggml_macko import system
from support import generators

SOURCES = generators.ROOT / "ggml-macko" / "src"
PACKAGE = generators.ROOT / "python" / "ggml_macko"

# names that POSIX lacks
HEADERS = """
    endian error execinfo features link malloc sched syscall ucontext linux/.* malloc/.* sys/auxv
    sys/epoll sys/eventfd sys/inotify sys/mman sys/prctl sys/random sys/sendfile sys/statfs sys/syscall sys/sysctl
    sys/sysinfo sys/sysmacros sys/vfs
"""
NAMES = r"""
    __linux__ __gnu_linux__ __GLIBC__ _GNU_SOURCE _DEFAULT_SOURCE
    getrandom getentropy arc4random\w* fopencookie off64_t l?seek64 stat64 fstat64
    fseeko64 ftello64 pread64 open64
    malloc_\w+ mallopt mallinfo2? memalign pvalloc valloc reallocarray
    mmap munmap mremap mprotect madvise posix_madvise mlock\w* MAP_\w+ MADV_\w+ memfd_create
    RTLD_NEXT RTLD_NOLOAD RTLD_DEEPBIND RTLD_NODELETE RTLD_FIRST dlmopen dlvsym dladdr1? dlinfo
    dl_iterate_phdr
    sched_\w+ gettid syscall prctl getauxval secure_getenv get_nprocs\w* sysinfo pthread_\w+_np pthread_yield
    posix_fadvise fallocate posix_fallocate sync_file_range copy_file_range sendfile splice fdatasync
    preadv2? pwritev2?
    pipe2 accept4 dup3 eventfd epoll_\w+ inotify_\w+ timerfd_\w+ signalfd O_TMPFILE O_PATH O_DIRECT
    O_LARGEFILE O_NOATIME
    mempcpy memrchr rawmemchr strchrnul strverscmp qsort_r explicit_bzero canonicalize_file_name program_invocation_\w+
    backtrace\w* target_clones ifunc
"""
OF_ONE_SYSTEM = re.compile(
    rf"^\s*#\s*include\s*<(?:{'|'.join(HEADERS.split())})(?:\.h)?>"
    rf"|\b(?:{'|'.join(NAMES.split())})\b"
    r'|"[^"\n]*(?:/proc/|/sys/|\.so\b)[^"\n]*"',
    re.MULTILINE,
)


def of_one_system(path: Path) -> list[str]:
    """Headers, names and paths of one system in a source file, except in comments."""
    return OF_ONE_SYSTEM.findall(re.sub(r"//.*|/\*(?s:.*?)\*/", "", path.read_text()))


def sources() -> list[Path]:
    return [
        p for p in sorted(SOURCES.rglob("*")) if p.suffix in (".h", ".c", ".cpp") and SOURCES / "cuda" not in p.parents
    ]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(SOURCES)))
def test_only_the_platform_folder_names_parts_of_one_system(path):
    found = of_one_system(path)
    if path == SOURCES / "platform" / "platform.cpp":
        assert {"getrandom", "fopencookie", "MADV_HUGEPAGE", "malloc_trim"} <= set(found)  # the search finds such names
    elif path.parent != SOURCES / "platform":
        assert not found


# ---- Python ----

PYTHON_NAMES = re.compile(
    r"sched_\w+|pwritev2?|memfd_create|getrandom|sendfile|splice|copy_file_range|posix_fadvise|posix_fallocate"
    r"|fdatasync|eventfd|pidfd_open|pipe2|\w*xattr|unshare|setns|O_DIRECT|O_PATH|O_TMPFILE"
    r"|F_\w*SEALS?|ru_maxrss|sysconf|uname|RTLD_DEEPBIND"
)
PYTHON_TEXT = re.compile(r"\bproc/|/sys/|sys/fs/|\.so\b|\bLD_")


def python_of_one_system(path: Path) -> Iterator[str]:
    """Names and strings of one system in a module, except in docstrings and comments."""
    tree = ast.parse(path.read_text(), str(path))
    prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (
            PYTHON_NAMES.fullmatch(node.attr) or ast.unparse(node) in ("sys.platform", "os.name")
        ):
            yield ast.unparse(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and ast.unparse(node).startswith("import platform"):
            yield "platform"
        elif (
            isinstance(node, ast.Constant)
            and node not in prose
            and isinstance(node.value, str)
            and PYTHON_TEXT.search(node.value)
        ):
            yield node.value


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "_ffi.py"]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_system_py_names_what_one_system_has(path):
    found = set(python_of_one_system(path))
    if path == PACKAGE / "system.py":
        assert {
            "os.sched_getaffinity",
            "proc/meminfo",
            "LD_PRELOAD",
        } <= found  # the search finds such names
    else:
        assert not found


def test_memory_is_what_the_kernel_counts(tmp_path):
    (tmp_path / "proc").mkdir()
    assert system.memory(tmp_path) is None
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  99 kB\nMemFree: 1 kB\nMemAvailable:   64 kB\nCached: 5 kB\n")
    assert system.memory(tmp_path) == (64 << 10, 99 << 10)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "0 0\n"}, 64),
        ({"cpu.max": "damaged"}, 64),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "200000\n"}, 64),
    ],
)
def test_cpu_quota_of_a_container_limits_the_cores(tmp_path, monkeypatch, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert system.available_cores(tmp_path) == cores
