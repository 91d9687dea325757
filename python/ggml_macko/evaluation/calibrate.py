"""Measures the inputs of a model's weights on a text and writes an imatrix file: `calibrate(model, text, output)`.

The file has the sums of squares of each input column of each weight, like a file of llama-imatrix. Sums are float64, so
they do not depend on the size of evaluations. A run writes OUTPUT.checkpoint every few chunks and when it is
interrupted; the same call resumes from it, even with a different number of chunks, and writes the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import console, errors
from ..evaluation.activations import MIN_ROWS, Weight, signals_held
from ..evaluation.text_model import (
    N_CALIBRATION_CHUNKS,
    N_CTX,
    N_UBATCH,
    Chunks,
    EvaluationOptions,
    TextModel,
)  # fmt: skip
from ..gguf import imatrix
from ..gguf.files import Model, make_key, shard_paths
from ..gguf.outputs import AtomicOutput

if TYPE_CHECKING:
    from typing_extensions import Unpack

N_BATCH = 512
"""Tokens per evaluation: the default of llama-imatrix."""

_LOG_SECONDS = 10.0


@dataclass(frozen=True)
class Calibration:
    """The result of `calibrate`."""

    path: Path
    entries: Mapping[str, imatrix.Statistics]  # weight name -> its sums of squares and counts
    n_chunks: int
    n_ctx: int


def calibrate(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    output: str | os.PathLike[str] = "imatrix.gguf",
    *,
    n_ctx: int = N_CTX,
    n_chunks: int = N_CALIBRATION_CHUNKS,
    process_output: bool = False,
    checkpoint_every: int = 10,
    force: bool = False,
    **options: Unpack[EvaluationOptions],
) -> Calibration:
    """Runs a UTF-8 text through a GGUF model, dense or sparse, and writes an imatrix file equal to llama-imatrix's.

    For each input column j of each weight, the file has the sum of x_j^2 over all tokens, and the number of tokens;
    for each expert, over the tokens that were routed to it.

    n_ctx: tokens per chunk, at least 16. n_chunks: largest number of chunks, from the start of the text; -1: all. A
    checkpoint with more chunks is used whole. process_output: also measure output.weight. checkpoint_every: chunks
    between two checkpoints. force: replace output if it exists. options: of EvaluationOptions; n_batch is N_BATCH here.

    Logs its progress. Raises MackoError (a text that is too short or not UTF-8, a model that llama.cpp does not load,
    inputs that are not finite, a checkpoint of another run) or OSError. Any exception leaves a checkpoint.
    """
    if n_ctx < MIN_ROWS:
        raise errors.usage_error(f"-c {n_ctx}: at least {MIN_ROWS}")
    if n_chunks == 0 or checkpoint_every < 1:
        raise errors.usage_error("--chunks 0 measures nothing, --output-frequency must be at least 1")
    sums = SquareSums(process_output)
    inputs: list[str | os.PathLike[str]] = [*shard_paths(model), text]
    run: EvaluationOptions = {"n_batch": N_BATCH, "n_ubatch": N_UBATCH, "n_gpu_layers": -1, **options}
    settings = {"-c": n_ctx, "-b": run["n_batch"], "-ub": run["n_ubatch"], "--process-output": process_output}
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(AtomicOutput(output, inputs, force))
        checkpoint = Checkpoint(opened.path, model, settings, inputs)
        n = -1 if checkpoint.path.exists() else n_chunks  # a checkpoint may have more chunks
        llama, whole = stack.enter_context(TextModel.opened_with(model, text, n_ctx, n, consumer=sums, **run))
        done = checkpoint.load(sums, whole)
        chunks = whole if n_chunks < 0 else whole[: max(n_chunks, done)]
        if done > n_chunks >= 0:
            console.log(f"{checkpoint.path}: {done} chunks are measured already, more than --chunks {n_chunks}")
        elif done:
            console.log(f"{checkpoint.path}: continuing after {done} of {len(chunks)} chunks")
        with checkpoint.kept(len(chunks)):
            _measure(llama, chunks, sums, done, checkpoint, checkpoint_every)
            found = imatrix.Imatrix(
                path=opened.path,
                entries=sums.entries(),
                datasets=[os.fspath(text)],
                chunk_count=len(chunks),
                chunk_size=n_ctx,
            )
            imatrix.write(found, opened)
            opened.seal()
            _check_written(found, opened)
            opened.commit()
        checkpoint.remove()
    return Calibration(path=found.path, entries=found.entries, n_chunks=found.chunk_count, n_ctx=found.chunk_size)


class SquareSums:
    """An activations.Consumer that sums squares, with one float64 per input column and expert."""

    def __init__(self, process_output: bool = False) -> None:
        self.sums: dict[str, npt.NDArray[np.float64]] = {}  # weight name -> (n_mat, cols)
        self.counts: dict[str, npt.NDArray[np.int64]] = {}  # weight name -> tokens: (n_mat,) if routed, else (1,)
        self._process_output = process_output

    def wants(self, name: str) -> bool:
        return name.startswith("blk.") or (self._process_output and name == "output.weight")

    def take(self, weight: Weight, index: int, x: npt.NDArray[np.float32]) -> None:
        """Adds the inputs x (rows, cols) of one matrix. Raises MackoError (NOT_FINITE)."""
        self.add(weight, index, np.einsum("ij,ij->j", x, x, dtype=np.float64), len(x))

    def add(self, weight: Weight, index: int, squares: npt.NDArray[np.float64], n_rows: int) -> None:
        """Adds the sums of squares (cols,) of n_rows inputs of one matrix. Raises MackoError (NOT_FINITE)."""
        if weight.name not in self.sums:
            self.sums[weight.name] = np.zeros((weight.n_mat, weight.cols))
            self.counts[weight.name] = np.zeros(weight.n_mat if weight.routed else 1, dtype=np.int64)
        sums = self.sums[weight.name][index]
        sums += squares
        if not np.isfinite(sums).all():
            column = int(np.argmin(np.isfinite(sums)))
            raise errors.error(errors.NOT_FINITE, f"{weight.name}: an input of column {column} is not finite")
        if weight.routed:
            self.counts[weight.name][index] += n_rows
        elif index == 0:  # all matrices of the tensor get equally many rows, and llama-imatrix writes one count
            self.counts[weight.name][0] += n_rows

    def entries(self) -> dict[str, imatrix.Statistics]:
        """Sums (float32) and counts for imatrix.Imatrix."""
        return {n: imatrix.Statistics(s.astype(np.float32), self.counts[n]) for n, s in self.sums.items()}


# ---- checkpoint ----

_KEY = "calibrate."


class Checkpoint:
    """The sums of an interrupted run, exact (float64), and what they were made of.

    settings: option -> value, as far as they change the sums.
    """

    def __init__(
        self,
        output: Path,
        model_path: str | os.PathLike[str],
        settings: Mapping[str, object],
        inputs: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        """inputs: files that the checkpoint must not replace."""
        self.path = output.with_name(output.name + ".checkpoint")
        self._inputs = inputs
        self._run = {"model": model_digest(model_path), **{k: str(v) for k, v in settings.items()}}
        self.n_chunks = 0  # that the file covers

    def save(self, sums: SquareSums, chunks: Chunks) -> None:
        """Writes the sums over these chunks."""
        keys = [make_key(_KEY + k, "str", v) for k, v in self._run.items()]
        keys += [
            make_key(_KEY + "chunks", "u32", len(chunks)),
            make_key(_KEY + "text", "str", _digest(chunks.tobytes())),
        ]
        arrays: dict[str, npt.NDArray[Any]] = {name + imatrix.SUMS: s for name, s in sums.sums.items()}
        arrays.update({name + imatrix.COUNTS: c for name, c in sums.counts.items()})
        keys.append(make_key(_KEY + "sums", "str", _digest_of((n, a.shape[-1], a) for n, a in arrays.items())))
        with AtomicOutput(self.path, self._inputs, force=True) as output:
            imatrix.write_arrays(arrays, keys, output)
            output.seal()
            output.commit()
        self.n_chunks = len(chunks)

    def load(self, sums: SquareSums, chunks: Chunks) -> int:
        """Puts the sums of the checkpoint into `sums`; returns how many chunks they cover, 0 without a checkpoint.

        chunks: all of the text. Raises MackoError if the checkpoint is damaged or of a run with another model, text or
        setting.
        """
        if not self.path.exists():
            return 0
        with Model(self.path) as file:
            found = {k.name[len(_KEY) :]: k.value() for k in file.keys if k.name.startswith(_KEY)}
            n_chunks = found.get("chunks", 0)
            done = n_chunks if isinstance(n_chunks, int) else 0
            differs = [what for what, value in self._run.items() if found.get(what) != value]
            if not differs and not 0 < done <= len(chunks):
                differs = ["text"]
            if not differs and found.get("text") != _digest(chunks[:done].tobytes()):
                differs = ["text"]
            if differs:
                raise errors.bad_argument(
                    f"{self.path}: is from a run with another {differs[0]}; delete it to start anew"
                )
            if found.get("sums") != _digest_of((t.name, t.cols, t.read()) for t in file.tensors):
                raise errors.error(errors.BAD_FORMAT, f"{self.path}: is damaged; delete it to start anew")
            tensors = {t.name: t for t in file.tensors}
            for name, t in tensors.items():
                if name.endswith(imatrix.SUMS):
                    weight = name[: -len(imatrix.SUMS)]
                    sums.sums[weight] = t.read().view(np.float64).reshape(t.rows, t.cols)
                    sums.counts[weight] = tensors[weight + imatrix.COUNTS].read().view(np.int64)
        self.n_chunks = done
        return done

    @contextlib.contextmanager
    def kept(self, n_chunks: int) -> Iterator[None]:
        """Says after an exception how many of n_chunks the next run need not measure."""
        try:
            yield
        except BaseException:
            if self.n_chunks:
                console.log(f"{self.path}: {self.n_chunks} of {n_chunks} chunks are done; the same command continues")
            raise

    def remove(self) -> None:
        """Deletes the checkpoint, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest_of(arrays: Iterable[tuple[str, int, npt.NDArray[Any]]]) -> str:
    """arrays: name, columns, values."""
    return _digest(repr(sorted((name, cols, _digest(a.tobytes())) for name, cols, a in arrays)).encode())


def model_digest(path: str | os.PathLike[str]) -> str:
    """A digest of the metadata of the model and of the sizes and modification times of its files."""
    with Model(path) as model:
        digest = hashlib.sha256()
        for shard in model.shards:
            digest.update(struct.pack("<qq", shard.opened.st_size, shard.opened.st_mtime_ns))
            for key in shard.keys:
                digest.update(key.record)
        return digest.hexdigest()


# ---- measuring ----


def _measure(
    model: TextModel, chunks: Chunks, sums: SquareSums, start: int, checkpoint: Checkpoint, checkpoint_every: int
) -> None:
    """Adds the chunks from `start` on to the sums, and saves the sums."""
    begin = logged = time.monotonic()
    done = start
    is_whole = True  # the sums belong to `done` chunks
    try:
        for i, batch in model.batches(chunks, start):
            with signals_held():
                is_whole = False
                model.evaluate(batch)
                done = i + len(batch)
                is_whole = True
            if done - checkpoint.n_chunks >= checkpoint_every or done == len(chunks):
                checkpoint.save(sums, chunks[:done])
            now = time.monotonic()
            if not console.shows_progress() and (i == start or now - logged >= _LOG_SECONDS or done == len(chunks)):
                logged = now
                console.log(console.eta(done, len(chunks), now - begin, done - start))
    except BaseException:
        if is_whole and done > checkpoint.n_chunks:
            checkpoint.save(sums, chunks[:done])
        raise


def _check_written(found: imatrix.Imatrix, output: AtomicOutput) -> None:
    """Reads the sealed file. Raises MackoError unless it is valid and equal to the measured sums."""
    written = imatrix.read(output.partial)
    for name, s in found.entries.items():
        other = written.entries.get(name)
        if (
            other is None
            or not np.array_equal(other.sums.ravel(), s.sums.ravel())
            or other.counts.tolist() != s.counts.tolist()
        ):
            raise errors.error(errors.FILE_CHANGED, f"{output.path}: {name}: the file does not hold what was written")
