"""GGUF files as Python objects that a test may change in any way, valid or not. For small files."""

from __future__ import annotations

import copy
import pathlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
PACK = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}
# ggml type -> (elements, bytes) of a block, for the types that the tests use
BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    6: (32, 22),
    8: (32, 34),
    9: (32, 36),
    24: (1, 1),
    25: (1, 2),
    26: (1, 4),
    27: (1, 8),
    28: (1, 8),
    30: (1, 2),
}


@dataclass
class Key:
    name: bytes
    type: int
    value: object  # a number, bytes, or a list of them
    element_type: int = -1  # for arrays


@dataclass
class Tensor:
    name: bytes
    ne: list
    type: int
    data: bytes


@dataclass
class GGUF:
    keys: list = field(default_factory=list)
    tensors: list = field(default_factory=list)
    alignment: int = 32

    def key(self, name: str):
        return next((k for k in self.keys if k.name == name.encode()), None)

    def set(self, name: str, type_: int, value, element_type: int = -1) -> None:
        old = self.key(name)
        new = Key(name.encode(), type_, value, element_type)
        if old is None:
            self.keys.append(new)
        else:
            self.keys[self.keys.index(old)] = new

    def drop(self, name: str) -> None:
        self.keys.remove(self.key(name))

    def tensor(self, name: str):
        return next(t for t in self.tensors if t.name == name.encode())


def _pack(type_: int, value) -> bytes:
    """The bytes of a value; the low bytes of a number that does not fit."""
    if type_ == STRING:
        return struct.pack("<Q", len(value)) + value
    code = PACK.get(type_, "B")  # an unknown type: one byte
    if code in "fd":
        try:
            return struct.pack("<" + code, value)
        except OverflowError:
            return struct.pack("<" + code, float("inf"))
    nbytes = struct.calcsize(code)
    return (int(value) & ((1 << 8 * nbytes) - 1)).to_bytes(nbytes, "little")


def write(f: GGUF) -> bytes:
    return b"".join(pieces(f))


def pieces(f: GGUF) -> Iterator[bytes]:
    """The bytes of a file: its header, then the data and the padding of each tensor."""
    out = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(f.tensors), len(f.keys)))
    for k in f.keys:
        out += _pack(STRING, k.name) + struct.pack("<I", k.type)
        if k.type == ARRAY:
            out += struct.pack("<IQ", k.element_type, len(k.value)) + b"".join(
                _pack(k.element_type, v) for v in k.value
            )
        else:
            out += _pack(k.type, k.value)
    offset = 0
    for t in f.tensors:
        out += _pack(STRING, t.name) + struct.pack("<I", len(t.ne)) + b"".join(_pack(U64, n) for n in t.ne)
        out += struct.pack("<IQ", t.type, offset)
        offset += -(-len(t.data) // f.alignment) * f.alignment
    yield bytes(out + bytes(-len(out) % f.alignment))
    for t in f.tensors:
        yield t.data
        yield bytes(-len(t.data) % f.alignment)


def read(data: bytes) -> GGUF:
    pos = 8
    f = GGUF()

    def take(type_: int):
        nonlocal pos
        if type_ == STRING:
            n = take(U64)
            pos += n
            return data[pos - n : pos]
        code = "<" + PACK[type_]
        pos += struct.calcsize(code)
        return struct.unpack_from(code, data, pos - struct.calcsize(code))[0]

    n_tensors, n_keys = take(U64), take(U64)
    for _ in range(n_keys):
        name, type_ = take(STRING), take(U32)
        if type_ == ARRAY:
            element_type, n = take(U32), take(U64)
            f.keys.append(Key(name, type_, [take(element_type) for _ in range(n)], element_type))
        else:
            f.keys.append(Key(name, type_, take(type_)))
    alignment = f.key("general.alignment")
    f.alignment = alignment.value if alignment else 32
    offsets = []
    for _ in range(n_tensors):
        name = take(STRING)
        ne = [take(U64) for _ in range(take(U32))]
        f.tensors.append(Tensor(name, ne, take(U32), b""))
        offsets.append(take(U64))
    start = pos + -pos % f.alignment
    for t, offset in zip(f.tensors, offsets):
        block, nbytes = BLOCKS[t.type]
        n = nbytes
        for d in t.ne:
            n *= d
        t.data = data[start + offset : start + offset + n // block]
    return f


def split(path: pathlib.Path, folder: pathlib.Path, counts: list, change=lambda parts: None) -> list:
    """Splits a file as llama-gguf-split does, with the given numbers of tensors. The first part gets the metadata, each
    part three split.* keys.
    """
    whole = read(path.read_bytes())
    parts, at = [], 0
    for i, n in enumerate(counts):
        part = GGUF(copy.deepcopy(whole.keys) if i == 0 else [], whole.tensors[at : at + n], whole.alignment)
        part.set("split.no", U16, i)
        part.set("split.count", U16, len(counts))
        part.set("split.tensors.count", I32, len(whole.tensors))
        parts.append(part)
        at += n
    assert at == len(whole.tensors)
    change(parts)
    paths = [folder / f"model-{i + 1:05d}-of-{len(parts):05d}.gguf" for i in range(len(parts))]
    for p, part in zip(paths, parts):
        p.write_bytes(write(part))
    return paths
