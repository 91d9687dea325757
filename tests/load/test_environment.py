"""Environment variables: one table in C++ lists every variable that the sources read; an invalid value gives an error
of one line.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from ggml_macko import convert, errors
from ggml_macko.native import environment, load_model
from ggml_macko.native.library import check, lib
from support import generators
from support.llama_logits import open_model

SOURCES = [generators.ROOT / name for name in ("ggml-macko/src", "python/ggml_macko", "tools")]
NO_VARIABLES = {"GGML_MACKO_CUDA"}  # read by tools/dev.py, which passes it to CMake

WRONG = [
    ("GGML_MACKO_DISABLE", "graphs,fuson", "GGML_MACKO_DISABLE=graphs,fuson: unknown word 'fuson'; allowed: graphs, "),
    ("GGML_MACKO_LOAD", "compres", "GGML_MACKO_LOAD=compres: unknown word 'compres'; allowed: compress, "),
    ("GGML_MACKO_ENABLE", "1", "GGML_MACKO_ENABLE=1: unknown word '1'; allowed: strict-versions, "),
    ("GGML_MACKO_CPU_KERNELS", "abacus", "GGML_MACKO_CPU_KERNELS=abacus: unknown word 'abacus'; allowed: portable, "),
    ("GGML_MACKO_SKIP", "1", "GGML_MACKO_SKIP: unknown environment variable; ggml-macko reads GGML_MACKO_LOAD, "),
]


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    path = tmp_path_factory.mktemp("environment") / "s.gguf"
    convert(generators.DEMO, path)
    return path


def test_every_variable_of_the_sources_is_in_the_table():
    known = {s.variable for s in environment.settings()}
    text = "".join(
        path.read_text()
        for folder in SOURCES
        for path in folder.rglob("*.*")
        if path.suffix in (".py", ".c", ".cpp", ".h")
    )
    used = set(re.findall(r'"(GGML_MACKO_[A-Z0-9_]*[A-Z0-9])"', text)) - NO_VARIABLES
    assert used == known


def test_only_the_table_reads_the_environment():
    """The exceptions are the user's folders, a variable of ggml, and the preloaded library, which is in C."""
    readers = {
        "platform/environment.cpp": {"variable"},
        "platform/linux.cpp": {'"XDG_CACHE_HOME"', '"HOME"'},
        "cuda/device/backend.cpp": {'"GGML_OP_OFFLOAD_MIN_BATCH"'},
        "plugin/preload.c": {'"GGML_MACKO_PLUGIN"'},
    }
    folder = generators.ROOT / "ggml-macko" / "src"
    found = {
        str(path.relative_to(folder)): read
        for path in folder.rglob("*.*")
        if (read := set(re.findall(r"\bgetenv\(([^)]*)\)", path.read_text())))
    }
    assert found == readers


def test_words_of_load_are_the_flags_of_load():
    words = [s.word for s in environment.settings() if s.variable == environment.LOAD]
    for i, word in enumerate(words):
        assert getattr(lib(), f"GGML_MACKO_LOAD_{word.replace('-', '_').upper()}") == 1 << i
    assert set(load_model.LoadOptions(*[True] * 5).words()) == {*words} - {"act-thresholds"}


@pytest.mark.parametrize("variable, value, message", WRONG)
def test_wrong_environment_refuses_a_sparse_model(sparse, monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(errors.MackoError) as e:
        check(lib().ggml_macko_check_environment())
    assert str(e.value).startswith(message) and "\n" not in str(e.value)
    with pytest.raises(errors.MackoError) as e:
        open_model(sparse)
    assert str(e.value).startswith(message)


@pytest.mark.parametrize("variable, value, message", WRONG)
def test_program_fails_with_one_line(sparse, variable, value, message):
    command = [sys.executable, "-m", "ggml_macko", "generate", "-m", str(sparse), "-p", "The", "-n", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, variable: value})
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith(f"error: {message}"), done


@pytest.mark.parametrize("variable, value, message", WRONG)
def test_dense_model_fails_only_where_its_load_is_concerned(monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    if variable == environment.LOAD:
        with pytest.raises(errors.MackoError, match="unknown word 'compres'"):
            open_model(generators.DEMO)
    else:
        open_model(generators.DEMO)
