"""Sets weights of a dense GGUF to zero: `macko prune IN OUT --sparsity S`.

Magnitude and Wanda give each weight a score; the lowest scores of each row (or matrix, or of the model) become +0.
SparseGPT also changes the weights that stay. Counts are exact: allocation.py says how many of each matrix, masks.py
which, ties go to the lowest index, so a mask does not depend on threads, NumPy or the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np

from .. import console, errors, values
from ..evaluation.text_model import N_CTX
from ..gguf import imatrix
from ..gguf import tensor_rules as weights
from ..gguf.files import AtomicOutput, Model, NewTensor, Tensor, Writer, make_key, type_name
from ..pruning import allocation, sparsegpt
from ..pruning.allocation import OWL_LAMBDA, OWL_M
from ..pruning.layerwise import Pruner, Scorer, by_scores, prune_with_text, read_finite, statistics_of_text

# method -> what it compares weights within by default
METHODS = {"magnitude": "row", "wanda": "row", "sparsegpt": "tensor"}
ALLOCATIONS = ("uniform", "owl")


@dataclass(frozen=True)
class Options:
    """What to do. With a pattern, sparsity is the pattern's."""

    sparsity: Fraction
    method: str = "magnitude"
    per: str = "row"
    pattern: tuple | None = None  # (n, m): of m neighbours in a row, n stay
    allocation: str = "uniform"
    owl_m: float = OWL_M
    owl_lambda: Fraction = OWL_LAMBDA
    table: tuple = ()  # (compiled regex, sparsity); the first found in a tensor's name decides, else sparsity
    imatrix: str | None = None
    text: str | None = None
    n_chunks: int = 128
    n_ctx: int = N_CTX
    sequential: bool = False
    damping: float = sparsegpt.DAMPING
    hessian_memory: int = 2 << 30  # bytes
    device: str = "auto"  # of SparseGPT; "none": the CPU even if CuPy finds a GPU
    n_threads: int = 0

    @property
    def in_passes(self) -> bool:
        """Needs the text for more than statistics that are taken once."""
        return self.method == "sparsegpt" or self.sequential


# ---- a whole model ----


@dataclass(frozen=True)
class Pruned:
    """What was done to a tensor."""

    tensor: Tensor
    n_zeros_before: int
    n_zeros: int
    checksum: int = field(default=0, compare=False)  # of its new bytes


def select(model: Model, include: list, exclude: list) -> list:
    """(tensor, why it cannot be pruned or "") of the tensors that are asked for."""
    out = []
    for t in model.tensors:
        if include:
            chosen = any(text in t.name for text in include) and len(t.ne) >= 2
        else:
            chosen = weights.is_block_weight(t.name, len(t.ne)) and not any(text in t.name for text in exclude)
        if chosen:
            usable = weights.is_value_type(t.type)
            out.append((t, "" if usable else f"{type_name(t.type)} values; prune the f16, bf16 or f32 model"))
    return out


def plan(tensors: list, options: Options, scorer: Scorer, wanda: Scorer | None) -> allocation.Quotas:
    """How many weights each matrix loses. wanda: scores with statistics, for OWL."""
    if options.pattern is not None:
        n, m = options.pattern
        for t in tensors:
            if t.cols % m:
                raise errors.error(errors.BAD_ARGUMENT, f"--pattern {n}:{m}: {t.name} has {t.cols} columns")
    by_table = {t.name: s for t in tensors for s in [table_sparsity(t.name, options.table)] if s is not None}
    free = [t for t in tensors if t.name not in by_table]
    quotas = {t.name: allocation.uniform(t, by_table[t.name], options.per) for t in tensors if t.name in by_table}
    if options.per == "model":
        total = int(options.sparsity * sum(t.n_elements for t in free))
        quotas.update(allocation.lowest_of_model(free, total, scorer.blocks))
    elif options.allocation == "owl" and free:
        quotas.update(
            allocation.owl(free, options.sparsity, options.per, wanda.blocks, options.owl_m, options.owl_lambda)
        )
    else:
        quotas.update({t.name: allocation.uniform(t, options.sparsity, options.per) for t in free})
    return quotas


def table_sparsity(name: str, table: tuple) -> Fraction | None:
    return next((s for pattern, s in table if pattern.search(name)), None)


def prune_tensor(t: Tensor, prune: Pruner) -> tuple:
    """(bit patterns, Pruned)."""
    bits = read_finite(t)
    before = bits.size - int(np.count_nonzero(bits))
    prune(bits, t)
    bits[bits == values.NEGATIVE_ZERO[t.type]] = 0  # what a mask left of negative weights
    n_zeros = bits.size - int(np.count_nonzero(bits))
    return bits, Pruned(t, before, n_zeros, zlib.crc32(bits))


def prune_model(
    model: Model,
    tensors: list,
    options: Options,
    output: AtomicOutput | None,
    pool: ThreadPoolExecutor,
    stack: contextlib.ExitStack,
) -> list:
    """Writes to output if there is one; returns a Pruned for each of the tensors. stack gets what is to clean up."""
    statistics = gather_statistics(model, tensors, options)
    wanda = Scorer(statistics) if statistics is not None else None
    scorer = wanda if options.method == "wanda" else Scorer()
    quotas = plan(tensors, options, scorer, wanda)
    n_chunks = 0
    if not options.in_passes:
        prune = by_scores(scorer, options, quotas, pool)
    elif output is None:
        prune = only_count(quotas)
    else:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".macko-prune-", dir=output.path.parent))
        path = Path(folder) / "model.gguf"
        n_chunks = prune_with_text(model, tensors, quotas, options, path, pool)
        copy = stack.enter_context(Model(path))
        prune = take_from(copy)
    return write_model(model, {t.name for t in tensors}, prune, provenance(options, statistics, n_chunks), output)


def gather_statistics(model: Model, tensors: list, options: Options) -> imatrix.Imatrix | None:
    """Sums of squares of the inputs of the tensors, if anything needs those of the dense model."""
    if options.allocation != "owl" and (options.method != "wanda" or options.sequential):
        return None
    if options.imatrix is None:
        console.log(f"statistics from {options.text} ...")
        found = statistics_of_text(model.path, tensors, options)
    else:
        found = imatrix.read(options.imatrix)
        found.check_model(model)
    for t in tensors:
        n = found.of(t).n_unused
        if n:
            console.log(f"warning: {t.name}: {n} of {allocation.n_matrices(t)} experts got no token: magnitude decides")
    return found


def only_count(quotas: allocation.Quotas) -> Pruner:
    """For a dry run of what takes long: as many zeros as there would be (where zeros stand is not the same)."""

    def prune(bits: np.ndarray, t: Tensor) -> None:
        flat = bits.reshape(-1)
        missing = int(quotas[t.name].sum()) - int((flat == 0).sum())
        flat[np.flatnonzero(flat)[: max(0, missing)]] = 0

    return prune


def take_from(copy: Model) -> Pruner:
    """The weights of another file of the same model."""
    others = {t.name: t for t in copy.tensors}

    def prune(bits: np.ndarray, t: Tensor) -> None:
        bits[:] = others[t.name].read_bits()

    return prune


def write_model(model: Model, names: set, prune: Pruner, keys: list, output: AtomicOutput | None) -> list:
    out = []
    writer = None
    if output is not None:
        keys = [k for k in model.keys if not k.name.startswith("macko.prune.")] + keys
        tensors = [NewTensor(t.name, t.type, t.ne, t.nbytes) for t in model.tensors]
        writer = Writer(output, keys, tensors, model.alignment)
    for i, t in enumerate(model.tensors):
        if t.name in names:
            bits, pruned = prune_tensor(t, prune)
            out.append(pruned)
            what = f"zeros = {pruned.n_zeros_before} -> {pruned.n_zeros} of {bits.size}"
            blocks: Iterator = iter([bits])
        else:
            what = f"size = {console.size(t.nbytes)}"
            blocks = t.blocks()
        if writer is not None:
            writer.write(blocks)
        console.progress(i + 1, len(model.tensors), t.name, t.ne, type_name(t.type), what)
    if writer is not None:
        writer.finish()
        model.check_unchanged()
    return out


def provenance(options: Options, statistics: imatrix.Imatrix | None, n_chunks: int) -> list:
    """Keys that tell how a model was pruned; n_chunks: of the text, in passes."""
    keys = [
        make_key("macko.prune.method", "str", options.method),
        make_key("macko.prune.sparsity", "f32", float(options.sparsity)),
        make_key("macko.prune.per", "str", options.per),
    ]
    if options.pattern is not None:
        keys.append(make_key("macko.prune.pattern", "str", "{}:{}".format(*options.pattern)))
    if options.allocation != "uniform":
        keys.append(make_key("macko.prune.allocation", "str", options.allocation))
    if options.table:
        table = [f"{pattern.pattern}={float(s):g}" for pattern, s in options.table]
        keys.append(make_key("macko.prune.tensor_sparsity", "[str", table))
    if options.sequential:
        keys.append(make_key("macko.prune.sequential", "u32", 1))
    if statistics is not None or n_chunks:
        datasets = statistics.datasets if statistics is not None else [options.text]
        keys.append(make_key("macko.prune.datasets", "[str", [Path(str(d)).name for d in datasets]))
        keys.append(make_key("macko.prune.chunks_count", "u32", n_chunks or statistics.chunk_count))
    return keys


def check_pruned(model: Model, output: AtomicOutput, pruned: list, changed: bool) -> None:
    """Reads the sealed output back: what was meant stands there, and weights are those of the source or +0 unless they
    were to change.
    """
    meant = {p.tensor.name: p for p in pruned}
    with Model(output.partial) as written:
        for source, result in zip(model.tensors, written.tensors):
            zeros, checksum = 0, 0
            same = (source.name, source.type, source.ne) == (result.name, result.type, result.ne)
            for a, b in zip(source.blocks(), result.blocks()):
                if source.name not in meant:
                    same = same and np.array_equal(a, b)
                    continue
                checksum = zlib.crc32(b, checksum)
                a, b = (x.view(values.bits_dtype(source.type)) for x in (a, b))
                zeros += len(b) - int(np.count_nonzero(b))
                same = same and (changed or not np.any((a != b) & (b != 0)))
            p = meant.get(source.name)
            if not same or (p is not None and (zeros, checksum) != (p.n_zeros, p.checksum)):
                raise errors.error(
                    errors.FILE_CHANGED, f"{output.path}: {source.name}: what was written is not what was meant"
                )


# ---- command ----

HELP = "set weights of a dense model to zero"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sets the least important weights of a dense GGUF to zero and writes a dense GGUF of the same size; then use "
        "`macko convert`. By default the matrices of all blocks are pruned (experts too, each as a matrix of its "
        "own); embeddings, output head, norms, biases and routers are not. Exactly floor(S * n) weights of each row or "
        "matrix become zero, the lowest index first where scores are equal; weights that are zero already (-0.0 too) "
        "are +0 in the result whatever S is."
    )
    parser.add_argument(
        "input", metavar="IN", help="dense GGUF with f16, bf16 or f32 weights; the first file of a split one"
    )
    parser.add_argument("output", metavar="OUT", nargs="?", help="GGUF to write (not needed with --dry-run)")
    how_many = parser.add_argument_group("how many weights")
    how_many.add_argument("--sparsity", metavar="S", help="share of zeros, 0 ... 1, for example 0.5")
    how_many.add_argument(
        "--tensor-sparsity",
        metavar="REGEX=S",
        action="append",
        default=[],
        help="share of zeros of tensors in whose name REGEX is found; may be repeated, the first match counts",
    )
    how_many.add_argument(
        "--allocation",
        choices=ALLOCATIONS,
        default="uniform",
        help="uniform: the same share in each tensor (default); owl: more in blocks with fewer outliers, the same in "
        "total (outlier-weighed layerwise sparsity, arXiv 2310.05175; needs statistics)",
    )
    how_many.add_argument(
        "--owl-m",
        type=float,
        default=float(OWL_M),
        metavar="M",
        help="an outlier is above M times the mean (default: %(default)g)",
    )
    how_many.add_argument(
        "--owl-lambda",
        default=str(float(OWL_LAMBDA)),
        metavar="L",
        help="blocks differ by at most 2 L (default: %(default)s)",
    )
    how_many.add_argument(
        "--pattern",
        metavar="N:M",
        help="N of every M neighbours in a row stay, for example 2:4, in place of --sparsity",
    )
    which = parser.add_argument_group("which weights")
    which.add_argument(
        "--method",
        choices=sorted(METHODS),
        default="magnitude",
        help="magnitude: the smallest (default); wanda: the smallest, times the norm of their inputs (needs "
        "statistics); sparsegpt: those that changes of others can best make up for (needs -f)",
    )
    which.add_argument(
        "--per",
        choices=["row", "tensor", "model"],
        help="compare weights within each row (default), each matrix, or all that is pruned; sparsegpt always compares "
        "within 128 columns of a matrix",
    )
    only = which.add_mutually_exclusive_group()
    only.add_argument(
        "--include-weights",
        metavar="NAME",
        action="append",
        default=[],
        help="prune the tensors (of 2 dimensions or more) whose names contain NAME, and no others; may be repeated",
    )
    only.add_argument(
        "--exclude-weights",
        metavar="NAME",
        action="append",
        default=[],
        help="leave tensors whose names contain NAME as they are",
    )
    statistics = parser.add_argument_group("statistics of the inputs")
    statistics.add_argument(
        "--imatrix",
        metavar="FILE",
        help="from `macko calibrate` or llama-imatrix, of the same model, for wanda and owl",
    )
    statistics.add_argument("-f", "--file", metavar="FNAME", help="calibration text, to take them from now")
    statistics.add_argument(
        "--chunks", type=int, default=128, metavar="N", help="chunks of the text to use (default: 128; -1: all)"
    )
    statistics.add_argument(
        "-c", "--ctx-size", type=int, default=N_CTX, metavar="N", help=f"tokens of a chunk (default: {N_CTX})"
    )
    statistics.add_argument(
        "--sequential",
        action="store_true",
        help="take the statistics of each block anew after the blocks before it are pruned (wanda and sparsegpt, with "
        "-f): one pass over the text per block",
    )
    statistics.add_argument(
        "--damping",
        type=float,
        default=sparsegpt.DAMPING,
        metavar="D",
        help="sparsegpt: added to second moments, times their mean (default: %(default)s)",
    )
    statistics.add_argument(
        "--hessian-memory",
        type=int,
        default=2048,
        metavar="MIB",
        help="sparsegpt: memory for second moments; less means more passes over the text (default: %(default)s)",
    )
    statistics.add_argument(
        "-dev",
        "--device",
        choices=["auto", "none"],
        default="auto",
        help="sparsegpt: auto (the default) prunes on a GPU where CuPy is installed and finds one, none on the CPU",
    )
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads (default: all cores)")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be done")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def parse_sparsity(text: str, what: str = "--sparsity") -> Fraction:
    """Exact: 0.7 of 10 weights is 7, whatever binary floating point makes of 0.7."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if not 0 <= value <= 1:
        raise errors.error(errors.BAD_ARGUMENT, f"{what} {text}: expected a number from 0 to 1")
    return value


def parse_table(text: str) -> tuple:
    pattern, equals, sparsity = text.rpartition("=")
    if not equals or not pattern:
        raise errors.error(errors.BAD_ARGUMENT, f"--tensor-sparsity {text}: expected REGEX=S")
    try:
        return re.compile(pattern), parse_sparsity(sparsity, f"--tensor-sparsity {pattern}=")
    except re.error as e:
        raise errors.error(errors.BAD_ARGUMENT, f"--tensor-sparsity {text}: {e}") from e


def parse_pattern(text: str) -> tuple:
    found = re.fullmatch(r"(\d{1,4}):(\d{1,4})", text)
    n, m = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < n < m:
        raise errors.error(errors.BAD_ARGUMENT, f"--pattern {text}: expected N:M with 0 < N < M")
    return n, m


def parse_options(args: argparse.Namespace) -> Options:
    def refuse_if(wrong: bool, text: str) -> None:
        if wrong:
            raise errors.error(errors.BAD_ARGUMENT, text)

    pattern = parse_pattern(args.pattern) if args.pattern is not None else None
    per = args.per or METHODS[args.method]
    if pattern is not None:
        refuse_if(
            args.sparsity is not None or bool(args.tensor_sparsity) or args.allocation != "uniform" or bool(args.per),
            "--pattern says how many weights go: leave out --sparsity, --tensor-sparsity, --allocation and --per",
        )
        sparsity = 1 - Fraction(*pattern)
    else:
        refuse_if(args.sparsity is None, "--sparsity (or --pattern) is missing")
        sparsity = parse_sparsity(args.sparsity)
    refuse_if(
        args.method == "sparsegpt" and args.per not in (None, "tensor"),
        f"--per {per} does not go with sparsegpt, which compares within 128 columns of a matrix",
    )
    refuse_if(
        per == "model" and (args.allocation != "uniform" or args.sequential),
        "--per model goes neither with --allocation owl nor with --sequential",
    )
    refuse_if(args.sequential and args.method == "magnitude", "--sequential: magnitude needs no statistics")
    refuse_if(
        not args.file and (args.method == "sparsegpt" or args.sequential),
        f"{'--sequential' if args.sequential else 'sparsegpt'} needs a calibration text: -f FNAME",
    )
    needs = args.method if args.method == "wanda" else args.allocation
    refuse_if(
        not args.file and not args.imatrix and needs in ("wanda", "owl"),
        f"{needs} needs statistics: --imatrix FILE (see `macko calibrate`) or -f FNAME",
    )
    refuse_if(args.chunks == 0 or args.ctx_size < 2, "--chunks 0 or -c below 2 measures nothing")
    refuse_if(not 0 < args.damping < float("inf"), f"--damping {args.damping:g}: expected a positive number")
    refuse_if(args.hessian_memory < 1, f"--hessian-memory {args.hessian_memory}: expected at least 1")
    refuse_if(not 0 < args.owl_m < float("inf"), f"--owl-m {args.owl_m:g}: expected a positive number")
    return Options(
        sparsity=sparsity,
        method=args.method,
        per=per,
        pattern=pattern,
        allocation=args.allocation,
        owl_m=args.owl_m,
        owl_lambda=parse_sparsity(args.owl_lambda, "--owl-lambda"),
        table=tuple(parse_table(text) for text in args.tensor_sparsity),
        imatrix=args.imatrix,
        text=args.file,
        n_chunks=args.chunks,
        n_ctx=args.ctx_size,
        sequential=args.sequential,
        damping=args.damping,
        hessian_memory=args.hessian_memory << 20,
        device=args.device,
        n_threads=args.threads,
    )


def run(args: argparse.Namespace) -> int:
    options = parse_options(args)
    if not args.output and not args.dry_run:
        raise errors.error(errors.BAD_ARGUMENT, "OUT is missing (or use --dry-run)")
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(Model(args.input))
        pool = stack.enter_context(ThreadPoolExecutor(args.threads or None))
        tensors = tensors_to_prune(model, args.include_weights, args.exclude_weights)
        output = None
        if not args.dry_run:
            inputs = [*model.paths, *(path for path in (args.imatrix, args.file) if path)]
            output = stack.enter_context(AtomicOutput(args.output, inputs, args.force))
        pruned = prune_model(model, tensors, options, output, pool, stack)
        if output is not None:
            output.seal()
            check_pruned(model, output, pruned, changed=options.method == "sparsegpt")
            output.commit()
        print_pruned(model, pruned, options)
    return 0


def tensors_to_prune(model: Model, include: list, exclude: list) -> list:
    if model.is_sparse:
        raise errors.error(errors.BAD_ARGUMENT, f"{model.path}: is a sparse file; use `macko restore` first")
    chosen = select(model, include, exclude)
    refused = [(t, why) for t, why in chosen if why]
    for t, why in refused:
        console.log(f"warning: {t.name} stays as it is: {why}")
    tensors = [t for t, why in chosen if not why]
    if not tensors:
        hint = f"{refused[0][0].name} has {refused[0][1]}" if refused else "no tensor has such a name"
        raise errors.error(errors.BAD_ARGUMENT, f"{model.path}: nothing to prune: {hint}")
    return tensors


def print_pruned(model: Model, pruned: list, options: Options) -> None:
    rows = []
    for p in pruned:
        t = p.tensor
        shape = "x".join(map(str, t.ne))
        rows.append([t.name, shape, type_name(t.type), p.n_zeros_before, p.n_zeros, p.n_zeros / t.n_elements])
    n = sum(p.tensor.n_elements for p in pruned)
    zeros = sum(p.n_zeros for p in pruned)
    rows.append(["total", "", "", sum(p.n_zeros_before for p in pruned), zeros, zeros / n])
    print(console.table(rows, ["tensor", "shape", "type", "zeros before", "zeros", "sparsity"]))
    n_all = sum(t.n_elements for t in model.tensors)
    how = f"pattern {options.pattern[0]}:{options.pattern[1]}" if options.pattern is not None else f"per {options.per}"
    print(
        f"\n{zeros} of {n} weights in {len(pruned)} tensors are zero ({zeros / n_all:.4f} of all {n_all} parameters), "
        f"{how}"
    )
