"""Perplexity of a model on a text, and its Kullback-Leibler divergence from another model.

Options, definitions and results are those of llama-perplexity; likelihood.py and kl_divergence.py describe them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import console, errors
from ..evaluation import likelihood, skipping
from ..evaluation.calibrate_activations import take_thresholds
from ..evaluation.kl_divergence import SIGNATURE, BaseFile, Divergence, divergence, encode, header
from ..evaluation.likelihood import Array, Estimate
from ..evaluation.skipping import SkipOptions, SkippedPart
from ..evaluation.text_model import N_CTX, Chunks, EvaluationOptions, TextModel, read_text
from ..gguf.activation_keys import SkipRule, read_rule
from ..gguf.files import Model, shard_paths
from ..gguf.outputs import AtomicOutput

if TYPE_CHECKING:
    from typing_extensions import Unpack


def perplexity(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    *,
    n_ctx: int = N_CTX,
    n_chunks: int = -1,
    evenly: bool = False,
    kl_divergence_base: str | os.PathLike[str] | None = None,
    force: bool = False,
    **options: Unpack[EvaluationOptions],
) -> Estimate:
    """Perplexity of a GGUF model, dense or sparse, on a UTF-8 text, as of llama-perplexity.

    n_ctx: tokens per chunk, at least 4; the second half of each chunk is scored. n_chunks: chunks from the start of the
    text (-1: all), or with evenly spread over it, unlike those of llama-perplexity. kl_divergence_base: also write the
    log-probabilities to this file, for kl_divergence(); force: replace it if it exists. options: of EvaluationOptions.

    Logs intermediate estimates. Raises MackoError (a text that is too short or not UTF-8, a model that llama.cpp does
    not load) or OSError.
    """
    _check_context(n_ctx)
    _check_chunks(n_chunks)

    def measure(base: AtomicOutput | None) -> Estimate:
        options_of_run = _with_gpu(options)
        with TextModel.opened_with(model, text, n_ctx, n_chunks, evenly=evenly, **options_of_run) as (llama, chunks):
            return _measure(llama, chunks, base)

    if kl_divergence_base is None:
        return measure(None)
    with AtomicOutput(kl_divergence_base, [*shard_paths(model), text], force, SIGNATURE[:4]) as base:
        estimate = measure(base)
        base.seal()
        with BaseFile(base.partial):  # checks header and size
            pass
        base.commit()
    return estimate


@dataclass(frozen=True)
class SkippedPerplexity:
    """Perplexity of a model with skipped neurons, and the skipped neurons of each feed-forward part."""

    estimate: Estimate
    skip: SkipOptions  # of the caller or of the file
    parts: list[SkippedPart]

    @property
    def share(self) -> float:
        """Share of skipped neurons on the evaluated text."""
        return skipping.skipped_share(self.parts)


def skipped_perplexity(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    skip: SkipOptions | None,
    *,
    n_ctx: int = N_CTX,
    n_chunks: int = -1,
    **options: Unpack[EvaluationOptions],
) -> SkippedPerplexity:
    """Perplexity of a GGUF model, dense or sparse, that skips feed-forward neurons (skipping.py). Share 0 gives the
    result of perplexity(), which explains the other parameters. skip=None: use the thresholds in the file
    (calibrate_activations()).

    The measurement runs on the CPU and is not faster. Raises MackoError (as perplexity(); a model without feed-forward
    parts with a gate or a ReLU, without thresholds or with wrong ones, or in GPU memory) or OSError.
    """
    _check_context(n_ctx)
    _check_chunks(n_chunks)
    for path in (text,) if skip is None else (skip.text, text):
        read_text(path)  # checks the text before the model is loaded
    how = _rule_of(model) if skip is None else skip
    with skipping.SkippingModel(model, how.score, n_ctx=n_ctx, **_with_gpu(options)) as skipper:
        chunks = skipper.model.read_chunks(text, n_chunks)
        if isinstance(how, SkipOptions):
            take_thresholds(skipper, how)
        else:
            skipper.find_parts(chunks[:1])
            skipper.skip_by(how)
            how = SkipOptions(how.share, how.text, how.score, how.allocation, how.n_chunks)
        estimate = _measure(skipper.model, chunks, None)
        return SkippedPerplexity(estimate, how, skipper.skipped())


def _rule_of(path: str | os.PathLike[str]) -> SkipRule:
    with Model(path) as file:
        rule = read_rule(file)
    if rule is None:
        raise errors.error(
            errors.MISSING_KEY,
            f"{path}: key macko.act.kind is missing or of a later version; macko calibrate --activations writes it",
        )
    return rule


def kl_divergence(
    model: str | os.PathLike[str],
    base: str | os.PathLike[str],
    *,
    n_chunks: int = -1,
    **options: Unpack[EvaluationOptions],
) -> Divergence:
    """Divergence of a GGUF model, dense or sparse, from the model that wrote base, as of llama-perplexity.

    base: file of perplexity() or llama-perplexity (kl_divergence_base), which also contains the text. The other
    parameters are those of perplexity(). Logs intermediate results. Raises MackoError (a base file that is damaged or
    of another vocabulary, fewer than 100 scored tokens) or OSError.
    """
    _check_chunks(n_chunks)
    with (
        BaseFile(base) as base_file,
        TextModel(model, base_file.n_ctx, **_with_gpu(options)) as llama,
    ):
        n = len(base_file.chunks)
        progress = _Progress(llama, n if n_chunks < 0 else min(n_chunks, n))

        def on_chunk(done: int, so_far: Divergence) -> None:
            progress.show(done, f"{done:4d}{so_far.line()}", title=_COLUMNS)

        return divergence(llama, base_file, n_chunks, on_chunk)


def _with_gpu(options: EvaluationOptions) -> EvaluationOptions:
    return {"n_gpu_layers": -1, **options}


def _check_context(n_ctx: int) -> None:
    if n_ctx < likelihood.MIN_CTX:
        raise errors.usage_error(f"-c {n_ctx}: at least {likelihood.MIN_CTX}")


def _check_chunks(n_chunks: int) -> None:
    if n_chunks == 0:
        raise errors.usage_error("--chunks 0 measures nothing")


def _measure(model: TextModel, chunks: Chunks, base: AtomicOutput | None) -> Estimate:
    """Perplexity on chunks (chunks, n_ctx). base: output for the header and rows of a base file."""
    progress = _Progress(model, len(chunks))

    def on_chunk(done: int, so_far: Estimate, more: list[Array]) -> None:
        if base is not None:
            (rows,) = more
            base.write(rows.data)
        if console.shows_progress():
            console.note(f"PPL = {so_far.ppl:.4f}")
        else:
            progress.show(done, f"[{done}]{so_far.ppl:.4f},", end="")

    if base is not None:
        base.write(base.magic + header(model.n_ctx, model.n_vocab, chunks)[len(base.magic) :])
    estimate = likelihood.estimate(model, chunks, encode if base is not None else None, on_chunk)
    if not console.shows_progress():
        console.log("")
    return estimate


_COLUMNS = (
    "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence"
    "              Δp RMS            Same top p"
)


class _Progress:
    """Logs intermediate results, and the expected time before the first of them."""

    def __init__(self, model: TextModel, n_chunks: int) -> None:
        self._n_chunks, self._n_seq = n_chunks, model.n_seq
        self._begin = time.monotonic()

    def show(self, done: int, text: str, end: str = "\n", title: str = "") -> None:
        if done == 1:
            n = min(self._n_seq, self._n_chunks)  # chunks of the first evaluation
            console.log(console.eta(n, self._n_chunks, time.monotonic() - self._begin, n))
            if title:
                console.log(title)
        console.log(text, end=end)
