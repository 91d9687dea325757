"""Weights with quantized values during training: a straight-through estimator, in which the gradient of a quantized
value is the gradient of its weight.

The non-zeros in the order of their rows are in the order of the type's blocks (FORMAT.md section 7), so a flat tensor
of them splits into blocks. One step of least squares updates the scales each time.
"""

from __future__ import annotations

import numpy as np
import torch

from ..codecs.value_types import BLOCK, nearest_numbers
from ..pruning import quantized

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
