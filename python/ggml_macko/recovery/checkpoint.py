"""The file from which a run that was interrupted goes on: arrays and a few numbers, written as a whole or not at all.

A NumPy .npz without pickled objects. It belongs to a run, and another run refuses it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import errors
from ..gguf.outputs import AtomicOutput
from ..regular_files import named, open_regular
from ..values import Array

_STATE = "state"  # the array that holds the numbers, as JSON; others are "array.NAME"
_SIGNATURE = b"PK\x03\x04"


class Saved(NamedTuple):
    """What a checkpoint holds."""

    state: dict[str, Any]
    arrays: dict[str, Array]


class Checkpoint:
    """The checkpoint at `path` of a run. run: what the result depends on, by the name that an error gives it."""

    def __init__(self, path: Path, run: Mapping[str, str]) -> None:
        self.path = path
        self._run = {what: hashlib.sha256(value.encode()).hexdigest() for what, value in run.items()}

    def load(self) -> Saved | None:
        """None if there is none. Raises MackoError if it is another run's or no checkpoint, or OSError."""
        if not self.path.exists():
            return None
        try:
            with open_regular(self.path) as file, np.load(file, allow_pickle=False) as found:
                state = json.loads(found[_STATE].tobytes())
                differs = [what for what, digest in self._run.items() if state["run"].get(what) != digest]
                arrays = {} if differs else {n.partition(".")[2]: found[n] for n in found.files if n != _STATE}
                if not differs and _kinds(arrays) != state["kinds"]:
                    raise ValueError("other arrays than were saved")
        except Exception as e:  # NumPy and zipfile raise exceptions of many classes, and none names the file
            text = f"{self.path}: is no checkpoint of `macko recover`, or damaged: {errors.one_line(e)[:200]}"
            raise errors.error(errors.BAD_FORMAT, text) from e
        if differs:
            raise errors.bad_argument(f"{self.path}: is from a run with another {differs[0]}; delete it to start anew")
        return Saved(state, arrays)

    def save(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Replaces what was there. Raises OSError."""
        text = json.dumps({**state, "run": self._run, "kinds": _kinds(arrays)}).encode()
        with AtomicOutput(self.path, [], force=True, signature=_SIGNATURE) as output:
            with named(output.partial), open(output.partial, "r+b") as file:
                members: dict[str, Any] = {f"array.{name}": array for name, array in arrays.items()}
                np.savez(file, **{_STATE: np.frombuffer(text, np.uint8), **members})
            output.seal()
            output.commit()

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


def _kinds(arrays: Mapping[str, Array]) -> dict[str, str]:
    """The type and the shape of each array; a zip file has checksums of their values."""
    return {name: f"{array.dtype.str} {array.shape}" for name, array in arrays.items()}
