"""The plot of a report: perplexity over size, and over speed. The only module here that uses matplotlib."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import console, errors
from ..benchmark.forms import DENSE, QUANTIZED, SPARSE, SPARSE_QUANTIZED
from ..gguf.outputs import AtomicOutput

SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xm"}
"""Suffix of each file that is written -> its first four bytes."""

_COLORS = {DENSE: "black", QUANTIZED: "tab:orange", SPARSE: "tab:blue", SPARSE_QUANTIZED: "tab:green"}
_MARKERS = {DENSE: "s", QUANTIZED: "o", SPARSE: "D", SPARSE_QUANTIZED: "^"}

Figure = Any
Axes = Any
"""matplotlib is optional: its types are unknown where it is not installed."""


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


class _Place(NamedTuple):
    """Where a label may stand, relative to its marker, in typographic points."""

    dx: int
    dy: int
    align: str


_LABEL_PLACES = tuple(
    _Place(*place)
    for place in (
        *((0, 6, "center"), (0, -12, "center"), (6, -3, "left"), (-6, -3, "right")),
        *((4, 14, "left"), (-4, 14, "right"), (4, -20, "left"), (-4, -20, "right"), (0, 24, "center")),
    )
)


def figure_class() -> type[Any]:
    """matplotlib's Figure. Raises MackoError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure as MatplotlibFigure
    except ImportError:
        raise errors.error(
            errors.BAD_ARGUMENT, "the plot needs matplotlib: pip install 'ggml-macko[plot]', or leave out -o"
        ) from None
    return MatplotlibFigure


def draw(panels: Sequence[Panel], title: str) -> Figure:
    """A figure of perplexity (y, logarithmic) over one quantity per panel. The first point is the dense model."""
    figure = figure_class()(figsize=(11, 4.4), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(all_axes, panels):
        for kind in _COLORS:
            points = [p for p in panel.points if p.kind == kind]
            if not points:
                continue
            # no error bars: all models read the same text, so their errors are correlated
            axes.plot([p.x for p in points], [p.y for p in points], _MARKERS[kind], color=_COLORS[kind], label=kind)
        axes.axhline(panel.points[0].y, color="gray", linewidth=0.6, linestyle=":")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_xlabel(panel.title)
        axes.margins(x=0.12)
        axes.grid(alpha=0.25, which="both")
    figure.axes[0].set_ylabel("perplexity (log), lower is better")
    figure.axes[0].legend()
    figure.suptitle(title, fontsize=10)
    figure.draw_without_rendering()  # lays the figure out, so that places are known from here on
    for axes, panel in zip(all_axes, panels):
        _label_points(axes, panel.points)
    return figure


def _label_points(axes: Axes, points: Sequence[Point]) -> None:
    """Writes each label where it covers neither a marker nor another label, if there is such a place."""
    from matplotlib.transforms import Bbox

    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in (axes.transData.transform((p.x, p.y)) for p in points)]
    for p in points:
        for place in _LABEL_PLACES:
            text = axes.annotate(
                p.label,
                (p.x, p.y),
                xytext=(place.dx, place.dy),
                textcoords="offset points",
                ha=place.align,
                fontsize=7,
            )
            box = text.get_window_extent()
            inside = axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1)
            last = place is _LABEL_PLACES[-1]
            if last or (inside and not any(box.overlaps(other) for other in taken)):
                break
            text.remove()
        taken.append(box)


def save_figure(figure: Figure, path: str, inputs: Sequence[str | os.PathLike[str]] = ()) -> None:
    """Writes a figure in the format that its suffix names, or not at all; an old file is replaced, but no input."""
    data = io.BytesIO()
    figure.savefig(data, format=Path(path).suffix[1:].lower() or "png", dpi=120)
    image = data.getvalue()
    with AtomicOutput(path, inputs, force=True, signature=image[:4]) as output:
        output.write(output.magic + image[4:])
        output.seal()
        output.commit()


def save(figure: Figure, stem: Path, outputs: Mapping[str, AtomicOutput]) -> None:
    """Writes the figure into open outputs, by suffix, and gives them their names."""
    from matplotlib import rc_context

    for suffix, output in outputs.items():
        data = io.BytesIO()
        # text stays text, and there are no dates and random ids: the same figures give the same file
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "macko"}):
            figure.savefig(data, format=suffix[1:], dpi=110, metadata={"Date": None} if suffix == ".svg" else {})
        output.write(output.magic + data.getvalue()[4:])
        output.seal()
    for output in outputs.values():
        output.commit()
    console.log(f"plot: {', '.join(str(stem) + suffix for suffix in outputs)}")
