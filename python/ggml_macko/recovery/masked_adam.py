"""Adam for weights with zeros that stay zero. Only non-zeros have optimizer states. With the values of a dense type,
all weights are trained.

Each tensor is updated when its gradient is complete, during the backward pass, and the gradient is freed, so the
gradients of a model never exist all at once. Kingma and Ba, "Adam" (arXiv 1412.6980), algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from ..codecs.dense_blocks import NAMES, layout_of
from ..recovery.dense_weights import DenseBlocks
from ..recovery.quantized_weights import Windows
from ..recovery.ranks import Ranks, local
from ..values import Array

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


class MaskedAdam:
    """An optimizer that changes tensors in place. Zeros stay zero.

    weights: float32 tensors, by name. Call prepare() before every backward pass, which then updates the tensors that it
    reaches. A step changes a weight by about the rate times the root mean square of its tensor. quant_values: the
    quantized type of the matrices' values from now on; the trained values are stored separately. ranks: the processes
    among which the tensors may be split.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], quant_values: str | None = None, ranks: Ranks | None = None
    ) -> None:
        self.n_steps = 0  # prepared so far
        self._whole = dict(weights)
        self._weights = {name: local(w) for name, w in weights.items()}
        device = next(iter(self._weights.values())).device
        self._step_size = torch.zeros((), device=device)  # a tensor, so that a GPU can repeat a recorded step
        dense_type = quant_values if quant_values in NAMES else None
        # places of a matrix; vectors, such as norms and biases, and dense types are trained completely
        self._kept = {name: _places(w) for name, w in self._weights.items() if w.dim() > 1 and dense_type is None}
        self._first = {name: torch.zeros_like(self._select(name, w)) for name, w in self._weights.items()}
        self._second = {name: torch.zeros_like(m) for name, m in self._first.items()}
        self._unit = {name: _root_mean_square(self._select(name, w), ranks) for name, w in self._weights.items()}
        self._trained: dict[str, torch.Tensor] = {}  # trained elements of weights with quantized values
        self._blocks: dict[str, Windows | DenseBlocks] = {}
        for name, w in self._weights.items():
            if quant_values is not None and len(self._first[name]) and w.dim() > 1:
                self._trained[name] = self._select(name, w).clone()
                if dense_type is not None:
                    layout = layout_of(dense_type, name, w.shape[-1])
                    self._blocks[name] = DenseBlocks(self._trained[name], layout)
                else:
                    self._blocks[name] = Windows(self._trained[name], self._kept[name], w.shape, quant_values)
                self._quantize(name)
        self._hooks = []
        for name, w in self._whole.items():
            w.requires_grad_(True)
            self._hooks.append(w.register_post_accumulate_grad_hook(lambda w, name=name: self._update(name, w)))

    def close(self) -> None:
        """Ends the training of the tensors."""
        for hook in self._hooks:
            hook.remove()
        for w in self._whole.values():
            w.requires_grad_(False)

    def prepare(self, rate: float) -> None:
        """Starts a step."""
        self.n_steps += 1
        self._step_size.fill_(rate * math.sqrt(1 - BETA2**self.n_steps) / (1 - BETA1**self.n_steps))

    def arrays(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The arrays of a checkpoint with their names: trained weights and states."""
        for name, w in self._weights.items():
            yield f"weight.{name}", self._trained.get(name, self._select(name, w))
            if name in self._blocks:
                yield f"scale.{name}", self._blocks[name].scale
            if isinstance(blocks := self._blocks.get(name), DenseBlocks):
                yield f"table.{name}", blocks.table
            yield f"first.{name}", self._first[name]
            yield f"second.{name}", self._second[name]

    def restore(self, arrays: Mapping[str, torch.Tensor], n_steps: int) -> None:
        """Restores the arrays() after n_steps. States that are missing become 0, as before the first step."""
        self.n_steps = n_steps
        for name, w in self._weights.items():
            if name in self._blocks:
                self._trained[name].copy_(arrays[f"weight.{name}"])
                self._blocks[name].scale.copy_(arrays[f"scale.{name}"])
                if isinstance(blocks := self._blocks[name], DenseBlocks):
                    blocks.table.copy_(arrays[f"table.{name}"])
                self._quantize(name)
            else:
                self._assign(name, w, arrays[f"weight.{name}"].to(w.device))
            for key, state in (("first", self._first[name]), ("second", self._second[name])):
                found = arrays.get(f"{key}.{name}")
                if found is None:
                    state.zero_()
                else:
                    state.copy_(found)

    def weights(self, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """A copy, on a device (None: that of the weights), of the trained weights, quantized if they have quantized
        values, and of the scales of dense types.
        """

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device or tensor.device, copy=True)

        found = {name: copied(self._select(name, w)) for name, w in self._weights.items()}
        for name, blocks in self._dense_blocks():
            found[f"scale.{name}"], found[f"table.{name}"] = copied(blocks.scale), copied(blocks.table)
        return found

    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Restores weights(), but not the states."""
        for name, w in self._weights.items():
            self._assign(name, w, weights[name].to(w.device))
        for name, blocks in self._dense_blocks():
            blocks.scale.copy_(weights[f"scale.{name}"])
            blocks.table.copy_(weights[f"table.{name}"])

    def packed(self) -> dict[str, tuple[int, Array]]:
        """The types and blocks, uint8 (blocks, bytes), of the tensors with the values of a dense type."""
        return {name: (blocks.layout.type, blocks.packed(self._weights[name])) for name, blocks in self._dense_blocks()}

    def _dense_blocks(self) -> Iterator[tuple[str, DenseBlocks]]:
        return ((name, blocks) for name, blocks in self._blocks.items() if isinstance(blocks, DenseBlocks))

    def _select(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The trained elements, flat, of a tensor with the shape of a weight."""
        kept = self._kept.get(name)
        return tensor.reshape(-1) if kept is None else tensor.reshape(-1).index_select(0, kept)

    def _assign(self, name: str, weight: torch.Tensor, values: torch.Tensor) -> None:
        kept = self._kept.get(name)
        with torch.no_grad():
            if kept is None:
                weight.copy_(values.reshape(weight.shape))
            else:
                weight.zero_().view(-1).index_add_(0, kept, values)

    def _quantize(self, name: str) -> None:
        self._assign(name, self._weights[name], self._blocks[name].values(self._trained[name]))

    def _update(self, name: str, whole: torch.Tensor) -> None:
        assert whole.grad is not None
        weight, gradient = self._weights[name], self._select(name, local(whole.grad)).float()
        whole.grad = None
        first = self._first[name].mul_(BETA1).add_(gradient, alpha=1 - BETA1)
        second = self._second[name].mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        change = (first / second.sqrt().add_(EPSILON)).mul_(self._step_size * self._unit[name])
        with torch.no_grad():
            if name in self._blocks:
                self._trained[name].sub_(change)
                self._blocks[name].follow(self._trained[name])
                self._quantize(name)
            elif name in self._kept:
                weight.view(-1).index_add_(0, self._kept[name], change, alpha=-1)
            else:
                weight.sub_(change.reshape(weight.shape))


def _places(weight: torch.Tensor) -> torch.Tensor:
    """The places of the non-zeros in the flat weight: int32 if that is enough, to save memory."""
    found = weight.reshape(-1).nonzero().flatten()
    return found.int() if weight.numel() < 2**31 else found


def _root_mean_square(values: torch.Tensor, ranks: Ranks | None) -> torch.Tensor:
    """The root mean square over all processes; 1 if all values are 0, such as new biases."""
    sums = torch.stack([values.double().square().sum(), values.new_tensor(values.numel(), dtype=torch.float64)])
    if ranks is not None:
        ranks.total(sums)
    found = (sums[0] / sums[1]).sqrt().float()
    return torch.where(found > 0, found, 1)
