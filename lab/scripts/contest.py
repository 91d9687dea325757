#!/usr/bin/env python3
"""Trains dense and sparse types on the same tokens, and compares them: quality over size and over speed.

    lab/scripts/contest.py docs-23m-f16.gguf -f calibration.txt --held-out held-out.txt -o contest \\
        --recover '--self-generated 10000 --epochs 1 --batch-size 8'

Each model is distilled from the dense one with the values of its type (`macko recover --quant-values`): dense types
with all weights, sparse types after ALPS with dense targets and allocation by loss. Files with bits by --target-bpw are
trained without a type. Embeddings and head are not trained, and get one type in all trained files. The report also has
types of llama.cpp that were not trained. The folder of -o gets the files, report.html and its pictures, and results.md
with speeds on the CPU and, if there is one, on a GPU. Text that the dense model writes is written once for all types. A
second run keeps existing files. Needs PyTorch, and matplotlib for the pictures: those of the reports, and contest.png
with perplexity over size and over the speeds of all devices.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ggml_macko import console
from ggml_macko.benchmark import plot
from ggml_macko.commands import cli
from ggml_macko.native import devices
from ggml_macko.recovery import sampling

PRUNE = "--method alps --asymmetric 0.5 --allocation loss"


def macko(*args: object) -> str:
    """Runs a subcommand in this process; returns its standard output."""
    words = [str(a) for a in args]
    console.log(f"$ macko {shlex.join(words)}")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli.main(words)
    if code:
        sys.exit(code)
    return out.getvalue()


def share_samples() -> None:
    """Lets all runs of recover() train on the same written text, which depends on the dense model and the seed only."""
    written: dict[object, Any] = {}
    sample = sampling.sample

    def once(teacher: Any, chunks: Any, n: int, *args: Any) -> Any:
        key = (n, np.asarray(chunks).tobytes())
        if key not in written:
            written[key] = sample(teacher, chunks, n, *args)
        return written[key]

    sampling.sample = once  # type: ignore[assignment]


def draw(models: Mapping[str, Sequence[Mapping[str, Any]]], title: str, path: Path) -> None:
    """One picture: perplexity over size, and over the speed on each device. models: those of a report, by device."""

    def panel(device: str, quantity: str, key: str, unit: float = 1) -> plot.Panel:
        points = [plot.Point(m["model"], m["kind"], m[key] / unit, m["ppl"]) for m in models[device]]
        return plot.Panel(quantity, points)

    panels = [panel(next(iter(models)), "size, MiB (log), less is better", "nbytes", console.MIB)]
    panels += [panel(device, f"tokens/s, {device} (log), more is better", "gen_tps") for device in models]
    plot.save_as(plot.draw(panels, title), str(path), force=True)


class Contest:
    """The files of a contest."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._out = args, Path(args.output)
        self._out.mkdir(parents=True, exist_ok=True)
        self._log = self._out / "training.json"
        self.training: dict[str, Any] = json.loads(self._log.read_text()) if self._log.exists() else {}
        self.files: list[Path] = []

    def add_dense(self, name: str) -> None:
        path = self._trained(f"dense-{name}", Path(self._args.model), "--quant-values", f"dense-{name}")
        self._convert(path, f"trained-{name}", "packed")

    def add_sparse(self, zeros: str) -> None:
        """All sparse types with this share of zeros."""
        args, pruned = self._args, self._out / f"pruned-{zeros}.gguf"
        if not pruned.exists():
            macko("prune", args.model, pruned, "--sparsity", zeros, "-f", args.file, *shlex.split(args.prune))
        percent = f"{float(zeros):.0%}".rstrip("%")
        for name in args.sparse:
            path = self._trained(f"{name}-{zeros}", pruned, "--quant-values", name)
            self._convert(path, f"s{percent}-{name}", f"sparse-{name}")
        for bpw in args.target_bpw:
            path = self._trained(f"f16-{zeros}", pruned)
            self._convert(path, f"s{percent}-{bpw}bpw", "auto", "--target-bpw", bpw)

    def _trained(self, label: str, source: Path, *more: object) -> Path:
        path = self._out / f"recovered-{label}.gguf"
        if not path.exists():
            args = self._args
            options = ["--dense", args.model, "-f", args.file, *shlex.split(args.recover), *more, "--json"]
            self.training[label] = json.loads(macko("recover", source, path, *options))
            self._log.write_text(json.dumps(self.training, indent=1) + "\n")
        return path

    def _convert(self, source: Path, label: str, *how: object) -> None:
        path = self._out / f"{label}.gguf"
        if not path.exists():
            head = self._args.head_type
            macko("convert", source, path, *how, "--output-tensor-type", head, "--token-embedding-type", head)
        self.files.append(path)

    def report(self) -> None:
        args = self._args
        found: dict[str, Any] = {}
        has_plots = importlib.util.find_spec("matplotlib") is not None
        for device, layers in (("CPU", 0), *([("GPU", -1)] if devices.gpus() else [])):
            stem = self._out / f"report-{device.lower()}"
            options = ["-ngl", layers, "--types", args.types, "--kl-divergence", "--json", "--force"]
            options += ["-o", stem] if has_plots else []
            done = macko("report", args.model, *self.files, "-f", args.held_out, *options, *shlex.split(args.report))
            found[device] = json.loads(done)["models"]
            stem.with_suffix(".json").write_text(done)
        if has_plots:
            draw(found, f"{Path(args.model).stem} after the same training", self._out / "contest.png")
        headers = ["model", "MiB", "bits/weight", "perplexity", "", "KL divergence", "same top", "CPU t/s", "GPU t/s"]
        base, rows = found["CPU"][0]["ppl"], []
        for i, r in enumerate(found["CPU"]):
            speeds = [found[device][i]["gen_tps"] if device in found else None for device in ("CPU", "GPU")]
            size = [
                f"{r['nbytes'] / console.MIB:.2f}",
                f"{r['bpw']:.2f}",
                f"{r['ppl']:.2f}",
                f"{r['ppl'] / base - 1:+.1%}",
            ]
            quality = [f"{r['kld']:.4f}", f"{r['same_top']:.1%}"]
            rows.append([r["model"], *size, *quality, *("" if s is None else f"{s:.0f}" for s in speeds)])
        table = console.table(rows, headers, "g")
        (self._out / "results.md").write_text(table + "\n")
        print(table)


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", metavar="MODEL", help="dense F16 model")
    parser.add_argument("-f", "--file", required=True, metavar="FNAME", help="text to prune and train on")
    parser.add_argument("--held-out", required=True, metavar="FNAME", help="text to measure on")
    parser.add_argument(
        "-o", "--output", default="contest", metavar="DIR", help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--dense", type=words, default="q4_0,q4_k,q3_k,q2_k", help="dense types (default: %(default)s)")
    parser.add_argument("--sparse", type=words, default="q5,q4,q3", help="sparse types (default: %(default)s)")
    parser.add_argument("--sparsities", type=words, default="0.5,0.7", help="shares of zeros (default: %(default)s)")
    parser.add_argument("--target-bpw", type=words, default="", metavar="X,...", help="also convert with --target-bpw")
    parser.add_argument("--head-type", default="q6_k", help="type of embeddings and head (default: %(default)s)")
    parser.add_argument("--prune", default=PRUNE, metavar="OPTIONS", help="of macko prune (default: %(default)s)")
    parser.add_argument("--recover", default="", metavar="OPTIONS", help="of macko recover, for all models")
    parser.add_argument("--types", default="Q8_0,Q4_K_S,Q4_0,Q3_K_S,Q2_K", help="not trained (default: %(default)s)")
    parser.add_argument(
        "--report", default="--chunks 64", metavar="OPTIONS", help="of macko report (default: %(default)s)"
    )
    parser.add_argument("--no-report", action="store_true", help="only make the files: runs for parts of the types")
    args = parser.parse_args()
    share_samples()
    contest = Contest(args)
    for name in args.dense:
        contest.add_dense(name)
    for zeros in args.sparsities:
        contest.add_sparse(zeros)
    if not args.no_report:
        contest.report()
    return 0


if __name__ == "__main__":
    sys.exit(main())
