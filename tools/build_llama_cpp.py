#!/usr/bin/env python3
"""Builds llama.cpp's programs, for `macko run -- PROGRAM`, from the source in the pinned llama-cpp-python.

  python3 tools/build_llama_cpp.py               with the CPU backend for this machine: build/llama.cpp/bin
  python3 tools/build_llama_cpp.py --dynamic     backends as plugins (GGML_BACKEND_DL), AVX2: build/llama.cpp-dl/bin
  python3 tools/build_llama_cpp.py llama-server  this program only

`macko run` works with any llama.cpp of this version whose libllama and libggml are shared libraries. Building all
programs takes half an hour on 2 cores and needs CMake and a C++17 compiler.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# without llama-save-load-state, a test in this version of llama.cpp; test_llama_features.py covers it
PROGRAMS = (
    "llama-cli", "llama-completion", "llama-server", "llama-bench", "llama-perplexity", "llama-imatrix",
    "llama-tokenize", "llama-quantize", "llama-gguf-split", "llama-embedding", "llama-speculative",
    "llama-speculative-simple", "llama-simple", "llama-fit-params", "llama-export-lora",
    "ggml-rpc-server",
)  # fmt: skip
NOT_DYNAMIC = ("llama-export-lora",)  # it uses symbols of the CPU backend, so llama.cpp does not build it with plugins


def tested_range() -> tuple[str, str]:
    """The oldest and the newest llama-cpp-python that the package is tested with."""
    found = re.findall(
        r"^set\(LLAMA_CPP_PYTHON_(?:OLDEST|NEWEST) ([0-9.]+)\)", (ROOT / "cmake" / "llama-cpp.cmake").read_text(), re.M
    )
    if len(found) != 2:
        sys.exit("error: no range of llama-cpp-python in cmake/llama-cpp.cmake")
    return found[0], found[1]


def fetch(version: str, folder: pathlib.Path) -> pathlib.Path:
    """The source tree of llama.cpp in llama-cpp-python. pip downloads it if it is missing."""
    tree = folder / f"llama_cpp_python-{version}" / "vendor" / "llama.cpp"
    if (tree / "CMakeLists.txt").exists():
        return tree
    with tempfile.TemporaryDirectory() as tmp:
        download = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python")
        run(*download, "-d", tmp, f"llama-cpp-python=={version}")
        (archive,) = pathlib.Path(tmp).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return tree


def run(*command: object) -> None:
    print("+", " ".join(str(c) for c in command), file=sys.stderr, flush=True)
    subprocess.run([str(c) for c in command], check=True)


def build(source: pathlib.Path, out: pathlib.Path, dynamic: bool, jobs: int, programs: list[str]) -> None:
    options = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_SHARED_LIBS=ON",
        "-DLLAMA_CURL=OFF",
        "-DLLAMA_OPENSSL=OFF",
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        "-DLLAMA_BUILD_TESTS=ON",
        "-DGGML_RPC=ON",
    ]
    if dynamic:
        options += [
            "-DGGML_BACKEND_DL=ON",
            "-DGGML_NATIVE=OFF",
            *(f"-DGGML_{x}=ON" for x in ("AVX", "AVX2", "FMA", "F16C", "BMI2")),
        ]
    generator = ["-GNinja"] if shutil.which("ninja") else []
    run("cmake", "-S", source, "-B", out, *generator, *options)
    targets = [*programs, *(["ggml-cpu", "ggml-rpc"] if dynamic else [])]  # no program depends on a plugin
    run("cmake", "--build", out, "-j", jobs, "--target", *targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", metavar="PROGRAM", nargs="*", help="default: " + ", ".join(PROGRAMS))
    parser.add_argument(
        "--dynamic", action="store_true", help="load the CPU backend at run time instead of linking it in"
    )
    parser.add_argument(
        "--source", type=pathlib.Path, metavar="DIR", help="a llama.cpp tree of that version (default: fetched by pip)"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", help="default: build/llama.cpp, or build/llama.cpp-dl"
    )
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    out = args.out or ROOT / "build" / ("llama.cpp-dl" if args.dynamic else "llama.cpp")
    programs = args.programs or [p for p in PROGRAMS if not (args.dynamic and p in NOT_DYNAMIC)]
    try:
        build(args.source or fetch(tested_range()[1], ROOT / "build"), out, args.dynamic, args.jobs, programs)
    except subprocess.CalledProcessError as e:
        sys.exit(f"error: {' '.join(e.cmd[:3])} ... failed with exit code {e.returncode}")
    except FileNotFoundError as e:
        sys.exit(f"error: {e.filename} not found")
    print(out / "bin")


if __name__ == "__main__":
    main()
