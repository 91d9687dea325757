"""The command line of `macko calibrate`."""

from __future__ import annotations

import argparse

from .. import console
from ..commands.arguments import add_quiet
from ..commands.text_arguments import add_text_arguments, text_arguments
from ..evaluation.calibrate import N_BATCH, calibrate
from ..evaluation.text_model import N_CALIBRATION_CHUNKS

HELP = "measure activation statistics of a model on a text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a text through a GGUF model, dense or sparse, and writes an imatrix file: for each weight the sum of "
        "squares of each input column. It is what `macko prune --imatrix` and llama-quantize --imatrix need, and equal "
        "to what llama-imatrix writes. An interrupted run leaves OUT.checkpoint; the same command continues from "
        "there, also with another number of --chunks."
    )
    add_text_arguments(parser, N_BATCH, n_chunks=N_CALIBRATION_CHUNKS)
    parser.add_argument(
        "-o",
        "--output",
        "--output-file",
        default="imatrix.gguf",
        metavar="FNAME",
        help="imatrix to write (default: imatrix.gguf)",
    )
    parser.add_argument(
        "-ofreq",
        "--output-frequency",
        type=int,
        default=10,
        metavar="N",
        help="write a checkpoint every N chunks (default: 10)",
    )
    parser.add_argument("--process-output", action="store_true", help="measure output.weight too")
    parser.add_argument("--force", action="store_true", help="replace FNAME if it exists")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    found = calibrate(
        args.model,
        args.file,
        args.output,
        n_ctx=args.ctx_size,
        process_output=args.process_output,
        checkpoint_every=args.output_frequency,
        force=args.force,
        **text_arguments(args),
    )
    for name, s in sorted(found.entries.items()):
        if s.n_unused:
            console.log(f"warning: {name}: {s.n_unused} of {len(s.counts)} experts got no token")
    print(f"{found.path}: {len(found.entries)} weights, {found.n_chunks} chunks of {found.n_ctx} tokens")
    return 0
