"""Which tensors of a model the tools work on. The one place that knows weight names."""

from __future__ import annotations

import re

from . import formats

# Weights that llama.cpp only ever multiplies with (MUL_MAT, MUL_MAT_ID). Norms and biases are 1-D; token_embd is read
# row by row; a router (ffn_gate_inp) is tiny and decides where tokens go; relative-position tables are looked up.
_BLOCK = re.compile(r"blk\.\d+\.(attn|ffn)_\w+\.weight")
_NOT_MULTIPLIED = re.compile(r"norm|_inp\b|_inp_|_rel_b|_sinks|_exp_probs")
_HEAD = "output.weight"


def is_block_weight(name: str, n_dims: int) -> bool:
    """A weight matrix of a block, or the weights of its experts (3-D)."""
    if not _BLOCK.fullmatch(name) or _NOT_MULTIPLIED.search(name):
        return False
    return n_dims == 2 or (n_dims == 3 and "_exps." in name)


def is_multiplied(name: str, n_dims: int) -> bool:
    """llama.cpp uses the tensor in nothing but matrix products: it may be stored sparse."""
    return is_block_weight(name, n_dims) or (name == _HEAD and n_dims == 2)


def is_value_type(type_id: int) -> bool:
    return type_id in formats.TYPE_NAMES
