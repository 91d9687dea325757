"""What `macko bench --gpu` says when its child process fails. The measurement itself needs a GPU: test_gpu.py."""

from __future__ import annotations

import sys

import pytest

from ggml_macko import errors
from ggml_macko.benchmark import bench_gpu


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
