#!/usr/bin/env python3
"""Makes the N-th allocation, read, write, fsync, rename, thread and so on fail, for every N, in every operation that
reads or writes model files, and prints the outcomes.

Two outcomes are allowed: the right result, or one line that names the failure and exit code 1. No file but the output
and no open descriptor may remain. Anything else is a fault, and the exit code is 1. The table counts separately the
processes that llama.cpp, CPython or NumPy end because of a failure in their own code.

Needs cc and the package (installed, or on PYTHONPATH). The model is tiny, so that all calls of an operation can be
tried. A worker imports everything, runs the operation once, and forks for each call. fail-nth.c is preloaded; it counts
calls and makes one fail.

    python3 tests/stress/inject_failures.py -j 16 --json results.jsonl      # everything
    python3 tests/stress/inject_failures.py --only convert-macko:write      # one operation and kind
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import gc
import json
import mmap
import multiprocessing
import os
import pathlib
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tabulate import tabulate

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SHIM = ROOT / "tests" / "support" / "fail-nth.c"

TIMEOUT = 60.0  # seconds after which a run hangs
SLICE = 40  # calls that a worker tries at a time
WHERE_NBYTES = 4096
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a file system in memory
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "OMP_NUM_THREADS": "1",  # OpenMP's threads do not survive a fork
    "PYTHONDONTWRITEBYTECODE": "1",
}


class Kind(NamedTuple):
    """A kind of call that fails."""

    id: int  # enum kind of fail-nth.c
    from_there_on: bool  # all calls from the N-th on fail, as on a full disk
    is_of_file: bool  # the message must name a file
    must_succeed: bool = False


KINDS = {
    "allocation": Kind(1, False, False),
    "read": Kind(2, False, True),
    "write": Kind(3, False, True),
    "every write from there on": Kind(3, True, True),
    "fsync": Kind(4, False, True),
    "rename or link": Kind(5, False, True),
    "resize": Kind(6, False, True),
    "open": Kind(7, False, True),
    "thread": Kind(8, False, False),
    "every thread from there on": Kind(8, True, False),
    "short read": Kind(9, False, False, must_succeed=True),
    "short write": Kind(10, False, False, must_succeed=True),
}

CONVERSIONS = ("macko", "ec-csr", "packed", "auto", "sparse-q8", "sparse-q5", "sparse-q4", "sparse-q3")

# operation -> arguments of macko; {t} is the number of threads, {out} the output. Inputs: make_inputs
OPERATIONS = {
    "load sparse": "generate -m {inputs}/sparse.gguf -p abab -n 3 -c 32 --temp 0 -t {t}",
    "load quantized": "generate -m {inputs}/q4.gguf -p abab -n 3 -c 32 --temp 0 -t {t}",
    "load and cache": "generate -m {inputs}/sparse.gguf -p abab -n 3 -c 32 --temp 0 -t {t} --cache",
    "load cached": "generate -m {inputs}/sparse.gguf -p abab -n 3 -c 32 --temp 0 -t {t} --cache",
    **{f"convert {name}": f"convert {{inputs}}/dense.gguf {{out}} {name} {{t}}" for name in CONVERSIONS},
    "restore": "restore {inputs}/sparse.gguf {out} {t}",
    "verify": "verify {inputs}/dense.gguf {inputs}/sparse.gguf -t {t}",
    "prune": "prune {inputs}/dense.gguf {out} --sparsity 0.8 -t {t}",
    "prune wanda": (
        "prune {inputs}/dense.gguf {out} --sparsity 0.8 --method wanda --imatrix {inputs}/imatrix.gguf -t {t}"
    ),
    "prune sparsegpt": (
        "prune {inputs}/dense.gguf {out} --sparsity 0.8 --method sparsegpt -f {inputs}/text.txt -c 32 --chunks 2 -t {t}"
        " --device none"
    ),
    "calibrate": "calibrate -m {inputs}/sparse.gguf -f {inputs}/text.txt -o {out} -c 32 --chunks 2 -t {t}",
}

THIRD_PARTIES = (  # start of a module's name -> project
    ("libggml-macko", ""),
    ("libllama", "llama.cpp"),
    ("libggml", "llama.cpp"),
    ("libgomp", ""),  # the caller is reported instead
    ("_cffi_backend", "cffi"),
    ("_multiarray", "NumPy"),
    ("_umath", "NumPy"),
    ("libopenblas", "NumPy"),
    ("libscipy_openblas", "NumPy"),
    ("python", "CPython"),
    ("libpython", "CPython"),
    ("_ctypes", "CPython"),
    ("libffi", "CPython"),
)


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one run."""

    operation: str
    kind: str
    n: int  # the call that failed
    outcome: str  # "right", "refused", the program that ended the process, or a fault
    detail: str = ""
    where: str = ""  # modules, innermost first

    @property
    def is_fault(self) -> bool:
        return self.outcome.startswith("fault")


# ---- a worker ----


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        yield


def make_inputs(folder: pathlib.Path) -> None:
    """Writes dense.gguf, sparse.gguf, q4.gguf, imatrix.gguf, text.txt, CACHE."""
    sys.path.insert(0, str(ROOT / "tests"))
    from ggml_macko.commands import cli
    from support import gguf_bytes, tiny_models

    dense = folder / "dense.gguf"
    dense.write_bytes(gguf_bytes.write(tiny_models.make("llama")))
    (folder / "text.txt").write_text("".join(random.Random(3).choice("abab cdefgh") for _ in range(200)))
    commands = (
        ["convert", dense, folder / "sparse.gguf"],
        ["convert", dense, folder / "q4.gguf", "sparse-q4"],
        ["calibrate", "-m", dense, "-f", folder / "text.txt", "-o", folder / "imatrix.gguf", "-c", "32"],
    )
    for command in commands:
        if cli.main(list(map(str, command))) != 0:
            raise SystemExit(f"could not make the inputs: {command}")
    time.sleep(3.1)  # a younger model has no cache
    os.environ["XDG_CACHE_HOME"] = str(folder)
    with quiet():
        cli.main(["generate", "-m", str(folder / "sparse.gguf"), "-p", "abab", "-n", "1", "-c", "32", "--cache"])
    if not list((folder / CACHE).glob("*.weights")):
        raise SystemExit("could not make the inputs: no cache")


CACHE = "ggml-macko"  # the weight cache, a folder in XDG_CACHE_HOME


class Run(NamedTuple):
    """A run of an operation in a forked process."""

    status: int  # of waitpid; -1: the process was killed because it hung
    out: str
    err: str
    files: dict[str, bytes]
    n_calls: int
    n_descriptors: int  # left open
    where: str


class Worker:
    """Runs operations in forks of this process, which has run each operation once."""

    def __init__(self, inputs: pathlib.Path, folder: pathlib.Path):
        self.inputs, self.folder = inputs, folder
        self.shim = ctypes.CDLL(None)
        self.shim.fail_nth_arm.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_bool, ctypes.c_void_p, ctypes.c_size_t]
        self.shim.fail_nth_disarm.restype = ctypes.c_long
        self.shared = mmap.mmap(-1, 16 + WHERE_NBYTES)  # numbers and a text from the child
        self.shared_at = ctypes.addressof(ctypes.c_char.from_buffer(self.shared))
        self.right: dict[str, Run] = {}
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def arguments(self, operation: str, n_threads: int) -> list[str]:
        words = OPERATIONS[operation].split()
        values = {"inputs": self.inputs, "out": self.folder / "out.gguf", "t": n_threads}
        return [word.format(**values) for word in words]

    def prepare(self, operation: str) -> None:
        """Imports what the operation needs, in this process and on one thread: threads do not survive a fork."""
        if operation in self.right:
            return
        from ggml_macko.commands import cli

        self.empty_folder(operation)
        with quiet():
            if cli.main(self.arguments(operation, 1)) != 0:
                raise SystemExit(f"{operation}: failed without any injected failure")
        gc.collect()
        run = self.run(operation, Kind(0, False, False), 0)
        if run.status != 0:
            raise SystemExit(f"{operation}: status {run.status} without any injected failure: {run.err}")
        self.right[operation] = run

    def empty_folder(self, operation: str) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        os.environ["XDG_CACHE_HOME"] = str(self.folder)
        if operation == "load cached":
            shutil.copytree(self.inputs / CACHE, self.folder / CACHE)

    def run(self, operation: str, kind: Kind, n: int) -> Run:
        """Runs the operation. n: the call that fails; 0: none."""
        self.empty_folder(operation)
        self.shared[:] = bytes(len(self.shared))
        out, err = (os.memfd_create(name) for name in ("out", "err"))
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self.child(self.arguments(operation, 2), kind, n, out, err)
        status = wait(pid)
        texts = []
        for fd in (out, err):
            texts.append(os.pread(fd, 1 << 20, 0).decode(errors="replace"))
            os.close(fd)
        found = self.folder.rglob("*")
        files = {
            str(p.relative_to(self.folder)): p.read_bytes() if p.is_file() else b"" for p in found if p.name != CACHE
        }
        numbers = memoryview(self.shared)[:16].cast("q")
        where = self.shared[16:].split(b"\0")[0].decode(errors="replace")
        return Run(status, *texts, files, numbers[0], numbers[1], where)

    def child(self, arguments: list[str], kind: Kind, n: int, out: int, err: int) -> None:
        from ggml_macko.commands import cli

        os.dup2(out, 1)
        os.dup2(err, 2)
        numbers = memoryview(self.shared)[:16].cast("q")
        ctypes.CDLL("libgomp.so.1").omp_set_num_threads(2)
        before = len(os.listdir("/proc/self/fd"))
        self.shim.fail_nth_arm(kind.id, n, kind.from_there_on, self.shared_at + 16, WHERE_NBYTES)
        code = 99
        try:
            code = cli.main(arguments)
        except BaseException as e:
            self.shim.fail_nth_disarm()
            sys.stderr.write(f"Traceback of {e!r}\n")
        numbers[0] = self.shim.fail_nth_disarm()
        gc.collect()
        numbers[1] = len(os.listdir("/proc/self/fd")) - before
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def judge(self, operation: str, kind_name: str, n: int) -> Result:
        kind, right = KINDS[kind_name], self.right[operation]
        run = self.run(operation, kind, n)
        outcome, detail = judge(run, right, kind, str(self.folder), str(self.inputs))
        if kind.must_succeed and outcome == "refused":
            outcome = "fault: a short read or write was not repeated"
        return Result(operation, kind_name, n, outcome, detail, run.where)


def wait(pid: int) -> int:
    fd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
    if fd >= 0 and not select.select([fd], [], [], TIMEOUT)[0]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        status = -1
    else:
        status = os.waitpid(pid, 0)[1]
    if fd >= 0:
        os.close(fd)
    return status


def third_party(where: str) -> str:
    """The project whose code made the failing call; "" for this project."""
    for entry in where.split():
        for start, name in THIRD_PARTIES:
            if entry.startswith(start):
                if start == "libgomp":
                    break
                return name
    return ""


def judge(run: Run, right: Run, kind: Kind, folder: str, inputs: str) -> tuple[str, str]:
    """Returns (outcome, detail)."""
    lines = [line for line in run.err.splitlines() if line.startswith("error: ")]
    last = run.err.rstrip().splitlines()[-1:] or [""]
    detail = (lines or last)[-1].replace(folder + "/", "").replace(inputs + "/", "")
    detail = re.sub(r"\.[0-9a-f]{16}\b", ".RANDOM", detail)
    if run.status == -1:
        return "fault: hangs", detail
    code = os.WEXITSTATUS(run.status) if os.WIFEXITED(run.status) else -os.WTERMSIG(run.status)
    if code < 0 or (code != 0 and not lines):
        who = third_party(run.where)
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return who or f"fault: ends with {name}", f"{name}: {detail}"
    if code == 0:
        kept = {name for name in right.files if name.startswith(CACHE)}  # a load without a cache succeeds
        if run.files != {n: f for n, f in right.files.items() if n in run.files or n not in kept} or (
            run.out != right.out
        ):
            return "fault: wrong result", ", ".join(sorted(run.files))
        return "right", ""
    if code != 1 or len(lines) != 1 or "Traceback" in run.err:
        return f"fault: exit code {code}, {len(lines)} lines of errors", detail
    files = {name: data for name, data in run.files.items() if name != "out.gguf.checkpoint"}  # an error loses no work
    left = {name for name in files if files[name] != right.files.get(name) or not name.startswith(CACHE)}
    if left and not (files == right.files and "is complete" in detail):
        return "fault: leaves files behind", f"{sorted(run.files)}: {detail}"
    if run.n_descriptors > right.n_descriptors:
        return third_party(run.where) or "fault: leaves descriptors open", f"leaves descriptors open: {detail}"
    if kind.is_of_file and folder not in lines[0] and inputs not in lines[0]:
        return "fault: names no file", detail
    return "refused", detail


# ---- all operations ----

worker: Worker


def start_worker(inputs: pathlib.Path, number: Any) -> None:
    """Starts a worker in each process of the pool. number: a counter that the processes share."""
    global worker
    with number:
        number.value += 1
        worker = Worker(inputs, inputs / f"work-{number.value}")


def count_calls(operation: str, kind: str) -> int:
    worker.prepare(operation)
    return worker.run(operation, KINDS[kind], 0).n_calls


def judge_calls(operation: str, kind: str, ns: Sequence[int]) -> list[Result]:
    worker.prepare(operation)
    return [worker.judge(operation, kind, n) for n in ns]


def results_of(
    pool: concurrent.futures.Executor, pairs: list[tuple[str, str]], sample: int, seed: int
) -> Iterator[Result]:
    """The results of all calls, or of a random sample of `sample` calls of each operation and kind."""
    rng = random.Random(seed)
    slices: list[tuple[str, str, list[int]]] = []
    for (operation, kind), count in zip(pairs, pool.map(count_calls, *zip(*pairs))):
        ns = list(range(1, count + 1))
        if 0 < sample < count:
            ns = sorted(rng.sample(ns, sample))
        print(f"{operation}, {kind}: {len(ns)} of {count} calls", file=sys.stderr)
        slices += [(operation, kind, ns[i : i + SLICE]) for i in range(0, len(ns), SLICE)]
    begin = time.monotonic()
    for done, found in enumerate(pool.map(judge_calls, *zip(*slices)), 1):
        yield from found
        if done % 50 == 0:
            left = (time.monotonic() - begin) / done * (len(slices) - done)
            print(f"{done} of {len(slices)} slices, {left / 60:.1f} minutes left", file=sys.stderr)


def table(results: Sequence[Result]) -> str:
    """A Markdown table: one row per group of operations and kind."""
    groups: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for r in results:
        groups[r.operation.split()[0], r.kind]["fault" if r.is_fault else r.outcome] += 1
    third = sorted({outcome for counts in groups.values() for outcome in counts} - {"right", "refused", "fault"})
    columns = ["right", "refused", *third, "fault"]
    titles = ["right result", "one line, exit 1", *(f"{name} ends the process or leaks" for name in third), "faults"]
    order = list(KINDS)
    rows = [
        [*key, sum(counts.values()), *(counts[c] for c in columns)]
        for key, counts in sorted(groups.items(), key=lambda item: (item[0][0], order.index(item[0][1])))
    ]
    return tabulate(rows, ["operation", "failing call", "calls", *titles], tablefmt="github")


def summary_of_faults(results: Sequence[Result]) -> list[str]:
    """One line per kind of fault, the most frequent first."""
    kinds: dict[tuple[str, str, str], list[Result]] = collections.defaultdict(list)
    for r in results:
        if r.is_fault:
            kinds[r.operation, r.kind, r.outcome].append(r)
    return [
        f"{len(found)} x {operation}, {kind} {found[0].n}: {outcome}: {found[0].detail} [{found[0].where[:200]}]"
        for (operation, kind, outcome), found in sorted(kinds.items(), key=lambda item: -len(item[1]))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-j", "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="N", help="try N random calls of each kind (default: 0, all)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="SEED", help="seed of the sample (default: 1)")
    parser.add_argument("--only", metavar="REGEX", help="only where OPERATION:KIND matches")
    parser.add_argument("--json", metavar="FILE", help="write every result, one per line")
    args = parser.parse_args()
    pairs = [(o, k) for o in OPERATIONS for k in KINDS if not args.only or re.search(args.only, f"{o}:{k}")]
    if not pairs:
        parser.error(f"--only {args.only}: no OPERATION:KIND matches")
    with tempfile.TemporaryDirectory(prefix="inject-", dir=MEMORY) as name, open(args.json or os.devnull, "w") as f:
        folder = pathlib.Path(name)
        shim = folder / "fail-nth.so"
        subprocess.run(["cc", "-O1", "-g", "-shared", "-fPIC", "-o", str(shim), str(SHIM), "-ldl"], check=True)
        with quiet():
            make_inputs(folder)
        os.environ.update(ENVIRONMENT, LD_PRELOAD=str(shim))  # for the processes of the pool, which are new programs
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(
            args.jobs, context, start_worker, (folder, context.Value("i", 0))
        ) as pool:
            results = []
            for result in results_of(pool, pairs, args.sample, args.seed):
                results.append(result)
                print(json.dumps(dataclasses.asdict(result)), file=f, flush=True)
    print(table(results))
    faults = summary_of_faults(results)
    for line in faults:
        print(line, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
