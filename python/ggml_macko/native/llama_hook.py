"""Lets the llama_cpp of this process open sparse GGUFs: `register()`.

The function loads the plugin into the ggml registry of libllama, and replaces llama_model_load_from_file by a function
that loads sparse files through the plugin. Dense models are loaded as before.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

from .. import errors, system
from ..native import environment, library, load_model

_lock = threading.RLock()
_registered = False
_options: contextvars.ContextVar[load_model.LoadOptions] = contextvars.ContextVar("options")


def run_with(options: load_model.LoadOptions, function: Callable[[], None]) -> None:
    """Calls function. The options hold for the models that it loads, and for no later ones."""

    def run() -> None:
        _options.set(options)
        function()

    contextvars.copy_context().run(run)


def register() -> None:
    """Registers the plugin. May be called any number of times, from any thread.

    Raises VersionMismatchError if the plugin does not fit the installed llama-cpp-python;
    GGML_MACKO_ENABLE=any-version tries versions outside of its range.
    """
    global _registered
    if _registered:
        return
    with _lock:
        if _registered:
            return
        _check_versions()
        _load_plugin()
        _replace_load_function()
        from .. import guards  # imports llama_cpp

        guards.install("llama_cpp")
        _registered = True


def _check_versions() -> None:
    import llama_cpp

    oldest, newest = library.llama_cpp_python_range()
    if not fits(llama_cpp.__version__) and not environment.is_enabled("any-version"):
        raise errors.error(
            errors.VERSION_MISMATCH,
            f"ggml-macko is for llama-cpp-python {oldest} to {newest}, but {llama_cpp.__version__} is installed: "
            f"pip install llama-cpp-python=={newest}",
        )
    library.check_running_ggml()


def fits(version: str) -> bool:
    """Whether the plugin supports a version of llama-cpp-python."""

    def numbers(text: str) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", text.split("+")[0])]

    oldest, newest = map(numbers, library.llama_cpp_python_range())
    return oldest <= numbers(version) <= newest


def _load_plugin() -> None:
    ggml = system.ggml_library("ggml")
    ggml.ggml_backend_load.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    ggml.ggml_backend_reg_by_name.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    if ggml.ggml_backend_reg_by_name(b"MACKO"):
        return  # an earlier register() failed after loading it; ggml would list its devices twice
    logger = logging.getLogger("llama-cpp-python")
    level = logger.level
    if level == logging.NOTSET:  # no Llama has set a level yet
        logger.setLevel(logging.ERROR)  # llama_cpp logs ggml's information as warnings
    try:
        if not ggml.ggml_backend_load(str(library.LIBRARY_PATH).encode()):
            raise errors.error(errors.LOAD_FAILED, f"llama.cpp refused the plugin {library.LIBRARY_PATH}")
    finally:
        logger.setLevel(level)


def _replace_load_function() -> None:
    import llama_cpp
    import llama_cpp.llama_cpp as api

    load_from_file = _address(_llama_load_function(api))

    def llama_model_load_from_file(path_model: bytes, params: Any, /) -> Any:
        options = _options.get(load_model.LoadOptions())
        functions = load_model.LlamaFunctions(
            load_from_file,
            _address(api.llama_model_load_from_file_ptr),
            _address(api.llama_model_free),
            api.llama_model_params,
        )
        return load_model.load_model(path_model, ctypes.addressof(params), functions, options) or None

    api.llama_model_load_from_file = llama_model_load_from_file
    llama_cpp.llama_model_load_from_file = llama_model_load_from_file


@functools.cache
def _llama_load_function(api: Any) -> Any:
    """llama.cpp's own function, even after an earlier register() failed halfway."""
    return api.llama_model_load_from_file


def _address(function: Any) -> int:
    """The address of a C function of ctypes."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
