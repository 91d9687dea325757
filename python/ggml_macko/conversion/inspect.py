"""What is in a model file: `macko inspect MODEL`. Types, shapes, densities, real bytes; as a table, JSON or a plot."""

from __future__ import annotations

import argparse
import re

import numpy as np

from .. import console, errors
from ..conversion.convert import storage_name
from ..gguf import tensor_rules as weights
from ..gguf.files import Model, Tensor, type_name


def tensor_report(t: Tensor, n_threads: int = 0) -> dict:
    """density: of non-zeros (null where values have no bit pattern zero). padding: share of stored entries that only
    bridge gaps.
    """
    out = {
        "name": t.name,
        "type": type_name(t.type),
        "shape": list(t.ne),
        "storage": "dense"
        if t.sparse is None
        else storage_name(t.sparse.format, t.sparse.bits, t.sparse.value_type),
        "density": None,
        "padding": None,
        "effective_density": t.nbytes_stored / t.nbytes,
        "nbytes": t.nbytes_stored,
        "nbytes_dense": t.nbytes,
        "bits_per_weight": t.nbytes_stored * 8 / t.n_elements,
    }
    if t.sparse is not None:
        n_stored = t.n_stored()
        out["density"] = t.sparse.nnz / t.n_elements
        out["padding"] = (n_stored - t.sparse.nnz) / n_stored if n_stored else 0.0
        if t.sparse.format == "ec-csr":
            out["sets"] = set_report(t)
    elif weights.is_value_type(t.type):
        nnz = sum(int(np.count_nonzero(block.view(f"u{t.nbytes // t.n_elements}"))) for block in t.blocks(n_threads))
        out["density"] = nnz / t.n_elements
    return out


def set_report(t: Tensor) -> list:
    """Block sets of an ec-csr tensor. coverage: share of its stored values;"""
    n_stored = t.n_stored()
    return [
        {
            "granularity": int(g),
            "vector_size": int(v),
            "blocks": int(n),
            "columns": int(cols),
            "coverage": int(g) * int(cols) / n_stored,
        }
        for g, v, n, cols in t.sets()
    ]


def model_report(model: Model, n_threads: int = 0) -> dict:
    tensors = [tensor_report(t, n_threads) for t in model.tensors]
    n_elements = sum(t.n_elements for t in model.tensors)
    keys = {k.name: k.value() for k in model.keys if k.name in ("general.architecture", "general.name")}
    keys.update({k.name: k.value() for k in model.keys if k.name.startswith("macko.")})
    version = model.key("macko.version")
    return {
        "path": str(model.path),
        "sparse": model.is_sparse,
        "format_version": version.value() if version else None,
        "metadata": keys,
        "n_parameters": n_elements,
        "n_tensors": len(tensors),
        "n_sparse": sum(t.sparse is not None for t in model.tensors),
        "nbytes": model.nbytes,
        "nbytes_dense": sum(t.nbytes for t in model.tensors),
        "bits_per_weight": model.nbytes * 8 / n_elements if n_elements else None,
        "tensors": tensors,
    }


# ---- command ----

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


def run(args: argparse.Namespace) -> int:
    with Model(args.model) as model:
        report = model_report(model, args.threads)
    if args.plot:
        plot(report, args.plot)
    if args.json:
        console.print_json(report)
    else:
        print_report(report)
    return 0


def print_report(report: dict) -> None:
    rows = [
        [
            t["name"],
            "x".join(map(str, t["shape"])),
            t["type"],
            t["storage"],
            t["density"],
            t["padding"],
            t["effective_density"],
            t["nbytes"],
            round(t["bits_per_weight"], 2),
        ]
        for t in report["tensors"]
    ]
    headers = ["tensor", "shape", "type", "storage", "density", "padding", "effective density", "bytes", "BPW"]
    print(console.table(rows, headers))
    print()
    sets = [[t["name"], *s.values()] for t in report["tensors"] for s in t.get("sets", [])]
    if sets:
        print(console.table(sets, ["tensor", "rows of a block", "vector size", "blocks", "columns", "coverage"]))
        print()
    for name, value in report["metadata"].items():
        print(f"{name} = {value!r}")
    print(f"{report['n_tensors']} tensors, {report['n_sparse']} stored sparse, {report['n_parameters']} parameters")
    print(console.model_line("file size", report["nbytes"], report["n_parameters"]))
    print(console.model_line("dense size", report["nbytes_dense"], report["n_parameters"]))


def plot(report: dict, path: str) -> None:
    """Density of each kind of weight over the layers."""
    try:
        import matplotlib
    except ImportError as e:
        raise errors.error(errors.BAD_ARGUMENT, "--plot needs matplotlib: pip install ggml-macko[plot]") from e
    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds: dict = {}
    for t in report["tensors"]:
        name = re.fullmatch(r"blk\.(\d+)\.(.+)\.weight", t["name"])
        if name and len(t["shape"]) >= 2 and t["density"] is not None:
            kinds.setdefault(name[2], []).append((int(name[1]), t["density"]))
    if not kinds:
        raise errors.error(errors.BAD_ARGUMENT, "--plot: the file has no block weights of a type with zeros")
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for kind, points in kinds.items():
        axes.plot(*zip(*sorted(points)), marker=".", label=kind)
    axes.set_xlabel("layer")
    axes.set_ylabel("density (non-zeros / weights)")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize="small", ncol=2)
    axes.set_title(str(report["metadata"].get("general.name", report["path"])), parse_math=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
