"""Packed matrices, plain and quantized: the C codec against its NumPy twin and ggml's own quantizers, files, tools, products,
text.
"""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import generators
from ggml_macko import bindings, errors, formats, packed
from ggml_macko.formats import TYPE_BF16, TYPE_F16, TYPE_F32
from ggml_macko.gguf_files import Model
from ggml_macko.packed import TYPE_Q4_0, TYPE_Q5_0, TYPE_Q8_0
from test_model_runs import DEMO, greedy, open_model

KINDS = {"macko-q8_0": TYPE_Q8_0, "macko-q5_0": TYPE_Q5_0, "macko-q4_0": TYPE_Q4_0}
GGML_TYPE = {t: gguf.GGMLQuantizationType(t) for t in KINDS.values()}


def moderate(bits: np.ndarray, type_id: int) -> np.ndarray:
    """Without values that no F16 scale can reach."""
    large = np.abs(generators.to_float64(bits, type_id)) > 1e4
    return np.where(large, formats.bits_dtype(type_id).type(0), bits)


# ---- codec ----


@pytest.mark.parametrize("index_bits", packed.INDEX_BITS)
def test_c_and_numpy_disagree(index_bits):
    for label, bits, type_id in generators.matrix_cases():
        for value_type in (type_id, *GGML_TYPE):
            dense = bits if value_type == type_id else moderate(bits, type_id)
            m = bindings.packed_encode(dense, type_id, value_type, index_bits, 1)
            generators.assert_same(packed.encode(dense, type_id, value_type, index_bits), m)
            assert packed.decode(m).tobytes() == bindings.decode(m, 1).tobytes(), label
            if value_type == type_id:
                assert bindings.decode(m, 1).tobytes() == dense.tobytes(), label


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_matrices_lose_more_than_the_bound(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows, cols = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 300))
    type_id = data.draw(st.sampled_from((TYPE_F16, TYPE_BF16, TYPE_F32)))
    value_type = data.draw(st.sampled_from(tuple(GGML_TYPE)))
    dense = moderate(generators.random_bits(rng, rows, cols, data.draw(st.floats(0, 1)), type_id), type_id)
    m = bindings.packed_encode(dense, type_id, value_type, n_threads=data.draw(st.integers(1, 3)))
    assert m.nnz == np.count_nonzero(dense)
    assert all(m.nbytes <= bindings.packed_encode(dense, type_id, value_type, b).nbytes for b in packed.INDEX_BITS)
    got = bindings.decode(m)
    assert not np.any(got[dense == 0])
    error = np.abs(generators.to_float64(got, type_id) - generators.to_float64(dense, type_id))
    source = generators.to_float64(dense, type_id)[packed.places(m)]
    assert np.all(error[packed.places(m)] <= packed.error_bound(m, source))


@pytest.mark.parametrize("value_type", list(GGML_TYPE))
def test_values_are_not_what_ggml_makes_of_the_non_zeros(value_type):
    rng = np.random.default_rng(5)
    for density in (0.1, 0.3, 1.0):
        dense = moderate(generators.random_bits(rng, 40, 257, density, TYPE_F16), TYPE_F16)
        m = bindings.packed_encode(dense, TYPE_F16, value_type)
        row = np.zeros(m.n_values, dtype=np.float32)
        row[: m.nnz] = dense[dense != 0].view(np.float16).astype(np.float32)
        assert gguf.quants.quantize(row, GGML_TYPE[value_type]).tobytes() == m.values.tobytes()
        d, q = packed.dequantize(m.values, value_type)
        assert np.array_equal(gguf.quants.dequantize(m.values, GGML_TYPE[value_type]).reshape(-1), d * q.astype(np.float32))


@pytest.mark.parametrize("value_type", list(GGML_TYPE))
@pytest.mark.parametrize("density", [0.1, 0.2, 0.3, 0.5, 0.8])
def test_bits_per_weight_are_beyond_the_arithmetic(value_type, density):
    """FORMAT.md section 7: values, index and row pointers; the rest is under 1 %."""
    rng = np.random.default_rng(6)
    dense = np.where(rng.random((512, 2048)) < density, np.uint16(0x2C00), np.uint16(0))
    m = bindings.packed_encode(dense, TYPE_F16, value_type)
    value = {TYPE_Q8_0: 8.5, TYPE_Q5_0: 5.5, TYPE_Q4_0: 4.5}[value_type]
    index = min(1.0, *(density * b / (1 - (1 - density) ** (2**b - 1)) for b in (2, 4, 8)))
    want = density * value + index + 32 / 2048
    assert m.nbytes * 8 / dense.size == pytest.approx(want, rel=0.01)
    assert m.index_bits == (packed.BITMAP if density > 0.38 else 2 if density > 0.19 else 4)


@pytest.mark.parametrize("value_type", [TYPE_F16, *GGML_TYPE])
def test_product_is_not_that_of_the_decoded_weights(value_type):
    rng = np.random.default_rng(7)
    for rows, cols, density in ((33, 300, 0.3), (70, 129, 0.05), (5, 2049, 0.8)):
        dense = moderate(generators.random_bits(rng, rows, cols, density, TYPE_F16), TYPE_F16)
        m = bindings.packed_encode(dense, TYPE_F16, value_type)
        w = np.zeros((rows, cols))
        if value_type == TYPE_F16:
            w = generators.to_float64(dense, TYPE_F16)
        else:
            d, q = packed.dequantize(m.values, value_type)
            w[packed.places(m)] = (d.astype(np.float64) * q)[: m.nnz]
        cpu = bindings.CpuMatrix(m)
        for n in (1, 2, 9, 40):
            x = rng.standard_normal((n, cols)).astype(np.float32)
            bound = 2 * cols * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(w).T) + 1e-30
            assert np.all(np.abs(cpu.mul_mat(x) - x.astype(np.float64) @ w.T) <= bound)


def test_infinite_or_huge_values_are_quantized():
    dense = np.full((2, 40), 0x3C00, dtype=np.uint16)
    dense[1, 3] = 0x7C00
    with pytest.raises(errors.PayloadError, match="Inf or NaN"):
        bindings.packed_encode(dense, TYPE_F16, TYPE_Q8_0)
    huge = np.full((2, 40), 1e38, dtype=np.float32).view(np.uint32)
    for encode in (bindings.packed_encode, lambda *a: packed.encode(*a, 0)):
        with pytest.raises(errors.PayloadError, match="too large"):
            encode(huge, TYPE_F32, TYPE_Q8_0)


# ---- files ----


def sparse_of(path) -> dict:
    with bindings.File(path) as f:
        return {s.name: s for s in f.sparse()}


@pytest.mark.parametrize("kind", ["packed", *KINDS])
def test_tools_change_a_packed_model(tmp_path, macko, kind):
    sparse, dense, again = (tmp_path / f"{n}.gguf" for n in "sda")
    done = macko("convert", DEMO, sparse, kind, "--drop-negative-zeros")
    assert done.code == 0, done.err
    assert ("lossy" in done.err + done.out) == (kind in KINDS)
    found = sparse_of(sparse)
    assert {s.format for s in found.values()} == {"packed"} and len(found) >= 28
    assert {s.value_type for s in found.values()} == {KINDS.get(kind, TYPE_F16)}
    for i in range(len(found)):
        with bindings.File(sparse) as f:
            f.check_payload(i)
    verified = macko("verify", DEMO, sparse, "--equal-zeros")
    assert verified.code == 0, verified.out
    assert ("not identical" in verified.out) == (kind in KINDS)
    assert macko("restore", sparse, dense).code == 0
    assert macko("verify", sparse, dense).out.startswith("identical")
    with Model(sparse) as a, Model(dense) as b:
        for x, y in zip(a.tensors, b.tensors):
            assert x.read().tobytes() == y.read().tobytes(), x.name
    shown = json.loads(macko("inspect", sparse, "--json").out)
    storage = {t["storage"] for t in shown["tensors"]}
    assert {name.rsplit("-", 1)[0] for name in storage} == {"dense", kind} and shown["format_version"] == 3
    assert macko("convert", sparse, again, "macko").code == 0  # a source like any other
    assert macko("verify", again, dense).code == 0


def test_file_is_not_what_the_specification_says(tmp_path, macko):
    """Read with gguf-py and decoded with the NumPy twin and gguf-py's dequantizers: nothing of the C library."""
    sparse = tmp_path / "s.gguf"
    assert macko("convert", DEMO, sparse, "macko-q8_0", "--tensor-type", "ffn_up=macko-q4_0", "--tensor-type", "ffn_down=packed").code == 0
    reader = gguf.GGUFReader(sparse)
    keys = {name: field.contents() for name, field in reader.fields.items() if name.startswith("macko.")}
    assert keys["macko.version"] == keys["macko.min_reader_version"] == 3
    parts = {t.name: t for t in reader.tensors}
    dense = generators.dense_bytes(DEMO)
    for i, name in enumerate(keys["macko.tensor.name"]):
        values, index, row_ptr = (parts[f"{name}.{c}"] for c in packed.ARRAYS)
        cols, rows = keys["macko.tensor.ne"][4 * i : 4 * i + 2]
        nnz = keys["macko.tensor.nnz"][i]
        want = np.frombuffer(dense[name][2], np.float16).reshape(rows, cols).astype(np.float32)
        m = packed.PackedMatrix(
            rows, cols, TYPE_F16, int(values.tensor_type), keys["macko.tensor.delta_bits"][i], nnz,
            np.ascontiguousarray(values.data).reshape(-1), np.ascontiguousarray(index.data).view(np.uint8), np.ascontiguousarray(row_ptr.data),
        )  # fmt: skip
        numbers = gguf.quants.dequantize(values.data, values.tensor_type).reshape(-1)[:nnz]
        got = np.zeros((rows, cols), np.float32)
        got[packed.places(m)] = numbers
        limit = {"ffn_up": 0.2, "ffn_down": 0}.get(name.split(".")[2], 0.02)
        assert np.sqrt(np.mean((got - want) ** 2)) <= limit * np.sqrt(np.mean(want**2)), name
        assert not np.any(got[want == 0])


def test_verify_accepts_a_damaged_quantized_model(tmp_path, macko):
    sparse = tmp_path / "s.gguf"
    dense = generators.write_gguf(tmp_path / "d.gguf", generators.tiny_tensors(density=0.6))  # a bitmap
    assert macko("convert", dense, sparse, "macko-q8_0").code == 0
    with bindings.File(sparse) as f:
        tensors = {t.name: t for t in f.tensors()}
    for component, at, what in (("values", 1, "too large"), ("index", 0, "zero")):
        data = bytearray(sparse.read_bytes())
        t = tensors[f"blk.0.attn_q.weight.{component}"]
        if component == "values":
            data[t.offset + at] ^= 4  # the scale of a block: 16 times as large or small
        else:  # a non-zero moves to another column
            byte = next(i for i in range(t.nbytes) if data[t.offset + i] not in (0, 255))
            bits = data[t.offset + byte]
            first = bits & -bits
            free = next(1 << b for b in range(8) if not bits & 1 << b)
            data[t.offset + byte] = bits ^ first ^ free
        damaged = tmp_path / "damaged.gguf"
        damaged.write_bytes(data)
        done = macko("verify", dense, damaged)
        assert done.code == 1 and "blk.0.attn_q.weight" in done.out and what in done.out, done.out


def test_older_reader_version_is_accepted(tmp_path, macko):
    sparse, old = tmp_path / "s.gguf", tmp_path / "old.gguf"
    assert macko("convert", DEMO, sparse, "packed").code == 0
    data = bytearray(sparse.read_bytes())
    for key in (b"macko.version", b"macko.min_reader_version"):
        data[data.index(key) + len(key) + 4] = 2
    old.write_bytes(data)
    with pytest.raises(errors.FileFormatError, match="'packed' in a file for readers of version 2"):
        bindings.File(old)


# ---- models ----


@pytest.mark.parametrize("kind", ["packed", *KINDS])
def test_model_writes_other_text_than_its_dense_form(tmp_path, macko, kind):
    sparse, dense = tmp_path / "s.gguf", tmp_path / "d.gguf"
    assert macko("convert", DEMO, sparse, kind).code == 0
    assert macko("restore", sparse, dense).code == 0
    prompt = (DEMO.parent / "sample.txt").read_text()[:600]
    assert greedy(open_model(sparse), 24, prompt) == greedy(open_model(dense), 24, prompt)
