"""One measurement of one model in a separate process: `python -m ggml_macko.benchmark.bench_worker REQUEST`.

models.py starts it. REQUEST is JSON with the path of the model and the fields of Workload; the output is JSON with the
fields of Sample.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DEPTH_BATCH = 512  # tokens per batch before the timed tokens


@dataclass(frozen=True)
class Workload:
    """The timed work, and the context of the model. The defaults are those of llama_cpp.Llama."""

    n_prompt: int  # timed tokens in one batch
    n_gen: int  # timed tokens one by one
    n_threads: int
    gpu_layers: int = 0  # -1 is all
    flash_attn: bool = False
    type_k: int | None = None  # ggml type ids of the KV cache; None: F16
    type_v: int | None = None
    depth: int = 0  # tokens before the timed ones


@dataclass(frozen=True)
class Sample:
    """One run of one model."""

    load_s: float  # seconds
    prompt_tps: float | None  # tokens per second; None without a prompt
    gen_tps: float | None
    rss: int  # peak resident memory in bytes, with the pages of mapped files
    gpu_memory: int | None  # bytes of the run on the GPUs; None without layers on a GPU


def measure(model: str, work: Workload) -> Sample:
    """Loads a model, then times the work."""
    from .. import system
    from ..llama import Llama
    from ..native import devices

    on_gpu = bool(work.gpu_layers and devices.gpus())

    def gpu_free() -> int:
        return sum(gpu.free for gpu in devices.gpus()) if on_gpu else 0

    free_before = gpu_free()
    begin = time.perf_counter()
    llama: Any = Llama(  # parts of llama_cpp are untyped
        model,
        n_ctx=work.depth + work.n_prompt + work.n_gen + 8,
        n_batch=max(work.n_prompt, DEPTH_BATCH if work.depth else 1),
        n_threads=work.n_threads,
        n_threads_batch=work.n_threads,
        n_gpu_layers=work.gpu_layers,
        flash_attn=work.flash_attn,
        type_k=work.type_k,
        type_v=work.type_v,
        verbose=False,
    )
    load_s = time.perf_counter() - begin
    vocabulary = llama.n_vocab()
    # the time does not depend on the tokens
    tokens = [(7919 * i + 1009) % vocabulary for i in range(work.depth + work.n_prompt + work.n_gen)]

    def rate(batches: Sequence[Sequence[int]]) -> float:
        begin = time.perf_counter()
        for batch in batches:
            llama.eval(batch)
        return sum(map(len, batches)) / (time.perf_counter() - begin)

    rate([tokens[: min(work.n_prompt, 8)], tokens[:1]])  # warm-up: the first use of weights and threads
    llama.reset()
    llama.eval(tokens[: work.depth])
    tokens = tokens[work.depth :]
    prompt_tps = rate([tokens[: work.n_prompt]]) if work.n_prompt else None
    gen_tps = rate([[token] for token in tokens[work.n_prompt :]]) if work.n_gen else None
    return Sample(
        load_s=load_s,
        prompt_tps=prompt_tps,
        gen_tps=gen_tps,
        rss=system.peak_rss(),
        gpu_memory=free_before - gpu_free() if on_gpu else None,
    )


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    print(json.dumps(dataclasses.asdict(measure(request.pop("model"), Workload(**request)))))
