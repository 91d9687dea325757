#!/usr/bin/env python3
"""Lets each CUDA call of loading a model and generating with it fail in turn, and shows what becomes of it.

  cmake -S . -B build -DGGML_MACKO_CUDA=ON && cmake --build build --target ggml-macko-failing ggml-macko-ffi
  python3 tools/inject_cuda_failures.py --build build -m MODEL.gguf

Two errors are tried: memory that is not there (the process goes on, and the model can be loaded again), and a failure
of the GPU (which is not used any more: the process has to be started again). Each call fails in a process of its own.
Exits with 1 if a process crashes or hangs, generates another text without an error, or cannot load after a failure
that it should survive. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import ctypes
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

from tabulate import tabulate

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROMPT = "The function returns"  # generated on the GPU token by token, the prompt at once
LONG_PROMPT = PROMPT + " the objective of the structure" * 20
ERRORS = {"out of memory": 2, "GPU failure": 719}  # cudaErrorMemoryAllocation, cudaErrorLaunchFailure
GOOD = ("no effect", "refused", "refused, then loaded", "slower, as the log says")


# ---- one process ----


def generate(path: str) -> str:
    from ggml_macko import Llama

    llama = Llama(path, n_ctx=512, n_threads=1, n_threads_batch=1, n_gpu_layers=-1, verbose=True, seed=1)
    try:
        return str([llama(p, max_tokens=6, temperature=0)["choices"][0]["text"] for p in (LONG_PROMPT, PROMPT)])
    finally:
        llama.close()


def work(path: str, call: int, error: int) -> None:
    import llama_cpp  # noqa: F401  loads libggml-base, which the plugin needs

    import ggml_macko

    plugin = ctypes.CDLL(str(pathlib.Path(ggml_macko.__file__).parent / "libggml-macko.so"))
    fail = plugin.ggml_macko_fail_cuda
    fail.restype, fail.argtypes = ctypes.c_long, [ctypes.c_long, ctypes.c_int]
    result: dict[str, Any] = {}
    fail(call, error)
    try:
        result["text"] = generate(path)
    except (ValueError, RuntimeError, MemoryError, OSError) as e:
        result["refused"] = f"{type(e).__name__}: {e}"
    result["calls"] = fail(0, 0)
    if "refused" in result and error == ERRORS["out of memory"]:
        try:
            result["again"] = generate(path)
        except (ValueError, RuntimeError, MemoryError, OSError) as e:
            result["again"] = f"{type(e).__name__}: {e}"
    print(json.dumps(result), flush=True)


# ---- all processes ----


def run(package: pathlib.Path, path: str, call: int, error: int) -> tuple[dict[str, Any], str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, "--worker", path, str(call), str(error)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    except subprocess.TimeoutExpired:
        return {"outcome": "HANG"}, ""
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return {"outcome": f"CRASH (exit code {done.returncode})"}, done.stderr
    return json.loads(lines[-1]), done.stderr


def outcome(result: dict[str, Any], log: str, want: str) -> str:
    said = "MACKO0:" in log and any(
        "MACKO0:" in line and ("memory" in line or "not used any more" in line or "slowly" in line)
        for line in log.splitlines()
    )
    if "outcome" in result:
        return str(result["outcome"])
    if "refused" in result:
        if "again" in result:
            return "refused, then loaded" if result["again"] == want else "REFUSED, THEN NOT USABLE"
        return "refused" if said else "refused, but the log does not say why"
    if result["text"] == want:
        return "slower, as the log says" if said else "no effect"
    return "another text, and an error in the log" if said else "ANOTHER TEXT"


def make_package(build: pathlib.Path) -> pathlib.Path:
    """The Python package around the failing plugin; returns the folder for PYTHONPATH."""
    folder = build / "failing"
    package = folder / "ggml_macko"
    if not (package / "libggml-macko.so").exists():
        sys.exit(f"error: {package}: no libggml-macko.so; build the target ggml-macko-failing")
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "python" / "ggml_macko", package, ignore=ignored, dirs_exist_ok=True)
    for name in ("_ffi.py", "libggml-macko-preload.so"):
        shutil.copy(build / name, package)
    return folder


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        return work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, metavar="MODEL.gguf")
    parser.add_argument("--build", type=pathlib.Path, required=True, metavar="DIR", help="CMake's build folder")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th call (default: 1)")
    parser.add_argument("-j", "--jobs", type=int, default=4, help="processes at a time (default: 4)")
    args = parser.parse_args()
    package = make_package(args.build)
    first, log = run(package, args.model, 0, 0)
    if "text" not in first:
        sys.exit(f"error: {args.model}: {first}\n{log[-2000:]}")
    want, n_calls = first["text"], first["calls"]
    print(f"{args.model}: {n_calls} CUDA calls", file=sys.stderr)
    rows, examples = [], {}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for name, error in ERRORS.items():
            calls = range(1, n_calls + 1, args.every)
            found: collections.Counter[str] = collections.Counter()
            tries = pool.map(functools.partial(run, package, args.model, error=error), calls)
            for call, (result, text) in zip(calls, tries):
                what = outcome(result, text, want)
                found[what] += 1
                if call // args.every % 50 == 0:
                    print(f"{name}: call {call} of {n_calls}", file=sys.stderr, flush=True)
                examples.setdefault((name, what), (call, result, text))
            rows += [[name, what, n] for what, n in sorted(found.items())]
    print(tabulate(rows, ["error", "outcome", "calls"], tablefmt="github"))
    bad = {key: value for key, value in examples.items() if key[1] not in GOOD}
    for (name, what), (call, result, text) in bad.items():
        print(f"{name}, {what}: call {call}: {result}\n{text[-1500:]}", file=sys.stderr)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
