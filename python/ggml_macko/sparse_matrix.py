"""SparseMatrix: MACKO, EC-CSR or packed on NumPy arrays, with the C codecs and the C CPU kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import errors, values
from .codecs import ec_csr, macko, packed
from .native import bindings
from .native.bindings import EcCsrOptions
from .values import TYPE_BF16, TYPE_F16, TYPE_F32


class SparseMatrix:
    """A (rows, cols) matrix that keeps only its non-zeros.

    >>> w = np.zeros((4, 64), dtype=np.float16); w[1, 3] = 2.0
    >>> s = SparseMatrix.from_dense(w)
    >>> s @ np.ones(64, dtype=np.float32)
    array([0., 2., 0., 0.], dtype=float32)

    The C library keeps a repacked copy for `@`, made with the first product.
    """

    def __init__(self, arrays: macko.MackoMatrix | ec_csr.EcCsrMatrix | packed.PackedMatrix):
        """arrays: from a file or from anywhere; they are checked in full here."""
        bindings.validate(arrays)
        self._init(arrays)

    def _init(self, arrays: macko.MackoMatrix | ec_csr.EcCsrMatrix | packed.PackedMatrix) -> None:
        self.arrays = arrays
        self._cpu: bindings.CpuMatrix | None = None

    # ---- making ----

    @classmethod
    def from_dense(
        cls,
        dense: np.ndarray,
        delta_bits: int | None = None,
        bf16: bool = False,
        n_threads: int = 0,
        format: str = "macko",
        extraction: EcCsrOptions | None = None,
    ) -> SparseMatrix:
        """dense: 2-D float16 or float32, or uint16 bits with bf16=True. delta_bits None: what makes it smallest.
        format: a type of `macko convert`: "macko", "ec-csr", "packed", "auto" for the smallest of these, or with quantized
        values "macko-q8_0" and its like (each block's scale by its largest value, of "macko-q4_nl" searched). extraction: options of EC-CSR.
        """
        bits, type_id = _to_bits(dense, bf16)
        quants = {f"macko-{name}": value_type for value_type, name in packed.QUANT_NAMES.items()}
        if format not in ("macko", "ec-csr", "packed", "auto", *quants):
            names = ", ".join(("macko", "ec-csr", "packed", *quants))
            raise errors.error(errors.BAD_ARGUMENT, f"format {format!r} is not one of {names}, auto")
        if delta_bits is not None and (format == "packed" or format in quants):
            raise errors.error(errors.BAD_ARGUMENT, f"format {format!r} has no delta_bits")
        found = []
        if format in ("macko", "auto"):
            count = bindings.count_dense(bits, type_id, n_threads)
            width = smallest_delta_bits(type_id, len(bits), count.n_stored) if delta_bits is None else delta_bits
            found.append(bindings.encode(bits, type_id, width, count, n_threads))
        if format == "ec-csr" or (format == "auto" and delta_bits in (None, *ec_csr.DELTA_BITS)):
            widths = ec_csr.DELTA_BITS if delta_bits is None else (delta_bits,)
            found += [bindings.ec_csr_encode(bits, type_id, b, extraction, n_threads) for b in widths]
        if format == "packed" or format in quants or (format == "auto" and delta_bits is None):
            found.append(bindings.packed_encode(bits, type_id, quants.get(format, type_id), n_threads=n_threads))
        self = cls.__new__(cls)
        self._init(min(found, key=lambda m: m.nbytes))
        return self

    @classmethod
    def from_scipy(cls, matrix: Any, delta_bits: int | None = None, n_threads: int = 0) -> SparseMatrix:
        """matrix: a 2-D scipy.sparse array of float32. Its dense form must fit in memory. Stored zeros are dropped."""
        return cls.from_dense(matrix.toarray(), delta_bits, n_threads=n_threads)

    # ---- properties ----

    @property
    def format(self) -> str:
        """As from_dense has it."""
        m = self.arrays
        if isinstance(m, packed.PackedMatrix):
            return "packed" if m.value_type == m.type else f"macko-{packed.QUANT_NAMES[m.value_type]}"
        return "ec-csr" if isinstance(m, ec_csr.EcCsrMatrix) else "macko"

    @property
    def shape(self) -> tuple:
        return (self.arrays.rows, self.arrays.cols)

    @property
    def dtype(self) -> np.dtype:
        """Of the dense matrix; uint16 stands for BF16 bit patterns."""
        return np.dtype({TYPE_F16: np.float16, TYPE_F32: np.float32, TYPE_BF16: np.uint16}[self.arrays.type])

    @property
    def nnz(self) -> int:
        return self.arrays.nnz

    @property
    def density(self) -> float:
        return self.nnz / (self.arrays.rows * self.arrays.cols)

    @property
    def nbytes(self) -> int:
        """Bytes of the canonical arrays, padding and pointers included."""
        return self.arrays.nbytes

    @property
    def effective_density(self) -> float:
        """nbytes over the bytes of the dense matrix."""
        return self.nbytes * 8 / (self.arrays.rows * self.arrays.cols * values.value_bits(self.arrays.type))

    # ---- using ----

    def to_dense(self, n_threads: int = 0) -> np.ndarray:
        """Bit for bit what from_dense got; of quantized values what they stand for, rounded to the dense type."""
        return bindings.decode(self.arrays, n_threads).view(self.dtype)

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        """x: (cols,) or (cols, n) float32; float32 result of shape (rows,) or (rows, n)."""
        x = np.asarray(x)
        if x.dtype != np.float32 or x.ndim not in (1, 2) or x.shape[0] != self.arrays.cols:
            raise errors.error(
                errors.BAD_ARGUMENT,
                f"expected float32 of shape ({self.arrays.cols},) or ({self.arrays.cols}, n), got {x.dtype} {x.shape}",
            )
        if self._cpu is None:
            self._cpu = bindings.CpuMatrix(self.arrays)
        if x.ndim == 1:
            return self._cpu.mul_mat(x[None, :])[0]
        return np.ascontiguousarray(self._cpu.mul_mat(np.ascontiguousarray(x.T)).T)

    def __repr__(self) -> str:
        return (
            f"<SparseMatrix {self.shape[0]}x{self.shape[1]} {values.TYPE_NAMES[self.arrays.type]} {self.format}, "
            f"density {self.density:.4f}, effective density {self.effective_density:.4f}>"
        )


def smallest_delta_bits(type_id: int, rows: int, n_stored: dict) -> int:
    """The width whose arrays are smallest; the narrower one if two are equal."""
    return min(macko.DELTA_BITS, key=lambda b: (macko.matrix_nbytes(type_id, b, rows, n_stored[b]), b))


def _to_bits(dense: np.ndarray, bf16: bool) -> tuple:
    dense = np.asarray(dense)
    types = {"float16": TYPE_F16, "float32": TYPE_F32}
    type_id = TYPE_BF16 if bf16 and dense.dtype == np.uint16 else types.get(dense.dtype.name, -1)
    if dense.ndim != 2 or type_id < 0 or (bf16 and type_id != TYPE_BF16):
        raise errors.error(
            errors.BAD_ARGUMENT,
            "expected a 2-D array of float16 or float32, or of uint16 with bf16=True; "
            f"got {dense.dtype} {dense.shape}, bf16={bf16}",
        )
    return np.ascontiguousarray(dense).view(values.bits_dtype(type_id)), type_id
