"""Activations while llama.cpp evaluates a text, for calibration, SparseGPT and skipping.

llama.cpp's scheduler calls a function for each node of its graph (cb_eval); a Tap provides this function. An InputTap
passes the inputs of matrix products, as float32 rows, to a consumer; it copies them only from device memory. As in
llama-imatrix, it counts every MUL_MAT_ID and each MUL_MAT with a float32 input of at least 16 rows. This module keeps
no activations, so it needs the memory of one micro-batch.
"""

from __future__ import annotations

import ctypes
import functools
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .. import errors, system
from ..values import TYPE_F32

MIN_ROWS = 16
"""Smallest number of input rows of a MUL_MAT that counts."""

_HEADS = ("output.weight", "token_embd.weight")
_LAST_NORM = b"result_norm"
"""llama.cpp's name of the input of the output head."""


class Weight(NamedTuple):
    """A weight of a matrix product."""

    name: str  # as in the model file
    cols: int  # length of an input row
    n_mat: int  # matrices in the tensor: 1, or the number of experts
    routed: bool  # MUL_MAT_ID: the router chooses the experts of each row


class Consumer(Protocol):
    """A receiver of the inputs of matrix products."""

    def wants(self, name: str) -> bool:
        """Whether to pass on the inputs of this weight. Called for each product, so it should be fast."""

    def take(self, weight: Weight, index: int, x: npt.NDArray[np.float32]) -> None:
        """Receives inputs x (rows, cols) of matrix `index` of the weight. x is read-only and valid during the call.

        The function is called at most once per micro-batch and matrix (per sequence if the graph separates sequences),
        and never for an expert without tokens. TextModel.evaluate stops at an exception and raises it.
        """


class Tensor(ctypes.Structure):
    """struct ggml_tensor of the supported ggml; native/llama_hook.py refuses others."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


_OBJECT_NBYTES = 32  # struct ggml_object, which ggml_tensor_overhead() includes

_OPS = {b"MUL_MAT", b"MUL_MAT_ID", b"MUL", b"ADD_ID", b"GLU", b"UNARY", b"SQR"}


class Ggml:
    """Functions of libggml-base and ids of operations.

    Raises MackoError (VERSION_MISMATCH) if its tensors have another size than Tensor.
    """

    def __init__(self) -> None:
        lib = system.ggml_library("ggml-base")  # libllama has loaded this copy already
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        for name, result, arguments in (
            ("ggml_tensor_overhead", size, []),
            ("ggml_op_name", ctypes.c_char_p, [ctypes.c_int]),
            ("ggml_glu_op_name", ctypes.c_char_p, [ctypes.c_int]),
            ("ggml_unary_op_name", ctypes.c_char_p, [ctypes.c_int]),
            ("ggml_nbytes", size, [pointer]),
            ("ggml_backend_buffer_is_host", ctypes.c_bool, [pointer]),
            ("ggml_backend_tensor_get", None, [pointer, pointer, size, size]),
        ):
            getattr(lib, name).restype, getattr(lib, name).argtypes = result, arguments
        self.glu_op_name, self.unary_op_name, self.nbytes = (
            lib.ggml_glu_op_name,
            lib.ggml_unary_op_name,
            lib.ggml_nbytes,
        )
        self.is_host, self.get = lib.ggml_backend_buffer_is_host, lib.ggml_backend_tensor_get
        ops: dict[bytes, int] = {}
        while len(ops) < 1024 and not ops.keys() >= _OPS:
            ops[lib.ggml_op_name(len(ops))] = len(ops)
        if lib.ggml_tensor_overhead() != ctypes.sizeof(Tensor) + _OBJECT_NBYTES or not ops.keys() >= _OPS:
            raise errors.error(
                errors.VERSION_MISMATCH, "this ggml's tensors are not those that ggml-macko was built for"
            )
        self.mul_mat, self.mul_mat_id, self.glu = ops[b"MUL_MAT"], ops[b"MUL_MAT_ID"], ops[b"GLU"]
        self.unary, self.sqr, self.mul, self.add_id = ops[b"UNARY"], ops[b"SQR"], ops[b"MUL"], ops[b"ADD_ID"]


@functools.cache
def _ggml() -> Ggml:
    return Ggml()


@contextmanager
def signals_held() -> Iterator[None]:
    """Delays Ctrl-C, SIGTERM and SIGHUP until the end of the outermost such block."""
    held: list[tuple[int, FrameType | None]] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # only the main thread gets signals
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, lambda *caught: held.append(caught))
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
        for caught, frame in held:
            if callable(before[caught]):
                before[caught](caught, frame)
            elif before[caught] == signal.SIG_DFL:
                signal.raise_signal(caught)


class Tap(ABC):
    """A function that llama.cpp's scheduler calls for the nodes of its graph.

    llama_context_params.cb_eval takes `callback`, which must live as long as the context. Call llama_decode inside
    `with tap.evaluation()`.

    ends_before_head: evaluations end at the input of the output head, so there are no logits. With a large vocabulary,
    the head takes longer than the rest of a small model.
    """

    def __init__(self, ends_before_head: bool = False) -> None:
        import llama_cpp.llama_cpp as api

        self.ggml = _ggml()
        self._ends_before_head = ends_before_head
        self._error: BaseException | None = None
        self.callback = api.ggml_backend_sched_eval_callback(self._on_node)

    @abstractmethod
    def wants(self, node: Tensor) -> bool:
        """Whether to call take() after this node is computed. Called for every node, in the order of the graph."""

    @abstractmethod
    def take(self, address: int, node: Tensor) -> bool:
        """Receives a computed node. address: of its struct ggml_tensor. False ends the evaluation.

        TextModel.evaluate stops at an exception of take() or wants() and raises it.
        """

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Delays signals and exceptions of wants() and take() until its end, because Python cannot raise through C."""
        self._error = None
        with signals_held():
            yield
        if self._error is not None:
            raise self._error

    def _on_node(self, address: int, ask: bool, unused: Any) -> bool:
        try:
            if self._error is not None:
                return False
            node = Tensor.from_address(address)
            if self._ends_before_head and node.name == _LAST_NORM:
                return ask
            return self.wants(node) if ask else self.take(address, node)
        except BaseException as e:
            self._error = e
            return False  # ends this evaluation early

    def array(self, address: int, dtype: type[np.float32] | type[np.int32]) -> npt.NDArray[Any]:
        """The elements of a tensor, slowest dimension first; a read-only view if the data is in host memory."""
        t = Tensor.from_address(address)
        nbytes = self.ggml.nbytes(address)
        if self.ggml.is_host(t.buffer):
            data: Any = (ctypes.c_char * nbytes).from_address(t.data)
        else:
            data = np.empty(nbytes, dtype=np.uint8)
            self.ggml.get(address, data.ctypes.data, 0, nbytes)
        out = np.ndarray(tuple(t.ne)[::-1], dtype, data, strides=tuple(t.nb)[::-1])
        out.flags.writeable = False
        return out


class InputTap(Tap):
    """Passes the inputs of matrix products to a consumer.

    An evaluation ends after the product of the weight `until`, and before the output head if the consumer does not want
    the head's inputs. There are no valid logits.
    """

    def __init__(self, consumer: Consumer, until: str = "") -> None:
        super().__init__(ends_before_head=not any(map(consumer.wants, _HEADS)))
        self._consumer = consumer
        self._until = until

    def wants(self, node: Tensor) -> bool:
        if node.op not in (self.ggml.mul_mat, self.ggml.mul_mat_id):
            return False
        x = Tensor.from_address(node.src[1])
        if x.type != TYPE_F32 or (node.op == self.ggml.mul_mat and x.ne[1] < MIN_ROWS):
            return False
        return self._consumer.wants(weight_name(Tensor.from_address(node.src[0]).name))

    def take(self, address: int, node: Tensor) -> bool:
        w = Tensor.from_address(node.src[0])
        x = self.array(node.src[1], np.float32)
        routed = node.op == self.ggml.mul_mat_id
        weight = Weight(weight_name(w.name), x.shape[3], w.ne[2] * w.ne[3], routed)
        if routed:
            # x: (1, tokens, experts used or 1, cols); ids: (1, 1, tokens, experts used)
            ids = self.array(node.src[2], np.int32)[0, 0]
            if x.shape[0] != 1 or x.shape[1] != ids.shape[0] or ids.min() < 0 or ids.max() >= weight.n_mat:
                raise errors.error(errors.LIMIT, f"{weight.name}: the shape of its expert product is not supported")
            for index in np.unique(ids):
                token, use = np.nonzero(ids == index)
                self._consumer.take(weight, int(index), x[0, token, use % x.shape[2]])
        else:
            for i3 in range(x.shape[0]):
                for i2 in range(x.shape[1]):
                    index = (i3 % w.ne[3]) * w.ne[2] + i2 % w.ne[2]
                    self._consumer.take(weight, index, x[i3, i2])
        return weight.name != self._until


@functools.lru_cache(maxsize=1 << 16)
def weight_name(name: bytes) -> str:
    """The name in the model file. The scheduler names a copy on another device CUDA0#blk.0.attn_k.weight#0."""
    parts = name.decode("utf-8", errors="replace").split("#")
    return parts[1] if len(parts) > 1 else parts[0]
