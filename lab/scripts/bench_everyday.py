#!/usr/bin/env python3
"""Measures everyday uses of a model with the plugin and with llama.cpp's own backend: one token at several depths, a
quantized cache, several sequences, prompts, and some of the layers in host memory.

  python3 tools/build_llama_cpp.py llama-bench llama-batched-bench       # for the plugin: no CUDA backend of llama.cpp
  cmake -S LLAMA_CPP -B cuda -DGGML_CUDA=ON && cmake --build cuda --target llama-bench llama-batched-bench
  lab/scripts/bench_everyday.py build/llama.cpp/bin sparse=sparse.gguf --other cuda/bin F16=f16.gguf Q8_0=q8_0.gguf

Each NAME=MODEL is a column. The first ones run with the plugin, those after --other with that build and no plugin.
Models take turns: each row is measured for all of them before the next one. Flash attention is on, micro-batches have
512 tokens. Prints a table; --json adds a line per figure to a file.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

from tabulate import tabulate

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tests"))
from support import llama_programs as programs  # noqa: E402

SEQUENCES = (2, 4, 8, 16, 32)
PROMPTS = (512, 2048)


class Model(NamedTuple):
    """A column of the table."""

    name: str
    path: str
    folder: pathlib.Path
    """The folder of the programs that run it."""
    plugin: bool


def output_of(model: Model, program: str, *args: object) -> list[dict[str, Any]]:
    """The JSON lines that a program prints. Raises RuntimeError unless it exits with 0."""
    path = model.folder / program
    words = ["-m", model.path, "-fa", 1, *args]
    command = programs.command(path, *words) if model.plugin else [str(path), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise RuntimeError(f"{program} of {model.name} exited with {done.returncode}: {done.stderr[-400:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def tests(model: Model, repetitions: int, *args: object) -> list[dict[str, Any]]:
    """The results of llama-bench, one dictionary per test."""
    return output_of(model, "llama-bench", "-r", repetitions, "-o", "jsonl", *args)


def speed(test: dict[str, Any]) -> str:
    return f"{test['avg_ts']:.0f}"


def milliseconds(test: dict[str, Any]) -> str:
    return f"{1000 * test['n_prompt'] / test['avg_ts']:.0f}"


def decode(model: Model, args: argparse.Namespace, cache: str, depths: list[int]) -> str:
    words = ["-p", 0, "-n", 64, "-d", ",".join(map(str, depths)), "-ctk", cache, "-ctv", cache]
    return " / ".join(speed(test) for test in tests(model, args.repetitions, "-ngl", 99, *words))


def prompts(model: Model, args: argparse.Namespace, cache: str, depth: int) -> str:
    sizes = PROMPTS if depth == 0 else PROMPTS[:1]
    words = ["-p", ",".join(map(str, sizes)), "-n", 0, "-d", depth, "-ctk", cache, "-ctv", cache]
    return " / ".join(milliseconds(test) for test in tests(model, args.repetitions, "-ngl", 99, *words))


def sequences(model: Model, _: argparse.Namespace) -> str:
    """Milliseconds of a step in which each sequence generates a token."""
    steps = 32
    context = max(SEQUENCES) * (16 + steps)
    for _ in range(20):  # its logger may lose the end of its output (llama_programs.run_logged)
        found = output_of(
            model, "llama-batched-bench", "-ngl", 99, "-c", context, "-npp", 16, "-ntg", steps, "-npl",
            ",".join(map(str, SEQUENCES)), "--output-format", "jsonl"
        )  # fmt: skip
        if len(found) == len(SEQUENCES):
            return " / ".join(f"{1000 * row['t_tg'] / steps:.1f}" for row in found)
    raise RuntimeError("llama-batched-bench printed no figures in 20 runs")


def offloaded(model: Model, args: argparse.Namespace) -> str:
    found = tests(model, args.repetitions, "-ngl", args.layers, "-t", args.threads, "-p", 512, "-n", 16)
    return f"{speed(found[1])}, {milliseconds(found[0])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="folder of the programs that run with the plugin")
    parser.add_argument("models", nargs="*", metavar="NAME=MODEL")
    parser.add_argument(
        "--other", nargs="+", default=[], metavar="ARG", help="folder of other programs, and the NAME=MODEL they run"
    )
    parser.add_argument("--depths", default="0,4096,16384", metavar="N,N...", help="(default: %(default)s)")
    parser.add_argument(
        "--rows", default="decode,cache,prompt,sequences", metavar="ROW,...",
        help="decode, cache (the same with one in Q8_0), prompt, sequences, offload (default: %(default)s)"
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=int, default=20, metavar="N", help="layers on the GPU, for offload (default: %(default)s)"
    )
    parser.add_argument("-t", "--threads", type=int, default=16, help="threads for offload (default: %(default)s)")
    parser.add_argument("-r", "--repetitions", type=int, default=3, metavar="N")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    depths = [int(d) for d in args.depths.split(",")]
    other = pathlib.Path(args.other[0]) if args.other else None
    wrong = [word for word in [*args.models, *args.other[1:]] if "=" not in word]
    if wrong:
        parser.error(f"{wrong[0]}: must be NAME=MODEL")
    models = [Model(*word.split("=", 1), args.folder, True) for word in args.models]  # type: ignore[misc]
    models += [Model(*word.split("=", 1), other, False) for word in args.other[1:]]  # type: ignore[misc]
    deepest = depths[-1]
    every = {
        "decode": {f"tok/s at depth {' / '.join(map(str, depths))}": lambda m: decode(m, args, "f16", depths)},
        "prompt": {
            "prompt of 512 / 2048, ms": lambda m: prompts(m, args, "f16", 0),
            f"512 tokens behind {deepest}, ms": lambda m: prompts(m, args, "f16", deepest),
        },
        "cache": {
            f"cache in Q8_0: tok/s at depth 0 / {deepest}": lambda m: decode(m, args, "q8_0", [0, deepest]),
            "cache in Q8_0: prompt of 512 / 2048, ms": lambda m: prompts(m, args, "q8_0", 0),
            f"cache in Q8_0: 512 tokens behind {deepest}, ms": lambda m: prompts(m, args, "q8_0", deepest),
        },
        "sequences": {f"{' / '.join(map(str, SEQUENCES))} sequences, ms": lambda m: sequences(m, args)},
        "offload": {f"{args.layers} layers on the GPU: tok/s, prompt of 512 in ms": lambda m: offloaded(m, args)},
    }
    chosen = args.rows.split(",")
    unknown = [name for name in chosen if name not in every]
    if unknown:
        parser.error(f"--rows {unknown[0]}: must be {', '.join(every)}")
    rows = {name: measure for group in chosen for name, measure in every[group].items()}
    table = []
    for name, measure in rows.items():
        cells = []
        for model in models:
            try:
                cells.append(measure(model))
            except (RuntimeError, IndexError) as problem:
                cells.append("failed")
                print(f"{name}: {problem}", file=sys.stderr, flush=True)
        table.append([name, *cells])
        print(" | ".join(table[-1]), file=sys.stderr, flush=True)
        if args.json:
            with args.json.open("a") as out:
                print(json.dumps({"row": name, **dict(zip((m.name for m in models), cells))}), file=out)
    print(tabulate(table, ["", *(m.name for m in models)], tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
