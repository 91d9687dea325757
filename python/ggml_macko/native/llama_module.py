"""Checks the parts of the module llama_cpp that the hook needs: functions, their ctypes signatures, and members of
llama_model_params.

The version says little: forks have numbers of their own, and one version has many builds. Therefore check() looks at
the module itself, and compares its struct with the one that the library writes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from .. import errors
from .library import ffi, lib

POINTER = ctypes.sizeof(ctypes.c_void_p)
FUNCTIONS: dict[str, tuple[tuple[str, ...], str | None]] = {
    "llama_model_load_from_file": (("pointer", "params"), "pointer"),
    "llama_model_load_from_file_ptr": (("pointer", "params"), "pointer"),
    "llama_model_free": (("pointer",), None),
    "llama_model_default_params": ((), "params"),
}
"""Arguments and result of each function."""
ENUM = ctypes.sizeof(ctypes.c_int)
MEMBERS = {"progress_callback": POINTER, "progress_callback_user_data": POINTER, "split_mode": ENUM}
MEMBERS |= dict.fromkeys(("vocab_only", "check_tensors", "no_alloc"), 1)
"""Bytes of each member of llama_model_params that every version has."""
LOAD_MODES: tuple[dict[str, int], ...] = (
    {"load_mode": ENUM},
    dict.fromkeys(("use_mmap", "use_direct_io", "use_mlock"), 1),
)
"""Members that choose how a file is read; llama_model_params has all of one group."""
LIBRARY = ("ggml_backend_load", "ggml_backend_reg_by_name")
"""Functions of libllama or of a library that it uses."""


def check(api: Any, load_from_file: Any) -> None:
    """Raises VersionMismatchError, which names what is missing or different.

    api: the module llama_cpp.llama_cpp. load_from_file: its llama_model_load_from_file before register().
    """
    problem = next(_problems(api, load_from_file), None)
    if problem is not None:
        raise errors.error(errors.VERSION_MISMATCH, f"ggml-macko cannot use this llama_cpp: {api.__file__}: {problem}")


def _problems(api: Any, load_from_file: Any) -> Iterator[str]:
    params = getattr(api, "llama_model_params", None)
    if not (isinstance(params, type) and issubclass(params, ctypes.Structure)):
        yield "has no struct llama_model_params"
        return
    for name, (arguments, result) in FUNCTIONS.items():
        function = load_from_file if name == "llama_model_load_from_file" else getattr(api, name, None)
        if function is None:
            yield f"has no function {name}"
        elif _signature(function, params) not in ((arguments, result), None):  # None: a program wraps it
            yield f"{name} is not ({', '.join(arguments)}) -> {result}"
    for name in LIBRARY:
        if not hasattr(getattr(api, "_lib", None), name):
            yield f"_lib has no function {name}"
    modes = next((group for group in LOAD_MODES if any(hasattr(params, name) for name in group)), LOAD_MODES[0])
    for name, nbytes in (MEMBERS | modes).items():
        member = getattr(params, name, None)
        if member is None:
            yield f"llama_model_params has no member {name}"
        elif member.size != nbytes:
            yield f"llama_model_params.{name} does not have {nbytes} bytes (has {member.size})"
    default_params = ctypes.cast(api._lib.llama_model_default_params, ctypes.c_void_p).value
    layout = ffi().new("struct ggml_macko_params_layout *")
    unknown = lib().ggml_macko_find_params_layout(
        ffi().cast("void (*)(void)", default_params), hasattr(api._lib, "llama_load_mode_name"), layout
    )
    if not unknown and layout.nbytes != ctypes.sizeof(params):
        yield f"llama_model_params does not have {layout.nbytes} bytes, as in libllama (has {ctypes.sizeof(params)})"


def _signature(function: Any, params: type[ctypes.Structure]) -> tuple[tuple[str, ...], str | None] | None:
    """The kinds of the arguments and of the result; None for a function that is not from a C library."""

    def kind(of: Any) -> str:
        if of is params:
            return "params"
        simple = isinstance(of, type) and issubclass(of, (ctypes.c_void_p, ctypes.c_char_p, ctypes._Pointer))
        return "pointer" if simple else getattr(of, "__name__", str(of))

    if not hasattr(function, "argtypes"):
        return None
    return tuple(map(kind, function.argtypes or ())), None if function.restype is None else kind(function.restype)
