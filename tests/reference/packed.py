"""Packed: non-zeros without fillers, plain, coded or quantized (FORMAT.md section 7)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ggml_macko import errors
from ggml_macko.codecs.packed import FILE_TYPES, TYPE_CODED, n_values
from ggml_macko.codecs.value_types import (
    BLOCK,
    BLOCK_NBYTES,
    LEVELS,
    Q_RANGE,
    QUANT_NAMES,
    TYPE_Q4_NL,
    TYPE_Q5_0,
    TYPE_Q8_0,
    pack_blocks,
    pack_nibbles,
)
from ggml_macko.native.codec import EncodedMatrix
from ggml_macko.values import SIGNIFICAND_BITS, TYPE_I8, TYPE_I32, Array, bits_dtype, from_float, to_float
from reference import coded

BITMAP = 0  # index_bits; otherwise the bits of a gap code
INDEX_BITS = (BITMAP, 2, 4, 8)
ARRAYS = ("values", "index", "row_ptr")  # the order of the components in a file


@dataclass(frozen=True)
class PackedMatrix:
    """The arrays of one matrix, exactly as in a file."""

    rows: int
    cols: int
    type: int  # of the dense matrix
    value_type: int  # the same, TYPE_CODED, or one of QUANT_NAMES
    index_bits: int
    nnz: int
    values: Array  # bit patterns; words (int32) if coded, bytes (uint8) if quantized
    index: Array  # uint8
    row_ptr: Array  # int32, rows + 1

    @property
    def n_values(self) -> int:
        return n_values(self.nnz)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.index.nbytes + self.row_ptr.nbytes

    def encoded(self) -> EncodedMatrix:
        return EncodedMatrix(
            format="packed",
            rows=self.rows,
            cols=self.cols,
            type=self.type,
            value_type=self.value_type,
            index_bits=self.index_bits,
            nnz=self.nnz,
            arrays=(self.values, self.index, self.row_ptr),
            types=(FILE_TYPES.get(self.value_type, self.value_type), TYPE_I8, TYPE_I32),
        )

    @classmethod
    def from_encoded(cls, m: EncodedMatrix) -> PackedMatrix:
        return cls(m.rows, m.cols, m.type, m.value_type, m.index_bits, m.nnz, *m.arrays)


# ---- quantizing ----


def round_to_blocks(values: Array, value_type: int) -> Array:
    """Blocks as uint8 (blocks, bytes) of float32 values that fill whole blocks; rounded like ggml's reference."""
    x = values.reshape(-1, BLOCK)
    extreme = np.take_along_axis(x, np.argmax(np.abs(x), axis=1)[:, None], axis=1)
    low = Q_RANGE[value_type][0]
    d = np.abs(extreme) / np.float32(127) if value_type == TYPE_Q8_0 else extreme / np.float32(low)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
        scale = d.astype(np.float16)
    inverse[~np.isfinite(inverse)] = 0
    if not np.all(np.isfinite(scale)):
        raise errors.error(errors.NOT_FINITE, "values are too large for a scale in F16")
    scaled = x * inverse
    if value_type == TYPE_Q8_0:
        whole = np.floor(np.abs(scaled))
        q = np.copysign(whole + (np.abs(scaled) - whole >= 0.5), scaled).astype(np.int8)  # ties away from 0
    else:
        q = np.minimum(-2 * low - 1, (scaled + np.float32(0.5 - low)).astype(np.uint8)).astype(np.int8) + np.int8(low)
    return pack_blocks(scale, q, value_type)


_MIDDLES = (LEVELS[:, 1:].astype(np.float64) + LEVELS[:, :-1]) / 2  # borders between levels of Q4_NL: halves
_NEAREST = np.array([np.searchsorted(m, np.arange(-256, 256) / 2, side="right") for m in _MIDDLES])


def _nearest_levels(x: Array, d: Array, table: int | Array) -> Array:
    """Numbers of the levels of Q4_NL nearest to x / d, (blocks, BLOCK); d: float32 (blocks, 1)."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    inverse[~np.isfinite(inverse)] = 0
    found: Array = _NEAREST[table, (np.clip(x * inverse, -128, np.float32(127.5)) * 2 + 256).astype(np.int64)]
    return found


def _scale_with_table(d: Array, table: Array) -> Array:
    """uint16: the F16 nearest to d whose lowest bit is the table."""
    with np.errstate(over="ignore"):
        h = d.astype(np.float16).view(np.uint16)
    if np.any(h & 0x7FFF == 0x7C00):
        raise errors.error(errors.NOT_FINITE, "values are too large for a scale in F16")
    below, above = h - np.uint16(1), h + np.uint16(1)  # by magnitude
    has_below, has_above = h & 0x7FFF != 0, above & 0x7FFF != 0x7C00
    with np.errstate(invalid="ignore"):
        nearer = np.abs(below.view(np.float16) - d) <= np.abs(
            above.view(np.float16) - d
        )  # in float32, like the C library
    return np.where(h & 1 == table, h, np.where(has_below & (~has_above | nearer), below, above))


# Scales tried for Q4_NL, with both tables and both signs: the largest magnitude becomes this share of the outermost
# level. The best for each table is replaced twice by the best scale for the levels that follow from it.
_TRIED = (0.78, 0.84, 0.9, 0.95, 1, 1.05, 1.1, 1.16)


def _best_scale(x: Array, w: Array, table: int, d: Array) -> tuple[Array, Array]:
    """The best (scale, gain) of each block for the levels of any scale in d (blocks, scales)."""
    wxq, wqq = np.zeros((2, *d.shape))
    for value, weight in zip(x.T[:, :, None], w.T[:, :, None]):  # the C library adds in this order
        q = LEVELS[table][_nearest_levels(value, d, table)].astype(np.float64)
        wxq, wqq = wxq + weight * value * q, wqq + weight * (q * q)
    ratio = wxq / wqq
    gain = np.maximum(np.nan_to_num(wxq * ratio), 0)
    at = gain.argmax(axis=1)[:, None]
    gain = np.take_along_axis(gain, at, axis=1)
    return np.where(gain > 0, np.take_along_axis(ratio, at, axis=1), 0).astype(np.float32), gain


def quantize_levels(values: Array, weights: Array | None = None) -> Array:
    """Blocks as uint8 (blocks, bytes) of float32 values in Q4_NL; weights: factors of the squared errors."""
    n = len(values)
    x, w = np.zeros((2, n_values(n)), dtype=np.float32)
    x[:n], w[:n] = values, 1 if weights is None else weights
    x, w = x.reshape(-1, BLOCK), w.reshape(-1, BLOCK).astype(np.float64)
    largest = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    best, gain, table = np.zeros_like(largest), np.zeros(largest.shape), np.zeros(largest.shape, dtype=np.int64)
    with np.errstate(all="ignore"):
        for t in (0, 1):
            d = np.concatenate([sign * largest * np.array(_TRIED, np.float32) for sign in np.float32([1, -1])], axis=1)
            for _ in range(3):
                d, found = _best_scale(x, w, t, d)
                better = found > gain
                best, gain, table = np.where(better, d, best), np.maximum(found, gain), np.where(better, t, table)
    scale = _scale_with_table(best, table).view(np.float16)
    number = _nearest_levels(x, scale.astype(np.float32), table).reshape(-1)
    number[n:] = 0
    return pack_nibbles(scale, [], number.reshape(-1, BLOCK).astype(np.uint8))


def dequantize(values: Array, value_type: int) -> tuple[Array, Array]:
    """(d, q) of each value as float32 and int."""
    blocks = values.reshape(-1, BLOCK_NBYTES[value_type])
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if value_type == TYPE_Q8_0:
        q = blocks[:, 2:].view(np.int8).astype(np.int64)
    else:
        q = np.concatenate([blocks[:, -16:] & 15, blocks[:, -16:] >> 4], axis=1).astype(np.int64)
        if value_type == TYPE_Q5_0:
            q += 16 * np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little").astype(np.int64)
        q = LEVELS[blocks[:, :1] & 1, q].astype(np.int64) if value_type == TYPE_Q4_NL else q + Q_RANGE[value_type][0]
    return np.broadcast_to(d, q.shape).reshape(-1), q.reshape(-1)


# ---- the matrix ----


def _align4(n: int) -> int:
    return max(4, (n + 3) // 4 * 4)


def _pad(data: Array, nbytes: int) -> Array:
    out = np.zeros(nbytes, dtype=np.uint8)
    out[: len(data)] = data
    return out


def _gap_codes(row: Array, col: Array, bits: int) -> Array:
    escape = (1 << bits) - 1
    first = np.ones(len(row), dtype=bool)
    first[1:] = row[1:] != row[:-1]
    gap = col - np.where(first, -1, np.concatenate([[-1], col[:-1]])) - 1
    codes = np.full(int(np.sum(gap // escape + 1)), escape, dtype=np.uint8)
    codes[np.cumsum(gap // escape + 1) - 1] = gap % escape
    return codes


def encode(
    dense: Array,
    type_id: int,
    value_type: int,
    index_bits: int,
    mantissa_bits: int | None = None,
    exponent_bits: int | None = None,
) -> PackedMatrix:
    """dense: bit patterns (rows, cols), finite. The last two arguments are for coded values; None: the fewest bytes."""
    rows, cols = dense.shape
    row, col = np.nonzero(dense)
    if index_bits == BITMAP:
        bits = np.packbits(dense != 0, axis=1, bitorder="little").reshape(-1)
    else:
        codes = _gap_codes(row, col, index_bits)
        each = (codes[:, None] >> np.arange(index_bits, dtype=np.uint8)) & 1
        bits = np.packbits(each.astype(np.uint8).reshape(-1), bitorder="little")
    values = np.zeros(n_values(len(row)), dtype=bits_dtype(type_id))
    values[: len(row)] = dense[row, col]
    if value_type == TYPE_CODED:
        values = coded.encode(values[: len(row)], type_id, mantissa_bits, exponent_bits)
    elif value_type == TYPE_Q4_NL:
        values = quantize_levels(to_float(values[: len(row)], type_id)).reshape(-1)
    elif value_type in QUANT_NAMES:
        values = round_to_blocks(to_float(values, type_id), value_type).reshape(-1)
    row_ptr = np.zeros(rows + 1, dtype=np.int32)
    row_ptr[1:] = np.cumsum(np.bincount(row, minlength=rows))
    return PackedMatrix(
        rows, cols, type_id, value_type, index_bits, len(row), values, _pad(bits, _align4(len(bits))), row_ptr
    )


def places(m: PackedMatrix) -> tuple[Array, Array]:
    """(row, column) of each non-zero of a matrix that the C library accepts."""
    bits = np.unpackbits(m.index, bitorder="little")
    if m.index_bits == BITMAP:
        stride = (m.cols + 7) // 8 * 8
        rows, cols = np.nonzero(bits[: m.rows * stride].reshape(m.rows, stride))
        return rows, cols
    codes = bits[: len(bits) // m.index_bits * m.index_bits].reshape(-1, m.index_bits).astype(np.int64)
    codes = codes @ (1 << np.arange(m.index_bits))
    escape = (1 << m.index_bits) - 1
    ends = np.flatnonzero(codes != escape)[: m.nnz]  # the codes of non-zeros
    column = np.cumsum(np.where(codes == escape, escape, codes + 1))[ends]
    row = np.repeat(np.arange(m.rows), np.diff(m.row_ptr))
    before = np.concatenate([[0], column])[m.row_ptr[:-1]]  # at the start of the row
    return row, column - before[row] - 1


def decode(m: PackedMatrix) -> Array:
    """The dense bit patterns (rows, cols) of a matrix that the C library accepts."""
    dense = np.zeros((m.rows, m.cols), dtype=bits_dtype(m.type))
    if m.value_type in QUANT_NAMES:
        d, q = (x[: m.nnz] for x in dequantize(m.values, m.value_type))
        product = d * q.astype(np.float32)
        values = np.where(product == 0, 0, from_float(product, m.type)).astype(dense.dtype)
    elif m.value_type == TYPE_CODED:
        values = coded.decode(m.values, m.type, m.nnz)
    else:
        values = m.values[: m.nnz]
    dense[places(m)] = values
    return dense


def nearest_q(values: Array, d: Array, value_type: int) -> Array:
    """The q of a ggml type whose d * q is nearest to each value; 0 if d is 0."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        q = np.clip(np.rint(values / d), *Q_RANGE[value_type])
    return np.where(d == 0, 0, q).astype(np.int8)


def _ratio(values: Array, d: Array) -> Array:
    """values / d; 0 if d is 0."""
    return np.divide(values, d, out=np.zeros_like(values), where=d != 0)


def error_bound(m: PackedMatrix, source: Array) -> Array:
    """The maximum distance of each non-zero's dense value from `source`, the values (float32) before quantization.

    It is the distance to the nearest d * q, plus the rounding of the scale to F16 and of the product to the dense type.
    A value of more than twice the largest |q| cannot belong to this scale: searched scales cut off less than half.
    """
    d, q = (x[: m.nnz] for x in dequantize(m.values, m.value_type))
    d, source = d.astype(np.float64), source.astype(np.float64)
    most = 2 - Q_RANGE[m.value_type][0]
    scale_error = 2 * most * (np.abs(d) * 2.0**-11 + 2.0**-25)  # twice, because it may change a q close to a tie
    if m.value_type == TYPE_Q4_NL:
        table = np.repeat(m.values.reshape(-1, BLOCK_NBYTES[TYPE_Q4_NL])[:, 0] & 1, BLOCK)[: m.nnz]
        best = np.where(
            table, *(t[np.searchsorted(mid, _ratio(source, d))] for t, mid in zip(LEVELS[::-1], _MIDDLES[::-1]))
        )
    else:
        best = nearest_q(source, d, m.value_type)
    nearest = np.abs(source - d * best) + 1e-4 * np.abs(d)
    digits = SIGNIFICAND_BITS[m.type]
    reached = np.abs(source) <= 2 * most * np.abs(d) + scale_error
    bound: Array = np.where(reached, nearest, 0) + scale_error + np.abs(q * d) * 2.0**-digits + 2.0**-24
    return bound
