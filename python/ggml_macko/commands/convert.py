"""`macko convert IN OUT [TYPE] [nthreads]`: stores a pruned model sparse."""

from __future__ import annotations

import argparse
import time

from .. import console, errors
from ..codecs import ggml_quants, registry
from ..commands.arguments import Number, add_hub, add_quiet, add_threads, threads
from ..conversion.convert import ConversionReport, ConvertOptions, checked_type, convert
from ..conversion.verify import error_line
from ..huggingface.hub import download
from ..huggingface.to_gguf import OUTTYPES, as_gguf
from ..values import TYPE_NAMES

HELP = "store a pruned model sparse"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a sparse GGUF: weights of blocks (and output.weight) sparse where that is smaller, everything else as "
        "it is. Lossless, but for the quantized types: the result is read back and compared bit for "
        "bit (quantized: within the type's error, zeros kept) before it gets its name. A -0.0, as W * mask leaves it, "
        "becomes 0 in sparse tensors; a line says how many."
    )
    parser.add_argument(
        "input",
        metavar="IN",
        nargs="?",
        help="GGUF model; the first file of a split one; or the folder of a Hugging Face checkpoint, where llama.cpp's "
        "convert_hf_to_gguf.py is installed",
    )
    parser.add_argument("output", metavar="OUT", nargs="?", help="sparse GGUF to write (not needed with --dry-run)")
    parser.add_argument(
        "type",
        metavar="TYPE",
        nargs="?",
        default=registry.AUTO,
        help="auto (default): for each tensor whatever is smallest of macko, packed and sparse-lossless. macko: "
        "non-zeros and the gaps between them, with the number of delta bits that makes each tensor smallest; macko-d1, "
        "macko-d2, macko-d4, macko-d8: that many. packed: non-zeros without fillers behind a bitmap or gap codes. "
        "sparse-lossless: packed, with the non-zeros coded in 10 to 14 bits, bit for bit, where that is smaller. "
        "ec-csr, ec-csr-4, ec-csr-8: blocks of rows that share columns, with delta bits as macko; lossless, too, but "
        "it takes seconds per tensor, so that auto leaves it out. sparse-q8_0, sparse-q5_0, "
        "sparse-q4_nl, sparse-q4_0: packed, with the non-zeros quantized (lossy), or dense in that type where there "
        "are next to no zeros; q4_nl is as large as q4_0, and loses less where zeros were pruned; elsewhere it is "
        "q4_0",
    )
    add_threads(parser, "nthreads", nargs="?")
    add_hub(parser, "in place of IN: a GGUF or a checkpoint of a repository on the Hugging Face hub")
    parser.add_argument(
        "--hf-outtype",
        choices=OUTTYPES,
        default="auto",
        help="of a checkpoint: the type of its dense weights in the GGUF (default: auto, what convert_hf_to_gguf.py "
        "takes from the checkpoint)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="of a checkpoint: let the converter run Python code that it names (auto_map), its own or that of another "
        "repository",
    )
    parser.add_argument(
        "--tensor-type",
        metavar="REGEX=TYPE",
        action="append",
        default=[],
        help="TYPE, or dense, for tensors in whose name REGEX is found; may be repeated, the first match counts",
    )
    parser.add_argument(
        "--keep-negative-zeros",
        action="store_true",
        help="store -0.0 like any other value: bit for bit the source, but larger and slower where pruning left many; "
        "without it -0.0 counts as 0, with the same results (quantized, it always does)",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be written")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    add_block_arguments(parser)
    add_quantization_arguments(parser)
    add_quiet(parser)


def add_block_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--granularity",
        type=Number(1, 64),
        default=16,
        metavar="N",
        help="ec-csr: at most N rows in a block, 1, 2, 4 ... 64 (default: 16)",
    )
    parser.add_argument(
        "--min-columns",
        type=Number(0),
        default=0,
        metavar="N",
        help="ec-csr: at least N columns in an extracted block, a multiple of 128 (default: as many as save bytes)",
    )
    parser.add_argument(
        "--seed",
        type=Number(0, 2**64 - 1),
        default=0,
        metavar="N",
        help="ec-csr: of the order in which rows are paired (default: 0)",
    )


def add_quantization_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--imatrix",
        metavar="FNAME",
        help="quantized types: weigh errors by the inputs of a calibration text (macko calibrate, llama-imatrix)",
    )
    parser.add_argument(
        "--target-bpw",
        type=Number(0, 64, float),
        metavar="X",
        help=f"with auto: for each tensor one of {', '.join(registry.mixed_types())}, or of ggml's types where it is "
        "dense or nearly so, so that the whole file has at most X bits per weight and the sum of relative squared "
        "errors is least",
    )
    dense_types = ", ".join((*ggml_quants.DENSE_TYPES, "dense (as it is)"))
    parser.add_argument(
        "--output-tensor-type",
        metavar="TYPE",
        help="type of output.weight (or of the embedding that stands for it), which stays dense: "
        f"{dense_types} (default with a quantized TYPE: q8_0 for sparse-q8_0 or if the columns are no multiple of 256, "
        "else q6_k; a pruned head becomes sparse)",
    )
    parser.add_argument("--token-embedding-type", metavar="TYPE", help="the same for token_embd.weight")


def convert_options(args: argparse.Namespace) -> ConvertOptions:
    return ConvertOptions(
        overrides=tuple(split_override(text) for text in args.tensor_type),
        keep_negative_zeros=args.keep_negative_zeros,
        granularity=args.granularity,
        min_columns=args.min_columns,
        seed=args.seed,
        imatrix=args.imatrix,
        target_bpw=args.target_bpw,
        output_tensor_type=args.output_tensor_type,
        token_embedding_type=args.token_embedding_type,
        n_threads=args.nthreads,
    )


def split_override(text: str) -> tuple[str, str]:
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise errors.usage_error(f"--tensor-type {text}: expected REGEX=TYPE")
    return pattern, name


def shift_positional(args: argparse.Namespace) -> None:
    """With -hf there is no IN: the first argument is OUT, the second TYPE, the third the number of threads."""
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
