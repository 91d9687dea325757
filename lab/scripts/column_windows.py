#!/usr/bin/env python3
"""Error of quantized non-zeros with one scale for each window of columns (lab/quantized.md). Needs PyTorch.

  python3 lab/scripts/column_windows.py --density .5 [--magnitude] [--blocks N] MODEL.gguf

For windows that hold 16, 32 and 64 non-zeros on average, 3, 4 and 5 bits, and several kinds of scales, the script
prints the RMS error divided by the RMS of the non-zeros, over the block matrices of a dense F16 GGUF. The levels are
fitted to each matrix. With --magnitude, the script first prunes each matrix to the density by magnitude.
"""

from __future__ import annotations

import argparse
import pathlib

import gguf
import numpy as np
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOP = 127  # largest level
GRID = (0.72, 0.8, 0.87, 0.93, 1.0, 1.08)  # first scales of the search, relative to the largest value


def matrices(path: pathlib.Path, n_blocks: int) -> list[Tensor]:
    found = []
    for t in gguf.GGUFReader(path).tensors:
        part = t.name.split(".")
        if part[0] == "blk" and int(part[1]) < n_blocks and len(t.shape) == 2 and t.n_elements > 20000:
            found.append(torch.from_numpy(np.array(t.data, dtype=np.float32)).to(DEVICE))
    return found


def prune(w: Tensor, density: float) -> Tensor:
    smallest = w.abs().flatten().kthvalue(int(w.numel() * (1 - density))).values
    return torch.where(w.abs() > smallest, w, torch.zeros_like(w))


def windows(w: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(w, (0, -w.shape[1] % width)).reshape(-1, width)


def nearest(x: Tensor, d: Tensor, levels: Tensor) -> Tensor:
    index = torch.bucketize((x / d[:, None]).contiguous(), (levels[1:] + levels[:-1]) / 2)
    return levels[index] * (x != 0)


def squared_error(x: Tensor, d: Tensor, levels: Tensor) -> Tensor:
    return ((x - d[:, None] * nearest(x, d, levels)) ** 2).sum(1)


def search(x: Tensor, levels: Tensor) -> Tensor:
    """The best scale of either sign for each window from a grid, each improved twice by least squares."""
    largest = x.abs().amax(1)
    best, chosen = torch.full_like(largest, torch.inf), torch.ones_like(largest)
    for start in (sign * g for sign in (1, -1) for g in GRID):
        d = torch.where(largest == 0, torch.ones_like(largest), start * largest / TOP)
        for _ in range(3):
            error = squared_error(x, d, levels)
            chosen, best = torch.where(error < best, d, chosen), torch.minimum(error, best)
            q = nearest(x, d, levels)
            fitted = (x * q).sum(1) / (q * q).sum(1).clamp_min(1e-30)
            d = torch.where(fitted == 0, d, fitted)
    return chosen


def fit_levels(x: Tensor, n: int) -> Tensor:
    """Levels of a matrix: quantiles, improved by alternating scales and weighted means, and rounded to integers."""
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0]
    by_largest = torch.where(largest == 0, torch.ones_like(largest), largest / -TOP)
    values = (x / by_largest[:, None])[x != 0]
    values = values[torch.randperm(len(values), device=DEVICE)[:1_000_000]]
    levels = torch.quantile(values, (torch.arange(n, device=DEVICE) + 0.5) / n)
    for turn in range(12):
        d = search(x, levels) if turn % 4 == 3 else by_largest
        y, weight = x / d[:, None], (d**2)[:, None].expand_as(x)
        index = torch.bucketize(y.contiguous(), (levels[1:] + levels[:-1]) / 2)[x != 0]
        total = torch.zeros_like(levels).index_add_(0, index, weight[x != 0])
        sums = torch.zeros_like(levels).index_add_(0, index, (weight * y)[x != 0])
        levels = torch.where(total > 0, sums / total.clamp_min(1e-30), levels).sort().values
    return torch.round(levels / levels.abs().max() * TOP)


def rounded_scales(d: Tensor, kind: str, per_row: int) -> Tensor:
    """Scales as stored in a file."""
    if kind == "F16":
        return d.half().float()
    if kind == "8-bit float":  # sign, 3 exponent bits and 4 mantissa bits, times a float for each row
        largest = d.abs().reshape(-1, per_row).amax(1).repeat_interleave(per_row)
        mantissa, exponent = torch.frexp(d.abs() / largest)
        step = torch.ldexp(torch.ones_like(d), exponent.clamp_min(-6) - 5)
        return (torch.round(d.abs() / largest / step) * step).clamp_min(2**-11) * largest * d.sign()
    row = d.abs().reshape(-1, per_row).amax(1).repeat_interleave(per_row) / 127  # 8-bit integers, a float for each row
    return torch.round(d.abs() / row).clamp_min(1) * row * d.sign()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--density", type=float, required=True)
    parser.add_argument("--magnitude", action="store_true")
    parser.add_argument("--blocks", type=int, default=4, metavar="N")
    args = parser.parse_args()
    ws = [prune(w, args.density) if args.magnitude else w for w in matrices(args.model, args.blocks)]
    kinds = ("F16", "8-bit integer", "8-bit float")
    energy = sum((w.double() ** 2).sum().item() for w in ws)
    print(f"| bits | non-zeros per window | {' | '.join(kinds)} |\n|---|---|---|---|---|")
    for bits in (3, 4, 5):
        for n in (16, 32, 64):
            width = 2 ** round(np.log2(n / args.density))
            errors = dict.fromkeys(kinds, 0.0)
            for w in ws:
                x = windows(w, width)
                levels = fit_levels(x, 2**bits)
                d = search(x, levels)
                for kind in kinds:
                    stored = rounded_scales(d, kind, -(-w.shape[1] // width))
                    errors[kind] += squared_error(x, stored, levels).double().sum().item()
            cells = " | ".join(f"{100 * (errors[kind] / energy) ** 0.5:.2f} %" for kind in kinds)
            print(f"| {bits} | {n} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
