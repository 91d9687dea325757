"""One place names what the standards of C and C++ lack: ggml-macko/src/platform/, and in Python system.py."""

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

# headers that are neither the system's nor the C library's: instruction sets, OpenMP, xxHash, the CUDA toolkit
PORTABLE_HEADERS = """
    \\w*mmintrin arm_neon cpuid omp xxhash/xxhash
    cooperative_groups cuda\\w* library_types mma
"""
C_HEADERS = "assert errno float limits math stdarg stddef stdint stdio stdlib string time"
# functions that the C library's own headers declare beside the standard ones, and names of libraries' files
NAMES = r"""
    __linux__ __gnu_linux__ __GLIBC__ _WIN32 __APPLE__ _GNU_SOURCE _DEFAULT_SOURCE
    fopencookie fmemopen fileno fdopen popen fseeko\w* ftello\w* getline asprintf dprintf
    realpath mkstemp mkdtemp setenv unsetenv secure_getenv posix_\w+ memalign valloc reallocarray
    canonicalize_file_name qsort_r strn?dup strsep strtok_r strerror_[rl] strsignal mempcpy memrchr rawmemchr strchrnul
    _exit environ ssize_t off_t off64_t pid_t localtime_r gmtime_r nanosleep clock_gettime
    target_clones ifunc
"""
OF_ONE_SYSTEM = re.compile(rf"\b(?:{'|'.join(NAMES.split())})\b" + r'|"[^"\n]*(?:/proc/|/sys/|\.so\b|\.dll\b)[^"\n]*"')
INCLUDE = re.compile(r"^\s*#\s*include\s*<([^>]+)>", re.MULTILINE)


def of_one_system(path: Path) -> list[str]:
    """Headers, names and paths of one system in a source file, except in comments."""
    text = re.sub(r"//.*|/\*(?s:.*?)\*/", "", path.read_text())
    allowed = PORTABLE_HEADERS.split() + (C_HEADERS.split() if path.suffix == ".c" else [])
    portable = re.compile(rf"(?:{'|'.join(allowed)})\.h|\w+")
    return [h for h in INCLUDE.findall(text) if not portable.fullmatch(h)] + OF_ONE_SYSTEM.findall(text)


def sources() -> list[Path]:
    return [p for p in sorted(SOURCES.rglob("*")) if p.suffix in (".h", ".c", ".cpp", ".cu", ".cuh")]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(SOURCES)))
def test_only_the_platform_folder_names_parts_of_one_system(path):
    found = of_one_system(path)
    if path == SOURCES / "platform" / "linux.cpp":
        assert {"sys/mman.h", "pthread.h", "fopencookie", "environ"} <= set(found)  # the search finds such names
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
    "limit, total",
    [(None, 99 << 10), ("max\n", 99 << 10), ("5000\n", 5000), ("9999999\n", 99 << 10), ("damaged", 99 << 10)],
)
def test_total_memory_is_that_of_the_container(tmp_path, limit, total):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  99 kB\nMemAvailable:   64 kB\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    if limit is not None:
        (group / "memory.max").write_text(limit)
    assert system.total_memory(tmp_path) == total
    assert system.total_memory(tmp_path / "nothing") == 0


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
