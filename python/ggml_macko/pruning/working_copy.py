"""The file in which a model is pruned tensor by tensor; a run continues from it after an interruption.

A GGUF like the model, whose first metadata count the finished tensors. The count is updated after the data are on disk,
so a killed run has pruned at least as many tensors as the file counts; the others are restored before the run
continues.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from .. import console, errors
from ..gguf.files import Key, Model, Tensor, make_key
from ..gguf.outputs import AtomicOutput
from ..gguf.writer import NewTensor, Writer
from ..pruning.masks import Bits
from ..regular_files import named, write_at

_DONE, _CHUNKS, _RUN = "macko.prune.done", "macko.prune.chunks_done", "macko.prune.run."
_FIRST_KEY = 24  # offset of the first metadata entry in a GGUF


def write_copy(model: Model, output: AtomicOutput, keys: Iterable[Key] = ()) -> None:
    """Writes a model, of one file or several, into one file, and seals it. keys: more metadata, in front."""
    tensors = [NewTensor(t.name, t.type, t.ne, t.nbytes) for t in model.tensors]
    writer = Writer(output, [*keys, *model.keys], tensors, model.alignment)
    for t in model.tensors:
        writer.write(t.blocks())
    writer.finish()
    output.seal()


class TensorFile:
    """A GGUF of a model whose tensors are overwritten in place. Close it after use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with Model(path) as copy:
            self._offset = {t.name: t.offset for t in copy.tensors}
        with named(path):
            self.file = io.FileIO(path, "r+")

    def close(self) -> None:
        self.file.close()

    def write(self, t: Tensor, bits: Bits) -> None:
        """Writes the bit patterns of a tensor."""
        with named(self.path):
            write_at(self.file, self._offset[t.name], bits.data.cast("B"))

    def restore(self, tensors: Iterable[Tensor]) -> None:
        """Writes the weights that these tensors have in the model."""
        for t in tensors:
            self.write(t, t.read_bits())


class WorkingCopy:
    """The working copy of a model at `path`: a new one, or the existing one of the same run.

    run: name -> value of everything that the result depends on, for errors. Raises MackoError for a file of another
    run, or OSError. Leaving the block removes the file, unless an exception ends a run that has pruned a tensor.
    """

    def __init__(self, model: Model, path: Path, run: Mapping[str, str]) -> None:
        self.path = path
        self._model = model
        self._run = {what: hashlib.sha256(value.encode()).hexdigest() for what, value in run.items()}
        self.n_done = 0  # tensors, in the order of the run
        self.n_chunks = 0  # of the text, in the passes so far
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> WorkingCopy:
        if self.path.exists():
            self._load()
            console.log(f"{self.path}: continuing after {self.n_done} tensors")
        else:
            self._make()
        with Model(self.path) as copy:
            done, chunks = copy.keys[:2]
            self._n_done_at = _FIRST_KEY + done.value_at
            self._n_chunks_at = _FIRST_KEY + len(done.record) + chunks.value_at
        self.tensors = self._stack.enter_context(contextlib.closing(TensorFile(self.path)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        self._stack.close()
        if self.n_done and kind is not None:
            console.log(f"{self.path}: {self.n_done} tensors are pruned; the same command continues")
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def _make(self) -> None:
        counts = [make_key(_DONE, "u32", 0), make_key(_CHUNKS, "u32", 0)]
        keys = counts + [make_key(_RUN + what, "str", digest) for what, digest in self._run.items()]
        with AtomicOutput(self.path, self._model.paths) as output:
            write_copy(self._model, output, keys)
            output.commit()

    def _load(self) -> None:
        with Model(self.path) as copy:
            found = {key.name: key.value() for key in copy.keys if key.name.startswith("macko.prune.")}
            tensors = [(t.name, t.type, t.ne) for t in copy.tensors]
            is_one = [(key.name, type(key.value())) for key in copy.keys[:2]] == [(_DONE, int), (_CHUNKS, int)]
        differs = [what for what, digest in self._run.items() if found.get(_RUN + what) != digest]
        if not differs and (not is_one or tensors != [(t.name, t.type, t.ne) for t in self._model.tensors]):
            differs = ["model"]
        if differs:
            raise errors.bad_argument(f"{self.path}: is from a run with another {differs[0]}; delete it to start anew")
        self.n_done, self.n_chunks = found[_DONE], found[_CHUNKS]

    def count(self, n_tensors: int, n_chunks: int) -> None:
        """Records that n_tensors more are finished, after n_chunks chunks of the text. All data are durable then."""
        file = self.tensors.file
        with named(self.path):
            os.fsync(file.fileno())
            self.n_done, self.n_chunks = self.n_done + n_tensors, n_chunks
            write_at(file, self._n_chunks_at, memoryview(struct.pack("<I", n_chunks)))
            write_at(file, self._n_done_at, memoryview(struct.pack("<I", self.n_done)))
            os.fsync(file.fileno())
