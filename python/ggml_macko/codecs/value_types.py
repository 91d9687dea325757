"""The types of quantized values: codes of 3, 4, 5 or 8 bits (FORMAT.md section 9)."""

from __future__ import annotations

import numpy as np

from ..native import codec as native_codec
from ..values import Array

_FIRST_TYPE = 1010  # value type, minus the bits of a code
CODE_BITS = (8, 5, 4, 3)


def code_type(bits: int) -> int:
    """The value type of codes with this number of bits."""
    return _FIRST_TYPE + bits


def code_bits(value_type: int) -> int:
    """Bits of a code."""
    return value_type - _FIRST_TYPE


VALUE_NAMES = {code_type(bits): f"q{bits}" for bits in CODE_BITS}
"""The names of all types that weights may be fitted to."""


def numbers(value_type: int) -> Array:
    """The standard levels of a type except 0, ascending: int8 (tables, numbers)."""
    levels = np.sort([native_codec.standard_levels(value_type, table) for table in (0, 1)], axis=1)
    return levels if levels.shape[1] < 256 else levels[:1, (levels[0] != 0) & (levels[0] != -128)]


def nearest_numbers(value_type: int) -> Array:
    """The nearest number to x, -128 <= x < 128, at index floor(2 * x) + 256 of int8 (tables, 512); the larger one of
    two equally near numbers. The limits between numbers are multiples of 1/2.
    """
    found = [
        q[np.searchsorted(q[:-1] / 2 + q[1:] / 2, np.arange(-256, 256) / 2, side="right")] for q in numbers(value_type)
    ]
    return np.array(found)
