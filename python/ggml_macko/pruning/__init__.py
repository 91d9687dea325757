"""Zeroing weights of dense models. `prune.py` has the public function."""

from __future__ import annotations
