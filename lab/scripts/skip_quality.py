#!/usr/bin/env python3
"""Perplexity of models with skipped feed-forward neurons, as tables and a plot.

    lab/scripts/skip_quality.py model-f16.gguf [MODEL ...] -f calibration.txt --held-out held-out.txt -o table.md

The tables have all scores and allocations of `macko perplexity --skip` at several shares. Thresholds and losses come
from the calibration text. Each model is also measured without a look at its activations; a share of 0 must give the
same figure to the last digit. Results are written to FILE.json at once; the next run continues from there after an
interruption. The plot is FILE.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import sys
from typing import Any

import numpy as np

from ggml_macko import console
from ggml_macko.benchmark import plot
from ggml_macko.evaluation import likelihood
from ggml_macko.evaluation.likelihood import Array, Estimate
from ggml_macko.evaluation.skipping import ALLOCATIONS, N_CHUNKS, N_LOSS_CHUNKS, SCORES, SkippingModel, skipped_share
from ggml_macko.evaluation.text_model import Chunks, TextModel, spread

N_CTX = 512

COLORS = {"cats": "tab:blue", "product": "tab:orange", "wina": "tab:green"}
STYLES = {"uniform": "-", "greedy": "--"}


def bytes_read(score: str, share: float) -> float:
    """The share of the feed-forward weights that one token needs. CATS selects neurons before up is computed; the other
    scores need up, so they skip only columns of down.
    """
    return (1 + 2 * (1 - share)) / 3 if score == "cats" else (2 + (1 - share)) / 3


def cell(result: dict[str, Any]) -> str:
    """Perplexity, and its increase with the standard error of the paired difference."""
    rise = 100 * math.expm1(result["rise"])
    return f"{result['ppl']:.2f} ({rise:+.1f} ± {(100 + rise) * result['rise_error']:.1f} %)"


def measure(model: TextModel, chunks: Chunks) -> tuple[Estimate, Array]:
    """The estimate, and the negative log-likelihood of each token (n_tokens,)."""
    tokens: list[Array] = []

    def score(logits: Array, came: Array) -> tuple[Array, Array]:
        (nll,) = likelihood.negative_log_likelihood(logits, came)
        return nll, nll

    found = likelihood.estimate(model, chunks, score, lambda done, so_far, more: tokens.append(more[0]))
    return found, np.concatenate(tokens)


class Sweep:
    """Measures models and stores the results in a file."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.shares = [float(s) for s in args.shares.split(",")]
        self.path = pathlib.Path(args.output).with_suffix(".json")
        self.tokens: dict[str, Array] = {}  # model -> negative log-likelihood of each token, without skipping
        self.results: dict[str, dict[str, Any]] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def keep(self, label: str, result: dict[str, Any]) -> None:
        self.results[label] = result
        self.path.write_text(json.dumps(self.results, indent=1) + "\n")

    def run(self) -> None:
        for path in self.args.models:
            model = pathlib.Path(path).stem
            for score in SCORES:
                todo = [
                    (allocation, share)
                    for allocation, share in [("uniform", 0.0), *itertools.product(ALLOCATIONS, self.shares)]
                    if f"{model}, {score}, {allocation}, {share}" not in self.results
                ]
                if todo:
                    self.measure_score(path, model, score, todo)

    def as_it_is(self, path: str, model: str) -> Array:
        """Negative log-likelihoods of the model without skipping; measured once per process, never stored."""
        if model in self.tokens:
            return self.tokens[model]
        with TextModel.opened_with(path, self.args.held_out, N_CTX, -1, n_threads=self.args.threads) as (llama, chunks):
            found, tokens = measure(llama, spread(chunks, self.args.held_out_chunks))
        kept = self.results.get(model, {}).get("tokens", found.n_tokens)
        if kept != found.n_tokens:
            raise SystemExit(f"{self.path}: is of {kept} tokens, not of {found.n_tokens}; delete it to start anew")
        self.keep(model, {"ppl": found.ppl, "error": found.error, "tokens": found.n_tokens})
        console.log(f"{model}: {found.ppl:.4f} +/- {found.error:.4f}")
        self.tokens[model] = tokens
        return tokens

    def measure_score(self, path: str, model: str, score: str, todo: list[tuple[str, float]]) -> None:
        args = self.args
        tokens = self.as_it_is(path, model)
        with SkippingModel(path, score, n_ctx=N_CTX, n_threads=args.threads) as skipper:
            chunks = spread(skipper.model.read_chunks(args.held_out), args.held_out_chunks)
            calibration = skipper.model.read_chunks(args.file, args.chunks)
            skipper.calibrate(calibration)
            key = f"{model}, {score}, losses"
            if any(allocation == "greedy" for allocation, _ in todo) and key not in self.results:
                self.keep(key, skipper.losses(spread(calibration, N_LOSS_CHUNKS)))
            for allocation, share in todo:
                greedy = allocation == "greedy"
                skipper.skip(skipper.greedy(share, self.results[key]) if greedy else skipper.uniform(share))
                found, skipped_tokens = measure(skipper.model, chunks)
                rise = skipped_tokens - tokens
                parts = skipper.skipped()
                result = {
                    "ppl": found.ppl,
                    "error": found.error,
                    "rise": float(rise.mean()),
                    "rise_error": float(rise.std() / math.sqrt(len(rise) - 1)),
                    "measured": skipped_share(parts),
                    "wanted": [round(p.wanted, 4) for p in parts],
                }
                if share == 0 and found.ppl != self.results[model]["ppl"]:
                    raise SystemExit(
                        f"{model}: {found.ppl} with nothing skipped, {self.results[model]['ppl']} as it is"
                    )
                self.keep(f"{model}, {score}, {allocation}, {share}", result)
                console.log(f"{model}, {score}, {allocation}, {share}: {found.ppl:.4f}, rise {result['rise']:.4f}")

    def result(self, model: str, score: str, allocation: str, share: float) -> dict[str, Any]:
        return self.results[f"{model}, {score}, {allocation}, {share}"]

    def tables(self) -> str:
        out = []
        for path in self.args.models:
            model = pathlib.Path(path).stem
            own = self.results[model]
            rows, off = [], []
            for score in SCORES:
                for allocation in ALLOCATIONS:
                    found = [self.result(model, score, allocation, s) for s in self.shares]
                    rows.append([score, allocation, f"{own['ppl']:.2f}", *map(cell, found)])
                    off += [100 * (r["measured"] - s) for r, s in zip(found, self.shares)]
            headers = ["score", "allocation", "0 %", *(f"{100 * s:g} %" for s in self.shares)]
            out.append(
                f"### {model}\n\n{console.table(rows, headers, '')}\n\n{own['tokens']} tokens; standard error of the "
                f"0 % column {own['error']:.2f}. Share measured on them minus the wanted one: {min(off):+.1f} to "
                f"{max(off):+.1f} percentage points.\n"
            )
        return "\n".join(out)

    def draw(self) -> plot.Figure:
        """Perplexity over the share of skipped neurons, and over the share of the feed-forward weights that is read."""
        models = [pathlib.Path(path).stem for path in self.args.models]
        figure = plot.figure_class()(figsize=(11, 4.2 * len(models)), layout="constrained", facecolor="white")
        for model, axes in zip(models, figure.subplots(len(models), 2, sharey="row", squeeze=False)):
            own = self.results[model]["ppl"]
            for score in SCORES:
                for allocation in ALLOCATIONS:
                    y = [own, *(self.result(model, score, allocation, s)["ppl"] for s in self.shares)]
                    style = {"color": COLORS[score], "linestyle": STYLES[allocation], "marker": "o", "markersize": 4}
                    shares = [0.0, *self.shares]
                    axes[0].plot([100 * s for s in shares], y, label=f"{score}, {allocation}", **style)
                    axes[1].plot([100 * bytes_read(score, s) for s in shares], y, **style)
            axes[0].set(ylabel=f"{model}: perplexity (log)", xlabel="neurons skipped, %", yscale="log")
            axes[1].set(xlabel="feed-forward weights read, % (one token, a kernel that skips)")
            axes[1].invert_xaxis()
            for a in axes:
                a.yaxis.set_major_formatter("{x:g}")
                a.yaxis.set_minor_formatter("{x:g}")
                a.grid(alpha=0.25, which="both")
        axes = figure.axes[0]
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
        return figure


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="GGUF model, dense or sparse")
    parser.add_argument("-f", "--file", required=True, help="calibration text")
    parser.add_argument("--chunks", type=int, default=N_CHUNKS, help="chunks of it (default: %(default)s)")
    parser.add_argument("--held-out", required=True, metavar="FNAME", help="text to measure perplexity on")
    parser.add_argument("--held-out-chunks", type=int, default=16, help="chunks of it, spread evenly (default: 16)")
    parser.add_argument("--shares", default="0.25,0.4,0.5,0.6,0.7", help="default: %(default)s")
    parser.add_argument("-t", "--threads", type=int, default=0, help="threads (default: all cores)")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.md", help="tables to write")
    args = parser.parse_args()
    sweep = Sweep(args)
    sweep.run()
    pathlib.Path(args.output).write_text(sweep.tables())
    plot.save_as(sweep.draw(), str(pathlib.Path(args.output).with_suffix(".png")), force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
