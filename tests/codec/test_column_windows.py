"""Quantized values with scales for windows of columns: the C codec against its NumPy twin, hostile arrays, tools."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ggml_macko import SparseMatrix, errors, values
from ggml_macko.native import codec as native_codec
from ggml_macko.values import TYPE_BF16, TYPE_F16, TYPE_F32
from reference import quantized
from reference.quantized import QuantizedMatrix
from support import c_codecs, generators

BITS = (3, 4, 5, 8)
LEVELS_OF_Q3 = np.array([20, 50, 80, 127, -120, -75, -45, -18], np.int8).view(np.uint8)


def encode(dense, type_id, bits, weights=None, n_threads=0) -> QuantizedMatrix:
    value_type = quantized.TYPES[bits]
    return QuantizedMatrix.from_encoded(
        native_codec.encode_quantized(dense, type_id, value_type, weights, n_threads=n_threads)
    )


def moderate(bits: np.ndarray, type_id: int) -> np.ndarray:
    """Without values that no factor can reach."""
    large = np.abs(generators.to_float64(bits, type_id)) > 1e28
    return np.where(large, values.bits_dtype(type_id).type(0), bits)


def pruned(rng, rows, cols, density, type_id=TYPE_F16, spread=0.3) -> np.ndarray:
    x = 0.02 * rng.standard_normal((rows, cols)) * np.exp(spread * rng.standard_normal((rows, 1)))
    x[np.abs(x) < np.quantile(np.abs(x), 1 - density)] = 0
    return values.from_float(x.astype(np.float32), type_id)


# ---- bytes ----


def test_literal_bytes_of_a_tiny_matrix():
    """Two rows of 9 columns, the second empty, codes of 3 bits, and d = (1 + 4 / 16) 2^-3 2^-1."""
    m = QuantizedMatrix(
        rows=2,
        cols=9,
        type=TYPE_F32,
        value_type=1013,
        nnz=3,
        codes=np.array([0b11_001_110, 0b1, 0, 0], np.uint8),
        bitmap=np.array([0b0001_0010, 1, 0, 0], np.uint8),
        scales=np.array([4 << 4 | 4, 0], np.uint8),
        factors=np.array([0x3F00, 0], np.uint16),
        row_ptr=np.array([0, 1, 1], np.int32),
        levels=LEVELS_OF_Q3,
    )
    want = np.zeros((2, 9), np.float32)
    want[0, [1, 4, 8]] = 1.25 / 16 * np.float32([-45, 50, -18])  # codes 6, 1, 7; the low bits come first
    assert c_codecs.decode(m).tobytes() == quantized.decode(m).tobytes() == want.tobytes()


@pytest.mark.parametrize("bits", BITS)
def test_c_and_numpy_decode_the_same_values(bits):
    for label, dense, type_id in generators.matrix_cases():
        m = encode(moderate(dense, type_id), type_id, bits)
        assert quantized.decode(m).tobytes() == c_codecs.decode(m, 1).tobytes(), label
        generators.assert_same(m, encode(moderate(dense, type_id), type_id, bits, n_threads=1), label)


@pytest.mark.parametrize("bits", BITS)
def test_scale_reaches_half_of_an_outlier(bits):
    """Least squares alone would choose a smaller scale for a window with one large value among small ones."""
    dense = pruned(np.random.default_rng(), 256, 1024, 0.5, spread=0).view(np.float16)
    dense[::16, :64] = np.where(np.arange(64) % 2, 1e-3, 0)  # 31 such values and an outlier in one of 256 windows
    dense[::16, 1] = 0.04
    found = native_codec.measure_error(encode(dense.view(np.uint16), TYPE_F16, bits).encoded(), dense.view(np.uint16))
    assert found.fault == native_codec.NO_FAULT
    decoded = generators.to_float64(quantized.decode(encode(dense.view(np.uint16), TYPE_F16, bits)), TYPE_F16)
    assert (decoded[::16, 1] >= 0.49 * 0.04).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 700)),
    density=st.sampled_from((0.0, 0.02, 0.1, 0.3, 0.5, 1.0)),
    bits=st.sampled_from(BITS),
    type_id=st.sampled_from((TYPE_F16, TYPE_BF16, TYPE_F32)),
)
@example(seed=549586, shape=(17, 1), density=0.3, bits=3, type_id=TYPE_F16)  # -65504, which larger values round to
def test_c_and_numpy_encode_the_same_bytes_on_a_lattice(seed, shape, density, bits, type_id):
    """Also of other values than those that the scales were searched for, and of values on the lattice, which stay."""
    rng = np.random.default_rng(seed)
    dense = moderate(generators.random_bits(rng, *shape, density, type_id), type_id)
    lattice = encode(dense, type_id, bits)
    generators.assert_same(quantized.encode(dense, lattice), lattice)
    decoded = c_codecs.decode(lattice)
    fewer = np.where(rng.random(shape) < 0.5, decoded, 0).astype(dense.dtype)
    for given_bits in (decoded, fewer):
        again = native_codec.encode_quantized(
            given_bits, type_id, lattice.value_type, lattice=lattice.encoded(), n_threads=2
        )
        generators.assert_same(quantized.encode(given_bits, lattice), QuantizedMatrix.from_encoded(again))
        assert native_codec.decode(again).tobytes() == given_bits.tobytes()


# ---- the search ----


@pytest.mark.parametrize(("bits", "limit"), [(3, 0.097), (4, 0.049), (5, 0.0255), (8, 0.0046)])
def test_errors_of_pruned_rows_are_small(bits, limit):
    """RMS error over RMS of the non-zeros, at 50 % zeros by magnitude."""
    dense = pruned(np.random.default_rng(1), 256, 1024, 0.5, spread=0)
    found = native_codec.measure_error(encode(dense, TYPE_F16, bits).encoded(), dense)
    assert found.fault == native_codec.NO_FAULT and found.rms_total < limit


@pytest.mark.parametrize("bits", (3, 4, 5))
def test_column_weights_move_errors_to_light_columns(bits):
    rng = np.random.default_rng(2)
    dense = pruned(rng, 128, 512, 0.5)
    weights = np.where(rng.random((2, 512)) < 0.1, 100, 1).astype(np.float32)  # two matrices, one below the other
    with_weights, without = (
        native_codec.measure_error(encode(dense, TYPE_F16, bits, w).encoded(), dense, weights) for w in (weights, None)
    )
    assert with_weights.relative < 0.95 * without.relative
    assert encode(dense, TYPE_F16, bits, np.zeros((1, 512), np.float32)).nnz == np.count_nonzero(dense)


@pytest.mark.parametrize(("density", "window"), [(0.9, 32), (0.5, 64), (0.3, 128), (0.1, 256), (0.01, 512)])
def test_a_scale_serves_about_32_non_zeros(density, window):
    assert encode(pruned(np.random.default_rng(3), 64, 1024, density), TYPE_F16, 4).window == window


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [65504.0, 64000.0, 6e-8])
def test_ends_of_the_range_of_f16_are_stored(bits, value):
    dense = np.zeros((3, 64), np.float16)
    dense[0, ::2], dense[1, 5], dense[2, :2] = value, -value, (value, 1.0)
    m = encode(dense.view(np.uint16), TYPE_F16, bits)
    found = native_codec.measure_error(m.encoded(), dense.view(np.uint16))
    assert found.fault == native_codec.NO_FAULT
    assert np.isfinite(c_codecs.decode(m).view(np.float16)).all()


def test_values_beyond_every_factor_are_refused():
    dense = np.full((1, 32), 3e38, np.float32).view(np.uint32)
    with pytest.raises(errors.PayloadError, match="too large for the scales") as e:
        encode(dense, TYPE_F32, 4)
    assert e.value.code == errors.NOT_FINITE


# ---- hostile arrays ----


def changed(name, index, value):
    def change(m):
        array = getattr(m, name).copy()
        array[index] = value
        return dataclasses.replace(m, **{name: array})

    return change


def resized(name, n):
    return lambda m: dataclasses.replace(m, **{name: np.resize(getattr(m, name), len(getattr(m, name)) + n)})


LIES = {
    "codes too long": (50, resized("codes", 4)),
    "codes too short": (50, resized("codes", -4)),
    "bitmap too short": (44, resized("bitmap", -4)),
    "a scale too many": (44, resized("scales", 1)),
    "a factor too few": (44, resized("factors", -1)),
    "row_ptr too short": (44, resized("row_ptr", -1)),
    "row_ptr[0]": (50, changed("row_ptr", 0, 1)),
    "row_ptr decreases": (50, changed("row_ptr", 2, 0)),
    "row_ptr is negative": (50, changed("row_ptr", 1, -1)),
    "row_ptr beyond the codes": (50, changed("row_ptr", -1, 2**31 - 1)),
    "a bit past the last column": (51, changed("bitmap", 12, 0xFF)),
    "a bit more": (50, lambda m: changed("bitmap", slice(0, 12), 0xFF)(m)),
    "bitmap padding": (52, changed("bitmap", -1, 1)),
    "codes after the last row": (52, changed("codes", -1, 1)),
    "a code after the last non-zero of a row": (
        52,
        lambda m: changed("codes", m.bits * int(m.row_ptr[1]) - 1, 0xFF)(m),
    ),
    "nnz": (54, lambda m: dataclasses.replace(m, nnz=m.nnz - 1)),
    "a scale of an empty window": (52, changed("scales", -1, 1)),
    "a factor of an empty row": (52, changed("factors", -1, 0x3F80)),
    "factor 0": (52, changed("factors", 0, 0)),
    "a negative factor": (52, changed("factors", 0, 0xBF80)),
    "a factor below 2^-90": (52, changed("factors", 0, 0x127F)),
    "a factor above 2^90": (52, changed("factors", 0, 0x6C81)),
    "an infinite factor": (53, changed("factors", 0, 0x7F80)),
    "a factor that is NaN": (53, changed("factors", 0, 0x7FC0)),
    "a value beyond F16": (53, changed("factors", 0, 0x4780)),
    "level 0": (52, changed("levels", 0, 0)),
    "level -128": (52, changed("levels", -4, 0x80)),
    "levels that fall": (52, changed("levels", 1, 1)),
    "a negative level among the positive": (52, changed("levels", 3, 0xFF)),
    "a value type of other levels": (42, lambda m: dataclasses.replace(m, value_type=1018)),
}


@pytest.mark.parametrize("lie", LIES)
def test_hostile_arrays_are_refused(lie):
    dense = pruned(np.random.default_rng(4), 7, 99, 0.6)
    dense[0, ::2] = 0x3C00  # no multiple of 8 non-zeros
    dense[0, 1::2] = 0
    dense[-1] = 0
    m = encode(dense, TYPE_F16, 3)
    c_codecs.validate(m)
    assert m.row_ptr[-1] * 3 % 4 and len(m.bitmap) > 7 * 13
    code, change = LIES[lie]
    for n_threads in (1, 4):
        with pytest.raises(errors.MackoError) as e:
            c_codecs.validate(change(m), n_threads)
        assert e.value.code == code, str(e.value)


def test_code_128_of_8_bits_is_refused():
    m = encode(pruned(np.random.default_rng(5), 3, 64, 0.5), TYPE_F16, 8)
    with pytest.raises(errors.PayloadError, match="row 0 has the code 128"):
        c_codecs.validate(changed("codes", 0, 128)(m))
    with pytest.raises(errors.PayloadError, match="level 0 is 1"):
        c_codecs.validate(changed("levels", 0, 1)(m))


# ---- products and tools ----


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("type_id", generators.TYPES)
def test_products_are_those_of_the_unrounded_values(bits, type_id):
    rng = np.random.default_rng(6)
    m = encode(pruned(rng, 100, 777, 0.4, type_id), type_id, bits)
    x = rng.standard_normal((3, 777)).astype(np.float32)
    w = quantized.values(m)
    found = c_codecs.cpu_matrix(m).mul_mat(x)
    rounding = (1 / (127 * 32768) + 8 * 2.0**-24) * np.abs(x).max(axis=1)[:, None]  # of x to integers, and of floats
    bound = np.abs(w).sum(axis=1) * rounding + 2 * 777 * 2.0**-24 * (np.abs(x) @ np.abs(w.T))
    assert np.all(np.abs(found - x @ w.T) <= bound)


@pytest.mark.parametrize("bits", BITS)
def test_matrix_has_the_size_and_name_of_its_type(bits):
    dense = pruned(np.random.default_rng(7), 256, 1024, 0.5).view(np.float16)
    m = SparseMatrix.from_dense(dense, format=f"sparse-q{bits}")
    assert m.format == f"sparse-q{bits}"
    assert m.arrays.nbytes * 8 / dense.size == pytest.approx(bits / 2 + 1 + 8 / 64 + 0.05, rel=0.02)
