"""Teaches the llama_cpp of this process to open sparse GGUFs: `register()`.

Loads the plugin into the ggml registry that libllama uses, and puts a function in the place of
llama_model_load_from_file that serves sparse files through the plugin. Everything else, dense models included, goes
the way it always went.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

from .. import errors
from ..native import bindings

_lock = threading.Lock()
_registered = False
_compress = contextvars.ContextVar("compress", default=False)
_keep_negative_zeros = contextvars.ContextVar("keep_negative_zeros", default=False)


@contextlib.contextmanager
def compressing(compress: bool, keep_negative_zeros: bool = False) -> Iterator[None]:
    """Dense models that are loaded inside, on this thread, are compressed on the way. A -0.0 counts as zero, unless it
    is to be kept.
    """
    tokens = _compress.set(compress), _keep_negative_zeros.set(keep_negative_zeros)
    try:
        yield
    finally:
        _compress.reset(tokens[0])
        _keep_negative_zeros.reset(tokens[1])


def register() -> None:
    """Safe to call any number of times, from any thread.

    With GGML_MACKO_COMPRESS=1 in the environment, dense models are compressed while they are loaded; with
    GGML_MACKO_KEEP_NEGATIVE_ZEROS=1, too, -0.0 is kept like any other value.
    Raises VersionMismatchError if the installed llama-cpp-python is not the one that the plugin was built for.
    """
    global _registered
    with _lock:
        if _registered:
            return
        _check_versions()
        _load_plugin()
        _replace_load_function()
        _registered = True


def _check_versions() -> None:
    import llama_cpp

    built_for = bindings.built_for_llama_cpp_python()
    if llama_cpp.__version__ != built_for:
        raise errors.error(
            errors.VERSION_MISMATCH,
            f"ggml-macko was built for llama-cpp-python {built_for}, but {llama_cpp.__version__} is installed: "
            f"pip install llama-cpp-python=={built_for}",
        )
    base = ctypes.CDLL("libggml-base.so.0")  # loaded already, by llama_cpp
    base.ggml_version.restype = ctypes.c_char_p
    bindings.check_ggml(base.ggml_version().decode())


def _load_plugin() -> None:
    # not llama_cpp._ggml.libggml: that is a second copy of the library, with a registry that libllama never sees
    ggml = ctypes.CDLL("libggml.so.0")
    ggml.ggml_backend_load.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    logger = logging.getLogger("llama-cpp-python")
    level = logger.level
    if level == logging.NOTSET:  # no Llama yet, so nobody said how verbose to be
        logger.setLevel(logging.ERROR)  # llama_cpp takes ggml's level of information for a warning
    try:
        if not ggml.ggml_backend_load(str(bindings.LIBRARY_PATH).encode()):
            raise errors.error(errors.LOAD_FAILED, f"llama.cpp refused the plugin {bindings.LIBRARY_PATH}")
    finally:
        logger.setLevel(level)


def _replace_load_function() -> None:
    import llama_cpp
    import llama_cpp.llama_cpp as api

    load_from_file = api.llama_model_load_from_file

    def llama_model_load_from_file(path_model: bytes, params: Any, /) -> Any:
        compress = _compress.get() or os.environ.get("GGML_MACKO_COMPRESS") == "1"
        keep = _keep_negative_zeros.get() or os.environ.get("GGML_MACKO_KEEP_NEGATIVE_ZEROS") == "1"
        try:
            load = bindings.Load(path_model, compress, params.no_alloc, keep)
        except errors.FileFormatError as e:
            if e.code != errors.NOT_SPARSE:
                raise
            return load_from_file(path_model, params)  # dense, split or not a model at all: llama.cpp's to judge
        return _load_sparse(api, load, params)

    api.llama_model_load_from_file = llama_model_load_from_file
    llama_cpp.llama_model_load_from_file = llama_model_load_from_file


def _load_sparse(api: Any, load: bindings.Load, params: Any) -> Any:
    model = None
    try:
        params = type(params).from_buffer_copy(params)  # the caller's stay as they are
        params.load_mode = api.LLAMA_LOAD_MODE_NONE  # a stream has no descriptor to map
        params.check_tensors = False  # it would look at placeholders; the plugin checks the real data, always
        model = api.llama_model_load_from_file_ptr(load.stream, params)
    finally:
        try:
            load.end(bool(model), not (params.vocab_only or params.no_alloc))
        except errors.MackoError:
            if model:
                api.llama_model_free(model)
            raise
    return model
