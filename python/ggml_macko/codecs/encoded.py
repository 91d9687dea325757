"""A matrix as a codec stores it."""

from __future__ import annotations

from dataclasses import dataclass

from ..values import Array


@dataclass(frozen=True)
class EncodedMatrix:
    """The canonical arrays of one matrix; exactly what stands in a file."""

    format: str  # name of the codec
    rows: int
    cols: int
    type: int  # ggml type of the dense matrix
    value_type: int  # of the stored values: `type`, or a quantized type
    bits: int  # width of an index entry; macko.tensor.delta_bits of a file
    nnz: int
    arrays: tuple[Array, ...]  # in the order of the codec's components; one-dimensional, contiguous
    types: tuple[int, ...]  # ggml type of each component in a file
