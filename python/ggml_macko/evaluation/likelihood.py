"""How likely a model finds the tokens of a text: llama-perplexity's choice of tokens, and its arithmetic.

Each chunk of n_ctx tokens is a fresh sequence. The tokens of its second half but the first are scored, each predicted
from all before it in the chunk. Where llama-perplexity computes in float32 or float64, so does this: the figures that
are printed agree to the last digit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable

import numpy as np

from ..evaluation.text_model import TextModel

MIN_CTX = 4  # tokens of a chunk: of fewer, none or one would be scored

_BLOCK_ELEMENTS = 1 << 20  # logits that a thread works on at a time


@dataclass(frozen=True)
class Estimate:
    """Perplexity over n_tokens. The error is the standard error of the mean, carried through the exponential."""

    n_tokens: int
    nll: float  # mean negative log-likelihood
    nll2: float  # mean of its square

    @property
    def ppl(self) -> float:
        return math.exp(self.nll)

    @property
    def error(self) -> float:
        variance = self.nll2 - self.nll**2
        return self.ppl * math.sqrt(variance / (self.n_tokens - 1)) if variance > 0 and self.n_tokens > 1 else 0.0


# Of the scored positions of a chunk: logits (n, n_vocab) float32, the n tokens that came, more arrays of n rows ->
# arrays of n rows.
Scorer = Callable[..., tuple]


def n_scored(n_ctx: int) -> int:
    """Tokens of a chunk that are scored."""
    return n_ctx - 1 - n_ctx // 2


def scored(
    model: TextModel, chunks: np.ndarray, score: Scorer, beside: Callable[[int], tuple] = lambda i: ()
) -> Iterator:
    """score's result for each chunk of model.read_chunks(). beside(i): the further arrays of chunk i."""
    first = model.n_ctx // 2
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for i, batch in model.batches(chunks):
            logits = model.evaluate(batch, first)
            for k, chunk in enumerate(batch):
                yield _in_blocks(pool, score, logits[k, :-1], chunk[first + 1 :], *beside(i + k))


def _in_blocks(pool: ThreadPoolExecutor, score: Scorer, logits: np.ndarray, *arrays: np.ndarray) -> tuple:
    step = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    blocks = [slice(i, i + step) for i in range(0, len(logits), step)]
    results = pool.map(lambda rows: score(logits[rows], *(a[rows] for a in arrays)), blocks)
    return tuple(np.concatenate(parts) for parts in zip(*results))


def estimate(
    model: TextModel,
    chunks: np.ndarray,
    score: Scorer | None = None,
    on_chunk: Callable[[int, Estimate, tuple], None] = lambda done, so_far, result: None,
) -> Estimate:
    """Perplexity. score: something whose first result is the negative log-likelihood. on_chunk is told after each
    chunk how many are done, the estimate so far, and what score gave."""
    total = total2 = 0.0
    n = 0
    for i, result in enumerate(scored(model, chunks, score or negative_log_likelihood)):
        nll = result[0]
        total += float(nll.sum())
        total2 += float((nll**2).sum())
        n += len(nll)
        on_chunk(i + 1, Estimate(n, total / n, total2 / n), result)
    return Estimate(n, total / n, total2 / n)


def negative_log_likelihood(logits: np.ndarray, tokens: np.ndarray) -> tuple:
    """(float64,)"""
    largest = logits.max(axis=1)
    chosen = logits[np.arange(len(tokens)), tokens]
    return (np.log(sum_exp(logits, largest)) - (chosen - largest),)


def sum_exp(logits: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """float64 sums over the rows of exp(logits - largest), each term rounded to float32 as expf does."""
    x = (logits - largest[:, None]).astype(np.float64)
    return np.exp(x, out=x).astype(np.float32).sum(axis=1, dtype=np.float64)
