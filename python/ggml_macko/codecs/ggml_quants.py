"""The quantizers of libggml, which llama-quantize uses, and their inverses, on NumPy arrays."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, TypeVar

import numpy as np
import numpy.typing as npt

from .. import system
from ..values import Array, to_float

Item = TypeVar("Item")
Result = TypeVar("Result")

_CHUNK = 1 << 20  # values per task of a thread

# types for dense weights, by name: ggml type id
DENSE_TYPES = {
    "q8_0": 8, "q6_k": 14, "q5_k": 13, "q5_1": 7, "q5_0": 6, "q4_k": 12, "q4_1": 3, "q4_0": 2, "iq4_nl": 20,
    "iq4_xs": 23, "q3_k": 11, "q2_k": 10,
}  # fmt: skip

MIXED_TYPES = ("q8_0", "q6_k", "q5_k", "q4_k", "iq4_xs", "q3_k", "q2_k")
"""The types that `--target-bpw` tries; MIXED_SMALL_BLOCKS replaces them if rows do not divide into their blocks."""

MIXED_SMALL_BLOCKS = ("q8_0", "q5_1", "q5_0", "iq4_nl")


@functools.cache
def library() -> ctypes.CDLL:
    """libggml-base, the copy that libllama uses."""
    import llama_cpp  # noqa: F401  loads it

    base = system.ggml_library("ggml-base")
    pointer, i64 = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("ggml_row_size", ctypes.c_size_t, [ctypes.c_int, i64]),
        ("ggml_blck_size", i64, [ctypes.c_int]),
        ("ggml_type_name", ctypes.c_char_p, [ctypes.c_int]),
        ("ggml_quantize_chunk", ctypes.c_size_t, [ctypes.c_int, pointer, pointer, i64, i64, i64, pointer]),
    ):
        getattr(base, name).restype = result
        getattr(base, name).argtypes = arguments
    return base


def block_size(type_id: int) -> int:
    """Values of a block."""
    return int(library().ggml_blck_size(type_id))


def mixed_types(cols: int) -> tuple[str, ...]:
    """The types that `--target-bpw` tries for a dense matrix with so many columns."""
    for names in (MIXED_TYPES, MIXED_SMALL_BLOCKS):
        if all(cols % block_size(DENSE_TYPES[name]) == 0 for name in names):
            return names
    return ()


def nbytes(type_id: int, rows: int, cols: int) -> float:
    """Bytes of a matrix; infinite if cols is not a multiple of the block size."""
    return rows * library().ggml_row_size(type_id, cols) if cols % block_size(type_id) == 0 else float("inf")


def quantize(
    bits: Array, source_type: int, type_id: int, weights: Array | None = None, n_threads: int = 0
) -> npt.NDArray[np.uint8]:
    """Quantizes bit patterns (rows, cols) of type F16, BF16 or F32 to uint8 (rows, bytes). cols is a multiple of the
    block size of type_id. weights: float32 weights of errors, (cols,) for all rows or (rows, cols).
    """
    rows, cols = bits.shape
    base = library()
    weights = None if weights is None else np.ascontiguousarray(weights, dtype=np.float32)
    out = np.empty((rows, base.ggml_row_size(type_id, cols)), dtype=np.uint8)
    step = 1 if weights is not None and weights.ndim == 2 else max(1, _CHUNK // cols)

    def quantize_rows(at: int) -> None:
        n = min(step, rows - at)
        x = np.ascontiguousarray(to_float(bits[at : at + n], source_type))
        w = None if weights is None else weights[at].ctypes.data if weights.ndim == 2 else weights.ctypes.data
        base.ggml_quantize_chunk(type_id, x.ctypes.data, out[at].ctypes.data, 0, n, cols, w)

    in_threads(quantize_rows, range(0, rows, step), n_threads)
    return out


def can_dequantize(type_id: int) -> bool:
    """Whether dequantize() supports a ggml type. F16, BF16 and F32 do not need it."""
    return _dequantizer(type_id) is not None


@functools.cache
def _dequantizer(type_id: int) -> Callable[..., None] | None:
    """The function of libggml for a type. Its arguments are the blocks, the result and the number of values."""
    function = getattr(library(), f"dequantize_row_{library().ggml_type_name(type_id).decode()}", None)
    if function is not None:
        function.restype = None
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    return function


def dequantize(data: Array, type_id: int, rows: int, cols: int, n_threads: int = 0) -> npt.NDArray[np.float32]:
    """The values (rows, cols) of a matrix of bytes (rows * bytes of a row,) in a ggml type that can_dequantize()."""
    function = _dequantizer(type_id)
    assert function is not None
    blocks = data.reshape(rows, -1)
    out = np.empty((rows, cols), dtype=np.float32)
    step = max(1, _CHUNK // cols)

    def dequantize_rows(at: int) -> None:
        function(blocks[at:].ctypes.data, out[at:].ctypes.data, min(step, rows - at) * cols)

    in_threads(dequantize_rows, range(0, rows, step), n_threads)
    return out


def in_threads(do: Callable[[Item], Result], items: Iterable[Item], n_threads: int = 0) -> list[Result]:
    """The results of do(item) for all items, in order. n_threads 0: all cores."""
    with ThreadPoolExecutor(n_threads if n_threads > 0 else system.available_cores()) as pool:
        return list(pool.map(do, items))
