"""EC-CSR: blocks of rows that share columns (FORMAT.md section 6; EC-SpMV paper, section 6).

The C library cuts a matrix into blocks (ggml-macko/src/codec/ec-csr/extract.cpp).
"""

from __future__ import annotations

from typing import ClassVar

from ..native import codec as native_codec
from ..native.codec import EncodedMatrix
from ..values import Array, value_bits
from .codec import DeltaCodec, Settings, Source, StoredArrays
from .macko import break_even_density

DELTA_BITS = (4, 8)


class EcCsrCodec(DeltaCodec):
    """The width of the deltas is chosen per matrix. Encoding compares all pairs of rows, which takes seconds."""

    name: ClassVar[str] = "ec-csr"
    components: ClassVar[tuple[str, ...]] = ("values", "deltas", "bases", "blk_ptr", "rows", "sets")
    options: ClassVar[tuple[str, ...]] = ("max_granularity", "min_columns", "clip", "seed")
    note: ClassVar[str | None] = "looking for blocks .."
    widths: ClassVar[tuple[int, ...]] = DELTA_BITS

    def break_even_density(self, cols: int, type_id: int, bits: int | None, value_type: int) -> float:
        """Blocks of one row cost about as much as MACKO. Random non-zeros have few blocks of several rows."""
        return max(break_even_density(cols, b, value_bits(type_id)) for b in ((bits,) if bits else DELTA_BITS))

    def encode(self, source: Source, bits: int | None, value_type: int | None, settings: Settings) -> EncodedMatrix:
        options = self.own_options(settings)
        if bits is not None:
            options["index_bits"] = bits
        return native_codec.encode(self.name, source.bits, source.type, options, settings.n_threads)

    def n_stored(self, stored: StoredArrays) -> int:
        return stored.components[0].n_elements

    def sets(self, stored: StoredArrays) -> Array | None:
        return stored.array(5).reshape(-1, 4)
