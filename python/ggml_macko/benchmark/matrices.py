"""Speed of products of a matrix and a vector on the CPU: the plugin's kernels, and ggml's with dense matrices.

The compared functions run in turn, round by round. Results are medians.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Protocol

import numpy as np
import numpy.typing as npt

from .. import console, errors, system
from ..codecs import ggml_quants
from ..native.cpu import CpuMatrix
from ..sparse_matrix import SparseMatrix
from ..values import TYPE_F32

WORKING_SET = 256 << 20
"""Smallest number of dense bytes per round, larger than caches, so that weights come from memory."""

DENSE_TYPES = {"F16": 1, "Q8_0": 8, "Q4_K": 12}
"""Names of the dense types to compare with -> ggml type ids."""

K_QUANT_BLOCK = 256
"""Rows of quantized dense types must have a multiple of this number of columns."""


class _InitParams(ctypes.Structure):
    """The struct ggml_init_params of ggml.h."""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class GgmlMatVec:
    """ggml's y = W x on the CPU, for n_copies dense random matrices of a ggml type.

    Raises MackoError if ggml has no memory.
    """

    def __init__(self, type_id: int, rows: int, cols: int, n_copies: int) -> None:
        self._base = base = ggml_quants.library()
        self._cpu = system.ggml_library("ggml-cpu")
        self._declare()
        nbytes = base.ggml_row_size(type_id, cols) * rows
        mem_size = n_copies * (nbytes + 64 * (rows + cols) + (1 << 16)) + (64 << 20)
        self._context = base.ggml_init(_InitParams(mem_size, None, False))
        if not self._context:
            raise errors.bad_argument("ggml could not get memory for a dense matrix")
        x = base.ggml_new_tensor_1d(self._context, 0, cols)
        rng = np.random.default_rng(1)
        values = rng.standard_normal(cols, dtype=np.float32)
        ctypes.memmove(base.ggml_get_data(x), values.ctypes.data, values.nbytes)
        # repeats a pattern of rows, because quantizing all rows is slow
        weights = rng.standard_normal((min(rows, 64), cols), dtype=np.float32).view(np.uint32)
        pattern = ggml_quants.quantize(weights, TYPE_F32, type_id).tobytes()
        self._graph = base.ggml_new_graph(self._context)
        for _ in range(n_copies):
            w = base.ggml_new_tensor_2d(self._context, type_id, cols, rows)
            for at in range(0, nbytes, len(pattern)):
                ctypes.memmove(base.ggml_get_data(w) + at, pattern, min(len(pattern), nbytes - at))
            base.ggml_build_forward_expand(self._graph, base.ggml_mul_mat(self._context, w, x))

    def _declare(self) -> None:
        base, pointer, i64 = self._base, ctypes.c_void_p, ctypes.c_int64
        for library, name, result, arguments in (
            (base, "ggml_init", pointer, [_InitParams]),
            (base, "ggml_free", None, [pointer]),
            (base, "ggml_new_tensor_1d", pointer, [pointer, ctypes.c_int, i64]),
            (base, "ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, i64, i64]),
            (base, "ggml_nbytes", ctypes.c_size_t, [pointer]),
            (base, "ggml_get_data", pointer, [pointer]),
            (base, "ggml_mul_mat", pointer, [pointer, pointer, pointer]),
            (base, "ggml_new_graph", pointer, [pointer]),
            (base, "ggml_build_forward_expand", None, [pointer, pointer]),
            (self._cpu, "ggml_graph_compute_with_ctx", ctypes.c_int, [pointer, pointer, ctypes.c_int]),
        ):
            getattr(library, name).restype = result
            getattr(library, name).argtypes = arguments

    def run(self, n_threads: int) -> None:
        """One product with each copy. Raises MackoError if ggml fails."""
        if self._cpu.ggml_graph_compute_with_ctx(self._context, self._graph, n_threads):
            raise errors.bad_argument("ggml failed to compute")

    def close(self) -> None:
        self._base.ggml_free(self._context)


@dataclass(frozen=True)
class MatrixResult:
    """One shape at one density."""

    rows: int
    cols: int
    density: float
    effective_density: float  # bytes in a file over bytes of the dense matrix
    delta_bits: int
    nbytes_memory: int  # of the CPU kernels' copy
    seconds: dict[str, float]  # "macko" or a key of DENSE_TYPES -> median time of one product


def bench_matrices(
    shapes: Sequence[tuple[int, int]], densities: Sequence[float], *, n_threads: int, repetitions: int
) -> list[MatrixResult]:
    """Times y = W x for random F16 matrices, sparse and dense. shapes: (rows, cols). Logs progress."""
    results = []
    for rows, cols in console.tracked(shapes, "measuring", lambda shape: shape[0] * shape[1], "weights"):
        console.log(f"{rows}x{cols} ...")
        results += _bench_shape(rows, cols, densities, n_threads, repetitions)
    return results


def _bench_shape(
    rows: int, cols: int, densities: Sequence[float], n_threads: int, repetitions: int
) -> list[MatrixResult]:
    n_copies = max(1, min(64, WORKING_SET // (rows * cols * 2)))
    rng = np.random.default_rng(0)
    dense = {
        name: GgmlMatVec(type_id, rows, cols, n_copies)
        for name, type_id in DENSE_TYPES.items()
        if cols % K_QUANT_BLOCK == 0 or name == "F16"
    }
    x = rng.standard_normal((1, cols), dtype=np.float32)
    results = []
    try:
        for density in densities:
            w = rng.standard_normal((rows, cols), dtype=np.float32).astype(np.float16)
            w[rng.random((rows, cols), dtype=np.float32) >= density] = 0
            sparse = SparseMatrix.from_dense(w)
            copies = [CpuMatrix(sparse.arrays) for _ in range(n_copies)]

            runs: dict[str, Callable[[], None]] = {"macko": functools.partial(_mul_mat, copies, x, n_threads)}
            runs.update({name: functools.partial(d.run, n_threads) for name, d in dense.items()})
            seconds = {name: s / n_copies for name, s in median_seconds(runs, repetitions).items()}
            results.append(
                MatrixResult(
                    rows=rows,
                    cols=cols,
                    density=density,
                    effective_density=sparse.effective_density,
                    delta_bits=sparse.arrays.index_bits,
                    nbytes_memory=copies[0].nbytes,
                    seconds=seconds,
                )
            )
    finally:
        for d in dense.values():
            d.close()
    return results


class _CpuMatrix(Protocol):
    """A matrix in a layout of the CPU kernels."""

    def mul_mat(self, x: npt.NDArray[np.float32], n_threads: int) -> object: ...


def _mul_mat(copies: Sequence[_CpuMatrix], x: npt.NDArray[np.float32], n_threads: int) -> None:
    for c in copies:
        c.mul_mat(x, n_threads)


def median_seconds(runs: dict[str, Callable[[], None]], repetitions: int) -> dict[str, float]:
    """Median time of each function over rounds that call all functions in turn, after a warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions + 1):
        for name, function in runs.items():
            begin = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(t[1:]) for name, t in times.items()}
