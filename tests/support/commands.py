"""Runs the `macko` command in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def run_macko(*args, **kwargs):
    """Raises CalledProcessError unless it exits with 0. kwargs: those of subprocess.run."""
    return subprocess.run(
        [sys.executable, "-m", "ggml_macko.commands.cli", *map(str, args)],
        check=True,
        capture_output=True,
        text=True,
        **kwargs,
    )
