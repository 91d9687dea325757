"""If the N-th allocation, read, write and so on fails, a command still succeeds, or fails with one line and leaves no
file. These tests take a sample; tests/stress/inject_failures.py tests all calls (lab/robustness.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support import generators

TOOL = generators.ROOT / "tests" / "stress" / "inject_failures.py"


def inject(tmp_path, only: str, sample: int, seed: int) -> list[dict]:
    """The results for a sample of the calls of some operations."""
    found = tmp_path / "results"
    command = [sys.executable, TOOL, "-j", "2", "--only", only, "--sample", sample, "--seed", seed, "--json", found]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in found.read_text().splitlines()]


@pytest.mark.parametrize("only", ["(convert ec-csr|restore):", "(load sparse|prune|calibrate):"])
def test_failure_of_any_call_gives_one_line_and_no_file(tmp_path, only):
    results = inject(tmp_path, only, sample=5, seed=1)
    assert len(results) > 60
    assert {r["kind"] for r in results} >= {"allocation", "read", "write", "fsync", "open"}
    assert {"right", "refused"} <= {r["outcome"] for r in results}


def run_with_failing_allocations(tmp_path, script: str) -> None:
    """Runs a script that may call shim.fail_nth_arm; it must exit with 0."""
    shim = tmp_path / "fail-nth.so"
    source = generators.ROOT / "tests" / "support" / "fail-nth.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    begin = """
import ctypes
from ggml_macko.native.file import WEIGHT_BLOCK
from ggml_macko.native.library import lib
shim = ctypes.CDLL(None)
def fail(n, from_there_on):
    shim.fail_nth_arm(1, ctypes.c_long(n), from_there_on, None, ctypes.c_size_t(0))
"""
    done = subprocess.run([sys.executable, "-c", begin + script], env={**os.environ, "LD_PRELOAD": str(shim)})
    assert done.returncode == 0


def test_use_of_a_weight_is_known_without_memory(tmp_path):
    """The result "no use" would leave the weight dense without a message."""
    run_with_failing_allocations(
        tmp_path,
        """
function, name = lib().ggml_macko_weight_use_of, b"blk.1.attn_output.weight"
assert function(name, 2) == WEIGHT_BLOCK  # cffi gets its memory of this thread now
fail(1, True)
use = function(name, 2)
shim.fail_nth_disarm()
assert use == WEIGHT_BLOCK, use
""",
    )
