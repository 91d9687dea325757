#!/usr/bin/env python3
"""Compares sparse and dense models of llama.cpp's architectures: the table in docs/design/architectures.md.

  python3 tools/checks/check_architectures.py             all of the installed llama.cpp, about five minutes on 2 cores
  python3 tools/checks/check_architectures.py mamba rwkv7 these
  python3 tools/checks/check_architectures.py --table docs/design/architectures.md   all, into the file
  python3 tools/checks/check_architectures.py --gpu -j 8  also on the GPU, sparse and dense
  python3 tools/checks/check_architectures.py --rows FILE --gpu --table PAGE      from the output of --json

For each architecture, the tool builds a random model of a few hundred kilobytes (tests/support/architectures.py),
prunes it to 70 % zeros and converts it. It loads the dense and the sparse file with GGML_MACKO_LOAD=sparse-only and
compares the logits (or embeddings, if the model has no logits) of a batch and of single tokens after it. With --gpu, it
also loads both files on the GPU and compares them with dense on the CPU; if both differ, sparse weights are not the
cause. It also prints the splits of llama.cpp's graph, for a prompt and for one token, and the operations on the CPU: a
model that stays on the GPU has two splits, because the CPU looks up the embeddings of tokens. Each step has a separate
process, because a failed assertion of llama.cpp ends the process. The tool prints one line per model, and exits with 1
if one differs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import json
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

SPARSITY = 0.7
N_BATCH, N_ONE_BY_ONE = 64, 4
MAX_NMSE = 1e-4
"""Largest mean squared difference of the outputs over their mean square, as in llama.cpp's test-llama-archs."""
MIN_EFFECT = 1e-3
"""Smallest effect of pruning on the outputs (NMSE), below which they are no test of the weights."""

ALL_LAYERS = 999

FORBIDDEN = 1e30
"""Largest magnitude of a logit; forbidden tokens have -FLT_MAX."""

# architectures without a model, and the reason
NOT_BUILT = {
    "clip": "an image or audio encoder, which llama.cpp opens as `--mmproj`: it stays dense",
    "gptj": "llama.cpp has the name, but no code for it",
    "gemma4-assistant": "a draft model, which runs beside its target only",
    "eagle3": "a draft model, which runs beside its target only",
    "dflash": "a draft model, which runs beside its target only",
    "graniteswitch": "not tried: a model with adapters inside, of which llama.cpp's own test builds none",
    "wavtokenizer-dec": "an audio decoder of convolutions: it has no matrix that could be stored sparse",
}
BEGIN, END = "<!-- begin: tools/checks/check_architectures.py -->", "<!-- end -->"


# ---- steps, each in a separate process ----


def build(folder: pathlib.Path, arch: str) -> dict[str, Any]:
    """Makes raw.gguf, dense.gguf, which is pruned, and sparse.gguf."""
    import ggml_macko
    from support import architectures
    from support.gguf_bytes import write

    raw = folder / "raw.gguf"
    raw.write_bytes(write(architectures.make(arch, arch in architectures.EXPERTS)))
    ggml_macko.prune(raw, folder / "dense.gguf", ggml_macko.PruneOptions(sparsity=SPARSITY))
    report = ggml_macko.convert(folder / "dense.gguf", folder / "sparse.gguf")
    if report.load_error is not None:
        raise SystemExit(report.load_error)
    sparse = [t for t in report.tensors if t.is_sparse]
    n_elements = sum(t.n_elements for t in report.tensors)
    return {"n_sparse": len(sparse), "share": sum(t.n_elements for t in sparse) / n_elements}


def outputs(path: pathlib.Path, arch: str, gpu: bool = False) -> npt.NDArray[np.float32]:
    """Logits or embeddings of every token: of a batch, then of single tokens."""
    import llama_cpp.llama_cpp as api

    from ggml_macko import register
    from support import architectures

    register()
    embeddings = arch in architectures.EMBEDDING
    params = api.llama_model_default_params()
    params.n_gpu_layers = ALL_LAYERS if gpu else 0
    params.use_extra_bufts = False  # on CPUs with AMX, llama.cpp stops at the small matrices of MLA with them
    model = api.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise SystemExit("not loaded")
    vocab = api.llama_model_get_vocab(model)
    n_vocab = max(api.llama_vocab_n_tokens(vocab), 1)
    has_decoder, has_encoder = api.llama_model_has_decoder(model), api.llama_model_has_encoder(model)
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 4 * N_BATCH
    params.n_threads = params.n_threads_batch = 2
    params.embeddings = embeddings
    context = api.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("no context")
    n_out = api.llama_model_n_embd_out(model) if embeddings else n_vocab
    tokens = np.random.default_rng(1).integers(0, n_vocab, N_BATCH + N_ONE_BY_ONE).tolist()

    def evaluate(batch: list[int], start: int, function: Any) -> list[npt.NDArray[np.float32]]:
        b = api.llama_batch_init(len(batch), 0, 1)
        b.n_tokens = len(batch)
        for i, token in enumerate(batch):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0], b.logits[i] = token, start + i, 1, 0, True
        code = function(context, b)
        api.llama_batch_free(b)
        if code != 0:
            raise SystemExit(f"llama.cpp returned {code}")
        rows = []
        for i in range(len(batch)):
            get = api.llama_get_embeddings_ith if embeddings else api.llama_get_logits_ith
            row = ctypes.cast(get(context, i), ctypes.POINTER(ctypes.c_float))
            rows.append(np.ctypeslib.as_array(row, (n_out,)).copy())
        return rows

    if not has_decoder:
        return np.array(evaluate(tokens[:N_BATCH], 0, api.llama_encode))
    if has_encoder:
        evaluate(tokens[:N_BATCH], 0, api.llama_encode)
    rows = evaluate(tokens[:N_BATCH], 0, api.llama_decode)
    for i in range(N_BATCH, N_BATCH if embeddings else len(tokens)):
        rows += evaluate(tokens[i : i + 1], i, api.llama_decode)
    return np.array(rows)


def nmse(x: npt.NDArray[np.float32], reference: npt.NDArray[np.float32]) -> float:
    allowed = np.abs(reference) < FORBIDDEN
    return float(np.mean((x - reference)[allowed] ** 2) / np.mean(reference[allowed] ** 2))


def compare(folder: pathlib.Path, arch: str) -> dict[str, Any]:
    """Compares the models on the CPU, and stores the output of the dense model."""
    found = {}
    for name in ("raw", "dense", "sparse"):
        (folder / "at").write_text(name)
        found[name] = outputs(folder / f"{name}.gguf", arch)
    raw, dense, sparse = found.values()
    np.save(folder / "dense.npy", dense)
    return {"effect": nmse(raw, dense), "nmse": nmse(sparse, dense)}


def graph_splits(log: str) -> dict[str, Any]:
    """The splits of the graphs of a prompt and of one token, and the operations on the CPU except look-ups of rows.

    llama.cpp's log has only the first ten letters of an operation. Graphs before the last line with splits do not run:
    llama.cpp tries whether the device has flash attention.
    """
    last = list(re.finditer(r"splits = (\d+)(?: / (\d+))?", log))[-1]
    nodes = re.findall(r"^node +#.*?\( *(\S+)\):.*?\[ *(\S+)", log[last.end() :], re.MULTILINE)
    on_cpu = sorted({op for op, device in nodes if device == "CPU" and op != "GET_ROWS"})
    return {"splits": [int(last[1]), int(last[2] or last[1])], "cpu_ops": on_cpu}


def compare_on_gpu(folder: pathlib.Path, arch: str) -> dict[str, Any]:
    """Compares the sparse and the dense model on the GPU with the dense one on the CPU."""
    import llama_cpp.llama_cpp as api

    lines: list[str] = []

    @api.llama_log_callback
    def keep(_level: int, text: bytes, _data: Any) -> None:
        lines.append(text.decode(errors="replace"))
        sys.stderr.write(lines[-1])

    api.llama_log_set(keep, None)
    on_cpu = np.load(folder / "dense.npy")
    sparse = nmse(outputs(folder / "sparse.gguf", arch, gpu=True), on_cpu)
    log = "".join(lines)
    sizes = re.findall(r"(\S+) model buffer size = +([\d.]+) MiB", log)
    on_gpu = sum(float(size) for device, size in sizes if re.fullmatch(r"MACKO\d+", device))
    if on_gpu == 0:
        raise SystemExit("no weight is on a GPU")
    found = {"gpu_nmse": sparse, "gpu_share": on_gpu / sum(float(size) for _, size in sizes), **graph_splits(log)}
    print(json.dumps(found), flush=True)  # the dense model may fail
    return {**found, "gpu_dense_nmse": nmse(outputs(folder / "dense.gguf", arch, gpu=True), on_cpu)}


# a process that has imported the packages forks for each step: importing takes more CPU time than a step
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["__main__", "ggml_macko", "llama_cpp", "support.architectures", "support.gguf_bytes"])
STEPS = {"build": build, "compare": compare, "gpu": compare_on_gpu}

# ---- all architectures ----


def run_step(name: str, folder: pathlib.Path, arch: str) -> None:
    """Runs a step in this process, which has been forked for it, with output in files of the folder."""
    for number, stream in (1, "stdout"), (2, "stderr"):
        os.dup2(os.open(folder / stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if name == "gpu":
        os.environ["GGML_SCHED_DEBUG"] = "2"
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print(json.dumps(STEPS[name](folder, arch)), flush=True)


def step(name: str, folder: pathlib.Path, arch: str) -> tuple[dict[str, Any], str]:
    """The result of a step, and the reason of a failure or an empty text. Only the step "gpu" has GPUs."""
    process = PROCESSES.Process(target=run_step, args=(name, folder, arch))
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        return {}, "did not end within two minutes"
    printed = [line for line in (folder / "stdout").read_text().splitlines() if line.startswith("{")]
    found = json.loads(printed[-1]) if printed else {}
    if process.exitcode == 0:
        return found, ""
    from support import architectures

    other = f"signal {-process.exitcode}" if process.exitcode < 0 else None
    return found, re.sub(r"^.*/llama\.cpp/", "", architectures.reason(folder / "stderr", other))


def check(arch: str, gpu: bool) -> dict[str, Any]:
    """A row of the table."""
    if arch in NOT_BUILT:
        return {"arch": arch, "why": NOT_BUILT[arch]}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        row, why = step("build", folder, arch)
        if not why:
            compared, why = step("compare", folder, arch)
            row.update(compared)
        if why and (folder / "at").exists() and (folder / "at").read_text() != "sparse":
            why = f"llama.cpp itself, with the dense model: {why}"
        row.update(arch=arch, why=why)
        if gpu and not why:
            on_gpu, row["gpu_why"] = step("gpu", folder, arch)
            row.update(on_gpu)
    if not why and not row["effect"] >= MIN_EFFECT:
        row["why"] = f"the output hardly depends on the pruned weights (NMSE {row['effect']:.1e})"
    elif not why and not row["nmse"] <= MAX_NMSE:
        row["why"] = f"the output differs from dense (NMSE {row['nmse']:.1e})"
    elif row.get("gpu_why") == "" and not row["gpu_nmse"] <= MAX_NMSE:
        row["gpu_why"] = (
            f"the output differs from dense on the CPU (NMSE {row['gpu_nmse']:.1e}; "
            f"that of dense on the GPU: {row['gpu_dense_nmse']:.1e})"
        )
    return row


def check_all(names: list[str], gpu: bool, jobs: int) -> Iterator[dict[str, Any]]:
    """Rows in the order in which they finish; without names, for all architectures."""
    from support import architectures

    # read when the process starts that forks for each step; waiting threads must not take a core
    os.environ.update({"GGML_MACKO_LOAD": "sparse-only", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"})
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:  # each waits for its processes
        checks = [pool.submit(check, name, gpu) for name in names or architectures.names()]
        for done in concurrent.futures.as_completed(checks):
            yield done.result()


def table_row(row: dict[str, Any], gpu: bool) -> str:
    cells = [row["arch"], "", "", row["why"]]
    if not row["why"]:
        cells[1:] = [str(row["n_sparse"]), f"{100 * row['share']:.0f} %", f"{row['nmse']:.0e}"]
    if gpu:
        cells += [f"{row[name]:.0e}" if name in row else "" for name in ("gpu_nmse", "gpu_dense_nmse")]
        cells += [f"{100 * row['gpu_share']:.0f} %" if "gpu_share" in row else ""]
        cells += ["{}, {}".format(*row["splits"]) if "splits" in row else "", ", ".join(row.get("cpu_ops", []))]
        cells[4] = row.get("gpu_why") or cells[4]
    return f"| {' | '.join(cells)} |"


def write_table(page: pathlib.Path, rows: list[dict[str, Any]], gpu: bool) -> None:
    import llama_cpp

    works = sum(not row["why"] for row in rows)
    text = page.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    title = f"With llama-cpp-python {llama_cpp.__version__} on the CPU, {works} of {len(rows)}"
    columns = ["architecture", "sparse tensors", "of the weights", "CPU: difference of the output, or why not"]
    if gpu:
        title += f"; on the GPU, {sum(row.get('gpu_why') == '' for row in rows)}"
        title += f", {sum(row.get('splits') == [2, 2] for row in rows)} of them with two splits"
        columns += ["GPU: difference, or why not", "GPU: dense", "weights on the GPU"]
        columns += ["splits: prompt, token", "operations on the CPU"]
    lines = [
        f"\n{title}:\n",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
        *(table_row(row, gpu) for row in sorted(rows, key=lambda row: str(row["arch"]))),
        "",
    ]
    page.write_text(text[:begin] + "\n".join(lines) + text[end:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="ARCHITECTURE", nargs="*")
    parser.add_argument("--gpu", action="store_true", help="also compare on the GPU")
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="architectures at a time")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument(
        "--rows", type=pathlib.Path, metavar="FILE", help="read rows that --json printed, and run no comparison"
    )
    parser.add_argument("--table", type=pathlib.Path, metavar="PAGE", help="write the table into this page")
    parser.add_argument("--step", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        name, folder, arch = args.step
        print(json.dumps(STEPS[name](pathlib.Path(folder), arch)))
        return 0
    if args.rows is not None:
        rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    else:
        rows = []
        for row in check_all(args.names, args.gpu, args.jobs):
            rows.append(row)
            print(json.dumps(row) if args.json else table_row(row, args.gpu), flush=True)
    if args.table is not None:
        write_table(args.table, rows, args.gpu)
    failed = [row for row in rows if (row["why"] or row.get("gpu_why")) and row["arch"] not in NOT_BUILT]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
