"""The command line for users: help, versions, exit codes, streams."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from ggml_macko import console, system
from ggml_macko.commands import cli
from ggml_macko.commands.arguments import Number
from ggml_macko.native import library
from support import generators

TOOLS = generators.ROOT / "tools"


@pytest.mark.parametrize("command", [[], *([c] for c in cli.COMMANDS)])
def test_help_names_every_subcommand_and_option(macko, command):
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


def test_subcommand_imports_no_other_one():
    """Imports of all take longer than many commands do."""
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules))\n"
        "from ggml_macko.commands import cli\n"
        "cli.main(['perplexity', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = done.stdout.splitlines()[-1].split()
    others = {f"ggml_macko.commands.{name}" for name in cli.COMMANDS if name != "perplexity"}
    assert "ggml_macko.commands.perplexity" in imported and not others & set(imported)


def test_version_names_what_is_installed(macko):
    import llama_cpp

    done = macko("--version")
    assert done.code == 0
    assert f"macko {library.version()}, with llama-cpp-python {llama_cpp.__version__} (ggml " in done.out
    text = (generators.ROOT / "pyproject.toml").read_text()
    assert library.version() == re.search(r'^version = "(.+)"', text, re.MULTILINE)[1]


@pytest.mark.parametrize(
    "args, message",
    [
        (["--no-such-option"], "--no-such-option"),
        (["compress"], "invalid choice: 'compress'"),
        (["convert"], "IN"),
        (["verify", "a", "b", "--metadata"], "--metadata"),
        (["run"], "PROGRAM is missing"),
        (["run", "--"], "PROGRAM is missing"),
        (["generate", "-m", "x.gguf"], "-p is missing"),
        (["bench", "--shapes", "12"], "--shapes 12: expected ROWSxCOLS"),
        (["bench", "--densities", "2"], "--densities 2: expected"),
        (["bench", "-r", "0"], "'0' is not an integer from 1 to 2147483647"),
        (["generate", "-m", "x.gguf", "-p", "hi", "-c", "4294967808"], "'4294967808' is not an integer from 0 to"),
        (["generate", "-m", "x.gguf", "-p", "hi", "--top-p", "7"], "'7' is not a number from 0 to 1"),
        (["generate", "-m", "x.gguf", "-p", "hi", "-ngl", "4294967297"], "'4294967297' is not an integer from -1 to"),
        (["perplexity", "-m", "x.gguf", "-t", "-2"], "'-2' is not an integer from -1 to 512"),
        (["convert", "a", "b", "macko", "100000"], "'100000' is not an integer from -1 to 512"),
        (["plan", "x.gguf", "-c", "-5"], "'-5' is not an integer from 0 to"),
        (["prune", "a", "b", "--sparsity", "1e-999999999"], "--sparsity 1e-999999999: expected a number from 0 to 1"),
        (["report", "a", "-f", "b", "--convert", "sparse-q4 --seed -1"], "'-1' is not an integer from 0 to"),
    ],
)
def test_usage_error_is_one_line_and_exit_2(macko, args, message):
    done = macko(*args)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err and done.out == ""
    assert done.err.startswith("error: ")


def typed_arguments():
    commands = next(a for a in cli.make_parser()._actions if a.dest == "command").choices
    return [(f"{name} {a.dest}", a.type) for name, p in commands.items() for a in p._actions if a.type is not None]


@pytest.mark.parametrize("kind", [kind for _, kind in typed_arguments()], ids=[name for name, _ in typed_arguments()])
def test_every_number_has_a_range(kind):
    """ctypes would silently truncate a plain int or float to 32 bits."""
    limits = [kind.least - 1, kind.most + 1] if isinstance(kind, Number) else [2**31, -(2**32)]
    for text in ("", "x", "nan", "1e999999999", *map(str, limits)):
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


def test_minus_one_thread_is_all_usable_cores(monkeypatch):
    monkeypatch.setattr(system, "available_cores", lambda: 7)
    parse = cli.make_parser().parse_args
    assert [parse(["verify", "a", "b", *more]).n_threads for more in ([], ["-t", "-1"], ["-t0"], ["-t3"])] == [
        7,
        7,
        7,
        3,
    ]
    assert [parse(["restore", "a", "b", *more]).nthreads for more in ([], ["-1"], ["2"])] == [7, 7, 2]


@pytest.mark.parametrize(
    ("program", "hint"),
    [
        ("/no/such/program", ""),
        ("llama-no-such-program", "; docs/guide/programs.md says how to get llama.cpp's programs"),
    ],
)
def test_program_that_is_missing_is_an_error_and_no_usage_error(macko, program, hint):
    done = macko("run", "--", program, "-hf", "x")
    assert done.code == 1 and done.err == f"error: {program}: No such file or directory{hint}\n"


@pytest.mark.parametrize(
    ("program", "serves"), [("/opt/rpc-server", True), ("ggml-rpc-server", True), ("llama-server", False)]
)
def test_run_tells_the_plugin_of_an_rpc_server(monkeypatch, program, serves):
    """SIGPIPE stays ignored for a server: otherwise the first client that disconnects early would end it."""
    variables, defaults = [], []
    monkeypatch.setattr(os, "execvpe", lambda name, arguments, environment: variables.append(environment))
    monkeypatch.setattr(signal, "signal", lambda number, action: defaults.append(number))
    cli.main(["run", "--", program, "-p", "1"])
    assert variables[0].get("GGML_MACKO_ENABLE") == ("rpc-server" if serves else None)
    assert (signal.SIGPIPE in defaults) is not serves


@pytest.mark.parametrize("option", ["-hx", "-cb", "-t4x", "-ngll", "--thread", "-Version"])
def test_unknown_option_is_no_abbreviation_of_another(macko, option):
    """argparse would read -hx as -h -x, and -cb as -c b."""
    for args in ((option,), ("generate", "-m", "x.gguf", "-p", "hi", option), ("convert", option, "a", "b")):
        done = macko(*args)
        assert done.code == 2 and done.out == "" and done.err.startswith(f"error: unknown option {option}"), done


def test_values_may_begin_with_a_dash_or_be_glued_numbers(macko, tmp_path):
    missing = f"{tmp_path}/x.gguf"
    for args in (["-n4"], ["-n", "-1"], ["--predict=-1"], ["-p", "- a list"]):
        done = macko("generate", "-m", missing, *(["-p", "hi"] if "-p" not in args else []), *args)
        assert done.code == 1 and "No such file or directory" in done.err, done.err


def test_version_names_an_untested_llama_cpp_python(macko, monkeypatch):
    import llama_cpp

    oldest, newest = library.llama_cpp_python_range()
    assert "is tested with" not in macko("--version").out
    monkeypatch.setattr(llama_cpp, "__version__", "0.1.2")
    done = macko("--version")
    assert done.code == 0
    assert done.out.endswith(
        f"ggml-macko is tested with llama-cpp-python {oldest} to {newest}, and 0.1.2 is installed\n"
    )


def test_gpu_layers_have_one_default(macko):
    choices = next(a for a in cli.make_parser()._actions if a.dest == "command").choices
    defaults = {name: p.get_default("gpu_layers") for name, p in choices.items() if "-ngl" in p._option_string_actions}
    assert set(defaults) >= {"generate", "perplexity", "calibrate", "bench", "report"} and set(defaults.values()) == {
        -1
    }


def test_completion_names_what_is_missing(macko, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    done = macko("--print-completion", "bash")
    assert done.code == 1 and done.err == (
        "error: --print-completion needs shtab: pip install 'ggml-macko[completion]'\n"
    )


def test_traceback_is_shown_with_debug_only(macko, macko_process, tmp_path):
    plain = macko_process("inspect", tmp_path / "missing.gguf")
    assert plain.code == 1 and plain.out == "" and plain.err.startswith("error: ") and len(plain.err.splitlines()) == 1
    debug = macko_process("inspect", tmp_path / "missing.gguf", "--debug")
    assert debug.code == 1 and "Traceback" in debug.err


def test_results_go_to_stdout_and_progress_to_stderr(tmp_path, tiny, macko):
    done = macko("convert", tiny, tmp_path / "s.gguf")
    assert re.match(
        r"\[   1/  10\] token_embd\.weight +- \[   64,    50,     1,     1\], type =    f16, size =", done.err
    )
    assert "[" not in done.out and done.out.startswith("model size  = ")


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_harmless(tmp_path, tiny, macko, closed):
    """An output file must not get the number of a standard stream, or a C library would print into it."""
    assert macko("convert", tiny, tmp_path / "whole.gguf").code == 0
    command = f"'{sys.executable}' -m ggml_macko.commands.cli convert '{tiny}' '{tmp_path}/out.gguf' {closed}"
    assert subprocess.run(["sh", "-c", command], capture_output=True).returncode == 0
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


@pytest.mark.parametrize("type_", ["dense", "sparse-lossless"])
def test_file_name_may_be_any_bytes(tmp_path, macko, type_):
    model, odd = generators.DEMO, tmp_path / os.fsdecode(b"caf\xe9.gguf")
    if type_ == "dense":
        odd.symlink_to(model)
    else:
        assert macko("convert", model, odd, type_).code == 0
    options = ("-p", "The", "-n", 4, "--temp", 0, "-t", 1)
    done = macko("generate", "-m", odd, *options)
    assert done.code == 0 and done.out == macko("generate", "-m", model, *options).out != "The\n", done.err


def test_json_has_no_numbers_that_json_lacks(capsys):
    console.print_json({"a": [float("nan"), (float("inf"), 1.5)], "b": {"c": -float("inf"), "d": "nan"}, "e": True})
    assert json.loads(capsys.readouterr().out, parse_constant=None) == {
        "a": [None, [None, 1.5]], "b": {"c": None, "d": "nan"}, "e": True,
    }  # fmt: skip


def test_reader_that_goes_away_ends_the_command_silently(tmp_path):
    big = {f"blk.{i}.attn_q.weight": generators.tiny_tensors()["blk.0.attn_q.weight"] for i in range(900)}
    path = generators.write_gguf(tmp_path / "big.gguf", big)
    command = f"'{sys.executable}' -m ggml_macko.commands.cli inspect '{path}' | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("| tensor") and done.stderr == ""


@pytest.mark.parametrize("name", ["convert_gguf_to_sparse", "make_random_llama"])
def test_script_shows_its_help(name):
    done = subprocess.run([sys.executable, str(TOOLS / f"{name}.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout and done.stderr == ""


def test_script_converts_a_model(macko, tmp_path, tiny):
    pruned, sparse = tmp_path / "p.gguf", tmp_path / "s.gguf"
    assert macko("prune", tiny, pruned, "--sparsity", "0.6").code == 0
    command = [sys.executable, str(TOOLS / "convert_gguf_to_sparse.py"), str(pruned), str(sparse)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert macko("verify", pruned, sparse).code == 0
    assert macko("verify", tiny, sparse).code == 1


def test_import_loads_nothing_heavy():
    """`import ggml_macko` must not load llama_cpp, NumPy or the C library; names are imported on first use."""
    code = (
        "import sys, ggml_macko; heavy = {'numpy', 'llama_cpp', 'cffi', '_cffi_backend', 'gguf'} & set(sys.modules); "
        "assert not heavy, heavy;"
        "assert 'Llama' in dir(ggml_macko); ggml_macko.SparseMatrix; assert 'llama_cpp' not in sys.modules;"
        "print(ggml_macko.__version__); ggml_macko.Llama; assert 'llama_cpp' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == library.version()
    with pytest.raises(AttributeError):
        __import__("ggml_macko").NoSuchName  # noqa: B018


def test_code_parses_as_python_3_9():
    """The code has no newer syntax; annotations are never evaluated, so they may have newer types."""
    own = sorted((generators.ROOT / "python").rglob("*.py"))
    assert len(own) > 50
    for path in [*own, *TOOLS.rglob("*.py"), *(generators.ROOT / "pybind").glob("*.py")]:
        text = path.read_text()
        tree = ast.parse(text, str(path), feature_version=(3, 9))
        only_docstring = len(tree.body) == 1 and ast.get_docstring(tree) is not None
        generated = path.name == "_ffi.py"
        if TOOLS not in path.parents and not only_docstring and not generated:
            assert "from __future__ import annotations" in text, path


def test_every_package_says_what_it_is_for():
    for path in (generators.ROOT / "python" / "ggml_macko").rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_macko_alone_prints_its_help(macko):
    done = macko()
    assert done.code == 0 and done.out == macko("--help").out and done.err == ""


def test_package_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "ggml_macko", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(f"macko {library.version()}")


TYPED = """
import llama_cpp
import ggml_macko
from ggml_macko import Llama, SparseMatrix

llama = Llama("sparse.gguf", n_ctx=512, compress=True, verbose=False)
base: llama_cpp.Llama = llama
reveal_type(llama.n_ctx())
reveal_type(ggml_macko.convert("dense.gguf", "sparse.gguf", "auto", options=ggml_macko.ConvertOptions(n_threads=2)))
reveal_type(ggml_macko.verify("dense.gguf", "sparse.gguf").difference)
reveal_type(SparseMatrix.from_dense)
Llama()
Llama("sparse.gguf", compress="yes")
ggml_macko.inspect("sparse.gguf", threads=2)
"""


def test_users_get_types(tmp_path):
    """mypy --strict checks a user's program: names resolve to their types, and wrong arguments are reported."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    program = tmp_path / "program.py"
    program.write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(program)]
    environment = {**os.environ, "MYPYPATH": str(generators.ROOT / "python")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    revealed = re.findall(r'program\.py:(\d+): note: Revealed type is "(.+)"', done.stdout)
    shown = [re.sub(r"Union\[(.+), None\]", r"\1 | None", name) for _, name in revealed[:3]]
    assert shown == [
        "builtins.int",
        "ggml_macko.conversion.convert.ConversionReport",
        "builtins.str | None",
    ], done.stdout
    assert "-> ggml_macko.sparse_matrix.SparseMatrix" in revealed[3][1]
    wrong = re.findall(r"program\.py:(\d+): error: .*\[(.+)\]", done.stdout)
    lines = TYPED.splitlines()
    assert [(lines[int(n) - 1], code) for n, code in wrong] == [
        ("Llama()", "call-arg"),
        ('Llama("sparse.gguf", compress="yes")', "arg-type"),
        ('ggml_macko.inspect("sparse.gguf", threads=2)', "call-arg"),
    ], done.stdout


@pytest.mark.parametrize(
    ("trained", "options", "line"),
    [
        (8192, [], "context of 4096 tokens; the model allows 8192, see -c\n"),
        (8192, ["-c", "64"], ""),
        (256, [], ""),
        (256, ["-c", "512"], "possible training context overflow\n"),  # llama.cpp's warning
        (256, ["-f"], "lines end in CRLF, which changes the tokens; dos2unix makes them LF\n"),
    ],
)
def test_generate_mentions_its_context_and_crlf(tmp_path, macko, trained, options, line):
    model = tmp_path / "m.gguf"
    data = bytearray(generators.DEMO.read_bytes())
    at = data.index(b"llama.context_length") + len("llama.context_length") + 4
    data[at : at + 4] = trained.to_bytes(4, "little")
    model.write_bytes(data)
    (tmp_path / "crlf.txt").write_bytes(b"The\r\nmodel")
    text = ["-f", tmp_path / "crlf.txt"] if options == ["-f"] else ["-p", "The"]
    done = macko("generate", "-m", model, "-n", 1, "--temp", 0, *text, *(options if options != ["-f"] else []))
    assert done.code == 0 and (done.err.endswith(line) if line else done.err == ""), done.err
