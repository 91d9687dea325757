"""ALPS: selects the remaining weights of a matrix by ADMM, and fits them by conjugate gradients.

Meng, Behdin, Wang, Mazumder, "ALPS: Improved Optimization for Highly Sparse One-Shot Pruning for Large Language Models"
(NeurIPS 2024, arXiv 2406.07831). This module reads no files; its arrays may be on a GPU (array_backend.py).

A matrix W (rows, cols) has inputs x and target outputs y. Up to a constant, the sum of squared errors is

    tr(W H W^T) - 2 tr(W T^T)       with H = sum of x x^T, (cols, cols), and T = sum of y x^T, (rows, cols)

If y is the product of the dense weights and x, T is the dense weights times H. If y is the product of the dense weights
and z, the inputs in the dense model, T also has the dense weights times the sum of (z - x) x^T; this corrects the
errors of matrices that were pruned before (asymmetric targets: Li et al., "GPTAQ", arXiv 2504.02692). Damping keeps the
result near the dense weights.
"""

from __future__ import annotations

import math
from typing import Callable, NamedTuple

import numpy as np

from ..pruning import array_backend, sparsegpt
from ..pruning.array_backend import Array

REFIT_STEPS = 10
"""Steps of conjugate gradients, as in the paper."""

MAX_ADMM_STEPS = 300
"""Largest number of ADMM steps. The support usually stops changing after 30 to 90."""

_SUPPORT_STEPS = 3  # between two counts of changes of the support, as in the paper
_PENALTY = 0.1  # rho of the first steps
_GROWTH = ((0.1, 1.3), (0.005, 1.2))  # smallest share of changed weights in the support -> factor of rho
_SLOW_GROWTH = 1.1


class Problem(NamedTuple):
    """A damped least squares problem: float32 arrays, of NumPy or CuPy."""

    hessian: Array  # H (cols, cols), positive definite
    target: Array  # T (rows, cols)
    dense: Array  # the dense weights (rows, cols)


class Spectrum(NamedTuple):
    """H with its rows and columns scaled so that its diagonal is 1, as Q diag(values) Q^T."""

    scale: Array  # (cols,): H_ij * scale_i * scale_j is the scaled matrix
    values: Array  # (cols,), ascending
    vectors: Array  # Q (cols, cols)


def damped(hessian: Array, damping: float) -> Array:
    """H + damping * mean(diag H) * I, float32 (cols, cols).

    hessian: float32 (cols, cols), symmetric; not modified. A zero on the diagonal (an input that is always zero) counts
    as 1.
    """
    xp = array_backend.module_of(hessian)
    h = hessian.copy()
    at = xp.arange(len(h))
    h[at, at] = sparsegpt.damped_diagonal(hessian, damping).astype(np.float32)
    return h


def spectrum(hessian: Array) -> Spectrum:
    """Raises numpy.linalg.LinAlgError unless the matrix (damped) is positive definite."""
    xp = array_backend.module_of(hessian)
    h = hessian.astype(np.float64)
    scale = 1 / xp.sqrt(h.diagonal())
    h *= scale[:, None]
    h *= scale
    with array_backend.raise_linalg_errors(xp):
        values, vectors = xp.linalg.eigh(h)
    if not float(values[0]) > 0:
        raise np.linalg.LinAlgError("not positive definite")
    return Spectrum(*(a.astype(np.float32) for a in (scale, values, vectors)))


def prune_matrix(
    problem: Problem,
    spectrum: Spectrum,
    n_zeros: int,
    advance: Callable[[int], object] = lambda steps: None,
) -> Array:
    """The pruned weights, float32 (rows, cols), before refit(): n_zeros of them are 0.

    Zeros of the dense matrix stay zero and count; if there are more of them, no other weight is pruned. advance: called
    with 1 after each step.
    """
    xp = array_backend.module_of(problem.dense)
    zero = problem.dense == 0
    n_kept = max(1, problem.dense.size - n_zeros)
    q, scale = spectrum.vectors, spectrum.scale
    target = problem.target * scale  # of the scaled weights, W / scale
    kept = problem.dense / scale
    mask = ~lowest(xp.square(kept), zero, n_zeros)
    kept = xp.where(mask, kept, 0)
    multiplier = xp.zeros_like(kept)
    rho = _PENALTY
    for step in range(1, MAX_ADMM_STEPS + 1):
        free = ((target - multiplier + rho * kept) @ q / (spectrum.values + np.float32(rho))) @ q.T
        kept = free + multiplier / rho
        found = ~lowest(xp.square(kept), zero, n_zeros)
        kept = xp.where(found, kept, 0)
        multiplier += rho * (free - kept)
        advance(1)
        if step % _SUPPORT_STEPS == 0:
            n_changed = int((found & ~mask).sum())
            mask = found
            if not n_changed:
                break
            rho *= next((f for share, f in _GROWTH if n_changed >= share * n_kept), _SLOW_GROWTH)
    return kept * scale


def lowest(scores: Array, zero: Array, n: int) -> Array:
    """Marks all existing zeros, and other weights with the lowest scores up to n marks in total; among equal scores,
    the lowest index first. scores: float32 (rows, cols), not negative.
    """
    xp = array_backend.module_of(scores)
    scores = xp.where(zero, 0, scores)
    flat = scores.reshape(-1)
    if n == 0:
        return zero
    threshold = xp.partition(flat, n - 1)[n - 1]
    found = flat <= threshold
    n_more = int(found.sum()) - n
    if n_more > 0:
        found[xp.flatnonzero(flat == threshold)[-n_more:]] = False
    return found.reshape(scores.shape) | zero


def refit(problem: Problem, w: Array, steps: int = REFIT_STEPS) -> Array:
    """Fits the non-zeros of each row by conjugate gradients, preconditioned with the diagonal of H. The residual is
    projected onto the non-zeros, so zeros stay zero.

    w: start, float32 (rows, cols). Returns an array of this shape whose error is not larger.
    """
    xp = array_backend.module_of(w)
    mask = w != 0
    hessian = problem.hessian
    inverse = 1 / hessian.diagonal()
    w = w.copy()
    residual = xp.where(mask, problem.target - w @ hessian, 0)
    direction = residual * inverse
    length = (residual * direction).sum(axis=1, keepdims=True)
    for _ in range(steps):
        curved = xp.where(mask, direction @ hessian, 0)
        curvature = (direction * curved).sum(axis=1, keepdims=True)
        alpha = xp.where(curvature > 0, length / xp.maximum(curvature, _TINY), 0)
        w += alpha * direction
        residual -= alpha * curved
        scaled = residual * inverse
        before, length = length, (residual * scaled).sum(axis=1, keepdims=True)
        direction = scaled + length / xp.maximum(before, _TINY) * direction
    return w


_TINY = np.float32(math.ldexp(1, -126))  # the smallest normal float32
