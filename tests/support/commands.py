"""Runs the `macko` command in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def run_macko(*args, **kwargs):
    """Raises CalledProcessError unless the exit code is 0. kwargs: passed to subprocess.run."""
    return subprocess.run(
        [sys.executable, "-m", "ggml_macko.commands.cli", *map(str, args)],
        check=True,
        capture_output=True,
        text=True,
        **kwargs,
    )
