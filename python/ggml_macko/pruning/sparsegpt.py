"""SparseGPT: zeroes weights of one matrix and changes the others to preserve its outputs.

Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot" (arXiv 2301.00774),
section 3, algorithm 1. This module reads no files; its arrays may be on a GPU (array_backend.py).

The Hessian of a matrix W (rows, cols) is H = sum of x x^T over the inputs x, (cols, cols). Replacing W by W' changes
the outputs by an error of tr(D H D^T), where D = W - W'. Columns are treated from left to right. Let U be upper
triangular with H^-1 = U^T U. Zeroing w_ij and then changing the weights right of it in the best way

    costs    w_ij^2 / U_jj^2
    subtracts (w_ij / U_jj) * U_j,k from w_ik     for every k > j

so the rows of U contain everything about H that the remaining columns need.
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from ..pruning import array_backend, masks
from ..pruning.array_backend import Array
from ..pruning.options import DAMPING

BLOCK_COLS = 128
"""Columns per selection of weights: the mask selection blocksize of the paper."""


def damped_diagonal(hessian: Array, damping: float) -> Array:
    """The diagonal of H + damping * mean(diag H) * I, float64 (cols,). hessian: H, float32 (cols, cols). A zero on the
    diagonal (an input that is always zero) counts as 1.
    """
    diagonal = hessian.diagonal().astype(np.float64)
    diagonal[diagonal == 0] = 1
    diagonal += damping * diagonal.mean()
    return diagonal


def inverse_factor(hessian: Array, damping: float = DAMPING) -> Array:
    """U, float32 (cols, cols), upper triangular, with U^T U = (H + damping * mean(diag H) * I)^-1.

    hessian: H, float32 (cols, cols), symmetric; not modified. A zero on the diagonal (an input that is always zero)
    counts as 1. Raises numpy.linalg.LinAlgError if the damped matrix is not positive definite.
    """
    xp = array_backend.module_of(hessian)
    h = hessian.astype(np.float64)
    at = xp.arange(len(h))
    h[at, at] = damped_diagonal(hessian, damping)
    # H = R R^T with R upper triangular is the Cholesky factorisation of H with rows and columns reversed; U = R^-1
    with array_backend.raise_linalg_errors(xp):
        lower = xp.linalg.cholesky(h[::-1, ::-1])
        del h
        return xp.triu(_invert_triangular(lower)[::-1, ::-1]).astype(np.float32)


_TRIANGLE = 256
"""Largest triangular matrix for which a general inverse is as fast."""


def _invert_triangular(lower: Array) -> Array:
    """The inverse of a lower triangular matrix, by halves. It takes a quarter of the operations of a general inverse,
    nearly all of them in matrix products.
    """
    xp = array_backend.module_of(lower)
    n = len(lower)
    if n <= _TRIANGLE:
        return xp.linalg.inv(lower)
    half = n // 2
    out = xp.zeros_like(lower)
    out[:half, :half] = _invert_triangular(lower[:half, :half])
    out[half:, half:] = _invert_triangular(lower[half:, half:])
    out[half:, :half] = -(out[half:, half:] @ (lower[half:, :half] @ out[:half, :half]))
    return out


def prune_matrix(
    w: Array,
    factor: Array,
    n_zeros: int,
    advance: Callable[[int], object] = lambda cols: None,
) -> None:
    """Prunes w, float32 (rows, cols), in place: n_zeros of its weights become 0.

    factor: inverse_factor of the Hessian of the inputs. Each block of BLOCK_COLS columns gets its share of n_zeros,
    selected from all rows together. Existing zeros stay zero and count; a block with more of them than its share loses
    no other weight. advance: called with the number of finished columns since the last call.
    """
    xp = array_backend.module_of(w)
    rows, cols = w.shape
    zero = (w == 0).T
    for begin in range(0, cols, BLOCK_COLS):
        end = min(begin + BLOCK_COLS, cols)
        u = factor[begin:end, begin:end]
        n = n_zeros * end // cols - n_zeros * begin // cols
        block = xp.ascontiguousarray(w[:, begin:end].T)  # transposed: a column of w is contiguous
        scaled_errors = xp.empty_like(block)  # w_ij / U_jj of the weights that are zeroed
        mask = choose(block, u, zero[begin:end], n)
        for j in range(end - begin):
            column = block[j] - u[:j, j] @ scaled_errors[:j]  # with the changes from previous columns
            scaled_errors[j] = xp.where(mask[j], column, 0) / u[j, j]
            block[j] = xp.where(mask[j], 0, column)
        w[:, begin:end] = block.T
        if end < cols:
            w[:, end:] -= scaled_errors.T @ factor[begin:end, end:]
        advance(end - begin)


def choose(block: Array, u: Array, zero: Array, n: int) -> Array:
    """Marks all existing zeros of a block, and other weights with the least costs up to n marks in total.

    block: (block cols, rows). u: the factor's diagonal block. zero: mask of the weights that are zero, of the shape of
    block, as is the result.
    """
    costs = costs_of(block, u, zero)
    chosen = masks.lowest_per_row(costs.reshape(1, -1), n).reshape(block.shape)
    return array_backend.module_of(block).asarray(chosen) | zero


def costs_of(block: Array, u: Array, zero: Array) -> masks.FloatArray:
    """w_ij^2 / U_jj^2, and 0 for zeros, in host memory, so that ties are always resolved in the same way."""
    xp = array_backend.module_of(block)
    costs = xp.square(block / u.diagonal()[:, None])
    costs[zero] = 0
    return array_backend.to_host(costs)


def energy(w: Array, hessian: Array) -> float:
    """tr(W H W^T), the sum of squares of the outputs of w (rows, cols), or the error for a difference of weights."""
    return float(((w @ hessian).astype(np.float64) * w).sum())
