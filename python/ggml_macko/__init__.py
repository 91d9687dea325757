"""Sparse LLM weights for stock llama.cpp: MACKO codec, CPU kernels, GGUF tools and a drop-in `Llama`.

    from ggml_macko import Llama, SparseMatrix

Importing the package is cheap: the C library and llama_cpp are loaded with the first name that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .errors import FileFormatError, MackoError, VersionMismatchError
    from .llama import Llama
    from .native.loader import register
    from .sparse_matrix import SparseMatrix

_HOME = {
    "Llama": "llama",
    "register": "native.loader",
    "SparseMatrix": "sparse_matrix",
    "MackoError": "errors",
    "FileFormatError": "errors",
    "VersionMismatchError": "errors",
}

__all__ = ["FileFormatError", "Llama", "MackoError", "SparseMatrix", "VersionMismatchError", "register"]


def __getattr__(name: str) -> object:
    if name == "__version__":  # one place for the number: the C library's
        return importlib.import_module(".native.bindings", __name__).version()
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list:
    return sorted([*globals(), *_HOME])
