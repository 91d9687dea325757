"""Random models of a few kilobytes, one for each supported architecture, that llama.cpp loads and runs; also arcee,
whose feed-forward blocks have no gate, and lfm2, whose first block has a short convolution in place of attention.
"""

from __future__ import annotations

import numpy as np

from support.gguf_bytes import ARRAY, BOOL, F32, GGUF, I32, STRING, U32, Tensor

N_EMBD, N_LAYER, N_HEAD, N_KV, N_FF, N_EXPERT = 64, 2, 4, 2, 96, 4
N_EMBD_HEAD = N_EMBD // N_HEAD
ARCHITECTURES = ("llama", "llama-moe", "mistral3", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "gpt-oss")


def _spm(f: GGUF) -> int:
    tokens = (
        [b"<unk>", b"<s>", b"</s>"]
        + [b"<0x%02X>" % b for b in range(256)]
        + ["▁".encode(), b"a", b"b", "▁a".encode(), b"ab"]
    )
    f.set("tokenizer.ggml.model", STRING, b"llama")
    f.set("tokenizer.ggml.tokens", ARRAY, tokens, STRING)
    f.set("tokenizer.ggml.scores", ARRAY, [-float(i) for i in range(len(tokens))], F32)
    f.set("tokenizer.ggml.token_type", ARRAY, [2, 3, 3] + [6] * 256 + [1] * 5, I32)
    return len(tokens)


def _bpe(f: GGUF) -> int:
    # GPT-2's printable characters for bytes; some bytes have none, as in a reduced vocabulary
    tokens = [bytes([b]) for b in range(33, 127)] + [
        "Ġ".encode(),
        "Ċ".encode(),
        b"ab",
        "Ġa".encode(),
        b"<|bos|>",
        b"<|endoftext|>",
    ]
    f.set("tokenizer.ggml.model", STRING, b"gpt2")
    f.set("tokenizer.ggml.pre", STRING, b"qwen2")
    f.set("tokenizer.ggml.tokens", ARRAY, tokens, STRING)
    f.set("tokenizer.ggml.token_type", ARRAY, [1] * (len(tokens) - 2) + [3, 3], I32)
    f.set("tokenizer.ggml.merges", ARRAY, [b"a b", "Ġ a".encode()], STRING)
    f.set("tokenizer.ggml.bos_token_id", U32, len(tokens) - 2)
    f.set("tokenizer.ggml.eos_token_id", U32, len(tokens) - 1)
    f.set("tokenizer.ggml.add_bos_token", BOOL, 1)
    return len(tokens)


def _metadata(f: GGUF, arch: str, moe: bool) -> None:
    def u32(key, value):
        f.set(f"{arch}.{key}", U32, value)

    f.set("general.architecture", STRING, arch.encode())
    f.set("general.name", STRING, b"tiny")
    u32("block_count", N_LAYER)
    u32("context_length", 256)
    u32("embedding_length", N_EMBD)
    u32("feed_forward_length", N_FF)
    u32("attention.head_count", N_HEAD)
    if arch == "lfm2":
        f.set("lfm2.attention.head_count_kv", ARRAY, [0, N_KV], U32)
        u32("shortconv.l_cache", 3)
    else:
        u32("attention.head_count_kv", N_KV)
    u32("attention.key_length", N_EMBD_HEAD)
    u32("attention.value_length", N_EMBD_HEAD)
    u32("rope.dimension_count", N_EMBD_HEAD)
    f.set(f"{arch}.attention.layer_norm_rms_epsilon", F32, 1e-5)
    f.set(f"{arch}.rope.freq_base", F32, 10000.0)
    if moe:
        u32("expert_count", N_EXPERT)
        u32("expert_used_count", 2)
        u32("expert_feed_forward_length", N_FF)
    if arch in ("gemma2", "gemma3", "gpt-oss"):
        u32("attention.sliding_window", 16)
    if arch == "gemma2":
        f.set("gemma2.attn_logit_softcapping", F32, 50.0)
        f.set("gemma2.final_logit_softcapping", F32, 30.0)


class _Tensors:
    """Appends tensors with random values to a file; ``ne`` and ``n`` are in GGUF's order, columns first."""

    def __init__(self, f: GGUF, seed: int) -> None:
        self.f = f
        self.rng = np.random.default_rng(seed)

    def matrix(self, name: str, *ne: int) -> None:
        w = self.rng.normal(0, 0.2, ne[::-1]).astype(np.float16)
        w[self.rng.random(w.shape) < 0.7] = 0
        self.f.tensors.append(Tensor(name.encode(), list(ne), 1, w.tobytes()))

    def vector(self, name: str, *ne: int, bias: bool = False) -> None:
        """Several vectors, if ne has a number of them."""
        v = self.rng.normal(0 if bias else 1, 0.1, ne[::-1]).astype(np.float32)
        self.f.tensors.append(Tensor(name.encode(), list(ne), 0, v.tobytes()))


def _attention(t: _Tensors, arch: str, blk: str) -> None:
    t.vector(blk + "attn_norm.weight", N_EMBD)
    if arch == "lfm2" and blk == "blk.0.":
        t.matrix(blk + "shortconv.in_proj.weight", N_EMBD, 3 * N_EMBD)
        t.matrix(blk + "shortconv.out_proj.weight", N_EMBD, N_EMBD)
        kernel = t.rng.normal(0, 1, (N_EMBD, 3)).astype(np.float32)
        t.f.tensors.append(Tensor(f"{blk}shortconv.conv.weight".encode(), [3, N_EMBD], 0, kernel.tobytes()))
        return
    if arch == "phi3":
        t.matrix(blk + "attn_qkv.weight", N_EMBD, (N_HEAD + 2 * N_KV) * N_EMBD_HEAD)
    else:
        t.matrix(blk + "attn_q.weight", N_EMBD, N_HEAD * N_EMBD_HEAD)
        t.matrix(blk + "attn_k.weight", N_EMBD, N_KV * N_EMBD_HEAD)
        t.matrix(blk + "attn_v.weight", N_EMBD, N_KV * N_EMBD_HEAD)
    if arch in ("qwen2", "gpt-oss"):
        for x, n in (("q", N_HEAD), ("k", N_KV), ("v", N_KV)):
            t.vector(blk + f"attn_{x}.bias", n * N_EMBD_HEAD, bias=True)
    if arch in ("qwen3", "qwen3moe", "gemma3", "lfm2"):
        t.vector(blk + "attn_q_norm.weight", N_EMBD_HEAD)
        t.vector(blk + "attn_k_norm.weight", N_EMBD_HEAD)
    t.matrix(blk + "attn_output.weight", N_HEAD * N_EMBD_HEAD, N_EMBD)
    if arch == "gpt-oss":
        t.vector(blk + "attn_output.bias", N_EMBD, bias=True)
        t.vector(blk + "attn_sinks.weight", N_HEAD, bias=True)


def _norms_around_feed_forward(t: _Tensors, arch: str, blk: str) -> None:
    gemma = arch.startswith("gemma")
    if gemma or arch == "gpt-oss":
        t.vector(blk + "post_attention_norm.weight", N_EMBD)
    if arch != "gpt-oss":
        t.vector(blk + "ffn_norm.weight", N_EMBD)
    if gemma:
        t.vector(blk + "post_ffw_norm.weight", N_EMBD)


def _feed_forward(t: _Tensors, arch: str, moe: bool, blk: str) -> None:
    if moe:
        t.matrix(blk + "ffn_gate_inp.weight", N_EMBD, N_EXPERT)
        t.matrix(blk + "ffn_gate_exps.weight", N_EMBD, N_FF, N_EXPERT)
        t.matrix(blk + "ffn_up_exps.weight", N_EMBD, N_FF, N_EXPERT)
        t.matrix(blk + "ffn_down_exps.weight", N_FF, N_EMBD, N_EXPERT)
        if arch == "gpt-oss":
            t.vector(blk + "ffn_gate_inp.bias", N_EXPERT, bias=True)
            t.vector(blk + "ffn_gate_exps.bias", N_FF, N_EXPERT, bias=True)
            t.vector(blk + "ffn_up_exps.bias", N_FF, N_EXPERT, bias=True)
            t.vector(blk + "ffn_down_exps.bias", N_EMBD, N_EXPERT, bias=True)
    elif arch == "phi3":
        t.matrix(blk + "ffn_up.weight", N_EMBD, 2 * N_FF)
        t.matrix(blk + "ffn_down.weight", N_FF, N_EMBD)
    else:
        if arch != "arcee":
            t.matrix(blk + "ffn_gate.weight", N_EMBD, N_FF)
        t.matrix(blk + "ffn_up.weight", N_EMBD, N_FF)
        t.matrix(blk + "ffn_down.weight", N_FF, N_EMBD)


def make(name: str, seed: int = 1) -> GGUF:
    """A dense file. Matrices are F16 with 70 % zeros; norms and biases are F32."""
    arch = "llama" if name == "llama-moe" else name
    moe = name in ("llama-moe", "qwen3moe", "gpt-oss")
    f = GGUF()
    _metadata(f, arch, moe)
    n_vocab = _bpe(f) if arch.startswith("qwen") or arch == "gpt-oss" else _spm(f)
    t = _Tensors(f, seed)
    t.matrix("token_embd.weight", N_EMBD, n_vocab)
    t.vector("token_embd_norm.weight" if arch == "lfm2" else "output_norm.weight", N_EMBD)
    if arch not in ("gemma2", "qwen3", "lfm2"):
        t.matrix("output.weight", N_EMBD, n_vocab)
    for i in range(N_LAYER):
        blk = f"blk.{i}."
        _attention(t, arch, blk)
        _norms_around_feed_forward(t, arch, blk)
        _feed_forward(t, arch, moe, blk)
    return f


def make_image_encoder(side: int, n_embd: int, seed: int = 1) -> GGUF:
    """An image encoder with Gemma 3's projector, for images of side * side pixels and a text model of width n_embd."""
    patch = 4
    f = GGUF()
    f.set("general.architecture", STRING, b"clip")
    f.set("clip.has_vision_encoder", BOOL, 1)
    f.set("clip.projector_type", STRING, b"gemma3")
    numbers = {
        "image_size": side,
        "patch_size": patch,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "block_count": N_LAYER,
        "attention.head_count": N_HEAD,
        "projection_dim": n_embd,
    }
    for key, value in numbers.items():
        f.set(f"clip.vision.{key}", U32, value)
    f.set("clip.vision.attention.layer_norm_epsilon", F32, 1e-6)
    f.set("clip.vision.image_mean", ARRAY, [0.5] * 3, F32)
    f.set("clip.vision.image_std", ARRAY, [0.5] * 3, F32)
    t = _Tensors(f, seed)
    t.matrix("v.patch_embd.weight", patch, patch, 3, N_EMBD)
    t.vector("v.position_embd.weight", N_EMBD, (side // patch) ** 2, bias=True)
    for i in range(N_LAYER):
        blk = f"v.blk.{i}."
        t.vector(blk + "ln1.weight", N_EMBD)
        for x in ("q", "k", "v", "out"):
            t.matrix(blk + f"attn_{x}.weight", N_EMBD, N_EMBD)
        t.vector(blk + "ln2.weight", N_EMBD)
        t.matrix(blk + "ffn_up.weight", N_EMBD, N_FF)
        t.matrix(blk + "ffn_down.weight", N_FF, N_EMBD)
    t.vector("mm.soft_emb_norm.weight", N_EMBD)
    t.matrix("mm.input_projection.weight", n_embd, N_EMBD)
    return f
