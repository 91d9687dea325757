"""SparseGPT: zeroes weights of one matrix and changes the others so that its outputs stay close.

Frantar & Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot" (2301.00774), algorithm 1.
On arrays (BLAS and LAPACK do the work, or their GPU twins: see arrays.py); reads no files.

The error of a matrix W whose inputs have second moments H = sum of x x^T is tr(D H D^T), D = W - W'. Columns are
treated left to right; with U upper triangular and H^-1 = U^T U, zeroing column j and then changing the columns right of
it in the best way costs w_j^2 / U_jj^2 and subtracts (w_j / U_jj) U_j,right.
"""

from __future__ import annotations

import numpy as np

from ..pruning import array_backend as arrays
from ..pruning import masks

BLOCK_COLS = 128  # columns among which weights to zero are chosen, as in the paper
DAMPING = 0.01  # times the mean of H's diagonal, added to it; the paper's value


def inverse_factor(hessian: np.ndarray, damping: float = DAMPING) -> np.ndarray:
    """U (float32, upper triangular) with U^T U = (H + damping)^-1. hessian: (cols, cols), symmetric; not changed.

    Raises numpy.linalg.LinAlgError if H is not positive definite in spite of the damping.
    """
    xp = arrays.of(hessian)
    h = hessian.astype(np.float64)
    diagonal = h.diagonal().copy()
    diagonal[diagonal == 0] = 1  # inputs that were always zero: any weight will do
    diagonal += damping * diagonal.mean()
    at = xp.arange(len(diagonal))
    h[at, at] = diagonal
    # H = R R^T with R upper is the Cholesky factorisation of H with rows and columns reversed; then U = R^-1
    with arrays.linalg_raises(xp):
        lower = xp.linalg.cholesky(h[::-1, ::-1])
        del h
        return xp.triu(xp.linalg.inv(lower[::-1, ::-1])).astype(np.float32)


def prune_matrix(w: np.ndarray, factor: np.ndarray, n_zeros: int, pattern: tuple | None = None) -> None:
    """Changes w (rows, cols) float32 in place; n_zeros of its weights become 0.

    Each block of columns gets its share of n_zeros, taken from all rows together. Weights that are zero already stay
    so: they count, and where a block has more of them than its share, all stay. pattern (n, m): n of every m columns
    of a row stay instead; n_zeros is then not looked at.
    """
    xp = arrays.of(w)
    rows, cols = w.shape
    m = 1 if pattern is None else pattern[1]
    block_cols = max(1, BLOCK_COLS // m) * m
    zero = (w == 0).T
    for begin in range(0, cols, block_cols):
        end = min(begin + block_cols, cols)
        u = factor[begin:end, begin:end]
        n = n_zeros * end // cols - n_zeros * begin // cols
        # transposed, so that a column is contiguous
        block = xp.ascontiguousarray(w[:, begin:end].T)
        errors = xp.empty_like(block)
        mask = choose(block, u, zero[begin:end], n) if pattern is None else zero[begin:end].copy()
        for j in range(end - begin):
            if pattern is not None and j % m == 0:
                group = slice(j, j + m)
                now = block[group] - u[:j, group].T @ errors[:j]
                mask[group] |= choose_in_groups(now, u[group, group], zero[begin:end][group], pattern)
            # what the columns before it did to this one
            column = block[j] - u[:j, j] @ errors[:j]
            errors[j] = xp.where(mask[j], column, 0) / u[j, j]
            block[j] = xp.where(mask[j], 0, column)
        w[:, begin:end] = block.T
        if end < cols:
            w[:, end:] -= errors.T @ factor[begin:end, end:]


def choose(block: np.ndarray, u: np.ndarray, zero: np.ndarray, n: int) -> np.ndarray:
    """Mask of the n weights of a block (cols, rows) that cost least, among them as many as possible that are zero."""
    costs = costs_of(block, u, zero)
    return arrays.of(block).asarray(masks.lowest_per_row(costs.reshape(1, -1), n).reshape(block.shape)) | zero


def choose_in_groups(group: np.ndarray, u: np.ndarray, zero: np.ndarray, pattern: tuple) -> np.ndarray:
    """Like choose, for m columns: n of them stay in each row."""
    costs = costs_of(group, u, zero)
    return arrays.of(group).asarray(masks.lowest_in_groups(np.ascontiguousarray(costs.T), *pattern).T)


def costs_of(block: np.ndarray, u: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """On the host, where ties are resolved in one way."""
    xp = arrays.of(block)
    costs = xp.square(block / u.diagonal()[:, None])
    costs[zero] = 0
    return arrays.to_host(costs)


def energy(w: np.ndarray, hessian: np.ndarray) -> float:
    """||W X||^2 of inputs X with X X^T = hessian; of a difference of weights, the error that it makes."""
    return float(((w @ hessian).astype(np.float64) * w).sum())
