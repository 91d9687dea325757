"""Logits of a llama_cpp.Llama."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np


def logits(llama: Any, tokens: list) -> np.ndarray:
    """(len(tokens), n_vocab) float32: one fresh evaluation of all tokens in one batch. llama: with logits_all=True."""
    import llama_cpp

    llama.reset()
    llama._ctx.kv_cache_clear()
    llama.eval(tokens)
    n_vocab = llama.n_vocab()
    out = np.empty((len(tokens), n_vocab), dtype=np.float32)
    for i in range(len(tokens)):
        row = llama_cpp.llama_get_logits_ith(llama._ctx.ctx, i)
        ctypes.memmove(out[i].ctypes.data, row, n_vocab * 4)
    return out
