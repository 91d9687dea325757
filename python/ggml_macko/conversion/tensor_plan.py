"""Plans the storage of each tensor of a converted model, in the first of two passes over the model.

One tensor is in memory at a time. The size of some tensors is known only after encoding; their arrays wait in a `Spool`
for the second pass.
"""

from __future__ import annotations

import io
import math
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Union

import numpy as np

from .. import console, errors
from ..codecs import ggml_quants, quantize, registry
from ..codecs.codec import Candidate, Choice, ElementCount, Settings, Source
from ..conversion import bit_allocation
from ..gguf import imatrix, tensor_rules
from ..gguf.files import MAX_NAME, Key, Model, Tensor, make_key, type_name
from ..gguf.writer import NewTensor, align, file_nbytes
from ..native import codec as native_codec
from ..regular_files import named, read_at, write_at
from ..values import Array

MIXED_DENSE_FROM = 0.65
"""Lowest density for which `--target-bpw` tries dense quantized types. Below it, each takes more bytes than the sparse
type with as many bits.
"""

DENSE = "dense"
"""The override that keeps a tensor unchanged."""

_FORMAT_VERSION = 1
"""`macko.version` of the files that convert writes (FORMAT.md section 2)."""


@dataclass(frozen=True)
class Override:
    """The type of the tensors whose names match a pattern."""

    pattern: re.Pattern[str]
    type: str


@dataclass(frozen=True)
class Options:
    """How to convert a model."""

    type: str = registry.AUTO
    overrides: tuple[Override, ...] = ()  # the first match counts, otherwise `type`
    keep_negative_zeros: bool = False  # store -0.0 as a value; otherwise it counts as zero
    settings: Settings = field(default_factory=Settings)
    imatrix: imatrix.Imatrix | None = None  # weights of the errors of quantized values
    dense_types: Mapping[str, str] = field(default_factory=dict)  # tensor -> key of ggml_quants.DENSE_TYPES, or DENSE
    target_bpw: float | None = None  # largest number of bits per weight of the file
    measure: bool = False  # fill in TensorPlan.error

    @property
    def n_threads(self) -> int:
        return self.settings.n_threads

    def asked(self, t: Tensor) -> str | None:
        """The TYPE, or DENSE, that an option gives to a tensor."""
        if self.dense_types.get(t.name) == DENSE:
            return DENSE
        return next((o.type for o in self.overrides if o.pattern.search(t.name)), None)

    def is_fixed(self, t: Tensor) -> bool:
        """Whether target_bpw does not choose the storage of this tensor: an option gives it, or it is embeddings."""
        return self.asked(t) is not None or t.name in self.dense_types or t.name == tensor_rules.EMBEDDING

    def column_weights(self, t: Tensor) -> Array | None:
        return None if self.imatrix is None else self.imatrix.column_weights(t)


# ---- storage of a tensor ----


@dataclass(frozen=True)
class KeptDense:
    """The tensor is copied byte for byte."""


@dataclass(frozen=True)
class QuantizedDense:
    """The tensor stays dense, in a quantized type of ggml."""

    type: int  # ggml type
    nbytes: int
    spooled_at: int


@dataclass(frozen=True)
class StoredSparse:
    """The tensor becomes the arrays of a codec."""

    candidate: Candidate
    spooled_at: int  # -1: encoded in the second pass


Storage = Union[KeptDense, QuantizedDense, StoredSparse]


@dataclass(frozen=True)
class Contents:
    """Counts of a tensor's data."""

    count: ElementCount
    n_negative_zeros: int  # counted as zeros


@dataclass(frozen=True)
class TensorPlan:
    """The storage of a tensor, and the reason."""

    tensor: Tensor
    storage: Storage
    nbytes: int  # in the new file, with alignment
    reason: str = ""  # why the tensor stays dense, or the alternatives; empty without a choice
    contents: Contents | None = None
    error: float = 0.0  # MatrixError.relative, if measured

    @property
    def is_sparse(self) -> bool:
        return isinstance(self.storage, StoredSparse)

    @property
    def density(self) -> float | None:
        """Non-zeros over weights, if they were counted."""
        return None if self.contents is None else self.contents.count.nnz / self.tensor.n_elements

    @property
    def type(self) -> str:
        """The storage, with the names of `macko inspect`."""
        if isinstance(self.storage, StoredSparse):
            return self.storage.candidate.name
        return DENSE if isinstance(self.storage, KeptDense) else type_name(self.storage.type)

    @property
    def break_even(self) -> float | None:
        """Density of random non-zeros at which the tensor is as large as dense, in the chosen format or the default
        TYPE.
        """
        t = self.tensor
        if self.contents is None:
            return None
        if isinstance(self.storage, StoredSparse):
            c = self.storage.candidate
            return c.codec.break_even_density(t.cols, t.type, c.index_bits, c.value_type)
        return registry.break_even_density(t.cols, t.type)

    def new_tensors(self) -> list[NewTensor]:
        """The entries in the tensor table of the new file."""
        t = self.tensor
        if isinstance(self.storage, KeptDense):
            return [NewTensor(t.name, t.type, t.ne, t.nbytes)]
        if isinstance(self.storage, QuantizedDense):
            return [NewTensor(t.name, self.storage.type, t.ne, self.storage.nbytes)]
        c = self.storage.candidate
        return [
            NewTensor(f"{t.name}.{suffix}", part.type, (part.n_elements,), part.nbytes)
            for suffix, part in zip(c.codec.components, c.components)
        ]


class Spool:
    """A nameless file in the folder of the output, with arrays between the two passes; no file without an output. An
    OSError names the output.
    """

    def __init__(self, output: Path | None):
        self._output = output
        self._file: io.FileIO | None = None
        self._end = 0

    def __enter__(self) -> Spool:
        if self._output is not None:
            with named(self._output, always=True):
                # unbuffered, so that close() writes nothing
                self._file = tempfile.TemporaryFile(dir=self._output.parent, buffering=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def put(self, arrays: Sequence[Array]) -> int:
        """Stores arrays one after another. Returns their offset, or -1 without an output."""
        if self._file is None or self._output is None:
            return -1
        begin = self._end
        with named(self._output):
            for array in arrays:
                write_at(self._file, self._end, array.data.cast("B"))
                self._end += array.nbytes
        return begin

    def get(self, at: int, nbytes: Sequence[int]) -> list[Array]:
        """The stored arrays of these lengths, uint8."""
        if self._file is None or self._output is None:
            raise RuntimeError("nothing was kept")
        arrays = []
        with named(self._output):
            for n in nbytes:
                array = np.empty(n, dtype=np.uint8)
                if read_at(self._file, at, array.data) != n:
                    raise errors.error(errors.FILE_CHANGED, f"{self._output}: its temporary file became shorter")
                arrays.append(array)
                at += n
        return arrays


# ---- planning ----


def read_weights(t: Tensor, options: Options, is_lossy: bool = False) -> tuple[Array, int]:
    """(bit patterns (rows, cols), number of -0.0 that became +0.0). Quantized tensors never keep -0.0."""
    bits = t.read_bits(options.n_threads)
    if options.keep_negative_zeros and not is_lossy:
        return bits, 0
    return bits, native_codec.drop_negative_zeros(bits, t.type, options.n_threads)


def plan_tensor(t: Tensor, options: Options, alignment: int, spool: Spool) -> TensorPlan:
    """Raises MackoError if the tensor cannot have the requested storage, or the file cannot be read."""
    asked = options.asked(t)
    wanted = asked or options.type

    def stay(reason: str, contents: Contents | None = None) -> TensorPlan:
        return TensorPlan(t, KeptDense(), align(t.nbytes, alignment), reason, contents)

    def stay_as(name: str) -> TensorPlan:
        planned = plan_dense(t, name, options, alignment, spool)
        return stay(planned) if isinstance(planned, str) else planned

    def stay_as_end(reason: str) -> TensorPlan:
        end = end_type(t, wanted) if asked is None else None
        return stay(reason) if end is None else stay_as(end)

    dense_type = options.dense_types.get(t.name, DENSE)
    if dense_type != DENSE:
        planned = plan_dense(t, dense_type, options, alignment, spool)
        if isinstance(planned, str):
            raise errors.bad_argument(f"{t.shard.path}: {t.name} cannot become {dense_type}: {planned}")
        return planned
    reason = why_dense(t, asked, wanted)
    if reason is not None:
        return stay_as_end(reason)
    choices = registry.types()[wanted]
    is_lossy = any(choice.is_lossy for choice in choices)
    try:
        bits, n_negative_zeros = read_weights(t, options, is_lossy)
        count = native_codec.count_dense(bits, t.type, options.n_threads)
    except errors.MackoError as e:
        if e.code != errors.LIMIT:
            raise
        return stay(str(e))
    contents = Contents(count, n_negative_zeros)
    if tensor_rules.is_unpruned_embedding(t.name, count.nnz / t.n_elements):
        return stay_as_end("" if asked is None else "it is not pruned")
    if count.n_nonfinite:
        return stay(f"{count.n_nonfinite} values are not finite", contents)
    source = Source(bits, t.type, count, options.column_weights(t) if is_lossy else None)
    found, refusal = try_choices(t, source, choices, options)
    if not found:
        return stay(refusal, contents)

    chosen = min(found, key=lambda c: stored_nbytes(c, alignment))  # the first of equals
    why = _why_smallest(found, alignment) if wanted == registry.AUTO else ""
    nbytes = stored_nbytes(chosen, alignment)
    used = max(nbytes, chosen.codec.nbytes_expanded(chosen, source))
    if used >= align(t.nbytes, alignment):
        density = count.nnz / t.n_elements
        return stay(f"would not shrink: density {density:.3f}, {used / t.nbytes:.3f} of dense", contents)
    instead = dense_instead(t, wanted, source, chosen, nbytes)
    if asked is None and not options.measure and instead is not None:
        return stay_as(instead)
    error = 0.0 if chosen.error is None else chosen.error.relative
    why = why or (f"error {math.sqrt(error):.2%}" if options.measure else "")
    spooled_at = -1 if chosen.matrix is None else spool.put(chosen.matrix.arrays)
    storage = StoredSparse(replace(chosen, matrix=None), spooled_at)
    return TensorPlan(t, storage, nbytes, why, contents, error)


def why_dense(t: Tensor, asked: str | None, wanted: str) -> str | None:
    """The reason why a tensor cannot be stored sparse, regardless of its values: empty if obvious; None if it can be
    stored sparse.
    """
    if not tensor_rules.may_be_sparse(t.name, len(t.ne)):
        return "llama.cpp does not only multiply with it" if asked and asked != DENSE else ""
    if wanted == DENSE:
        return "asked for"
    if not tensor_rules.is_value_type(t.type):
        return f"{type_name(t.type)} values; only f16, bf16 and f32 can be stored sparse"
    longest = MAX_NAME - registry.longest_suffix()
    return f"its name is longer than {longest} bytes" if len(t.name.encode()) > longest else None


def try_choices(t: Tensor, source: Source, choices: Sequence[Choice], options: Options) -> tuple[list[Candidate], str]:
    """The possible choices, and the reason against the last of the others."""
    for note in dict.fromkeys(choice.codec.note for choice in choices if choice.codec.note):
        console.log(f"{t.name}: {note}")
    found, refusal = [], ""
    for choice in choices:
        try:
            found.append(choice.codec.plan(source, choice, options.settings))
        except errors.MackoError as e:
            if e.code not in (errors.LIMIT, errors.NOT_FINITE):
                raise
            refusal = str(e)
    return found, refusal


def dense_nbytes(t: Tensor, name: str | None) -> float:
    """Bytes of the tensor in a quantized ggml type; infinite if there is no such type or its blocks do not fit."""
    type_id = None if name is None else ggml_quants.DENSE_TYPES.get(name)
    return float("inf") if type_id is None else ggml_quants.nbytes(type_id, t.rows, t.cols)


def end_type(t: Tensor, wanted: str) -> str | None:
    """The dense type of an embedding or an output head, if TYPE `wanted` quantizes the other weights: like
    llama-quantize, Q6_K, or Q8_0 if TYPE also has 8 bits or Q6_K's blocks do not fit the rows. None: it stays.
    """
    if t.name not in tensor_rules.ENDS or not tensor_rules.is_value_type(t.type):
        return None
    names = [c.codec.dense_name(c.value_type) for c in registry.types().get(wanted, ()) if c.value_type is not None]
    tried = [] if not any(names) else ["q8_0"] if "q8_0" in names else ["q6_k", "q8_0"]
    return next((name for name in tried if dense_nbytes(t, name) < float("inf")), None)


def dense_instead(t: Tensor, wanted: str, source: Source, chosen: Candidate, nbytes: int) -> str | None:
    """The dense quantized type of a tensor with too few zeros for an index: the type of its values, or end_type().
    None: the tensor is stored sparse. source: all rows or a sample; nbytes: of all rows, stored sparse.
    """
    name = chosen.codec.dense_name(chosen.value_type)
    end = None if name is None else end_type(t, wanted)
    if end is None:
        return name if dense_nbytes(t, name) <= nbytes else None
    per_value = chosen.components[0].nbytes / max(1, source.count.nnz)
    return end if per_value * t.n_elements <= nbytes else None


def stored_nbytes(candidate: Candidate, alignment: int) -> int:
    """Bytes in a file, with alignment."""
    return sum(align(part.nbytes, alignment) for part in candidate.components)


def plan_dense(t: Tensor, name: str, options: Options, alignment: int, spool: Spool) -> TensorPlan | str:
    """A tensor that stays dense in a quantized type, or the reason against that type."""
    type_id = ggml_quants.DENSE_TYPES[name]
    block = ggml_quants.block_size(type_id)
    if t.cols % block:
        return f"{t.cols} columns are no multiple of {block}"
    if not tensor_rules.is_value_type(t.type):
        return f"it is {type_name(t.type)} already"
    bits = t.read_bits(options.n_threads)
    n_nonfinite = native_codec.count_dense(bits, t.type, options.n_threads).n_nonfinite
    if n_nonfinite:
        return f"{n_nonfinite} values are not finite"
    weights = options.column_weights(t)
    data = quantize.dense(bits, t.type, type_id, weights, options.n_threads)
    found = quantize.dense_error(bits, t.type, data, type_id, weights, options.n_threads)
    why = quantize.excess(8 * data.nbytes / bits.size, found.rms_total, found.rms_relative_max, found.row)
    if why is not None:
        return f"{name} cannot represent it: {why}"
    storage = QuantizedDense(type_id, data.nbytes, spool.put([data]))
    why = f"error {math.sqrt(found.relative):.2%}" if options.measure else ""
    return TensorPlan(t, storage, align(data.nbytes, alignment), why, error=found.relative)


def _why_smallest(found: Sequence[Candidate], alignment: int) -> str:
    """The candidates of auto: the smallest of each format."""
    best = []
    for codec in registry.CODECS:
        of_codec = [c for c in found if c.codec is codec]
        best += [min(of_codec, key=lambda c: stored_nbytes(c, alignment))] if of_codec else []
    best.sort(key=lambda c: stored_nbytes(c, alignment))
    return "smallest: " + ", ".join(f"{c.name} {console.size(stored_nbytes(c, alignment))}" for c in best)


# ---- a whole model ----


def plan_model(model: Model, options: Options, spool: Spool) -> list[TensorPlan]:
    """The plans, in the order of the model's tensors."""
    if options.target_bpw is not None:
        return plan_for_target(model, options, options.target_bpw, spool)
    return [plan_tensor(t, options, model.alignment, spool) for t in _tracked(model.tensors, "planning")]


def _tracked(tensors: Sequence[Tensor], what: str) -> Iterator[Tensor]:
    return console.tracked(tensors, what, lambda t: t.nbytes, "B")


def plan_for_target(model: Model, options: Options, target_bpw: float, spool: Spool) -> list[TensorPlan]:
    """The types with the least error that keep the file within target_bpw bits per weight. All types are tried; the
    chosen ones are made again, so that memory holds only one form of a tensor.
    """
    n_elements = sum(t.n_elements for t in model.tensors)
    limit = int(target_bpw * n_elements / 8)
    least = output_nbytes(model, [_smallest_plan(t, options, model.alignment) for t in model.tensors])
    if least > limit:
        raise _unreachable(target_bpw, least, n_elements)
    tried: list[list[tuple[Options, TensorPlan]]] = []
    for t in _tracked(model.tensors, "trying types"):
        is_free = tensor_rules.may_be_sparse(t.name, len(t.ne)) and not options.is_fixed(t)
        first, *names = registry.mixed_types() if is_free else (options.type,)
        measured = replace(options, type=first, measure=True)
        plans = [(measured, plan_tensor(t, measured, model.alignment, Spool(None)))]
        if is_free:
            more = [replace(measured, type=name) for name in names]
            more += [
                replace(measured, dense_types={t.name: name}) for name in mixed_dense_types(t, plans[0][1].contents)
            ]
            plans += [(o, plan_tensor(t, o, model.alignment, Spool(None))) for o in more]
        tried.append(plans)
    points = [[bit_allocation.Point(p.nbytes, p.error * p.tensor.n_elements) for _, p in plans] for plans in tried]
    chosen = bit_allocation.choose(
        points,
        lambda picks: output_nbytes(model, [plans[i][1] for plans, i in zip(tried, picks)]),
        limit,
    )
    if isinstance(chosen, int):  # a tensor that cannot have its smallest type
        raise _unreachable(target_bpw, chosen, n_elements)
    return [
        plan_tensor(t, plans[i][0], model.alignment, spool)
        for t, plans, i in zip(_tracked(model.tensors, "planning"), tried, chosen)
    ]


def mixed_dense_types(t: Tensor, contents: Contents | None) -> tuple[str, ...]:
    """The dense quantized types that may help to reach a size."""
    if contents is None or contents.count.n_nonfinite or contents.count.nnz < MIXED_DENSE_FROM * t.n_elements:
        return ()
    return ggml_quants.mixed_types(t.cols)


def _unreachable(target_bpw: float, least: int, n_elements: int) -> errors.MackoError:
    bpw = math.ceil(least * 8000 / n_elements) / 1000  # rounded up: it can be reached
    return errors.bad_argument(f"--target-bpw {target_bpw:g} cannot be reached; the least is {bpw:.3f}")


def _smallest_plan(t: Tensor, options: Options, alignment: int) -> TensorPlan:
    """The smallest form of a tensor. The search for scales changes no size."""
    if options.dense_types.get(t.name, DENSE) != DENSE:
        type_id = ggml_quants.DENSE_TYPES[options.dense_types[t.name]]
        if t.cols % ggml_quants.block_size(type_id) == 0:  # otherwise plan_dense reports the reason
            nbytes = int(ggml_quants.nbytes(type_id, t.rows, t.cols))
            return TensorPlan(t, QuantizedDense(type_id, nbytes, -1), align(nbytes, alignment))
    if options.is_fixed(t) or why_dense(t, None, options.type) is not None:
        return plan_tensor(t, options, alignment, Spool(None))
    fast = replace(options, settings=replace(options.settings, search=False), measure=True)
    dense = TensorPlan(t, KeptDense(), align(t.nbytes, alignment))
    try:
        bits, n_negative_zeros = read_weights(t, options, is_lossy=True)
        count = native_codec.count_dense(bits, t.type, options.n_threads)
    except errors.MackoError as e:
        if e.code != errors.LIMIT:
            raise
        return dense
    if count.n_nonfinite:
        return dense
    choices = [choice for name in registry.mixed_types() for choice in registry.types()[name]]
    found, _ = try_choices(t, Source(bits, t.type, count), choices, fast)
    contents = Contents(count, n_negative_zeros)
    plans = [
        TensorPlan(t, StoredSparse(replace(c, matrix=None), -1), stored_nbytes(c, alignment), contents=contents)
        for c in found
    ]
    for name in mixed_dense_types(t, contents):
        type_id = ggml_quants.DENSE_TYPES[name]
        nbytes = int(ggml_quants.nbytes(type_id, t.rows, t.cols))
        plans.append(TensorPlan(t, QuantizedDense(type_id, nbytes, -1), align(nbytes, alignment), contents=contents))
    return min([*plans, dense], key=lambda p: p.nbytes)


def output_nbytes(model: Model, plans: Sequence[TensorPlan]) -> int:
    """Size of the new file."""
    return file_nbytes([*model.keys, *sparse_keys(plans)], new_tensors(plans), model.alignment)


def new_tensors(plans: Sequence[TensorPlan]) -> list[NewTensor]:
    return [new for p in plans for new in p.new_tensors()]


def sparse_keys(plans: Sequence[TensorPlan]) -> list[Key]:
    """The macko.* metadata (FORMAT.md section 2) of the tensors that become sparse."""
    sparse = [(p.tensor, p.storage.candidate, p.contents) for p in plans if isinstance(p.storage, StoredSparse)]
    if not sparse:
        return []
    ne = [x for t, _, _ in sparse for x in (*t.ne, 1, 1, 1)[:4]]
    return [
        make_key("macko.version", "u32", _FORMAT_VERSION),
        make_key("macko.tensor.name", "[str", [t.name for t, _, _ in sparse]),
        make_key("macko.tensor.format", "[str", [c.codec.name for _, c, _ in sparse]),
        make_key("macko.tensor.type", "[u32", [t.type for t, _, _ in sparse]),
        make_key("macko.tensor.ne", "[u64", ne),
        make_key("macko.tensor.index_bits", "[u32", [c.index_bits for _, c, _ in sparse]),
        make_key("macko.tensor.nnz", "[u64", [contents.count.nnz for _, _, contents in sparse if contents]),
    ]
