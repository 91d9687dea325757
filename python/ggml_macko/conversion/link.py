"""Sparse GGUF -> link, for programs that have the plugin only through GGML_BACKEND_PATH (FORMAT.md section 11)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .. import console, errors
from ..gguf.files import Model, Tensor, make_key
from ..gguf.outputs import AtomicOutput
from ..gguf.writer import NewTensor, Writer
from ..native.file import WEIGHT_OTHER, weight_use

TYPE_I8 = 24
"""The type of a hole. Only the plugin multiplies with it."""


@dataclass(frozen=True)
class Link:
    """A link that was written."""

    path: Path
    nbytes: int  # its length
    nbytes_on_disk: int


def _is_hole(t: Tensor) -> bool:
    return t.sparse is not None and weight_use(t.name, len(t.ne)) != WEIGHT_OTHER


def link(source: str | os.PathLike[str], output: str | os.PathLike[str] | None = None, *, force: bool = False) -> Link:
    """Writes a link to a sparse model, with copies of its dense tensors, in the folder of the model.

    output: default is NAME.link.gguf for a model NAME.gguf. force=True replaces an output that exists. Raises
    MackoError if the source is not a sparse model in one file, or the output exists or is in another folder; OSError if
    a file cannot be read or written.
    """
    output = Path(source).with_suffix(".link.gguf") if output is None else Path(output)
    with Model(source) as model:
        if not model.is_sparse:
            raise errors.error(errors.NOT_SPARSE, f"{source}: is not sparse: llama.cpp opens it without a link")
        if len(model.shards) > 1:
            text = f"{source}: is split: merge it first (llama-gguf-split --merge)"
            raise errors.error(errors.SPLIT_FILE, text)
        if not output.absolute().parent.samefile(model.path.absolute().parent):
            raise errors.bad_argument(f"{output}: a link must be in the folder of its model, {model.path.name}")
        with AtomicOutput(output, model.paths, force) as out:
            _write(model, out)
            out.seal()
            out.commit()
        found = out.path.stat()
        return Link(out.path, found.st_size, 512 * found.st_blocks)


def _write(model: Model, output: AtomicOutput) -> None:
    opened = model.shards[0].opened
    keys = [
        make_key("macko.link.file", "str", model.path.name),
        make_key("macko.link.size", "u64", opened.st_size),
        make_key("macko.link.mtime", "u64", opened.st_mtime_ns),
        *model.keys,
    ]
    # llama.cpp unmaps and does not lock what lies behind the last tensor that it uses in the map
    dense = [t for t in model.tensors if not _is_hole(t)]
    holes = [t for t in model.tensors if _is_hole(t)]
    tensors = [NewTensor(t.name, t.type, t.ne, t.nbytes) for t in dense]
    tensors += [NewTensor(t.name, TYPE_I8, t.ne, t.n_elements) for t in holes]
    writer = Writer(output, keys, tensors, model.alignment)
    for t in console.tracked(dense, "writing", lambda t: t.nbytes, "B"):
        writer.write(t.blocks())
    for _ in holes:
        writer.skip()
    writer.finish()
    model.check_unchanged()
