"""Packed: non-zeros without fillers, plain or coded, behind a bitmap or gap codes (FORMAT.md section 7)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..native import codec as native_codec
from ..native.codec import EncodedMatrix
from ..values import value_bits
from . import coded
from .codec import Candidate, Choice, Codec, Component, Settings, Source, StoredArrays, ValueCoding

TYPE_CODED = 1005  # without loss (FORMAT.md section 8), words in a file

LOSSLESS = "sparse-lossless"
"""The TYPE with coded values, if they are smaller than plain values."""


def _plain_nbytes(type_id: int, nnz: int) -> int:
    """Bytes of uncoded values."""
    return coded.n_places(nnz) * value_bits(type_id) // 8


class PackedCodec(Codec):
    """The index is the smallest of a bitmap and gap codes of 2, 4 and 8 bits."""

    name: ClassVar[str] = "packed"
    components: ClassVar[tuple[str, ...]] = ("values", "index", "row_ptr")
    mixed_types: ClassVar[tuple[str, ...]] = (LOSSLESS,)

    def types(self) -> Mapping[str, tuple[Choice, ...]]:
        return {"packed": (Choice(self),), LOSSLESS: self.automatic()}

    def automatic(self) -> tuple[Choice, ...]:
        return (Choice(self, None, TYPE_CODED),)

    def storage_name(self, bits: int, value_type: int) -> str:
        return f"{self.type_name(value_type)}-gaps{bits}" if bits else f"{self.type_name(value_type)}-bitmap"

    def type_name(self, value_type: int) -> str:
        return LOSSLESS if value_type == TYPE_CODED else self.name

    def break_even_density(self, cols: int, type_id: int, bits: int | None, value_type: int) -> float:
        """With a bitmap, since an index takes at most one bit per weight. Coded values count as plain values."""
        n = value_bits(type_id)
        return (n - 1 - 32 / cols) / n

    def nbytes_expanded(self, candidate: Candidate, source: Source) -> int:
        _, *places = candidate.components
        return _plain_nbytes(source.type, source.count.nnz) + sum(part.nbytes for part in places)

    def plan(self, source: Source, choice: Choice, settings: Settings) -> Candidate:
        """Uses plain values unless coded values are smaller; the index is the same."""
        found = super().plan(source, choice, settings)
        plain_nbytes = _plain_nbytes(source.type, source.count.nnz)
        if found.value_type != TYPE_CODED or found.components[0].nbytes < plain_nbytes:
            return found
        return super().plan(source, Choice(self, choice.index_bits), settings)

    def encode(self, source: Source, bits: int | None, value_type: int | None, settings: Settings) -> EncodedMatrix:
        kind = source.type if value_type is None else value_type
        options = {"value_type": kind, "index_bits": -1 if bits is None else bits}
        return native_codec.encode("packed", source.bits, source.type, options, settings.n_threads)

    def enlarged(self, candidate: Candidate, source: Source, nnz: int, scale: float) -> tuple[Component, ...]:
        _, *places = super().enlarged(candidate, source, nnz, scale)
        type_id = candidate.components[0].type
        if candidate.value_type == TYPE_CODED and candidate.matrix is not None:
            found = coded.coding_of(candidate.matrix.arrays[0])
            coding = coded.Coding(found.widths, round(found.n_outliers * scale))
            words = coded.n_words(coding, source.type, nnz)
            return (Component(type_id, words, 4 * words), *places)
        return (Component(type_id, coded.n_places(nnz), _plain_nbytes(source.type, nnz)), *places)

    def n_stored(self, stored: StoredArrays) -> int:
        return stored.last_number(2)

    def coding(self, stored: StoredArrays, value_type: int, nnz: int) -> ValueCoding | None:
        if value_type != TYPE_CODED:
            return None
        header = coded.coding_of(stored.first_numbers(0, coded.HEADER_WORDS))
        return ValueCoding(
            n_values=nnz,
            value_bits=stored.components[0].nbytes * 8 / max(1, nnz),
            mantissa_bits=header.widths.mantissa_bits,
            exponents=header.widths.n_codes,
            n_outliers=header.n_outliers,
        )
