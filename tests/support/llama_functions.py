"""Functions of Python in the place of llama.cpp's, for tests of what happens while a model loads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import llama_cpp.llama_cpp as api


def as_c(function: Callable[[int, api.llama_model_params], int | None]) -> ctypes._CFuncPtr:
    """function(stream or path, params) -> address of a model, as a C function: what llama_model_load_from_file_ptr is.

    Keep the result alive as long as C may call it.
    """
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, api.llama_model_params)(function)
