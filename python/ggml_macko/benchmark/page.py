"""One HTML page of a report: a sortable table, pictures with values on hover, and texts that the models generate.

The page needs no network, and its policy forbids it. Names of files and generated texts are untrusted and escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from ..benchmark.forms import DENSE, QUANTIZED, SPARSE, SPARSE_QUANTIZED
from ..benchmark.plot import Panel, Point
from ..errors import printable

SUFFIX, SIGNATURE = ".html", b"<!do"
"""The end of the name of a page, and its first four bytes."""

_CLASSES = {DENSE: "dense", QUANTIZED: "quantized", SPARSE: "sparse", SPARSE_QUANTIZED: "both"}
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 600, 380, 64, 24, 20, 48  # of a picture, and its margins
_CHARACTER = 6.6  # the width of a character of a label

Row = Sequence["str | float | None"]


class Column(NamedTuple):
    """A column of the table."""

    header: str
    format: str = ""  # of numbers, as of format()


class Continuation(NamedTuple):
    """A prompt, and the text with which each model continues it."""

    prompt: str
    texts: Sequence[tuple[str, str]]  # label of the model, text


def page(
    title: str, about: str, columns: Sequence[Column], rows: Sequence[Row], panels: Sequence[Panel],
    continuations: Sequence[Continuation],
) -> str:  # fmt: skip
    """The text of a page. rows: of the table; None is an empty cell."""
    kinds = {p.kind for panel in panels for p in panel.points}
    shown = [(kind, c) for kind, c in _CLASSES.items() if kind in kinds]
    legend = "".join(f'<li class="{c}"><svg viewBox="-8 -8 16 16">{_marker(c)}</svg>{kind}' for kind, c in shown)
    parts = [
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{_text(title)}</title>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">",
        f"<style>{_STYLE}</style>\n<h1>{_text(title)}</h1>\n<p>{_text(about)}</p>",
        f"<div class=wide>{''.join(_table(columns, rows))}</div>",
        f"<h2>Pictures</h2>\n<ul class=legend>{legend}</ul>\n<div class=pictures>",
        *(_picture(panel) for panel in panels),
        "</div>",
    ]
    if continuations:
        parts.append(
            "<h2>Generated text</h2>\n<p>Each model continues the same text with its most probable tokens.</p>"
        )
        parts += map(_side_by_side, continuations)
    return "\n".join([*parts, f"<script>{_SCRIPT}</script>\n"])


def _text(text: str) -> str:
    return escape(printable(text))


# ---- table ----


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[str]:
    yield "<table><thead><tr>"
    for column in columns:
        number = " class=number" if column.format else ""
        yield f"<th scope=col{number}><button>{_text(column.header)}</button>"
    yield "<tbody>"
    for row in rows:
        yield "\n<tr>"
        for column, cell in zip(columns, row):
            if isinstance(cell, str):
                yield f"<td>{_text(cell)}"
            else:
                yield "<td>" if cell is None else f'<td class=number data-value="{cell!r}">{cell:{column.format}}'
    yield "</table>"


def _number(x: float) -> str:
    """Four digits; no exponent below a million."""
    return f"{x:,.0f}" if 1000 <= abs(x) < 1e6 else f"{x:.4g}"


# ---- pictures ----


def _picture(panel: Panel) -> str:
    """Perplexity over one quantity, both logarithmic."""
    xs, ys = _Axis([p.x for p in panel.points]), _Axis([p.y for p in panel.points])
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def place(p: Point) -> tuple[float, float]:
        return _LEFT + xs.at(p.x) * (right - _LEFT), bottom - ys.at(p.y) * (bottom - _TOP)

    parts = [f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role=img><title>perplexity, {_text(panel.title)}</title>']
    for tick in xs.ticks:
        x = _LEFT + xs.at(tick) * (right - _LEFT)
        parts.append(f'<path class=grid d="M{x:.1f} {_TOP}V{bottom}"/>')
        parts.append(f'<text class=tick text-anchor=middle x="{x:.1f}" y="{bottom + 18}">{_number(tick)}</text>')
    for tick in ys.ticks:
        y = bottom - ys.at(tick) * (bottom - _TOP)
        parts.append(f'<path class=grid d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text class=tick text-anchor=end x="{_LEFT - 8}" y="{y + 4:.1f}">{_number(tick)}</text>')
    centered = "class=tick text-anchor=middle"
    middle = (_LEFT + right) / 2
    parts.append(f'<text {centered} x="{middle}" y="{_HEIGHT - 8}">{_text(panel.title)} (log)</text>')
    turned = f'transform="translate(14 {(_TOP + bottom) / 2}) rotate(-90)"'
    parts.append(f"<text {centered} {turned}>perplexity (log)</text>")
    labels = _labels([(*place(p), p.label) for p in panel.points])
    for p, label in zip(panel.points, labels):
        x, y = place(p)
        kind = _CLASSES[p.kind]
        values = f"{_text(p.label)}: {_number(p.x)} {_text(panel.title)}, perplexity {p.y:.2f}"
        parts.append(f'<g class="point {kind}" tabindex=0><title>{values}</title>{label}')
        parts.append(f'<g transform="translate({x:.1f} {y:.1f})"><circle class=area r=14 />{_marker(kind)}</g>')
        parts.append(f'<text class=values text-anchor=end x="{right}" y="{_TOP - 6}">{values}</text></g>')
    return "".join([*parts, "</svg></figure>"])


def _marker(kind: str) -> str:
    shape = {"dense": "M-5-5H5V5H-5Z", "sparse": "M0-7L7 0L0 7L-7 0Z", "both": "M0-7L7 5H-7Z"}.get(kind)
    return f'<path class=marker d="{shape}"/>' if shape else "<circle class=marker r=5.5 />"


class _Axis:
    """A logarithmic axis. at(value) is 0 ... 1."""

    def __init__(self, values: Sequence[float]) -> None:
        low, high = math.log(min(values)), math.log(max(values))
        margin = 0.12 * (high - low) or 0.1
        self._low, self._width = low - margin, high - low + 2 * margin
        self.ticks = _ticks(math.exp(self._low), math.exp(self._low + self._width))

    def at(self, value: float) -> float:
        return (math.log(value) - self._low) / self._width


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers: about equally far from each other on a logarithmic axis, or on a short one with equal steps."""
    if high / low > 3:
        digits = (1.0, 2.0, 5.0) if high / low > 30 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
        tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
        return [t for ten in tens for digit in digits if low <= (t := digit * 10.0**ten) <= high]
    rough = (high - low) / 6
    ten = 10.0 ** math.floor(math.log10(rough))
    step = next(m * ten for m in (1, 2, 5, 10) if m * ten >= rough)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _labels(points: Sequence[tuple[float, float, str]]) -> list[str]:
    """Labels for points (x, y, label), each next to its marker without overlap; points without free space get none."""
    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y, _ in points]
    out = []
    for x, y, label in points:
        width = _CHARACTER * len(printable(label))
        for left, base in (
            (x + 11, y + 4), (x - 11 - width, y + 4), (x - width / 2, y - 12), (x - width / 2, y + 21),
            (x + 9, y - 9), (x + 9, y + 17), (x - 9 - width, y - 9), (x - 9 - width, y + 17),
        ):  # fmt: skip
            box = (left, base - 11, left + width, base + 3)
            inside = box[0] >= _LEFT and box[2] <= _WIDTH - 4 and box[1] >= _TOP and box[3] <= _HEIGHT - _BOTTOM
            if inside and not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken):
                taken.append(box)
                out.append(f'<text class=label x="{left:.1f}" y="{base:.1f}">{_text(label)}</text>')
                break
        else:
            out.append("")
    return out


# ---- texts ----


def _side_by_side(found: Continuation) -> str:
    prompt = f"<span class=prompt>{_text(found.prompt)}</span>"
    texts = "".join(
        f"<article><h3>{_text(label)}</h3><p>{prompt}{_lines(text)}</article>" for label, text in found.texts
    )
    return f"<div class=texts>{texts}</div>"


def _lines(text: str) -> str:
    return "".join(part if part in ("\n", "\t") else _text(part) for part in re.split("([\n\t])", text))


_STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --back: #fff; --soft: #60666e; --line: #d9dde2; --card: #f5f6f8;
  --quantized: #b85c00; --sparse: #1b6ac9; --both: #1d7a3a; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e7eb; --back: #15181c; --soft: #9aa3ad; --line: #363c44;
  --card: #1e2228; --quantized: #f0a050; --sparse: #6cb0ff; --both: #62c57f; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 80rem;
  margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; } h2 { font-size: 1.2rem; margin-top: 2rem; }
p { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: bottom; }
td { white-space: nowrap; }
th.number, td.number { text-align: right; }
tbody tr:hover { background: var(--card); }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--sparse); }
th button::after { content: "\\a0\\2195"; color: var(--line); }
th[aria-sort=ascending] button::after { content: "\\a0\\2191"; color: inherit; }
th[aria-sort=descending] button::after { content: "\\a0\\2193"; color: inherit; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.5rem; padding: 0; list-style: none; }
.legend svg { width: 1em; height: 1em; margin-right: .4em; vertical-align: -.1em; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(28rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; } figure svg { width: 100%; font: 12px system-ui, sans-serif; }
.grid { stroke: var(--line); } .tick { fill: var(--soft); } .label, .values { fill: var(--text); }
.values { visibility: hidden; font-weight: 600; } .area { fill: transparent; } .point { outline: none; }
.point:hover .values, .point:focus .values { visibility: visible; }
.point:hover .marker, .point:focus .marker { stroke: var(--text); stroke-width: 2; }
.dense .marker { fill: var(--text); } .quantized .marker { fill: var(--quantized); }
.sparse .marker { fill: var(--sparse); } .both .marker { fill: var(--both); }
.texts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(17rem, 100%), 1fr)); gap: .8rem;
  margin-bottom: 1.5rem; }
article { background: var(--card); border-radius: .5rem; padding: .8rem 1rem; }
article h3 { margin: 0 0 .4rem; font-size: 1rem; overflow-wrap: anywhere; }
article p { margin: 0; color: inherit; white-space: pre-wrap; overflow-wrap: anywhere; } .prompt { color: var(--soft); }
"""

_SCRIPT = """
for (const [column, th] of document.querySelectorAll("th").entries()) {
  const body = document.querySelector("tbody"), cell = row => row.cells[column], value = row => cell(row).dataset.value;
  th.firstChild.onclick = () => {
    const sign = th.ariaSort === "ascending" ? -1 : 1;
    for (const other of document.querySelectorAll("th")) other.ariaSort = null;
    th.ariaSort = sign > 0 ? "ascending" : "descending";
    const isNumber = row => value(row) !== undefined;
    body.append(...[...body.rows].sort((a, b) => th.className
      ? isNumber(b) - isNumber(a) || sign * (value(a) - value(b))
      : sign * cell(a).textContent.localeCompare(cell(b).textContent)));
  };
}
"""
