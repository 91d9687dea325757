"""Sparse GGUF -> dense GGUF: `macko restore IN OUT`. The inverse of convert, tensor data byte for byte."""

from __future__ import annotations

import argparse

from .. import console
from ..conversion.convert import check_and_commit
from ..gguf.files import AtomicOutput, Model, NewTensor, Writer, type_name

HELP = "turn a sparse model back into a dense one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the dense GGUF that a sparse one stands for: the same metadata, tensors in the same order, each value"
        " bit for bit. Also merges a split model into one file."
    )
    parser.add_argument("input", metavar="IN", help="sparse GGUF")
    parser.add_argument("output", metavar="OUT", help="dense GGUF to write")
    parser.add_argument("nthreads", nargs="?", type=int, default=0, help="threads (default: all cores)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def restore(model: Model, output: AtomicOutput, n_threads: int = 0, quiet: bool = False) -> None:
    """Writes model densely into output, up to and including its final name."""
    tensors = [NewTensor(t.name, t.type, t.ne, t.nbytes) for t in model.tensors]
    writer = Writer(output, model.keys, tensors, model.alignment)
    for i, t in enumerate(model.tensors):
        writer.write(t.blocks(n_threads))
        if not quiet:
            what = f"size = {console.size(t.nbytes_stored)} -> {console.size(t.nbytes)}"
            console.progress(i + 1, len(tensors), t.name, t.ne, type_name(t.type), what)
    writer.finish()
    model.check_unchanged()
    check_and_commit(model, output, n_threads)


def run(args: argparse.Namespace) -> int:
    with Model(args.input) as model:
        if not model.is_sparse:
            console.log("warning: the input is dense already; the output is a copy")
        with AtomicOutput(args.output, model.paths, args.force) as output:
            restore(model, output, args.nthreads)
        n_elements = sum(t.n_elements for t in model.tensors)
        print(console.model_line("model size", model.nbytes, n_elements))
        print(console.model_line("dense size", output.path.stat().st_size, n_elements))
    return 0
