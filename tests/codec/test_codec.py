"""The C codec against its NumPy twin, byte for byte, and against literal bytes from FORMAT.md."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_macko import errors
from ggml_macko.codecs.macko import DELTA_BITS
from ggml_macko.native import codec
from ggml_macko.values import TYPE_F16
from reference import macko as macko_codec
from support import c_codecs, generators


def test_example_of_the_specification():
    dense = np.zeros((1, 16), dtype=np.uint16)
    dense[0, [1, 4, 11, 12]] = np.array([1, 2, 3, 4], dtype=np.float16).view(np.uint16)
    for m in (macko_codec.encode(dense, TYPE_F16, 2), c_codecs.macko(dense, TYPE_F16, 2)):
        assert m.values.view(np.float16).tolist() == [1, 2, 0, 3, 4, 0, 0, 0]
        assert m.deltas.tolist() == [1 | 2 << 2 | 3 << 4 | 2 << 6, 0, 0, 0]
        assert m.row_ptr.tolist() == [0, 5]
        assert (m.nnz, m.n_stored) == (4, 5)


@pytest.mark.parametrize("delta_bits", DELTA_BITS)
def test_c_and_numpy_give_the_same_bytes(delta_bits):
    for label, bits, type_id in generators.matrix_cases():
        twin = macko_codec.encode(bits, type_id, delta_bits)
        m = c_codecs.macko(bits, type_id, delta_bits, n_threads=1)
        generators.assert_same(twin, m, label)
        assert c_codecs.decode(twin, 1).tobytes() == bits.tobytes(), label
        assert macko_codec.decode(m).tobytes() == bits.tobytes(), label


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_matrices_round_trip(data):
    type_id = data.draw(st.sampled_from(generators.TYPES))
    delta_bits = data.draw(st.sampled_from(DELTA_BITS))
    rows, cols = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 700))
    density = data.draw(st.sampled_from([0.0, 0.002, 0.02, 0.1, 0.3, 0.5, 0.9, 1.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bits = generators.random_bits(rng, rows, cols, density, type_id)
    n_threads = data.draw(st.sampled_from([1] * 9 + [2, 3]))
    m = c_codecs.macko(bits, type_id, delta_bits, n_threads=n_threads)
    generators.assert_same(macko_codec.encode(bits, type_id, delta_bits), m)
    assert c_codecs.decode(m, n_threads).tobytes() == bits.tobytes()
    count = codec.count_dense(bits, type_id, n_threads)
    assert count.nnz == np.count_nonzero(bits) and count.n_stored[delta_bits] == m.n_stored


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_one_changed_byte_is_judged_alike(data):
    """C and NumPy accept the same arrays; what they accept re-encodes to the same bytes."""
    type_id = data.draw(st.sampled_from(generators.TYPES))
    delta_bits = data.draw(st.sampled_from(DELTA_BITS))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bits = generators.random_bits(rng, data.draw(st.integers(1, 6)), data.draw(st.integers(1, 80)), 0.4, type_id)
    m = macko_codec.encode(bits, type_id, delta_bits)
    name = data.draw(st.sampled_from(["values", "deltas", "row_ptr"]))
    array = getattr(m, name).copy()
    raw = array.view(np.uint8)
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    changed = dataclasses.replace(m, **{name: array})

    def verdict(validate, *n_threads):
        try:
            validate(changed, *n_threads)
        except errors.MackoError as e:
            assert isinstance(e, errors.FileFormatError), e
            return type(e)
        return None

    assert verdict(c_codecs.validate, 1) == verdict(macko_codec.validate)
    if verdict(macko_codec.validate) is None:
        generators.assert_same(macko_codec.encode(c_codecs.decode(changed, 1), type_id, delta_bits), changed)


def broken_matrices() -> list:
    """(status, matrix): one lie each."""
    dense = np.zeros((3, 40), dtype=np.uint16)
    dense[0, [0, 5, 39]] = 0x3C00
    dense[2, [1, 30, 31]] = 0xBC00
    m = macko_codec.encode(dense, TYPE_F16, 4)

    def change(name: str, at: int, value: int) -> macko_codec.MackoMatrix:
        array = getattr(m, name).copy()
        array[at] = value
        return dataclasses.replace(m, **{name: array})

    n = m.n_stored
    return [
        (errors.BAD_ROW_PTR, change("row_ptr", 0, 1)),
        (errors.BAD_ROW_PTR, change("row_ptr", 1, -1)),
        (errors.BAD_ROW_PTR, change("row_ptr", 1, m.row_ptr[2] + 1)),
        (errors.BAD_COLUMN, change("deltas", 0, 0xFF)),
        (errors.NOT_CANONICAL, change("values", 0, 0)),  # a zero that no gap needs
        (errors.NOT_CANONICAL, change("values", n, 0x3C00)),  # hidden data
        (errors.NOT_CANONICAL, change("deltas", len(m.deltas) - 1, 0x10)),
        (errors.NOT_FINITE, change("values", 0, 0x7C00)),
        (errors.NOT_FINITE, change("values", 0, 0xFE01)),
        (errors.BAD_NNZ, dataclasses.replace(m, nnz=m.nnz + 1)),
    ]


@pytest.mark.parametrize("code, matrix", broken_matrices())
def test_broken_matrix_is_refused_with_its_code(code, matrix):
    for validate in (c_codecs.validate, macko_codec.validate):
        with pytest.raises(errors.PayloadError) as e:
            validate(matrix)
        assert e.value.code == code, str(e.value)
    with pytest.raises(errors.PayloadError):
        c_codecs.decode(matrix)


@pytest.mark.parametrize(
    "call",
    [
        lambda: c_codecs.macko(np.zeros((2, 2), np.float16), TYPE_F16, 4),
        lambda: c_codecs.macko(np.zeros(4, np.uint16), TYPE_F16, 4),
        lambda: c_codecs.macko(np.zeros((2, 2), np.uint16), 2, 4),
        lambda: c_codecs.macko(np.zeros((2, 2), np.uint16), TYPE_F16, 3),
        lambda: c_codecs.macko(np.full((2, 2), 0x7C00, np.uint16), TYPE_F16, 4),
        lambda: c_codecs.decode(macko_codec.encode(np.ones((2, 9), np.uint16), TYPE_F16, 4).__class__(
            2, 9, TYPE_F16, 4, 18, 18, np.ones(24, np.int16), np.zeros(12, np.uint8), np.zeros(3, np.int32))),
    ],
)  # fmt: skip
def test_wrong_argument_is_refused_before_c_sees_it(call):
    with pytest.raises(errors.MackoError):
        call()


def test_non_contiguous_input_is_read_by_its_strides():
    rng = np.random.default_rng(3)
    bits = generators.random_bits(rng, 40, 60, 0.5)
    for view in (bits[:, ::2], bits.T, bits[::-1]):
        m = c_codecs.macko(view, TYPE_F16, 4)
        assert c_codecs.decode(m).tobytes() == np.ascontiguousarray(view).tobytes()
