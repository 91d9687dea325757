#!/usr/bin/env python3
"""Reads sparse GGUF files with struct and NumPy alone: FORMAT.md as a program, which shares no code with ggml-macko.

    read_sparse_gguf.py FILE [DENSE]    lists the dense tensors of FILE; with DENSE, compares them with that file's

A file that breaks a rule of FORMAT.md raises Refused with the number of the section. Clear rather than fast.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

F32, F16, I8, I16, I32, BF16 = 0, 1, 24, 25, 26, 30  # ggml types
U16, U32, INT32, FLOAT, STRING, ARRAY, U64 = 2, 4, 5, 6, 8, 9, 10  # types of metadata
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
BLOCKS = {  # ggml type -> (elements, bytes) of a block
    **{0: (1, 4), 1: (1, 2), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2)},
    **{2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36), 20: (32, 18), 39: (32, 17)},
    **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 29: (256, 56)},
    **{16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 21: (256, 110), 22: (256, 82), 23: (256, 136)},
    **{34: (256, 54), 35: (256, 66), 40: (64, 36), 41: (128, 18), 42: (64, 18)},
}
DTYPES = {F32: "<u4", F16: "<u2", BF16: "<u2", I16: "<u2", I32: "<i4"}  # of components; the others are bytes
MANTISSA_BITS = {F32: 23, F16: 10, BF16: 7}
INFINITE = {F32: 0x7F800000, F16: 0x7C00, BF16: 0x7F80}
COMPONENTS = {
    b"macko": ["values", "deltas", "row_ptr"],
    b"ec-csr": ["values", "deltas", "bases", "blk_ptr", "rows", "sets"],
    b"packed": ["values", "index", "row_ptr"],
    b"quantized": ["codes", "bitmap", "wscales", "factors", "row_ptr", "levels"],
}
MOST = 2**31 - 513


class Refused(Exception):
    """The file breaks a rule of FORMAT.md."""


def check(ok: object, section: int, rule: str) -> None:
    if not ok:
        raise Refused(f"section {section}: {rule}")


@dataclass
class Tensor:
    name: str
    ne: list[int]
    type: int
    data: np.ndarray  # bytes


@dataclass
class Gguf:
    keys: dict = field(default_factory=dict)  # name -> (type, value); of an array (type of its elements, list)
    tensors: list[Tensor] = field(default_factory=list)
    alignment: int = 32

    def key(self, name: str, kind: int, n: int | None = None, section: int = 2) -> object:
        """A number or bytes; with n, a list of n of them (0: of any number)."""
        check(name in self.keys, section, f"key {name} is missing")
        found, value = self.keys[name]
        check(found == kind and isinstance(value, list) == (n is not None), section, f"key {name} has another type")
        check(not n or len(value) == n, section, f"key {name} has another length")
        return value


# ---- GGUF (sections 1 and 4) ----


class Cursor:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def number(self, kind: str) -> object:
        return struct.unpack("<" + kind, self.bytes(struct.calcsize(kind)))[0]

    def bytes(self, n: int) -> bytes:
        check(n <= len(self.data) - self.at, 1, "the file ends in its header")
        self.at += n
        return self.data[self.at - n : self.at]

    def value(self, kind: int) -> object:
        check(kind in NUMBERS or kind == STRING, 4, f"metadata of type {kind}")
        return self.bytes(self.number("Q")) if kind == STRING else self.number(NUMBERS[kind])

    def name(self, limit: int, known: object) -> str:
        found = self.value(STRING)
        check(re.fullmatch(rb"[\x20-\x7e]+", found) and len(found) <= limit, 4, f"the name {found[:80]!r}")
        check(found.decode() not in known, 4, f"{found!r} occurs twice")
        return found.decode()


def read_gguf(data: bytes) -> Gguf:
    f, c, offset, end = Gguf(), Cursor(data), 0, 0
    check(c.bytes(4) == b"GGUF", 1, "not a GGUF")
    version, n_tensors, n_keys = c.number("I"), c.number("Q"), c.number("Q")
    for _ in range(n_keys):
        name, kind = c.name(65535, f.keys), c.number("I")
        if kind == ARRAY:
            kind, n = c.number("I"), c.number("Q")
            f.keys[name] = (kind, [c.value(kind) for _ in range(n)])
        else:
            f.keys[name] = (kind, c.value(kind))
    is_sparse = "macko.version" in f.keys
    check(version == 3 or (version == 2 and not is_sparse), 1, f"GGUF version {version}")
    f.alignment = f.key("general.alignment", U32) if "general.alignment" in f.keys else 32
    check(8 <= f.alignment <= 2**20 and f.alignment & (f.alignment - 1) == 0, 4, f"alignment {f.alignment}")
    places = {}
    for _ in range(n_tensors):
        name, n_dims = c.name(63, places), c.number("I")
        check(1 <= n_dims <= 4, 4, f"{name} has {n_dims} dimensions")
        ne, kind = [c.number("Q") for _ in range(n_dims)], c.number("I")
        elements, nbytes = BLOCKS.get(kind, (1, 0))
        check(nbytes > 0 and min(ne) > 0 and ne[0] % elements == 0, 4, f"the type or shape of {name}")
        nbytes *= math.prod(ne) // elements
        check(nbytes <= 16 << 30, 4, f"{name} is too large")
        check(c.number("Q") == offset, 1, f"{name} does not follow the tensor before")
        places[name] = (ne, kind, offset, nbytes)
        end = offset + nbytes
        offset += -(-nbytes // f.alignment) * f.alignment
    start = -(-c.at // f.alignment) * f.alignment if places else c.at
    check(len(data) >= start + end, 1, "the file ends in its data")
    check(len(data) in (start + end, start + offset) or not is_sparse, 1, "data after the last tensor")
    for name, (ne, kind, at, nbytes) in places.items():
        f.tensors.append(Tensor(name, ne, kind, np.frombuffer(data, np.uint8, nbytes, start + at)))
    return f


def read_model(path: Path) -> Gguf:
    """A file, or all files of a split model whose first file is given."""
    f = read_gguf(path.read_bytes())
    n = f.key("split.count", U16, None, 1) if "split.count" in f.keys else 1
    if n <= 1:
        return f
    stem, ending = path.name[: -len("-00001-of-00001.gguf")], f"-of-{n:05d}.gguf"
    check(f.key("split.no", U16, None, 1) == 0 and path.name == f"{stem}-00001{ending}", 1, "not the first of a split")
    for i in range(1, n):
        part = read_gguf((path.parent / f"{stem}-{i + 1:05d}{ending}").read_bytes())
        numbers = [part.key("split.no", U16, None, 1), part.key("split.count", U16, None, 1), part.alignment]
        check(numbers == [i, n, f.alignment], 1, f"not file {i + 1} of {n}, or another alignment")
        check(not any(key.startswith("macko.") for key in part.keys), 1, "macko.* keys in another file than the first")
        f.tensors += part.tensors
    count = f.key("split.tensors.count", INT32, None, 1)
    check(count == len(f.tensors) == len({t.name for t in f.tensors}), 1, "a tensor twice, or their number")
    return f


# ---- keys (sections 2 and 10) ----


def check_activation_keys(f: Gguf) -> None:
    found = [key for key in f.keys if key.startswith("macko.act.")]
    if not found or f.key("macko.act.version", U32, None, 10) > 1:
        return
    kinds = {"version": U32, "kind": STRING, "share": FLOAT, "allocation": STRING, "text": STRING, "chunks": U32}
    kinds.update({"n_ctx": U32, "part.down": STRING, "part.share": FLOAT, "part.threshold": FLOAT})
    check(set(found) <= {"macko.act." + name for name in kinds}, 10, "an unknown macko.act.* key")
    lists = {name: 0 if "part." in name else None for name in kinds}
    v = {name: f.key("macko.act." + name, kind, lists[name], 10) for name, kind in kinds.items()}
    down, share, threshold = v["part.down"], v["part.share"], v["part.threshold"]
    check(v["kind"] in (b"cats", b"product", b"wina") and v["allocation"] in (b"uniform", b"greedy"), 10, "kind")
    check(1 <= len(v["text"]) <= 1024 and min(v["chunks"], v["n_ctx"], v["version"]) >= 1, 10, "text, chunks or n_ctx")
    check(all(0 <= x <= 1 for x in [v["share"], *share]), 10, "a share")
    check(all(0 <= x < math.inf for x in threshold), 10, "a threshold")
    check(1 <= len(down) <= 65536 and len(down) == len(share) == len(threshold), 10, "the length of a list")
    check(len(set(down)) == len(down) and all(1 <= len(name) <= 63 for name in down), 10, "a name of part.down")


@dataclass
class Matrix:
    """A line of the table of section 2."""

    name: str
    format: bytes
    type: int
    ne: list[int]
    bits: int
    nnz: int
    parts: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cols, self.rows = self.ne[0], math.prod(self.ne[1:])
        check(self.format in COMPONENTS and self.type in MANTISSA_BITS, 2, f"the format or type of {self.name}")
        check(1 <= self.cols <= 2**24 and 1 <= self.rows <= 2**24 and min(self.ne) > 0, 4, f"the shape of {self.name}")
        check(self.rows * self.cols * np.dtype(DTYPES[self.type]).itemsize <= 16 << 30, 4, f"{self.name} is too large")
        check(self.nnz <= min(MOST, self.rows * self.cols), 4, f"nnz of {self.name}")

    def array(self, i: int, kind: int, n: int | None = None) -> np.ndarray:
        """Component i, which must have a ggml type and n elements."""
        t = self.parts[i]
        check(t.type == kind and len(t.ne) == 1, 2, f"{t.name} has type {t.type}, not {kind}, or not one dimension")
        check(n is None or t.ne[0] == n, 2, f"{t.name} has {t.ne[0]} elements, not {n}")
        return t.data.view(DTYPES.get(kind, "u1"))


def matrices(f: Gguf) -> list[Matrix]:
    columns = {"name": STRING, "format": STRING, "type": U32, "ne": U64, "index_bits": U32, "nnz": U64}
    is_sparse, known = "macko.version" in f.keys, {"macko.version", *("macko.tensor." + name for name in columns)}
    check(not is_sparse or f.key("macko.version", U32) == 1, 2, "macko.version")
    for key in f.keys:
        free = key.startswith(("macko.prune.", "macko.x-", "macko.act.")) or (is_sparse and key in known)
        check(not key.startswith("macko.") or free, 2, f"key {key} is reserved")
    check_activation_keys(f)
    if not is_sparse:
        return []
    names = f.key("macko.tensor.name", STRING, 0)
    n = len(names)
    check(n > 0 and len(set(names)) == n, 2, "macko.tensor.name")
    for name in names:
        check(re.fullmatch(rb"[\x20-\x7e]{1,55}", name), 4, f"the name {name!r}")
    lists = [f.key("macko.tensor." + c, kind, 4 * n if c == "ne" else n) for c, kind in columns.items()]
    lists[0], lists[3] = [name.decode() for name in names], [lists[3][i : i + 4] for i in range(0, 4 * n, 4)]
    return [Matrix(*row) for row in zip(*lists)]


# ---- formats: each returns (rows, columns, bits of the values) ----


def codes(data: np.ndarray, bits: int) -> np.ndarray:
    found = np.unpackbits(data, bitorder="little")
    return found[: len(found) // bits * bits].reshape(-1, bits) @ (1 << np.arange(bits))


def align4(n: int) -> int:
    return -(-n // 4) * 4


def read_row_ptr(m: Matrix, i: int, section: int) -> np.ndarray:
    row_ptr = m.array(i, I32, m.rows + 1).astype(np.int64)
    check(row_ptr[0] == 0 and np.all(np.diff(row_ptr) >= 0), section, "row_ptr falls")
    return row_ptr


def columns_of(steps: np.ndarray, ends: np.ndarray, row_ptr: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of entries that end at the codes `ends`, if each code advances by `steps`."""
    row = np.repeat(np.arange(len(row_ptr) - 1), np.diff(row_ptr))
    total = np.concatenate([[0], np.cumsum(steps)[ends]])
    return row, total[1:] - total[row_ptr[:-1]][row] - 1


def read_macko(m: Matrix) -> tuple[np.ndarray, ...]:
    check(m.bits in (1, 2, 4, 8), 2, "index_bits")
    row_ptr = read_row_ptr(m, 2, 3)
    n, n_padded = int(row_ptr[-1]), max(8, -(-int(row_ptr[-1]) // 8) * 8)
    check(n <= MOST, 4, "n_stored")
    values, delta = m.array(0, m.type, n_padded), codes(m.array(1, I8, align4(n_padded * m.bits // 8)), m.bits)
    check(not values[n:].any() and not delta[n:].any(), 3, "padding is not zero")
    values, delta = values[:n], delta[:n]
    row, col = columns_of(delta + 1, np.arange(n), row_ptr)
    is_last = np.append(row[1:] != row[:-1], True)[:n]
    check(np.all((values != 0) | ((delta == 2**m.bits - 1) & ~is_last)), 3, "a zero that is no filler")
    return row[values != 0], col[values != 0], values[values != 0]


def read_ec_csr(m: Matrix) -> tuple[np.ndarray, ...]:
    check(m.bits in (4, 8), 2, "index_bits")
    check(m.parts[5].ne[0] % 4 == 0, 6, "sets")
    sets = m.array(5, I32).reshape(-1, 4).tolist()
    kinds, allowed = [(g, v) for g, v, _, _ in sets], [*((64 >> i, 4) for i in range(7)), (1, 1)]
    check(kinds == [kind for kind in allowed if kind in kinds], 6, "the sets are unknown or out of order")
    check(all(n_blocks > 0 and n_cols > 0 for _, _, n_blocks, n_cols in sets), 6, "an empty set")
    n_blocks, n_cols = sum(s[2] for s in sets), sum(s[3] for s in sets)
    values = m.array(0, m.type, sum(g * n for g, _, _, n in sets))
    distances = codes(m.array(1, I8, n_cols * m.bits // 8), m.bits)
    bases = m.array(2, I16 if m.cols <= 65536 else I32, 32 * n_blocks).astype(np.int64).reshape(-1, 32)
    blk_ptr = m.array(3, I32, n_blocks + len(sets)).astype(np.int64)
    all_rows = m.array(4, I32, sum(g * b for g, _, b, _ in sets)).astype(np.int64)
    check(max(len(values), len(all_rows), bases.size) <= MOST, 4, "elements of a component")
    found, block, at_row, at_ptr, at_col, at_value = [], 0, 0, 0, 0, 0
    for g, v, count, n_cols in sets:
        ptr, order = blk_ptr[at_ptr : at_ptr + count + 1], []
        check(ptr[0] == 0 and ptr[-1] == n_cols and np.all(np.diff(ptr) > 0), 6, "blk_ptr")
        for n in np.diff(ptr).tolist():
            check(n % (32 * v) == 0, 6, "the number of columns of a block")
            rows = all_rows[at_row : at_row + g]
            check(np.all(np.diff(rows) > 0) and rows[0] >= 0 and rows[-1] < m.rows, 6, "the rows of a block")
            lane, k = np.divmod(np.arange(n), n // 32)
            place = k // v * 32 * v + lane * v + k % v
            distance = distances[at_col + place].reshape(32, -1)
            check(not distance[:, 0].any(), 6, "a distance at the first column of a lane")
            col = (bases[block][:, None] + np.cumsum(distance, axis=1)).reshape(-1)
            value = values[at_value : at_value + n * g].reshape(n, g)[place]
            kept = value.any(axis=1)
            if m.nnz == 0:
                check(len(values) == 32 and not col.any() and not rows.any() and not kept.any(), 6, "no non-zeros")
            elif g > 1:
                check(np.all(value != 0) and np.all(np.diff(col) > 0), 6, "zeros or columns of a block")
            else:
                check(kept.any(), 6, "a block without non-zeros")
                e = int(np.flatnonzero(kept)[-1]) + 1
                check(v == (1 if e <= 96 else 4) and n == -(-e // (32 * v)) * 32 * v, 6, "the set or length of a block")
                step, padding, widest = *np.split(np.diff(col), [e - 1]), 2**m.bits - 1
                check(np.all((step > 0) & (step <= widest)) and not padding.any(), 6, "a column of a block")
                check(kept[0] and np.all(step[~kept[1:e]] == widest), 6, "a filler that no gap needs")
            found.append((np.repeat(rows, kept.sum()), np.tile(col[kept], g), value[kept].T.reshape(-1)))
            order.append((-n, *rows.tolist(), int(bases[block][0])))
            block, at_row, at_col, at_value = block + 1, at_row + g, at_col + n, at_value + n * g
        check(all(a < b for a, b in zip(order, order[1:])), 6, "the order of the blocks")
        at_ptr += count + 1
    return tuple(np.concatenate(parts) for parts in zip(*found))


def read_bitmap(m: Matrix, i: int, section: int) -> tuple[np.ndarray, np.ndarray]:
    stride = -(-m.cols // 8)
    bits = m.array(i, I8, align4(m.rows * stride))
    check(not bits[m.rows * stride :].any(), section, "bits after the last row")
    return np.nonzero(np.unpackbits(bits[: m.rows * stride].reshape(m.rows, stride), axis=1, bitorder="little"))


def read_packed(m: Matrix) -> tuple[np.ndarray, ...]:
    check(m.bits in (0, 2, 4, 8), 2, "index_bits")
    row_ptr, skip = read_row_ptr(m, 2, 7), 2**m.bits - 1
    check(row_ptr[-1] == m.nnz, 7, "row_ptr does not end with nnz")
    if m.bits == 0:
        row, col = read_bitmap(m, 1, 7)
        check(np.array_equal(np.bincount(row, minlength=m.rows), np.diff(row_ptr)), 7, "bits that do not match row_ptr")
    else:
        index = m.array(1, I8)
        code = codes(index, m.bits)
        ends = np.flatnonzero(code != skip)[: m.nnz]
        used = int(ends[-1]) + 1 if len(ends) else 0
        check(len(ends) == m.nnz and len(index) == max(4, align4(-(-used * m.bits // 8))), 7, "the length of the index")
        check(not code[used:].any(), 7, "codes after the last row")
        row, col = columns_of(np.where(code == skip, skip, code + 1), ends, row_ptr)
    n = max(32, -(-m.nnz // 32) * 32)
    if m.parts[0].type == I32:
        return row, col, read_coded(m, m.array(0, I32).view("<u4"), n)
    values, padding = np.split(m.array(0, m.type, n), [m.nnz])
    check(values.all() and not padding.any(), 7, "a zero among the values, or a value after them")
    return row, col, values


def read_coded(m: Matrix, words: np.ndarray, n: int) -> np.ndarray:
    check(len(words) >= 2, 8, "no header")
    mantissa_bits, exponent_bits, base, zero = (int(x) for x in words[:1].view("u1"))
    n_outliers, stored, dtype = int(words[1]), MANTISSA_BITS[m.type], np.dtype(DTYPES[m.type])
    infinite, n_codes, size = INFINITE[m.type] >> stored, 2**exponent_bits - 1, mantissa_bits + exponent_bits + 1
    check(mantissa_bits in (7, min(10, stored)) and exponent_bits in (2, 3) and zero == 0, 8, "widths")
    check(base + n_codes < infinite, 8, "base")
    end, nbytes = 2 + size * n // 32, n_outliers * dtype.itemsize
    check(len(words) == end + -(-nbytes // 4), 8, "the length of the values")
    blocks = words[2:end].view("u1").reshape(-1, 4 * size)
    octet = blocks[:, :32].reshape(-1).astype(np.int64)
    masks = np.unpackbits(blocks[:, 32:].reshape(-1, size - 8, 4), axis=2, bitorder="little").astype(np.int64)
    sign, *masks = masks.transpose(1, 0, 2).reshape(size - 8, n)
    c, mantissa = octet >> 7, octet & 127
    for i, mask in enumerate(masks[: exponent_bits - 1]):
        c |= mask << (i + 1)
    for mask in masks[exponent_bits - 1 :]:
        mantissa = mantissa << 1 | mask
    check(not (octet | sign | mantissa)[c == 0].any() and not c[m.nnz :].any(), 8, "bits of an outlier or of padding")
    values = sign << (8 * dtype.itemsize - 1) | c + base << stored | mantissa << (stored - mantissa_bits)
    values, is_outlier = values[: m.nnz].astype(dtype), c[: m.nnz] == 0
    outliers, padding = np.split(words[end:].view("u1"), [nbytes])
    check(np.count_nonzero(is_outlier) == n_outliers and not padding.any(), 8, "the number of outliers")
    values[is_outlier] = outliers.view(dtype)
    check(values.all(), 8, "an outlier is zero")
    is_short = values & (2 ** (stored - mantissa_bits) - 1) == 0
    counts = np.bincount((values[is_short] & INFINITE[m.type]) >> stored, minlength=infinite)
    fits = [counts[b + 1 : b + 1 + n_codes].sum() for b in range(infinite - n_codes)]
    check(np.argmax(fits) == base and fits[base] == m.nnz - n_outliers, 8, "base, or an outlier that fits")
    return values


def rounded(product: np.ndarray, kind: int) -> np.ndarray:
    """The dense bits of values d * q."""
    bits = product.astype(np.float32).view(np.uint32).astype(np.int64)
    if kind == BF16:
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    if kind == F16:
        check(np.all(np.abs(product) < 65536), 2, "a value is beyond F16")
        with np.errstate(over="ignore"):
            bits = product.astype(np.float16).view(np.uint16)
        bits = np.where(bits & 0x7FFF == 0x7C00, bits - 1, bits)
    return np.where(product == 0, 0, bits).astype(DTYPES[kind])


def read_quantized(m: Matrix) -> tuple[np.ndarray, ...]:
    check(m.bits == 0, 2, "index_bits")
    level = m.array(5, I8).view(np.int8).astype(np.int64)
    b = {2**b: b for b in (3, 4, 5, 8)}.get(len(level), 0)
    low, high = np.split(level, [len(level) // 2])
    if b < 8:
        is_valid = b and low[0] > 0 and high[0] > -128 and high[-1] < 0 and np.diff([low, high]).min() > 0
    else:
        is_valid = np.array_equal(level, np.arange(256).astype(np.int8))
    check(is_valid, 9, "the levels")
    row, col = read_bitmap(m, 1, 9)
    count, row_ptr = np.bincount(row, minlength=m.rows), read_row_ptr(m, 4, 9)
    check(np.array_equal(np.diff(row_ptr), -(-count // 8)), 9, "row_ptr")
    end = b * int(row_ptr[-1])
    data = m.array(0, I8, max(4, align4(end)))
    code = codes(data[:end], b)
    kept = 8 * row_ptr[row] + np.arange(len(row)) - (np.cumsum(count) - count)[row]
    check(not np.delete(code, kept).any() and not data[end:].any(), 9, "codes of no value")
    check(b < 8 or not np.any(code == 128), 9, "the code 128")
    scale = m.array(2, I8)
    windows = [w for w in (32, 64, 128, 256, 512) if -(-m.cols // w) * m.rows == len(scale)]
    check(windows, 9, "the number of scales")
    scale, window = scale.reshape(m.rows, -1).astype(np.int64), col // windows[0]
    is_empty = np.ones(scale.shape, dtype=bool)
    is_empty[row, window] = False
    check(not scale[is_empty].any(), 9, "the scale of an empty window")
    factor = (m.array(3, BF16, m.rows).astype(np.uint32) << 16).view(np.float32)
    is_valid = np.where(count > 0, (factor >= 2.0**-90) & (factor <= 2.0**90), factor.view(np.uint32) == 0)
    check(np.all(is_valid), 9, "a factor")
    d = np.where(scale >> 7, -1.0, 1.0) * (1 + (scale & 15) / 16) * 2.0 ** ((scale >> 4 & 7) - 7) * factor[:, None]
    return row, col, rounded((d[row, window] * level[code[kept]]).astype(np.float32), m.type)


READERS = {b"macko": read_macko, b"ec-csr": read_ec_csr, b"packed": read_packed, b"quantized": read_quantized}


def decode(m: Matrix) -> Tensor:
    row, col, values = READERS[m.format](m)
    check(np.all((col >= 0) & (col < m.cols)), 2, f"{m.name}: a column past the last")
    check(np.all(values & INFINITE[m.type] != INFINITE[m.type]), 2, f"{m.name}: Inf or NaN")
    check(len(values) == m.nnz, 2, f"{m.name}: {len(values)} non-zeros, but nnz is {m.nnz}")
    element = row * m.cols + col
    check(len(np.unique(element)) == len(element), 6, f"{m.name}: an element in two blocks")
    dense = np.zeros(m.rows * m.cols, dtype=DTYPES[m.type])
    dense[element] = values
    n_dims = max(i for i in range(1, 5) if i == 1 or m.ne[i - 1] > 1)
    return Tensor(m.name, m.ne[:n_dims], m.type, dense.view(np.uint8))


def read_dense(path: Path) -> Gguf:
    """The dense model of a file, which may be sparse, dense or split. Raises Refused."""
    f = read_model(Path(path))
    todo, tensors, out, at = matrices(f), f.tensors, [], 0
    names, suffixes = {m.name for m in todo}, {part for parts in COMPONENTS.values() for part in parts}
    for m in [*todo, None]:
        parts = [f"{m.name}.{part}" for part in COMPONENTS[m.format]] if m else []
        while at < len(tensors) and (not m or tensors[at].name != parts[0]):
            name = tensors[at].name
            owners = {name, *(name[: dot.start()] for dot in re.finditer(r"\.", name))}
            is_free = not todo or (not owners & names and name.rpartition(".")[2] not in suffixes)
            check(is_free, 1, f"{name} is no component in its place")
            out.append(tensors[at])
            at += 1
        if m:
            m.parts = tensors[at : at + len(parts)]
            check([t.name for t in m.parts] == parts, 1, f"the components of {m.name}")
            out.append(decode(m))
            at += len(parts)
    keys = {k: v for k, v in f.keys.items() if k != "macko.version" and not k.startswith(("macko.tensor.", "split."))}
    return Gguf(keys, out, f.alignment)


def main() -> int:
    try:
        models = [read_dense(Path(arg)).tensors for arg in sys.argv[1:3]]
    except (Refused, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    for t in models[0]:
        print(f"{t.name}: type {t.type}, {' x '.join(map(str, t.ne))}")
    bits = [[(t.name, t.ne, t.type, t.data.tobytes()) for t in tensors] for tensors in models]
    print(["differs" if bits[0] != bits[-1] else "the same bits"][0] if len(bits) == 2 else "valid")
    return int(bits[0] != bits[-1])


if __name__ == "__main__":
    sys.exit(main())
