"""Loads models into llama.cpp with one call of C, so that a Python exception cannot interrupt a load."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, fields
from typing import Any

from .library import check, ffi, lib, new_struct


@dataclass(frozen=True)
class LlamaFunctions:
    """Addresses of functions of the process's libllama."""

    load_from_file: int
    load_from_file_ptr: int
    model_free: int
    params: type[ctypes.Structure]  # the installed package's llama_model_params


def _layout(params: type[ctypes.Structure]) -> dict[str, int]:
    """The members of a struct ggml_macko_params_layout."""
    places = {"nbytes": ctypes.sizeof(params)}
    for name, _ in ffi().typeof("struct ggml_macko_params_layout").fields[1:]:
        member = getattr(params, name, None)
        places[name] = -1 if member is None else member.offset
    return places


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded.

    compress: encode the weights of a dense model that shrink.
    keep_negative_zeros: with compress, keep -0.0 as a value (default: it counts as zero).
    sparse_only: fail if llama.cpp places a sparse weight on a device of another backend (default: make it dense there).
    strict: fail for sparse files of architectures without rules for their metadata (default: trust llama.cpp).
    cache: keep CPU weights in a file in their memory layout; the next load of the unchanged model maps this file.
    """

    compress: bool = False
    keep_negative_zeros: bool = False
    sparse_only: bool = False
    strict: bool = False
    cache: bool = False

    def words(self) -> list[str]:
        """The same options as words of GGML_MACKO_LOAD."""
        return [field.name.replace("_", "-") for field in fields(self) if getattr(self, field.name)]


def load_model(
    path: str | os.PathLike[str] | bytes,
    params_address: int,
    functions: LlamaFunctions,
    options: LoadOptions | None = None,
) -> int:
    """The address of the llama_model of a file, dense or sparse; 0 if llama.cpp refused a dense file. The caller owns
    the model.

    params_address: address of a llama_model_params. options: GGML_MACKO_LOAD in the environment adds to them.
    Raises FileFormatError for a damaged sparse file, FileAccessError for a directory, FIFO, socket or device, and
    LoadError if llama.cpp refused a sparse file.
    """
    c_functions = new_struct("ggml_macko_llama")
    for name in ("load_from_file", "load_from_file_ptr", "model_free"):
        setattr(c_functions, name, ffi().cast("void (*)(void)", getattr(functions, name)))
    for name, place in _layout(functions.params).items():
        setattr(c_functions.params, name, place)
    model_free = ffi().cast("void (*)(struct llama_model *)", functions.model_free)

    def free_if_kept(owner: Any) -> None:
        if owner[0]:
            model_free(owner[0])

    params = ffi().cast("const struct llama_model_params *", params_address)
    owner = ffi().gc(ffi().new("struct llama_model **"), free_if_kept)  # after an exception before the return
    words = (options or LoadOptions()).words()
    flags = sum(getattr(lib(), "GGML_MACKO_LOAD_" + word.replace("-", "_").upper()) for word in words)
    check(lib().ggml_macko_load_model(os.fsencode(path), params, flags, c_functions, owner))
    address = int(ffi().cast("uintptr_t", owner[0]))
    owner[0] = ffi().NULL
    return address
