"""Memory of a model besides its weights, from its metadata: the KV cache and the buffers of the graph."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import errors, system
from ..gguf import tensor_rules
from ..gguf.files import Model
from ..native import devices

if TYPE_CHECKING:
    import gguf

CTX_STEP = 256  # llama.cpp rounds the context up to a multiple of this
UBATCH = 512  # tokens of a matrix product, llama.cpp's default
CUDA_NBYTES = 617 << 20  # CUDA's own: context, kernels and cuBLAS, of an H100 with driver 580; others may need less
PROCESS_NBYTES, TOKEN_NBYTES = 64 << 20, 200  # of Python, libllama and the plugin; of a token of the vocabulary
CUBLAS_WORKSPACE_NBYTES = 32 << 20
N_PANELS, MAX_PANEL_NBYTES, PANEL_SHARE = 2, 96 << 20, 512
"""Buffers in which the plugin makes weights dense for prompts, the most bytes of one, and the share of the GPU's memory
that one may take.
"""
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""The types of llama.cpp's KV cache."""


@dataclass(frozen=True)
class ContextMemory:
    """Memory of a context, in bytes."""

    n_ctx: int
    type_k: str  # of CACHE_TYPES
    type_v: str
    kv_cache: int  # an upper bound for models with attention windows
    compute: int  # an estimate of what llama.cpp reserves
    host: int  # of a process that computes on the CPU, without weights and cache: an estimate
    gpu: int  # of a GPU in addition to these, for a sparse model: an estimate


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device, in bytes."""

    name: str
    free: int
    total: int


def cache_type(name: str) -> gguf.GGMLQuantizationType:
    """The ggml type of a name in CACHE_TYPES. Raises MackoError for other names."""
    if name not in CACHE_TYPES:
        raise errors.bad_argument(f"{name} is no type of a cache: {', '.join(CACHE_TYPES)}")
    import gguf  # commands without a cache start faster without it

    return gguf.GGMLQuantizationType[name.upper()]


DEFAULT_N_CTX = 4096
"""The largest number of tokens of a context, unless an option sets more."""


def _block_of(name: str) -> tuple[int, int]:
    """Values and bytes of a block of a cache type."""
    kind = cache_type(name)
    import gguf

    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    return values, nbytes


def is_quantized_cache(name: str) -> bool:
    return _block_of(name)[0] > 1


def _cache_nbytes(n_elements: int, name: str) -> int:
    block, nbytes = _block_of(name)
    return int(-(-n_elements // block) * nbytes)


def trained_n_ctx(model: Model) -> int:
    """Tokens of a context in the model's training; 4096 if the metadata do not have it."""
    keys = {k.name: k for k in model.keys}
    key = keys.get(f"{keys['general.architecture'].value()}.context_length") if "general.architecture" in keys else None
    value = None if key is None else key.value()
    return value if isinstance(value, int) else DEFAULT_N_CTX


def context_memory(
    model: Model, n_ctx: int, type_k: str = "f16", type_v: str = "f16", gpu_total: int | None = None
) -> ContextMemory | None:
    """Memory of a context of n_ctx tokens; 0: 4096, or the model's training context if that is less. type_k, type_v:
    types of the cache. gpu_total: bytes of the GPU's memory; None: those of an H100. Returns None if the metadata lack
    the dimensions. Raises MackoError for a type that a cache cannot have.
    """
    keys = {k.name: k for k in model.keys}

    def read(name: str, default: Any = None) -> Any:
        key = keys.get(f"{arch}.{name}")
        return default if key is None else key.value()

    def number(name: str, default: int) -> int:
        value = read(name, default)
        return value if isinstance(value, int) else default

    arch_key = keys.get("general.architecture")
    arch = None if arch_key is None else arch_key.value()
    n_layer, n_embd, n_head = read("block_count"), read("embedding_length"), read("attention.head_count")
    if not all(isinstance(n, int) and n > 0 for n in (n_layer, n_embd)) or n_layer > 10_000:
        return None
    heads = _per_layer(n_head, n_layer)
    heads_kv = _per_layer(read("attention.head_count_kv", n_head), n_layer)
    if heads is None or heads_kv is None or not max(heads):
        return None
    n_ctx = n_ctx or min(DEFAULT_N_CTX, trained_n_ctx(model))
    n_ctx = -(-n_ctx // CTX_STEP) * CTX_STEP
    head = n_embd // max(heads)
    rows = n_ctx * sum(heads_kv)
    kv_cache = _cache_nbytes(rows * number("attention.key_length", head), type_k)
    kv_cache += _cache_nbytes(rows * number("attention.value_length", head), type_v)
    n_ff = max(_per_layer(read("feed_forward_length", 0), n_layer) or [0])
    n_vocab = next((t.rows for t in model.tensors if t.name in ("output.weight", "token_embd.weight")), 0)
    # logits of a micro-batch or the inner results of a block, whichever is more, and the mask of attention
    compute = UBATCH * (4 * max(n_vocab + n_embd, 2 * n_ff + 3 * n_embd) + 4 * n_ctx)
    # a process touches only the logits of the last token
    host = min(compute, UBATCH * 4 * (2 * n_ff + 3 * n_embd + n_ctx)) + 4 * n_vocab
    host += PROCESS_NBYTES + n_vocab * TOKEN_NBYTES
    return ContextMemory(n_ctx, type_k, type_v, kv_cache, compute, host, _gpu_nbytes(model, gpu_total))


def _gpu_nbytes(model: Model, total: int | None) -> int:
    """Memory of CUDA itself and of products with many columns."""
    sparse = [t for t in model.tensors if tensor_rules.may_be_sparse(t.name, len(t.ne))]
    largest = max((2 * t.cols * t.ne[1] for t in sparse if t.name != tensor_rules.EMBEDDING), default=0)
    most = MAX_PANEL_NBYTES if total is None else min(MAX_PANEL_NBYTES, total // PANEL_SHARE)
    return CUDA_NBYTES + CUBLAS_WORKSPACE_NBYTES + N_PANELS * min(most, largest)


def _per_layer(value: Any, n_layer: int) -> Sequence[int] | None:
    """The numbers of all layers, from a list or one number for all."""
    numbers = value if isinstance(value, list) else [value] * n_layer
    return numbers if all(isinstance(n, int) and n >= 0 for n in numbers) and numbers else None


def gpu_memory() -> list[DeviceMemory]:
    """The GPUs of the plugin, or those of nvidia-smi without any."""
    try:
        found = [DeviceMemory(f"{g.name} {g.description}", g.free, g.total) for g in devices.gpus()]
    except errors.MackoError:
        found = []
    return found or _nvidia_smi()


def _nvidia_smi() -> list[DeviceMemory]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = ["--query-gpu=name,memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run([program, *query], capture_output=True, text=True, timeout=20, check=True)
        rows = [line.rsplit(",", 2) for line in done.stdout.splitlines()]
        return [DeviceMemory(name, int(free) << 20, int(total) << 20) for name, free, total in rows]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def host_memory() -> DeviceMemory | None:
    """The memory of this machine, or None if unknown."""
    found = system.memory()
    return found and DeviceMemory("RAM", found.free, found.total)
