"""The interfaces of Linux that the package uses. test_platform.py checks that no other module names them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from pathlib import Path
from typing import NamedTuple

PLUGIN = "libggml-macko.so"
"""File name of the plugin."""
PRELOAD = "libggml-macko-preload.so"
"""File name of the library that `macko run` preloads."""
PRELOAD_VARIABLE = "LD_PRELOAD"
"""The environment variable that names the libraries to preload."""
PRELOAD_SEPARATORS = " :\t\n"
"""The characters that end a path in this variable."""


MAX_THREADS = 512
"""ggml's GGML_MAX_N_THREADS."""


def available_cores(root: Path = Path("/")) -> int:
    """The number of cores of this process: its affinity, limited by the CPU quota of the container. root: parent of
    sys/.
    """
    group, n = root / "sys/fs/cgroup", len(os.sched_getaffinity(0))
    for paths in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # cgroup v2, v1
        with contextlib.suppress(OSError, ValueError):  # no quota is "max" or -1
            quota, period = (int(x) for path in paths for x in (group / path).read_text().split())
            n = min(n, -(-quota // period)) if min(quota, period) > 0 else n
    return n


class Memory(NamedTuple):
    """Bytes of memory."""

    free: int  # available without swapping
    total: int


def memory(root: Path = Path("/")) -> Memory | None:
    """The memory of this machine, or None if unknown. root: parent of proc/."""
    try:
        with open(root / "proc/meminfo", encoding="ascii") as f:
            numbers = {line.split(":")[0]: int(line.split()[1]) << 10 for line in f}
        return Memory(numbers["MemAvailable"], numbers["MemTotal"])
    except (OSError, KeyError, ValueError, IndexError):
        return None


def _container_limit(root: Path) -> int | None:
    """The bytes that this container may use (cgroup v2), or None without a limit."""
    with contextlib.suppress(OSError, ValueError):  # no limit is "max"
        return int((root / "sys/fs/cgroup/memory.max").read_text())
    return None


def container_memory(root: Path = Path("/")) -> int | None:
    """Free bytes below the limit of this container (cgroup v2), or None without a limit. root: parent of sys/."""
    most = _container_limit(root)
    with contextlib.suppress(OSError, ValueError):
        return None if most is None else most - int((root / "sys/fs/cgroup/memory.current").read_text())
    return None


def total_memory(root: Path = Path("/")) -> int:
    """All memory of this machine, or of its container (cgroup v2); 0 if unknown. root: parent of proc/ and sys/."""
    machine, container = memory(root), _container_limit(root)
    return min((n for n in (machine and machine.total, container) if n is not None), default=0)


def limit(kind: int, value: int) -> None:
    """Sets the soft limit of a resource, no higher than the hard one."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def limit_memory(more: int) -> None:
    """Lets this process allocate this many bytes more than it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit(resource.RLIMIT_AS, used + more)


def peak_rss() -> int:
    """Peak resident memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def ggml_library(name: str) -> ctypes.CDLL:
    """The library of this name, such as "ggml-base", which libllama uses and importing llama_cpp loads.

    llama_cpp._ggml.libggml is a second copy with a registry that libllama does not use.
    """
    return ctypes.CDLL(f"lib{name}.so.0")


def cuda_driver() -> ctypes.CDLL | None:
    """The library of NVIDIA's driver, or None."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
