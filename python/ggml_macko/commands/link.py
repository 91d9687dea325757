"""`macko link MODEL`: writes a file through which a program without `macko run` opens a sparse model."""

from __future__ import annotations

import argparse

from .. import console
from ..commands.arguments import add_force, add_quiet
from ..conversion.link import link

HELP = "write a link, through which a program with GGML_BACKEND_PATH opens a sparse model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a link to a sparse GGUF: a file with the same metadata and dense tensors, and holes in the place of "
        "the sparse tensors. A program of llama.cpp opens it without `macko run`, if GGML_BACKEND_PATH names the "
        "plugin, which reads the sparse tensors from the model. The link must stay in the folder of the model."
    )
    parser.add_argument("input", metavar="MODEL", help="sparse GGUF")
    parser.add_argument("output", metavar="OUT", nargs="?", help="link to write (default: MODEL with .link.gguf)")
    add_force(parser)
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    done = link(args.input, args.output, force=args.force)
    print(f"{done.path}: {console.size(done.nbytes_on_disk)} on disk, {console.size(done.nbytes)} long")
    return 0
