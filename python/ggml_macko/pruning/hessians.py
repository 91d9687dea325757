"""Second moments of the inputs of weights, sum of x x^T over a calibration text: what SparseGPT needs.

A consumer of activations.py. Memory is 4 * cols^2 bytes for each distinct input of the weights asked for: those that
read the same activations (q, k and v; gate and up) share one matrix. Sums are float32, as in SparseGPT's own code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import errors
from ..evaluation.activations import Weight
from ..gguf.files import Tensor
from ..pruning import allocation, sparsegpt


def nbytes(t: Tensor) -> int:
    """At most, of one tensor."""
    return 4 * t.cols**2 * allocation.n_matrices(t)


class Hessians:
    """The second moments of the inputs of `names`; to be asked for after the text has been evaluated."""

    def __init__(self, names: set, xp: Any = np):
        self.xp = xp  # where factors are computed: numpy or arrays.gpu()
        self._names = names
        self._sums: dict = {}  # (owner, matrix index) -> (cols, cols) float32
        self._owner: dict = {}  # name -> the first weight that reads the same activations
        self._last: dict = {}  # matrix index -> (owner, input) of the last call
        self._factor: tuple = (None, None)  # that of the last matrix asked for, and its key

    def wants(self, name: str) -> bool:
        return name in self._names

    def take(self, weight: Weight, index: int, x: np.ndarray) -> None:
        owner, last = self._last.get(index, ("", None))
        same = last is not None and np.array_equal(x, last)
        known = self._owner.setdefault(weight.name, owner if same else weight.name)
        if known != weight.name:
            if not same or known != owner:
                raise errors.error(errors.LIMIT, f"{weight.name}: reads the same inputs as {known} only at times")
            return  # counted already
        x = np.array(x)  # the graph's memory is reused
        self._last[index] = (known, x)
        total = self._sums.get((known, index))
        if total is None:
            self._sums[known, index] = x.T @ x
        else:
            total += x.T @ x

    def get(self, name: str, index: int, cols: int) -> np.ndarray:
        """(cols, cols) float32 of a matrix; the identity for an expert that no token was routed to."""
        if name not in self._owner:
            raise errors.error(
                errors.BAD_ARGUMENT, f"{name}: llama.cpp did not multiply with it; --exclude-weights leaves it out"
            )
        found = self._sums.get((self._owner[name], index))
        if found is None:
            return np.eye(cols, dtype=np.float32)
        if found.shape[0] != cols or not np.isfinite(np.einsum("ii->i", found)).all():
            raise errors.error(errors.NOT_FINITE, f"{name}: its inputs are not finite")
        return found

    def inverse_factor(self, name: str, index: int, cols: int, damping: float) -> np.ndarray:
        """sparsegpt.inverse_factor of get(), an array of self.xp."""
        key = (self._owner.get(name), index)
        if self._factor[0] != key:
            try:
                self._factor = (key, sparsegpt.inverse_factor(self.xp.asarray(self.get(name, index, cols)), damping))
            except np.linalg.LinAlgError:
                raise errors.error(
                    errors.NOT_FINITE,
                    f"{name}: the second moments of its inputs have no inverse; use a larger --damping",
                ) from None
        return self._factor[1]
