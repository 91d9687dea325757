#!/usr/bin/env python3
"""Measures models with the plugin and with llama.cpp's own CUDA backend in one run: one token, steps of several
sequences, prompts, and speculation. By default, the models have this year's architectures.

  cmake -S LLAMA_CPP -B cuda -DGGML_BACKEND_DL=ON -DGGML_NATIVE=OFF -DGGML_CUDA=ON -DGGML_CUDA_GRAPHS=ON
  cmake --build cuda --target ggml-cuda
  lab/scripts/bench_architectures.py folder --cuda cuda/bin/libggml-cuda.so --json speeds.jsonl

LLAMA_CPP is the source that the same llama-cpp-python contains. Its ggml folder alone has no CUDA graphs by default.

The folder gets random models of the widths of real ones, with a few layers, fewer experts and a small vocabulary. Those
that it already has are not built again. Experts are F16, also those of gpt-oss, whose files have MXFP4. All layers of a
model, and all of its experts, have the same random weights. Half of the weights of blocks are pruned by magnitude, or
the percentage that the name of a column has: sparse-q4@70.

With --draft, a smaller model of the same type proposes tokens one by one, and the model checks them in one batch. As
the weights are random, a fixed random sequence decides which tokens count as accepted.

A column named "other sparse-q4" runs the package in the folder that --other-package names, to compare two versions.

The columns of an architecture take turns on the GPU; each has a process of its own, since a failed assertion ends it.
Without --cuda, all of them run on the CPU. Prints medians of the repetitions, in milliseconds, and speeds relative to
llama.cpp's; --json adds a line per figure to a file.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import functools
import json
import math
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tabulate import tabulate

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tests"))
from support import architectures, gguf_bytes, other_device  # noqa: E402
from support.architectures import Shape  # noqa: E402

PERCENT = 50
"""Of the weights of blocks that are pruned, by default."""
MICRO_BATCH = 512
ALL_LAYERS = 999
TIMEOUT = 120
"""Seconds after which a process that loads or measures a model is stopped."""


class Wide(NamedTuple):
    """A model as wide as a real one."""

    shape: Shape
    n_experts: int = 0
    keys: dict[str, Any] = {}
    """Metadata that differ from those of the small model; None: without this key."""
    absent: str = "$^"
    """A regular expression of optional tensors that the real model does not have."""
    arch: str = ""
    """The architecture, unless it is the name."""


BIASES = r"(attn|ffn)_\w+\.bias"
HEADS_128 = {"attention.head_count": 32, "attention.head_count_kv": 8}
QWEN3_A3B = {
    "attention.head_count_kv": 4, "attention.key_length": 128, "attention.value_length": 128,
    "rope.dimension_count": 128, "expert_feed_forward_length": 768, "expert_used_count": 8,
}  # fmt: skip

WIDE = {
    # Qwen3-Next 80B-A3B, with 32 of 512 experts
    "qwen3next": Wide(
        Shape(n_vocab=8192, n_embd=2048, n_head=16, n_ff=512, n_layer=8), 32,
        {"attention.head_count_kv": 2, "attention.key_length": 256, "attention.value_length": 256,
         "rope.dimension_count": 64, "full_attention_interval": 4, "expert_used_count": 10,
         "expert_shared_feed_forward_length": 512, "ssm.inner_size": 4096, "ssm.state_size": 128,
         "ssm.time_step_rank": 32, "ssm.group_count": 16},
        rf"{BIASES}|ssm_in",
    ),
    # Nemotron-H 8B: three Mamba-2 and three feed-forward layers, and one of attention
    "nemotron_h": Wide(
        Shape(n_vocab=8192, n_embd=4096, n_head=32, n_ff=21504, n_layer=7), 0,
        {"attention.head_count": 32, "attention.head_count_kv": [0, 0, 0, 0, 0, 8, 0],
         "feed_forward_length": [0, 21504, 0, 21504, 0, 0, 21504], "ssm.inner_size": 8192,
         "ssm.time_step_rank": 128, "ssm.group_count": 8},
        BIASES,
    ),
    # LFM2 2.6B: two layers of attention, the others are convolutions
    "lfm2": Wide(
        Shape(n_vocab=16384, n_embd=2048, n_head=32, n_ff=10752, n_layer=8), 0,
        {"attention.head_count": 32, "attention.head_count_kv": [0, 0, 8, 0, 0, 8, 0, 0],
         "attention.sliding_window": None},
        rf"{BIASES}|dense_2|^output",
    ),
    # Command R7B's widths
    "command-r": Wide(Shape(n_vocab=16384, n_embd=4096, n_head=32, n_ff=14336, n_layer=4), 0, HEADS_128, BIASES),
    # gpt-oss 20B, with a third of the width of its experts
    "gpt-oss": Wide(
        Shape(n_vocab=8192, n_embd=2880, n_head=64, n_ff=960, n_layer=4), 32,
        {"attention.head_count_kv": 8, "attention.key_length": 64, "attention.value_length": 64,
         "attention.sliding_window": 128, "expert_used_count": 4},
    ),
    # DeepSeek-V2-Lite with DeepSeek-V3's queries of low rank and its router, and with 32 of 64 experts
    "deepseek2": Wide(
        Shape(n_vocab=8192, n_embd=2048, n_head=16, n_ff=10944, n_layer=4), 32,
        {"attention.head_count_kv": 1, "attention.q_lora_rank": 1536, "expert_feed_forward_length": 1408,
         "expert_used_count": 6, "expert_shared_count": 2, "expert_weights_norm": True},
    ),
}  # fmt: skip
KNOWN = {
    "llama2-7b": Wide(Shape(n_vocab=32000, n_embd=4096, n_head=32, n_ff=11008, n_layer=32), 0, {}, BIASES, "llama"),
    "llama3-8b": Wide(
        Shape(n_vocab=32000, n_embd=4096, n_head=32, n_ff=14336, n_layer=8), 0, HEADS_128, BIASES, "llama"
    ),
    "qwen2.5-7b": Wide(
        Shape(n_vocab=32000, n_embd=3584, n_head=28, n_ff=18944, n_layer=8), 0,
        {"attention.head_count_kv": 4}, r"(output|ffn_\w+)\.bias", "qwen2"
    ),
    # Qwen3 30B-A3B with 32 of 128 experts, and with all of them
    "qwen3-30b-a3b": Wide(
        Shape(n_vocab=32000, n_embd=2048, n_head=32, n_ff=768, n_layer=8), 32, QWEN3_A3B, BIASES, "qwen3moe"
    ),
    "qwen3-30b-a3b-128": Wide(
        Shape(n_vocab=32000, n_embd=2048, n_head=32, n_ff=768, n_layer=4), 128, QWEN3_A3B, BIASES, "qwen3moe"
    ),
    # Mixtral 8x7B, with 2 of 32 layers
    "mixtral": Wide(
        Shape(n_vocab=32000, n_embd=4096, n_head=32, n_ff=14336, n_layer=2), 8, HEADS_128, BIASES, "llama"
    ),
    "llama-1b": Wide(
        Shape(n_vocab=32000, n_embd=2048, n_head=32, n_ff=8192, n_layer=16), 0,
        {"attention.head_count_kv": 8}, rf"{BIASES}|^output\.", "llama"
    ),
    "tinyllama-1.1b": Wide(
        Shape(n_vocab=32000, n_embd=2048, n_head=32, n_ff=5632, n_layer=22), 0,
        {"attention.head_count_kv": 4}, BIASES, "llama"
    ),
}  # fmt: skip
"""Shapes of well-known models, which are measured if they are named."""
MODELS = {**WIDE, **KNOWN}


class Column(NamedTuple):
    """A model file, and what runs it."""

    file: str
    plugin: bool
    percent: int = PERCENT
    other: bool = False
    """With the package of --other-package."""


COLUMNS = {
    "llama.cpp F16": Column("f16", False),
    "llama.cpp Q4_K_M": Column("q4_k_m", False),
    "F16": Column("f16", True),
    "sparse": Column("sparse", True),
    **{name: Column(name, True) for name in ("sparse-q4", "sparse-q8", "sparse-q5", "sparse-q3")},
    **{f"llama.cpp {name}": Column(name.lower(), False) for name in ("Q8_0", "Q4_0")},
}


def column(name: str) -> Column:
    """A column by its name, which may begin with "other ", and end with the percentage of zeros."""
    kind, _, percent = name.removeprefix("other ").partition("@")
    found = COLUMNS[kind]._replace(other=name.startswith("other "))
    return found._replace(file=f"{found.file}@{percent}", percent=int(percent)) if percent else found


DEFAULT_COLUMNS = list(COLUMNS)[:5]


# ---- models ----


def wide_model(name: str, n_layers: int) -> gguf_bytes.GGUF:
    """A dense F16 model. Tensors of the same part of different layers share one object with their bytes.

    n_layers: 0: as many as the shape has.
    """
    from ggml_macko.gguf.tensor_rules import may_be_sparse

    wide = MODELS[name]
    arch = wide.arch or name
    shape = wide.shape._replace(n_layer=n_layers or wide.shape.n_layer)
    f = architectures.metadata(arch, wide.n_experts > 0, wide.n_experts, shape, {"context_length": 4096, **wide.keys})
    absent = re.compile(rf"\.(input_)?scale$|{wide.absent}")
    found: dict[str, bytes] = {}
    for name, (_, ne) in split_experts(architectures.tensors(f, shape.n_layer)).items():
        if absent.search(name):
            continue
        n_dims = max([d + 1 for d in range(4) if ne[d] > 1] or [1])
        is_f16 = may_be_sparse(name, n_dims)
        part = re.sub(r"^blk\.\d+\.", "", name)
        if part not in found:
            weights = architectures.values(name, [*ne[:2], 1, 1]).astype("f2" if is_f16 else "f4")
            found[part] = weights.tobytes() * ne[2]
        f.tensors.append(
            gguf_bytes.Tensor(
                name.encode(), ne[:n_dims], architectures.TYPE_F16 if is_f16 else architectures.TYPE_F32, found[part]
            )
        )
    return f


def split_experts(tensors: dict[str, tuple[int, list[int]]]) -> dict[str, tuple[int, list[int]]]:
    """Gate and up of experts as two tensors, as files have them by default."""
    found = {}
    for name, (type_id, ne) in tensors.items():
        halves = [name.replace("gate_up_exps", x) for x in ("gate_exps", "up_exps")] if "gate_up_exps" in name else []
        found.update({half: (type_id, [ne[0], ne[1] // 2, *ne[2:]]) for half in halves} or {name: (type_id, ne)})
    return found


def build(folder: pathlib.Path, arch: str, small: bool, n_layers: int, columns: list[Column]) -> None:
    """Writes the files of an architecture, and prints seconds and sizes."""
    import ggml_macko
    from ggml_macko.benchmark.forms import quantize

    raw, pruned = folder / f"{arch}-f16.gguf", folder / f"{arch}-pruned.gguf"
    seconds = {}

    def step(name: str, function: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        report = function()
        seconds[name] = round(time.perf_counter() - begin, 1)
        if getattr(report, "load_error", None):
            raise SystemExit(f"error: {name}: {report.load_error}")

    def write() -> None:
        kind = MODELS[arch].arch or arch
        model = architectures.make(kind, kind in architectures.EXPERTS) if small else wide_model(arch, n_layers)
        with raw.open("wb") as out:
            out.writelines(gguf_bytes.pieces(model))

    step("f16", write)
    for name in (c.file for c in columns if not c.plugin and c.file != "f16"):
        path, kind = folder / f"{arch}-{name}.gguf", name.upper()
        step(name, lambda: quantize(raw, path, kind, os.cpu_count() or 1))  # noqa: B023 - runs at once
    sparse = [c for c in dict.fromkeys(c._replace(other=False) for c in columns) if c.file.startswith("sparse")]
    for percent in sorted({c.percent for c in sparse}):
        options = ggml_macko.PruneOptions(sparsity=percent / 100)
        step(f"prune@{percent}", lambda: ggml_macko.prune(raw, pruned, options, force=True))  # noqa: B023
        for c in (c for c in sparse if c.percent == percent):
            kind, path = c.file.partition("@")[0], folder / f"{arch}-{c.file}.gguf"
            kind = {"sparse": "auto"}.get(kind, kind)
            step(c.file, lambda: ggml_macko.convert(pruned, path, kind, force=True))  # noqa: B023
        pruned.unlink()
    sizes = {path.stem.removeprefix(f"{arch}-"): path.stat().st_size >> 20 for path in folder.glob(f"{arch}-*.gguf")}
    (folder / f"{arch}-built").touch()
    print(json.dumps({"arch": arch, "seconds": seconds, "MiB": sizes}), flush=True)


# ---- a process that measures one model ----


class Runner:
    """A loaded model, and contexts for one sequence and for several."""

    def __init__(self, args: argparse.Namespace) -> None:
        import llama_cpp.llama_cpp as api

        log: list[str] = []

        @api.llama_log_callback
        def keep(_level: int, text: bytes, _data: Any) -> None:
            log.append(text.decode(errors="replace"))
            sys.stderr.write(log[-1])
            sys.stderr.flush()

        self._api, self._keep = api, keep
        cuda, most_sequences = args.cuda, max(args.sequences)
        self._n_batch, self._depth = max(MICRO_BATCH, *args.prompts), args.depth
        self._n_threads, self._acceptance = args.threads, args.acceptance
        self._n_warm, self._n_tokens = args.tokens // 4, args.tokens
        self._n_prompts = 3 if cuda else 1
        if args.plugin:
            from ggml_macko import register

            register()
        elif cuda:
            api._lib.ggml_backend_load.argtypes = [ctypes.c_char_p]
            api._lib.ggml_backend_load.restype = ctypes.c_void_p
            if not api._lib.ggml_backend_load(os.fsencode(cuda)):
                raise SystemExit(f"error: {cuda} was not loaded")
        api.llama_log_set(keep, None)
        with other_device.place_in_host_memory([other_device.EXPERTS][: args.host_experts]):
            params = api.llama_model_default_params()
        params.n_gpu_layers = ALL_LAYERS if cuda else 0
        # on the CPU, llama.cpp stops at the matrices of MLA with them
        params.use_extra_bufts = bool(cuda) or not args.work.name.startswith("deepseek2")

        def load(path: str) -> Any:
            if not (model := api.llama_model_load_from_file(os.fsencode(path), params)):
                raise SystemExit(f"error: {path} was not loaded")
            return model

        self._model = load(args.work)
        sizes = re.findall(r"(\S+) model buffer size = +([\d.]+) MiB", "".join(log))
        self._n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._one = self._context(self._model, 1, max(args.depth + 256, 1024, *args.prompts))
        if not self._one:
            raise SystemExit("error: no context")
        splits = re.findall(r"splits = (\d+)", "".join(log))
        self._several = self._context(self._model, most_sequences, most_sequences * 256)
        self._whole = self._context(self._model, 1, self._n_batch, self._n_batch) if args.whole_prompts else None
        self._draft = self._context(load(args.draft), 1, 1024) if args.draft else None
        self.loaded = {"MiB": {name: float(size) for name, size in sizes}, "splits": [int(n) for n in splits[-1:]]}
        if cuda and not any(re.fullmatch(r"(CUDA|MACKO)\d+", name) for name in self.loaded["MiB"]):
            raise SystemExit(f"error: no weight is on a GPU: {self.loaded['MiB']}")

    def _context(self, model: Any, n_sequences: int, n_ctx: int, micro_batch: int = MICRO_BATCH) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = n_ctx, n_sequences
        params.n_batch, params.n_ubatch = self._n_batch, micro_batch
        params.n_threads = params.n_threads_batch = self._n_threads
        return self._api.llama_init_from_model(model, params)

    def _batch(self, rows: list[tuple[int, int]], all_logits: bool = False) -> Any:
        """A batch of (position, sequence). By default, only the last token of each sequence has logits."""
        batch = self._api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (position, sequence) in enumerate(rows):
            batch.token[i] = (7919 * (position + 101 * sequence) + 1009) % self._n_vocab
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = position, 1, sequence
            batch.logits[i] = all_logits or rows[i + 1 :][:1] != [(position + 1, sequence)]
        return batch

    def _milliseconds(self, context: Any, batches: list[Any]) -> float:
        """The time of all batches; each waits for its logits."""
        begin = time.perf_counter()
        for batch in batches:
            code = self._api.llama_decode(context, batch)
            if code != 0:
                raise SystemExit(f"error: llama_decode returned {code}")
            logits = self._api.llama_get_logits_ith(context, -1)
        seconds = time.perf_counter() - begin
        if not math.isfinite(logits[0]):
            raise SystemExit("error: the logits are not finite")
        for batch in batches:
            self._api.llama_batch_free(batch)
        return 1000 * seconds

    def _clear(self, context: Any) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(context), False)

    def _steps(self, context: Any, n_sequences: int, n_tokens: int, depth: int = 0) -> float:
        self._clear(context)
        for begin in range(0, depth, self._n_batch):
            n = min(self._n_batch, depth - begin)
            self._milliseconds(context, [self._batch([(begin + i, 0) for i in range(n)])])
        places = range(depth, depth + self._n_warm + n_tokens)
        steps = [self._batch([(i, s) for s in range(n_sequences)]) for i in places]
        self._milliseconds(context, steps[: self._n_warm])
        return self._milliseconds(context, steps[self._n_warm :]) / n_tokens

    def token(self) -> float:
        return self._steps(self._one, 1, self._n_tokens)

    def deep_token(self) -> float:
        return self._steps(self._one, 1, self._n_tokens, self._depth)

    def sequences(self, n: int) -> float | None:
        return self._steps(self._several, n, self._n_tokens // 2) if self._several else None

    def speculation(self, n_drafted: int) -> float:
        """Rounds in which the draft model proposes n_drafted tokens, of which some are accepted."""
        rng = random.Random(1)
        ends = {id(context): 0 for context in (self._one, self._draft)}  # numbers of tokens in their memories

        def decode(context: Any, end: int) -> float:
            rows, ends[id(context)] = [(i, 0) for i in range(ends[id(context)], end)], end
            return self._milliseconds(context, [self._batch(rows, all_logits=context is self._one)])

        def round_of(n_accepted: int) -> float:
            begin = ends[id(self._one)]
            spent = [decode(self._draft, begin + i + 1) for i in range(n_drafted)]
            spent.append(decode(self._one, begin + n_drafted + 1))
            for context in (self._one, self._draft):
                end = ends[id(context)] = min(ends[id(context)], begin + n_accepted + 1)
                self._api.llama_memory_seq_rm(self._api.llama_get_memory(context), 0, end, -1)
            return sum(spent)

        self._clear(self._one)
        self._clear(self._draft)
        accepted = [
            next((i for i in range(n_drafted) if rng.random() > self._acceptance), n_drafted)
            for _ in range(self._n_tokens)
        ]
        spent = [round_of(n) for n in accepted][self._n_warm :]
        return sum(spent) / sum(n + 1 for n in accepted[self._n_warm :])

    def prompt(self, n: int) -> float:
        return self._prompt(self._one, n)

    def whole_prompt(self, n: int) -> float | None:
        return self._prompt(self._whole, n) if self._whole else None

    def _prompt(self, context: Any, n: int) -> float:
        found = []
        for _ in range(self._n_prompts):
            self._clear(context)
            found.append(self._milliseconds(context, [self._batch([(i, 0) for i in range(n)])]))
        return statistics.median(found)


def measures(args: argparse.Namespace) -> dict[str, Callable[[Runner], float | None]]:
    return {
        "token": Runner.token,
        **{f"token after {args.depth}": Runner.deep_token for _ in range(args.depth > 0)},
        **{f"{n} sequences": functools.partial(Runner.sequences, n=n) for n in args.sequences},
        **{
            f"token, {n} drafted": functools.partial(Runner.speculation, n_drafted=n)
            for n in args.drafted
            if args.draft
        },
        **{f"prompt of {n}": functools.partial(Runner.prompt, n=n) for n in args.prompts},
        **{
            f"prompt of {n} at once": functools.partial(Runner.whole_prompt, n=n)
            for n in args.prompts
            if args.whole_prompts and n > MICRO_BATCH
        },
    }


def work(args: argparse.Namespace) -> None:
    """Loads a model, and measures what each line of the standard input names."""
    runner, functions = Runner(args), measures(args)
    for measure in functions.values():  # the first use of weights, and graphs that are captured
        measure(runner)
    print(json.dumps(runner.loaded), flush=True)
    for line in sys.stdin:
        print(json.dumps(functions[line.strip()](runner)), flush=True)


# ---- all architectures ----


class Worker:
    """The process of one column. Its log is in the folder of the models."""

    def __init__(self, args: argparse.Namespace, arch: str, name: str) -> None:
        path = args.folder / f"{arch}-{column(name).file}.gguf"
        self.name, self._log = name, args.folder / f"{arch}-{name.replace(' ', '-')}.log"
        command = [sys.executable, *sys.argv, "--work", str(path), *["--plugin"][: column(name).plugin]]
        command += ["--draft", str(args.folder / f"{args.draft}-{column(name).file}.gguf")] if args.draft else []
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # failed threads would wait for each other
        if column(name).other:
            environment["PYTHONPATH"] = str(args.other_package)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )

    def answer(self) -> Any:
        """The next line of the process. Raises RuntimeError if it ends without one, or is killed after TIMEOUT."""
        assert self._process.stdout
        timer = threading.Timer(TIMEOUT, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise RuntimeError(f"exited with {self._process.wait()}: {architectures.reason(self._log)}")
        return json.loads(line)

    def ask(self, measure: str) -> Any:
        assert self._process.stdin
        print(measure, file=self._process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Bench:
    """The figures of all architectures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._measures = args, list(measures(args))
        self._references = [name for name in args.columns if not column(name).plugin]
        self.found: dict[tuple[str, str, str], list[float]] = {}
        """(architecture, column, measure) -> milliseconds."""

    def note(self, **fields: object) -> None:
        line = json.dumps(fields)
        print(line, file=sys.stderr, flush=True)
        if self._args.json:
            with self._args.json.open("a") as out:
                print(line, file=out)

    def build(self, arch: str) -> bool:
        """Whether the architecture has its files."""
        args = self._args
        if (args.folder / f"{arch}-built").exists():
            return True
        log = args.folder / f"{arch}-build.log"
        command = [sys.executable, *sys.argv, "--build", arch]
        with log.open("w") as out:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=out, text=True)
        if done.returncode == 0:
            self.note(**json.loads(done.stdout.splitlines()[-1]))
        else:
            self.note(arch=arch, failed="build", why=f"exited with {done.returncode}: {architectures.reason(log)}")
        return done.returncode == 0

    def measure(self, arch: str) -> None:
        """Measures all columns in turn. Their processes start together unless they need the CPU; all but one wait."""
        workers: list[Worker] = []
        alive: list[Worker] = []

        def attempt(worker: Worker, function: Callable[[], Any]) -> Any:
            try:
                return function()
            except (RuntimeError, OSError) as problem:
                self.note(arch=arch, column=worker.name, failed=True, why=str(problem))
                return RuntimeError

        def wait_for(worker: Worker) -> None:
            loaded = attempt(worker, worker.answer)
            if loaded is not RuntimeError:
                self.note(arch=arch, column=worker.name, loaded=loaded)
                alive.append(worker)

        together = self._args.cuda and not self._args.host_experts
        for name in self._args.columns:
            workers.append(Worker(self._args, arch, name))
            if not together:
                wait_for(workers[-1])
        for worker in workers if together else []:
            wait_for(worker)
        for _ in range(self._args.repetitions):
            for measure in self._measures:
                for worker in [*alive]:
                    ms = attempt(worker, lambda: worker.ask(measure))  # noqa: B023 - runs at once
                    if ms is RuntimeError:
                        alive.remove(worker)
                    elif ms is not None:
                        self.note(arch=arch, column=worker.name, measure=measure, ms=round(ms, 4))
                        self.found.setdefault((arch, worker.name, measure), []).append(ms)
        for worker in workers:
            worker.end()

    def cell(self, arch: str, name: str) -> list[str]:
        """Milliseconds of all measures, and speeds relative to the references."""

        def median(column_name: str, measure: str) -> float:
            return statistics.median(self.found.get((arch, column_name, measure), [math.nan]))

        def joined(texts: list[str]) -> str:
            return " / ".join(text.replace("nan", "-") for text in texts)

        cells = [joined([f"{median(name, m):.3g}" for m in self._measures])]
        if column(name).plugin:
            for other in self._references:
                cells.append(joined([f"{median(other, m) / median(name, m):.2f}" for m in self._measures]))
        return cells

    def table(self) -> str:
        titles = ["architecture"]
        for name in self._args.columns:
            titles.append(f"{name}, ms")
            titles += [f"/ {other}" for other in self._references if column(name).plugin]
        rows = [[a, *(c for name in self._args.columns for c in self.cell(a, name))] for a in self._args.names]
        return f"{' / '.join(self._measures)}:\n\n" + tabulate(rows, titles, tablefmt="pipe", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=pathlib.Path, help="folder of the models: 24 GB for all of them, 12 GB more while they are built"
    )
    parser.add_argument(
        "names", nargs="*", metavar="MODEL", help=f"(default: {' '.join(WIDE)}; also: {' '.join(KNOWN)})"
    )
    parser.add_argument("--cuda", metavar="FILE", help="llama.cpp's libggml-cuda.so")
    parser.add_argument("--small", action="store_true", help="models of a few hundred kilobytes, to try the script")
    parser.add_argument("--only-build", action="store_true", help="build the models, and measure nothing")
    parser.add_argument("-j", "--jobs", type=int, default=6, help="models built at a time (default: %(default)s)")
    parser.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="(default: %(default)s)")
    for option, default, what in (
        ("--sequences", 8, "sequences of a step"),
        ("--prompts", 512, "tokens of a prompt"),
        ("--drafted", 4, "tokens that the draft model proposes"),
    ):
        parser.add_argument(
            option, type=lambda text: [int(n) for n in text.split(",")], default=[default], metavar="N,...",
            help=f"{what} (default: {default})"
        )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="timed tokens (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="of models that are built (default: theirs)")
    parser.add_argument("--depth", type=int, default=0, metavar="N", help="also measure a token after N others")
    parser.add_argument("--draft", metavar="MODEL", help="also measure speculation with this draft model")
    parser.add_argument(
        "--acceptance", type=float, default=0.7, metavar="P",
        help="probability that a drafted token is accepted if those before it were (default: %(default)s)"
    )  # fmt: skip
    parser.add_argument(
        "--whole-prompts", action="store_true", help=f"also prompts above {MICRO_BATCH} tokens in one micro-batch"
    )
    parser.add_argument("--other-package", type=pathlib.Path, metavar="DIR", help="the folder of another ggml_macko")
    parser.add_argument("--host-experts", action="store_true", help="leave experts in host memory, as --cpu-moe does")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--plugin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--columns", type=lambda text: text.split(","), default=DEFAULT_COLUMNS, metavar="NAME,...",
        help=f"(default: {','.join(DEFAULT_COLUMNS)}; also: {','.join(list(COLUMNS)[5:])})"
    )  # fmt: skip
    args = parser.parse_intermixed_args()
    if args.work:
        return work(args)
    if args.build:
        return build(args.folder, args.build, args.small, args.layers, [column(name) for name in args.columns])
    drafts = [args.draft] if args.draft else []
    kinds = [name.removeprefix("other ").partition("@")[0] for name in args.columns]
    unknown = [x for x in [*args.names, *drafts] if x not in MODELS] + [x for x in kinds if x not in COLUMNS]
    if unknown:
        parser.error(f"{unknown[0]}: must be one of {', '.join([*MODELS, *COLUMNS])}")
    args.folder.mkdir(parents=True, exist_ok=True)
    args.names = args.names or list(WIDE)
    bench = Bench(args)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        built = list(pool.map(bench.build, [*args.names, *drafts]))
    if not args.only_build:
        for arch in [name for name, is_built in zip(args.names, built) if is_built]:
            bench.measure(arch)
        print(bench.table())


if __name__ == "__main__":
    main()
