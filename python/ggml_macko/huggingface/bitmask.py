"""Decodes weights that the compressed-tensors library stored sparse: `sparse-bitmask` and `sparse-24-bitmask`.

A weight NAME.weight is stored as a few tensors:

    NAME.shape        int64: its shape, in one dimension or as a column
    NAME.bitmask      uint8 (rows, ceil(cols / 8)): bit j % 8, the lowest first, of byte j // 8 is set where column j of
                      the row is stored
    NAME.compressed   the stored values, row by row
    NAME.row_offsets  int64 (rows,): number of values in the previous rows; sparse-24-bitmask has none

In sparse-24-bitmask, exactly two of every four neighbors are stored. Definitions: the classes BitmaskTensor and
Sparse24BitMaskTensor of compressed-tensors (src/compressed_tensors/compressors/sparse_compressors), which current
versions of the library no longer load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .. import errors
from ..values import Array

PARTS = ("shape", "bitmask", "compressed")
ROW_OFFSETS = "row_offsets"

DTYPES = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
"""Type of values that can be unpacked -> unsigned integer with the same bits."""


@dataclass(frozen=True)
class Packed:
    """The arrays of one weight."""

    name: str  # NAME, for messages
    shape: tuple[int, ...]
    dtype: str  # key of DTYPES
    bitmask: Array  # uint8, in one dimension
    values: Array  # bit patterns
    row_offsets: Array | None  # int64
    is_24: bool

    @property
    def cols(self) -> int:
        return self.shape[-1]

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


def unpack(p: Packed) -> Array:
    """Dense bit patterns (rows, cols). Raises MackoError (PayloadError) if the arrays contradict each other."""
    row_nbytes = -(-p.cols // 8)
    if len(p.bitmask) != p.rows * row_nbytes:
        raise _bad(
            p, f"a bitmask of {len(p.bitmask)} bytes for {p.rows} rows of {p.cols} columns ({p.rows * row_nbytes})"
        )
    bits = np.unpackbits(p.bitmask.reshape(p.rows, row_nbytes), axis=1, bitorder="little")
    if bits[:, p.cols :].any():
        raise _bad(p, f"row {int(bits[:, p.cols :].any(axis=1).argmax())}: its bitmask has bits behind the last column")
    mask = bits[:, : p.cols].astype(bool)
    counts = np.count_nonzero(mask, axis=1)
    n = int(counts.sum())
    if n != len(p.values):
        raise _bad(p, f"{len(p.values)} values for {n} bits of the bitmask")
    if p.row_offsets is not None:
        expected = np.cumsum(counts) - counts
        if len(p.row_offsets) != p.rows or not np.array_equal(p.row_offsets, expected):
            raise _bad(p, "its row_offsets are not the sums of its bitmask")
    if p.is_24:
        if p.cols % 4:
            raise _bad(p, f"{p.cols} columns are no multiple of 4, as sparse-24-bitmask needs")
        fours = np.count_nonzero(mask.reshape(p.rows, -1, 4), axis=2)
        if (fours != 2).any():
            row, group = np.argwhere(fours != 2)[0]
            raise _bad(p, f"row {row}, columns {4 * group} to {4 * group + 3}: {fours[row, group]} values, not 2")
    dense = np.zeros((p.rows, p.cols), dtype=DTYPES[p.dtype])
    dense[mask] = p.values
    return dense


def _bad(p: Packed, what: str) -> errors.MackoError:
    return errors.error(errors.BAD_COMPONENT, f"{p.name}: {what}")
