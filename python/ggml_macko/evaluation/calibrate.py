"""Measures what goes into a model's weights: `macko calibrate -m MODEL -f TEXT -o imatrix.gguf`.

Runs the text through the model and sums the squares of each weight's input columns, as llama-imatrix does and in its
file format; the sums are kept in float64, so they do not depend on how the text is cut into evaluations. Every few
chunks, and when it is interrupted, a run leaves OUT.checkpoint, with which the same command goes on to the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import struct
import time
from pathlib import Path

import numpy as np

from .. import console, errors
from ..evaluation import text_model
from ..evaluation.activations import MIN_ROWS, Weight, signals_held
from ..gguf import imatrix
from ..gguf.files import AtomicOutput, Model, make_key

HELP = "measure activation statistics of a model on a text"

_LOG_SECONDS = 10.0


class SquareSums:
    """activations.Consumer that sums squares: all that memory holds is one float64 per input column and expert."""

    def __init__(self, process_output: bool = False):
        self.sums: dict[str, np.ndarray] = {}  # (n_mat, cols)
        self.counts: dict[str, np.ndarray] = {}  # int64: one per expert, or one
        self._process_output = process_output

    def wants(self, name: str) -> bool:
        return name.startswith("blk.") or (self._process_output and name == "output.weight")

    def take(self, weight: Weight, index: int, x: np.ndarray) -> None:
        if weight.name not in self.sums:
            self.sums[weight.name] = np.zeros((weight.n_mat, weight.cols))
            self.counts[weight.name] = np.zeros(weight.n_mat if weight.routed else 1, dtype=np.int64)
        sums = self.sums[weight.name][index]
        sums += np.einsum("ij,ij->j", x, x, dtype=np.float64)
        if not np.isfinite(sums).all():
            column = int(np.argmin(np.isfinite(sums)))
            raise errors.error(errors.NOT_FINITE, f"{weight.name}: an input of column {column} is not finite")
        if weight.routed:
            self.counts[weight.name][index] += len(x)
        elif index == 0:  # llama-imatrix keeps one count for all matrices of such a tensor: they get equally many rows
            self.counts[weight.name][0] += len(x)

    def entries(self) -> dict:
        """As imatrix.Imatrix keeps them."""
        return {n: imatrix.Statistics(s.astype(np.float32), self.counts[n]) for n, s in self.sums.items()}


# ---- checkpoint ----

_KEY = "calibrate."


class Checkpoint:
    """The sums of an interrupted run, exact (float64), and what they were made of."""

    def __init__(self, output: Path, model_path: str, settings: dict):
        self.path = output.with_name(output.name + ".checkpoint")
        self._run = {"model": _model_digest(model_path), **{k: str(v) for k, v in settings.items()}}

    def save(self, sums: SquareSums, chunks: np.ndarray) -> None:
        """chunks: those that are done."""
        keys = [make_key(_KEY + k, "str", v) for k, v in self._run.items()]
        keys += [
            make_key(_KEY + "chunks", "u32", len(chunks)),
            make_key(_KEY + "text", "str", _digest(chunks.tobytes())),
        ]
        arrays = {name + imatrix.SUMS: s for name, s in sums.sums.items()}
        arrays.update({name + imatrix.COUNTS: c for name, c in sums.counts.items()})
        with AtomicOutput(self.path, [], force=True) as output:
            imatrix.write_arrays(arrays, keys, output)
            output.seal()
            output.commit()

    def load(self, sums: SquareSums, chunks: np.ndarray) -> int:
        """How many chunks are done already; their sums are put into `sums`. 0 if there is no checkpoint."""
        if not self.path.exists():
            return 0
        with Model(self.path) as file:
            found = {k.name[len(_KEY) :]: k.value() for k in file.keys if k.name.startswith(_KEY)}
            done = int(found.get("chunks", 0))
            differs = [what for what, value in self._run.items() if found.get(what) != value]
            if not differs and not 0 < done <= len(chunks):
                differs = ["--chunks"]
            if not differs and found.get("text") != _digest(chunks[:done].tobytes()):
                differs = ["text"]
            if differs:
                raise errors.error(
                    errors.BAD_ARGUMENT,
                    f"{self.path}: is from a run with another {differs[0]}; delete it to start anew",
                )
            tensors = {t.name: t for t in file.tensors}
            for name, t in tensors.items():
                if name.endswith(imatrix.SUMS):
                    weight = name[: -len(imatrix.SUMS)]
                    sums.sums[weight] = t.read().view(np.float64).reshape(t.rows, t.cols)
                    sums.counts[weight] = tensors[weight + imatrix.COUNTS].read().view(np.int64)
        return done

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _model_digest(path: str) -> str:
    """Of everything about the model but its weights' values, and when and how large they were written."""
    with Model(path) as model:
        digest = hashlib.sha256()
        for shard in model.shards:
            digest.update(struct.pack("<qq", shard.opened.st_size, shard.opened.st_mtime_ns))
            for key in shard.keys:
                digest.update(key.record)
        return digest.hexdigest()


# ---- command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a text through a GGUF model, dense or sparse, and writes an imatrix file: for each weight the sum of "
        "squares of each input column. It is what `macko prune --imatrix` and llama-quantize --imatrix need, and equal "
        "to what llama-imatrix writes. An interrupted run leaves OUT.checkpoint; the same command continues from there."
    )
    text_model.add_arguments(parser, n_batch=512)
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


def run(args: argparse.Namespace) -> int:
    if args.ctx_size < MIN_ROWS:
        raise errors.error(errors.BAD_ARGUMENT, f"-c {args.ctx_size}: at least {MIN_ROWS}")
    if args.chunks == 0 or args.output_frequency < 1:
        raise errors.error(errors.BAD_ARGUMENT, "--chunks 0 measures nothing, --output-frequency must be at least 1")
    sums = SquareSums(args.process_output)
    with (
        AtomicOutput(args.output, [args.model, args.file], args.force) as output,
        text_model.open_model(args, consumer=sums) as model,
    ):
        chunks = model.read_chunks(args.file, args.chunks)
        settings = {
            "-c": args.ctx_size,
            "-b": args.batch_size,
            "-ub": args.ubatch_size,
            "--process-output": args.process_output,
        }
        checkpoint = Checkpoint(output.path, args.model, settings)
        done = checkpoint.load(sums, chunks)
        if done:
            console.log(f"{checkpoint.path}: continuing after {done} of {len(chunks)} chunks")
        measure(model, chunks, sums, done, checkpoint, args.output_frequency)
        found = imatrix.Imatrix(output.path, sums.entries(), [args.file], len(chunks), args.ctx_size)
        imatrix.write(found, output)
        output.seal()
        check_written(found, output)
        output.commit()
        checkpoint.remove()
    report(found)
    return 0


def measure(
    model: text_model.TextModel, chunks: np.ndarray, sums: SquareSums, done: int, checkpoint: Checkpoint, every: int
) -> None:
    begin = said = time.monotonic()
    start, saved = done, done
    try:
        for i, batch in model.batches(chunks, start):
            with signals_held():  # so that `done` is what the sums hold
                model.evaluate(batch)
                done = i + len(batch)
            if done - saved >= every and done < len(chunks):
                checkpoint.save(sums, chunks[:done])
                saved = done
            now = time.monotonic()
            if i == start or now - said >= _LOG_SECONDS or done == len(chunks):
                said = now
                console.log(console.eta(done, len(chunks), now - begin, done - start))
    except (KeyboardInterrupt, SystemExit):
        if done > saved:
            checkpoint.save(sums, chunks[:done])
        if done:
            console.log(f"{checkpoint.path}: {done} of {len(chunks)} chunks are done; the same command continues")
        raise


def check_written(found: imatrix.Imatrix, output: AtomicOutput) -> None:
    """Reads the sealed file back: it passes every check and holds what was measured."""
    written = imatrix.read(output.partial)
    for name, s in found.entries.items():
        other = written.entries.get(name)
        if (
            other is None
            or not np.array_equal(other.sums.ravel(), s.sums.ravel())
            or other.counts.tolist() != s.counts.tolist()
        ):
            raise errors.error(errors.FILE_CHANGED, f"{output.path}: {name}: what was written is not what was meant")


def report(found: imatrix.Imatrix) -> None:
    for name, s in sorted(found.entries.items()):
        if s.n_unused:
            console.log(f"warning: {name}: {s.n_unused} of {len(s.counts)} experts got no token")
    print(f"{found.path}: {len(found.entries)} weights, {found.chunk_count} chunks of {found.chunk_size} tokens")
