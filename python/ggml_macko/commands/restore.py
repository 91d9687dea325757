"""`macko restore IN OUT`: turns a sparse model back into a dense one."""

from __future__ import annotations

import argparse

from .. import console
from ..commands.arguments import add_force, add_quiet, add_threads
from ..conversion.restore import restore

HELP = "turn a sparse model back into a dense one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the dense GGUF that a sparse one was made from: the same metadata, the tensors in the same order, each "
        "value bit for bit. Negative zeros are plain zeros, unless the model was converted with --keep-negative-zeros. "
        "The command also merges a split model into one file."
    )
    parser.add_argument("input", metavar="IN", help="sparse GGUF")
    parser.add_argument("output", metavar="OUT", help="dense GGUF to write")
    add_threads(parser, "nthreads", nargs="?")
    add_force(parser)
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    done = restore(args.input, args.output, n_threads=args.nthreads, force=args.force)
    print(console.model_line("model size", done.nbytes_source, done.n_parameters))
    print(console.model_line("dense size", done.nbytes, done.n_parameters))
    return 0
