"""The C library: opened once, its errors as exceptions, its versions.

The modules of this package are thin wrappers of ggml-macko.h, one module per area, and the only users of cffi. They
check dtypes, contiguity and array lengths, which C cannot check, allocate results, and turn status codes into
exceptions. Arguments and results are NumPy arrays and dataclasses; no cdata leaves the package.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
from pathlib import Path
from typing import Any, TypeVar

from .. import errors, system

PACKAGE = Path(__file__).parent.parent
LIBRARY_PATH = PACKAGE / system.PLUGIN
PRELOAD_PATH = PACKAGE / system.PRELOAD

_load_lock = threading.RLock()
_library: Any = None

Fields = TypeVar("Fields")


def ffi() -> Any:
    """The declarations of pybind/build_ffi.py. The type is Any, here and in lib(), because cffi has no types."""
    try:
        generated: Any = importlib.import_module("ggml_macko._ffi")
    except ImportError as e:
        raise _not_built("_ffi.py") from e
    return generated.ffi


def _not_built(name: str) -> errors.MackoError:
    """The error of a package with only its Python files, such as a clone of the repository."""
    folder = LIBRARY_PATH.parent
    return errors.error(errors.IO, f"{folder} has no {name}: it was not built; pip install ggml-macko from its sources")


def _open_library() -> Any:
    # importing llama_cpp loads the copy of libggml-base that libllama uses, which the plugin needs
    import llama_cpp  # noqa: F401

    return ffi().dlopen(str(LIBRARY_PATH))


def lib() -> Any:
    """The functions of the library."""
    global _library
    if _library is not None:
        return _library
    with _load_lock:
        if not LIBRARY_PATH.exists():
            raise _not_built(LIBRARY_PATH.name)
        try:
            _library = _open_library()
        except OSError as e:
            raise errors.error(errors.VERSION_MISMATCH, f"cannot load {LIBRARY_PATH}: {e}") from e
    return _library


def new_struct(name: str) -> Any:
    """A C struct of zeros with its struct_size set."""
    struct = ffi().new(f"struct {name} *")
    struct.struct_size = ffi().sizeof(struct[0])
    return struct


def text(c_string: Any) -> str:
    """The text of a C string, which C owns."""
    raw: bytes = ffi().string(c_string)
    return raw.decode("utf-8", errors="replace")


def from_struct(cls: type[Fields], c: Any, **others: Any) -> Fields:
    """The dataclass cls, each field from `others` or from the member of a C struct with the same name."""

    def value(name: str) -> Any:
        found = others[name] if name in others else getattr(c, name)
        return text(found) if isinstance(found, ffi().CData) else found

    return cls(**{field.name: value(field.name) for field in dataclasses.fields(cls)})  # type: ignore[arg-type]


def check(status: int) -> None:
    """Raises the exception for a status other than OK, with the library's message."""
    if status != 0:
        raise errors.error(status, text(lib().ggml_macko_last_error()))


def version() -> str:
    """The version of this package."""
    return text(lib().ggml_macko_version())


def llama_cpp_python_range() -> tuple[str, str]:
    """The oldest and the newest version of llama-cpp-python that the plugin is tested with."""
    return text(lib().ggml_macko_oldest_llama_cpp_python()), text(lib().ggml_macko_newest_llama_cpp_python())


def running_ggml() -> str:
    """The version of the ggml of this process."""
    return text(lib().ggml_macko_running_ggml())


def ggml_range() -> tuple[str, str]:
    """The oldest and the newest version of ggml that the plugin is tested with."""
    return text(lib().ggml_macko_oldest_ggml()), text(lib().ggml_macko_newest_ggml())


def gpus() -> str:
    """The GPUs in use, or the reason for none, and the GPU architectures of this build."""
    return text(lib().ggml_macko_gpus())


def untested_ggml() -> str:
    """A line that says that the version of this process's ggml is not tested; "" if it is tested."""
    return text(lib().ggml_macko_untested_ggml())


def check_running_ggml() -> None:
    """Raises VersionMismatchError unless the plugin fits the structs and operations of this process's ggml."""
    check(lib().ggml_macko_check_running_ggml())
