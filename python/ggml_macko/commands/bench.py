"""The command line of `macko bench`."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import console, errors
from ..benchmark.bench_worker import Workload
from ..benchmark.matrices import DENSE_TYPES, MatrixResult, bench_matrices
from ..benchmark.models import LabelledModel, ModelResult, as_json, bench_models, dense_twin
from ..commands.arguments import (
    Number,
    add_attention,
    add_gpu_layers,
    add_load_options,
    add_quiet,
    add_threads,
    attention_arguments,
)
from ..native import cpu, devices, library

HELP = "measure speed on this machine"

SHAPES = "4096x4096,4096x11008,11008x4096,2048x8192"
DENSITIES = "0.5,0.3,0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "With -m, measures load time, prompt and generation speed in tokens/s and peak memory of models, each run in "
        "its own process, and compares them with the dense model. Without -m, times products of random matrices and a "
        "vector on the CPU, and compares them with ggml's dense F16, Q8_0 and Q4_K kernels."
    )
    _add_model_arguments(parser)
    _add_matrix_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON with all samples")
    add_quiet(parser)


def add_speed_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the commands that measure the speed of models, without -ngl."""
    parser.add_argument(
        "-p", "--n-prompt", type=Number(0), default=128, metavar="N", help="prompt tokens (default: 128)"
    )
    parser.add_argument(
        "-n", "--n-gen", type=Number(0), default=64, metavar="N", help="tokens to generate (default: 64)"
    )
    add_threads(parser)
    parser.add_argument(
        "-r", "--repetitions", type=Number(1), default=5, metavar="N", help="rounds; results are medians (default: 5)"
    )


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m", "--model", metavar="FNAME", action="append", default=[], help="sparse or dense GGUF; may be repeated"
    )
    parser.add_argument(
        "--dense",
        metavar="FNAME",
        help="dense GGUF to compare with (default: the first sparse model, restored into a temporary file)",
    )
    add_speed_arguments(parser)
    parser.add_argument(
        "-d",
        "--n-depth",
        type=Number(0),
        default=0,
        metavar="N",
        help="tokens in the context before the timed ones (default: 0)",
    )
    add_gpu_layers(parser)
    add_attention(parser)
    add_load_options(parser)


def _add_matrix_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes", metavar="ROWSxCOLS,...", default=SHAPES, help=f"matrices without -m (default: {SHAPES})"
    )
    parser.add_argument(
        "--densities", metavar="D,...", default=DENSITIES, help=f"densities without -m (default: {DENSITIES})"
    )


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """(rows, cols) of "ROWSxCOLS,...". Raises UsageError."""
    shapes = []
    try:
        for item in text.split(","):
            rows, cols = (int(n) for n in item.split("x"))
            if min(rows, cols) < 1:
                raise ValueError
            shapes.append((rows, cols))
    except ValueError:
        raise errors.usage_error(f"--shapes {text}: expected ROWSxCOLS,...") from None
    return shapes


def parse_densities(text: str) -> list[float]:
    """The numbers of "D,...". Raises UsageError."""
    try:
        densities = [float(item) for item in text.split(",")]
        if not all(0 <= d <= 1 for d in densities):
            raise ValueError
    except ValueError:
        raise errors.usage_error(f"--densities {text}: expected numbers from 0 to 1") from None
    return densities


def run(args: argparse.Namespace) -> int:
    about: dict[str, Any] = {
        "threads": args.n_threads,
        "kernels": cpu.cpu_kernels(),
        "version": library.version(),
    }
    if args.model:
        _run_models(args, about)
    else:
        _run_matrices(args, about)
    return 0


# ---- models ----


def _run_models(args: argparse.Namespace, about: dict[str, Any]) -> None:
    models = [LabelledModel(Path(m).name, Path(m)) for m in args.model]
    if len({m.label for m in models}) != len(models):
        raise errors.usage_error("two models have the same file name")
    timed = (args.n_prompt, args.n_gen, args.n_threads)
    work = Workload(*timed, args.gpu_layers, **attention_arguments(args), depth=args.n_depth)
    with contextlib.ExitStack() as stack:
        if args.dense:
            dense = Path(args.dense)
            baseline: LabelledModel | None = LabelledModel(f"{dense.name} (dense)", dense)
        else:
            baseline = stack.enter_context(dense_twin(models))
        results = bench_models(models if baseline is None else [baseline, *models], work, args.repetitions)
    if args.json:
        tokens = {"n_prompt": args.n_prompt, "n_gen": args.n_gen, "n_depth": args.n_depth}
        cache = {"flash_attn": work.flash_attn, "type_k": args.cache_type_k, "type_v": args.cache_type_v}
        about["devices"] = [gpu.description for gpu in devices.gpus()]
        console.print_json({**about, **tokens, **cache, "models": [as_json(r) for r in results]})
        return
    print_models(results, args.n_prompt, args.n_gen, args.n_depth)
    print(
        f"\n{about['threads']} threads, kernels: {about['kernels']}; medians of {args.repetitions} interleaved runs, "
        "each in its own process"
    )


def print_models(results: Sequence[ModelResult], n_prompt: int, n_gen: int, n_depth: int = 0) -> None:
    """Prints a table. The first model is the baseline of the ratios."""
    base = results[0]

    def ratio(value: float | None, of: float | None) -> str | None:
        return None if value is None or of is None else f"{value:.2f} ({value / of:.2f}x)"

    def mib(value: float | None, of: float | None, digits: int = 0) -> str | None:
        if value is None or of is None:
            return None
        return f"{value / console.MIB:.{digits}f} MiB ({value / of:.2f}x)"

    with_gpu = base.gpu_memory is not None
    rows = [
        [
            r.model,
            mib(r.nbytes, base.nbytes, digits=1),
            mib(r.rss, base.rss),
            *([mib(r.gpu_memory, base.gpu_memory)] if with_gpu else []),
            ratio(r.load_s, base.load_s),
            ratio(r.prompt_tps, base.prompt_tps),
            ratio(r.gen_tps, base.gen_tps),
        ]
        for r in results
    ]
    gpu = ["GPU memory"] if with_gpu else []
    at = f" @ d{n_depth}" if n_depth else ""
    headers = ["model", "file", "peak RSS", *gpu, "load s", f"pp{n_prompt}{at} t/s", f"tg{n_gen}{at} t/s"]
    print(console.table(rows, headers))


# ---- matrices ----


def _run_matrices(args: argparse.Namespace, about: dict[str, Any]) -> None:
    shapes, densities = parse_shapes(args.shapes), parse_densities(args.densities)
    results = bench_matrices(shapes, densities, n_threads=about["threads"], repetitions=args.repetitions)
    if args.json:
        console.print_json({**about, "matrices": [as_json(r) for r in results]})
        return
    print_matrices(results)
    print(f"\n{about['threads']} threads, kernels: {about['kernels']}; times are medians of {args.repetitions} rounds")


def print_matrices(results: Sequence[MatrixResult]) -> None:
    rows = [
        [
            f"{r.rows}x{r.cols}",
            r.density,
            round(r.effective_density, 4),
            round(r.nbytes_memory / (r.rows * r.cols * 2), 4),
            round(r.seconds["macko"] * 1e6, 1),
            *(round(r.seconds[name] * 1e6, 1) if name in r.seconds else None for name in DENSE_TYPES),
            f"{r.seconds['F16'] / r.seconds['macko']:.2f}x",
        ]
        for r in results
    ]
    dense = [f"{name} us" for name in DENSE_TYPES]
    headers = ["shape", "density", "eff. density, file", "in memory", "macko us", *dense, "speed vs F16"]
    print(console.table(rows, headers, "g"))
