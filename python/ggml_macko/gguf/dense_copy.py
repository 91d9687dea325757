"""Temporary copies of a model, and the F16 copy of a quantized one for code that reads F16, BF16 and F32 weights."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import numpy as np

from .. import console, errors
from ..codecs import ggml_quants
from ..values import TYPE_F16, TYPE_NAMES, Array, from_float
from .files import Model, Tensor, make_key, type_name
from .outputs import AtomicOutput
from .writer import NewTensor, Writer

_PIECE = 1 << 24  # values that are dequantized at a time
_FILE_TYPE, _MOSTLY_F16 = "general.file_type", 1  # of enum llama_ftype
_LARGEST = float(np.finfo(np.float16).max)


def is_quantized(t: Tensor) -> bool:
    """Whether a tensor has blocks of a quantized ggml type that dequantized() can read."""
    return t.type not in TYPE_NAMES and ggml_quants.can_dequantize(t.type)


@contextlib.contextmanager
def temporary_copy(
    model: Model, near: str | os.PathLike[str] | None, suffix: str, write: Callable[[AtomicOutput], None]
) -> Iterator[Path]:
    """A changed copy of the model, which is removed with the context.

    near: the output; the copy is in its folder, and the next run with the same copy removes the file of a killed run.
    None: the copy is in the system's temporary folder. suffix: distinguishes copies near the same output. write: writes
    and seals the copy. The copy has the time of the source, so that interrupted runs find it unchanged. Raises
    MackoError or OSError.
    """
    name = Path(tempfile.gettempdir(), f"macko-{os.getpid()}") if near is None else Path(near)
    with AtomicOutput(name.with_name(f"{name.name}.{suffix}"), model.paths, force=True) as output:
        write(output)  # never committed
        modified = model.shards[0].opened.st_mtime_ns
        os.utime(output.partial, ns=(modified, modified))
        yield output.partial


@contextlib.contextmanager
def dequantized(source: str | os.PathLike[str], near: str | os.PathLike[str] | None) -> Iterator[Path]:
    """A model without quantized tensors: the source itself, or a temporary_copy() in which they are F16.

    Logs the size of the copy. Raises MackoError or OSError.
    """
    with contextlib.ExitStack() as stack:
        path = Path(source)
        with Model(source) as model:
            quantized = [t for t in model.tensors if is_quantized(t)]
            if quantized:
                names = {t.name for t in quantized}
                copy = temporary_copy(model, near, "f16", lambda output: _write_f16(model, names, output))
                path = stack.enter_context(copy)
                types = ", ".join(sorted({type_name(t.type) for t in quantized}))
                console.log(
                    f"note: {model.path}: {len(quantized)} quantized tensors ({types}) are dequantized to f16, "
                    f"{console.size(model.nbytes)} -> {console.size(path.stat().st_size)}: the result keeps the errors "
                    "of their quantization; the F16 or BF16 model is a better source"
                )
        yield path


def _write_f16(model: Model, names: set[str], output: AtomicOutput) -> None:
    keys = [k for k in model.keys if k.name not in (_FILE_TYPE, "general.quantization_version")]
    stored = {t.name: (TYPE_F16, 2 * t.n_elements) if t.name in names else (t.type, t.nbytes) for t in model.tensors}
    tensors = [NewTensor(t.name, stored[t.name][0], t.ne, stored[t.name][1]) for t in model.tensors]
    writer = Writer(output, [*keys, make_key(_FILE_TYPE, "u32", _MOSTLY_F16)], tensors, model.alignment)
    for t in console.tracked(model.tensors, "dequantizing", lambda t: t.nbytes, "B"):
        writer.write(_as_f16(t) if t.name in names else t.blocks())
    writer.finish()
    model.check_unchanged()
    output.seal()


def _as_f16(t: Tensor) -> Iterator[Array]:
    """Bit patterns of the values, rounded to nearest, in pieces of some rows."""
    row_nbytes = t.nbytes // t.rows
    step = max(1, _PIECE // t.cols)
    for begin in range(0, t.rows, step):
        n = min(step, t.rows - begin)
        values = ggml_quants.dequantize(t.shard.read(t.offset + begin * row_nbytes, n * row_nbytes), t.type, n, t.cols)
        if not np.abs(values).max() <= _LARGEST:
            raise errors.error(
                errors.NOT_FINITE, f"{t.shard.path}: {t.name}: values beyond f16, up to {np.abs(values).max():g}"
            )
        yield from_float(values, TYPE_F16)
