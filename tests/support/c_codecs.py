"""The C library's codecs for matrices of the reference, so that tests can compare the two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Union

import numpy as np

from ggml_macko.native import codec as native_codec
from ggml_macko.native.cpu import CpuMatrix
from reference.ec_csr import EcCsrMatrix
from reference.macko import MackoMatrix
from reference.packed import PackedMatrix
from reference.quantized import QuantizedMatrix

Matrix = Union[MackoMatrix, EcCsrMatrix, PackedMatrix, QuantizedMatrix]


def macko(dense: np.ndarray, type_id: int, delta_bits: int, n_threads: int = 0) -> MackoMatrix:
    """Encodes a matrix. dense: bit patterns (rows, cols)."""
    m = native_codec.encode("macko", dense, type_id, {"index_bits": delta_bits}, n_threads)
    return MackoMatrix.from_encoded(m)


def ec_csr(
    dense: np.ndarray, type_id: int, delta_bits: int, options: Mapping[str, int] | None = None, n_threads: int = 0
) -> EcCsrMatrix:
    m = native_codec.encode("ec-csr", dense, type_id, {"index_bits": delta_bits, **(options or {})}, n_threads)
    return EcCsrMatrix.from_encoded(m)


def packed(dense: np.ndarray, type_id: int, value_type: int, index_bits: int = -1, n_threads: int = 0) -> PackedMatrix:
    options = {"value_type": value_type, "index_bits": index_bits}
    return PackedMatrix.from_encoded(native_codec.encode("packed", dense, type_id, options, n_threads))


def validate(m: Matrix, n_threads: int = 0) -> None:
    native_codec.validate(m.encoded(), n_threads)


def decode(m: Matrix, n_threads: int = 0) -> np.ndarray:
    """Returns bit patterns (rows, cols)."""
    return native_codec.decode(m.encoded(), n_threads)


def cpu_matrix(m: Matrix) -> Any:
    return CpuMatrix(m.encoded())
