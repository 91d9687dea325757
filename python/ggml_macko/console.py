"""How the tools talk: logs and progress on stderr, results on stdout.

Library functions log lines in the style of llama-quantize (`log`, `tensor_line`) and show how far they are on a
terminal (`progress`); they print nothing else. `quiet()` silences them, `brief()` leaves out details.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from .errors import printable

if TYPE_CHECKING:
    from tqdm import tqdm as Tqdm

MIB = 1024 * 1024

T = TypeVar("T")

_is_quiet = contextvars.ContextVar("is_quiet", default=False)
_is_brief = contextvars.ContextVar("is_brief", default=False)
_bars: list[Tqdm[Any]] = []  # those that are on the terminal, the outermost first


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Progress and warnings of library functions that are called inside are not shown."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


@contextlib.contextmanager
def brief() -> Iterator[None]:
    """Details, such as a line for each tensor, are not shown: for what is one step of a longer task."""
    token = _is_brief.set(True)
    try:
        yield
    finally:
        _is_brief.reset(token)


def log(text: str, end: str = "\n") -> None:
    if _is_quiet.get():
        return
    with _bars_cleared():
        print("\n".join(map(printable, text.split("\n"))), end=end, file=sys.stderr, flush=True)


def detail(text: str) -> None:
    """Logs what brief() leaves out."""
    if not _is_brief.get():
        log(text)


def tensor_line(i: int, n: int, name: str, ne: Sequence[int], type_name: str, what: str) -> None:
    """Tensor i of n is done. ne: its shape, ggml order."""
    shape = ", ".join(f"{x:5d}" for x in (*ne, 1, 1, 1, 1)[:4])
    detail(f"[{i:4d}/{n:4d}] {name:36s} - [{shape}], type = {type_name:>6s}, {what}")


# ---- progress on a terminal ----


@contextlib.contextmanager
def progress(what: str, total: float, unit: str = "", initial: float = 0) -> Iterator[Callable[[float], object]]:
    """Shows at the bottom of a terminal how far a task is and how long the rest will take; gives a function that says
    how many more units are done.

    total: in units; "B" and "weights" are shown in thousands and millions. initial: what was done before. Nothing is
    shown where stderr is no terminal, nor within quiet().
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
    """The items, one after another, with progress(): an item is done when the next one is asked for. size: of an item,
    in units.
    """
    with progress(what, sum(map(size, items)) + initial, unit, initial) as advance:
        for item in items:
            yield item
            advance(size(item))


def shows_progress() -> bool:
    """Whether progress() shows anything now."""
    return not _is_quiet.get() and sys.stderr.isatty()


def note(text: str) -> None:
    """Says something behind the progress that is shown, such as the result so far."""
    if _bars:
        _bars[-1].set_postfix_str(text)


@functools.cache
def _bar_class() -> type[Tqdm[Any]]:
    """tqdm without its watching thread and without locks between processes: a child of fork() must not wait for one."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]  # it takes parameters in its stubs only
        monitor_interval = 0

    Bar.set_lock(threading.RLock())
    return Bar


@contextlib.contextmanager
def _bars_cleared() -> Iterator[None]:
    """Takes the bars away while a line is printed."""
    for bar in _bars:
        bar.clear()
    yield
    for bar in _bars:
        bar.refresh()


# ---- lines ----


def eta(done: int, total: int, seconds: float, n: int) -> str:
    """Of a run whose last `n` of `done` chunks took `seconds`; llama-imatrix's words."""
    hours, left = divmod(seconds / n * (total - done), 3600)
    each = seconds / n
    return f"[{done:4d}/{total:4d}] {each:.2f} seconds per pass - ETA {hours:.0f} hours {left / 60:.2f} minutes"


def size(nbytes: int) -> str:
    return f"{nbytes / MIB:.2f} MiB"


def size_column(nbytes: int) -> str:
    """The same, so that lines below each other align."""
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
    json.dump(value, sys.stdout, indent=2)
    print()
