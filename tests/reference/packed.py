"""Packed: non-zeros without fillers, plain or coded (FORMAT.md section 7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ggml_macko.codecs.coded import n_places
from ggml_macko.codecs.packed import TYPE_CODED
from ggml_macko.native.codec import EncodedMatrix
from ggml_macko.values import TYPE_I8, TYPE_I32, Array, bits_dtype
from reference import coded

BITMAP = 0  # index_bits; otherwise the bits of a gap code
INDEX_BITS = (BITMAP, 2, 4, 8)
ARRAYS = ("values", "index", "row_ptr")  # the order of the components in a file


@dataclass(frozen=True)
class PackedMatrix:
    """The arrays of one matrix, exactly as in a file."""

    rows: int
    cols: int
    type: int  # of the dense matrix
    value_type: int  # the same, or TYPE_CODED
    index_bits: int
    nnz: int
    values: Array  # bit patterns; words (int32) if coded
    index: Array  # uint8
    row_ptr: Array  # int32, rows + 1

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.index.nbytes + self.row_ptr.nbytes

    def encoded(self) -> EncodedMatrix:
        return EncodedMatrix(
            format="packed",
            rows=self.rows,
            cols=self.cols,
            type=self.type,
            value_type=self.value_type,
            index_bits=self.index_bits,
            nnz=self.nnz,
            arrays=(self.values, self.index, self.row_ptr),
            types=(TYPE_I32 if self.value_type == TYPE_CODED else self.value_type, TYPE_I8, TYPE_I32),
        )

    @classmethod
    def from_encoded(cls, m: EncodedMatrix) -> PackedMatrix:
        return cls(m.rows, m.cols, m.type, m.value_type, m.index_bits, m.nnz, *m.arrays)


def _align4(n: int) -> int:
    return max(4, (n + 3) // 4 * 4)


def _pad(data: Array, nbytes: int) -> Array:
    out = np.zeros(nbytes, dtype=np.uint8)
    out[: len(data)] = data
    return out


def _gap_codes(row: Array, col: Array, bits: int) -> Array:
    escape = (1 << bits) - 1
    first = np.ones(len(row), dtype=bool)
    first[1:] = row[1:] != row[:-1]
    gap = col - np.where(first, -1, np.concatenate([[-1], col[:-1]])) - 1
    codes = np.full(int(np.sum(gap // escape + 1)), escape, dtype=np.uint8)
    codes[np.cumsum(gap // escape + 1) - 1] = gap % escape
    return codes


def encode(
    dense: Array,
    type_id: int,
    value_type: int,
    index_bits: int,
    mantissa_bits: int | None = None,
    exponent_bits: int | None = None,
) -> PackedMatrix:
    """dense: bit patterns (rows, cols), finite. The last two arguments are for coded values; None: the fewest bytes."""
    rows, cols = dense.shape
    row, col = np.nonzero(dense)
    if index_bits == BITMAP:
        bits = np.packbits(dense != 0, axis=1, bitorder="little").reshape(-1)
    else:
        codes = _gap_codes(row, col, index_bits)
        each = (codes[:, None] >> np.arange(index_bits, dtype=np.uint8)) & 1
        bits = np.packbits(each.astype(np.uint8).reshape(-1), bitorder="little")
    values = np.zeros(n_places(len(row)), dtype=bits_dtype(type_id))
    values[: len(row)] = dense[row, col]
    if value_type == TYPE_CODED:
        values = coded.encode(values[: len(row)], type_id, mantissa_bits, exponent_bits)
    row_ptr = np.zeros(rows + 1, dtype=np.int32)
    row_ptr[1:] = np.cumsum(np.bincount(row, minlength=rows))
    return PackedMatrix(
        rows, cols, type_id, value_type, index_bits, len(row), values, _pad(bits, _align4(len(bits))), row_ptr
    )


def places(m: PackedMatrix) -> tuple[Array, Array]:
    """(row, column) of each non-zero of a matrix that the C library accepts."""
    bits = np.unpackbits(m.index, bitorder="little")
    if m.index_bits == BITMAP:
        stride = (m.cols + 7) // 8 * 8
        rows, cols = np.nonzero(bits[: m.rows * stride].reshape(m.rows, stride))
        return rows, cols
    codes = bits[: len(bits) // m.index_bits * m.index_bits].reshape(-1, m.index_bits).astype(np.int64)
    codes = codes @ (1 << np.arange(m.index_bits))
    escape = (1 << m.index_bits) - 1
    ends = np.flatnonzero(codes != escape)[: m.nnz]  # the codes of non-zeros
    column = np.cumsum(np.where(codes == escape, escape, codes + 1))[ends]
    row = np.repeat(np.arange(m.rows), np.diff(m.row_ptr))
    before = np.concatenate([[0], column])[m.row_ptr[:-1]]  # at the start of the row
    return row, column - before[row] - 1


def decode(m: PackedMatrix) -> Array:
    """The dense bit patterns (rows, cols) of a matrix that the C library accepts."""
    dense = np.zeros((m.rows, m.cols), dtype=bits_dtype(m.type))
    dense[places(m)] = coded.decode(m.values, m.type, m.nnz) if m.value_type == TYPE_CODED else m.values[: m.nnz]
    return dense
