"""llama.cpp's imatrix files: the sum of squares of each input column of each weight, over a calibration text.

llama-imatrix writes this GGUF format, and llama-quantize reads it. Each weight X has a tensor X.in_sum2 (F32, one row
of sums per expert) and X.counts (F32, number of summed input rows, one or one per expert). The file has four keys.
Invalid files are refused with one line. Sums are finite and not negative, and counts fit them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .. import errors
from ..gguf.files import Key, Model, Tensor, make_key
from ..gguf.outputs import AtomicOutput
from ..gguf.writer import NewTensor, Writer
from ..regular_files import named, open_regular, read_at
from ..values import TYPE_F32, Array

SUMS, COUNTS = ".in_sum2", ".counts"
_ALIGNMENT = 32
_LARGEST_COUNT = 2**53
_LEAST_WEIGHT = 1e-4  # of the mean, so that a block whose inputs were zero in the text is not lost


@dataclass
class Statistics:
    """The statistics of one weight."""

    sums: Array  # (matrices, cols), >= 0
    counts: Array  # int64, one per matrix, or one for all

    @property
    def n_unused(self) -> int:
        """The number of experts without tokens."""
        return int(np.count_nonzero(self.counts == 0))


@dataclass
class Imatrix:
    path: Path  # for messages
    entries: dict[str, Statistics]  # by the name of the weight
    datasets: list[str] = field(default_factory=list)  # text files
    chunk_count: int = 0
    chunk_size: int = 0  # tokens

    def of(self, tensor: Tensor) -> Statistics:
        """The statistics of a tensor of the model, sums (n_mat, cols) and counts (n_mat,).

        counts[i] and sums[i] are 0 for an expert without tokens. Raises MackoError without statistics or for another
        shape.
        """
        found = self.entries.get(tensor.name)
        if found is None:
            raise errors.bad_argument(f"{self.path}: did not find weights for {tensor.name}")
        cols, n_mat = tensor.cols, _n_mat(tensor)
        if found.sums.size != cols * n_mat or len(found.counts) not in (1, n_mat):
            raise errors.bad_argument(
                f"{self.path}: {tensor.name}: {_shape(found.sums)} sums and {len(found.counts)} counts, but the tensor "
                f"has {n_mat} x {cols} columns: it is the imatrix of another model"
            )
        return Statistics(found.sums.reshape(n_mat, cols), np.broadcast_to(found.counts, n_mat))

    def column_weights(self, tensor: Tensor) -> Array | None:
        """Weights of squared errors, float32 (matrices, cols): the mean square of each input column, scaled to a mean
        of 1 per matrix. None for a tensor without statistics. Raises the errors of `of`.
        """
        if tensor.name not in self.entries:
            return None
        found = self.of(tensor)
        mean = found.sums / np.maximum(found.counts, 1)[:, None]
        mean[found.counts == 0] = 1  # an expert without tokens
        mean /= mean.mean(axis=1, keepdims=True)
        return np.maximum(mean, _LEAST_WEIGHT).astype(np.float32)

    def check_model(self, model: Model) -> None:
        """Raises MackoError unless each entry has the name and the shape of a tensor of the model."""
        tensors = {t.name: t for t in model.tensors}
        for name in self.entries:
            if name not in tensors:
                raise errors.bad_argument(
                    f"{self.path}: {name}: {model.path} has no such tensor: it is the imatrix of another model"
                )
            self.of(tensors[name])


def _n_mat(tensor: Tensor) -> int:
    return int(np.prod(tensor.ne[2:], dtype=np.int64))


def _shape(a: Array) -> str:
    return " x ".join(map(str, a.shape))


# ---- reading ----


def read(path: str | os.PathLike[str]) -> Imatrix:
    """Reads a file. Raises MackoError with file, tensor, position and value, or OSError."""
    path = Path(path)
    with named(path), open_regular(path) as f:
        magic = bytearray(4)
        if read_at(f, 0, memoryview(magic)) and magic != b"GGUF":
            raise errors.bad_argument(
                f"{path}: is not a GGUF file; an imatrix in the old format becomes one with llama-imatrix --in-file"
            )
    with Model(path) as file:
        keys = {k.name: k.value() for k in file.keys if not k.name.startswith("tokenizer.")}
        if keys.get("general.type", "imatrix") != "imatrix":
            raise errors.bad_argument(f"{path}: general.type is {keys['general.type']!r}, not 'imatrix'")
        parts = {t.name: t for t in file.tensors}
        names = sorted({n[: -len(s)] for n in parts for s in (SUMS, COUNTS) if n.endswith(s)})
        if not names:
            raise errors.bad_argument(f"{path}: holds no statistics: it is not an imatrix")
        out = Imatrix(
            path,
            {name: _read_entry(path, name, parts) for name in names},
            _checked_key(path, keys, "imatrix.datasets", list, []),
            _checked_key(path, keys, "imatrix.chunk_count", int, 0),
            _checked_key(path, keys, "imatrix.chunk_size", int, 0),
        )
        file.check_unchanged()
        return out


def _checked_key(path: Path, keys: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = keys.get(name, default)
    if not isinstance(value, kind):
        raise errors.bad_argument(f"{path}: {name} has another type than llama-imatrix writes")
    return value


def _read_entry(path: Path, name: str, parts: Mapping[str, Tensor]) -> Statistics:
    def bad(text: str) -> errors.MackoError:
        return errors.bad_argument(f"{path}: {name}: {text}")

    arrays = []
    for suffix in (SUMS, COUNTS):
        t = parts.get(name + suffix)
        if t is None:
            raise bad(f"{suffix[1:]} is missing")
        if t.type != TYPE_F32:
            raise bad(f"{suffix[1:]} is not f32")
        arrays.append(t.read().view(np.float32))
    sums, counts = arrays
    for what, a in (("in_sum2", sums), ("counts", counts)):
        wrong = np.flatnonzero(~np.isfinite(a) | (a < 0))
        if len(wrong):
            raise bad(f"{what}[{wrong[0]}] is {a[wrong[0]]:g}; a finite number, at least 0, was expected")
    wrong = np.flatnonzero((counts != np.rint(counts)) | (counts > _LARGEST_COUNT))
    if len(wrong):
        raise bad(f"counts[{wrong[0]}] is {counts[wrong[0]]:.9g}; a whole number up to 2^53 was expected")
    rows = parts[name + SUMS].rows
    if sums.size % len(counts) or len(counts) not in (1, rows):
        raise bad(f"{len(counts)} counts for {rows} x {sums.size // rows} sums")
    sums = sums.reshape(len(counts), -1)
    used = counts > 0
    if not used.any():
        raise bad("all counts are 0: nothing was measured")
    empty = ~sums.any(axis=1)
    if np.any(used & empty):
        i = np.flatnonzero(used & empty)[0]
        where = f" of matrix {i}" if len(counts) > 1 else ""
        raise bad(f"all sums{where} are zero, over {counts[i]:.0f} rows")
    if np.any(~used & ~empty):
        raise bad(f"matrix {np.flatnonzero(~used & ~empty)[0]} has sums, but its count is 0")
    return Statistics(sums, counts.astype(np.int64))


# ---- writing ----


def write(imatrix: Imatrix, output: AtomicOutput) -> None:
    """Writes the file into an open output, which the caller seals and commits."""
    keys = [
        make_key("general.type", "str", "imatrix"),
        make_key("imatrix.datasets", "[str", imatrix.datasets),
        make_key("imatrix.chunk_count", "u32", imatrix.chunk_count),
        make_key("imatrix.chunk_size", "u32", imatrix.chunk_size),
    ]
    arrays = {}
    for name, s in sorted(imatrix.entries.items()):
        arrays[name + SUMS] = s.sums.reshape(len(s.counts), -1).astype(np.float32)
        arrays[name + COUNTS] = s.counts.reshape(-1, 1).astype(np.float32)
    write_arrays(arrays, keys, output)


_TYPES = {np.dtype(np.float32): TYPE_F32, np.dtype(np.int64): 27, np.dtype(np.float64): 28}


def write_arrays(arrays: Mapping[str, Array], keys: Sequence[Key], output: AtomicOutput) -> None:
    """Writes a GGUF of NumPy arrays with at most two dimensions, by name."""
    tensors = []
    for name, a in arrays.items():
        ne = a.shape[::-1]
        while len(ne) > 1 and ne[-1] == 1:  # as ggml counts dimensions
            ne = ne[:-1]
        tensors.append(NewTensor(name, _TYPES[a.dtype], ne, a.nbytes))
    writer = Writer(output, keys, tensors, _ALIGNMENT)
    for a in arrays.values():
        writer.write([a])
    writer.finish()
