"""Quantizing weights: the non-zeros of a sparse matrix, or all of a dense one, with scales that libggml searches (of Q4_NL,
which it does not know, the C library); and what that costs.

How much the error of a weight counts is the mean square of the input that it meets (an imatrix), so that the error of
the product is what is kept small; without an imatrix all count alike.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .. import errors
from ..codecs import ggml_quants, packed
from ..gguf import imatrix
from ..gguf.files import Tensor
from ..native import bindings
from ..values import to_float

_PIECE = 1 << 16  # non-zeros that libggml takes as one row: its search compares values with their mean square
_LEAST_WEIGHT = 1e-4  # of the mean: a block whose inputs were all zero in the calibration text is no reason to lose it


def column_weights(file: imatrix.Imatrix | None, t: Tensor) -> np.ndarray | None:
    """float32 (matrices, cols), of mean 1 in each matrix, or None: no imatrix, or it has nothing of this tensor."""
    if file is None or t.name not in file.entries:
        return None
    found = file.of(t)
    mean = found.sums / np.maximum(found.counts, 1)[:, None]
    mean[found.counts == 0] = 1  # an expert that no token was routed to
    mean /= mean.mean(axis=1, keepdims=True)
    return np.maximum(mean, _LEAST_WEIGHT).astype(np.float32)


def _of_rows(weights: np.ndarray | None, rows: int, begin: int, end: int) -> np.ndarray:
    """(rows, cols) or a 1: weights of some rows of a matrix, or of matrices one below the other."""
    return np.float32(1) if weights is None else weights[np.arange(begin, end) * len(weights) // rows]


def _row_ranges(bits: np.ndarray) -> list:
    """Ranges of rows of some 16 M elements, to keep temporary memory small."""
    step = max(1, (1 << 24) // bits.shape[1])
    return [(at, min(at + step, len(bits))) for at in range(0, len(bits), step)]


def non_zeros(
    bits: np.ndarray, type_id: int, value_type: int, weights: np.ndarray | None, n_threads: int = 0
) -> packed.PackedMatrix:
    """The packed matrix of dense bit patterns (rows, cols). Raises MackoError if a value is not finite or too large for a
    scale in F16, or if there are too many.
    """
    if value_type == packed.TYPE_Q8_0:  # nothing to search
        return bindings.packed_encode(bits, type_id, value_type, n_threads=n_threads)
    m = bindings.packed_encode(bits, type_id, type_id, n_threads=n_threads)
    x = to_float(m.values, m.type)
    counts = np.ones(len(x), dtype=np.float32)
    if weights is not None:
        rows = [_of_rows(weights, len(bits), a, b)[bits[a:b] != 0] for a, b in _row_ranges(bits)]
        counts[: m.nnz] = np.concatenate(rows)
    if value_type == packed.TYPE_Q4_NL:
        values = bindings.quantize_q4_nl(x[: m.nnz], counts[: m.nnz], n_threads)
        return dataclasses.replace(m, value_type=value_type, values=values)
    n = len(x) // _PIECE * _PIECE
    pieces = [(x[:n].reshape(-1, _PIECE), counts[:n].reshape(-1, _PIECE)), (x[None, n:], counts[None, n:])]
    blocks = [ggml_quants.quantize(v, value_type, w, n_threads).reshape(-1) for v, w in pieces if v.size]
    scales = np.concatenate(blocks).reshape(-1, packed.BLOCK_NBYTES[value_type])[:, :2].copy().view(np.float16)
    if not np.all(np.isfinite(scales)):
        raise errors.error(errors.NOT_FINITE, "values are too large for a scale in F16")
    # the search leaves each q as it was before its last step changed the scale
    q = packed.nearest_q(x.reshape(-1, packed.BLOCK), scales.astype(np.float32), value_type)
    return dataclasses.replace(m, value_type=value_type, values=packed.pack_blocks(scales, q, value_type).reshape(-1))


def dense(bits: np.ndarray, t: Tensor, type_id: int, weights: np.ndarray | None, n_threads: int = 0) -> np.ndarray:
    """uint8, all of the dense tensor t (bit patterns (rows, cols)) in a ggml type."""
    values = to_float(bits, t.type)
    n_mat = 1 if weights is None else len(weights)
    parts = np.split(values, n_mat)
    return np.concatenate(
        [
            ggml_quants.quantize(p, type_id, None if weights is None else weights[i], n_threads)
            for i, p in enumerate(parts)
        ]
    ).reshape(-1)


def error_of(source: np.ndarray, decoded: np.ndarray, type_id: int, weights: np.ndarray | None) -> float:
    """Weighted sum of squared errors over that of the weights, both bit patterns (rows, cols) of type_id. With an
    imatrix: the expected squared error of a product over its square, inputs taken as uncorrelated.
    """
    lost = total = 0.0
    for a, b in _row_ranges(source):
        want, got = (to_float(x[a:b], type_id).astype(np.float64) for x in (source, decoded))
        w = _of_rows(weights, len(source), a, b)
        lost += float(np.sum(w * (got - want) ** 2))
        total += float(np.sum(w * want**2))
    return lost / total if total else 0.0
