"""Grammars (GBNF) in a separate process.

Many grammars end the process in llama.cpp: it throws exceptions through its C interface, and does not limit the time,
memory or stack that a grammar needs. Therefore a worker process computes the permitted tokens, within limits.
The worker loads the vocabulary once. A child of the worker follows the grammar; if it dies, the worker forks another.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
from multiprocessing import Pipe, connection, spawn
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp._logger import logger

from . import errors, system

MAX_SECONDS = 5  # of CPU time to compute the tokens permitted after one token
MAX_NBYTES = 1 << 29  # of memory, in addition to the vocabulary
_BEGIN, _ACCEPT, _ALLOWED, _REFUSED, _DIED = b"bamrd"


def _refuse(why: str) -> errors.MackoError:
    return errors.bad_argument(f"grammar: {why}")


# ---- this process ----


class Worker:
    """A process with the vocabulary of a model. It follows one grammar at a time."""

    def __init__(self, model: Any) -> None:
        """model: llama_cpp._internals.LlamaModel"""
        self._connection, theirs = Pipe()
        overrides, n = model.params.kv_overrides, 0
        while overrides and overrides[n].key:
            n += 1
        keys = ctypes.string_at(overrides, (n + 1) * ctypes.sizeof(overrides.contents)) if n else b""
        code = (
            f"import sys; sys.path = {sys.path!a}; from ggml_macko.grammar import serve; "
            f"serve({theirs.fileno()}, {model.path_model!a}, {keys!a}, {MAX_SECONDS}, {MAX_NBYTES})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [spawn.get_executable(), "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C must interrupt only this process
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "GGML_NO_BACKTRACE": "1"},
            )
        self.creator = os.getpid()
        self.grammar: Grammar | None = None  # the one that the worker follows

    def ask(self, kind: int, content: bytes) -> np.ndarray:
        """A mask of the permitted tokens. Raises ArgumentError for a grammar that llama.cpp refuses, or crashes on."""
        try:
            self._connection.send_bytes(bytes([kind]) + content)
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as e:
            self.close()
            raise RuntimeError("the process that follows grammars has ended") from e
        except BaseException:  # a later question must not receive the answer to this one
            self.close()
            raise
        if answer[0] == _REFUSED:
            raise _refuse("llama.cpp refused it; its log says why")
        if answer[0] == _DIED:
            limits = f"{MAX_SECONDS} s or {MAX_NBYTES >> 20} MiB"
            raise _refuse(f"llama.cpp failed, or needed more than {limits} for a token ({answer[1:].decode()})")
        return np.frombuffer(answer, np.bool_, offset=1)

    def is_usable(self) -> bool:
        """Whether the connection is open and belongs to this process; after a fork, it belongs to the parent."""
        return not self._connection.closed and self.creator == os.getpid()

    def close(self) -> None:
        if self.is_usable():
            self._connection.close()
            os.killpg(self._process.pid, signal.SIGKILL)  # its child, too
            self._process.wait()


class Grammar:
    """A grammar in use, and the position in it."""

    def __init__(self, worker: Worker, text: str, root: str) -> None:
        try:
            content = root.encode() + b"\0" + text.encode()
        except UnicodeEncodeError as e:
            raise _refuse(f"character {e.start} is half of a surrogate pair") from e
        self._worker = worker
        self._allowed = worker.ask(_BEGIN, content)
        self._token: int | None = None  # chosen, but not accepted yet
        worker.grammar = self

    def advance(self) -> None:
        """Raises ArgumentError if no token is permitted."""
        if self._worker.grammar is not self:
            raise RuntimeError("the model has started to follow another grammar")
        if self._token is not None:
            self._allowed = self._worker.ask(_ACCEPT, self._token.to_bytes(4, "little"))
            self._token = None
        if not self._allowed.any():
            raise _refuse("no token of the vocabulary can follow")

    def apply(self, candidates: Any) -> None:
        """Excludes tokens that are not permitted. candidates: a pointer to llama_token_data_array"""
        array = candidates.contents
        tokens = np.ctypeslib.as_array(array.data, (array.size,))
        tokens["logit"][~self._allowed[tokens["id"]]] = -np.inf

    def choose(self, token: int) -> None:
        if not self._allowed[token]:
            raise _refuse("all tokens that can follow have the probability 0")
        self._token = token


# ---- the worker ----


def serve(fd: int, model_path: str, keys: bytes, max_seconds: int, max_nbytes: int) -> None:
    """Answers until the other end is closed."""
    logger.setLevel(logging.CRITICAL + 1)  # the first load has logged all messages about the model
    params = llama_cpp.llama_model_default_params()
    params.vocab_only, params.n_gpu_layers = True, 0
    if keys:
        kind = llama_cpp.llama_model_kv_override
        params.kv_overrides = (kind * (len(keys) // ctypes.sizeof(kind))).from_buffer_copy(keys)
    model = llama_cpp.llama_model_load_from_file(os.fsencode(model_path), params)
    if not model:
        return
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    logger.setLevel(logging.ERROR)
    system.limit(resource.RLIMIT_CORE, 0)
    with connection.Connection(fd) as parent:
        while child := os.fork():
            _, status = os.waitpid(child, 0)
            if status == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            parent.send_bytes(bytes([_DIED]) + why.encode())
        code = 1
        try:
            system.limit_memory(max_nbytes)
            _follow(parent, vocabulary, max_seconds)
            code = 0
        finally:
            os._exit(code)


def _follow(parent: connection.Connection, vocabulary: Any, max_seconds: int) -> None:
    n = llama_cpp.llama_vocab_n_tokens(vocabulary)
    data = (llama_cpp.llama_token_data * n)()
    tokens = np.ctypeslib.as_array(data)
    tokens["id"] = np.arange(n)
    array = llama_cpp.llama_token_data_array(data, n, -1, False)
    sampler = None
    with contextlib.suppress(EOFError):
        while message := parent.recv_bytes():
            used = resource.getrusage(resource.RUSAGE_SELF)
            system.limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + max_seconds)
            if message[0] == _BEGIN:
                if sampler:
                    llama_cpp.llama_sampler_free(sampler)
                root, text = message[1:].split(b"\0", 1)
                sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, text, root)
                if not sampler:
                    parent.send_bytes(bytes([_REFUSED]))
                    continue
            else:
                llama_cpp.llama_sampler_accept(sampler, int.from_bytes(message[1:], "little"))
            tokens["logit"] = 0
            llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
            parent.send_bytes(bytes([_ALLOWED]) + (tokens["logit"] == 0).tobytes())
