"""Which weights of a matrix go: scores, and the exact choice of the lowest ones.

Pure NumPy on arrays; reads no files. Everything is exact: counts are integers that the caller gives, ties go to the
lowest index, and scores are single float32 operations, so a mask depends neither on threads nor on the machine.
"""

from __future__ import annotations

import numpy as np

from ..values import TYPE_BF16, TYPE_F16

# ---- values ----


def to_float32(bits: np.ndarray, type_id: int) -> np.ndarray:
    """Exact, from the bit patterns of any of the three value types."""
    if type_id == TYPE_F16:
        return bits.view(np.float16).astype(np.float32)
    if type_id == TYPE_BF16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32)


def from_float32(values: np.ndarray, type_id: int) -> np.ndarray:
    """Bit patterns of the nearest value, ties to even. Overflow gives Inf."""
    if type_id == TYPE_F16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    if type_id == TYPE_BF16:
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return bits


# ---- scores ----


def magnitude(bits: np.ndarray, type_id: int) -> np.ndarray:
    """|w|, exact in float32 for all three types."""
    return np.abs(to_float32(bits, type_id))


def wanda(bits: np.ndarray, type_id: int, sum_squares: np.ndarray) -> np.ndarray:
    """|w_ij| * ||x_j||: Sun et al., "A Simple and Effective Pruning Approach for LLMs" (2306.11695), equation 1.

    sum_squares: float32 (cols), the squares of input j summed over all tokens.
    """
    with np.errstate(over="ignore"):  # Inf is a fine score: never pruned before a finite one
        return magnitude(bits, type_id) * np.sqrt(sum_squares)


# ---- choosing ----


def spread(total: int, n: int) -> np.ndarray:
    """total as n integers that differ by at most one."""
    ends = [total * i // n for i in range(n + 1)]
    return np.diff(np.array(ends, dtype=np.int64))


def lowest(scores: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Boolean mask of the counts[i] lowest scores >= 0 of row i; of equal scores, those of the lowest columns."""
    distinct = np.unique(counts)
    if len(distinct) == 1:
        return lowest_per_row(scores, int(distinct[0]))
    mask = np.empty(scores.shape, dtype=bool)
    for k in distinct:
        chosen = counts == k
        mask[chosen] = lowest_per_row(scores[chosen], int(k))
    return mask


def lowest_per_row(scores: np.ndarray, k: int) -> np.ndarray:
    """The same with k of every row."""
    if k == 0:
        return np.zeros(scores.shape, dtype=bool)
    keys = score_keys(scores)
    threshold = np.partition(keys, k - 1, axis=1)[:, k - 1 : k]
    mask = keys < threshold
    room = k - mask.sum(axis=1, keepdims=True)
    equal = keys == threshold
    equal &= np.cumsum(equal, axis=1) <= room
    mask |= equal
    return mask


def score_keys(scores: np.ndarray) -> np.ndarray:
    """uint32 in the order of the scores: that of floats >= 0 is that of their bits."""
    return np.ascontiguousarray(scores).view(np.uint32)


def lowest_in_groups(scores: np.ndarray, n: int, m: int) -> np.ndarray:
    """Mask that leaves n of every m neighbours in a row (the n:m pattern); the number of columns divides by m."""
    return lowest_per_row(scores.reshape(-1, m), m - n).reshape(scores.shape)
