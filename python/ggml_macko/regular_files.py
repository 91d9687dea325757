"""Opens files for reading, with errors that name the file.

A path from a user may be a FIFO without a writer, a socket or a device. Opening it can block forever, and reading a
device can have side effects, so all code opens files with these functions.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import stat
from collections.abc import Iterable, Iterator

from . import errors

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_regular(path: str | os.PathLike[str], mode: int | None = None) -> None:
    """Raises FileAccessError unless path is a regular file or a link to one, OSError if there is no such file.

    mode: st_mode of the file, if known.
    """
    found = os.stat(path).st_mode if mode is None else mode
    if not stat.S_ISREG(found):
        kind = next((name for is_kind, name in _KINDS if is_kind(found)), "something else")
        raise errors.error(errors.NOT_A_FILE, f"{os.fspath(path)}: is {kind}, not a regular file")


def open_regular(path: str | os.PathLike[str]) -> io.FileIO:
    """Opens a regular file for unbuffered reading without blocking. Raises the errors of check_regular."""
    check_regular(path)
    file = io.FileIO(os.fspath(path), opener=_open_without_waiting)
    try:
        check_regular(path, os.fstat(file.fileno()).st_mode)  # the file may have been replaced meanwhile
    except BaseException:
        file.close()
        raise
    return file


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def permissions(sources: Iterable[str | os.PathLike[str]]) -> int:
    """The permissions of a file that is made from these files: no more than any existing one has."""
    shared = 0o666
    for source in sources:
        with contextlib.suppress(OSError):
            shared &= os.stat(source).st_mode | 0o600
    return shared


def new_file(path: str | os.PathLike[str], mode: str, sources: Iterable[str | os.PathLike[str]]) -> io.FileIO:
    """Creates an unbuffered file that is made from these files. mode: x or x+. Raises OSError."""
    return io.FileIO(os.fspath(path), mode, opener=functools.partial(os.open, mode=permissions(sources)))


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """All of a regular file. Raises FileAccessError or an OSError that names the file."""
    with named(path), open_regular(path) as file:
        return file.readall()


def read_at(file: io.FileIO, offset: int, out: memoryview) -> int:
    """Fills `out` with the bytes from `offset` on. Returns their number, smaller only at the end of the file."""
    done = 0
    while done < len(out):
        n = os.preadv(file.fileno(), [out[done:]], offset + done)
        if n == 0:
            break
        done += n
    return done


def write_at(file: io.FileIO, offset: int, data: memoryview) -> None:
    """Writes all bytes of `data` (uint8) from `offset` on."""
    while len(data):
        n = os.pwrite(file.fileno(), data[: 1 << 30], offset)
        data = data[n:]
        offset += n


@contextlib.contextmanager
def named(path: str | os.PathLike[str], always: bool = False) -> Iterator[None]:
    """Adds this name to an OSError without a file name, as from a full disk; always: also replaces names."""
    try:
        yield
    except OSError as e:
        if e.errno is None or (e.filename is not None and not always):
            raise
        raise OSError(e.errno, e.strerror, os.fspath(path)) from e
