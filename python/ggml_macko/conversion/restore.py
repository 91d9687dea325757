"""Sparse GGUF -> dense GGUF: the inverse of convert, tensor data byte for byte."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .. import console
from ..gguf.files import Model, type_name
from ..gguf.outputs import AtomicOutput
from ..gguf.writer import NewTensor, Writer
from .write import check_and_commit


@dataclass(frozen=True)
class RestorationReport:
    """A restored model."""

    path: Path  # of the dense file
    was_dense: bool  # the source was dense already; the output is a copy
    n_parameters: int
    nbytes_source: int
    nbytes: int  # of the dense file


def restore(
    source: str | os.PathLike[str], output: str | os.PathLike[str], *, n_threads: int = 0, force: bool = False
) -> RestorationReport:
    """Writes the dense GGUF of a sparse one: the same metadata and tensors in the same order, each value bit for bit.
    Quantized values are rounded to the dense type. Negative zeros that convert() counted as zeros remain positive. Also
    merges a split model.

    n_threads=0 uses all cores; force=True replaces an output that exists. Raises MackoError if the source is not a
    valid model or the output exists, OSError if a file cannot be read or written; the output then does not exist.
    """
    with Model(source) as model:
        if not model.is_sparse:
            console.log("warning: the input is dense already; the output is a copy")
        with AtomicOutput(output, model.paths, force) as out:
            write_dense(model, out, n_threads)
            check_and_commit(model, out, n_threads, exact=True)
        return RestorationReport(
            path=out.path,
            was_dense=not model.is_sparse,
            n_parameters=sum(t.n_elements for t in model.tensors),
            nbytes_source=model.nbytes,
            nbytes=out.path.stat().st_size,
        )


def write_dense(model: Model, output: AtomicOutput, n_threads: int = 0) -> None:
    """Writes the dense file into an open output."""
    tensors = [NewTensor(t.name, t.type, t.ne, t.nbytes) for t in model.tensors]
    writer = Writer(output, model.keys, tensors, model.alignment)
    for i, t in enumerate(console.tracked(model.tensors, "restoring", lambda t: t.nbytes, "B")):
        writer.write(t.blocks(n_threads))
        what = f"size = {console.size_column(t.nbytes_stored)} -> {console.size_column(t.nbytes)}"
        console.tensor_line(i + 1, len(tensors), t.name, t.ne, type_name(t.type), what)
    writer.finish()
    model.check_unchanged()
