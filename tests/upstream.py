"""llama.cpp's own programs, to compare figures with: LLAMA_CPP_BIN names the folder of llama-imatrix, llama-perplexity and llama-quantize.

They must be of the llama.cpp that llama-cpp-python brings (its source distribution holds it), built for this machine: then figures are equal to
the last printed digit.
"""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest


def run(name: str, *args: object, cwd: pathlib.Path | None = None) -> subprocess.CompletedProcess:
    """Skips the test if there are no such programs."""
    folder = os.environ.get("LLAMA_CPP_BIN", "")
    program = pathlib.Path(folder) / name
    if not folder or not program.exists():
        pytest.skip(f"LLAMA_CPP_BIN names no folder with {name}")
    done = subprocess.run([str(program), *map(str, args)], capture_output=True, text=True, timeout=600, cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    return done
