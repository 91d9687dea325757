"""Packed and quantized matrices: the C codec against its NumPy twin, files, tools, products, text."""

from __future__ import annotations

import functools
import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ggml_macko
from ggml_macko import errors, values
from ggml_macko.codecs import coded, quantize
from ggml_macko.codecs.packed import TYPE_CODED
from ggml_macko.codecs.value_types import CODE_BITS, code_type
from ggml_macko.conversion import bit_allocation
from ggml_macko.gguf import imatrix
from ggml_macko.gguf.files import Model
from ggml_macko.gguf.outputs import AtomicOutput
from ggml_macko.native import codec as native_codec
from ggml_macko.native.codec import EncodedMatrix
from ggml_macko.native.cpu import CpuMatrix, cpu_kernels
from ggml_macko.native.file import File
from ggml_macko.values import TYPE_BF16, TYPE_F16, TYPE_F32
from reference import coded as coded_values
from reference import packed, quantized
from support import c_codecs, generators, llama_logits
from support.generators import DEMO
from support.llama_logits import greedy, open_model

KINDS = {f"sparse-q{bits}": code_type(bits) for bits in CODE_BITS}
QUANTS = tuple(KINDS.values())


def encode(dense: np.ndarray, type_id: int, value_type: int) -> EncodedMatrix:
    """In the format of the type of values."""
    if value_type in QUANTS:
        return native_codec.encode_quantized(dense, type_id, value_type)
    return native_codec.encode("packed", dense, type_id, {"value_type": value_type})


def moderate(bits: np.ndarray, type_id: int) -> np.ndarray:
    """Without values that no scale can reach."""
    large = np.abs(generators.to_float64(bits, type_id)) > 1e28
    return np.where(large, values.bits_dtype(type_id).type(0), bits)


# ---- codec ----


@pytest.mark.parametrize("index_bits", packed.INDEX_BITS)
def test_c_and_numpy_give_the_same_bytes(index_bits):
    for label, dense, type_id in generators.matrix_cases():
        for value_type in (type_id, TYPE_CODED):
            m = c_codecs.packed(dense, type_id, value_type, index_bits, 1)
            generators.assert_same(packed.encode(dense, type_id, value_type, index_bits), m)
            assert packed.decode(m).tobytes() == c_codecs.decode(m, 1).tobytes() == dense.tobytes(), label


@st.composite
def short_matrices(draw) -> tuple[np.ndarray, int]:
    """(bits, type) of a pruned matrix of any scale, with few mantissa bits or many, and some values of any kind."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, cols = draw(st.integers(1, 30)), draw(st.integers(1, 300))
    type_id = draw(st.sampled_from((TYPE_F16, TYPE_BF16, TYPE_F32)))
    spread = draw(st.sampled_from((0.0, 1.0, 3.0)))
    scale = 2.0 ** draw(st.integers(-14, 4))
    x = (scale * rng.standard_normal((rows, cols)) * np.exp(spread * rng.standard_normal((rows, cols)))).astype("f4")
    dropped = draw(st.sampled_from((0, 13, 16)))
    x = np.clip(x.view(np.uint32) >> dropped << dropped, 0, 2**32 - 1).astype(np.uint32).view(np.float32)
    bits = values.from_float(x, type_id)
    odd = rng.random(x.shape) < draw(st.sampled_from((0, 0.01)))
    bits = np.where(odd, generators.random_bits(rng, rows, cols, 1.0, type_id), bits)
    return np.where(rng.random(x.shape) < draw(st.floats(0, 1)), bits, 0).astype(bits.dtype), type_id


@settings(max_examples=150, deadline=None)
@given(data=st.data(), matrix=short_matrices())
def test_coded_matrices_are_restored_and_canonical(data, matrix):
    """C and NumPy give the same bytes for all widths; the smallest are chosen; encoding again changes nothing."""
    dense, type_id = matrix
    n_threads = data.draw(st.integers(1, 3))
    sizes = {}
    for m, e in coded_values.widths_of_type(type_id):
        found = coded_matrix(dense, type_id, m, e, n_threads)
        generators.assert_same(packed.encode(dense, type_id, TYPE_CODED, found.index_bits, m, e), found)
        assert packed.decode(found).tobytes() == c_codecs.decode(found, n_threads).tobytes() == dense.tobytes()
        coding = coded.coding_of(found.values)
        assert (coding.widths.mantissa_bits, coding.widths.exponent_bits) == (m, e)
        sizes[m, e] = found.nbytes
    best = coded_matrix(dense, type_id)
    widths = coded.coding_of(best.values).widths
    assert (widths.mantissa_bits, widths.exponent_bits) == min(sizes, key=lambda w: (sizes[w], w))
    assert best.nbytes == min(sizes.values())


def coded_matrix(
    dense: np.ndarray, type_id: int, mantissa_bits: int = -1, exponent_bits: int = -1, n_threads: int = 0
) -> packed.PackedMatrix:
    options = {"value_type": TYPE_CODED, "mantissa_bits": mantissa_bits, "exponent_bits": exponent_bits}
    return packed.PackedMatrix.from_encoded(native_codec.encode("packed", dense, type_id, options, n_threads))


@pytest.mark.parametrize("type_id", [TYPE_F16, TYPE_BF16, TYPE_F32])
@pytest.mark.parametrize(("density", "limit"), [(0.5, 6.3), (0.3, 4.2)])
def test_rows_of_a_7b_model_take_a_third_less(type_id, density, limit):
    """Pruned by magnitude, BF16's significant bits, in any of the types: bits per weight."""
    rng = np.random.default_rng(21)
    x = (0.02 * rng.standard_normal((256, 4096))).astype(np.float32)
    x[np.abs(x) < np.quantile(np.abs(x), 1 - density)] = 0
    x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    dense = values.from_float(x, type_id)
    m = coded_matrix(dense, type_id)
    assert c_codecs.decode(m).tobytes() == dense.tobytes()
    assert m.nbytes * 8 / dense.size <= limit
    coding = coded.coding_of(m.values)
    assert (coding.widths.mantissa_bits, coding.widths.exponent_bits) == (7, 2)
    want = (density * coding.widths.bits + index_bits_of(density) + 32 / 4096) * dense.size / 8
    assert m.nbytes == pytest.approx(want + coding.n_outliers * values.value_bits(type_id) / 8, rel=0.01)


def is_zen4():
    """AMD's family 25 with AVX-512."""
    info = Path("/proc/cpuinfo")
    words = info.read_text() if info.exists() else ""
    return "AuthenticAMD" in words and re.search(r"^cpu family\s*: 25$", words, re.MULTILINE) is not None


@pytest.mark.parametrize("type_id", [TYPE_F16, TYPE_BF16, TYPE_F32])
def test_values_stay_coded_where_kernels_read_them(type_id):
    """With AVX-512 VBMI2: no more than 5 % above the file. Elsewhere they are expanded, and on Zen 4 those of 16 bits.
    The products are those of the dense matrix in either case."""
    rng = np.random.default_rng(23)
    x = (0.02 * rng.standard_normal((128, 2048))).astype(np.float32)
    x[np.abs(x) < np.quantile(np.abs(x), 0.5)] = 0
    x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    m = native_codec.encode("packed", values.from_float(x, type_id), type_id, {"value_type": TYPE_CODED})
    cpu = CpuMatrix(m)
    if cpu_kernels() == "avx512-vbmi2" and (type_id == TYPE_F32 or not is_zen4()):
        assert m.nbytes < cpu.nbytes <= 1.05 * m.nbytes + 4096
    else:
        assert cpu.nbytes >= np.count_nonzero(x) * values.value_bits(type_id) / 8 + x.size / 8
    for n in (1, 3, 40):
        tokens = rng.standard_normal((n, 2048)).astype(np.float32)
        want = tokens.astype(np.float64) @ x.astype(np.float64).T
        bound = 2 * 2048 * 2.0**-24 * (np.abs(tokens).astype(np.float64) @ np.abs(x).astype(np.float64).T)
        assert (np.abs(cpu.mul_mat(tokens) - want) <= bound).all()


def test_f16_with_all_its_bits_takes_13_bits():
    rng = np.random.default_rng(22)
    dense = pruned(rng, 256, 4096, 0.5)
    m = coded_matrix(dense, TYPE_F16)
    coding = coded.coding_of(m.values)
    assert (coding.widths.mantissa_bits, coding.widths.exponent_bits) == (10, 2)
    assert m.nbytes * 8 / dense.size <= 7.6
    assert c_codecs.decode(m).tobytes() == dense.tobytes()


def index_bits_of(density: float) -> float:
    """Of a weight, where non-zeros are at random places (FORMAT.md section 7)."""
    return min(1.0, *(density * b / (1 - (1 - density) ** (2**b - 1)) for b in (2, 4, 8)))


@pytest.mark.parametrize("density", [0.1, 0.2, 0.3, 0.5, 0.8])
def test_bits_per_weight_follow_the_arithmetic(density):
    """FORMAT.md section 7: values, index and row pointers; the rest is under 1 %."""
    rng = np.random.default_rng(6)
    dense = np.where(rng.random((512, 2048)) < density, np.uint16(0x2C00), np.uint16(0))
    m = c_codecs.packed(dense, TYPE_F16, TYPE_F16)
    want = density * 16 + index_bits_of(density) + 32 / 2048
    assert m.nbytes * 8 / dense.size == pytest.approx(want, rel=0.01)
    assert m.index_bits == (packed.BITMAP if density > 0.38 else 2 if density > 0.19 else 4)


@pytest.mark.parametrize("value_type", [TYPE_F16, TYPE_CODED])
def test_product_is_that_of_the_decoded_weights(value_type):
    rng = np.random.default_rng(7)
    for rows, cols, density in ((33, 300, 0.3), (70, 129, 0.05), (5, 2049, 0.8)):
        dense = generators.random_bits(rng, rows, cols, density, TYPE_F16)
        w = generators.to_float64(dense, TYPE_F16)
        cpu = c_codecs.cpu_matrix(c_codecs.packed(dense, TYPE_F16, value_type))
        for n in (1, 2, 9, 40):
            x = rng.standard_normal((n, cols)).astype(np.float32)
            bound = 2 * cols * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(w).T) + 1e-30
            assert np.all(np.abs(cpu.mul_mat(x) - x.astype(np.float64) @ w.T) <= bound)


@pytest.mark.parametrize("value_type", [TYPE_F16, TYPE_CODED, *QUANTS])
def test_infinite_values_are_refused(value_type):
    dense = np.full((2, 40), 0x3C00, dtype=np.uint16)
    dense[1, 3] = 0x7C00
    with pytest.raises(errors.PayloadError, match="Inf or NaN"):
        encode(dense, TYPE_F16, value_type)


# ---- errors ----


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_measured_error_is_that_of_float64(data):
    """A stored -0.0 counts as a non-zero."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    rows, cols = 3 * data.draw(st.integers(1, 8)), data.draw(st.integers(1, 300))
    type_id = data.draw(st.sampled_from((TYPE_F16, TYPE_BF16, TYPE_F32)))
    value_type = data.draw(st.sampled_from((type_id, TYPE_CODED, *QUANTS)))
    dense = moderate(generators.random_bits(rng, rows, cols, data.draw(st.floats(0, 1)), type_id), type_id)
    m = encode(dense, type_id, value_type)
    weights = rng.random((3, cols)).astype(np.float32) if data.draw(st.booleans()) else None
    got = native_codec.measure_error(m, dense, weights, 1)
    assert got == native_codec.measure_error(m, dense, weights, 3)

    x = generators.to_float64(dense, type_id)
    lost, power = (generators.to_float64(native_codec.decode(m), type_id) - x) ** 2, x**2
    w = 1 if weights is None else np.repeat(weights, rows // 3, axis=0).astype(np.float64)
    of_rows = np.sqrt(lost.sum(axis=1)[x.any(axis=1)] / power.sum(axis=1)[x.any(axis=1)])
    competes = (np.count_nonzero(dense, axis=1) >= 64) & (
        power.sum(axis=1) >= 2.0**-48 * power.sum(axis=1).max(initial=0)
    )
    of_competing = of_rows[competes[x.any(axis=1)]]
    assert got.is_equal == np.array_equal(native_codec.decode(m), dense) and got.fault == native_codec.NO_FAULT
    assert got.n_nonzero == m.nnz and got.max_error == np.sqrt(lost.max())
    want = [of_rows.mean() if len(of_rows) else 0, of_competing.max(initial=0), np.sum(w * lost), np.sum(w * power)]
    want += [np.sqrt(lost.sum() / power.sum()) if power.any() else 0]
    found = [got.rms_relative, got.rms_relative_max, got.weighted_error, got.weighted_power, got.rms_total]
    assert np.allclose(found, want, rtol=1e-9, atol=0)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_error_is_too_large_where_numpy_finds_it(data):
    """Values are changed a little or much; C and NumPy agree on the first that its scale does not excuse."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    type_id, value_type = data.draw(st.sampled_from((TYPE_F16, TYPE_F32))), data.draw(st.sampled_from(QUANTS))
    x = rng.standard_normal((20, 150)) * (rng.random((20, 150)) < data.draw(st.floats(0.05, 1)))
    dense = values.from_float(x.astype(np.float32), type_id)
    m = encode(dense, type_id, value_type)
    changed = values.to_float(dense, type_id) * (1 + 0.05 * rng.standard_normal(x.shape)).astype(np.float32)
    bits = np.where(rng.random(x.shape) < 0.2, values.from_float(changed.astype(np.float32), type_id), dense)
    source, got = (generators.to_float64(b, type_id) for b in (bits, native_codec.decode(m)))
    beyond = np.abs(got - source) > quantized.error_bound(quantized.QuantizedMatrix.from_encoded(m), bits)
    found = native_codec.measure_error(m, bits)
    if beyond.any():
        first = np.unravel_index(int(np.argmax(beyond)), beyond.shape)
        assert (found.fault, found.row, found.col) == (native_codec.FAULT_TOO_LARGE, *first)
    else:
        assert found.fault == native_codec.NO_FAULT


def test_weights_in_other_places_are_a_fault():
    bits = moderate(generators.random_bits(np.random.default_rng(3), 9, 200, 0.4, TYPE_F16), TYPE_F16)
    bits[bits == values.NEGATIVE_ZERO[TYPE_F16]] = 0
    m = encode(bits, TYPE_F16, code_type(8))
    row, col = np.argwhere(bits != 0)[40]
    fewer = bits.copy()
    fewer[row, col] = 0
    found = native_codec.measure_error(m, fewer)
    assert (found.fault, found.n_nonzero) == (native_codec.FAULT_NNZ, m.nnz - 1)
    free = int(np.flatnonzero(bits[row] == 0)[0])
    fewer[row, free] = bits[row, col]  # as many as before
    found = native_codec.measure_error(m, fewer)
    assert (found.fault, found.row) == (native_codec.FAULT_NOT_ZERO, row)
    negative = np.where(bits == 0, np.uint16(0x8000), bits)  # a mask that was multiplied with leaves them
    found = native_codec.measure_error(m, negative)
    assert (found.fault, found.n_nonzero, found.is_equal) == (native_codec.NO_FAULT, m.nnz, False)


def pruned(rng: np.random.Generator, rows: int, cols: int, density: float) -> np.ndarray:
    """Bits (F16) of normally distributed weights of which the small ones are gone."""
    w = rng.standard_normal((rows, cols))
    return np.where(np.abs(w) >= np.quantile(np.abs(w), 1 - density), w, 0).astype(np.float16).view(np.uint16)


def test_matrix_that_kernels_would_expand_stays_dense(tmp_path, macko):
    """Coded it would be smaller on file, but not as the kernels multiply with it."""
    rng = np.random.default_rng(14)
    weights = {f"blk.0.{t}.weight": (pruned(rng, 64, 512, d), TYPE_F16) for t, d in (("attn_q", 0.9), ("attn_k", 0.96))}
    dense = generators.write_gguf(tmp_path / "d.gguf", weights)
    coded_nbytes = coded_matrix(weights["blk.0.attn_k.weight"][0], TYPE_F16).nbytes
    assert coded_nbytes < 64 * 512 * 2
    done = macko("convert", dense, tmp_path / "s.gguf", "sparse-lossless")
    assert done.code == 0 and "blk.0.attn_k.weight" in done.err and "would not shrink: density 0.96" in done.err
    found = sparse_of(tmp_path / "s.gguf")
    assert {n: s.value_type for n, s in found.items()} == {"blk.0.attn_q.weight": TYPE_CODED}


def test_sources_of_bf16_values_are_restored(tmp_path, macko):
    """F16, BF16 and F32 tensors with the same values take the same room, and come back byte for byte."""
    x = values.to_float(pruned(np.random.default_rng(15), 64, 2048, 0.5), TYPE_F16)
    x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    names = {TYPE_F16: "attn_q", TYPE_BF16: "attn_k", TYPE_F32: "attn_v"}
    weights = {f"blk.0.{name}.weight": (values.from_float(x, t), t) for t, name in names.items()}
    dense = generators.write_gguf(tmp_path / "d.gguf", weights)
    assert macko("convert", dense, tmp_path / "s.gguf", "sparse-lossless").code == 0
    with Model(tmp_path / "s.gguf") as model:
        stored = {t.name: t for t in model.tensors}
        for name, (bits, type_id) in weights.items():
            assert stored[name].type == type_id and stored[name].nbytes_stored * 8 / bits.size < 6.3
            assert stored[name].read().tobytes() == bits.tobytes()
    assert macko("restore", tmp_path / "s.gguf", tmp_path / "r.gguf").code == 0
    assert (tmp_path / "r.gguf").read_bytes() == dense.read_bytes()


@pytest.mark.parametrize("name, dense_type", [("q8", 8), ("q5", 6), ("q4", 2), ("q3", 11)])
def test_matrix_without_zeros_is_no_larger_than_dense(tmp_path, macko, name, dense_type):
    """its index would say nothing; but for a type that was asked for"""
    rng = np.random.default_rng(13)
    columns = {"attn_q": (512, 0.5), "attn_k": (512, 0.97), "attn_v": (500, 1.0), "attn_output": (512, 1.0)}
    weights = {f"blk.0.{t}.weight": (pruned(rng, 64, n, d), TYPE_F16) for t, (n, d) in columns.items()}
    dense = generators.write_gguf(tmp_path / "d.gguf", weights)
    out = tmp_path / "s.gguf"
    done = macko("convert", dense, out, f"sparse-{name}", "--tensor-type", f"attn_output=sparse-{name}")
    assert done.code == 0, done.err
    sparse = sparse_of(out)
    assert {n.split(".")[2] for n in sparse} == {"attn_q", "attn_v", "attn_output"}  # 500 columns are no whole blocks
    with Model(out) as model:
        whole = [t for t in model.tensors if t.name in weights and t.name not in sparse]
        nbytes = 64 * 512 // 256 * {8: 272, 6: 176, 2: 144, 11: 110}[dense_type]
        assert [(t.name, t.type, t.nbytes) for t in whole] == [("blk.0.attn_k.weight", dense_type, nbytes)]
    assert macko("verify", out, dense).code == 0


def test_columns_without_input_keep_their_weights():
    """All inputs of a window were zero in the calibration text: its scale must not become zero."""
    dense = np.full((4, 64), 0x3C00, dtype=np.uint16)
    t = SimpleNamespace(name="x", ne=(64, 4), cols=64)
    sums = np.zeros((1, 64), np.float32)
    sums[0, 40:] = 1
    found = imatrix.Imatrix("x", {"x": imatrix.Statistics(sums, np.array([1]))})
    m = native_codec.encode_quantized(dense, TYPE_F16, code_type(4), found.column_weights(t))
    assert np.all(np.abs(generators.to_float64(native_codec.decode(m), TYPE_F16) - 1) < 0.01)


def total(candidates: list, picks: tuple, what: int) -> float:
    """Of bytes (0) or errors (1)."""
    return sum(c[i][what] for c, i in zip(candidates, picks))


def test_chosen_types_are_near_the_best():
    """Greedy against all combinations: within one step of the best, and never beyond the limit."""
    rng = np.random.default_rng(9)
    for _ in range(50):
        candidates = [
            [
                bit_allocation.Point(int(b), float(e))
                for b, e in zip(sorted(rng.integers(10, 99, 4)), sorted(rng.random(4) ** 2)[::-1])
            ]
            for _ in range(5)
        ]
        nbytes_of = functools.partial(total, candidates, what=0)
        least, most = (sum(c[i][0] for c in candidates) for i in (0, -1))
        assert bit_allocation.choose(candidates, nbytes_of, least - 1) == least
        for limit in (least, (least + most) // 2, most):
            picks = bit_allocation.choose(candidates, nbytes_of, limit)
            every = [p for p in itertools.product(range(4), repeat=5) if total(candidates, p, 0) <= limit]
            best = min(total(candidates, p, 1) for p in every)
            assert total(candidates, picks, 0) <= limit
            assert total(candidates, picks, 1) <= best + max(c[0][1] for c in candidates)
            if limit in (least, most):
                assert total(candidates, picks, 1) == pytest.approx(best)


# ---- files ----


@pytest.fixture(scope="module")
def imatrix_of_demo(tmp_path_factory):
    """Of random inputs: every weight has one."""
    rng = np.random.default_rng(10)
    path = tmp_path_factory.mktemp("imatrix") / "imatrix.gguf"
    with Model(DEMO) as model:
        sums = {t.name: rng.random((1, t.cols), np.float32) + 1e-3 for t in model.tensors if len(t.ne) == 2}
    entries = {name: imatrix.Statistics(s, np.array([8])) for name, s in sums.items()}
    with AtomicOutput(path, []) as output:
        imatrix.write(imatrix.Imatrix(path, entries, ["x.txt"], 1, 8), output)
        output.seal()
        output.commit()
    return path


def test_sparse_source_gives_the_file_of_its_dense_form(tmp_path, macko, imatrix_of_demo):
    sparse, a, b, plain = (tmp_path / f"{n}.gguf" for n in "sabp")
    assert macko("convert", DEMO, sparse).code == 0
    for source, out in ((DEMO, a), (sparse, b)):
        done = macko("convert", source, out, "sparse-q4", "--imatrix", imatrix_of_demo)
        assert done.code == 0, done.err
    assert a.read_bytes() == b.read_bytes()
    assert macko("convert", DEMO, plain, "sparse-q4").code == 0
    assert plain.stat().st_size == a.stat().st_size and plain.read_bytes() != a.read_bytes()


def test_file_meets_the_target(tmp_path, macko, imatrix_of_demo):
    n = sum(t.n_elements for t in Model(DEMO).tensors)
    errors_of = []
    for bpw in ("6.2", "12"):
        out = tmp_path / f"{bpw}.gguf"
        done = macko("convert", DEMO, out, "auto", "--target-bpw", bpw, "--imatrix", imatrix_of_demo)
        assert done.code == 0, done.err
        assert (bpw == "12" or float(bpw) - 0.5 < out.stat().st_size * 8 / n) and out.stat().st_size * 8 / n <= float(
            bpw
        )
        found = re.findall(r"converting to (\S+) .* \(error (.*)%\)", done.err)
        assert len(found) == len(sparse_of(out)) > 0
        errors_of.append(sum(float(e) ** 2 for _, e in found))
        assert macko("verify", DEMO, out).code == 0
    assert errors_of[0] > errors_of[1] == 0
    done = macko("convert", DEMO, tmp_path / "x.gguf", "auto", "--target-bpw", "2")
    assert done.code == 1 and re.search(r"--target-bpw 2 cannot be reached; the least is [56]\.\d+\n$", done.err)
    assert not (tmp_path / "x.gguf").exists()


def test_few_non_zeros_meet_the_target_without_loss(tmp_path, macko):
    """With 98 % zeros, gap codes are smaller than the bitmap of any quantized type."""
    tensors = {"blk.0.attn_q.weight": (pruned(np.random.default_rng(16), 64, 2048, 0.02), TYPE_F16)}
    model, out = generators.write_gguf(tmp_path / "model.gguf", tensors), tmp_path / "out.gguf"
    done = macko("convert", model, out, "auto", "--target-bpw", "0.6")
    assert done.code == 0, done.err
    assert out.stat().st_size * 8 / (64 * 2048) <= 0.6 and macko("verify", model, out).out.startswith("identical")


def test_dense_tensor_gets_a_dense_type_to_meet_the_target(tmp_path, macko):
    """Where a tensor is dense, ggml's types of 4 to 6 bits lose less than a type with an index in as many bytes; the
    error that decides is that of the values in the file.
    """
    rng = np.random.default_rng(8)
    shapes = {"blk.0.attn_q.weight": 1.0, "blk.0.ffn_up.weight": 1.0, "blk.0.attn_k.weight": 0.9, "output.weight": 0.4}
    source = {
        name: np.where(rng.random((64, 512)) < d, rng.standard_normal((64, 512)), 0) for name, d in shapes.items()
    }
    source["blk.0.attn_v.weight"] = rng.standard_normal((64, 96))  # no multiple of 256
    tensors = {name: (w.astype(np.float16).view(np.uint16), TYPE_F16) for name, w in source.items()}
    model, out = generators.write_gguf(tmp_path / "model.gguf", tensors), tmp_path / "out.gguf"
    n = sum(w.size for w in source.values())
    chosen = []
    for bpw in ("3.2", "4.5", "6"):
        done = macko("convert", model, out, "auto", "--target-bpw", bpw, "--force")
        assert done.code == 0, done.err
        assert out.stat().st_size * 8 / n <= float(bpw)
        stored = {t.name: (t.tensor_type, t.data) for t in gguf.GGUFReader(out).tensors}
        notes = dict(re.findall(r"\] (\S+) .* converting to .*\(error (.*)%\)", done.err))
        for name in ("blk.0.attn_q.weight", "blk.0.ffn_up.weight", "blk.0.attn_v.weight"):
            kind, data = stored[name]
            assert kind not in (TYPE_F16, TYPE_F32)
            want = source[name].astype(np.float16).astype(np.float64)
            lost = gguf.quants.dequantize(data, kind).reshape(want.shape) - want
            assert 100 * np.sqrt((lost**2).sum() / (want**2).sum()) == pytest.approx(float(notes[name]), abs=0.006)
        assert "output.weight" not in stored and macko("verify", model, out).code == 0
        chosen.append(sum(w.size * float(notes[name]) ** 2 for name, w in source.items() if name in notes))
    assert chosen[0] > chosen[1] > chosen[2]


def test_quantized_head_is_what_was_asked_for(tmp_path, macko, imatrix_of_demo):
    """The embedding of a tied model is its head."""
    out = tmp_path / "s.gguf"
    done = macko("convert", DEMO, out, "sparse-q8", "--output-tensor-type", "Q6_K", "--imatrix", imatrix_of_demo)
    assert done.code == 0, done.err
    with Model(out) as model, Model(DEMO) as source:
        head = next(t for t in model.tensors if t.name == "token_embd.weight")
        want = next(t for t in source.tensors if t.name == head.name)
        assert head.type == 14 and head.ne == want.ne
        got = gguf.quants.dequantize(head.read().reshape(head.rows, -1), gguf.GGMLQuantizationType.Q6_K)
        x = want.read_bits().view(np.float16).astype(np.float32)
        assert 0.001 < np.sqrt(np.mean((got - x) ** 2) / np.mean(x**2)) < 0.03
        offset, nbytes = head.offset, head.nbytes
    verified = macko("verify", out, DEMO)
    assert verified.code == 0 and "q6_K" in verified.out
    prompt = (DEMO.parent / "sample.txt").read_text()[:600]
    assert macko("restore", out, tmp_path / "d.gguf").code == 0
    assert greedy(open_model(out), 8, prompt) == greedy(open_model(tmp_path / "d.gguf"), 8, prompt)
    data = bytearray(out.read_bytes())
    for at in range(offset + 208, offset + nbytes, 210):
        data[at + 1] ^= 4  # super-block scales: 16 times as large or small
    out.write_bytes(data)
    verified = macko("verify", out, DEMO)
    assert verified.code == 1 and "token_embd.weight: the error is too large" in verified.out


@pytest.mark.parametrize(
    ("cols", "head_density", "arguments", "embedding", "head"),
    [
        (512, 1.0, ["sparse-q5"], "q6_K", "q6_K"),
        (512, 0.9, ["sparse-q4"], "q6_K", "q6_K"),
        (96, 1.0, ["sparse-q4"], "q8_0", "q8_0"),
        (512, 1.0, ["sparse-q8"], "q8_0", "q8_0"),
        (80, 1.0, ["sparse-q4"], "dense", "sparse-q4"),  # no type of ggml's has such rows
        (512, 0.4, ["sparse-q5"], "q6_K", "sparse-q5"),
        (512, 1.0, ["auto"], "dense", "dense"),
        (512, 1.0, ["sparse-q5", "--token-embedding-type", "dense"], "dense", "q6_K"),
        (512, 1.0, ["sparse-q5", "--output-tensor-type", "dense", "--token-embedding-type", "q4_k"], "q4_K", "dense"),
        (512, 1.0, ["sparse-q5", "--tensor-type", "token_embd|output=dense"], "dense", "dense"),
        (512, 1.0, ["sparse-q5", "--tensor-type", "output=sparse-q4"], "q6_K", "sparse-q4"),
    ],
)
def test_ends_have_the_types_of_llama_quantize(tmp_path, macko, cols, head_density, arguments, embedding, head):
    rng = np.random.default_rng(5)
    densities = {"token_embd.weight": 1.0, "blk.0.ffn_up.weight": 0.5, "output.weight": head_density}
    source = {n: np.where(rng.random((64, cols)) < d, rng.standard_normal((64, cols)), 0) for n, d in densities.items()}
    tensors = {name: (w.astype(np.float16).view(np.uint16), TYPE_F16) for name, w in source.items()}
    dense, out = generators.write_gguf(tmp_path / "d.gguf", tensors), tmp_path / "s.gguf"
    done = macko("convert", dense, out, *arguments)
    assert done.code == 0, done.err
    found = {t["name"]: t for t in json.loads(macko("inspect", out, "--json").out)["tensors"]}
    stored = [found[n]["storage"] if found[n]["storage"] != "dense" else found[n]["type"] for n in densities]
    assert [name.replace("f16", "dense") for name in stored[::2]] == [embedding, head]
    assert stored[1].startswith("sparse-") and macko("verify", dense, out).code == 0


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (2, ["macko", "--target-bpw", "5"], "needs type auto"),
        (2, ["auto", "--target-bpw", "0"], "a number above 0"),
        (1, ["sparse-q4", "--imatrix", DEMO], "not 'imatrix'"),
        (2, ["sparse-q4", "--output-tensor-type", "q9_0"], "unknown type; known: q8_0"),
        (1, ["sparse-q4", "--token-embedding-type", "q4_k"], "cannot become q4_k: 64 columns are no multiple of 256"),
    ],
)
def test_wrong_option_leaves_no_file(tmp_path, macko, code, arguments, message):
    dense = generators.write_gguf(tmp_path / "d.gguf", generators.tiny_tensors(density=0.3))
    done = macko("convert", dense, tmp_path / "s.gguf", *arguments)
    assert done.code == code and message in done.err and done.err.count("\n") == 1, done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.gguf"]


def sparse_of(path) -> dict:
    with File(path) as f:
        return {s.name: s for s in f.sparse()}


@pytest.mark.parametrize("kind", ["packed", "sparse-lossless", *KINDS])
def test_tools_keep_a_model(tmp_path, macko, kind):
    sparse, dense, again = (tmp_path / f"{n}.gguf" for n in "sda")
    done = macko("convert", DEMO, sparse, kind)
    assert done.code == 0, done.err
    assert ("lossy" in done.err + done.out) == (kind in KINDS)
    found = sparse_of(sparse)
    assert {s.format for s in found.values()} == {"quantized" if kind in KINDS else "packed"} and len(found) >= 28
    used = {s.value_type for s in found.values()}
    assert used == {TYPE_CODED if kind == "sparse-lossless" else KINDS.get(kind, TYPE_F16)}
    for i in range(len(found)):
        with File(sparse) as f:
            f.check_payload(i)
    verified = macko("verify", DEMO, sparse)
    assert verified.code == 0, verified.out
    assert ("not identical" in verified.out) == (kind in KINDS)
    assert macko("restore", sparse, dense).code == 0
    assert macko("verify", sparse, dense).out.startswith("identical")
    with Model(sparse) as a, Model(dense) as b:
        for x, y in zip(a.tensors, b.tensors):
            assert x.read().tobytes() == y.read().tobytes(), x.name
    shown = json.loads(macko("inspect", sparse, "--json").out)
    storage = {t["storage"] for t in shown["tensors"]}
    assert {"dense", kind} <= {re.sub("-(bitmap|gaps.)$", "", name) for name in storage}
    assert shown["format_version"] == 1
    codings = [t["coding"] for t in shown["tensors"] if "coding" in t]
    assert len(codings) == (len(found) if kind == "sparse-lossless" else 0)
    assert all(10 < c["value_bits"] < 15 and c["coverage"] > 0.9 for c in codings)
    assert macko("convert", sparse, again, "macko").code == 0  # a source like any other
    assert macko("verify", again, dense).code == 0


def test_file_is_what_the_specification_says(tmp_path, macko):
    """Read with gguf-py and decoded with the NumPy twins: nothing of the C library."""
    sparse = tmp_path / "s.gguf"
    types = ("ffn_up=sparse-q4", "ffn_down=packed", "ffn_gate=sparse-q3", "attn_v=sparse-lossless")
    options = [word for override in types for word in ("--tensor-type", override)]
    assert macko("convert", DEMO, sparse, "sparse-q8", *options).code == 0
    reader = gguf.GGUFReader(sparse)
    keys = {name: field.contents() for name, field in reader.fields.items() if name.startswith("macko.")}
    assert keys["macko.version"] == 1
    parts = {t.name: t for t in reader.tensors}
    dense = generators.dense_bytes(DEMO)
    for i, (name, format) in enumerate(zip(keys["macko.tensor.name"], keys["macko.tensor.format"])):
        suffixes = {c.name: c.suffixes for c in native_codec.codecs()}[format]
        components = [parts[name + suffix] for suffix in suffixes]
        first, *rest = [np.ascontiguousarray(c.data).reshape(-1) for c in components]
        cols, rows = keys["macko.tensor.ne"][4 * i : 4 * i + 2]
        nnz = keys["macko.tensor.nnz"][i]
        want = np.frombuffer(dense[name][2], np.float16).reshape(rows, cols).astype(np.float32)
        role = name.split(".")[2]
        if format == "quantized":
            bits = {"ffn_up": 4, "ffn_gate": 3}.get(role, 8)
            bitmap, scales, factors, row_ptr, levels = rest
            bytes_of = [a.view(np.uint8) for a in (first, bitmap, scales)]
            m = quantized.QuantizedMatrix(
                rows, cols, TYPE_F16, code_type(bits), nnz, *bytes_of, factors.view(np.uint16), row_ptr, levels
            )
            assert m.bits == bits
            decoded = quantized.decode(m)
        else:
            is_coded = components[0].tensor_type == gguf.GGMLQuantizationType.I32
            assert is_coded == (role == "attn_v")
            value_type, bits = TYPE_CODED if is_coded else TYPE_F16, keys["macko.tensor.index_bits"][i]
            plain = first if is_coded else first.view(np.uint16)
            index, row_ptr = rest
            m = packed.PackedMatrix(rows, cols, TYPE_F16, value_type, bits, nnz, plain, index.view(np.uint8), row_ptr)
            decoded = packed.decode(m)
        got = decoded.view(np.float16).astype(np.float32)
        limit = {"ffn_up": 0.2, "ffn_gate": 0.2, "ffn_down": 0, "attn_v": 0}.get(role, 0.02)
        assert np.sqrt(np.mean((got - want) ** 2)) <= limit * np.sqrt(np.mean(want**2)), name
        assert not np.any(got[want == 0])


def test_verify_names_damage_of_a_quantized_model(tmp_path, macko):
    sparse = tmp_path / "s.gguf"
    dense = generators.write_gguf(tmp_path / "d.gguf", generators.tiny_tensors(density=0.6))
    assert macko("convert", dense, sparse, "sparse-q8").code == 0
    with File(sparse) as f:
        tensors = {t.name: t for t in f.tensors()}
    for component, what in (("wscales", "too large"), ("bitmap", "zero")):
        data = bytearray(sparse.read_bytes())
        t = tensors[f"blk.0.attn_q.weight.{component}"]
        if component == "wscales":
            data[t.offset] ^= 0x40  # the exponent of a scale: 16 times as large or small
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


TOO_SMALL = {  # what is scaled how, and what scales near the end of their range cannot represent
    "all": (slice(None), 2.0**-20, "of the weights"),
    "a row": (5, 2.0**-20, "of row 5"),
    "an untrained token": (5, 2.0**-50, None),
}


@pytest.mark.parametrize("case", TOO_SMALL)
@pytest.mark.parametrize("kind", [*KINDS, "q6_k"])
def test_tensor_that_a_type_cannot_represent_stays_dense(tmp_path, macko, monkeypatch, kind, case):
    """And a file in which it did not is refused by verify."""
    where, scale, message = TOO_SMALL[case]
    rng = np.random.default_rng(3)
    size, density = (0.02, 1) if kind == "q6_k" else (2.0**-80, 0.5)  # the least scales are 2^-24 and 2^-97
    w = np.where(rng.random((16, 512)) < density, size * rng.standard_normal((16, 512)), 0).astype(np.float32)
    w[where] *= scale
    good = 0.02 * rng.standard_normal((16, 512)).astype(np.float32)
    name = "token_embd.weight" if kind == "q6_k" else "blk.0.ffn_up.weight"
    tensors = {"blk.0.attn_q.weight": (good.view(np.uint32), TYPE_F32), name: (w.view(np.uint32), TYPE_F32)}
    dense = generators.write_gguf(tmp_path / "d.gguf", tensors)
    arguments = {"type": "sparse-q5" if kind == "q6_k" else kind}
    done = {t.name: t for t in ggml_macko.convert(dense, tmp_path / "s.gguf", **arguments).tensors}[name]
    assert (done.storage == "dense") == (message is not None)
    if message is None:
        return
    assert re.fullmatch(rf"(sparse-)?q\S+ cannot represent it: .* {message}, limit .*", done.note)
    if kind == "q6_k":
        refused = macko("convert", dense, tmp_path / "x.gguf", "sparse-q5", "--token-embedding-type", kind)
        assert refused.code == 1 and f"{name} cannot become q6_k: q6_k cannot represent it: the error" in refused.err
    monkeypatch.setattr(quantize, "excess", lambda *_: None)
    ggml_macko.convert(dense, tmp_path / "bad.gguf", **arguments)
    monkeypatch.undo()
    difference = ggml_macko.verify(dense, tmp_path / "bad.gguf").difference
    assert difference.startswith(f"{name}: the error is too large (RMS ") and message in difference


# ---- models ----


@pytest.mark.parametrize("kind", ["packed", "sparse-lossless"])
def test_model_writes_the_text_of_its_dense_form(tmp_path, macko, kind):
    sparse, dense = tmp_path / "s.gguf", tmp_path / "d.gguf"
    assert macko("convert", DEMO, sparse, kind).code == 0
    assert macko("restore", sparse, dense).code == 0
    prompt = (DEMO.parent / "sample.txt").read_text()[:600]
    assert greedy(open_model(sparse), 24, prompt) == greedy(open_model(dense), 24, prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_model_has_nearly_the_logits_of_its_dense_form(tmp_path, macko, kind):
    """With VBMI2 and AVX-VNNI, x has 8 bits. Measured: 1.3e-4 for the prompt, and 1.7e-4 for single tokens."""
    sparse, dense = tmp_path / "s.gguf", tmp_path / "d.gguf"
    assert macko("convert", DEMO, sparse, kind).code == 0
    assert macko("restore", sparse, dense).code == 0
    prompt = (DEMO.parent / "sample.txt").read_bytes()[:600]
    found = []
    for path in (sparse, dense):
        llama = llama_logits.open_model(path, logits_all=True)
        tokens = llama.tokenize(prompt)
        found.append((llama_logits.logits(llama, tokens), llama_logits.logits_one_by_one(llama, tokens[:40])))
        llama.close()
    for got, want in zip(*found):
        assert llama_logits.nmse(got, want) < 5e-4


def test_coded_model_has_the_logits_of_a_plain_one(tmp_path, macko):
    """To the last bit: the kernels get the same values."""
    prompt = (DEMO.parent / "sample.txt").read_bytes()[:600]
    found = []
    for kind in ("packed", "sparse-lossless"):
        assert macko("convert", DEMO, tmp_path / f"{kind}.gguf", kind).code == 0
        llama = llama_logits.open_model(tmp_path / f"{kind}.gguf", logits_all=True)
        found.append(llama_logits.logits(llama, llama.tokenize(prompt)))
        llama.close()
    assert np.array_equal(*found)
