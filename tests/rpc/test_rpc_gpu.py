"""Sparse weights on the GPU of a server of llama.cpp's RPC backend. Skipped where there is no GPU, or where
LLAMA_CPP_BIN names no folder that tools/build_llama_cpp.py made. test_rpc_messages.py tests single messages.
"""

from __future__ import annotations

import contextlib
import random
import re
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
from support.llama_logits import logits, logits_one_by_one, open_model
from support.rpc_clients import ALL, TOKENS, Raw, Relay, addresses, rpc_logits, servers, start

pytestmark = pytest.mark.gpu

MIB = 1 << 20
DEVICE_COUNT = 15  # a request of llama.cpp's protocol


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if not devices.gpus():
        pytest.skip("no NVIDIA GPU was found")


@pytest.fixture(scope="module")
def want(folder, sparse):
    """The greedy text of the sparse model on the GPU of this machine."""
    return programs.completion(folder, sparse, *ALL)


def on(all_servers):
    """Options that place all layers on the servers and none on the client's GPU."""
    names = ",".join(f"RPC{i}" for i in range(len(all_servers)))
    return ("--rpc", addresses(all_servers), "-dev", names, *ALL)


def test_server_offers_the_gpus_and_the_cpu_when_asked(folder, tmp_path):
    n = len(devices.gpus())
    for options, expected in ((), n), (("-d", "MACKO0,MACKO_CPU"), 2):
        with rpc_servers.running(folder, tmp_path / "log", *options) as server:
            client = Raw(server)
            assert struct.unpack("<I", client.ask(DEVICE_COUNT, b"", 4)) == (expected,)
            client.close()


@pytest.mark.parametrize("n", [1, 2])
def test_text_is_that_of_the_local_gpu(folder, sparse, want, tmp_path, n):
    with servers(folder, tmp_path, n) as all_servers:
        assert programs.completion(folder, sparse, *on(all_servers)) == want
        assert programs.completion(folder, generators.DEMO, *on(all_servers)) == want  # dense, on the same servers
        assert programs.completion(folder, sparse, *on(all_servers)) == want
        assert not any("refused" in s.log() for s in all_servers)


@pytest.mark.parametrize("how", [logits, logits_one_by_one])
@pytest.mark.parametrize("kind", ["llama", "llama-moe", "demo"])
def test_logits_are_those_of_the_local_gpu(folder, sparse, macko, tmp_path, kind, how):
    """A batch has the same logits bit for bit. Token by token, one launch on a local GPU can be several launches on a
    server, which never calls the backend's graph optimization, so some roundings differ.
    """
    model = sparse
    if kind != "demo":
        dense, model = tmp_path / "dense.gguf", tmp_path / "sparse.gguf"
        dense.write_bytes(gb.write(tiny_models.make(kind)))
        assert macko("convert", dense, model).code == 0
    with contextlib.closing(open_model(model, logits_all=True, n_gpu_layers=99)) as llama:
        local = how(llama, TOKENS).astype(np.float32)
    with servers(folder, tmp_path, 1) as (server,):
        got = rpc_logits(folder, [server.address], model, how.__name__)
        assert "refused" not in server.log()
    assert np.array_equal(got, local) or how is logits_one_by_one
    assert np.mean((got - local) ** 2) <= 1e-6 * np.mean(local.astype(np.float64) ** 2)


def test_hostile_clients_cost_a_line_each(folder, sparse, want, tmp_path):
    file = gb.read(sparse.read_bytes())
    data = gb.write(rpc.matrix_file(file, "blk.0.ffn_up.weight"))
    rng = random.Random(6)
    with servers(folder, tmp_path, 1) as (server,):
        client = Raw(server)
        buffer, address = client.alloc(4 * MIB)
        assert client.send(buffer, address, data) == (0, "")
        refused = 0
        for n in (1, 500, len(data) - 1):
            refused += client.send(buffer, address, data[:n])[0] != 0
        assert refused == 3
        for _ in range(40):
            changed = bytearray(data)
            for _ in range(3):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            refused += client.send(buffer, address, bytes(changed))[0] != 0
        client.close()
        assert len(re.findall(r"refused data from an RPC client for w: .*", server.log())) == refused
        for delay in (0.5, 1.0, 2.0):  # killed while it loads, and while it computes
            killed = start(folder, sparse, server, "-dev", "RPC0")
            time.sleep(delay)
            killed.kill()
            killed.communicate()
        passed = 0

        def some(piece):
            nonlocal passed
            passed += len(piece)
            return piece if passed < MIB else None

        relay = Relay(server, to_server=some)  # ends within a payload
        command = programs.command(
            folder / "llama-completion", "-m", sparse, "-n", 4, "-no-cnv", "--rpc", relay.address, "-dev", "RPC0", *ALL
        )
        assert subprocess.run(command, capture_output=True, timeout=60).returncode == 1
        relay.close()
        assert programs.completion(folder, sparse, *on([server])) == want
        assert server.process.poll() is None


def wait_for_text(client):
    """Waits until a client of start() generates."""
    client.stdout.read(len(programs.PROMPT) + 8)


def test_memory_is_that_of_the_compressed_weights(folder, tmp_path):
    """The bound includes the measured 1.4 times the server's share of the file. Each buffer and norm takes a granule,
    and a model of two layers has many of them. Dense weights would take 3 times as much.
    """
    from ggml_macko import convert

    dense, model = tmp_path / "dense.gguf", tmp_path / "sparse.gguf"
    shape = ("--layers", "2", "--ff", "16384", "--vocab", "512", "--density", "0.3", "--smallest")
    tool = generators.ROOT / "tools" / "make_random_llama.py"
    subprocess.run([sys.executable, str(tool), *shape, str(dense)], check=True, capture_output=True)
    convert(dense, model, "packed")
    share = sum(len(t.data) for t in gb.read(model.read_bytes()).tensors if t.name.startswith(b"blk."))

    def free():
        return devices.gpus()[0].free

    with servers(folder, tmp_path, 1) as (server,):
        taken = []
        for _ in range(2):  # the first client loads kernels and allocates the memory for dense copies of weights
            before = free()
            client = start(folder, model, server, "-dev", "RPC0", "-ub", "64")
            wait_for_text(client)
            taken.append(before - free())
            client.kill()
            client.communicate()
            time.sleep(0.5)  # the server frees its buffers
    print(f"GPU memory of the server: {taken[1] / MIB:.1f} MiB for {share / MIB:.1f} MiB of the file")
    assert taken[1] <= 1.5 * share, taken
