"""Models on servers of llama.cpp's RPC backend, with and without the plugin. LLAMA_CPP_BIN names the folder that
tools/build_llama_cpp.py made. Where logits are compared bit for bit, its CPU backend must have been compiled for the
instruction sets of the installed llama-cpp-python: dense products of others round differently.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ggml_macko.native import devices
from support import generators, rpc_servers, tiny_models
from support import gguf_bytes as gb
from support import llama_programs as programs
from support import rpc_messages as rpc
from support.llama_logits import logits, open_model

TOKENS = list(range(3, 60))
ALL = ("-ngl", 99, "-fit", "off")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # an environment


@pytest.fixture(scope="module", autouse=True)
def no_gpu():
    """Clients and servers, which are processes of their own, have the CPU only; test_rpc_gpu.py has the rest."""
    devices.gpus()  # this process has looked for its own by now
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NO_GPU.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def folder():
    """The folder of the programs."""
    path = pathlib.Path(os.environ.get("LLAMA_CPP_BIN", "/nonesuch"))
    if not (path / rpc_servers.PROGRAM).exists():
        pytest.skip(f"LLAMA_CPP_BIN names no folder with {rpc_servers.PROGRAM}")
    return path


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    from ggml_macko import convert

    path = tmp_path_factory.mktemp("demo") / "sparse.gguf"
    convert(generators.DEMO, path)
    return path


@pytest.fixture(scope="module")
def want(folder, sparse):
    """The greedy text of the sparse model on this machine."""
    return programs.completion(folder, sparse, "-ngl", 0)


@contextlib.contextmanager
def servers(folder, tmp_path, n, **kwargs):
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(rpc_servers.running(folder, tmp_path / f"server{i}.log", **kwargs)) for i in range(n)
        ]


def addresses(all_servers):
    return ",".join(s.address for s in all_servers)


def logged(folder, model, *args):
    """A completion's text and its log."""
    done = programs.run(
        folder / "llama-completion", "-m", model, "-p", programs.PROMPT, "-n", 8, "--temp", 0, "-no-cnv", "-lv", 4,
        *args
    )  # fmt: skip
    return done.stdout.strip(), done.stderr


def test_stock_server_gets_dense_weights(folder, sparse, want, tmp_path):
    with servers(folder, tmp_path, 1, plugin=False) as (server,):
        rpc = ("--rpc", server.address, *ALL)
        assert programs.completion(folder, generators.DEMO, *rpc) == want
        assert programs.completion(folder, sparse, *rpc) == want
        assert "28 of 28 sparse tensors became dense" in logged(folder, sparse, *rpc)[1]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_text_is_that_of_one_machine(folder, sparse, want, tmp_path, n):
    with servers(folder, tmp_path, n) as all_servers:
        rpc = ("--rpc", addresses(all_servers), *ALL)
        assert programs.completion(folder, sparse, *rpc) == want
        log = logged(folder, sparse, *rpc)[1]
        found = re.findall(r"RPC\d+\[127.0.0.1:\d+\]: (\d+) sparse tensors", log)
        assert len(found) >= min(n, 2) and sum(map(int, found)) == 28  # the third may have the dense head only
        assert "became dense" not in log
        # a second model, and a dense one, on the same servers
        assert programs.completion(folder, generators.DEMO, *rpc) == want


def test_stock_client_uses_our_server(folder, want, tmp_path):
    with servers(folder, tmp_path, 1) as (server,):
        args = [str(x) for x in ("-p", programs.PROMPT, "-n", 48, "--temp", 0, "-no-cnv", "-t", 1, *ALL)]
        command = [str(folder / "llama-completion"), "-m", str(generators.DEMO), "--rpc", server.address, *args]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert want.startswith(done.stdout.strip()[:60])


def rpc_logits(folder, server_addresses, model, how="logits"):
    """In a process of its own, whose llama_cpp gets the RPC backend of the programs. how: function of llama_logits."""
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
    done = subprocess.run(command, capture_output=True, check=True, timeout=120, env={**os.environ, **NO_GPU})
    return np.frombuffer(done.stdout, np.float32).reshape(len(TOKENS), -1)


@pytest.mark.parametrize("n", [1, 2])
def test_logits_are_bit_identical(folder, sparse, tmp_path, n):
    with contextlib.closing(open_model(sparse, logits_all=True, n_gpu_layers=0)) as llama:
        local = logits(llama, TOKENS).astype(np.float32)
    with servers(folder, tmp_path, n) as all_servers:
        got = rpc_logits(folder, [s.address for s in all_servers], sparse)
    assert np.array_equal(got, local)


def test_experts_are_bit_identical(folder, macko, tmp_path):
    dense, model = tmp_path / "dense.gguf", tmp_path / "sparse.gguf"
    dense.write_bytes(gb.write(tiny_models.make("llama-moe")))
    assert macko("convert", dense, model).code == 0
    with contextlib.closing(open_model(model, logits_all=True, n_gpu_layers=0)) as llama:
        local = logits(llama, TOKENS).astype(np.float32)
    with servers(folder, tmp_path, 1) as (server,):
        assert np.array_equal(rpc_logits(folder, [server.address], model), local)
        assert "refused" not in server.log()


def test_server_caches_pieces_by_hash(folder, tmp_path):
    """A model whose matrices are larger than llama.cpp's threshold of 10 MiB is sent once."""
    dense, model = tmp_path / "dense.gguf", tmp_path / "sparse.gguf"
    make_random(dense, "--layers", "1", "--ff", "16384", "--vocab", "512", "--density", "0.4")
    from ggml_macko import convert

    convert(dense, model, "macko")
    with servers(folder, tmp_path, 1, LLAMA_CACHE=str(tmp_path / "cache")) as (server,):
        pass
    with rpc_servers.running(folder, tmp_path / "c.log", "-c", LLAMA_CACHE=str(tmp_path / "cache")) as server:
        first = logged(folder, model, "--rpc", server.address, *ALL)[0]
        stored = sorted((tmp_path / "cache").rglob("*"))
        assert logged(folder, model, "--rpc", server.address, *ALL)[0] == first
        assert sorted((tmp_path / "cache").rglob("*")) == stored and len(stored) > 1


def make_random(path, *args):
    tool = generators.ROOT / "tools" / "make_random_llama.py"
    subprocess.run([sys.executable, str(tool), *args, str(path)], check=True, capture_output=True)


def start(folder, model, server, *args):
    command = programs.command(
        folder / "llama-completion", "-m", model, "-p", programs.PROMPT, "--temp", 0, "-no-cnv", "--ignore-eos", "-n",
        100000, "-c", 256, "--context-shift", "--rpc", server.address, *ALL, *args
    )  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_server_outlives_a_killed_client(folder, sparse, want, tmp_path):
    with servers(folder, tmp_path, 1) as (server,):
        for delay in (0.35, 0.5, 0.7, 1.5):  # while it loads, and while it computes
            client = start(folder, sparse, server)
            time.sleep(delay)
            client.kill()
            client.communicate()
        assert programs.completion(folder, sparse, "--rpc", server.address, *ALL) == want
        assert server.process.poll() is None


GONE = "ggml-macko: an RPC server was stopped, crashed or gave a malformed answer; llama.cpp cannot go on"


def test_client_of_a_killed_server_ends_with_one_line(folder, sparse, tmp_path):
    with servers(folder, tmp_path, 1) as (server,):
        client = start(folder, sparse, server)
        time.sleep(1.5)
        server.process.kill()
        _, err = client.communicate(timeout=30)
    assert client.returncode == 1
    assert err.decode().splitlines()[-1] == GONE


def test_client_ends_as_ever_when_nobody_reads_its_output(folder, sparse, tmp_path):
    with servers(folder, tmp_path, 1) as (server,):
        client = start(folder, sparse, server)
        client.stdout.read(1)
        client.stdout.close()
        assert client.wait(30) == -signal.SIGPIPE
        client.stderr.close()


class Relay:
    """A port whose connections go on to a server. change: called with what the client sends, and with what the server
    answers, piece by piece; it returns what goes on, or None to end the connection.
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


def load_through(folder, model, relay):
    """A client of the relay's server."""
    command = programs.command(
        folder / "llama-completion", "-m", model, "-p", "x", "-n", 4, "-no-cnv", "--rpc", relay.address, *ALL
    )
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, errors="replace")
    finally:
        relay.close()


def lines_of(done):
    return [line for line in done.stderr.splitlines() if line.startswith("ggml-macko: ")]


def test_server_of_another_version_is_refused(folder, sparse, tmp_path):
    def other_version(data):
        return data.replace(rpc.MAGIC + struct.pack("<I", rpc.VERSION), rpc.MAGIC + struct.pack("<I", rpc.VERSION + 1))

    with servers(folder, tmp_path, 1) as (server,):
        done = load_through(folder, sparse, Relay(server, to_client=other_version))
    (line,) = lines_of(done)
    assert done.returncode == 1
    assert f"with RPC version {rpc.VERSION + 1}, and this is" in line and "use the same on both" in line


def test_payload_that_changes_on_the_way_is_refused(folder, sparse, tmp_path):
    with servers(folder, tmp_path, 1) as (server,):
        relay = Relay(server, to_server=lambda data: data.replace(b"macko.tensor.nnz", b"macko.tensor.nnx"))
        done = load_through(folder, sparse, relay)
        assert server.process.poll() is None
        assert "refused what an RPC client sent for blk." in server.log()
    (line,) = lines_of(done)
    assert done.returncode == 1
    assert str(sparse) in line and "RPC0[" in line and "macko.tensor.nn" in line


def test_connection_that_ends_in_a_payload_ends_the_client_only(folder, sparse, want, tmp_path):
    """With one line, whether the client was sending or waiting."""
    passed = 0

    def some(data):
        nonlocal passed
        passed += len(data)
        return data if passed < 1 << 20 else None

    with servers(folder, tmp_path, 1) as (server,):
        done = load_through(folder, sparse, Relay(server, to_server=some))
        assert done.returncode == 1 and done.stderr.splitlines()[-1] == GONE
        assert programs.completion(folder, sparse, "--rpc", server.address, *ALL) == want


class Raw:
    """A client that speaks the protocol of llama.cpp's RPC backend itself."""

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
        """The buffer and its address."""
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
        """Sends a matrix file in pieces, and returns the status and text of the answer."""
        for at in range(0, len(data), step):
            part = data[at : at + step]
            message = rpc.message(rpc.PIECE, offset=at, total=len(data))
            head = self.tensor(buffer, address, len(part), message)
            self.tell(self.SET, head + struct.pack("<BQ", 0, 0) + part)
        head = self.tensor(buffer, address, 256, rpc.message(rpc.RESULT))
        status, text = struct.unpack("<i252s", self.ask(self.GET, head + struct.pack("<QQ", 0, 256), 256))
        return status, text.split(b"\0")[0].decode(errors="replace")

    def close(self):
        self.socket.close()


def test_server_outlives_a_client_that_leaves_without_its_answers(folder, sparse, want, tmp_path):
    with servers(folder, tmp_path, 1) as (server,):
        for _ in range(5):
            client = Raw(server)
            buffer, address = client.alloc(16 << 20)
            head = client.tensor(buffer, address, 16 << 20, b"")
            for _ in range(4):
                client.tell(client.GET, head + struct.pack("<QQ", 0, 16 << 20))
            client.close()
        assert programs.completion(folder, sparse, "--rpc", server.address, *ALL) == want
        assert server.process.poll() is None


def test_hostile_payloads_are_refused_and_the_server_goes_on(folder, sparse, want, tmp_path):
    file = gb.read(sparse.read_bytes())
    data = gb.write(rpc.matrix_file(file, "blk.0.ffn_up.weight"))
    rng = random.Random(6)
    with servers(folder, tmp_path, 1) as (server,):
        client = Raw(server)
        buffer, address = client.alloc(4 << 20)
        assert client.send(buffer, address, data) == (0, "")
        for n in (1, 24, 500, len(data) // 2, len(data) - 1):
            status, text = client.send(buffer, address, data[:n])
            assert status != 0 and text
        refused = 0
        for _ in range(80):
            changed = bytearray(data)
            for _ in range(3):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            refused += client.send(buffer, address, bytes(changed))[0] != 0
        assert refused > 20
        client.tell(client.SET, client.tensor(buffer, address, 8, rpc.message(rpc.PIECE, total=99))[:50])  # cut off
        client.close()
        assert programs.completion(folder, sparse, "--rpc", server.address, *ALL) == want
        assert server.process.poll() is None
        lines = re.findall(r"refused what an RPC client sent for w: .*", server.log())
        assert len(lines) == refused + 5


def test_memory_is_that_of_the_compressed_weights(folder, tmp_path):
    """At most 1.1 of the server's share of the file, of which the embeddings stay with the client."""
    dense, model = tmp_path / "dense.gguf", tmp_path / "sparse.gguf"
    make_random(dense, "--layers", "2", "--ff", "8192", "--vocab", "512", "--density", "0.3", "--smallest")
    from ggml_macko import convert

    convert(dense, model, "packed")
    share = sum(len(t.data) for t in gb.read(model.read_bytes()).tensors if t.name.startswith(b"blk."))
    dense_share = sum(len(t.data) for t in gb.read(dense.read_bytes()).tensors if t.name.startswith(b"blk."))
    with servers(folder, tmp_path, 1) as (server,):
        idle = server.memory()
        client = start(folder, model, server, "-ctk", "f16", "-ub", "64")
        assert client.stdout
        client.stdout.read(len(programs.PROMPT) + 8)  # until it generates
        got = server.memory() - idle
        client.kill()
        client.communicate()
    assert got <= 1.1 * share and got < 0.5 * dense_share
