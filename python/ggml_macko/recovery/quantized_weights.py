"""Weights with quantized values during training: a straight-through estimator, in which the gradient of a quantized
value is the gradient of its weight.

Scales belong to windows of columns (FORMAT.md section 9). One step of least squares updates them each time.
"""

from __future__ import annotations

import numpy as np
import torch

from ..codecs.quantized import FACTORS, window_of, window_scales
from ..codecs.value_types import nearest_numbers
from ..native import codec as native_codec
from ..pruning import quantized
from ..values import TYPE_BF16, TYPE_F32, to_float


class Windows:
    """The windows of one tensor.

    kept: its non-zeros, float32 (n,), and their places in the flat tensor of this shape. scale: those of the windows,
    float32; change it in place to restore a state. The levels are the standard ones with a narrow gap, because
    different processes may have rows of one matrix.
    """

    def __init__(self, kept: torch.Tensor, places: torch.Tensor, shape: torch.Size, name: str) -> None:
        value_type, cols = quantized.VALUE_TYPES[name], shape[-1]
        levels = native_codec.standard_levels(value_type, 0)
        dense = np.zeros(shape.numel(), dtype=np.float32)
        dense[places.cpu().numpy()] = kept.cpu().numpy()
        m = native_codec.encode_quantized(dense.reshape(-1, cols).view(np.uint32), TYPE_F32, value_type, levels=levels)
        self._width = window_of(m)
        per_row, row, col = -(-cols // self._width), places.long() // cols, places.long() % cols
        self._window = row * per_row + col // self._width
        self._slot = row * (per_row * self._width) + col
        factors = np.repeat(np.maximum(to_float(m.arrays[FACTORS], TYPE_BF16), np.float32(2.0**-90)), per_row)
        self._factor = torch.from_numpy(factors).to(kept.device)
        scales = torch.from_numpy(window_scales(m).reshape(-1)).to(kept.device)
        self.scale = torch.where(scales == 0, self._factor, scales)
        lookup = nearest_numbers(value_type)[0].astype(np.float32)
        self._nearest = torch.from_numpy(lookup).to(kept.device)

    def values(self, kept: torch.Tensor) -> torch.Tensor:
        """The quantized values of weights (n,) with the present scales."""
        scale = self.scale[self._window]
        return scale * self._numbers(kept, scale)

    def follow(self, kept: torch.Tensor) -> None:
        """Sets each scale to the best one for the numbers of its weights at the previous scale."""
        q = self._numbers(kept, self.scale[self._window])
        best = self._sums(kept * q) / self._sums(q * q)  # NaN without weights
        self.scale.copy_(torch.where(best * self.scale > 0, self._as_scales(best), self.scale))

    def _numbers(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        place = torch.floor((x / scale).clamp(-128, 127.5) * 2).int() + 256
        return self._nearest[place]

    def _sums(self, x: torch.Tensor) -> torch.Tensor:
        """Sums over windows, in a fixed order."""
        slots = x.new_zeros(len(self.scale) * self._width)
        return slots.index_copy_(0, self._slot, x).reshape(-1, self._width).sum(1)

    def _as_scales(self, d: torch.Tensor) -> torch.Tensor:
        """The nearest floats with 4 bits of mantissa, 2^-7 to 1.9375, times the factor."""
        bits = (d.abs() / self._factor).clamp(2.0**-7, 1.9375).view(torch.int32)
        return (((bits + (1 << 18)) >> 19) << 19).view(torch.float32).mul(self._factor).copysign(d)
