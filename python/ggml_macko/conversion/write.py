"""Writes and checks a converted or restored model, in the second pass over the model."""

from __future__ import annotations

from collections.abc import Sequence

from .. import console, errors
from ..codecs.codec import Source
from ..gguf.files import Model, type_name
from ..gguf.outputs import AtomicOutput
from ..gguf.writer import Writer
from ..native.codec import EncodedMatrix
from ..values import Array
from .tensor_plan import (
    Options,
    QuantizedDense,
    Spool,
    StoredSparse,
    TensorPlan,
    new_tensors,
    read_weights,
    sparse_keys,
)
from .verify import Comparison, QuantizationError


def write_model(
    model: Model, plans: Sequence[TensorPlan], output: AtomicOutput, options: Options, spool: Spool
) -> None:
    """Writes the file into an open output, which the caller seals."""
    writer = Writer(output, [*model.keys, *sparse_keys(plans)], new_tensors(plans), model.alignment)
    for i, p in enumerate(console.tracked(plans, "writing", lambda p: p.tensor.nbytes, "B")):
        t = p.tensor
        if isinstance(p.storage, (QuantizedDense, StoredSparse)):
            arrays = _new_arrays(model, p, p.storage, options, spool)
            for array in arrays:
                writer.write([array])
            nbytes = sum(a.nbytes for a in arrays)
            what = f"converting to {p.type} .. size = {console.size_column(t.nbytes)} -> {console.size_column(nbytes)}"
            what += f" ({p.reason})" if p.reason else ""
        else:
            writer.write(t.blocks())
            what = f"size = {console.size_column(t.nbytes)}" + (f", stays dense: {p.reason}" if p.reason else "")
        console.tensor_line(i + 1, len(plans), t.name, t.ne, type_name(t.type), what)
    writer.finish()
    model.check_unchanged()


def _new_arrays(
    model: Model, p: TensorPlan, storage: QuantizedDense | StoredSparse, options: Options, spool: Spool
) -> Sequence[Array]:
    if isinstance(storage, QuantizedDense):
        return spool.get(storage.spooled_at, [storage.nbytes])
    if storage.spooled_at >= 0:
        return spool.get(storage.spooled_at, [part.nbytes for part in storage.candidate.components])
    try:
        m = encode_as_planned(p, storage, options)
    except errors.MackoError:
        model.check_unchanged()  # if it has changed, that is the error: the tensor is not the one that was counted
        raise
    if storage.candidate.codec.components_of(m) != storage.candidate.components:
        model.check_unchanged()
        raise errors.error(errors.FILE_CHANGED, f"{p.tensor.shard.path}: {p.tensor.name}: changed while it was read")
    return m.arrays


def encode_as_planned(p: TensorPlan, storage: StoredSparse, options: Options) -> EncodedMatrix:
    """The arrays of the plan."""
    t, c = p.tensor, storage.candidate
    assert p.contents is not None
    source = Source(read_weights(t, options)[0], t.type, p.contents.count)
    return c.codec.encode(source, c.index_bits, c.value_type, options.settings)


def check_and_commit(
    model: Model, output: AtomicOutput, n_threads: int = 0, *, exact: bool
) -> tuple[QuantizationError, ...]:
    """Seals the output, reads it back with the C library, compares it with the source, and gives it its name. exact:
    the signs of zeros must be equal. Returns the errors of tensors that were quantized. Raises MackoError if the file
    differs from the source.
    """
    output.seal()
    comparison = Comparison(n_threads, exact, allow_quantized=True)
    try:
        with Model(output.partial) as written:
            difference = comparison.first_difference(model, written)
    except errors.MackoError as e:
        raise errors.error(e.code, str(e).replace(str(output.partial), str(output.path))) from e
    if difference is not None:
        raise errors.error(errors.FILE_CHANGED, f"{output.path}: what was written is not what was read: {difference}")
    output.commit()
    return tuple(comparison.quantized)
