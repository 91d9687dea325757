"""Forks and other builds of llama-cpp-python: the hook depends on what the module llama_cpp provides, not on its
version. The tests use copies of the installed package with one change each.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys
from typing import NamedTuple

import llama_cpp
import pytest

from ggml_macko import guards
from ggml_macko.native import library
from support import generators

INSTALLED = pathlib.Path(llama_cpp.__file__).parent
OLDEST, NEWEST = library.llama_cpp_python_range()
GENERATE = """
import sys
from ggml_macko import Llama
for _ in range(2):
    llama = Llama(sys.argv[1], n_ctx=64, verbose=False)
print(llama("The function", max_tokens=8, temperature=0)["choices"][0]["text"])
"""


class Change(NamedTuple):
    old: str
    new: str
    file: str = "llama_cpp.py"


FORK = Change(llama_cpp.__version__, "0.3.48", "__init__.py")
UNTESTED = f"ggml-macko is tested with llama-cpp-python {OLDEST} to {NEWEST}, and 0.3.48 is installed"


def doctored(folder: pathlib.Path, *changes: Change) -> pathlib.Path:
    """A copy of the package with these changes, in a folder for PYTHONPATH. The libraries are not copied."""
    package = folder / "llama_cpp"
    shutil.copytree(INSTALLED, package, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    (package / "lib").symlink_to(INSTALLED / "lib")
    for change in changes:
        path = package / change.file
        text = path.read_text()
        assert change.old in text
        path.write_text(text.replace(change.old, change.new))
    return folder


def run(folder: pathlib.Path, model: object, **environment: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", GENERATE, str(model)],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(folder), **{name: str(value) for name, value in environment.items()}},
    )  # fmt: skip


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> pathlib.Path:
    from ggml_macko.commands import cli

    path = tmp_path_factory.mktemp("other") / "sparse.gguf"
    assert cli.main(["convert", str(generators.DEMO), str(path), "--quiet"]) == 0
    return path


@pytest.fixture(scope="module")
def text(sparse, tmp_path_factory) -> str:
    """What the installed package generates."""
    done = run(tmp_path_factory.mktemp("installed"), sparse)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()
    return done.stdout


def test_fork_with_a_number_of_its_own_works_with_one_warning(sparse, text, tmp_path):
    done = run(doctored(tmp_path, FORK), sparse)
    assert (done.returncode, done.stdout, done.stderr) == (0, text, UNTESTED + "\n")


def test_strict_versions_refuses_a_version_that_nobody_tested(sparse, text, tmp_path):
    strict = {"GGML_MACKO_ENABLE": "strict-versions"}
    done = run(doctored(tmp_path, FORK), sparse, **strict)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        "ggml_macko.errors.VersionMismatchError: " + UNTESTED.replace(", and", ", but")
        + f": pip install llama-cpp-python=={NEWEST}"
    )  # fmt: skip
    if llama_cpp.__version__ == NEWEST:
        done = run(tmp_path / "installed", sparse, **strict)
        assert (done.returncode, done.stdout, done.stderr) == (0, text, "")


def test_guard_without_its_place_is_named_in_the_warning(sparse, text, tmp_path):
    """In fork 0.3.48, add_grammar gets the text of the grammar, and the server has no such handler."""
    grammar = Change(
        "self, model: LlamaModel, grammar: LlamaGrammar", "self, model: LlamaModel, grammar_str: str", "_internals.py"
    )
    adapter = Change("def llama_adapter_lora_init(", "def llama_lora_init(")
    done = run(doctored(tmp_path, FORK, grammar, adapter), sparse)
    without = "; it has no place for the checks of llama_adapter_lora_init, LlamaSampler.add_grammar"
    assert (done.returncode, done.stdout, done.stderr) == (0, text, UNTESTED + without + "\n")


def test_guard_passes_on_what_the_function_returns():
    """In fork 0.3.48, decode() returns a status that Llama.eval reads."""

    class Context:
        class model:
            class params:
                vocab_only = False

    (guard,) = (g for g in guards.GUARDS if g.function.endswith(":LlamaContext.decode"))
    assert guard.replace(lambda self, batch: (self, batch))(Context, 1) == (Context, 1)


def test_libraries_in_another_place_are_found(sparse, text, tmp_path):
    folder = doctored(tmp_path / "package")
    (folder / "llama_cpp" / "lib").unlink()
    shutil.copytree(INSTALLED / "lib", tmp_path / "elsewhere", symlinks=True)
    (folder / "llama_cpp" / "lib").symlink_to(tmp_path / "elsewhere")
    done = run(folder, sparse, LLAMA_CPP_LIB_PATH=tmp_path / "elsewhere")
    assert (done.returncode, done.stdout, done.stderr) == (0, text, "")


MEMBER = '        ("no_alloc", ctypes.c_bool),\n'
NBYTES = ctypes.sizeof(llama_cpp.llama_model_params)
LACKS = {
    "has no function llama_model_load_from_file_ptr": Change(
        "def llama_model_load_from_file_ptr(", "def llama_model_load_from_stream("
    ),
    "llama_model_free is not (pointer) -> None": Change(
        '    "llama_model_free",\n    [llama_model_p_ctypes],\n    None,', '    "llama_model_free",\n    [],\n    None,'
    ),
    "llama_model_params has no member no_alloc": Change(MEMBER, MEMBER.replace("no_alloc", "allocates_nothing")),
    "llama_model_params.vocab_only does not have 1 bytes (has 4)": Change(
        '("vocab_only", ctypes.c_bool)', '("vocab_only", ctypes.c_int32)'
    ),
    f"llama_model_params does not have {NBYTES} bytes, as in libllama (has {NBYTES + 8})": Change(
        '("vocab_only", ctypes.c_bool)', '("added", ctypes.c_void_p),\n        ("vocab_only", ctypes.c_bool)'
    ),
}


@pytest.mark.parametrize("problem", LACKS)
def test_module_without_what_the_hook_needs_is_refused_with_one_line(problem, sparse, tmp_path):
    done = run(doctored(tmp_path, LACKS[problem]), sparse)
    module = tmp_path / "llama_cpp" / "llama_cpp.py"
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.splitlines()[-1] == (
        f"ggml_macko.errors.VersionMismatchError: ggml-macko cannot use this llama_cpp: {module}: {problem}"
    )
