"""The functions of this package under one name, and the matrix classes of ggml_macko.codecs in place of EncodedMatrix.

validate(), decode() and CpuMatrix take either; encode(), ec_csr_encode() and packed_encode() make the class of their
format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from .. import errors
from ..codecs import ec_csr, packed
from ..codecs.ec_csr import EcCsrMatrix
from ..codecs.macko import DELTA_BITS, TYPE_NAMES, MackoMatrix, bits_dtype
from ..codecs.packed import PackedMatrix
from . import codec, cpu
from .codec import Array, Codec, Count, EncodedMatrix, codecs, count_dense, gpu_cost, quantize_q4_nl
from .cpu import cpu_kernels
from .file import WEIGHT_BLOCK, WEIGHT_HEAD, WEIGHT_OTHER, File, FileSparse, FileTensor, weight_use
from .library import (
    LIBRARY_PATH,
    PRELOAD_PATH,
    built_for_ggml,
    built_for_llama_cpp_python,
    check_ggml,
    gpus,
    status_name,
    version,
)
from .load import Load

__all__ = [
    "LIBRARY_PATH", "PRELOAD_PATH", "WEIGHT_BLOCK", "WEIGHT_HEAD", "WEIGHT_OTHER", "Codec", "Count", "CpuMatrix",
    "EcCsrOptions", "EncodedMatrix", "File", "FileSparse", "FileTensor", "Load", "built_for_ggml",
    "built_for_llama_cpp_python", "check_ggml", "codecs", "count_dense", "cpu_kernels", "decode", "ec_csr_encode",
    "ec_csr_gpu_us", "encode", "gpu_cost", "gpus", "packed_encode", "quantize_q4_nl", "status_name", "validate",
    "version", "weight_use",
]  # fmt: skip

_I8, _I16, _I32 = 24, 25, 26  # ggml type ids of components
AnyMatrix = MackoMatrix | EcCsrMatrix | PackedMatrix | EncodedMatrix


@dataclass(frozen=True)
class EcCsrOptions:
    """How blocks are extracted; ggml_macko_encode in ggml-macko.h says what each means."""

    max_granularity: int = 16
    min_columns: int = 0
    clip: bool = True
    seed: int = 0


def encode(dense: Array, type_id: int, delta_bits: int, count: Count | None = None, n_threads: int = 0) -> MackoMatrix:
    """MACKO of a dense matrix. count: count_dense of the same matrix, if the caller has it; it tells of Inf and NaN."""
    dense = codec.dense_bits(dense, type_id)
    if delta_bits not in DELTA_BITS:
        raise errors.error(errors.BAD_ARGUMENT, f"delta_bits is {delta_bits}, not 1, 2, 4 or 8")
    if count is not None and count.n_nonfinite:
        raise errors.error(errors.NOT_FINITE, f"{count.n_nonfinite} values are not finite")
    m = codec.encode("macko", dense, type_id, {"delta_bits": delta_bits}, n_threads)
    return MackoMatrix(m.rows, m.cols, m.type, m.bits, m.nnz, int(m.arrays[2][-1]), *m.arrays)


def ec_csr_encode(
    dense: Array, type_id: int, delta_bits: int, options: EcCsrOptions | None = None, n_threads: int = 0
) -> EcCsrMatrix:
    """EC-CSR of a dense matrix. Takes seconds for large matrices: it compares all rows."""
    given = {name: int(value) for name, value in asdict(options or EcCsrOptions()).items()}
    m = codec.encode("ec-csr", dense, type_id, {"delta_bits": delta_bits, **given}, n_threads)
    return EcCsrMatrix(m.rows, m.cols, m.type, m.bits, m.nnz, *m.arrays)


def packed_encode(
    dense: Array, type_id: int, value_type: int, index_bits: int = -1, n_threads: int = 0
) -> PackedMatrix:
    """The packed format of a dense matrix. index_bits -1: what makes it smallest."""
    m = codec.encode("packed", dense, type_id, {"value_type": value_type, "index_bits": index_bits}, n_threads)
    return PackedMatrix(m.rows, m.cols, m.type, m.value_type, m.bits, m.nnz, *m.arrays)


def ec_csr_gpu_us(m: EcCsrMatrix, n_threads: int = 0) -> tuple[float, float]:
    """gpu_cost(): microseconds of a product on a GPU that keeps the blocks, and on one that keeps MACKO rows."""
    return codec.gpu_cost(_encoded(m), n_threads)


def _arrays(m: AnyMatrix, names: Iterable[str], dtypes: Iterable[npt.DTypeLike]) -> tuple[Array, ...]:
    """m's arrays of these names, if C can read them as they lie."""
    arrays: list[Array] = []
    for name, dtype in zip(names, dtypes):
        array: Array = getattr(m, name)
        if array.ndim != 1 or array.dtype != dtype or not array.flags.c_contiguous:
            raise errors.error(errors.BAD_ARGUMENT, f"{name}: expected a contiguous 1-D array of {np.dtype(dtype)}")
        arrays.append(array)
    return tuple(arrays)


def _encoded(m: AnyMatrix) -> EncodedMatrix:
    """m as the generic functions take it; shares m's arrays."""
    if isinstance(m, EncodedMatrix):
        return m
    if m.type not in TYPE_NAMES:
        raise errors.error(errors.BAD_ARGUMENT, f"dense type {m.type} is not F16, BF16 or F32")
    if isinstance(m, MackoMatrix):
        return EncodedMatrix(
            "macko", m.rows, m.cols, m.type, m.type, m.delta_bits, m.nnz,
            _arrays(m, ("values", "deltas", "row_ptr"), (bits_dtype(m.type), np.uint8, np.int32)),
            (m.type, _I8, _I32),
        )  # fmt: skip
    if isinstance(m, EcCsrMatrix):
        bases = ec_csr.base_dtype(m.cols)
        return EncodedMatrix(
            "ec-csr", m.rows, m.cols, m.type, m.type, m.delta_bits, m.nnz,
            _arrays(m, ec_csr.ARRAYS, (bits_dtype(m.type), np.uint8, bases, np.int32, np.int32, np.int32)),
            (m.type, _I8, _I16 if bases.itemsize == 2 else _I32, _I32, _I32, _I32),
        )  # fmt: skip
    return EncodedMatrix(
        "packed", m.rows, m.cols, m.type, m.value_type, m.index_bits, m.nnz,
        _arrays(m, packed.ARRAYS, (packed.values_dtype(m.type, m.value_type), np.uint8, np.int32)),
        (_I8 if m.value_type == packed.TYPE_Q4_NL else m.value_type, _I8, _I32),
    )  # fmt: skip


def validate(m: AnyMatrix, n_threads: int = 0) -> None:
    """Checks an untrusted matrix in full; raises PayloadError or FileFormatError."""
    codec.validate(_encoded(m), n_threads)


def decode(m: AnyMatrix, n_threads: int = 0) -> Array:
    """Dense bit patterns (rows, cols). m is checked in full first."""
    return codec.decode(_encoded(m), n_threads)


class CpuMatrix(cpu.CpuMatrix):
    """A matrix in the layout that is fastest on this CPU."""

    def __init__(self, m: AnyMatrix, n_threads: int = 0):
        super().__init__(_encoded(m), n_threads)
