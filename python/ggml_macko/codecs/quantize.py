"""Dense matrices in a quantized type of ggml, and the error of quantization.

Column weights, float32 (matrices, cols), are the weights of squared errors: the mean squares of the inputs (an
imatrix), so that the error of products is small. Without them, all weights are equal. The rows of several matrices
(experts) in a tensor lie one below the other.
"""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

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
    bits: Array, source_type: int, data: npt.NDArray[np.uint8], type_id: int, weights: Array | None, n_threads: int = 0
) -> float:
    """Weighted sum of the squared errors of dense() over that of the squared values, as MatrixError.relative."""
    kind = gguf.GGMLQuantizationType(type_id)
    blocks = data.reshape(len(bits), -1)

    def sums(rows: tuple[int, int]) -> tuple[float, float]:
        source = to_float(bits[slice(*rows)], source_type).astype(np.float64)
        difference = gguf.quants.dequantize(blocks[slice(*rows)], kind).reshape(source.shape) - source
        counts = weights_of_rows(weights, len(bits), *rows)
        return float((counts * difference**2).sum()), float((counts * source**2).sum())

    lost, power = (sum(x) for x in zip(*ggml_quants.in_threads(sums, row_ranges(bits), n_threads)))
    return lost / power if power else 0.0
