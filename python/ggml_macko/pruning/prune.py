"""Sets weights of a dense GGUF to zero: `prune(source, output, PruneOptions(sparsity=0.5))`. Before that, it can remove
whole experts (experts.py).

Magnitude and Wanda give each weight a score; the lowest scores of each row (or matrix, or of the model) become +0.
SparseGPT also changes the weights that stay. Counts are exact: allocation.py decides how many weights each matrix
loses, masks.py which, and ties go to the lowest index, so that a mask depends neither on threads nor on the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np

from .. import console, errors, system
from ..evaluation import text_model
from ..evaluation.calibrate import model_digest
from ..gguf import dense_copy, tensor_rules
from ..gguf import imatrix as imatrix_file
from ..gguf.activation_keys import without_rule
from ..gguf.files import Key, Model, Tensor, make_key, type_name
from ..gguf.outputs import AtomicOutput
from ..gguf.writer import NewTensor, Writer
from ..pruning import allocation, experts, layerwise, methods, torch_text
from ..pruning import options as option_rules
from ..pruning.allocation import Quotas
from ..pruning.masks import Bits
from ..pruning.methods import Pruner, Scorer
from ..pruning.options import ParsedOptions, PruneOptions, TableEntry
from ..pruning.working_copy import WorkingCopy
from ..regular_files import check_regular
from ..values import NEGATIVE_ZERO, bits_dtype


@dataclass(frozen=True)
class PrunedTensor:
    """The result for one tensor."""

    name: str
    ne: tuple[int, ...]  # ggml order: columns first
    type: int  # ggml type id
    n_elements: int
    n_zeros_before: int  # -0.0 does not count
    n_zeros: int
    checksum: int = field(default=0, compare=False, repr=False)  # CRC-32 of its new bytes

    @property
    def sparsity(self) -> float:
        return self.n_zeros / self.n_elements


class ExpertCounts(NamedTuple):
    """Experts of each block."""

    n_before: int
    n_after: int
    n_blocks: int


@dataclass(frozen=True)
class PruneReport:
    """The result of `prune`, or of a dry run."""

    tensors: tuple[PrunedTensor, ...]
    n_parameters: int  # of the whole model
    compare_within: str  # row, tensor or model
    experts: ExpertCounts | None = None  # None: all remain

    @property
    def n_elements(self) -> int:
        """Weights of the pruned tensors."""
        return sum(t.n_elements for t in self.tensors)

    @property
    def n_zeros_before(self) -> int:
        return sum(t.n_zeros_before for t in self.tensors)

    @property
    def n_zeros(self) -> int:
        return sum(t.n_zeros for t in self.tensors)


def prune(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    options: PruneOptions,
    *,
    force: bool = False,
) -> PruneReport:
    """Sets the least important weights of a dense GGUF (the first file of a split one) to zero and writes a dense GGUF,
    of the same size if no tensor is quantized; dense_copy.py converts quantized ones to F16. With experts in the
    options, whole experts are removed first; quantized tensors keep their type if there are no zeros to make. output
    None: a dry run. force: replace output if it exists.

    A run that prunes while it reads the text stores its state in OUTPUT.checkpoint: after an interruption, the same
    call continues and gives the same bytes.

    Raises MackoError (options that do not go together, weights that are not finite, a sparse source) or OSError; then
    there is no output.
    """
    return prune_with(option_rules.parse(options), source, output, force=force)


def check_inputs(options: ParsedOptions, source: str | os.PathLike[str]) -> None:
    """Raises the errors of prune_with() for the files and names in its arguments, before any work."""
    with Model(source) as model, console.quiet():
        if options.experts is not None:
            experts.Mixture.of(model).n_kept(options.experts, model.path)
        if not options.makes_zeros:
            return
        _check_table(model, tensors_to_prune(model, options.include, options.exclude), options.table)
        if options.imatrix is not None:
            imatrix_file.read(options.imatrix).check_model(model)
    if options.text is not None:
        text_model.read_text(options.text)


def prune_with(
    options: ParsedOptions,
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    *,
    force: bool = False,
) -> PruneReport:
    """prune() with parsed options."""
    statistics_files = [Path(p) for p in (options.imatrix, options.text) if p is not None]
    for path in statistics_files:
        check_regular(path)
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(Model(source))
        pool = stack.enter_context(ThreadPoolExecutor(options.n_threads or system.available_cores()))
        _check_dense(model)
        tensors = []
        if options.makes_zeros:
            tensors = tensors_to_prune(model, options.include, options.exclude)
            _check_table(model, tensors, options.table)
        opened = None
        if output is not None:
            inputs = [*model.paths, *statistics_files]
            opened = stack.enter_context(AtomicOutput(output, inputs, force))
        counts = None
        if options.experts is not None:
            selection = experts.select(model, options)
            counts = ExpertCounts(selection.mixture.n_expert, selection.n_kept, len(selection.kept))
            if not options.makes_zeros:
                return _without_experts(model, selection, opened, counts)
            source = stack.enter_context(experts.removed(model, selection, output))
        model = stack.enter_context(Model(stack.enter_context(dense_copy.dequantized(source, output))))
        names = {t.name for t in tensors}
        tensors = [t for t in model.tensors if t.name in names]
        pruned = _prune_model(model, tensors, options, opened, pool, stack)
        if opened is not None:
            opened.seal()
            check_pruned(model, opened, pruned, changed=options.needs_hessians)
            opened.commit()
        return PruneReport(
            tensors=tuple(pruned),
            n_parameters=sum(t.n_elements for t in model.tensors),
            compare_within=options.compare_within,
            experts=counts,
        )


def _without_experts(
    model: Model, selection: experts.Selection, output: AtomicOutput | None, counts: ExpertCounts
) -> PruneReport:
    """Writes the model without the removed experts and without new zeros, if there is an output."""
    if output is not None:
        experts.write(model, selection, output)
        output.commit()
    n_parameters = sum(math.prod(selection.ne(t)) for t in model.tensors)
    return PruneReport(tensors=(), n_parameters=n_parameters, compare_within="", experts=counts)


# ---- which tensors ----


def _check_dense(model: Model) -> None:
    """Raises MackoError (BAD_ARGUMENT) if the model is sparse."""
    if model.is_sparse:
        raise errors.bad_argument(f"{model.path}: is a sparse file; use `macko restore` first")


class _Selected(NamedTuple):
    tensor: Tensor
    obstacle: str  # the reason why the tensor cannot be pruned, or empty


def tensors_to_prune(model: Model, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Tensor]:
    """The selected tensors that can be pruned; logs a warning for the others.

    Raises MackoError (BAD_ARGUMENT) if the model is sparse or none is left.
    """
    _check_dense(model)
    for option, parts in (("--include-weights", include), ("--exclude-weights", exclude)):
        for part in parts:
            tensor_rules.check_pattern(f"{option} {part}", re.escape(part), (t.name for t in model.tensors))
    chosen = _select(model, include, exclude)
    refused = [s for s in chosen if s.obstacle]
    for t, obstacle in refused:
        console.log(f"warning: {t.name} stays as it is: {obstacle}")
    tensors = [s.tensor for s in chosen if not s.obstacle]
    for t in tensors:
        if not tensor_rules.may_be_sparse(t.name, len(t.ne)):
            console.log(f"warning: {t.name} cannot be stored sparse: llama.cpp does not only multiply with it")
    if not tensors:
        hint = f"{refused[0].tensor.name} has {refused[0].obstacle}" if refused else "no tensor has such a name"
        raise errors.bad_argument(f"{model.path}: nothing to prune: {hint}")
    return tensors


def _check_table(model: Model, tensors: Sequence[Tensor], table: Iterable[TableEntry]) -> None:
    """Raises MackoError (BAD_ARGUMENT) if an entry matches none of the pruned tensors."""
    names, all_names = ([t.name for t in ts] for ts in (tensors, model.tensors))
    for entry in table:
        text = f"--tensor-sparsity {entry.regex.pattern}={float(entry.sparsity):g}"
        tensor_rules.check_pattern(text, entry.regex.pattern, names, all_names, "is not pruned; see --include-weights")


def _select(model: Model, include: Sequence[str], exclude: Sequence[str]) -> list[_Selected]:
    out = []
    for t in model.tensors:
        if include:
            chosen = any(part in t.name for part in include) and len(t.ne) >= 2
        else:
            chosen = tensor_rules.is_block_weight(t.name, len(t.ne)) and not any(part in t.name for part in exclude)
        if chosen:
            usable = tensor_rules.is_value_type(t.type) or dense_copy.is_quantized(t)
            obstacle = "" if usable else f"{type_name(t.type)} values; prune the f16, bf16 or f32 model"
            out.append(_Selected(t, obstacle))
    return out


# ---- how many weights ----


def make_quotas(
    tensors: Sequence[Tensor],
    options: ParsedOptions,
    scorer: Scorer,
    loss_curves: Callable[[Sequence[Tensor], Sequence[Fraction]], dict[str, list[float]]] | None = None,
) -> Quotas:
    """The number of weights to prune in each matrix.

    scorer: the scores that are compared (used with compare_within model). loss_curves: of tensors at sparsities, for
    allocation by loss.
    """
    by_table = {t.name: s for t in tensors for s in [table_sparsity(t.name, options.table)] if s is not None}
    free = [t for t in tensors if t.name not in by_table]
    quotas = {
        t.name: allocation.uniform(t, by_table[t.name], options.compare_within) for t in tensors if t.name in by_table
    }
    if options.compare_within == "model":
        total = int(options.sparsity * sum(t.n_elements for t in free))
        quotas.update(allocation.lowest_of_model(free, total, scorer.blocks))
    elif options.allocation == "loss" and free:
        assert loss_curves is not None
        grid = allocation.loss_grid(options.sparsity, options.loss_shift)
        losses = loss_curves(free, grid)
        quotas.update(allocation.by_loss(free, options.sparsity, options.compare_within, losses, options.loss_shift))
    else:
        quotas.update({t.name: allocation.uniform(t, options.sparsity, options.compare_within) for t in free})
    return quotas


def table_sparsity(name: str, table: Iterable[TableEntry]) -> Fraction | None:
    """The sparsity of a tensor from the first matching entry of a table, if any."""
    return next((entry.sparsity for entry in table if entry.regex.search(name)), None)


def _statistics(model: Model, tensors: Sequence[Tensor], options: ParsedOptions) -> imatrix_file.Imatrix | None:
    """Sums of squares of the inputs of the tensors in the dense model, if they are needed."""
    if options.method != "wanda" or options.needs_passes:
        return None
    if options.imatrix is None:
        console.log(f"statistics from {options.text} ...")
        found = layerwise.statistics_of_text(model.path, tensors, options, torch_text.Session(options))
    else:
        found = imatrix_file.read(options.imatrix)
        found.check_model(model)
    for t in tensors:
        layerwise.warn_of_unused(t, found.of(t).n_unused)
    return found


def _what_decides(model: Model, options: ParsedOptions, quotas: Quotas) -> dict[str, str]:
    """The inputs that determine the weights of a model pruned in passes."""
    assert options.text is not None
    settings = dataclasses.asdict(dataclasses.replace(options, table=(), hessian_memory=0, n_threads=0, imatrix=None))
    return {
        "model": model_digest(model.path),
        "text": hashlib.sha256(text_model.read_text(options.text)).hexdigest(),
        "set of options": repr(sorted(settings.items())),
        "number of zeros": repr([(name, n.tolist()) for name, n in sorted(quotas.items())]),
    }


# ---- writing ----


def _prune_model(
    model: Model,
    tensors: Sequence[Tensor],
    options: ParsedOptions,
    output: AtomicOutput | None,
    pool: ThreadPoolExecutor,
    stack: contextlib.ExitStack,
) -> list[PrunedTensor]:
    """Prunes the tensors and writes the model if there is an output. stack: closes the working copy, if any."""
    statistics = _statistics(model, tensors, options)
    scorer = Scorer(statistics)

    def loss_curves(tensors: Sequence[Tensor], grid: Sequence[Fraction]) -> dict[str, list[float]]:
        path = output.path if output is not None else Path(tempfile.gettempdir()) / f"macko-prune-{os.getpid()}"
        with AtomicOutput(path.with_name(path.name + ".losses"), model.paths, force=True) as copy:
            return layerwise.loss_curves(model, tensors, options, grid, copy)

    quotas = make_quotas(tensors, options, scorer, loss_curves)
    n_chunks = 0
    if not options.needs_passes:
        pruner = methods.by_scores(scorer, options, quotas, pool)
    elif output is None:
        pruner = methods.count_only(quotas)
    else:
        path = output.path.with_name(output.path.name + ".checkpoint")
        working = stack.enter_context(WorkingCopy(model, path, _what_decides(model, options, quotas)))
        n_chunks = layerwise.prune_in_passes(model, tensors, quotas, options, working, pool)
        copy = stack.enter_context(Model(path))
        pruner = methods.take_from({t.name: t for t in copy.tensors})
    keys = provenance(options, statistics, n_chunks)
    return write_model(model, {t.name for t in tensors}, pruner, keys, output)


def write_model(
    model: Model, names: set[str], pruner: Pruner, keys: list[Key], output: AtomicOutput | None
) -> list[PrunedTensor]:
    """Writes the model with the tensors of these names pruned, and with keys that replace its macko.prune.*, except
    those about experts. A rule for skipping neurons is omitted.

    Without an output, the tensors are pruned in memory and only counted.
    """
    out = []
    writer = None
    if output is not None:
        others = without_rule(model.keys)
        keys = [
            k for k in others if k.name.startswith(experts.PROVENANCE) or not k.name.startswith("macko.prune.")
        ] + keys
        tensors = [NewTensor(t.name, t.type, t.ne, t.nbytes) for t in model.tensors]
        writer = Writer(output, keys, tensors, model.alignment)
    for i, t in enumerate(console.tracked(model.tensors, "pruning", lambda t: t.nbytes, "B")):
        blocks: Iterable[Bits]
        if t.name in names:
            bits, pruned = _prune_tensor(t, pruner)
            out.append(pruned)
            what = f"zeros = {pruned.n_zeros_before} -> {pruned.n_zeros} of {bits.size}"
            blocks = [bits]
        else:
            what = f"size = {console.size_column(t.nbytes)}"
            blocks = t.blocks()
        if writer is not None:
            writer.write(blocks)
        console.tensor_line(i + 1, len(model.tensors), t.name, t.ne, type_name(t.type), what)
    if writer is not None:
        writer.finish()
        model.check_unchanged()
    return out


def _prune_tensor(t: Tensor, pruner: Pruner) -> tuple[Bits, PrunedTensor]:
    bits = methods.read_finite(t)
    n_zeros_before = bits.size - int(np.count_nonzero(bits))
    pruner(bits, t)
    bits[bits == NEGATIVE_ZERO[t.type]] = 0  # multiplication with a mask leaves -0.0 of negative weights
    return bits, PrunedTensor(
        name=t.name,
        ne=t.ne,
        type=t.type,
        n_elements=t.n_elements,
        n_zeros_before=n_zeros_before,
        n_zeros=bits.size - int(np.count_nonzero(bits)),
        checksum=zlib.crc32(bits.data),
    )


def provenance(options: ParsedOptions, statistics: imatrix_file.Imatrix | None, n_chunks: int) -> list[Key]:
    """The metadata about the pruning of a model. n_chunks: of a text that was read in passes."""
    keys = [
        make_key("macko.prune.method", "str", options.method),
        make_key("macko.prune.sparsity", "f32", float(options.sparsity)),
        make_key("macko.prune.compare_within", "str", options.compare_within),
    ]
    table = [f"{entry.regex.pattern}={float(entry.sparsity):g}" for entry in options.table]
    for name, kind, value in (
        ("allocation", "str", options.allocation if options.allocation != "uniform" else None),
        ("tensor_sparsity", "[str", table or None),
        ("sequential", "u32", options.sequential or None),
        ("refit", "u32", options.refit or None),
        ("quant_values", "str", options.quant_values),
        ("keep_mantissa", "u32", options.keep_mantissa or None),
        ("asymmetric", "f32", options.asymmetric),
    ):
        if value is not None:
            keys.append(make_key(f"macko.prune.{name}", kind, value))
    if statistics is not None or n_chunks:
        datasets = statistics.datasets if statistics is not None else [options.text or ""]
        chunk_count = n_chunks or (statistics.chunk_count if statistics is not None else 0)
        keys.append(make_key("macko.prune.datasets", "[str", [Path(d).name for d in datasets]))
        keys.append(make_key("macko.prune.chunks_count", "u32", chunk_count))
    return keys


def check_pruned(model: Model, output: AtomicOutput, pruned: Iterable[PrunedTensor], changed: bool) -> None:
    """Reads the sealed output back and compares it with the source.

    Tensors that were not pruned must be equal; in the others, each weight must be that of the source or +0 unless the
    method changes weights, and counts and checksums must be those of the report. Raises MackoError (FILE_CHANGED).
    """
    expected = {p.name: p for p in pruned}
    with Model(output.partial) as written:
        for source, result in zip(console.tracked(model.tensors, "checking", lambda t: t.nbytes, "B"), written.tensors):
            n_zeros, checksum = 0, 0
            same = (source.name, source.type, source.ne) == (result.name, result.type, result.ne)
            for a, b in zip(source.blocks(), result.blocks()):
                if source.name not in expected:
                    same = same and np.array_equal(a, b)
                    continue
                checksum = zlib.crc32(b.data, checksum)
                a, b = (x.view(bits_dtype(source.type)) for x in (a, b))
                n_zeros += len(b) - int(np.count_nonzero(b))
                same = same and (changed or not np.any((a != b) & (b != 0)))
            p = expected.get(source.name)
            if not same or (p is not None and (n_zeros, checksum) != (p.n_zeros, p.checksum)):
                raise errors.error(
                    errors.FILE_CHANGED, f"{output.path}: {source.name}: the file does not hold what was written"
                )
