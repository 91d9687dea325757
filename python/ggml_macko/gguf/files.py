"""Reads GGUF model files for the tools: dense or sparse, whole or split, with one tensor in memory at a time.

The C library checks the header of every file first. This module then reads the metadata from the checked header. It
copies keys as raw records, which preserves empty arrays, NaNs and types. gguf-py's reader would need 15 s and 600 MiB
for a 128k-token vocabulary, and its writer drops empty arrays. pread() reads data into NumPy buffers; no file is
mapped, so a file that shrinks causes an error and not SIGBUS.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import errors
from ..codecs import ggml_quants, registry
from ..codecs.codec import Codec, Component
from ..native.codec import EncodedMatrix, MatrixError, count_dense
from ..native.file import File, FileSparse, FileTensor
from ..regular_files import open_regular, read_at
from ..values import TYPE_NAMES, Array, bits_dtype, component_dtype, to_float

MAX_NAME = 63  # bytes of a tensor name; FORMAT.md section 4
COPY_BLOCK = 16 << 20  # bytes per step when a tensor is copied

# ---- metadata ----

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_U32, _F32, _STRING, _ARRAY, _U64 = 4, 6, 8, 9, 10


@dataclass(frozen=True)
class Key:
    """A metadata entry: its record in the file, and the start of its value."""

    name: str
    type: int
    record: bytes
    value_at: int

    def value(self) -> Any:
        return _read_value(self.record, self.value_at, self.type)[0]


def _read_value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    """The value at `at` in checked data, and its end."""
    if kind in _SCALARS:
        layout = _SCALARS[kind]
        return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)
    if kind == _STRING:
        (n,) = struct.unpack_from("<Q", data, at)
        return data[at + 8 : at + 8 + n].decode("utf-8", errors="replace"), at + 8 + n
    element, n = struct.unpack_from("<IQ", data, at)
    at += 12
    if element in _SCALARS:
        width = struct.calcsize(_SCALARS[element])
        return np.frombuffer(data, _SCALARS[element][1:].replace("?", "B"), n, at).tolist(), at + n * width
    out: list[Any] = []
    for _ in range(n):
        value, at = _read_value(data, at, element)
        out.append(value)
    return out, at


def _value_end(data: bytes, at: int, kind: int) -> int:
    """The end of a value, without the value: vocabularies have 100,000 strings."""
    if kind in _SCALARS:
        return at + struct.calcsize(_SCALARS[kind])
    length = struct.Struct("<Q").unpack_from
    if kind == _STRING:
        return at + 8 + int(length(data, at)[0])
    element, n = struct.unpack_from("<IQ", data, at)
    at += 12
    if element in _SCALARS:
        return at + int(n) * struct.calcsize(_SCALARS[element])
    for _ in range(n):
        at += 8 + int(length(data, at)[0])
    return at


def _walk_keys(header: bytes) -> list[Key]:
    n_keys = struct.unpack_from("<Q", header, 16)[0]
    at, keys = 24, []
    for _ in range(n_keys):
        begin = at
        name, at = _read_value(header, at, _STRING)
        (kind,) = struct.unpack_from("<I", header, at)
        value_at = at + 4
        at = _value_end(header, value_at, kind)
        if at > len(header):
            raise struct.error("key past the header")
        keys.append(Key(name, kind, header[begin:at], value_at - begin))
    return keys


def make_key(name: str, kind: str, value: Any) -> Key:
    """A new metadata entry. kind: "u32", "u64", "f32", "str", "[u32", "[u64", "[f32" or "[str"."""
    prefix = pack_string(name)
    kind_id = element = {"u32": _U32, "u64": _U64, "f32": _F32, "str": _STRING}[kind.lstrip("[")]
    values = value if kind.startswith("[") else [value]
    body = b"".join(pack_string(v) if element == _STRING else struct.pack(_SCALARS[element], v) for v in values)
    if kind.startswith("["):
        kind_id, body = _ARRAY, struct.pack("<IQ", element, len(value)) + body
    return Key(name, kind_id, prefix + struct.pack("<I", kind_id) + body, len(prefix) + 4)


def pack_string(text: object) -> bytes:
    data = re.sub("[\ud800-\udfff]", "\ufffd", str(text)).encode("utf-8")  # as in a file name that is not UTF-8
    return struct.pack("<Q", len(data)) + data


# ---- reading ----


def type_name(type_id: int) -> str:
    """llama.cpp's spelling of a ggml type id."""
    if type_id in TYPE_NAMES:
        return TYPE_NAMES[type_id]
    import gguf

    try:
        return gguf.GGMLQuantizationType(type_id).name.lower().replace("_k", "_K")
    except ValueError:  # gguf-py may have fewer types than llama.cpp
        return f"type {type_id}"


def _is_unchanged(file: os.stat_result, before: os.stat_result) -> bool:
    """Whether it is the same file with the same content. st_ctime reveals a write after which st_mtime was restored; it
    also changes with the number of links, as when another file gets the name.
    """
    found, expected = ((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in (file, before))
    return found == expected and (file.st_ctime_ns == before.st_ctime_ns or file.st_nlink != before.st_nlink)


class _Shard:
    """One file: its descriptor and its checked header."""

    def __init__(self, path: Path):
        self.path = path
        with contextlib.ExitStack() as on_error:
            self.file = on_error.enter_context(open_regular(path))
            self.opened = os.fstat(self.file.fileno())
            checked = on_error.enter_context(File(path))
            if not _is_unchanged(os.stat(path), self.opened):  # the checked file was another one
                raise errors.error(errors.FILE_CHANGED, f"{path}: changed while it was opened")
            self.checked = checked
            self.is_sparse = checked.is_sparse
            self.tensors = checked.tensors()
            self.sparse = checked.sparse()
            self.alignment = checked.alignment
            header = self.read(0, min((t.offset for t in self.tensors), default=checked.size)).tobytes()
            try:
                self.keys = _walk_keys(header)
            except (struct.error, MemoryError, ValueError) as e:
                raise errors.error(errors.FILE_CHANGED, f"{path}: changed while it was read") from e
            on_error.pop_all()

    def close(self) -> None:
        self.checked.close()
        self.file.close()

    def read(self, offset: int, nbytes: int) -> Array:
        out = np.empty(nbytes, dtype=np.uint8)
        try:
            n = read_at(self.file, offset, out.data)
        except OSError as e:
            raise errors.error(errors.IO, f"{self.path}: {e.strerror}") from e
        if n != nbytes:
            raise errors.error(errors.FILE_CHANGED, f"{self.path}: became shorter while it was read")
        return out

    def blocks(self, offset: int, nbytes: int) -> Iterator[Array]:
        """The bytes in blocks."""
        for at in range(0, nbytes, COPY_BLOCK):
            yield self.read(offset + at, min(COPY_BLOCK, nbytes - at))

    def check_unchanged(self) -> None:
        if not _is_unchanged(os.fstat(self.file.fileno()), self.opened):
            raise errors.error(errors.FILE_CHANGED, f"{self.path}: changed while it was read")


class FileArrays:
    """The components of a sparse matrix in a file, as codec.StoredArrays."""

    def __init__(self, shard: _Shard, tensors: Sequence[FileTensor]):
        self._shard = shard
        self._tensors = tensors

    @property
    def components(self) -> list[Component]:
        return [Component(t.type, int(np.prod(t.ne, dtype=np.int64)), t.nbytes) for t in self._tensors]

    def data(self, i: int) -> Array:
        """The bytes of component i, uint8."""
        return self._shard.read(self._tensors[i].offset, self._tensors[i].nbytes)

    def array(self, i: int) -> Array:
        """Component i, an array of int32 or of bytes."""
        return self.data(i).view(component_dtype(self._tensors[i].type))

    def first_numbers(self, i: int, n: int) -> Array:
        t = self._tensors[i]
        return self._shard.read(t.offset, min(t.nbytes, 4 * n)).view(np.int32)

    def last_number(self, i: int) -> int:
        t = self._tensors[i]
        return int(self._shard.read(t.offset + t.nbytes - 4, 4).view(np.int32)[0])


@dataclass(frozen=True)
class Tensor:
    """A tensor of the dense model, stored dense or sparse."""

    name: str
    type: int
    ne: tuple[int, ...]  # ggml order: the number of columns first
    nbytes: int  # of the dense tensor
    shard: _Shard
    offset: int  # of the dense data; -1 if sparse
    sparse: FileSparse | None = None

    @property
    def rows(self) -> int:
        return int(np.prod(self.ne[1:], dtype=np.int64))

    @property
    def cols(self) -> int:
        return self.ne[0]

    @property
    def n_elements(self) -> int:
        return self.rows * self.cols

    @property
    def codec(self) -> Codec | None:
        """The codec of a sparse tensor."""
        return None if self.sparse is None else registry.codec(self.sparse.format)

    @property
    def storage_name(self) -> str:
        """The storage of the data: dense, or the TYPE of `macko convert` with its index."""
        if self.sparse is None:
            return "dense"
        return registry.codec(self.sparse.format).storage_name(self.sparse.index_bits, self.sparse.value_type)

    @property
    def is_quantized(self) -> bool:
        """Whether the tensor is stored sparse with quantized values, not bit for bit equal to its source."""
        return self.codec is not None and self.sparse is not None and self.codec.is_lossy(self.sparse.value_type)

    @property
    def nbytes_stored(self) -> int:
        return self.nbytes if self.sparse is None else self.sparse.nbytes

    def read(self, n_threads: int = 0) -> Array:
        """All dense bytes (uint8). A sparse tensor is checked and decoded."""
        if self.sparse is None:
            return self.shard.read(self.offset, self.nbytes)
        m = self.read_sparse()
        with self._named_errors():
            return registry.codec_of(m).decode(m, n_threads).reshape(-1).view(np.uint8)

    def measure_error(self, source: Array, n_threads: int = 0) -> tuple[EncodedMatrix, MatrixError]:
        """A checked sparse tensor, and its errors relative to the source bit patterns (rows, cols)."""
        m = self.read_sparse()
        with self._named_errors():
            return m, registry.codec_of(m).measure_error(m, source, n_threads=n_threads)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except errors.MackoError as e:
            raise errors.error(e.code, f"{self.shard.path}: {self.name}: {e}") from e

    def read_bits(self, n_threads: int = 0) -> Array:
        """Bit patterns (rows, cols) of an F16, BF16 or F32 tensor."""
        return self.read(n_threads).view(bits_dtype(self.type)).reshape(self.rows, self.cols)

    def read_values(self, n_threads: int = 0) -> npt.NDArray[np.float32]:
        """The values (rows, cols) of a tensor of any type, dequantized if need be. Raises MackoError (LIMIT)."""
        if self.type in TYPE_NAMES:
            return to_float(self.read_bits(n_threads), self.type)
        if not ggml_quants.can_dequantize(self.type):
            raise errors.error(
                errors.LIMIT, f"{self.shard.path}: {self.name}: {type_name(self.type)} values cannot be dequantized"
            )
        return ggml_quants.dequantize(self.read(), self.type, self.rows, self.cols, n_threads)

    def stored_arrays(self) -> FileArrays:
        """The arrays of a sparse tensor, for reading one at a time."""
        if self.sparse is None:
            raise errors.error(errors.NOT_SPARSE, f"{self.shard.path}: {self.name}: is not stored sparse")
        return FileArrays(self.shard, [self.shard.tensors[i] for i in self.sparse.tensor_index])

    def read_sparse(self) -> EncodedMatrix:
        """The unchecked stored arrays of a sparse tensor."""
        stored = self.stored_arrays()
        assert self.sparse is not None
        header = EncodedMatrix(
            format=self.sparse.format,
            rows=self.rows,
            cols=self.cols,
            type=self.type,
            value_type=self.sparse.value_type,
            index_bits=self.sparse.index_bits,
            nnz=self.sparse.nnz,
            arrays=(),
            types=tuple(c.type for c in stored.components),
        )
        return registry.codec(header.format).from_arrays(header, [stored.data(i) for i in range(len(header.types))])

    def blocks(self, n_threads: int = 0) -> Iterator[Array]:
        """The dense bytes: in blocks for a dense tensor, at once for a sparse tensor."""
        if self.sparse is not None:
            yield self.read(n_threads)
            return
        yield from self.shard.blocks(self.offset, self.nbytes)


def _is_format_key(name: str) -> bool:
    """Whether a key describes the storage and not the model."""
    return name.startswith(("split.", "macko.tensor.")) or name == "macko.version"


class Model:
    """A model file, dense or sparse, or all shards of a split model, presented as the dense model."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if self.path.is_dir():
            text = "is a directory, not a regular file; `macko convert` makes a GGUF of a Hugging Face checkpoint"
            raise errors.error(errors.NOT_A_FILE, f"{path}: {text}")
        self.shards: list[_Shard] = []
        try:
            for shard in _open_shards(self.path):
                self.shards.append(shard)
            self.alignment = self.shards[0].alignment
            self.tensors = [tensor for shard in self.shards for tensor in _dense_view(shard)]
            names = {t.name for t in self.tensors}
            if len(names) != len(self.tensors):
                raise errors.error(errors.DUPLICATE_TENSOR, f"{self.path}: a tensor is in two shards")
        except BaseException:
            self.close()
            raise

    @property
    def keys(self) -> list[Key]:
        """Metadata of the model: that of the first shard, without keys about storage."""
        return [k for k in self.shards[0].keys if not _is_format_key(k.name)]

    @property
    def stored_keys(self) -> list[Key]:
        """Metadata of the model and of its sparse tensors, for a copy in one file."""
        return [k for k in self.shards[0].keys if not k.name.startswith("split.")]

    @property
    def is_sparse(self) -> bool:
        return any(shard.is_sparse for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(shard.opened.st_size for shard in self.shards)

    @property
    def paths(self) -> list[Path]:
        return [shard.path for shard in self.shards]

    def key(self, name: str) -> Key | None:
        return next((k for k in self.shards[0].keys if k.name == name), None)

    def not_finite(self) -> str | None:
        """Names the first F16, BF16 or F32 tensor with a NaN or an infinity, with their number."""
        for t in self.tensors:
            n = count_dense(t.read_bits(), t.type).n_nonfinite if t.type in TYPE_NAMES else 0
            if n:
                return f"{t.shard.path}: {t.name}: {n} values are not finite"
        return None

    def check_unchanged(self) -> None:
        for shard in self.shards:
            shard.check_unchanged()

    def close(self) -> None:
        while self.shards:
            self.shards.pop().close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _part_name(path: Path) -> re.Match[str] | None:
    """The name of a file of llama-gguf-split; groups: model name, shard number, shard count."""
    return re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name, re.DOTALL)


def _part_path(path: Path, name: re.Match[str], no: int) -> Path:
    """The path of shard `no`, counted from 0."""
    return path.with_name(f"{name[1]}-{no + 1:05d}-of-{name[3]}.gguf")


def shard_paths(path: str | os.PathLike[str]) -> list[Path]:
    """The files of a model up to the first missing one, according to their names; no file is opened."""
    path = Path(path)
    name = _part_name(path)
    paths = [path] if name is None else (_part_path(path, name, no) for no in range(int(name[3])))
    return [*itertools.takewhile(Path.exists, paths)]


def _open_shards(path: Path) -> Iterator[_Shard]:
    first = _Shard(path)
    yield first
    numbers = {k.name: k.value() for k in first.keys if k.name.startswith("split.")}
    count = numbers.get("split.count", 1)
    if count in (0, 1):  # 0: llama-gguf-split merged it
        return
    name = _part_name(path)
    if not name or int(name[3]) != count or not isinstance(count, int) or not 1 < count <= 99999:
        raise errors.error(errors.SPLIT_FILE, f"{path}: shard of a split model, but not named NAME-00001-of-0000N.gguf")
    if numbers.get("split.no") != 0 or int(name[2]) != 1:
        raise errors.error(errors.SPLIT_FILE, f"{path}: is not the first shard; give {name[1]}-00001-of-{name[3]}.gguf")
    n_tensors = len(first.tensors)
    for no in range(1, count):
        shard = _Shard(_part_path(path, name, no))
        yield shard
        n_tensors += len(shard.tensors)
        found = {k.name: k.value() for k in shard.keys if k.name.startswith("split.")}
        if found.get("split.no") != no or found.get("split.count") != count:
            raise errors.error(errors.SPLIT_FILE, f"{shard.path}: is not shard {no + 1} of {count}")
    if numbers.get("split.tensors.count", n_tensors) != n_tensors:
        raise errors.error(
            errors.SPLIT_FILE, f"{path}: the shards hold {n_tensors} tensors, not {numbers['split.tensors.count']}"
        )


def _dense_view(shard: _Shard) -> Iterator[Tensor]:
    for t in shard.tensors:
        if t.sparse_index < 0:
            yield Tensor(t.name, t.type, t.ne, t.nbytes, shard, t.offset)
            continue
        sparse = shard.sparse[t.sparse_index]
        if shard.tensors[sparse.tensor_index[0]] is t:  # once, at the place of the first component
            yield Tensor(sparse.name, sparse.type, sparse.ne, sparse.nbytes_dense, shard, -1, sparse)
