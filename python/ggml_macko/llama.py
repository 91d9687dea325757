"""Llama: llama_cpp.Llama that also opens sparse GGUFs."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Generator, Iterator
from typing import Any

import llama_cpp
from llama_cpp._logger import set_verbose

from . import errors
from .native import bindings
from .native import grammar as grammars
from .native.loader import register, run_with


class Llama(llama_cpp.Llama):
    """Drop-in for llama_cpp.Llama: the same arguments, methods and results; dense models work as before.

    >>> llama = Llama("sparse.gguf", n_ctx=2048, n_gpu_layers=-1)
    >>> llama("The capital of France is", max_tokens=8)["choices"][0]["text"]

    A sparse model is never memory-mapped: use_mmap and use_mlock have no effect on it. n_gpu_layers=-1 puts all layers
    on the GPU, if the plugin was built with one; the default, as in llama_cpp, is 0.

    A GPU that fails while the logits are read is an error: llama_cpp would go on with what is not there.

    Three things that end the process in llama_cpp raise ArgumentError here: a grammar that llama.cpp refuses or would
    not survive, a token outside of the vocabulary in detokenize, and any use after close(). close() while another
    thread generates lets it finish its token; the model is freed when nothing uses it any more.
    """

    _users_lock: Any  # an RLock of this object
    _n_users = 0
    _closed = False

    def __new__(cls, *unused: Any, **also_unused: Any) -> Llama:
        """What close() needs, which __del__ calls even if __init__ has not begun."""
        self = super().__new__(cls)
        self._stack = contextlib.ExitStack()
        self._users_lock = threading.RLock()
        return self

    def __init__(
        self,
        model_path: str,
        *args: Any,
        compress: bool = False,
        keep_negative_zeros: bool = False,
        sparse_only: bool = False,
        strict: bool = False,
        weight_cache: bool = False,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        """Loads a model.

        model_path: a GGUF model, dense or sparse; the first file of a split one.
        compress: encodes the weights of a dense model that are full of zeros while it is loaded; no new file is needed.
        keep_negative_zeros, with compress: -0.0 is a value like any other; else it counts as zero.
        sparse_only: a sparse weight that llama.cpp places on a device of another backend is an error; else it becomes
        dense there, and a warning says how many did.
        strict: a sparse model of an architecture without rules for its metadata (SECURITY.md) is an error; else it is
        trusted like a dense one, which a warning says.
        weight_cache: the next load of the unchanged file maps its weights on the CPU, as they are in memory, from a
        file in the user's cache folder that this load writes; the log says where. It has nothing to do with the cache
        of prompts (set_cache).
        verbose: shows llama.cpp's log on stderr.
        args, kwargs: every other argument of llama_cpp.Llama, for example n_ctx, n_gpu_layers, n_threads, seed.

        Raises FileFormatError for a damaged file and for one that is no GGUF, FileAccessError for a directory, FIFO,
        socket or device, VersionMismatchError if another llama-cpp-python is installed than the plugin was built for,
        and else what llama_cpp.Llama raises, ValueError above all.
        """
        set_verbose(verbose)  # before the plugin is loaded, so that it is as quiet as the rest
        register()
        options = bindings.LoadOptions(compress, keep_negative_zeros, sparse_only, strict, weight_cache)
        init = super().__init__
        try:
            run_with(options, lambda: init(model_path, *args, verbose=verbose, **kwargs))
        except ValueError as e:
            _say_what_is_wrong(model_path, e)
            raise

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Inside, close() waits until the end to free the model."""
        with self._users_lock:
            if self._closed:
                raise errors.error(errors.BAD_ARGUMENT, "this Llama has been closed")
            self._n_users += 1
        try:
            yield
        finally:
            with self._users_lock:
                self._n_users -= 1
                is_last = self._closed and self._n_users == 0
            if is_last:
                super().close()

    def close(self) -> None:
        """Frees the model; if it is in use, when it is not any more."""
        with self._users_lock:
            self._closed = True
            is_idle = self._n_users == 0
        if is_idle:
            super().close()

    def _create_completion(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with self._in_use():
            yield from super()._create_completion(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Generator[int, Any, None]:
        with self._in_use():
            yield from super().generate(*args, **kwargs)

    def eval(self, *args: Any, **kwargs: Any) -> None:
        """Raises RuntimeError where llama_cpp would go on with logits that a failed GPU did not give."""
        with self._in_use():
            super().eval(*args, **kwargs)
            logits = llama_cpp.llama_get_logits_ith(self._ctx.ctx, -1)
            if logits and math.isnan(logits[0]):
                raise RuntimeError("llama_decode left no logits: they are NaN, as after a failure of a GPU")

    def sample(self, *args: Any, **kwargs: Any) -> int:
        with self._in_use():
            return int(super().sample(*args, **kwargs))

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_use():
            return super().embed(*args, **kwargs)

    def tokenize(self, *args: Any, **kwargs: Any) -> list[int]:
        with self._in_use():
            return list(super().tokenize(*args, **kwargs))

    def detokenize(self, tokens: list[int], *args: Any, **kwargs: Any) -> bytes:
        with self._in_use():
            n_vocab = self.n_vocab()
            for token in tokens:
                if not 0 <= token < n_vocab:
                    known = f"0...{n_vocab - 1}"
                    raise errors.error(errors.BAD_ARGUMENT, f"token {token} is not in the vocabulary ({known})")
            return bytes(super().detokenize(tokens, *args, **kwargs))

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        grammar = kwargs.get("grammar")
        if grammar is not None:
            self._check_grammar(grammar._grammar, grammar._root)
        return super()._init_sampler(*args, **kwargs)

    def _check_grammar(self, text: str, root: str) -> None:
        """llama_cpp.Llama puts the null of a refused grammar into its chain of samplers."""
        grammars.check(text)
        sampler = llama_cpp.llama_sampler_init_grammar(self._model.vocab, text.encode(), root.encode())
        if not sampler:
            raise errors.error(errors.BAD_ARGUMENT, "grammar: llama.cpp refused it; its log says why")
        llama_cpp.llama_sampler_free(sampler)


def _say_what_is_wrong(path: str, error: ValueError) -> None:
    """Raises MackoError with the reason if llama.cpp did not load a file that is no GGUF, or a damaged one: its own
    words are "Failed to load model from file".
    """
    if isinstance(error, errors.MackoError) or not os.path.exists(path):
        return
    try:
        bindings.File(path).close()
    except errors.MackoError as found:
        raise type(found)(found.code, f"Failed to load model from file: {found}") from error
