"""`macko inspect MODEL`: what is in a model file, as a table, JSON or a plot."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any

from .. import console, errors
from ..benchmark.plot import save_figure
from ..commands.arguments import add_quiet
from ..conversion.inspect import ModelReport, TensorReport, inspect

HELP = "show what a model file holds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists the tensors of a GGUF, dense or sparse, with shape, density of non-zeros, share of padding entries, "
        "effective density (bytes here over bytes of the dense tensor), bytes and bits per weight; of EC-CSR tensors "
        "the block sets, with the share of stored values that each covers; then totals of the file."
    )
    parser.add_argument("model", metavar="MODEL", help="GGUF model; the first file of a split one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot", metavar="FILE.png", help="also draw the density of each weight by layer (needs matplotlib)"
    )
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads (default: all cores)")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    report = inspect(args.model, n_threads=args.threads)
    if args.plot:
        plot(report, args.plot)
    if args.json:
        console.print_json(as_json(report))
    else:
        print_report(report)
    return 0


def as_json(report: ModelReport) -> dict[str, Any]:
    return {
        "path": report.path,
        "sparse": report.is_sparse,
        "format_version": report.format_version,
        "metadata": dict(report.metadata),
        "n_parameters": report.n_parameters,
        "n_tensors": len(report.tensors),
        "n_sparse": report.n_sparse,
        "nbytes": report.nbytes,
        "nbytes_dense": report.nbytes_dense,
        "bits_per_weight": report.bits_per_weight,
        "tensors": [_tensor_as_json(t) for t in report.tensors],
    }


def _tensor_as_json(t: TensorReport) -> dict[str, Any]:
    out: dict[str, Any] = {
        "name": t.name,
        "type": t.type,
        "shape": list(t.shape),
        "storage": t.storage,
        "density": t.density,
        "padding": t.padding,
        "effective_density": t.effective_density,
        "nbytes": t.nbytes,
        "nbytes_dense": t.nbytes_dense,
        "bits_per_weight": t.bits_per_weight,
    }
    if t.sets is not None:
        out["sets"] = [dataclasses.asdict(s) for s in t.sets]
    return out


def print_report(report: ModelReport) -> None:
    rows = []
    for t in report.tensors:
        shape, bpw = "x".join(map(str, t.shape)), round(t.bits_per_weight, 2)
        rows.append([t.name, shape, t.type, t.storage, t.density, t.padding, t.effective_density, t.nbytes, bpw])
    headers = ["tensor", "shape", "type", "storage", "density", "padding", "effective density", "bytes", "BPW"]
    print(console.table(rows, headers))
    print()
    sets = [[t.name, *dataclasses.astuple(s)] for t in report.tensors for s in t.sets or ()]
    if sets:
        print(console.table(sets, ["tensor", "rows of a block", "vector size", "blocks", "columns", "coverage"]))
        print()
    for name, value in report.metadata.items():
        print(f"{name} = {value!r}")
    print(f"{len(report.tensors)} tensors, {report.n_sparse} stored sparse, {report.n_parameters} parameters")
    print(console.model_line("file size", report.nbytes, report.n_parameters))
    print(console.model_line("dense size", report.nbytes_dense, report.n_parameters))


def plot(report: ModelReport, path: str) -> None:
    """Density of each kind of weight over the layers."""
    try:
        import matplotlib
    except ImportError as e:
        raise errors.error(errors.BAD_ARGUMENT, "--plot needs matplotlib: pip install ggml-macko[plot]") from e
    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds: dict[str, list[tuple[int, float]]] = {}
    for t in report.tensors:
        name = re.fullmatch(r"blk\.(\d+)\.(.+)\.weight", t.name)
        if name and len(t.shape) >= 2 and t.density is not None:
            kinds.setdefault(name[2], []).append((int(name[1]), t.density))
    if not kinds:
        raise errors.error(errors.BAD_ARGUMENT, "--plot: the file has no block weights of a type with zeros")
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for kind, points in kinds.items():
        axes.plot(*zip(*sorted(points)), marker=".", label=kind)
    axes.set_xlabel("layer")
    axes.set_ylabel("density (non-zeros / weights)")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize="small", ncol=2)
    axes.set_title(str(report.metadata.get("general.name", report.path)), parse_math=False)
    figure.tight_layout()
    save_figure(figure, path, [report.path])
    pyplot.close(figure)
