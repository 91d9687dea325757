"""What only one operating system has is named in one place: ggml-macko/src/platform/ for C and C++, system.py for
Python. src/cuda, the GPU device, is for Linux alone.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggml_macko import system
from support import generators

SOURCES = generators.ROOT / "ggml-macko" / "src"
PACKAGE = generators.ROOT / "python" / "ggml_macko"

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
    if path == SOURCES / "platform" / "platform.cpp":
        assert {"getrandom", "fopencookie", "MADV_HUGEPAGE", "malloc_trim"} <= set(found)  # the search finds such names
    elif path.parent != SOURCES / "platform":
        assert not found


# ---- Python ----

PYTHON_NAMES = re.compile(
    r"sched_\w+|preadv2?|pwritev2?|memfd_create|getrandom|sendfile|splice|copy_file_range|posix_fadvise|posix_fallocate"
    r"|fdatasync|eventfd|pidfd_open|pipe2|\w*xattr|unshare|setns|O_DIRECT|O_PATH|O_TMPFILE|O_EXLOCK|O_EVTONLY"
    r"|F_\w*SEALS?|F_FULLFSYNC|ru_maxrss|sysconf|uname|RTLD_DEEPBIND"
)
PYTHON_TEXT = re.compile(r"\bproc/|/sys/|sys/fs/|\.so\b|\.dylib\b|\bLD_|\bDYLD_")


def python_of_one_system(path: Path) -> Iterator[str]:
    """Names and strings of a module, besides its docstrings and comments."""
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
            "os.preadv",
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


# ---- macOS: the functions that need nothing of it but the output of a program ----

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            500000.
Pages inactive:                          200000.
Pages speculative:                         3000.
Pages throttled:                              0.
Pages wired down:                        120000.
Pages purgeable:                           7000.
"Translation faults":                 123456789.
"""


def test_free_memory_of_macos_is_free_and_inactive_pages(monkeypatch):
    def vm_stat(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, VM_STAT, "")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", vm_stat)
    found = system.memory()
    assert found is not None and found.free == 213000 * 16384
    assert found.total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_memory_of_macos_is_unknown_without_its_program(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError("vm_stat")))
    assert system.memory() is None


def test_library_that_libllama_is_linked_to_has_a_version():
    folder = "/opt/llama_cpp/lib"
    loaded = ["/usr/lib/libSystem.B.dylib", f"{folder}/libggml.dylib", f"{folder}/libggml-base.0.dylib"]
    assert system.versioned_image("ggml", loaded) == f"{folder}/libggml.dylib"
    assert (
        system.versioned_image("ggml", [*loaded, f"{folder}/libggml.0.25.3.dylib"]) == f"{folder}/libggml.0.25.3.dylib"
    )
    assert system.versioned_image("ggml-base", loaded) == f"{folder}/libggml-base.0.dylib"
    assert system.versioned_image("ggml-cpu", loaded) == "libggml-cpu.dylib"


def test_bytes_are_read_where_python_has_no_preadv(monkeypatch, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    monkeypatch.delattr(os, "preadv")
    with open(path, "rb") as file:
        out = bytearray(4)
        assert system.read_into(file.fileno(), memoryview(out), 3) == 4 and out == b"3456"
        assert system.read_into(file.fileno(), memoryview(out), 8) == 2 and out == b"8956"


def test_cores_are_all_where_no_affinity_is_known(monkeypatch):
    assert system.available_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert system.available_cores() == os.cpu_count()
