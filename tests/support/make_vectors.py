"""Writes ggml-macko/vectors/: small sparse GGUF files, their dense values, and files that a reader must refuse.

PYTHONPATH=tests python -m support.make_vectors [FOLDER]

The library encodes the matrices; read_sparse_gguf.py, which was written from FORMAT.md alone, checks the result.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ggml_macko.codecs import packed
from ggml_macko.codecs.value_types import code_type
from ggml_macko.native import codec
from ggml_macko.native.codec import EncodedMatrix
from ggml_macko.values import TYPE_BF16, TYPE_F16, TYPE_F32, bits_dtype
from reference import ec_csr
from support import gguf_bytes as gb
from support.generators import ROOT, SPECIAL

FOLDER = ROOT / "ggml-macko" / "vectors"
SUFFIXES = {c.name: c.suffixes for c in codec.codecs()}
NAMES = {TYPE_F16: "f16", TYPE_BF16: "bf16", TYPE_F32: "f32"}
ONE = {TYPE_F16: 0x3C00, TYPE_BF16: 0x3F80, TYPE_F32: 0x3F800000}

Dense = dict[str, tuple[np.ndarray, int]]  # name -> (bit patterns in the shape of the tensor, type)


# ---- dense matrices ----


def numbers(n: int, seed: int) -> np.ndarray:
    """n numbers below 2^32 that look random, the same with every version of NumPy."""
    x = (np.arange(n, dtype=np.uint64) + np.uint64(1000 * seed + 1)) * np.uint64(0x9E3779B97F4A7C15)
    return (x ^ x >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(32)


def weights(type_id: int, rows: int, cols: int, percent: int, seed: int, special: bool = False) -> np.ndarray:
    """Bit patterns: signs, a few exponents, mantissas of 5, 10 and all bits; special: values that are easily lost."""
    r = numbers(rows * cols, seed)
    width = {TYPE_F16: 10, TYPE_BF16: 7, TYPE_F32: 23}[type_id]
    exponent = {TYPE_F16: 13, TYPE_BF16: 125, TYPE_F32: 125}[type_id] + (r >> 8) % 4
    mantissa = (r >> 12) % 32 << (width - 5)
    mantissa |= np.where(r % 5 == 0, r >> 9, 0) % (1 << min(width, 10)) << (width - min(width, 10))
    mantissa |= np.where(r % 13 == 0, r >> 5, 0) % (1 << width)
    bits = (r >> 7 & 1) << (31 if type_id == TYPE_F32 else 15) | exponent << width | mantissa
    if special:
        bits[::23] = np.resize(SPECIAL[type_id], len(bits[::23]))
    bits[(r >> 17) % 100 >= percent] = 0
    return bits.astype(bits_dtype(type_id)).reshape(rows, cols)


def at_columns(type_id: int, cols: int, columns: list[list[int]]) -> np.ndarray:
    """A matrix with non-zeros in the given columns of each row."""
    bits = np.zeros((len(columns), cols), bits_dtype(type_id))
    for row, places in enumerate(columns):
        bits[row, places] = np.resize(SPECIAL[type_id][5:] + SPECIAL[type_id], len(places))
    return bits


def lossless_model() -> Dense:
    gaps = [[0, 2, 5, 9, 14, 30, 47, 65, 321, 559], [], [256, 513, *range(514, 550), 558]]
    return {
        "norm.weight": (np.full(3, ONE[TYPE_F32], np.uint32), TYPE_F32),
        "gaps.weight": (at_columns(TYPE_F16, 560, gaps), TYPE_F16),
        "bf16.weight": (weights(TYPE_BF16, 3, 40, 50, 1, True), TYPE_BF16),
        "f32.weight": (weights(TYPE_F32, 2, 33, 40, 2, True), TYPE_F32),
        "experts.weight": (weights(TYPE_F16, 4, 17, 60, 3, True).reshape(2, 2, 17), TYPE_F16),
        "zero.weight": (np.zeros((2, 20), np.uint16), TYPE_BF16),
    }


def blocks_model() -> Dense:
    """For ec-csr: rows that share columns, and rows of 96, 97 and 128 entries."""
    shared = list(range(1, 300, 2))
    rows = [shared, list(range(96)), [0, *range(300, 396)], shared, list(range(5, 133)), [7, 399]]
    return {
        "blocks.weight": (at_columns(TYPE_F16, 400, rows), TYPE_F16),
        "f32.weight": (weights(TYPE_F32, 3, 70, 60, 4, True), TYPE_F32),
        "zero.weight": (np.zeros((2, 20), np.uint16), TYPE_BF16),
    }


def wide_model() -> Dense:
    return {"wide.weight": (at_columns(TYPE_F16, 65537, [[*range(600), 65536]]), TYPE_F16)}


def quantized_model() -> Dense:
    return {
        "f16.weight": (weights(TYPE_F16, 4, 70, 50, 5), TYPE_F16),
        "bf16.weight": (weights(TYPE_BF16, 2, 300, 5, 6), TYPE_BF16),
        "f32.weight": (weights(TYPE_F32, 3, 40, 90, 7), TYPE_F32),
        "zero.weight": (np.zeros((2, 20), np.uint16), TYPE_BF16),
    }


# ---- files ----

Encoder = Callable[[np.ndarray, int], EncodedMatrix]


def new_file() -> gb.GGUF:
    f = gb.GGUF()
    f.set("general.architecture", gb.STRING, b"llama")
    return f


def dense_file(model: Dense) -> gb.GGUF:
    f = new_file()
    f.tensors = [gb.Tensor(n.encode(), list(bits.shape[::-1]), t, bits.tobytes()) for n, (bits, t) in model.items()]
    return f


def add_sparse(f: gb.GGUF, name: str, shape: tuple[int, ...], m: EncodedMatrix) -> None:
    """Appends a matrix to the table of section 2, and its components to the tensors."""
    columns = {
        "name": (gb.STRING, [name.encode()]),
        "format": (gb.STRING, [m.format.encode()]),
        "type": (gb.U32, [m.type]),
        "ne": (gb.U64, [*shape[::-1], 1, 1, 1][:4]),
        "index_bits": (gb.U32, [m.index_bits]),
        "nnz": (gb.U64, [m.nnz]),
    }
    f.set("macko.version", gb.U32, 1)
    for column, (type_, values) in columns.items():
        old = f.key("macko.tensor." + column)
        f.set("macko.tensor." + column, gb.ARRAY, (old.value if old else []) + values, type_)
    for suffix, array, type_ in zip(SUFFIXES[m.format], m.arrays, m.types):
        block, nbytes = gb.BLOCKS[type_]
        f.tensors.append(gb.Tensor((name + suffix).encode(), [array.nbytes // nbytes * block], type_, array.tobytes()))


def sparse_file(model: Dense, encode: Encoder) -> gb.GGUF:
    f = new_file()
    for name, (bits, type_id) in model.items():
        if bits.ndim == 1:
            f.tensors.append(gb.Tensor(name.encode(), list(bits.shape), type_id, bits.tobytes()))
        else:
            add_sparse(f, name, bits.shape, encode(bits.reshape(-1, bits.shape[-1]), type_id))
    return f


def decoded_file(model: Dense, encode: Encoder) -> gb.GGUF:
    """The dense file of quantized matrices."""
    dense = {
        n: (codec.decode(encode(bits.reshape(-1, bits.shape[-1]), t)).reshape(bits.shape), t)
        for n, (bits, t) in model.items()
    }
    return dense_file(dense)


def encoder(format: str, **options: int) -> Encoder:
    def encode(bits: np.ndarray, type_id: int) -> EncodedMatrix:
        own = dict(options)
        if type_id == TYPE_BF16 and own.get("mantissa_bits") == 10:
            own["mantissa_bits"] = 7
        return codec.encode(format, bits, type_id, own, 1)

    return encode


def in_windows(bits_of_code: int) -> Encoder:
    """Codes; in F16 with values that round to 65,504, to +0 and to -0, and a level 0 with a negative scale."""

    def encode(bits: np.ndarray, type_id: int) -> EncodedMatrix:
        m = codec.encode_quantized(bits, type_id, code_type(bits_of_code), n_threads=1)
        if type_id != TYPE_F16:
            return m
        codes, bitmap, scales, factors, row_ptr, levels = (a.copy() for a in m.arrays)
        sizes = np.abs(levels.view(np.int8).astype(int)) % 128  # the code 128 does not occur
        factors[0] = np.array(np.nextafter(65536 / sizes.max(), 0), np.float32).view(np.uint32) >> 16
        factors[1] = 0x1280  # 2^-90
        per_row = len(scales) // m.rows
        scales[:per_row] = np.where(scales[:per_row] > 0, 0x70, 0)
        scales[per_row] |= 0x80
        group = int(row_ptr[0]) * bits_of_code
        codes[group] = sizes.argmax()
        if bits_of_code == 8:
            codes[int(row_ptr[1]) * 8] = 0
        return dataclasses.replace(m, arrays=(codes, bitmap, scales, factors, row_ptr, levels))

    return encode


def matrix(format: str, type_id: int, shape: tuple[int, int], bits: int, nnz: int, parts: list) -> EncodedMatrix:
    """A matrix from literal bytes: parts are (bytes, ggml type)."""
    arrays = tuple(np.frombuffer(data, np.uint8) for data, _ in parts)
    return EncodedMatrix(format, *shape, type_id, type_id, bits, nnz, arrays, tuple(t for _, t in parts))


def ints(*values: int) -> tuple[bytes, int]:
    return np.array(values, "<i4").tobytes(), 26


def raw(text: str, nbytes: int = 0) -> tuple[bytes, int]:
    return bytes.fromhex(text).ljust(nbytes, b"\0"), 24


def example() -> tuple[gb.GGUF, gb.GGUF]:
    """The file of FORMAT.md section 5."""
    f, dense = gb.GGUF(), np.zeros((2, 13), np.uint16)
    f16 = np.array([1, 2, 0, 3, 4, 0, 0, 0], np.float16).tobytes()
    add_sparse(f, "w", (2, 13), matrix("macko", 1, (2, 13), 2, 4, [(f16, 1), raw("b9000000"), ints(0, 5, 5)]))
    dense[0, [1, 4, 11, 12]] = np.array([1, 2, 3, 4], np.float16).view(np.uint16)
    whole = gb.GGUF(tensors=[gb.Tensor(b"w", [13, 2], 1, dense.tobytes())])
    return f, whole


def examples() -> tuple[gb.GGUF, gb.GGUF]:
    """The examples of FORMAT.md sections 6 to 9, from the bytes on the page."""
    f, model = new_file(), {}

    def add(name: str, m: EncodedMatrix, columns: list[int], values: list[float]) -> None:
        bits = np.zeros((m.rows, m.cols), np.uint16)
        bits[0, columns] = np.array(values, np.float16).view(np.uint16)
        model[name] = (bits[0], TYPE_F16)  # the shape of the dense file has no trailing 1
        add_sparse(f, name, bits.shape, m)

    def f16(*values: float) -> tuple[bytes, int]:
        return np.array(values, np.float16).tobytes(), TYPE_F16

    row = [3, 5, 20, 35, *[40] * 28]
    x, y, z = 1.0, -2.0, 0.5
    parts = [f16(x, y, 0, 0, z, *[0] * 27), raw("", 16), (np.array(row, "<u2").tobytes(), 25), ints(0, 32), ints(0)]
    add("section6", matrix("ec-csr", 1, (1, 64), 4, 3, [*parts, ints(1, 1, 1, 32)]), [3, 5, 40], [x, y, z])
    entries = [3, 5, 20, 35, *range(40, 81), *[80] * 19]
    stored = [x, y, 0, 0, *[z] * 41, *[0] * 19]
    parts = [f16(*stored[::2], *stored[1::2]), raw("00" * 16 + "f2" + "11" * 10, 32)]
    parts += [(np.array(entries[::2], "<u2").tobytes(), 25), ints(0, 64), ints(0), ints(1, 1, 1, 64)]
    columns = [3, 5, *range(40, 81)]
    add("section6.long_lanes", matrix("ec-csr", 1, (1, 81), 4, 43, parts), columns, [x, y, *[z] * 41])
    for name, bits, index in (("section7.bitmap", 0, "12180000"), ("section7.gaps", 2, "f9000000")):
        parts = [f16(1, 2, 3, 4, *[0] * 28), raw(index), ints(0, 4)]
        add(name, matrix("packed", 1, (1, 13), bits, 4, parts), [1, 4, 11, 12], [1, 2, 3, 4])
    words = "07020e00 02000000 80c00080" + "00" * 28 + "02000000 08000000 01400100"
    parts = [(raw(words)[0], 26), raw("1f000000"), ints(0, 5)]
    add("section8", matrix("packed", 1, (1, 12), 0, 5, parts), [0, 1, 2, 3, 4], [1, -1.5, 2 + 2**-9, 4, 2**-24])
    parts = [raw("ea010000"), raw("0a00000002000000"), raw("70e8"), (raw("003d")[0], 30), ints(0, 1)]
    parts += [(np.array([25, 60, 90, 120, -120, -90, -60, -25], np.int8).tobytes(), 24)]
    add("section9", matrix("quantized", 1, (1, 40), 0, 3, parts), [1, 3, 33], [90 / 32, -90 / 32, 18.75 / 32])
    return f, dense_file(model)


# ---- files with one lie ----

Change = Callable[[gb.GGUF], None]


def one_matrix(encode: Encoder, bits: np.ndarray, type_id: int = TYPE_F16) -> gb.GGUF:
    return sparse_file({"w": (bits, type_id)}, encode)


def key(name: str, i: int, value: object) -> Change:
    """Replaces element i of a list of metadata."""
    return lambda f: f.key("macko.tensor." + name).value.__setitem__(i, value)


def data(name: str, dtype: str, *changes: tuple[int, int]) -> Change:
    """Replaces elements of a component: (index, value)."""

    def change(f: gb.GGUF) -> None:
        t = f.tensor("w." + name)
        array = np.frombuffer(t.data, dtype).copy()
        for index, value in changes:
            array[index] = value
        t.data = array.tobytes()

    return change


def longer(name: str, n: int) -> Change:
    def change(f: gb.GGUF) -> None:
        t = f.tensor("w." + name)
        t.ne[0] += n
        t.data += bytes(len(t.data) // (t.ne[0] - n) * n)

    return change


def setting(name: str, type_: int, value: object, element_type: int = -1) -> Change:
    return lambda f: f.set(name, type_, value, element_type)


def renamed(old: str, new: str) -> Change:
    return lambda f: setattr(f.tensor(old), "name", new.encode())


def swapped(i: int, j: int) -> Change:
    def change(f: gb.GGUF) -> None:
        f.tensors[i], f.tensors[j] = f.tensors[j], f.tensors[i]

    return change


ACTIVATION_KEYS = {
    "version": (gb.U32, 1),
    "kind": (gb.STRING, b"product"),
    "share": (gb.F32, 0.5),
    "allocation": (gb.STRING, b"uniform"),
    "text": (gb.STRING, b"text.txt"),
    "chunks": (gb.U32, 2),
    "n_ctx": (gb.U32, 512),
    "part.down": (gb.STRING, [b"w"]),
    "part.share": (gb.F32, [0.5]),
    "part.threshold": (gb.F32, [0.25]),
}


def set_activation_keys(f: gb.GGUF) -> None:
    for name, (type_, value) in ACTIVATION_KEYS.items():
        is_list = isinstance(value, list)
        f.set("macko.act." + name, gb.ARRAY if is_list else type_, value, type_ if is_list else -1)


def blocks(dense: np.ndarray, *parts: tuple[int, list[int], list[int]]) -> gb.GGUF:
    """An ec-csr file of blocks that a writer would not make: (v, rows, columns)."""
    chosen = [ec_csr.Part(v, np.array(rows, np.int32), np.array(columns)) for v, rows, columns in parts]
    m = ec_csr.assemble(dense, TYPE_F16, 8, chosen).encoded()
    f = new_file()
    add_sparse(f, "w", dense.shape, m)
    return f


def refused() -> dict[str, tuple[int, str, gb.GGUF]]:
    """name -> (section, what is wrong, file)."""
    bits = at_columns(TYPE_F16, 40, [[1, 4, 39], [], [0, 20, 21]])
    macko, bitmap, gaps = (
        encoder("macko", index_bits=4),
        encoder("packed", index_bits=0),
        encoder("packed", index_bits=4),
    )
    coded = encoder("packed", value_type=packed.TYPE_CODED, index_bits=0, mantissa_bits=7, exponent_bits=2)
    q4, q8 = encoder("quantized", value_type=code_type(4)), encoder("quantized", value_type=code_type(8))
    out: dict[str, tuple[int, str, gb.GGUF]] = {}

    def add(
        name: str,
        section: int,
        what: str,
        encode: Encoder,
        *changes: Change,
        source: np.ndarray = bits,
        type_id: int = TYPE_F16,
    ) -> None:
        f = one_matrix(encode, source, type_id)
        for change in changes:
            change(f)
        out[name] = (section, what, f)

    a = "macko."
    add("version-0", 2, "`macko.version` is 0", macko, setting(a + "version", gb.U32, 0))
    add(
        "version-2",
        2,
        "`macko.version` is larger than the reader's",
        macko,
        setting(a + "version", gb.U32, 2),
        setting(a + "later", gb.U32, 2),
    )
    add("unknown-key", 2, "a key with a reserved name", macko, setting(a + "later", gb.U32, 1))
    add("no-version", 2, "`macko.tensor.*` without `macko.version`", macko, lambda f: f.drop(a + "version"))
    add("missing-key", 2, "no `macko.tensor.nnz`", macko, lambda f: f.drop(a + "tensor.nnz"))
    add("unknown-format", 2, "a format with another name", macko, key("format", 0, b"Macko"))
    add("dense-type", 2, "the dense type is Q8_0", macko, key("type", 0, 8))
    add("index-bits", 2, "b = 3", macko, key("index_bits", 0, 3))
    add("nnz", 2, "nnz is too small by one", macko, key("nnz", 0, 5))
    add("length", 2, "four bytes too many in `w.deltas`", macko, longer("deltas", 4))
    add(
        "component-type",
        2,
        "`w.deltas` has I32 elements",
        macko,
        lambda f: (setattr(f.tensor("w.deltas"), "type", 26), f.tensor("w.deltas").ne.__setitem__(0, 1)),
    )
    add("nan", 2, "a value is NaN", macko, data("values", "<u2", (0, 0x7E00)))
    add("column", 2, "a column past the last", macko, data("deltas", "u1", (2, 0x1F)))
    add("missing-component", 1, "no `w.row_ptr`", macko, lambda f: f.tensors.pop())
    add("component-order", 1, "`w.deltas` before `w.values`", macko, swapped(0, 1))
    add(
        "stray-component",
        1,
        "another tensor is called `v.values`",
        macko,
        lambda f: f.tensors.append(gb.Tensor(b"v.values", [2], 0, bytes(8))),
    )
    add(
        "dense-beside-sparse",
        1,
        "another tensor is called `w`",
        macko,
        lambda f: f.tensors.append(gb.Tensor(b"w", [2], 0, bytes(8))),
    )
    add(
        "long-name",
        4,
        "the matrix has a name of 56 bytes",
        macko,
        key("name", 0, b"w" * 56),
        *(renamed(f"w.{c}", "w" * 56 + c) for c in ()),
    )
    add("rows", 4, "2^24 + 1 rows", macko, key("ne", 1, 2**24 + 1))
    add("row-ptr", 3, "row_ptr falls", macko, data("row_ptr", "<i4", (1, 9), (2, 7)))
    add("filler", 3, "a zero whose delta is no gap's", macko, data("values", "<u2", (1, 0)))
    add(
        "last-filler",
        3,
        "a row ends with a filler",
        macko,
        data("values", "<u2", (4, 0)),
        data("deltas", "u1", (2, 0xF4)),
    )
    add("padding", 3, "padding is not zero", macko, data("values", "<u2", (-1, 1)))

    row = np.full((1, 200), ONE[TYPE_F16], np.uint16)
    out["short-block-of-128"] = (
        6,
        "a block of 128 entries is in the short set",
        blocks(row, (1, [0], range(128)), (1, [0], range(128, 200))),
    )
    out["long-block-of-96"] = (
        6,
        "a block of 96 entries is in the long set",
        blocks(row, (4, [0], range(96)), (4, [0], range(96, 200))),
    )
    twice = blocks(np.pad(row, ((0, 0), (0, 8))), (4, [0], range(97)), (4, [0], range(96, 200)))
    key("nnz", 0, 201)(twice)
    out["two-blocks"] = (6, "an element is in two blocks", twice)
    two = blocks(np.full((2, 60), ONE[TYPE_F16], np.uint16), (1, [0], range(60)), (1, [1], range(60)))
    data("rows", "<i4", (0, 1), (1, 0))(two)
    out["block-order"] = (6, "blocks of equal length with descending rows", two)
    far = at_columns(TYPE_F16, 300, [[0, 5, 299]])
    out["filler-without-gap"] = (6, "a filler that bridges no gap", blocks(far, (1, [0], [0, 5, 299])))
    data("values", "<u2", (1, 0))(out["filler-without-gap"][2])
    key("nnz", 0, 2)(out["filler-without-gap"][2])

    add(
        "bit-past-cols",
        2,
        "a bit past the last column",
        bitmap,
        data("index", "u1", (0, 0x02), (4, 0x80)),
        source=bits[:, :37],
    )
    add("stored-zero", 7, "a plain value is zero", bitmap, data("values", "<u2", (1, 0)))
    add("value-after-last", 7, "a plain value behind the last", bitmap, data("values", "<u2", (-1, 1)))
    add("row-ptr-bitmap", 7, "row_ptr does not match the bitmap", bitmap, data("row_ptr", "<i4", (1, 2)))
    add("code-after-last", 7, "a gap code behind the last non-zero", gaps, data("index", "u1", (-1, 0xF0)))
    values = at_columns(TYPE_F16, 40, [[3, 4, 5], [], [7]])
    add(
        "base",
        8,
        "a lower base fits as many values",
        coded,
        data("values", "u1", (2, 13), (8, 0), (9, 0), (10, 0), (11, 0)),
        source=np.where(values, ONE[TYPE_F16], 0).astype(np.uint16),
    )
    add("outlier-count", 8, "one outlier too many", coded, data("values", "u1", (4, 9)))
    add("coded-padding", 8, "a sign behind the last value", coded, data("values", "u1", (8 + 32 + 3, 0x80)))
    add("levels", 9, "the levels do not rise", q4, data("levels", "i1", (1, 1)))
    add("code-128", 9, "the code 128", q8, data("codes", "u1", (0, 128)))
    add("code-after-last-value", 9, "a code behind the last of a row", q4, data("codes", "u1", (3, 0x10)))
    add("empty-window", 9, "a window without non-zeros has a scale", q4, data("wscales", "u1", (1, 0x70)))
    add("factor", 9, "the factor of a row with non-zeros is 0", q4, data("factors", "<u2", (0, 0)))
    add("beyond-f16", 2, "a value of 65,536 or more in F16", q4, data("factors", "<u2", (0, 0x4B80)))  # 2^24
    add("act-missing-key", 10, "no `macko.act.kind`", macko, set_activation_keys, lambda f: f.drop(a + "act.kind"))
    add(
        "act-unknown-key",
        10,
        "another `macko.act.*` key",
        macko,
        set_activation_keys,
        setting(a + "act.note", gb.U32, 1),
    )
    add("act-share", 10, "a share above 1", macko, set_activation_keys, setting(a + "act.share", gb.F32, 1.5))
    return out


# ---- the folder ----


def accepted() -> dict[str, tuple[str, str, Dense, Encoder]]:
    """name -> (dense file, rule, model, encoder). A dense file with the same name has the decoded values."""
    model, out = lossless_model(), {}

    def add(name: str, dense: str, rule: str, model: Dense, encode: Encoder) -> None:
        out[name] = (dense, rule, model, encode)

    for b in (1, 2, 4, 8):
        rule = f"section 3, b = {b}: gaps of 2^b - 1, 2^b and 2^b + 1 columns, empty rows, experts, no non-zeros"
        add(f"macko-{b}", "lossless", rule, model, encoder("macko", index_bits=b))
    for b in (0, 2, 4, 8):
        name, rule = (f"packed-gaps-{b}", f"gap codes of {b} bits") if b else ("packed-bitmap", "a bitmap")
        add(name, "lossless", f"section 7: plain values, {rule}", model, encoder("packed", index_bits=b))
    for m in (7, 10):
        for e in (2, 3):
            options = {"value_type": packed.TYPE_CODED, "index_bits": 0, "mantissa_bits": m, "exponent_bits": e}
            rule = f"section 8, m = {m} (BF16: 7), e = {e}: outliers, subnormals, -0.0"
            add(f"coded-{m}-{e}", "lossless", rule, model, encoder("packed", **options))
    for b in (4, 8):
        options = {"index_bits": b, "max_granularity": 2, "min_columns": 128}
        rule = f"section 6, b = {b}: g = 2, blocks of 96, 97 and 128 entries, fillers, padding"
        add(f"ec-csr-{b}", "blocks", rule, blocks_model(), encoder("ec-csr", **options))
    add(
        "ec-csr-wide",
        "wide",
        "section 6: I32 bases; a gap between two blocks",
        wide_model(),
        encoder("ec-csr", index_bits=8),
    )
    for b in (3, 4, 5, 8):
        rule = f"section 9, b = {b}: W = 32, 64 and 512; 65,520 and more becomes 65,504; -0 in F16"
        add(f"quantized-{b}", f"quantized-{b}", rule, quantized_model(), in_windows(b))
    return out


README = """# Conformance files of the sparse GGUF format

Small files for the author of a reader of [FORMAT.md](../FORMAT.md), version 1.

* `accept/` has files that every reader must accept. Each decodes to the file of `dense/` in the table: the same tensors
  in the same order, bit for bit. (`dense/wide.gguf` is itself sparse, in `macko`, because its matrix has 65,537
  columns.) No file is a model.
* `refuse/` has files that every reader must refuse. Each breaks one rule, in the section of the table.
* [read_sparse_gguf.py](read_sparse_gguf.py) is a reader that was written from FORMAT.md alone, with Python's struct
  module and NumPy: `python3 read_sparse_gguf.py accept/macko-4.gguf dense/lossless.gguf`.

Provenance: `tests/support/make_vectors.py` writes this folder. The bytes of `example` and `examples` are those of
FORMAT.md. ggml-macko's encoders made the other matrices from numbers of a formula, and a line of the script damages
each refused file. `tests/codec/test_vectors.py` checks that the script reproduces all files, that the library and
read_sparse_gguf.py decode each to the same bits, and that both refuse the rest.

| file in `accept/` | file in `dense/` | rules |
|---|---|---|
{accepted}

| file in `refuse/` | section | what is wrong |
|---|---|---|
{refused}
"""


def write_all(folder: Path) -> None:
    """Writes the folder, without read_sparse_gguf.py."""
    for name in ("accept", "dense", "refuse"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    rows = {}

    def put(kind: str, name: str, f: gb.GGUF) -> None:
        (folder / kind / f"{name}.gguf").write_bytes(gb.write(f))

    for name, (f, dense) in (("example", example()), ("examples", examples())):
        put("accept", name, f)
        put("dense", name, dense)
    rows["example"] = ("example", "section 5, byte for byte")
    rows["examples"] = ("examples", "the examples of sections 6 to 9")
    for name, (dense, rule, model, encode) in accepted().items():
        put("accept", name, sparse_file(model, encode))
        rows[name] = (dense, rule)
        if name == dense:
            put("dense", name, decoded_file(model, encode))
    for name, model in (("lossless", lossless_model()), ("blocks", blocks_model())):
        put("dense", name, dense_file(model))
    put("dense", "wide", sparse_file(wide_model(), encoder("macko", index_bits=4)))

    model, encode = {"w": (at_columns(TYPE_F16, 40, [[1, 4, 39], [0]]), TYPE_F16)}, encoder("macko", index_bits=4)
    f, dense = sparse_file(model, encode), dense_file(model)
    for g in (f, dense):
        set_activation_keys(g)
        g.set("macko.x-note", gb.STRING, b"ignored")
        g.set("macko.prune.method", gb.STRING, b"ignored")
    put("accept", "act", f)
    put("dense", "act", dense)
    rows["act"] = ("act", "sections 2 and 10: `macko.act.*`, and keys that readers ignore")
    for g in (f, dense):
        g.set("macko.act.version", gb.U32, 2)
        g.set("macko.act.later", gb.U32, 1)
    put("accept", "act-later", f)
    put("dense", "act-later", dense)
    rows["act-later"] = ("act-later", "section 10: a later version of `macko.act.*` is ignored")

    whole = folder / "accept" / "macko-4.gguf"
    n = len(gb.read(whole.read_bytes()).tensors)
    for part in gb.split(whole, folder / "accept", [5, n - 5]):
        part.rename(part.with_name(part.name.replace("model-", "split-")))
    rows["split-00001-of-00002"] = ("lossless", "section 1: macko-4 in two files, cut between components")

    lies = refused()
    for name, (_, _, f) in lies.items():
        put("refuse", name, f)
    bytes_ = gb.write(one_matrix(encode, at_columns(TYPE_F16, 40, [[1, 4, 39]])))
    for name, what, data_ in (
        ("truncated", "the file ends in the last tensor", bytes_[:-33]),
        ("trailing-data", "bytes behind the last tensor", bytes_ + bytes(32)),
    ):
        (folder / "refuse" / f"{name}.gguf").write_bytes(data_)
        lies[name] = (1, what, f)

    def key_in_second_file(parts: list) -> None:
        parts[1].set("macko.x-note", gb.U32, 1)

    for part in gb.split(folder / "accept" / "act.gguf", folder / "refuse", [2, 1], key_in_second_file):
        part.rename(part.with_name(part.name.replace("model-", "split-")))
    lies["split-00001-of-00002"] = (1, "a `macko.*` key in the second file", f)
    (folder / "README.md").write_text(
        README.format(
            accepted="\n".join(f"| {name} | {dense} | {rule} |" for name, (dense, rule) in rows.items()),
            refused="\n".join(f"| {name} | {section} | {what} |" for name, (section, what, _) in lies.items()),
        )
    )


if __name__ == "__main__":
    write_all(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
