"""Options of the commands that evaluate a model on a text, with llama.cpp's names."""

from __future__ import annotations

import argparse
from typing import Any

from ..commands.arguments import Number, add_chunks, add_gpu_layers, add_load_options, add_threads
from ..evaluation.text_model import N_UBATCH


def add_text_arguments(
    parser: argparse.ArgumentParser,
    n_batch: int,
    file_required: bool = True,
    n_chunks: int | None = -1,
    chunks_default: str = "all",
) -> None:
    """-m, -f, -c, --chunks, -b, -ub, -t, -ngl and -v. n_batch, n_chunks: the defaults of -b and --chunks;
    chunks_default: as add_chunks() takes it.
    """
    parser.add_argument("-m", "--model", required=True, metavar="FNAME", help="GGUF model, dense or sparse")
    parser.add_argument("-f", "--file", dest="text", required=file_required, metavar="FNAME", help="text file")
    add_chunks(parser, n_chunks, "chunks to evaluate", chunks_default)
    for flags, name, default, what in (
        (("-b", "--batch-size"), "n_batch", n_batch, "evaluation"),
        (("-ub", "--ubatch-size"), "n_ubatch", N_UBATCH, "matrix product"),
    ):
        what = f"tokens per {what} (default: {default})"
        parser.add_argument(*flags, dest=name, type=Number(1), default=default, metavar="N", help=what)
    add_threads(parser)
    add_gpu_layers(parser)
    add_load_options(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="show llama.cpp's log")


def text_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments that calibrate(), perplexity() and kl_divergence() share."""
    shared = {name: getattr(args, name) for name in ("n_batch", "n_ubatch", "n_chunks", "n_threads", "verbose")}
    return {**shared, "n_gpu_layers": args.gpu_layers}
