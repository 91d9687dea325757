"""The header of lossless coded values: short exponents, short mantissas and outliers (FORMAT.md section 8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..values import Array, value_bits

BLOCK = 32  # values
HEADER_WORDS = 2


@dataclass(frozen=True)
class Widths:
    """The widths of the codes of a matrix."""

    mantissa_bits: int
    exponent_bits: int
    base: int  # the lowest exponent field with a code, minus 1

    @property
    def bits(self) -> int:
        """Bits of a value: sign, exponent code and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def n_codes(self) -> int:
        return (1 << self.exponent_bits) - 1


@dataclass(frozen=True)
class Coding:
    """The header of the values of a matrix."""

    widths: Widths
    n_outliers: int


def coding_of(words: Array) -> Coding:
    """The unchecked header. words: int32, at least HEADER_WORDS of them."""
    header, n_outliers = words[:HEADER_WORDS].view(np.uint32).tolist()
    return Coding(Widths(header & 255, header >> 8 & 255, header >> 16), n_outliers)


def n_words(coding: Coding, type_id: int, n: int) -> int:
    """Words of n coded values of a dense type."""
    outliers = -(-coding.n_outliers * value_bits(type_id) // 32)
    return HEADER_WORDS + n_places(n) // BLOCK * coding.widths.bits + outliers


def n_places(n: int) -> int:
    """n rounded up to whole blocks."""
    return max(BLOCK, -(-n // BLOCK) * BLOCK)
