"""Models on servers of llama.cpp's RPC backend, with and without the plugin. LLAMA_CPP_BIN names the folder that
tools/build_llama_cpp.py made. Tests that compare logits bit for bit require a CPU backend that was compiled for the
instruction sets of the installed llama-cpp-python: dense products with other sets round differently.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

from ggml_macko.native import devices
from support import generators, rpc_servers, tiny_models
from support import gguf_bytes as gb
from support import llama_programs as programs
from support import rpc_messages as rpc
from support.llama_logits import logits, open_model
from support.rpc_clients import ALL, NO_GPU, TOKENS, Raw, Relay, addresses, rpc_logits, servers, start


@pytest.fixture(scope="module", autouse=True)
def no_gpu():
    """Clients and servers, which are separate processes, use the CPU only; test_rpc_gpu.py tests GPUs."""
    devices.gpus()  # this process reads the list of GPUs before the change
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NO_GPU.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def want(folder, sparse):
    """The greedy text of the sparse model on this machine."""
    return programs.completion(folder, sparse, "-ngl", 0)


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
        assert len(found) >= min(n, 2) and sum(map(int, found)) == 28  # the third server may have the dense head only
        assert "became dense" not in log
        # a second model, and a dense one, on the same servers
        assert programs.completion(folder, generators.DEMO, *rpc) == want


def test_stock_client_uses_our_server(folder, want, tmp_path):
    with servers(folder, tmp_path, 1) as (server,):
        args = [str(x) for x in ("-p", programs.PROMPT, "-n", 48, "--temp", 0, "-no-cnv", "-t", 1, *ALL)]
        command = [str(folder / "llama-completion"), "-m", str(generators.DEMO), "--rpc", server.address, *args]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert want.startswith(done.stdout.strip()[:60])


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


def test_server_caches_chunks_by_hash(folder, tmp_path):
    """A server stores a model whose matrices exceed llama.cpp's threshold of 10 MiB, so it is sent only once."""
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


def test_server_outlives_a_killed_client(folder, sparse, want, tmp_path):
    with servers(folder, tmp_path, 1) as (server,):
        for delay in (0.35, 0.5, 0.7, 1.5):  # while it loads or computes
            client = start(folder, sparse, server)
            time.sleep(delay)
            client.kill()
            client.communicate()
        assert programs.completion(folder, sparse, "--rpc", server.address, *ALL) == want
        assert server.process.poll() is None


GONE = "ggml-macko: an RPC server was stopped, crashed or gave a malformed answer; llama.cpp cannot continue"


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


def load_through(folder, model, relay):
    """Starts a client of the relay's server."""
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
        assert "refused data from an RPC client for blk." in server.log()
    (line,) = lines_of(done)
    assert done.returncode == 1
    assert str(sparse) in line and "RPC0[" in line and "macko.tensor.nn" in line


def test_connection_that_ends_in_a_payload_ends_the_client_only(folder, sparse, want, tmp_path):
    """It exits with one line, both while it sends and while it waits."""
    passed = 0

    def some(data):
        nonlocal passed
        passed += len(data)
        return data if passed < 1 << 20 else None

    with servers(folder, tmp_path, 1) as (server,):
        done = load_through(folder, sparse, Relay(server, to_server=some))
        assert done.returncode == 1 and done.stderr.splitlines()[-1] == GONE
        assert programs.completion(folder, sparse, "--rpc", server.address, *ALL) == want


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
        client.tell(client.SET, client.tensor(buffer, address, 8, rpc.message(rpc.CHUNK, total=99))[:50])  # truncated
        client.close()
        assert programs.completion(folder, sparse, "--rpc", server.address, *ALL) == want
        assert server.process.poll() is None
        lines = re.findall(r"refused data from an RPC client for w: .*", server.log())
        assert len(lines) == refused + 5


def test_memory_is_that_of_the_compressed_weights(folder, tmp_path):
    """At most 1.1 times the server's share of the file; the embeddings stay with the client."""
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
