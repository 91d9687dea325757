"""safetensors files, one tensor in memory at a time: a checked header, raw bytes, and a writer that streams.

The format is that of the safetensors package: 8 bytes with the length of a JSON header, the header, the data without
gaps. The package itself reads and writes whole files, does not support BF16 with NumPy, and changes its low-level
functions between releases. The tests compare this module with the package in both directions.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import errors
from ..gguf.outputs import AtomicOutput
from ..regular_files import named, open_regular, read_at
from ..values import Array

MAX_HEADER = 100_000_000  # bytes of the JSON; the limit of the safetensors package
MAX_DIMS = 8

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32,
    "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file."""

    name: str
    dtype: str  # key of DTYPE_BITS
    shape: tuple[int, ...]
    begin: int  # of its bytes, in the file
    nbytes: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class TensorFile:
    """A safetensors file that is open for reading; its header has been checked.

    Raises MackoError (FileFormatError) for a file that breaks a rule of the format, or OSError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with named(path):
            self._file = open_regular(path)
        try:
            self.tensors: Mapping[str, TensorEntry] = {t.name: t for t in self._read_header()}
        except BaseException:
            self.close()
            raise

    def _bad(self, what: str) -> errors.MackoError:
        return errors.error(errors.BAD_FORMAT, f"{self.path}: {what}")

    def _read_header(self) -> list[TensorEntry]:
        nbytes = os.fstat(self._file.fileno()).st_size
        if nbytes < 8:
            raise self._bad(f"has {nbytes} bytes: not a safetensors file")
        (n,) = struct.unpack("<Q", self._read_at(0, 8).tobytes())
        if n > min(MAX_HEADER, nbytes - 8):
            raise self._bad(f"a header of {n} bytes in a file of {nbytes}: not a safetensors file, or cut off")
        try:
            header = json.loads(self._read_at(8, n).tobytes().decode("utf-8"), object_pairs_hook=_without_twins)
        except (ValueError, RecursionError) as e:
            raise self._bad(f"its header is not valid: {errors.one_line(e)[:200]}") from e
        if not isinstance(header, dict):
            raise self._bad("its header is not a JSON object")
        entries = [self._entry(name, value, 8 + n) for name, value in header.items() if name != "__metadata__"]
        at = 8 + n
        for t in sorted(entries, key=lambda t: (t.begin, t.nbytes)):
            if t.begin != at:
                raise self._bad(f"{t.name}: its data begin at byte {t.begin}, where {at} is expected")
            at += t.nbytes
        if at != nbytes:
            raise self._bad(f"the data end at byte {at}, the file at {nbytes}")
        return entries

    def _entry(self, name: str, value: Any, data_at: int) -> TensorEntry:
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise self._bad(f"{name[:200]}: its entry is not dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            raise self._bad(f"{name[:200]}: dtype {str(dtype)[:40]!r} is not known")
        if not _are_sizes(shape) or len(shape) > MAX_DIMS:
            raise self._bad(f"{name[:200]}: its shape is not at most {MAX_DIMS} sizes")
        if not _are_sizes(offsets) or len(offsets) != 2:
            raise self._bad(f"{name[:200]}: its data_offsets are not two numbers")
        nbytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
        if offsets[1] - offsets[0] != nbytes:
            raise self._bad(f"{name[:200]}: {offsets[1] - offsets[0]} bytes for {nbytes} of {dtype} {shape}")
        return TensorEntry(name, dtype, tuple(shape), data_at + offsets[0], nbytes)

    def _read_at(self, offset: int, nbytes: int) -> Array:
        out = np.empty(nbytes, dtype=np.uint8)
        with named(self.path):
            if read_at(self._file, offset, out.data) < nbytes:
                raise errors.error(errors.FILE_CHANGED, f"{self.path}: became shorter while it was read")
        return out

    def read(self, name: str) -> Array:
        """The bytes (uint8) of a tensor."""
        t = self.tensors[name]
        return self._read_at(t.begin, t.nbytes)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        twin = next(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
        raise ValueError(f"{twin!r} stands twice")
    return out


@dataclass(frozen=True)
class NewTensor:
    """A tensor of a file that is being written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def write(path: Path, sources: Sequence[Path], tensors: Sequence[NewTensor], data: Iterable[Array]) -> None:
    """Writes a file that does not exist yet, and reads it back before it gets its name. data: the bytes of each tensor,
    in order. sources: files whose permissions limit those of the file. Raises MackoError or OSError, and then leaves no
    file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for t in tensors:
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text = text.ljust(-(-len(text) // 8) * 8)  # data begin at a multiple of 8
    size = struct.pack("<Q", len(text))
    checksums = []
    with AtomicOutput(path, sources, signature=size[:4]) as output:
        output.write(output.magic + size[4:] + text)
        for t, array in zip(tensors, data):
            if array.nbytes != t.nbytes:
                raise RuntimeError(f"{t.name}: {array.nbytes} bytes, expected {t.nbytes}")
            view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            output.write(view)
            checksums.append(zlib.crc32(view))
        output.seal()
        with TensorFile(output.partial) as written:
            found = [zlib.crc32(written.read(t.name).data) for t in tensors]
        if found != checksums:
            raise errors.error(errors.FILE_CHANGED, f"{path}: the file does not hold what was written")
        output.commit()
