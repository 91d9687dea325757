"""The tokens and the learning rate of each training step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..evaluation.text_model import Chunks
from ..recovery.options import FINAL_RATE, WARMUP, RecoverOptions


class Texts(NamedTuple):
    """Tokens (chunks, n_ctx), and the token that the vocabulary adds in front of a sequence."""

    train: Chunks
    held_out: Chunks
    first_token: int | None  # of each chunk, if the vocabulary adds one


class Point(NamedTuple):
    """A moment of a run at which it was evaluated."""

    step: int
    rate: float
    loss: float  # divergence on the text, in nats per token
    divergence: float  # on the held-out text
    perplexity: float


def learning_rate(step: int, n_steps: int, highest: float) -> float:
    """The rate of a step. It rises during WARMUP and then falls along half a cosine."""
    warmup = max(1, round(WARMUP * n_steps))
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, n_steps - warmup)
    return highest * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * done)) / 2)


def n_steps(texts: Texts, options: RecoverOptions) -> int:
    """Steps of a run."""
    return -(-len(texts.train) * options.epochs // options.batch_size)


def chunks_of_epoch(texts: Texts, options: RecoverOptions, epoch: int) -> Chunks:
    """The chunks of one pass over the text, with a different order and different splits in each epoch."""
    rng = np.random.default_rng([options.seed, epoch])
    stream, n_ctx = texts.train.reshape(-1), texts.train.shape[1]
    shift = int(rng.integers(n_ctx)) if epoch and len(texts.train) > 1 else 0
    # the last chunk continues at the start of the text
    chunks = np.roll(stream, -shift).reshape(-1, n_ctx)
    if texts.first_token is not None:
        chunks[:, 0] = texts.first_token
    return chunks[rng.permutation(len(chunks))]


def batches(texts: Texts, options: RecoverOptions, step: int) -> Iterator[Chunks]:
    """The batches from a step on, without end. All have the same size: one at the end of an epoch continues in the
    next.
    """
    epoch, n_read = divmod(step * options.batch_size, len(texts.train))
    rest = chunks_of_epoch(texts, options, epoch)[n_read:]
    while True:
        while len(rest) < options.batch_size:
            epoch += 1
            rest = np.concatenate([rest, chunks_of_epoch(texts, options, epoch)])
        yield rest[: options.batch_size]
        rest = rest[options.batch_size :]
