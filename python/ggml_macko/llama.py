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
"""Arguments of Llama that llama_cpp cuts to 32 bits unseen, or that end the process, and the largest values."""


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

    A GPU that fails while the logits are read is an error: llama_cpp would go on with what is not there.

    Four things that end the process in llama_cpp raise ArgumentError here: a grammar that llama.cpp refuses or does not
    survive, or that no token can follow; a LoRA adapter that does not fit; a token outside the vocabulary in
    detokenize; and any use after close(). close() while another thread generates lets it finish its token.

    Threads that share a Llama take turns: one call at a time, or one item of a stream. A call that changes the state
    ends the streams that others have begun: their next item is a RuntimeError. pickle, copy.deepcopy and spawned
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
        for name in NUMBERS.keys() & kwargs.keys():
            if kwargs[name] is not None and not 0 <= kwargs[name] <= NUMBERS[name]:
                text = f"{name}={kwargs[name]}: expected a number from 0 to {NUMBERS[name]}"
                raise errors.bad_argument(text)
        set_verbose(verbose)  # before the plugin is loaded, so that it is as quiet as the rest
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
        # llama.cpp rounds a context up to a multiple of 256; llama_cpp has room for as many tokens as were asked for
        self._n_ctx = min(self._n_ctx, len(self.input_ids))

    def __getstate__(self) -> dict[str, Any]:
        """All options, those with their present values that llama_cpp keeps."""
        return {**self._given, **super().__getstate__()}  # type: ignore[no-untyped-call]


def _say_what_is_wrong(path: str, error: ValueError) -> None:
    """Raises MackoError with the reason if llama.cpp did not load a file that is no GGUF, or a damaged one: its own
    words are "Failed to load model from file".
    """
    if isinstance(error, errors.MackoError) or not os.path.exists(path):
        return
    try:
        File(path).close()
    except errors.MackoError as found:
        raise type(found)(found.code, f"Failed to load model from file: {found}") from error
