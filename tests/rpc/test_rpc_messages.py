"""The RPC server's device handles valid and invalid messages of clients (docs/design/rpc.md), without a network;
test_rpc.py uses servers.
"""

from __future__ import annotations

import ctypes
import random
import struct

import numpy as np
import pytest

from support import generators
from support import gguf_bytes as gb
from support import rpc_messages as rpc

NAME = "blk.0.ffn_up.weight"
ROWS, COLS = 96, 160
KINDS = ["macko", "packed", "ec-csr", "sparse-lossless", "sparse-q8"]


@pytest.fixture(scope="module")
def dense():
    bits = generators.random_bits(np.random.default_rng(1), ROWS, COLS, 0.3)
    bits[bits == 0x8000] = 0
    return bits


def make_matrix(dense, kind, folder):
    """A matrix in a format, as a client sends it, and its dense bits."""
    from ggml_macko import convert, restore

    source = generators.write_gguf(folder / "dense.gguf", {NAME: (dense, generators.TYPE_F16)})
    convert(source, folder / "sparse.gguf", kind)
    restore(folder / "sparse.gguf", folder / "restored.gguf")
    return rpc.matrix_file(gb.read((folder / "sparse.gguf").read_bytes()), NAME), gb.read(
        (folder / "restored.gguf").read_bytes()
    ).tensor(NAME).data


@pytest.fixture(scope="module")
def matrix(dense, tmp_path_factory):
    return make_matrix(dense, "macko", tmp_path_factory.mktemp("rpc"))


@pytest.fixture(params=["MACKO_CPU", pytest.param("MACKO0", marks=pytest.mark.gpu)])
def device(request):
    try:
        d = rpc.Device(1 << 20, request.param)
    except LookupError:
        pytest.skip("no NVIDIA GPU was found")
    yield d
    d.close()


X_AT, Y_AT = 512 << 10, 768 << 10


def product(device, offset, x, rows=ROWS, cols=COLS, x_at=X_AT, y_at=Y_AT, change=None):
    """The device's product of the weight at an offset and columns x; x and y are stored behind the weight.

    change: called with the graph and the product before it is computed.
    """
    base = device.base
    n = x.shape[0]
    context = device.call(base.ggml_init, InitParams(1 << 20, None, True))
    try:
        w = device.call(base.ggml_new_tensor_2d, context, rpc.F16, ctypes.c_int64(cols), ctypes.c_int64(rows))
        xs = device.call(base.ggml_new_tensor_2d, context, rpc.F32, ctypes.c_int64(cols), ctypes.c_int64(n))
        y = device.call(base.ggml_mul_mat, context, w, xs)
        graph = device.call(base.ggml_new_graph, context)
        device.call(base.ggml_build_forward_expand, graph, y)
        for t, at in ((w, offset), (xs, x_at), (y, y_at)):
            device.call(base.ggml_backend_tensor_alloc, device.buffer, t, device.address + at)
        if x_at == X_AT:
            device.set(rpc.Tensor.from_address(xs), x.tobytes())
        if change:
            change(graph, rpc.Tensor.from_address(y))
        assert device.base.ggml_backend_graph_compute(ctypes.c_void_p(device.backend), ctypes.c_void_p(graph)) == 0
        out = device.get(rpc.Tensor.from_address(y), 4 * n * rows)
        return np.frombuffer(out, np.float32).reshape(n, rows)
    finally:
        device.call(base.ggml_free, context)


class InitParams(ctypes.Structure):
    """The struct ggml_init_params of ggml.h."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def columns(n, seed=2):
    return np.random.default_rng(seed).standard_normal((n, COLS)).astype(np.float32)


def expected(dense_bytes, x):
    w = np.frombuffer(dense_bytes, np.float16).astype(np.float64).reshape(ROWS, COLS)
    return x.astype(np.float64) @ w.T


def assert_close(got, dense_bytes, x, is_quantized=False):
    """x is rounded to F16; for quantized values, as coarsely as to 8 bits with the scale of its largest element."""
    w = np.abs(np.frombuffer(dense_bytes, np.float16).astype(np.float64).reshape(ROWS, COLS))
    step = np.abs(x).max(axis=1, keepdims=True) / 127
    bound = 1e-3 * (np.abs(x).astype(np.float64) @ w.T) + is_quantized * step / 2 * w.sum(axis=1) + 1e-6
    assert np.all(np.abs(got - expected(dense_bytes, x)) <= bound)


def test_hello_is_answered_with_the_challenge(device):
    challenge = random.Random(3).randbytes(16)
    magic, version, echo, _ = struct.unpack("<16sI16s28s", device.hello(challenge))
    assert (magic, version, echo) == (rpc.MAGIC, rpc.VERSION, challenge)


@pytest.mark.parametrize("kind", KINDS)
def test_matrix_is_kept_and_multiplied(device, dense, kind, tmp_path):
    file, dense_bytes = make_matrix(dense, kind, tmp_path)
    assert device.send(0, gb.write(file), step=1000) == (0, "")
    assert device.get(device.at(0, (COLS, ROWS), rpc.F16), len(dense_bytes)) == dense_bytes
    assert device.get(device.at(0, (COLS, ROWS), rpc.F16), 77, offset=333) == dense_bytes[333:410]
    for n in (1, 3, 17):
        assert_close(product(device, 0, columns(n)), dense_bytes, columns(n), kind == "sparse-q8")


def test_bytes_of_data_are_no_message(device):
    data = rpc.message(rpc.CHUNK, total=8) * 4
    t = device.at(4096, (len(data),), rpc.I8)
    device.set(t, data)
    assert device.get(t, len(data)) == data


def test_pages_of_a_weight_take_no_memory(matrix):
    file, _ = matrix
    big = rpc.Device(1 << 40)  # more than the machine's memory
    try:
        before = resident()
        assert big.send(1 << 39, gb.write(file))[0] == 0
        assert resident() - before < 4 << 20
    finally:
        big.close()


def resident():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) << 10 for line in f if line.startswith("RssAnon"))


def test_plain_bytes_replace_a_weight(device, matrix):
    file, dense_bytes = matrix
    device.send(0, gb.write(file))
    t = device.at(0, (COLS, ROWS), rpc.F16)
    device.set(t, b"\x00\x3c" * (ROWS * COLS))
    assert device.get(t, len(dense_bytes)) == b"\x00\x3c" * (ROWS * COLS)
    x = columns(1)
    assert_close(product(device, 0, x), b"\x00\x3c" * (ROWS * COLS), x)


def test_incomplete_weight_is_not_computed_with(device, matrix, capfd):
    data = gb.write(matrix[0])
    chunk = rpc.message(rpc.CHUNK, total=len(data))
    device.set(device.at(0, (len(data) - 1,), rpc.I8, chunk), data[:-1])
    status, text = device.result(0)
    assert status != 0 and "missing" in text
    assert np.all(np.isnan(product(device, 0, columns(2))))


def test_every_truncation_is_refused(device, matrix):
    data = gb.write(matrix[0])
    for n in [*range(1, 600, 7), *range(600, len(data), 331), len(data) - 1]:
        status, text = device.send(0, data[:n])
        assert status != 0 and text and "\n" not in text, n
    assert device.send(0, data) == (0, "")


def test_wrong_matrix_is_refused(device, matrix):
    for part in (".values", ".deltas", ".row_ptr"):
        file = gb.read(gb.write(matrix[0]))
        t = file.tensor(NAME + part)
        t.data = b"\xff" * len(t.data)
        status, text = device.send(0, gb.write(file))
        assert status != 0 and NAME in text
        assert np.all(np.isnan(product(device, 0, columns(1))))


def test_chunk_out_of_order_is_refused(device, matrix):
    data = gb.write(matrix[0])
    for offset, total in ((0, 8), (1, len(data)), (1 << 63, 1 << 63), (len(data), 2 * len(data))):
        device.set(device.at(0, (100,), rpc.I8, rpc.message(rpc.CHUNK, total=len(data))), data[:100])
        device.set(device.at(0, (200,), rpc.I8, rpc.message(rpc.CHUNK, offset=offset, total=total)), bytes(200))
        assert device.result(0)[0] != 0
    assert device.send(0, data) == (0, "")


def test_message_of_another_version_is_refused(device, matrix):
    data = gb.write(matrix[0])
    t = device.at(0, (len(data),), rpc.I8, rpc.message(rpc.CHUNK, total=len(data), version=rpc.VERSION + 1))
    device.set(t, data)
    assert device.result(0)[0] != 0


def test_weight_outside_of_the_buffer_is_refused(device, matrix):
    at = (1 << 20) - len(gb.write(matrix[0])) // 64 * 64
    status, text = device.send(at, gb.write(matrix[0]), step=1024)
    assert status != 0 and "buffer" in text


def test_weights_that_overlap_are_refused(device, matrix):
    data = gb.write(matrix[0])
    assert device.send(4096, data)[0] == 0
    status, text = device.send(0, data)
    assert status != 0 and "another sparse weight" in text
    assert device.send(4096 + 64, data)[0] == 0  # inside of the first one, which it replaces
    assert device.result(4096)[0] != 0


def test_file_with_more_than_a_matrix_is_refused(device, matrix):
    file = gb.read(gb.write(matrix[0]))
    file.set("general.name", gb.STRING, b"x")
    assert device.send(0, gb.write(file))[0] != 0
    file = gb.read(gb.write(matrix[0]))
    file.tensors.append(gb.Tensor(b"dense", [8], rpc.F32, bytes(32)))
    assert device.send(0, gb.write(file))[0] != 0
    assert device.send(0, b"GGUF" + bytes(100))[0] != 0


def test_product_of_another_shape_is_not_computed(device, matrix):
    assert device.send(0, gb.write(matrix[0]))[0] == 0
    assert np.all(np.isnan(product(device, 0, columns(2), rows=ROWS - 1)))
    assert np.all(np.isnan(product(device, 64, columns(2), rows=8)))
    assert np.all(np.isnan(product(device, 64, columns(2))))  # the right shape at the wrong offset


def test_other_operands_of_a_product_are_no_weights(device, matrix):
    for offset in (0, 256 << 10):
        assert device.send(offset, gb.write(matrix[0])) == (0, "")
    assert np.all(np.isnan(product(device, 0, columns(2), x_at=256 << 10)))
    product(device, 0, columns(2), y_at=256 << 10)  # the weight stays
    x = columns(2)
    assert_close(product(device, 256 << 10, x), matrix[1], x)


def test_operation_without_kernel_is_computed(device):
    """NORM, which ggml's CPU backend computes for a GPU, between two operations that a GPU computes itself."""
    base = device.base
    x = np.random.default_rng(5).standard_normal((64, 512)).astype(np.float32)
    context = device.call(base.ggml_init, InitParams(1 << 20, None, True))
    try:
        xs = device.call(base.ggml_new_tensor_2d, context, rpc.F32, ctypes.c_int64(512), ctypes.c_int64(64))
        half = device.call(base.ggml_scale, context, xs, ctypes.c_float(0.5))
        norm = device.call(base.ggml_norm, context, half, ctypes.c_float(1e-5))
        y = device.call(base.ggml_scale, context, norm, ctypes.c_float(2.0))
        graph = device.call(base.ggml_new_graph, context)
        device.call(base.ggml_build_forward_expand, graph, y)
        for i, t in enumerate((xs, half, norm, y)):
            device.call(base.ggml_backend_tensor_alloc, device.buffer, t, device.address + (i << 18))
        device.set(rpc.Tensor.from_address(xs), x.tobytes())
        assert base.ggml_backend_graph_compute(ctypes.c_void_p(device.backend), ctypes.c_void_p(graph)) == 0
        got = np.frombuffer(device.get(rpc.Tensor.from_address(y), x.nbytes), np.float32).reshape(x.shape)
    finally:
        device.call(base.ggml_free, context)
    z = (x / 2).astype(np.float64)
    want = 2 * (z - z.mean(1, keepdims=True)) / np.sqrt(z.var(1, keepdims=True) + 1e-5)
    assert np.max(np.abs(got - want)) < 1e-4


def test_operation_that_does_not_exist_is_refused(device, matrix):
    def change(graph, y):
        y.op = 99999

    assert device.send(0, gb.write(matrix[0]))[0] == 0
    assert np.all(np.isnan(product(device, 0, columns(1), change=change)))


def test_node_that_is_left_out_is_passed_over(device, matrix):
    def change(graph, y):
        device.base.ggml_graph_nodes.restype = ctypes.POINTER(ctypes.c_void_p)
        device.base.ggml_graph_nodes(ctypes.c_void_p(graph))[0] = None
        device.set(y, bytes(4 * ROWS))

    assert device.send(0, gb.write(matrix[0]))[0] == 0
    assert np.all(product(device, 0, columns(1), change=change) == 0)


# llama_cpp's callback fails on a line that is no UTF-8
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_random_changes_of_a_matrix_never_crash(device, matrix):
    """Each accepted change affects only unused bytes or makes another valid matrix; all products are finite."""
    data = gb.write(matrix[0])
    rng = random.Random(4)
    x = columns(1)
    accepted = 0
    for _ in range(1500):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            changed[rng.randrange(len(changed))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        status, text = device.send(0, bytes(changed))
        assert (status == 0) == (text == "")
        accepted += status == 0
        if status == 0:
            product(device, 0, x)
    assert 0 < accepted < 1500


def test_random_messages_never_crash(device, matrix):
    data = gb.write(matrix[0])
    rng = random.Random(5)
    for _ in range(3000):
        kind = rng.choice((rpc.HELLO, rpc.CHUNK, rpc.CHUNK, rpc.RESULT, 0, 77))
        offset = rng.choice((0, 0, 100, 4096, len(data), rng.getrandbits(64)))
        total = rng.choice((len(data), 0, 1, rng.getrandbits(64)))
        n = rng.choice((1, 7, 100, len(data)))
        t = device.at(rng.choice((0, 64, 4096, 1 << 18)), (n,), rpc.I8, rpc.message(kind, offset=offset, total=total))
        if rng.random() < 0.7:
            device.set(t, data[:n])
        else:
            device.get(t, n)
    assert device.send(1 << 19, data) == (0, "")
