"""Files that appear complete or not at all, and scratch folders.

A temporary file has a new random name, which an object owns before the file exists and until it is removed. So the file
is removed after any exception, even of a signal handler: by the with block, by the end of the object, or at the latest
at the exit of the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
import struct
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Callable, TypeVar

from .. import console, errors
from ..regular_files import check_regular, named, new_file, write_at

_MAX_NAME = 200  # bytes of an output's name in the name of its partial file, which has at most 255
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)  # errors of link() on such a file system

_NO_FSYNC_OF_FOLDERS = (errno.EINVAL, errno.EOPNOTSUPP)

_Made = TypeVar("_Made")

# ---- temporary names ----


class _Temporary:
    """A random name in a folder. The file or folder with this name is removed with this object."""

    def __init__(self, folder: Path, prefix: str, suffix: str = ""):
        self.path = folder / f"{prefix}{secrets.token_hex(8)}{suffix}"
        self._finalizer = weakref.finalize(self, _remove_own, self.path, os.getpid())

    def make(self, how: Callable[[Path], _Made]) -> _Made:
        """Makes the file or folder. how: raises FileExistsError if the name exists."""
        try:
            return how(self.path)
        except FileExistsError:
            self.forget()
            raise

    def remove(self) -> None:
        """Removes the file or folder, if it exists."""
        if self._finalizer.alive:
            _remove(self.path)
            self.forget()  # last, so that the finalizer removes the file after an exception

    def forget(self) -> None:
        """Gives up the name."""
        self._finalizer.detach()


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)


def _remove_own(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has copies of the parent's objects
        with contextlib.suppress(OSError):
            _remove(path)


@contextlib.contextmanager
def scratch_folder(parent: str | os.PathLike[str], prefix: str) -> Iterator[Path]:
    """A new folder for this user only, which is removed with its content."""
    temporary = _Temporary(Path(parent), prefix)
    try:
        temporary.make(lambda path: os.mkdir(path, 0o700))
        yield temporary.path
    finally:
        temporary.remove()


# ---- outputs ----


class AtomicOutput:
    """A file that appears under its final name complete, checked and durable, or not at all.

        with AtomicOutput("out.gguf", inputs, force) as out:
            ... out.write(data) ...
            out.seal()           # complete, on disk, still under the partial name
            ... verify out.partial ...
            out.commit()

    The data is in `.NAME.RANDOM.partial` in the same folder, which is created exclusively and locked with flock. Its
    first four bytes are the id of this process until seal() writes the signature (the GGUF magic or that of another
    format), so that no reader mistakes an incomplete file for a model. Leaving the block without commit() removes the
    partial file. It remains after kill -9 or a power cut; the next run of the same user with the same output removes
    it, if it can lock it. A held lock means that the output is in use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        inputs: Iterable[str | os.PathLike[str]],
        force: bool = False,
        signature: bytes = b"GGUF",
    ):
        """inputs: files that the output must not replace, and whose permissions it gets at most."""
        self.path = Path(os.path.realpath(path))
        self.magic = struct.pack("<I", os.getpid())
        self._inputs = [Path(source) for source in inputs]
        self._force = force
        self._signature = signature
        self._temporary: _Temporary | None = None
        self._file: io.FileIO | None = None
        if not self.path.parent.is_dir():
            raise errors.error(errors.IO, f"{path}: there is no folder {self.path.parent}")
        if any(_is_same(self.path, source) for source in self._inputs):
            raise errors.bad_argument(f"{path}: input and output files are the same")
        self._check_free()

    @property
    def partial(self) -> Path:
        """The path of the data until commit()."""
        assert self._temporary is not None
        return self._temporary.path

    def _check_free(self) -> None:
        try:
            mode = os.stat(self.path).st_mode
        except FileNotFoundError:
            return
        check_regular(self.path, mode)
        if not self._force:
            raise errors.bad_argument(f"{self.path}: exists; use --force to replace it")

    def __enter__(self) -> AtomicOutput:
        try:
            with named(self.path, always=True):
                self._make_partial()
                self._look_for_others()
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        if self._temporary is not None:
            self._temporary.remove()
        if self._file is not None:
            self._file.close()

    def _make_partial(self) -> None:
        prefix, suffix = _partial_name(self.path)
        while True:
            temporary = self._temporary = _Temporary(self.path.parent, prefix, suffix)
            self._file = temporary.make(lambda path: new_file(path, "x+", self._inputs))
            # another run may briefly lock and remove the file, as if a killed run had left it
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(self._file.fileno()).st_nlink:
                    return
            temporary.remove()

    def _look_for_others(self) -> None:
        """Raises MackoError if another process writes the same output. Removes files of killed processes."""
        prefix, suffix = _partial_name(self.path)
        name = re.compile(re.escape(prefix) + "[0-9a-f]{16}" + re.escape(suffix))
        for other in sorted(entry for entry in os.listdir(self.path.parent) if name.fullmatch(entry)):
            path = self.path.parent / other
            if path != self.partial and not any(_is_same(path, source) for source in self._inputs):
                self._look_at(path)

    def _look_at(self, path: Path) -> None:
        """A step of _look_for_others(). It follows no links and ignores files of other users."""
        try:
            found = os.lstat(path)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                return
            file = io.FileIO(path, "r+", opener=_open_no_link)
        except OSError:  # the file is gone or not ours
            return
        with file:
            if not os.path.samestat(found, os.fstat(file.fileno())):
                return
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                owner = file.read(4) or b""
                unknown = len(owner) < 4 or owner == self._signature
                by = "another process" if unknown else f"pid {struct.unpack('<I', owner)[0]}"
                raise errors.error(errors.IO, f"{self.path}: in use by {by}") from e
            # the owner may have renamed the file before it released the lock
            if os.path.lexists(path) and os.path.samestat(found, os.lstat(path)):
                os.unlink(path)
                console.log(f"{path}: removed; it was left by a run that was killed")

    @property
    def _fd(self) -> int:
        assert self._file is not None
        return self._file.fileno()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        with named(self.path):
            while len(view):
                view = view[os.write(self._fd, view[: 1 << 30]) :]

    def skip(self, nbytes: int) -> None:
        """Leaves a hole, which reads as zeros."""
        with named(self.path):
            os.ftruncate(self._fd, os.lseek(self._fd, nbytes, os.SEEK_CUR))

    def seal(self) -> None:
        """Makes the complete data durable, and then writes the signature of the format."""
        with named(self.path):
            assert self._file is not None
            os.fsync(self._fd)
            write_at(self._file, 0, memoryview(self._signature))
            os.fsync(self._fd)

    def commit_whole(self, data: bytes) -> None:
        """Writes, seals and commits a whole file, which begins with the signature."""
        self.write(self.magic + data[len(self.magic) :])
        self.seal()
        self.commit()

    def commit(self) -> None:
        """Gives the sealed file its name. Raises MackoError if the output has appeared meanwhile (without force), or if
        the new name is not durable; in the latter case, the output is complete and in its place.
        """
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # before any change
        try:
            self._check_free()
            with named(self.path, always=True):
                self._rename()
            with self._complete("its folder could not be made durable, so that a power cut may undo it"):
                try:
                    os.fsync(folder)
                except OSError as e:
                    if e.errno not in _NO_FSYNC_OF_FOLDERS:
                        raise
        finally:
            os.close(folder)
            assert self._file is not None
            self._file.close()

    @contextlib.contextmanager
    def _complete(self, what: str) -> Iterator[None]:
        """Adds to errors inside the block that the output is complete."""
        try:
            yield
        except OSError as e:
            text = f"{self.path}: is complete and in its place, but {what}: {e.strerror}"
            raise errors.error(errors.IO, text) from e

    def _rename(self) -> None:
        assert self._temporary is not None
        if not self._force:
            try:
                os.link(self.partial, self.path, follow_symlinks=False)  # unlike rename(), link() never replaces a file
            except FileExistsError:
                self._check_free()
                raise
            except OSError as e:
                if e.errno not in _NO_HARD_LINKS:
                    raise
            else:
                with self._complete(f"{self.partial.name}, a second name of it, could not be removed"):
                    self._temporary.remove()
                return
        os.rename(self.partial, self.path)
        self._temporary.forget()


def _partial_name(path: Path) -> tuple[str, str]:
    """The parts of the name before and after the random part."""
    name = os.fsencode(path.name)
    return f".{path.name if len(name) <= _MAX_NAME else hashlib.sha256(name).hexdigest()}.", ".partial"


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)


def _is_same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:  # one of the files does not exist
        return False
