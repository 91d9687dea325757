#!/usr/bin/env python3
"""Perplexity of a dense model pruned by every method at several sparsities: one table, made by one command.

    tools/prune_quality.py model-f16.gguf -f calibration.txt --held-out held-out.txt -o table.md

Statistics of the dense model are taken once and serve all sparsities; --sequential adds Wanda and SparseGPT with
statistics that are taken anew after each block: a pass over the text per block, sparsity and method. Results
go to FILE.json as they come; a run that is interrupted goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

from ggml_macko import console
from ggml_macko.benchmark import report
from ggml_macko.commands import cli
from ggml_macko.gguf.files import AtomicOutput, Model
from ggml_macko.pruning import hessians, layerwise, prune

# label, method, --per
METHODS = (
    ("magnitude, row", "magnitude", "row"),
    ("magnitude, tensor", "magnitude", "tensor"),
    ("Wanda", "wanda", "row"),
    ("SparseGPT", "sparsegpt", "tensor"),
)


class Sweep:
    """Prunes one model in many ways and measures each result."""

    def __init__(self, args: argparse.Namespace, folder: str):
        self.args = args
        self.path = pathlib.Path(folder) / "pruned.gguf"
        self.results_path = pathlib.Path(args.output).with_suffix(".json")
        self.results = json.loads(self.results_path.read_text()) if self.results_path.exists() else {}

    def measure(self, label: str, path: pathlib.Path) -> dict:
        found = report.perplexity_of(path, self.args.held_out, self.args.held_out_chunks)
        self.results[label] = {"ppl": found.ppl, "error": found.error, "tokens": found.n_tokens}
        self.results_path.write_text(json.dumps(self.results, indent=1) + "\n")
        console.log(f"{label:50s} {found.ppl:9.4f} +/- {found.error:.4f}")
        return self.results[label]

    def run(self) -> None:
        args = self.args
        for path in [args.model, *args.other]:
            if pathlib.Path(path).stem not in self.results:
                self.measure(pathlib.Path(path).stem, pathlib.Path(path))
        todo = [
            (f"{label}, {rule}, {s}", method, per, rule, s)
            for s in args.sparsities.split(",")
            for label, method, per in METHODS
            for rule in prune.ALLOCATIONS
        ]
        todo += [
            (f"{label}, uniform, {pattern}", method, per, "uniform", pattern)
            for pattern in filter(None, args.patterns.split(","))
            for label, method, per in METHODS
            if label != "magnitude, tensor"
        ]
        todo = [job for job in todo if job[0] not in self.results]
        if todo:
            self.run_one_pass(todo)
        if args.sequential:
            for s in args.sequential.split(","):
                for label, method, _ in METHODS[2:]:
                    self.run_sequential(f"{label}, sequential, {s}", method, s)

    def run_one_pass(self, todo: list) -> None:
        args = self.args
        with Model(args.model) as model, ThreadPoolExecutor() as pool:
            tensors = prune.tensors_to_prune(model, [], [])
            names = {t.name for t in tensors}
            options = prune.Options(Fraction(0), text=args.file, n_chunks=args.chunks)
            console.log("statistics ...")
            wanda = layerwise.Scorer(layerwise.statistics_of_text(model.path, tensors, options))
            moments = hessians.Hessians(names)
            layerwise.gather(model.path, options, moments)
            for label, method, per, rule, how_many in todo:
                pattern = prune.parse_pattern(how_many) if ":" in how_many else None
                sparsity = 1 - Fraction(*pattern) if pattern else prune.parse_sparsity(how_many)
                options = prune.Options(sparsity, method=method, per=per, allocation=rule, pattern=pattern)
                scorer = wanda if method == "wanda" else layerwise.Scorer()
                quotas = prune.plan(tensors, options, scorer, wanda)
                with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):
                    if method == "sparsegpt":
                        pruner = layerwise.by_second_moments(moments, options, quotas)
                    else:
                        pruner = layerwise.by_scores(scorer, options, quotas, pool)
                    with AtomicOutput(self.path, [], force=True) as output:
                        prune.write_model(model, names, pruner, [], output)
                        output.seal()
                        output.commit()
                self.measure(label, self.path)

    def run_sequential(self, label: str, method: str, sparsity: str) -> None:
        args = self.args
        if label in self.results:
            return
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            code = cli.main(
                [
                    *("prune", args.model, str(self.path), "--force", "--method", method, "--sparsity", sparsity),
                    *("-f", args.file, "--chunks", str(args.chunks), "--sequential"),
                ]
            )
        if code:
            sys.exit(f"error: pruning failed: {label}")
        self.measure(label, self.path)

    def table(self) -> str:
        args = self.args
        columns = [*args.sparsities.split(","), *filter(None, args.patterns.split(","))]
        rows = []

        def cells(make: object) -> list:
            return [f"{self.results[make(s)]['ppl']:.2f}" if make(s) in self.results else "" for s in columns]

        for label, _, _ in METHODS:
            for rule in prune.ALLOCATIONS:
                rows.append([label, rule, *cells(lambda s, a=label, b=rule: f"{a}, {b}, {s}")])
        for label, _, _ in METHODS[2:]:
            if args.sequential:
                rows.append([f"{label}, sequential", "uniform", *cells(lambda s, a=label: f"{a}, sequential, {s}")])
        for path in [args.model, *args.other]:
            found = self.results[pathlib.Path(path).stem]
            name = f"**{pathlib.Path(path).stem}**"
            rows.append([name, "", *[""] * len(columns), f"{found['ppl']:.2f} ± {found['error']:.2f}"])
        headers = ["method", "allocation", *(s if ":" in s else f"{float(s):.0%}" for s in columns), "as it is"]
        return console.table(rows, headers, ".2f")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="dense F16 model")
    parser.add_argument("--other", action="append", default=[], metavar="FNAME", help="a model to measure as it is")
    parser.add_argument("-f", "--file", required=True, help="calibration text")
    parser.add_argument("--chunks", type=int, default=128, help="chunks of it (default: 128)")
    parser.add_argument("--held-out", required=True, metavar="FNAME", help="text to measure perplexity on")
    parser.add_argument("--held-out-chunks", type=int, default=64, help="chunks of it, spread evenly (default: 64)")
    parser.add_argument("--sparsities", default="0.3,0.4,0.5,0.6,0.7", help="default: %(default)s")
    parser.add_argument("--patterns", default="2:4", metavar="N:M,...", help="default: %(default)s")
    parser.add_argument("--sequential", metavar="S,...", help="also with sequential statistics at these sparsities")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.md", help="table to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(args, folder)
        sweep.run()
    pathlib.Path(args.output).write_text(sweep.table() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
