"""Text that the dense model writes. Each chunk begins with a few tokens of the user's text; the model's probabilities
give the next tokens. The pruned model thus learns from the dense model beyond the text.
"""

from __future__ import annotations

import numpy as np
import torch

from .. import console
from ..evaluation.text_model import Chunks
from ..evaluation.transformer import Transformer, as_tokens

N_PROMPT = 8
"""Tokens of the user's text at the start of a chunk, after a token that the vocabulary adds."""

_CPU_CACHE_NBYTES = 1 << 30
_GPU_CACHE_SHARE = 1 / 4
"""Approximate memory for keys and values, and its share of a GPU's memory. They limit the chunks per batch. The share
is not that of the free memory, because the text depends on it.
"""


class Writer(Transformer):
    """A forward pass with stored keys and values, so that each step reads one token per chunk."""

    def __init__(self, model: Transformer, n_chunks: int, n_ctx: int) -> None:
        super().__init__(model.shape, model.weights)
        head = model.weights["token_embd.weight"]
        size = (2, model.shape.n_layers, n_chunks, model.shape.n_heads, n_ctx, model.shape.head_dim)
        self._cache = torch.empty(size, dtype=head.dtype, device=head.device)

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (chunks, n_vocab) after the next tokens (chunks, n) of every chunk."""
        out = self.logits(tokens)[:, -1]
        self.n_past += tokens.shape[1]
        return out

    def _weighted(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        end = self.n_past + q.shape[2]
        keys, values = self._cache[:, layer]
        keys[:, :, self.n_past : end], values[:, :, self.n_past : end] = k, v
        return super()._weighted(q.to(keys.dtype), keys[:, :, :end], values[:, :, :end], layer).to(q.dtype)


def _cache_nbytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * _GPU_CACHE_SHARE)
    return _CPU_CACHE_NBYTES


def sample(
    teacher: Transformer, chunks: Chunks, n: int, first_token: int | None, device: torch.device, seed: int
) -> Chunks:
    """n chunks with the length of `chunks`, which is the user's text; their first tokens are from random places of it.

    first_token: token that the vocabulary adds in front of a sequence. The result depends on seed and device only.
    """
    n_ctx, stream = chunks.shape[1], chunks.reshape(-1)
    rng = np.random.default_rng([seed, n])
    starts = rng.integers(0, len(stream) - N_PROMPT, n)
    n_prompt = min(N_PROMPT, n_ctx - 1)
    prompts = stream[starts[:, None] + np.arange(n_prompt)]
    if first_token is not None:
        prompts = np.concatenate([np.full((n, 1), first_token, dtype=stream.dtype), prompts], axis=1)[:, : n_ctx - 1]
    generator = torch.Generator(device).manual_seed(seed)
    out = np.empty((n, n_ctx), dtype=chunks.dtype)
    s = teacher.shape
    nbytes = 2 * s.n_layers * s.n_heads * s.head_dim * n_ctx * teacher.weights["token_embd.weight"].element_size()
    at_once = max(1, _cache_nbytes(device) // nbytes)
    with torch.no_grad(), console.progress("writing text", n * (n_ctx - prompts.shape[1]), "tokens") as advance:
        for begin in range(0, n, at_once):
            rows = slice(begin, min(begin + at_once, n))
            tokens = as_tokens(prompts[rows], device)
            writer = Writer(teacher, len(tokens), n_ctx)
            written = [tokens]
            for _ in range(n_ctx - prompts.shape[1]):
                shares = torch.softmax(writer.next_logits(tokens), dim=-1)
                # like torch.multinomial, for which the host would wait until a GPU has checked the shares
                tokens = (shares / torch.empty_like(shares).exponential_(generator=generator)).argmax(-1, keepdim=True)
                written.append(tokens)
                advance(len(tokens))
            out[rows] = torch.cat(written, dim=1).cpu().numpy()
    return out
