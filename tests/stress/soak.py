#!/usr/bin/env python3
"""Loads a model, generates a few tokens and frees it, thousands of times. No resource may grow.

  python3 tests/stress/soak.py --cycles 5000                    on the CPU
  python3 tests/stress/soak.py --cycles 1000 --gpu              on the first GPU, which no other program may use

The cycles alternate between the formats of a small random model, with compression on load among them; each must
generate the same tokens every time. Prints a table of the resident memory, descriptors and threads of this process, and
of the free memory of the GPU. After a warm-up of a tenth of the cycles, the slope of the resident memory may be at most
--max-slope, and the others must not be worse at the end; otherwise, the exit code is 1. Needs the package and
llama-cpp-python.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import numpy as np

from ggml_macko import Llama, convert
from ggml_macko.native import devices

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SHAPE = ["--layers", "2", "--embd", "128", "--ff", "256", "--heads", "4", "--kv-heads", "2", "--vocab", "400"]
FORMATS = ("macko", "packed", "ec-csr", "sparse-q4")
TOKENS = [5, 17, 42, 99]
N_GENERATED = 6
MAX_GPU_NBYTES = 2 << 20
"""Fluctuation of the free memory that the driver itself causes."""


def make_models(folder: pathlib.Path) -> list[tuple[str, pathlib.Path, bool]]:
    """(label, path, whether to compress on load) of each kind of load."""
    dense = folder / "dense.gguf"
    make = [sys.executable, str(ROOT / "tools" / "make_random_llama.py"), *SHAPE, "--type", "f16", "--density", "0.3"]
    subprocess.run([*make, str(dense)], check=True, stdout=subprocess.DEVNULL)
    models = [("dense", dense, False), ("compressed on load", dense, True)]
    for kind in FORMATS:
        path = folder / f"{kind}.gguf"
        convert(str(dense), str(path), kind)
        models.append((kind, path, False))
    return models


def generate(path: pathlib.Path, compress: bool, args: argparse.Namespace, flash_attn: bool) -> list[int]:
    llama = Llama(
        str(path), compress=compress, n_ctx=64, n_batch=64, n_threads=args.threads, n_threads_batch=args.threads,
        n_gpu_layers=-1 if args.gpu else 0, flash_attn=flash_attn, verbose=False,
    )  # fmt: skip
    try:
        return list(itertools.islice(llama.generate(TOKENS, temp=0.0), N_GENERATED))
    finally:
        llama.close()


def measure(gpu: bool) -> tuple[int, int, int, int]:
    """Resident KiB, descriptors and threads of this process, and free bytes of the GPU."""
    match = re.search(r"^VmRSS:\s+(\d+)", pathlib.Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match
    descriptors, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return int(match[1]), descriptors, threads, devices.gpus()[0].free if gpu else 0


def soak(args: argparse.Namespace, models: list[tuple[str, pathlib.Path, bool]]) -> np.ndarray:
    """A row of measure() for each cycle."""
    first: dict[tuple[str, bool], list[int]] = {}
    seen = []
    start = time.monotonic()
    print("| cycles | seconds | resident MiB | descriptors | threads |" + (" GPU free MiB |" if args.gpu else ""))
    print("|---|---|---|---|---|" + ("---|" if args.gpu else ""))
    for i in range(args.cycles):
        label, path, compress = models[i % len(models)]
        flash_attn = i // len(models) % 2 == 1
        tokens = generate(path, compress, args, flash_attn)
        if tokens != first.setdefault((label, flash_attn), tokens):
            sys.exit(f"error: cycle {i}, {label}: {tokens}, not {first[label, flash_attn]}")
        gc.collect()
        seen.append(measure(args.gpu))
        if (i + 1) % args.every == 0 or i == len(models) - 1 or i == args.cycles - 1:
            rss, descriptors, threads, free = seen[-1]
            print(
                f"| {i + 1:,} | {time.monotonic() - start:.0f} | {rss / 1024:.1f} | {descriptors} | {threads} |"
                + (f" {free / (1 << 20):.1f} |" if args.gpu else ""),
                flush=True,
            )
    return np.array(seen)


def problems(seen: np.ndarray, max_slope: float) -> list[str]:
    """Messages for the resources that grew."""
    seen = seen[len(seen) // 10 :]
    slope = float(np.polyfit(np.arange(len(seen)), seen[:, 0], 1)[0]) if len(seen) > 1 else 0.0
    print(f"\nresident memory behind the warm-up: {slope:+.3f} KiB per cycle, at most {max_slope} are allowed")
    found = [] if slope <= max_slope else [f"resident memory grows by {slope:.2f} KiB per cycle"]
    for column, what in ((1, "descriptors"), (2, "threads")):
        before, after = seen[:20, column].max(), seen[-1, column]
        if after > before:
            found.append(f"{after} {what}, {before} after the warm-up")
    lost = seen[:20, 3].min() - seen[-1, 3]
    if lost > MAX_GPU_NBYTES:
        found.append(f"{lost / (1 << 20):.1f} MiB of GPU memory are gone")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=5000)
    parser.add_argument("--gpu", action="store_true", help="all layers on the first GPU")
    parser.add_argument("--threads", type=int, default=2, help="threads of generation (default: 2)")
    parser.add_argument("--every", type=int, metavar="CYCLES", help="cycles per row of the table (default: a tenth)")
    parser.add_argument(
        "--max-slope", type=float, default=1.0, metavar="KIB", help="largest slope per cycle (default: 1)"
    )
    args = parser.parse_args()
    if args.cycles < 1:
        parser.error("--cycles: at least 1")
    args.every = args.every or max(1, args.cycles // 10)
    if args.gpu and not devices.gpus():
        sys.exit("error: no GPU, or a build without CUDA")
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = problems(soak(args, make_models(pathlib.Path(folder))), args.max_slope)
    except KeyboardInterrupt:
        sys.exit(130)
    if found:
        sys.exit("error: " + "; ".join(found))


if __name__ == "__main__":
    main()
