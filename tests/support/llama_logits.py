"""A llama_cpp.Llama with the settings of the tests, a text, and its logits."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from support import generators

PROMPT = "The function returns"


def open_model(path: Any, n_ctx: int = 512, **kwargs: Any) -> Any:
    """A ggml_macko.Llama with two threads and a batch as long as the context, unless kwargs override them."""
    from ggml_macko import Llama

    usual = {"n_ctx": n_ctx, "n_batch": n_ctx, "n_threads": 2, "n_threads_batch": 2, "verbose": False, "seed": 1}
    return Llama(str(path), **{**usual, **kwargs})


@contextlib.contextmanager
def model_params(**members: Any) -> Iterator[None]:
    """Within the context, models are loaded with these members of llama_model_params."""
    import llama_cpp.llama_cpp as api

    default = api.llama_model_default_params

    def params() -> Any:
        p = default()
        for name, value in members.items():
            setattr(p, name, value)
        return p

    api.llama_model_default_params = params
    try:
        yield
    finally:
        api.llama_model_default_params = default


def plain_dense_weights() -> contextlib.AbstractContextManager[None]:
    """Within the context, models are loaded without the CPU backend's buffer types for weights. On a CPU with AMX, one
    of them multiplies F16 weights with x in float32; llama.cpp's other kernels and the plugin's round x to F16.
    """
    return model_params(use_extra_bufts=False)


def clear(llama: Any) -> None:
    llama.reset()
    llama._ctx.kv_cache_clear()


def logits_one_by_one(llama: Any, tokens: list) -> np.ndarray:
    """Like logits(), but token by token, with the graphs for decoding."""
    clear(llama)
    rows = []
    for token in tokens:
        llama.eval([token])
        rows.append(np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(llama.n_vocab(),)).copy())
    return np.array(rows)


def logits(llama: Any, tokens: list) -> np.ndarray:
    """(len(tokens), n_vocab) float32 of all tokens in one batch, from an empty context. llama: with logits_all=True."""
    import llama_cpp

    clear(llama)
    llama.eval(tokens)
    n_vocab = llama.n_vocab()
    out = np.empty((len(tokens), n_vocab), dtype=np.float32)
    for i in range(len(tokens)):
        row = llama_cpp.llama_get_logits_ith(llama._ctx.ctx, i)
        ctypes.memmove(out[i].ctypes.data, row, n_vocab * 4)
    return out


def greedy(llama: Any, n: int = 128, prompt: str = PROMPT) -> str:
    return llama(prompt, max_tokens=n, temperature=0)["choices"][0]["text"]


def greedy_tokens(llama: Any, n: int = 128, prompt: str = PROMPT) -> tuple[list[int], list[int]]:
    """The tokens of the prompt, and the n tokens of its greedy continuation."""
    start = llama.tokenize(prompt.encode())
    return start, list(itertools.islice(llama.generate(start, temp=0), n))


def prompt_logits(llama: Any, n: int = 256) -> tuple[list, np.ndarray]:
    """The first n tokens of the bundled text and their logits."""
    tokens = llama.tokenize(generators.SAMPLE.read_bytes(), add_bos=False)[:n]
    return tokens, logits(llama, tokens)


def nmse(got, want):
    """The sum of squared errors divided by the sum of squares of the expected values."""
    assert np.isfinite(got).all()
    return float(((got - want) ** 2).sum() / (want.astype(np.float64) ** 2).sum())
