"""The number of weights that each matrix loses: the same share in each, by one ranking of the whole model, or by the
loss of each matrix.

Counts are integers and fractions, so totals are exact and the same on every machine. The caller passes a function for
the scores; this module reads no files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Callable, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import console
from ..gguf.files import Tensor
from ..pruning import masks

Quotas = dict[str, masks.IntArray]
"""Tensor name -> number of zeros in each of its matrices (experts; most tensors have one)."""


class ScoreBlock(NamedTuple):
    """The scores of successive rows of one matrix of a tensor."""

    matrix: int
    scores: masks.FloatArray  # (rows, cols), not negative


Scores = Callable[[Tensor], Iterator[ScoreBlock]]
"""The scores of a tensor, in blocks of rows, in the order of the file."""

AFTER_ALL_BLOCKS = 1 << 30


def n_matrices(t: Tensor) -> int:
    """The number of matrices in a tensor. A 3-D tensor has one per expert."""
    return t.rows // int(t.ne[1])


def block_of(name: str) -> int:
    """The index of the transformer block of a tensor; AFTER_ALL_BLOCKS for tensors outside of blocks."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else AFTER_ALL_BLOCKS


def uniform_count(t: Tensor, sparsity: Fraction, compare_within: str) -> int:
    """Zeros of one matrix of n weights: floor(S * n) if compare_within is tensor, floor(S * cols) in each row if it is
    row.
    """
    rows, cols = t.ne[1], t.cols
    return rows * int(sparsity * cols) if compare_within == "row" else int(sparsity * rows * cols)


def uniform(t: Tensor, sparsity: Fraction, compare_within: str) -> masks.IntArray:
    """Zeros of each matrix of a tensor, by the same share."""
    return np.full(n_matrices(t), uniform_count(t, sparsity, compare_within), dtype=np.int64)


def uniform_total(tensors: Iterable[Tensor], sparsity: Fraction, compare_within: str) -> int:
    """Zeros of all tensors together under uniform allocation."""
    return sum(n_matrices(t) * uniform_count(t, sparsity, compare_within) for t in tensors)


# ---- one ranking of the whole model ----


def _n_elements(t: Tensor) -> int:
    return t.n_elements


def lowest_of_model(tensors: Sequence[Tensor], total: int, scores: Scores) -> Quotas:
    """Zeros of each matrix if the `total` lowest scores of all tensors are pruned; among equal scores, the first tensor
    and the lowest index come first.

    The result is exact in bounded memory: two passes over the scores find the total-th lowest score, 16 bits of its key
    at a time, and a third pass counts.
    """
    high = _find_bin(tensors, scores, total, lambda keys: keys >> 16)
    low = _find_bin(tensors, scores, total - high.n_below, lambda keys: keys[keys >> 16 == high.digits] & 0xFFFF)
    threshold = high.digits << 16 | low.digits
    capacity = total - high.n_below - low.n_below
    quotas = {}
    for t in console.tracked(tensors, "counting", _n_elements, "weights"):
        quotas[t.name] = quota = np.zeros(n_matrices(t), dtype=np.int64)
        for i, block in scores(t):
            keys = masks.score_keys(block)
            equal = min(capacity, int((keys == threshold).sum()))
            capacity -= equal
            quota[i] += int((keys < threshold).sum()) + equal
    return quotas


class _Bin(NamedTuple):
    """The bin of the total-th lowest score in a histogram of 16 bits of the keys."""

    digits: int  # 16 bits of the key of the score
    n_below: int  # scores in lower bins


def _find_bin(
    tensors: Sequence[Tensor],
    scores: Scores,
    total: int,
    digits_of: Callable[[npt.NDArray[np.uint32]], npt.NDArray[Any]],
) -> _Bin:
    histogram = np.zeros(1 << 16, dtype=np.int64)
    for t in console.tracked(tensors, "comparing scores", _n_elements, "weights"):
        for _, block in scores(t):
            histogram += np.bincount(digits_of(masks.score_keys(block).reshape(-1)), minlength=1 << 16)
    ends = np.cumsum(histogram)
    found = int(np.searchsorted(ends, total))
    return _Bin(found, int(ends[found] - histogram[found]))


# ---- by loss ----

_STEPS = 64
"""Steps of by_loss from the lowest to the highest sparsity of a tensor."""


def loss_grid(sparsity: Fraction, max_shift: Fraction) -> list[Fraction]:
    """The five sparsities at which by_loss needs losses, from sparsity - max_shift to sparsity + max_shift, limited to
    possible values.
    """
    shifts = [max_shift * i / 2 for i in range(-2, 3)]
    return sorted({min(max(sparsity + shift, Fraction(0)), (1 + sparsity) / 2) for shift in shifts})


def by_loss(
    tensors: Sequence[Tensor],
    sparsity: Fraction,
    compare_within: str,
    losses: dict[str, list[float]],
    max_shift: Fraction,
) -> Quotas:
    """Gives each tensor a sparsity, at most max_shift from the mean, with the least sum of losses.

    losses: for each tensor, the rise of the model's loss at the sparsities of loss_grid(); its logarithm is linear
    between them. Each tensor starts at the lowest sparsity; the tensor with the smallest rise per weight gets the next
    zeros.
    """
    grid = loss_grid(sparsity, max_shift)
    total = uniform_total(tensors, sparsity, compare_within)
    step = (grid[-1] - grid[0]) / _STEPS
    at = np.linspace(float(grid[0]), float(grid[-1]), _STEPS + 1)
    growth = {}
    for t in tensors:
        log = np.log(np.maximum(losses[t.name], np.finfo(float).tiny))
        growth[t.name] = np.diff(np.exp(np.interp(at, [float(g) for g in grid], log))) / t.n_elements
    n_steps = dict.fromkeys(growth, 0)
    size = {t.name: t.n_elements for t in tensors}
    lowest = min(grid[0], Fraction(total, sum(size.values())))  # whole numbers per row may be below the mean
    shares = dict.fromkeys(growth, lowest)
    left = total - lowest * sum(size.values())
    while left > 0 and step > 0:
        name = min((name for name in size if n_steps[name] < _STEPS), key=lambda name: growth[name][n_steps[name]])
        more = min(step, Fraction(left, size[name]))
        shares[name] += more
        n_steps[name] += 1
        left -= more * size[name]
    return distribute(tensors, shares, total)


def distribute(tensors: Sequence[Tensor], sparsity: dict[str, Fraction], total: int) -> Quotas:
    """Whole numbers near sparsity[name] * n of each tensor that add up to total, the sum of these products.

    Products are rounded down, and the tensors with the largest remainders get the rest. A tensor distributes its zeros
    evenly over its matrices.
    """
    exact = {t.name: sparsity[t.name] * t.n_elements for t in tensors}
    counts = {name: int(x) for name, x in exact.items()}
    missing = total - sum(counts.values())
    for t in sorted(tensors, key=lambda t: counts[t.name] - exact[t.name])[:missing]:
        counts[t.name] += 1
    return {t.name: masks.spread(counts[t.name], n_matrices(t)) for t in tensors}
