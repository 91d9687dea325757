"""Perplexity of a model on a text, from llama.cpp's logits: exp of the mean negative log-likelihood, in float64.

Every position of consecutive windows of 512 tokens is predicted from the window's earlier tokens (its first token is
not predicted). No BOS is added. Lower than llama-perplexity's figure never means better here: that tool counts only
the second half of each window.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

WINDOW = 512


def perplexity(llama: Any, text: str, n_windows: int | None = None, window: int = WINDOW) -> float:
    """llama: a llama_cpp.Llama with n_ctx and n_batch >= window, logits_all=True. n_windows None: the whole text."""
    tokens = llama.tokenize(text.encode("utf-8"), add_bos=False)
    total, count = 0.0, 0
    for begin in range(0, len(tokens), window):
        if n_windows is not None and begin >= n_windows * window:
            break
        piece = tokens[begin : begin + window]
        if len(piece) < 2:
            break
        log_p = log_probabilities(logits(llama, piece[:-1]))
        total -= float(log_p[np.arange(len(piece) - 1), piece[1:]].sum())
        count += len(piece) - 1
    if not count:
        raise ValueError("the text has fewer than two tokens")
    return float(np.exp(total / count))


def logits(llama: Any, tokens: list) -> np.ndarray:
    """(len(tokens), n_vocab) float32: one fresh evaluation of all tokens in one batch."""
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


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))
