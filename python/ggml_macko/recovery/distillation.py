"""End-to-end recovery: the pruned model learns the dense model's probabilities of the next token on a text.

The loss is the Kullback-Leibler divergence of the pruned model from the dense one, averaged over all positions, without
labels. It is measured on a held-out text at intervals; the result has the weights with the lowest loss there.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .. import console, errors
from ..evaluation.text_model import Chunks
from ..evaluation.transformer import Transformer, as_tokens
from ..recovery.checkpoint import Checkpoint, Saved
from ..recovery.divergence import divergence_of_hidden, log_probabilities, pieces
from ..recovery.masked_adam import MaskedAdam
from ..recovery.options import (
    FIRST_RATE,
    MAX_POWER,
    RATE_FACTOR,
    TRIAL_SHARE,
    TRIAL_STEPS,
    TRIAL_TOLERANCE,
    RecoverOptions,
)
from ..recovery.ranks import N_RANKS, RANK, Ranks
from ..recovery.schedule import Point, Texts, batches, learning_rate, n_steps
from ..values import Array

_READ_EVERY = 16
"""Steps between two reads of the loss, at which the host waits for the GPU."""

_EVALUATED_TOKENS = 4096
"""Tokens of a batch of an evaluation."""

_EAGER_STEPS = 3
"""Steps before a GPU repeats a recorded one."""

_MAX_NLL = 700.0
"""exp() of more is not finite."""

_SAVING_SHARE = 0.05
"""Largest share of a run's time that checkpoints take."""

GPU_PRODUCTS = torch.bfloat16
"""The type of matrix products on a GPU. All other arithmetic, and all on a CPU, is float32."""


class Arithmetic:
    """The device and precision of evaluations. product_type: of matrices and their products."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.product_type = GPU_PRODUCTS if device.type == "cuda" else torch.float32

    def mixed_precision(self) -> AbstractContextManager[object]:
        """Autocast to the type of products."""
        if self.product_type == torch.float32:
            return contextlib.nullcontext()
        found: AbstractContextManager[object] = torch.autocast(self.device.type, self.product_type)
        return found

    def tokens(self, chunks: Chunks) -> torch.Tensor:
        return as_tokens(chunks, self.device)


class Evaluation(NamedTuple):
    """Results on the held-out text, over the second half of each chunk."""

    perplexity: float  # as llama-perplexity measures it
    divergence: float  # from the dense model, in nats per token


class HeldOut:
    """The held-out text. The results of the dense model are computed once, as hidden states: its probabilities need
    far more memory.
    """

    def __init__(self, teacher: Transformer, chunks: Chunks, arithmetic: Arithmetic) -> None:
        self._teacher, self._arithmetic = teacher, arithmetic
        self._tokens = arithmetic.tokens(chunks)
        self._first = chunks.shape[1] // 2
        self._wanted = self._hidden(teacher)
        self.of_dense = self._evaluation(teacher, self._wanted)

    def evaluate(self, student: Transformer) -> Evaluation:
        return self._evaluation(student, self._hidden(student))

    def _hidden(self, model: Transformer) -> torch.Tensor:
        """hidden() of the positions that count: (positions, n_embd)."""
        at_once = max(1, _EVALUATED_TOKENS // self._tokens.shape[1])
        with torch.no_grad(), self._arithmetic.mixed_precision():
            found = [model.hidden(tokens)[:, self._first : -1].flatten(0, 1) for tokens in self._tokens.split(at_once)]
            return torch.cat(found)

    def _evaluation(self, model: Transformer, x: torch.Tensor) -> Evaluation:
        next_tokens = self._tokens[:, self._first + 1 :].flatten()
        sums = torch.zeros(2, dtype=torch.float64, device=x.device)
        with torch.no_grad(), self._arithmetic.mixed_precision():
            for piece in pieces(len(x), len(model.head)):
                found = log_probabilities(model, x[piece])
                wanted = log_probabilities(self._teacher, self._wanted[piece])
                sums[0] += F.nll_loss(found, next_tokens[piece], reduction="sum")
                sums[1] += F.kl_div(found, wanted, reduction="sum", log_target=True)
        nll, kl = (sums / len(x)).tolist()
        return Evaluation(math.exp(min(nll, _MAX_NLL)), kl)


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
    held_out: HeldOut
    before: Evaluation
    ranks: Ranks


class Trained(NamedTuple):
    """The result of a method, besides the trained tensors."""

    rate: float  # the highest learning rate
    before: Evaluation  # of the start, with quantized values if they are trained
    points: Sequence[Point] = ()  # the evaluations during the run
    packed: Mapping[str, tuple[int, Array]] = {}  # ggml types and blocks, uint8, of tensors in dense types


def distill(training: Training) -> Trained:
    """Resumes from the checkpoint, if there is one. Raises MackoError if the loss is not finite."""
    run = _Run(training)
    options, checkpoint = training.options, training.checkpoint
    saved = checkpoint.load()
    if saved is not None:
        run.restore(saved)
        console.log(f"{checkpoint.path}: continuing after step {run.optimizer.n_steps} of {run.n_steps}")
    else:
        run.rate = options.learning_rate or run.find_rate()
    evaluate_every = max(1, run.n_steps // options.n_evaluations)
    start, seconds_saving = time.monotonic(), 0.0
    with console.progress("recovering", run.n_steps, "steps", run.optimizer.n_steps) as advance:
        for chunks in batches(training.texts, options, run.optimizer.n_steps):
            loss_of_step = run.step(chunks, learning_rate(run.optimizer.n_steps, run.n_steps, run.rate))
            advance(1)
            n_done = run.optimizer.n_steps
            evaluates = n_done % evaluate_every == 0 or n_done == run.n_steps
            if not evaluates and n_done % _READ_EVERY:
                continue
            loss = run.checked(loss_of_step)
            console.note(f"divergence {loss:.4f}")
            if evaluates:
                run.evaluate(loss)
            if n_done == run.n_steps or run.best.n_since >= options.patience:
                break
            now = time.monotonic()
            if training.ranks.of_first(seconds_saving <= _SAVING_SHARE * (now - start)):
                run.save()
                seconds_saving += time.monotonic() - now
    run.optimizer.set_weights(run.best.weights)
    run.optimizer.close()
    if not run.best.divergence < run.before.divergence:
        console.log(
            f"warning: no evaluation was better than the {options.start} model, whose weights are written; "
            f"--learning-rate {run.rate / 4:.2g} may help (this run: {run.rate:.2g}), or more text (--self-generated)"
        )
    return Trained(run.rate, run.before, run.points, run.optimizer.packed())


class _Run:
    """The state of a run."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.n_steps = n_steps(training.texts, training.options)
        self.optimizer = MaskedAdam(training.trained, training.options.quant_values, training.ranks)
        self._step = TrainingStep(training.student, training.teacher, training.arithmetic)
        self.before = training.before if training.options.quant_values is None else self._evaluated()
        self.best = Best(self.before.divergence, self._weights_on_host(), 0)
        self.points: list[Point] = []
        self.rate = 0.0  # the highest

    def step(self, chunks: Chunks, rate: float) -> torch.Tensor:
        self.optimizer.prepare(rate)
        return self._step(self._training.ranks.share(chunks))

    def checked(self, loss_of_step: torch.Tensor) -> float:
        loss = float(self._training.ranks.total(loss_of_step.clone())) / N_RANKS
        if not math.isfinite(loss):
            raise errors.error(
                errors.NOT_FINITE,
                f"the loss is {loss} at step {self.optimizer.n_steps}; a lower --learning-rate than {self.rate:g} may "
                "help",
            )
        return loss

    def evaluate(self, loss: float) -> None:
        step = self.optimizer.n_steps
        found = self._evaluated()
        rate = learning_rate(step - 1, self.n_steps, self.rate)
        self.points.append(Point(step, rate, loss, found.divergence, found.perplexity))
        console.detail(
            f"step {step:6d}: divergence {loss:.4f}, held out {found.divergence:.4f}, perplexity {found.perplexity:.4f}"
        )
        if found.divergence < self.best.divergence:
            self.best = Best(found.divergence, self._weights_on_host(), 0)
        elif 2 * step > self.n_steps:  # the divergence may rise while the learning rate is high
            self.best = self.best._replace(n_since=self.best.n_since + 1)

    def _weights_on_host(self) -> dict[str, torch.Tensor]:
        """Copied one by one: a GPU that trains has no room for all."""
        return self.optimizer.weights(torch.device("cpu"))

    def _evaluated(self) -> Evaluation:
        return self._training.ranks.of_first(self._training.held_out.evaluate(self._training.student))

    def find_rate(self) -> float:
        """The highest learning rate with which a short run ends at about the lowest divergence: from FIRST_RATE, up or
        down until the divergence rises.
        """
        n = max(8, min(TRIAL_STEPS, self.n_steps // 16), round(TRIAL_SHARE * self.n_steps))
        first = list(itertools.islice(batches(self._training.texts, self._training.options, 0), n))
        states = ("first.", "second.")  # 0 at the start
        start = {name: a.cpu().clone() for name, a in self.optimizer.arrays() if not name.startswith(states)}
        found: dict[int, float] = {}  # by the power of RATE_FACTOR
        best, untried = 0, [0]
        while untried:
            rate = FIRST_RATE * RATE_FACTOR ** untried[0]
            for i, chunks in enumerate(first):
                self.step(chunks, learning_rate(i, n, rate))
            divergence = self._evaluated().divergence
            console.detail(f"learning rate {rate:.1e}: divergence {divergence:.4f} after {n} steps")
            self.optimizer.restore(start, 0)
            found[untried[0]] = divergence if math.isfinite(divergence) else math.inf
            best = min(found, key=lambda i: (found[i], i))
            untried = [i for i in (best - 1, best + 1) if i not in found and abs(i) <= MAX_POWER]
        limit = found[best] + TRIAL_TOLERANCE * max(0.0, self.before.divergence - found[best])
        chosen = max(i for i, divergence in found.items() if divergence <= limit)
        return float(f"{FIRST_RATE * RATE_FACTOR**chosen:.1e}")

    def save(self) -> None:
        """The checkpoint has whole tensors, so that a run goes on with another number of processes."""
        ranks = self._training.ranks
        parts = [*self.optimizer.arrays(), *((f"best.{name}", w) for name, w in self.best.weights.items())]
        arrays = {name: ranks.joined(array.cpu().numpy()) for name, array in parts}
        if RANK == 0:
            state = {
                "step": self.optimizer.n_steps,
                "rate": self.rate,
                "divergence": self.best.divergence,
                "n_since": self.best.n_since,
                "points": self.points,
            }
            self._training.checkpoint.save(state, arrays)

    def restore(self, saved: Saved) -> None:
        state, ranks = saved.state, self._training.ranks
        lengths = {name: len(array) for name, array in self.optimizer.arrays()}
        bounds = {name.partition(".")[2]: ranks.bounds(n) for name, n in lengths.items() if name.startswith("weight.")}
        arrays = {}
        for name, array in saved.arrays.items():
            part = bounds[name.partition(".")[2]] if N_RANKS > 1 else slice(None)
            arrays[name] = torch.from_numpy(array[part])
        self.optimizer.restore(arrays, state["step"])
        weights = {name[len("best.") :]: array for name, array in arrays.items() if name.startswith("best.")}
        self.best = Best(state["divergence"], weights, state["n_since"])
        self.points = [Point(*point) for point in state["points"]]
        self.rate = state["rate"]


class TrainingStep:
    """One forward and one backward pass, in which the optimizer updates the weights.

    After a few steps, a GPU repeats the kernels of a recorded step: the host would take longer to launch each of them
    than most of them run.
    """

    def __init__(self, student: Transformer, teacher: Transformer, arithmetic: Arithmetic) -> None:
        self._student, self._teacher, self._arithmetic = student, teacher, arithmetic
        self._n_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: Any = torch.cuda.Stream() if arithmetic.device.type == "cuda" else None
        self._tokens = self._loss = torch.empty(0)

    def __call__(self, chunks: Chunks) -> torch.Tensor:
        """Returns the loss, which the next step may overwrite. All chunks have the same shape."""
        tokens = self._arithmetic.tokens(chunks)
        # neither FSDP2 nor experts, whose numbers of tokens differ between steps, can be recorded
        if self._stream is None or N_RANKS > 1 or self._student.shape.n_experts_used:
            return self._run(tokens)
        self._n_steps += 1
        if self._n_steps <= _EAGER_STEPS:
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._loss = self._run(tokens)
            current.wait_stream(self._stream)
            return self._loss
        if self._graph is None:
            torch.cuda.empty_cache()  # the recorded step has memory of its own
            self._tokens = tokens
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._loss = self._run(tokens)
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._loss

    def _run(self, tokens: torch.Tensor) -> torch.Tensor:
        with self._arithmetic.mixed_precision():
            with torch.no_grad():
                wanted = self._teacher.hidden(tokens)
            loss = divergence_of_hidden(self._student, self._student.hidden(tokens), self._teacher, wanted)
        loss.backward()
        return loss.detach()
