"""How the tools talk: progress on stderr in the line style of llama-quantize, results on stdout.

Library functions report progress through `log` and `progress` and print nothing else; `quiet()` silences them.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import sys
from collections.abc import Iterator, Sequence

from .errors import printable

MIB = 1024 * 1024

_is_quiet = contextvars.ContextVar("is_quiet", default=False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Progress and warnings of library functions that are called inside are not shown."""
    token = _is_quiet.set(True)
    try:
        yield
    finally:
        _is_quiet.reset(token)


def log(text: str, end: str = "\n") -> None:
    if not _is_quiet.get():
        print("\n".join(map(printable, text.split("\n"))), end=end, file=sys.stderr, flush=True)


def progress(i: int, n: int, name: str, ne: Sequence[int], type_name: str, what: str) -> None:
    """Tensor i of n is done. ne: its shape, ggml order."""
    shape = ", ".join(f"{x:5d}" for x in (*ne, 1, 1, 1, 1)[:4])
    log(f"[{i:4d}/{n:4d}] {name:36s} - [{shape}], type = {type_name:>6s}, {what}")


def eta(done: int, total: int, seconds: float, n: int) -> str:
    """Of a run whose last `n` of `done` chunks took `seconds`; llama-imatrix's words."""
    hours, left = divmod(seconds / n * (total - done), 3600)
    each = seconds / n
    return f"[{done:4d}/{total:4d}] {each:.2f} seconds per pass - ETA {hours:.0f} hours {left / 60:.2f} minutes"


def size(nbytes: int) -> str:
    return f"{nbytes / MIB:8.2f} MiB"


def model_line(what: str, nbytes: int, n_elements: int) -> str:
    """Like llama-quantize's "model size  =    12.34 MiB (16.01 BPW)"."""
    return f"{what:11s} = {size(nbytes)} ({nbytes * 8 / n_elements:.2f} BPW)"


def table(rows: Sequence[Sequence[object]], headers: Sequence[str], number_format: str = ".4f") -> str:
    """A table in Markdown."""
    from tabulate import tabulate

    cells = [[printable(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    return str(tabulate(cells, headers, tablefmt="pipe", floatfmt=number_format, disable_numparse=False))


def print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2)
    print()
