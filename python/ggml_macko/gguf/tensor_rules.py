"""The tensors of a model that the tools change. The rule is in src/load/compress.cpp, because the loader needs it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .. import errors
from ..native.file import WEIGHT_BLOCK, WEIGHT_OTHER, weight_use
from ..values import TYPE_NAMES

HEAD, EMBEDDING = "output.weight", "token_embd.weight"
ENDS = (HEAD, EMBEDDING, "per_layer_token_embd.weight")
"""Tensors whose errors cost more quality than those of block weights."""


def is_block_weight(name: str, n_dims: int) -> bool:
    """Whether a tensor is a weight matrix of a block, or the weights of its experts (3-D)."""
    return weight_use(name, n_dims) == WEIGHT_BLOCK


def may_be_sparse(name: str, n_dims: int) -> bool:
    """Whether llama.cpp uses the tensor only in matrix products, or as embeddings, so that it may be stored sparse."""
    return weight_use(name, n_dims) != WEIGHT_OTHER


def is_unpruned_embedding(name: str, density: float) -> bool:
    """Whether a tensor is embeddings that nobody pruned, which stay dense unless an option says otherwise."""
    return name == EMBEDDING and density > 0.9


def check_pattern(option: str, pattern: str, names: Iterable[str], others: Iterable[str] = (), why: str = "") -> None:
    """Raises MackoError (BAD_ARGUMENT), with the nearest names, unless a regular expression matches a name.

    option: text of the option, for the message. others, why: names of tensors without this option, and the reason.
    """
    names = list(names)
    if any(re.search(pattern, name) for name in names):
        return
    other = next((name for name in others if re.search(pattern, name)), None)
    if other is not None:
        raise errors.bad_argument(f"{option}: {other} {why}")
    kinds = [re.sub(r"^blk\.\d+\.|\.(weight|bias)$", "", name) for name in names]
    # ffn_up of ffn_up_exps
    kinds += [kind[: match.start()] for kind in kinds for match in [*re.finditer("_", kind)][1:]]
    plain = re.sub(r"\\|\.[*+]|[\^$()]", "", pattern)
    hint = errors.did_you_mean(plain, dict.fromkeys([*kinds, *names]), 3)
    raise errors.bad_argument(f"{option}: no tensor has such a name{hint}")


def is_value_type(type_id: int) -> bool:
    return type_id in TYPE_NAMES
