"""Fits the remaining weights to the values of a quantized type, so that they compensate for each other's errors.

A weight is a number of the type times a scale, which serves 32 consecutive non-zeros in the rows of a tensor (FORMAT.md
section 7), or a window of columns (section 9), so pruning comes first. Scales are computed for the given weights. Then
each weight gets its best value while the others are fixed, column by column, in several passes, as in QuantEase (Behdin
et al., arXiv 2309.01885). Unlike SparseGPT and GPTQ, this method never relies on changes of later weights that are
zero. The module reads no files; its arrays may be on a GPU (array_backend.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Callable, NamedTuple

import numpy as np

from ..codecs.quantized import element_scales
from ..codecs.value_types import BLOCK, QUANT_NAMES, VALUE_NAMES, nearest_numbers, numbers
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
_PIECE = 1 << 14  # blocks per step of the search for scales
_TRIED = (0.78, 0.88, 0.95, 1.0, 1.06, 1.14)  # tried positions of the largest weight, as shares of the outermost number


class Grid:
    """The numbers of a quantized type except 0, because remaining weights are not zero."""

    def __init__(self, name: str, xp: array_backend.ArrayModule = np) -> None:
        self.type = VALUE_TYPES[name]
        found = numbers(self.type)
        self.n_tables = len(found)  # one of two is selected by the lowest bit of a scale, or for a matrix
        self.largest = np.float32(np.abs(found.astype(np.int64)).max())
        self._nearest = xp.asarray(nearest_numbers(self.type).astype(np.float32)).reshape(-1)

    def nearest(self, x: Array, table: Array | int) -> Array:
        """The nearest numbers to x, float32. table: of each element, or of all."""
        xp = array_backend.module_of(x)
        place = xp.floor(xp.clip(x, np.float32(-128), np.float32(127.5)) * 2).astype(np.int32) + 256
        return self._nearest[place + 512 * table]


class Lattice(NamedTuple):
    """The possible values of each remaining weight of a matrix: arrays (rows, cols)."""

    scale: Array  # float32, that of the weight's block or window
    table: Array  # int32


def lattices(weights: Sequence[Array], importance: Sequence[Array], grid: Grid) -> list[Lattice]:
    """The lattices of the matrices of one tensor, whose blocks span matrices.

    weights: float32 (rows, cols). importance: float32 (cols,), weights of squared errors.
    """
    xp = array_backend.module_of(weights[0])
    if grid.type not in QUANT_NAMES:
        return window_lattices(weights, importance, grid)
    kept = [w != 0 for w in weights]
    values = xp.concatenate([w[k] for w, k in zip(weights, kept)])
    counts = xp.concatenate([xp.broadcast_to(of, k.shape)[k] for of, k in zip(importance, kept)])
    n = len(values)
    padding = xp.zeros(-n % BLOCK, dtype=np.float32)
    values, counts = (xp.concatenate([a, padding]).reshape(-1, BLOCK) for a in (values, counts))
    found = [search_scales(values[i : i + _PIECE], counts[i : i + _PIECE], grid) for i in range(0, len(values), _PIECE)]
    out, begin = [], 0
    for w, k in zip(weights, kept):
        end = begin + int(k.sum())
        lattice = Lattice(xp.ones(w.shape, dtype=np.float32), xp.zeros(w.shape, dtype=np.int32))
        for i, whole in enumerate(lattice):
            of_blocks = xp.concatenate([f[i] for f in found]) if found else values.reshape(-1)
            whole[k] = xp.repeat(of_blocks, BLOCK)[begin:end]
        out.append(lattice)
        begin = end
    return out


def window_lattices(weights: Sequence[Array], importance: Sequence[Array], grid: Grid) -> list[Lattice]:
    """lattices() of codes with scales for windows, with the standard levels of least error."""
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
    return [Lattice(xp.asarray(s), xp.full(s.shape, table, dtype=np.int32)) for s in scales]


def search_scales(x: Array, counts: Array, grid: Grid) -> Lattice:
    """Scales (blocks,), which are F16 numbers except 0, and tables for x, float32 (blocks, BLOCK), with nearly the
    least sum of counts * error^2. Zeros of x and counts are padding. Each tried scale is twice replaced by the best
    scale for its numbers.
    """
    xp = array_backend.module_of(x)
    largest = xp.abs(x).max(axis=1) / grid.largest
    weighted = counts * x
    best, gain, table = largest, xp.zeros_like(largest), xp.zeros(largest.shape, dtype=np.int32)
    for t, sign, tried in itertools.product(range(grid.n_tables), (1, -1), _TRIED):
        d = np.float32(sign * tried) * largest
        for _ in range(2):
            q = grid.nearest(x / xp.where(d == 0, 1, d)[:, None], t)
            product, power = (weighted * q).sum(axis=1), (counts * q * q).sum(axis=1)
            d = product / xp.where(power == 0, 1, power)
            better = product * d > gain
            best, gain = xp.where(better, d, best), xp.where(better, product * d, gain)
            table = xp.where(better, t, table)
    return Lattice(_as_scales(best, table if grid.n_tables > 1 else None), table)


def _as_scales(d: Array, last_bit: Array | None) -> Array:
    """The nearest F16 numbers except 0 with this last bit, as float32. The caller handles infinite numbers."""
    xp = array_backend.module_of(d)
    with np.errstate(over="ignore"):
        found = d.astype(np.float16).view(np.uint16)
    sign, magnitude = found & 0x8000, xp.maximum(found & 0x7FFF, 1)
    if last_bit is not None:
        beyond = xp.abs(d) > magnitude.view(np.float16).astype(np.float32)
        other = xp.where(beyond | (magnitude < 2), magnitude + 1, magnitude - 1)
        magnitude = xp.where((magnitude & 1) == last_bit, magnitude, other)
    return (sign | magnitude).astype(np.uint16).view(np.float16).astype(np.float32)


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
            block, slopes, scale, table, stays = (
                xp.ascontiguousarray(a[:, cols].T) for a in (w, slope, lattice.scale, lattice.table, kept)
            )  # transposed: a column of w is contiguous
            change = xp.zeros_like(block)
            for j in range(len(block)):
                wanted = block[j] - (slopes[j] + hessian[:j, j] @ change[:j]) * step[begin + j]
                new = xp.where(stays[j], scale[j] * grid.nearest(wanted / scale[j], table[j]), 0)
                change[j] = new - block[j]
                block[j] = new
            w[:, cols] = block.T
            slope[:, begin + _BLOCK_COLS :] += change.T @ problem.hessian[cols, begin + _BLOCK_COLS :]
        advance(1)
    return w
