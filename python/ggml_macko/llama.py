"""Llama: llama_cpp.Llama that also opens sparse GGUFs."""

from __future__ import annotations

import os
import sys
from typing import Any

from llama_cpp._logger import set_verbose

from . import errors, system
from .guards import GuardedLlama
from .native import load_model
from .native.file import File
from .native.llama_hook import register, run_with

NUMBERS = dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), 2**31 - 1) | dict.fromkeys(
    ("n_threads", "n_threads_batch"), system.MAX_THREADS
)
"""The largest values of arguments that llama_cpp silently truncates to 32 bits, or that end the process."""


class _Path(str):
    """llama_cpp encodes a path as UTF-8, but a file name may be any bytes."""

    def encode(self, *unused: str) -> bytes:
        return super().encode(sys.getfilesystemencoding(), "surrogateescape")


class Llama(GuardedLlama):
    """Drop-in for llama_cpp.Llama: the same arguments, methods and results; dense models work as before.

    >>> llama = Llama("sparse.gguf", n_ctx=2048, n_gpu_layers=-1)
    >>> llama("The capital of France is", max_tokens=8)["choices"][0]["text"]

    A sparse model is never memory-mapped: use_mmap and use_mlock have no effect on it. n_gpu_layers=-1 puts all layers
    on the GPU, if the plugin was built with one; the default, as in llama_cpp, is 0.

    If a GPU fails while the logits are read, an exception is raised; llama_cpp would continue without valid logits.

    Four mistakes that end the process in llama_cpp raise ArgumentError here: a grammar that llama.cpp refuses, that
    crashes llama.cpp, or that no token can follow; a LoRA adapter that does not fit the model; a token outside the
    vocabulary in detokenize; and any use after close(). If another thread generates during close(), its current token
    is completed.

    Threads that share a Llama take turns, one call or one item of a stream at a time. A call that changes the state
    ends the streams of other threads: requesting their next item raises RuntimeError. pickle, copy.deepcopy and spawned
    processes load the model again, with the same options.
    """

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
        compress: encodes weights of a dense model with enough zeros while the model is loaded. No file is written.
        keep_negative_zeros, with compress: stores -0.0 as a value. By default, -0.0 counts as zero.
        sparse_only: raises an exception if llama.cpp places a sparse weight on a device of another backend. By default,
        the weight becomes dense there, and a warning has the number of such weights.
        strict: raises an exception for a sparse model of an architecture without rules for its metadata (SECURITY.md).
        By default, such a model is trusted like a dense model, and a warning is logged.
        weight_cache: writes the CPU weights in their memory layout to a file in the user's cache folder, whose path is
        logged. The next load of the unchanged model maps that file. This cache is unrelated to the prompt cache
        (set_cache).
        verbose: shows llama.cpp's log on stderr.
        args, kwargs: every other argument of llama_cpp.Llama, for example n_ctx, n_gpu_layers, n_threads, seed.

        Raises FileFormatError for a file that is damaged or is not a GGUF, FileAccessError for a directory, FIFO,
        socket or device, and VersionMismatchError if the plugin does not support the installed llama-cpp-python. Other
        errors are those of llama_cpp.Llama, mostly ValueError.
        """
        for name, most in NUMBERS.items():
            if kwargs.get(name) is not None and not 0 <= kwargs[name] <= most:
                text = f"{name}={kwargs[name]}: expected a number from 0 to {most}"
                raise errors.bad_argument(text)
        set_verbose(verbose)  # before the plugin is loaded, so that the setting also applies to its log
        register()
        options = load_model.LoadOptions(compress, keep_negative_zeros, sparse_only, strict, weight_cache)
        self._given = dict(
            kwargs,
            compress=compress,
            keep_negative_zeros=keep_negative_zeros,
            sparse_only=sparse_only,
            strict=strict,
            weight_cache=weight_cache,
        )
        init = super().__init__
        try:
            run_with(options, lambda: init(_Path(model_path), *args, verbose=verbose, **kwargs))
        except ValueError as e:
            _say_what_is_wrong(model_path, e)
            raise
        self.model_path = model_path
        # llama.cpp rounds a context up to a multiple of 256; llama_cpp reserves only the requested number of tokens
        self._n_ctx = min(self._n_ctx, len(self.input_ids))

    def __getstate__(self) -> dict[str, Any]:
        """All options. An option that llama_cpp stores has its present value."""
        return {**self._given, **super().__getstate__()}  # type: ignore[no-untyped-call]


def _say_what_is_wrong(path: str, error: ValueError) -> None:
    """Raises MackoError with the reason if the file is damaged or is not a GGUF. The message of llama_cpp is only
    "Failed to load model from file".
    """
    if isinstance(error, errors.MackoError) or not os.path.exists(path):
        return
    try:
        File(path).close()
    except errors.MackoError as found:
        raise type(found)(found.code, f"Failed to load model from file: {found}") from error
