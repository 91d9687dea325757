"""Llama: llama_cpp.Llama that also opens sparse GGUFs."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import llama_cpp
from llama_cpp._logger import set_verbose

from .errors import MackoError
from .native import bindings
from .native.loader import compressing, register


class Llama(llama_cpp.Llama):
    """Drop-in for llama_cpp.Llama: the same arguments, methods and results; dense models work as before.

    >>> llama = Llama("sparse.gguf", n_ctx=2048, n_gpu_layers=-1)
    >>> llama("The capital of France is", max_tokens=8)["choices"][0]["text"]

    A sparse model is never memory-mapped: use_mmap and use_mlock have no effect on it. n_gpu_layers=-1 puts all layers
    on the GPU, if the plugin was built with one; the default, as in llama_cpp, is 0.
    """

    def __init__(
        self,
        model_path: str,
        *args: Any,
        compress: bool = False,
        keep_negative_zeros: bool = False,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        """Loads a model.

        model_path: a GGUF model, dense or sparse; the first file of a split one.
        compress: encodes the weights of a dense model that are full of zeros while it is loaded; no new file is needed.
        keep_negative_zeros, with compress: -0.0 is a value like any other; else it counts as zero.
        verbose: shows llama.cpp's log on stderr.
        args, kwargs: every other argument of llama_cpp.Llama, for example n_ctx, n_gpu_layers, n_threads, seed.

        Raises FileFormatError for a damaged file and for one that is no GGUF, VersionMismatchError if another
        llama-cpp-python is installed than the plugin was built for, and else what llama_cpp.Llama raises, ValueError
        above all.
        """
        self._stack = contextlib.ExitStack()  # llama_cpp.Llama.__del__ closes it, also when register() fails
        set_verbose(verbose)  # before the plugin is loaded, so that it is as quiet as the rest
        register()
        with compressing(compress, keep_negative_zeros):
            try:
                super().__init__(model_path, *args, verbose=verbose, **kwargs)
            except ValueError as e:
                _say_what_is_wrong(model_path, e)
                raise


def _say_what_is_wrong(path: str, error: ValueError) -> None:
    """Raises MackoError with the reason if llama.cpp did not load a file that is no GGUF, or a damaged one: its own
    words are "Failed to load model from file".
    """
    if isinstance(error, MackoError) or not os.path.exists(path):
        return
    try:
        bindings.File(path).close()
    except MackoError as found:
        raise type(found)(found.code, f"Failed to load model from file: {found}") from error
