"""Llama: llama_cpp.Llama that also opens sparse GGUFs."""

from __future__ import annotations

import contextlib
from typing import Any

import llama_cpp
from llama_cpp._logger import set_verbose

from .native.loader import compressing, register


class Llama(llama_cpp.Llama):
    """Drop-in for llama_cpp.Llama: the same arguments, methods and results; dense models work as before.

    compress=True encodes the weights of a dense model that are full of zeros while it is loaded: no new file is needed.
    A sparse model is never memory-mapped: use_mmap and use_mlock have no effect on it. n_gpu_layers=-1 puts all layers
    on the GPU, if the plugin was built with one; the default, as in llama_cpp, is 0.
    """

    def __init__(self, model_path: str, *args: Any, compress: bool = False, verbose: bool = True, **kwargs: Any):
        self._stack = contextlib.ExitStack()  # llama_cpp.Llama.__del__ closes it, also when register() fails
        set_verbose(verbose)  # before the plugin is loaded, so that it is as quiet as the rest
        register()
        with compressing(compress):
            super().__init__(model_path, *args, verbose=verbose, **kwargs)
