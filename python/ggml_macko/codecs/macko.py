"""MACKO: non-zeros and the distances between them in 1, 2, 4 or 8 bits (FORMAT.md section 3; MACKO paper, section 4).

This module has the size formulas of the paper (section 4.1) and the codec. Fillers, which are stored zeros, bridge gaps
that are too long for one delta.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from .. import errors
from ..native import codec as native_codec
from ..native.codec import EncodedMatrix
from ..values import TYPE_I8, TYPE_I32, value_bits
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


# ---- sizes (paper, section 4.1) ----
# Effective density = bytes of the sparse matrix / bytes of the dense matrix, without row pointers.


def effective_density_expected(density: float, delta_bits: int = 4, bits_value: int = 16) -> float:
    """For non-zeros at independent random places: z = (1-d)^(2^b), and d / (1-z) entries per element."""
    if density <= 0:
        return 0.0
    z: float = (1 - density) ** (2**delta_bits)
    return float(density / (1 - z) * (bits_value + delta_bits) / bits_value)


def break_even_density(cols: int, delta_bits: int, bits_value: int) -> float:
    """Density of random non-zeros at which a matrix with rows of cols, with row pointers, is as large as dense."""
    capacity = 1 - 32 / (cols * bits_value)
    low, high = 0.0, 1.0
    if effective_density_expected(high, delta_bits, bits_value) <= capacity:
        return 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if effective_density_expected(middle, delta_bits, bits_value) <= capacity:
            low = middle
        else:
            high = middle
    return low


# ---- codec ----


class MackoCodec(DeltaCodec):
    """The width of the deltas is chosen per matrix. A count of the entries gives the size without encoding."""

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
        width = choice.index_bits or smallest_delta_bits(source.type, source.rows, source.count.n_stored)
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
        return native_codec.encode(self.name, source.bits, source.type, {"index_bits": bits or 0}, settings.n_threads)

    def n_stored(self, stored: StoredArrays) -> int:
        return stored.last_number(2)


def smallest_delta_bits(type_id: int, rows: int, n_stored: Mapping[int, int]) -> int:
    """The width with the smallest arrays; the narrower one if two are equal."""
    return min(DELTA_BITS, key=lambda b: (matrix_nbytes(type_id, b, rows, n_stored[b]), b))
