#!/usr/bin/env python3
"""Sizes of EC-CSR: random matrices of the shapes of the EC-SpMV paper, or the weights of a model.

  python3 tools/ec_csr_storage.py [--shapes 4096x4096,...] [--sparsities 0.7,0.8,0.9]
  python3 tools/ec_csr_storage.py --model MODEL.gguf        -0.0 counts as zero
  python3 tools/ec_csr_storage.py --structured              beside MACKO

Every size is that of arrays that were encoded (FP16; FP32 has the same blocks and twice the bytes of values). Padding:
stored values that are no non-zeros, over non-zeros. Reduction: against CSR with 32-bit columns and row pointers. The
last column is the reduction with 32-bit bases. Needs the installed package.
"""

from __future__ import annotations

import argparse
import re
import time

import numpy as np

from ggml_macko import SparseMatrix, console, values
from ggml_macko.codecs import ec_csr
from ggml_macko.gguf import tensor_rules
from ggml_macko.gguf.files import Model
from ggml_macko.native import codec as native_codec

SHAPES = "1024x8192,4096x4096,4096x11008,11008x4096,5120x5120,5120x13824,13824x5120,8192x8192"
VARIANTS = {  # label -> options. 128 is the smallest block that the paper extracts
    "no extraction": {"max_granularity": 1},
    "every block of 128": {"min_columns": 128},
    "default": {},
}


def random_mask(rows: int, cols: int, sparsity: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    out = np.empty((rows, cols), dtype=np.uint16)
    for row in out:  # one row of floats at a time
        row[:] = np.where(rng.random(cols, dtype=np.float32) < sparsity, 0, 0x3C00)
    return out


def encode(bits: np.ndarray, delta_bits: int, options: dict) -> ec_csr.EcCsrMatrix:
    """bits: F16 bit patterns (rows, cols)."""
    found = native_codec.encode("ec-csr", bits, values.TYPE_F16, {"delta_bits": delta_bits, **options})
    return ec_csr.EcCsrMatrix.from_encoded(found)


def measure(bits: np.ndarray, delta_bits: int, options: dict) -> dict:
    start = time.monotonic()
    m = encode(bits, delta_bits, options)
    seconds = time.monotonic() - start
    csr = m.nnz * 4 + (m.rows + 1) * 4  # columns and row pointers
    sizes = {16: (m.nbytes, csr + 2 * m.nnz), 32: (m.nbytes + 2 * m.n_stored, csr + 4 * m.nnz)}
    table = ec_csr.sets(m)
    wide_bases = 0 if m.bases.dtype.itemsize == 4 else m.bases.nbytes
    return {
        "seconds": seconds,
        "padding": (m.n_stored - m.nnz) / m.nnz,
        "in blocks of several rows": float((table[:, 0] * table[:, 3])[table[:, 0] > 1].sum() / m.nnz),
        "bytes per non-zero": m.nbytes / m.nnz,
        **{f"reduction FP{b}": 1 - ours / theirs for b, (ours, theirs) in sizes.items()},
        "FP16, 32-bit bases": 1 - (m.nbytes + wide_bases) / sizes[16][1],
    }


def row_of(label: str, delta_bits: int, found: list) -> list:
    mean = {key: float(np.mean([f[key] for f in found])) for key in found[0]}
    percent = [f"{100 * mean[k]:.2f} %" for k in ("padding", "in blocks of several rows")]
    reductions = [f"{100 * mean[k]:.1f} %" for k in ("reduction FP16", "reduction FP32", "FP16, 32-bit bases")]
    return [
        label,
        delta_bits,
        *percent,
        f"{mean['bytes per non-zero']:.3f}",
        *reductions,
        f"{max(f['seconds'] for f in found):.1f}",
    ]


HEADERS = [
    "bits",
    "padding",
    "in blocks of several rows",
    "bytes per non-zero",
    "reduction FP16",
    "reduction FP32",
    "FP16, 32-bit bases",
    "longest s",
]


def print_table(first: list, rows: list) -> None:
    print(console.table(rows, [*first, *HEADERS]), flush=True)


def run_random(shapes: list, sparsities: list, each: bool) -> None:
    for sparsity in sparsities:
        found: dict = {}
        for rows, cols in shapes:
            bits = random_mask(rows, cols, sparsity, seed=rows + cols)
            for label, options in VARIANTS.items():
                for delta_bits in ec_csr.DELTA_BITS:
                    result = measure(bits, delta_bits, options)
                    found.setdefault((label, delta_bits), []).append(result)
                    if each:
                        print_table(["shape", "blocks"], [[f"{rows}x{cols}", *row_of(label, delta_bits, [result])]])
        print(f"\nSparsity {100 * sparsity:.0f} %, mean of {len(shapes)} shapes:\n")
        print_table(["blocks"], [row_of(label, bits, results) for (label, bits), results in found.items()])


def run_model(path: str) -> None:
    found: dict = {}
    with Model(path) as model:
        for t in model.tensors:
            if not tensor_rules.is_multiplied(t.name, len(t.ne)) or t.type != values.TYPE_F16:
                continue
            bits = t.read_bits()
            bits[bits == values.NEGATIVE_ZERO[t.type]] = 0
            if np.count_nonzero(bits) > bits.size * 0.9:
                continue
            kind = re.sub(r"blk\.\d+\.|\.weight", "", t.name) + f" {t.rows}x{t.cols}"
            for label, options in VARIANTS.items():
                for delta_bits in ec_csr.DELTA_BITS:
                    found.setdefault((kind, label, delta_bits), []).append(measure(bits, delta_bits, options))
    print_table(
        ["weight", "blocks"], [[kind, *row_of(label, bits, results)] for (kind, label, bits), results in found.items()]
    )


def rest_packed_nbytes(w: np.ndarray) -> int:
    """Bytes if what extraction leaves of the rows had the packed types' index: gaps without fillers, or a bitmap."""
    m = encode(w.view(np.uint16), 8, VARIANTS["every block of 128"])
    rest, nbytes = w.copy(), m.sets.nbytes
    for block in ec_csr.blocks(m):
        if len(block.rows) > 1:
            rest[np.ix_(block.rows, block.cols)] = 0
            nbytes += (
                block.values.nbytes + len(block.cols) + block.bases.size * m.bases.itemsize + 4 * len(block.rows) + 4
            )
    return nbytes + SparseMatrix.from_dense(rest, format="packed").nbytes


def run_structured(rows: int, cols: int) -> None:
    """Masks at density .3 that are not random: columns of uneven density, rows that are alike."""
    rng = np.random.default_rng(0)
    uniform = rng.random((rows, cols), dtype=np.float32)
    masks = {"random": uniform < 0.3}
    for share, high in ((0.2, 0.8), (0.25, 0.95)):
        low = (0.3 - share * high) / (1 - share)
        masks[f"{share:.0%} of the columns at {high}, the others at {low:.3f}"] = uniform < np.where(
            rng.random(cols) < share, high, low
        )
    masks["column densities from Beta(.5, 1.17)"] = uniform < rng.beta(0.5, 0.5 * 7 / 3, cols)
    for alike, redrawn in ((2, 0), (4, 0), (4, 0.02), (16, 0.05)):
        patterns = np.repeat(rng.random((rows // alike, cols)) < 0.3, alike, axis=0)[rng.permutation(rows)]
        mask = np.where(rng.random((rows, cols)) < redrawn, uniform < 0.3, patterns)
        masks[f"{alike} rows alike, {redrawn:.0%} of the places redrawn"] = mask
    table = []
    for label, mask in masks.items():
        w = np.where(mask, np.float16(1), np.float16(0))
        found = [
            SparseMatrix.from_dense(w),
            *(SparseMatrix.from_dense(w, b, format="ec-csr") for b in ec_csr.DELTA_BITS),
            SparseMatrix.from_dense(w, format="packed"),
        ]
        sizes = [*(m.nbytes for m in found), rest_packed_nbytes(w)]
        table.append([label, *(f"{n / found[0].nnz:.3f}" for n in sizes)])
    types = ["macko", "ec-csr-4", "ec-csr-8", "packed", "ec-csr-8, rest packed"]
    print(console.table(table, [f"bytes per non-zero, FP16, {rows}x{cols}", *types]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help=f"ROWSxCOLS, ... (default: {SHAPES})")
    parser.add_argument("--sparsities", default="0.7,0.8,0.9", help="shares of zeros (default: 0.7,0.8,0.9)")
    parser.add_argument("--each", action="store_true", help="also print each shape")
    parser.add_argument("--model", metavar="MODEL.gguf", help="the F16 weights of a pruned model instead")
    parser.add_argument("--structured", action="store_true", help="masks that are not random, beside MACKO, instead")
    args = parser.parse_args()
    if args.model:
        run_model(args.model)
    elif args.structured:
        run_structured(2048, 4096)
    else:
        shapes = [tuple(int(x) for x in s.split("x")) for s in args.shapes.split(",")]
        run_random(shapes, [float(s) for s in args.sparsities.split(",")], args.each)


if __name__ == "__main__":
    main()
