"""Speed on this machine: `macko bench` (matrix times vector, by shape and density) and `macko bench -m MODEL` (tokens
per second); with --gpu on the GPU.

The baseline on the CPU is llama.cpp itself: ggml's kernels on a dense matrix of the same shape, or the same model
dense. On the GPU it is cuBLAS, or the same model dense on the same device. Runs of the things compared are
interleaved, and medians are reported.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from .. import console, errors
from ..benchmark import bench_gpu
from ..codecs import c_library, ggml_quants
from ..commands.arguments import add_gpu_layers
from ..conversion.restore import restore
from ..gguf.files import Model
from ..native import bindings
from ..sparse_matrix import SparseMatrix

WORKING_SET = 256 << 20  # dense bytes that a round walks through, so that weights come from memory and not from a cache
SHAPES = "4096x4096,4096x11008,11008x4096,2048x8192"
DENSITIES = "0.5,0.3,0.1"
DENSE_TYPES = {"F16": 1, "Q8_0": 8, "Q4_K": 12}  # name -> ggml type id


# ---- matrix times vector ----


class _InitParams(ctypes.Structure):  # struct ggml_init_params
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class GgmlMatVec:
    """ggml's own y = W x on the CPU, for n_copies dense random matrices."""

    def __init__(self, type_id: int, rows: int, cols: int, n_copies: int):
        self._base = base = ggml_quants.library()
        self._cpu = ctypes.CDLL("libggml-cpu.so.0")
        pointer, i64 = ctypes.c_void_p, ctypes.c_int64
        for library, name, result, arguments in (
            (base, "ggml_init", pointer, [_InitParams]),
            (base, "ggml_free", None, [pointer]),
            (base, "ggml_new_tensor_1d", pointer, [pointer, ctypes.c_int, i64]),
            (base, "ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, i64, i64]),
            (base, "ggml_nbytes", ctypes.c_size_t, [pointer]),
            (base, "ggml_get_data", pointer, [pointer]),
            (base, "ggml_mul_mat", pointer, [pointer, pointer, pointer]),
            (base, "ggml_new_graph", pointer, [pointer]),
            (base, "ggml_build_forward_expand", None, [pointer, pointer]),
            (self._cpu, "ggml_graph_compute_with_ctx", ctypes.c_int, [pointer, pointer, ctypes.c_int]),
        ):
            getattr(library, name).restype = result
            getattr(library, name).argtypes = arguments
        nbytes = base.ggml_row_size(type_id, cols) * rows
        self._context = base.ggml_init(
            _InitParams(n_copies * (nbytes + 64 * (rows + cols) + (1 << 16)) + (64 << 20), None, False)
        )
        if not self._context:
            raise errors.error(errors.BAD_ARGUMENT, "ggml could not get memory for a dense matrix")
        x = base.ggml_new_tensor_1d(self._context, 0, cols)
        rng = np.random.default_rng(1)
        values = rng.standard_normal(cols, dtype=np.float32)
        ctypes.memmove(base.ggml_get_data(x), values.ctypes.data, values.nbytes)
        # repeated: quantizing all rows takes longer
        pattern = ggml_quants.quantize(rng.standard_normal((min(rows, 64), cols), dtype=np.float32), type_id).tobytes()
        self._graph = base.ggml_new_graph(self._context)
        for _ in range(n_copies):
            w = base.ggml_new_tensor_2d(self._context, type_id, cols, rows)
            for at in range(0, nbytes, len(pattern)):
                ctypes.memmove(base.ggml_get_data(w) + at, pattern, min(len(pattern), nbytes - at))
            base.ggml_build_forward_expand(self._graph, base.ggml_mul_mat(self._context, w, x))

    def run(self, n_threads: int) -> None:
        """One product with each copy."""
        if self._cpu.ggml_graph_compute_with_ctx(self._context, self._graph, n_threads):
            raise errors.error(errors.BAD_ARGUMENT, "ggml failed to compute")

    def close(self) -> None:
        self._base.ggml_free(self._context)


def bench_matrix(rows: int, cols: int, densities: list, n_threads: int, repetitions: int) -> list:
    """A result per density: seconds per product, sparse and dense."""
    n_copies = max(1, min(64, WORKING_SET // (rows * cols * 2)))
    rng = np.random.default_rng(0)
    dense = {
        name: GgmlMatVec(type_id, rows, cols, n_copies)
        for name, type_id in DENSE_TYPES.items()
        if cols % 256 == 0 or name == "F16"
    }
    x = rng.standard_normal((1, cols), dtype=np.float32)
    out = []
    try:
        for density in densities:
            w = rng.standard_normal((rows, cols), dtype=np.float32).astype(np.float16)
            w[rng.random((rows, cols), dtype=np.float32) >= density] = 0
            sparse = SparseMatrix.from_dense(w)
            copies = [c_library.CpuMatrix(sparse.arrays) for _ in range(n_copies)]

            def run_sparse(copies: list = copies) -> None:
                for c in copies:
                    c.mul_mat(x, n_threads)

            runs = {"macko": run_sparse, **{name: lambda d=d: d.run(n_threads) for name, d in dense.items()}}
            times: dict = {name: [] for name in runs}
            for _ in range(repetitions + 1):
                for name, function in runs.items():
                    begin = time.perf_counter()
                    function()
                    times[name].append((time.perf_counter() - begin) / n_copies)
            out.append(
                {
                    "rows": rows,
                    "cols": cols,
                    "density": density,
                    "effective_density": sparse.effective_density,
                    "delta_bits": sparse.arrays.delta_bits,
                    "nbytes_memory": copies[0].nbytes,
                    "seconds": {
                        name: statistics.median(t[1:]) for name, t in times.items()
                    },  # the first round warms up
                }
            )
    finally:
        for d in dense.values():
            d.close()
    return out


# ---- models ----


def measure_once(model: Path, args: argparse.Namespace, threads: int) -> dict:
    request = {
        "model": str(model),
        "n_prompt": args.n_prompt,
        "n_gen": args.n_gen,
        "threads": threads,
        "gpu_layers": args.gpu_layers,
    }
    done = subprocess.run(
        [sys.executable, "-m", "ggml_macko.benchmark.bench_worker", json.dumps(request)],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise errors.error(errors.LOAD_FAILED, f"{model}: {lines[-1]}")
    return json.loads(done.stdout)


def bench_models(models: list, args: argparse.Namespace, threads: int) -> list:
    """models: (label, path); the first is the baseline. Each round runs every model once, in turn."""
    samples: dict = {label: [] for label, _ in models}
    for i in range(args.repetitions):
        for label, path in models:
            console.log(f"round {i + 1}/{args.repetitions}: {label}")
            samples[label].append(measure_once(path, args, threads))
    out = []
    for label, path in models:
        runs = samples[label]
        with Model(path) as model:
            nbytes = model.nbytes
        median = {k: None if runs[0][k] is None else statistics.median(r[k] for r in runs) for k in runs[0]}
        out.append({"model": label, "nbytes": nbytes, **median, "samples": runs})
    return out


# ---- command ----

HELP = "measure speed on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Without -m: matrix times vector for random matrices, against ggml's dense F16, Q8_0 and Q4_K kernels, or with "
        "--gpu against cuBLAS. With -m: load time, prompt and generation tokens/s and peak memory of models, each run "
        "in its own process, against the same model dense."
    )
    parser.add_argument("--gpu", action="store_true", help="measure on the GPU; with -m: all layers there (-ngl all)")
    parser.add_argument(
        "-m", "--model", metavar="FNAME", action="append", default=[], help="sparse or dense GGUF; may be repeated"
    )
    parser.add_argument(
        "--dense",
        metavar="FNAME",
        help="dense GGUF to compare with (default: the first sparse model, restored into a temporary file)",
    )
    parser.add_argument("-p", "--n-prompt", type=int, default=128, metavar="N", help="prompt tokens (default: 128)")
    parser.add_argument("-n", "--n-gen", type=int, default=64, metavar="N", help="tokens to generate (default: 64)")
    add_gpu_layers(parser, None, "all: as many as there are (default: 0, with --gpu all)")
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads (default: all cores)")
    parser.add_argument(
        "-r", "--repetitions", type=int, default=5, metavar="N", help="rounds, of which medians are taken (default: 5)"
    )
    parser.add_argument(
        "--shapes",
        metavar="ROWSxCOLS,...",
        help=f"matrices without -m (default: {SHAPES}; with --gpu the 31 shapes of the MACKO paper)",
    )
    parser.add_argument(
        "--densities",
        metavar="D,...",
        help=f"densities without -m (default: {DENSITIES}; with --gpu {bench_gpu.DENSITIES})",
    )
    parser.add_argument(
        "--cusparse", action="store_true", help="with --gpu: CSR products of cuSPARSE, too (slow to set up)"
    )
    parser.add_argument(
        "--values",
        choices=bench_gpu.VALUES,
        default="f16",
        help="with --gpu: how the non-zeros are stored, plain or packed and quantized (default: f16)",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="with --gpu: draw speed and bandwidth into this file (PNG, PDF, SVG)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, all samples included")


def run(args: argparse.Namespace) -> int:
    threads = args.threads or len(os.sched_getaffinity(0))
    if args.repetitions < 1 or args.n_prompt < 0 or args.n_gen < 0:
        raise errors.error(errors.BAD_ARGUMENT, "-r must be at least 1; -p and -n must not be negative")
    if (args.plot or args.cusparse or args.values != "f16") and (args.model or not args.gpu):
        raise errors.error(errors.BAD_ARGUMENT, "--plot, --cusparse and --values are for --gpu without -m")
    if args.gpu_layers is None:
        args.gpu_layers = -1 if args.gpu else 0
    about = {"threads": threads, "kernels": bindings.cpu_kernels(), "version": bindings.version()}
    if args.gpu:
        about["devices"] = [description for _, description, _, _ in bench_gpu.devices()]
        if not about["devices"]:
            raise errors.error(errors.LOAD_FAILED, f"--gpu needs a GPU, and there is {bindings.gpus()}")
    if not args.model:
        return run_matrices(args, threads, about)
    with contextlib.ExitStack() as stack:
        models = [(Path(m).name, Path(m)) for m in args.model]
        labels = {str(m): m.name for _, m in models}
        if len(set(labels.values())) != len(models):
            raise errors.error(errors.BAD_ARGUMENT, "two models have the same file name")
        if args.dense:
            models.insert(0, (f"{Path(args.dense).name} (dense)", Path(args.dense)))
        else:
            restored = restore_first_sparse(models, stack)
            if restored is not None:
                models.insert(0, restored)
        results = bench_models(models, args, threads)
    if args.json:
        console.print_json({**about, "n_prompt": args.n_prompt, "n_gen": args.n_gen, "models": results})
    else:
        print_models(results, args)
        print(
            f"\n{threads} threads, kernels: {about['kernels']}; medians of {args.repetitions} interleaved runs, "
            "each in its own process"
        )
    return 0


def run_matrices(args: argparse.Namespace, threads: int, about: dict) -> int:
    default_shapes, default_densities = ("paper", bench_gpu.DENSITIES) if args.gpu else (SHAPES, DENSITIES)
    shapes, densities = args.shapes or default_shapes, args.densities or default_densities
    parsed_shapes = [] if shapes == "paper" else parse_shapes(shapes)
    parsed_densities = parse_densities(densities)
    results = []
    if args.gpu:
        results = bench_gpu.bench_matrices(shapes, densities, args.cusparse, args.values)
        if args.plot:
            bench_gpu.plot(results, args.plot)
    else:
        for rows, cols in parsed_shapes:
            console.log(f"{rows}x{cols} ...")
            results += bench_matrix(rows, cols, parsed_densities, threads, args.repetitions)
    if args.json:
        console.print_json({**about, "matrices": results})
    elif args.gpu:
        bench_gpu.print_matrices(results)
    else:
        print_matrices(results)
        print(f"\n{threads} threads, kernels: {about['kernels']}; times are medians of {args.repetitions} rounds")
    return 0


def restore_first_sparse(models: list, stack: contextlib.ExitStack) -> tuple | None:
    """(label, path) of a dense twin of the first sparse model, in a temporary folder beside it, if there is one."""
    for label, path in models:
        with Model(path) as model:
            if not model.is_sparse:
                continue
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".macko-bench-", dir=path.resolve().parent))
            console.log(f"restoring {label} ...")
            with console.quiet():
                done = restore(path, Path(folder) / "dense.gguf")
            return f"{label} (dense)", done.path
    return None


def parse_shapes(text: str) -> list:
    try:
        shapes = [tuple(int(n) for n in item.split("x")) for item in text.split(",")]
        if not all(len(s) == 2 and min(s) > 0 for s in shapes):
            raise ValueError
    except ValueError:
        raise errors.error(errors.BAD_ARGUMENT, f"--shapes {text}: expected ROWSxCOLS,...") from None
    return shapes


def parse_densities(text: str) -> list:
    try:
        densities = [float(item) for item in text.split(",")]
        if not all(0 <= d <= 1 for d in densities):
            raise ValueError
    except ValueError:
        raise errors.error(errors.BAD_ARGUMENT, f"--densities {text}: expected numbers from 0 to 1") from None
    return densities


def print_matrices(results: list) -> None:
    rows = []
    for r in results:
        seconds = r["seconds"]
        rows.append(
            [
                f"{r['rows']}x{r['cols']}",
                r["density"],
                round(r["effective_density"], 4),
                round(r["nbytes_memory"] / (r["rows"] * r["cols"] * 2), 4),
                round(seconds["macko"] * 1e6, 1),
                *(round(seconds[name] * 1e6, 1) if name in seconds else None for name in DENSE_TYPES),
                f"{seconds['F16'] / seconds['macko']:.2f}x",
            ]
        )
    headers = [
        "shape",
        "density",
        "eff. density, file",
        "in memory",
        "macko us",
        *(f"{n} us" for n in DENSE_TYPES),
        "speed vs F16",
    ]
    print(console.table(rows, headers, "g"))


def print_models(results: list, args: argparse.Namespace) -> None:
    base = results[0]

    def ratio(r: dict, key: str) -> str | None:
        return None if r[key] is None else f"{r[key]:.2f} ({r[key] / base[key]:.2f}x)"

    gpu = [] if base["gpu_memory"] is None else ["GPU memory"]
    rows = [
        [
            r["model"],
            f"{r['nbytes'] / console.MIB:.1f} MiB ({r['nbytes'] / base['nbytes']:.2f}x)",
            f"{r['rss'] / console.MIB:.0f} MiB ({r['rss'] / base['rss']:.2f}x)",
            *(f"{r['gpu_memory'] / console.MIB:.0f} MiB ({r['gpu_memory'] / base['gpu_memory']:.2f}x)" for _ in gpu),
            ratio(r, "load_s"),
            ratio(r, "prompt_tps"),
            ratio(r, "gen_tps"),
        ]
        for r in results
    ]
    print(
        console.table(
            rows, ["model", "file", "peak RSS", *gpu, "load s", f"pp{args.n_prompt} t/s", f"tg{args.n_gen} t/s"]
        )
    )
