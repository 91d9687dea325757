"""Compares two models: are they equal bit for bit, except for the signs of zeros, however each is stored?

If a tensor is quantized in one of the models: is the error within the limit of the type, and did zeros stay zeros?
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .. import console
from ..codecs import quantize, registry
from ..gguf import tensor_rules
from ..gguf.files import Model, Tensor, type_name
from ..native import codec as native_codec
from ..native.codec import MatrixError
from ..values import NEGATIVE_ZERO, Array, bits_dtype, to_float

# ---- results ----


@dataclass(frozen=True)
class QuantizationError:
    """The error of a quantized tensor relative to its source."""

    name: str
    value_type: str
    max_error: float  # largest error of a weight
    rms_relative: float  # RMS of a row's errors over RMS of the row; the mean over rows
    rms_relative_max: float  # the same in the worst row
    fault: str | None  # a zero that did not stay one, or an error beyond the type's bound


@dataclass(frozen=True)
class Verification:
    """The result of comparing two models."""

    difference: str | None  # one line that names the first thing that differs
    quantized: tuple[QuantizationError, ...]  # tensors whose values are quantized in one of the models, within bounds
    n_tensors: int
    nbytes_dense: int  # of all tensors, stored densely
    n_sparse: tuple[int, int]  # tensors that each model stores sparse
    n_negative_zeros: int = 0  # places where one model has -0.0 and the other +0.0

    @property
    def is_equal(self) -> bool:
        """Nothing differs except the signs of zeros and, within bounds, quantized values."""
        return self.difference is None

    @property
    def is_identical(self) -> bool:
        """Every value is the same, bit for bit."""
        return self.difference is None and not self.quantized and not self.n_negative_zeros


def verify(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    metadata: bool = True,
    exact: bool = False,
    n_threads: int = 0,
) -> Verification:
    """Compares two GGUF models, each dense, sparse or split: metadata, tensor names, types, shapes and values.

    The order of tensors and keys and their storage do not matter. A tensor that only one of the models has with
    quantized values need not be identical: errors must be within the limits of quantize.excess(), and zeros must be
    zeros. Positions with -0.0 in one model and +0.0 in the other, as convert() leaves them, are counted; with
    exact=True each is a difference.

    metadata=False compares tensors only; n_threads=0 uses all cores.
    Raises MackoError if a file is not a valid model, OSError if it cannot be read. A difference is a result, no error.
    """
    with Model(a) as model_a, Model(b) as model_b:
        comparison = Comparison(n_threads, exact, allow_quantized=True)
        difference = comparison.first_difference(model_a, model_b, metadata)
        return Verification(
            difference=difference,
            quantized=tuple(comparison.quantized),
            n_tensors=len(model_a.tensors),
            nbytes_dense=sum(t.nbytes for t in model_a.tensors),
            n_sparse=(count_sparse(model_a), count_sparse(model_b)),
            n_negative_zeros=comparison.n_negative_zeros,
        )


def count_sparse(model: Model) -> int:
    return sum(t.sparse is not None for t in model.tensors)


# ---- comparing ----

_PIECE = 1 << 20  # bytes that are compared at a time: they and what is computed from them stay in the cache


class Comparison:
    """Compares models, and collects the errors of tensors that are quantized in one of them only."""

    def __init__(self, n_threads: int = 0, exact: bool = True, allow_quantized: bool = False):
        self._n_threads = n_threads
        self._exact = exact  # False: -0.0 and +0.0 are equal, and counted
        self._allow_quantized = allow_quantized  # False: a quantized tensor must also be equal bit for bit
        self.n_negative_zeros = 0  # places where only the sign of a zero differs
        self.quantized: list[QuantizationError] = []

    def first_difference(self, a: Model, b: Model, metadata: bool = True) -> str | None:
        """One line that names the first thing that differs, or None."""
        if metadata:
            keys_a, keys_b = ({k.name: k.record for k in m.keys} for m in (a, b))
            for name in [*keys_a, *(k for k in keys_b if k not in keys_a)]:
                if name not in keys_a or name not in keys_b:
                    return f"metadata {name}: only in {a.path if name in keys_a else b.path}"
                if keys_a[name] != keys_b[name]:
                    return f"metadata {name}: differs"
        tensors_a, tensors_b = ({t.name: t for t in m.tensors} for m in (a, b))
        for name in [*tensors_a, *tensors_b]:
            if name not in tensors_a or name not in tensors_b:
                return f"{name}: only in {a.path if name in tensors_a else b.path}"
        for t in console.tracked(a.tensors, "comparing", lambda t: t.nbytes, "B"):
            difference = self.tensor_difference(t, tensors_b[t.name])
            if difference is not None:
                return difference
        return None

    def tensor_difference(self, a: Tensor, b: Tensor) -> str | None:
        """One line with the first place where two tensors of the same name differ, or None."""
        a_has_bits, b_has_bits = tensor_rules.is_value_type(a.type), tensor_rules.is_value_type(b.type)
        if self._allow_quantized and _shape(a) == _shape(b) and a_has_bits != b_has_bits:
            source, other = (a, b) if a_has_bits else (b, a)
            bits = source.read_bits(self._n_threads)
            return self._collect(dense_quantization_error(other, bits, source.type, self._n_threads))
        if (a.type, _shape(a)) != (b.type, _shape(b)):
            return f"{a.name}: type {a.type} {list(a.ne)} against type {b.type} {list(b.ne)}"
        if self._allow_quantized and a.is_quantized != b.is_quantized:
            source, other = (b, a) if a.is_quantized else (a, b)
            error = quantization_error(other, source.read_bits(self._n_threads), self._n_threads)
            return None if error is None else self._collect(error)
        at = 0
        for block_a, block_b in self._blocks(a, b):
            byte = self._first_different_byte(block_a, block_b, a.type)
            if byte is not None:
                return _name_byte(a, at + byte, block_a, block_b, at)
            at += len(block_a)
        return None

    def _first_different_byte(self, x: Array, y: Array, type_id: int) -> int | None:
        """The index of the first byte that differs between two arrays of one type. Without `exact`, zeros that differ
        only in their sign are counted instead.
        """
        if self._exact or not tensor_rules.is_value_type(type_id):
            return None if np.array_equal(x, y) else int(np.argmax(x != y))
        dtype = bits_dtype(type_id)
        for at in range(0, len(x), _PIECE):
            a, b = x[at : at + _PIECE].view(dtype), y[at : at + _PIECE].view(dtype)
            if np.array_equal(a, b):
                continue
            differs = a != b
            signs = differs & ((a | b) == NEGATIVE_ZERO[type_id])  # one is -0.0, the other +0.0
            n = int(np.count_nonzero(signs))
            if n != int(np.count_nonzero(differs)):
                return at + int(np.argmax(differs & ~signs)) * dtype.itemsize
            self.n_negative_zeros += n
        return None

    def _collect(self, error: QuantizationError) -> str | None:
        self.quantized.append(error)
        return error.fault

    def _blocks(self, a: Tensor, b: Tensor) -> Iterator[tuple[Array, Array]]:
        """The dense bytes of both, in pieces of the same length."""
        if a.sparse is None and b.sparse is None:
            yield from zip(a.blocks(), b.blocks())
        else:
            yield a.read(self._n_threads), b.read(self._n_threads)


# ---- errors of quantized tensors ----


def quantization_error(quantized: Tensor, bits: Array, n_threads: int = 0) -> QuantizationError | None:
    """The error of a sparse tensor. bits: its dense source (rows, cols). None if both are equal."""
    m, found = quantized.measure_error(bits, n_threads)
    if found.is_equal:
        return None
    codec = registry.codec_of(m)
    fault = codec.fault_of(found, m.value_type)
    if found.fault in (native_codec.FAULT_NOT_ZERO, native_codec.FAULT_TOO_LARGE):
        x, y = (to_float(b[found.row], m.type)[found.col] for b in (bits, codec.decode(m, n_threads)))
        fault = f"{fault} ({x:g}, {y:g})"
    return _error_of(quantized.name, codec.value_name(m.value_type) or codec.name, found, fault)


def dense_quantization_error(quantized: Tensor, bits: Array, type_id: int, n_threads: int = 0) -> QuantizationError:
    """The error of a dense tensor in one of ggml's types. bits: its source (rows, cols)."""
    found = quantize.dense_error(bits, type_id, quantized.read(), quantized.type, n_threads=n_threads)
    value_bits = 8 * quantized.nbytes / quantized.n_elements
    fault = quantize.excess(value_bits, found.rms_total, found.rms_relative_max, found.row)
    return _error_of(quantized.name, type_name(quantized.type), found, fault)


def _error_of(name: str, value_type: str, found: MatrixError, fault: str | None) -> QuantizationError:
    return QuantizationError(
        name=name,
        value_type=value_type,
        max_error=found.max_error,
        rms_relative=found.rms_relative,
        rms_relative_max=found.rms_relative_max,
        fault=None if fault is None else f"{name}: {fault}",
    )


def error_line(found: Sequence[QuantizationError]) -> str:
    """A summary of the quantized tensors in one line."""
    kinds = ", ".join(sorted({e.value_type for e in found}))
    worst = max(found, key=lambda e: e.rms_relative_max)
    return (
        f"{len(found)} tensors with {kinds} values: error at most {max(e.max_error for e in found):.3g}, RMS "
        f"{np.mean([e.rms_relative for e in found]):.2%} of a row's (worst row {worst.rms_relative_max:.2%}, in "
        f"{worst.name}); zeros of sparse tensors stayed zeros"
    )


# ---- naming a difference ----


def _shape(t: Tensor) -> tuple[int, ...]:
    """The shape in four dimensions. Dimensions of 1 at the end have no meaning in ggml."""
    return (*t.ne, 1, 1, 1)[:4]


def _name_byte(t: Tensor, byte: int, a: Array, b: Array, begin: int) -> str:
    """byte: of the tensor's dense data; a and b are that data from byte `begin` on, in both models."""
    if not tensor_rules.is_value_type(t.type):
        return f"{t.name}: first difference at byte {byte} of the data"
    dtype = bits_dtype(t.type)
    i = byte // dtype.itemsize
    local = i - begin // dtype.itemsize
    x, y = a.view(dtype)[local], b.view(dtype)[local]
    digits = dtype.itemsize * 2
    place = f"row {i // t.cols}, column {i % t.cols}"
    return f"{t.name}: first difference at {place}: 0x{x:0{digits}x} against 0x{y:0{digits}x}"
