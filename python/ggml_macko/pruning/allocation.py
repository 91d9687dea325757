"""How many weights each matrix loses: uniform, by a table, over the whole model, or outlier-weighed (OWL).

Works on counts alone, in integers and fractions, so a total is exact and the same everywhere. What it needs of the
weights comes from a `Scores` function; nothing here reads files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Callable

import numpy as np

from .. import errors
from ..gguf.files import Tensor
from ..pruning import masks

# Of the pruned tensors, by name: the number of zeros of each of its matrices (experts; most tensors have one)
Quotas = dict[str, np.ndarray]

# tensor -> (matrix index, float32 scores >= 0 (rows, cols)) of successive blocks of rows
Scores = Callable[[Tensor], Iterator[tuple]]

OWL_M = 5  # the paper's M for LLaMA, and its lambda
OWL_LAMBDA = Fraction("0.08")


def n_matrices(t: Tensor) -> int:
    """A 3-D tensor holds one matrix per expert."""
    return t.rows // t.ne[1]


def block_of(name: str) -> int:
    """The transformer block that a tensor belongs to; what stands outside of them comes last."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else 1 << 30


def uniform_count(t: Tensor, sparsity: Fraction, per: str) -> int:
    """Zeros of one matrix: floor(S * n) of each row, or of the matrix."""
    rows, cols = t.ne[1], t.cols
    return rows * int(sparsity * cols) if per == "row" else int(sparsity * rows * cols)


def uniform(t: Tensor, sparsity: Fraction, per: str) -> np.ndarray:
    return np.full(n_matrices(t), uniform_count(t, sparsity, per), dtype=np.int64)


def total_of(tensors: Iterable, sparsity: Fraction, per: str) -> int:
    return sum(n_matrices(t) * uniform_count(t, sparsity, per) for t in tensors)


# ---- over the whole model ----


def lowest_of_model(tensors: list, total: int, scores: Scores) -> Quotas:
    """The `total` lowest scores of all tensors together; of equal ones, those of the first tensor and lowest index.

    Exact in bounded memory: two passes find the score that divides (16 bits of its key each), a third counts.
    """
    high = _find_bin(tensors, scores, total, lambda keys: keys >> 16)
    below = high[1]
    low = _find_bin(tensors, scores, total - below, lambda keys: keys[keys >> 16 == high[0]] & 0xFFFF)
    threshold = high[0] << 16 | low[0]
    room = total - below - low[1]
    out = {}
    for t in tensors:
        out[t.name] = quota = np.zeros(n_matrices(t), dtype=np.int64)
        for i, block in scores(t):
            keys = masks.score_keys(block)
            equal = min(room, int((keys == threshold).sum()))
            room -= equal
            quota[i] += int((keys < threshold).sum()) + equal
    return out


def _find_bin(tensors: list, scores: Scores, total: int, digits: Callable) -> tuple:
    """(the value of the digits that the total-th lowest score has, how many scores are in lower bins)."""
    histogram = np.zeros(1 << 16, dtype=np.int64)
    for t in tensors:
        for _, block in scores(t):
            histogram += np.bincount(digits(masks.score_keys(block).reshape(-1)), minlength=1 << 16)
    ends = np.cumsum(histogram)
    found = int(np.searchsorted(ends, total))
    return found, int(ends[found] - histogram[found])


# ---- outlier-weighed ----


def owl(tensors: list, sparsity: Fraction, per: str, scores: Scores, m: float, spread: Fraction) -> Quotas:
    """OWL: Yin et al., "Outlier Weighed Layerwise Sparsity" (2310.05175), section 3.

    A block's share of outliers D is that of its scores above m times their mean; the more a block has, the more of it
    stays: densities follow D linearly over a range of 2 * spread, around a mean that leaves the total exactly as
    uniform allocation has it. All matrices of a block get its sparsity.
    """
    by_block: dict = {}
    for t in tensors:
        by_block.setdefault(block_of(t.name), []).append(t)
    share = {b: outlier_share(ts, scores, m) for b, ts in by_block.items()}
    size = {b: sum(t.n_elements for t in ts) for b, ts in by_block.items()}
    n = sum(size.values())
    total = total_of(tensors, sparsity, per)
    least, most = min(share.values()), max(share.values())
    width = most - least
    bonus = {b: 2 * spread * (d - least) / width if width else Fraction(0) for b, d in share.items()}
    mean = sum(bonus[b] * size[b] for b in share) / n
    wanted = {b: Fraction(total, n) - (bonus[b] - mean) for b in share}
    for b, s in wanted.items():
        if not 0 <= s <= 1:
            raise errors.error(
                errors.BAD_ARGUMENT,
                f"--owl-lambda {float(spread):g} gives block {b} a sparsity of {float(s):.3f}; use a smaller one",
            )
    return distribute(tensors, {t.name: wanted[block_of(t.name)] for t in tensors}, total)


def outlier_share(tensors: list, scores: Scores, m: float) -> Fraction:
    """Share of the scores of all tensors together that exceed m times their mean."""
    total, n = 0.0, 0
    for t in tensors:
        for _, block in scores(t):
            total += float(block.sum(dtype=np.float64))
            n += block.size
    limit = m * total / n
    return Fraction(sum(int((block > limit).sum()) for t in tensors for _, block in scores(t)), n)


def distribute(tensors: list, sparsity: dict, total: int) -> Quotas:
    """Whole numbers near sparsity[name] * n of each tensor that add up to total, the sum of those products."""
    exact = {t.name: sparsity[t.name] * t.n_elements for t in tensors}
    counts = {name: int(x) for name, x in exact.items()}
    missing = total - sum(counts.values())
    for t in sorted(tensors, key=lambda t: counts[t.name] - exact[t.name])[:missing]:  # largest remainders first
        counts[t.name] += 1
    return {t.name: masks.spread(counts[t.name], n_matrices(t)) for t in tensors}
