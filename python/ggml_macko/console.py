"""The output of the tools: logs and progress on stderr, results on stdout.

Library functions log lines in the style of llama-quantize (`log`, `tensor_line`) and show progress on a terminal
(`progress`); they print nothing else. `quiet()` silences them, and `brief()` omits details.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import math
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from .errors import printable

if TYPE_CHECKING:
    from tqdm import tqdm as Tqdm

MIB = 1024 * 1024

T = TypeVar("T")

_is_quiet = contextvars.ContextVar("is_quiet", default=False)
_is_brief = contextvars.ContextVar("is_brief", default=False)
_bars: list[Tqdm[Any]] = []  # the bars on the terminal, outermost first


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides progress and warnings of library functions inside the block."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


@contextlib.contextmanager
def brief() -> Iterator[None]:
    """Hides details, such as a line per tensor, in a step of a longer task."""
    token = _is_brief.set(True)
    try:
        yield
    finally:
        _is_brief.reset(token)


def log(text: str, end: str = "\n") -> None:
    if _is_quiet.get() or sys.stderr is None:  # None: closed
        return
    with _bars_cleared():
        print("\n".join(map(printable, text.split("\n"))), end=end, file=sys.stderr, flush=True)


def detail(text: str) -> None:
    """Logs a line that brief() omits."""
    if not _is_brief.get():
        log(text)


def tensor_line(i: int, n: int, name: str, ne: Sequence[int], type_name: str, what: str) -> None:
    """Logs that tensor i of n is finished. ne: its shape in ggml order."""
    shape = ", ".join(f"{x:5d}" for x in (*ne, 1, 1, 1, 1)[:4])
    detail(f"[{i:4d}/{n:4d}] {name:36s} - [{shape}], type = {type_name:>6s}, {what}")


# ---- progress on a terminal ----


@contextlib.contextmanager
def progress(what: str, total: float, unit: str = "", initial: float = 0) -> Iterator[Callable[[float], object]]:
    """Shows the progress and the remaining time of a task at the bottom of a terminal. Yields a function that adds
    finished units.

    total: in units; "B" and "weights" have prefixes for thousands and millions. initial: units finished before. Nothing
    is shown if stderr is not a terminal, or inside quiet().
    """
    if not shows_progress():
        yield lambda n: None
        return
    bar = _bar_class()(
        total=total,
        initial=initial,
        desc=what,
        unit=unit,
        unit_scale=unit in ("B", "weights"),
        file=sys.stderr,
        dynamic_ncols=True,
        leave=False,
    )
    _bars.append(bar)
    try:
        yield bar.update
    finally:
        _bars.remove(bar)
        bar.close()


def tracked(
    items: Sequence[T], what: str, size: Callable[[T], float] = lambda item: 1, unit: str = "", initial: float = 0
) -> Iterator[T]:
    """Iterates over the items with progress(). An item is finished when the next one is requested. size: units of an
    item.
    """
    with progress(what, sum(map(size, items)) + initial, unit, initial) as advance:
        for item in items:
            yield item
            advance(size(item))


def shows_progress() -> bool:
    """Whether progress() is visible."""
    return not _is_quiet.get() and sys.stderr is not None and sys.stderr.isatty()


def note(text: str) -> None:
    """Shows a text, such as the present result, after the progress."""
    if _bars:
        _bars[-1].set_postfix_str(text)


@functools.cache
def _bar_class() -> type[Tqdm[Any]]:
    """tqdm without its monitor thread and without locks between processes, which a child of fork() would wait for."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]  # it takes parameters in its stubs only
        monitor_interval = 0

    Bar.set_lock(threading.RLock())
    return Bar


@contextlib.contextmanager
def _bars_cleared() -> Iterator[None]:
    """Hides the bars while a line is printed."""
    for bar in _bars:
        bar.clear()
    yield
    for bar in _bars:
        bar.refresh()


# ---- lines ----


def eta(done: int, total: int, seconds: float, n: int) -> str:
    """The remaining time of a run whose last `n` of `done` chunks took `seconds`, in the words of llama-imatrix."""
    hours, left = divmod(seconds / n * (total - done), 3600)
    each = seconds / n
    return f"[{done:4d}/{total:4d}] {each:.2f} seconds per pass - ETA {hours:.0f} hours {left / 60:.2f} minutes"


def size(nbytes: int) -> str:
    return f"{nbytes / MIB:.2f} MiB"


def size_column(nbytes: int) -> str:
    """size() in a column of fixed width."""
    return f"{size(nbytes):>12s}"


def model_line(what: str, nbytes: int, n_elements: int) -> str:
    """Like llama-quantize's "model size  =    12.34 MiB (16.01 BPW)"."""
    return f"{what:11s} = {size_column(nbytes)} ({nbytes * 8 / n_elements:.2f} BPW)"


def table(rows: Sequence[Sequence[object]], headers: Sequence[str], number_format: str = ".4f") -> str:
    """A table in Markdown."""
    from tabulate import tabulate

    cells = [[printable(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    return str(tabulate(cells, headers, tablefmt="pipe", floatfmt=number_format, disable_numparse=False))


def print_json(value: object) -> None:
    """Numbers that are not finite, which JSON does not have, become null."""
    json.dump(_finite(value), sys.stdout, indent=2, allow_nan=False)
    print()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
