"""What operating systems do differently. Only this module names what one of them has: test_platform.py checks it.

There are two: Linux, and macOS, which follows its manuals and has never been run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PLUGIN = "libggml-macko.so"
"""File name of the plugin. CMake gives modules this suffix on macOS, too."""
if sys.platform == "darwin":
    PRELOAD = "libggml-macko-preload.dylib"
    PRELOAD_VARIABLE = "DYLD_INSERT_LIBRARIES"
    PRELOAD_SEPARATORS, SEPARATORS_TEXT = ":", "a colon"
else:
    PRELOAD = "libggml-macko-preload.so"
    """File name of the library that `macko run` preloads."""
    PRELOAD_VARIABLE = "LD_PRELOAD"
    """The environment variable that names the libraries to preload, with colons between them."""
    PRELOAD_SEPARATORS, SEPARATORS_TEXT = " :\t\n", "a space or a colon"
    """The characters that end a path there, and what they are called."""


def available_cores() -> int:
    """How many cores this process may use: on macOS all, since it ties no process to some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Memory(NamedTuple):
    """Bytes of memory."""

    free: int  # without making anything else swap
    total: int


def memory(root: Path = Path("/")) -> Memory | None:
    """Of this machine, None if the system does not tell. root: where Linux has mounted proc/."""
    if sys.platform == "darwin":
        return _macos_memory()
    try:
        with open(root / "proc/meminfo", encoding="ascii") as f:
            numbers = {line.split(":")[0]: int(line.split()[1]) << 10 for line in f}
        return Memory(numbers["MemAvailable"], numbers["MemTotal"])
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _macos_memory() -> Memory | None:
    """Free pages and those whose content is on disk, which vm_stat(1) counts."""
    try:
        text = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=20, check=True).stdout
        size = re.search(r"page size of (\d+) bytes", text)
        pages = re.findall(r"^Pages (?:free|speculative|inactive):\s+(\d+)\.", text, re.MULTILINE)
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Memory(int(size[1]) * sum(map(int, pages)), total) if size and pages else None


def container_memory(root: Path = Path("/")) -> int | None:
    """Bytes that the limit of this container (cgroup v2) leaves, None without a limit. root: where sys/ is mounted."""
    group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError):  # no limit is "max"
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    return None


def peak_rss() -> int:
    """Peak of this process's resident memory, in bytes."""
    if sys.platform == "darwin":
        import resource

        # bytes; on Linux KiB, and the peak of the program before exec() would count
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def read_into(fd: int, out: memoryview, offset: int) -> int:
    """os.preadv() for one buffer of bytes; Pythons for macOS before 11 lack it."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [out], offset)
    data = os.pread(fd, len(out), offset)
    out[: len(data)] = data
    return len(data)


def flush_to_disk(fd: int) -> None:
    """fsync() of a file, which on macOS leaves the data in the disk's own cache, where F_FULLFSYNC does not."""
    if sys.platform == "darwin":
        import fcntl

        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        except OSError:  # not every file system has it
            os.fsync(fd)
    else:
        os.fsync(fd)


def ggml_library(name: str) -> ctypes.CDLL:
    """The library of this name, such as "ggml-base", that libllama uses and importing llama_cpp has loaded.

    Not llama_cpp._ggml.libggml: that is a second copy of the library, with a registry that libllama never sees. Linux
    finds the right one by its soname; on macOS it is the loaded file with a version in its name, which libllama is
    linked to.
    """
    if sys.platform == "darwin":
        return ctypes.CDLL(versioned_image(name, _loaded_images()))
    return ctypes.CDLL(f"lib{name}.so.0")


def versioned_image(name: str, paths: list[str]) -> str:
    """Of the libraries libNAME.dylib and libNAME.0.dylib among these: the first with a version, or the one without."""
    pattern = re.compile(rf".*/lib{re.escape(name)}((?:\.\d+)*)\.dylib")
    found = [match for match in map(pattern.fullmatch, paths) if match]
    return next((match[0] for match in found if match[1]), found[0][0] if found else f"lib{name}.dylib")


def _loaded_images() -> list[str]:
    """The paths of all libraries of this process on macOS: dyld(3)."""
    dyld = ctypes.CDLL(None)
    dyld._dyld_get_image_name.restype = ctypes.c_char_p
    dyld._dyld_get_image_name.argtypes = [ctypes.c_uint32]
    names = (dyld._dyld_get_image_name(i) for i in range(dyld._dyld_image_count()))
    return [os.fsdecode(name) for name in names if name]
