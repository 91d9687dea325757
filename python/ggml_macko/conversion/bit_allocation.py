"""Which type for which tensor: the least error that fits into a number of bytes."""

from __future__ import annotations

from collections.abc import Callable


def choose(candidates: list, nbytes_of: Callable, limit: int) -> list | int:
    """candidates: of each tensor, (bytes, error) of each type it may have. nbytes_of(indices): size of the file with one
    candidate for each tensor. Returns the indices, or the least size if that is beyond the limit.

    Greedy: from the smallest, again and again the step that saves most error per byte and still fits. That follows the
    lower convex hulls of the tensors' points, the optimum for a Lagrange multiplier, until the limit is near, and fills
    up what is left.
    """
    picks = [min(range(len(c)), key=lambda i: c[i]) for c in candidates]
    size = nbytes_of(picks)
    if size > limit:
        return size
    while True:
        steps = []
        for t, c in enumerate(candidates):
            nbytes, error = c[picks[t]]
            for i, (more, less) in enumerate(c):
                if less < error and size + more - nbytes <= limit:
                    steps.append(((error - less) / max(more - nbytes, 1), t, i))
        for _, t, i in sorted(steps, reverse=True):
            after = [*picks[:t], i, *picks[t + 1 :]]
            new_size = nbytes_of(after)  # exact: what is stored dense needs fewer header bytes
            if new_size <= limit:
                picks, size = after, new_size
                break
        else:
            return picks
