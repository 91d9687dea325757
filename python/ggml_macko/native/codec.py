"""The codecs: dense matrices to the arrays of any format and back. No function here names a format: codecs() lists the
formats of the library and their options.

Dense matrices are 2-D arrays of bit patterns: uint16 for F16 and BF16, uint32 for F32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import errors
from ..values import TYPE_BF16, TYPE_I8, TYPE_I32, TYPE_NAMES, Array, bits_dtype, component_dtype
from .library import check, ffi, from_struct, lib, new_struct, text

_DELTA_BITS = (1, 2, 4, 8)  # of Count.n_stored


@dataclass(frozen=True)
class Codec:
    """A format of the library."""

    name: str  # in macko.tensor.format
    suffixes: tuple[str, ...]  # of the component tensors, with the dot, in the order of the tensor table
    options: dict[str, int]  # of the encoder, with their defaults; ggml-macko.h explains them


def codecs() -> tuple[Codec, ...]:
    """All formats of the library."""
    info = new_struct("ggml_macko_codec_info")
    found = []
    for i in range(lib().ggml_macko_codec_count()):
        check(lib().ggml_macko_codec_at(i, info))
        suffixes = tuple(text(info.suffixes[k]) for k in range(info.n_arrays))
        options = {text(info.options[k].name): int(info.options[k].value) for k in range(info.n_options)}
        found.append(Codec(text(info.name), suffixes, options))
    return tuple(found)


@dataclass(frozen=True)
class _Described:
    """The description of a matrix in the header of a file."""

    format: str
    rows: int
    cols: int
    type: int  # ggml type of the dense matrix
    value_type: int  # of the stored values: equals type, or a quantized type in some formats
    index_bits: int  # macko.tensor.index_bits
    nnz: int


@dataclass(frozen=True)
class MatrixHeader(_Described):
    """A matrix in any format without its data."""

    types: tuple[int, ...]  # ggml type of each component
    nbytes: tuple[int, ...]  # of each component


@dataclass(frozen=True)
class EncodedMatrix(_Described):
    """A matrix in any format, with its data."""

    arrays: tuple[Array, ...]  # contiguous and 1-D, in component order
    types: tuple[int, ...]  # ggml type of each component on file

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    @property
    def header(self) -> MatrixHeader:
        sizes = tuple(a.nbytes for a in self.arrays)
        return MatrixHeader(
            self.format, self.rows, self.cols, self.type, self.value_type, self.index_bits, self.nnz, self.types, sizes
        )


def dense_bits(dense: Array, type_id: int) -> Array:
    """A contiguous copy of dense. Raises MackoError unless dense is a 2-D array of bit patterns of the type."""
    if type_id not in TYPE_NAMES:
        raise errors.bad_argument(f"value type {type_id} is not F16, BF16 or F32")
    dtype = bits_dtype(type_id)
    if dense.ndim != 2 or dense.dtype != dtype:
        raise errors.bad_argument(f"expected a 2-D array of {dtype} bit patterns, got {dense.dtype} {dense.shape}")
    return np.ascontiguousarray(dense)


@dataclass(frozen=True)
class Count:
    """The entries of a dense matrix in MACKO format."""

    nnz: int
    n_stored: dict[int, int]  # delta_bits -> entries
    n_nonfinite: int  # Inf and NaN


def count_dense(dense: Array, type_id: int, n_threads: int = 0) -> Count:
    """Counts the non-zeros of a dense matrix (rows, cols), and the entries for each width, in one pass."""
    dense = dense_bits(dense, type_id)
    out = ffi().new("struct ggml_macko_count *")
    pointer = ffi().from_buffer("const void *", dense)
    check(lib().ggml_macko_count_dense(pointer, type_id, *dense.shape, n_threads, out))
    return Count(int(out.nnz), dict(zip(_DELTA_BITS, (int(n) for n in out.n_stored))), int(out.n_nonfinite))


def encode(
    format: str, dense: Array, type_id: int, options: Mapping[str, int] | None = None, n_threads: int = 0
) -> EncodedMatrix:
    """Encodes a dense matrix (rows, cols) of finite values.

    options: those of codecs(), by name; missing ones have their defaults. Raises PayloadError (NOT_FINITE) for Inf and
    NaN, and MackoError for an unknown format or option. ec-csr takes seconds for large matrices: it compares all rows.
    """
    dense = dense_bits(dense, type_id)
    names = [ffi().new("char[]", name.encode()) for name in options or {}]  # alive until the call returns
    values = [value - 2**64 if value >= 2**63 else value for value in (options or {}).values()]  # bits of a uint64_t
    c_options = ffi().new("struct ggml_macko_option[]", list(zip(names, values)))
    out = ffi().new("struct ggml_macko_encoded **")
    pointer = ffi().from_buffer("const void *", dense)
    check(
        lib().ggml_macko_encode(format.encode(), pointer, type_id, *dense.shape, c_options, len(names), n_threads, out)
    )
    return _take(out[0])


def encode_quantized(
    dense: Array,
    type_id: int,
    value_type: int,
    weights: Array | None = None,
    lattice: EncodedMatrix | None = None,
    levels: npt.NDArray[np.int8] | None = None,
    n_threads: int = 0,
) -> EncodedMatrix:
    """Encodes a dense matrix (rows, cols) of finite values in the format `quantized`.

    weights: as in measure_error(). lattice: a matrix of the same shape and value type, whose levels, scales and factors
    are used. levels: the levels to search scales for, in the order of the codes; None: fitted to the matrix. Raises
    PayloadError (NOT_FINITE) for Inf, NaN, and values beyond the range of a scale.
    """
    dense = dense_bits(dense, type_id)
    out = ffi().new("struct ggml_macko_encoded **")
    pointer = ffi().from_buffer("const void *", dense)
    n_weights = 0 if weights is None else len(weights)
    c_lattice = ffi().NULL if lattice is None else c_matrix(lattice)
    if levels is not None:
        rows, cols = dense.shape
        c_lattice = _lattice_of_levels(rows, cols, type_id, value_type, levels)
    check(
        lib().ggml_macko_encode_quantized(
            pointer, type_id, *dense.shape, value_type, _floats(weights), n_weights, c_lattice, n_threads, out
        )
    )
    return _take(out[0])


def _lattice_of_levels(rows: int, cols: int, type_id: int, value_type: int, levels: npt.NDArray[np.int8]) -> Any:
    """The C struct of a lattice without scales and factors."""
    nbytes = (4, -(-rows * -(-cols // 8) // 4) * 4, rows * -(-cols // 32), 2 * rows, 4 * (rows + 1), len(levels))
    types = (TYPE_I8, TYPE_I8, TYPE_I8, TYPE_BF16, TYPE_I32, TYPE_I8)
    c = _c_header(MatrixHeader("quantized", rows, cols, type_id, value_type, 0, 0, types, nbytes))
    c.arrays[5].data = ffi().from_buffer("const void *", levels)
    return c


def standard_levels(value_type: int, table: int) -> npt.NDArray[np.int8]:
    """One of two tables of levels, in the order of the codes, with which encode_quantized() finds a lattice again."""
    out = np.zeros(256, dtype=np.int8)
    check(lib().ggml_macko_standard_levels(value_type, table, ffi().from_buffer("int8_t *", out)))
    return np.trim_zeros(out, "b")


def _take(encoded: Any) -> EncodedMatrix:
    """A copy of an encoded matrix of the library, which is freed."""
    owner = ffi().gc(encoded, lib().ggml_macko_encoded_free)
    m = new_struct("ggml_macko_matrix")
    check(lib().ggml_macko_encoded_matrix(owner, m))
    components = [m.arrays[i] for i in range(m.n_arrays)]
    arrays = tuple(_copied(c.data, c.nbytes, np.dtype(component_dtype(c.type))) for c in components)
    return from_struct(EncodedMatrix, m, arrays=arrays, types=tuple(c.type for c in components))


def _copied(pointer: Any, nbytes: int, dtype: np.dtype[Any]) -> Array:
    return np.frombuffer(ffi().buffer(pointer, nbytes), dtype).copy()


def _c_header(m: MatrixHeader) -> Any:
    """The C struct of a matrix whose arrays have no data."""
    c = new_struct("ggml_macko_matrix")
    if len(m.nbytes) != len(m.types) or len(m.nbytes) > len(c.arrays):
        raise errors.bad_argument(f"{len(m.nbytes)} arrays with {len(m.types)} types")
    name = ffi().new("char[]", m.format.encode())
    for field in ("rows", "cols", "type", "value_type", "index_bits", "nnz"):
        setattr(c, field, getattr(m, field))
    c.format, c.n_arrays = name, len(m.nbytes)
    for i, (type_id, nbytes) in enumerate(zip(m.types, m.nbytes)):
        c.arrays[i].type, c.arrays[i].nbytes = type_id, nbytes
    return ffi().gc(c, lambda _: name)  # keeps the name alive as long as the struct


def c_matrix(m: EncodedMatrix) -> Any:
    """The C struct of a matrix. It points into the arrays of m, which must live as long."""
    if m.type not in TYPE_NAMES:
        raise errors.bad_argument(f"dense type {m.type} is not F16, BF16 or F32")
    c = _c_header(m.header)
    for i, array in enumerate(m.arrays):
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise errors.bad_argument(f"array {i} of {m.format}: expected a contiguous 1-D array")
        c.arrays[i].data = ffi().from_buffer("const void *", array)
    return c


def validate(m: EncodedMatrix, n_threads: int = 0) -> None:
    """Checks an untrusted matrix completely. Raises PayloadError or FileFormatError."""
    check(lib().ggml_macko_validate(c_matrix(m), n_threads))


def decode(m: EncodedMatrix, n_threads: int = 0) -> Array:
    """Dense bit patterns (rows, cols) of m, which is checked completely first."""
    validate(m, n_threads)  # before the allocation, whose size is unchecked until then
    dense = np.empty((m.rows, m.cols), dtype=bits_dtype(m.type))
    check(lib().ggml_macko_decode(c_matrix(m), ffi().from_buffer("void *", dense, require_writable=True), n_threads))
    return dense


GPU_SHARED_NBYTES = 99 << 10
"""Shared memory per block on GeForce cards since the 30 series. Data center cards have more."""


@dataclass(frozen=True)
class DeviceLayout:
    """The layout of a matrix in the memory of a device."""

    nbytes: int  # reserved bytes, which depend on the header of the matrix only
    own_nbytes: int  # bytes that a GPU allocates in addition for an unusual structure
    name: str  # name of the layout; without data, the first choice
    is_settled: bool  # no other layout is possible
    delta_bits: int  # 0: the layout has none
    lanes: int  # runs per row; 0: the layout has none
    bank_order: bool  # entries are ordered by the banks of shared memory
    reason: str


def gpu_layout(
    m: MatrixHeader | EncodedMatrix,
    shared_nbytes: int = GPU_SHARED_NBYTES,
    *,
    stacked: bool = False,
    n_threads: int = 0,
) -> DeviceLayout:
    """The layout of a matrix on a GPU, or the candidates if m is a header. Needs no GPU. Raises MackoError for an
    invalid header or invalid values.
    """
    out = new_struct("ggml_macko_layout")
    c = _c_header(m) if isinstance(m, MatrixHeader) else c_matrix(m)
    check(lib().ggml_macko_gpu_layout(c, stacked, shared_nbytes, n_threads, out))
    return from_struct(DeviceLayout, out)


def cpu_layout(m: MatrixHeader) -> DeviceLayout:
    """The layout of a matrix for the CPU kernels in use. Raises MackoError for an invalid header."""
    out = new_struct("ggml_macko_layout")
    check(lib().ggml_macko_cpu_layout(_c_header(m), out))
    return from_struct(DeviceLayout, out)


def gpu_nbytes(m: MatrixHeader, shared_nbytes: int = GPU_SHARED_NBYTES) -> int:
    """Bytes of GPU memory that are reserved for a matrix."""
    return gpu_layout(m, shared_nbytes).nbytes


def drop_negative_zeros(bits: Array, type_id: int, n_threads: int = 0) -> int:
    """Sets each -0.0 in a contiguous array of bit patterns to +0.0. Returns the number of changes."""
    dtype = bits_dtype(type_id)
    if bits.dtype != dtype or not bits.flags.c_contiguous or not bits.flags.writeable:
        raise errors.bad_argument(f"expected a contiguous, writable array of {dtype}, got {bits.dtype}")
    count = ffi().new("int64_t *")
    pointer = ffi().from_buffer("void *", bits, require_writable=True)
    check(lib().ggml_macko_drop_negative_zeros(pointer, type_id, bits.size, n_threads, count))
    return int(count[0])


@dataclass(frozen=True)
class MatrixError:
    """The difference between an encoded and a dense matrix."""

    is_equal: bool  # all elements are the same, bit for bit
    fault: int  # one of NO_FAULT ... FAULT_TOO_LARGE
    row: int  # of the first faulty element, or the worst row
    col: int
    n_nonzero: int  # of the dense matrix; includes -0.0 if the encoded matrix does
    max_error: float  # largest error of an element
    rms_relative: float  # RMS of a row's errors over RMS of the row; the mean over non-zero rows
    rms_relative_max: float  # the same in the worst row with 64 non-zeros and 2^-24 of the largest row's RMS
    rms_total: float  # RMS of all errors over RMS of all elements
    weighted_error: float  # sum of weight * error^2
    weighted_power: float  # sum of weight * value^2

    @property
    def relative(self) -> float:
        """Weighted sum of squared errors over the weighted sum of squared values. With the weights of an imatrix: the
        expected squared error of a product over its square, for uncorrelated inputs.
        """
        return self.weighted_error / self.weighted_power if self.weighted_power else 0.0


NO_FAULT, FAULT_NNZ, FAULT_NOT_ZERO, FAULT_TOO_LARGE = range(4)  # enum ggml_macko_fault


def measure_error(m: EncodedMatrix, dense: Array, weights: Array | None = None, n_threads: int = 0) -> MatrixError:
    """Checks m completely and compares it with the dense bit patterns (rows, cols) that it was made from.

    weights: float32 (matrices, cols), weights of squared errors; the matrices of the tensor lie one below the other.
    None: 1. Raises PayloadError or FileFormatError for a matrix that breaks a rule.
    """
    dense = dense_bits(dense, m.type)
    if dense.shape != (m.rows, m.cols):
        raise errors.bad_argument(f"shape {dense.shape} of a matrix of {(m.rows, m.cols)}")
    if weights is not None and (weights.ndim != 2 or weights.shape[1] != m.cols):
        raise errors.bad_argument(f"weights {weights.shape} of {m.cols} columns")
    out = new_struct("ggml_macko_error")
    c_weights, n_weights = _floats(weights), 0 if weights is None else len(weights)
    c_dense = ffi().from_buffer("const void *", dense)
    check(lib().ggml_macko_measure_error(c_matrix(m), c_dense, c_weights, n_weights, n_threads, out))
    return from_struct(MatrixError, out)


def _floats(values: Array | None) -> Any:
    """A pointer to float32 values, which lives as long as the result; NULL for None."""
    if values is None:
        return ffi().NULL
    return ffi().from_buffer("const float *", np.ascontiguousarray(values, dtype=np.float32))
