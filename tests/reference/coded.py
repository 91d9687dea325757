"""Coded values: short exponents, short mantissas and outliers (FORMAT.md section 8)."""

from __future__ import annotations

import numpy as np

from ggml_macko.codecs import coded
from ggml_macko.codecs.coded import BLOCK, Widths
from ggml_macko.values import EXPONENT, SIGNIFICAND_BITS, TYPE_BF16, Array, bits_dtype, value_bits

MANTISSA_BITS, EXPONENT_BITS = (7, 10), (2, 3)


def widths_of_type(type_id: int) -> list[tuple[int, int]]:
    """(mantissa bits, exponent bits) of each coding of a dense type."""
    return [(m, e) for m in MANTISSA_BITS for e in EXPONENT_BITS if m == 7 or type_id != TYPE_BF16]


def _fields(values: Array, type_id: int) -> tuple[Array, Array, Array]:
    """(sign, exponent, mantissa) of bit patterns as int64."""
    stored = SIGNIFICAND_BITS[type_id] - 1
    v = values.astype(np.int64)
    return v >> (value_bits(type_id) - 1), (v & EXPONENT[type_id]) >> stored, v & ((1 << stored) - 1)


def _codes(values: Array, type_id: int, w: Widths) -> Array:
    """The code of each value; 0 for an outlier."""
    _, exponent, mantissa = _fields(values, type_id)
    dropped = SIGNIFICAND_BITS[type_id] - 1 - w.mantissa_bits
    code = exponent - w.base
    fits = (mantissa & ((1 << dropped) - 1) == 0) & (code >= 1) & (code <= w.n_codes)
    return np.where(fits, code, 0)


def best_base(values: Array, type_id: int, mantissa_bits: int, exponent_bits: int) -> int:
    """The lowest exponent base that codes the most values."""
    infinite = EXPONENT[type_id] >> (SIGNIFICAND_BITS[type_id] - 1)
    _, exponent, mantissa = _fields(values, type_id)
    dropped = SIGNIFICAND_BITS[type_id] - 1 - mantissa_bits
    counts = np.bincount(exponent[mantissa & ((1 << dropped) - 1) == 0], minlength=infinite)
    n_codes = (1 << exponent_bits) - 1
    return int(np.argmax([counts[b + 1 : b + 1 + n_codes].sum() for b in range(infinite - n_codes)]))


def encode(values: Array, type_id: int, mantissa_bits: int | None = None, exponent_bits: int | None = None) -> Array:
    """The words (int32) of n bit patterns of a dense type, non-zero and finite. None: the fewest words."""
    found = [
        _encode(values, type_id, Widths(m, e, best_base(values, type_id, m, e)))
        for m, e in widths_of_type(type_id)
        if mantissa_bits in (None, m) and exponent_bits in (None, e)
    ]
    return min(found, key=len)  # the first of several with the same length


def _encode(values: Array, type_id: int, w: Widths) -> Array:
    n, n_places = len(values), coded.n_places(len(values))
    code, sign, mantissa = np.zeros((3, n_places), dtype=np.int64)
    code[:n] = _codes(values, type_id, w)
    has_code = code[:n] != 0
    signs, _, mantissas = _fields(values, type_id)
    sign[:n] = np.where(has_code, signs, 0)
    mantissa[:n] = np.where(has_code, mantissas >> (SIGNIFICAND_BITS[type_id] - 1 - w.mantissa_bits), 0)

    low = w.mantissa_bits - 7
    planes = [sign, *(code >> j for j in range(1, w.exponent_bits)), *(mantissa >> j for j in reversed(range(low)))]
    masks = [np.packbits((p & 1).astype(np.uint8).reshape(-1, BLOCK), axis=1, bitorder="little") for p in planes]
    octets = ((code & 1) << 7 | mantissa >> low).astype(np.uint8).reshape(-1, BLOCK)
    blocks = np.concatenate([octets, *masks], axis=1)

    outliers = values[~has_code].view(np.uint8)
    header = np.array([w.mantissa_bits | w.exponent_bits << 8 | w.base << 16, np.count_nonzero(~has_code)])
    parts = [header.astype("<u4").view(np.uint8), blocks.reshape(-1), outliers, np.zeros(-len(outliers) % 4, np.uint8)]
    return np.concatenate(parts).view(np.int32)


def decode(words: Array, type_id: int, n: int) -> Array:
    """The n bit patterns in words that the C library accepts."""
    coding, data = coded.coding_of(words), words[coded.HEADER_WORDS :].view(np.uint8)
    w, stored = coding.widths, SIGNIFICAND_BITS[type_id] - 1
    end = coded.n_places(n) // BLOCK * 4 * w.bits
    blocks = data[:end].reshape(-1, 4 * w.bits)
    octets = blocks[:, :BLOCK].reshape(-1)[:n].astype(np.int64)

    def mask(i: int) -> Array:
        """Word i behind the bytes of each block, as one number for each value."""
        at = BLOCK + 4 * i
        return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little").reshape(-1)[:n].astype(np.int64)

    code, mantissa = octets >> 7, octets & 127
    for j in range(1, w.exponent_bits):
        code |= mask(j) << j
    for j in range(w.mantissa_bits - 7):
        mantissa = mantissa << 1 | mask(w.exponent_bits + j)
    value = mask(0) << (value_bits(type_id) - 1) | (code + w.base) << stored | mantissa << (stored - w.mantissa_bits)
    bits: Array = value.astype(bits_dtype(type_id))
    bits[code == 0] = data[end:].view(bits_dtype(type_id))[: coding.n_outliers]
    return bits
