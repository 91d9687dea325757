"""`macko plan MODEL`: predicts the results of storing a model sparse, and gives advice."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

from .. import console
from ..commands.arguments import Number, add_cache_types, add_quiet, add_threads
from ..conversion.estimate import SAMPLE_WEIGHTS, ModelPlan, plan
from ..conversion.measured_speed import PAGE

HELP = "predict size, memory and speed of a model stored sparse"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts size, memory and speed of a GGUF model, dense or sparse, for each type of `macko convert` and for "
        "dense Q8_0 and Q4_K_M, and gives advice. Sizes come from encoding the weights (of tensors with more than "
        f"{SAMPLE_WEIGHTS >> 20} million weights, a sample of rows; --all-rows encodes all). ec-csr, which takes "
        f"seconds per tensor, is tried only if --types names it. Speeds were measured on other machines: {PAGE}."
    )
    parser.add_argument("model", metavar="MODEL", help="GGUF model; the first file of a split one")
    parser.add_argument(
        "--types",
        metavar="TYPE,...",
        default="",
        help="types of `macko convert` to try (default: all except ec-csr and auto)",
    )
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=Number(0),
        default=0,
        metavar="N",
        help="context length for the memory (default: 4096, or the context length of the model if smaller)",
    )
    add_cache_types(parser)
    parser.add_argument("--all-rows", action="store_true", help="encode all weights of large tensors")
    add_threads(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    found = plan(
        args.model,
        types=[name for name in args.types.split(",") if name],
        n_ctx=args.ctx_size,
        cache_type_k=args.cache_type_k,
        cache_type_v=args.cache_type_v,
        all_rows=args.all_rows,
        n_threads=args.n_threads,
    )
    if args.json:
        console.print_json(dataclasses.asdict(found))
    else:
        for part in sections(found):
            print(part)
    return 0


def sections(p: ModelPlan) -> Iterator[str]:
    """The parts of the output."""
    yield (
        f"{p.path}: {console.size(p.nbytes)}, {p.n_parameters} parameters, {p.n_sparse_parameters} of them in matrices "
        "that can be stored sparse"
        + (f" (density {p.density:.4f})" if p.density is not None else "")
        + ("" if p.sampled == 1 else f"; {p.sampled:.0%} of the weights were looked at, the rest is estimated")
    )
    yield "\n" + console.table(list(_group_rows(p)), _GROUP_HEADERS, "g")
    yield "\n" + console.table(list(_type_rows(p)), _TYPE_HEADERS, "g")
    yield (
        '\n"bits per value", "exponents covered": of the non-zeros as sparse-lossless stores them, and the share of\n'
        'them that are no outliers; "embeddings, head": their type, which --token-embedding-type and\n'
        '--output-tensor-type change; "smaller than": the file is, at densities of random non-zeros below that'
    )
    if p.context is not None:
        types = " and ".join(dict.fromkeys((p.context.type_k.upper(), p.context.type_v.upper())))
        yield (
            f"memory: weights, {console.size(p.context.kv_cache)} of keys and values ({types}, {p.context.n_ctx} "
            f"tokens) and about {console.size(p.context.host)} of the process; on a GPU about "
            f"{console.size(p.context.compute + p.context.gpu)} instead of the latter, CUDA's own among it"
        )
    if p.advice:
        yield "\n" + "\n".join(f"* {line}" for line in p.advice)


_GROUP_HEADERS = ["tensors", "n", "weights", "type", "density", "-0.0", "MiB", "bits per value", "exponents covered"]

_TYPE_HEADERS = [
    "type",
    "lossless",
    "sparse tensors",
    "MiB",
    "BPW",
    "of file",
    "embeddings, head",
    "RAM, MiB",
    "GPU, MiB",
    "smaller than Q8_0",
    "smaller than Q4_K_M",
]


def _group_rows(p: ModelPlan) -> Iterator[list[object]]:
    for g in p.groups:
        density = None if g.density is None else round(g.density, 4)
        yield [
            g.name,
            g.n_tensors,
            g.n_parameters,
            g.type,
            density,
            g.n_negative_zeros,
            round(g.nbytes / console.MIB, 2),
            None if g.value_bits is None else round(g.value_bits, 2),
            None if g.coverage is None else round(g.coverage, 4),
        ]


def _type_rows(p: ModelPlan) -> Iterator[list[object]]:
    host, on_gpu = 0, 0
    if p.context is not None:
        host = p.context.kv_cache + p.context.host
        on_gpu = p.context.kv_cache + p.context.compute + p.context.gpu
    for t in p.types:
        yield [
            t.type,
            "yes" if t.is_lossless else "no",
            t.n_sparse,
            round(t.nbytes_file / console.MIB, 2),
            round(t.bits_per_weight, 2),
            round(t.nbytes_file / p.nbytes, 2),
            t.ends,
            round((t.nbytes_cpu + host) / console.MIB),
            round((t.nbytes_gpu + on_gpu) / console.MIB),
            *(_below(t.below.get(name)) for name in ("Q8_0", "Q4_K_M")),
        ]


def _below(density: float | None) -> str:
    if density is None:
        return ""
    if density in (0, 1):
        return "always" if density else "never"
    return f"below {density:.2f}"
