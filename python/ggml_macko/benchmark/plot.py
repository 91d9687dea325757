"""Plots of perplexity over size and speed, of the density of weights, and of a recovery. No other module uses
matplotlib.

The background is white, so plots are readable on light and dark pages.
"""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

from .. import console, errors
from ..benchmark.forms import DENSE, QUANTIZED, SPARSE, SPARSE_QUANTIZED
from ..gguf.outputs import AtomicOutput

SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xm", ".pdf": b"%PDF"}
"""Suffix of a plot -> the first four bytes of its format."""

REPORT_SUFFIXES = (".png", ".svg")
"""The files of a report."""

_COLORS = {DENSE: "black", QUANTIZED: "tab:orange", SPARSE: "tab:blue", SPARSE_QUANTIZED: "tab:green"}
_MARKERS = {DENSE: "s", QUANTIZED: "o", SPARSE: "D", SPARSE_QUANTIZED: "^"}

_NO_DATE: Mapping[str, dict[str, None]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}

Figure = Any
Axes = Any
"""Any, because matplotlib is optional."""


class Point(NamedTuple):
    """One form of the model."""

    label: str
    kind: str  # DENSE, QUANTIZED, SPARSE or SPARSE_QUANTIZED
    x: float
    y: float


class Panel(NamedTuple):
    """One pair of axes."""

    title: str  # of the x axis
    points: Sequence[Point]


def _directions() -> list[tuple[float, float]]:
    """Offsets of a label from its marker in typographic points, nearest first: 16 directions on each of 8 circles."""
    angles = [math.radians(degrees) for degrees in (90, 270, 0, 180, *(45 * i for i in (1, 3, 5, 7)))]
    angles += [math.radians(22.5 * i) for i in range(1, 16, 2)]
    return [(r * math.cos(a), r * math.sin(a)) for r in (10, 18, 28, 40, 54, 70, 90, 115) for a in angles]


def figure_class() -> type[Any]:
    """matplotlib's Figure. Raises MackoError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
        from matplotlib.figure import Figure as MatplotlibFigure
    except ImportError:
        raise errors.bad_argument(
            "a plot needs matplotlib: pip install 'ggml-macko[plot]', or leave the plot out"
        ) from None
    return MatplotlibFigure


def _without_formulas(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Turns off formulas, so that a dollar sign in a name is plain text."""

    @functools.wraps(draw)
    def wrapped(*args: Any) -> Figure:
        figure_class()
        from matplotlib import rc_context

        with rc_context({"text.parse_math": False}):
            return draw(*args)

    return wrapped


@_without_formulas
def draw(panels: Sequence[Panel], title: str) -> Figure:
    """A figure of perplexity over one quantity per panel, all logarithmic. The first point is the dense model."""
    figure = figure_class()(figsize=(6.5 * len(panels) + 2.5, 5.2), layout="constrained", facecolor="white")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(all_axes, panels):
        for kind in _COLORS:
            points = [p for p in panel.points if p.kind == kind]
            if not points:
                continue
            # no error bars: errors on the same text are correlated
            axes.plot([p.x for p in points], [p.y for p in points], _MARKERS[kind], color=_COLORS[kind], label=kind)
        axes.axhline(panel.points[0].y, color="gray", linewidth=0.6, linestyle=":")
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("{x:g}")
        axes.set_xlabel(panel.title)
        axes.margins(x=0.12, y=0.12)
        axes.grid(alpha=0.25, which="both")
    figure.axes[0].set_ylabel("perplexity (log), lower is better")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(errors.printable(title), fontsize=10)
    figure.draw_without_rendering()  # computes the layout, which the labels need
    for axes, panel in zip(all_axes, panels):
        _label_points(axes, panel.points)
    return figure


def _label_points(axes: Axes, points: Sequence[Point]) -> None:
    """Writes each label at the nearest place at which the label and the line to its marker cover no other element."""
    from matplotlib.path import Path as Line
    from matplotlib.transforms import Bbox

    def leader(box: Any, x: float, y: float) -> Any:
        """The line from a marker to the border of its label."""
        return Line([(x, y), (min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1))])

    def badness(box: Any, line: Any) -> float:
        """Pixels outside of the axes and on other labels and markers, or without any the number of crossed lines."""
        beyond = (axes.bbox.x0 - box.x0, box.x1 - axes.bbox.x1, axes.bbox.y0 - box.y0, box.y1 - axes.bbox.y1)
        overlaps = [Bbox.intersection(box, other) for other in taken]
        covered = sum(max(0.0, n + 3) for n in beyond) + sum(o.width * o.height + 1 for o in overlaps if o is not None)
        if covered:
            return float(1000 * covered)
        own_marker = tuple(line.vertices[0])
        n_crossed = sum(line.intersects_path(other) or other.intersects_bbox(box) for other in lines)
        return float(n_crossed + sum(line.intersects_bbox(o) for o in taken if not o.contains(*own_marker)))

    positions = {p: axes.transData.transform((p.x, p.y)) for p in points}
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in positions.values()]
    lines: list[Any] = []
    pixels = axes.figure.dpi / 72  # per typographic point
    for p in sorted(points, key=lambda p: -p.y):
        x, y = positions[p]
        style = {"textcoords": "offset points", "fontsize": 8, "ha": "center", "va": "center"}
        text = axes.annotate(errors.printable(p.label), (p.x, p.y), xytext=(0, 0), **style)
        box = text.get_window_extent()
        best = (math.inf, (0.0, 0.0), box)
        for dx, dy in _directions():
            dx += box.width / pixels / 2 * (abs(dx) > 3) * math.copysign(1, dx)  # next to the marker, not across it
            moved = box.translated(dx * pixels, dy * pixels)
            bad = badness(moved, leader(moved, x, y))
            if bad < best[0]:
                best = (bad, (dx, dy), moved)
            if not bad:
                break
        _, place, box = best
        text.set_position(place)
        taken.append(box)
        lines.append(leader(box, x, y))
        end = (lines[-1].vertices[1] - (x, y)) / pixels
        arrow = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
        axes.annotate("", (p.x, p.y), xytext=end, textcoords="offset points", arrowprops=arrow, zorder=1)


# ---- density of weights ----


class Cell(NamedTuple):
    """A weight of a model."""

    layer: int
    matrix: str  # such as ffn_down
    density: float


@_without_formulas
def draw_density(cells: Sequence[Cell], title: str) -> Figure:
    """A heatmap of densities: layers from left to right, matrices from top to bottom."""
    import numpy as np

    matrices = list(dict.fromkeys(cell.matrix for cell in cells))
    n_layers = max(cell.layer for cell in cells) + 1
    grid = np.full((len(matrices), n_layers), np.nan)
    for cell in cells:
        grid[matrices.index(cell.matrix), cell.layer] = cell.density
    size = (min(16.0, 3.5 + 0.42 * n_layers), 1.8 + 0.36 * len(matrices))
    figure = figure_class()(figsize=size, layout="constrained", facecolor="white")
    axes = figure.subplots()
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="viridis_r", aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(matrices)), matrices, fontsize=8)
    axes.set_xticks(range(0, n_layers, max(1, n_layers // 16)))
    axes.set_xlabel("layer")
    if n_layers <= 40:
        for row, column in np.argwhere(np.isfinite(grid)):
            value = grid[row, column]
            shown = f"{value:.2f}".lstrip("0") if value < 0.995 else "1"
            axes.text(
                column, row, shown, ha="center", va="center", fontsize=7, color="white" if value > 0.5 else "black"
            )
    figure.colorbar(image, ax=axes, label="density: non-zeros / weights", fraction=0.05)
    figure.suptitle(title, fontsize=10)
    return figure


# ---- recovery ----


@_without_formulas
def draw_recovery(evaluations: Sequence[Mapping[str, float]], before: float, title: str) -> Figure:
    """Divergences and learning rates over the steps of a recovery. evaluations: those of RecoverReport; before: the
    divergence of the pruned model on the held-out text.
    """
    figure = figure_class()(figsize=(7.5, 6), layout="constrained", facecolor="white")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = [e["step"] for e in evaluations]
    top.plot(steps, [e["loss"] for e in evaluations], "o-", color="tab:gray", label="text")
    top.plot([0, *steps], [before, *(e["divergence"] for e in evaluations)], "s-", color="tab:blue", label="held out")
    top.axhline(before, color="gray", linewidth=0.6, linestyle=":")
    top.set(yscale="log", ylabel="divergence from the dense model\n(nats per token, log)")
    top.yaxis.set_major_formatter("{x:g}")
    top.yaxis.set_minor_formatter("{x:g}")
    top.legend(frameon=False)
    bottom.plot(steps, [e["rate"] for e in evaluations], "o-", color="tab:orange")
    bottom.set(xlabel="step", ylabel="learning rate")
    bottom.set_ylim(bottom=0)
    for axes in (top, bottom):
        axes.grid(alpha=0.25, which="both")
    figure.suptitle(errors.printable(title), fontsize=10)
    return figure


# ---- writing ----


Inputs = Sequence["str | os.PathLike[str]"]


def check_output(path: str, force: bool, inputs: Inputs = ()) -> None:
    """Raises MackoError before any work: for missing matplotlib, an existing file or an unknown suffix."""
    figure_class()
    with output_of(path, force, inputs):
        pass


def output_of(path: str, force: bool, inputs: Inputs = ()) -> AtomicOutput:
    """The file of a plot. Raises MackoError if its suffix is not in SIGNATURES, if it exists without force, or if it is
    one of the inputs.
    """
    signature = SIGNATURES.get(Path(path).suffix.lower())
    if signature is None:
        raise errors.bad_argument(f"{path}: a plot ends in {', '.join(SIGNATURES)}")
    return AtomicOutput(path, inputs, force, signature)


def save_as(figure: Figure, path: str, force: bool = False, inputs: Inputs = ()) -> None:
    """Writes the figure into one file. Raises MackoError if it exists without force, or is one of the inputs."""
    with output_of(path, force, inputs) as output:
        save(figure, {Path(path).suffix.lower(): output})


def save(figure: Figure, outputs: Mapping[str, AtomicOutput]) -> None:
    """Writes the figure into open outputs, by suffix, and commits them."""
    from matplotlib import rc_context

    for suffix, output in outputs.items():
        data = io.BytesIO()
        # text stays text; without dates and random ids, the same figures give the same file
        with rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "macko"}):
            figure.savefig(data, format=suffix[1:], dpi=110, metadata=_NO_DATE.get(suffix, {}))
        output.write(output.magic + data.getvalue()[4:])
        output.seal()
    for output in outputs.values():
        output.commit()
    console.log(f"plot: {', '.join(str(output.path) for output in outputs.values())}")
