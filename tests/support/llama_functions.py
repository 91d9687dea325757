"""Python functions that replace llama.cpp's, for tests of the steps while a model loads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import llama_cpp.llama_cpp as api

from ggml_macko import errors
from ggml_macko.native import load_model


def as_c(function: Callable[[int, api.llama_model_params], int | None]) -> ctypes._CFuncPtr:
    """A C function like llama_model_load_from_file_ptr that calls a function (stream or path, params) -> model address.

    Keep the result alive as long as C may call it.
    """
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, api.llama_model_params)(function)


def compress_log(path, **options):
    """The plugin's log for a dense file that it compresses; llama.cpp does not load the file."""
    import llama_cpp

    log = []
    nothing = as_c(lambda stream, params: None)
    address = ctypes.cast(nothing, ctypes.c_void_p).value
    params = api.llama_model_default_params()
    llama_cpp.llama_log_set(callback := llama_cpp.llama_log_callback(lambda level, text, data: log.append(text)), None)
    try:
        functions = load_model.LlamaFunctions(address, address, address, api.llama_model_params)
        load_options = load_model.LoadOptions(compress=True, **options)
        load_model.load_model(path, ctypes.addressof(params), functions, load_options)
    except errors.LoadError:
        pass
    finally:
        from llama_cpp._logger import llama_log_callback

        llama_cpp.llama_log_set(llama_log_callback, None)
    del callback
    return b"".join(log).decode()
