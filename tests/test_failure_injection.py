"""The N-th allocation, read, write and so on fails: the right result, or one line, and nothing else. A sample; all of
them take tools/inject_failures.py minutes on many cores (docs/lab/robustness.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import generators

TOOL = generators.ROOT / "tools" / "inject_failures.py"


def inject(tmp_path, only: str, sample: int, seed: int) -> list[dict]:
    """What came of a sample of the calls of some operations."""
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


def test_use_of_a_weight_is_known_without_memory(tmp_path):
    """An answer of "no use" would leave the weight dense, without a word."""
    shim = tmp_path / "fail-nth.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", shim, generators.ROOT / "tests" / "fail-nth.c", "-ldl"], check=True)
    script = """
import ctypes
from ggml_macko.native import bindings
from ggml_macko.native.library import lib
shim, name = ctypes.CDLL(None), b"blk.1.attn_output.weight"
function, allocation = lib().ggml_macko_weight_use_of, 1
assert function(name, 2) == bindings.WEIGHT_BLOCK  # cffi gets its memory of this thread now
shim.fail_nth_arm(allocation, ctypes.c_long(1), True, None, ctypes.c_size_t(0))
use = function(name, 2)
shim.fail_nth_disarm()
assert use == bindings.WEIGHT_BLOCK, use
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "LD_PRELOAD": str(shim)})
