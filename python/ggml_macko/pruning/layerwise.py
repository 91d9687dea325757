"""Pruning tensor by tensor: by scores in place, or with a calibration text in passes over a working copy of the model.

A pass runs the text through the model, gathers statistics of the inputs of some tensors, and prunes these. In memory
are one tensor and the statistics of one pass. A sequential run takes the statistics of each transformer block from the
copy in which the blocks before it are pruned already; else they are all those of the dense model.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Callable

import numpy as np

from .. import console, errors
from ..evaluation import calibrate
from ..evaluation.text_model import TextModel
from ..gguf import imatrix
from ..gguf.files import AtomicOutput, Model, NewTensor, Tensor, Writer, type_name
from ..native import bindings
from ..pruning import allocation, hessians, masks, sparsegpt
from ..pruning import array_backend as arrays

if TYPE_CHECKING:
    from ..pruning.prune import Options

BLOCK_ELEMENTS = 1 << 21  # weights that are scored and sorted at a time

Pruner = Callable[[np.ndarray, Tensor], None]  # changes the bit patterns (rows, cols) of a tensor in place


def read_finite(t: Tensor) -> np.ndarray:
    """Bit patterns (rows, cols)."""
    bits = t.read_bits()
    n = bindings.count_dense(bits, t.type).n_nonfinite
    if n:
        raise errors.error(errors.NOT_FINITE, f"{t.shard.path}: {t.name}: {n} values are not finite")
    return bits


# ---- by scores ----


class Scorer:
    """Scores of the weights of a tensor: Wanda's with the statistics of its inputs, magnitudes without."""

    def __init__(self, statistics: imatrix.Imatrix | None = None):
        self._statistics = statistics

    def sums(self, t: Tensor) -> list:
        """Of each matrix, the sum of squares of each input; None: magnitude decides, as for an expert never used."""
        if self._statistics is None:
            return [None] * allocation.n_matrices(t)
        found = self._statistics.of(t)
        return [s if count else None for s, count in zip(found.sums.astype(np.float32), found.counts)]

    @staticmethod
    def score(bits: np.ndarray, type_id: int, sums: np.ndarray | None) -> np.ndarray:
        return masks.magnitude(bits, type_id) if sums is None else masks.wanda(bits, type_id, sums)

    def blocks(self, t: Tensor) -> Iterator[tuple]:
        """allocation.Scores"""
        bits = read_finite(t)
        rows = t.ne[1]
        step = max(1, BLOCK_ELEMENTS // t.cols)
        for i, sums in enumerate(self.sums(t)):
            for begin in range(0, rows, step):
                yield i, self.score(bits[i * rows + begin : i * rows + min(begin + step, rows)], t.type, sums)


def by_scores(scorer: Scorer, options: Options, quotas: allocation.Quotas, pool: ThreadPoolExecutor) -> Pruner:
    """Zeroes the weights with the lowest scores."""

    def prune(bits: np.ndarray, t: Tensor) -> None:
        rows = t.ne[1]
        step = rows if options.per != "row" and options.pattern is None else max(1, BLOCK_ELEMENTS // t.cols)
        quota = [masks.spread(int(k), rows) for k in quotas[t.name]]
        sums = scorer.sums(t)

        def prune_rows(at: tuple) -> None:
            i, begin = at
            end = min(begin + step, rows)
            block = bits[i * rows + begin : i * rows + end]
            scores = scorer.score(block, t.type, sums[i])
            if options.pattern is not None:
                mask = masks.lowest_in_groups(scores, *options.pattern)
            elif options.per == "row":
                mask = masks.lowest(scores, quota[i][begin:end])
            else:
                mask = masks.lowest_per_row(scores.reshape(1, -1), int(quotas[t.name][i])).reshape(block.shape)
            block[mask] = 0

        list(pool.map(prune_rows, [(i, b) for i in range(len(quota)) for b in range(0, rows, step)]))

    return prune


# ---- by second moments ----


def by_second_moments(found: hessians.Hessians, options: Options, quotas: allocation.Quotas) -> Pruner:
    """SparseGPT on each matrix; logs the error of the outputs on the calibration text, relative to their energy."""

    def prune(bits: np.ndarray, t: Tensor) -> None:
        rows = t.ne[1]
        lost = total = 0.0
        for i, n_zeros in enumerate(quotas[t.name]):
            part = bits[i * rows : (i + 1) * rows]
            h = found.xp.asarray(found.get(t.name, i, t.cols))
            before = found.xp.asarray(masks.to_float32(part, t.type))
            w = before.copy()
            sparsegpt.prune_matrix(
                w, found.inverse_factor(t.name, i, t.cols, options.damping), int(n_zeros), options.pattern
            )
            part[:] = masks.from_float32(arrays.to_host(w), t.type)
            if bindings.count_dense(part, t.type).n_nonfinite:
                raise errors.error(
                    errors.NOT_FINITE, f"{t.name}: a changed weight does not fit into {type_name(t.type)}"
                )
            lost += sparsegpt.energy(before - found.xp.asarray(masks.to_float32(part, t.type)), h)
            total += sparsegpt.energy(before, h)
        console.log(f"{t.name:36s} - relative output error {lost / total if total else 0.0:.5f}")

    return prune


# ---- passes over a text ----


def gather(model: Path, options: Options, consumer: object) -> int:
    """Runs the text through the model; the number of chunks."""
    with TextModel(
        model, options.n_ctx, n_batch=options.n_ctx, n_threads=options.n_threads, consumer=consumer
    ) as llama:
        chunks = llama.read_chunks(options.text, options.n_chunks)
        for _, batch in llama.batches(chunks):
            llama.evaluate(batch)
    return len(chunks)


class _SquareSumsOf(calibrate.SquareSums):
    """Of some weights."""

    def __init__(self, names: set):
        super().__init__()
        self._names = names

    def wants(self, name: str) -> bool:
        return name in self._names


def statistics_of_text(model: Path, tensors: list, options: Options) -> imatrix.Imatrix:
    sums = _SquareSumsOf({t.name for t in tensors})
    n_chunks = gather(model, options, sums)
    return imatrix.Imatrix(Path(options.text), sums.entries(), [options.text], n_chunks, options.n_ctx)


def passes(tensors: list, options: Options) -> list:
    """Lists of tensors whose statistics are taken together: block by block in a sequential run, else as many as have
    room for their second moments.
    """
    by_block: dict = {}
    for t in sorted(tensors, key=lambda t: allocation.block_of(t.name)):
        by_block.setdefault(allocation.block_of(t.name), []).append(t)
    if options.sequential:
        return list(by_block.values())
    out: list = []
    used = 0
    for block in by_block.values():
        for t in block:
            need = hessians.nbytes(t)
            if not out or used + need > options.hessian_memory:
                out.append([])
                used = 0
            out[-1].append(t)
            used += need
    return out


def prune_with_text(
    model: Model, tensors: list, quotas: allocation.Quotas, options: Options, path: Path, pool: ThreadPoolExecutor
) -> int:
    """Makes path, a copy of the model, and prunes it in place. Returns the number of chunks."""
    copy_model(model, path)
    with Model(path) as copy:
        place = {t.name: t.offset for t in copy.tensors}
    n_chunks = 0
    todo = passes(tensors, options)
    with open(path, "r+b") as f:
        for i, group in enumerate(todo):
            console.log(f"pass {i + 1}/{len(todo)} over {options.text}: {group[0].name} ... {group[-1].name}")
            source = path if options.sequential else model.path
            if options.method == "wanda":
                found = statistics_of_text(source, group, options)
                n_chunks = found.chunk_count
                prune = by_scores(Scorer(found), options, quotas, pool)
            else:
                xp = None if options.device == "none" else arrays.gpu()
                moments = hessians.Hessians({t.name for t in group}, xp or np)
                n_chunks = gather(source, options, moments)
                prune = by_second_moments(moments, options, quotas)
            for t in group:
                bits = read_finite(t)
                prune(bits, t)
                f.seek(place[t.name])
                f.write(bits)
            f.flush()
    return n_chunks


def copy_model(model: Model, path: Path) -> None:
    """One dense file of all parts."""
    with AtomicOutput(path, model.paths) as output:
        tensors = [NewTensor(t.name, t.type, t.ne, t.nbytes) for t in model.tensors]
        writer = Writer(output, model.keys, tensors, model.alignment)
        for t in model.tensors:
            writer.write(t.blocks())
        writer.finish()
        output.seal()
        output.commit()
