"""`macko decompress FOLDER OUT`: makes a Hugging Face checkpoint of compressed-tensors dense again."""

from __future__ import annotations

import argparse

from .. import console
from ..commands.arguments import add_quiet
from ..huggingface.decompress import FORMATS, decompress

HELP = "make a compressed-tensors checkpoint dense"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"Reads a Hugging Face checkpoint with sparse weights of compressed-tensors ({', '.join(FORMATS)}), which "
        "current PyTorch tools do not load, and writes the same checkpoint dense, bit for bit, for all tools that "
        "read safetensors. `macko convert FOLDER` includes this step."
    )
    parser.add_argument("input", metavar="FOLDER", help="checkpoint: config.json and safetensors files")
    parser.add_argument("output", metavar="OUT", help="folder to write; it must not exist")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    done = decompress(args.input, args.output)
    print(
        f"{done.path}: {done.n_tensors} tensors, {done.n_decompressed} of them decompressed, "
        f"{console.size(done.nbytes_source)} -> {console.size(done.nbytes)}"
    )
    return 0
