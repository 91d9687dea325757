#!/usr/bin/env python3
"""Makes each CUDA call of a load and a generation fail in turn, and prints the outcomes.

  cmake -S . -B build -DGGML_MACKO_CUDA=ON && cmake --build build --target ggml-macko-failing ggml-macko-ffi
  python3 tests/stress/inject_cuda_failures.py --build build -m MODEL.gguf

The tool tries two errors: missing memory, after which the model can be loaded again, and a failure of the GPU, after
which the process must be restarted. For the first load of a process, each failure has a separate process, which takes
seconds if it makes a CUDA context; --every takes a sample. In processes that have loaded the model before, all calls
fail once, in turn, because of missing memory. Without memory for a launch or a copy, the plugin stops using the GPU,
and the log has a message.
Exits with 1 if a process crashes or hangs, generates another text without an error, or cannot load after a failure that
it should survive; with 130 after Ctrl-C, with a table of the finished trials. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

from tabulate import tabulate

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROMPT = "The function returns"  # the GPU generates token by token, after the prompt in one batch
LONG_PROMPT = PROMPT + " the objective of the structure" * 20
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
ERRORS = {"out of memory": OUT_OF_MEMORY, "GPU failure": 719}  # cudaErrorLaunchFailure
GIVEN_UP = "is no longer used"
LOADED_BEFORE = "out of memory, loaded before"
LOG_OF = "== call "
GOOD = ("no effect", "refused", "refused, then loaded", "refused, GPU given up", "slower, as the log says")


# ---- one process ----


def generate(path: str) -> str:
    from ggml_macko import Llama

    llama = Llama(path, n_ctx=512, n_threads=1, n_threads_batch=1, n_gpu_layers=-1, verbose=True, seed=1)
    try:
        return str([llama(p, max_tokens=6, temperature=0)["choices"][0]["text"] for p in (LONG_PROMPT, PROMPT)])
    finally:
        llama.close()


def load_failing() -> Any:
    """The plugin's function that makes a call fail and returns the number of calls since its last call."""
    import llama_cpp  # noqa: F401  loads libggml-base, which the plugin needs

    import ggml_macko

    plugin = ctypes.CDLL(str(pathlib.Path(ggml_macko.__file__).parent / "libggml-macko.so"))
    fail = plugin.ggml_macko_fail_cuda
    fail.restype, fail.argtypes = ctypes.c_long, [ctypes.c_long, ctypes.c_int]
    return fail


def try_call(fail: Any, path: str, call: int, error: int) -> dict[str, Any]:
    """Prints and returns the result of one failure. A line marks the start of its log."""
    print(f"{LOG_OF}{call}", file=sys.stderr, flush=True)
    result: dict[str, Any] = {"call": call}
    fail(call, error)
    try:
        result["text"] = generate(path)
    except (ValueError, RuntimeError, MemoryError, OSError) as e:
        result["refused"] = f"{type(e).__name__}: {e}"
    result["calls"] = fail(0, 0)
    if "refused" in result and error == OUT_OF_MEMORY:
        try:
            result["again"] = generate(path)
        except (ValueError, RuntimeError, MemoryError, OSError) as e:
            result["again"] = f"{type(e).__name__}: {e}"
    print(json.dumps(result), flush=True)
    return result


def work(path: str, call: int, error: int) -> None:
    try_call(load_failing(), path, call, error)


def work_on(path: str, first: int, step: int) -> None:
    """Makes call first, first + step, ... fail for missing memory, after the first load of the process."""
    fail = load_failing()
    generate(path)
    fail(0, 0)
    want = generate(path)
    n_calls = fail(0, 0)
    for call in range(first, n_calls + 1, step):
        result = try_call(fail, path, call, OUT_OF_MEMORY)
        if result.get("again", result.get("text")) != want:
            sys.exit(1)  # later calls need the GPU: another process continues


# ---- all processes ----


class Trial(NamedTuple):
    """A failure, its result, its log, and whether the GPU was given up in this trial or before it in its process."""

    call: int
    result: dict[str, Any]
    log: str
    given_up: bool


HANG_SECONDS = 60.0
"""Longest time without output of a process that does not hang."""

interrupted = threading.Event()
"""Set by Ctrl-C: no process starts any more, and finished trials are kept."""
running: set[subprocess.Popen[bytes]] = set()


def wait(process: subprocess.Popen[bytes], err: IO[str]) -> str:
    """The way in which the process failed; empty after a success."""
    nbytes, since = 0, time.monotonic()
    while True:
        try:
            code = process.wait(1)
            return f"CRASH (exit code {code})" if code else ""
        except subprocess.TimeoutExpired:
            size = os.fstat(err.fileno()).st_size
            if size > nbytes:
                nbytes, since = size, time.monotonic()
            elif time.monotonic() - since > HANG_SECONDS:
                process.kill()
                return "HANG"


def run(package: pathlib.Path, arguments: Sequence[object]) -> tuple[list[Trial], str]:
    """Runs a process. Returns its trials and how it failed, which is the outcome of the last trial."""
    if interrupted.is_set():
        return [], ""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # a session of its own: Ctrl-C is for this process alone
        with subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True) as process:
            running.add(process)
            end = wait(process, err)
            running.discard(process)
        if interrupted.is_set():
            end = ""
        out.seek(0)
        err.seek(0)
        results = [json.loads(line) for line in out.read().splitlines() if line.startswith("{")]
        logs = err.read().split(LOG_OF)[1:]
    given_up = [any(GIVEN_UP in log for log in logs[: i + 1]) for i in range(len(logs))]
    trials = [Trial(result["call"], result, log, gone) for result, log, gone in zip(results, logs, given_up)]
    if end and len(logs) > len(results):
        log = logs[-1]
        trials.append(Trial(int(log.split("\n", 1)[0]), {"outcome": end}, log, given_up[-1]))
    return trials, end


def run_one(package: pathlib.Path, path: str, call: int, error: int) -> list[Trial]:
    trials, end = run(package, ["--worker", path, call, error])
    return trials if trials or interrupted.is_set() else [Trial(call, {"outcome": end}, "", False)]


def run_all(package: pathlib.Path, path: str, first: int, step: int) -> list[Trial]:
    """Tests every step-th call in processes that have loaded the model before; a new process replaces an ended one."""
    found: list[Trial] = []
    while True:
        trials, end = run(package, ["--worker-of-all", path, first, step])
        found += trials
        if not end:
            return found
        if not trials:
            return [*found, Trial(first, {"outcome": end}, "", False)]
        first = trials[-1].call + step


def lines_of_gpu(log: str) -> list[str]:
    return [line for line in log.splitlines() if "MACKO0:" in line]


def outcome(trial: Trial, want: str) -> str:
    result, log = trial.result, trial.log
    reasons = ("memory", GIVEN_UP, "slowly")
    said = any(any(reason in line for reason in reasons) for line in lines_of_gpu(log))
    said = said or "(cudaError" in result.get("refused", "")
    if "outcome" in result:
        return str(result["outcome"])
    if "refused" in result:
        if "again" in result:
            if result["again"] == want:
                return "refused, then loaded"
            return "refused, GPU given up" if trial.given_up else "REFUSED, THEN NOT USABLE"
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


def try_all(package: pathlib.Path, args: argparse.Namespace, n_calls: int) -> Iterator[tuple[str, Trial]]:
    """(row of the table, failure) of all trials."""
    pool = concurrent.futures.ThreadPoolExecutor(args.jobs)
    calls = range(1, n_calls + 1, args.every)
    rows = {
        pool.submit(run_one, package, args.model, call, error): name for name, error in ERRORS.items() for call in calls
    }
    rows |= {pool.submit(run_all, package, args.model, 1 + i, args.jobs): LOADED_BEFORE for i in range(args.jobs)}
    left = set(rows)
    try:
        for future in concurrent.futures.as_completed(rows):
            left.discard(future)
            print(f"{len(rows) - len(left)} of {len(rows)} processes: {rows[future]}", file=sys.stderr, flush=True)
            yield from ((rows[future], trial) for trial in future.result())
    except KeyboardInterrupt:
        interrupted.set()
        for process in list(running):
            process.kill()
        for future in left:
            if not future.cancel():
                yield from ((rows[future], trial) for trial in future.result())
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        return work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    if sys.argv[1:2] == ["--worker-of-all"]:
        return work_on(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, metavar="MODEL.gguf")
    parser.add_argument("--build", type=pathlib.Path, required=True, metavar="DIR", help="CMake's build folder")
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="only every N-th call of the first load of a process (default: 1)",
    )
    parser.add_argument("-j", "--jobs", type=int, default=4, help="processes at a time (default: 4)")
    args = parser.parse_args()
    package = make_package(args.build)
    (first,) = run_one(package, args.model, 0, 0)
    if "text" not in first.result:
        sys.exit(f"error: {args.model}: {first.result}\n{first.log[-2000:]}")
    want, n_calls = first.result["text"], first.result["calls"]
    print(f"{args.model}: {n_calls} CUDA calls", file=sys.stderr)
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    examples: dict[tuple[str, str], Trial] = {}
    cut_off = False
    try:
        for name, trial in try_all(package, args, n_calls):
            key = name, outcome(trial, want)
            found[key] += 1
            examples.setdefault(key, trial)
    except KeyboardInterrupt:
        cut_off = True
    rows = [[name, what, n] for (name, what), n in sorted(found.items())]
    print(tabulate(rows, ["error", "outcome", "calls"], tablefmt="github"))
    bad = {key: value for key, value in examples.items() if key[1] not in GOOD}
    for (name, what), trial in bad.items():
        log = "\n".join([*lines_of_gpu(trial.log), trial.log[-300:]])
        print(f"{name}, {what}: call {trial.call}: {trial.result}\n{log}\n", file=sys.stderr)
    sys.exit(130 if cut_off else 1 if bad else 0)


if __name__ == "__main__":
    main()
