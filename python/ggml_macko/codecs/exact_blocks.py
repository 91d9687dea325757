"""Finds the blocks of quantized values from which a dense tensor was made, for example by `macko prune --quant-values`.

A dense value is d * q, rounded to the dense type (FORMAT.md section 7). The largest value of a block is d times one of
the type's numbers, so d has few candidates, and each other q is the number nearest to value / d. All numbers are tried,
and a result is compared bit for bit.
"""

from __future__ import annotations

import numpy as np

from ..values import TYPE_BF16, TYPE_F16, TYPE_F32, Array, from_float, to_float
from . import ggml_quants
from .value_types import BLOCK, TYPE_Q4_NL, nearest_numbers, numbers, pack_blocks, pack_nibbles

_PROBED = 32  # blocks to try first; if one is not exact, the search ends
_PIECE = 1 << 13  # blocks that a thread takes at a time
_STEPS = {TYPE_F16: 2, TYPE_BF16: 9, TYPE_F32: 1}
"""Largest distance, in F16 numbers, between a scale and value / q: the value and the quotient are rounded."""


def find(values: Array, type_id: int, value_type: int, n_threads: int = 0) -> Array | None:
    """The bytes of blocks of type value_type whose dense values are exactly these bit patterns (n,) of type type_id, or
    None. n is a multiple of 32; zeros are padding. If several scales give the same dense values, any of them is used.
    """
    blocks = values.reshape(-1, BLOCK)
    if not _may_be_exact(blocks[:1], type_id, value_type) or _find(blocks[:_PROBED], type_id, value_type) is None:
        return None
    pieces = [blocks[i : i + _PIECE] for i in range(0, len(blocks), _PIECE)]
    found = ggml_quants.in_threads(lambda piece: _find(piece, type_id, value_type), pieces, n_threads)
    complete = [f for f in found if f is not None]
    return np.concatenate(complete).reshape(-1) if len(complete) == len(found) else None


def _find(blocks: Array, type_id: int, value_type: int) -> Array | None:
    """Blocks (blocks, bytes) as uint8 for bit patterns (blocks, BLOCK), or None."""
    x = to_float(blocks, type_id).astype(np.float64)
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    nearest = nearest_numbers(value_type)
    scales, q = np.zeros((len(x), 1), dtype=np.float16), np.zeros(x.shape, dtype=np.int8)
    left = np.flatnonzero(largest[:, 0])
    for number, table in _tried(value_type):
        with np.errstate(over="ignore"):
            near = (largest[left] / number).astype(np.float16).view(np.uint16)
        for step in sorted(range(-_STEPS[type_id], _STEPS[type_id] + 1), key=abs):
            scale = (near + np.uint16(step % (1 << 16))).view(np.float16)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                place = np.floor(x[left] / scale.astype(np.float64) * 2) + 256
                found = nearest[table, np.nan_to_num(np.clip(place, 0, 511)).astype(np.int64)]
                found[x[left] == 0] = 0
                is_exact = _are_exact(blocks[left], scale, found, type_id)
            if value_type == TYPE_Q4_NL:
                is_exact &= scale.view(np.uint16)[:, 0] & 1 == table
            scales[left[is_exact]], q[left[is_exact]] = scale[is_exact], found[is_exact]
            left, near = left[~is_exact], near[~is_exact]
            if not len(left):
                return _packed(scales, q, value_type)
    return None if len(left) else _packed(scales, q, value_type)


def _may_be_exact(block: Array, type_id: int, value_type: int) -> bool:
    """Whether any scale gives exactly these bit patterns (1, BLOCK). Tries all scales at once: where weights were not
    quantized before, nothing else of the search runs.
    """
    x = to_float(block, type_id).astype(np.float64)
    largest = x[0, np.abs(x).argmax()]
    number, table = (np.array(column) for column in zip(*_tried(value_type)))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        near = (largest / number).astype(np.float16).view(np.uint16)
        steps = np.arange(-_STEPS[type_id], _STEPS[type_id] + 1).astype(np.uint16)
        scale = (near[:, None] + steps).reshape(-1, 1).view(np.float16)
        place = np.floor(x / scale.astype(np.float64) * 2) + 256
        q = nearest_numbers(value_type)[
            np.repeat(table, len(steps))[:, None], np.nan_to_num(np.clip(place, 0, 511)).astype(np.int64)
        ]
        q[:, x[0] == 0] = 0
        return bool(_are_exact(block, scale, q, type_id).any())


def _tried(value_type: int) -> list[tuple[int, int]]:
    """(number, table) pairs for the largest value of a block, the largest number first."""
    all_of_them = [(int(q), table) for table, row in enumerate(numbers(value_type)) for q in row]
    return sorted(all_of_them, key=lambda found: (-abs(found[0]), found))


def _are_exact(bits: Array, scale: Array, q: Array, type_id: int) -> Array:
    """A mask (blocks,) of the blocks for which the scales (blocks, 1) times q are these bit patterns."""
    is_finite = np.isfinite(scale)
    product = np.where(is_finite, scale, 0).astype(np.float32) * q
    found: Array = is_finite[:, 0] & np.all((from_float(product, type_id) == bits) | (q == 0), axis=1)
    return found


def _packed(scales: Array, q: Array, value_type: int) -> Array:
    if value_type != TYPE_Q4_NL:
        return pack_blocks(scales, q, value_type)
    number = np.empty(q.shape, dtype=np.uint8)
    for table, levels in enumerate(numbers(value_type)):
        mine = scales.view(np.uint16)[:, 0] & 1 == table
        number[mine] = np.where(q[mine] == 0, 0, np.searchsorted(levels, q[mine]))
    return pack_nibbles(scales, [], number)
