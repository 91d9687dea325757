"""GGUF files, dense or sparse, with checked headers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from .library import check, ffi, from_struct, lib, new_struct

WEIGHT_OTHER, WEIGHT_BLOCK, WEIGHT_HEAD = range(3)  # enum ggml_macko_weight_use


@dataclass(frozen=True)
class FileTensor:
    """An entry of the file's own tensor table."""

    name: str
    type: int  # ggml type id
    ne: tuple[int, ...]  # ggml order, n_dims numbers
    offset: int  # of the data, from the start of the file
    nbytes: int
    sparse_index: int  # index of the sparse matrix that the tensor is a component of, or -1


@dataclass(frozen=True)
class FileSparse:
    """A sparse matrix of the file."""

    name: str
    format: str
    type: int
    value_type: int  # of the stored values: equals type, or a quantized type in some formats
    index_bits: int  # macko.tensor.index_bits
    ne: tuple[int, ...]  # dense shape, ggml order
    nnz: int
    nbytes: int
    nbytes_dense: int
    tensor_index: tuple[int, ...]  # of its components in the tensor table, in the order of Codec.suffixes


class File:
    """A GGUF file, dense or sparse, with a checked header."""

    def __init__(self, path: str | os.PathLike[str], require_model: bool = False):
        out = ffi().new("struct ggml_macko_file **")
        check(lib().ggml_macko_file_open(os.fsencode(path), require_model, out))
        self._c: Any = ffi().gc(out[0], lib().ggml_macko_file_close)
        self.is_sparse = bool(lib().ggml_macko_file_is_sparse(self._c))
        self.size = int(lib().ggml_macko_file_size(self._c))
        self.alignment = int(lib().ggml_macko_file_alignment(self._c))

    def close(self) -> None:
        if self._c is not None:
            ffi().release(self._c)
            self._c = None

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def tensors(self) -> list[FileTensor]:
        """The entries in the order of the tensor table."""
        info = new_struct("ggml_macko_tensor_info")
        out = []
        for i in range(lib().ggml_macko_file_n_tensors(self._c)):
            check(lib().ggml_macko_file_tensor(self._c, i, info))
            out.append(from_struct(FileTensor, info, ne=tuple(info.ne[0 : info.n_dims])))
        return out

    def sparse(self) -> list[FileSparse]:
        """The sparse matrices."""
        info = new_struct("ggml_macko_sparse_info")
        out = []
        for i in range(lib().ggml_macko_file_n_sparse(self._c)):
            check(lib().ggml_macko_file_sparse(self._c, i, info))
            ne = tuple(info.ne[0 : info.n_dims])
            index = tuple(range(info.first_tensor, info.first_tensor + info.n_components))
            out.append(from_struct(FileSparse, info, ne=ne, tensor_index=index))
        return out

    def check_payload(self, i: int, n_threads: int = 0) -> None:
        """Full validation of sparse matrix i."""
        check(lib().ggml_macko_file_check_payload(self._c, i, n_threads))


def weight_use(name: str, n_dims: int) -> int:
    """WEIGHT_OTHER, WEIGHT_BLOCK or WEIGHT_HEAD: how llama.cpp uses a weight of this name."""
    return int(lib().ggml_macko_weight_use_of(name.encode(), n_dims))
