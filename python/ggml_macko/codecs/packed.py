"""Packed: non-zeros without fillers, plain, coded or quantized, behind a bitmap or gap codes (FORMAT.md section 7).

libggml searches the scales of its own types, and the C library searches the scales of Q4_NL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from .. import errors
from ..native import codec as native_codec
from ..native.codec import EncodedMatrix
from ..values import TYPE_I8, TYPE_I32, Array, value_bits
from . import coded, exact_blocks, ggml_quants, quantize
from .codec import Candidate, Choice, Codec, Component, Settings, Source, StoredArrays, ValueCoding
from .value_types import BLOCK, BLOCK_NBYTES, QUANT_NAMES, TYPE_Q4_0, TYPE_Q4_NL, TYPE_Q8_0

TYPE_CODED = 1005  # without loss (FORMAT.md section 8), words in a file

FILE_TYPES = {TYPE_Q4_NL: TYPE_I8, TYPE_CODED: TYPE_I32}
"""ggml types that replace the types that ggml lacks."""


def n_values(nnz: int) -> int:
    return max(BLOCK, (nnz + BLOCK - 1) // BLOCK * BLOCK)


def values_nbytes(type_id: int, value_type: int, n: int) -> int:
    """Bytes of n values; n is a multiple of BLOCK for quantized types."""
    return n // BLOCK * BLOCK_NBYTES[value_type] if value_type in QUANT_NAMES else n * value_bits(type_id) // 8


# ---- quantizing ----

_PIECE = 1 << 16  # non-zeros per row for libggml, whose search compares values with the mean square of a row


def quantize_non_zeros(
    bits: Array, type_id: int, value_type: int, weights: Array | None, n_threads: int = 0
) -> EncodedMatrix:
    """The packed matrix of dense bit patterns (rows, cols) with the scales that have the least weighted error. If all
    values come from blocks of the type (`macko prune --quant-values`), these blocks are found.

    weights: column weights as in codecs/quantize.py. Raises MackoError with the code NOT_FINITE if a value
    is not finite or too large for a scale in F16, and LIMIT if there are too many non-zeros.
    """
    m = _encode_in_c(bits, type_id, type_id, None, n_threads)
    values, index, row_ptr = m.arrays
    blocks = exact_blocks.find(values, type_id, value_type, n_threads)
    if blocks is None and value_type == TYPE_Q8_0:  # nothing to search
        return _encode_in_c(bits, type_id, value_type, None, n_threads)
    if blocks is None:
        counts = None if weights is None else _weights_of_values(bits, weights, row_ptr, n_threads)
        if value_type == TYPE_Q4_NL:
            of_values = None if counts is None else counts[: m.nnz]
            blocks = native_codec.quantize_q4_nl(values[: m.nnz], type_id, of_values, n_threads)
        else:
            blocks = _search_blocks(values, type_id, counts, value_type, n_threads)
    types = (FILE_TYPES.get(value_type, value_type), *m.types[1:])
    return dataclasses.replace(m, value_type=value_type, arrays=(blocks, index, row_ptr), types=types)


def _weights_of_values(bits: Array, weights: Array, row_ptr: Array, n_threads: int) -> Array:
    """Weights of the errors of the stored values, float32; 1 for the padding."""
    counts = np.ones(n_values(int(row_ptr[-1])), dtype=np.float32)

    def fill(rows: tuple[int, int]) -> None:
        a, b = rows
        counts[row_ptr[a] : row_ptr[b]] = quantize.weights_of_rows(weights, len(bits), a, b)[bits[a:b] != 0]

    ggml_quants.in_threads(fill, quantize.row_ranges(bits), n_threads)
    return counts


def _search_blocks(
    values: Array, type_id: int, counts: Array | None, value_type: int, n_threads: int
) -> npt.NDArray[np.uint8]:
    """Blocks of a type of ggml for bit patterns (n,) of type type_id; n is a multiple of the block size. counts:
    weights of errors.
    """
    n = len(values) // _PIECE * _PIECE
    found = []
    for begin, end, cols in ((0, n, _PIECE), (n, len(values), len(values) - n)):
        if begin < end:
            # ggml does not search without weights
            w = np.ones(cols, dtype=np.float32) if counts is None else counts[begin:end].reshape(-1, cols)
            part = values[begin:end].reshape(-1, cols)
            found.append(ggml_quants.quantize(part, type_id, value_type, w, n_threads).reshape(-1))
    blocks = np.concatenate(found)
    # the last step of the search changes the scale, but not the numbers
    native_codec.round_to_scales(values, type_id, value_type, blocks, n_threads)
    return blocks


def _encode_in_c(bits: Array, type_id: int, value_type: int, index_bits: int | None, n_threads: int) -> EncodedMatrix:
    options = {"value_type": value_type, "index_bits": -1 if index_bits is None else index_bits}
    return native_codec.encode("packed", bits, type_id, options, n_threads)


def _plain_nbytes(source: Source) -> int:
    """Bytes of uncoded values."""
    return values_nbytes(source.type, source.type, n_values(source.count.nnz))


# ---- codec ----


_SAMPLE = 1 << 18  # weights of a matrix that decide between Q4_NL and Q4_0; all of a small matrix

LOSSLESS = "sparse-lossless"
"""The TYPE with coded values, if they are smaller than plain values."""


class PackedCodec(Codec):
    """The index is the smallest of a bitmap and gap codes of 2, 4 and 8 bits."""

    name: ClassVar[str] = "packed"
    components: ClassVar[tuple[str, ...]] = ("values", "index", "row_ptr")
    # with fewer non-zeros, an index of gap codes makes sparse-q4_nl smaller than the types of the format `quantized`
    mixed_types: ClassVar[Mapping[str, float]] = {LOSSLESS: 1.0, "sparse-q4_nl": 0.25}

    def types(self) -> Mapping[str, tuple[Choice, ...]]:
        lossy = {f"sparse-{name}": (Choice(self, None, value_type),) for value_type, name in QUANT_NAMES.items()}
        return {"packed": (Choice(self),), LOSSLESS: self.automatic(), **lossy}

    def automatic(self) -> tuple[Choice, ...]:
        return (Choice(self, None, TYPE_CODED),)

    def storage_name(self, bits: int, value_type: int) -> str:
        return f"{self.type_name(value_type)}-gaps{bits}" if bits else f"{self.type_name(value_type)}-bitmap"

    def type_name(self, value_type: int) -> str:
        if value_type == TYPE_CODED:
            return LOSSLESS
        return f"sparse-{QUANT_NAMES[value_type]}" if value_type in QUANT_NAMES else self.name

    def value_name(self, value_type: int) -> str | None:
        return QUANT_NAMES.get(value_type)

    def break_even_density(self, cols: int, type_id: int, bits: int | None, value_type: int) -> float:
        """With a bitmap, since an index takes at most one bit per weight. Coded values count as plain values."""
        n = value_bits(type_id)
        return 1.0 if value_type in QUANT_NAMES else (n - 1 - 32 / cols) / n

    def nbytes_expanded(self, candidate: Candidate, source: Source) -> int:
        values, *places = candidate.components
        plain = _plain_nbytes(source) if candidate.value_type == TYPE_CODED else values.nbytes
        return plain + sum(part.nbytes for part in places)

    def plan(self, source: Source, choice: Choice, settings: Settings) -> Candidate:
        """Uses plain values unless coded values are smaller; the index is the same. Q4_NL has no levels near zero, so
        Q4_0 fits matrices that were not pruned better, such as most heads.
        """
        if choice.value_type == TYPE_Q4_NL and settings.search:
            return self._nearest(source, (choice, Choice(self, choice.index_bits, TYPE_Q4_0)), settings)
        found = super().plan(source, choice, settings)
        if found.value_type != TYPE_CODED or found.components[0].nbytes < _plain_nbytes(source):
            return found
        return super().plan(source, Choice(self, choice.index_bits), settings)

    def _nearest(self, source: Source, choices: Sequence[Choice], settings: Settings) -> Candidate:
        """The candidate with the least error in a sample of rows, or the next one if that type cannot represent the
        matrix.
        """
        rows = np.arange(0, source.rows, max(1, source.bits.size // _SAMPLE))
        sample = source.bits[rows]
        weights = None
        if source.column_weights is not None:
            weights = source.column_weights[rows * len(source.column_weights) // source.rows]

        def error(choice: Choice) -> float:
            assert choice.value_type is not None  # of choices that differ in the type of the values
            try:
                m = quantize_non_zeros(sample, source.type, choice.value_type, weights, settings.n_threads)
            except errors.MackoError:
                return float("inf")
            return self.measure_error(m, sample, weights, settings.n_threads).relative

        refusal = None
        for choice in sorted(choices, key=error):
            try:
                return super().plan(source, choice, settings)
            except errors.MackoError as e:
                refusal = refusal or e
        assert refusal is not None
        raise refusal

    def encode(self, source: Source, bits: int | None, value_type: int | None, settings: Settings) -> EncodedMatrix:
        kind = source.type if value_type is None else value_type
        if kind in (source.type, TYPE_CODED) or not settings.search:
            return _encode_in_c(source.bits, source.type, kind, bits, settings.n_threads)
        return quantize_non_zeros(source.bits, source.type, kind, source.column_weights, settings.n_threads)

    def n_elements(self, m: EncodedMatrix, i: int) -> int:
        """ggml counts the values of its quantized types; blocks of other types are bytes or words."""
        return n_values(m.nnz) if i == 0 and m.value_type not in FILE_TYPES else len(m.arrays[i])

    def enlarged(self, candidate: Candidate, source: Source, nnz: int, scale: float) -> tuple[Component, ...]:
        _, *places = super().enlarged(candidate, source, nnz, scale)
        n, type_id = n_values(nnz), candidate.components[0].type
        if candidate.value_type == TYPE_CODED and candidate.matrix is not None:
            found = coded.coding_of(candidate.matrix.arrays[0])
            coding = coded.Coding(found.widths, round(found.n_outliers * scale))
            words = coded.n_words(coding, source.type, nnz)
            return (Component(type_id, words, 4 * words), *places)
        return (Component(type_id, n, values_nbytes(source.type, candidate.value_type, n)), *places)

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
