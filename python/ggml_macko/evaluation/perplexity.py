"""Perplexity of a model on a text, and its KL divergence from another model: `macko perplexity -m MODEL -f TEXT`.

llama-perplexity's options, definitions and figures (likelihood.py, kl_divergence.py say which).
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from .. import console, errors
from ..evaluation import kl_divergence, likelihood, text_model
from ..gguf.files import AtomicOutput

HELP = "perplexity of a model, and its KL divergence from another"


def of_file(
    path: str | os.PathLike, text_path: str | os.PathLike, n_chunks: int = -1, **options: int
) -> likelihood.Estimate:
    """Perplexity of a model on a text file. options: those of TextModel. Raises MackoError or OSError."""
    with text_model.TextModel(path, **options) as model:
        return likelihood.estimate(model, model.read_chunks(text_path, n_chunks))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Perplexity of a GGUF model, dense or sparse, on a text: the figure of llama-perplexity. With "
        "--kl-divergence-base it also writes the model's log-probabilities to a file; with --kl-divergence it compares "
        "the model with those of such a file, which holds the text too. The file is llama-perplexity's."
    )
    text_model.add_arguments(parser, n_batch=2048, file_required=False)
    parser.add_argument(
        "--kl-divergence-base", metavar="FNAME", help="file of log-probabilities to write, or to compare with"
    )
    parser.add_argument(
        "--kl-divergence",
        action="store_true",
        help="compare with the model that wrote the file of --kl-divergence-base",
    )
    parser.add_argument("--force", action="store_true", help="replace FNAME if it exists")


def run(args: argparse.Namespace) -> int:
    if args.ctx_size < likelihood.MIN_CTX:
        raise errors.error(errors.BAD_ARGUMENT, f"-c {args.ctx_size}: at least {likelihood.MIN_CTX}")
    if args.chunks == 0:
        raise errors.error(errors.BAD_ARGUMENT, "--chunks 0 measures nothing")
    if args.kl_divergence:
        return compare(args)
    if args.file is None:
        raise errors.error(errors.BAD_ARGUMENT, "-f is missing: the text to measure on")
    if args.kl_divergence_base is None:
        estimate = measure(args, None)
    else:
        inputs = [args.model, args.file]
        with AtomicOutput(args.kl_divergence_base, inputs, args.force, kl_divergence.SIGNATURE[:4]) as base:
            estimate = measure(args, base)
            base.seal()
            with kl_divergence.BaseFile(base.partial):  # its header and size are as a reader expects them
                pass
            base.commit()
    print(f"Final estimate: PPL = {estimate.ppl:.4f} +/- {estimate.error:.5f}")
    return 0


def measure(args: argparse.Namespace, base: AtomicOutput | None) -> likelihood.Estimate:
    with text_model.open_model(args) as model:
        chunks = model.read_chunks(args.file, args.chunks)
        progress = _Progress(model, len(chunks))

        def on_chunk(done: int, so_far: likelihood.Estimate, result: tuple) -> None:
            if base is not None:
                base.write(result[1])
            progress.show(done, f"[{done}]{so_far.ppl:.4f},", end="")

        if base is not None:
            base.write(base.magic + kl_divergence.header(model.n_ctx, model.n_vocab, chunks)[len(base.magic) :])
        estimate = likelihood.estimate(model, chunks, kl_divergence.encode if base else None, on_chunk)
        console.log("")
        return estimate


_COLUMNS = (
    "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence"
    "              Δp RMS            Same top p"
)


def compare(args: argparse.Namespace) -> int:
    if args.kl_divergence_base is None:
        raise errors.error(errors.BAD_ARGUMENT, "--kl-divergence-base is missing: the file to compare with")
    with kl_divergence.BaseFile(args.kl_divergence_base) as base, text_model.open_model(args, base.n_ctx) as model:
        progress = _Progress(model, len(base.chunks) if args.chunks < 0 else min(args.chunks, len(base.chunks)))

        def on_chunk(done: int, so_far: kl_divergence.Divergence) -> None:
            progress.show(done, f"{done:4d}{so_far.line()}", title=_COLUMNS)

        print(kl_divergence.divergence(model, base, args.chunks, on_chunk).text())
    return 0


class _Progress:
    """Figures so far on stderr; before the first, how long it will take."""

    def __init__(self, model: text_model.TextModel, n_chunks: int):
        self._n_chunks, self._n_seq = n_chunks, model.n_seq
        self._begin = time.monotonic()

    def show(self, done: int, text: str, end: str = "\n", title: str = "") -> None:
        if done == 1:
            n = min(self._n_seq, self._n_chunks)
            console.log(console.eta(n, self._n_chunks, time.monotonic() - self._begin, n))
            if title:
                console.log(title)
        print(text, end=end, file=sys.stderr, flush=True)
