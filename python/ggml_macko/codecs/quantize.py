"""Dense matrices in a quantized type of ggml, and the error of quantization.

Column weights, float32 (matrices, cols), are the weights of squared errors: the mean squares of the inputs (an
imatrix), so that the error of products is small. Without them, all weights are equal. The rows of several matrices
(experts) in a tensor lie one below the other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..native.codec import NO_FAULT, MatrixError
from ..values import Array, to_float
from . import ggml_quants


def weights_of_rows(weights: Array | None, rows: int, begin: int, end: int) -> Array:
    """Column weights (end - begin, cols) of the rows begin ... end - 1 of a tensor of `rows` rows, or a 1 to
    broadcast.
    """
    if weights is None:
        return np.ones((1, 1), dtype=np.float32)
    found: Array = weights[np.arange(begin, end) * len(weights) // rows]
    return found


def excess(value_bits: float, total: float, worst: float, row: int) -> str | None:
    """Why values of value_bits bits cannot represent a matrix; None if they can.

    total: RMS of all errors over RMS of the matrix; worst: the same of the worst row. The limit of n bits is 2^(2-n)
    for the total, 2 to 4 times the error for normally distributed weights, and three times that for a row. Tiny weights
    exceed it: they are below the range of scales.
    """
    limit = 2.0 ** (2 - value_bits)
    for error, most, where in ((total, limit, "the weights"), (worst, min(3 * limit, 0.9), f"row {row}")):
        if not error <= most:
            return f"the error is too large (RMS {error:.2%} of {where}, limit {most:.2%})"
    return None


def row_ranges(bits: Array) -> list[tuple[int, int]]:
    """Ranges of rows with about 1 M elements each, so that threads need little temporary memory."""
    step = max(1, (1 << 20) // int(bits.shape[1]))
    return [(at, min(at + step, len(bits))) for at in range(0, len(bits), step)]


def dense(
    bits: Array, source_type: int, type_id: int, weights: Array | None, n_threads: int = 0
) -> npt.NDArray[np.uint8]:
    """The bytes of a dense tensor in ggml type `type_id`. bits: bit patterns (rows, cols) of type `source_type`."""
    matrices = np.split(bits, 1 if weights is None else len(weights))
    return np.concatenate(
        [
            ggml_quants.quantize(m, source_type, type_id, None if weights is None else weights[i], n_threads)
            for i, m in enumerate(matrices)
        ]
    ).reshape(-1)


def dense_error(
    bits: Array,
    source_type: int,
    data: npt.NDArray[np.uint8],
    type_id: int,
    weights: Array | None = None,
    n_threads: int = 0,
) -> MatrixError:
    """The error of ggml type `type_id` for bit patterns (rows, cols); data: the bytes of the quantized tensor."""
    import gguf  # other commands start faster without it

    kind, blocks = gguf.GGMLQuantizationType(type_id), data.reshape(len(bits), -1)

    def measure(rows: tuple[int, int]) -> tuple[Array, ...]:
        """For each row: the largest error, sums of squares of errors and values, and the same sums weighted."""
        want = to_float(bits[slice(*rows)], source_type)
        lost = gguf.quants.dequantize(blocks[slice(*rows)], kind).reshape(want.shape) - want
        counts = weights_of_rows(weights, len(bits), *rows)
        largest = np.maximum(lost.max(axis=1), -lost.min(axis=1)).astype(np.float64)
        lost, power = np.square(lost, dtype=np.float64), np.square(want, dtype=np.float64)
        sums = [lost.sum(axis=1), power.sum(axis=1)]
        weighted = sums if weights is None else [(counts * lost).sum(axis=1), (counts * power).sum(axis=1)]
        return (largest, *sums, *weighted)

    parts = ggml_quants.in_threads(measure, row_ranges(bits), n_threads)
    largest, lost, power, weighted_lost, weighted_power = (np.concatenate(column) for column in zip(*parts))
    relative = np.sqrt(lost / np.where(power > 0, power, 1))
    competes = np.where(power >= power.max() * 2.0**-48, relative, 0)  # as in the C library's measure_error
    return MatrixError(
        is_equal=not lost.any(),
        fault=NO_FAULT,
        row=int(competes.argmax()),
        col=0,
        n_nonzero=int(np.count_nonzero(bits)),
        max_error=float(largest.max()),
        rms_relative=float(relative[power > 0].mean()) if power.any() else 0.0,
        rms_relative_max=float(competes.max()),
        rms_total=float(np.sqrt(lost.sum() / power.sum())) if power.any() else 0.0,
        weighted_error=float(weighted_lost.sum()),
        weighted_power=float(weighted_power.sum()),
    )
