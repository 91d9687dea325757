"""ggml's type ids and the bit patterns of weights.

Weights are bit patterns (unsigned integers), never floats, so that no operation rounds them or loses the sign of a zero
by accident. A zero is the pattern with all bits clear. Codecs treat -0.0 as a value; converters drop it first, unless
asked to keep it. The module imports no other module of the package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
"""A NumPy array. The docstrings state its dtype: unsigned bit patterns, bytes or numbers."""

# ids of enum ggml_type
TYPE_F32 = 0
TYPE_F16 = 1
TYPE_I8 = 24
TYPE_I16 = 25
TYPE_I32 = 26
TYPE_BF16 = 30

TYPE_NAMES = {TYPE_F32: "f32", TYPE_F16: "f16", TYPE_BF16: "bf16"}
"""The types whose tensors can be stored sparse."""

NEGATIVE_ZERO = {TYPE_F32: 0x80000000, TYPE_F16: 0x8000, TYPE_BF16: 0x8000}

EXPONENT = {TYPE_F32: 0x7F800000, TYPE_F16: 0x7C00, TYPE_BF16: 0x7F80}
"""Mask of the exponent bits. A value with all of them set is infinite or NaN."""

SIGNIFICAND_BITS = {TYPE_F32: 24, TYPE_F16: 11, TYPE_BF16: 8}
"""Including the implicit leading bit."""


def value_bits(type_id: int) -> int:
    """Bits of one value of type F16, BF16 or F32."""
    return 32 if type_id == TYPE_F32 else 16


def bits_dtype(type_id: int) -> np.dtype[Any]:
    """The unsigned integer type for the bits of a value."""
    return np.dtype(np.uint32 if type_id == TYPE_F32 else np.uint16)


def component_dtype(type_id: int) -> type[np.generic]:
    """The dtype of the array of a component with this ggml type; bytes for most types."""
    known: dict[int, type[np.generic]] = {TYPE_F32: np.uint32, TYPE_I32: np.int32}
    return np.uint16 if type_id in (TYPE_F16, TYPE_BF16, TYPE_I16) else known.get(type_id, np.uint8)


def to_float(bits: Array, type_id: int) -> npt.NDArray[np.float32]:
    """The values of bit patterns of type F16, BF16 or F32, of the same shape. All three are exact in float32."""
    if type_id == TYPE_F16:
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32) if type_id == TYPE_BF16 else bits.view(np.float32)


def from_float(values: npt.NDArray[np.float32], type_id: int) -> Array:
    """Bit patterns of finite float32 values, rounded to nearest, ties to even. Values beyond the largest finite value
    of the type become that value.
    """
    if type_id == TYPE_F32:
        return values.view(np.uint32)
    if type_id == TYPE_BF16:
        u = values.view(np.uint32).astype(np.uint64)
        return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    return np.where(np.isinf(half), np.copysign(np.float16(65504), half), half).astype(np.float16).view(np.uint16)
