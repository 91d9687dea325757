#!/usr/bin/env python3
"""Tokens per second of models with zeros in their weights, with neurons skipped by thresholds at run time, and with
both, against perplexity: a table and a plot.

    lab/scripts/skip_quality.py MODEL ... -f calibration.txt --held-out held-out.txt -o quality.md
    lab/scripts/skip_speed.py MODEL ... -f calibration.txt --held-out held-out.txt --quality quality.json -o speed.md

MODEL: dense files of one model with increasing numbers of zeros. Each is converted, and gets thresholds for each share
from the calibration text (score product, uniform); a model without zeros stays dense, and none of its neurons are
skipped. All files are loaded into one process with GGML_MACKO_LOAD=act-thresholds, and evaluate the beginning of the
held-out text one token at a time, in turn, round after round. Speeds are medians of rounds, and so are ratios to the
first file in the same round, which other work on the machine affects little. Perplexities are from skip_quality.py;
without them the script prints a table only. Times are stored in FILE.json; a run that finds this file only draws. The
plot is FILE.png.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any, NamedTuple

from ggml_macko import Llama, console, convert
from ggml_macko.benchmark import plot
from ggml_macko.evaluation.calibrate_activations import calibrate_activations
from ggml_macko.evaluation.skipping import N_CHUNKS, SkipOptions
from ggml_macko.evaluation.text_model import N_CTX
from ggml_macko.gguf.files import Model
from ggml_macko.native import cpu

SCORE, ALLOCATION = "product", "uniform"


def label(model: str, share: float) -> str:
    return f"{model}, {100 * share:g} %"


def measure(args: argparse.Namespace, shares: list[float]) -> dict[str, Any]:
    """Median milliseconds of a token in each round, with the number of threads and the kernels."""
    with tempfile.TemporaryDirectory(dir=pathlib.Path(args.output).resolve().parent) as folder:
        files = {}
        for path in map(pathlib.Path, args.models):
            sparse = pathlib.Path(folder) / path.name
            convert(path, sparse, args.type)
            files[label(path.stem, 0)] = sparse
            with Model(sparse) as model:
                if not model.is_sparse:
                    continue
            for share in shares:
                out = sparse.with_name(f"{share}-{path.name}")
                skip = SkipOptions(share, args.file, SCORE, ALLOCATION, n_chunks=args.chunks)
                calibrate_activations(sparse, out, skip, n_ctx=args.ctx, n_threads=args.threads, n_gpu_layers=0)
                files[label(path.stem, share)] = out
        os.environ["GGML_MACKO_LOAD"] = "act-thresholds"
        options = {"n_ctx": args.n_gen + 8, "n_threads": args.threads, "n_gpu_layers": 0, "verbose": False}
        models = {name: Llama(str(path), **options) for name, path in files.items()}
        text = pathlib.Path(args.held_out).read_bytes()[: 16 * args.n_gen]
        times: dict[str, list[float]] = {name: [] for name in models}
        for _, (name, llama) in console.tracked([(i, m) for i in range(args.rounds) for m in models.items()], "rounds"):
            llama.reset()
            ms = []
            for token in llama.tokenize(text)[: args.n_gen]:
                begin = time.perf_counter()
                llama.eval([token])
                ms.append(1000 * (time.perf_counter() - begin))
            times[name].append(statistics.median(ms))
    return {"threads": args.threads, "kernels": cpu.cpu_kernels(), "ms": times}


class Row(NamedTuple):
    model: str
    share: float
    speed: float  # tokens per second
    times: float  # relative to the first model's speed
    ppl: float | None


def table(rows: list[Row]) -> str:
    base = rows[0]
    cells = []
    for r in rows:
        cells.append([r.model, f"{100 * r.share:g} %", f"{r.speed:.1f}", f"{r.times:.2f}x"])
        if r.ppl and base.ppl:
            cells[-1].append(f"{r.ppl:.2f} ({100 * (r.ppl / base.ppl - 1):+.1f} %)")
    headers = ["model", "skipped", "tokens/s", "speed", "perplexity"]
    return console.table(cells, headers[: len(cells[0])], "")


def draw(rows: list[Row], title: str) -> plot.Figure:
    """A line through the models without skipping, and one from each of them through its shares."""
    figure = plot.figure_class()(figsize=(8, 5), layout="constrained", facecolor="white")
    axes = figure.subplots()
    whole = [r for r in rows if r.share == 0]
    axes.plot([r.speed for r in whole], [r.ppl for r in whole], "ks-", label="zeros in the weights alone")
    for model, _, speed, _, ppl in whole:
        part = [r for r in rows if r.model == model]
        axes.annotate(model, (speed, ppl), xytext=(4, -12), textcoords="offset points", fontsize=8)
        if len(part) > 1:
            axes.plot([r.speed for r in part], [r.ppl for r in part], "o--", markersize=4, label=f"{model}, skipped")
        for r in part[1:]:
            axes.annotate(
                f"{100 * r.share:g} %", (r.speed, r.ppl), xytext=(5, 0), textcoords="offset points", fontsize=8
            )
    axes.set(xlabel="tokens per second, one at a time", ylabel="perplexity (log)", yscale="log", title=title)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.margins(x=0.18, y=0.1)  # space for the labels
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="dense GGUF model; the first is the baseline")
    parser.add_argument("-f", "--file", required=True, help="calibration text")
    parser.add_argument("--chunks", type=int, default=N_CHUNKS, help="chunks of it (default: %(default)s)")
    parser.add_argument("-c", "--ctx", type=int, default=N_CTX, help="tokens of a chunk (default: %(default)s)")
    parser.add_argument("--held-out", required=True, metavar="FNAME", help="text to read while time is taken")
    parser.add_argument("--quality", metavar="FILE.json", help="results of skip_quality.py")
    parser.add_argument("--shares", default="0.5,0.6,0.7", help="shares of skipped neurons (default: %(default)s)")
    parser.add_argument("--type", default="auto", help="TYPE of macko convert (default: auto)")
    parser.add_argument("-n", "--n-gen", type=int, default=64, help="tokens of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=24, help="default: %(default)s")
    parser.add_argument("-t", "--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.md", help="table to write")
    args = parser.parse_args()
    output, shares = pathlib.Path(args.output), [float(s) for s in args.shares.split(",")]
    quality = json.loads(pathlib.Path(args.quality).read_text()) if args.quality else {}
    kept = output.with_suffix(".json")
    if not kept.exists():
        kept.write_text(json.dumps(measure(args, shares), indent=1) + "\n")
    found = json.loads(kept.read_text())
    rows: list[Row] = []
    first = next(iter(found["ms"].values()))
    for model in (pathlib.Path(path).stem for path in args.models):
        for share in [0.0, *shares]:
            if ms := found["ms"].get(label(model, share)):
                key = f"{model}, {SCORE}, {ALLOCATION}, {share}"
                if quality and key not in quality:
                    raise SystemExit(f"{args.quality}: has no '{key}'")
                ppl = quality[key]["ppl"] if quality else None
                times = statistics.median(a / b for a, b in zip(first, ms))
                rows.append(Row(model, share, 1000 / statistics.median(ms), times, ppl))
    title = f"{found['threads']} threads, {found['kernels']}"
    output.write_text(f"{table(rows)}\n\n{title}\n")
    if args.quality:
        plot.save_as(draw(rows, title), str(output.with_suffix(".png")), force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
