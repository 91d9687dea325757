"""SparseMatrix on NumPy arrays: products against float64, sizes against the paper's formulas."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_macko import SparseMatrix, errors, values
from ggml_macko.codecs import macko as macko_codec
from ggml_macko.codecs.macko import DELTA_BITS
from ggml_macko.values import TYPE_BF16, TYPE_F16, TYPE_F32
from reference import macko as reference
from reference.products import assert_close_to_float64
from support import c_codecs, generators


def make(bits: np.ndarray, type_id: int, **kwargs) -> SparseMatrix:
    if type_id == TYPE_BF16:
        return SparseMatrix.from_dense(bits, bf16=True, keep_negative_zeros=True, **kwargs)
    dtype = np.float16 if type_id == TYPE_F16 else np.float32
    return SparseMatrix.from_dense(bits.view(dtype), keep_negative_zeros=True, **kwargs)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_product_is_within_rounding_of_float64(data):
    type_id = data.draw(st.sampled_from(generators.TYPES))
    rows, cols, n = (
        data.draw(st.integers(1, 70)),
        data.draw(st.integers(1, 600)),
        data.draw(st.sampled_from([1, 2, 3, 8, 33])),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bits = generators.safe_bits(rng, rows, cols, data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), type_id)
    s = make(bits, type_id, index_bits=data.draw(st.sampled_from(DELTA_BITS)))
    w = generators.to_float64(bits, type_id)
    x = rng.standard_normal((cols, n), dtype=np.float32)
    y = s @ x
    assert y.shape == (rows, n) and y.dtype == np.float32
    assert_close_to_float64(y, w, x)
    y = s @ x[:, 0]
    assert y.shape == (rows,)
    assert_close_to_float64(y, w, x[:, 0])


def test_scipy_matrix_keeps_every_value():
    rng = np.random.default_rng(1)
    dense = scipy.sparse.random(90, 200, 0.2, dtype=np.float32, random_state=rng, format="coo")
    twice = scipy.sparse.coo_matrix(
        (np.r_[dense.data, np.float32(1), np.float32(2)], (np.r_[dense.row, 3, 3], np.r_[dense.col, 5, 5])), dense.shape
    )
    for matrix in (dense, dense.tocsr(), dense.tocsc(), twice):
        s = SparseMatrix.from_dense(matrix)
        assert s.to_dense().tobytes() == matrix.toarray().tobytes()
        x = rng.standard_normal((200, 4), dtype=np.float32)
        assert_close_to_float64(s @ x, matrix.toarray().astype(np.float64), x)


@pytest.mark.parametrize("type_id", generators.TYPES)
def test_to_dense_is_bit_exact(type_id):
    bits = generators.random_bits(np.random.default_rng(2), 33, 257, 0.5, type_id)
    s = make(bits, type_id)
    assert s.to_dense().tobytes() == bits.tobytes()
    assert s.nnz == np.count_nonzero(bits) and s.shape == (33, 257)
    assert s.density == s.nnz / bits.size


@pytest.mark.parametrize("delta_bits", DELTA_BITS)
@pytest.mark.parametrize("density", [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
def test_measured_size_follows_the_paper(delta_bits, density):
    """Section 4.1: within 0.5 % of the expected effective density. Row pointers are not in the formula: 4 bytes per
    row of 8192.
    """
    rows, cols = 2048, 8192
    rng = np.random.default_rng(int(density * 100) + delta_bits)
    bits = np.where(rng.random((rows, cols), dtype=np.float32) < density, np.uint16(0x3C00), np.uint16(0))
    m = c_codecs.macko(bits, TYPE_F16, delta_bits)
    measured = (m.nbytes - m.row_ptr.nbytes) / bits.nbytes
    expected = macko_codec.effective_density_expected(density, delta_bits)
    assert abs(measured / expected - 1) < 0.005
    d = m.nnz / bits.size
    assert reference.effective_density_best(d, delta_bits) <= measured * 1.0001
    assert measured <= reference.effective_density_worst(d, delta_bits) * 1.0001


def test_density_half_costs_five_eighths():
    bits = np.where(np.random.default_rng(0).random((1024, 4096)) < 0.5, np.uint16(0x3C00), np.uint16(0))
    s = make(bits, TYPE_F16, index_bits=4)
    assert s.effective_density == pytest.approx(0.625, abs=0.002)
    assert s.nbytes == sum(a.nbytes for a in s.arrays.arrays)


def test_worst_case_formula_is_reached():
    """Zeros in runs that fillers must cover: the formula is an upper bound, and such a matrix comes close to it."""
    bits = np.zeros((64, 4096), dtype=np.uint16)
    bits[:, 16::17] = 0x3C00  # 16 zeros before each non-zero
    m = c_codecs.macko(bits, TYPE_F16, 4)
    measured = (m.nbytes - m.row_ptr.nbytes) / bits.nbytes
    worst = reference.effective_density_worst(m.nnz / bits.size, 4)
    assert 0.97 * worst < measured <= worst


def test_automatic_width_is_the_smallest():
    rng = np.random.default_rng(5)
    for density, width in ((0.9, 1), (0.5, 2), (0.2, 4), (0.02, 8)):
        bits = np.where(rng.random((256, 4096)) < density, np.uint16(0x3C00), np.uint16(0))
        s = make(bits, TYPE_F16, format="macko")
        sizes = {b: make(bits, TYPE_F16, index_bits=b).nbytes for b in DELTA_BITS}
        assert s.nbytes == min(sizes.values())
        assert s.arrays.index_bits == width, sizes


def test_break_even_is_where_sizes_cross():
    for cols, delta_bits, bits_value in ((4096, 4, 16), (256, 4, 16), (4096, 2, 16), (4096, 4, 32)):
        d = macko_codec.break_even_density(cols, delta_bits, bits_value)
        size = macko_codec.effective_density_expected(d, delta_bits, bits_value) + 32 / (cols * bits_value)
        assert size == pytest.approx(1, abs=1e-6)
    assert macko_codec.break_even_density(4096, 4, 16) == pytest.approx(0.8, abs=0.001)


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s @ np.zeros(63, np.float32),
        lambda s: s @ np.zeros(64, np.complex64),
        lambda s: s @ np.full(64, 1e300),
        lambda s: s @ np.zeros((64, 2, 2), np.float32),
        lambda s: SparseMatrix.from_dense(np.zeros((2, 2), np.complex128)),
        lambda s: SparseMatrix.from_dense([["a", "b"]]),
        lambda s: SparseMatrix.from_dense(np.array([[2**70]], dtype=object)),
        lambda s: SparseMatrix.from_dense(np.zeros(4, np.float16)),
        lambda s: SparseMatrix.from_dense(np.zeros((2, 2), np.uint16)),
        lambda s: SparseMatrix.from_dense(np.zeros((2, 2), np.float16), bf16=True),
        lambda s: SparseMatrix.from_dense(np.full((2, 2), np.nan, np.float16)),
        lambda s: SparseMatrix.from_dense(np.zeros((2, 2), np.float16), index_bits=5),
    ],
)
def test_wrong_argument_is_refused(call):
    s = SparseMatrix.from_dense(np.ones((8, 64), np.float16))
    with pytest.raises((errors.ArgumentError, errors.PayloadError)):
        call(s)


@pytest.mark.parametrize("dtype", [np.float64, np.longdouble])
def test_float64_is_rounded_to_the_nearest_float32(dtype):
    dense = np.random.default_rng(5).standard_normal((20, 100)).astype(dtype)
    s = SparseMatrix.from_dense(dense)
    assert s.dtype == np.float32 and s.to_dense().tobytes() == dense.astype(np.float32).tobytes()
    third = SparseMatrix.from_dense([[0, 1 / 3]]).to_dense()
    assert third.tolist() == [[0, float(np.float32(1 / 3))]]
    with pytest.raises(errors.ArgumentError, match=r"element \[1, 0\] is 1e\+39, which is beyond the range of float32"):
        SparseMatrix.from_dense(np.array([[0, 1], [1e39, 0]], dtype=dtype))
    with pytest.raises(errors.PayloadError, match="not finite"):
        SparseMatrix.from_dense(np.array([[0, np.inf]], dtype=dtype))


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_integers_are_kept_exactly_or_refused(dtype):
    rng = np.random.default_rng(6)
    low = 0 if np.dtype(dtype).kind == "u" else -100
    dense = rng.integers(low, 100, (16, 80)).astype(dtype) * (rng.random((16, 80)) < 0.3).astype(dtype)
    s = SparseMatrix.from_dense(dense)
    assert s.dtype == np.float32 and np.array_equal(s.to_dense(), dense)
    x = rng.integers(-5, 5, (80, 2))
    assert np.array_equal(s @ x, dense.astype(np.int64) @ x)
    if np.dtype(dtype).itemsize >= 4:
        exact = [2**24, 2**24 + 2, 5 << 28 if np.dtype(dtype).itemsize == 8 else 3 << 28]
        if dtype in (np.int32, np.int64):
            exact += [int(np.iinfo(dtype).min), -(2**24)]
        assert [int(v) for v in SparseMatrix.from_dense(np.array([exact], dtype=dtype)).to_dense()[0]] == exact
        for odd in (2**24 + 1, int(np.iinfo(dtype).max)):
            with pytest.raises(errors.ArgumentError, match=rf"element \[0, 1\] is {odd}, which would be rounded"):
                SparseMatrix.from_dense(np.array([[7, odd]], dtype=dtype))


def test_scipy_matrix_is_taken_in_every_format():
    matrix = scipy.sparse.random(40, 300, 0.3, random_state=np.random.default_rng(7))  # float64
    dense = matrix.toarray().astype(np.float32)
    for format in ("macko", "ec-csr", "packed", "sparse-lossless", "auto"):
        assert np.array_equal(SparseMatrix.from_dense(matrix, format=format).to_dense(), dense)


def test_untrusted_arrays_are_checked():
    m = reference.encode(np.full((2, 9), 0x3C00, dtype=np.uint16), TYPE_F16, 4)
    assert SparseMatrix(m.encoded()).nnz == 18
    m.deltas[0] = 0xFF
    with pytest.raises(errors.PayloadError):
        SparseMatrix(m.encoded())


def test_float32_specials_survive():
    bits = np.array([generators.SPECIAL[TYPE_F32] * 5], dtype=np.uint32)
    assert make(bits, TYPE_F32).to_dense().tobytes() == bits.tobytes()


QUANTIZED = ("sparse-q8", "sparse-q5", "sparse-q4", "sparse-q3")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_packed_matrices_multiply_as_what_they_decode_to(data):
    format = data.draw(st.sampled_from(["packed", "sparse-lossless", *QUANTIZED]))
    type_id = data.draw(st.sampled_from(generators.TYPES))
    rows, cols, n = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 600)), data.draw(st.sampled_from([1, 2, 9]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bits = generators.safe_bits(rng, rows, cols, data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), type_id)
    s = make(bits, type_id, format=format)
    assert s.format in ({format, "packed"} if format == "sparse-lossless" else {format})
    assert SparseMatrix(s.arrays).format == s.format
    decoded = s.to_dense().view(values.bits_dtype(type_id))
    if format not in QUANTIZED:
        np.testing.assert_array_equal(decoded, bits)
    x = rng.standard_normal((cols, n), dtype=np.float32)
    w = generators.to_float64(decoded, type_id)  # quantized: rounded once more, half a unit of the dense type
    rounding = {TYPE_F16: 2.0**-11, TYPE_BF16: 2.0**-8, TYPE_F32: 0}[type_id] if format in QUANTIZED else 0
    slack = (np.abs(w) @ np.abs(x.astype(np.float64))) * (2 * cols * 2.0**-24 + rounding) + 1e-30
    if format in QUANTIZED and type_id == TYPE_F16:
        slack += 2.0**-25 * np.abs(x).sum(axis=0)  # subnormal numbers
    if format in QUANTIZED:  # one column: x in 16 bits (lab/quantized.md, numerics)
        slack += np.abs(w).sum(axis=1, keepdims=True) * np.abs(x).max(axis=0) * (1 / 65534 + (cols / 64 + 8) * 2.0**-23)
    assert np.all(np.abs(s @ x - w @ x.astype(np.float64)) <= slack)


def test_auto_takes_the_smallest_format():
    rng = np.random.default_rng(4)
    dense = np.where(rng.random((64, 640)) < 0.5, rng.standard_normal((64, 640)), 0).astype(np.float16)
    sizes = {f: SparseMatrix.from_dense(dense, format=f).nbytes for f in ("macko", "packed", "sparse-lossless")}
    for named in ({}, {"format": "auto"}):
        s = SparseMatrix.from_dense(dense, **named)
        assert s.nbytes == min(sizes.values()) == sizes["sparse-lossless"]
        np.testing.assert_array_equal(s.to_dense(), dense)


def test_unknown_format_or_width_is_refused():
    dense = np.eye(4, dtype=np.float32)
    with pytest.raises(errors.ArgumentError, match="'csr' is not one of macko, macko-d1"):
        SparseMatrix.from_dense(dense, format="csr")
    with pytest.raises(errors.ArgumentError, match="'sparse-q4' has no index_bits"):
        SparseMatrix.from_dense(dense, 4, format="sparse-q4")


@pytest.mark.parametrize("type_id", generators.TYPES)
@pytest.mark.parametrize("format", ["auto", "macko", "sparse-q8"])
def test_matrix_behaves_like_an_array(type_id, format):
    rng = np.random.default_rng(6)
    s = make(generators.safe_bits(rng, 40, 96, 0.4, type_id), type_id, format=format)
    w = generators.to_float64(s.to_dense().view(values.bits_dtype(type_id)), type_id)
    assert s.T.shape == (96, 40) and s.T.T.to_dense().tobytes() == s.to_dense().tobytes()
    for x in (rng.standard_normal(40), rng.standard_normal((3, 40))):
        assert_close_to_float64((x @ s).T, w.T, x.T.astype(np.float32))
    assert np.array_equal(np.asarray(s), w) and np.asarray(s, np.float64).dtype == np.float64
    for copied in (pickle.loads(pickle.dumps(s)), copy.deepcopy(s)):
        assert copied.format == s.format and copied.n_negative_zeros == s.n_negative_zeros
        assert np.array_equal(copied @ w.T[:, :2], s @ w.T[:, :2])


@pytest.mark.parametrize(
    "call",
    [
        lambda s: np.ones(3) * s,
        lambda s: np.exp(s),
        lambda s: np.ones(7) @ s,
        lambda s: np.ones((2, 2, 8)) @ s,
        lambda s: np.array(s, copy=False),
    ],
)
def test_operation_that_has_no_meaning_raises(call):
    with pytest.raises((TypeError, ValueError)):
        call(SparseMatrix.from_dense(np.eye(8, dtype=np.float32)))
