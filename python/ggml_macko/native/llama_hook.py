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

from .. import errors
from ..native import environment, library, llama_module, load_model

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

    Raises VersionMismatchError if the installed llama_cpp lacks what the plugin needs. The log has a warning if nobody
    tested its version, which GGML_MACKO_ENABLE=strict-versions refuses.
    """
    global _registered
    if _registered:
        return
    with _lock:
        if _registered:
            return
        import llama_cpp
        import llama_cpp.llama_cpp as api

        tested = _check_version(llama_cpp.__version__)
        load_from_file = _llama_load_function(api)
        llama_module.check(api, load_from_file)
        library.check_running_ggml()
        _load_plugin(api)
        _replace_load_function(load_from_file)
        from .. import guards  # imports llama_cpp

        missing = guards.install("llama_cpp")
        if not tested:
            _warn_once(llama_cpp.__version__, missing)
        _registered = True


def _check_version(version: str) -> bool:
    """Whether the version is tested. Raises VersionMismatchError for another one with strict-versions."""
    oldest, newest = library.llama_cpp_python_range()
    if not is_tested(version) and environment.is_enabled("strict-versions"):
        raise errors.error(
            errors.VERSION_MISMATCH,
            f"ggml-macko is tested with llama-cpp-python {oldest} to {newest}, but {version} is installed: "
            f"pip install llama-cpp-python=={newest}",
        )
    return is_tested(version)


def untested(version: str) -> str:
    """The warning about a version that nobody tested."""
    oldest, newest = library.llama_cpp_python_range()
    return f"ggml-macko is tested with llama-cpp-python {oldest} to {newest}, and {version} is installed"


@functools.cache
def _warn_once(version: str, missing: tuple[str, ...]) -> None:
    """missing: functions whose guards do not fit."""
    without = f"; it has no place for the checks of {', '.join(missing)}" if missing else ""
    logging.getLogger("ggml_macko").warning("%s%s", untested(version), without)


def is_tested(version: str) -> bool:
    """Whether a version of llama-cpp-python is one that the plugin is tested with."""

    def numbers(text: str) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", text.split("+")[0])]

    oldest, newest = map(numbers, library.llama_cpp_python_range())
    return oldest <= numbers(version) <= newest


def _load_plugin(api: Any) -> None:
    ggml = api._lib  # its symbols include those of the libraries that libllama uses, wherever they are
    ggml.ggml_backend_load.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    ggml.ggml_backend_reg_by_name.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    if ggml.ggml_backend_reg_by_name(b"MACKO"):
        return  # an earlier register() failed after loading it; ggml would list its devices twice
    logger = logging.getLogger("llama-cpp-python")
    level = logger.level
    if level == logging.NOTSET and not library.untested_ggml():  # no Llama has set a level yet
        logger.setLevel(logging.ERROR)  # llama_cpp logs ggml's information as warnings
    try:
        if not ggml.ggml_backend_load(str(library.LIBRARY_PATH).encode()):
            raise errors.error(errors.LOAD_FAILED, f"llama.cpp refused the plugin {library.LIBRARY_PATH}")
    finally:
        logger.setLevel(level)


def _replace_load_function(original: Any) -> None:
    import llama_cpp
    import llama_cpp.llama_cpp as api

    load_from_file = _address(original)

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
