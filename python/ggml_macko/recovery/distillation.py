"""End-to-end recovery: the pruned model learns the dense model's probabilities of the next token on a text.

The loss is the Kullback-Leibler divergence of the pruned model from the dense one, averaged over all positions, without
labels. It is measured on a held-out text at intervals; the result has the weights with the lowest loss there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .. import console, errors
from ..evaluation.text_model import Chunks
from ..evaluation.transformer import Transformer, as_tokens, divergence
from ..recovery.checkpoint import Checkpoint, Saved
from ..recovery.masked_adam import MaskedAdam
from ..recovery.options import RecoverOptions
from ..recovery.schedule import Texts, from_step, learning_rate, steps_per_epoch

_READ_EVERY = 16
"""Steps between two reads of the loss, at which the host waits for the GPU."""

_SAVE_SECONDS = 120.0
"""Smallest time between two checkpoints. Each evaluation is also followed by one."""


class Arithmetic:
    """The device and precision of evaluations."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mixed_precision(self) -> AbstractContextManager[object]:
        """Matrix products are bfloat16 on a GPU. On a CPU, all arithmetic is float32."""
        found: AbstractContextManager[object] = torch.autocast(
            "cuda", torch.bfloat16, enabled=self.device.type == "cuda"
        )
        return found

    def tokens(self, chunks: Chunks) -> torch.Tensor:
        return as_tokens(chunks, self.device)


class Evaluation(NamedTuple):
    """Results on the held-out text, over the second half of each chunk."""

    perplexity: float  # as llama-perplexity measures it
    divergence: float  # from the dense model, in nats per token


def evaluate(student: Transformer, teacher: Transformer, chunks: Chunks, arithmetic: Arithmetic) -> Evaluation:
    """Evaluates the student. evaluate(teacher, teacher, ...) evaluates the teacher."""
    first = chunks.shape[1] // 2
    sums = torch.zeros(2, dtype=torch.float64, device=arithmetic.device)
    with torch.no_grad(), arithmetic.mixed_precision():
        for chunk in chunks:
            tokens = arithmetic.tokens(chunk[None])
            found, wanted = (model.logits(tokens)[:, first:-1] for model in (student, teacher))
            sums += torch.stack([F.cross_entropy(found[0], tokens[0, first + 1 :]), divergence(found, wanted)])
    nll, kl = (sums / len(chunks)).tolist()
    return Evaluation(math.exp(nll), kl)


class Best(NamedTuple):
    """The weights with the lowest divergence on the held-out text."""

    divergence: float
    weights: Mapping[str, torch.Tensor]
    n_since: int  # later evaluations without improvement, in the second half of the run


class Training(NamedTuple):
    """The arguments of a method, which changes weights of the student in place."""

    student: Transformer
    teacher: Transformer
    trained: Mapping[str, torch.Tensor]  # trained weights of the student, by name
    texts: Texts
    options: RecoverOptions
    arithmetic: Arithmetic
    checkpoint: Checkpoint


def distill(training: Training) -> None:
    """Resumes from the checkpoint, if there is one. Raises MackoError if the loss is not finite."""
    student, teacher, trained, texts, options, arithmetic, checkpoint = training
    per_epoch = steps_per_epoch(len(texts.train), options.batch_size)
    n_steps = per_epoch * options.epochs
    evaluate_every = max(1, n_steps // options.n_evaluations)
    optimizer = MaskedAdam(trained, options.quant_values)
    highest = options.rate(student.shape.n_embd)
    saved = checkpoint.load()
    if saved is None:
        before = evaluate(student, teacher, texts.held_out, arithmetic)
        best = Best(before.divergence, _on_host(optimizer.weights()), 0)
    else:
        best = _restored(saved, optimizer)
        console.log(f"{checkpoint.path}: continuing after step {optimizer.n_steps} of {n_steps}")
    saved_at = time.monotonic()
    with console.progress("recovering", n_steps, "steps", optimizer.n_steps) as advance:
        for tokens in from_step(texts, options, per_epoch, optimizer.n_steps):
            optimizer.rate = learning_rate(optimizer.n_steps, n_steps, highest)
            loss_of_step = training_step(student, teacher, tokens, arithmetic)
            optimizer.advance()
            advance(1)
            evaluates = optimizer.n_steps % evaluate_every == 0 or optimizer.n_steps == n_steps
            if not evaluates and optimizer.n_steps % _READ_EVERY:
                continue
            loss = float(loss_of_step)
            if not math.isfinite(loss):
                raise errors.error(
                    errors.NOT_FINITE,
                    f"the loss is {loss} at step {optimizer.n_steps}; a lower --learning-rate than {highest:g} "
                    "may help",
                )
            console.note(f"divergence {loss:.4f}")
            if evaluates:
                found = evaluate(student, teacher, texts.held_out, arithmetic)
                console.detail(
                    f"step {optimizer.n_steps:6d}: divergence {loss:.4f}, held out {found.divergence:.4f}, "
                    f"perplexity {found.perplexity:.4f}"
                )
                is_better = found.divergence < best.divergence
                if is_better:
                    best = Best(found.divergence, _on_host(optimizer.weights()), 0)
                elif 2 * optimizer.n_steps > n_steps:  # the divergence may rise while the learning rate is high
                    best = best._replace(n_since=best.n_since + 1)
                if best.n_since >= options.patience:
                    break
                saved_at = -math.inf
            if time.monotonic() - saved_at > _SAVE_SECONDS:
                _save(checkpoint, optimizer, best)
                saved_at = time.monotonic()
    optimizer.set_weights(best.weights)
    optimizer.close()


def _save(checkpoint: Checkpoint, optimizer: MaskedAdam, best: Best) -> None:
    arrays = {name: array.cpu().numpy() for name, array in optimizer.arrays()}
    arrays.update({f"best.{name}": w.numpy() for name, w in best.weights.items()})
    state = {"step": optimizer.n_steps, "divergence": best.divergence, "n_since": best.n_since}
    checkpoint.save(state, arrays)


def _restored(saved: Saved, optimizer: MaskedAdam) -> Best:
    """Restores the optimizer and the weights of _save()."""
    arrays = {name: torch.from_numpy(array) for name, array in saved.arrays.items()}
    optimizer.restore(arrays, saved.state["step"])
    weights = {name[len("best.") :]: array for name, array in arrays.items() if name.startswith("best.")}
    return Best(saved.state["divergence"], weights, saved.state["n_since"])


def training_step(student: Transformer, teacher: Transformer, chunks: Chunks, arithmetic: Arithmetic) -> torch.Tensor:
    """One forward and one backward pass, in which the optimizer updates the weights. Returns the loss."""
    tokens = arithmetic.tokens(chunks)
    with arithmetic.mixed_precision():
        with torch.no_grad():
            wanted = teacher.logits(tokens)
        loss = divergence(student.logits(tokens), wanted)
    loss.backward()
    return loss.detach()


def _on_host(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: w.cpu() for name, w in weights.items()}
