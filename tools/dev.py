#!/usr/bin/env python3
"""Builds and tests this repository. Needs git, Python 3.9+, a C++17 compiler and CMake; the rest goes into .venv/.

  python3 tools/dev.py check [--fix]           a minute or two: format, lint, types, build, unit tests
  python3 tools/dev.py test                    everything: also sanitized fuzzing and the end-to-end tests
  python3 tools/dev.py demo [--dense MODEL]    install a wheel, then prune, convert, verify and generate

check and test install the package in editable mode: .venv/ uses python/ as it is, and the libraries of build/dev, which
`cmake --build build/dev` renews. The first call compiles llama-cpp-python from source, which takes minutes; pip
caches the result. ccache is used where it is installed.

environment variables:
  GGML_MACKO_CUDA   ON, OFF or AUTO (if nvcc is found): whether to build for NVIDIA GPUs, which takes minutes. Without
                    it, test builds for them if nvcc is found, demo if there is a GPU, and check if build/dev does.
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
from concurrent.futures import ThreadPoolExecutor

import build_llama_cpp

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
READY = VENV / "ready"  # the requirements that .venv has, next to the editable package
NEWEST_LLAMA_CPP_PYTHON = f"llama-cpp-python=={build_llama_cpp.tested_range()[1]}"  # not a newer, untested one
BUILD = ROOT / "build" / "dev"
DIST = ROOT / "build" / "dist"
SANITIZED = ROOT / "build" / "sanitized"
# builds of the core for other machines: programs (Debian's names), toolchain file in cmake/, environment of ctest
CROSS_BUILDS: dict[str, tuple[tuple[str, ...], str, dict[str, str]]] = {
    # a Neoverse N1 has no FMLAL: kernels-neon-fhm is tested with QEMU_CPU=max (lab/kernels-cpu.md)
    "arm64": (("aarch64-linux-gnu-g++", "qemu-aarch64"), "aarch64-linux-gnu.cmake", {"QEMU_CPU": "neoverse-n1"}),
    "windows": (("x86_64-w64-mingw32-g++-posix", "wine"), "x86_64-w64-mingw32.cmake", {}),
}
CPUS = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
CUDA = os.environ.pop("GGML_MACKO_CUDA", "")  # the library refuses names that it does not read
FIX = "python3 tools/dev.py check --fix"

MAX_COLUMNS = 120
# folders with files for clang-format, except tables of data (*.inc)
FORMATTED = ("examples", "ggml-macko", "tests", "tools")
CPP_SUFFIXES = {".c", ".cpp", ".cu", ".cuh", ".h"}


def run(*command: object, env: dict[str, str] | None = None) -> None:
    print("+", " ".join(str(c) for c in command), file=sys.stderr, flush=True)
    start = time.monotonic()
    subprocess.run([str(c) for c in command], check=True, cwd=ROOT, env=env)
    print(f"  ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)


def run_together(commands: dict[str, list[object]]) -> None:
    """Runs commands at the same time and prints the output of each when it ends. Ends the process if one fails."""

    def run_one(name: str) -> bool:
        start = time.monotonic()
        command = [str(c) for c in commands[name]]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        seconds = time.monotonic() - start
        output = done.stdout if done.returncode or name.startswith("pytest") else ""
        print(f"+ {name}: {'failed' if done.returncode else 'passed'} ({seconds:.0f} s)\n{output}", end="", flush=True)
        return done.returncode == 0

    with ThreadPoolExecutor(len(commands)) as pool:
        passed = dict(zip(commands, pool.map(run_one, commands)))
    failed = [name for name, ok in passed.items() if not ok]
    if failed:
        sys.exit(f"error: failed: {', '.join(failed)}; {FIX} mends what a formatter can")


# ---- build ----


def cuda_architectures() -> str:
    """The architectures of this machine's GPUs. Without one, the oldest and the newest code path; a release has all."""
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        found = subprocess.run(query, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError):
        found = []
    return ";".join(sorted({cap.replace(".", "") for cap in found})) or "75-virtual;90"


def has_gpu() -> bool:
    return bool(shutil.which("nvidia-smi")) and subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0


def cuda_options(default: str) -> list[str]:
    value = CUDA or default
    if value not in ("ON", "OFF", "AUTO"):
        sys.exit(f"error: GGML_MACKO_CUDA={value}: must be ON, OFF or AUTO")
    return [f"GGML_MACKO_CUDA={value}", f"GGML_MACKO_CUDA_ARCHITECTURES={cuda_architectures()}"]


def use_ccache() -> None:
    if shutil.which("ccache"):
        for language in ("C", "CXX", "CUDA"):
            os.environ.setdefault(f"CMAKE_{language}_COMPILER_LAUNCHER", "ccache")


def create_venv() -> None:
    if not PYTHON.exists():
        try:
            venv.create(VENV, with_pip=True)
        except subprocess.CalledProcessError:
            sys.exit("error: this Python cannot create a virtual environment (on Debian: apt-get install python3-venv)")
    # CMake finds the ninja that pip installs, and lint its tools
    if os.environ["PATH"].split(os.pathsep)[0] != str(VENV / "bin"):
        os.environ["PATH"] = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"


def install_package(package: list[object], extra: str) -> None:
    """Installs the package, then the requirements of the package and its extra."""
    run(PYTHON, "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", "--no-build-isolation", *package)
    # llama-cpp-python is compiled here, without the library of llama.cpp's command-line programs
    hook = shlex.quote(f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={ROOT / 'cmake' / 'llama-cpp-python.cmake'}")
    environment = {**os.environ, "CMAKE_ARGS": f"{os.environ.get('CMAKE_ARGS', '')} {hook}".strip()}
    run(PYTHON, "-m", "pip", "install", "-q", f"ggml-macko[{extra}]", NEWEST_LLAMA_CPP_PYTHON, env=environment)


def install_build_requirements() -> None:
    create_venv()
    run(PYTHON, "-m", "pip", "install", "-q", "scikit-build-core>=0.10", "cffi", "ninja", "pip>=23.1")


def prepare() -> None:
    """Prepares .venv for check and test: the package in editable mode, all requirements of tests, and the tools."""
    create_venv()
    wanted = (ROOT / "pyproject.toml").read_text() + NEWEST_LLAMA_CPP_PYTHON
    if READY.exists() and READY.read_text() == wanted:
        return
    install_build_requirements()
    run(PYTHON, "-m", "pip", "install", "-q", *lint_requirements())
    install_package(["-e", ROOT], "test")
    # the path alone: scikit-build-core's import hook would also hide packages in PYTHONPATH, such as the debug build
    for path in VENV.glob("lib/python*/site-packages/_editable_skbc_ggml_macko.pth"):
        path.write_text(f"{ROOT / 'python'}\n")
    READY.write_text(wanted)


def configure(*definitions: str) -> None:
    """CMake's step for build/dev; the libraries that are built there become part of the editable package."""
    definitions = ("GGML_MACKO_EDITABLE=ON", f"Python3_EXECUTABLE={PYTHON}", *definitions)
    run("cmake", "-S", ROOT, "-B", BUILD, "-GNinja", *(f"-D{d}" for d in definitions))


def build_wheel(cuda: list[str]) -> pathlib.Path:
    """Puts a wheel of the package into build/dist; build/dev keeps the C++ build."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(
        PYTHON, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", DIST, "-C", f"build-dir={BUILD}",
        "-C", "cmake.args=-GNinja", *(part for d in cuda for part in ("-C", f"cmake.define.{d}")), ".",
    )  # fmt: skip
    (wheel,) = DIST.glob("*.whl")
    return wheel


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
    found = (path for folder in ("cmake", "pybind", *FORMATTED) for path in (ROOT / folder).rglob("*"))
    inside = (path for path in found if path.name == "CMakeLists.txt" or path.suffix == ".cmake")
    return sorted(path.relative_to(ROOT) for path in (ROOT / "CMakeLists.txt", *inside))


def long_lines() -> Iterator[str]:
    """Lines of more than 120 columns: clang-format cannot break comments and strings, and ruff checks only Python."""
    for path in [*cpp_files(), *cmake_files()]:
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            if len(line) > MAX_COLUMNS:
                yield f"{path}:{number}: {len(line)} columns, at most {MAX_COLUMNS}"


def stop_at_long_lines() -> None:
    too_long = list(long_lines())
    if too_long:
        sys.exit("\n".join(too_long))


def style_checks() -> dict[str, list[object]]:
    tools = VENV / "bin"
    return {
        "ruff check": [tools / "ruff", "check", "--output-format", "concise"],
        "ruff format": [tools / "ruff", "format", "--check", "--diff"],
        "clang-format": [tools / "clang-format", "--dry-run", "-Werror", *cpp_files()],
    }


def type_check() -> dict[str, list[object]]:
    """Runs mypy, which reads the types of the installed dependencies, some of which need Python 3.10."""
    if sys.version_info < (3, 10):
        print("+ mypy: skipped, needs Python 3.10", file=sys.stderr, flush=True)
        return {}
    return {"mypy": [PYTHON, "-m", "mypy"]}


def fix_style() -> None:
    run(VENV / "bin" / "ruff", "check", "--fix-only", "-q")
    run(VENV / "bin" / "ruff", "format", "-q")
    run(VENV / "bin" / "clang-format", "-i", *cpp_files())


# ---- commands ----


def demo(args: argparse.Namespace) -> None:
    install_build_requirements()
    wheel = build_wheel(cuda_options("AUTO" if has_gpu() else "OFF"))
    READY.unlink(missing_ok=True)  # the wheel replaces the editable package
    install_package([wheel], "plot")
    run(PYTHON, "tools/demo.py", *(["--dense", args.dense] if args.dense else []))


def ctest(folder: pathlib.Path) -> list[object]:
    """ctest in a build folder. CMake before 3.20 ignores --test-dir, and then finds no tests, which is no error."""
    return ["cmake", "-E", "chdir", folder, "ctest", "--no-tests=error", "--output-on-failure", "-j", CPUS]


def check(args: argparse.Namespace) -> None:
    prepare()
    if args.fix:
        fix_style()
    stop_at_long_lines()
    is_configured = (BUILD / "CMakeCache.txt").exists() and not CUDA
    configure(*([] if is_configured else cuda_options("OFF")))
    run_together({**style_checks(), **type_check(), "build": ["cmake", "--build", BUILD]})
    run_together(
        {
            "ctest": [*ctest(BUILD), "-LE", "slow"],
            "pytest": [PYTHON, "-m", "pytest", "-q", "-n", CPUS, "--dist", "worksteal", "tests/unit"],
        }
    )


def missing_for(cross_build: str) -> list[str]:
    return [name for name in CROSS_BUILDS[cross_build][0] if not shutil.which(name)]


def build_everything() -> None:
    """Runs all builds, format, lint and types at the same time, so that no core is idle."""
    core_only = ["-GNinja", "-DGGML_MACKO_PLUGIN=OFF", "-DGGML_MACKO_CUDA=OFF", f"-DPython3_EXECUTABLE={PYTHON}"]
    run("cmake", "-S", ROOT, "-B", SANITIZED, "-DGGML_MACKO_SANITIZE=ON", *core_only)
    builds: dict[str, list[object]] = {
        "build": ["cmake", "--build", BUILD, "--target", "all", "ggml-macko-debug"],
        "sanitized build": ["cmake", "--build", SANITIZED],
    }
    for name, (_, toolchain, _) in CROSS_BUILDS.items():
        if missing := missing_for(name):
            print(f"+ {name}: skipped, no {' and no '.join(missing)}", file=sys.stderr, flush=True)
            continue
        folder = ROOT / "build" / name
        run("cmake", "-S", ROOT, "-B", folder, f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / toolchain}", *core_only)
        builds[f"{name} build"] = ["cmake", "--build", folder]
    run_together({**builds, **style_checks(), **type_check()})


def run_ctest(folder: pathlib.Path, env: dict[str, str] | None = None) -> None:
    run(*ctest(folder), env=env)


def run_pytest(*args: object, env: dict[str, str]) -> None:
    """Runs one process per core: waiting threads of one must not take the core of another."""
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, **env}
    run(PYTHON, "-m", "pytest", "-n", CPUS, "--dist", "worksteal", *args, env=environment)


def test_debug_build() -> None:
    """Builds the plugin without optimization, with libstdc++'s assertions; its link compares the types' definitions."""
    package = BUILD / "debug" / "ggml_macko"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")  # links to the optimized libraries
    shutil.copytree(ROOT / "python" / "ggml_macko", package, ignore=ignored, dirs_exist_ok=True)
    shutil.copy(BUILD / "libggml-macko-preload.so", package)
    tests = ["tests/codec/test_sparse_matrix.py", "tests/end-to-end/test_model_runs.py"]
    run_pytest("-q", "-m", "not slow and not gpu", *tests, env={"PYTHONPATH": str(package.parent)})


def test(_: argparse.Namespace) -> None:
    prepare()
    stop_at_long_lines()
    cuda = cuda_options("AUTO")
    configure(*cuda)
    build_everything()
    build_wheel(cuda)  # for test_wheel.py
    run_ctest(BUILD)
    run_ctest(SANITIZED)
    for name, (_, _, environment) in CROSS_BUILDS.items():
        if not missing_for(name):
            run_ctest(ROOT / "build" / name, env={**environment, **os.environ})
    test_debug_build()
    run_pytest("--durations", "25", env={})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    check_parser = commands.add_parser("check", help="format, lint, types, build and unit tests")
    check_parser.add_argument("--fix", action="store_true", help="first rewrite files where a formatter can")
    check_parser.set_defaults(func=check)
    commands.add_parser("test", help="check, build and run everything").set_defaults(func=test)
    demo_parser = commands.add_parser("demo", help="build and run the main job")
    demo_parser.add_argument(
        "--dense", metavar="MODEL.gguf", help="a dense F16 or BF16 model: also prune it to 30 %% and 50 %% zeros"
    )
    demo_parser.set_defaults(func=demo)
    args = parser.parse_args()
    use_ccache()
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
