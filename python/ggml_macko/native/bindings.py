"""The C library, one thin function per call: the only module that touches cffi.

Checks what C cannot check (dtype, contiguity, array lengths), allocates results, turns status codes into exceptions.
Takes and returns NumPy arrays and dataclasses; no cdata leaves this module but `Load.stream`.
"""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import errors
from ..codecs import ec_csr, packed
from ..codecs.ec_csr import EcCsrMatrix
from ..codecs.macko import DELTA_BITS, MackoMatrix, deltas_nbytes, n_padded
from ..codecs.packed import PackedMatrix
from ..values import TYPE_NAMES, bits_dtype

PACKAGE = Path(__file__).parent.parent
LIBRARY_PATH = PACKAGE / "libggml-macko.so"
PRELOAD_PATH = PACKAGE / "libggml-macko-preload.so"

WEIGHT_OTHER, WEIGHT_BLOCK, WEIGHT_HEAD = range(3)  # enum ggml_macko_weight_use

_load_lock = threading.Lock()


def _ffi():
    try:
        from .. import _ffi as generated
    except ImportError as e:
        raise _not_built("_ffi.py") from e
    return generated.ffi


def _not_built(name: str) -> errors.MackoError:
    """The package's Python files alone, as in a clone of the repository."""
    folder = LIBRARY_PATH.parent
    return errors.error(errors.IO, f"{folder} has no {name}: it was not built; pip install ggml-macko from its sources")


@functools.cache
def _open_library():
    # the plugin needs the soname libggml-base.so.0, and it must be the copy that libllama uses: importing llama_cpp
    # loads it
    import llama_cpp  # noqa: F401

    return _ffi().dlopen(str(LIBRARY_PATH))


def _lib():
    with _load_lock:
        if not LIBRARY_PATH.exists():
            raise _not_built(LIBRARY_PATH.name)
        try:
            return _open_library()
        except OSError as e:
            raise errors.error(errors.VERSION_MISMATCH, f"cannot load {LIBRARY_PATH}: {e}") from e


def _text(c_string) -> str:
    return _ffi().string(c_string).decode("utf-8", errors="replace")


def _check(status: int) -> None:
    if status != 0:
        raise errors.error(status, _text(_lib().ggml_macko_last_error()))


# ---- library ----


def version() -> str:
    return _text(_lib().ggml_macko_version())


def built_for_llama_cpp_python() -> str:
    return _text(_lib().ggml_macko_built_for_llama_cpp_python())


def built_for_ggml() -> str:
    return _text(_lib().ggml_macko_built_for_ggml())


def gpus() -> str:
    """The GPUs in use, or why there are none, and what this build has kernels for."""
    return _text(_lib().ggml_macko_gpus())


def status_name(code: int) -> str:
    return _text(_lib().ggml_macko_status_name(code))


def check_ggml(ggml_version: str) -> None:
    """VersionMismatchError unless the plugin was built for this ggml."""
    _check(_lib().ggml_macko_check_ggml(ggml_version.encode()))


# ---- codecs ----


@dataclass(frozen=True)
class Count:
    """What a dense matrix needs."""

    nnz: int
    n_stored: dict  # delta_bits -> entries
    n_nonfinite: int


def _dense_bits(dense: np.ndarray, type_id: int) -> np.ndarray:
    if type_id not in TYPE_NAMES:
        raise errors.error(errors.BAD_ARGUMENT, f"value type {type_id} is not F16, BF16 or F32")
    if dense.ndim != 2 or dense.dtype != bits_dtype(type_id):
        raise errors.error(
            errors.BAD_ARGUMENT,
            f"expected a 2-D array of {bits_dtype(type_id)} bit patterns, got {dense.dtype} {dense.shape}",
        )
    return np.ascontiguousarray(dense)


def count_dense(dense: np.ndarray, type_id: int, n_threads: int = 0) -> Count:
    """dense: bit patterns (rows, cols)."""
    dense = _dense_bits(dense, type_id)
    ffi = _ffi()
    out = ffi.new("struct ggml_macko_count *")
    _check(
        _lib().ggml_macko_count_dense(
            ffi.from_buffer("const void *", dense), type_id, dense.shape[0], dense.shape[1], n_threads, out
        )
    )
    return Count(out.nnz, dict(zip(DELTA_BITS, out.n_stored)), out.n_nonfinite)


def _check_array(m, name: str, dtype) -> np.ndarray:
    """m's array of this name, if C can read it as it lies."""
    array = getattr(m, name)
    if array.ndim != 1 or array.dtype != dtype or not array.flags.c_contiguous:
        raise errors.error(errors.BAD_ARGUMENT, f"{name}: expected a contiguous 1-D array of {np.dtype(dtype)}")
    return array


def _copied(pointer, count: int, dtype) -> np.ndarray:
    """count numbers from C's memory, or bytes if dtype is of one byte."""
    return np.frombuffer(_ffi().buffer(pointer, count * np.dtype(dtype).itemsize), dtype).copy()


def _c_matrix(m: MackoMatrix):
    """The C struct; it points into m's arrays, so m must live as long. C gets their lengths apart, and checks them."""
    for name, dtype in (("values", bits_dtype(m.type)), ("deltas", np.uint8), ("row_ptr", np.int32)):
        _check_array(m, name, dtype)
    ffi = _ffi()
    c = ffi.new("struct ggml_macko_matrix *")
    c.rows, c.cols, c.type, c.delta_bits, c.nnz, c.n_stored = m.rows, m.cols, m.type, m.delta_bits, m.nnz, m.n_stored
    c.values = ffi.from_buffer("const void *", m.values)
    c.deltas = ffi.from_buffer("const uint8_t *", m.deltas)
    c.row_ptr = ffi.from_buffer("const int32_t *", m.row_ptr)
    return c


def encode(
    dense: np.ndarray, type_id: int, delta_bits: int, count: Count | None = None, n_threads: int = 0
) -> MackoMatrix:
    """dense: bit patterns (rows, cols), finite. count: count_dense of the same matrix, if the caller has it already."""
    dense = _dense_bits(dense, type_id)
    if delta_bits not in DELTA_BITS:
        raise errors.error(errors.BAD_ARGUMENT, f"delta_bits is {delta_bits}, not 1, 2, 4 or 8")
    if count is None:
        count = count_dense(dense, type_id, n_threads)
    if count.n_nonfinite:
        raise errors.error(errors.NOT_FINITE, f"{count.n_nonfinite} values are not finite")
    n_stored = count.n_stored[delta_bits]
    m = MackoMatrix(
        dense.shape[0],
        dense.shape[1],
        type_id,
        delta_bits,
        count.nnz,
        n_stored,
        np.empty(n_padded(n_stored), dtype=bits_dtype(type_id)),
        np.empty(deltas_nbytes(n_stored, delta_bits), dtype=np.uint8),
        np.empty(dense.shape[0] + 1, dtype=np.int32),
    )
    _check(_lib().ggml_macko_encode(_ffi().from_buffer("const void *", dense), _c_matrix(m), n_threads))
    return m


@dataclass(frozen=True)
class EcCsrOptions:
    """How blocks are extracted; struct ggml_macko_ec_csr_options says what each means."""

    max_granularity: int = 16
    min_columns: int = 0
    clip: bool = True
    seed: int = 0


def ec_csr_encode(
    dense: np.ndarray, type_id: int, delta_bits: int, options: EcCsrOptions | None = None, n_threads: int = 0
) -> EcCsrMatrix:
    """dense: bit patterns (rows, cols), finite. Takes seconds for large matrices: it compares all rows."""
    dense = _dense_bits(dense, type_id)
    options = options or EcCsrOptions()
    ffi = _ffi()
    c_options = ffi.new("struct ggml_macko_ec_csr_options *")
    c_options.max_granularity, c_options.min_columns = options.max_granularity, options.min_columns
    c_options.clip, c_options.seed = options.clip, options.seed
    out = ffi.new("struct ggml_macko_ec_csr_matrix **")
    _check(
        _lib().ggml_macko_ec_csr_encode(
            ffi.from_buffer("const void *", dense), type_id, *dense.shape, delta_bits, c_options, n_threads, out
        )
    )
    owner = ffi.gc(out[0], _lib().ggml_macko_ec_csr_free)
    c = ffi.new("struct ggml_macko_ec_csr *")
    _check(_lib().ggml_macko_ec_csr_arrays(owner, c))
    arrays = {}
    for name, dtype in _ec_csr_dtypes(type_id, dense.shape[1]).items():
        arrays[name] = _copied(getattr(c, name), getattr(c, f"n_{name}"), dtype)
    return EcCsrMatrix(*dense.shape, type_id, delta_bits, c.nnz, **arrays)


def ec_csr_gpu_us(m: EcCsrMatrix, n_threads: int = 0) -> tuple:
    """(microseconds of a product on a GPU that keeps the blocks, and that keeps MACKO's rows): a model, fitted on an H200."""
    blocks, rows = _ffi().new("double *"), _ffi().new("double *")
    _check(_lib().ggml_macko_ec_csr_gpu_us(_c_ec_csr(m), n_threads, blocks, rows))
    return blocks[0], rows[0]


def _ec_csr_dtypes(type_id: int, cols: int) -> dict:
    dtypes = (bits_dtype(type_id), np.uint8, ec_csr.base_dtype(cols), np.int32, np.int32, np.int32)
    return dict(zip(ec_csr.ARRAYS, dtypes))


_EC_CSR_POINTERS = {"values": "const void", "deltas": "const uint8_t", "bases": "const void"}  # the others: int32_t


def _c_ec_csr(m: EcCsrMatrix):
    """The C struct; it points into m's arrays, so m must live as long."""
    if m.type not in TYPE_NAMES:
        raise errors.error(errors.BAD_ARGUMENT, f"value type {m.type} is not F16, BF16 or F32")
    ffi = _ffi()
    c = ffi.new("struct ggml_macko_ec_csr *")
    c.rows, c.cols, c.type, c.delta_bits, c.nnz = m.rows, m.cols, m.type, m.delta_bits, m.nnz
    for name, dtype in _ec_csr_dtypes(m.type, m.cols).items():
        array = _check_array(m, name, dtype)
        setattr(c, f"n_{name}", len(array))
        setattr(c, name, ffi.from_buffer(f"{_EC_CSR_POINTERS.get(name, 'const int32_t')} *", array))
    return c


def packed_encode(
    dense: np.ndarray, type_id: int, value_type: int, index_bits: int = -1, n_threads: int = 0
) -> PackedMatrix:
    """dense: bit patterns (rows, cols), finite. index_bits -1: what makes it smallest."""
    dense = _dense_bits(dense, type_id)
    ffi = _ffi()
    out = ffi.new("struct ggml_macko_packed_matrix **")
    _check(
        _lib().ggml_macko_packed_encode(
            ffi.from_buffer("const void *", dense), type_id, *dense.shape, value_type, index_bits, n_threads, out
        )
    )
    owner = ffi.gc(out[0], _lib().ggml_macko_packed_free)
    c = ffi.new("struct ggml_macko_packed *")
    _check(_lib().ggml_macko_packed_arrays(owner, c))
    dtype = np.dtype(packed.values_dtype(type_id, value_type))
    values = _copied(c.values, packed.values_nbytes(type_id, value_type, c.n_values) // dtype.itemsize, dtype)
    index = _copied(c.index, c.n_index, np.uint8)
    row_ptr = _copied(c.row_ptr, c.n_row_ptr, np.int32)
    return PackedMatrix(*dense.shape, type_id, value_type, c.index_bits, c.nnz, values, index, row_ptr)


def quantize_q4_nl(values: np.ndarray, weights: np.ndarray | None = None, n_threads: int = 0) -> np.ndarray:
    """uint8, the blocks of n float32 values; weights: float32 (n,), how much the square of an error counts. Raises
    MackoError if a value is too large for a scale in F16.
    """
    arrays = [None if a is None else np.ascontiguousarray(a, dtype=np.float32) for a in (values, weights)]
    if weights is not None and arrays[1].shape != arrays[0].shape:
        raise errors.error(errors.BAD_ARGUMENT, f"{len(arrays[1])} weights of {len(arrays[0])} values")
    ffi = _ffi()
    pointers = [ffi.NULL if a is None else ffi.from_buffer("const float *", a) for a in arrays]
    n = packed.n_values(len(arrays[0]))
    out = np.empty(n // packed.BLOCK * packed.BLOCK_NBYTES[packed.TYPE_Q4_NL], dtype=np.uint8)
    c_out = ffi.from_buffer("void *", out, require_writable=True)
    _check(_lib().ggml_macko_quantize_q4_nl(*pointers, len(arrays[0]), n_threads, c_out))
    return out


def _c_packed(m: PackedMatrix):
    """The C struct; it points into m's arrays, so m must live as long."""
    if m.type not in TYPE_NAMES:
        raise errors.error(errors.BAD_ARGUMENT, f"dense type {m.type} is not F16, BF16 or F32")
    dtypes = (packed.values_dtype(m.type, m.value_type), np.uint8, np.int32)
    for name, dtype in zip(packed.ARRAYS, dtypes):
        _check_array(m, name, dtype)
    ffi = _ffi()
    c = ffi.new("struct ggml_macko_packed *")
    c.rows, c.cols, c.type, c.value_type, c.index_bits, c.nnz = (
        m.rows, m.cols, m.type, m.value_type, m.index_bits, m.nnz,
    )  # fmt: skip
    block = packed.BLOCK_NBYTES.get(m.value_type)
    c.n_values = len(m.values) if block is None else len(m.values) // block * packed.BLOCK
    c.n_index, c.n_row_ptr = len(m.index), len(m.row_ptr)
    c.values = ffi.from_buffer("const void *", m.values)
    c.index = ffi.from_buffer("const uint8_t *", m.index)
    c.row_ptr = ffi.from_buffer("const int32_t *", m.row_ptr)
    return c


# ---- any type ----


def validate(m: MackoMatrix | EcCsrMatrix | PackedMatrix, n_threads: int = 0) -> None:
    if isinstance(m, PackedMatrix):
        _check(_lib().ggml_macko_packed_validate(_c_packed(m), n_threads))
        return
    if isinstance(m, EcCsrMatrix):
        _check(_lib().ggml_macko_ec_csr_validate(_c_ec_csr(m), n_threads))
        return
    _check(_lib().ggml_macko_validate(_c_matrix(m), len(m.values), len(m.deltas), len(m.row_ptr), n_threads))


def decode(m: MackoMatrix | EcCsrMatrix | PackedMatrix, n_threads: int = 0) -> np.ndarray:
    """Dense bit patterns (rows, cols). m is checked in full first."""
    validate(m, n_threads)  # before memory is taken for a shape that nobody has checked
    dense = np.empty((m.rows, m.cols), dtype=bits_dtype(m.type))
    out = _ffi().from_buffer("void *", dense, require_writable=True)
    if isinstance(m, EcCsrMatrix):
        _check(_lib().ggml_macko_ec_csr_decode(_c_ec_csr(m), out, n_threads))
    elif isinstance(m, PackedMatrix):
        _check(_lib().ggml_macko_packed_decode(_c_packed(m), out, n_threads))
    else:
        c = _c_matrix(m)
        _check(_lib().ggml_macko_decode(c, len(m.values), len(m.deltas), len(m.row_ptr), out, n_threads))
    return dense


# ---- CPU kernels ----


def cpu_kernels() -> str:
    """Name of the kernel set in use, for example "avx2"."""
    return _text(_lib().ggml_macko_cpu_kernels())


class CpuMatrix:
    """A matrix in the layout that is fastest on this CPU."""

    def __init__(self, m: MackoMatrix | EcCsrMatrix | PackedMatrix, n_threads: int = 0):
        self.rows, self.cols = m.rows, m.cols
        ffi = _ffi()
        out = ffi.new("struct ggml_macko_cpu_matrix **")
        if isinstance(m, EcCsrMatrix):
            _check(_lib().ggml_macko_cpu_matrix_init_ec_csr(_c_ec_csr(m), n_threads, out))
        elif isinstance(m, PackedMatrix):
            _check(_lib().ggml_macko_cpu_matrix_init_packed(_c_packed(m), n_threads, out))
        else:
            _check(
                _lib().ggml_macko_cpu_matrix_init(
                    _c_matrix(m), len(m.values), len(m.deltas), len(m.row_ptr), n_threads, out
                )
            )
        self._c = ffi.gc(out[0], _lib().ggml_macko_cpu_matrix_free)

    @property
    def nbytes(self) -> int:
        return _lib().ggml_macko_cpu_matrix_nbytes(self._c)

    def mul_mat(self, x: np.ndarray, n_threads: int = 0) -> np.ndarray:
        """x: (n, cols) float32 -> (n, rows) float32, y = x W^T."""
        if x.ndim != 2 or x.shape[1] != self.cols or x.dtype != np.float32:
            raise errors.error(
                errors.BAD_ARGUMENT, f"expected float32 of shape (n, {self.cols}), got {x.dtype} {x.shape}"
            )
        x = np.ascontiguousarray(x)
        y = np.empty((len(x), self.rows), dtype=np.float32)
        ffi = _ffi()
        _check(
            _lib().ggml_macko_cpu_mul_mat(
                self._c,
                ffi.from_buffer("const float *", x),
                ffi.from_buffer("float *", y, require_writable=True),
                len(x),
                n_threads,
            )
        )
        return y


# ---- files ----


@dataclass(frozen=True)
class FileTensor:
    """An entry of the file's own tensor table."""

    name: str
    type: int  # ggml type id
    ne: tuple  # ggml order, n_dims numbers
    offset: int  # of the data, from the start of the file
    nbytes: int
    sparse_index: int  # of the sparse matrix that it is a component of, or -1


@dataclass(frozen=True)
class FileSparse:
    """A sparse matrix of the file."""

    name: str
    format: str
    type: int
    value_type: int  # of the stored values: type, or of packed a quantized one
    delta_bits: int
    ne: tuple  # dense shape, ggml order
    nnz: int
    nbytes: int
    nbytes_dense: int
    tensor_index: tuple  # of its components in the tensor table; FORMAT.md sections 3, 6 and 7 have their order


class File:
    """A GGUF file, dense or sparse, whose header passed all checks."""

    def __init__(self, path: str | os.PathLike, require_model: bool = False):
        ffi = _ffi()
        out = ffi.new("struct ggml_macko_file **")
        _check(_lib().ggml_macko_file_open(os.fsencode(path), require_model, out))
        self._c = ffi.gc(out[0], _lib().ggml_macko_file_close)
        self.is_sparse = bool(_lib().ggml_macko_file_is_sparse(self._c))
        self.size = int(_lib().ggml_macko_file_size(self._c))
        self.alignment = int(_lib().ggml_macko_file_alignment(self._c))

    def close(self) -> None:
        if self._c is not None:
            _ffi().release(self._c)
            self._c = None

    def __enter__(self) -> File:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def tensors(self) -> list:
        """FileTensor of each entry, in table order."""
        info = _ffi().new("struct ggml_macko_tensor_info *")
        out = []
        for i in range(_lib().ggml_macko_file_n_tensors(self._c)):
            _check(_lib().ggml_macko_file_tensor(self._c, i, info))
            ne = tuple(info.ne[0 : info.n_dims])
            out.append(FileTensor(_text(info.name), info.type, ne, info.offset, info.nbytes, info.sparse_index))
        return out

    def sparse(self) -> list:
        """FileSparse of each sparse matrix."""
        info = _ffi().new("struct ggml_macko_sparse_info *")
        out = []
        for i in range(_lib().ggml_macko_file_n_sparse(self._c)):
            _check(_lib().ggml_macko_file_sparse(self._c, i, info))
            out.append(
                FileSparse(
                    _text(info.name),
                    _text(info.format),
                    info.type,
                    info.value_type,
                    info.delta_bits,
                    tuple(info.ne[0 : info.n_dims]),
                    info.nnz,
                    info.nbytes,
                    info.nbytes_dense,
                    tuple(range(info.first_tensor, info.first_tensor + info.n_components)),
                )
            )
        return out

    def check_payload(self, i: int, n_threads: int = 0) -> None:
        """Full validation of sparse matrix i."""
        _check(_lib().ggml_macko_file_check_payload(self._c, i, n_threads))


# ---- loading into llama.cpp ----


def weight_use(name: str, n_dims: int) -> int:
    """WEIGHT_OTHER, WEIGHT_BLOCK or WEIGHT_HEAD: what llama.cpp does with a weight of this name."""
    return _lib().ggml_macko_weight_use_of(name.encode(), n_dims)


class Load:
    """A load in progress on this thread. `stream` is the address of the FILE that serves the virtual dense GGUF."""

    def __init__(self, path: str | os.PathLike | bytes, compress: bool = False, no_alloc: bool = False):
        ffi = _ffi()
        out = ffi.new("struct ggml_macko_load **")
        stream = ffi.new("FILE **")
        flags = (_lib().GGML_MACKO_LOAD_COMPRESS if compress else 0) | (
            _lib().GGML_MACKO_LOAD_NO_ALLOC if no_alloc else 0
        )
        _check(_lib().ggml_macko_load_begin(os.fsencode(path), flags, out, stream))
        self._c = out[0]
        self.stream = int(ffi.cast("uintptr_t", stream[0]))

    def end(self, model_loaded: bool, with_weights: bool) -> None:
        """Closes the stream; raises what went wrong, if anything: then the caller frees the model."""
        load, self._c = self._c, None
        _check(_lib().ggml_macko_load_end(load, model_loaded, with_weights))
