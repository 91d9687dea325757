"""The CPU kernels on plain arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .. import errors
from .codec import EncodedMatrix, c_matrix
from .library import check, ffi, lib, text


def cpu_kernels() -> str:
    """Name of the kernel set in use, for example "avx2"."""
    return text(lib().ggml_macko_cpu_kernels())


class CpuMatrix:
    """A checked matrix in the fastest layout for this CPU."""

    def __init__(self, m: EncodedMatrix, n_threads: int = 0):
        self.rows, self.cols = m.rows, m.cols
        out = ffi().new("struct ggml_macko_cpu_matrix **")
        check(lib().ggml_macko_cpu_matrix_init(c_matrix(m), n_threads, out))
        self._c = ffi().gc(out[0], lib().ggml_macko_cpu_matrix_free)

    @property
    def nbytes(self) -> int:
        return int(lib().ggml_macko_cpu_matrix_nbytes(self._c))

    def mul_mat(self, x: npt.NDArray[Any], n_threads: int = 0) -> npt.NDArray[np.float32]:
        """x: (n, cols) float32 -> (n, rows) float32, y = x W^T."""
        if x.ndim != 2 or x.shape[1] != self.cols or x.dtype != np.float32:
            raise errors.bad_argument(f"expected float32 of shape (n, {self.cols}), got {x.dtype} {x.shape}")
        x = np.ascontiguousarray(x)
        y = np.empty((len(x), self.rows), dtype=np.float32)
        c_x = ffi().from_buffer("const float *", x)
        c_y = ffi().from_buffer("float *", y, require_writable=True)
        check(lib().ggml_macko_cpu_mul_mat(self._c, c_x, c_y, len(x), n_threads))
        return y
