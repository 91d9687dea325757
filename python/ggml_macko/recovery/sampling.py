"""Text that the dense model writes. Each chunk begins with a few tokens of the user's text; the model's probabilities
give the next tokens. The pruned model thus learns from the dense model beyond the text.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from .. import console
from ..evaluation.text_model import Chunks
from ..evaluation.transformer import Transformer, as_tokens, capped
from ..recovery.ranks import N_RANKS, RANK, Ranks

N_PROMPT = 8
"""Tokens of the user's text at the start of a chunk, after a token that the vocabulary adds."""

_MAX_AT_ONCE = 512
"""Chunks per batch: enough to keep a GPU busy."""

_CPU_CACHE_NBYTES = 1 << 30
_GPU_CACHE_SHARE = 1 / 4
"""Approximate memory for keys and values, and its share of a GPU's memory. They limit the chunks per batch. The share
is not that of the free memory, because the text depends on it.
"""


class Writer(Transformer):
    """A forward pass of one token per chunk, with stored keys, values and inputs of convolutions. It always reads the
    whole cache, so that a GPU can repeat a recorded step.

    position: of the next token, int64 (1,); the caller increases it.
    """

    def __init__(self, model: Transformer, n_chunks: int, n_ctx: int) -> None:
        super().__init__(model.shape, model.weights)
        head, s = model.head, model.shape
        size = (2, s.n_layers, n_chunks, s.n_heads_kv, n_ctx, s.head_dim)
        self._cache = torch.zeros(size, dtype=head.dtype, device=head.device)
        self._convolved: dict[str, torch.Tensor] = {}  # the last inputs of each convolution
        self._at = torch.arange(n_ctx, device=head.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=head.device)

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (chunks, n_vocab) after the next token of every chunk (chunks,)."""
        return self.logits(tokens[:, None])[:, 0]

    def _cos_and_sin(self, local: bool, n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super()._cos_and_sin(local, len(self._at), device)
        return cos[self.position], sin[self.position]

    def _with_past(self, prefix: str, x: torch.Tensor, n: int) -> torch.Tensor:
        past = self._convolved.setdefault(prefix, x.new_zeros(*x.shape[:2], n))
        found = torch.cat([past, x], dim=2)
        past.copy_(found[:, :, 1:])
        return found

    def _weighted(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        s, (keys, values) = self.shape, self._cache[:, layer]
        keys.index_copy_(2, self.position, k.to(keys.dtype))
        values.index_copy_(2, self.position, v.to(keys.dtype))
        seen = self._at <= self.position
        if s.has_window(layer):
            seen &= self._at > self.position - s.window
        heads = q.to(keys.dtype).reshape(len(q), s.n_heads_kv, -1, s.head_dim)  # those that share keys and values
        scores = capped((heads @ keys.transpose(-1, -2)).float() * s.attention_scale, s.attention_cap)
        shares = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
        return (shares.to(keys.dtype) @ values).reshape(q.shape).to(q.dtype)


def _cache_nbytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * _GPU_CACHE_SHARE)
    return _CPU_CACHE_NBYTES


def sample(
    teacher: Transformer,
    chunks: Chunks,
    n: int,
    first_token: int | None,
    device: torch.device,
    seed: int,
    ranks: Ranks | None = None,
) -> Chunks:
    """n chunks with the length of `chunks`, which is the user's text; their first tokens are from random places of it.

    first_token: token that the vocabulary adds in front of a sequence. ranks: processes that share the work. The result
    depends on seed and device only.
    """
    n_ctx, stream = chunks.shape[1], chunks.reshape(-1)
    rng = np.random.default_rng([seed, n])
    starts = rng.integers(0, len(stream) - N_PROMPT, n)
    n_prompt = min(N_PROMPT, n_ctx - 1)
    prompts = stream[starts[:, None] + np.arange(n_prompt)]
    if first_token is not None:
        prompts = np.concatenate([np.full((n, 1), first_token, dtype=stream.dtype), prompts], axis=1)[:, : n_ctx - 1]
    out = np.zeros((n, n_ctx), dtype=chunks.dtype)
    s = teacher.shape
    nbytes = 2 * s.n_layers * s.n_heads_kv * s.head_dim * n_ctx * teacher.head.element_size()
    at_once = min(_MAX_AT_ONCE, max(1, _cache_nbytes(device) // nbytes))
    with torch.no_grad(), console.progress("writing text", n * (n_ctx - 1), "tokens") as advance:
        for begin in range(RANK * at_once, n, N_RANKS * at_once):
            generator = torch.Generator(device).manual_seed(int(np.random.default_rng([seed, begin]).integers(2**62)))
            rows = slice(begin, min(begin + at_once, n))
            tokens = F.pad(as_tokens(prompts[rows], device), (0, n_ctx - prompts.shape[1]))
            step = _Step(teacher, tokens, prompts.shape[1], generator)
            for _ in range(n_ctx - 1):
                step()
                advance(len(tokens))
            out[rows] = tokens.cpu().numpy()
    return out if ranks is None else ranks.total(torch.from_numpy(out).to(device)).cpu().numpy()


class _Step:
    """Writes the next token of every chunk into `tokens` (chunks, n_ctx), where the first n_prompt are given.

    A GPU repeats the kernels of a recorded step, which the host could not launch fast enough.
    """

    def __init__(self, teacher: Transformer, tokens: torch.Tensor, n_prompt: int, generator: torch.Generator) -> None:
        self._writer = Writer(teacher, *tokens.shape)
        self._tokens, self._n_prompt, self._generator = tokens, n_prompt, generator
        self._graph: torch.cuda.CUDAGraph | None = None
        # tokens that each expert gets differ between steps
        self._is_repeatable = tokens.device.type == "cuda" and not teacher.shape.n_experts_used
        self._n_steps = 0

    def __call__(self) -> None:
        self._n_steps += 1
        if not self._is_repeatable or self._n_steps == 1:
            self._run()
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            self._graph.register_generator_state(self._generator)
            with torch.cuda.graph(self._graph):
                self._run()
        self._graph.replay()

    def _run(self) -> None:
        position, tokens = self._writer.position, self._tokens
        logits = self._writer.next_logits(tokens.index_select(1, position)[:, 0])
        # the largest of logits - log(noise) is drawn with its probability; torch.multinomial would make the host wait
        noise = torch.empty_like(logits).exponential_(generator=self._generator)
        drawn = logits.sub_(noise.log_()).argmax(-1, keepdim=True)
        position += 1
        given = tokens.index_select(1, position)
        tokens.index_copy_(1, position, torch.where(position < self._n_prompt, given, drawn))
