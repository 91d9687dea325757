"""Random models of a few hundred kilobytes for every architecture of the installed llama.cpp.

The metadata follow llama.cpp's test-llama-archs. The tensors and their shapes are those that llama.cpp requests when
it builds a model from metadata alone (llama_model_init_from_user), so this file has no list of tensors that could
become outdated. Multiplied matrices are F16, all other tensors are F32.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import tempfile
import zlib
from typing import Any, NamedTuple

import numpy as np

from support.gguf_bytes import ARRAY, BOOL, F32, GGUF, I32, STRING, U32, U64, Tensor, write

TYPE_F32, TYPE_F16, TYPE_I32 = 0, 1, 26
N_CTX, N_TOKENS = 256, 64

EMBEDDING = ("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3",
             "eurobert", "gemma-embedding", "llama-embed", "t5encoder")  # fmt: skip
MLA = ("deepseek2", "deepseek32", "glm-dsa", "dots3note", "kimi-linear", "bailingmoe3", "kimi-k3",
       "glm5-next", "mistral4", "hy_v4", "plm", "minicpm3")  # fmt: skip
# architectures whose second layer has no attention, or no keys and values
HYBRID = ("plamo2", "jamba", "nemotron_h", "nemotron_h_moe", "granitehybrid", "lfm2", "lfm2moe", "kimi-linear",
          "bailingmoe3", "kimi-k3", "glm5-next")  # fmt: skip
# architectures with a list of the layers that have a window; in the others, every n-th layer has none
WINDOW_LISTS = ("cohere2moe", "mimo2", "step35", "spark2_5", "muse-glimmer", "granite_swa", "dots3note", "maple")
# architectures that llama.cpp loads with experts only
EXPERTS = ("llama4", "cohere2moe", "grok", "qwen2moe", "qwen3moe", "qwen3next", "qwen3vlmoe", "qwen35moe", "qwen4exp",
           "phimoe", "dbrx", "olmoe", "arctic", "deepseek", "deepseek2", "deepseek2-ocr", "deepseek32", "dots3note",
           "deepseek4", "glm4moe", "glm-dsa", "exaone-moe", "bailingmoe", "bailingmoe2", "bailingmoe3", "dots1",
           "afmoe", "ernie4_5-moe", "hunyuan-moe", "hy_v3", "hy_v4", "gpt-oss", "lfm2moe", "smallthinker",
           "llada-moe", "grovemoe", "minimax-01", "minimax-m2", "minimax-m3", "rnd1", "mimo2", "kimi-linear", "kimi-k3",
           "glm5-next", "step35", "mistral4", "mellum", "laguna", "maple", "granitemoe", "nemotron_h_moe",
           "nomic-bert-moe")  # fmt: skip


class Shape(NamedTuple):
    """The dimensions of a small model; SHAPES has those that the graph of an architecture requires."""

    n_vocab: int = 128
    n_embd: int = 256
    n_head: int = 2
    n_ff: int = 384
    n_layer: int = 2


SHAPES = {
    "llama4": Shape(n_layer=4),
    "gemma4": Shape(n_embd=128, n_ff=192, n_layer=5),
    "gemma3n": Shape(n_embd=64, n_head=1, n_ff=96, n_layer=22),
    "deepseek4": Shape(n_embd=512, n_head=8, n_ff=1024, n_layer=4),
    "step35": Shape(n_embd=160),
    "laguna": Shape(n_embd=160),
    "qwen3": Shape(n_head=4),
    "muse-glimmer": Shape(n_head=4),
    "afmoe": Shape(n_head=4),
    "nemotron_h": Shape(n_layer=3),
    "nemotron_h_moe": Shape(n_layer=3),
    "chameleon": Shape(n_vocab=10240),
    "qwen3tts": Shape(n_vocab=3072),
    "hrm_text": Shape(n_layer=6),
    **{name: Shape(n_embd=128, n_head=1, n_ff=192) for name in MLA},
}


# ---- metadata ----


def _tokens(n: int) -> list[bytes]:
    return [bytes([b]) for b in range(33, 127)] + ["Ġ".encode(), "Ċ".encode(), b"ab"] + [b"t%d" % i for i in range(n)]


def _vocabulary(f: GGUF, arch: str, n: int) -> None:
    model, types = b"gpt2", [1] * n
    tokens = _tokens(n)[:n]
    if arch in ("rwkv6", "rwkv7"):
        model, tokens = b"rwkv", [b"<s>", *tokens][:n]
    elif arch in ("t5", "t5encoder"):
        model, types = b"t5", [3, 3, 2] + [1] * (n - 3)
        tokens = [b"<pad>", b"</s>", b"<unk>", "▁".encode(), *tokens][:n]
    elif "bert" in arch and arch != "eurobert":
        model, types = b"bert", [3] * 4 + [1] * (n - 4)
        tokens = [b"[PAD]", b"[UNK]", b"[CLS]", b"[SEP]", *(b"\xe2\x96\x81" + t for t in tokens)][:n]
        for name, token in (("padding", 0), ("unknown", 1), ("cls", 2), ("bos", 2), ("seperator", 3), ("mask", 1)):
            f.set(f"tokenizer.ggml.{name}_token_id", U32, token)
        f.set("tokenizer.ggml.token_type_count", U32, 2)
    elif arch == "wavtokenizer-dec":
        f.set("tokenizer.ggml.model", STRING, b"none")
        return
    else:
        f.set("tokenizer.ggml.pre", STRING, b"gpt-2")
        f.set("tokenizer.ggml.merges", ARRAY, [b"a b"], STRING)
        f.set("tokenizer.ggml.bos_token_id", U32, n - 1)
        f.set("tokenizer.ggml.eos_token_id", U32, n - 1)
        f.set("tokenizer.ggml.padding_token_id", U32, n - 1)
    f.set("tokenizer.ggml.model", STRING, model)
    f.set("tokenizer.ggml.tokens", ARRAY, tokens, STRING)
    f.set("tokenizer.ggml.scores", ARRAY, [-float(i) for i in range(n)], F32)
    f.set("tokenizer.ggml.token_type", ARRAY, types, I32)


def _typed(value: Any) -> tuple[int, Any, int]:
    """The GGUF type of a Python value, the value, and the type of its elements; the dtype decides for numpy scalars."""
    if isinstance(value, list):
        return ARRAY, [_typed(v)[1] for v in value], _typed(value[0])[0]
    if isinstance(value, str):
        return STRING, value.encode(), -1
    if isinstance(value, bool):
        return BOOL, int(value), -1
    if isinstance(value, np.uint64):
        return U64, int(value), -1
    return (F32, value, -1) if isinstance(value, float) else (U32, value, -1)


def _attention(arch: str, s: Shape) -> dict[str, Any]:
    n_embd_head = s.n_embd // s.n_head
    n_head_kv = {"qwen3": 1, "muse-glimmer": 2, "afmoe": 2, "deepseek4": 1}.get(arch, s.n_head)
    heads = [0 if i == 1 else s.n_head for i in range(s.n_layer)] if arch in HYBRID else None
    swa = [i % 2 for i in range(s.n_layer)]
    keys: dict[str, Any] = {
        "head_count": heads if heads and arch != "glm5-next" else s.n_head,
        "head_count_kv": heads or n_head_kv,
        "max_alibi_bias": 8.0,
        "clamp_kqv": 1.0,
        "layer_norm_epsilon": 1e-5,
        "layer_norm_rms_epsilon": 1e-5,
        "group_norm_epsilon": 1e-5,
        "group_norm_groups": 8,
        "q_lora_rank": 64 if arch == "deepseek4" else 512,
        "kv_lora_rank": 512,
        "relative_buckets_count": 8,
        "sliding_window": N_CTX // 8,
        "sliding_window_pattern": swa if arch in WINDOW_LISTS else [1, 1, 1, 1, 0] if arch == "gemma4" else 2,
        "indexer.head_count": s.n_head if arch == "minimax-m3" else 64,
        "indexer.key_length": n_embd_head if arch == "qwen4exp" else 128,
        "indexer.top_k": 131072,
        "indexer.block_size": 4,
        "indexer.kpool": 4,
        "indexer.kpool_select_tail": True,
        "indexer.local_blocks": 1,
    }
    if arch in EMBEDDING:
        keys["causal"] = False
    if arch == "plm":
        keys.update(key_length=192, value_length=128)
    elif arch == "minicpm3":
        keys.update(key_length=96, value_length=64)
    elif arch in MLA:
        keys.update(key_length=512 if arch == "glm5-next" else 576, value_length=512)
        keys.update(key_length_mla=192, value_length_mla=128)
    if arch == "deepseek4":
        keys.update(key_length=n_embd_head, value_length=n_embd_head, output_group_count=8, output_lora_rank=32)
        keys.update(compress_ratios=[0, 0, 4, 128], compress_rope_freq_base=160000.0)
    if arch == "gemma4":
        keys.update(key_length_swa=n_embd_head, value_length_swa=n_embd_head, shared_kv_layers=0)
    if arch == "dots3note":
        keys.update(kv_lora_rank_swa=512, key_length_swa=576, value_length_swa=512)
        keys.update(key_length_mla_swa=192, value_length_mla_swa=128)
    if arch in ("dots3note", "hy_v4"):
        keys["indexer.types"] = [1 - i for i in swa]
    if arch in ("qwen4exp", "glm5-next"):
        keys["compress_ratios"] = [4] * s.n_layer
    return {f"attention.{name}": value for name, value in keys.items()}


def _rope(arch: str, s: Shape) -> dict[str, Any]:
    n_embd_head = s.n_embd // s.n_head
    keys: dict[str, Any] = {"dimension_sections": [n_embd_head // 4] * 4}
    if arch == "bailingmoe3":
        keys["dimension_sections"] = [8, 12, 12, 0]
    if arch == "deepseek4":
        keys["dimension_count"] = n_embd_head // 2
    elif arch == "minicpm3":
        keys["dimension_count"] = 32
    elif arch in MLA:
        keys["dimension_count"] = 0 if arch == "glm5-next" else 64
    elif arch == "minimax-m3":
        keys["dimension_count"] = 64
    if arch in ("dots3note", "gemma4"):
        keys["freq_base_swa"] = 10000.0
    return {f"rope.{name}": value for name, value in keys.items()}


def _experts(arch: str, s: Shape, n: int) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": s.n_ff,
        "expert_shared_feed_forward_length": s.n_ff // 2,
        "expert_latent_length": s.n_ff,
        "interleave_moe_layer_step": 2,
        "expert_count": n,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_gating_func": 4 if arch == "deepseek4" else 2,
        "expert_group_scale": 1.0,
        "experts_per_group": 1,
    }


def _recurrent(arch: str, s: Shape) -> dict[str, Any]:
    next_qwen = arch in ("qwen3next", "qwen35", "qwen35moe", "qwen4exp")
    keys: dict[str, Any] = {
        "time_mix_extra_dim": 64,
        "time_decay_extra_dim": 128,
        "full_attention_interval": 2,
        "ssm.inner_size": 256 if next_qwen else 2 * s.n_embd,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.time_step_rank": s.n_head,
        "ssm.group_count": 0 if arch == "plamo2" else 2,
        "kda.head_dim": 128,
        "kda.gate_lower_bound": -5.0,
        "wkv.head_size": s.n_embd // s.n_head,
        "token_shift_count": 1 if arch == "rwkv6qwen2" or arch == "arwkv7" else 2,
        "shortconv.l_cache": 3,
    }
    if arch.endswith("rwkv7") or arch == "rwkv7":
        keys.update({f"attention.{name}_lora_rank": 32 for name in ("decay", "iclr", "value_residual_mix", "gate")})
    if arch != "bailingmoe3":
        keys["kda.safe_gate"] = True
    return keys


def _special(arch: str, s: Shape) -> dict[str, Any]:
    """The keys that only one or a few architectures need."""
    if arch in ("qwen4exp", "glm5-next"):
        n_heads = 4
        return {
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 2,
            "hyper_connection.epsilon": 1e-6,
            "hyper_connection.low_rank": 8,
            "ple.layers": [0],
            "ple.ngram_size": 3,
            "ple.heads_per_ngram": 2,
            "ple.conv_kernel": 4,
            "ple.eos_token_id": 0,
            "embedding_length_per_layer_input": s.n_embd // n_heads,
            "ple.layer_multipliers": [np.uint64(i) for i in (1, 3, 5)],
            "ple.head_offsets": [np.uint64(i * s.n_vocab) for i in range(n_heads)],
            "ple.head_vocab_sizes": [np.uint64(s.n_vocab)] * n_heads,
        }
    if arch in ("hy_v4", "deepseek4"):
        return {
            "hyper_connection.count": 4,
            "hyper_connection.epsilon": 1e-6,
            "swiglu_clamp_exp": 10.0,
            "expert_weights_scale": 1.0,
            "expert_weights_norm": True,
            "hyper_connection.magnitude": 2.0,
            "hyper_connection.sinkhorn_iterations": 2,
            "hash_layer_count": 0,
        }
    return {
        "gemma4": {"embedding_length_per_layer_input": s.n_embd // 2},
        "hrm_text": {"hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2},
        "maple": {"swiglu_clamp_exp": 7.0},
        "bailingmoe3": {"swiglu_clamp_exp": [0.0, 4.0], "swiglu_clamp_shexp": [0.0, 5.0]},
    }.get(arch, {})


def metadata(
    arch: str, experts: bool, n_experts: int = 2, shape: Shape | None = None, other: dict[str, Any] | None = None
) -> GGUF:
    """A GGUF file that has metadata and no tensors. A token uses two experts.

    shape: dimensions instead of those of SHAPES. other: values of keys of the architecture; None removes a key.
    """
    s = shape or SHAPES.get(arch, Shape())
    f = GGUF()
    f.set("general.architecture", STRING, arch.encode())
    keys: dict[str, Any] = {
        "vocab_size": s.n_vocab,
        "context_length": N_CTX,
        "embedding_length": s.n_embd,
        "features_length": s.n_embd,
        "block_count": s.n_layer,
        "leading_dense_block_count": 1,
        "feed_forward_length": [0, 0, s.n_ff] if arch.startswith("nemotron_h") else s.n_ff,
        "use_parallel_residual": False,
        "logit_scale": 1.0,
        "residual_scale": 3.5,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
        "posnet.embedding_length": s.n_embd,
        "posnet.block_count": s.n_layer,
        "convnext.embedding_length": s.n_embd,
        "convnext.block_count": s.n_layer,
        **_attention(arch, s),
        **_rope(arch, s),
        **(_experts(arch, s, n_experts) if experts else {}),
        **_recurrent(arch, s),
        **_special(arch, s),
        **(other or {}),
    }
    for name, value in keys.items():
        if value is not None:
            f.set(f"{arch}.{name}", *_typed(value))
    for name, number in (("alpha_n", 1.0), ("alpha_p", 1.0), ("beta", 1.0), ("eps", 1e-7)):
        f.set(f"xielu.{name}", F32, number)
    _vocabulary(f, arch, s.n_vocab)
    return f


# ---- tensors ----


class _InitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


class _TensorHead(ctypes.Structure):
    """The first members of struct ggml_tensor, the same in every supported version."""

    _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4)]


def reason(log: pathlib.Path, otherwise: str | None = None) -> str:
    """The first line of a process's log that looks like the reason of its failure; otherwise: instead of the last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    wanted = [line for line in lines if "GGML_ASSERT" in line or "GGML_ABORT" in line or "error" in line.lower()]
    return (wanted or [otherwise or (lines or ["no output"])[-1]])[0]


def names() -> list[str]:
    """The names of all architectures of the installed llama.cpp, as model files contain them."""
    import llama_cpp.llama_cpp as api

    name_of = api._lib["_Z13llm_arch_name8llm_arch"]
    name_of.restype = ctypes.c_char_p
    found: list[str] = []
    while not found or found[-1] != "(unknown)":
        found.append(name_of(len(found)).decode())
    return found[:-1]


def _convolutions(f: GGUF, n_layer: int) -> GGUF:
    """A copy of f with dummy tensors, from which llama.cpp reads that the kernels of convolutions are F16."""
    names = [f"{x}.weight" for i in range(n_layer)
             for x in (f"conv{i}d", f"posnet.{i}.conv1", f"posnet.{i}.conv2", f"convnext.{i}.dw")]  # fmt: skip
    return GGUF(list(f.keys), [Tensor(name.encode(), [1], TYPE_F16, b"\0\0") for name in names])


def tensors(f: GGUF, n_layer: int) -> dict[str, tuple[int, list[int]]]:
    """The type and shape (columns first) of each tensor that llama.cpp requests. A failed assertion of llama.cpp ends
    the process. Raises RuntimeError if llama.cpp refuses the metadata.
    """
    import llama_cpp.llama_cpp as api

    base = ctypes.CDLL("libggml-base.so.0")
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    base.ggml_get_name.restype, base.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    found: dict[str, tuple[int, list[int]]] = {}

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    def note(tensor: int, unused: Any) -> None:
        head = _TensorHead.from_address(tensor)
        found.setdefault(base.ggml_get_name(tensor).decode(), (head.type, list(head.ne)))

    init = api._lib.llama_model_init_from_user
    init.restype = ctypes.c_void_p
    init.argtypes = [ctypes.c_void_p, type(note), ctypes.c_void_p, api.llama_model_params]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "metadata.gguf"
        path.write_bytes(write(_convolutions(f, n_layer)))
        keys = base.gguf_init_from_file(os.fsencode(path), _InitParams(True, None))
        model = init(keys, note, None, api.llama_model_default_params())
    if not model:
        raise RuntimeError("llama.cpp refused the metadata")
    return found


def values(name: str, ne: list[int]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    x = rng.standard_normal(ne[::-1], dtype=np.float32)
    if "ssm_a" in name:
        return -np.abs(x)  # the state must decay
    if name.endswith(("_q_norm.weight", "_k_norm.weight")):
        return np.float32(0.3) + x * np.float32(0.1)  # attention must not amplify rounding errors of F16
    if ("norm" in name and name.endswith(".weight")) or name.endswith(("ssm_d", "scale")):
        return 1 + x * np.float32(0.1)
    if "conv1d" in name:
        return x  # the few columns of a convolution
    return x * np.float32(max(ne[0], 16) ** -0.5 if name.endswith("weight") and ne[1] > 1 else 0.1)


def make(arch: str, experts: bool, n_experts: int = 2) -> GGUF:
    """A dense model; its multiplied matrices are F16."""
    from ggml_macko.gguf.tensor_rules import may_be_sparse

    f = metadata(arch, experts, n_experts)
    for name, (type_id, ne) in tensors(f, SHAPES.get(arch, Shape()).n_layer).items():
        if arch == "rwkv6qwen2" and "time_mix_first" in name:
            continue  # with this tensor, llama.cpp would load the model as RWKV-6
        n_dims = max([d + 1 for d in range(4) if ne[d] > 1] or [1])
        if type_id == TYPE_I32:
            data = np.zeros(ne[::-1], dtype=np.int32).tobytes()
        else:
            if may_be_sparse(name, n_dims):
                type_id = TYPE_F16
            data = values(name, ne).astype(np.float16 if type_id == TYPE_F16 else np.float32).tobytes()
        f.tensors.append(Tensor(name.encode(), ne[:n_dims], type_id, data))
    return f
