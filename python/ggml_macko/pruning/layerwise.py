"""Pruning with a calibration text, in passes over a working copy of the model.

A pass evaluates the text, collects statistics of the inputs of some tensors, and prunes these tensors. Memory holds one
tensor and the statistics of one pass. In a sequential run, the statistics of each transformer block come from the copy,
in which the previous blocks are pruned. With dense targets, a pass evaluates both models for the matrices with one
input. Otherwise, all statistics come from the dense model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from .. import console
from ..evaluation import likelihood
from ..evaluation.activations import Consumer, Weight
from ..evaluation.calibrate import SquareSums
from ..evaluation.text_model import TextModel, spread
from ..gguf import imatrix
from ..gguf.files import Model, Tensor
from ..gguf.outputs import AtomicOutput
from ..pruning import allocation, array_backend, hessians, methods, torch_text
from ..pruning.allocation import Quotas
from ..pruning.array_backend import Array
from ..pruning.masks import Bits, FloatArray
from ..pruning.options import ParsedOptions
from ..pruning.working_copy import TensorFile, WorkingCopy, write_copy

N_LOSS_CHUNKS = 8
"""Chunks on which the loss is measured for allocation."""

# ---- statistics ----


def gather(model: Path, options: ParsedOptions, consumer: Consumer, n_chunks: int) -> int:
    """Evaluates evenly spread chunks of the options' text with a model, one at a time, and passes activations to a
    consumer. Returns the number of chunks. Raises MackoError or OSError.
    """
    assert options.text is not None
    n_ctx = options.n_ctx
    settings: dict[str, Any] = {"n_batch": n_ctx, "n_threads": options.n_threads, "consumer": consumer}
    with TextModel.opened_with(model, options.text, n_ctx, n_chunks, evenly=True, **settings) as (llama, chunks):
        for _, batch in llama.batches(chunks):
            llama.evaluate(batch)
    return len(chunks)


def gather_for(model: Path, options: ParsedOptions, consumer: Consumer, session: torch_text.Session) -> int:
    """gather() with the chunks of the options; with PyTorch if torch_text.py does it."""
    n_chunks = session.gather([torch_text.Reader(model, consumer)])
    return gather(model, options, consumer, options.n_chunks) if n_chunks is None else n_chunks


class _SquareSumsOf(SquareSums):
    """Sums of squares of the inputs of some weights."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def wants(self, name: str) -> bool:
        return name in self._names

    def take(self, weight: Weight, index: int, x: Array) -> None:
        """Also accepts an array on a GPU."""
        if isinstance(x, np.ndarray):
            super().take(weight, index, x)
        else:
            self.add(weight, index, array_backend.to_host((x.astype(np.float64) ** 2).sum(axis=0)), len(x))


def statistics_of_text(
    model: Path, tensors: Sequence[Tensor], options: ParsedOptions, session: torch_text.Session
) -> imatrix.Imatrix:
    """The statistics of `calibrate` for the inputs of these tensors, on the text of the options."""
    assert options.text is not None
    sums = _SquareSumsOf({t.name for t in tensors})
    n_chunks = gather_for(model, options, sums, session)
    return imatrix.Imatrix(
        path=Path(options.text),
        entries=sums.entries(),
        datasets=[options.text],
        chunk_count=n_chunks,
        chunk_size=options.n_ctx,
    )


def loss_curves(
    model: Model, tensors: Sequence[Tensor], options: ParsedOptions, grid: Sequence[Fraction], output: AtomicOutput
) -> dict[str, list[float]]:
    """For each tensor, the rise of the loss on the text if only this tensor has the sparsities of the grid.

    methods.refitted() prunes each tensor with the inputs of the dense model. The loss is measured once, at the sparsity
    of the options, and assumed proportional to the error of the outputs. output: place for a copy of the model, which
    is not committed. The sparsity of the options is one of the grid.
    """
    out: dict[str, list[float]] = {}
    todo = passes(tensors, dataclasses.replace(options, sequential=False))
    session = torch_text.Session(options)
    begin = time.monotonic()
    with (
        contextlib.closing(session.losses(model.path, N_LOSS_CHUNKS) or _Losses(model, options, output)) as of,
        console.progress("measuring losses", sum(t.n_elements for t in tensors), "weights") as advance,
    ):
        for group in todo:
            found = hessians_for(group, options)
            gather_for(model.path, options, found, session)
            for t in group:
                bits, errors = methods.refitted(t, found, options.damping, grid, options.sparsity)
                at_mean = errors[options.sparsity]
                rise = max(of.with_weights(t, bits) - of.dense, 0.0)
                out[t.name] = [rise * error / at_mean if at_mean else 0.0 for error in errors.values()]
                console.detail(f"{t.name:36s} - loss +{rise:.5f}, relative output error {at_mean:.5f}")
                advance(t.n_elements)
    console.detail(f"measured losses in {time.monotonic() - begin:.1f} s")
    return out


class _Losses:
    """The loss of a model on a few chunks of the calibration text, also with changed weights in one tensor of a copy,
    which llama.cpp evaluates.
    """

    def __init__(self, model: Model, options: ParsedOptions, output: AtomicOutput) -> None:
        assert options.text is not None
        self._options = options
        self._path = output.partial
        write_copy(model, output)
        self._copy = TensorFile(self._path)
        with TextModel.opened_with(
            self._path, options.text, options.n_ctx, options.n_chunks, evenly=True, n_threads=options.n_threads
        ) as (llama, chunks):
            self._chunks = spread(chunks, N_LOSS_CHUNKS)
            self.dense = likelihood.estimate(llama, self._chunks).nll

    def with_weights(self, t: Tensor, bits: Bits) -> float:
        """The mean negative log-likelihood if the tensor has these weights. The text is not tokenized again."""
        self._copy.write(t, bits)
        with TextModel(self._path, self._options.n_ctx, n_threads=self._options.n_threads) as llama:
            found = likelihood.estimate(llama, self._chunks).nll
        self._copy.restore([t])
        return found

    def close(self) -> None:
        self._copy.close()


def hessians_for(
    group: Sequence[Tensor], options: ParsedOptions, dense: hessians.DenseInputs | None = None
) -> hessians.Hessians:
    """Empty Hessians for the inputs of a group of tensors."""
    xp = None if options.device == "none" else array_backend.gpu()
    share = 1.0 if options.asymmetric is None else options.asymmetric
    return hessians.Hessians({t.name for t in group}, xp or np, dense, share)


# ---- passes ----


def passes(tensors: Sequence[Tensor], options: ParsedOptions) -> list[list[Tensor]]:
    """The tensors of each pass over the text: one block in a sequential run; otherwise as many tensors (at least one)
    as have Hessians within options.hessian_memory and the GPU's memory.
    """
    limit = min(options.hessian_memory, torch_text.free_memory(options))
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
            if not out or used + need > limit:
                out.append([])
                used = 0
            out[-1].append(t)
            used += need
    return out


class _AllFound(Exception):
    """Ends an evaluation whose remaining products are not needed."""


class InputGroups:
    """A Consumer that groups weights with the same input, in the order of the model. Raises _AllFound at the last."""

    def __init__(self, names: set[str]) -> None:
        self.groups: list[list[str]] = []
        self._left = set(names)
        self._last: FloatArray | None = None

    def wants(self, name: str) -> bool:
        return name in self._left

    def take(self, weight: Weight, index: int, x: FloatArray) -> None:
        if weight.name not in self._left:  # its first matrix decides
            return
        self._left.remove(weight.name)
        if self._last is None or not np.array_equal(x, self._last):
            self.groups.append([])
            self._last = np.array(x)
        self.groups[-1].append(weight.name)
        if not self._left:
            raise _AllFound


def passes_by_input(model: Path, tensors: Sequence[Tensor], options: ParsedOptions) -> list[list[Tensor]]:
    """The tensors of each pass for one input, in the order of the model. The last pass has tensors without products."""
    by_name = {t.name: t for t in tensors}
    found = InputGroups(set(by_name))
    with contextlib.suppress(_AllFound):
        gather(model, options, found, n_chunks=1)
    groups = [[by_name.pop(name) for name in names] for names in found.groups]
    return groups + ([list(by_name.values())] if by_name else [])


def prune_in_passes(
    model: Model,
    tensors: Sequence[Tensor],
    quotas: Quotas,
    options: ParsedOptions,
    copy: WorkingCopy,
    pool: ThreadPoolExecutor,
) -> int:
    """Prunes these tensors in the working copy. Returns the number of chunks of the text."""
    by_input = options.asymmetric is not None
    todo = passes_by_input(model.path, tensors, options) if by_input else passes(tensors, options)
    order = [t for group in todo for t in group]
    todo = _without(todo, copy.n_done)
    n_weights = sum(t.n_elements for t in order)
    done = sum(t.n_elements for t in order[: copy.n_done])
    depends = options.sequential or by_input  # statistics come from the copy
    if todo and depends:
        copy.tensors.restore(todo[0])
    session = torch_text.Session(options)
    begin = time.monotonic()
    seconds_of_text = 0.0
    with console.progress("pruning", n_weights, "weights", done) as advance:
        for i, group in enumerate(todo):
            console.detail(f"pass {i + 1}/{len(todo)} over {options.text}: {group[0].name} ... {group[-1].name}")
            begin_of_pass = time.monotonic()
            pruner, n_chunks = _statistics_and_pruner(model, group, quotas, options, copy, session, pool)
            seconds_of_text += time.monotonic() - begin_of_pass
            for t in group:
                bits = methods.read_finite(t)
                pruner(bits, t)
                copy.tensors.write(t, bits)
                session.renew(copy.path, t, bits)
                if not depends:
                    copy.count(1, n_chunks)
                advance(t.n_elements)
            if depends:
                copy.count(len(group), n_chunks)
    console.detail(f"pruned in {time.monotonic() - begin:.1f} s, {seconds_of_text:.1f} s of them for the text")
    return copy.n_chunks


def _without(groups: list[list[Tensor]], n: int) -> list[list[Tensor]]:
    """The groups without the first n tensors."""
    out = []
    for group in groups:
        if len(group) > n:
            out.append(group[n:])
        n = max(0, n - len(group))
    return out


def _statistics_and_pruner(
    model: Model,
    group: list[Tensor],
    quotas: Quotas,
    options: ParsedOptions,
    copy: WorkingCopy,
    session: torch_text.Session,
    pool: ThreadPoolExecutor,
) -> tuple[methods.Pruner, int]:
    """Runs the pass over the text for a group of tensors. Returns their pruner and the number of chunks."""
    source = copy.path if options.sequential else model.path
    if not options.needs_hessians:
        statistics = statistics_of_text(source, group, options, session)
        for t in group:
            warn_of_unused(t, statistics.of(t).n_unused)
        return methods.by_scores(methods.Scorer(statistics), options, quotas, pool), statistics.chunk_count
    if options.asymmetric is None:
        found = hessians_for(group, options)
        n_chunks = gather_for(source, options, found, session)
    else:
        dense = hessians.DenseInputs(group[0].name)
        found = hessians_for(group, options, dense)
        n_chunks = gather_pairs(model.path, dense, copy.path, found, options, session, until=group[-1].name)
    for t in group:
        warn_of_unused(t, found.n_unused(t.name, allocation.n_matrices(t)))
    return methods.by_hessians(found, options, quotas, pool), n_chunks


def warn_of_unused(t: Tensor, n_unused: int) -> None:
    """n_unused: experts that no token of the text was routed to."""
    if n_unused:
        n = allocation.n_matrices(t)
        console.log(f"warning: {t.name}: {n_unused} of {n} experts got no token: magnitude decides")


def gather_pairs(
    model: Path,
    dense: Consumer,
    copy: Path,
    pruned: Consumer,
    options: ParsedOptions,
    session: torch_text.Session,
    *,
    until: str,
) -> int:
    """Evaluates each chunk of the text with the dense and then the pruned model, up to the weight `until`, the last
    that the consumers want.

    Returns the number of chunks.
    """
    assert options.text is not None
    n_chunks = session.gather([torch_text.Reader(model, dense), torch_text.Reader(copy, pruned)])
    if n_chunks is not None:
        return n_chunks
    settings: dict[str, Any] = {"n_batch": options.n_ctx, "n_threads": options.n_threads}
    with (
        TextModel.opened_with(
            model, options.text, options.n_ctx, options.n_chunks, evenly=True, consumer=dense, until=until, **settings
        ) as (first, chunks),
        TextModel(copy, options.n_ctx, consumer=pruned, until=until, **settings) as second,
    ):
        for _, batch in first.batches(chunks):
            first.evaluate(batch)
            second.evaluate(batch)
    return len(chunks)
