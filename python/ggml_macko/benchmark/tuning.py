"""The report of `macko bench --gpu --tune`: how good the plugin's choices are on this GPU, for whoever improves them.

It is made from the lines that tools/bench-tune-gpu.cuh describes (bench_gpu.tune).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import console

CLOSE = 0.05
"""A choice that takes up to this much longer than the best counts as good: times of two runs differ by as much."""

Record = dict[str, Any]


class Choice(NamedTuple):
    """One choice of the plugin, and the best that was measured in its place."""

    case: str
    chosen: str
    best: str
    behind: float  # 0.05: the chosen one takes 5 % longer


def layout_name(record: Record) -> str:
    """Layout and lanes per row: "fused/16"."""
    return f"{record['layout']}/{record['lanes']}" if record["lanes"] else str(record["layout"])


def case_name(record: Record) -> str:
    columns = f", {record['n']} columns" if "n" in record else ""
    return f"{record['rows']}x{record['cols']} {record['values']} {record['density']:g}{columns}"


def by_matrix(records: Sequence[Record]) -> list[list[Record]]:
    """The choices for one column, matrix by matrix; in each the plugin's own first."""
    matrices: dict[str, list[Record]] = {}
    for r in records:
        if r["record"] == "choice":
            matrices.setdefault(case_name(r), []).append(r)
    return [sorted(choices, key=lambda r: not r["chosen"]) for choices in matrices.values()]


def ways(record: Record) -> dict[str, float]:
    """Microseconds of the ways to multiply several columns."""
    times = {way: record[f"{way.replace(' ', '_')}_us"] for way in ("tiles", "passes", "dense rows")}
    return {way: us for way, us in times.items() if us}


def _choice(case: str, chosen: str, times: dict[str, float]) -> Choice:
    best = min(times, key=lambda name: times[name])
    return Choice(case, chosen, best, times[chosen] / times[best] - 1)


def choices(records: Sequence[Record]) -> dict[str, list[Choice]]:
    """The plugin's choices by parameter, each beside the best.

    layout: with its best number of lanes; lanes: in the layout that was chosen; tiles: against passes of 8 columns,
    where there are both; dense rows: whether rows are made dense for so many columns, against the better other way.
    """
    found: dict[str, list[Choice]] = {"layout": [], "lanes per row": [], "tiles": [], "dense rows": []}
    for matrix in by_matrix(records):
        own, case = matrix[0], case_name(matrix[0])
        layouts: dict[str, float] = {}
        for r in matrix:
            layouts[r["layout"]] = min(r["us"], layouts.get(r["layout"], r["us"]))
        lanes = {layout_name(r): r["us"] for r in matrix if r["layout"] == own["layout"]}
        found["layout"].append(_choice(case, own["layout"], layouts))
        found["lanes per row"].append(_choice(case, layout_name(own), lanes))
    for r in records:
        if r["record"] != "columns":
            continue
        times = ways(r)
        dense = times.pop("dense rows")
        if "tiles" in times:
            found["tiles"].append(_choice(case_name(r), "tiles", times))
        sparse_or_dense = {"dense rows": dense, "sparse": min(times.values())}
        chosen = r["chosen"] if r["chosen"] in sparse_or_dense else "sparse"
        found["dense rows"].append(_choice(case_name(r), chosen, sparse_or_dense))
    return found


def summary(records: Sequence[Record]) -> list[str]:
    """A line for each parameter that there was a choice of."""
    lines = []
    for parameter, made in choices(records).items():
        if not made:
            continue
        close = sum(c.behind <= CLOSE for c in made)
        worst = max(made, key=lambda c: c.behind)
        line = f"{parameter}: chosen is within {CLOSE:.0%} of the best in {close} of {len(made)} cases"
        if worst.behind > 0:
            line += f"; worst: {worst.chosen} is {worst.behind:.1%} behind {worst.best} ({worst.case})"
        lines.append(line)
    return lines


def report(records: Sequence[Record], version: str) -> str:
    """The report as Markdown. version: of the plugin."""
    device = next(r for r in records if r["record"] == "device")
    columns = [r for r in records if r["record"] == "columns"]
    return "\n".join(
        [
            f"# Tuning report of ggml-macko {version}\n",
            _device_table(device, version),
            "\n## One column\n\nLayout/lanes per row; dense: F16 weights and cuBLAS.\n",
            _one_column_table(by_matrix(records), device["read_bandwidth"]),
            "\n## Several columns, us\n\nDense rows: made dense a panel at a time, and multiplied.\n",
            _columns_table(columns),
            "\n## Summary\n",
            *(f"* {line}" for line in summary(records)),
            "",
        ]
    )


def _device_table(device: Record, version: str) -> str:
    share = f" ({device['read_bandwidth'] / device['bandwidth']:.0%})" if device["bandwidth"] else ""
    rows = [
        ["GPU", f"{device['gpu']}, compute capability {device['cc']}"],
        ["multiprocessors", f"{device['multiprocessors']}, {device['mhz']} MHz"],
        ["memory", f"{device['memory_nbytes'] / 1e9:.1f} GB, {device['memory_mhz']} MHz, {device['bus_bits']} bits"],
        ["bandwidth, data sheet", f"{device['bandwidth'] / 1e9:.0f} GB/s"],
        ["bandwidth, reading", f"{device['read_bandwidth'] / 1e9:.0f} GB/s{share}"],
        ["L2", console.size(device["l2_nbytes"])],
        ["shared memory of a block", f"{device['shared_nbytes'] / 1024:.0f} KiB"],
        ["CUDA", f"driver {device['driver']}, runtime {device['runtime']}, {'' if device['cublas'] else 'no '}cuBLAS"],
        ["plugin", f"{version}, {device['date']}"],
    ]
    return console.table(rows, ["", ""])


def _percent(behind: float) -> str:
    return f"{behind:.1%}"


def _us(microseconds: float) -> float | None:
    return round(microseconds, 1) if microseconds else None


def _one_column_table(matrices: Sequence[Sequence[Record]], read_bandwidth: float) -> str:
    rows = []
    for own, *others in matrices:
        best = min((own, *others), key=lambda r: r["us"])
        rows.append(
            [
                f"{own['rows']}x{own['cols']}",
                own["values"],
                own["density"],
                _us(own["dense_us"]),
                f"{layout_name(own)}, {own['delta_bits']} bits",
                f"{own['blocks']}x{own['threads']}",
                _us(own["us"]),
                f"{own['nbytes'] / own['us'] * 1e6 / read_bandwidth:.0%}",
                layout_name(best),
                _percent(own["us"] / best["us"] - 1),
                ", ".join(f"{layout_name(r)} {r['us']:.1f}" for r in sorted(others, key=lambda r: float(r["us"]))),
            ]
        )
    chosen = ["chosen", "blocks x threads", "us", "of bandwidth", "best", "behind"]
    return console.table(rows, ["matrix", "values", "density", "dense us", *chosen, "others, us"], "g")


def _columns_table(records: Sequence[Record]) -> str:
    rows = []
    for r in records:
        times = ways(r)
        choice = _choice(case_name(r), r["chosen"], times)
        rows.append(
            [
                f"{r['rows']}x{r['cols']}",
                r["values"],
                r["density"],
                r["n"],
                _us(r["dense_us"]),
                *(_us(times.get(way, 0)) for way in ("tiles", "passes", "dense rows")),
                choice.chosen,
                choice.best,
                _percent(choice.behind),
            ]
        )
    headers = ["matrix", "values", "density", "columns", "dense", "tiles", "passes of 8", "dense rows"]
    return console.table(rows, [*headers, "chosen", "best", "behind"], "g")
