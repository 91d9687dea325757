"""Llama: llama_cpp.Llama that also opens sparse GGUFs."""

from __future__ import annotations

import contextlib
from typing import Any

import llama_cpp
from llama_cpp._logger import set_verbose

from .native.loader import register, run_compressing


class Llama(llama_cpp.Llama):
    """Drop-in for llama_cpp.Llama: the same arguments, methods and results; dense models work as before.

    >>> llama = Llama("sparse.gguf", n_ctx=2048, n_gpu_layers=-1)
    >>> llama("The capital of France is", max_tokens=8)["choices"][0]["text"]

    A sparse model is never memory-mapped: use_mmap and use_mlock have no effect on it. n_gpu_layers=-1 puts all layers
    on the GPU, if the plugin was built with one; the default, as in llama_cpp, is 0.
    """

    _stack = contextlib.ExitStack()  # what llama_cpp.Llama.__del__ closes if __init__ has not begun

    def __init__(
        self, model_path: str, *args: Any, compress: bool = False, verbose: bool = True, **kwargs: Any
    ) -> None:
        """Loads a model.

        model_path: a GGUF model, dense or sparse; the first file of a split one.
        compress: encodes the weights of a dense model that are full of zeros while it is loaded; no new file is needed.
        verbose: shows llama.cpp's log on stderr.
        args, kwargs: every other argument of llama_cpp.Llama, for example n_ctx, n_gpu_layers, n_threads, seed.

        Raises FileFormatError for a damaged sparse file, VersionMismatchError if another llama-cpp-python is installed
        than the plugin was built for, and else what llama_cpp.Llama raises, ValueError above all.
        """
        self._stack = contextlib.ExitStack()  # llama_cpp.Llama.__del__ closes it, also when register() fails
        set_verbose(verbose)  # before the plugin is loaded, so that it is as quiet as the rest
        register()
        init = super().__init__
        run_compressing(compress, lambda: init(model_path, *args, verbose=verbose, **kwargs))
