"""The interface through which the tools use a storage format.

`convert`, `restore`, `verify`, `inspect` and `SparseMatrix` work with every codec of registry.py. A new format is a
subclass of `Codec` and a row of the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from .. import errors
from ..native import codec as native_codec
from ..native.codec import EncodedMatrix, MatrixError, MatrixHeader
from ..values import Array, component_dtype
from . import quantize
from .value_types import code_bits

_BLOCK = 32  # elements of any type that fill whole bytes


class ElementCount(Protocol):
    """The result of a pass over the dense matrix (native.codec.Count)."""

    @property
    def nnz(self) -> int: ...

    @property
    def n_nonfinite(self) -> int: ...

    @property
    def n_stored(self) -> Mapping[int, int]:
        """Entries of delta coding, by width in bits."""


@dataclass(frozen=True)
class Source:
    """A dense matrix to store."""

    bits: Array  # bit patterns (rows, cols), finite
    type: int  # ggml type: F16, BF16 or F32
    count: ElementCount
    column_weights: Array | None = None  # float32 (matrices, cols): weights of squared errors

    @property
    def rows(self) -> int:
        return len(self.bits)

    @property
    def cols(self) -> int:
        return int(self.bits.shape[1])


@dataclass(frozen=True)
class Choice:
    """A way to store a matrix in a TYPE of `macko convert`. None: the codec chooses, or uses the dense type."""

    codec: Codec
    index_bits: int | None = None
    value_type: int | None = None

    @property
    def is_lossy(self) -> bool:
        return self.value_type is not None and self.codec.is_lossy(self.value_type)


@dataclass(frozen=True)
class Component:
    """A tensor of a file with one array of a matrix."""

    type: int  # ggml type
    n_elements: int
    nbytes: int


class StoredArrays(Protocol):
    """The unchecked arrays of a matrix in a file, read one at a time."""

    @property
    def components(self) -> Sequence[Component]: ...

    def array(self, i: int) -> Array:
        """All of component i."""

    def first_numbers(self, i: int, n: int) -> Array:
        """The first n elements of component i, an array of int32."""

    def last_number(self, i: int) -> int:
        """The last element of component i, an array of int32."""


@dataclass(frozen=True)
class EncodedArrays:
    """The arrays of a matrix in memory, as StoredArrays."""

    matrix: EncodedMatrix
    components: tuple[Component, ...]

    def array(self, i: int) -> Array:
        return self.matrix.arrays[i]

    def first_numbers(self, i: int, n: int) -> Array:
        return self.matrix.arrays[i][:n]

    def last_number(self, i: int) -> int:
        return int(self.matrix.arrays[i][-1])


@dataclass(frozen=True)
class Candidate:
    """The size of a matrix for a choice, and its arrays if the size is known only after encoding."""

    codec: Codec
    index_bits: int
    value_type: int
    components: tuple[Component, ...]
    matrix: EncodedMatrix | None = None  # None: Codec.encode makes it later
    error: MatrixError | None = None  # of quantized values

    @property
    def name(self) -> str:
        return self.codec.storage_name(self.index_bits, self.value_type)


@dataclass(frozen=True)
class Settings:
    """How to encode. options: by their names in the C library; each codec uses its own options."""

    n_threads: int = 0
    options: Mapping[str, int] = field(default_factory=dict)
    search: bool = True  # of quantized values, the scales with the least error; otherwise, only sizes are planned


@dataclass(frozen=True)
class ValueCoding:
    """The lossless coding of the values of a matrix. Estimated numbers of values may be fractions."""

    n_values: float
    value_bits: float  # mean bits of a value, including outliers
    mantissa_bits: int  # of a value that is not an outlier
    exponents: int  # number of consecutive exponents with a code
    n_outliers: float  # values without a code, which are stored in full

    @property
    def coverage(self) -> float:
        """Share of the values that have a code."""
        return 1 - self.n_outliers / max(1, self.n_values)


class Codec(ABC):
    """A storage format.

    Methods with an `EncodedMatrix` raise PayloadError or FileFormatError if it breaks a rule of FORMAT.md. `plan` and
    `encode` raise MackoError with the code LIMIT or NOT_FINITE if the format cannot represent the matrix. Only `plan`
    checks the errors of quantized values, unless their scales are not searched.
    """

    name: ClassVar[str]
    """The value of `macko.tensor.format` in a file."""

    components: ClassVar[tuple[str, ...]]
    """Suffixes of the tensors with the arrays, in file order: `blk.0.attn_q.weight.values`."""

    options: ClassVar[tuple[str, ...]] = ()
    """Names of the `Settings.options` that the encoder uses."""

    note: ClassVar[str | None] = None
    """A message to log before encoding, if encoding takes seconds."""

    mixed_types: ClassVar[tuple[str, ...]] = ()
    """TYPEs that `--target-bpw` chooses from."""

    # ---- types ----

    @abstractmethod
    def types(self) -> Mapping[str, tuple[Choice, ...]]:
        """TYPE of `macko convert` -> choices, of which the smallest is used."""

    def automatic(self) -> tuple[Choice, ...]:
        """The choices for TYPE auto: lossless, without a search."""
        return ()

    @abstractmethod
    def storage_name(self, bits: int, value_type: int) -> str:
        """The TYPE together with the chosen index, for example macko-d4."""

    def type_name(self, value_type: int) -> str:
        """The TYPE alone."""
        return self.name

    def value_name(self, value_type: int) -> str | None:
        """Name of a quantized type of values; None for lossless types."""
        return None

    def dense_name(self, value_type: int) -> str | None:
        """ggml's type of a dense matrix in which a quantized type of values has as many bits; None if lossless."""
        return None

    def is_lossy(self, value_type: int) -> bool:
        """Whether values of the type may differ from the encoded values."""
        return self.value_name(value_type) is not None

    @abstractmethod
    def break_even_density(self, cols: int, type_id: int, bits: int | None, value_type: int) -> float:
        """Density of random non-zeros at which a matrix with rows of `cols` is as large as dense. bits None: best."""

    # ---- encoding ----

    def plan(self, source: Source, choice: Choice, settings: Settings) -> Candidate:
        """The size of the matrix. By default, the matrix is encoded."""
        matrix = self.encode(source, choice.index_bits, choice.value_type, settings)
        error = None
        if self.is_lossy(matrix.value_type) and settings.search:
            error = self.measure_error(matrix, source.bits, source.column_weights, settings.n_threads)
            why = self.fault_of(error, matrix.value_type)
            if why is not None:
                name = self.type_name(matrix.value_type)
                raise errors.error(errors.LIMIT, f"{name} cannot represent it: {why}")
        return Candidate(self, matrix.index_bits, matrix.value_type, self.components_of(matrix), matrix, error)

    @abstractmethod
    def encode(self, source: Source, bits: int | None, value_type: int | None, settings: Settings) -> EncodedMatrix:
        """The arrays of a matrix."""

    def own_options(self, settings: Settings) -> dict[str, int]:
        return {name: value for name, value in settings.options.items() if name in self.options}

    def nbytes_expanded(self, candidate: Candidate, source: Source) -> int:
        """Bytes of a matrix in the form that devices multiply, without coding that only the file has."""
        return sum(part.nbytes for part in candidate.components)

    def header(self, candidate: Candidate, source: Source, rows: int) -> MatrixHeader:
        """The header of a matrix with so many rows, of which `source` is the whole or a sample."""
        scale = rows / source.rows
        nnz = round(source.count.nnz * scale)
        parts = candidate.components if rows == source.rows else self.enlarged(candidate, source, nnz, scale)
        return MatrixHeader(
            format=self.name,
            rows=rows,
            cols=source.cols,
            type=source.type,
            value_type=candidate.value_type,
            index_bits=candidate.index_bits,
            nnz=nnz,
            types=tuple(part.type for part in parts),
            nbytes=tuple(part.nbytes for part in parts),
        )

    def enlarged(self, candidate: Candidate, source: Source, nnz: int, scale: float) -> tuple[Component, ...]:
        """The estimated components, in whole blocks, of a matrix `scale` times as large as source."""

        def part(c: Component) -> Component:
            n = int(c.n_elements * scale) // _BLOCK * _BLOCK
            return Component(c.type, n, n * c.nbytes // c.n_elements)

        return tuple(part(c) for c in candidate.components)

    def components_of(self, m: EncodedMatrix) -> tuple[Component, ...]:
        return tuple(Component(t, len(array), array.nbytes) for t, array in zip(m.types, m.arrays))

    # ---- reading ----

    def from_arrays(self, header: EncodedMatrix, data: Sequence[Array]) -> EncodedMatrix:
        """The unchecked matrix of a header and the bytes (uint8) of a file's components."""
        arrays = tuple(a.view(component_dtype(t)) for a, t in zip(data, header.types))
        return replace(header, format=self.name, arrays=arrays)

    def validate(self, m: EncodedMatrix, n_threads: int = 0) -> None:
        """Checks every rule of FORMAT.md."""
        native_codec.validate(m, n_threads)

    def decode(self, m: EncodedMatrix, n_threads: int = 0) -> Array:
        """Dense bit patterns (rows, cols) of type m.type, after a complete check of m."""
        return native_codec.decode(m, n_threads)

    # ---- statistics ----

    @abstractmethod
    def n_stored(self, stored: StoredArrays) -> int:
        """Stored values, including fillers."""

    def sets(self, stored: StoredArrays) -> Array | None:
        """For a format with blocks: int32 (n_sets, 4) of granularity, vector size, blocks, columns."""
        return None

    def coding(self, stored: StoredArrays, value_type: int, nnz: int) -> ValueCoding | None:
        """The coding of lossless coded values, from their header."""
        return None

    def measure_error(
        self, m: EncodedMatrix, source: Array, column_weights: Array | None = None, n_threads: int = 0
    ) -> MatrixError:
        """Checks m completely and compares it with `source`, bit patterns (rows, cols), and with the bounds of its
        type. column_weights: as in Source.
        """
        return native_codec.measure_error(m, source, column_weights, n_threads)

    def fault_of(self, found: MatrixError, value_type: int) -> str | None:
        """Why a matrix does not represent its source, or None."""
        if found.fault == native_codec.FAULT_NNZ:
            return f"not all of {found.n_nonzero} non-zeros are stored"
        if found.fault != native_codec.NO_FAULT:
            is_zero = found.fault == native_codec.FAULT_NOT_ZERO
            what = "a zero did not stay one" if is_zero else "the error is too large"
            return f"row {found.row}, column {found.col}: {what}"
        return quantize.excess(code_bits(value_type), found.rms_total, found.rms_relative_max, found.row)


class DeltaCodec(Codec):
    """A format that stores the distances between columns with a width that is chosen per matrix."""

    widths: ClassVar[tuple[int, ...]]
    """Bits of a distance."""

    width_mark: ClassVar[str] = ""
    """The letter before the width in the TYPE."""

    def types(self) -> Mapping[str, tuple[Choice, ...]]:
        return {self.name: self.each_width(), **{self._type_of(b): (Choice(self, b),) for b in self.widths}}

    def each_width(self) -> tuple[Choice, ...]:
        return tuple(Choice(self, b) for b in self.widths)

    def storage_name(self, bits: int, value_type: int) -> str:
        return self._type_of(bits)

    def _type_of(self, bits: int) -> str:
        return f"{self.name}-{self.width_mark}{bits}"
