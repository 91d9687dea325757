"""Servers of llama.cpp's RPC backend, with and without the plugin, for test_rpc.py and tools/bench_rpc.py."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

PROGRAM = "ggml-rpc-server"


class Server:
    """A server, its address, and what it has printed."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: pathlib.Path) -> None:
        self.process, self.port, self._log = process, port, log

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of the server: `macko run` has become it."""
        return self.process.pid

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def memory(self) -> int:
        """Anonymous resident memory in bytes."""
        return _field(self.pid, "RssAnon")

    def peak_memory(self) -> int:
        """The largest resident memory so far, files included, in bytes."""
        return _field(self.pid, "VmHWM")


def _field(pid: int, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match
    return int(match[1]) * 1024


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def running(
    folder: pathlib.Path, log: pathlib.Path, *args: str, plugin: bool = True, threads: int = 2, **environment: str
) -> Iterator[Server]:
    """A server that listens; it is killed at the end."""
    port = free_port()
    command = [str(folder / PROGRAM), "-p", str(port), "-t", str(threads), *args]
    if plugin:
        command = [sys.executable, "-m", "ggml_macko.commands.cli", "run", "--", *command]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment})
    try:
        wait_until_it_listens(process, port, log)
        yield Server(process, port, log)
    finally:
        process.kill()
        process.wait()


def wait_until_it_listens(process: subprocess.Popen[bytes], port: int, log: pathlib.Path) -> None:
    """It asks the kernel, because a connection would be the server's client."""
    for _ in range(600):
        if process.poll() is not None:
            break
        if re.search(
            rf"^ *\d+: \w+:{port:04X} 00000000:0000 0A ", pathlib.Path("/proc/net/tcp").read_text(), re.MULTILINE
        ):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server does not listen: {log.read_text(errors='replace')[-800:]}")
