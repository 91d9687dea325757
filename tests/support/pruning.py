"""Shared by the tests of pruning: inputs of layers, small models, interrupted runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np

from ggml_macko import values
from ggml_macko.gguf.files import Model
from ggml_macko.pruning import alps
from ggml_macko.pruning.prune import tensors_to_prune
from support import generators, gguf_bytes, tiny_models

PRUNED = {
    "blk.0.attn_q.weight",
    "blk.0.attn_k.weight",
    "blk.0.attn_v.weight",
    "blk.0.attn_output.weight",
    "blk.0.ffn_up_exps.weight",
    "blk.0.ffn_down_exps.weight",
}

SUPPORTED = ("llama", "arcee", "qwen2", "qwen3", "gemma2", "gemma3", "lfm2")
"""Architectures that PyTorch evaluates. Mixtures are MIXTURES."""

MIXTURES = ("llama-moe", "qwen3moe")


def inputs(rng, n, cols):
    """Inputs (n, cols): correlated, with outlier columns and one column that is always zero."""
    mix = rng.standard_normal((cols, cols)) * 0.2 + np.eye(cols)
    x = rng.standard_normal((n, cols)) @ mix * np.where(rng.random(cols) < 0.03, 20, 1)
    x[:, cols // 2] = 0
    return x.astype(np.float32)


def pruned_tensors(path) -> dict:
    with Model(path) as m:
        return {t.name: t.read_bits() for t in tensors_to_prune(m)}


def moments(rng, cols, n=4):
    x = inputs(rng, n * cols, cols)
    return x.T @ x


def problem_of(w, h, difference=None, damping=0.01):
    damped = alps.damped(h, damping)
    target = w @ damped
    return alps.Problem(damped, target if difference is None else target + w @ difference, w)


def damped64(h, damping=0.01):
    h = h.astype(np.float64)
    d = np.einsum("ii->i", h)
    d[d == 0] = 1
    d += damping * d.mean()
    return h


def tiny_model(folder, architecture="llama"):
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes.write(tiny_models.make(architecture)))
    return path


def interrupted(*args, when):
    """Runs `macko prune` and kills it (-9) when when() returns true; returns whether it was still running."""
    command = [sys.executable, "-m", "ggml_macko.commands.cli", "prune", *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not when():
        time.sleep(0.0005)
    running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return running


def bits_of(path, name):
    type_id, shape, data = generators.dense_bytes(path)[name]
    return np.frombuffer(data, values.bits_dtype(type_id)).reshape(-1, shape[0]), type_id, shape
