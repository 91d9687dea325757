"""Sets weights of a dense GGUF to zero: `macko prune IN OUT --sparsity S`.

Magnitude gives each weight a score; the lowest scores of each row (or matrix) become +0. Counts are exact: floor(S *
n) of n, ties go to the lowest index, so the result does not depend on threads, NumPy or the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Callable

import numpy as np

from . import bindings, console, errors, formats, weights
from .gguf_files import AtomicOutput, Model, NewTensor, Tensor, Writer, make_key, type_name

BLOCK_ELEMENTS = 1 << 21  # weights that are scored and sorted at a time


# bit patterns (rows, cols), ggml type, tensor -> float32 scores >= 0
Scorer = Callable[[np.ndarray, int, Tensor], np.ndarray]


# ---- scores ----


def magnitude(bits: np.ndarray, type_id: int, tensor: Tensor) -> np.ndarray:
    """|w|, exact in float32 for all three types."""
    return np.abs(to_float32(bits, type_id))


def to_float32(bits: np.ndarray, type_id: int) -> np.ndarray:
    if type_id == formats.TYPE_F16:
        return bits.view(np.float16).astype(np.float32)
    if type_id == formats.TYPE_BF16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32)


# ---- choosing ----


def lowest_per_row(scores: np.ndarray, k: int) -> np.ndarray:
    """Boolean mask of the k lowest scores of each row; of equal scores, those of the lowest columns."""
    if k == 0:
        return np.zeros(scores.shape, dtype=bool)
    keys = np.ascontiguousarray(scores).view(np.uint32)  # the order of floats >= 0 is that of their bits
    threshold = np.partition(keys, k - 1, axis=1)[:, k - 1 : k]
    mask = keys < threshold
    room = k - mask.sum(axis=1, keepdims=True)
    equal = keys == threshold
    equal &= np.cumsum(equal, axis=1) <= room
    mask |= equal
    return mask


def by_score(score: Scorer) -> Method:
    """The method that zeroes the weights with the lowest scores."""

    def prune(bits: np.ndarray, tensor: Tensor, sparsity: Fraction, per: str, pool: ThreadPoolExecutor) -> None:
        rows, cols = bits.shape
        if per == "row":
            step, k = max(1, BLOCK_ELEMENTS // cols), int(sparsity * cols)
        else:  # an expert tensor counts as one matrix per expert
            step = tensor.ne[1]
            cols *= step
            k = int(sparsity * cols)

        def prune_rows(begin: int) -> None:
            block = bits[begin : begin + step]
            mask = lowest_per_row(score(block, tensor.type, tensor).reshape(-1, cols), k)
            block[mask.reshape(block.shape)] = 0

        list(pool.map(prune_rows, range(0, rows, step)))
        bits[bits == formats.NEGATIVE_ZERO[tensor.type]] = 0  # what a mask left of negative weights

    return prune


# A method zeroes weights of one tensor in place: bit patterns (rows, cols), tensor, share of zeros, "row" or "tensor",
# threads.
Method = Callable[[np.ndarray, Tensor, Fraction, str, ThreadPoolExecutor], None]
METHODS: dict[str, Method] = {"magnitude": by_score(magnitude)}


# ---- a whole model ----


@dataclass(frozen=True)
class Pruned:
    """What was done to a tensor."""

    tensor: Tensor
    n_zeros_before: int
    n_zeros: int


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


def prune_tensor(t: Tensor, method: str, sparsity: Fraction, per: str, pool: ThreadPoolExecutor) -> tuple:
    """(bit patterns, Pruned)."""
    bits = t.read_bits()
    before = bindings.count_dense(bits, t.type)
    if before.n_nonfinite:
        raise errors.error(errors.NOT_FINITE, f"{t.shard.path}: {t.name}: {before.n_nonfinite} values are not finite")
    METHODS[method](bits, t, sparsity, per, pool)
    n_zeros = bits.size - int(np.count_nonzero(bits))
    return bits, Pruned(t, bits.size - before.nnz, n_zeros)


def prune_model(
    model: Model, chosen: dict, method: str, sparsity: Fraction, per: str, output: AtomicOutput | None, n_threads: int
) -> list:
    """chosen: tensor names. Writes to output if there is one; returns a Pruned for each tensor of chosen."""
    out = []
    writer = None
    if output is not None:
        keys = [k for k in model.keys if not k.name.startswith("macko.prune.")] + provenance(method, sparsity, per)
        tensors = [NewTensor(t.name, t.type, t.ne, t.nbytes) for t in model.tensors]
        writer = Writer(output, keys, tensors, model.alignment)
    with ThreadPoolExecutor(n_threads or None) as pool:
        for i, t in enumerate(model.tensors):
            if t.name in chosen:
                bits, pruned = prune_tensor(t, method, sparsity, per, pool)
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


def provenance(method: str, sparsity: Fraction, per: str) -> list:
    return [
        make_key("macko.prune.method", "str", method),
        make_key("macko.prune.sparsity", "f32", float(sparsity)),
        make_key("macko.prune.per", "str", per),
    ]


def check_pruned(model: Model, output: AtomicOutput, pruned: list) -> None:
    """Reads the sealed output back: weights are those of the source or +0, with the counts that were reported."""
    n_zeros = {p.tensor.name: p.n_zeros for p in pruned}
    with Model(output.partial) as written:
        for source, result in zip(model.tensors, written.tensors):
            zeros = 0
            same = (source.name, source.type, source.ne) == (result.name, result.type, result.ne)
            for a, b in zip(source.blocks(), result.blocks()):
                if source.name in n_zeros:
                    a, b = (x.view(formats.bits_dtype(source.type)) for x in (a, b))
                    zeros += len(b) - int(np.count_nonzero(b))
                    same = same and not np.any((a != b) & (b != 0))
                else:
                    same = same and np.array_equal(a, b)
            if not same or zeros != n_zeros.get(source.name, 0):
                raise errors.error(
                    errors.FILE_CHANGED, f"{output.path}: {source.name}: what was written is not what was meant"
                )


# ---- command ----

HELP = "set weights of a dense model to zero"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sets the least important weights of a dense GGUF to zero and writes a dense GGUF of the same size; then use "
        "`macko convert`. By default the matrices of all blocks are pruned (experts too); embeddings, output head, "
        "norms, biases and routers are not. Exactly floor(S * n) weights of each row or matrix become zero, the "
        "lowest index first where scores are equal; weights that are zero already (-0.0 too) are +0 in the result "
        "whatever S is."
    )
    parser.add_argument(
        "input", metavar="IN", help="dense GGUF with f16, bf16 or f32 weights; the first file of a split one"
    )
    parser.add_argument("output", metavar="OUT", nargs="?", help="GGUF to write (not needed with --dry-run)")
    parser.add_argument("--sparsity", metavar="S", required=True, help="share of zeros, 0 ... 1, for example 0.5")
    parser.add_argument(
        "--method", choices=sorted(METHODS), default="magnitude", help="how weights are scored (default: magnitude)"
    )
    parser.add_argument(
        "--per",
        choices=["row", "tensor"],
        default="row",
        help="prune each row, or each matrix as a whole (default: row)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--include-weights",
        metavar="NAME",
        action="append",
        default=[],
        help="prune the tensors (of 2 dimensions or more) whose names contain NAME, and no others; may be repeated",
    )
    which.add_argument(
        "--exclude-weights",
        metavar="NAME",
        action="append",
        default=[],
        help="leave tensors whose names contain NAME as they are",
    )
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads (default: all cores)")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be done")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def parse_sparsity(text: str) -> Fraction:
    """Exact: 0.7 of 10 weights is 7, whatever binary floating point makes of 0.7."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if not 0 <= value <= 1:
        raise errors.error(errors.BAD_ARGUMENT, f"--sparsity {text}: expected a number from 0 to 1")
    return value


def run(args: argparse.Namespace) -> int:
    sparsity = parse_sparsity(args.sparsity)
    if not args.output and not args.dry_run:
        raise errors.error(errors.BAD_ARGUMENT, "OUT is missing (or use --dry-run)")
    with Model(args.input) as model:
        if model.is_sparse:
            raise errors.error(errors.BAD_ARGUMENT, f"{args.input}: is a sparse file; use `macko restore` first")
        chosen = select(model, args.include_weights, args.exclude_weights)
        refused = [(t, why) for t, why in chosen if why]
        for t, why in refused:
            console.log(f"warning: {t.name} stays as it is: {why}")
        names = {t.name for t, why in chosen if not why}
        if not names:
            hint = f"{refused[0][0].name} has {refused[0][1]}" if refused else "no tensor has such a name"
            raise errors.error(errors.BAD_ARGUMENT, f"{args.input}: nothing to prune: {hint}")
        if args.dry_run:
            pruned = prune_model(model, names, args.method, sparsity, args.per, None, args.threads)
        else:
            with AtomicOutput(args.output, model.paths, args.force) as output:
                pruned = prune_model(model, names, args.method, sparsity, args.per, output, args.threads)
                output.seal()
                check_pruned(model, output, pruned)
                output.commit()
        print_pruned(model, pruned, args.per)
    return 0


def print_pruned(model: Model, pruned: list, per: str) -> None:
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
    print(
        f"\n{zeros} of {n} weights in {len(pruned)} tensors are zero ({zeros / n_all:.4f} of all {n_all} parameters), "
        f"per {per}"
    )
