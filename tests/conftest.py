"""Fixtures of the Python tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import namedtuple

import pytest

import generators
from ggml_macko.commands import cli

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell that ran us in the background left it so, for us and our children
    signal.signal(signal.SIGINT, signal.default_int_handler)

Done = namedtuple("Done", "code out err")


@pytest.fixture
def macko(capfd):
    """Runs a subcommand in this process: macko("convert", IN, OUT) -> code, out, err."""

    def run(*args: object) -> Done:
        capfd.readouterr()
        try:
            code = cli.main([str(a) for a in args])
        except SystemExit as e:
            code = e.code
        out, err = capfd.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture
def macko_process():
    """The same in a process of its own, as a user would: exit codes, signals, environment."""

    def run(*args: object, **kwargs: object) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "ggml_macko.commands.cli", *map(str, args)],
            capture_output=True,
            text=True,
            timeout=300,
            **kwargs,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def tiny(tmp_path):
    """A small dense GGUF with a tensor of every kind."""
    return generators.write_gguf(tmp_path / "tiny.gguf", generators.tiny_tensors())


@pytest.fixture
def shared_models():
    """A folder of real models that is not part of the repository."""
    if not generators.SHARED.is_dir():
        pytest.skip(f"no models in {generators.SHARED}")
    return generators.SHARED
