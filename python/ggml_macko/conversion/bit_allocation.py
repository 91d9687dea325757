"""Assigns a type to each tensor, with the least error within a number of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """A tensor in one of its possible types."""

    nbytes: int
    error: float


class _Step(NamedTuple):
    """A change to another point for one tensor. Steps are ordered by saved error per byte."""

    gain: float
    tensor: int
    pick: int


def choose(
    candidates: Sequence[Sequence[Point]], nbytes_of: Callable[[Sequence[int]], int], limit: int
) -> list[int] | int:
    """The index of one point for each tensor, or the least size of the file if that is beyond the limit.

    candidates: the points of each tensor. nbytes_of(picks): size of the file with one point for each tensor.

    Greedy: from the smallest points on, repeats the step that saves most error per byte and still fits. That follows
    the lower convex hulls of the tensors' points, the optimum for a Lagrange multiplier, until the limit is near, and
    then uses the remaining bytes.
    """
    picks = [min(range(len(c)), key=lambda i: c[i]) for c in candidates]
    size = nbytes_of(picks)
    if size > limit:
        return size
    while True:
        steps = []
        for t, points in enumerate(candidates):
            now = points[picks[t]]
            for i, other in enumerate(points):
                if other.error < now.error and size + other.nbytes - now.nbytes <= limit:
                    gain = (now.error - other.error) / max(other.nbytes - now.nbytes, 1)
                    steps.append(_Step(gain, t, i))
        for step in sorted(steps, reverse=True):
            after = [*picks[: step.tensor], step.pick, *picks[step.tensor + 1 :]]
            new_size = nbytes_of(after)  # exact: dense tensors need fewer header bytes
            if new_size <= limit:
                picks, size = after, new_size
                break
        else:
            return picks
