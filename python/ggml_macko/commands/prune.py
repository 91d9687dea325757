"""The command line of `macko prune`."""

from __future__ import annotations

import argparse

from .. import console, errors
from ..commands.arguments import add_quiet
from ..evaluation.text_model import N_CALIBRATION_CHUNKS, N_CTX
from ..gguf.files import type_name
from ..pruning import options
from ..pruning.options import PruneOptions
from ..pruning.prune import PruneReport, prune

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
    _add_how_many(parser.add_argument_group("how many weights"))
    _add_which(parser.add_argument_group("which weights"))
    _add_statistics(parser.add_argument_group("statistics of the inputs"))
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads (default: all cores)")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be done")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    add_quiet(parser)


def _add_how_many(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sparsity", metavar="S", help="share of zeros, 0 ... 1, for example 0.5")
    group.add_argument(
        "--tensor-sparsity",
        metavar="REGEX=S",
        action="append",
        default=[],
        help="share of zeros of tensors in whose name REGEX is found; may be repeated, the first match counts",
    )
    group.add_argument(
        "--allocation",
        choices=options.ALLOCATIONS,
        default="uniform",
        help="uniform: the same share in each tensor (default); loss: such that the loss on the text rises "
        "least, measured with one tensor pruned at a time (needs -f)",
    )
    group.add_argument(
        "--loss-shift",
        default=str(float(options.LOSS_SHIFT)),
        metavar="D",
        help="--allocation loss: a tensor's sparsity differs from the mean by at most D (default: %(default)s)",
    )


def _add_which(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--method",
        choices=sorted(options.METHODS),
        default="magnitude",
        help="magnitude: the smallest (default); wanda: the smallest, times the norm of their inputs (needs "
        "statistics); sparsegpt: those that changes of others can best make up for (needs -f); alps: the same, "
        "chosen from the whole matrix: better and slower (needs -f)",
    )
    group.add_argument(
        "--compare-within",
        choices=["row", "tensor", "model"],
        help="compare weights within each row (default), each matrix, or all that is pruned; sparsegpt always compares "
        "within 128 columns of a matrix, alps within the matrix",
    )
    group.add_argument(
        "--refit",
        action="store_true",
        help="magnitude, wanda and sparsegpt: fit the weights that stay to the outputs of the dense matrix (needs -f)",
    )
    group.add_argument(
        "--asymmetric",
        type=float,
        metavar="A",
        help="alps and --refit: take statistics anew for each input of a block, and correct the share A (0 ... 1) of "
        "what the matrices before have changed in it: two passes over the text for each input, about half of the model "
        "each",
    )
    group.add_argument(
        "--quant-values",
        choices=options.VALUES,
        help="then give the weights that stay values of this quantized type, each of which makes up for the errors of "
        "the others; `macko convert ... sparse-q4_nl` (and so on) finds them again (needs -f); without --sparsity, "
        "only what is zero already stays zero",
    )
    group.add_argument(
        "--keep-mantissa",
        action="store_true",
        help="sparsegpt, alps and --refit: give the weights that they change all bits of the type; without it they are "
        "rounded to the significant bits that the tensor's weights have (8 from BF16, 11 from F16), so that `macko "
        "convert ... sparse-lossless` can make them small",
    )
    only = group.add_mutually_exclusive_group()
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


def _add_statistics(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--imatrix",
        metavar="FILE",
        help="from `macko calibrate` or llama-imatrix, of the same model, for wanda",
    )
    group.add_argument("-f", "--file", metavar="FNAME", help="calibration text, to take them from now")
    group.add_argument(
        "--chunks",
        type=int,
        default=N_CALIBRATION_CHUNKS,
        metavar="N",
        help="chunks of the text to use, spread evenly over it (default: %(default)s; -1: all)",
    )
    group.add_argument(
        "-c", "--ctx-size", type=int, default=N_CTX, metavar="N", help=f"tokens of a chunk (default: {N_CTX})"
    )
    group.add_argument(
        "--sequential",
        action="store_true",
        help="take the statistics of each block anew after the blocks before it are pruned (not for magnitude; with "
        "-f): one pass over the text per block",
    )
    group.add_argument(
        "--damping",
        type=float,
        default=options.DAMPING,
        metavar="D",
        help="sparsegpt, alps, --refit, --quant-values: added to second moments, times their mean (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--hessian-memory",
        type=int,
        metavar="MIB",
        help="sparsegpt, alps, --refit, --quant-values: memory for second moments; less means more passes over the "
        "text, and "
        "the same result (default: half of what is free)",
    )
    group.add_argument(
        "-dev",
        "--device",
        choices=["auto", "none"],
        default="auto",
        help="sparsegpt, alps, --refit, --quant-values: auto (the default) prunes on a GPU where CuPy is installed "
        "and finds "
        "one, none on the CPU",
    )


def parse_table_entry(text: str) -> tuple[str, str]:
    """The regular expression and the sparsity of REGEX=S. Raises UsageError if there is no "="."""
    regex, equals, sparsity = text.rpartition("=")
    if not equals or not regex:
        raise errors.usage_error(f"--tensor-sparsity {text}: expected REGEX=S")
    return regex, sparsity


def prune_options(args: argparse.Namespace) -> PruneOptions:
    return PruneOptions(
        sparsity=args.sparsity,
        method=args.method,
        compare_within=args.compare_within,
        allocation=args.allocation,
        loss_shift=args.loss_shift,
        tensor_sparsity=[parse_table_entry(text) for text in args.tensor_sparsity],
        include=args.include_weights,
        exclude=args.exclude_weights,
        imatrix=args.imatrix,
        text=args.file,
        n_chunks=args.chunks,
        n_ctx=args.ctx_size,
        sequential=args.sequential,
        refit=args.refit,
        asymmetric=args.asymmetric,
        quant_values=args.quant_values,
        keep_mantissa=args.keep_mantissa,
        damping=args.damping,
        hessian_memory=None if args.hessian_memory is None else args.hessian_memory << 20,
        device=args.device,
        n_threads=args.threads,
    )


def run(args: argparse.Namespace) -> int:
    if not args.output and not args.dry_run:
        raise errors.usage_error("OUT is missing (or use --dry-run)")
    output = None if args.dry_run else args.output
    print_report(prune(args.input, output, prune_options(args), force=args.force))
    return 0


def print_report(report: PruneReport) -> None:
    rows: list[list[object]] = [
        [t.name, "x".join(map(str, t.ne)), type_name(t.type), t.n_zeros_before, t.n_zeros, t.sparsity]
        for t in report.tensors
    ]
    rows.append(["total", "", "", report.n_zeros_before, report.n_zeros, report.n_zeros / report.n_elements])
    print(console.table(rows, ["tensor", "shape", "type", "zeros before", "zeros", "sparsity"]))
    print(
        f"\n{report.n_zeros} of {report.n_elements} weights in {len(report.tensors)} tensors are zero "
        f"({report.n_zeros / report.n_parameters:.4f} of all {report.n_parameters} parameters), "
        f"per {report.compare_within}"
    )
