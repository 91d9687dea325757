"""Random models of a few kilobytes, one per supported architecture, that llama.cpp loads and runs; with zeros, so that
they convert.
"""

from __future__ import annotations

import numpy as np

from gguf_bytes import ARRAY, BOOL, F32, GGUF, I32, STRING, U32, Tensor

N_EMBD, N_LAYER, N_HEAD, N_KV, N_FF, N_EXPERT = 64, 2, 4, 2, 96, 4
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
    # GPT-2's printable stand-ins for bytes; a few bytes have none here, as in a real cut-down vocabulary
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


def make(name: str, seed: int = 1) -> GGUF:
    """The dense file. Matrices are F16 with 70 % zeros; norms and biases F32."""
    rng = np.random.default_rng(seed)
    arch = "llama" if name == "llama-moe" else name
    moe = name in ("llama-moe", "qwen3moe", "gpt-oss")
    head = N_EMBD // N_HEAD
    f = GGUF()
    f.set("general.architecture", STRING, arch.encode())
    f.set("general.name", STRING, b"tiny")

    def u32(key, value):
        f.set(f"{arch}.{key}", U32, value)

    u32("block_count", N_LAYER)
    u32("context_length", 256)
    u32("embedding_length", N_EMBD)
    u32("feed_forward_length", N_FF)
    u32("attention.head_count", N_HEAD)
    u32("attention.head_count_kv", N_KV)
    u32("attention.key_length", head)
    u32("attention.value_length", head)
    u32("rope.dimension_count", head)
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
    n_vocab = _bpe(f) if arch.startswith("qwen") or arch == "gpt-oss" else _spm(f)

    def matrix(tensor, *ne):
        w = rng.normal(0, 0.2, ne[::-1]).astype(np.float16)
        w[rng.random(w.shape) < 0.7] = 0
        f.tensors.append(Tensor(tensor.encode(), list(ne), 1, w.tobytes()))

    def vector(tensor, n, bias=False):
        v = rng.normal(0 if bias else 1, 0.1, n).astype(np.float32)
        f.tensors.append(Tensor(tensor.encode(), [n], 0, v.tobytes()))

    def biases(tensor, n):
        f.tensors.append(
            Tensor(tensor.encode(), [n, N_EXPERT], 0, rng.normal(0, 0.1, (N_EXPERT, n)).astype(np.float32).tobytes())
        )

    matrix("token_embd.weight", N_EMBD, n_vocab)
    vector("output_norm.weight", N_EMBD)
    if arch not in ("gemma2", "qwen3"):
        matrix("output.weight", N_EMBD, n_vocab)
    for i in range(N_LAYER):
        blk = f"blk.{i}."
        gemma = arch.startswith("gemma")
        vector(blk + "attn_norm.weight", N_EMBD)
        if arch == "phi3":
            matrix(blk + "attn_qkv.weight", N_EMBD, (N_HEAD + 2 * N_KV) * head)
        else:
            matrix(blk + "attn_q.weight", N_EMBD, N_HEAD * head)
            matrix(blk + "attn_k.weight", N_EMBD, N_KV * head)
            matrix(blk + "attn_v.weight", N_EMBD, N_KV * head)
        if arch in ("qwen2", "gpt-oss"):
            for x, n in (("q", N_HEAD), ("k", N_KV), ("v", N_KV)):
                vector(blk + f"attn_{x}.bias", n * head, bias=True)
        if arch in ("qwen3", "qwen3moe", "gemma3"):
            vector(blk + "attn_q_norm.weight", head)
            vector(blk + "attn_k_norm.weight", head)
        matrix(blk + "attn_output.weight", N_HEAD * head, N_EMBD)
        if arch == "gpt-oss":
            vector(blk + "attn_output.bias", N_EMBD, bias=True)
            vector(blk + "attn_sinks.weight", N_HEAD, bias=True)
        if gemma or arch == "gpt-oss":
            vector(blk + "post_attention_norm.weight", N_EMBD)
        if arch != "gpt-oss":
            vector(blk + "ffn_norm.weight", N_EMBD)
        if gemma:
            vector(blk + "post_ffw_norm.weight", N_EMBD)
        if moe:
            matrix(blk + "ffn_gate_inp.weight", N_EMBD, N_EXPERT)
            matrix(blk + "ffn_gate_exps.weight", N_EMBD, N_FF, N_EXPERT)
            matrix(blk + "ffn_up_exps.weight", N_EMBD, N_FF, N_EXPERT)
            matrix(blk + "ffn_down_exps.weight", N_FF, N_EMBD, N_EXPERT)
            if arch == "gpt-oss":
                vector(blk + "ffn_gate_inp.bias", N_EXPERT, bias=True)
                biases(blk + "ffn_gate_exps.bias", N_FF)
                biases(blk + "ffn_up_exps.bias", N_FF)
                biases(blk + "ffn_down_exps.bias", N_EMBD)
        elif arch == "phi3":
            matrix(blk + "ffn_up.weight", N_EMBD, 2 * N_FF)
            matrix(blk + "ffn_down.weight", N_FF, N_EMBD)
        else:
            matrix(blk + "ffn_gate.weight", N_EMBD, N_FF)
            matrix(blk + "ffn_up.weight", N_EMBD, N_FF)
            matrix(blk + "ffn_down.weight", N_FF, N_EMBD)
    return f
