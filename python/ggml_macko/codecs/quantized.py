"""The quantized format: codes of 3, 4, 5 or 8 bits, with scales for windows of columns (FORMAT.md section 9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ..native import codec as native_codec
from ..native.codec import EncodedMatrix
from ..values import TYPE_BF16, TYPE_I8, to_float, value_bits
from .codec import Candidate, Choice, Codec, Component, Settings, Source, StoredArrays
from .value_types import CODE_BITS, VALUE_NAMES, code_bits, code_type

CODES, BITMAP, SCALES, FACTORS, ROW_PTR, LEVELS = range(6)
"""The components, in file order."""

DENSE_NAMES = {3: "q3_k", 4: "q4_0", 5: "q5_0", 8: "q8_0"}
"""ggml's type of a dense matrix whose values have as many bits."""

WINDOWS = (32, 64, 128, 256, 512)
_GROUP = 8  # codes


class QuantizedCodec(Codec):
    """The width of the windows follows from the density."""

    name: ClassVar[str] = "quantized"
    components: ClassVar[tuple[str, ...]] = ("codes", "bitmap", "wscales", "factors", "row_ptr", "levels")
    mixed_types: ClassVar[tuple[str, ...]] = ("sparse-q8", "sparse-q5", "sparse-q4", "sparse-q3")

    def types(self) -> Mapping[str, tuple[Choice, ...]]:
        return {self.type_name(code_type(bits)): (Choice(self, None, code_type(bits)),) for bits in CODE_BITS}

    def storage_name(self, bits: int, value_type: int) -> str:
        return self.type_name(value_type)

    def type_name(self, value_type: int) -> str:
        return f"sparse-{VALUE_NAMES[value_type]}"

    def value_name(self, value_type: int) -> str | None:
        return VALUE_NAMES[value_type]

    def dense_name(self, value_type: int) -> str | None:
        return DENSE_NAMES[code_bits(value_type)]

    def break_even_density(self, cols: int, type_id: int, bits: int | None, value_type: int) -> float:
        n = value_bits(type_id)
        return min(1.0, (n - 1 - 8 / 64 - 48 / cols) / code_bits(value_type))

    def encode(self, source: Source, bits: int | None, value_type: int | None, settings: Settings) -> EncodedMatrix:
        assert value_type is not None  # of all choices
        return native_codec.encode_quantized(
            source.bits, source.type, value_type, source.column_weights, n_threads=settings.n_threads
        )

    def plan(self, source: Source, choice: Choice, settings: Settings) -> Candidate:
        """Without a search for scales, only the sizes, which are those of any other width of codes."""
        if settings.search:
            return super().plan(source, choice, settings)
        assert choice.value_type is not None
        found = super().plan(source, Choice(self, None, code_type(8)), settings)
        n_groups = int(found.matrix.arrays[ROW_PTR][-1]) if found.matrix is not None else 0
        components = list(found.components)
        components[CODES] = _codes(n_groups, code_bits(choice.value_type))
        components[LEVELS] = _bytes(1 << code_bits(choice.value_type))
        return replace(found, value_type=choice.value_type, components=tuple(components), matrix=None)

    def enlarged(self, candidate: Candidate, source: Source, nnz: int, scale: float) -> tuple[Component, ...]:
        rows = round(source.rows * scale)
        codes, _, scales, factors, row_ptr, levels = candidate.components
        return (
            _codes(
                codes.nbytes * 8 // code_bits(candidate.value_type) * rows // source.rows // _GROUP,
                code_bits(candidate.value_type),
            ),
            _bytes(-(-rows * -(-source.cols // 8) // 4) * 4),
            _bytes(scales.nbytes // source.rows * rows),
            Component(factors.type, rows, 2 * rows),
            Component(row_ptr.type, rows + 1, 4 * (rows + 1)),
            levels,
        )

    def n_stored(self, stored: StoredArrays) -> int:
        return _GROUP * stored.last_number(ROW_PTR)


def window_scales(m: EncodedMatrix) -> npt.NDArray[np.float32]:
    """The scale of each window, (rows, windows), times the factor of its row."""
    codes = m.arrays[SCALES].reshape(m.rows, -1).astype(np.uint32)
    scales = (codes >> 7 << 31 | ((codes & 127) << 19) + (120 << 23)).astype(np.uint32).view(np.float32)
    found: npt.NDArray[np.float32] = scales * to_float(m.arrays[FACTORS], TYPE_BF16)[:, None]
    return found


def element_scales(m: EncodedMatrix) -> npt.NDArray[np.float32]:
    """The scale of each element's window, (rows, cols)."""
    return np.repeat(window_scales(m), window_of(m), axis=1)[:, : m.cols]


def window_of(m: EncodedMatrix) -> int:
    """Columns that share a scale."""
    return next(w for w in WINDOWS if -(-m.cols // w) * m.rows == len(m.arrays[SCALES]))


def _bytes(n: int) -> Component:
    return Component(TYPE_I8, n, n)


def _codes(n_groups: int, bits: int) -> Component:
    return _bytes(max(4, -(-n_groups * bits // 4) * 4))
