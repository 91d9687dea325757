"""The command line of `macko report`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from .. import console, errors
from ..benchmark import card
from ..benchmark.forms import Recipe
from ..benchmark.models import as_json
from ..benchmark.report import FormResult, conditions, report
from ..codecs import registry
from ..commands import convert as convert_command
from ..commands import prune as prune_command
from ..commands.arguments import add_chunks, add_force, add_gpu_layers, add_load_options, add_quiet
from ..commands.bench import add_speed_arguments
from ..conversion.convert import check_inputs as check_conversion
from ..conversion.convert import checked_type, convert
from ..gguf.files import shard_paths
from ..gguf.outputs import AtomicOutput
from ..native import cpu, devices, library
from ..pruning.options import parse
from ..pruning.prune import check_inputs, prune_with

HELP = "compare quality, size and speed of dense, quantized and sparse variants of a model"

DEFAULT_CONVERSION = registry.AUTO

MEASUREMENT = ("n_chunks", "n_ctx", "n_prompt", "n_gen", "repetitions", "n_threads")
"""Arguments that decide what is measured; report() and Measurement have the same names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures perplexity, size and speed of a dense model, of its quantized types of llama.cpp, and of sparse "
        "variants, and prints a table; -o also draws a plot and writes a web page with a sortable table and the texts "
        "that the models generate. Dense files with zeros are converted first. Sizes are those of whole files; BPW is "
        "bits per parameter of the dense model."
    )
    parser.add_argument("dense", metavar="DENSE", help="dense model in F16, BF16 or F32")
    parser.add_argument(
        "models", metavar="MODEL", nargs="*", help="variants of DENSE: sparse, quantized, or dense with zeros"
    )
    parser.add_argument(
        "-f", "--file", dest="text", required=True, metavar="FNAME", help="text to measure perplexity on"
    )
    parser.add_argument(
        "--types",
        default="Q8_0,Q4_K_M,Q4_0",
        metavar="TYPE,...",
        help="quantized types to make and compare (default: %(default)s; '' for none)",
    )
    parser.add_argument(
        "--prune",
        action="append",
        default=[],
        metavar="OPTIONS",
        help="also prune DENSE with these options of `macko prune`, for example "
        "'--method wanda --sparsity 0.5 -f calibration.txt'; repeatable",
    )
    parser.add_argument(
        "--convert",
        action="append",
        default=[],
        metavar="ARGUMENTS",
        help="arguments of `macko convert` for dense files with zeros, for example 'sparse-q4 --imatrix "
        f"imatrix.gguf --output-tensor-type q6_k'; repeatable (default: {DEFAULT_CONVERSION})",
    )
    parser.add_argument("-o", "--output", metavar="STEM", help="write STEM.png, STEM.svg and STEM.html")
    parser.add_argument(
        "--prompt",
        dest="prompts",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that each model continues in STEM.html, with the tokens of -n; repeatable (default: words from two "
        "places of the text)",
    )
    parser.add_argument(
        "--card",
        metavar="FILE.md",
        help="also write a README for a model hub: sizes, perplexities, commands, the origin of the model according to "
        "its metadata, and missing measurements",
    )
    parser.add_argument(
        "--kl-divergence",
        dest="with_kld",
        action="store_true",
        help="also compare the probabilities of all tokens with those of DENSE: KL divergence, and the share of tokens "
        "at which the same token is most probable (a temporary file has two bytes for each token of the vocabulary and "
        "of the text)",
    )
    add_force(parser, "files of -o and --card")
    add_chunks(parser, -1, "chunks of the text, spread evenly over it")
    add_gpu_layers(parser)
    add_load_options(parser)
    add_speed_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON with all samples instead of the table")
    add_quiet(parser)


# ---- options that hold the arguments of another command ----


def parse_arguments(module: ModuleType, option: str, text: str) -> argparse.Namespace:
    """The arguments of another command, without its files, from the text of one option. Raises MackoError."""
    parser = argparse.ArgumentParser(prog=option, allow_abbrev=False, exit_on_error=False)
    module.add_arguments(parser)
    try:
        args, unknown = parser.parse_known_args(["IN", "OUT", *shlex.split(text)])
    except (argparse.ArgumentError, ValueError) as e:
        raise errors.usage_error(f"{option} {text}: {e}") from e
    if unknown or args.dry_run or getattr(args, "hf", None):
        what = " ".join(unknown) or ("--dry-run" if args.dry_run else "-hf")
        raise errors.usage_error(f"{option} {text}: {what} is not allowed here")
    return args


def parse_pruning(text: str) -> Recipe:
    """The pruning that these options of `macko prune` describe. Raises MackoError."""
    args = parse_arguments(prune_command, "--prune", text)
    options = parse(prune_command.prune_options(args))
    how_many = f"{float(options.sparsity):.0%}"
    label = f"{args.method} {how_many}"
    if args.compare_within:
        label += f" per {args.compare_within}"
    if args.sequential:
        label += " sequential"
    if args.quant_values:
        label += f" {args.quant_values}"

    def make(source: Path, output: Path) -> None:
        prune_with(options, source, output, force=True)

    def check(source: Path) -> None:
        check_inputs(options, source)

    return Recipe(label, make, check)


def parse_conversion(text: str, n_threads: int) -> Recipe:
    """The conversion that these arguments of `macko convert`, after OUT, describe. Raises MackoError."""
    args = parse_arguments(convert_command, "--convert", text)
    type = checked_type(args.type)
    options = dataclasses.replace(convert_command.convert_options(args), n_threads=n_threads)
    target = f" {args.target_bpw:g} bpw" if args.target_bpw is not None else ""

    def make(source: Path, output: Path) -> None:
        convert(source, output, type, options=options, force=args.force)

    def check(source: Path) -> None:
        check_conversion(source, type, options)

    return Recipe(f"{type}{target}", make, check)


# ---- the command ----


def run(args: argparse.Namespace) -> int:
    if args.n_chunks == 0:
        raise errors.usage_error("--chunks 0 measures nothing")
    with contextlib.ExitStack() as stack:
        opened = None
        if args.card:
            inputs = [*(shard for model in (args.dense, *args.models) for shard in shard_paths(model)), args.text]
            opened = stack.enter_context(AtomicOutput(args.card, inputs, args.force, card.SIGNATURE))
        results = measure(args)
        if opened is not None:
            write_card(args, results, opened)
    if args.json:
        about = {"threads": args.n_threads, "n_prompt": args.n_prompt, "n_gen": args.n_gen}
        console.print_json({**about, "models": [as_json(r) for r in results]})
        return 0
    print_table(results, args.n_prompt, args.n_gen)
    print("\n" + conditions(results, Path(args.text), args.n_threads, args.repetitions))
    return 0


def measure(args: argparse.Namespace) -> list[FormResult]:
    return report(
        args.dense,
        args.text,
        args.models,
        types=[name for name in args.types.split(",") if name],
        prunings=[parse_pruning(text) for text in args.prune],
        conversions=[parse_conversion(text, args.n_threads) for text in args.convert or [DEFAULT_CONVERSION]],
        output=args.output or None,
        prompts=args.prompts,
        n_gpu_layers=args.gpu_layers,
        force=args.force,
        with_kld=args.with_kld,
        **{name: getattr(args, name) for name in MEASUREMENT},
    )


def write_card(args: argparse.Namespace, results: Sequence[FormResult], output: AtomicOutput) -> None:
    """Writes the card into an open output and commits it."""
    import llama_cpp

    how = card.Measurement(
        text=Path(args.text).name,
        **{name: getattr(args, name) for name in MEASUREMENT},
        gpus=tuple(gpu.description for gpu in devices.gpus()) if args.gpu_layers else (),
        kernels=cpu.cpu_kernels(),
        version=library.version(),
        llama_cpp_python=llama_cpp.__version__,
    )
    dense, *models = (card.read_model(path, args.n_threads) for path in (args.dense, *args.models))
    plot = os.path.relpath(f"{args.output}.png", output.path.parent) if args.output else ""
    output.commit_whole(card.model_card(dense, models, results, how, plot).encode("utf-8"))
    console.log(f"card: {output.path}")


def print_table(results: Sequence[FormResult], n_prompt: int, n_gen: int) -> None:
    """Prints a table. The first model is the baseline of the ratios."""
    base = results[0]

    def ratio(value: float | None, of: float | None) -> str | None:
        return f"{value:.0f} ({value / of:.2f}x)" if value and of else None

    rows = [
        [
            r.model,
            r.kind,
            f"{r.nbytes / console.MIB:.2f} ({r.nbytes / base.nbytes:.2f}x)",
            f"{r.bpw:.2f}",
            f"{r.ppl:.2f} ± {r.ppl_error:.2f}",
            f"{r.ppl / base.ppl - 1:+.1%}",
            *([f"{r.kld:.4f} nats", f"{r.same_top:.1%}"] if r.kld is not None else []),
            ratio(r.prompt_tps, base.prompt_tps),
            ratio(r.gen_tps, base.gen_tps),
        ]
        for r in results
    ]
    compared = [] if base.kld is None else ["KL divergence", "same top"]
    headers = ["model", "kind", "MiB", "BPW", "perplexity", "", *compared, f"pp{n_prompt} t/s", f"tg{n_gen} t/s"]
    print(console.table(rows, headers, ".2f"))
