"""Exceptions with a status code of the C library and one line of text.

Errors that llama_cpp.Llama raises as ValueError are also ValueErrors here, so callers of the drop-in class need no
change.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def printable(text: str) -> str:
    """The text with escapes for control characters and invisible characters, since names and metadata are untrusted."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


class MackoError(Exception):
    """Any failure of ggml-macko. `code` is a value of enum ggml_macko_status, `str(error)` is one line."""

    def __init__(self, code: int, text: str):
        super().__init__(printable(text))
        self.code = code


class ArgumentError(MackoError, ValueError):
    """An argument of the wrong shape, type or size, or options that do not go together."""


class UsageError(ArgumentError):
    """Options that are wrong for any file. `macko` exits with 2."""


class OutOfMemoryError(MackoError, MemoryError):
    """The host ran out of memory. The call had no effect."""


class VersionMismatchError(MackoError, ImportError):
    """The plugin does not support the installed llama-cpp-python."""


class LoadError(MackoError, ValueError):
    """llama.cpp refused the model, or the load was cancelled."""


class FileAccessError(MackoError, ValueError):
    """A file could not be read, is not a regular file, is too short, or changed while it was read."""


class FileFormatError(MackoError, ValueError):
    """A GGUF file that breaks a rule of FORMAT.md. No part of it was used."""


class PayloadError(FileFormatError):
    """A file with a valid header, but with an invalid array of a sparse matrix."""


# Values of enum ggml_macko_status that Python code raises or compares with; a test checks them against the header.
BAD_ARGUMENT = 1
OUT_OF_MEMORY = 2
VERSION_MISMATCH = 3
LOAD_FAILED = 5
IO = 10
NOT_A_FILE = 11
FILE_CHANGED = 13
LIMIT = 22
BAD_KEY_VALUE = 26
MISSING_KEY = 27
DUPLICATE_TENSOR = 30
SPLIT_FILE = 35
UNSUPPORTED_ARCH = 36
NOT_SPARSE = 40
BAD_FORMAT = 42
BAD_COMPONENT = 44
BAD_ROW_PTR = 50
BAD_COLUMN = 51
NOT_CANONICAL = 52
NOT_FINITE = 53
BAD_NNZ = 54
BAD_BLOCK = 55
OVERLAP = 56


def error_class(code: int) -> type[MackoError]:
    """The exception class of a status code."""
    own = {BAD_ARGUMENT: ArgumentError, OUT_OF_MEMORY: OutOfMemoryError, VERSION_MISMATCH: VersionMismatchError}
    areas = ((10, LoadError), (20, FileAccessError), (50, FileFormatError))  # codes below the number
    return own.get(code) or next((found for end, found in areas if code < end), PayloadError)


def error(code: int, text: str) -> MackoError:
    """The exception for a status code; the caller raises it."""
    return error_class(code)(code, text)


def bad_argument(text: str) -> MackoError:
    """The exception for an argument or an input that does not fit; the caller raises it."""
    return error(BAD_ARGUMENT, text)


def usage_error(text: str) -> UsageError:
    """The exception for wrong options; the caller raises it."""
    return UsageError(BAD_ARGUMENT, text)


def did_you_mean(name: str, known: Iterable[str], n: int = 1) -> str:
    """ "; did you mean ...?" with the known names nearest to an unknown one, or an empty text."""
    nearest = difflib.get_close_matches(name, list(known), n, cutoff=0.6)
    names = " or ".join([", ".join(nearest[:-1]), nearest[-1]] if len(nearest) > 1 else nearest)
    return f"; did you mean {names}?" if nearest else ""


def one_line(error: BaseException) -> str:
    """The message for the user about any exception."""
    if isinstance(error, MackoError):
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    elif isinstance(error, MemoryError):
        text = "out of memory"
    elif isinstance(error, SystemError):  # NumPy often sets no exception when an allocation fails
        text = f"internal error of Python or NumPy, perhaps out of memory: {error}"
    else:
        text = str(error) or type(error).__name__
    return printable(" ".join(text.split()))
