"""The Hessians that SparseGPT needs: H = sum of x x^T over the inputs x of a weight during a calibration text.

A consumer of evaluation/activations.py. Takes 4 * cols^2 bytes for each distinct input of the weights asked for:
weights that read the same activations (q, k and v; gate and up) share one matrix. Sums are float32, as in the authors'
implementation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .. import errors
from ..evaluation.activations import Weight
from ..gguf.files import Tensor
from ..pruning import allocation, sparsegpt
from ..pruning.array_backend import Array, ArrayModule
from ..pruning.masks import FloatArray


def max_nbytes(t: Tensor) -> int:
    """Bytes of the Hessians of one tensor, if it shares its inputs with no other."""
    return 4 * t.cols**2 * allocation.n_matrices(t)


class _Key(NamedTuple):
    """One Hessian: that of a matrix (expert) of all weights that read the activations of `owner`."""

    owner: str  # the weight that was the first to read them
    matrix: int


class _LastInput(NamedTuple):
    owner: str
    x: FloatArray


class Hessians:
    """The Hessians of the inputs of `names`, to be asked for after the text has been evaluated.

    xp: the module, numpy or cupy, that factors are computed with.
    """

    def __init__(self, names: set[str], xp: ArrayModule = np) -> None:
        self.xp = xp
        self._names = names
        self._sums: dict[_Key, FloatArray] = {}
        self._owner: dict[str, str] = {}
        self._last: dict[int, _LastInput] = {}  # by matrix index
        self._factor_key: _Key | None = None
        self._factor: Array = None  # the last one that was computed

    def wants(self, name: str) -> bool:
        return name in self._names

    def take(self, weight: Weight, index: int, x: FloatArray) -> None:
        """Adds the inputs x, float32 (tokens, cols), of one matrix of a weight (see activations.Consumer).

        Raises MackoError (LIMIT) if two weights share their inputs in some calls but not in all.
        """
        last = self._last.get(index)
        same = last is not None and np.array_equal(x, last.x)
        last_owner = last.owner if last is not None else ""
        owner = self._owner.setdefault(weight.name, last_owner if same else weight.name)
        if owner != weight.name:
            if not same or owner != last_owner:
                raise errors.error(errors.LIMIT, f"{weight.name}: reads the same inputs as {owner} only at times")
            return  # the owner has counted them
        x = np.array(x)  # a copy: the graph's memory is reused
        self._last[index] = _LastInput(owner, x)
        key = _Key(owner, index)
        if key not in self._sums:
            self._sums[key] = x.T @ x
        else:
            self._sums[key] += x.T @ x

    def get(self, name: str, index: int, cols: int) -> FloatArray:
        """H, float32 (cols, cols), of a matrix of a weight; the identity for an expert that no token was routed to.

        Raises MackoError if the model did not multiply with the weight, or if its inputs were not finite.
        """
        if name not in self._owner:
            raise errors.error(
                errors.BAD_ARGUMENT, f"{name}: llama.cpp did not multiply with it; --exclude-weights leaves it out"
            )
        hessian = self._sums.get(_Key(self._owner[name], index))
        if hessian is None:
            return np.eye(cols, dtype=np.float32)
        if hessian.shape[0] != cols or not np.isfinite(np.einsum("ii->i", hessian)).all():
            raise errors.error(errors.NOT_FINITE, f"{name}: its inputs are not finite")
        return hessian

    def inverse_factor(self, name: str, index: int, cols: int, damping: float) -> Array:
        """sparsegpt.inverse_factor of get(), as an array of self.xp. Raises MackoError if there is no inverse."""
        key = _Key(self._owner.get(name, ""), index)
        if self._factor_key != key or self._factor is None:
            try:
                self._factor = sparsegpt.inverse_factor(self.xp.asarray(self.get(name, index, cols)), damping)
                self._factor_key = key
            except np.linalg.LinAlgError:
                raise errors.error(
                    errors.NOT_FINITE,
                    f"{name}: the second moments of its inputs have no inverse; use a larger --damping",
                ) from None
        return self._factor
