"""`macko verify A B`: compares two models bit for bit, except for the signs of zeros."""

from __future__ import annotations

import argparse
import dataclasses

from .. import console
from ..commands.arguments import add_quiet, add_threads
from ..conversion.verify import error_line, verify

HELP = "compare two models bit for bit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares the metadata, tensor names, types, shapes and values of two GGUF models, each dense, sparse or "
        "split, bit for bit. Prints the first difference and exits with 1, or prints that they are identical and exits "
        "with 0. Zeros that differ only in their sign, as after `macko convert`, are counted and allowed. "
        "Tensors with quantized values in one of the models need not be identical: the command prints their errors, "
        "and exits with 0 if the RMS errors of each tensor and each row are within the limit for the bits of the type, "
        "and zeros are still zeros."
    )
    parser.add_argument("a", metavar="A", help="GGUF model")
    parser.add_argument("b", metavar="B", help="GGUF model to compare with")
    parser.add_argument("--no-metadata", action="store_true", help="compare tensors only")
    parser.add_argument("--exact", action="store_true", help="treat -0.0 in place of 0.0 as a difference")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_threads(parser)
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    found = verify(args.a, args.b, metadata=not args.no_metadata, exact=args.exact, n_threads=args.n_threads)
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
