#!/usr/bin/env python3
"""Runs the C++ tests of the code for older GPUs on any newer GPU. Each build has PTX for one architecture.

  python3 tools/checks/check_gpu_architectures.py --architectures 75 80 86 89

Host code uses the architecture of the PTX (op_compute_capability), so it launches the same kernels as on that GPU, but
with the shared memory of the present GPU. Prints a table; exits with 1 if a test fails. Needs nvcc, CMake, an NVIDIA
GPU, and no Python package. --build-only builds the programs for another machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SKIPPED = 77


@dataclasses.dataclass
class Result:
    """A row of the table. checks: -1 if the test ended before it printed their number."""

    architecture: int
    test: str
    checks: int
    failed: int
    seconds: float
    problem: str = ""


def run(*command: object) -> None:
    print("+", " ".join(str(c) for c in command), file=sys.stderr, flush=True)
    subprocess.run([str(c) for c in command], check=True, stdout=sys.stderr)


def gpu_tests(folder: pathlib.Path) -> dict[str, list[str]]:
    """The command of each test with the CMake label `gpu`."""
    found = subprocess.run(
        ["ctest", "-L", "^gpu$", "--show-only=json-v1"],
        cwd=folder,  # --test-dir needs CMake 3.20
        check=True,
        capture_output=True,
        text=True,
    )
    tests = {t["name"]: t.get("command", []) for t in json.loads(found.stdout)["tests"]}
    if not tests:
        sys.exit(f"error: {folder}: no test has the label gpu")
    return tests


def build(architecture: int, folder: pathlib.Path, jobs: int) -> None:
    generator = ["-GNinja"] if shutil.which("ninja") else []
    run(
        "cmake", "-S", ROOT, "-B", folder, *generator, "-DGGML_MACKO_PLUGIN=OFF", "-DGGML_MACKO_CUDA=ON",
        f"-DGGML_MACKO_CUDA_ARCHITECTURES={architecture}-virtual",
    )  # fmt: skip
    run("cmake", "--build", folder, "-j", jobs, "--target", *gpu_tests(folder))


def run_test(architecture: int, name: str, command: list[str], timeout: float) -> Result:
    """Runs one program, which must print that it ran the code of the architecture."""
    # the driver compiles the PTX; its cache must hold all kernels of this build, and no others
    environment = {**os.environ, "CUDA_CACHE_PATH": str(pathlib.Path(command[0]).parent / "ptx-cache")}
    environment["CUDA_CACHE_MAXSIZE"] = str(4 << 30)
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired:
        return Result(architecture, name, -1, 0, time.monotonic() - start, f"no end after {timeout:.0f} s")
    seconds = time.monotonic() - start
    sys.stderr.write(done.stdout + done.stderr)
    if done.returncode == SKIPPED:
        sys.exit(f"error: {name} found no GPU")
    counts = re.search(rf"^{re.escape(name)}: (\d+) passed, (\d+) failed$", done.stdout, re.MULTILINE)
    path = re.search(rf"^{re.escape(name)}: code for compute capability (\d+)$", done.stdout, re.MULTILINE)
    if not counts:
        failed = len(re.findall(r"^.*: failed: ", done.stderr, re.MULTILINE))
        return Result(architecture, name, -1, failed, seconds, f"ended early with exit code {done.returncode}")
    passed, failed = int(counts[1]), int(counts[2])
    problem = "" if done.returncode == 0 else f"exit code {done.returncode}"
    if not path or int(path[1]) != architecture:
        problem = f"ran the code for {path[1] if path else 'an unknown GPU'}"
    return Result(architecture, name, passed + failed, failed, seconds, problem)


def print_table(results: list[Result]) -> None:
    rows = [("architecture", "test", "checks", "failed", "seconds", "")]
    for r in results:
        checks = "unknown" if r.checks < 0 else f"{r.checks:,}"
        rows.append((f"sm_{r.architecture}", r.test, checks, str(r.failed), f"{r.seconds:.1f}", r.problem))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, tuple("-" * width for width in widths))
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--architectures", type=int, nargs="+", default=[75, 80, 86, 89], metavar="SM", help="default: 75 80 86 89"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=ROOT / "build" / "gpu-architectures", metavar="DIR",
        help="a build folder for each architecture (default: build/gpu-architectures)",
    )  # fmt: skip
    parser.add_argument("--build-only", action="store_true", help="run nothing")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="of one test (default: 600)")
    args = parser.parse_args()
    try:
        for architecture in args.architectures:
            build(architecture, args.out / f"sm_{architecture}", args.jobs)
        if args.build_only:
            return
        results = [
            run_test(architecture, name, command, args.timeout)
            for architecture in args.architectures
            for name, command in gpu_tests(args.out / f"sm_{architecture}").items()
        ]
    except subprocess.CalledProcessError as e:
        sys.exit(f"error: {' '.join(e.cmd[:3])} ... failed with exit code {e.returncode}")
    except FileNotFoundError as e:
        sys.exit(f"error: {e.filename} not found")
    except KeyboardInterrupt:
        sys.exit(130)
    print_table(results)
    if any(r.failed or r.problem for r in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
