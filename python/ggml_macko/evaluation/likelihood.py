"""The likelihood of the tokens of a text, with the tokens and the arithmetic of llama-perplexity.

Each chunk of n_ctx tokens is a new sequence. The tokens of its second half except the first are scored, each predicted
from all previous tokens of the chunk. The precision of each step, float32 or float64, is that of llama-perplexity, so
printed results agree to the last digit. Exponentials alone can differ in their last bits, 1e-8 of a result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
import numpy.typing as npt

from .. import errors, system
from ..evaluation.text_model import Chunks, Logits, TextModel
from ..gguf.files import Model

Array = npt.NDArray[Any]
Tokens = npt.NDArray[np.integer[Any]]

MIN_CTX = 4
"""Smallest number of tokens of a chunk; shorter chunks have at most one scored token."""

_BLOCK_ELEMENTS = 1 << 20  # logits per task of a thread
_MAX_THREADS = 16  # more of them wait for memory and for Python


@dataclass(frozen=True)
class Estimate:
    """Perplexity over n_tokens scored tokens."""

    n_tokens: int
    nll: float  # mean negative log-likelihood, natural logarithm
    nll2: float  # mean of its square

    @property
    def ppl(self) -> float:
        """Perplexity: exp(nll)."""
        return math.exp(self.nll)

    @property
    def error(self) -> float:
        """The standard error of ppl: ppl * sqrt((nll2 - nll^2) / (n_tokens - 1))."""
        variance = self.nll2 - self.nll**2
        return self.ppl * math.sqrt(variance / (self.n_tokens - 1)) if variance > 0 and self.n_tokens > 1 else 0.0


Scorer = Callable[..., "tuple[Array, ...]"]
"""For n positions: float32 logits (n, n_vocab), the tokens that came (n,), and further arrays of n rows -> arrays of n
rows, the first of which are negative log-likelihoods."""


def n_scored(n_ctx: int) -> int:
    """The number of scored tokens of a chunk."""
    return n_ctx - 1 - n_ctx // 2


def scored(
    model: TextModel,
    chunks: Chunks,
    score: Scorer,
    more_of: Callable[[int], tuple[Array, ...]] = lambda chunk: (),
) -> Iterator[tuple[Array, ...]]:
    """What score returns for the scored positions of each chunk.

    chunks: int32 (chunks, n_ctx), from TextModel.read_chunks. more_of(i): further arrays that score gets of chunk i.
    """
    first = model.n_ctx // 2
    with ThreadPoolExecutor(min(_MAX_THREADS, system.available_cores())) as pool:
        for i, batch in model.batches(chunks):
            logits = model.evaluate(batch, first)
            for k, chunk in enumerate(batch):
                found = _in_blocks(pool, score, logits[k, :-1], chunk[first + 1 :], *more_of(i + k))
                if np.isnan(found[0]).any() or np.isnan(logits[k, -1]).any():  # scored, and the last one
                    with Model(model.path) as file:
                        fault = file.not_finite() or f"{model.path}: its logits are not finite"
                    raise errors.error(errors.NOT_FINITE, fault)
                yield found


def _blocks(logits: Logits) -> list[slice]:
    """Blocks of rows for the tasks of threads."""
    step = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    return [slice(i, i + step) for i in range(0, len(logits), step)]


def _in_blocks(pool: ThreadPoolExecutor, score: Scorer, logits: Logits, *arrays: Array) -> tuple[Array, ...]:
    """score of blocks of rows, in threads, joined."""
    results = pool.map(lambda rows: score(logits[rows], *(a[rows] for a in arrays)), _blocks(logits))
    return tuple(np.concatenate(parts) for parts in zip(*results))


@dataclass
class _Sums:
    """Sums over the tokens of the chunks that are done."""

    n: int = 0
    nll: float = 0.0
    nll2: float = 0.0

    def add(self, nll: Array) -> Estimate:
        self.nll += float(nll.sum())
        self.nll2 += float((nll**2).sum())
        self.n += len(nll)
        return Estimate(self.n, self.nll / self.n, self.nll2 / self.n)


OnChunk = Callable[[int, Estimate, "list[Array]"], None]
"""Called after each chunk: chunks done, the estimate so far, and what the scorer returned for the chunk after the
negative log-likelihoods."""


def estimate(
    model: TextModel, chunks: Chunks, score: Scorer | None = None, on_chunk: OnChunk | None = None
) -> Estimate:
    """Perplexity of a model on chunks (chunks, n_ctx) of a text.

    score: a scorer that returns negative log-likelihoods first (default: nothing else). Raises MackoError.
    """
    sums = _Sums()
    so_far = None
    for i, (nll, *more) in enumerate(scored(model, chunks, score or negative_log_likelihood)):
        so_far = sums.add(nll)
        if on_chunk is not None:
            on_chunk(i + 1, so_far, more)
    if so_far is None:
        raise ValueError("no chunks")
    return so_far


def negative_log_likelihood(logits: Logits, tokens: Tokens) -> tuple[Array]:
    """A Scorer: float64 (n,), -log softmax(logits)[tokens] of each position."""
    largest = logits.max(axis=1)
    chosen = logits[np.arange(len(tokens)), tokens]
    return (np.log(sum_exp(logits, largest)) - (chosen - largest),)


class _Scratch(threading.local):
    """A thread's arrays, by type. New ones for each block would take as long as the exponentials in them."""

    def __init__(self) -> None:
        self._arrays: dict[npt.DTypeLike, Array] = {}

    def array(self, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> Array:
        size = math.prod(shape)
        if size > len(self._arrays.get(dtype, ())):
            self._arrays[dtype] = np.empty(size, dtype)
        return self._arrays[dtype][:size].reshape(shape)


_scratch = _Scratch()


def sum_exp(logits: Logits, largest: npt.NDArray[np.float32], *, exact: bool = False) -> npt.NDArray[np.float64]:
    """Sums over the rows (n, n_vocab) of exp(logits - largest), float64 (n,), of float32 terms. exact: these are the
    nearest ones, as expf returns them, and not within 3 units in the last place.
    """
    x = np.subtract(logits, largest[:, None], out=_scratch.array(np.float32, logits.shape))
    if exact:
        x[...] = np.exp(x, out=_scratch.array(np.float64, logits.shape), dtype=np.float64)
    else:
        np.exp(x, out=x)
    sums: npt.NDArray[np.float64] = x.sum(axis=1, dtype=np.float64)
    return sums
