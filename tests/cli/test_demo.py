"""The table at the end of tools/demo.py for runs in which sparse is faster, and for others."""

from __future__ import annotations

import importlib.util
import json

import pytest

from support import generators

VERSION = "macko 0.1.0, with llama-cpp-python 0.3.36 (ggml 0.25.3), CPU kernels: avx2, GPU: none (built without CUDA)"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", generators.ROOT / "tools" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(demo, *sparse_tps: float) -> list:
    measured = {"rss": 400 << 20, "gpu_memory": 300 << 20, "prompt_tps": 100.0}
    dense = [10.0, 9.8, 10.2]
    return [
        demo.Row("random", "dense F16", 360 << 20, measured, dense, dense),
        demo.Row("random", "sparse, 50 % zeros", 220 << 20, measured, list(sparse_tps), dense),
    ]


@pytest.mark.parametrize(
    "sparse_tps, ratio, text",
    [
        ((16.0, 15.9, 16.3), "1.60x", "(sparse, 50 % zeros), bit for bit, generate 1.60 times as fast"),
        ((8.0, 8.1, 7.9), "0.80x", "not faster than dense F16 here (0.80x at best)"),
        ((10.3, 10.1, 10.2), "1.02x", "not faster than dense F16 here (1.02x at best)"),  # within the noise
        ((48.9, 7.0, 16.0), "1.60x", "(0.69 to 4.99 times dense F16): this machine is too busy to compare speeds"),
    ],
)
def test_table_says_what_the_runs_show(demo, capsys, sparse_tps, ratio, text):
    demo.print_table(rows(demo, *sparse_tps), False, VERSION)
    out = capsys.readouterr().out
    assert "sparse kernels: avx2" in out and f"| {ratio}" in out and text in out and "up to" not in out


def test_table_of_a_gpu_shows_its_memory(demo, capsys):
    demo.print_table(rows(demo, 16.0), True, VERSION.replace("none (built without CUDA)", "NVIDIA H200"))
    out = capsys.readouterr().out
    assert "GPU: NVIDIA H200" in out and "GPU MiB" in out and "| 300" in out


@pytest.mark.parametrize("first, n_calls", [([10.0, 10.1, 9.9], 1), ([10.0, 30.0, 9.9], 4)])
def test_measurement_with_a_large_spread_is_repeated(demo, tmp_path, monkeypatch, first, n_calls):
    calls = []

    def bench(*args, quiet):
        calls.append(args)
        return json.dumps({"models": [{"samples": [{"gen_tps": tps} for tps in first]}] * 2})

    monkeypatch.setattr(demo, "macko", bench)
    found = demo.bench("m", {name: generators.SAMPLE for name in ("dense F16", "sparse")}, gpu=False)
    assert len(calls) == n_calls and [len(row.gen_tps) for row in found] == [3 * n_calls] * 2
