"""The table at the end of tools/demo.py: what it says where sparse wins, and where it does not."""

from __future__ import annotations

import importlib.util

import pytest

from support import generators

VERSION = "macko 0.1.0, with llama-cpp-python 0.3.36 (ggml 0.25.3), CPU kernels: avx2, GPU: none (built without CUDA)"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", generators.ROOT / "tools" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(demo, sparse_tps: float) -> list:
    measured = {"rss": 400 << 20, "gpu_memory": 300 << 20, "prompt_tps": 100.0}
    return [
        demo.Row("random", "dense F16", 360 << 20, {**measured, "gen_tps": 10.0}, 10.0),
        demo.Row("random", "sparse, 50 % zeros", 220 << 20, {**measured, "gen_tps": sparse_tps}, 10.0),
    ]


def test_table_names_the_instruction_set_and_the_gain(demo, capsys):
    demo.print_table(rows(demo, 16.0), False, VERSION)
    out = capsys.readouterr().out
    assert "sparse kernels: avx2" in out and "| 1.60x" in out and "up to 1.60 times as fast" in out


def test_table_says_so_where_sparse_is_slower(demo, capsys):
    demo.print_table(rows(demo, 8.0), False, VERSION)
    out = capsys.readouterr().out
    assert "| 0.80x" in out and "not faster than dense F16 here (0.80x at best)" in out


def test_table_of_a_gpu_shows_its_memory(demo, capsys):
    demo.print_table(rows(demo, 16.0), True, VERSION.replace("none (built without CUDA)", "NVIDIA H200"))
    out = capsys.readouterr().out
    assert "GPU: NVIDIA H200" in out and "GPU MiB" in out and "| 300" in out
