"""SparseMatrix: a matrix of any codec on NumPy arrays, with the codecs and CPU kernels of the C library."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from . import errors
from .codecs import registry
from .codecs.codec import Candidate, Settings, Source
from .native import codec as native_codec
from .native.codec import EncodedMatrix
from .native.cpu import CpuMatrix
from .values import NEGATIVE_ZERO, TYPE_BF16, TYPE_F16, TYPE_F32, TYPE_NAMES, Array, bits_dtype, to_float, value_bits


class SparseMatrix:
    """A (rows, cols) matrix that stores only its non-zeros.

    >>> w = np.zeros((4, 64), dtype=np.float16); w[1, 3] = 2.0
    >>> s = SparseMatrix.from_dense(w)
    >>> s @ np.ones(64, dtype=np.float32)
    array([0., 2., 0., 0.], dtype=float32)

    The first product makes a copy in the layout of the CPU kernels, which is kept.
    """

    __array_ufunc__ = None
    """Makes NumPy pass x @ self to __rmatmul__, and refuse all other operations."""

    def __init__(self, arrays: EncodedMatrix):
        """arrays: of any origin. Raises MackoError unless they follow every rule of FORMAT.md."""
        registry.codec_of(arrays).validate(arrays)
        self._init(arrays)

    def _init(self, arrays: EncodedMatrix) -> None:
        self.arrays = arrays
        self.n_negative_zeros = 0  # number of -0.0 that counted as zeros
        self._cpu: Any = None

    # ---- making ----

    @classmethod
    def from_dense(
        cls,
        dense: npt.ArrayLike,
        index_bits: int | None = None,
        bf16: bool = False,
        n_threads: int = 0,
        format: str = registry.AUTO,
        options: Mapping[str, int] | None = None,
        keep_negative_zeros: bool = False,
    ) -> SparseMatrix:
        """Encodes a dense matrix.

        dense: 2-D; an array, nested lists or a scipy.sparse matrix of finite numbers, or with bf16=True the uint16 bit
        patterns of BF16. float16 and float32 are kept bit for bit, except for -0.0. float64 is rounded to the nearest
        float32, ties to even. Integers and booleans become float32 if all of them are exact in float32 (up to 2^24,
        they are).
        index_bits: width of the gap codes, if the format has any; None selects the smallest result.
        n_threads: 0 uses all cores.
        format: a TYPE of `macko convert`: "macko" (MACKO paper, section 4), "packed", "sparse-lossless" (packed, its
        values coded bit for bit where that is smaller), "auto" for the smallest of these, "ec-csr" (EC-SpMV paper,
        section 6; slow for large matrices), or with quantized values "sparse-q8", "sparse-q5", "sparse-q4" or
        "sparse-q3".
        options: of the codecs, by the names of the C API, for example {"max_granularity": 1}.
        keep_negative_zeros: store -0.0 as a value. By default, and always for quantized types, it counts as zero, and
        n_negative_zeros is the number of them.

        Raises ArgumentError for another shape, dtype or format, for an integer that is not exact in float32, and for a
        float64 beyond its range. Raises PayloadError for values that are not finite.
        """
        bits, type_id = _to_bits(dense, bf16)
        name = registry.type_named(format)
        if name is None:
            known = ", ".join(registry.types())
            raise errors.bad_argument(f"format {format!r} is not one of {known}")
        choices = registry.types()[name]
        n_negative_zeros = 0
        if not keep_negative_zeros or any(choice.is_lossy for choice in choices):
            bits, n_negative_zeros = _without_negative_zeros(bits, type_id, n_threads)
        count = native_codec.count_dense(bits, type_id, n_threads)
        if count.n_nonfinite:
            raise errors.error(errors.NOT_FINITE, f"{count.n_nonfinite} values are not finite")
        settings = Settings(n_threads, options or {}, search=False)
        source = Source(bits, type_id, count)
        found: list[tuple[int, Candidate]] = []
        for choice in choices:
            if index_bits is not None and choice.index_bits != index_bits:
                continue
            candidate = choice.codec.plan(source, choice, settings)
            found.append((sum(part.nbytes for part in candidate.components), candidate))
        if not found:
            raise errors.bad_argument(f"format {format!r} has no index_bits {index_bits}")
        best = min(found, key=lambda x: x[0])[1]  # the first of equals
        self = cls.__new__(cls)
        self._init(best.matrix or best.codec.encode(source, best.index_bits, best.value_type, settings))
        self.n_negative_zeros = n_negative_zeros
        return self

    # ---- properties ----

    @property
    def format(self) -> str:
        """The TYPE, as in from_dense()."""
        return registry.codec_of(self.arrays).type_name(self.arrays.value_type)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.arrays.rows, self.arrays.cols)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the dense matrix; uint16 for BF16 bit patterns."""
        return np.dtype({TYPE_F16: np.float16, TYPE_F32: np.float32, TYPE_BF16: np.uint16}[self.arrays.type])

    @property
    def nnz(self) -> int:
        return self.arrays.nnz

    @property
    def density(self) -> float:
        """Non-zeros over elements."""
        return self.nnz / (self.arrays.rows * self.arrays.cols)

    @property
    def nbytes(self) -> int:
        """Bytes of the canonical arrays, with padding and pointers."""
        return sum(a.nbytes for a in self.arrays.arrays)

    @property
    def effective_density(self) -> float:
        """nbytes over the bytes of the dense matrix."""
        return self.nbytes * 8 / (self.arrays.rows * self.arrays.cols * value_bits(self.arrays.type))

    # ---- using ----

    def to_dense(self, n_threads: int = 0) -> Array:
        """The dense matrix (rows, cols) of self.dtype: bit for bit the argument of from_dense(), except for negative
        zeros that counted as zeros. Quantized values are rounded to the dense type.
        """
        return registry.codec_of(self.arrays).decode(self.arrays, n_threads).view(self.dtype)

    def __matmul__(self, x: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The product with x, numbers of shape (cols,) or (cols, n): float32 of shape (rows,) or (rows, n). Sums are
        float32; x becomes float32 by the rules of from_dense.
        """
        x = _to_float32(np.asarray(x))
        if x.ndim not in (1, 2) or x.shape[0] != self.arrays.cols:
            raise errors.bad_argument(
                f"expected an array of shape ({self.arrays.cols},) or ({self.arrays.cols}, n), got {x.shape}"
            )
        if self._cpu is None:
            self._cpu = CpuMatrix(self.arrays)
        if x.ndim == 1:
            product: npt.NDArray[np.float32] = self._cpu.mul_mat(x[None, :])[0]
            return product
        return np.ascontiguousarray(self._cpu.mul_mat(np.ascontiguousarray(x.T)).T)

    def __rmatmul__(self, x: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The product of x, numbers of shape (rows,) or (n, rows), with the matrix, through .T: float32 of shape
        (cols,) or (n, cols).
        """
        return (self.T @ np.asarray(x).T).T

    @functools.cached_property
    def T(self) -> SparseMatrix:
        """The transpose, encoded in the smallest lossless format, and kept. Its values are those of to_dense(), even
        for quantized values.
        """
        dense, is_bf16 = self.to_dense().T, self.arrays.type == TYPE_BF16
        return SparseMatrix.from_dense(np.ascontiguousarray(dense), bf16=is_bf16, keep_negative_zeros=True)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        """For np.asarray: the numbers of to_dense(), as float32 for BF16."""
        if copy is False:
            raise ValueError("a SparseMatrix has no dense array to share: np.asarray(matrix) makes one")
        dense = self.to_dense()
        values = to_float(dense, TYPE_BF16) if self.arrays.type == TYPE_BF16 else dense
        return values if dtype is None else values.astype(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: the stored arrays, which are checked again, without the copy for products."""
        return SparseMatrix, (self.arrays,), {"n_negative_zeros": self.n_negative_zeros}

    def __repr__(self) -> str:
        dropped = f", {self.n_negative_zeros} negative zeros counted as zeros" if self.n_negative_zeros else ""
        return (
            f"<SparseMatrix {self.shape[0]}x{self.shape[1]} {TYPE_NAMES[self.arrays.type]} {self.format}, "
            f"density {self.density:.4f}, effective density {self.effective_density:.4f}{dropped}>"
        )


def _without_negative_zeros(bits: Array, type_id: int, n_threads: int) -> tuple[Array, int]:
    """The bit patterns with +0.0 for -0.0, and the number of -0.0. The caller's array is not changed."""
    if not np.any(bits == NEGATIVE_ZERO[type_id]):
        return bits, 0
    bits = bits.copy()
    return bits, native_codec.drop_negative_zeros(bits, type_id, n_threads)


def _to_bits(dense: Any, bf16: bool) -> tuple[Array, int]:
    """(bit patterns, ggml type) of the argument of from_dense()."""
    array = dense.toarray() if hasattr(dense, "toarray") else np.asarray(dense)
    if array.ndim != 2:
        raise errors.bad_argument(f"expected a 2-D array, got shape {array.shape}")
    if bf16 != (array.dtype == np.uint16):  # numbers of this type are more likely a forgotten bf16=True
        raise errors.bad_argument(
            f"{array.dtype} with bf16={bf16}: uint16 holds bit patterns of BF16, and needs bf16=True; if they are "
            "numbers, use astype(np.float32)"
        )
    if bf16:
        return np.ascontiguousarray(array), TYPE_BF16
    if array.dtype != np.float16:
        array = _to_float32(array)
    type_id = TYPE_F16 if array.dtype == np.float16 else TYPE_F32
    return np.ascontiguousarray(array).view(bits_dtype(type_id)), type_id


def _to_float32(array: Array) -> npt.NDArray[np.float32]:
    """The numbers as float32. Raises ArgumentError for inexact integers, values out of range, and other types."""
    if array.dtype.kind not in "fiub":
        raise errors.bad_argument(f"expected an array of real numbers, got {array.dtype}")
    with np.errstate(over="ignore"):
        values: npt.NDArray[np.float32] = array.astype(np.float32, copy=False)
    if array.dtype.kind == "f":
        lost, why = np.isinf(values) & np.isfinite(array), "is beyond the range of float32"
    else:
        lost, why = _rounded(array), "would be rounded to float32; astype(np.float32) does so"
    if lost.any():
        at = tuple(int(i) for i in np.unravel_index(int(np.argmax(lost)), lost.shape))
        raise errors.bad_argument(f"element {list(at)} is {array[at]}, which {why}")
    return values


def _rounded(array: Array) -> npt.NDArray[np.bool_]:
    """A mask of the integers with more than the 24 significant bits of float32."""
    magnitude = array.astype(np.uint64) if array.dtype.kind in "ub" else np.abs(array.astype(np.int64)).view(np.uint64)
    lowest_bit = magnitude & (~magnitude + np.uint64(1))
    found: npt.NDArray[np.bool_] = magnitude // np.maximum(lowest_bit, np.uint64(1)) >= np.uint64(1 << 24)
    return found
