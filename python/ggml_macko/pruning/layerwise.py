"""Pruning with a calibration text, in passes over a working copy of the model.

A pass evaluates the text, gathers statistics of the inputs of some tensors, and prunes these. Memory holds one tensor
and the statistics of one pass. In a sequential run, the statistics of each transformer block come from the copy, in
which the blocks before it are pruned already; else all statistics are those of the dense model.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .. import console
from ..evaluation.activations import Consumer
from ..evaluation.calibrate import SquareSums
from ..evaluation.text_model import TextModel
from ..gguf import imatrix
from ..gguf.files import Model, Tensor
from ..gguf.outputs import AtomicOutput
from ..gguf.writer import NewTensor, Writer
from ..pruning import allocation, array_backend, hessians, methods
from ..pruning.allocation import Quotas
from ..pruning.options import PruneOptions
from ..regular_files import named, write_at

# ---- statistics ----


def gather(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    consumer: Consumer,
    *,
    n_chunks: int,
    n_ctx: int,
    n_threads: int = 0,
) -> int:
    """Evaluates a text with a model, one chunk at a time, and hands activations to a consumer.

    Returns the number of chunks. Raises MackoError or OSError.
    """
    with TextModel.opened_with(model, text, n_ctx, n_chunks, n_batch=n_ctx, n_threads=n_threads, consumer=consumer) as (
        llama,
        chunks,
    ):
        for _, batch in llama.batches(chunks):
            llama.evaluate(batch)
    return len(chunks)


def gather_for(model: Path, options: PruneOptions, consumer: Consumer) -> int:
    """gather() with the text of the options, which must be set."""
    assert options.text is not None
    return gather(
        model, options.text, consumer, n_chunks=options.n_chunks, n_ctx=options.n_ctx, n_threads=options.n_threads
    )


class _SquareSumsOf(SquareSums):
    """Sums of squares of the inputs of some weights."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def wants(self, name: str) -> bool:
        return name in self._names


def statistics_of_text(model: Path, tensors: Sequence[Tensor], options: PruneOptions) -> imatrix.Imatrix:
    """What `calibrate` measures on the text of the options, for the inputs of these tensors."""
    assert options.text is not None
    sums = _SquareSumsOf({t.name for t in tensors})
    n_chunks = gather_for(model, options, sums)
    return imatrix.Imatrix(
        path=Path(options.text),
        entries=sums.entries(),
        datasets=[options.text],
        chunk_count=n_chunks,
        chunk_size=options.n_ctx,
    )


# ---- passes ----


def passes(tensors: Sequence[Tensor], options: PruneOptions) -> list[list[Tensor]]:
    """The tensors of each pass over the text: those of one block in a sequential run, else as many as have room for
    their Hessians within options.hessian_memory (one at least).
    """
    by_block: dict[int, list[Tensor]] = {}
    for t in sorted(tensors, key=lambda t: allocation.block_of(t.name)):
        by_block.setdefault(allocation.block_of(t.name), []).append(t)
    if options.sequential:
        return list(by_block.values())
    out: list[list[Tensor]] = []
    used = 0
    for block in by_block.values():
        for t in block:
            need = hessians.max_nbytes(t)
            if not out or used + need > options.hessian_memory:
                out.append([])
                used = 0
            out[-1].append(t)
            used += need
    return out


def prune_in_passes(
    model: Model,
    tensors: Sequence[Tensor],
    quotas: Quotas,
    options: PruneOptions,
    path: Path,
    pool: ThreadPoolExecutor,
) -> int:
    """Makes path, a copy of the model, and prunes these tensors of it in place. Returns the number of chunks."""
    copy_model(model, path)
    with Model(path) as copy:
        offset = {t.name: t.offset for t in copy.tensors}
    n_chunks = 0
    todo = passes(tensors, options)
    n_weights = sum(t.n_elements for t in tensors)
    with io.FileIO(path, "r+") as f, console.progress("pruning", n_weights, "weights") as advance:
        for i, group in enumerate(todo):
            console.detail(f"pass {i + 1}/{len(todo)} over {options.text}: {group[0].name} ... {group[-1].name}")
            source = path if options.sequential else model.path
            if options.method == "wanda":
                statistics = statistics_of_text(source, group, options)
                n_chunks = statistics.chunk_count
                pruner = methods.by_scores(methods.Scorer(statistics), options, quotas, pool)
            else:
                xp = None if options.device == "none" else array_backend.gpu()
                found = hessians.Hessians({t.name for t in group}, xp or np)
                n_chunks = gather_for(source, options, found)
                pruner = methods.by_hessians(found, options, quotas)
            for t in group:
                bits = methods.read_finite(t)
                pruner(bits, t)
                with named(path):
                    write_at(f, offset[t.name], bits.data.cast("B"))
                advance(t.n_elements)
    return n_chunks


def copy_model(model: Model, path: Path) -> None:
    """Writes a dense model, of one file or several, into one file."""
    with AtomicOutput(path, model.paths) as output:
        tensors = [NewTensor(t.name, t.type, t.ne, t.nbytes) for t in model.tensors]
        writer = Writer(output, model.keys, tensors, model.alignment)
        for t in model.tensors:
            writer.write(t.blocks())
        writer.finish()
        output.seal()
        output.commit()
