"""The forward pass of Llama in float64 NumPy, a reference for logits without code of llama.cpp or the plugin."""

from __future__ import annotations

import gguf
import numpy as np


class Float64Llama:
    """A dense F16 or F32 GGUF of the Llama architecture: GQA, SwiGLU, RMSNorm, interleaved RoPE without scaling."""

    def __init__(self, path: str):
        reader = gguf.GGUFReader(path)
        self.weights = {t.name: np.asarray(t.data, dtype=np.float64) for t in reader.tensors}

        def value(key):
            return reader.fields[f"llama.{key}"].contents()

        self.n_layer = value("block_count")
        self.n_head = value("attention.head_count")
        self.n_head_kv = value("attention.head_count_kv")
        self.eps = value("attention.layer_norm_rms_epsilon")
        self.rope_base = value("rope.freq_base") if "llama.rope.freq_base" in reader.fields else 10000.0

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps) * self.weights[name]

    def rope(self, x: np.ndarray) -> np.ndarray:
        """x: (tokens, heads, head_dim). Pairs (2i, 2i + 1) are rotated by position * base^(-2i / head_dim)."""
        n, _, dim = x.shape
        angle = np.arange(n)[:, None, None] * self.rope_base ** (-np.arange(0, dim, 2) / dim)
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
        out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
        return out

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Returns (tokens, vocabulary) in float64."""
        w = self.weights
        x = w["token_embd.weight"][tokens]
        n = len(tokens)
        mask = np.triu(np.full((n, n), -np.inf), 1)
        for i in range(self.n_layer):
            h = self.norm(x, f"blk.{i}.attn_norm.weight")
            q = self.rope((h @ w[f"blk.{i}.attn_q.weight"].T).reshape(n, self.n_head, -1))
            k = self.rope((h @ w[f"blk.{i}.attn_k.weight"].T).reshape(n, self.n_head_kv, -1))
            v = (h @ w[f"blk.{i}.attn_v.weight"].T).reshape(n, self.n_head_kv, -1)
            k, v = (np.repeat(t, self.n_head // self.n_head_kv, axis=1) for t in (k, v))
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1]) + mask
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
            x = x + np.einsum("hqk,khd->qhd", scores, v).reshape(n, -1) @ w[f"blk.{i}.attn_output.weight"].T
            h = self.norm(x, f"blk.{i}.ffn_norm.weight")
            gate = h @ w[f"blk.{i}.ffn_gate.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w[f"blk.{i}.ffn_up.weight"].T)) @ w[f"blk.{i}.ffn_down.weight"].T
        head = w.get("output.weight", w["token_embd.weight"])
        return self.norm(x, "output_norm.weight") @ head.T
