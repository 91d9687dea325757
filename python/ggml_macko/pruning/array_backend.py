"""NumPy arrays, or CuPy arrays if CuPy is installed and finds a GPU.

CuPy is not a dependency; only this module imports it. Code for both libraries calls the functions of
`module_of(array)`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

Array = Any
"""A NumPy or CuPy array. The type is Any, because CuPy is optional."""

ArrayModule = Any
"""The module numpy or cupy."""


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
    """The module of an array, numpy or cupy."""
    return np if isinstance(array, np.ndarray) else gpu()


def to_host(array: Array) -> npt.NDArray[Any]:
    """The array in host memory. A NumPy array is not copied."""
    if isinstance(array, np.ndarray):
        return array
    cupy = gpu()
    assert cupy is not None  # the array is CuPy's
    host: npt.NDArray[Any] = cupy.asnumpy(array)
    return host


def from_torch(tensor: Any) -> Array:
    """The memory of a PyTorch tensor as a CuPy array, or as a NumPy array if it is in host memory."""
    cupy = gpu() if tensor.is_cuda else None
    return cupy.from_dlpack(tensor) if cupy is not None else tensor.numpy()


def raise_linalg_errors(xp: ArrayModule) -> contextlib.AbstractContextManager[object]:
    """A block in which a failed factorization raises numpy.linalg.LinAlgError with either module."""
    if xp is np:
        return contextlib.nullcontext()
    errstate: contextlib.AbstractContextManager[object] = importlib.import_module("cupyx").errstate(linalg="raise")
    return errstate
