"""The plugin's device for RPC servers and its clients' messages (docs/design/rpc.md), called through ctypes without a
network.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

from ggml_macko.evaluation.activations import Tensor
from support import gguf_bytes as gb

MAGIC = b"macko rpc\x9e\x1f\x5c\xd3\x07\xb8\x42"
HELLO, CHUNK, RESULT = 1, 2, 3
VERSION = 1
F32, F16, I8, I32 = 0, 1, 24, 26


def message(kind: int, challenge: bytes = bytes(16), offset: int = 0, total: int = 0, version: int = VERSION) -> bytes:
    return struct.pack("<16sII16sQQ", MAGIC, version, kind, challenge, offset, total)


def tensor(
    address: int, buffer: int, shape: tuple[int, ...], type_: int, op_params: bytes = b"", name: str = "w"
) -> Tensor:
    ne = [*shape, *[1] * (4 - len(shape))]
    size = {F32: 4, F16: 2, I8: 1, I32: 4}[type_]
    nb = [size, size * ne[0], size * ne[0] * ne[1], size * ne[0] * ne[1] * ne[2]]
    return Tensor(
        type=type_,
        buffer=buffer,
        ne=(ctypes.c_int64 * 4)(*ne),
        nb=(ctypes.c_size_t * 4)(*nb),
        op_params=(ctypes.c_int32 * 16).from_buffer_copy(op_params.ljust(64, b"\0")),
        data=address,
        name=name.encode(),
    )


def matrix_file(sparse: gb.GGUF, name: str) -> gb.GGUF:
    """A sparse GGUF with one matrix of another file, as a client sends it."""
    i = sparse.key("macko.tensor.name").value.index(name.encode())
    out = gb.GGUF(tensors=[t for t in sparse.tensors if t.name.startswith(name.encode() + b".")])
    for key in sparse.keys:
        if key.name.startswith(b"macko.tensor."):
            n = 4 if key.name.endswith(b".ne") else 1
            out.set(key.name.decode(), key.type, key.value[n * i : n * (i + 1)], key.element_type)
        elif key.name == b"macko.version":
            out.set(key.name.decode(), key.type, key.value)
    # drops components of tensors whose longer names begin with this name and a dot
    out.tensors = [t for t in out.tensors if t.name.count(b".") == name.count(".") + 1]
    return out


class Device:
    """A device that a server offers, its backend, and a buffer."""

    def __init__(self, nbytes: int, name: str = "MACKO_CPU") -> None:
        from ggml_macko.native import llama_hook

        llama_hook.register()
        self.base = ctypes.CDLL("libggml-base.so.0")
        self.all = ctypes.CDLL("libggml.so.0")
        os.environ["GGML_MACKO_ENABLE"] = "rpc-server"
        try:
            registry = self.call(self.all.ggml_backend_reg_by_name, b"MACKO")
            self.device = self._find(registry, name)
        finally:
            del os.environ["GGML_MACKO_ENABLE"]
        self.backend = self.call(self.base.ggml_backend_dev_init, self.device, None)
        self.buffer_type = self.call(self.base.ggml_backend_dev_buffer_type, self.device)
        self.buffer = self.call(self.base.ggml_backend_buft_alloc_buffer, self.buffer_type, nbytes)
        self.address = self.call(self.base.ggml_backend_buffer_get_base, self.buffer)

    def _find(self, registry: int, name: str) -> int:
        self.base.ggml_backend_dev_name.restype = ctypes.c_char_p
        for i in range(self.base.ggml_backend_reg_dev_count(ctypes.c_void_p(registry))):
            device = self.call(self.base.ggml_backend_reg_dev_get, registry, i)
            if self.base.ggml_backend_dev_name(ctypes.c_void_p(device)) == name.encode():
                return int(device)
        raise LookupError(name)

    @staticmethod
    def call(function: Any, *args: Any) -> Any:
        function.restype = ctypes.c_void_p
        as_c = [ctypes.c_void_p(a) if isinstance(a, int) or a is None else a for a in args]
        return function(*as_c)

    def close(self) -> None:
        self.call(self.base.ggml_backend_buffer_free, self.buffer)
        self.call(self.base.ggml_backend_free, self.backend)

    def set(self, t: Tensor, data: bytes, offset: int = 0) -> None:
        self.call(self.base.ggml_backend_tensor_set, ctypes.byref(t), data, ctypes.c_size_t(offset), len(data))

    def get(self, t: Tensor, n: int, offset: int = 0) -> bytes:
        out = ctypes.create_string_buffer(n)
        self.call(self.base.ggml_backend_tensor_get, ctypes.byref(t), out, ctypes.c_size_t(offset), n)
        return out.raw

    def at(self, offset: int, shape: tuple[int, ...], type_: int, op_params: bytes = b"", name: str = "w") -> Tensor:
        return tensor(self.address + offset, self.buffer, shape, type_, op_params, name)

    def hello(self, challenge: bytes) -> bytes:
        return self.get(self.at(0, (64,), I8, message(HELLO, challenge)), 64)

    def send(self, offset: int, data: bytes, step: int = 1 << 20) -> tuple[int, str]:
        """Sends a matrix file in chunks; returns the status and the text of the reply."""
        for at in range(0, len(data), step):
            part = data[at : at + step]
            self.set(self.at(offset, (len(part),), I8, message(CHUNK, offset=at, total=len(data))), part)
        return self.result(offset)

    def result(self, offset: int) -> tuple[int, str]:
        status, text = struct.unpack("<i252s", self.get(self.at(offset, (256,), I8, message(RESULT)), 256))
        return status, text.split(b"\0")[0].decode(errors="replace")
