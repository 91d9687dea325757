"""llama.cpp's own programs, as a reference for figures, and its headers, to compile programs.

LLAMA_CPP_BIN names the folder of llama-imatrix, llama-perplexity and llama-quantize. They must be of the llama.cpp in
the source distribution of the pinned llama-cpp-python, and built for this machine (tools/build_llama_cpp.py): only
then are figures equal to the last printed digit.
"""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def run(name: str, *args: object, cwd: pathlib.Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program, which must exit with 0. Skips the test if the program is missing."""
    folder = os.environ.get("LLAMA_CPP_BIN", "")
    program = pathlib.Path(folder) / name
    if not folder or not program.exists():
        pytest.skip(f"LLAMA_CPP_BIN names no folder with {name}")
    done = subprocess.run([str(program), *map(str, args)], capture_output=True, text=True, timeout=600, cwd=cwd)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def header_tree() -> pathlib.Path:
    """The llama.cpp tree whose headers a build of the plugin fetched. Skips the test if there is none."""
    headers = next(iter(sorted((ROOT / "build").glob("*/llama-cpp-python-*"))), None)
    if headers is None:
        pytest.skip("llama.cpp headers are fetched by the CMake build, which has not run here")
    return headers


def compile_program(source: pathlib.Path, out: pathlib.Path, library: pathlib.Path | None = None) -> pathlib.Path:
    """Compiles a C program that uses llama.h only and links it to libllama: the installed one by default."""
    import llama_cpp

    headers = header_tree()
    library = library or pathlib.Path(llama_cpp.__file__).parent / "lib" / "libllama.so"
    subprocess.run(
        ["cc", "-o", out, source, f"-I{headers}/include", f"-I{headers}/ggml/include", library,
         f"-Wl,-rpath,{library.parent}"], check=True,
    )  # fmt: skip
    return out
