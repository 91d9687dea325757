"""NumPy arrays, or CuPy arrays where CuPy is installed and finds a GPU: the same functions work on either.

CuPy is not a dependency, and this is the only module that imports it. Code that serves both libraries asks `module_of`
for the module of an array that it was given, and calls the functions of that module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

Array = Any
"""A NumPy or CuPy array. Any, because CuPy is optional: its types are unknown where it is not installed."""

ArrayModule = Any
"""The module numpy or cupy. Any, for the same reason."""


@functools.cache
def gpu() -> ArrayModule | None:
    """The module cupy, or None if it is not installed, does not work, or finds no GPU."""
    try:
        cupy = importlib.import_module("cupy")
        importlib.import_module("cupyx")
        return cupy if cupy.cuda.runtime.getDeviceCount() > 0 else None
    except Exception:  # CuPy raises many kinds of exceptions when the driver or a library is missing
        return None


def module_of(array: Array) -> ArrayModule:
    """The module, numpy or cupy, that an array belongs to."""
    return np if isinstance(array, np.ndarray) else gpu()


def to_host(array: Array) -> npt.NDArray[Any]:
    """The array in host memory; a NumPy array is returned as it is."""
    if isinstance(array, np.ndarray):
        return array
    cupy = gpu()
    assert cupy is not None  # the array is CuPy's
    host: npt.NDArray[Any] = cupy.asnumpy(array)
    return host


def from_torch(tensor: Any) -> Array:
    """The same memory as an array of CuPy, or of NumPy where the tensor lies in host memory. tensor: of PyTorch."""
    cupy = gpu() if tensor.is_cuda else None
    return cupy.from_dlpack(tensor) if cupy is not None else tensor.numpy()


def raise_linalg_errors(xp: ArrayModule) -> contextlib.AbstractContextManager[object]:
    """Within the block, a factorisation that fails raises numpy.linalg.LinAlgError with either module."""
    if xp is np:
        return contextlib.nullcontext()
    errstate: contextlib.AbstractContextManager[object] = importlib.import_module("cupyx").errstate(linalg="raise")
    return errstate
