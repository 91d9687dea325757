"""Weights with quantized values during training: a straight-through estimator, in which the gradient of a quantized
value is the gradient of its weight.

The non-zeros in the order of their rows are in the order of the type's blocks (FORMAT.md section 7), so a flat tensor
of them splits into blocks. Codes have scales for windows of columns (section 9). One step of least squares updates the
scales each time.
"""

from __future__ import annotations

import numpy as np
import torch

from ..codecs.quantized import FACTORS, window_of, window_scales
from ..codecs.value_types import BLOCK, QUANT_NAMES, nearest_numbers
from ..native import codec as native_codec
from ..pruning import quantized
from ..values import TYPE_BF16, TYPE_F32, to_float

_PIECE = 1 << 14  # blocks per step of the search for scales


class Blocks:
    """The blocks of one tensor.

    kept: its non-zeros, float32 (n,). scale, table: scales and tables of the blocks, float32 and int32 (blocks,);
    change them in place to restore a state.
    """

    def __init__(self, kept: torch.Tensor, name: str) -> None:
        grid = quantized.Grid(name)
        self._n = kept.numel()
        self._n_tables = grid.n_tables
        lookup = nearest_numbers(quantized.VALUE_TYPES[name]).astype(np.float32).reshape(-1)
        self._nearest = torch.from_numpy(lookup).to(kept.device)
        x = self._in_blocks(kept).cpu().numpy()
        found = [quantized.search_scales(p, np.ones_like(p), grid) for p in _pieces(x)]
        scale, table = (np.concatenate([f[i] for f in found]) for i in range(2))
        self.scale, self.table = (torch.from_numpy(a).to(kept.device) for a in (scale, table.astype(np.int32)))

    def values(self, kept: torch.Tensor) -> torch.Tensor:
        """The quantized values of weights (n,) with the present scales."""
        x = self._in_blocks(kept)
        return (self.scale[:, None] * self._numbers(x, self.scale)).reshape(-1)[: self._n]

    def follow(self, kept: torch.Tensor) -> None:
        """Sets each scale to the best one for the numbers of its weights at the previous scale."""
        x = self._in_blocks(kept)
        q = self._numbers(x, self.scale)
        if self._n % BLOCK:
            q[-1, self._n % BLOCK :] = 0
        best = (x * q).sum(1) / (q * q).sum(1)
        self.scale.copy_(torch.where(best * self.scale > 0, self._as_scales(best), self.scale))

    def _in_blocks(self, kept: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(kept, (0, -self._n % BLOCK)).reshape(-1, BLOCK)

    def _numbers(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        place = torch.floor((x / scale[:, None]).clamp(-128, 127.5) * 2).int() + 256
        return self._nearest[place + 512 * self.table[:, None]]

    def _as_scales(self, d: torch.Tensor) -> torch.Tensor:
        """As in pruning/quantized.py."""
        found = d.half().view(torch.int16).int()
        magnitude = (found & 0x7FFF).clamp(min=1)
        if self._n_tables > 1:
            beyond = d.abs() > magnitude.short().view(torch.float16).float()
            other = torch.where(beyond | (magnitude < 2), magnitude + 1, magnitude - 1)
            magnitude = torch.where((magnitude & 1) == self.table, magnitude, other)
        return magnitude.short().view(torch.float16).float().copysign(d)


def _pieces(x: np.ndarray) -> list[np.ndarray]:
    return [x[i : i + _PIECE] for i in range(0, len(x), _PIECE)]


class Windows:
    """The windows of one tensor, as Blocks.

    kept: its non-zeros, float32 (n,), and their places in the flat tensor of this shape. The levels are the standard
    ones with a narrow gap, because different processes may have rows of one matrix.
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
        self.table = torch.zeros(1, dtype=torch.int32, device=kept.device)
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


def of_tensor(kept: torch.Tensor, places: torch.Tensor, shape: torch.Size, name: str) -> Blocks | Windows:
    """For the non-zeros (n,) at these places of a flat tensor."""
    is_block = quantized.VALUE_TYPES[name] in QUANT_NAMES
    return Blocks(kept, name) if is_block else Windows(kept, places, shape, name)
