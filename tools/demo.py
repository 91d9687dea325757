#!/usr/bin/env python3
"""The main job, shown on real models: prune, convert, verify, generate, and a table of what it brings. `tools/dev.py demo` runs it.

Works on the bundled model, which was trained with 70 % zeros; with --dense MODEL.gguf also prunes that model to 30 % and 50 % zeros.
It runs what is installed, from any folder; everything it writes goes to demo-out/ there.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys

from tabulate import tabulate

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUNDLED = ROOT / "models" / "docs-4m-s70-f16.gguf"
SAMPLE = ROOT / "models" / "sample.txt"
OUT = pathlib.Path("demo-out")
PROMPT = "The function returns"
N_TOKENS = 48


def macko(*args: object, quiet: bool = False) -> str:
    command = [sys.executable, "-m", "ggml_macko.commands.cli", *map(str, args)]
    print("\n$ macko " + " ".join(_shown(a) for a in args), flush=True)
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE if quiet else None, text=True
    )
    if not quiet and done.stdout:
        print(done.stdout, end="" if done.stdout.endswith("\n") else "\n")
    return done.stdout


def _shown(argument: object) -> str:
    if isinstance(argument, pathlib.Path) and ROOT in argument.parents:
        argument = argument.relative_to(ROOT)
    text = str(argument)
    return f'"{text}"' if " " in text else text


def words(path: pathlib.Path) -> str:
    return macko("generate", "-m", path, "-p", PROMPT, "-n", N_TOKENS, "--temp", 0, quiet=True).strip()


def perplexity(path: pathlib.Path) -> str:
    """Of the sample text, with its error."""
    return macko("perplexity", "-m", path, "-f", SAMPLE, quiet=True).strip().split("PPL = ")[1]


def compare(dense: pathlib.Path, sparse: pathlib.Path, label: str) -> list:
    """Verifies that sparse is dense, bit for bit, and returns the two table rows."""
    macko("verify", dense, sparse)
    texts = {path: words(path) for path in (dense, sparse)}
    print(texts[sparse])
    if texts[dense] != texts[sparse]:
        sys.exit(f"error: {sparse.name} and {dense.name} write different texts")
    speeds = json.loads(
        macko("bench", "-m", sparse, "--dense", dense, "-p", 128, "-n", 64, "-r", 3, "--json", quiet=True)
    )
    rows = []
    for path, kind, s in zip((dense, sparse), ("dense F16", "sparse"), speeds["models"]):
        rows.append(
            [label, kind, f"{path.stat().st_size / 2**20:.2f}", f"{s['rss'] / 2**20:.0f}", f"{s['prompt_tps']:.0f}", f"{s['gen_tps']:.0f}",
             perplexity(path), texts[path][:40]]
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dense", type=pathlib.Path, metavar="MODEL.gguf", help="dense F16 or BF16 model to prune as well"
    )
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)

    rows = []
    # training left half of the zeros negative (-0.0), which a lossless file must keep: pruning each tensor at its own sparsity makes them
    # plain zeros and changes nothing else
    jobs = [(BUNDLED, 0.7, "tensor", "bundled, 70 % zeros")]
    if args.dense:
        jobs += [(args.dense.resolve(), s, "row", f"{args.dense.stem}, {s:.0%} pruned") for s in (0.3, 0.5)]
    for model, sparsity, per, label in jobs:
        stem = f"{model.stem}-{sparsity:.0%}".rstrip("%")
        dense, sparse = OUT / f"{stem}.gguf", OUT / f"{stem}-macko.gguf"
        macko("prune", model, dense, "--sparsity", sparsity, "--per", per, "--force", quiet=True)
        macko("convert", dense, sparse, "--force", quiet=True)
        macko("inspect", sparse)
        rows += compare(dense, sparse, label)
    headers = ["model", "weights", "file MiB", "peak RSS MiB", "prompt tok/s", "gen tok/s", "perplexity", "first words"]
    print("\n" + tabulate(rows, headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as e:
        sys.stderr.write(e.stderr or "")
        sys.exit(f"error: {' '.join(map(str, e.cmd[2:6]))} ... failed with exit code {e.returncode}")
    except KeyboardInterrupt:
        sys.exit(130)
