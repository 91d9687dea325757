"""The contents of a model file: types, shapes, densities and bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import console, errors
from ..codecs import registry
from ..codecs.codec import ValueCoding
from ..gguf import tensor_rules
from ..gguf.activation_keys import SkipRule, read_rule
from ..gguf.files import Model, Tensor, type_name
from ..native.codec import DeviceLayout, cpu_layout, gpu_layout
from ..native.devices import shared_nbytes


@dataclass(frozen=True)
class BlockSet:
    """Blocks of one shape in a tensor with blocks of rows."""

    granularity: int  # rows of a block
    vector_size: int
    blocks: int
    columns: int
    coverage: float  # share of the tensor's stored values


@dataclass(frozen=True)
class TensorReport:
    """A tensor of the dense model and its storage."""

    name: str
    type: str  # of the dense tensor
    shape: tuple[int, ...]  # ggml order: the number of columns first
    storage: str  # dense, or a TYPE of `macko convert` with its index
    density: float | None  # non-zeros over weights; None for types without a bit pattern for zero
    padding: float | None  # share of stored entries that only bridge gaps; None for a dense tensor
    nbytes: int  # as stored
    nbytes_dense: int
    n_elements: int
    break_even_density: float | None  # of random non-zeros at which this format is as large as dense, or the
    # default format of a dense tensor that could be stored sparse
    sets: tuple[BlockSet, ...] | None = None  # for a format in blocks
    coding: ValueCoding | None = None  # for values that are coded without loss
    layout: DeviceLayout | None = None  # in the memory of the requested device

    @property
    def effective_density(self) -> float:
        """Stored bytes over bytes of the dense tensor."""
        return self.nbytes / self.nbytes_dense

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / self.n_elements


@dataclass(frozen=True)
class ModelReport:
    """A model file, or all shards of a split model."""

    path: str
    is_sparse: bool
    format_version: int | None  # macko.version
    metadata: Mapping[str, Any]  # name, architecture and macko.* keys
    skip_rule: SkipRule | None  # the neurons that may be skipped for a token, if the file has a rule
    nbytes: int  # on disk
    tensors: tuple[TensorReport, ...]

    @property
    def n_parameters(self) -> int:
        return sum(t.n_elements for t in self.tensors)

    @property
    def n_sparse(self) -> int:
        return sum(t.storage != "dense" for t in self.tensors)

    @property
    def nbytes_dense(self) -> int:
        return sum(t.nbytes_dense for t in self.tensors)

    @property
    def bits_per_weight(self) -> float | None:
        return self.nbytes * 8 / self.n_parameters if self.n_parameters else None


SHARED_KB = {"sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_120": 99}
"""Shared memory per block in KB, by compute capability."""


def parse_device(text: str) -> int:
    """Bytes of shared memory of a GPU; 0 for `cpu`. `cuda`, `cuda:1`, `CUDA1` and `MACKO1` are GPUs of this machine;
    `cuda:sm_86`, `cuda:99KB`, or both with a comma describe any.
    """
    if text == "cpu":
        return 0
    if present := re.fullmatch(r"cuda|(?:cuda:?|macko)(\d{1,3})", text, re.IGNORECASE):
        return shared_nbytes(int(present[1] or 0))
    name, _, details = text.partition(":")
    sizes = []
    for word in details.split(","):
        size = re.fullmatch(r"(\d{1,6})KB", word)
        if word not in SHARED_KB and not size:
            name = ""
        sizes.append(int(size[1]) if size else SHARED_KB.get(word, 0))
    if name != "cuda":
        known = ", ".join(f"cuda:{word}" for word in SHARED_KB)
        raise errors.bad_argument(f"device '{text}': expected cpu, cuda, cuda:0, {known}, or cuda:<n>KB")
    return sizes[-1] << 10


def inspect(path: str | os.PathLike[str], *, n_threads: int = 0, device: str | None = None) -> ModelReport:
    """Describes a GGUF model, dense or sparse: for each tensor the density of non-zeros, the share of padding entries,
    and bytes as stored. Dense tensors are read to count their zeros; n_threads=0 uses all cores.

    path: the model, or the first file of a split one. device: also finds the layout of each sparse tensor in the memory
    of that device; see parse_device(). Raises MackoError if it is not a valid model, OSError if it cannot be read.
    """
    on_device = None if device is None else parse_device(device)
    with Model(path) as model:
        keys = {k.name: k.value() for k in model.keys if k.name in ("general.architecture", "general.name")}
        keys.update({k.name: k.value() for k in model.keys if k.name.startswith("macko.")})
        version = model.key("macko.version")
        return ModelReport(
            path=str(model.path),
            is_sparse=model.is_sparse,
            format_version=version.value() if version else None,
            metadata=keys,
            skip_rule=read_rule(model),
            nbytes=model.nbytes,
            tensors=tuple(
                inspect_tensor(t, n_threads, on_device)
                for t in console.tracked(model.tensors, "reading", lambda t: t.nbytes_stored, "B")
            ),
        )


def inspect_tensor(t: Tensor, n_threads: int = 0, on_device: int | None = None) -> TensorReport:
    density = padding = sets = coding = layout = None
    if t.codec is not None and t.sparse is not None:
        stored = t.stored_arrays()
        n_stored = t.codec.n_stored(stored)
        density = t.sparse.nnz / t.n_elements
        padding = (n_stored - t.sparse.nnz) / n_stored if n_stored else 0.0
        coding = t.codec.coding(stored, t.sparse.value_type, t.sparse.nnz)
        if on_device is not None:  # parse_device()
            layout = _layout_of(t, on_device, n_threads)
        table = t.codec.sets(stored)
        if table is not None:
            rows = table.tolist()
            sets = tuple(BlockSet(g, v, n, cols, coverage=g * cols / n_stored) for g, v, n, cols in rows)
    elif tensor_rules.is_value_type(t.type):
        unit = np.dtype(f"u{t.nbytes // t.n_elements}")
        density = sum(int(np.count_nonzero(block.view(unit))) for block in t.blocks(n_threads)) / t.n_elements
    return TensorReport(
        name=t.name,
        type=type_name(t.type),
        shape=t.ne,
        storage=t.storage_name,
        density=density,
        padding=padding,
        nbytes=t.nbytes_stored,
        nbytes_dense=t.nbytes,
        n_elements=t.n_elements,
        break_even_density=_break_even(t),
        sets=sets,
        coding=coding,
        layout=layout,
    )


def _layout_of(t: Tensor, on_device: int, n_threads: int) -> DeviceLayout:
    m = t.read_sparse()
    if not on_device:
        return cpu_layout(m.header)
    return gpu_layout(m, on_device, stacked=len(t.ne) > 2, n_threads=n_threads)


def _break_even(t: Tensor) -> float | None:
    if t.codec is not None and t.sparse is not None:
        return t.codec.break_even_density(t.cols, t.type, t.sparse.index_bits, t.sparse.value_type)
    if tensor_rules.is_value_type(t.type) and tensor_rules.may_be_sparse(t.name, len(t.ne)):
        return registry.break_even_density(t.cols, t.type)
    return None
