"""What a codec is: the one interface through which the tools see a storage format.

`convert`, `restore`, `verify`, `inspect` and `SparseMatrix` work with every codec of registry.py and name none. A new
format is a subclass of `Codec` and a row of the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np

from ..native import codec as native_codec
from ..native.codec import EncodedMatrix, MatrixError, MatrixHeader
from ..values import TYPE_BF16, TYPE_F16, TYPE_F32, TYPE_I8, TYPE_I16, TYPE_I32, Array

_DTYPES: dict[int, type[np.generic]] = {  # of a component's array; what is not listed is bytes
    TYPE_F32: np.uint32,
    TYPE_F16: np.uint16,
    TYPE_BF16: np.uint16,
    TYPE_I16: np.uint16,
    TYPE_I32: np.int32,
    TYPE_I8: np.uint8,
}


_BLOCK = 32  # elements that take whole bytes, whatever their type


def component_dtype(type_id: int) -> type[np.generic]:
    """Of the array of a component that has this ggml type in a file."""
    return _DTYPES.get(type_id, np.uint8)


class ElementCount(Protocol):
    """What a pass over the dense matrix finds (native.codec.Count)."""

    @property
    def nnz(self) -> int: ...

    @property
    def n_nonfinite(self) -> int: ...

    @property
    def n_stored(self) -> Mapping[int, int]:
        """Entries that delta coding needs, by width in bits."""


@dataclass(frozen=True)
class Source:
    """A dense matrix that is to be stored."""

    bits: Array  # bit patterns (rows, cols), finite
    type: int  # ggml type: F16, BF16 or F32
    count: ElementCount
    column_weights: Array | None = None  # float32 (matrices, cols): how much the squared error of a weight counts

    @property
    def rows(self) -> int:
        return len(self.bits)

    @property
    def cols(self) -> int:
        return int(self.bits.shape[1])


@dataclass(frozen=True)
class Choice:
    """One way of storing that a TYPE of `macko convert` allows. None: the codec chooses, or takes the dense type."""

    codec: Codec
    index_bits: int | None = None
    value_type: int | None = None

    @property
    def is_lossy(self) -> bool:
        return self.value_type is not None and self.codec.is_lossy(self.value_type)


@dataclass(frozen=True)
class Component:
    """A tensor of the file that holds one array of a matrix."""

    type: int  # ggml type
    n_elements: int
    nbytes: int


class StoredArrays(Protocol):
    """The arrays of a matrix in a file, read one at a time; nothing is checked yet."""

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
    """The arrays of a matrix in memory; StoredArrays."""

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
    """A matrix as a choice would store it: how large, and the arrays if they had to be made to know."""

    codec: Codec
    index_bits: int
    value_type: int
    components: tuple[Component, ...]
    matrix: EncodedMatrix | None = None  # None: Codec.encode makes it later

    @property
    def name(self) -> str:
        return self.codec.storage_name(self.index_bits, self.value_type)


@dataclass(frozen=True)
class Settings:
    """How to encode. options: of codecs, by the names that the C library gives them; each codec takes its own."""

    n_threads: int = 0
    options: Mapping[str, int] = field(default_factory=dict)
    search: bool = True  # search scales of quantized values for the least error; else the largest value gives the scale


@dataclass(frozen=True)
class ValueCoding:
    """How the values of a matrix are coded without loss. Numbers of values are not whole where they are estimated."""

    n_values: float
    value_bits: float  # of a value on average, outliers included
    mantissa_bits: int  # of a value that is no outlier
    exponents: int  # how many neighbouring ones have a code
    n_outliers: float  # values without a code, which are stored in full

    @property
    def coverage(self) -> float:
        """Share of the values that have a code."""
        return 1 - self.n_outliers / max(1, self.n_values)


class Codec(ABC):
    """A storage format.

    Methods that take an `EncodedMatrix` raise PayloadError or FileFormatError if it breaks a rule of FORMAT.md;
    `plan` and `encode` raise MackoError with the code LIMIT or NOT_FINITE if the format cannot hold the matrix.
    """

    name: ClassVar[str]
    """The value of `macko.tensor.format` in a file."""

    components: ClassVar[tuple[str, ...]]
    """Suffixes of the tensors that hold the arrays, in file order: `blk.0.attn_q.weight.values`."""

    options: ClassVar[tuple[str, ...]] = ()
    """Names of `Settings.options` that the encoder knows."""

    note: ClassVar[str | None] = None
    """What to log before encoding, of a codec that takes seconds."""

    mixed_types: ClassVar[tuple[str, ...]] = ()
    """The TYPEs that `--target-bpw` chooses from."""

    # ---- what it offers ----

    @abstractmethod
    def types(self) -> Mapping[str, tuple[Choice, ...]]:
        """TYPE of `macko convert` -> what to choose from by real size."""

    def automatic(self) -> tuple[Choice, ...]:
        """Its part in TYPE auto: lossless choices that take no search."""
        return ()

    @abstractmethod
    def storage_name(self, bits: int, value_type: int) -> str:
        """The TYPE together with the chosen index, for example macko-d4."""

    def type_name(self, value_type: int) -> str:
        """The TYPE alone."""
        return self.name

    def value_name(self, value_type: int) -> str | None:
        """Name of a quantized type of values; None of what is kept bit for bit."""
        return None

    def is_lossy(self, value_type: int) -> bool:
        """Whether such values are not bit for bit those that were encoded."""
        return self.value_name(value_type) is not None

    @abstractmethod
    def break_even_density(self, cols: int, type_id: int, bits: int | None, value_type: int) -> float:
        """Density of random non-zeros at which a matrix with rows of `cols` is as large as dense. bits None: best."""

    # ---- encoding ----

    def plan(self, source: Source, choice: Choice, settings: Settings) -> Candidate:
        """How large the matrix would be. By default it is encoded, since nothing less tells."""
        matrix = self.encode(source, choice.index_bits, choice.value_type, settings)
        return Candidate(self, matrix.index_bits, matrix.value_type, self.components_of(matrix), matrix)

    @abstractmethod
    def encode(self, source: Source, bits: int | None, value_type: int | None, settings: Settings) -> EncodedMatrix:
        """The arrays of a matrix."""

    def own_options(self, settings: Settings) -> dict[str, int]:
        return {name: value for name, value in settings.options.items() if name in self.options}

    def nbytes_expanded(self, candidate: Candidate, source: Source) -> int:
        """Of a matrix as devices multiply with it, if that is larger than what is stored: what was coded for the file
        only is plain there.
        """
        return sum(part.nbytes for part in candidate.components)

    def header(self, candidate: Candidate, source: Source, rows: int) -> MatrixHeader:
        """What a file would say of a matrix of so many rows, of which `source` is all or a sample."""
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
        """The components of a matrix of nnz non-zeros, `scale` times as large as source: about so, in whole blocks."""

        def part(c: Component) -> Component:
            n = int(c.n_elements * scale) // _BLOCK * _BLOCK
            return Component(c.type, n, n * c.nbytes // c.n_elements)

        return tuple(part(c) for c in candidate.components)

    def components_of(self, m: EncodedMatrix) -> tuple[Component, ...]:
        return tuple(Component(t, self.n_elements(m, i), m.arrays[i].nbytes) for i, t in enumerate(m.types))

    def n_elements(self, m: EncodedMatrix, i: int) -> int:
        """Elements of component i, as ggml counts them for its type."""
        return len(m.arrays[i])

    # ---- reading ----

    def from_arrays(self, header: EncodedMatrix, data: Sequence[Array]) -> EncodedMatrix:
        """The matrix of the bytes (uint8) of a file's components; header: everything else. Nothing is checked yet."""
        arrays = tuple(a.view(component_dtype(t)) for a, t in zip(data, header.types))
        return EncodedMatrix(
            format=self.name,
            rows=header.rows,
            cols=header.cols,
            type=header.type,
            value_type=header.value_type,
            index_bits=header.index_bits,
            nnz=header.nnz,
            arrays=arrays,
            types=header.types,
        )

    def validate(self, m: EncodedMatrix, n_threads: int = 0) -> None:
        """Checks every rule of FORMAT.md."""
        native_codec.validate(m, n_threads)

    def decode(self, m: EncodedMatrix, n_threads: int = 0) -> Array:
        """Dense bit patterns (rows, cols) of type m.type; m is checked in full first."""
        return native_codec.decode(m, n_threads)

    # ---- what is known of a matrix ----

    @abstractmethod
    def n_stored(self, stored: StoredArrays) -> int:
        """Stored values, fillers counted."""

    def sets(self, stored: StoredArrays) -> Array | None:
        """Of a format in blocks: int32 (n_sets, 4) of granularity, vector size, blocks, columns; else None."""
        return None

    def coding(self, stored: StoredArrays, value_type: int, nnz: int) -> ValueCoding | None:
        """Of values that are coded without loss; else None. Reads what stands in front of them."""
        return None

    def measure_error(
        self, m: EncodedMatrix, source: Array, column_weights: Array | None = None, n_threads: int = 0
    ) -> MatrixError:
        """What encoding did to `source`, bit patterns (rows, cols), and whether that is more than the type of values
        allows; m is checked in full first. column_weights: as in Source.
        """
        return native_codec.measure_error(m, source, column_weights, n_threads)


class DeltaCodec(Codec):
    """A format that stores the distances between columns in one of several widths, which is chosen per matrix."""

    widths: ClassVar[tuple[int, ...]]
    """Bits of a distance."""

    width_mark: ClassVar[str] = ""
    """What the TYPE has in front of the width."""

    def types(self) -> Mapping[str, tuple[Choice, ...]]:
        return {self.name: self.each_width(), **{self._type_of(b): (Choice(self, b),) for b in self.widths}}

    def each_width(self) -> tuple[Choice, ...]:
        return tuple(Choice(self, b) for b in self.widths)

    def storage_name(self, bits: int, value_type: int) -> str:
        return self._type_of(bits)

    def _type_of(self, bits: int) -> str:
        return f"{self.name}-{self.width_mark}{bits}"


def nbytes(m: EncodedMatrix) -> int:
    """Bytes of the arrays, without alignment."""
    return sum(a.nbytes for a in m.arrays)
