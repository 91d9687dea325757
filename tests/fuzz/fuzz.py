#!/usr/bin/env python3
"""Coverage-guided fuzzing of model files and matrices with libFuzzer (tests/fuzz/).

  python3 tests/fuzz/fuzz.py build build/fuzz                with clang: programs without its libraries at run time
  python3 tests/fuzz/fuzz.py run build/fuzz --seconds 480    one process per core; a table, new inputs and crashes
  python3 tests/fuzz/fuzz.py merge build/fuzz                the fewest new inputs with the same coverage, to corpus/
  .venv/bin/python tests/fuzz/fuzz.py grammars --count 1000000    random grammars, in processes of ggml_macko.grammar

Each target is built with the address and undefined-behavior sanitizers and, several times faster, without them.
`run` needs only Python: copy this file and the folder to another x86-64 machine without compiler or network. An input
of more than 5 s is a hang; a process may use 512 MB. The exit code is 1 after a crash, a hang or too much memory.

`tools/dev.py test` also runs the stored inputs and mutants of them, with any compiler.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# name -> largest input, as in tests/fuzz/fuzz-NAME.cpp, and share of the processes
TARGETS = {
    "header": (8192, 3),
    "model": (8192, 3),
    "payload": (4096, 3),
    "encode": (2048, 2),
    "products": (2048, 2),
    "compress": (8192, 1),
    "split": (8192, 2),
}
VARIANTS = {"sanitized": "ON", "plain": "OFF"}
HANG_SECONDS, RSS_MB = 5, 512
MAX_STOPS = 20
"""Stops of one target after which it is not restarted, because it finds the same bug again."""
KINDS_OF_STOPS = ("timeout", "out-of-memory")
"""libFuzzer's names of stops without a crash."""
DICTIONARY_OF = (
    "gguf/model-keys.cpp",
    "load/activation-keys.cpp",
    "load/sparse-header.cpp",
    "load/file-shards.cpp",
)


def run_build(*command: object, env: dict[str, str] | None = None) -> None:
    print("+", " ".join(str(c) for c in command), file=sys.stderr, flush=True)
    subprocess.run([str(c) for c in command], check=True, cwd=ROOT, stdout=sys.stderr, env=env)


def write_dictionary(path: pathlib.Path) -> None:
    """Writes the strings in the header checks: names of keys, suffixes, architectures."""
    words: set[str] = set()
    for source in DICTIONARY_OF:
        text = (ROOT / "ggml-macko" / "src" / source).read_text()
        words.update(re.findall(r'"([A-Za-z][\w.\-]{2,40}|\.[a-z_.]{2,40})"', text))
    path.write_text("".join(f'"{word}"\n' for word in sorted(words)))


def build(args: argparse.Namespace) -> None:
    """Makes FOLDER/VARIANT/fuzz-NAME, FOLDER/corpus/NAME (seeds and stored inputs) and FOLDER/gguf.dict."""
    env = {**os.environ, "CC": args.clang, "CXX": f"{args.clang}++"}
    generator = ["-GNinja"] if shutil.which("ninja") else []
    for variant in args.variants:
        out = args.folder / "build" / variant
        run_build(
            "cmake", "-S", ROOT, "-B", out.resolve(), *generator, "-DGGML_MACKO_FUZZ=ON",
            f"-DGGML_MACKO_SANITIZE={VARIANTS[variant]}", "-DGGML_MACKO_PLUGIN=OFF", "-DGGML_MACKO_CUDA=OFF", env=env,
        )  # fmt: skip
        run_build("cmake", "--build", out.resolve(), "-j", args.jobs)
        (args.folder / variant).mkdir(parents=True, exist_ok=True)
        for name in TARGETS:
            shutil.copy2(out / f"fuzz-{name}", args.folder / variant)
    for name in TARGETS:
        corpus = args.folder / "corpus" / name
        corpus.mkdir(parents=True, exist_ok=True)
        program = args.folder / args.variants[0] / f"fuzz-{name}"
        run_build(program.resolve(), f"--write-seeds={corpus.resolve()}")
        for stored in sorted((CORPUS / name).iterdir()):
            shutil.copy2(stored, corpus)
    write_dictionary(args.folder / "gguf.dict")


# ---- a campaign ----


@dataclasses.dataclass
class Worker:
    """A process that fuzzes one target, and its successors after stops."""

    name: str
    variant: str
    folder: pathlib.Path
    out: pathlib.Path
    number: int
    process: subprocess.Popen[str] | None = None
    log: pathlib.Path = pathlib.Path()
    executions: int = 0
    stops: int = 0
    started: float = 0
    seconds: float = 0
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def start(self, seconds: float) -> None:
        max_len, _ = TARGETS[self.name]
        self.log = self.out / "logs" / f"{self.name}-{self.variant}-{self.number}.{self.stops}"
        options = {
            "max_total_time": max(1, int(seconds)), "timeout": HANG_SECONDS, "rss_limit_mb": RSS_MB,
            "max_len": max_len, "print_final_stats": 1, "reload": 1, "seed": 1 + self.number * 1000 + self.stops,
            "dict": self.folder / "gguf.dict", "artifact_prefix": f"{self.out / 'crashes'}/{self.name}-",
            # half of the processes also use compared values, which is slower and deeper
            "use_value_profile": self.number % 2,
        }  # fmt: skip
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0:quarantine_size_mb=8:handle_abort=1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    str(self.folder / self.variant / f"fuzz-{self.name}"),
                    *(f"-{key}={value}" for key, value in options.items()),
                    str(self.out / "corpus" / self.name),
                    str(self.folder / "corpus" / self.name),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
        self.started = time.monotonic()

    def finish(self) -> bool:
        """Adds the counts of the process. Returns whether it stopped at an input; one input can stop several."""
        assert self.process is not None
        text = self.log.read_text(errors="replace")
        counts = re.findall(r"^stat::number_of_executed_units: *(\d+)", text, re.MULTILINE)
        last = re.findall(r"^#(\d+)\t", text, re.MULTILINE)  # if the end of the log is missing
        self.executions += int(counts[-1] if counts else last[-1] if last else 0)
        self.seconds += time.monotonic() - self.started
        stopped = self.process.returncode != 0
        self.process = None
        self.stops += stopped
        if stopped:
            self.kinds[next((kind for kind in KINDS_OF_STOPS if f"libFuzzer: {kind}" in text), "crash")] += 1
        return stopped


def distribute(n: int, names: list[str], plain: float) -> list[tuple[str, str]]:
    """Targets and variants of n processes: one of each target first, then by the targets' shares."""
    order = names + [name for k in range(1, 4) for name in names if TARGETS[name][1] > k]
    chosen = [order[i % len(order)] for i in range(n)]
    # the share `plain` of the processes of a target has no sanitizers; the first process has them
    nth = [chosen[:i].count(name) for i, name in enumerate(chosen)]
    return [(name, "plain" if int((k + 1) * plain) > int(k * plain) else "sanitized") for name, k in zip(chosen, nth)]


def campaign(args: argparse.Namespace, names: list[tuple[str, str]], seconds: float) -> list[Worker]:
    workers = [Worker(name, variant, args.folder, args.out, i) for i, (name, variant) in enumerate(names)]
    end = time.monotonic() + seconds
    for worker in workers:
        worker.start(seconds)
    while any(w.process for w in workers):
        time.sleep(0.2)
        left = end - time.monotonic()
        for worker in workers:
            if worker.process is None:
                continue
            if left < -2 * HANG_SECONDS - 20:
                worker.process.kill()
            if worker.process.poll() is None:
                continue
            if worker.finish() and left > 2 and worker.stops < MAX_STOPS:
                worker.start(left)
    return workers


def edges(args: argparse.Namespace, name: str) -> int:
    """Edges of the program that its old and new inputs reach."""
    variant = next(v for v in VARIANTS if (args.folder / v / f"fuzz-{name}").exists())
    done = subprocess.run(
        [str(args.folder / variant / f"fuzz-{name}"), "-runs=0", str(args.out / "corpus" / name),
         str(args.folder / "corpus" / name)],
        capture_output=True, text=True, errors="replace", env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
    )  # fmt: skip
    found = re.findall(r"cov: (\d+)", done.stderr)
    return int(found[-1]) if found else 0


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    for folder in ("logs", "crashes", *(f"corpus/{name}" for name in TARGETS)):
        (args.out / folder).mkdir(parents=True, exist_ok=True)
    names = distribute(args.workers, args.targets or list(TARGETS), args.plain)
    start = time.monotonic()
    rounds = [[n] for n in names] if args.one_by_one else [names]
    workers = [w for part in rounds for w in campaign(args, part, args.seconds / len(rounds))]
    elapsed = time.monotonic() - start
    rows = [("target", "processes", "executions", "seconds", "per second", "edges", "crashes", "hangs", "over 512 MB")]
    total, bad = 0, 0
    for name in TARGETS:
        of_target = [w for w in workers if w.name == name]
        if not of_target:
            continue
        n, seconds = sum(w.executions for w in of_target), sum(w.seconds for w in of_target)
        stops = [sum(w.kinds[kind] for w in of_target) for kind in ("crash", *KINDS_OF_STOPS)]
        plain = sum(w.variant == "plain" for w in of_target)
        rows.append(
            (name, f"{len(of_target) - plain} + {plain}", f"{n:,}", f"{seconds:.0f}", f"{n / max(seconds, 1):,.0f}",
             str(edges(args, name)), *map(str, stops))
        )  # fmt: skip
        total += n
        bad += sum(stops)
    rows.append(("all", str(len(workers)), f"{total:,}", f"{elapsed:.0f}", f"{total / elapsed:,.0f}", "", "", "", ""))
    print(table(rows))
    print("processes: sanitized + plain; seconds: of all processes together, and of the campaign in the last row")
    if bad:
        print(f"inputs that stopped a target: {args.out / 'crashes'}", file=sys.stderr)
        sys.exit(1)


def merge(args: argparse.Namespace) -> None:
    """Stores new inputs, up to 2 KiB each, that add coverage to the stored ones and the seeds."""
    for name in TARGETS:
        program = args.folder / args.variant / f"fuzz-{name}"
        merged = args.folder / "merged" / name
        shutil.rmtree(merged, ignore_errors=True)
        merged.mkdir(parents=True)
        sources = [args.folder / "corpus" / name, args.out / "corpus" / name]
        limit = [f"-max_len={min(TARGETS[name][0], args.max_nbytes)}"]
        command = [program.resolve(), "-merge=1", *limit, merged, *(s for s in sources if s.exists())]
        subprocess.run(
            [str(c) for c in command], check=True, stderr=subprocess.DEVNULL,
            env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        )  # fmt: skip
        known = {p.read_bytes() for p in (args.folder / "corpus" / name).glob("seed-*")}
        found = [p for p in merged.iterdir() if p.read_bytes() not in known]
        found = sorted(found, key=lambda p: (p.stat().st_size, p.name))
        step = max(1, -(-len(found) // args.max_files))
        found = found[::-step]  # of all sizes, because small inputs are refused early
        for path in found:
            shutil.copy2(path, args.into / name / path.name[:16])
        print(f"{name}: {len(found)} inputs, {sum(p.stat().st_size for p in found):,} bytes")


def grammars(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from support import generators, random_grammars

    start = time.monotonic()
    seen = random_grammars.run(args.model or generators.DEMO, args.count, args.seed, args.workers)
    rows = [(f"{n:,}", text) for text, n in seen.most_common()]
    print(table([("grammars", "answer"), *rows, (f"{sum(seen.values()):,}", "all")]))
    print(f"{time.monotonic() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("build", help="compile the targets with clang")
    one.add_argument("folder", type=pathlib.Path)
    one.add_argument("--clang", default="clang", help="C compiler; its C++ compiler has ++ after the name")
    one.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    one.add_argument("-j", "--jobs", type=int, default=CPUS)
    one.set_defaults(func=build)
    one = commands.add_parser("run", help="fuzz, and print a table")
    one.add_argument("folder", type=pathlib.Path)
    one.add_argument("--seconds", type=float, default=60)
    one.add_argument("--workers", type=int, default=CPUS, help="processes (default: one per core)")
    one.add_argument(
        "--plain", type=float, default=0.5, metavar="SHARE", help="share of the processes without sanitizers"
    )
    one.add_argument("--targets", nargs="+", choices=list(TARGETS), default=[])
    one.add_argument(
        "--one-by-one", action="store_true", help="one process at a time, with an equal share of the seconds"
    )
    one.add_argument("--out", type=pathlib.Path, help="new inputs, crashes and logs (default: FOLDER/out)")
    one.set_defaults(func=run)
    one = commands.add_parser("merge", help="store useful new inputs in the repository")
    one.add_argument("folder", type=pathlib.Path)
    one.add_argument("--out", type=pathlib.Path, help="output of run (default: FOLDER/out)")
    one.add_argument("--into", type=pathlib.Path, default=CORPUS)
    one.add_argument("--variant", choices=list(VARIANTS), default="plain")
    one.add_argument("--max-files", type=int, default=40, help="largest number per target")
    one.add_argument("--max-nbytes", type=int, default=2048, help="largest size of an input")
    one.set_defaults(func=merge)
    one = commands.add_parser("grammars", help="follow random grammars; a table of the answers")
    one.add_argument("--count", type=int, default=10_000)
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--workers", type=int, default=CPUS, help="threads with a process each (default: one per core)")
    one.add_argument("--model", type=pathlib.Path, help="whose vocabulary (default: the bundled model)")
    one.set_defaults(func=grammars)
    args = parser.parse_args()
    if getattr(args, "out", "") is None:
        args.out = args.folder / "out"
    try:
        args.func(args)
    except subprocess.CalledProcessError as e:
        sys.exit(f"error: {' '.join(e.cmd[:3])} ... failed with exit code {e.returncode}")
    except FileNotFoundError as e:
        sys.exit(f"error: {e.filename} not found")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
