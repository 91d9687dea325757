"""`macko verify A B`: compares two models bit for bit, but for the signs of zeros."""

from __future__ import annotations

import argparse
import dataclasses

from .. import console
from ..commands.arguments import add_quiet
from ..conversion.verify import error_line, verify

HELP = "compare two models bit for bit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares two GGUF models bit for bit, each dense, sparse or split: metadata, tensor names, types, shapes, "
        "values. Prints the first difference and exits with 1, or says that they are identical and exits with 0. Where "
        "only the sign of a zero differs, as `macko convert` leaves it, it says how many. "
        "Tensors that one of the models has with quantized values need not be identical: their errors are printed, and "
        "the exit code is 0 if they are within what the type allows and zeros stayed zeros."
    )
    parser.add_argument("a", metavar="A", help="a model")
    parser.add_argument("b", metavar="B", help="another")
    parser.add_argument("--no-metadata", action="store_true", help="compare tensors only")
    parser.add_argument("--exact", action="store_true", help="-0.0 in place of 0.0 is a difference, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads (default: all cores)")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    found = verify(args.a, args.b, metadata=not args.no_metadata, exact=args.exact, n_threads=args.threads)
    if args.json:
        console.print_json({"identical": found.is_identical, "equal": found.is_equal, **dataclasses.asdict(found)})
        return 0 if found.is_equal else 1
    if found.difference is not None:
        print(found.difference)
        return 1
    but = f", but for {found.n_negative_zeros} negative zeros" if found.n_negative_zeros else ""
    if found.quantized:
        rows = [[e.name, e.value_type, e.max_error, e.rms_relative, e.rms_relative_max] for e in found.quantized]
        print(console.table(rows, ["tensor", "values", "max error", "RMS / row RMS", "worst row"]))
        print(f"not identical: {error_line(found.quantized)}; everything else is identical{but}")
        return 0
    print(
        f"identical{but}: {found.n_tensors} tensors, {console.size(found.nbytes_dense)} of dense data "
        f"(stored sparse: {found.n_sparse[0]} in A, {found.n_sparse[1]} in B)"
    )
    return 0
