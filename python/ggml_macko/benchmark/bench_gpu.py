"""`macko bench --gpu`: sparse matrix times vector on the GPU, against cuBLAS and cuSPARSE.

The measurement is a part of the plugin (tools/bench-spmv-gpu.cu). It prints and ends its process at the first error, so
it runs in a child process; this module starts that, is its main module, and presents the results.
"""

from __future__ import annotations

import ctypes
import json
import math
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .. import console, errors
from ..benchmark import plot
from ..native import bindings

DENSITIES = "0.9,0.8,0.7,0.6,0.5,0.4,0.3,0.2,0.1,0.05"
VALUES = ("f16", "q8_0", "q4_0")

TUNE_SHAPES = "4096x4096,11008x4096,4096x11008,4096x14336,32000x4096"
TUNE_DENSITIES = "0.5,0.3"
_TUNE_VALUES = "f16,pruned-8"
"""F16 at random places, and with 8 significant bits, pruned by magnitude: what the two main layouts are for."""
_TUNE_COLUMNS = "4,8,16,32,64"

ERROR = "bench-spmv-gpu: "
"""What a line of the measurement begins with that says why it ends."""


def is_built() -> bool:
    """Whether the plugin was built with CUDA, and so has the measurement; there may be no GPU all the same."""
    return hasattr(_plugin(), "ggml_macko_bench_spmv_gpu")


def _require_built() -> None:
    if not is_built():
        raise errors.error(errors.LOAD_FAILED, "the plugin was built without CUDA")


def _plugin() -> ctypes.CDLL:
    bindings.version()  # loads the plugin, with the libggml-base that it needs
    return ctypes.CDLL(str(bindings.LIBRARY_PATH))


def main(arguments: list[str]) -> int:
    """Calls the plugin's measurement with options like a program's (tools/bench-spmv-gpu.cu) and returns its status."""
    _require_built()
    argv = [b"bench-spmv-gpu", *(argument.encode() for argument in arguments)]
    return int(_plugin().ggml_macko_bench_spmv_gpu(len(argv), (ctypes.c_char_p * (len(argv) + 1))(*argv)))


def bench_matrices(shapes: str, densities: str, cusparse: bool, values: str = "f16") -> list[dict[str, Any]]:
    """Measures every shape and density in a child process.

    shapes, densities, values: the measurement's options. Returns one dictionary per line of its --json file: rows,
    cols, density, times in microseconds, bytes, bandwidths in bytes per second. Raises LoadError if it fails, with what
    the measurement said of that, or with the signal that ended it.
    """
    options = ["--shapes", shapes, "--densities", densities, "--values", values]
    return _measure([*options, "--csr"] if cusparse else options)


def tune(shapes: str = TUNE_SHAPES, densities: str = TUNE_DENSITIES) -> list[dict[str, Any]]:
    """Measures every choice of the plugin for every shape and density, in a child process.

    Returns the lines that tools/bench-tune-gpu.cuh describes. Raises LoadError as bench_matrices() does.
    """
    options = ["--shapes", shapes, "--densities", densities, "--values", _TUNE_VALUES, "--columns", _TUNE_COLUMNS]
    return _measure(["--tune", *options])


def _measure(options: list[str]) -> list[dict[str, Any]]:
    """The lines of the --json file of a measurement with these options. Raises LoadError; see bench_matrices()."""
    _require_built()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results"
        command = [sys.executable, "-m", __name__, *options, "--json", str(out)]
        problem = ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
            assert program.stdout is not None
            try:
                for line in program.stdout:
                    console.log(line.strip())
                    if line.startswith(ERROR):
                        problem = line[len(ERROR) :].strip()
            except BaseException:
                program.kill()
                raise
        if program.returncode != 0:
            raise errors.error(errors.LOAD_FAILED, problem or f"the measurement {_end(program.returncode)}")
        return [json.loads(line) for line in out.read_text().splitlines()]


def _end(code: int) -> str:
    """How a process ended that said nothing: by an exit code, or by a signal if that is negative."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {int(s): s.name for s in signal.Signals}
    return f"was ended by {names.get(-code, f'signal {-code}')}"


def geometric_means(results: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(density, geometric mean of the speedup over the shapes)"""
    by_density: dict[float, list[float]] = {}
    for r in results:
        if r["speedup"] > 0:
            by_density.setdefault(r["density"], []).append(math.log(r["speedup"]))
    return [(d, math.exp(sum(logs) / len(logs))) for d, logs in by_density.items()]


def print_matrices(results: list[dict[str, Any]]) -> None:
    rows = [
        [
            f"{r['rows']}x{r['cols']}",
            r["density"],
            round(r["nbytes"] / 1e6, 1),
            round(r["nbytes"] / (2 * r["rows"] * r["cols"]), 3),
            round(min(r["us"], r["chained_us"]), 1),
            round(r["dense_us"], 1) if r["dense_us"] else None,
            round(r["csr_us"], 1) if r["csr_us"] else None,
            f"{r['bandwidth'] / r['read_bandwidth']:.0%}",
            f"{r['speedup']:.2f}x" if r["dense_us"] else None,
        ]
        for r in results
    ]
    headers = ["shape", "density", "MB", "of dense", "us", "cuBLAS us", "cuSPARSE us", "of bandwidth", "vs cuBLAS"]
    print(console.table(rows, headers, "g"))
    first = results[0]
    print(f"\n{first['gpu']}, {first['date']}, read bandwidth {first['read_bandwidth'] / 1e12:.2f} TB/s (measured)")
    for density, mean in geometric_means(results):
        print(f"density {density:g}: {mean:.2f}x cuBLAS, geometric mean of the shapes")


def draw(results: list[dict[str, Any]], path: str, force: bool = False) -> None:
    """Draws speed and bandwidth into a file. Raises MackoError if it exists without force."""
    products = [
        plot.Product(
            (r["rows"], r["cols"]), r["density"], r["speedup"], r["nbytes"], r["bandwidth"] / r["read_bandwidth"]
        )
        for r in results
    ]
    title = f"sparse products, {results[0]['gpu']}, {results[0]['date']}"
    plot.save_as(plot.draw_products(products, geometric_means(results), title), path, force)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
