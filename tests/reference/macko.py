"""MACKO: non-zeros and the gaps between them (FORMAT.md section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ggml_macko import errors
from ggml_macko.codecs.macko import deltas_nbytes, n_padded
from ggml_macko.native.codec import EncodedMatrix
from ggml_macko.values import EXPONENT, TYPE_I8, TYPE_I32, Array, bits_dtype


@dataclass(frozen=True)
class MackoMatrix:
    """The canonical arrays of one matrix, exactly as in a file."""

    rows: int
    cols: int
    type: int
    delta_bits: int
    nnz: int
    n_stored: int
    values: Array  # n_padded(n_stored) bit patterns
    deltas: Array  # uint8, deltas_nbytes(n_stored, delta_bits)
    row_ptr: Array  # int32, rows + 1

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.deltas.nbytes + self.row_ptr.nbytes

    def encoded(self) -> EncodedMatrix:
        return EncodedMatrix(
            format="macko",
            rows=self.rows,
            cols=self.cols,
            type=self.type,
            value_type=self.type,
            index_bits=self.delta_bits,
            nnz=self.nnz,
            arrays=(self.values, self.deltas, self.row_ptr),
            types=(self.type, TYPE_I8, TYPE_I32),
        )

    @classmethod
    def from_encoded(cls, m: EncodedMatrix) -> MackoMatrix:
        n_stored = int(m.arrays[2][-1]) if len(m.arrays[2]) else 0
        return cls(m.rows, m.cols, m.type, m.index_bits, m.nnz, n_stored, *m.arrays)


def encode(dense: Array, type_id: int, delta_bits: int) -> MackoMatrix:
    """dense: bit patterns (rows, cols). Values must be finite."""
    rows, cols = dense.shape
    if np.any((dense & EXPONENT[type_id]) == EXPONENT[type_id]):
        raise errors.error(errors.NOT_FINITE, "a value is not finite")
    span = 1 << delta_bits
    row, col = np.nonzero(dense)
    new_row = np.ones(len(row), dtype=bool)
    new_row[1:] = row[1:] != row[:-1]
    previous = np.where(new_row, -1, np.concatenate([[-1], col[:-1]]))
    step = col - previous  # 1 ... cols
    n_fillers = (step - 1) // span

    at = np.cumsum(n_fillers + 1) - 1  # the entry of each non-zero
    n_stored = int(at[-1]) + 1 if len(at) else 0
    values = np.zeros(n_padded(n_stored), dtype=bits_dtype(type_id))
    values[at] = dense[row, col]
    codes = np.zeros(len(values), dtype=np.uint8)
    codes[:n_stored] = span - 1  # fillers
    codes[at] = (step - 1) % span

    row_ptr = np.zeros(rows + 1, dtype=np.int32)
    row_ptr[1:] = np.cumsum(np.bincount(row, weights=n_fillers + 1, minlength=rows))
    return MackoMatrix(
        rows, cols, type_id, delta_bits, len(row), n_stored, values, _pack(codes, n_stored, delta_bits), row_ptr
    )


def _pack(codes: Array, n_stored: int, delta_bits: int) -> Array:
    bits = (codes[:, None] >> np.arange(delta_bits, dtype=np.uint8)) & 1
    packed = np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little")
    out = np.zeros(deltas_nbytes(n_stored, delta_bits), dtype=np.uint8)
    out[: len(packed)] = packed
    return out


def _unpack(deltas: Array, n: int, delta_bits: int) -> Array:
    bits = np.unpackbits(deltas, bitorder="little")[: n * delta_bits].reshape(n, delta_bits).astype(np.int64)
    codes: Array = bits @ (1 << np.arange(delta_bits, dtype=np.int64))
    return codes


def _entries(m: MackoMatrix) -> tuple[Array, Array, Array]:
    """(row, column, code) of each stored entry."""
    codes = _unpack(m.deltas, m.n_stored, m.delta_bits)
    row_ptr = m.row_ptr.astype(np.int64)
    lengths = row_ptr[1:] - row_ptr[:-1]
    row = np.repeat(np.arange(m.rows), lengths)
    total = np.cumsum(codes + 1)
    before_row = np.concatenate([[0], total])[m.row_ptr[:-1]]
    return row, total - before_row[row] - 1, codes


def validate(m: MackoMatrix) -> None:
    """Raises PayloadError unless m is canonical (FORMAT.md sections 3 and 5)."""
    if len(m.row_ptr) != m.rows + 1 or m.row_ptr.dtype != np.int32:
        raise errors.error(errors.BAD_COMPONENT, f"row_ptr has {len(m.row_ptr)} elements, expected {m.rows + 1}")
    if m.row_ptr[0] != 0 or np.any(np.diff(m.row_ptr.astype(np.int64)) < 0) or m.row_ptr[-1] != m.n_stored:
        raise errors.error(errors.BAD_ROW_PTR, "row_ptr does not rise from 0 to n_stored")
    if len(m.values) != n_padded(m.n_stored) or len(m.deltas) != deltas_nbytes(m.n_stored, m.delta_bits):
        raise errors.error(errors.BAD_ROW_PTR, "values or deltas are not as long as row_ptr says")

    row, col, codes = _entries(m)
    values = m.values[: m.n_stored]
    last = np.zeros(m.n_stored, dtype=bool)
    last[m.row_ptr[1:][np.diff(m.row_ptr) > 0] - 1] = True
    if np.any(col >= m.cols):
        raise errors.error(errors.BAD_COLUMN, f"row {row[np.argmax(col >= m.cols)]} walks past column {m.cols - 1}")
    filler = values == 0
    if np.any(filler & ((codes != (1 << m.delta_bits) - 1) | last)):
        raise errors.error(errors.NOT_CANONICAL, "a zero is stored that no gap needs")
    if np.any(m.values[m.n_stored :]) or np.any(
        np.unpackbits(m.deltas, bitorder="little")[m.n_stored * m.delta_bits :]
    ):
        raise errors.error(errors.NOT_CANONICAL, "the padding is not zero")
    if np.any((values & EXPONENT[m.type]) == EXPONENT[m.type]):
        raise errors.error(errors.NOT_FINITE, "a value is not finite")
    if np.count_nonzero(values) != m.nnz:
        raise errors.error(errors.BAD_NNZ, f"{np.count_nonzero(values)} non-zeros, the header says {m.nnz}")


def decode(m: MackoMatrix) -> Array:
    """The dense bit patterns (rows, cols) of a matrix that passes validate()."""
    validate(m)
    row, col, _ = _entries(m)
    dense = np.zeros((m.rows, m.cols), dtype=bits_dtype(m.type))
    dense[row, col] = m.values[: m.n_stored]
    return dense


# ---- sizes (paper, section 4.1): bytes relative to those of the dense matrix, without row pointers ----


def effective_density_best(density: float, delta_bits: int = 4, bits_value: int = 16) -> float:
    """The density if no gap is longer than the span of one code."""
    return density * (bits_value + delta_bits) / bits_value


def effective_density_worst(density: float, delta_bits: int = 4, bits_value: int = 16) -> float:
    """The density if all zeros are in runs that need fillers."""
    return float((density + (1 - density) / 2**delta_bits) * (bits_value + delta_bits) / bits_value)
