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


def learning_rate(step: int, n_steps: int, highest: float) -> float:
    """The rate of a step. It rises during WARMUP and then falls along half a cosine."""
    warmup = max(1, round(WARMUP * n_steps))
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, n_steps - warmup)
    return highest * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * done)) / 2)


def steps_per_epoch(n_chunks: int, batch_size: int) -> int:
    return -(-n_chunks // batch_size)


def batches(texts: Texts, options: RecoverOptions, epoch: int) -> Iterator[Chunks]:
    """One pass over the text, with a different order and different splits in each epoch."""
    rng = np.random.default_rng([options.seed, epoch])
    stream, n_ctx = texts.train.reshape(-1), texts.train.shape[1]
    shift = int(rng.integers(n_ctx)) if epoch and len(texts.train) > 1 else 0
    # the last chunk continues at the start of the text
    chunks = np.roll(stream, -shift).reshape(-1, n_ctx)
    if texts.first_token is not None:
        chunks[:, 0] = texts.first_token
    order = rng.permutation(len(chunks))
    for begin in range(0, len(order), options.batch_size):
        yield chunks[order[begin : begin + options.batch_size]]


def from_step(texts: Texts, options: RecoverOptions, per_epoch: int, step: int) -> Iterator[Chunks]:
    """The batches of the steps from `step` on."""
    for epoch in range(step // per_epoch, options.epochs):
        for i, tokens in enumerate(batches(texts, options, epoch)):
            if epoch * per_epoch + i >= step:
                yield tokens
