"""One measurement of one model in a process of its own, started by bench.py: `python -m ggml_macko.benchmark.bench_worker
REQUEST`.

REQUEST is JSON: model, n_prompt, n_gen, threads, gpu_layers. Prints JSON: load_s, prompt_tps, gen_tps, rss (peak
bytes, mapped file pages included), gpu_memory (bytes that the run took on the GPUs; null without gpu_layers).
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path


def peak_rss() -> int:
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def measure(model: str, n_prompt: int, n_gen: int, threads: int, gpu_layers: int) -> dict:
    from ..benchmark import bench_gpu
    from ..llama import Llama

    def gpu_free() -> int:
        return sum(free for _, _, free, _ in bench_gpu.devices()) if gpu_layers else 0

    free_before = gpu_free()
    begin = time.perf_counter()
    llama = Llama(
        model,
        n_ctx=n_prompt + n_gen + 8,
        n_batch=max(n_prompt, 1),
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=gpu_layers,
        verbose=False,
    )
    load_s = time.perf_counter() - begin
    vocabulary = llama.n_vocab()
    tokens = [
        (7919 * i + 1009) % vocabulary for i in range(n_prompt + n_gen)
    ]  # any tokens: time does not depend on them

    def rate(pieces: list) -> float:
        begin = time.perf_counter()
        for piece in pieces:
            llama.eval(piece)
        return sum(map(len, pieces)) / (time.perf_counter() - begin)

    rate([tokens[: min(n_prompt, 8)], tokens[:1]])  # warm-up: first touch of weights and threads
    llama.reset()
    prompt_tps = rate([tokens[:n_prompt]]) if n_prompt else None
    gen_tps = rate([[token] for token in tokens[n_prompt:]]) if n_gen else None
    return {
        "load_s": load_s,
        "prompt_tps": prompt_tps,
        "gen_tps": gen_tps,
        "rss": peak_rss(),
        "gpu_memory": free_before - gpu_free() if gpu_layers else None,
    }


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
