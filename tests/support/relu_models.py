"""Models with a ReLU in their feed-forward blocks."""

from __future__ import annotations

import numpy as np

from support import architectures
from support import gguf_bytes as gb

RELU = {"smallthinker": b"gate_exps", "arcee": b"ffn_up"}

TOKENS = [int(t) for t in np.random.default_rng(3).integers(3, 120, 16)]


def relu_model(arch, path, shift):
    """A model with 50 % zeros. The embeddings have a mean, and the weights before the ReLU have that mean minus
    `shift`, which therefore sets the share of zeros after the ReLU. The weights of ffn_down are large, so that the
    remaining non-zeros still affect the output.
    """
    f = architectures.make(arch, arch == "smallthinker")
    rng = np.random.default_rng(5)
    for t in f.tensors:
        if t.name == b"token_embd.weight":
            dtype = np.float16 if t.type == architectures.TYPE_F16 else np.float32
            t.data = (np.frombuffer(t.data, dtype) + dtype(1)).tobytes()
        elif len(t.ne) > 1 and t.type == architectures.TYPE_F16:
            x = np.frombuffer(t.data, np.float16).astype(np.float32)
            x[rng.random(x.size) < 0.5] = 0
            if RELU[arch] in t.name:
                x = np.where(x == 0, 0, x - np.float32(shift))
            if b"ffn_down" in t.name:
                x *= 500
            t.data = x.astype(np.float16).tobytes()
    path.write_bytes(gb.write(f))
    return path
