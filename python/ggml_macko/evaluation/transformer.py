"""The forward pass of llama-family models in PyTorch, with the tensors of a GGUF under their own names.

Architectures: llama (with those that llama.cpp loads as llama, such as Mistral and Mixtral), arcee, qwen2, qwen3,
qwen3moe, gemma2, gemma3, lfm2. Other features, such as shared experts or YaRN, are refused. Callers first compare the
logits with those of llama.cpp. Shapes: hidden states (chunks, tokens, n_embd).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from .. import errors
from ..evaluation.text_model import Chunks, TextModel
from ..gguf.files import Model
from ..values import TYPE_BF16, TYPE_F16, Array, to_float

PARTS = ("attention", "feed_forward")
"""The parts of a block; the result of each is added to the hidden states."""

_NEOX = {"qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "lfm2"}
"""Architectures that rotate the first half of a head with the second half, not neighbors."""

_GEMMA = {"gemma2", "gemma3"}
_WINDOW_PERIOD = {"gemma2": 2, "gemma3": 6}  # one of so many layers has the whole context
_ARCHITECTURES = ("llama", "arcee", *sorted(_NEOX))

_MIXTURES = {"llama", "qwen3moe"}  # architectures that may have experts

_GLOBAL_TENSORS = {"token_embd.weight", "output.weight", "rope_freqs.weight"}
_BLOCK_TENSOR = re.compile(
    r"blk\.\d+\.((attn_(q|k|v|output)|ffn_(gate|up|down))\.(weight|bias)"
    r"|(attn_norm|attn_(q|k)_norm|post_attention_norm|ffn_norm|post_ffw_norm)\.weight)"
)
_EXPERT_TENSOR = re.compile(r"blk\.\d+\.ffn_(gate_inp|(gate|up|down)_exps)\.weight")
_CONVOLUTION = re.compile(r"blk\.\d+\.shortconv\.(in_proj|conv|out_proj)\.weight")

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The metadata of the forward pass of a model."""

    arch: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_heads_kv: int
    head_dim: int
    rope_dim: int
    rope_base: float
    rope_base_window: float
    rope_scale: float  # of positions
    epsilon: float
    n_experts_used: int  # by a token; 0: no experts
    window: int  # tokens; 0: all layers have the whole context
    attention_cap: float  # 0: none
    logit_cap: float

    @classmethod
    def of(cls, model: Model) -> Shape:
        """Raises MackoError if this module cannot evaluate the model."""
        keys = {key.name: key for key in model.keys}
        arch = str(keys["general.architecture"].value())

        def get(name: str, default: Any = None) -> Any:
            key = keys.get(f"{arch}.{name}")
            if key is None and default is None:
                raise errors.error(errors.BAD_KEY_VALUE, f"{model.path}: no key {arch}.{name}")
            value = default if key is None else key.value()
            if isinstance(value, list):
                values = set(value) - ({0} if arch == "lfm2" else set())  # blocks without attention have no heads
                if len(values) != 1:
                    raise _unsupported(model, f"{arch}.{name} differs between layers")
                value = values.pop()
            return value

        if arch not in _ARCHITECTURES:
            raise _unsupported(model, f"architecture {arch}; known: {', '.join(_ARCHITECTURES)}")
        has_experts = get("expert_count", 0) > 0
        if has_experts and (arch not in _MIXTURES or get("expert_weights_scale", 1.0) not in (0.0, 1.0)):
            raise _unsupported(model, f"experts of {arch}" if arch not in _MIXTURES else "expert_weights_scale")
        if arch == "lfm2" and get("attention.sliding_window", 0):
            raise _unsupported(model, "lfm2.attention.sliding_window")
        scaling = get("rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise _unsupported(model, f"{arch}.rope.scaling.type {scaling}")
        known = {*_GLOBAL_TENSORS, _output_norm(arch)}
        patterns = [
            _BLOCK_TENSOR,
            *([_EXPERT_TENSOR] if has_experts else []),
            *([_CONVOLUTION] if arch == "lfm2" else []),
        ]
        for name in (t.name for t in model.tensors):
            if name not in known and not any(pattern.fullmatch(name) for pattern in patterns):
                raise _unsupported(model, f"tensor {name}")
        n_embd, n_heads = get("embedding_length"), get("attention.head_count")
        head_dim = get("attention.key_length", n_embd // n_heads)
        return cls(
            arch=arch,
            n_layers=get("block_count"),
            n_embd=n_embd,
            n_heads=n_heads,
            n_heads_kv=get("attention.head_count_kv", n_heads),
            head_dim=head_dim,
            rope_dim=get("rope.dimension_count", head_dim),
            rope_base=get("rope.freq_base", 10000.0),
            rope_base_window=get("rope.freq_base_swa", 10000.0),
            rope_scale=1 / (get("rope.scaling.factor", 0.0) or 1.0) if scaling == "linear" else 1.0,
            epsilon=get("attention.layer_norm_rms_epsilon"),
            n_experts_used=get("expert_used_count") if has_experts else 0,
            window=get("attention.sliding_window", 0) if arch in _WINDOW_PERIOD else 0,
            attention_cap=get("attn_logit_softcapping", 50.0) if arch == "gemma2" else 0.0,
            logit_cap=get("final_logit_softcapping", 30.0) if arch == "gemma2" else 0.0,
        )

    def has_window(self, layer: int) -> bool:
        period = _WINDOW_PERIOD.get(self.arch, 0)
        return self.window > 0 and layer % period != period - 1

    @property
    def attention_scale(self) -> float:
        if self.arch == "gemma2" and self.n_layers == 46:  # 27B, by the rule of llama.cpp
            return 1 / math.sqrt(self.n_embd / self.n_heads)
        return 1 / math.sqrt(self.head_dim)


def _output_norm(arch: str) -> str:
    return "token_embd_norm.weight" if arch == "lfm2" else "output_norm.weight"


def _unsupported(model: Model, what: str) -> errors.MackoError:
    return errors.error(errors.UNSUPPORTED_ARCH, f"{model.path}: {what}: not supported by recover")


def read_weights(
    model: Model, device: torch.device, dtype: torch.dtype | None = torch.float32
) -> dict[str, torch.Tensor]:
    """All tensors of a model, sparse ones decoded: matrices (rows, cols). dtype: of matrices; None: that of the file.
    Raises MackoError.
    """
    out = {}
    for t in model.tensors:
        values = as_values(t.read_bits(), t.type).reshape(tuple(reversed(t.ne))).to(device)
        if len(t.ne) == 1:
            values = values.float()
        elif dtype is not None:
            values = values.to(dtype)  # on the device, which is faster than the host
        out[t.name] = values
        if not values.isfinite().all():
            raise errors.error(errors.NOT_FINITE, f"{model.path}: {t.name}: contains values that are not finite")
    return out


def as_values(bits: Array, type_id: int) -> torch.Tensor:
    """Bit patterns of type F16, BF16 or F32 as values of that type."""
    if type_id in (TYPE_F16, TYPE_BF16):
        half = torch.float16 if type_id == TYPE_F16 else torch.bfloat16
        return torch.from_numpy(bits.view(np.int16)).view(half)
    return torch.from_numpy(to_float(bits, type_id))


def as_bits(values: torch.Tensor) -> Array:
    """The bit patterns of values of type float16, bfloat16 or float32, in host memory: uint16 or uint32."""
    is_half = values.element_size() == 2
    bits = values.contiguous().view(torch.int16 if is_half else torch.int32).cpu().numpy()
    found: Array = bits.view(np.uint16 if is_half else np.uint32)
    return found


MAX_DIVERGENCE = 1e-3
"""Largest divergence from llama.cpp's probabilities, in nats per token. F16 products differ by 1e-5."""

_CHECKED_TOKENS = 64  # whose logits are compared at once, for the sake of memory


def divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean over positions of KL(teacher || student); both are logits (chunks, tokens, n_vocab)."""
    s, t = (F.log_softmax(x.flatten(0, 1), dim=-1) for x in (student, teacher))
    return F.kl_div(s, t, reduction="batchmean", log_target=True)


def capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """x within -cap and cap, smoothly; 0: unchanged."""
    return torch.tanh(x / cap) * cap if cap else x


def as_tokens(chunks: Chunks, device: torch.device) -> torch.Tensor:
    """Tokens for embed()."""
    return torch.from_numpy(chunks.astype(np.int64)).to(device, non_blocking=True)


def divergence_from_llama_cpp(llama: TextModel, model: Transformer, chunk: Chunks, device: torch.device) -> float:
    """Divergence of the logits of a model from llama.cpp's, in nats per token. chunk: tokens (1, n_ctx)."""
    expected, total = llama.evaluate(chunk), 0.0
    with torch.no_grad():
        hidden = model.hidden(as_tokens(llama.as_sequences(chunk), device))
        for i in range(0, chunk.shape[1], _CHECKED_TOKENS):
            part = slice(i, i + _CHECKED_TOKENS)
            teacher = torch.from_numpy(np.array(expected[:, part])).to(device)
            total += float(divergence(model.logits_of(hidden[:, part]), teacher) * teacher.shape[1])
    return total / len(chunk[0])


class _Angles(NamedTuple):
    """Cosines and sines of rotary angles (positions, rope_dim / 2)."""

    cos: torch.Tensor
    sin: torch.Tensor


class Transformer:
    """The forward pass. weights: of read_weights(); each call reads them, so they can be trained."""

    def __init__(self, shape: Shape, weights: Weights, *, gradient_checkpointing: bool = False) -> None:
        self.shape = shape
        self.weights = weights
        self.gradient_checkpointing = gradient_checkpointing
        self._angles: dict[bool, _Angles] = {}  # of layers with a window's own base, and of the others

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Hidden states before the first block. tokens: (chunks, tokens), int64."""
        x = self.weights["token_embd.weight"][tokens].float()
        return x * math.sqrt(self.shape.n_embd) if self.shape.arch in _GEMMA else x

    def part(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        """Hidden states after one of PARTS of a block."""
        return x + (self._attention(layer, x) if name == "attention" else self._feed_forward(layer, x))

    def block(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        for name in PARTS:
            x = self.part(layer, name, x)
        return x

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """(chunks, tokens, n_vocab), float32."""
        return self.logits_of(self.hidden(tokens))

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """logits() of hidden()."""
        return capped(F.linear(hidden, self.head).float(), self.shape.logit_cap)

    @property
    def head(self) -> torch.Tensor:
        """The matrix (n_vocab, n_embd) that turns hidden() into logits."""
        return self.weights.get("output.weight", self.weights["token_embd.weight"])

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """The input of the head: (chunks, tokens, n_embd), in the type of the head."""
        return self.hidden_after(0, self.embed(tokens))

    def hidden_after(self, first: int, x: torch.Tensor) -> torch.Tensor:
        """hidden() of hidden states before a block."""
        for layer in range(first, self.shape.n_layers):
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(
                    self.block, layer, x, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = self.block(layer, x)
        return self._norm(x, _output_norm(self.shape.arch)).to(self.head.dtype)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[name]
        return F.rms_norm(x.float(), weight.shape, weight, self.shape.epsilon)

    def _input(self, x: torch.Tensor, norm: str) -> torch.Tensor:
        """The normalized input of several products, which is converted only once for them."""
        h = self._norm(x, norm)
        return h.bfloat16() if torch.is_autocast_enabled() else h

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = _product(x, self.weights[f"{name}.weight"])
        bias = self.weights.get(f"{name}.bias")
        return out if bias is None else out + bias

    def _attention(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        s, prefix = self.shape, f"blk.{layer}."
        h = self._input(x, f"{prefix}attn_norm.weight")
        if f"{prefix}shortconv.conv.weight" in self.weights:
            return self._convolution(f"{prefix}shortconv", h)

        def heads(which: str, n: int, rotate: bool = True) -> torch.Tensor:
            out = self._linear(h, f"{prefix}attn_{which}").unflatten(-1, (n, s.head_dim)).transpose(1, 2)
            if f"{prefix}attn_{which}_norm.weight" in self.weights:
                out = self._norm(out, f"{prefix}attn_{which}_norm.weight")
            return self._rotated(out, layer) if rotate else out

        q, k, v = heads("q", s.n_heads), heads("k", s.n_heads_kv), heads("v", s.n_heads_kv, rotate=False)
        out = self._weighted(q, k, v, layer).transpose(1, 2).flatten(-2)
        out = self._linear(out, f"{prefix}attn_output")
        post = f"{prefix}post_attention_norm.weight"
        return self._norm(out, post) if post in self.weights else out

    def _convolution(self, prefix: str, h: torch.Tensor) -> torch.Tensor:
        """The short convolution of LFM2, in place of an attention: c * conv(b * x), each channel by itself."""
        b, c, x = self._linear(h, f"{prefix}.in_proj").chunk(3, dim=-1)
        kernel = self.weights[f"{prefix}.conv.weight"].float()  # (n_embd, length); the last column is for the newest
        past = self._with_past(prefix, (b * x).float().transpose(1, 2), kernel.shape[1] - 1)
        out = F.conv1d(past, kernel[:, None], groups=kernel.shape[0]).transpose(1, 2)
        return self._linear((c * out).to(h.dtype), f"{prefix}.out_proj")

    def _with_past(self, prefix: str, x: torch.Tensor, n: int) -> torch.Tensor:
        """Inputs x (chunks, n_embd, tokens) of a convolution, after the n before them."""
        return F.pad(x, (n, 0))

    def _weighted(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """Values weighted by the softmax of q k^T: (chunks, n_heads, tokens, head_dim); k and v have n_heads_kv."""
        s, n = self.shape, q.shape[2]
        k, v = (y.repeat_interleave(s.n_heads // s.n_heads_kv, dim=1) for y in (k, v))
        windowed = s.has_window(layer) and n > s.window
        if not windowed and not s.attention_cap:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=s.attention_scale)
        at = torch.arange(n, device=q.device)
        distance = at[:, None] - at[None, :]
        seen = (distance >= 0) & (distance < (s.window if windowed else n))
        if not s.attention_cap:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=s.attention_scale)
        scores = capped((q @ k.transpose(-1, -2)) * s.attention_scale, s.attention_cap)
        return torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ v

    def _rotated(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """Rotary position embedding of the first rope_dim of each head."""
        s = self.shape
        cos, sin = self._cos_and_sin(s.arch == "gemma3" and s.has_window(layer), x.shape[2], x.device)
        rotated, rest = x[..., : s.rope_dim], x[..., s.rope_dim :]
        if s.arch in _NEOX:
            a, b = rotated.chunk(2, dim=-1)
            out = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        else:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            out = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        return torch.cat([out, rest], dim=-1) if rest.shape[-1] else out

    def _cos_and_sin(self, local: bool, n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for the first n positions (n, rope_dim / 2). The last result is kept for other layers."""
        s = self.shape
        last = self._angles.get(local)
        if last is None or (last.cos.shape[0], last.cos.device) != (n, device):
            exponents = torch.arange(0, s.rope_dim, 2, device=device, dtype=torch.float32) / s.rope_dim
            frequencies = (s.rope_base_window if local else s.rope_base) ** -exponents
            if "rope_freqs.weight" in self.weights:
                frequencies = frequencies / self.weights["rope_freqs.weight"]
            positions = torch.arange(n, device=device, dtype=torch.float32) * (1.0 if local else s.rope_scale)
            angle = positions[:, None] * frequencies
            last = self._angles[local] = _Angles(angle.cos(), angle.sin())
        return last.cos, last.sin

    def _feed_forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        prefix = f"blk.{layer}."
        h = self._input(x, f"{prefix}ffn_norm.weight")
        if self.shape.n_experts_used:
            return self._experts(prefix, h)
        up = self._linear(h, f"{prefix}ffn_up")
        if self.shape.arch == "arcee":  # without a gate
            neurons = F.relu(up).square()
        else:
            gate = self._linear(h, f"{prefix}ffn_gate")
            neurons = up * (F.gelu(gate, approximate="tanh") if self.shape.arch in _GEMMA else F.silu(gate))
        out = self._linear(neurons, f"{prefix}ffn_down")
        post = f"{prefix}post_ffw_norm.weight"
        return self._norm(out, post) if post in self.weights else out

    def _experts(self, prefix: str, h: torch.Tensor) -> torch.Tensor:
        """The experts with the highest probabilities for each token, weighted by these; the weights add up to 1."""
        rows = h.flatten(0, 1)
        probabilities = F.softmax(self._linear(rows, f"{prefix}ffn_gate_inp").float(), dim=-1)
        weights, chosen = probabilities.topk(self.shape.n_experts_used, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        gate, up, down = (self.weights[f"{prefix}ffn_{x}_exps.weight"].unbind() for x in ("gate", "up", "down"))
        out = torch.zeros_like(rows, dtype=torch.float32)
        for i in range(len(down)):
            token, place = (chosen == i).nonzero(as_tuple=True)
            x = rows[token]
            neurons = F.silu(_product(x, gate[i])) * _product(x, up[i])
            out = out.index_add(0, token, _product(neurons, down[i]).float() * weights[token, place, None])
        return out.unflatten(0, h.shape[:2])


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (..., cols) times a matrix (rows, cols)."""
    is_mixed = torch.is_autocast_enabled()
    out = F.linear(x if is_mixed else x.to(weight.dtype), weight)
    return out if is_mixed else out.float()  # mixed: it stays in bfloat16, for the sake of memory
