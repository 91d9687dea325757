"""The pruning methods: scores of the weights of one tensor, and zeroing.

A method is a `Pruner`, a function that changes the bit patterns of a tensor in place. allocation.py gives the number of
weights to prune in each matrix, and layerwise.py the statistics. This module reads only the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Callable, NamedTuple

import numpy as np

from .. import console, errors
from ..gguf import imatrix
from ..gguf.files import Tensor, type_name
from ..pruning import allocation, alps, array_backend, masks, quantized, sparsegpt
from ..pruning.allocation import Quotas, ScoreBlock
from ..pruning.array_backend import Array
from ..pruning.hessians import Hessians
from ..pruning.masks import Bits, FloatArray
from ..pruning.options import ParsedOptions
from ..values import SIGNIFICAND_BITS

BLOCK_ELEMENTS = 1 << 21
"""Weights per step of scoring and sorting."""

Pruner = Callable[[Bits, Tensor], None]
"""A function that changes the bit patterns (rows, cols) of a tensor, with the rows of all its matrices, in place."""


def read_finite(t: Tensor) -> Bits:
    """The bit patterns (rows, cols) of a tensor. Raises MackoError (NOT_FINITE) if one is infinite or NaN."""
    bits: Bits = t.read_bits()
    n = masks.count_not_finite(bits, t.type)
    if n:
        raise errors.error(errors.NOT_FINITE, f"{t.shard.path}: {t.name}: {n} values are not finite")
    return bits


# ---- magnitude and Wanda: by scores ----


class Scorer:
    """Scores of the weights of a tensor: Wanda's if there are statistics of its inputs, otherwise magnitudes."""

    def __init__(self, statistics: imatrix.Imatrix | None = None) -> None:
        self._statistics = statistics

    def sums(self, t: Tensor) -> list[FloatArray | None]:
        """For each matrix of a tensor, the sums of squares of the inputs (cols,); None, for scores by magnitude,
        without statistics and for an expert without tokens.
        """
        if self._statistics is None:
            return [None] * allocation.n_matrices(t)
        found = self._statistics.of(t)
        return [s if count else None for s, count in zip(found.sums.astype(np.float32), found.counts)]

    @staticmethod
    def score(bits: Bits, type_id: int, sums: FloatArray | None) -> FloatArray:
        """Scores (rows, cols) of rows of one matrix. sums: element of sums()."""
        return masks.magnitude(bits, type_id) if sums is None else masks.wanda(bits, type_id, sums)

    def blocks(self, t: Tensor) -> Iterator[ScoreBlock]:
        """All scores of a tensor, as allocation.Scores."""
        bits = read_finite(t)
        rows = t.ne[1]
        step = max(1, BLOCK_ELEMENTS // t.cols)
        for i, sums in enumerate(self.sums(t)):
            for begin in range(0, rows, step):
                block = bits[i * rows + begin : i * rows + min(begin + step, rows)]
                yield ScoreBlock(i, self.score(block, t.type, sums))


class _Rows(NamedTuple):
    """Rows of one matrix for a task of a thread."""

    matrix: int
    begin: int


def by_scores(scorer: Scorer, options: ParsedOptions, quotas: Quotas, pool: ThreadPoolExecutor) -> Pruner:
    """Zeroes the weights with the lowest scores; the quotas have their numbers."""

    def prune_tensor(bits: Bits, t: Tensor) -> None:
        rows = t.ne[1]
        whole_matrix = options.compare_within != "row"
        step = rows if whole_matrix else max(1, BLOCK_ELEMENTS // t.cols)
        row_quotas = [masks.spread(int(k), rows) for k in quotas[t.name]]
        sums = scorer.sums(t)

        def prune_rows(at: _Rows) -> None:
            i, begin = at
            end = min(begin + step, rows)
            block = bits[i * rows + begin : i * rows + end]
            scores = scorer.score(block, t.type, sums[i])
            if options.compare_within == "row":
                mask = masks.lowest(scores, row_quotas[i][begin:end])
            else:
                mask = masks.lowest_per_row(scores.reshape(1, -1), int(quotas[t.name][i])).reshape(block.shape)
            block[mask] = 0

        list(pool.map(prune_rows, [_Rows(i, b) for i in range(len(row_quotas)) for b in range(0, rows, step)]))

    return prune_tensor


class MomentScorer(Scorer):
    """Wanda's scores from Hessians."""

    def __init__(self, hessians: Hessians) -> None:
        super().__init__()
        self._hessians = hessians

    def sums(self, t: Tensor) -> list[FloatArray | None]:
        found = (self._hessians.get(t.name, i, t.cols) for i in range(allocation.n_matrices(t)))
        return [array_backend.to_host(hessian.diagonal()) for hessian in found]


# ---- SparseGPT, ALPS, refits and quantized values: by Hessians ----


def by_hessians(hessians: Hessians, options: ParsedOptions, quotas: Quotas, pool: ThreadPoolExecutor) -> Pruner:
    """Prunes each matrix with its Hessian: SparseGPT, ALPS, or scores and a refit of the remaining weights. With
    quant_values, the remaining weights then get values of this type.

    The pruner logs the error of a tensor's outputs on the calibration text, relative to their energy. It raises
    MackoError (NOT_FINITE) if a changed weight overflows the type of the tensor.
    """
    xp = hessians.xp
    scorer = MomentScorer(hessians) if options.method == "wanda" else Scorer()
    choose = by_scores(scorer, options, quotas, pool) if options.method in ("magnitude", "wanda") else None
    grid = None if options.quant_values is None else quantized.Grid(options.quant_values, xp)

    def prune_tensor(bits: Bits, t: Tensor) -> None:
        n = len(quotas[t.name])
        unit, total = ("columns", n * t.cols) if options.method == "sparsegpt" else ("matrices", n)
        dense = bits.copy()
        kept = SIGNIFICAND_BITS[t.type] if options.keep_mantissa else masks.significant_bits(dense, t.type)
        if choose is not None:
            choose(bits, t)
        lost = energy = 0.0

        def dense_matrix(i: int) -> Array:
            return masks.to_float32(xp.asarray(dense[i * t.ne[1] : (i + 1) * t.ne[1]]), t.type)

        def store(i: int, before: Array, w: Array) -> None:
            nonlocal lost, energy
            new = masks.from_float32(w, t.type)
            after = masks.to_float32(new, t.type)
            if not xp.isfinite(after).all():
                raise errors.error(
                    errors.NOT_FINITE, f"{t.name}: a changed weight does not fit into {type_name(t.type)}"
                )
            bits[i * t.ne[1] : (i + 1) * t.ne[1]] = array_backend.to_host(new)
            hessian = xp.asarray(hessians.get(t.name, i, t.cols))
            lost += sparsegpt.energy(before - after, hessian)
            energy += sparsegpt.energy(before, hessian)

        pruned = []
        with console.progress(t.name, total, unit) as advance:
            for i in range(n):
                before = dense_matrix(i)
                w = prune_matrix(before, bits[i * t.ne[1] : (i + 1) * t.ne[1]], t, i, advance)
                if grid is None:
                    store(i, before, masks.with_significant_bits(w, kept))
                else:
                    pruned.append(w)
                if unit == "matrices":
                    advance(1)
        if grid is not None:
            importance = [xp.asarray(hessians.get(t.name, i, t.cols)).diagonal() for i in range(n)]
            lattices = quantized.lattices(pruned, importance, grid)
            with console.progress(f"{t.name}, {options.quant_values}", n * quantized.PASSES, "passes") as advance:
                for i, lattice in enumerate(lattices):
                    before = dense_matrix(i)
                    problem = hessians.problem(t.name, i, before, options.damping)
                    store(i, before, quantized.fit(problem, pruned[i], lattice, grid, advance))
        console.detail(f"{t.name:36s} - relative output error {lost / energy if energy else 0.0:.5f}")

    def prune_matrix(before: Array, chosen: Bits, t: Tensor, i: int, advance: Callable[[float], object]) -> Array:
        """Weights (rows, cols) of matrix i. chosen: the bit patterns after pruning by scores, if any."""
        n_zeros = int(quotas[t.name][i])
        if options.method == "sparsegpt":
            w = before.copy()
            factor = hessians.inverse_factor(t.name, i, t.cols, options.damping)
            sparsegpt.prune_matrix(w, factor, n_zeros, advance)
        elif options.method == "alps":
            problem = hessians.problem(t.name, i, before, options.damping)
            spectrum = hessians.spectrum(t.name, i, problem)
            return alps.refit(problem, alps.prune_matrix(problem, spectrum, n_zeros))
        else:
            w = masks.to_float32(xp.asarray(chosen), t.type)
        if options.refit:
            w = alps.refit(hessians.problem(t.name, i, before, options.damping), w)
        return w

    return prune_tensor


class Refitted(NamedTuple):
    """A tensor that was pruned to measure the loss."""

    bits: Bits
    errors: dict[Fraction, float]  # by sparsity: squared error of its outputs, relative to their energy


def refitted(t: Tensor, hessians: Hessians, damping: float, sparsities: Sequence[Fraction], kept: Fraction) -> Refitted:
    """A tensor at some sparsities, pruned by Wanda within each matrix and refitted. kept: the sparsity of the bits."""
    xp, rows = hessians.xp, t.ne[1]
    bits = read_finite(t)
    lost = dict.fromkeys(sparsities, 0.0)
    energy = 0.0
    for i in range(allocation.n_matrices(t)):
        part = slice(i * rows, (i + 1) * rows)
        w = masks.to_float32(xp.array(bits[part]), t.type)
        problem = hessians.problem(t.name, i, w, damping)
        scores = xp.abs(w) * xp.sqrt(problem.hessian.diagonal())
        energy += sparsegpt.energy(w, problem.hessian)
        for sparsity in sparsities:
            mask = alps.lowest(scores, w == 0, int(sparsity * w.size))
            found = alps.refit(problem, xp.where(mask, 0, w))
            lost[sparsity] += sparsegpt.energy(w - found, problem.hessian)
            if sparsity == kept:
                bits[part] = array_backend.to_host(masks.from_float32(found, t.type))
    return Refitted(bits, {sparsity: error / energy if energy else 0.0 for sparsity, error in lost.items()})


# ---- copies and dry runs ----


def take_from(tensors: dict[str, Tensor]) -> Pruner:
    """Copies the weights from another file of the same model. tensors: of that file, by name."""

    def prune_tensor(bits: Bits, t: Tensor) -> None:
        bits[:] = tensors[t.name].read_bits()

    return prune_tensor


def count_only(quotas: Quotas) -> Pruner:
    """For a dry run of a slow method: makes the right number of zeros, but in other places."""

    def prune_tensor(bits: Bits, t: Tensor) -> None:
        flat = bits.reshape(-1)
        missing = int(quotas[t.name].sum()) - int((flat == 0).sum())
        flat[np.flatnonzero(flat)[: max(0, missing)]] = 0

    return prune_tensor
