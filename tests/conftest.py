"""Fixtures for the Python tests."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
from collections import namedtuple

import pytest

import ggml_macko
from ggml_macko.commands import cli
from support import generators

# A shell that starts pytest in the background makes it ignore SIGINT, nohup SIGHUP; child processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

Done = namedtuple("Done", "code out err")


def pytest_configure(config):
    """In .venv the package must be this tree or its debug build, so that the tests run the edited files."""
    package = pathlib.Path(ggml_macko.__file__).resolve()
    if pathlib.Path(sys.prefix) == generators.ROOT / ".venv" and pathlib.Path(sys.prefix) in package.parents:
        raise pytest.UsageError(f"{package.parent} is an installed wheel; python3 tools/dev.py check installs the tree")


@pytest.fixture
def macko(capfd):
    """Runs a subcommand in this process: macko("convert", IN, OUT) returns code, out and err."""

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
    """Runs a subcommand in its own process, for exit codes, signals and environment variables."""

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
    """A small dense GGUF that has a tensor of every kind."""
    return generators.write_gguf(tmp_path / "tiny.gguf", generators.tiny_tensors())


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """The bundled model as a sparse file."""
    path = tmp_path_factory.mktemp("demo") / "sparse.gguf"
    subprocess.run(
        [sys.executable, "-m", "ggml_macko.commands.cli", "convert", str(generators.DEMO), str(path)],
        check=True,
        capture_output=True,
    )
    return path


@pytest.fixture
def shared_models():
    """A folder of real models outside of the repository. Skips the test without it."""
    if not generators.SHARED.is_dir():
        pytest.skip(f"no models in {generators.SHARED}")
    return generators.SHARED
