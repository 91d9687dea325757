"""Options that the commands that evaluate a text share, with llama.cpp's names."""

from __future__ import annotations

import argparse
from typing import Any

from ..commands.arguments import add_gpu_layers, add_load_options
from ..evaluation.text_model import N_CTX, N_UBATCH


def add_text_arguments(
    parser: argparse.ArgumentParser, n_batch: int, file_required: bool = True, n_chunks: int = -1
) -> None:
    """-m, -f, -c, --chunks, -b, -ub, -t, -ngl and -v. n_batch, n_chunks: the defaults of -b and --chunks."""
    parser.add_argument("-m", "--model", required=True, metavar="FNAME", help="GGUF model, dense or sparse")
    parser.add_argument("-f", "--file", required=file_required, metavar="FNAME", help="text file")
    parser.add_argument(
        "-c", "--ctx-size", type=int, default=N_CTX, metavar="N", help=f"tokens of a chunk (default: {N_CTX})"
    )
    parser.add_argument(
        "--chunks", type=int, default=n_chunks, metavar="N", help="chunks to evaluate; -1: all (default: %(default)s)"
    )
    parser.add_argument(
        "-b", "--batch-size", type=int, default=n_batch, metavar="N", help=f"tokens per evaluation (default: {n_batch})"
    )
    parser.add_argument(
        "-ub",
        "--ubatch-size",
        type=int,
        default=N_UBATCH,
        metavar="N",
        help=f"tokens per matrix product (default: {N_UBATCH})",
    )
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads (default: all cores)")
    add_gpu_layers(parser)
    add_load_options(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="show llama.cpp's log")


def text_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments that calibrate(), perplexity() and kl_divergence() share."""
    return {
        "n_batch": args.batch_size,
        "n_ubatch": args.ubatch_size,
        "n_chunks": args.chunks,
        "n_threads": args.threads,
        "n_gpu_layers": args.gpu_layers,
        "verbose": args.verbose,
    }
