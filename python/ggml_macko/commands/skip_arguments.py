"""Options that say which neurons may be skipped, for the commands that share them."""

from __future__ import annotations

import argparse
from typing import Any

from ..evaluation.skipping import ALLOCATIONS, SCORES, SkipOptions


def add_skip_score(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skip-score",
        choices=SCORES,
        help="what decides: |act(gate)|, |act(gate) * up|, or the latter times the norm of the neuron's column of down "
        f"(default: {SkipOptions.score})",
    )


def add_skip_allocation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skip-allocation",
        choices=ALLOCATIONS,
        help="the same share in each layer, or more where it costs less, as measured first (default: "
        f"{SkipOptions.allocation})",
    )


def given(**options: Any) -> dict[str, Any]:
    """Those of the options that are given."""
    return {name: value for name, value in options.items() if value is not None}
