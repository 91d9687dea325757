"""What goes into each matrix product while llama.cpp evaluates a text: the inputs that calibration and SparseGPT need.

llama.cpp's scheduler calls a function for each node of its graph (cb_eval). For the products whose weight a consumer
wants, the input activations are handed over as float32 rows, straight from the graph's memory where that is the
host's. Which products count is llama-imatrix's rule: every MUL_MAT_ID, and a MUL_MAT with float32 input of at least 16
rows. Nothing here keeps activations: memory is that of one micro-batch.
"""

from __future__ import annotations

import ctypes
import functools
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import errors

MIN_ROWS = 16  # a plain product with fewer rows is skipped: llama-imatrix's rule


class Weight(NamedTuple):
    """A weight that is multiplied with."""

    name: str  # as in the model file
    cols: int  # length of an input row
    n_mat: int  # matrices in the tensor: 1, or the number of experts
    routed: bool  # MUL_MAT_ID: each row goes to the experts that the router chose


class Consumer(Protocol):
    def wants(self, name: str) -> bool:
        """Whether to hand over the inputs of the weight of this name; asked for each product, so it should be quick."""

    def take(self, weight: Weight, index: int, x: np.ndarray) -> None:
        """x: (rows, cols) float32, inputs of matrix `index` of the weight; valid during the call only, read only.

        Called at most once per micro-batch and matrix (for each sequence of the batch where the graph keeps them
        apart); an expert that no token was routed to gets no call. Whatever it raises stops the evaluation and comes
        out of TextModel.evaluate.
        """


class _Tensor(ctypes.Structure):
    """struct ggml_tensor of the ggml that the plugin is built for; the loader refuses any other."""

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


_TYPE_F32, _TYPE_I32 = 0, 26
_OBJECT_NBYTES = 32  # what ggml_tensor_overhead() counts beside the struct


class _Ggml:
    """The functions of libggml-base that are needed here, and the ids of the two operations."""

    def __init__(self) -> None:
        lib = ctypes.CDLL("libggml-base.so.0")  # the copy that libllama uses, loaded already
        lib.ggml_tensor_overhead.restype = ctypes.c_size_t
        lib.ggml_op_name.restype = ctypes.c_char_p
        lib.ggml_op_name.argtypes = [ctypes.c_int]
        self.nbytes = lib.ggml_nbytes
        self.nbytes.restype, self.nbytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
        self.is_host = lib.ggml_backend_buffer_is_host
        self.is_host.restype, self.is_host.argtypes = ctypes.c_bool, [ctypes.c_void_p]
        self.get = lib.ggml_backend_tensor_get
        self.get.restype, self.get.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        ops = {}
        while len(ops) < 1024 and b"MUL_MAT_ID" not in ops:
            ops[lib.ggml_op_name(len(ops))] = len(ops)
        if lib.ggml_tensor_overhead() != ctypes.sizeof(_Tensor) + _OBJECT_NBYTES or b"MUL_MAT_ID" not in ops:
            raise errors.error(
                errors.VERSION_MISMATCH, "this ggml's tensors are not those that ggml-macko was built for"
            )
        self.mul_mat, self.mul_mat_id = ops[b"MUL_MAT"], ops[b"MUL_MAT_ID"]


@functools.cache
def _ggml() -> _Ggml:
    return _Ggml()


@contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect at the end of the block (or of the outermost such block)."""
    held: list = []
    before: dict = {}
    if threading.current_thread() is threading.main_thread():  # only that one gets signals
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda *caught: held.append(caught))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number, frame in held:
            if callable(before[number]):
                before[number](number, frame)
            elif before[number] == signal.SIG_DFL:
                signal.raise_signal(number)


class Tap:
    """Between the scheduler and a consumer: `callback` goes into llama_context_params.cb_eval and must live as long as
    the context; each llama_decode stands in a `with tap.evaluation()`."""

    def __init__(self, consumer: Consumer):
        import llama_cpp.llama_cpp as api

        self._consumer = consumer
        self._ggml = _ggml()
        self._error: BaseException | None = None
        self.callback = api.ggml_backend_sched_eval_callback(self._on_node)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Brings out what the consumer raised, and holds signals back meanwhile: Python cannot raise through C."""
        self._error = None
        with signals_held():
            yield
        if self._error is not None:
            raise self._error

    def _on_node(self, address: int, ask: bool, unused: Any) -> bool:
        try:
            if self._error is not None:
                return False
            node = _Tensor.from_address(address)
            return self._is_wanted(node) if ask else self._hand_over(node)
        except BaseException as e:
            self._error = e
            return False  # ends this evaluation early

    def _is_wanted(self, node: _Tensor) -> bool:
        if node.op not in (self._ggml.mul_mat, self._ggml.mul_mat_id):
            return False
        x = _Tensor.from_address(node.src[1])
        if x.type != _TYPE_F32 or (node.op == self._ggml.mul_mat and x.ne[1] < MIN_ROWS):
            return False
        return self._consumer.wants(weight_name(_Tensor.from_address(node.src[0]).name))

    def _hand_over(self, node: _Tensor) -> bool:
        w = _Tensor.from_address(node.src[0])
        x = self._array(node.src[1], np.float32)
        routed = node.op == self._ggml.mul_mat_id
        weight = Weight(weight_name(w.name), x.shape[3], w.ne[2] * w.ne[3], routed)
        if routed:
            # x: (1, tokens, experts used or 1, cols); ids: (1, 1, tokens, experts used)
            ids = self._array(node.src[2], np.int32)[0, 0]
            if x.shape[0] != 1 or x.shape[1] != ids.shape[0] or ids.min() < 0 or ids.max() >= weight.n_mat:
                raise errors.error(errors.LIMIT, f"{weight.name}: experts of a shape that is not understood")
            for index in np.unique(ids):
                token, use = np.nonzero(ids == index)
                self._consumer.take(weight, int(index), x[0, token, use % x.shape[2]])
        else:
            for i3 in range(x.shape[0]):
                for i2 in range(x.shape[1]):
                    index = (i3 % w.ne[3]) * w.ne[2] + i2 % w.ne[2]
                    self._consumer.take(weight, index, x[i3, i2])
        return True

    def _array(self, address: int, dtype: type) -> np.ndarray:
        """A tensor's elements, dimensions slowest first; a view where the data lies in host memory."""
        t = _Tensor.from_address(address)
        nbytes = self._ggml.nbytes(address)
        if self._ggml.is_host(t.buffer):
            data: Any = (ctypes.c_char * nbytes).from_address(t.data)
        else:
            data = np.empty(nbytes, dtype=np.uint8)
            self._ggml.get(address, data.ctypes.data, 0, nbytes)
        out = np.ndarray(tuple(t.ne)[::-1], dtype, data, strides=tuple(t.nb)[::-1])
        out.flags.writeable = False
        return out


@functools.lru_cache(maxsize=1 << 16)
def weight_name(name: bytes) -> str:
    """Without what the scheduler adds to a copy on another device: CUDA0#blk.0.attn_k.weight#0."""
    parts = name.decode("utf-8", errors="replace").split("#")
    return parts[1] if len(parts) > 1 else parts[0]
