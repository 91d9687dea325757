"""`macko convert IN OUT [TYPE] [nthreads]`: stores a pruned model sparse."""

from __future__ import annotations

import argparse
import time

from .. import console, errors
from ..codecs import ggml_quants, registry
from ..commands.arguments import Number, add_force, add_hub, add_quiet, add_threads, options_of, threads
from ..conversion.convert import ConversionReport, ConvertOptions, checked_type, convert
from ..conversion.verify import error_line
from ..huggingface.hub import download
from ..huggingface.to_gguf import OUTTYPES, as_gguf
from ..values import TYPE_NAMES

HELP = "store a pruned model sparse"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a sparse GGUF. Weights of blocks (and output.weight, and token_embd.weight if it is pruned) become "
        "sparse if that is smaller; other tensors stay the same. All types except the quantized ones are lossless. The "
        "command reads the result and compares it bit for bit (quantized types: within the error of the type, with the "
        "same zeros) before it gives the file its name. A -0.0, which W * mask leaves, becomes 0 in sparse tensors; "
        "the log has their number."
    )
    parser.add_argument(
        "input",
        metavar="IN",
        nargs="?",
        help="GGUF model; the first file of a split model; or the folder of a Hugging Face checkpoint, if llama.cpp's "
        "convert_hf_to_gguf.py is installed",
    )
    parser.add_argument("output", metavar="OUT", nargs="?", help="sparse GGUF to write (not needed with --dry-run)")
    parser.add_argument(
        "type",
        metavar="TYPE",
        nargs="?",
        default=registry.AUTO,
        help="auto (default): the smallest of macko, packed and sparse-lossless for each tensor. macko: non-zeros and "
        "the gaps between them, with the best number of delta bits for each tensor; macko-d1, macko-d2, macko-d4, "
        "macko-d8: with this number. packed: non-zeros without fillers, and a bitmap or gap codes. sparse-lossless: "
        "packed, with non-zeros coded in 10 to 14 bits, bit for bit, if that is smaller. ec-csr, ec-csr-4, ec-csr-8: "
        "blocks of rows that share columns, with delta bits as in macko; lossless, but not part of auto, because "
        "encoding takes seconds per tensor. sparse-q8, sparse-q5, sparse-q4, sparse-q3: non-zeros in so many bits "
        "(lossy), with scales for windows of columns and levels that fit the tensor, or dense in a type of as many "
        "bits (q8_0, q5_0, q4_0, q3_k) if there are almost no zeros",
    )
    add_threads(parser, "nthreads", nargs="?")
    add_hub(parser, "replaces IN: a GGUF or a checkpoint from a repository on the Hugging Face hub")
    parser.add_argument(
        "--hf-outtype",
        choices=OUTTYPES,
        default="auto",
        help="checkpoint: type of its dense weights in the GGUF (default: auto, the choice of convert_hf_to_gguf.py)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="checkpoint: let the converter run Python code that the checkpoint names (auto_map), from this or another "
        "repository",
    )
    parser.add_argument(
        "--tensor-type",
        metavar="REGEX=TYPE",
        action="append",
        default=[],
        help="TYPE, or dense, of the tensors whose names match REGEX; repeatable, the first match counts",
    )
    parser.add_argument(
        "--keep-negative-zeros",
        action="store_true",
        help="store -0.0 as a value: bit for bit the source, but larger and slower if pruning left many (default: -0.0 "
        "counts as 0, with the same results; always so for quantized types)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the report and write nothing")
    add_force(parser)
    add_block_arguments(parser)
    add_quantization_arguments(parser)
    add_quiet(parser)


def add_block_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--granularity",
        type=Number(1, 64),
        default=16,
        metavar="N",
        help="ec-csr: largest number of rows in a block, 1, 2, 4 ... 64 (default: 16)",
    )
    parser.add_argument(
        "--min-columns",
        type=Number(0),
        default=0,
        metavar="N",
        help="ec-csr: smallest number of columns in an extracted block, a multiple of 128 (default: as many as save "
        "bytes)",
    )
    parser.add_argument(
        "--seed",
        type=Number(0, 2**64 - 1),
        default=0,
        metavar="N",
        help="ec-csr: seed of the order in which rows are paired (default: 0)",
    )


def add_quantization_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--imatrix",
        metavar="FNAME",
        help="quantized types: weight errors by the inputs on a calibration text (macko calibrate, llama-imatrix)",
    )
    parser.add_argument(
        "--target-bpw",
        type=Number(0, 64, float),
        metavar="X",
        help=f"with auto: use {', '.join(registry.mixed_types())} for sparse tensors and ggml's types for dense or "
        "nearly dense ones, with at most X bits per weight in the whole file and the least sum of relative squared "
        "errors",
    )
    dense_types = ", ".join((*ggml_quants.DENSE_TYPES, "dense (as it is)"))
    parser.add_argument(
        "--output-tensor-type",
        metavar="TYPE",
        help="type of output.weight (or of the embedding that replaces it), which stays dense: "
        f"{dense_types} (default with a quantized TYPE: q8_0 for sparse-q8 or if the columns are no "
        "multiple of 256, otherwise q6_k; a pruned tensor becomes sparse)",
    )
    parser.add_argument("--token-embedding-type", metavar="TYPE", help="the same for token_embd.weight")


def convert_options(args: argparse.Namespace) -> ConvertOptions:
    overrides = tuple(split_override(text) for text in args.tensor_type)
    return options_of(ConvertOptions, args, overrides=overrides, n_threads=args.nthreads)


def split_override(text: str) -> tuple[str, str]:
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise errors.usage_error(f"--tensor-type {text}: expected REGEX=TYPE")
    return pattern, name


def shift_positional(args: argparse.Namespace) -> None:
    """Shifts the arguments for -hf, which replaces IN: OUT, TYPE and the number of threads."""
    has_type = args.output is not None
    if args.type != registry.AUTO:
        try:
            args.nthreads = threads(args.type)
        except argparse.ArgumentTypeError:
            raise errors.usage_error(f"-hf stands for IN, and {args.type!r} is one argument too many") from None
    args.input, args.output, args.type = None, args.input, args.output if has_type else registry.AUTO


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    if args.hf is not None:
        shift_positional(args)
    elif args.input is None:
        raise errors.usage_error("IN is missing (or use -hf)")
    if args.dry_run and args.output and registry.type_named(args.output):  # `convert IN macko --dry-run`
        args.output, args.type = None, args.output
    if not args.output and not args.dry_run:
        raise errors.usage_error("OUT is missing (or use --dry-run)")
    output = None if args.dry_run else args.output
    with as_gguf(
        args.input if args.hf is None else download(args.hf), output, args.hf_outtype, args.trust_remote_code
    ) as source:
        done = convert(source, output, checked_type(args.type), options=convert_options(args), force=args.force)
    if args.dry_run:
        print_tensors(done)
    print_totals(done)
    if done.quantized:
        console.log(f"lossy: {error_line(done.quantized)}")
        lossy = {e.name for e in done.quantized if e.rms_relative > 0}
        if args.imatrix is None and any(t.is_sparse and t.name in lossy for t in done.tensors):
            console.log("note: an imatrix (macko calibrate, then --imatrix) reduces the loss, sometimes to a tenth")
    if done.load_error is not None:
        console.log(f"warning: ggml_macko will refuse to load this model: {done.load_error}")
    if not args.dry_run:
        console.log(f"total time  = {(time.monotonic() - started) * 1000:8.2f} ms")
    return 0


def print_tensors(done: ConversionReport) -> None:
    rows = []
    for t in done.tensors:
        size, new_size = console.size(t.nbytes_source), console.size(t.nbytes)
        shape, bpw = "x".join(map(str, t.shape)), round(t.bits_per_weight, 2)
        rows.append([t.name, shape, t.type, t.density, size, new_size, t.storage, bpw, t.break_even_density, t.note])
    headers = [
        "tensor",
        "shape",
        "type",
        "density",
        "size",
        "new size",
        "new type",
        "BPW",
        "break-even density",
        "note",
    ]
    print(console.table(rows, headers))


def print_totals(done: ConversionReport) -> None:
    print(console.model_line("model size", done.nbytes_source, done.n_parameters))
    print(console.model_line("sparse size", done.nbytes, done.n_parameters))
    bad = [t.name for t in done.tensors if t.note.endswith("values are not finite")]
    if bad:
        more = ", ..." if len(bad) > 1 else ""
        console.log(f"warning: {len(bad)} tensor(s) with values that are not finite: {bad[0]}{more}")
    n_dense = sum(bool(t.note) and not t.is_sparse for t in done.tensors)
    if not done.n_sparse:
        is_quantized = any(t.note and t.type not in TYPE_NAMES.values() for t in done.tensors)
        hint = "; its weights are quantized: `macko prune` dequantizes and prunes them" if is_quantized else ""
        console.log(f"warning: no tensor would shrink; the output is a dense file{hint}")
    elif n_dense:
        console.log(f"warning: {n_dense} of {len(done.tensors)} tensor(s) stay dense, see above")
    if done.n_negative_zeros:  # masks leave them: w * 0 is -0.0 for a negative w
        n = sum(t.n_elements for t in done.tensors if t.is_sparse)
        console.log(
            f"{done.n_negative_zeros} negative zeros ({done.n_negative_zeros / n:.1%} of the sparse tensors' weights) "
            "count as zeros; --keep-negative-zeros keeps them"
        )
