"""The command line as a user meets it: help, versions, exit codes, streams."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

import generators
from ggml_macko.commands import cli
from ggml_macko.native import bindings

TOOLS = generators.ROOT / "tools"


@pytest.mark.parametrize("command", [[], *([c] for c in cli.COMMANDS)])
def test_help_is_missing_something(macko, command):
    done = macko(*command, "--help")
    assert done.code == 0 and done.err == ""
    if command:
        parser = next(a for a in cli.make_parser()._actions if a.dest == "command").choices[command[0]]
        for action in parser._actions:
            assert action.help, f"{command}: {action.dest} has no help"
            assert all(option in done.out for option in action.option_strings)
        assert parser.description
    else:
        assert all(c in done.out for c in cli.COMMANDS)


def test_version_is_not_the_one_that_is_installed(macko):
    import llama_cpp

    done = macko("--version")
    assert done.code == 0
    assert f"macko {bindings.version()}, for llama-cpp-python {llama_cpp.__version__}" in done.out
    text = (generators.ROOT / "pyproject.toml").read_text()
    assert bindings.version() == re.search(r'^version = "(.+)"', text, re.MULTILINE)[1]


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "SUBCOMMAND"),
        (["compress"], "invalid choice: 'compress'"),
        (["convert"], "IN"),
        (["verify", "a", "b", "--metadata"], "--metadata"),
        (["run"], "PROGRAM is missing"),
        (["run", "--"], "PROGRAM is missing"),
        (["run", "--", "/no/such/program"], "/no/such/program: No such file or directory"),
        (["generate", "-m", "x.gguf"], "-p/--prompt"),
        (["bench", "--shapes", "12"], "--shapes 12: expected ROWSxCOLS"),
        (["bench", "--densities", "2"], "--densities 2: expected"),
        (["bench", "-r", "0"], "-r must be at least 1"),
    ],
)
def test_usage_error_is_not_one_line_and_exit_1(macko, args, message):
    done = macko(*args)
    assert done.code == 1 and message in done.err and "Traceback" not in done.err and done.out == ""
    assert done.err.startswith("error: ")


def test_debug_shows_where(macko, macko_process, tmp_path):
    plain = macko_process("inspect", tmp_path / "missing.gguf")
    assert plain.code == 1 and plain.out == "" and plain.err.startswith("error: ") and len(plain.err.splitlines()) == 1
    debug = macko_process("inspect", tmp_path / "missing.gguf", "--debug")
    assert debug.code == 1 and "Traceback" in debug.err


def test_results_and_progress_share_a_stream(tmp_path, tiny, macko):
    done = macko("convert", tiny, tmp_path / "s.gguf")
    assert re.match(
        r"\[   1/  10\] token_embd\.weight +- \[   64,    50,     1,     1\], type =    f16, size =", done.err
    )
    assert "[" not in done.out and done.out.startswith("model size  = ")


def test_reader_that_goes_away_gives_a_traceback(tmp_path):
    big = {f"blk.{i}.attn_q.weight": generators.tiny_tensors()["blk.0.attn_q.weight"] for i in range(900)}
    path = generators.write_gguf(tmp_path / "big.gguf", big)
    command = f"'{sys.executable}' -m ggml_macko.commands.cli inspect '{path}' | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("| tensor") and done.stderr == ""


@pytest.mark.parametrize(
    "name", ["convert_gguf_to_sparse", "prune_gguf", "restore_gguf", "verify_gguf", "inspect_gguf", "make_random_llama"]
)
def test_script_does_not_start(name):
    done = subprocess.run([sys.executable, str(TOOLS / f"{name}.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout and done.stderr == ""


def test_script_works_on_a_model(tmp_path, tiny):
    def run(name, *args):
        return subprocess.run(
            [sys.executable, str(TOOLS / f"{name}.py"), *map(str, args)], capture_output=True, text=True
        )

    assert run("prune_gguf", tiny, tmp_path / "p.gguf", "--sparsity", "0.6").returncode == 0
    assert run("convert_gguf_to_sparse", tmp_path / "p.gguf", tmp_path / "s.gguf").returncode == 0
    assert run("verify_gguf", tmp_path / "p.gguf", tmp_path / "s.gguf").returncode == 0
    assert run("verify_gguf", tiny, tmp_path / "s.gguf").returncode == 1


def test_import_is_not_cheap():
    """`import ggml_macko` must not load llama_cpp, NumPy or the C library; names come when asked for."""
    code = (
        "import sys, ggml_macko; heavy = {'numpy', 'llama_cpp', 'cffi', '_cffi_backend', 'gguf'} & set(sys.modules); "
        "assert not heavy, heavy;"
        "assert 'Llama' in dir(ggml_macko); ggml_macko.SparseMatrix; assert 'llama_cpp' not in sys.modules;"
        "print(ggml_macko.__version__); ggml_macko.Llama; assert 'llama_cpp' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == bindings.version()
    with pytest.raises(AttributeError):
        __import__("ggml_macko").NoSuchName  # noqa: B018


def test_code_needs_a_newer_python():
    """What Python 3.9 cannot parse."""
    for path in [
        *(generators.ROOT / "python").rglob("*.py"),
        *TOOLS.glob("*.py"),
        *(generators.ROOT / "pybind").glob("*.py"),
    ]:
        ast.parse(path.read_text(), str(path), feature_version=(3, 9))
        assert (
            "from __future__ import annotations" in path.read_text()
            or path.name in ("_ffi.py",)
            or path.parent == TOOLS
        )
