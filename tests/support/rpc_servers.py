"""Servers of llama.cpp's RPC backend, with and without the plugin, for bench_rpc.py and the tests. They run on this
machine or in network namespaces, each of which acts as a host.
"""

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


class Host:
    """The place of a server: this machine or a network namespace."""

    def __init__(self, address: str = "127.0.0.1", namespace: str = "", link: str = "") -> None:
        self.address, self.namespace, self._link = address, namespace, link

    def command(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []

    def traffic(self) -> int:
        """Bytes that have passed the link of a namespace so far, in both directions."""
        folder = pathlib.Path("/sys/class/net") / self._link / "statistics"
        return sum(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


@contextlib.contextmanager
def hosts(n: int) -> Iterator[list[Host]]:
    """n network namespaces, each with a link to this one. Requires the permission to create them."""

    def ip(*args: str) -> None:
        subprocess.run(["ip", *args], check=True, capture_output=True, text=True)

    made = []
    try:
        for i in range(n):
            host = Host(f"10.231.{i}.2", f"macko-host{i}", f"mkhost{i}")
            ip("netns", "add", host.namespace)
            made.append(host)
            ip("link", "add", f"mkhost{i}", "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            ip("addr", "add", f"10.231.{i}.1/30", "dev", f"mkhost{i}")
            ip("link", "set", f"mkhost{i}", "up")
            ip("-n", host.namespace, "addr", "add", f"{host.address}/30", "dev", "eth0")
            ip("-n", host.namespace, "link", "set", "eth0", "up")
        yield made
    finally:
        for i, host in enumerate(made):
            with contextlib.suppress(subprocess.CalledProcessError):  # it does not exist
                ip("link", "del", f"mkhost{i}")  # otherwise the kernel deletes it some time after the namespace
            ip("netns", "del", host.namespace)


class Server:
    """A server process with its address and log."""

    def __init__(self, process: subprocess.Popen[bytes], host: Host, port: int, log: pathlib.Path) -> None:
        self.process, self.host, self.port, self._log = process, host, port, log

    @property
    def address(self) -> str:
        return f"{self.host.address}:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process id; `macko run` replaces its own process with the server."""
        return self.process.pid

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def memory(self) -> int:
        """Anonymous resident memory in bytes."""
        return _field(self.pid, "RssAnon")


THIS_MACHINE = Host()


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
    folder: pathlib.Path,
    log: pathlib.Path,
    *args: str,
    plugin: bool = True,
    threads: int = 2,
    host: Host = THIS_MACHINE,
    **environment: str,
) -> Iterator[Server]:
    """A listening server; the exit of the context kills it."""
    port = free_port()
    command = [str(folder / PROGRAM), "-H", host.address, "-p", str(port), "-t", str(threads), *args]
    if plugin:
        command = [sys.executable, "-m", "ggml_macko.commands.cli", "run", "--", *command]
    command = [*host.command(), *command]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment})
    try:
        wait_until_it_listens(process, port, log)
        yield Server(process, host, port, log)
    finally:
        process.kill()
        process.wait()


def wait_until_it_listens(process: subprocess.Popen[bytes], port: int, log: pathlib.Path) -> None:
    """Reads the kernel's table, because a connection would be the server's only client."""
    listens = re.compile(rf"^ *\d+: \w+:{port:04X} 00000000:0000 0A ", re.MULTILINE)
    for _ in range(600):
        if process.poll() is not None:
            break
        if listens.search(pathlib.Path(f"/proc/{process.pid}/net/tcp").read_text()):  # in its namespace
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server does not listen: {log.read_text(errors='replace')[-800:]}")
