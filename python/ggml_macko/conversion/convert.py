"""Dense GGUF -> sparse GGUF.

Two passes over the source, one tensor in memory at a time: tensor_plan.py decides the tensor table, write.py writes
the data. The result is read back and compared with the source before it gets its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Union

from .. import errors
from ..codecs import ggml_quants, registry
from ..codecs.codec import Settings
from ..gguf import imatrix as imatrix_file
from ..gguf import tensor_rules
from ..gguf.files import Model, type_name
from ..gguf.outputs import AtomicOutput
from ..native.file import File
from .tensor_plan import DENSE, Options, Override, Spool, TensorPlan, output_nbytes, plan_model
from .verify import QuantizationError
from .write import check_and_commit, write_model

Overrides = Union[Mapping[str, str], Iterable["tuple[str, str]"]]

# ---- results ----


@dataclass(frozen=True)
class TensorConversion:
    """The conversion of a tensor."""

    name: str
    shape: tuple[int, ...]  # ggml order: the number of columns first
    type: str  # of the source
    storage: str  # dense, a quantized ggml type, or a TYPE with its index
    is_sparse: bool
    density: float | None  # non-zeros over weights, if they were counted
    break_even_density: float | None  # of random non-zeros, at which sparse is as large as dense
    n_negative_zeros: int  # -0.0 that became +0.0 in a sparse tensor
    nbytes_source: int
    nbytes: int  # in the new file
    n_elements: int
    note: str  # why the tensor stays dense, or the alternatives; empty without a choice

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / self.n_elements


@dataclass(frozen=True)
class ConversionReport:
    """A converted model, or the result that a dry run predicts."""

    path: Path | None  # of the sparse file; None: a dry run
    tensors: tuple[TensorConversion, ...]
    quantized: tuple[QuantizationError, ...]  # measured errors of lossy tensors; empty in a dry run
    nbytes_source: int
    nbytes: int  # of the new file
    load_error: str | None = None  # why ggml_macko cannot load the file

    @property
    def n_parameters(self) -> int:
        return sum(t.n_elements for t in self.tensors)

    @property
    def n_sparse(self) -> int:
        return sum(t.is_sparse for t in self.tensors)

    @property
    def n_negative_zeros(self) -> int:
        """The number of -0.0 that became +0.0."""
        return sum(t.n_negative_zeros for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / self.n_parameters


# ---- converting ----


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert a model.

    overrides: (regular expression, type or "dense") for tensors with matching names; the first match counts.
    keep_negative_zeros: store -0.0 as a value, in more bytes.
    granularity, min_columns, seed: search for blocks in ec-csr. imatrix: file of activation statistics, which weight
    the errors of quantized values. target_bpw, with auto: largest number of bits per weight, with the least error.
    output_tensor_type, token_embedding_type: a ggml type that quantizes these tensors, which stay dense; "dense" leaves
    them as they are. Without it they become Q6_K or Q8_0 if TYPE is quantized.
    n_threads: 0 uses all cores.
    """

    overrides: Overrides = ()
    keep_negative_zeros: bool = False
    granularity: int = 16
    min_columns: int = 0
    seed: int = 0
    imatrix: str | os.PathLike[str] | None = None
    target_bpw: float | None = None
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    n_threads: int = 0


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    type: str = registry.AUTO,
    *,
    options: ConvertOptions | None = None,
    force: bool = False,
) -> ConversionReport:
    """Stores a pruned model sparse: weights of blocks, the output head and pruned embeddings if that is smaller, all
    other data unchanged.

    Lossless except for the quantized types: the result is read back and compared with the source, bit for bit or within
    the type's error, before it gets its name. A -0.0 of a tensor that is stored sparse becomes +0.0, which gives the
    same results in llama.cpp.

    source: a GGUF model, dense or sparse; the first file of a split one. output: the file to write; None is a dry run.
    type: a TYPE of `macko convert`: macko (MACKO paper, section 4), packed, sparse-lossless (packed, its values coded
    bit for bit where that is smaller), auto for the smallest of these for each tensor, ec-csr (EC-SpMV paper, section
    6; takes seconds per tensor), or sparse-q8, sparse-q5, sparse-q4, sparse-q3 with quantized values.
    force: replaces an output that exists.

    Raises MackoError for options that do not fit together or the model, an invalid source, or an output that exists,
    and OSError if a file cannot be read or written. After an error there is no output.
    """
    with Model(source) as model:
        parsed = parse_options(model, type, options or ConvertOptions())
        if output is None:
            return make_report(model, plan_model(model, parsed, Spool(None)), None, ())
        inputs = model.paths if parsed.imatrix is None else [*model.paths, parsed.imatrix.path]
        with AtomicOutput(output, inputs, force) as out, Spool(out.path) as spool:
            plans = plan_model(model, parsed, spool)
            write_model(model, plans, out, parsed, spool)
            quantized = check_and_commit(model, out, parsed.n_threads, exact=parsed.keep_negative_zeros)
        return make_report(model, plans, out.path, quantized)


def make_report(
    model: Model, plans: Sequence[TensorPlan], path: Path | None, quantized: tuple[QuantizationError, ...]
) -> ConversionReport:
    return ConversionReport(
        path=path,
        tensors=tuple(_describe(p) for p in plans),
        quantized=quantized,
        nbytes_source=model.nbytes,
        nbytes=output_nbytes(model, plans),
        load_error=None if path is None else why_not_loadable(path),
    )


def _describe(p: TensorPlan) -> TensorConversion:
    t = p.tensor
    return TensorConversion(
        name=t.name,
        shape=t.ne,
        type=type_name(t.type),
        storage=p.type,
        is_sparse=p.is_sparse,
        density=p.density,
        break_even_density=p.break_even,
        n_negative_zeros=p.contents.n_negative_zeros if p.contents is not None and p.is_sparse else 0,
        nbytes_source=t.nbytes,
        nbytes=p.nbytes,
        n_elements=t.n_elements,
        note=p.reason,
    )


def why_not_loadable(path: Path) -> str | None:
    """The reason why the metadata checks of a later load will fail, if any."""
    try:
        File(path, require_model=True).close()
    except errors.MackoError as e:
        return str(e)
    return None


# ---- options ----


def check_inputs(source: str | os.PathLike[str], type: str, options: ConvertOptions) -> None:
    """Raises the errors that convert() with these arguments raises before any work."""
    with Model(source) as model:
        parse_options(model, type, options)


def parse_options(model: Model, type: str, o: ConvertOptions) -> Options:
    """The arguments of convert() after checks. Raises MackoError or OSError."""
    if not 0 <= o.seed < 2**64 or not all(0 <= n < 2**31 for n in (o.granularity, o.min_columns)):
        raise errors.usage_error("--seed, --granularity or --min-columns is out of range")
    options = Options(
        type=checked_type(type),
        overrides=checked_overrides(o.overrides),
        keep_negative_zeros=o.keep_negative_zeros,
        settings=Settings(
            o.n_threads, {"max_granularity": o.granularity, "min_columns": o.min_columns, "seed": o.seed}
        ),
        imatrix=imatrix_file.read(o.imatrix) if o.imatrix else None,
        dense_types=dense_types_of(model, o.output_tensor_type, o.token_embedding_type),
        target_bpw=o.target_bpw,
    )
    check_options(options)
    for override in options.overrides:
        text = f"--tensor-type {override.pattern.pattern}={override.type}"
        names = [t.name for t in model.tensors]
        usable = [t.name for t in model.tensors if tensor_rules.may_be_sparse(t.name, len(t.ne))]
        tensor_rules.check_pattern(
            text,
            override.pattern.pattern,
            names if override.type == DENSE else usable,
            names,
            "cannot be sparse: llama.cpp does not only multiply with it",
        )
    if options.imatrix is not None:
        options.imatrix.check_model(model)
    return options


def checked_type(name: str, more: tuple[str, ...] = ()) -> str:
    """The TYPE with this name, or one of the words in `more`."""
    if name.lower() in more:
        return name.lower()
    found = registry.type_named(name)
    if found is None:
        known = (*registry.types(), *more)
        raise errors.usage_error(f"unknown type '{name}'{_type_hint(name.lower(), known)}; known: {', '.join(known)}")
    return found


def _type_hint(name: str, known: Sequence[str]) -> str:
    """A hint for an unknown TYPE, which is often a type of llama-quantize."""
    quantized = [kind for kind in known if kind == f"sparse-{name}"]
    if quantized or not (name in ggml_quants.DENSE_TYPES or re.match(r"i?q\d", name)):
        return errors.did_you_mean(quantized[0] if quantized else name, known)
    return " (a dense type, of llama-quantize)"


def checked_overrides(overrides: Overrides) -> tuple[Override, ...]:
    pairs = overrides.items() if isinstance(overrides, Mapping) else overrides
    out = []
    for pattern, name in pairs:
        try:
            out.append(Override(re.compile(pattern), checked_type(name, (DENSE,))))
        except re.error as e:
            raise errors.usage_error(f"--tensor-type {pattern}={name}: {e}") from e
    return tuple(out)


def dense_types_of(model: Model, output: str | None, embedding: str | None) -> dict[str, str]:
    """Options.dense_types. In a model without output head, the embedding is also the head."""
    out = {}
    names = {t.name for t in model.tensors}
    for option, name in (("--output-tensor-type", output), ("--token-embedding-type", embedding)):
        if name is None:
            continue
        if name.lower() not in (*ggml_quants.DENSE_TYPES, DENSE):
            known = ", ".join((*ggml_quants.DENSE_TYPES, DENSE))
            raise errors.usage_error(f"{option} {name}: unknown type; known: {known}")
        is_head = option == "--output-tensor-type" and tensor_rules.HEAD in names
        out[tensor_rules.HEAD if is_head else tensor_rules.EMBEDDING] = name.lower()
    return out


def check_options(options: Options) -> None:
    """Raises MackoError for options that do not go together."""
    bpw = options.target_bpw
    if bpw is not None and (options.type != registry.AUTO or not 0 < bpw < 64):
        raise errors.usage_error(f"--target-bpw {bpw:g}: needs type auto and a number above 0")
