"""The codecs, in the order in which tools list them. A new format is a module here and a row in CODECS."""

from __future__ import annotations

from .. import errors
from ..native.codec import EncodedMatrix
from .codec import Choice, Codec
from .ec_csr import EcCsrCodec
from .macko import MackoCodec
from .packed import PackedCodec
from .quantized import QuantizedCodec

CODECS: list[Codec] = [MackoCodec(), EcCsrCodec(), PackedCodec(), QuantizedCodec()]

AUTO = "auto"
"""The default TYPE: for each tensor, the smallest lossless TYPE that needs no search."""


def codec(name: str) -> Codec:
    """The codec of a format by its name in a file. Raises FileFormatError."""
    for found in CODECS:
        if found.name == name:
            return found
    raise errors.error(errors.BAD_FORMAT, f"unknown format {name!r}")


def codec_of(m: EncodedMatrix) -> Codec:
    return codec(m.format)


def types() -> dict[str, tuple[Choice, ...]]:
    """TYPE of `macko convert` -> choices, of which the smallest is used."""
    out: dict[str, tuple[Choice, ...]] = {}
    for c in CODECS:
        out.update(c.types())
    out[AUTO] = tuple(choice for c in CODECS for choice in c.automatic())
    return out


def break_even_density(cols: int, type_id: int) -> float:
    """Density of random non-zeros at which a matrix with rows of `cols` is as large as dense, in the default TYPE."""
    choices = types()[AUTO]
    return max(c.codec.break_even_density(cols, type_id, c.index_bits, c.value_type or type_id) for c in choices)


def type_named(name: str) -> str | None:
    """The TYPE with this name in lower or upper case, or None."""
    return name.lower() if name.lower() in types() else None


def mixed_types() -> tuple[str, ...]:
    """The TYPEs that `--target-bpw` chooses from."""
    return tuple(name for c in CODECS for name in c.mixed_types)


def longest_suffix() -> int:
    """Largest number of bytes, with the dot, that a component adds to the name of its tensor."""
    return max(len(component) + 1 for c in CODECS for component in c.components)
