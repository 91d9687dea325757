"""Fits the remaining weights to the values of a quantized type, so that they compensate for each other's errors.

A weight is a number of the type times the scale of a window of columns (FORMAT.md section 9). Pruning comes first, and
scales are computed for the remaining weights. Then each weight gets its best value while the others are fixed, column
by column, in several passes, as in QuantEase (Behdin et al., arXiv 2309.01885). Unlike SparseGPT and GPTQ, this method
never relies on changes of later weights that are zero. The module reads no files; its arrays may be on a GPU
(array_backend.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, NamedTuple

import numpy as np

from ..codecs.quantized import element_scales
from ..codecs.value_types import VALUE_NAMES, nearest_numbers
from ..native import codec as native_codec
from ..pruning import array_backend
from ..pruning.alps import Problem
from ..pruning.array_backend import Array
from ..values import TYPE_F32

VALUE_TYPES = {name: type_id for type_id, name in VALUE_NAMES.items()}
"""Name of a quantized type -> type id."""

PASSES = 3
"""Passes over all columns. Four passes reduce the error of quantization by 2 % compared with two."""

_BLOCK_COLS = 128


class Grid:
    """The numbers of a quantized type except 0, because remaining weights are not zero."""

    def __init__(self, name: str, xp: array_backend.ArrayModule = np) -> None:
        self.type = VALUE_TYPES[name]
        found = nearest_numbers(self.type)
        self.n_tables = len(found)
        self._nearest = xp.asarray(found.astype(np.float32))

    def nearest(self, x: Array, table: int) -> Array:
        """The nearest numbers to x, float32."""
        xp = array_backend.module_of(x)
        place = xp.floor(xp.clip(x, np.float32(-128), np.float32(127.5)) * 2).astype(np.int32) + 256
        return self._nearest[table][place]


class Lattice(NamedTuple):
    """The possible values of each remaining weight of a matrix."""

    scale: Array  # float32 (rows, cols), that of the weight's window
    table: int


def lattices(weights: Sequence[Array], importance: Sequence[Array], grid: Grid) -> list[Lattice]:
    """The lattices of the matrices of one tensor, with the standard levels of least error.

    weights: float32 (rows, cols). importance: float32 (cols,), weights of squared errors.
    """
    xp = array_backend.module_of(weights[0])
    stack = np.concatenate([array_backend.to_host(w) for w in weights]).astype(np.float32)
    bits, counts = stack.view(np.uint32), np.stack([array_backend.to_host(of) for of in importance])
    tried = []
    for table in range(grid.n_tables):
        levels = native_codec.standard_levels(grid.type, table)
        m = native_codec.encode_quantized(bits, TYPE_F32, grid.type, counts, levels=levels)
        tried.append((native_codec.measure_error(m, bits, counts).weighted_error, table, m))
    _, table, m = min(tried, key=lambda found: found[:2])
    scales = np.split(np.where(stack != 0, element_scales(m), 1).astype(np.float32), len(weights))
    return [Lattice(xp.asarray(s), table) for s in scales]


def nearest_weights(w: Array, lattice: Lattice, grid: Grid) -> Array:
    """The nearest value to each weight; zeros stay zero."""
    xp = array_backend.module_of(w)
    return xp.where(w != 0, lattice.scale * grid.nearest(w / lattice.scale, lattice.table), 0)


def fit(
    problem: Problem,
    w: Array,
    lattice: Lattice,
    grid: Grid,
    advance: Callable[[float], object] = lambda passes: None,
    n_passes: int = PASSES,
) -> Array:
    """Weights on a lattice, float32 (rows, cols), at which nearly no change of a single weight reduces the error. w:
    the start; its zeros stay zero. advance: called with 1 after each pass.
    """
    xp = array_backend.module_of(w)
    kept = w != 0
    w = nearest_weights(w, lattice, grid)
    step = 1 / problem.hessian.diagonal()
    for _ in range(n_passes):
        slope = w @ problem.hessian - problem.target  # half the gradient; finished columns are not updated
        for begin in range(0, w.shape[1], _BLOCK_COLS):
            cols = slice(begin, begin + _BLOCK_COLS)
            hessian = problem.hessian[cols, cols]
            block, slopes, scale, stays = (
                xp.ascontiguousarray(a[:, cols].T) for a in (w, slope, lattice.scale, kept)
            )  # transposed: a column of w is contiguous
            change = xp.zeros_like(block)
            for j in range(len(block)):
                wanted = block[j] - (slopes[j] + hessian[:j, j] @ change[:j]) * step[begin + j]
                new = xp.where(stays[j], scale[j] * grid.nearest(wanted / scale[j], lattice.table), 0)
                change[j] = new - block[j]
                block[j] = new
            w[:, cols] = block.T
            slope[:, begin + _BLOCK_COLS :] += change.T @ problem.hessian[cols, begin + _BLOCK_COLS :]
        advance(1)
    return w
