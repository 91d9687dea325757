"""Text that the dense model writes: each chunk begins with a few tokens of the user's text and goes on as the model
would, token by token, drawn from its probabilities. It shows the pruned model what the dense one knows beyond the text.
"""

from __future__ import annotations

import numpy as np
import torch

from .. import console
from ..evaluation.text_model import Chunks
from ..evaluation.transformer import Transformer, as_tokens

N_PROMPT = 8
"""Tokens of the user's text at the beginning of a chunk, the one that the vocabulary puts in front aside."""

_CPU_CACHE_NBYTES = 1 << 30
_GPU_CACHE_SHARE = 1 / 4
"""Memory for keys and values, about, and its share of a GPU's: decides how many chunks are written at a time. It is not
a share of what is free, because the text depends on it.
"""


class Writer(Transformer):
    """A forward pass that keeps keys and values, so that each step reads one token of each chunk."""

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
    """n chunks of the length of `chunks`, the user's text, from anywhere in which their first tokens come.

    first_token: what the vocabulary puts in front of a sequence. The same for a seed on one device.
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
                # as torch.multinomial draws one, which has the host wait for a GPU that checks the shares
                tokens = (shares / torch.empty_like(shares).exponential_(generator=generator)).argmax(-1, keepdim=True)
                written.append(tokens)
                advance(len(tokens))
            out[rows] = torch.cat(written, dim=1).cpu().numpy()
    return out
