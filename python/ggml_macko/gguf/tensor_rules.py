"""Which tensors of a model the tools work on. The rule itself is in src/load/compress.cpp: the loader needs it too."""

from __future__ import annotations

from ..native import bindings
from ..values import TYPE_NAMES

HEAD, EMBEDDING = "output.weight", "token_embd.weight"


def is_block_weight(name: str, n_dims: int) -> bool:
    """A weight matrix of a block, or the weights of its experts (3-D)."""
    return bindings.weight_use(name, n_dims) == bindings.WEIGHT_BLOCK


def is_multiplied(name: str, n_dims: int) -> bool:
    """llama.cpp uses the tensor in nothing but matrix products: it may be stored sparse."""
    return bindings.weight_use(name, n_dims) != bindings.WEIGHT_OTHER


def is_value_type(type_id: int) -> bool:
    return type_id in TYPE_NAMES
