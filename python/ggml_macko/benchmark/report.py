"""What a model costs and how good it is in each of its forms, to decide by: `macko report DENSE [MODEL ...] -f TEXT`.

One table and one plot of perplexity, size and speed for the dense model, llama.cpp's quantized types of it (made by
libllama's own quantizer), and sparse variants: files that are given, and ones that --prune makes. Everything that is
made lies in a temporary folder beside the output and is gone at the end. Speeds are those of `macko bench`: each run in
its own process, all models in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import io
import os
import shlex
import tempfile
import time
from pathlib import Path
from types import ModuleType

from .. import console, errors
from ..benchmark import bench
from ..commands import prune
from ..commands.generate import add_gpu_layers
from ..conversion import convert
from ..evaluation import likelihood
from ..evaluation.text_model import N_CTX, TextModel
from ..gguf.files import AtomicOutput, Model
from ..pruning.options import parse_sparsity

DENSE, QUANTIZED, SPARSE, SPARSE_QUANTIZED = "dense", "quantized", "sparse", "sparse quantized"
PLOTS = {".png": b"\x89PNG", ".svg": b"<?xm"}  # suffix -> what such a file starts with

# ---- the forms of a model ----


class Forms:
    """(label, kind, path) of each form, made in a folder. conversions: arguments of `macko convert`, behind IN and OUT."""

    def __init__(self, dense: Path, folder: Path, n_threads: int, conversions: list):
        self._dense, self._folder, self._n_threads = dense, folder, n_threads
        self._conversions = conversions or ["macko --drop-negative-zeros"]
        with Model(dense) as model:
            if model.is_sparse:
                raise errors.error(errors.BAD_ARGUMENT, f"{dense}: is a sparse file; the dense model comes first")
            self.n_elements = sum(t.n_elements for t in model.tensors)
            self._shapes = {t.name: t.ne for t in model.tensors}
        self.list = [(dense.stem, DENSE, dense)]

    def _add(self, label: str, kind: str, path: Path) -> None:
        if any(label == other for other, _, _ in self.list):
            raise errors.error(errors.BAD_ARGUMENT, f"two models would be called '{label}' in the table")
        self.list.append((label, kind, path))

    def add_quantized(self, name: str) -> None:
        """A type of llama-quantize, by its name."""
        console.log(f"quantizing to {name} ...")
        path = self._folder / f"{name}.gguf"
        quantize(self._dense, path, name, self._n_threads)
        self._add(name, QUANTIZED, path)

    def add_file(self, path: Path, label: str = "") -> None:
        """A variant of the same model: sparse, or dense with zeros, which is then converted."""
        with Model(path) as model:
            if {t.name: t.ne for t in model.tensors} != self._shapes:
                raise errors.error(
                    errors.BAD_ARGUMENT,
                    f"{path}: has other tensors than {self._dense}: not a variant of the same model",
                )
            if model.is_sparse:
                kind = SPARSE_QUANTIZED if any(t.is_quantized for t in model.tensors) else SPARSE
                self._add(label or path.stem, kind, path)
                return
            for arguments in self._conversions:
                self._convert(model, label or path.stem, arguments)

    def _convert(self, model: Model, label: str, arguments: str) -> None:
        converted = self._folder / f"sparse-{len(self.list)}.gguf"
        args = parse_arguments(convert, "--convert", arguments, [str(model.path), str(converted)])
        options = dataclasses.replace(convert.options_of(args, model), n_threads=self._n_threads)
        with AtomicOutput(converted, model.paths) as output, convert.Spool(self._folder) as spool:
            plans = convert.plan_model(model, options, spool)
            convert.write_model(model, plans, output, options, spool)
            lost = convert.check_and_commit(model, output, self._n_threads, options.drop_negative_zeros)
        if len(self._conversions) > 1:
            target = f" {options.target_bpw:g} bpw" if options.target_bpw is not None else ""
            label = f"{label} {options.type}{target}"
        self._add(label, SPARSE_QUANTIZED if lost else SPARSE, converted)

    def add_pruned(self, arguments: str) -> None:
        """arguments: options of `macko prune`."""
        path = self._folder / "pruned.gguf"
        args = parse_arguments(prune, "--prune", arguments, [str(self._dense), str(path), "--force"])
        with contextlib.redirect_stdout(io.StringIO()):
            prune.run(args)
        how_many = f"{args.pattern}" if args.pattern else f"{float(parse_sparsity(args.sparsity)):.0%}"
        how = "".join([f" per {args.per}"] * bool(args.per) + [" owl"] * (args.allocation == "owl"))
        self.add_file(path, f"{args.method} {how_many}{how}{' sequential' if args.sequential else ''}")
        path.unlink()


def parse_arguments(module: ModuleType, option: str, text: str, paths: list) -> argparse.Namespace:
    """The arguments of another tool, given as one of an option's here. Raises MackoError."""
    parser = argparse.ArgumentParser(prog=option, allow_abbrev=False, exit_on_error=False)
    module.add_arguments(parser)
    try:
        args, unknown = parser.parse_known_args([*paths, *shlex.split(text)])
    except (argparse.ArgumentError, ValueError) as e:
        raise errors.error(errors.BAD_ARGUMENT, f"{option} {text}: {e}") from e
    if unknown or args.dry_run:
        raise errors.error(errors.BAD_ARGUMENT, f"{option} {text}: {' '.join(unknown) or '--dry-run'}: not here")
    return args


def quantize(source: Path, output: Path, name: str, n_threads: int) -> None:
    """llama-quantize, by way of libllama. Raises MackoError."""
    import llama_cpp.llama_cpp as api
    from llama_cpp._logger import set_verbose
    from llama_cpp._utils import suppress_stdout_stderr

    ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{name}", None)
    if ftype is None:
        raise errors.error(errors.BAD_ARGUMENT, f"--types: llama.cpp has no type {name}")
    set_verbose(False)
    params = api.llama_model_quantize_default_params()
    params.ftype, params.nthread = ftype, n_threads
    with suppress_stdout_stderr(disable=False):
        status = api.llama_model_quantize(os.fsencode(source), os.fsencode(output), ctypes.byref(params))
    if status:
        raise errors.error(errors.LOAD_FAILED, f"{source}: llama.cpp could not quantize it to {name}")


# ---- measuring ----


def perplexity_of(path: Path, text: str, n_chunks: int, **options: int) -> likelihood.Estimate:
    """On n_chunks chunks spread evenly over the text (all if negative). options: TextModel's.

    llama-perplexity's figure would be that of the first chunks, which may be one document.
    """
    with TextModel(path, **options) as model:
        chunks = model.read_chunks(text)
        if 0 <= n_chunks < len(chunks):
            chunks = chunks[[i * len(chunks) // n_chunks for i in range(n_chunks)]]
        return likelihood.estimate(model, chunks)


def measure(forms: Forms, args: argparse.Namespace, threads: int) -> list:
    """A dict per form."""
    out = []
    for label, kind, path in forms.list:
        begin = time.monotonic()
        found = perplexity_of(
            path, args.file, args.chunks, n_ctx=args.ctx_size, n_threads=threads, n_gpu_layers=args.gpu_layers
        )
        console.log(f"{label}: perplexity {found.ppl:.4f} +/- {found.error:.4f} ({time.monotonic() - begin:.1f} s)")
        out.append({"kind": kind, "ppl": found.ppl, "ppl_error": found.error, "tokens": found.n_tokens})
    speeds = bench.bench_models([(label, path) for label, _, path in forms.list], args, threads)
    return [
        {
            "model": s["model"],
            "nbytes": s["nbytes"],
            "bpw": s["nbytes"] * 8 / forms.n_elements,
            **quality,
            **speed_of(s),
        }
        for s, quality in zip(speeds, out)
    ]


def speed_of(result: dict) -> dict:
    return {k: result[k] for k in ("prompt_tps", "gen_tps", "load_s", "rss", "samples")}


def print_table(results: list, args: argparse.Namespace) -> None:
    base = results[0]
    rows = [
        [
            r["model"],
            r["kind"],
            f"{r['nbytes'] / console.MIB:.2f} ({r['nbytes'] / base['nbytes']:.2f}x)",
            f"{r['bpw']:.2f}",
            f"{r['ppl']:.2f} ± {r['ppl_error']:.2f}",
            f"{r['ppl'] / base['ppl'] - 1:+.1%}",
            *(f"{r[k]:.0f} ({r[k] / base[k]:.2f}x)" if r[k] else None for k in ("prompt_tps", "gen_tps")),
        ]
        for r in results
    ]
    headers = ["model", "kind", "MiB", "BPW", "perplexity", "", f"pp{args.n_prompt} t/s", f"tg{args.n_gen} t/s"]
    print(console.table(rows, headers, ".2f"))


# ---- plot ----

_COLORS = {DENSE: "black", QUANTIZED: "tab:orange", SPARSE: "tab:blue", SPARSE_QUANTIZED: "tab:green"}
_MARKERS = {DENSE: "s", QUANTIZED: "o", SPARSE: "D", SPARSE_QUANTIZED: "^"}
_LABEL_PLACES = [  # from the marker, in points
    *((0, 6, "center"), (0, -12, "center"), (6, -3, "left"), (-6, -3, "right")),
    *((4, 14, "left"), (-4, 14, "right"), (4, -20, "left"), (-4, -20, "right"), (0, 24, "center")),
]


def matplotlib_figure() -> type:
    """Imported before anything is measured: what is missing is said at once."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise errors.error(
            errors.BAD_ARGUMENT, "the plot needs matplotlib: pip install 'ggml-macko[plot]', or leave out -o"
        ) from None
    return Figure


def draw(figure_class: type, results: list, title: str, n_gen: int) -> object:
    """Perplexity over size, and over speed: good is low, and left or right."""
    figure = figure_class(figsize=(11, 4.4), layout="constrained")
    panels = [("bpw", "bits per weight, whole file")]
    if results[0]["gen_tps"]:
        panels.append(("gen_tps", f"tokens/s, generating {n_gen}"))
    for axes, (key, name) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
        for kind in _COLORS:
            points = [r for r in results if r["kind"] == kind]
            if not points:
                continue
            # no error bars: all models read the same text, so they err together
            axes.plot(
                [r[key] for r in points], [r["ppl"] for r in points], _MARKERS[kind], color=_COLORS[kind], label=kind
            )
        axes.axhline(results[0]["ppl"], color="gray", linewidth=0.6, linestyle=":")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_xlabel(name)
        axes.margins(x=0.12)
        axes.grid(alpha=0.25, which="both")
    figure.axes[0].set_ylabel("perplexity (log), lower is better")
    figure.axes[0].legend()
    figure.suptitle(title, fontsize=10)
    figure.draw_without_rendering()  # lays it out: from here on, places are known
    for axes, (key, _) in zip(figure.axes, panels):
        label_points(axes, [(r[key], r["ppl"], r["model"]) for r in results])
    return figure


def label_points(axes: object, points: list) -> None:
    """Writes each name where it covers neither a marker nor another name, if there is such a place."""
    from matplotlib.transforms import Bbox

    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in (axes.transData.transform(p[:2]) for p in points)]
    for x, y, name in points:
        for dx, dy, align in _LABEL_PLACES:
            place = {"xytext": (dx, dy), "textcoords": "offset points", "ha": align, "fontsize": 7}
            text = axes.annotate(name, (x, y), **place)
            box = text.get_window_extent()
            if (
                not any(box.overlaps(other) for other in taken)
                and axes.bbox.containsx(box.x0)
                and axes.bbox.containsx(box.x1)
            ):
                break
            text.remove()
        else:
            text = axes.annotate(name, (x, y), **place)
        taken.append(box)


def save_plots(figure: object, stem: Path, outputs: dict) -> None:
    from matplotlib import rc_context

    for suffix, output in outputs.items():
        data = io.BytesIO()
        # text as text; no date, no random ids: the same figures give the same file
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "macko"}):
            figure.savefig(data, format=suffix[1:], dpi=110, metadata={"Date": None} if suffix == ".svg" else {})
        output.write(output.magic + data.getvalue()[4:])
        output.seal()
    for output in outputs.values():
        output.commit()
    console.log(f"plot: {', '.join(str(stem) + suffix for suffix in outputs)}")


# ---- command ----

HELP = "compare dense, quantized and sparse forms of a model: quality, size, speed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures perplexity, size and speed of a dense model, of llama.cpp's quantized types of it, and of sparse "
        "variants, and prints one table; with -o also draws one plot. A dense file with zeros is converted first. "
        "Sizes are whole files; BPW is per parameter of the dense model."
    )
    parser.add_argument("dense", metavar="DENSE", help="the dense model, F16, BF16 or F32")
    parser.add_argument("models", metavar="MODEL", nargs="*", help="variants of it: sparse, or dense with zeros")
    parser.add_argument("-f", "--file", required=True, metavar="FNAME", help="text to measure perplexity on")
    parser.add_argument(
        "--types",
        default="Q8_0,Q4_K_M,Q4_0",
        metavar="TYPE,...",
        help="quantized types to make and compare with (default: %(default)s; '' for none)",
    )
    parser.add_argument(
        "--prune",
        action="append",
        default=[],
        metavar="OPTIONS",
        help="also prune DENSE with these options of `macko prune`, for example "
        "'--method wanda --sparsity 0.5 -f calibration.txt'; may be repeated",
    )
    parser.add_argument(
        "--convert",
        action="append",
        default=[],
        metavar="ARGUMENTS",
        help="how dense files with zeros are converted: arguments of `macko convert`, for example 'macko-q4_0 --imatrix "
        "imatrix.gguf --output-tensor-type q6_k'; may be repeated (default: macko --drop-negative-zeros)",
    )
    parser.add_argument("-o", "--output", metavar="STEM", help="write STEM.png and STEM.svg")
    parser.add_argument("--force", action="store_true", help="replace them if they exist")
    parser.add_argument(
        "--chunks",
        type=int,
        default=-1,
        metavar="N",
        help="chunks of the text, spread evenly over it (default: -1, all)",
    )
    parser.add_argument(
        "-c", "--ctx-size", type=int, default=N_CTX, metavar="N", help=f"tokens of a chunk (default: {N_CTX})"
    )
    parser.add_argument("-p", "--n-prompt", type=int, default=128, metavar="N", help="prompt tokens (default: 128)")
    parser.add_argument("-n", "--n-gen", type=int, default=64, metavar="N", help="tokens to generate (default: 64)")
    add_gpu_layers(parser, 0, "all: as many as there are (default: 0)")
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads (default: all cores)")
    parser.add_argument(
        "-r", "--repetitions", type=int, default=5, metavar="N", help="rounds, of which medians are taken (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, all samples included, in place of the table")


def run(args: argparse.Namespace) -> int:
    threads = args.threads or len(os.sched_getaffinity(0))
    if args.repetitions < 1 or args.n_prompt < 0 or args.n_gen < 0 or args.chunks == 0:
        raise errors.error(errors.BAD_ARGUMENT, "-r must be at least 1, --chunks not 0; -p and -n must not be negative")
    with contextlib.ExitStack() as stack:
        outputs = {}
        if args.output:
            figure_class = matplotlib_figure()
            inputs = [args.dense, *args.models, args.file]
            for suffix, start in PLOTS.items():
                outputs[suffix] = stack.enter_context(AtomicOutput(args.output + suffix, inputs, args.force, start))
        folder = Path(args.output).resolve().parent if args.output else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".macko-report-", dir=folder)))
        forms = Forms(Path(args.dense), folder, threads, args.convert)
        for name in filter(None, args.types.split(",")):
            forms.add_quantized(name)
        for arguments in args.prune:
            forms.add_pruned(arguments)
        for path in args.models:
            forms.add_file(Path(path))
        results = measure(forms, args, threads)
        if outputs:
            title = (
                f"{results[0]['model']}: perplexity on {Path(args.file).name} against size and speed, {threads} threads"
            )
            save_plots(draw(figure_class, results, title, args.n_gen), Path(args.output), outputs)
    if args.json:
        console.print_json({"threads": threads, "n_prompt": args.n_prompt, "n_gen": args.n_gen, "models": results})
    else:
        print_table(results, args)
        print(
            f"\nperplexity over {results[0]['tokens']} tokens of {Path(args.file).name}; {threads} threads, medians of "
            f"{args.repetitions} interleaved runs, each in its own process"
        )
    return 0
