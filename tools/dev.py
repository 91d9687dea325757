#!/usr/bin/env python3
"""Builds and tests this repository. Needs git, Python 3.9+, a C++17 compiler and CMake; the rest goes into .venv/.

  python3 tools/dev.py demo [--dense MODEL.gguf]   build, then prune, convert, verify and generate: sizes and speeds
  python3 tools/dev.py lint [--fix]                format, lint and types, with the versions that pyproject.toml pins
  python3 tools/dev.py test [--quick]              lint, build, then all tests (C++, sanitized fuzzing, Python)

The first build compiles llama-cpp-python from source, which takes minutes; pip caches the result.

environment variables:
  GGML_MACKO_CUDA   ON, OFF or AUTO (default): whether to build for NVIDIA GPUs. AUTO builds for them if nvcc is found,
                    which takes minutes; OFF never does, and needs no CUDA toolkit.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
BUILD = ROOT / "build" / "dev"
DIST = ROOT / "build" / "dist"
SANITIZED = ROOT / "build" / "sanitized"
ARM64 = ROOT / "build" / "arm64"
CPUS = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
FIX = "python3 tools/dev.py lint --fix"

MAX_COLUMNS = 120
# clang-format formats neither the declarations that cffi parses (pybind/) nor tables of data (*.inc)
FORMATTED = ("ggml-macko", "pybind", "tests", "tools")
CPP_SUFFIXES = {".c", ".cpp", ".cu", ".cuh", ".h"}


def run(*command: object, env: dict[str, str] | None = None) -> None:
    print("+", " ".join(str(c) for c in command), file=sys.stderr, flush=True)
    start = time.monotonic()
    subprocess.run([str(c) for c in command], check=True, cwd=ROOT, env=env)
    print(f"  ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)


# ---- build ----


def cuda_architectures() -> str:
    """Those of the GPUs here. Without one, the oldest and the newest paths of the code; a release builds all."""
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        found = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError):
        found = []
    return ";".join(sorted({cap.replace(".", "") for cap in found})) or "75-virtual;90"


def cuda_option() -> str:
    value = os.environ.pop("GGML_MACKO_CUDA", "") or "AUTO"  # the library refuses names that it does not read
    if value not in ("ON", "OFF", "AUTO"):
        sys.exit(f"error: GGML_MACKO_CUDA={value}: must be ON, OFF or AUTO")
    return value


def create_venv() -> None:
    if not PYTHON.exists():
        try:
            venv.create(VENV, with_pip=True)
        except subprocess.CalledProcessError:
            sys.exit("error: this Python cannot create a virtual environment (on Debian: apt-get install python3-venv)")
    # CMake finds the ninja that pip installs, and lint its tools
    if os.environ["PATH"].split(os.pathsep)[0] != str(VENV / "bin"):
        os.environ["PATH"] = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"


def install(extra: str) -> None:
    """Puts a wheel of the package into build/dist, and installs it with the extra; build/dev keeps the C++ build."""
    cuda = cuda_option()
    create_venv()
    run(PYTHON, "-m", "pip", "install", "-q", "scikit-build-core>=0.10", "cffi", "ninja", "pip>=23.1")
    shutil.rmtree(DIST, ignore_errors=True)
    run(
        PYTHON, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", DIST, "-C", f"build-dir={BUILD}",
        "-C", "cmake.args=-GNinja", "-C", f"cmake.define.GGML_MACKO_CUDA={cuda}",
        "-C", f"cmake.define.GGML_MACKO_CUDA_ARCHITECTURES={cuda_architectures()}", ".",
    )  # fmt: skip
    (wheel,) = DIST.glob("*.whl")
    # llama-cpp-python is compiled here, without the library of llama.cpp's command-line programs
    hook = shlex.quote(f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={ROOT / 'cmake' / 'llama-cpp-python.cmake'}")
    environment = {**os.environ, "CMAKE_ARGS": f"{os.environ.get('CMAKE_ARGS', '')} {hook}".strip()}
    run(PYTHON, "-m", "pip", "install", f"{wheel}[{extra}]", env=environment)
    # again, since pip keeps an installed package of the same version
    run(PYTHON, "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", wheel)


# ---- lint ----


def lint_requirements() -> list[str]:
    """The pinned versions: the extra `lint` of pyproject.toml (tomllib needs Python 3.11)."""
    block = re.search(r"^lint = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    if not block:
        sys.exit("error: no extra named lint in pyproject.toml")
    return re.findall(r'"([^"]+)"', block[1])


def cpp_files() -> list[pathlib.Path]:
    found = (path for folder in FORMATTED for path in (ROOT / folder).rglob("*") if path.suffix in CPP_SUFFIXES)
    return sorted(path.relative_to(ROOT) for path in found)


def cmake_files() -> list[pathlib.Path]:
    found = (path for folder in ("cmake", *FORMATTED) for path in (ROOT / folder).rglob("*"))
    inside = (path for path in found if path.name == "CMakeLists.txt" or path.suffix == ".cmake")
    return sorted(path.relative_to(ROOT) for path in (ROOT / "CMakeLists.txt", *inside))


def long_lines() -> Iterator[str]:
    """clang-format cannot break comments and strings, and ruff looks at Python only."""
    for path in [*cpp_files(), *cmake_files()]:
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            if len(line) > MAX_COLUMNS:
                yield f"{path}:{number}: {len(line)} columns, at most {MAX_COLUMNS}"


def check_style(fix: bool) -> list[str]:
    """Runs ruff and clang-format; returns the names of those that found something."""
    create_venv()
    run(PYTHON, "-m", "pip", "install", "-q", *lint_requirements())
    checks: dict[str, list[object]] = {
        "ruff check": ["ruff", "check", "--output-format", "concise", *(["--fix"] if fix else [])],
        "ruff format": ["ruff", "format", *([] if fix else ["--check", "--diff"])],
        "clang-format": ["clang-format", *(["-i"] if fix else ["--dry-run", "-Werror"]), *cpp_files()],
    }
    failed = []
    for name, command in checks.items():
        print(f"+ {name}", file=sys.stderr, flush=True)
        if subprocess.run([str(VENV / "bin" / str(command[0])), *map(str, command[1:])], cwd=ROOT).returncode != 0:
            failed.append(name)
    too_long = list(long_lines())
    if too_long:
        print("\n".join(too_long))
        failed.append("line length")
    return failed


def check_types() -> list[str]:
    """Runs mypy, which reads the types of the installed dependencies, for each system: branches for others it skips."""
    failed = []
    for system in ("linux", "darwin"):
        print(f"+ mypy --platform {system}", file=sys.stderr, flush=True)
        command = [PYTHON, "-m", "mypy", "--platform", system, "--cache-dir", f".mypy_cache/{system}"]
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            failed.append(f"mypy for {system}")
    return failed


def stop_if_failed(failed: list[str]) -> None:
    if failed:
        sys.exit(f"error: lint failed: {', '.join(failed)}; {FIX} mends what a formatter can")


def lint(args: argparse.Namespace) -> None:
    failed = check_style(args.fix)
    if subprocess.run([PYTHON, "-c", "import cffi, gguf, llama_cpp, numpy, tabulate"], cwd=VENV).returncode != 0:
        install("test")
    stop_if_failed(failed + check_types())


# ---- commands ----


def demo(args: argparse.Namespace) -> None:
    install("plot")
    run(PYTHON, "tools/demo.py", *(["--dense", args.dense] if args.dense else []))


def test_debug_build() -> None:
    """The plugin without optimization, with libstdc++'s assertions; its link compares the definitions of every type."""
    run("cmake", "--build", BUILD, "--target", "ggml-macko-debug")
    package = BUILD / "debug" / "ggml_macko"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")  # a library that a developer copied there is not this one
    shutil.copytree(ROOT / "python" / "ggml_macko", package, ignore=ignored, dirs_exist_ok=True)
    shutil.copy(BUILD / "_ffi.py", package)
    shutil.copy(BUILD / "libggml-macko-preload.so", package)
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    tests = ["tests/codec/test_sparse_matrix.py", "tests/end-to-end/test_model_runs.py"]
    run(PYTHON, "-m", "pytest", "-q", "-m", "not slow and not gpu", *tests, env=environment)


def test_arm64() -> None:
    """The C++ tests, the kernels for arm64 among them, under emulation where a cross compiler is installed.

    A Neoverse N1 has no FMLAL: kernels-neon-fhm is tested with QEMU_CPU=max (lab/kernels-cpu.md).
    """
    missing = [name for name in ("aarch64-linux-gnu-g++", "qemu-aarch64") if not shutil.which(name)]
    if missing:
        print(f"+ arm64: skipped, no {' and no '.join(missing)}", file=sys.stderr, flush=True)
        return
    run(
        "cmake", "-S", ROOT, "-B", ARM64, "-GNinja", f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake/aarch64-linux-gnu.cmake'}",
        "-DGGML_MACKO_PLUGIN=OFF", "-DGGML_MACKO_CUDA=OFF", f"-DPython3_EXECUTABLE={PYTHON}",
    )  # fmt: skip
    run("cmake", "--build", ARM64)
    environment = {"QEMU_CPU": "neoverse-n1", **os.environ}
    run("ctest", "--test-dir", ARM64, "--output-on-failure", "-j", CPUS, env=environment)


def test(args: argparse.Namespace) -> None:
    stop_if_failed(check_style(fix=False))
    install("test")
    stop_if_failed(check_types())
    run("cmake", BUILD)  # again: test-graph-fusion links the ggml of llama-cpp-python, which is installed only now
    run("cmake", "--build", BUILD)
    run("ctest", "--test-dir", BUILD, "--output-on-failure", "-j", CPUS)
    run(
        "cmake", "-S", ROOT, "-B", SANITIZED, "-GNinja", "-DGGML_MACKO_SANITIZE=ON", "-DGGML_MACKO_PLUGIN=OFF",
        "-DGGML_MACKO_CUDA=OFF", f"-DPython3_EXECUTABLE={PYTHON}",
    )  # fmt: skip
    run("cmake", "--build", SANITIZED)
    run("ctest", "--test-dir", SANITIZED, "--output-on-failure", "-j", CPUS)
    test_arm64()
    test_debug_build()
    # one process per core; waiting threads of one must not take the core of another
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    command = [PYTHON, "-m", "pytest", "-n", CPUS, "--dist", "loadfile", "--durations", "25"]
    run(*command, *(["-m", "not slow"] if args.quick else []), env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    demo_parser = commands.add_parser("demo", help="build and run the main job")
    demo_parser.add_argument(
        "--dense", metavar="MODEL.gguf", help="a dense F16 or BF16 model: also prune it to 30 %% and 50 %% zeros"
    )
    demo_parser.set_defaults(func=demo)
    lint_parser = commands.add_parser("lint", help="check formatting, lint and types")
    lint_parser.add_argument("--fix", action="store_true", help="rewrite files where a formatter can")
    lint_parser.set_defaults(func=lint)
    test_parser = commands.add_parser("test", help="lint, build and run all tests")
    test_parser.add_argument("--quick", action="store_true", help="without the tests marked slow")
    test_parser.set_defaults(func=test)
    args = parser.parse_args()
    try:
        args.func(args)
    except subprocess.CalledProcessError as e:
        sys.exit(f"error: {' '.join(e.cmd[:4])} ... failed with exit code {e.returncode}")
    except FileNotFoundError as e:
        sys.exit(f"error: {e.filename} not found")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
