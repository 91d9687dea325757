"""MACKO: non-zeros and the distances between them in 1, 2, 4 or 8 bits (FORMAT.md section 3; MACKO paper, section 4).

The NumPy twin of the C codec, the paper's size formulas (section 4.1), and the codec for the tools. The twin, `encode`,
`decode` and `validate` of a `MackoMatrix`, is the readable reference that tests hold the C library against, byte for
byte; it does not use the C library. A gap that is too long for one delta is bridged by fillers: stored zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .. import errors
from ..native import codec as native_codec
from ..native.codec import EncodedMatrix
from ..values import EXPONENT, TYPE_I8, TYPE_I32, Array, bits_dtype, value_bits
from .codec import Candidate, Choice, Component, DeltaCodec, Settings, Source, StoredArrays

DELTA_BITS = (1, 2, 4, 8)
MAX_STORED = 2**31 - 513  # entries of a matrix (FORMAT.md section 4)


def n_padded(n_stored: int) -> int:
    return max(8, (n_stored + 7) // 8 * 8)


def deltas_nbytes(n_stored: int, delta_bits: int) -> int:
    return (n_padded(n_stored) * delta_bits // 8 + 3) // 4 * 4


def matrix_nbytes(type_id: int, delta_bits: int, rows: int, n_stored: int) -> int:
    """Bytes of all components, without alignment."""
    return n_padded(n_stored) * value_bits(type_id) // 8 + deltas_nbytes(n_stored, delta_bits) + 4 * (rows + 1)


@dataclass(frozen=True)
class MackoMatrix:
    """The canonical arrays of one matrix; exactly what stands in a file."""

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
            bits=self.delta_bits,
            nnz=self.nnz,
            arrays=(self.values, self.deltas, self.row_ptr),
            types=(self.type, TYPE_I8, TYPE_I32),
        )

    @classmethod
    def from_encoded(cls, m: EncodedMatrix) -> MackoMatrix:
        n_stored = int(m.arrays[2][-1]) if len(m.arrays[2]) else 0
        return cls(m.rows, m.cols, m.type, m.bits, m.nnz, n_stored, *m.arrays)


# ---- NumPy twin ----


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

    at = np.cumsum(n_fillers + 1) - 1  # the entry that each non-zero lands on
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


# ---- sizes (paper, section 4.1) ----
# Effective density = bytes of the sparse matrix / bytes of the dense one, row pointers left out.


def effective_density_best(density: float, delta_bits: int = 4, bits_value: int = 16) -> float:
    """No gap is longer than one code spans."""
    return density * (bits_value + delta_bits) / bits_value


def effective_density_worst(density: float, delta_bits: int = 4, bits_value: int = 16) -> float:
    """All zeros lie in runs that fillers must cover."""
    return float((density + (1 - density) / 2**delta_bits) * (bits_value + delta_bits) / bits_value)


def effective_density_expected(density: float, delta_bits: int = 4, bits_value: int = 16) -> float:
    """Non-zeros at independent random places: z = (1-d)^(2^b), d / (1-z) entries per element."""
    if density <= 0:
        return 0.0
    z: float = (1 - density) ** (2**delta_bits)
    return float(density / (1 - z) * (bits_value + delta_bits) / bits_value)


def break_even_density(cols: int, delta_bits: int, bits_value: int) -> float:
    """Density of random non-zeros at which a matrix with rows of cols is as large as dense, row pointers counted."""
    room = 1 - 32 / (cols * bits_value)
    low, high = 0.0, 1.0
    if effective_density_expected(high, delta_bits, bits_value) <= room:
        return 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if effective_density_expected(middle, delta_bits, bits_value) <= room:
            low = middle
        else:
            high = middle
    return low


# ---- codec ----


class MackoCodec(DeltaCodec):
    """The width of the deltas is chosen per matrix. Its size follows from a count; nothing is encoded to plan."""

    name: ClassVar[str] = "macko"
    components: ClassVar[tuple[str, ...]] = ("values", "deltas", "row_ptr")
    mixed_types: ClassVar[tuple[str, ...]] = ("macko",)
    widths: ClassVar[tuple[int, ...]] = DELTA_BITS
    width_mark: ClassVar[str] = "d"

    def automatic(self) -> tuple[Choice, ...]:
        return self.each_width()

    def break_even_density(self, cols: int, type_id: int, bits: int | None, value_type: int) -> float:
        widths = (bits,) if bits else DELTA_BITS
        return max(break_even_density(cols, b, value_bits(type_id)) for b in widths)

    def plan(self, source: Source, choice: Choice, settings: Settings) -> Candidate:
        width = choice.bits or smallest_delta_bits(source.type, source.rows, source.count.n_stored)
        n_stored = source.count.n_stored[width]
        if n_stored > MAX_STORED:
            raise errors.error(errors.LIMIT, f"more than {MAX_STORED} entries")
        n, n_deltas = n_padded(n_stored), deltas_nbytes(n_stored, width)
        components = (
            Component(source.type, n, n * value_bits(source.type) // 8),
            Component(TYPE_I8, n_deltas, n_deltas),
            Component(TYPE_I32, source.rows + 1, 4 * (source.rows + 1)),
        )
        return Candidate(self, width, source.type, components)

    def encode(self, source: Source, bits: int | None, value_type: int | None, settings: Settings) -> EncodedMatrix:
        return native_codec.encode(self.name, source.bits, source.type, {"delta_bits": bits or 0}, settings.n_threads)

    def n_stored(self, stored: StoredArrays) -> int:
        return stored.last_number(2)


def smallest_delta_bits(type_id: int, rows: int, n_stored: Mapping[int, int]) -> int:
    """The width whose arrays are smallest; the narrower one if two are equal."""
    return min(DELTA_BITS, key=lambda b: (matrix_nbytes(type_id, b, rows, n_stored[b]), b))
