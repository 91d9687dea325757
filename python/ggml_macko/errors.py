"""What can go wrong, as exceptions. Each carries the status code of the C library and its one line of text.

Errors that llama_cpp.Llama would raise as ValueError are ValueErrors here too, so that callers of the drop-in class
need no change.
"""

from __future__ import annotations


class MackoError(Exception):
    """Any failure of ggml-macko. `code` is an enum ggml_macko_status, `str(error)` one line."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


class ArgumentError(MackoError, ValueError):
    """A shape, type or count that does not fit."""


class OutOfMemoryError(MackoError, MemoryError):
    """The host ran out of memory; nothing is left behind."""


class VersionMismatchError(MackoError, ImportError):
    """The installed llama-cpp-python is not the one that the plugin was built for."""


class LoadError(MackoError, ValueError):
    """llama.cpp refused the model, or the load was cancelled."""


class FileAccessError(MackoError, ValueError):
    """The file could not be read, is not a regular file, is too short, or changed meanwhile."""


class FileFormatError(MackoError, ValueError):
    """A GGUF file that breaks a rule of FORMAT.md; nothing of it was used."""


class PayloadError(FileFormatError):
    """The header is right, but the arrays of a sparse matrix are not."""


# enum ggml_macko_status, as far as Python code raises them itself or asks for them; tests compare them with the header
BAD_ARGUMENT = 1
VERSION_MISMATCH = 3
LOAD_FAILED = 5
IO = 10
FILE_CHANGED = 13
LIMIT = 22
BAD_KEY_VALUE = 26
DUPLICATE_TENSOR = 30
SPLIT_FILE = 35
UNSUPPORTED_ARCH = 36
NOT_SPARSE = 40
BAD_ROW_PTR = 50
BAD_COLUMN = 51
NOT_CANONICAL = 52
NOT_FINITE = 53
BAD_NNZ = 54
BAD_BLOCK = 55
OVERLAP = 56
BAD_FORMAT = 42
BAD_COMPONENT = 44


def error_class(code: int) -> type[MackoError]:
    """The exception class of a status code."""
    if code == BAD_ARGUMENT:
        return ArgumentError
    if code == 2:
        return OutOfMemoryError
    if code == VERSION_MISMATCH:
        return VersionMismatchError
    if code < 10:
        return LoadError
    if code < 20:
        return FileAccessError
    if code < 50:
        return FileFormatError
    return PayloadError


def error(code: int, text: str) -> MackoError:
    return error_class(code)(code, text)
