"""NumPy arrays, or CuPy's where that is installed and finds a GPU: the same functions on either.

CuPy is no dependency; it is imported only here. Code that serves both takes the module from `of` an array it was given.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np


@functools.cache
def gpu() -> Any:
    """CuPy, or None: not installed, broken, or no GPU."""
    try:
        import cupy
        import cupyx  # noqa: F401

        return cupy if cupy.cuda.runtime.getDeviceCount() > 0 else None
    except Exception:  # CuPy raises many kinds when the driver or a library is missing
        return None


def of(array: Any) -> Any:
    """The module that array belongs to."""
    return np if isinstance(array, np.ndarray) else gpu()


def to_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else gpu().asnumpy(array)


def linalg_raises(xp: Any) -> contextlib.AbstractContextManager:
    """In the block, factorisations that fail raise LinAlgError with either module."""
    if xp is np:
        return contextlib.nullcontext()
    import cupyx

    return cupyx.errstate(linalg="raise")
