"""A buffer type that replaces another GPU backend: ggml's CPU buffer type under a different address.

`place` puts tensors there, as `-ot` and `-dev` do in llama.cpp's programs.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from support import llama_logits

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # of --cpu-moe in llama.cpp's common.h


class BufferType(ctypes.Structure):
    """ggml_backend_buffer_type"""

    NAMES = "get_name alloc_buffer get_alignment get_max_size get_alloc_size is_host device context"
    _fields_ = [(name, ctypes.c_void_p) for name in NAMES.split()]


class Override(ctypes.Structure):
    """llama_model_tensor_buft_override"""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


def _cpu_buffer_type() -> int:
    base = ctypes.CDLL("libggml-base.so.0")
    base.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    return base.ggml_backend_cpu_buffer_type()


def _overriding(buffer_types: dict[str, int]) -> contextlib.AbstractContextManager[None]:
    """Within the context, models put tensors whose names match a pattern into its buffer type."""
    pairs = [Override(pattern.encode(), address) for pattern, address in buffer_types.items()]
    overrides = (Override * (len(pairs) + 1))(*pairs, Override(None, None))
    kept.append(overrides)
    return llama_logits.model_params(tensor_buft_overrides=ctypes.cast(overrides, ctypes.c_void_p))


@contextlib.contextmanager
def place(pattern: str, host: bool = True) -> Iterator[None]:
    """Within the context, models put tensors with matching names into the other buffer type. host: llama.cpp reads
    directly into its memory; otherwise it copies. The buffer type is never freed.
    """
    other = BufferType.from_buffer_copy(ctypes.string_at(_cpu_buffer_type(), ctypes.sizeof(BufferType)))
    is_host = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda buffer_type: host)
    if not host:
        other.is_host = ctypes.cast(is_host, ctypes.c_void_p)
    kept.extend([other, is_host])
    with _overriding({pattern: ctypes.addressof(other)}):
        try:
            yield
        finally:
            host = True  # the CPU backend computes with host memory only


def place_in_host_memory(patterns: list[str]) -> contextlib.AbstractContextManager[None]:
    """Within the context, models put matching tensors into host memory, as `-ot PATTERN=CPU` does."""
    return _overriding(dict.fromkeys(patterns, _cpu_buffer_type()))


kept: list[object] = []  # objects that loaded models point to
