"""The types of quantized values: blocks of 32 numbers with one scale (FORMAT.md section 7), and codes of 3, 4, 5 or 8
bits (section 9).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..native import codec as native_codec
from ..values import Array

BLOCK = 32  # values that share a scale
TYPE_Q4_0, TYPE_Q5_0, TYPE_Q8_0 = 2, 6, 8  # ggml type ids
TYPE_Q4_NL = 1004  # not a type of ggml: its blocks are bytes in a file
_FIRST_CODE_TYPE = 1010  # value type of the format `quantized`, minus the bits of a code
CODE_BITS = (8, 5, 4, 3)
QUANT_NAMES = {TYPE_Q8_0: "q8_0", TYPE_Q5_0: "q5_0", TYPE_Q4_NL: "q4_nl", TYPE_Q4_0: "q4_0"}
VALUE_NAMES = {**QUANT_NAMES, **{_FIRST_CODE_TYPE + bits: f"q{bits}" for bits in CODE_BITS}}
"""The names of all types that weights may be fitted to."""
BLOCK_NBYTES = {TYPE_Q8_0: 34, TYPE_Q5_0: 22, TYPE_Q4_NL: 18, TYPE_Q4_0: 18}
Q_RANGE = {TYPE_Q8_0: (-127, 127), TYPE_Q5_0: (-16, 15), TYPE_Q4_NL: (-127, 124), TYPE_Q4_0: (-8, 7)}
LEVELS = np.array(  # numbers of Q4_NL; the lowest bit of the scale selects the table
    [
        [-127, -100, -81, -67, -54, -42, -31, -17, 10, 25, 38, 50, 63, 77, 94, 121],
        [-127, -107, -89, -74, -61, -50, -39, -28, 23, 36, 47, 58, 70, 84, 101, 124],
    ],
    dtype=np.int8,
)


def code_type(bits: int) -> int:
    """The value type of codes with this number of bits."""
    return _FIRST_CODE_TYPE + bits


def code_bits(value_type: int) -> int:
    """Bits of a code; 0 if the type has blocks."""
    return value_type - _FIRST_CODE_TYPE if value_type > _FIRST_CODE_TYPE else 0


def quant_bits(value_type: int) -> float:
    """Bits of a quantized value, without its share of a scale."""
    if code_bits(value_type):
        return code_bits(value_type)
    return (BLOCK_NBYTES[value_type] - 2) * 8 / BLOCK


def numbers(value_type: int) -> Array:
    """The numbers of a type except 0, ascending: int8 (tables, numbers). Codes have the standard levels."""
    if code_bits(value_type):
        levels = np.sort([native_codec.standard_levels(value_type, table) for table in (0, 1)], axis=1)
        return levels if levels.shape[1] < 256 else levels[:1, (levels[0] != 0) & (levels[0] != -128)]
    if value_type == TYPE_Q4_NL:
        return LEVELS
    low, high = Q_RANGE[value_type]
    return np.array([[q for q in range(low, high + 1) if q]], dtype=np.int8)


def nearest_numbers(value_type: int) -> Array:
    """The nearest number to x, -128 <= x < 128, at index floor(2 * x) + 256 of int8 (tables, 512); the larger one of
    two equally near numbers. The limits between numbers are multiples of 1/2.
    """
    found = [
        q[np.searchsorted(q[:-1] / 2 + q[1:] / 2, np.arange(-256, 256) / 2, side="right")] for q in numbers(value_type)
    ]
    return np.array(found)


def pack_blocks(scale: Array, q: Array, value_type: int) -> Array:
    """Packs float16 scales (blocks, 1) and int8 q (blocks, BLOCK) in a type of ggml: uint8 (blocks, bytes)."""
    if value_type == TYPE_Q8_0:
        return np.concatenate([scale.view(np.uint8), q.view(np.uint8)], axis=1)
    u = (q - np.int8(Q_RANGE[value_type][0])).view(np.uint8)
    fifth = [np.packbits(u >> 4, axis=1, bitorder="little")] if value_type == TYPE_Q5_0 else []
    return pack_nibbles(scale, fifth, u & 15)


def pack_nibbles(scale: Array, fifth: Sequence[Array], u: Array) -> Array:
    return np.concatenate([scale.view(np.uint8), *fifth, u[:, :16] | u[:, 16:] << 4], axis=1)
