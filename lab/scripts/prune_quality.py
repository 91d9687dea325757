#!/usr/bin/env python3
"""Perplexity of a dense model pruned by every method at several sparsities, as one table.

    lab/scripts/prune_quality.py model-f16.gguf -f calibration.txt --held-out held-out.txt -o table.md

Statistics of the dense model are computed once for all sparsities. --sequential adds Wanda, SparseGPT and ALPS with
statistics that are computed again after each block, which costs a pass over the text per block, sparsity and method;
--asymmetric adds ALPS with targets of the dense model, which costs two passes per input of a block. Results are written
to FILE.json at once; the next run continues from there after an interruption.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from ggml_macko import console
from ggml_macko.evaluation.perplexity import perplexity
from ggml_macko.gguf.files import Model, Tensor
from ggml_macko.gguf.outputs import AtomicOutput
from ggml_macko.pruning import layerwise, methods, torch_text
from ggml_macko.pruning import prune as pruning
from ggml_macko.pruning.options import ALLOCATIONS, ParsedOptions, PruneOptions, parse


class Method(NamedTuple):
    """A row of the table."""

    label: str
    method: str
    per: str  # the unit within which weights are compared
    refit: bool = False


METHODS_WITH_STATISTICS = (
    Method("Wanda", "wanda", "row"),
    Method("Wanda, refit", "wanda", "row", refit=True),
    Method("SparseGPT", "sparsegpt", "tensor"),
    Method("SparseGPT, refit", "sparsegpt", "tensor", refit=True),
    Method("ALPS", "alps", "tensor"),
)
METHODS = (
    Method("magnitude, row", "magnitude", "row"),
    Method("magnitude, tensor", "magnitude", "tensor"),
    *METHODS_WITH_STATISTICS,
)


@dataclass(frozen=True)
class Job:
    """A pruned model to measure."""

    label: str  # its key in the results
    method: Method
    allocation: str
    sparsity: str


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppresses all output within the block."""
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        yield


class Sweep:
    """Prunes one model in many ways and measures each result."""

    def __init__(self, args: argparse.Namespace, folder: str):
        self.args = args
        self.path = pathlib.Path(folder) / "pruned.gguf"
        self.methods = [m for m in METHODS if args.methods is None or m.label in args.methods.split(";")]
        self.results_path = pathlib.Path(args.output).with_suffix(".json")
        self.results: dict[str, dict[str, Any]] = {}  # label -> figures
        if self.results_path.exists():
            self.results = json.loads(self.results_path.read_text())

    def measure(self, label: str, path: pathlib.Path) -> None:
        with console.quiet():
            found = perplexity(path, self.args.held_out, n_chunks=self.args.held_out_chunks, evenly=True)
        self.results[label] = {"ppl": found.ppl, "error": found.error, "tokens": found.n_tokens}
        self.results_path.write_text(json.dumps(self.results, indent=1) + "\n")
        console.log(f"{label:50s} {found.ppl:9.4f} +/- {found.error:.4f}")

    def run(self) -> None:
        args = self.args
        for path in [args.model, *args.other]:
            if pathlib.Path(path).stem not in self.results:
                self.measure(pathlib.Path(path).stem, pathlib.Path(path))
        todo = [
            Job(label=f"{m.label}, {rule}, {s}", method=m, allocation=rule, sparsity=s)
            for s in args.sparsities.split(",")
            for m in self.methods
            for rule in ALLOCATIONS
        ]
        todo = [job for job in todo if job.label not in self.results]
        if todo:
            self.run_one_pass(todo)
        if args.sequential:
            for s in args.sequential.split(","):
                for m in self.methods:
                    if m in METHODS_WITH_STATISTICS and not m.refit:
                        self.run_in_passes(f"{m.label}, sequential, {s}", m.method, s, sequential=True)
        for s in filter(None, (args.asymmetric or "").split(",")):
            for rule in ALLOCATIONS:
                for share in args.shares.split(","):
                    label = f"ALPS, targets {share}, {rule}, {s}"
                    self.run_in_passes(label, "alps", s, asymmetric=float(share), allocation=rule)

    def run_one_pass(self, todo: list[Job]) -> None:
        args = self.args
        with Model(args.model) as model, ThreadPoolExecutor() as pool:
            tensors = pruning.tensors_to_prune(model)
            names = {t.name for t in tensors}
            options = ParsedOptions(text=args.file, n_chunks=args.chunks)
            console.log("statistics ...")
            found = layerwise.hessians_for(tensors, options)
            layerwise.gather_for(model.path, options, found, torch_text.Session(options))
            wanda = methods.MomentScorer(found)

            def loss_curves(tensors: Sequence[Tensor], grid: Sequence[Fraction]) -> dict[str, list[float]]:
                with AtomicOutput(self.path.with_suffix(".losses"), [], force=True) as copy:
                    return layerwise.loss_curves(model, tensors, options, grid, copy)

            for job in todo:
                given = PruneOptions(
                    sparsity=job.sparsity,
                    method=job.method.method,
                    refit=job.method.refit,
                    compare_within=job.method.per,
                    allocation=job.allocation,
                    text=args.file,
                    n_chunks=args.chunks,
                )
                options = parse(given)
                scorer = wanda if options.method == "wanda" else methods.Scorer()
                quotas = pruning.make_quotas(tensors, options, scorer, loss_curves)
                with silence():
                    if options.needs_hessians:
                        pruner = methods.by_hessians(found, options, quotas, pool)
                    else:
                        pruner = methods.by_scores(scorer, options, quotas, pool)
                    with AtomicOutput(self.path, [], force=True) as output:
                        pruning.write_model(model, names, pruner, [], output)
                        output.seal()
                        output.commit()
                self.measure(job.label, self.path)

    def run_in_passes(self, label: str, method: str, sparsity: str, **options: Any) -> None:
        args = self.args
        if label in self.results:
            return
        with silence():
            given = PruneOptions(method=method, sparsity=sparsity, text=args.file, n_chunks=args.chunks, **options)
            pruning.prune(args.model, self.path, given, force=True)
        self.measure(label, self.path)

    def table(self) -> str:
        args = self.args
        columns = args.sparsities.split(",")
        rows: list[list[str]] = []

        def cells(prefix: str) -> list[str]:
            found = (self.results.get(f"{prefix}, {column}") for column in columns)
            return [f"{result['ppl']:.2f}" if result is not None else "" for result in found]

        for m in self.methods:
            for rule in ALLOCATIONS:
                rows.append([m.label, rule, *cells(f"{m.label}, {rule}")])
        for m in self.methods:
            if args.sequential and m in METHODS_WITH_STATISTICS and not m.refit:
                rows.append([f"{m.label}, sequential", "uniform", *cells(f"{m.label}, sequential")])
        if args.asymmetric:
            for rule in ALLOCATIONS:
                for share in args.shares.split(","):
                    rows.append([f"ALPS, dense targets {share}", rule, *cells(f"ALPS, targets {share}, {rule}")])
        for path in [args.model, *args.other]:
            found = self.results[pathlib.Path(path).stem]
            name = f"**{pathlib.Path(path).stem}**"
            rows.append([name, "", *[""] * len(columns), f"{found['ppl']:.2f} ± {found['error']:.2f}"])
        headers = ["method", "allocation", *(f"{float(s):.0%}" for s in columns), "as it is"]
        return console.table(rows, headers, ".2f")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="dense F16 model")
    parser.add_argument("--other", action="append", default=[], metavar="FNAME", help="model to measure, not to prune")
    parser.add_argument("-f", "--file", required=True, help="calibration text")
    parser.add_argument("--chunks", type=int, default=128, help="chunks of it (default: 128)")
    parser.add_argument("--held-out", required=True, metavar="FNAME", help="text to measure perplexity on")
    parser.add_argument("--held-out-chunks", type=int, default=64, help="chunks of it, spread evenly (default: 64)")
    parser.add_argument("--sparsities", default="0.3,0.4,0.5,0.6,0.7", help="default: %(default)s")
    parser.add_argument("--sequential", metavar="S,...", help="also with sequential statistics at these sparsities")
    parser.add_argument("--asymmetric", metavar="S,...", help="also ALPS with --asymmetric at these sparsities")
    parser.add_argument("--shares", default="0,0.5,1", help="values of --asymmetric (default: %(default)s)")
    parser.add_argument("--methods", metavar="LABEL;...", help="only these rows, by their labels in the table")
    parser.add_argument("-o", "--output", required=True, metavar="FILE.md", help="table to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(args, folder)
        sweep.run()
    pathlib.Path(args.output).write_text(sweep.table() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
