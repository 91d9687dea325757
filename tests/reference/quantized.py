"""Codes of 3, 4, 5 or 8 bits, with scales for windows of columns (FORMAT.md section 9)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ggml_macko.native.codec import EncodedMatrix
from ggml_macko.values import SIGNIFICAND_BITS, TYPE_BF16, TYPE_F16, TYPE_I8, TYPE_I32, Array, from_float, to_float

TYPES = {3: 1013, 4: 1014, 5: 1015, 8: 1018}  # value type of codes with so many bits
ARRAYS = ("codes", "bitmap", "scales", "factors", "row_ptr", "levels")  # the order of the components in a file
GROUP = 8  # codes


@dataclass(frozen=True)
class QuantizedMatrix:
    """The arrays of one matrix, exactly as in a file."""

    rows: int
    cols: int
    type: int  # of the dense matrix
    value_type: int
    nnz: int
    codes: Array  # uint8
    bitmap: Array  # uint8
    scales: Array  # uint8
    factors: Array  # uint16, BF16
    row_ptr: Array  # int32, rows + 1
    levels: Array  # uint8, to be read as int8

    @property
    def bits(self) -> int:
        return len(self.levels).bit_length() - 1

    @property
    def window(self) -> int:
        per_row = len(self.scales) // self.rows
        return next(w for w in (32, 64, 128, 256, 512) if -(-self.cols // w) == per_row)

    def encoded(self) -> EncodedMatrix:
        return EncodedMatrix(
            format="quantized",
            rows=self.rows,
            cols=self.cols,
            type=self.type,
            value_type=self.value_type,
            index_bits=0,
            nnz=self.nnz,
            arrays=tuple(getattr(self, name) for name in ARRAYS),
            types=(TYPE_I8, TYPE_I8, TYPE_I8, TYPE_BF16, TYPE_I32, TYPE_I8),
        )

    @classmethod
    def from_encoded(cls, m: EncodedMatrix) -> QuantizedMatrix:
        return cls(m.rows, m.cols, m.type, m.value_type, m.nnz, *m.arrays)


def scale_of(codes: Array) -> Array:
    """The scales of uint8 scale codes, float64."""
    m, e, s = codes & 15, codes >> 4 & 7, codes >> 7
    return np.where(s, -1.0, 1.0) * (1 + m / 16) * 2.0 ** (e.astype(np.int64) - 7)


def window_scales(m: QuantizedMatrix) -> Array:
    """The scale of each element, float64 (rows, cols)."""
    scales = scale_of(m.scales).reshape(m.rows, -1) * to_float(m.factors, TYPE_BF16).astype(np.float64)[:, None]
    return np.repeat(scales, m.window, axis=1)[:, : m.cols]


def places(m: QuantizedMatrix) -> Array:
    """A mask (rows, cols) of the non-zeros."""
    nbytes = -(-m.cols // 8)
    bits = np.unpackbits(m.bitmap[: m.rows * nbytes].reshape(m.rows, nbytes), axis=1, bitorder="little")
    return bits[:, : m.cols].astype(bool)


def code_numbers(m: QuantizedMatrix) -> Array:
    """The codes of all non-zeros, row after row."""
    n = int(m.row_ptr[-1]) * GROUP
    bits = np.unpackbits(m.codes, bitorder="little")[: n * m.bits].reshape(n, m.bits)
    numbers = (bits << np.arange(m.bits, dtype=np.uint16)).sum(axis=1)
    counts = places(m).sum(axis=1)
    return np.concatenate(
        [numbers[:0], *(numbers[GROUP * first : GROUP * first + k] for first, k in zip(m.row_ptr, counts))]
    )


def values(m: QuantizedMatrix) -> Array:
    """The products of scales and levels, which kernels multiply, float64 (rows, cols)."""
    kept = places(m)
    found = np.zeros(kept.shape)
    found[kept] = window_scales(m)[kept] * m.levels.view(np.int8)[code_numbers(m)]
    return found


def decode(m: QuantizedMatrix) -> Array:
    """Bit patterns (rows, cols)."""
    return from_float(values(m).astype(np.float32) + np.float32(0), m.type)  # no -0.0


def encode(dense: Array, lattice: QuantizedMatrix) -> QuantizedMatrix:
    """Bit patterns (rows, cols) with the levels, scales and factors of another matrix, whose windows all have one."""
    bits, levels = lattice.bits, lattice.levels.view(np.int8)
    half = len(levels) // 2
    kept = dense != 0
    number = nearest_numbers(dense, lattice)[kept]
    counts = kept.sum(axis=1)
    row_ptr = np.concatenate([[0], np.cumsum(-(-counts // GROUP))]).astype(np.int32)
    codes = np.zeros(int(row_ptr[-1]) * GROUP, dtype=np.int64)
    ranks = np.concatenate([GROUP * first + np.arange(n) for first, n in zip(row_ptr, counts)]).astype(np.int64)
    codes[ranks] = (number + half) % (2 * half)
    packed = np.packbits((codes[:, None] >> np.arange(bits) & 1).astype(np.uint8), bitorder="little")
    bitmap = np.packbits(kept, axis=1, bitorder="little").reshape(-1)
    in_windows = np.pad(kept, ((0, 0), (0, -lattice.cols % lattice.window))).reshape(-1, lattice.window)
    return QuantizedMatrix(
        rows=lattice.rows,
        cols=lattice.cols,
        type=lattice.type,
        value_type=lattice.value_type,
        nnz=int(counts.sum()),
        codes=padded(packed) if len(packed) else np.zeros(4, np.uint8),
        bitmap=padded(bitmap),
        scales=np.where(in_windows.any(axis=1), lattice.scales, 0).astype(np.uint8),
        factors=np.where(counts > 0, lattice.factors, 0).astype(np.uint16),
        row_ptr=row_ptr,
        levels=lattice.levels,
    )


def padded(data: Array) -> Array:
    return np.pad(data, (0, -len(data) % 4))


def nearest_numbers(dense: Array, m: QuantizedMatrix) -> Array:
    """Numbers (rows, cols) of the nearest levels, counted from the most negative one; rounded as the C code does."""
    x = to_float(dense, m.type).astype(np.float64)
    in_windows = np.pad(np.abs(x), ((0, 0), (0, -m.cols % m.window))).reshape(m.rows, -1, m.window)
    largest = np.repeat(in_windows.max(axis=2), m.window, axis=1)[:, : m.cols]
    largest[largest == 0] = 1
    factors = to_float(m.factors, TYPE_BF16).astype(np.float64)[:, None]
    codes = np.repeat(scale_of(m.scales).reshape(m.rows, -1), m.window, axis=1)[:, : m.cols]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = (1 / (codes * (factors / largest))).astype(np.float32)
        y = (x * (1 / largest)).astype(np.float32) * inverse
    if m.bits == 8:
        return np.rint(np.clip(np.nan_to_num(y), -127, 127)).astype(np.int64) + 128
    ascending = np.sort(m.levels.view(np.int8)).astype(np.float32)
    return np.searchsorted((ascending[1:] + ascending[:-1]) / 2, y, side="right")


def error_bound(m: QuantizedMatrix, source: Array) -> Array:
    """The maximum distance (rows, cols) of each decoded non-zero from `source`, its bit pattern before quantization.

    It is the distance to the nearest product of scale and level, plus the rounding of the product to the dense type. A
    value beyond twice the largest level cannot belong to its scale.
    """
    x, d = to_float(source, m.type).astype(np.float64), window_scales(m)
    levels = m.levels.view(np.int8).astype(np.float64)
    nearest = np.min([np.abs(x - d * level) for level in levels[levels > -128]], axis=0)
    rounding = (np.abs(x) + nearest) * 2.0 ** -SIGNIFICAND_BITS[m.type] + (2.0**-24 if m.type == TYPE_F16 else 0)
    return rounding + np.where(np.abs(x) <= 2 * 127 * np.abs(d), nearest + 1e-4 * np.abs(d), 0)
