"""The command line of `macko prune`."""

from __future__ import annotations

import argparse

from .. import console, errors
from ..commands.arguments import Number, add_chunks, add_force, add_quiet, add_threads, options_of
from ..evaluation.text_model import N_CALIBRATION_CHUNKS
from ..gguf.files import type_name
from ..pruning import options
from ..pruning.options import PruneOptions
from ..pruning.prune import PruneReport, prune

HELP = "set weights of a dense model to zero, or remove whole experts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Sets the least important weights of a dense GGUF to zero and writes a dense GGUF of the same size; then use "
        "`macko convert`. By default, the command prunes the matrices of all blocks, each expert as a separate matrix; "
        "embeddings, output head (see --include-weights), norms, biases and routers are not pruned. Exactly "
        "floor(S * n) weights of each row or matrix become zero; at equal scores, the lowest index first. Existing "
        "zeros (and -0.0) become +0. A quantized model becomes F16, and keeps the errors of its quantization."
    )
    parser.add_argument(
        "input", metavar="IN", help="dense GGUF, best with f16, bf16 or f32 weights; the first file of a split model"
    )
    parser.add_argument("output", metavar="OUT", nargs="?", help="GGUF to write (not needed with --dry-run)")
    _add_how_many(parser.add_argument_group("how many weights"))
    _add_which(parser.add_argument_group("which weights"))
    _add_experts(parser.add_argument_group("whole experts"))
    _add_statistics(parser.add_argument_group("statistics of the inputs"))
    add_threads(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the report and write nothing")
    add_force(parser)
    add_quiet(parser)


def _add_how_many(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sparsity", metavar="S", help="share of zeros, 0 ... 1, for example 0.5")
    group.add_argument(
        "--tensor-sparsity",
        metavar="REGEX=S",
        action="append",
        default=[],
        help="share of zeros of the tensors whose names match REGEX; repeatable, the first match counts",
    )
    group.add_argument(
        "--allocation",
        choices=options.ALLOCATIONS,
        default="uniform",
        help="uniform: the same share in each tensor (default); loss: the shares at which the loss on the text rises "
        "least, measured with one tensor pruned at a time (needs -f)",
    )
    group.add_argument(
        "--loss-shift",
        default=str(float(options.LOSS_SHIFT)),
        metavar="D",
        help="--allocation loss: largest difference between a tensor's sparsity and the mean (default: %(default)s)",
    )


def _add_which(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--method",
        choices=sorted(options.METHODS),
        default="magnitude",
        help="magnitude: prune the smallest weights (default); wanda: the smallest products of weight and norm of its "
        "inputs (needs statistics); sparsegpt: the weights whose loss the others can best compensate (needs -f); alps: "
        "the same, chosen from the whole matrix: better and slower (needs -f)",
    )
    group.add_argument(
        "--compare-within",
        choices=["row", "tensor", "model"],
        help="compare weights within each row (default), each matrix, or all pruned matrices; sparsegpt always "
        "compares within 128 columns of a matrix, alps within the matrix",
    )
    group.add_argument(
        "--refit",
        action="store_true",
        help="magnitude, wanda and sparsegpt: fit the remaining weights to the outputs of the dense matrix (needs -f)",
    )
    group.add_argument(
        "--asymmetric",
        type=Number(0, 1, float),
        metavar="A",
        help="alps and --refit: renew the statistics for each input of a block, and correct the share A (0 ... 1) of "
        "the changes that earlier matrices made to it; takes two passes over the text per input, each through about "
        "half of the model, or through one block with PyTorch, if both models fit into half of the memory",
    )
    group.add_argument(
        "--quant-values",
        choices=options.VALUES,
        help="after pruning, fit the remaining weights to values of this quantized type, so that they compensate for "
        "each other's errors; `macko convert ... sparse-q4` (and so on) finds the same values (needs -f); without "
        "--sparsity, only existing zeros stay zero",
    )
    group.add_argument(
        "--keep-mantissa",
        action="store_true",
        help="sparsegpt, alps and --refit: give changed weights all bits of the type (default: round them to the "
        "significant bits of the tensor's weights, 8 from BF16, 11 from F16, for a small sparse-lossless file)",
    )
    only = group.add_mutually_exclusive_group()
    for option, name, what in (
        ("--include-weights", "include", "prune only tensors (of 2 dimensions or more) whose names contain NAME"),
        ("--exclude-weights", "exclude", "do not prune tensors whose names contain NAME"),
    ):
        only.add_argument(option, dest=name, metavar="NAME", action="append", default=[], help=f"{what}; repeatable")


def _add_experts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--experts",
        metavar="S",
        help="remove the share S (0 ... 1) of the experts of each block, with their rows of the router; needs -f. "
        "Experts are removed before zeros are made, and without --sparsity no zeros are made: the weights keep their "
        "types, also quantized ones",
    )
    group.add_argument(
        "--expert-score",
        choices=options.EXPERT_SCORES,
        default="reap",
        help="which experts are removed first; reap: those with the lowest mean norm of output times router weight, "
        "over the tokens that are routed to them (default); frequency: those of the fewest tokens; random: any",
    )
    group.add_argument(
        "--seed",
        type=Number(0),
        default=0,
        metavar="N",
        help="--expert-score random: number of the choice (default: 0)",
    )


def _add_statistics(group: argparse._ArgumentGroup) -> None:
    needs_hessians = "sparsegpt, alps, --refit, --quant-values"
    group.add_argument("--imatrix", metavar="FILE", help="wanda: file of `macko calibrate` or llama-imatrix")
    group.add_argument("-f", "--file", dest="text", metavar="FNAME", help="text to measure statistics on")
    add_chunks(group, N_CALIBRATION_CHUNKS, "chunks to use, spread evenly over the text")
    group.add_argument(
        "--sequential",
        action="store_true",
        help="measure the statistics of each block after the blocks before it are pruned: one pass over the text per "
        "block (not for magnitude; needs -f)",
    )
    group.add_argument(
        "--damping",
        type=Number(0, kind=float),
        default=options.DAMPING,
        metavar="D",
        help=f"{needs_hessians}: added to the diagonal of second moments, as a multiple of its mean (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--hessian-memory",
        type=Number(1),
        metavar="MIB",
        help=f"{needs_hessians}: memory for second moments; less memory means more passes over the text and the same "
        "result (default: half of the free memory)",
    )
    group.add_argument(
        "-dev",
        "--device",
        choices=["auto", "none"],
        default="auto",
        help=f"{needs_hessians}: auto prunes on a GPU if CuPy is installed and finds one (default), none on the CPU",
    )


def parse_table_entry(text: str) -> tuple[str, str]:
    """The regular expression and the sparsity of REGEX=S. Raises UsageError if there is no "="."""
    regex, equals, sparsity = text.rpartition("=")
    if not equals or not regex:
        raise errors.usage_error(f"--tensor-sparsity {text}: expected REGEX=S")
    return regex, sparsity


def prune_options(args: argparse.Namespace) -> PruneOptions:
    return options_of(
        PruneOptions,
        args,
        tensor_sparsity=[parse_table_entry(text) for text in args.tensor_sparsity],
        hessian_memory=None if args.hessian_memory is None else args.hessian_memory << 20,
    )


def run(args: argparse.Namespace) -> int:
    if not args.output and not args.dry_run:
        raise errors.usage_error("OUT is missing (or use --dry-run)")
    output = None if args.dry_run else args.output
    print_report(prune(args.input, output, prune_options(args), force=args.force))
    return 0


def print_report(report: PruneReport) -> None:
    if report.experts is not None:
        n_before, n_after, n_blocks = report.experts
        print(
            f"{n_after} of {n_before} experts remain in each of {n_blocks} blocks; the model has {report.n_parameters} "
            "parameters"
        )
    if report.tensors:
        print_zeros(report)


def print_zeros(report: PruneReport) -> None:
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
