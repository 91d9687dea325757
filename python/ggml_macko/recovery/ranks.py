"""The processes of a run that torchrun starts. PyTorch's FSDP2 splits the trained tensors among them by rows, and each
reads its share of a batch. Without torchrun there is one process, and nothing is split.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any, Callable, TypeVar

import numpy as np
import torch

from .. import errors, system
from ..evaluation.transformer import Transformer, Weights
from ..pruning.options import refuse_if
from ..recovery.options import RecoverOptions
from ..values import Array

T = TypeVar("T")

RANK, LOCAL_RANK = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
N_RANKS, N_LOCAL_RANKS = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
"""The number of processes that torchrun started, and of those of this host; above, the number of this one, also among
those of its host.
"""


def check(options: RecoverOptions) -> None:
    """Raises UsageError if several processes cannot share this run."""
    if N_RANKS > 1:
        refuse_if(options.method != "distill", f"--method {options.method} runs in one process, not {N_RANKS}")
        refuse_if(options.quant_values is not None, f"--quant-values runs in one process, not {N_RANKS}")
        refuse_if(
            options.batch_size % N_RANKS != 0,
            f"--batch-size {options.batch_size}: expected a multiple of the {N_RANKS} processes",
        )


def with_share_of_cores(options: RecoverOptions) -> RecoverOptions:
    """These options with a number of threads, if several processes of this host share its cores. Threads of llama.cpp
    that wait for each other in turns take many times as long, and torchrun allows PyTorch one.
    """
    if N_LOCAL_RANKS == 1 or options.n_threads:
        return options
    return dataclasses.replace(options, n_threads=max(1, system.available_cores() // N_LOCAL_RANKS))


class Ranks:
    """The processes. With a single one, all methods return what they are given."""

    def __init__(self, device: torch.device) -> None:
        self._mesh: Any = None
        if N_RANKS > 1:
            from torch.distributed.device_mesh import init_device_mesh

            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
            self._mesh = init_device_mesh(device.type, (N_RANKS,))

    def share(self, rows: Array) -> Array:
        """The rows of this process."""
        return rows[RANK::N_RANKS]

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all processes; changes the argument."""
        if N_RANKS > 1:
            torch.distributed.all_reduce(values)
        return values

    def of_first(self, value: T) -> T:
        """The value of the first process, so that all decide alike."""
        values = [value]
        if N_RANKS > 1:
            torch.distributed.broadcast_object_list(values)
        return values[0]

    def joined(self, part: Array) -> Array:
        """In the first process the parts of all, one after another; in the others something else."""
        if N_RANKS == 1:
            return part
        parts: list[Any] | None = [None] * N_RANKS if RANK == 0 else None
        torch.distributed.gather_object(part, parts)
        return part if parts is None else np.concatenate(parts)

    def bounds(self, n: int) -> slice:
        """Where the part of this process lies in joined(); n: length of the part."""
        lengths = [n]
        if N_RANKS > 1:
            lengths = [0] * N_RANKS
            torch.distributed.all_gather_object(lengths, n)
        begin = sum(lengths[:RANK])
        return slice(begin, begin + n)

    def split(self, model: Transformer, trained: Mapping[str, torch.Tensor]) -> tuple[Transformer, Weights]:
        """The model and its trained tensors, which are split among the processes if there are several."""
        if self._mesh is None:
            return model, trained
        other = next((name for name in trained if not name.startswith("blk.")), None)
        if other is not None:
            raise errors.bad_argument(f"{other}: several processes train only tensors of blocks")
        found = _SplitTransformer(model, trained, self._mesh)
        return found, found.trained


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's rows of a tensor that may be split; shares its memory."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def assign(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Sets a tensor that may be split. values: of the whole tensor."""
    with torch.no_grad():
        if hasattr(tensor, "full_tensor"):
            from torch.distributed.tensor import distribute_tensor

            values = distribute_tensor(values.to(tensor.device), tensor.device_mesh, tensor.placements)
        tensor.copy_(values)


class _Part(torch.nn.Module):
    """Tensors and the function that reads them: what FSDP2 collects before a call, and splits again after it."""

    def __init__(self, call: Callable[..., torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._call = call
        for name, tensor in tensors.items():
            self.register_parameter(name.replace(".", "/"), torch.nn.Parameter(tensor))

    def forward(self, *args: Any) -> torch.Tensor:
        return self._call(*args)


class _Lookup(Mapping[str, torch.Tensor]):
    """Weights by name: those of parts as they are at the moment, split or not."""

    def __init__(self, fixed: Weights, parts: Mapping[str, _Part]) -> None:
        self._fixed, self._parts = fixed, parts

    def __getitem__(self, name: str) -> torch.Tensor:
        part = self._parts.get(name)
        if part is None:
            return self._fixed[name]
        found: torch.Tensor = getattr(part, name.replace(".", "/"))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter([*self._fixed, *self._parts])

    def __len__(self) -> int:
        return len(self._fixed) + len(self._parts)


class _SplitTransformer(Transformer):
    """A model whose trained tensors, all of blocks, are split."""

    def __init__(self, model: Transformer, trained: Mapping[str, torch.Tensor], mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        self._blocks = torch.nn.ModuleList()
        parts = {}
        for layer in range(model.shape.n_layers):
            tensors = {name: w for name, w in trained.items() if name.startswith(f"blk.{layer}.")}
            block = _Part(lambda x, layer=layer: super(_SplitTransformer, self).block(layer, x), tensors)
            self._blocks.append(fully_shard(block, mesh=mesh))
            parts.update(dict.fromkeys(tensors, block))
        root = _Part(lambda tokens: super(_SplitTransformer, self).hidden(tokens), {})
        root.blocks = self._blocks
        self._root = fully_shard(root, mesh=mesh)
        fixed = {name: w for name, w in model.weights.items() if name not in trained}
        super().__init__(model.shape, _Lookup(fixed, parts), gradient_checkpointing=model.gradient_checkpointing)
        self.trained = {name: self.weights[name] for name in trained}

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._root(tokens)
        return found

    def block(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._blocks[layer](x)
        return found
