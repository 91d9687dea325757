"""Are two models the same, bit for bit, whatever way each is stored? `macko verify A B`. Where one of them has quantized
values: is the error what the type allows, and did zeros stay zeros?
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import gguf
import numpy as np

from .. import console, values
from ..codecs import packed
from ..gguf import tensor_rules as weights
from ..gguf.files import Model, Tensor, type_name


def first_difference(
    a: Model,
    b: Model,
    n_threads: int = 0,
    metadata: bool = True,
    equal_zeros: bool = False,
    quantized: list | None = None,
) -> str | None:
    """One line that names the first thing that differs, or None. Order of tensors and keys, and how they are stored,
    do not count.

    equal_zeros: -0.0 and 0.0 count as equal. quantized: a tensor whose values are quantized in one of the models only
    does not differ if its error is within bounds; its QuantizationError is appended here.
    """
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
    for t in a.tensors:
        difference = tensor_difference(t, tensors_b[t.name], n_threads, equal_zeros, quantized)
        if difference is not None:
            return difference
    return None


def tensor_difference(
    a: Tensor, b: Tensor, n_threads: int = 0, equal_zeros: bool = False, quantized: list | None = None
) -> str | None:
    if (
        quantized is not None
        and _shape(a) == _shape(b)
        and weights.is_value_type(a.type) != weights.is_value_type(b.type)
    ):
        source, other = (a, b) if weights.is_value_type(a.type) else (b, a)
        error = dense_quantization_error(other, source.read_bits(n_threads), source.type)
        quantized.append(error)
        return error.fault
    if (a.type, _shape(a)) != (b.type, _shape(b)):
        return f"{a.name}: type {a.type} {list(a.ne)} against type {b.type} {list(b.ne)}"
    if quantized is not None and a.is_quantized != b.is_quantized:
        source, other = (b, a) if a.is_quantized else (a, b)
        want, got = source.read_bits(n_threads), other.read_bits(n_threads)
        if np.array_equal(want, got):  # restored from it
            return None
        error = quantization_error(other, want, got)
        quantized.append(error)
        return error.fault
    both_dense = a.sparse is None and b.sparse is None
    pairs = zip(a.blocks(), b.blocks()) if both_dense else iter([(a.read(n_threads), b.read(n_threads))])
    at = 0
    for block_a, block_b in pairs:
        if equal_zeros and weights.is_value_type(a.type):
            block_a, block_b = (_positive_zeros(x, a.type) for x in (block_a, block_b))
        if not np.array_equal(block_a, block_b):
            return _name_byte(a, at + int(np.argmax(block_a != block_b)), block_a, block_b, at)
        at += len(block_a)
    return None


@dataclass(frozen=True)
class QuantizationError:
    """Of a tensor, against what it was quantized from."""

    name: str
    value_type: str
    max_error: float
    rms_relative: float  # RMS of a row's error over RMS of the row: mean of the rows
    rms_relative_max: float  # ... and the worst row
    fault: str | None  # a zero that did not stay one, or an error beyond the type's bound


def quantization_error(quantized: Tensor, bits: np.ndarray, decoded: np.ndarray) -> QuantizationError:
    """bits: the dense source; decoded: what quantized gives, both bit patterns (rows, cols)."""
    m = quantized.read_sparse()
    want, got = values.to_float(bits, m.type), values.to_float(decoded, m.type)
    difference = got - want
    fault = None
    zeros = bits == 0
    if int(np.count_nonzero(zeros)) != bits.size - m.nnz:
        zeros = want == 0  # -0.0 was dropped
    if int(np.count_nonzero(zeros)) != bits.size - m.nnz:
        fault = (
            f"{quantized.name}: {m.nnz} weights are stored, but {bits.size - int(np.count_nonzero(zeros))} are not zero"
        )
    else:  # the stored weights are those that are not zero, in the same order
        beyond = np.zeros(bits.shape, dtype=bool)
        beyond[~zeros] = np.abs(difference[~zeros]) > packed.error_bound(m, want[~zeros])
        for what, wrong in (("a zero did not stay one", zeros & (got != 0)), ("the error is too large", beyond)):
            if fault is None and wrong.any():
                row, column = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
                fault = f"{quantized.name}: row {row}, column {column}: {what} ({want[row, column]:g}, {got[row, column]:g})"
    return QuantizationError(quantized.name, packed.QUANT_NAMES[m.value_type], *_sizes(want, difference), fault)


def dense_quantization_error(quantized: Tensor, bits: np.ndarray, type_id: int) -> QuantizationError:
    """Of a dense tensor in one of ggml's types; bits: its source (rows, cols). A fault is an error that its bits do not
    excuse: of n bits per weight 2^(2-n), 2 to 4 times what ggml's types leave of normally distributed weights.
    """
    want = values.to_float(bits, type_id)
    rows = quantized.read().reshape(quantized.rows, -1)
    got = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(quantized.type)).reshape(want.shape)
    sizes = _sizes(want, got - want)
    rms = float(np.sqrt(np.mean((got - want) ** 2, dtype=np.float64) / max(np.mean(want**2, dtype=np.float64), 1e-300)))
    limit = 2.0 ** (2 - 8 * quantized.nbytes / quantized.n_elements)
    fault = (
        None
        if rms <= limit
        else f"{quantized.name}: the error is too large (RMS {rms:.2%} of the weights, limit {limit:.2%})"
    )
    return QuantizationError(quantized.name, type_name(quantized.type), *sizes, fault)


def _sizes(want: np.ndarray, difference: np.ndarray) -> tuple:
    """Largest error; RMS of a row's error over RMS of the row: mean of the rows, and the worst."""
    power = np.einsum("ij,ij->i", want, want, dtype=np.float64)
    rows = power > 0
    relative = np.sqrt(np.einsum("ij,ij->i", difference, difference, dtype=np.float64)[rows] / power[rows])
    return float(np.abs(difference).max()), *(
        (float(relative.mean()), float(relative.max())) if rows.any() else (0.0, 0.0)
    )


def error_line(errors_of: list) -> str:
    """What a user should know of quantized tensors."""
    kinds = ", ".join(sorted({e.value_type for e in errors_of}))
    worst = max(errors_of, key=lambda e: e.rms_relative_max)
    return (
        f"{len(errors_of)} tensors with {kinds} values: error at most {max(e.max_error for e in errors_of):.3g}, RMS "
        f"{np.mean([e.rms_relative for e in errors_of]):.2%} of a row's (worst row {worst.rms_relative_max:.2%}, in "
        f"{worst.name}); zeros of sparse tensors stayed zeros"
    )


def _positive_zeros(data: np.ndarray, type_id: int) -> np.ndarray:
    bits = data.view(values.bits_dtype(type_id))
    return np.where(bits == values.NEGATIVE_ZERO[type_id], 0, bits).astype(bits.dtype).view(np.uint8)


def _shape(t: Tensor) -> tuple:
    """Dimensions of 1 at the end mean nothing in ggml."""
    return (*t.ne, 1, 1, 1)[:4]


def _name_byte(t: Tensor, byte: int, a: np.ndarray, b: np.ndarray, begin: int) -> str:
    if not weights.is_value_type(t.type):
        return f"{t.name}: first difference at byte {byte} of the data"
    dtype = values.bits_dtype(t.type)
    i = byte // dtype.itemsize
    local = i - begin // dtype.itemsize
    x, y = a.view(dtype)[local], b.view(dtype)[local]
    digits = dtype.itemsize * 2
    place = f"row {i // t.cols}, column {i % t.cols}"
    return f"{t.name}: first difference at {place}: 0x{x:0{digits}x} against 0x{y:0{digits}x}"


# ---- command ----

HELP = "compare two models bit for bit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares two GGUF models bit for bit, each dense, sparse or split: metadata, tensor names, types, shapes, "
        "values. Prints the first difference and exits with 1, or says that they are identical and exits with 0. Tensors "
        "that one of the models has with quantized values need not be identical: their errors are printed, and the exit "
        "code is 0 if they are within what the type allows and zeros stayed zeros."
    )
    parser.add_argument("a", metavar="A", help="a model")
    parser.add_argument("b", metavar="B", help="another")
    parser.add_argument("--no-metadata", action="store_true", help="compare tensors only")
    parser.add_argument("--equal-zeros", action="store_true", help="count -0.0 and 0.0 as equal")
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads (default: all cores)")


def run(args: argparse.Namespace) -> int:
    with Model(args.a) as a, Model(args.b) as b:
        quantized: list = []
        difference = first_difference(a, b, args.threads, not args.no_metadata, args.equal_zeros, quantized)
        if difference is not None:
            print(difference)
            return 1
        if quantized:
            rows = [[e.name, e.value_type, e.max_error, e.rms_relative, e.rms_relative_max] for e in quantized]
            print(console.table(rows, ["tensor", "values", "max error", "RMS / row RMS", "worst row"]))
            print(f"not identical: {error_line(quantized)}; everything else is identical")
            return 0
        n_sparse = [sum(t.sparse is not None for t in m.tensors) for m in (a, b)]
        identical = "equal but for the sign of zeros" if args.equal_zeros else "identical"
        print(
            f"{identical}: {len(a.tensors)} tensors, {console.size(sum(t.nbytes for t in a.tensors)).strip()} of "
            f"dense data (stored sparse: {n_sparse[0]} in A, {n_sparse[1]} in B)"
        )
    return 0
