#!/usr/bin/env python3
"""Fits the cost model of EC-CSR on a GPU (ggml-macko/src/codec/ec-csr/cost.cpp) to tests/ec-csr-times.inc.

  python3 tools/fit_ec_csr_cost.py

Prints the constants for rows and blocks of 16-bit and F32 values, and how often the model takes the faster layout: with
constants fitted to all matrices, and with constants fitted to half of them on the other half. Needs scipy.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

TIMES = Path(__file__).parent.parent / "tests" / "ec-csr-times.inc"
NAMES = ["us", "row_mb", "block_mb", "kilorows", "kilopieces", "shared", "step"]
START = [4, 0.25, 0.26, 1, 0.2, 2, 0.5]
KINDS = {  # (values, layout) -> the constants that it has
    ("F16", "rows"): ["us", "row_mb", "step"],
    ("F16", "blocks"): ["us", "row_mb", "block_mb", "kilopieces", "step"],
    ("F32", "rows"): ["us", "row_mb", "kilorows", "step"],
    ("F32", "blocks"): ["us", "block_mb", "kilopieces", "shared", "step"],
}


def read() -> list[dict[str, Any]]:
    found = []
    line = re.compile(r'\{ "(.*) (\S+)", GGML_MACKO_TYPE_(F\d+), (.*), (true|false), (.*) \},')
    for m in line.finditer(TIMES.read_text()):
        rows, row_nbytes, block_nbytes, pieces, steps = (float(x) for x in m[4].split(","))
        found.append(
            {
                "where": m[1],
                "kind": (m[3], "blocks" if block_nbytes else "rows"),
                "features": np.array(
                    [1, row_nbytes / 1e6, block_nbytes / 1e6, rows / 1e3, pieces / 1e3, m[5] == "true", steps]
                ),
                "us": float(m[6]),
            }
        )
    return found


def model_us(c: np.ndarray, d: dict[str, Any]) -> float:
    """Microseconds of a product, as gpu_us() in codec/ec-csr/cost.cpp."""
    return float(c @ d["features"])


def fit(measured: list[dict[str, Any]], kind: tuple[str, str]) -> np.ndarray:
    free = [NAMES.index(name) for name in KINDS[kind]]
    mine = [d for d in measured if d["kind"] == kind]

    def constants(x: np.ndarray) -> np.ndarray:
        c = np.zeros(len(NAMES))
        c[free] = x
        return c

    def errors(x: np.ndarray) -> list[float]:
        return [model_us(constants(x), d) / d["us"] - 1 for d in mine]

    return constants(least_squares(errors, [START[i] for i in free], loss="soft_l1", f_scale=0.08).x).round(3)


def judge(fitted: dict[tuple[str, str], np.ndarray], measured: list[dict[str, Any]]) -> tuple[int, int]:
    """(pairs of rows and blocks, of which the slower was taken and costs over 5 %)."""
    by_matrix: dict[str, list[dict[str, Any]]] = {}
    for d in measured:
        by_matrix.setdefault(d["where"], []).append(d)
    n = wrong = 0
    for rows, *blocks in by_matrix.values():
        for b in blocks:
            taken = min(rows, b, key=lambda d: model_us(fitted[d["kind"]], d))
            n += 1
            wrong += taken["us"] > 1.05 * min(rows["us"], b["us"])
    return n, wrong


def main() -> None:
    measured = read()
    fitted = {kind: fit(measured, kind) for kind in KINDS}
    for kind, c in fitted.items():
        errors = np.array([model_us(c, d) / d["us"] - 1 for d in measured if d["kind"] == kind])
        print(
            *kind, dict(zip(NAMES, c.tolist(), strict=True)), f"rms {np.sqrt((errors**2).mean()):.1%} of {len(errors)}"
        )
    print("pairs, wrong by over 5 %:", *judge(fitted, measured))
    places = sorted({d["where"] for d in measured})
    for seed in range(4):
        random.Random(seed).shuffle(places)
        half = set(places[::2])
        fitted = {kind: fit([d for d in measured if d["where"] in half], kind) for kind in KINDS}
        print("fitted to half, judged on the others:", *judge(fitted, [d for d in measured if d["where"] not in half]))


if __name__ == "__main__":
    main()
