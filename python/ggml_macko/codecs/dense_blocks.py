"""The blocks of dense types of ggml that training can use: their numbers and scales, and the packing of both.

The value of a weight is factor * multiple * number, minus smallest_factor * smallest_multiple where the type has
smallest values. Factors are F16 numbers of a block, multiples are integers of a part of it, and all products are exact
in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import errors
from ..values import Array


class Layout(NamedTuple):
    """A type."""

    type: int  # ggml type id
    block: int  # values of a block
    part: int  # values of a part
    numbers: tuple[int, int]  # lowest and highest
    multiples: tuple[int, int]  # of the factor of a scale
    has_smallest: bool  # a part has a smallest value


LAYOUTS = {
    "q4_0": Layout(2, 32, 32, (-8, 7), (1, 1), False),
    "q4_k": Layout(12, 256, 32, (0, 15), (0, 63), True),
    "q3_k": Layout(11, 256, 16, (-4, 3), (-32, 31), False),
    "q2_k": Layout(10, 256, 16, (0, 3), (0, 15), True),
}

NAMES = tuple(f"dense-{name}" for name in LAYOUTS)
"""The names of the types as values of `macko recover`."""

FALLBACK = "q4_0"
"""Replaces a type whose blocks do not fit into rows."""


def layout_of(name: str, tensor: str, cols: int) -> Layout:
    """The layout of a matrix with so many columns. name: one of NAMES. Raises MackoError if no block fits."""
    for found in (LAYOUTS[name.partition("-")[2]], LAYOUTS[FALLBACK]):
        if cols % found.block == 0:
            return found
    raise errors.error(errors.LIMIT, f"{tensor}: {cols} columns are no multiple of {LAYOUTS[FALLBACK].block}")


def pack(layout: Layout, numbers: Array, factors: Array, multiples: Array) -> Array:
    """The bytes of blocks: uint8 (blocks, bytes).

    numbers: int8 (blocks, values of a block). factors: float16 (blocks, 1), or (blocks, 2) with those of smallest
    values. multiples: int32 (blocks, parts of a block, as many).
    """
    halves = np.ascontiguousarray(factors).view(np.uint8).reshape(len(factors), -1)
    u = (numbers - layout.numbers[0]).astype(np.uint8)
    if layout == LAYOUTS["q4_0"]:
        return np.concatenate([halves, u[:, :16] | u[:, 16:] << 4], axis=1)
    scales = (multiples - layout.multiples[0]).astype(np.uint8)
    if layout == LAYOUTS["q4_k"]:
        low, high = (u.reshape(-1, 4, 2, 32)[:, :, i].reshape(len(u), -1) for i in (0, 1))
        return np.concatenate([halves, _pack_q4_k_scales(scales), low | high << 4], axis=1)
    if layout == LAYOUTS["q2_k"]:
        return np.concatenate([scales[:, :, 0] | scales[:, :, 1] << 4, _pack_2_bits(u), halves], axis=1)
    third = np.packbits(u.reshape(-1, 8, 32) >> 2, axis=1, bitorder="little").reshape(len(u), -1)
    return np.concatenate([third, _pack_2_bits(u & 3), _pack_q3_k_scales(scales[:, :, 0]), halves], axis=1)


def _pack_2_bits(u: Array) -> Array:
    """Two bits of each of 256 values: a byte has those of four that are 32 apart."""
    found = u.reshape(-1, 2, 4, 32)
    packed: Array = found[:, :, 0] | found[:, :, 1] << 2 | found[:, :, 2] << 4 | found[:, :, 3] << 6
    return packed.reshape(len(u), -1)


def _pack_q4_k_scales(scales: Array) -> Array:
    """8 scales and 8 smallest values, 6 bits each: the first four with the upper bits of the last four."""
    first, last = scales[:, :4], scales[:, 4:]
    return np.concatenate(
        [*(first[:, :, i] | last[:, :, i] >> 4 << 6 for i in (0, 1)), last[:, :, 0] & 15 | last[:, :, 1] << 4], axis=1
    )


def _pack_q3_k_scales(scales: Array) -> Array:
    """16 scales of 6 bits: their lower four bits, then the upper two."""
    upper = scales.reshape(-1, 4, 4) >> 4
    return np.concatenate(
        [scales[:, :8] & 15 | scales[:, 8:] << 4, upper[:, 0] | upper[:, 1] << 2 | upper[:, 2] << 4 | upper[:, 3] << 6],
        axis=1,
    )
