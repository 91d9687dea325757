"""Scores of weights, and the exact selection of the lowest ones. This module reads no files. Values may be on a GPU
(array_backend.py); scores and masks are NumPy arrays.

Counts are integers, the lowest index wins ties, and a score is the result of single float32 operations. A mask
therefore depends neither on the number of threads nor on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..pruning.array_backend import module_of
from ..values import EXPONENT, SIGNIFICAND_BITS, TYPE_BF16, TYPE_F16

Bits = npt.NDArray[Any]
"""Bit patterns of weights: uint16 for F16 and BF16, uint32 for F32."""

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
"""True where a weight is pruned."""

# ---- values ----


def to_float32(bits: Bits, type_id: int) -> FloatArray:
    """The values of bit patterns of type F16, BF16 or F32, of the same shape; exact for all three types."""
    if type_id == TYPE_F16:
        return bits.view(np.float16).astype(np.float32)
    if type_id == TYPE_BF16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32)


def from_float32(values: FloatArray, type_id: int) -> Bits:
    """Bit patterns of the nearest values of a type, ties to even. Values beyond the type become infinite."""
    if type_id == TYPE_F16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits: Bits = module_of(values).ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    if type_id == TYPE_BF16:
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return bits


_COMMON_BITS = (8, 11)  # significant bits of BF16 and F16, from which weights of other types are often made
_MORE_BITS = 0.01  # allowed share of weights with more bits

_PIECE = 1 << 16


def significant_bits(bits: Bits, type_id: int) -> int:
    """The number of significant bits of nearly all weights of a tensor: 8 if they come from BF16, 11 if they come from
    F16, otherwise that of the type. Zeros and subnormal numbers do not count.
    """
    full = SIGNIFICAND_BITS[type_id]
    common = [n for n in _COMMON_BITS if n < full]
    n_normal, n_more = 0, dict.fromkeys(common, 0)
    for piece in pieces(bits):
        is_normal = piece & EXPONENT[type_id] != 0
        n_normal += int(np.count_nonzero(is_normal))
        for n in common:
            n_more[n] += int(np.count_nonzero(is_normal & (piece & ((1 << (full - n)) - 1) != 0)))
    return next((n for n in common if n_more[n] <= _MORE_BITS * n_normal), full)


def count_not_finite(bits: Bits, type_id: int) -> int:
    """The number of bit patterns that are infinite or NaN."""
    exponent = EXPONENT[type_id]
    return sum(int(np.count_nonzero(piece & exponent == exponent)) for piece in pieces(bits))


def pieces(bits: Bits) -> Iterator[Bits]:
    """Flat parts of an array that fit the cache with their temporary arrays: several times as fast as the whole."""
    flat = bits.reshape(-1)
    return (flat[i : i + _PIECE] for i in range(0, len(flat), _PIECE))


def with_significant_bits(values: FloatArray, n: int) -> FloatArray:
    """The nearest float32 values that have n significant bits, ties to even. The largest may become infinite."""
    dropped = 24 - n
    if dropped == 0:
        return values
    u: Bits = module_of(values).ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    half = (1 << (dropped - 1)) - 1
    return ((u + np.uint32(half) + ((u >> dropped) & 1)) >> dropped << dropped).astype(np.uint32).view(np.float32)


# ---- scores ----


def magnitude(bits: Bits, type_id: int) -> FloatArray:
    """The score |w| of each weight, of the shape of bits; exact in float32 for all three types."""
    return np.abs(to_float32(bits, type_id))


def wanda(bits: Bits, type_id: int, sum_squares: FloatArray) -> FloatArray:
    """Wanda's score S_ij = |w_ij| * ||x_j||_2 of each weight: Sun et al., "A Simple and Effective Pruning Approach for
    Large Language Models" (arXiv 2306.11695), section 3, equation 1.

    bits: (rows, cols). sum_squares: (cols,), the squares of input j summed over all tokens, so that ||x_j||_2 is its
    square root. Returns scores (rows, cols).
    """
    with np.errstate(over="ignore"):  # an infinite score is correct: the weight is pruned last
        return magnitude(bits, type_id) * np.sqrt(sum_squares)


# ---- choosing ----


def spread(total: int, n: int) -> IntArray:
    """n integers that add up to total and differ by at most one."""
    ends = [total * i // n for i in range(n + 1)]
    return np.array([b - a for a, b in zip(ends, ends[1:])], dtype=np.int64)


def lowest(scores: FloatArray, counts: IntArray) -> Mask:
    """Marks the counts[i] lowest scores of row i; among equal scores, the lowest columns.

    scores: (rows, cols), not negative. counts: (rows,). Returns a mask (rows, cols).
    """
    distinct = np.unique(counts)
    if len(distinct) == 1:
        return lowest_per_row(scores, int(distinct[0]))
    mask = np.empty(scores.shape, dtype=bool)
    for k in distinct:
        chosen = counts == k
        mask[chosen] = lowest_per_row(scores[chosen], int(k))
    return mask


def lowest_per_row(scores: FloatArray, k: int) -> Mask:
    """Marks the k lowest scores of each row; among equal scores, the lowest columns.

    scores: (rows, cols), not negative. Returns a mask (rows, cols).
    """
    if k == 0:
        return np.zeros(scores.shape, dtype=bool)
    keys = score_keys(scores)
    threshold = np.partition(keys, k - 1, axis=1)[:, k - 1 : k]
    mask: Mask = keys < threshold
    capacity = k - mask.sum(axis=1, keepdims=True)
    equal = keys == threshold
    equal &= np.cumsum(equal, axis=1) <= capacity
    mask |= equal
    return mask


def score_keys(scores: FloatArray) -> npt.NDArray[np.uint32]:
    """Integers in the order of the scores: the bits of floats that are not negative have the same order."""
    return np.ascontiguousarray(scores).view(np.uint32)
