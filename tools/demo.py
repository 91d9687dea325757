#!/usr/bin/env python3
"""Shows the effect of sparse weights on this machine, in two parts and one table. `tools/dev.py demo` runs it.

1. The bundled model, trained with 70 % zeros: prune, convert, verify bit for bit, generate the same text. --dense
   MODEL.gguf adds that model, pruned to 30 % and to 50 % zeros. A model of 4 M weights does not become faster.
2. A random model large enough to be limited by memory, generated in a few seconds and deleted at the end, with 50 % and
   70 % zeros: file size, memory and speed compared with the same model in dense F16 and Q8_0.

It runs the installed package from any folder. Files of part 1 remain in demo-out/ there; part 2 needs 1 GB of disk
temporarily. GGML_MACKO_CPU_KERNELS selects the kernels, as always.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

from tabulate import tabulate

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUNDLED = ROOT / "models" / "docs-4m-s70-f16.gguf"
GENERATOR = ROOT / "tools" / "make_random_llama.py"
SAMPLE = ROOT / "models" / "sample.txt"
OUT = pathlib.Path("demo-out")
PROMPT = "The function returns"
N_TOKENS = 48
# F16 weights of 380 MB, more than caches hold, so that reading them limits the generation
SHAPE = [
    "--layers=4",
    "--embd=2048",
    "--ff=5632",
    "--heads=32",
    "--kv-heads=8",
    "--vocab=4096",
    "--ctx=512",
    "--tied",
    "--smallest",
]
DENSITIES = (0.5, 0.3)
MAX_SPREAD = 1.15  # largest over smallest speed of one model; runs that differ more are repeated
MAX_ROUNDS = 4  # of three runs each


class Row(NamedTuple):
    """A line of the table: a measured model, and the speed that it is compared with."""

    model: str
    weights: str
    nbytes: int
    measured: dict[str, Any]  # of `macko bench --json`
    gen_tps: list[float]  # per run
    dense_tps: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.gen_tps) / statistics.median(self.dense_tps)


def spread(speeds: list[float]) -> float:
    return max(speeds) / min(speeds)


def macko(*args: object, quiet: bool = False) -> str:
    """Runs a subcommand and returns its standard output."""
    command = [sys.executable, "-m", "ggml_macko.commands.cli", *map(str, args)]
    print("\n$ macko " + " ".join(shown(a) for a in args), flush=True)
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE if quiet else None, text=True
    )
    if not quiet and done.stdout:
        print(done.stdout, end="" if done.stdout.endswith("\n") else "\n")
    return done.stdout


def shown(argument: object) -> str:
    if isinstance(argument, pathlib.Path):
        argument = argument.relative_to(ROOT) if ROOT in argument.parents else argument.name
    text = str(argument)
    return f'"{text}"' if " " in text else text


def generated_text(path: pathlib.Path) -> str:
    return macko("generate", "-m", path, "-p", PROMPT, "-n", N_TOKENS, "--temp", 0, quiet=True).strip()


def perplexity(path: pathlib.Path) -> str:
    """The perplexity of the sample text, with its error."""
    return macko("perplexity", "-m", path, "-f", SAMPLE, quiet=True).strip().split("PPL = ")[1]


def bench(label: str, models: dict[str, pathlib.Path], gpu: bool, n_gen: int = 64) -> list[Row]:
    """Measures the models in turn, each run in a process of its own; the first one is the dense baseline."""
    dense, *others = models.values()
    command = ["bench", "--dense", dense, "-p", 128, "-n", n_gen, "-r", 3, "--json", *(["--gpu"] if gpu else [])]
    for path in others:
        command += ["-m", path]
    speeds: list[list[float]] = [[] for _ in models]
    for _ in range(MAX_ROUNDS):
        measured = json.loads(macko(*command, quiet=True))["models"]
        for runs, found in zip(speeds, measured):
            runs += [sample["gen_tps"] for sample in found["samples"]]
        if max(map(spread, speeds)) <= MAX_SPREAD:
            break
    return [
        Row(label, weights, path.stat().st_size, found, runs, speeds[0])
        for (weights, path), found, runs in zip(models.items(), measured, speeds)
    ]


def compare(model: pathlib.Path, sparsity: float, per: str, label: str, gpu: bool) -> list[Row]:
    """Prunes and converts a model, compares the results, and measures it dense and sparse."""
    stem = f"{model.stem}-{sparsity:.0%}".rstrip("%")
    dense, sparse = OUT / f"{stem}.gguf", OUT / f"{stem}-sparse.gguf"
    macko("prune", model, dense, "--sparsity", sparsity, "--compare-within", per, "--force", quiet=True)
    macko("convert", dense, sparse, "--force", quiet=True)
    macko("verify", dense, sparse)
    dense_text, text = generated_text(dense), generated_text(sparse)
    print(text)
    if dense_text != text:
        sys.exit(f"error: {sparse.name} and {dense.name} write different texts")
    print(f"perplexity of {SAMPLE.name}: dense {perplexity(dense)}, sparse {perplexity(sparse)}")
    return bench(label, {"dense F16": dense, "sparse": sparse}, gpu)


def compare_large(folder: pathlib.Path, gpu: bool) -> list[Row]:
    """Measures a random model at two densities. Both dense files have the same size, so one of them is the baseline."""
    from ggml_macko.benchmark.forms import quantize

    models = {"dense F16": folder / "dense.gguf", "dense Q8_0": folder / "q8_0.gguf"}
    for density in DENSITIES:
        dense, sparse = folder / f"dense-{density}.gguf", folder / f"sparse-{density}.gguf"
        print(f"\n# a random model, its smallest {100 - 100 * density:.0f} % of the weights zero", flush=True)
        subprocess.run([sys.executable, GENERATOR, *SHAPE, f"--density={density}", dense], check=True)
        macko("convert", dense, sparse, quiet=True)
        models[f"sparse, {100 - 100 * density:.0f} % zeros"] = sparse
        dense.replace(models["dense F16"])
    quantize(models["dense F16"], models["dense Q8_0"], "Q8_0", 0)
    return bench("random, 190 M", models, gpu, n_gen=32)


def print_table(rows: list[Row], gpu: bool, version: str) -> None:
    from ggml_macko.system import available_cores

    found = re.search(r"CPU kernels: ([^,]+), GPU: (.*)", version)
    kernels, gpus = found.groups() if found else ("unknown", "unknown")
    where = f"GPU: {gpus}" if gpu else f"CPU, {available_cores()} cores, sparse kernels: {kernels}"
    memory = "gpu_memory" if gpu else "rss"
    table = [
        [
            row.model,
            row.weights,
            f"{row.nbytes / 2**20:.1f}",
            f"{row.measured[memory] / 2**20:.0f}",
            f"{row.measured['prompt_tps']:.0f}",
            f"{statistics.median(row.gen_tps):.1f}",
            f"{min(row.gen_tps):.1f} to {max(row.gen_tps):.1f}",
            f"{row.ratio:.2f}x",
        ]
        for row in rows
    ]
    headers = [
        "model",
        "weights",
        "file MiB",
        "GPU MiB" if gpu else "memory MiB",
        "prompt tok/s",
        "generate tok/s",
        "of all runs",
        "speed to dense F16",
    ]
    print(f"\n{where}; medians of interleaved runs; dense models run in llama.cpp's own kernels\n")
    print(tabulate(table, headers, tablefmt="github", disable_numparse=True))
    print(f"\n{conclusion(rows)}")


def conclusion(rows: list[Row]) -> str:
    """Reports a difference only if the runs of two models do not overlap."""
    best = max((row for row in rows if row.weights.startswith("sparse,")), key=lambda row: row.ratio)
    low, high = min(best.gen_tps) / max(best.dense_tps), max(best.gen_tps) / min(best.dense_tps)
    if max(spread(best.gen_tps), spread(best.dense_tps)) > MAX_SPREAD:
        return (
            f"The runs of one model differ too much ({low:.2f} to {high:.2f} times dense F16): this machine is too "
            "busy to compare speeds."
        )
    if low > 1:
        return f"The same weights ({best.weights}), bit for bit, generate {best.ratio:.2f} times as fast as dense F16."
    return f"Sparse is not faster than dense F16 here ({best.ratio:.2f}x at best): its gain on this machine is memory."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dense", type=pathlib.Path, metavar="MODEL.gguf", help="dense F16 or BF16 model to prune as well"
    )
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    version = macko("--version")
    gpu = "GPU: none" not in version

    # trained with 70 % zeros: pruning each tensor at its own sparsity only makes its negative zeros positive, so the
    # files are the same bit for bit
    rows = compare(BUNDLED, 0.7, "tensor", "bundled, 70 % zeros", gpu)
    if args.dense:
        for sparsity in (0.3, 0.5):
            label = f"{args.dense.stem}, {sparsity:.0%} pruned"
            rows += compare(args.dense.resolve(), sparsity, "row", label, gpu)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        rows += compare_large(pathlib.Path(folder), gpu)
    print_table(rows, gpu, version)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as e:
        sys.stderr.write(e.stderr or "")
        sys.exit(f"error: {' '.join(map(str, e.cmd[2:6]))} ... failed with exit code {e.returncode}")
    except KeyboardInterrupt:
        sys.exit(130)
