"""`macko inspect MODEL`: shows the tensors of a model file as a table, JSON or a plot."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

from .. import console, errors
from ..benchmark import plot
from ..commands.arguments import add_force, add_quiet, add_threads
from ..conversion.inspect import ModelReport, TensorReport, inspect
from ..gguf.activation_keys import is_rule_key
from ..native.codec import DeviceLayout

HELP = "show the contents of a model file"

MAX_LAYERS, MAX_MATRICES = 512, 128
"""The size limits of a plot: llama.cpp's limit of layers, and a number of matrices in each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists the tensors of a GGUF, dense or sparse, with shape, density of non-zeros, share of padding entries, "
        "effective density (bytes over bytes of the dense tensor), bytes, bits per weight, and the break-even density, "
        "at which random non-zeros would take as many bytes as the dense tensor. Further tables show the block sets of "
        "EC-CSR tensors with the share of stored values in each; the bits per value, mantissa bits, coded exponents, "
        "their share of the values, and the outliers of sparse-lossless tensors; and the thresholds of neurons, if the "
        "file has any (macko calibrate --activations). The last lines are totals of the file."
    )
    parser.add_argument("model", metavar="MODEL", help="GGUF model; the first file of a split one")
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="also show the layout of each sparse tensor in the memory of a device, and the reason: cpu (with the "
        "kernels in use), cuda or cuda:0 (a GPU of this machine), cuda:sm_86 or another compute capability (needs no "
        "GPU), or cuda:99KB for the shared memory per block",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="also draw the densities, layers by matrices, into this file (.png, .svg or .pdf; needs matplotlib)",
    )
    add_force(parser, "FILE")
    add_threads(parser)
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    if args.plot:
        plot.check_output(args.plot, args.force, [args.model])
    report = inspect(args.model, n_threads=args.n_threads, device=args.device)
    if args.plot:
        draw(report, args.plot, args.force)
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
        "break_even_density": t.break_even_density,
    }
    if t.sets is not None:
        out["sets"] = [dataclasses.asdict(s) for s in t.sets]
    if t.layout is not None:
        out["layout"] = dataclasses.asdict(t.layout)
    if t.coding is not None:
        out["coding"] = {**dataclasses.asdict(t.coding), "coverage": t.coding.coverage}
    return out


def print_report(report: ModelReport) -> None:
    rows = []
    for t in report.tensors:
        cells = [t.name, "x".join(map(str, t.shape)), t.type, t.storage, t.density, t.padding, t.effective_density]
        rows.append([*cells, t.nbytes, round(t.bits_per_weight, 2), t.break_even_density])
    titles = "tensor,shape,type,storage,density,padding,effective density,bytes,BPW,break-even density"
    print(console.table(rows, titles.split(",")))
    print()
    sets = [[t.name, *dataclasses.astuple(s)] for t in report.tensors for s in t.sets or ()]
    if sets:
        print(console.table(sets, ["tensor", "rows of a block", "vector size", "blocks", "columns", "coverage"]))
        print()
    coded = [
        [t.name, round(c.value_bits, 2), c.mantissa_bits, c.exponents, c.coverage, c.n_outliers]
        for t in report.tensors
        for c in [t.coding]
        if c is not None
    ]
    if coded:
        headers = ["tensor", "bits per value", "mantissa bits", "exponents", "coverage", "outliers"]
        print(console.table(coded, headers))
        print()
    kept = [_layout_row(t.name, t.layout) for t in report.tensors if t.layout is not None]
    if kept:
        print(console.table(kept, ["tensor", "layout", "delta bits", "lanes", "order", "bytes reserved", "reason"]))
        print()
    rule = report.skip_rule
    if rule is not None:
        neurons = {t.name: t.shape[0] for t in report.tensors}
        rows = [[p.down, neurons[p.down], round(p.share, 4), p.threshold] for p in rule.parts]
        headers = ["neurons that may be skipped, by down", "neurons", "share", "threshold"]
        print(console.table(rows, headers))
        print(
            f"score {rule.score}, {rule.allocation} shares, {rule.share:.2%} of the neurons; thresholds from "
            f"{rule.n_chunks} chunks of {rule.n_ctx} tokens of {rule.text!r}"
        )
        print()
    for name, value in report.metadata.items():
        if not is_rule_key(name):
            print(f"{name} = {value!r}")
    print(f"{len(report.tensors)} tensors, {report.n_sparse} stored sparse, {report.n_parameters} parameters")
    print(console.model_line("file size", report.nbytes, report.n_parameters))
    print(console.model_line("dense size", report.nbytes_dense, report.n_parameters))


def _layout_row(name: str, layout: DeviceLayout) -> list[Any]:
    order = "" if not layout.lanes else "banks" if layout.bank_order else "columns"
    reason = layout.reason + (f"; {layout.own_nbytes} bytes beside those reserved" if layout.own_nbytes else "")
    return [name, layout.name, layout.delta_bits or None, layout.lanes or None, order, layout.nbytes, reason]


def draw(report: ModelReport, path: str, force: bool) -> None:
    """The density of each weight of a block, as a heatmap of layers and matrices."""
    cells = []
    for t in report.tensors:
        name = re.fullmatch(r"blk\.(\d+)\.(.+)\.weight", t.name)
        if name and len(t.shape) >= 2 and t.density is not None:
            cells.append(plot.Cell(int(name[1]), name[2], t.density))
    if not cells:
        raise errors.bad_argument("--plot: the file has no block weights of a type with zeros")
    last, n_matrices = max(cells), len({cell.matrix for cell in cells})
    if last.layer >= MAX_LAYERS or n_matrices > MAX_MATRICES:
        raise errors.error(
            errors.LIMIT,
            f"--plot: {report.path}: blk.{last.layer}.{last.matrix}.weight: {last.layer + 1} layers, "
            f"{n_matrices} matrices in a layer; a plot shows at most {MAX_LAYERS} and {MAX_MATRICES}",
        )
    title = errors.printable(str(report.metadata.get("general.name", Path(report.path).name)))
    figure = plot.draw_density(cells, f"{title[:100]}: density of the weights of each layer")
    plot.save_as(figure, path, force, [report.path])
