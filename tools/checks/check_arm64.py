#!/usr/bin/env python3
"""Compares the text of the bundled model, dense and in each TYPE, on an emulated 64-bit Arm and on this machine.

  .venv/bin/python tools/checks/check_arm64.py

Cross-compiles the llama.cpp inside the pinned llama-cpp-python (fetched by pip), the plugin and run-llama.c into
build/arm64-text with g++-aarch64-linux-gnu, and runs them with qemu-user (Debian's names) on CPUs with and without the
extensions of the kernels. Greedy texts must equal those of llama-cpp-python and the plugin on this machine, and texts
of lossless types those of the dense model. Prints a table; exits with 1 if a text differs or a program fails.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import llama_cpp
from tabulate import tabulate

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import build_llama_cpp  # noqa: E402

OUT = ROOT / "build" / "arm64-text"
MODEL = ROOT / "models" / "docs-4m-s70-f16.gguf"
LOSSLESS = ("macko", "ec-csr", "packed", "sparse-lossless")
QUANTIZED = ("sparse-q8", "sparse-q5", "sparse-q4", "sparse-q3")
CPUS = ("cortex-a72", "cortex-a76", "max")
MACKO = (sys.executable, "-m", "ggml_macko.commands.cli")


def compile_program(compiler: str, source: pathlib.Path, libraries: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Compiles tests/support/run-llama.c with the libllama in a folder."""
    include = (f"-I{source}/include", f"-I{source}/ggml/include")
    link = (f"-L{libraries}", "-lllama", f"-Wl,-rpath,{libraries}", f"-Wl,-rpath-link,{libraries}")
    build_llama_cpp.run(compiler, "-o", out, ROOT / "tests" / "support" / "run-llama.c", *include, *link)
    return out


def build(source: pathlib.Path, jobs: int) -> pathlib.Path:
    """Builds everything for arm64; returns the program."""
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake' / 'aarch64-linux-gnu.cmake'}"
    library, plugin = OUT / "llama.cpp", OUT / "plugin"
    parts = [f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP")]
    options = ("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=OFF", *parts)
    build_llama_cpp.run("cmake", "-S", source, "-B", library, toolchain, *options)
    build_llama_cpp.run("cmake", "--build", library, "-j", jobs, "--target", "llama")
    options = (f"-DGGML_MACKO_LLAMA_CPP_DIR={source}", f"-DPython3_EXECUTABLE={sys.executable}")
    off = ("-DGGML_MACKO_CUDA=OFF", "-DGGML_MACKO_TESTS=OFF")
    build_llama_cpp.run("cmake", "-S", ROOT, "-B", plugin, toolchain, *options, *off)
    build_llama_cpp.run("cmake", "--build", plugin, "-j", jobs, "--target", "ggml-macko", "ggml-macko-preload")
    return compile_program("aarch64-linux-gnu-gcc", source, library / "bin", OUT / "run-llama")


def emulated(cpu: str, sparse: bool) -> list[str]:
    """The command for a program for arm64, with the plugin if `sparse`."""
    plugin = OUT / "plugin"
    variables = (
        f"LD_PRELOAD={plugin / 'libggml-macko-preload.so'}",
        f"GGML_MACKO_PLUGIN={plugin / 'libggml-macko.so'}",
    )
    options = [option for variable in variables if sparse for option in ("-E", variable)]
    return ["qemu-aarch64", "-cpu", cpu, "-L", "/usr/aarch64-linux-gnu", *options]


def text_of(command: list[str], model: pathlib.Path, n: int) -> str:
    """The text of a command for the start of the sample, which needs products with many columns of x."""
    prompt = (ROOT / "models" / "sample.txt").read_text()[:240]
    # a waiting thread of llama.cpp's two must not take the core of the other
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    done = subprocess.run(
        [*command, str(model), str(n), prompt], capture_output=True, text=True, timeout=600, env=environment
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} exited with {done.returncode}: {done.stderr[-800:]}")
    return done.stdout


def check(arm64: pathlib.Path, host: pathlib.Path, n: int) -> list[tuple[str, ...]]:
    """A row of the table per type: its name, and the result on each CPU."""
    rows = []
    dense = text_of([str(host)], MODEL, n)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("dense", *LOSSLESS, *QUANTIZED):
            model, sparse = MODEL, name != "dense"
            if sparse:
                model = pathlib.Path(folder) / f"{name}.gguf"
                subprocess.run([*MACKO, "convert", "--quiet", MODEL, model, name], check=True, capture_output=True)
            here = text_of([*(MACKO if sparse else ()), *(("run", "--") if sparse else ()), str(host)], model, n)
            if name not in QUANTIZED and here != dense:
                raise RuntimeError(f"{name}: on this machine the text is not that of the dense model")
            cells = []
            for cpu in CPUS:
                start = time.monotonic()
                same = text_of([*emulated(cpu, sparse), str(arm64)], model, n) == here
                cells.append(f"{'equal' if same else 'DIFFERS'}, {time.monotonic() - start:.1f} s")
            rows.append((name, *cells))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=pathlib.Path, metavar="DIR", help="a llama.cpp tree of that version")
    parser.add_argument("-n", type=int, default=48, help="tokens (default: 48)")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    try:
        source = args.source or build_llama_cpp.fetch(build_llama_cpp.tested_range()[1], ROOT / "build")
        start = time.monotonic()
        arm64 = build(source.resolve(), args.jobs)
        print(f"built in {time.monotonic() - start:.0f} s", file=sys.stderr)
        libraries = pathlib.Path(llama_cpp.__file__).parent / "lib"
        rows = check(arm64, compile_program("cc", source, libraries, OUT / "run-llama-here"), args.n)
    except (subprocess.CalledProcessError, RuntimeError) as e:
        sys.exit(f"error: {e}")
    except FileNotFoundError as e:
        sys.exit(f"error: {e.filename} not found")
    print(tabulate(rows, headers=("TYPE", *CPUS)))
    if "DIFFERS" in str(rows):
        sys.exit("error: a text differs")


if __name__ == "__main__":
    main()
