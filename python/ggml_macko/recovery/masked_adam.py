"""Adam for weights with zeros that stay zero. Only non-zeros have optimizer states.

Each tensor is updated when its gradient is complete, during the backward pass, and the gradient is freed, so the
gradients of a model never exist all at once. Kingma and Ba, "Adam" (arXiv 1412.6980), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from ..recovery.quantized_weights import Blocks

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


class MaskedAdam:
    """An optimizer that changes tensors in place. Zeros stay zero.

    weights: float32 tensors, by name. Every backward pass updates the tensors that it reaches; set `rate` before it,
    and call advance() after it. quant_values: the quantized type of the matrices' values from now on; the trained
    values are stored separately.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], quant_values: str | None = None) -> None:
        self.rate = 0.0
        self.n_steps = 0  # complete steps
        self._weights = dict(weights)
        # None: a vector, such as a norm or a bias, which is trained completely
        self._kept = {name: None if w.dim() < 2 else w != 0 for name, w in self._weights.items()}
        self._n_kept = {name: w.numel() if w.dim() < 2 else int((w != 0).sum()) for name, w in self._weights.items()}
        self._first = {name: torch.zeros(self._n_kept[name], device=w.device) for name, w in self._weights.items()}
        self._second = {name: torch.zeros_like(m) for name, m in self._first.items()}
        self._trained: dict[str, torch.Tensor] = {}  # trained elements of weights with quantized values
        self._blocks: dict[str, Blocks] = {}
        for name, w in self._weights.items():
            if quant_values is not None and self._n_kept[name] and w.dim() >= 2:
                self._trained[name] = self._select(name, w.detach()).clone()
                self._blocks[name] = Blocks(self._trained[name], quant_values)
                self._quantize(name)
        self._hooks = []
        for name, w in self._weights.items():
            w.requires_grad_(True)
            self._hooks.append(w.register_post_accumulate_grad_hook(lambda w, name=name: self._update(name, w)))

    def close(self) -> None:
        """Ends the training of the tensors."""
        for hook in self._hooks:
            hook.remove()
        for w in self._weights.values():
            w.requires_grad_(False)

    def advance(self) -> None:
        self.n_steps += 1

    def arrays(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The arrays of a checkpoint with their names: trained weights and states."""
        for name, w in self._weights.items():
            yield f"weight.{name}", self._trained.get(name, self._select(name, w.detach()))
            if name in self._blocks:
                yield f"scale.{name}", self._blocks[name].scale
                yield f"table.{name}", self._blocks[name].table
            yield f"first.{name}", self._first[name]
            yield f"second.{name}", self._second[name]

    def restore(self, arrays: Mapping[str, torch.Tensor], n_steps: int) -> None:
        """Restores the arrays() after n_steps."""
        self.n_steps = n_steps
        for name, w in self._weights.items():
            if name in self._blocks:
                self._trained[name].copy_(arrays[f"weight.{name}"])
                self._blocks[name].scale.copy_(arrays[f"scale.{name}"])
                self._blocks[name].table.copy_(arrays[f"table.{name}"])
                self._quantize(name)
            else:
                self._assign(name, w, arrays[f"weight.{name}"].to(w.device))
            self._first[name].copy_(arrays[f"first.{name}"])
            self._second[name].copy_(arrays[f"second.{name}"])

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the trained weights, quantized if they have quantized values."""
        return {name: self._select(name, w.detach()).clone() for name, w in self._weights.items()}

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Restores weights(), but not the states."""
        for name, w in self._weights.items():
            self._assign(name, w, weights[name].to(w.device))

    def _select(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The trained elements, flat, of a tensor with the shape of a weight.

        The result is tensor[kept], for which the host would wait until a GPU has counted the elements.
        """
        kept = self._kept[name]
        if kept is None:
            return tensor.reshape(-1)
        is_kept = kept.reshape(-1)
        place = is_kept.cumsum(0).mul_(is_kept)  # from 1; other elements go to 0
        return tensor.new_empty(self._n_kept[name] + 1).scatter_(0, place, tensor.reshape(-1))[1:]

    def _assign(self, name: str, weight: torch.Tensor, values: torch.Tensor) -> None:
        kept = self._kept[name]
        with torch.no_grad():
            if kept is None:
                weight.copy_(values.reshape(weight.shape))
            else:
                weight.masked_scatter_(kept, values)

    def _quantize(self, name: str) -> None:
        self._assign(name, self._weights[name], self._blocks[name].values(self._trained[name]))

    def _update(self, name: str, weight: torch.Tensor) -> None:
        assert weight.grad is not None
        gradient = self._select(name, weight.grad).float()
        weight.grad = None
        step = self.n_steps + 1
        first = self._first[name].mul_(BETA1).add_(gradient, alpha=1 - BETA1)
        second = self._second[name].mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        correction = math.sqrt(1 - BETA2**step) / (1 - BETA1**step)
        change = (first / second.sqrt().add_(EPSILON)).mul_(self.rate * correction)
        kept = self._kept[name]
        with torch.no_grad():
            if name in self._blocks:
                self._trained[name].sub_(change)
                self._blocks[name].follow(self._trained[name])
                self._quantize(name)
            elif kept is None:
                weight.sub_(change.reshape(weight.shape))
            else:
                weight.sub_(torch.zeros_like(weight).masked_scatter_(kept, change))
