"""Files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from .. import errors


class AtomicOutput:
    """A file that appears under its final name complete, checked and durable, or not at all.

        with AtomicOutput("out.gguf", inputs, force) as out:
            ... out.write(data) ...
            out.seal()           # complete, on disk, still under the partial name
            ... verify out.partial ...
            out.commit()

    The data goes to `.NAME.partial` in the same folder, locked with flock. Its first four bytes are this process's id
    until seal() writes the signature (the GGUF magic, or that of another format), so that no reader takes an incomplete
    file for a model. Leaving the block without commit() removes the partial file; after kill -9 or a power cut it
    stays, and the next run that writes the same output takes it over.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        inputs: Iterable[str | os.PathLike[str]],
        force: bool = False,
        signature: bytes = b"GGUF",
    ):
        self.path = Path(os.path.realpath(path))
        self.partial = self.path.with_name(f".{self.path.name}.partial")
        self.magic = struct.pack("<I", os.getpid())
        self._force = force
        self._signature = signature
        for source in inputs:
            if self.path.exists() and self.path.samefile(source):
                raise errors.error(errors.BAD_ARGUMENT, f"{path}: input and output files are the same")
        self._check_free()
        self._fd = -1

    def _check_free(self) -> None:
        try:
            mode = os.stat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISREG(mode):
            raise errors.error(errors.BAD_ARGUMENT, f"{self.path}: is not a regular file")
        if not self._force:
            raise errors.error(errors.BAD_ARGUMENT, f"{self.path}: exists; use --force to replace it")

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Adds the path of the output to an OSError that names none, as that of a full disk."""
        try:
            yield
        except OSError as e:
            if e.filename is not None:
                raise
            raise OSError(e.errno, e.strerror, str(self.path)) from e

    def __enter__(self) -> AtomicOutput:
        while True:
            fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # between open and flock its owner may have renamed it to a final name: never touch that file
                same = os.path.exists(self.partial) and os.path.samestat(os.fstat(fd), os.stat(self.partial))
            except OSError as e:
                owner = os.pread(fd, 4, 0)
                os.close(fd)
                if e.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                unknown = len(owner) < 4 or owner == self._signature
                by = "another process" if unknown else f"pid {struct.unpack('<I', owner)[0]}"
                raise errors.error(errors.IO, f"{self.path}: in use by {by}") from e
            if same:
                break
            os.close(fd)
        self._fd = fd
        try:
            with self._named():
                os.ftruncate(fd, 0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._fd >= 0:  # not committed
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.partial)
            fd, self._fd = self._fd, -1
            os.close(fd)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        with self._named():
            while len(view):
                view = view[os.write(self._fd, view[: 1 << 30]) :]

    def seal(self) -> None:
        """All data is written: make it durable, then turn it into a file of its format."""
        with self._named():
            os.fsync(self._fd)
            if os.pwrite(self._fd, self._signature, 0) != 4:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            os.fsync(self._fd)

    def commit(self) -> None:
        self._check_free()  # the output may have appeared meanwhile
        with self._named():
            os.rename(self.partial, self.path)
        fd, self._fd = self._fd, -1
        os.close(fd)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with self._named():
                os.fsync(folder)
        finally:
            os.close(folder)
