"""Weights of a dense model with the values of a dense type of ggml during training, with a straight-through estimator,
as in quantized_weights.py.

A block's factors follow the largest scale of its parts, as in ggml's quantizers, and one step of least squares updates
the scales each time.
"""

from __future__ import annotations

import torch

from ..codecs.dense_blocks import Layout, pack
from ..values import Array

_TRIED = (0.65, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)  # scales, as shares of the one with which no weight is out of range
_STEPS = 4  # of least squares after the search
_SMALLEST = 2.0**-24
"""The least factor, the smallest number of F16."""


class DenseBlocks:
    """The blocks of one tensor.

    weights: float32 (n,), whole rows. scale, table: the factors, float32 (blocks, 1 or 2), and the multiples, int32
    (parts, 1 or 2), of scales and smallest values; change them in place to restore a state.
    """

    def __init__(self, weights: torch.Tensor, layout: Layout) -> None:
        self.layout = layout
        self._low, self._high = layout.numbers
        x = self._in_parts(weights)
        n_kinds = 1 + layout.has_smallest
        self.scale = x.new_zeros(weights.numel() // layout.block, n_kinds)
        self.table = torch.zeros(len(x), n_kinds, dtype=torch.int32, device=x.device)
        scale, smallest = self._searched(x)
        self._round(0, scale)
        self._round(1, smallest)
        for _ in range(_STEPS):
            self.follow(weights)

    def values(self, weights: torch.Tensor) -> torch.Tensor:
        """The quantized values of weights (n,) with the present scales."""
        scale, smallest = self._scales()
        return (scale * self._numbers(self._in_parts(weights), scale, smallest) - smallest).reshape(-1)

    def follow(self, weights: torch.Tensor) -> None:
        """Sets scales and smallest values to the best ones for the numbers that the weights had."""
        x = self._in_parts(weights)
        scale, smallest = self._scales()
        q = self._numbers(x, scale, smallest)
        self._round(0, self._best_scale(x, q, scale))
        self._round(1, self._best_smallest(x, q, self._scales()[0]))

    def packed(self, values: torch.Tensor) -> Array:
        """The bytes of the blocks, uint8 (blocks, bytes). values: those of values()."""
        scale, smallest = self._scales()
        q = self._numbers(self._in_parts(values), scale, smallest)
        numbers = q.to(torch.int8).reshape(len(self.scale), -1).cpu().numpy()
        multiples = self.table.reshape(len(self.scale), -1, self.table.shape[1])
        return pack(self.layout, numbers, self.scale.half().cpu().numpy(), multiples.cpu().numpy())

    def _in_parts(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, self.layout.part)

    def _scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales, and smallest values with the opposite sign, of the parts: (parts, 1) each."""
        n_kinds = self.scale.shape[1]
        found = (self.scale[:, None] * self.table.reshape(len(self.scale), -1, n_kinds)).reshape(-1, n_kinds)
        return found[:, :1], found[:, 1:] if n_kinds > 1 else torch.zeros_like(found)

    def _numbers(self, x: torch.Tensor, scale: torch.Tensor, smallest: torch.Tensor) -> torch.Tensor:
        return ((x + smallest) / scale).round_().clamp_(self._low, self._high)

    def _searched(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and smallest values, not rounded, with nearly the least error."""
        if self.layout.has_smallest:
            smallest = (-x.amin(1, keepdim=True)).clamp_(min=0)
            widest = (x.amax(1, keepdim=True) + smallest) / self._high
        else:
            smallest = x.new_zeros(len(x), 1)
            widest = x.gather(1, x.abs().argmax(1, keepdim=True)) / self._low
        widest = torch.where(widest == 0, _SMALLEST, widest)
        least, best_scale, best_smallest = torch.full_like(widest, torch.inf), widest, smallest
        for share in _TRIED:
            q = self._numbers(x, widest * share, smallest * share)
            scale = self._best_scale(x, q, widest * share)
            lowest = self._best_smallest(x, q, scale)
            error = (scale * self._numbers(x, scale, lowest) - lowest - x).square().sum(1, keepdim=True)
            better = error < least
            least, best_scale, best_smallest = (
                torch.where(better, new, old)
                for new, old in ((error, least), (scale, best_scale), (lowest, best_smallest))
            )
        return best_scale, best_smallest

    def _best_scale(self, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The scales, not rounded, with the least error for these numbers; the present ones where there is none."""
        qq, xq = (q * q).sum(1, keepdim=True), (x * q).sum(1, keepdim=True)
        best = xq / qq  # not finite if all numbers are 0
        if self.layout.has_smallest:
            n, sum_q, sum_x = q.shape[1], q.sum(1, keepdim=True), x.sum(1, keepdim=True)
            both = (n * xq - sum_x * sum_q) / (n * qq - sum_q * sum_q)
            best = torch.where(both * sum_q < sum_x, best, both)  # there the smallest value would be above 0
        return torch.where(best.isfinite() & (best * scale > 0), best, scale)

    def _best_smallest(self, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (scale * q - x).mean(1, keepdim=True).clamp_(min=0)
        return found

    def _round(self, kind: int, wanted: torch.Tensor) -> None:
        """Stores scales (kind 0) or smallest values (1), (parts, 1), as multiples of factors."""
        if kind == self.scale.shape[1]:
            return
        low, high = self.layout.multiples
        parts = wanted.reshape(len(self.scale), -1)
        largest = parts.gather(1, parts.abs().argmax(1, keepdim=True))
        factor = (largest / (low if low < 0 else high)).half().float()
        tiny = torch.where(factor < 0, -_SMALLEST, _SMALLEST)
        factor = torch.where(factor == 0, tiny, factor)
        multiple = (parts / factor).round_().clamp_(low, high)
        if kind == 0:  # a part with scale 0 would keep it
            multiple = torch.where(multiple == 0, 1, multiple)
        self.scale[:, kind : kind + 1] = factor
        self.table[:, kind] = multiple.reshape(-1).int()
