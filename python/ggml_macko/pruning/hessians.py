"""The Hessians for SparseGPT, ALPS and refits: H = sum of x x^T over the inputs x of a weight on a calibration text.

The classes are consumers of evaluation/activations.py. A Hessian takes 4 * cols^2 bytes; weights with the same input
(q, k and v; gate and up) share one. Sums are float32, as in SparseGPT's implementation, and in the memory of the
activations, on the GPU or host. With the inputs of the dense model, cross moments take the same number of bytes again.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, TypeVar, cast

import numpy as np

from .. import errors
from ..evaluation.activations import Weight
from ..gguf.files import Tensor
from ..pruning import allocation, alps, array_backend, sparsegpt
from ..pruning.array_backend import Array, ArrayModule


def max_nbytes(t: Tensor) -> int:
    """Bytes of the Hessians of one tensor that shares its inputs with no other."""
    return 4 * t.cols**2 * allocation.n_matrices(t)


class _Key(NamedTuple):
    """The key of a Hessian: a matrix (expert) of all weights with the input of `owner`."""

    owner: str  # the first weight with this input
    matrix: int


_Made = TypeVar("_Made")


class DenseInputs:
    """A Consumer that stores the inputs of one weight while the dense model evaluates a chunk, for Hessians.

    Inputs of experts are not stored, because experts get different tokens in the pruned model.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._found: dict[int, list[Array]] = {}  # by matrix index, of successive products

    def wants(self, name: str) -> bool:
        return name == self.name

    def take(self, weight: Weight, index: int, x: Array) -> None:
        if not weight.routed:
            self._found.setdefault(index, []).append(x.copy())

    def next(self, index: int) -> Array:
        """The inputs of the next product with a matrix, each returned once."""
        return self._found[index].pop(0)


class _LastInput(NamedTuple):
    owner: str
    x: Array


class Hessians:
    """The Hessians of the inputs of `names`, complete after the evaluation of the text.

    xp: the module for computations, numpy or cupy. dense: the inputs in the dense model of the weights `names`, which
    share one input. share: share of the difference that the targets of problem() correct.
    """

    def __init__(
        self, names: set[str], xp: ArrayModule = np, dense: DenseInputs | None = None, share: float = 1.0
    ) -> None:
        self.xp = xp
        self._dense = dense
        self._share = share
        self._differences: dict[_Key, Array] = {}  # sum of (z - x) x^T, where z is the input in the dense model
        self._names = names
        self._sums: dict[_Key, Array] = {}
        self._owner: dict[str, str] = {}
        self._last: dict[int, _LastInput] = {}  # by matrix index
        self._derived: dict[str, tuple[_Key, object]] = {}  # kind -> the last matrix and its result

    def wants(self, name: str) -> bool:
        return name in self._names

    def take(self, weight: Weight, index: int, x: Array) -> None:
        """Adds the inputs x, float32 (tokens, cols), of one matrix of a weight (see activations.Consumer).

        Raises MackoError (LIMIT) if two weights share their inputs in some calls but not in all.
        """
        last = self._last.get(index)
        same = last is not None and bool(array_backend.module_of(x).array_equal(x, last.x))
        last_owner = last.owner if last is not None else ""
        owner = self._owner.setdefault(weight.name, last_owner if same else weight.name)
        if owner != weight.name:
            if not same or owner != last_owner:
                raise errors.error(errors.LIMIT, f"{weight.name}: reads the same inputs as {owner} only at times")
            return  # the owner has counted them
        x = x.copy()  # the graph reuses its memory
        self._last[index] = _LastInput(owner, x)
        key = _Key(owner, index)
        _add(self._sums, key, x, x)
        if self._dense is not None and not weight.routed:
            _add(self._differences, key, self._dense.next(index) - x, x)

    def n_unused(self, name: str, n_matrices: int) -> int:
        """Experts of a weight that no token was routed to."""
        owner = self._owner.get(name)
        return sum(_Key(owner, i) not in self._sums for i in range(n_matrices)) if owner is not None else 0

    def get(self, name: str, index: int, cols: int) -> Array:
        """H, float32 (cols, cols), of a matrix of a weight; the identity for an expert without tokens.

        Raises MackoError if the model did not multiply with the weight, or if its inputs were not finite.
        """
        if name not in self._owner:
            raise errors.bad_argument(f"{name}: llama.cpp did not multiply with it; --exclude-weights leaves it out")
        hessian = self._sums.get(_Key(self._owner[name], index))
        if hessian is None:
            return np.eye(cols, dtype=np.float32)
        if hessian.shape[0] != cols or not bool(array_backend.module_of(hessian).isfinite(hessian.diagonal()).all()):
            raise errors.error(errors.NOT_FINITE, f"{name}: its inputs are not finite")
        return hessian

    def inverse_factor(self, name: str, index: int, cols: int, damping: float) -> Array:
        """sparsegpt.inverse_factor of get(), as an array of self.xp. Raises MackoError if there is no inverse."""
        return self._derive(
            "factor",
            name,
            index,
            lambda: sparsegpt.inverse_factor(self.xp.asarray(self.get(name, index, cols)), damping),
        )

    def problem(self, name: str, index: int, dense: Array, damping: float) -> alps.Problem:
        """The least squares problem of one matrix of a weight. dense: its dense weights (rows, cols), of self.xp."""
        hessian = self.xp.asarray(self.get(name, index, dense.shape[1]))
        damped = self._derive("damped", name, index, lambda: alps.damped(hessian, damping))
        moved = self._differences.get(_Key(self._owner[name], index))
        target = dense @ damped
        if moved is not None:
            target += dense @ self.xp.asarray(moved * np.float32(self._share))
        return alps.Problem(damped, target, dense)

    def spectrum(self, name: str, index: int, problem: alps.Problem) -> alps.Spectrum:
        """alps.spectrum of the Hessian of problem(). Raises MackoError if it is not positive definite."""
        return self._derive("spectrum", name, index, lambda: alps.spectrum(problem.hessian))

    def _derive(self, what: str, name: str, index: int, make: Callable[[], _Made]) -> _Made:
        """make(), or its last result if the last weight had the same input."""
        key = _Key(self._owner.get(name, ""), index)
        last = self._derived.get(what)
        if last is not None and last[0] == key:
            return cast(_Made, last[1])
        self._derived.pop(what, None)
        try:
            made = make()
        except np.linalg.LinAlgError:
            raise errors.error(
                errors.NOT_FINITE,
                f"{name}: the second moments of its inputs have no inverse; use a larger --damping",
            ) from None
        self._derived[what] = (key, made)
        return made


def _add(sums: dict[_Key, Array], key: _Key, a: Array, b: Array) -> None:
    """Adds a^T b of inputs (tokens, cols) to a sum."""
    if key in sums:
        sums[key] += a.T @ b
    else:
        sums[key] = a.T @ b
