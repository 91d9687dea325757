#!/usr/bin/env python3
"""The two commands of this repository. Needs git, Python 3.9+, a C++17 compiler and CMake; everything else goes into .venv/.

  python3 tools/dev.py demo [--dense MODEL.gguf]   build, then prune / convert / verify / generate with sizes and speeds
  python3 tools/dev.py test [--quick]              build, then every test (C++, sanitized fuzzing, Python)

The first run builds llama-cpp-python from source (about 8 minutes on 2 cores); pip caches the result.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import time
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
BUILD = ROOT / "build" / "dev"
DIST = ROOT / "build" / "dist"
SANITIZED = ROOT / "build" / "sanitized"
CPUS = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())


def cuda_architectures() -> str:
    """Of the GPUs here; without one, two that show whether the code compiles (a release builds all)."""
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        found = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError):
        found = []
    return ";".join(sorted({cap.replace(".", "") for cap in found})) or "80;90"


def run(*command: object, **kwargs) -> None:
    print("+", " ".join(str(c) for c in command), file=sys.stderr, flush=True)
    start = time.monotonic()
    subprocess.run([str(c) for c in command], check=True, cwd=ROOT, **kwargs)
    print(f"  ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)


def install(extra: str) -> None:
    """A wheel of the package in build/dist, and it and what `extra` lists in .venv; the C++ build stays in build/dev for the tests."""
    if not PYTHON.exists():
        try:
            venv.create(VENV, with_pip=True)
        except subprocess.CalledProcessError:
            sys.exit(
                "error: this Python cannot create a virtual environment with pip (on Debian: apt-get install python3-venv)"
            )
    os.environ["PATH"] = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"  # pip's ninja for CMake
    run(PYTHON, "-m", "pip", "install", "-q", "scikit-build-core>=0.10", "cffi", "ninja", "pip>=23.1")
    shutil.rmtree(DIST, ignore_errors=True)
    run(
        PYTHON, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", DIST, "-C", f"build-dir={BUILD}",
        "-C", "cmake.args=-GNinja", "-C", f"cmake.define.GGML_MACKO_CUDA_ARCHITECTURES={cuda_architectures()}", ".",
    )  # fmt: skip
    (wheel,) = DIST.glob("*.whl")
    run(PYTHON, "-m", "pip", "install", f"{wheel}[{extra}]")
    run(
        PYTHON, "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", wheel
    )  # the version is the old one, the code may not be


def demo(args: argparse.Namespace) -> None:
    install("plot")
    run(PYTHON, "tools/demo.py", *(["--dense", args.dense] if args.dense else []))


def test(args: argparse.Namespace) -> None:
    install("test")
    run("cmake", "--build", BUILD)
    run("ctest", "--test-dir", BUILD, "--output-on-failure", "-j", CPUS)
    run(
        "cmake", "-S", ROOT, "-B", SANITIZED, "-GNinja", "-DGGML_MACKO_SANITIZE=ON", "-DGGML_MACKO_PLUGIN=OFF", "-DGGML_MACKO_CUDA=OFF",
        f"-DPython3_EXECUTABLE={PYTHON}",
    )  # fmt: skip
    run("cmake", "--build", SANITIZED)
    run("ctest", "--test-dir", SANITIZED, "--output-on-failure", "-j", CPUS)
    run(PYTHON, "-m", "pytest", *(["-m", "not slow"] if args.quick else []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    demo_parser = commands.add_parser("demo", help="build and run the main job")
    demo_parser.add_argument(
        "--dense", metavar="MODEL.gguf", help="a dense F16 or BF16 model: also prune it to 30 %% and 50 %% zeros"
    )
    demo_parser.set_defaults(func=demo)
    test_parser = commands.add_parser("test", help="build and run all tests")
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
