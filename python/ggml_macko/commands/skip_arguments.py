"""Options of the commands that select neurons to skip."""

from __future__ import annotations

import argparse
from typing import Any

from ..evaluation.skipping import ALLOCATIONS, SCORES, SkipOptions


def add_skip_score(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skip-score",
        choices=SCORES,
        help="score of a neuron: |act(gate)|, |act(gate) * up|, or the latter times the norm of the neuron's column of "
        f"down (default: {SkipOptions.score})",
    )


def add_skip_allocation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skip-allocation",
        choices=ALLOCATIONS,
        help="the same share in each layer, or a larger share where a first measurement finds a lower cost (default: "
        f"{SkipOptions.allocation})",
    )


def given(**options: Any) -> dict[str, Any]:
    """The options that the command line sets."""
    return {name: value for name, value in options.items() if value is not None}
