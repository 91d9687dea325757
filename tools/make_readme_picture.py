#!/usr/bin/env python3
"""Draws docs/size-quality-{light,dark}.svg, the picture of README.md, from the table of docs/guide/pruning.md.

Needs matplotlib (pip install 'ggml-macko[plot]'). Run it after a change to that table.
"""

from __future__ import annotations

import pathlib
import re

from matplotlib import rc_context
from matplotlib.figure import Figure

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"

ABOVE, BELOW = ((5, 5), "left"), ((-5, -10), "right")  # offset of a label from its point, and alignment

# legend -> the start of a row that begins the series, its color, and the place of its labels
SERIES = {
    "dense, quantized after training": ("dense F16", "#d9822b", ABOVE),
    "trained with 70 % zeros": ("trained with 70 % zeros", "#8a63d2", ABOVE),
    "pruned to 50 %, recovered": ("pruned to 50 %", "#2f81c7", BELOW),
}
LEFT_OUT = {"F16", "Q2_K", "Q4_0"}  # far from the others, or covered by one of them


def rows() -> list[tuple[str, str, float, float]]:
    """(legend, type, MiB, perplexity) of each row of the table."""
    out, legend = [], ""
    for row in (DOCS / "guide" / "pruning.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" *") for cell in row.strip("|").split("|")]
        if len(cells) != 5 or not re.fullmatch(r"[\d.]+ MiB", cells[1]):
            continue
        started = [name for name, (start, *_) in SERIES.items() if cells[0].startswith(start)]
        if started or not cells[0].startswith(("...", "dense")):
            legend = started[0] if started else ""
        kind = re.split(r"[ ,]+", cells[0].replace("**", "").removesuffix(" as `macko`"))[-1]
        if legend and kind not in LEFT_OUT:
            out.append((legend, kind, float(cells[1].split()[0]), float(cells[3])))
    return out


def draw(ink: str) -> Figure:
    """Draws the figure with text and axes in one color on a transparent background."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    for legend, (_, color, (offset, side)) in SERIES.items():
        points = sorted((x, y, kind) for name, kind, x, y in rows() if name == legend)
        axes.plot([p[0] for p in points], [p[1] for p in points], "o-", color=color, markersize=5, label=legend)
        for x, y, kind in points:
            axes.annotate(kind, (x, y), offset, textcoords="offset points", ha=side, fontsize=8, color=color)
    axes.set_xlabel("file, MiB", color=ink)
    axes.set_ylabel("perplexity, lower is better", color=ink)
    axes.tick_params(colors=ink)
    for side, spine in axes.spines.items():
        spine.set(color=ink, visible=side in ("left", "bottom"))
    axes.margins(0.06, 0.1)
    axes.legend(frameon=False, labelcolor=ink, fontsize=9)
    return figure


def main() -> None:
    with rc_context({"svg.hashsalt": "macko", "svg.fonttype": "none", "font.family": "sans-serif"}):
        for theme, ink in (("light", "#24292f"), ("dark", "#d0d7de")):
            draw(ink).savefig(DOCS / f"size-quality-{theme}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
