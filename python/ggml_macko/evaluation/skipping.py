"""Activation sparsity: the quality of a model that skips neurons with little influence on a token.

A neuron of a feed-forward part (feed_forward_parts.py) is skipped for a token if its score is below the threshold of
the part. Its element of the input of down, act(gate) * up, becomes zero before the product, as in a kernel that does
not read the weights of the neuron. This module measures quality; it is not faster.

Scores of neuron j:
  cats     |act(gate_j)|                            arXiv 2404.08763; available before up is computed
  product  |act(gate_j) * up_j|                     available after up is computed
  wina     |act(gate_j) * up_j| * ||down[:, j]||_2  arXiv 2505.19427; available after up is computed

In parts with a ReLU instead of a gate, relu(up_j) or its square replaces act(gate_j) * up_j, and `cats` is undefined.

Thresholds are fixed quantiles of the scores of a part on a calibration text (CATS, section 4.1). The share of skipped
neurons is the same in each part (uniform), or larger in parts with a smaller loss (greedy). For the latter, the loss of
each part alone is measured at a few shares, and neurons are assigned to the part whose loss rises least per neuron,
which is optimal for convex losses that add up (marginal analysis, Fox 1966; TEAL, arXiv 2408.14690, is greedy among the
matrices of a block and repeats the measurement after each step). The loss is the KL divergence of the distribution of
the next token from that of the model without skipping, on the calibration text.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np
import numpy.typing as npt

from .. import console, errors
from ..evaluation.feed_forward_parts import FeedForwardPart, FeedForwardTap, Rows
from ..evaluation.text_model import Chunks, Logits, TextModel, spread
from ..gguf.activation_keys import PartRule, SkipRule
from ..gguf.files import Model, Tensor

SCORES = ("cats", "product", "wina")
ALLOCATIONS = ("uniform", "greedy")

N_CHUNKS = 16
"""Chunks of the calibration text for thresholds."""

N_LOSS_CHUNKS = 2
"""Chunks among these for losses."""

LOSS_SHARES = (0.25, 0.5, 0.7, 0.85, 1.0)
"""Shares at which the loss of a part is measured."""


@dataclass(frozen=True)
class SkipOptions:
    """The neurons to skip. share: share of the neurons, 0 to 1. text: calibration text, UTF-8. n_chunks: chunks from
    the start of the text (-1: all). Raises MackoError for other values.
    """

    share: float
    text: str | os.PathLike[str]
    score: str = "cats"
    allocation: str = "uniform"
    n_chunks: int = N_CHUNKS

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise errors.usage_error(f"--skip {self.share:g}: a share of the neurons, 0 to 1")
        if self.score not in SCORES:
            raise errors.usage_error(f"--skip-score {self.score}: one of {', '.join(SCORES)}")
        if self.allocation not in ALLOCATIONS:
            raise errors.usage_error(f"--skip-allocation {self.allocation}: one of {', '.join(ALLOCATIONS)}")
        if self.n_chunks == 0:
            raise errors.usage_error("--skip-chunks 0 measures nothing")


# ---- scores ----


def _silu(x: Rows) -> Rows:
    y: Rows = x / (1 + np.exp(-x))
    return y


def _gelu(x: Rows) -> Rows:
    inner = np.float32(math.sqrt(2 / math.pi)) * x * (1 + np.float32(0.044715) * x * x)
    y: Rows = np.float32(0.5) * x * (1 + np.tanh(inner))
    return y


def _gelu_quick(x: Rows) -> Rows:
    y: Rows = x / (1 + np.exp(np.float32(-1.702) * x))
    return y


def _relu(x: Rows) -> Rows:
    return np.maximum(x, np.float32(0))


ACTIVATIONS: Mapping[str, Callable[[Rows], Rows]] = {
    "SWIGLU": _silu, "GEGLU": _gelu, "GEGLU_QUICK": _gelu_quick, "REGLU": _relu,
}  # fmt: skip
"""The activation function of the gate, by ggml's name of the gated operation, as ggml defines it."""


def column_norms(t: Tensor) -> npt.NDArray[np.float32]:
    """The Euclidean norms (cols,) of the columns of a matrix, dense, quantized or sparse. Raises MackoError."""
    values = t.read_values()
    norms: npt.NDArray[np.float32] = np.sqrt(np.einsum("ij,ij->j", values, values, dtype=np.float64)).astype(np.float32)
    return norms


class Scorer:
    """Computes scores of the neurons of parts: float32 (tokens, neurons), not negative."""

    def __init__(self, score: str, model: str | os.PathLike[str], parts: Sequence[FeedForwardPart]) -> None:
        """Raises MackoError for a part without this score."""
        self._score = score
        self._norms: dict[str, npt.NDArray[np.float32]] = {}
        if score == "cats":
            for part in parts:
                if not part.has_gate:
                    raise errors.error(
                        errors.LIMIT, f"{model}: {part.down}: its part has no gate to score; other scores need none"
                    )
                if part.kind not in ACTIVATIONS:
                    raise errors.error(
                        errors.LIMIT,
                        f"{model}: {part.node}: no rule for the gate of {part.kind}; other scores need none",
                    )
        if score == "wina":
            downs = {part.down for part in parts}
            with Model(model) as file:
                self._norms = {t.name: column_norms(t) for t in file.tensors if t.name in downs}

    def __call__(self, part: FeedForwardPart, gate: Rows | None, product: Rows) -> Rows:
        """gate: before the activation function, if there is a gate. Raises MackoError (NOT_FINITE)."""
        scored = product
        if self._score == "cats":
            assert gate is not None  # the constructor refuses a part without
            with np.errstate(over="ignore", invalid="ignore"):  # exp() of a large number: x / inf is the right 0
                scored = ACTIVATIONS[part.kind](gate)
        scores = np.abs(scored)
        if self._score == "wina":
            scores *= self._norms[part.down]
        if not np.isfinite(scores.max()):
            raise errors.error(errors.NOT_FINITE, f"{part.down}: the score of an input is not a finite number")
        return scores


# ---- distributions ----

_BIN_SHIFT = 12
_N_BINS = 0x7F800000 >> _BIN_SHIFT

BIN_WIDTH = 2.0 ** (_BIN_SHIFT - 23)
"""Width of a bin relative to the lower end of its binade: 2^-11."""


class Distribution:
    """A histogram of float32 scores with 2048 bins per binade: quantiles have a relative error of 0.05 %."""

    def __init__(self) -> None:
        self.counts = np.zeros(_N_BINS, dtype=np.int64)

    @property
    def n(self) -> int:
        return int(self.counts.sum())

    def add(self, scores: Rows) -> None:
        """scores: finite, not negative."""
        bins = np.ascontiguousarray(scores).view(np.uint32).ravel() >> _BIN_SHIFT
        self.counts += np.bincount(bins, minlength=_N_BINS)

    def threshold(self, share: float) -> float:
        """The upper end of the bin of the smallest score t with at least this share of the scores <= t; 0 for share 0.

        At least this share of the scores is below it.
        """
        rank = math.ceil(round(share * self.n, 6))  # 0.7 * 10 is 7
        if rank == 0:
            return 0.0
        i = int(np.searchsorted(np.cumsum(self.counts), rank))
        return float(np.array((i + 1) << _BIN_SHIFT, dtype=np.uint32).view(np.float32))


# ---- allocation ----


def allocate(losses: Mapping[str, Sequence[float]], n_neurons: Mapping[str, int], share: float) -> dict[str, float]:
    """The share of each part, in steps of 1 %, with the least total loss for `share` of all neurons.

    losses: part -> loss at each of LOSS_SHARES. Losses are interpolated, made convex, and assumed to add up.
    """
    steps = []
    for part, values in losses.items():
        hull: list[tuple[float, float]] = []
        for point in zip(_GRID, interpolated(values)):
            while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
                hull.pop()
            hull.append(point)
        steps += [(_slope(x, y) / n_neurons[part], part, y[0] - x[0]) for x, y in zip(hull, hull[1:])]
    left = share * sum(n_neurons.values())
    out = dict.fromkeys(losses, 0.0)
    for _, part, length in sorted(steps, key=lambda step: step[0]):
        taken = min(length * n_neurons[part], left)
        out[part] = min(1.0, round(out[part] + taken / n_neurons[part], 9))
        left -= taken
    return out


_GRID = tuple(i / 100 for i in range(101))


def interpolated(losses: Sequence[float]) -> list[float]:
    """The loss of a part at 0, 0.01 ... 1. losses: at each of LOSS_SHARES; a loss that is not positive counts as
    almost 0, and a loss below its predecessor as equal to it.

    The logarithms follow a monotone cubic (Fritsch and Carlson 1980, harmonic means as tangents), so the slope has no
    steps, at which many targets would give the same shares.
    """
    x = np.log(LOSS_SHARES)
    y = np.maximum.accumulate(np.log(np.maximum(losses, 1e-12)))
    width = np.diff(x)
    secant = np.diff(y) / width
    tangent = np.empty_like(y)
    tangent[0], tangent[-1] = secant[0], secant[-1]
    product, total = secant[:-1] * secant[1:], secant[:-1] + secant[1:]
    tangent[1:-1] = np.divide(2 * product, total, out=np.zeros_like(total), where=total > 0)

    at = np.log(_GRID[1:])
    i = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(x) - 2)
    t = (at - x[i]) / width[i]
    inside = (
        (1 + 2 * t) * (1 - t) ** 2 * y[i]
        + t * (1 - t) ** 2 * width[i] * tangent[i]
        + t**2 * (3 - 2 * t) * y[i + 1]
        + t**2 * (t - 1) * width[i] * tangent[i + 1]
    )
    below = y[0] + (at - x[0]) * tangent[0]
    return [0.0, *np.exp(np.where(at < x[0], below, inside)).tolist()]


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


# ---- a model whose neurons are skipped ----


@dataclass(frozen=True)
class SkippedPart:
    """The skipped neurons of a part."""

    down: str  # name of the weight
    n_neurons: int
    threshold: float
    wanted: float  # share of the neurons
    measured: float  # share of the neurons of all evaluated tokens


def skipped_share(parts: Sequence[SkippedPart]) -> float:
    """The measured share of skipped neurons in these parts."""
    return sum(part.measured * part.n_neurons for part in parts) / sum(part.n_neurons for part in parts)


class SkippingModel:
    """A model that skips neurons while it evaluates texts on the CPU.

    options: of TextModel. Raises MackoError (a model without such parts, scores that are not finite) or OSError.
    """

    def __init__(self, path: str | os.PathLike[str], score: str, **options: Any) -> None:
        self._tap = FeedForwardTap()
        self.model = TextModel(path, tap=self._tap, **options)
        self._score = score
        self._collects = False
        self._shares: dict[str, float] = {}  # node -> share; neurons of other parts are not skipped
        self._thresholds: dict[str, float] = {}
        self._n_scored: dict[str, int] = {}
        self._n_skipped: dict[str, int] = {}
        self.distributions: dict[str, Distribution] = {}  # by node

    @property
    def parts(self) -> list[FeedForwardPart]:
        """The parts of a calibrated model, in the order of the graph."""
        return list(self._tap.parts.values())

    def find_parts(self, chunks: Chunks) -> None:
        """Finds the feed-forward parts. chunks: (1, n_ctx) of any text."""
        model, tap = self.model, self._tap
        tap.on_part = None
        model.evaluate(chunks)
        if not tap.parts:
            what = "only experts have" if tap.n_routed else "no feed-forward part has"
            raise errors.error(errors.LIMIT, f"{model.path}: {what} a gate or a ReLU: there are no neurons to skip")
        if tap.n_routed:
            console.log(f"{model.path}: the neurons of {tap.n_routed} parts with experts are not skipped")
        self._scorer = Scorer(self._score, model.path, self.parts)
        tap.on_part = self._on_part

    def calibrate(self, chunks: Chunks) -> None:
        """Finds the feed-forward parts, and measures the distributions of their scores on chunks (chunks, n_ctx)."""
        self.find_parts(chunks[:1])
        self.distributions = {part.node: Distribution() for part in self.parts}
        self._collects = True
        try:
            for _, batch in self.model.batches(chunks):
                self.model.evaluate(batch)
        finally:
            self._collects = False

    def skip(self, shares: Mapping[str, float]) -> None:
        """Skips these shares of parts (node -> share) from now on, and resets the counts."""
        self._skip(shares, {node: self.distributions[node].threshold(share) for node, share in shares.items()})

    def skip_by(self, rule: SkipRule) -> None:
        """Skips by a rule, after the parts are found. Raises MackoError if the rule names an unknown part."""
        node_of = {part.down: part.node for part in self.parts}
        for part in rule.parts:
            if part.down not in node_of:
                raise errors.error(
                    errors.BAD_KEY_VALUE,
                    f"{self.model.path}: key macko.act.part.down has {part.down!r}, which no feed-forward part of "
                    "the model is multiplied with",
                )
        self._skip(
            {node_of[part.down]: part.share for part in rule.parts},
            {node_of[part.down]: part.threshold for part in rule.parts},
        )

    def _skip(self, shares: Mapping[str, float], thresholds: Mapping[str, float]) -> None:
        self._shares, self._thresholds = dict(shares), dict(thresholds)
        self._n_scored = dict.fromkeys(shares, 0)
        self._n_skipped = dict.fromkeys(shares, 0)

    def rule(self, options: SkipOptions, n_chunks: int) -> SkipRule:
        """The present rule, for a file. options: its origin; n_chunks: chunks of the text."""
        return SkipRule(
            score=self._score,
            share=_as_float32(options.share),
            allocation=options.allocation,
            text=os.fsencode(Path(options.text).name).decode("utf-8", errors="replace"),
            n_chunks=n_chunks,
            n_ctx=self.model.n_ctx,
            parts=tuple(
                PartRule(
                    part.down,
                    share=_as_float32(self._shares[part.node]),
                    threshold=self._thresholds[part.node],
                )
                for part in self.parts
            ),
        )

    def skipped(self) -> list[SkippedPart]:
        """The skipped neurons since skip()."""
        return [
            SkippedPart(
                down=part.down,
                n_neurons=part.n_neurons,
                threshold=self._thresholds[part.node],
                wanted=self._shares[part.node],
                measured=self._n_skipped[part.node] / max(1, self._n_scored[part.node]),
            )
            for part in self.parts
            if part.node in self._shares
        ]

    def uniform(self, share: float) -> dict[str, float]:
        """The same share for each part."""
        return {part.node: share for part in self.parts}

    def shares(self, options: SkipOptions, chunks: Chunks) -> dict[str, float]:
        """Shares of the parts by the allocation of the options. chunks: of the calibration text."""
        if options.allocation == "uniform":
            return self.uniform(options.share)
        return self.greedy(options.share, self.losses(spread(chunks, N_LOSS_CHUNKS)))

    def greedy(self, share: float, losses: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Shares of the parts with the least loss. losses: result of losses()."""
        return allocate(losses, {part.node: part.n_neurons for part in self.parts}, share)

    def losses(self, chunks: Chunks) -> dict[str, list[float]]:
        """The loss of skipping in single parts: node -> mean KL divergence at each of LOSS_SHARES, over the second
        halves of chunks (chunks, n_ctx).
        """
        model, first = self.model, self.model.n_ctx // 2
        sums = {part.node: [0.0] * len(LOSS_SHARES) for part in self.parts}
        base: Logits | None = None
        todo = [(i, part) for i in range(len(chunks)) for part in self.parts]
        console.log(f"losses: {len(todo) * len(LOSS_SHARES)} evaluations of a chunk")
        for i, part in console.tracked(todo, model.path.name, unit="layers"):
            chunk = chunks[i : i + 1]
            if base is None or part is self.parts[0]:
                self.skip({})
                base = model.evaluate(chunk, first)[0].copy()
            for k, share in enumerate(LOSS_SHARES):
                self.skip({part.node: share})
                sums[part.node][k] += divergence(base, model.evaluate(chunk, first)[0])
        self.skip({})
        return {node: [s / len(chunks) for s in found] for node, found in sums.items()}

    def _on_part(self, part: FeedForwardPart, gate: Rows | None, product: Rows) -> None:
        if product.size == 0 or not (self._collects or part.node in self._thresholds):
            return  # the last block has no tokens if no logits are requested
        scores = self._scorer(part, gate, product)
        if self._collects:
            self.distributions[part.node].add(scores)
            return
        mask = scores < np.float32(self._thresholds[part.node])
        product[mask] = 0
        self._n_scored[part.node] += mask.size
        self._n_skipped[part.node] += int(np.count_nonzero(mask))

    def close(self) -> None:
        self.model.close()

    def __enter__(self) -> SkippingModel:
        return self

    def __exit__(self, *unused: Any) -> None:
        self.close()


def _as_float32(x: float) -> float:
    return float(np.float32(x))


def divergence(p: Logits, q: Logits) -> float:
    """Mean KL divergence of the distributions with logits q from those with logits p (n, n_vocab)."""
    return float(np.mean([_divergence(p[i], q[i]) for i in range(len(p))]))


def _divergence(p: Logits, q: Logits) -> float:
    a, b = (x.astype(np.float64) - float(x.max()) for x in (p, q))
    a -= math.log(np.exp(a).sum())
    b -= math.log(np.exp(b).sum())
    return float(np.exp(a) @ (a - b))
