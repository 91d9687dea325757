"""Writes GGUF files front to back: the header, then the data of each tensor."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .. import console
from ..values import Array
from .files import Key, Model, pack_string
from .outputs import AtomicOutput


@dataclass(frozen=True)
class NewTensor:
    """An entry of the tensor table of a new file."""

    name: str
    type: int
    ne: tuple[int, ...]  # ggml order
    nbytes: int


def build_header(keys: Iterable[Key], tensors: Sequence[NewTensor], alignment: int) -> bytes:
    """All bytes before the data, with padding."""
    keys = list(keys)
    header = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys)))
    for key in keys:
        header += key.record
    offset = 0
    for t in tensors:
        header += pack_string(t.name) + struct.pack(f"<I{len(t.ne)}QIQ", len(t.ne), *t.ne, t.type, offset)
        offset += align(t.nbytes, alignment)
    return bytes(header.ljust(align(len(header), alignment), b"\0"))


def file_nbytes(keys: Iterable[Key], tensors: Sequence[NewTensor], alignment: int) -> int:
    """The exact size of the file that Writer writes."""
    return len(build_header(keys, tensors, alignment)) + sum(align(t.nbytes, alignment) for t in tensors)


class Writer:
    """Writes a GGUF into an open output: the header, then the data of each tensor in table order."""

    def __init__(self, output: AtomicOutput, keys: Iterable[Key], tensors: Sequence[NewTensor], alignment: int):
        self._output = output
        self._alignment = alignment
        self._left = [t.nbytes for t in tensors]
        output.write(output.magic + build_header(keys, tensors, alignment)[4:])

    def write(self, blocks: Iterable[Array]) -> None:
        """Writes the data of the next tensor."""
        nbytes = self._left.pop(0)
        written = 0
        for block in blocks:
            data = np.ascontiguousarray(block).data.cast("B")
            self._output.write(data)
            written += len(data)
        if written != nbytes:
            raise RuntimeError(f"wrote {written} bytes of a tensor of {nbytes}")
        self._output.write(bytes(align(nbytes, self._alignment) - nbytes))

    def skip(self) -> None:
        """Leaves a hole in the place of the data of the next tensor."""
        self._output.skip(align(self._left.pop(0), self._alignment))

    def finish(self) -> None:
        if self._left:
            raise RuntimeError(f"{len(self._left)} tensors were not written")


def align(n: int, alignment: int) -> int:
    return (n + alignment - 1) // alignment * alignment


# ---- copies ----


def write_with_keys(model: Model, keys: Iterable[Key], output: AtomicOutput) -> None:
    """Copies a model, with its sparse tensors and these metadata, into one file, which the caller seals. Raises
    MackoError if the model has changed meanwhile.
    """
    stored = [(shard, t) for shard in model.shards for t in shard.tensors]
    tensors = [NewTensor(t.name, t.type, t.ne, t.nbytes) for _, t in stored]
    writer = Writer(output, keys, tensors, model.alignment)
    for shard, t in console.tracked(stored, "writing", lambda s: s[1].nbytes, "B"):
        writer.write(shard.blocks(t.offset, t.nbytes))
    writer.finish()
    model.check_unchanged()


def is_written(model: Model, written: Model) -> bool:
    """Whether the stored bytes of all tensors are equal in both files."""
    a, b = ([(shard, t) for shard in m.shards for t in shard.tensors] for m in (model, written))
    return len(a) == len(b) and all(
        (t.name, t.type, t.ne) == (u.name, u.type, u.ne)
        and all(map(np.array_equal, s.blocks(t.offset, t.nbytes), v.blocks(u.offset, u.nbytes)))
        for (s, t), (v, u) in zip(a, b)
    )
