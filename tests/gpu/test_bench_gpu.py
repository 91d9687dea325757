"""What `macko bench --gpu` says when its child process fails, and the report that --tune makes of what that wrote. The
measurement itself needs a GPU: test_gpu.py.
"""

from __future__ import annotations

import json
import sys

import pytest

from ggml_macko import errors
from ggml_macko.benchmark import bench_gpu, tuning
from ggml_macko.native import devices


@pytest.fixture
def measurement(monkeypatch, tmp_path):
    """Replaces the child process by a shell script."""

    def replace(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\necho 'shape values density'\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        monkeypatch.setattr(bench_gpu, "_require_built", lambda: None)

    return replace


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'bench-spmv-gpu: cudaMalloc: out of memory' >&2; echo a row; exit 1", "cudaMalloc: out of memory"),
        ("kill -SEGV $$", "the measurement was ended by SIGSEGV"),
        ("exit 3", "the measurement ended with exit code 3"),
    ],
)
def test_error_is_the_reason_and_not_a_row_of_the_table(measurement, script, said):
    measurement(script)
    with pytest.raises(errors.LoadError) as error:
        bench_gpu.bench_matrices("4096x4096", "0.5", cusparse=False)
    assert str(error.value) == said


# ---- the report of --tune ----

DEVICE = {
    "record": "device", "gpu": "NVIDIA RTX 9090", "date": "2026-11-25", "cc": "8.9", "multiprocessors": 128,
    "mhz": 2520, "memory_nbytes": 24e9, "memory_mhz": 10501, "bus_bits": 384, "bandwidth": 1000e9,
    "read_bandwidth": 900e9, "l2_nbytes": 72 << 20, "shared_nbytes": 101376, "driver": "13.0", "runtime": "13.0",
    "cublas": True,
}  # fmt: skip
CASE = {"rows": 4096, "cols": 4096, "values": "f16", "density": 0.5}
OTHER = {"rows": 11008, "cols": 4096, "values": "pruned-8", "density": 0.3}


def one(case, layout, lanes, us, chosen=False):
    return {
        "record": "choice", **case, "layout": layout, "lanes": lanes, "delta_bits": 2, "blocks": 128, "threads": 768,
        "nbytes": 9e6, "us": us, "chosen": chosen, "dense_us": 40.0,
    }  # fmt: skip


def several(case, n, chosen, tiles=0.0, passes=0.0, dense_rows=0.0):
    return {
        "record": "columns", **case, "n": n, "max_n": 16, "tiles_us": tiles, "passes_us": passes,
        "dense_rows_us": dense_rows, "dense_us": 41.0, "chosen": chosen,
    }  # fmt: skip


RECORDS = [
    DEVICE,
    one(CASE, "fused", 16, 20.0, chosen=True),
    several(CASE, 4, "passes", passes=30.0, dense_rows=90.0),
    several(CASE, 32, "tiles", tiles=80.0, passes=100.0, dense_rows=64.0),
    several(CASE, 64, "dense rows", tiles=120.0, passes=200.0, dense_rows=100.0),
    one(CASE, "file", 0, 60.0),
    one(CASE, "fused", 32, 16.0),
    one(OTHER, "coded", 16, 30.0, chosen=True),
    one(OTHER, "fused", 8, 24.0),
    one(OTHER, "fused", 16, 25.0),
]


def test_tuning_report_names_choice_best_and_what_lies_between():
    lines = tuning.report(RECORDS, "1.2.3").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    facts = {row[0]: row[1] for row in rows if len(row) == 2}
    assert facts["GPU"] == "NVIDIA RTX 9090, compute capability 8.9"
    assert facts["bandwidth, data sheet"] == "1000 GB/s" and facts["bandwidth, reading"] == "900 GB/s (90%)"
    assert facts["shared memory of a block"] == "99 KiB" and facts["CUDA"] == "driver 13.0, runtime 13.0, cuBLAS"
    assert facts["plugin"] == "1.2.3, 2026-11-25"
    fused, coded, *columns = [row for row in rows if row[0] in ("4096x4096", "11008x4096")]
    assert fused[4:] == [
        "fused/16, 2 bits", "128x768", "20", "50%", "fused/32", "25.0%", "fused/32 16.0, file 60.0"
    ]  # fmt: skip
    assert coded[8:] == ["fused/8", "25.0%", "fused/8 24.0, fused/16 25.0"]
    assert [row[3:] for row in columns] == [
        ["4", "41", "", "30", "90", "passes", "passes", "0.0%"],
        ["32", "41", "80", "100", "64", "tiles", "dense rows", "25.0%"],
        ["64", "41", "120", "200", "100", "dense rows", "dense rows", "0.0%"],
    ]


def test_tuning_report_ends_with_a_line_for_each_parameter():
    assert tuning.summary(RECORDS) == [
        "layout: chosen is within 5% of the best in 1 of 2 cases; worst: coded is 25.0% behind fused (11008x4096 "
        "pruned-8 0.3)",
        "lanes per row: chosen is within 5% of the best in 1 of 2 cases; worst: fused/16 is 25.0% behind fused/32 "
        "(4096x4096 f16 0.5)",
        "tiles: chosen is within 5% of the best in 2 of 2 cases",
        "dense rows: chosen is within 5% of the best in 2 of 3 cases; worst: sparse is 25.0% behind dense rows "
        "(4096x4096 f16 0.5, 32 columns)",
    ]
    assert tuning.report(RECORDS, "1.2.3").endswith("".join(f"* {line}\n" for line in tuning.summary(RECORDS)))
    assert [line.split(":")[0] for line in tuning.summary(RECORDS[:2])] == ["layout", "lanes per row"]


def test_tuning_report_without_cublas_has_no_times_of_it():
    without = [{**r, **({"cublas": False} if r is DEVICE else {"dense_us": 0.0})} for r in RECORDS]
    lines = tuning.report(without, "1.2.3").splitlines()
    assert any("runtime 13.0, no cuBLAS" in line for line in lines)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| 4096x4096")]
    assert [row[4:6] for row in rows] == [["", "fused/16, 2 bits"], ["4", ""], ["32", ""], ["64", ""]]


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(devices, "gpus", lambda: [devices.Gpu("MACKO0", "NVIDIA RTX 9090", 1, 2)])


@pytest.fixture
def records(monkeypatch, a_gpu):
    """Replaces the measurement; the list of its arguments."""
    calls = []
    monkeypatch.setattr(bench_gpu, "tune", lambda *arguments: calls.append(arguments) or RECORDS)
    return calls


def test_tune_prints_and_writes_the_report(macko, records, tmp_path):
    done = macko("bench", "--gpu", "--tune", "-o", tmp_path / "report.md")
    assert done.code == 0 and records == [(bench_gpu.TUNE_SHAPES, bench_gpu.TUNE_DENSITIES)]
    assert done.out == (tmp_path / "report.md").read_text() and done.out.startswith("# Tuning report of ggml-macko ")
    assert done.err == f"report: {tmp_path / 'report.md'}\n"
    options = ("--shapes", "64x2048", "--densities", "0.2", "--json", "-o", tmp_path / "report.json")
    done = macko("bench", "--gpu", "--tune", *options)
    assert done.code == 0 and records[1:] == [("64x2048", "0.2")]
    written = json.loads((tmp_path / "report.json").read_text())
    assert written == json.loads(done.out) and written["devices"] == ["NVIDIA RTX 9090"]
    assert written["tuning"] == RECORDS and written["summary"] == tuning.summary(RECORDS)


def test_tune_needs_force_to_replace_a_file(macko, records, tmp_path):
    path = tmp_path / "report.md"
    path.write_text("mine")
    done = macko("bench", "--gpu", "--tune", "-o", path)
    assert done.code == 1 and "exists; use --force" in done.err and not records and path.read_text() == "mine"
    done = macko("bench", "--gpu", "--tune", "-o", tmp_path / "no" / "report.md")
    assert done.code == 1 and "there is no folder" in done.err and not records
    assert macko("bench", "--gpu", "--tune", "-o", path, "--force").code == 0 and path.read_text().startswith(
        "# Tuning"
    )


def test_tune_that_fails_leaves_no_file(macko, measurement, a_gpu, tmp_path):
    measurement("echo 'bench-spmv-gpu: row 3 is 1, should be 2' >&2; exit 1")
    folder = tmp_path / "out"
    folder.mkdir()
    done = macko("bench", "--gpu", "--tune", "-o", folder / "report.md")
    assert done.code == 1 and done.out == "" and not list(folder.iterdir())
    assert done.err.endswith("error: row 3 is 1, should be 2\n") and "shape values density" in done.err


def test_measurement_is_told_to_tune(measurement):
    measurement('for last; do :; done; printf \'{"said": "%s"}\' "$*" > "$last"')
    said = bench_gpu.tune("64x2048", "0.5")[0]["said"]
    assert " --tune --shapes 64x2048 --densities 0.5 --values f16,pruned-8 --columns 4,8,16,32,64 --json " in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tune",), "--tune is for --gpu without"),
        (("--gpu", "--tune", "-m", "x.gguf"), "--tune is for --gpu without"),
        (("--gpu", "--tune", "--plot", "x.png"), "--tune is for --gpu without"),
        (("--gpu", "--tune", "--cusparse"), "--tune is for --gpu without"),
        (("--gpu", "--tune", "--values", "q8_0"), "--tune is for --gpu without"),
        (("--gpu", "-o", "x.md"), "-o is for --tune"),
        (("--gpu", "--tune", "--shapes", "12"), "--shapes 12: expected ROWSxCOLS"),
        (("--gpu", "--tune", "--densities", "2"), "--densities 2: expected"),
    ],
)
def test_options_that_do_not_fit_tune_are_usage_errors(macko, records, options, said):
    done = macko("bench", *options)
    assert done.code == 2 and done.out == "" and done.err.startswith("error: ") and said in done.err and not records
