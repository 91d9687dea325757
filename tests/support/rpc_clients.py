"""Clients of RPC servers: programs, raw sockets, and a relay that can change the data."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading

import numpy as np

from support import generators, rpc_servers
from support import llama_programs as programs
from support import rpc_messages as rpc

TOKENS = list(range(3, 60))

ALL = ("-ngl", 99, "-fit", "off")

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # environment variables


@contextlib.contextmanager
def servers(folder, tmp_path, n, **kwargs):
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(rpc_servers.running(folder, tmp_path / f"server{i}.log", **kwargs)) for i in range(n)
        ]


def addresses(all_servers):
    return ",".join(s.address for s in all_servers)


def rpc_logits(folder, server_addresses, model, how="logits"):
    """Logits computed in a process of its own whose llama_cpp has the RPC backend. how: a function of llama_logits. A
    GCC that links a part of libstdc++ statically builds libraries that Python cannot open (undefined symbol:
    __cxxabiv1::__terminate); build the programs elsewhere then.
    """
    script = f"""
import ctypes, sys, numpy as np
sys.path.insert(0, {str(generators.ROOT / "tests")!r})
from support.llama_logits import {how}, open_model
import llama_cpp
rpc = ctypes.CDLL({str(folder / "libggml-rpc.so")!r})
rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
ggml = ctypes.CDLL("libggml.so.0")
for address in {server_addresses!r}:
    ggml.ggml_backend_register(ctypes.c_void_p(rpc.ggml_backend_rpc_add_server(address.encode())))
llama = open_model({str(model)!r}, logits_all=True, n_gpu_layers=99)
sys.stdout.buffer.write({how}(llama, {TOKENS!r}).astype(np.float32).tobytes())
llama.close()
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, timeout=120, env={**os.environ, **NO_GPU})
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return np.frombuffer(done.stdout, np.float32).reshape(len(TOKENS), -1)


def start(folder, model, server, *args):
    command = programs.command(
        folder / "llama-completion", "-m", model, "-p", programs.PROMPT, "--temp", 0, "-no-cnv", "--ignore-eos", "-n",
        100000, "-c", 256, "--context-shift", "--rpc", server.address, *ALL, *args
    )  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


class Relay:
    """A port that forwards connections to a server. change: called with each chunk from the client and each chunk from
    the server; it returns the bytes to forward, or None to end the connection.
    """

    def __init__(self, server, to_server=None, to_client=None):
        self._server = server
        self._change = (to_server or bytes, to_client or bytes)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server.port))
                for ends, change in zip(((client, server), (server, client)), self._change):
                    threading.Thread(target=self._copy, args=(*ends, change), daemon=True).start()

    @staticmethod
    def _copy(source, target, change):
        with contextlib.suppress(OSError):
            while data := change(source.recv(1 << 16)):
                target.sendall(data)
        for s in (source, target):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.close()


class Raw:
    """A client that implements the protocol of llama.cpp's RPC backend itself."""

    ALLOC, BASE, SET, GET, HELLO = 0, 3, 6, 8, 14

    def __init__(self, server):
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        self.ask(self.HELLO, bytes(24), 28)

    def ask(self, command, data, n):
        self.tell(command, data)
        (got,) = struct.unpack("<Q", self.receive(8))
        assert got == n
        return self.receive(n)

    def tell(self, command, data):
        self.socket.sendall(struct.pack("<BQ", command, len(data)) + data)

    def receive(self, n):
        out = b""
        while len(out) < n:
            part = self.socket.recv(n - len(out))
            if not part:
                raise ConnectionError
            out += part
        return out

    def alloc(self, nbytes):
        """Allocates a buffer and returns it with its address."""
        buffer, _ = struct.unpack("<QQ", self.ask(self.ALLOC, struct.pack("<IQ", 0, nbytes), 16))
        (base,) = struct.unpack("<Q", self.ask(self.BASE, struct.pack("<Q", buffer), 8))
        return buffer, base

    @staticmethod
    def tensor(buffer, address, n, op_params):
        """An rpc_tensor of n bytes."""
        head = struct.pack("<QIQ8II", 1, rpc.I8, buffer, n, 1, 1, 1, 1, n, n, n, 0)
        tail = struct.pack("<i10QQQQ64si", 0, *[0] * 10, 0, 0, address, b"w", 0)
        return head + op_params.ljust(64, b"\0") + tail

    def send(self, buffer, address, data, step=4096):
        """Sends a matrix file in chunks; returns the status and the text of the reply."""
        for at in range(0, len(data), step):
            part = data[at : at + step]
            message = rpc.message(rpc.CHUNK, offset=at, total=len(data))
            head = self.tensor(buffer, address, len(part), message)
            self.tell(self.SET, head + struct.pack("<BQ", 0, 0) + part)
        head = self.tensor(buffer, address, 256, rpc.message(rpc.RESULT))
        status, text = struct.unpack("<i252s", self.ask(self.GET, head + struct.pack("<QQ", 0, 256), 256))
        return status, text.split(b"\0")[0].decode(errors="replace")

    def close(self):
        self.socket.close()
