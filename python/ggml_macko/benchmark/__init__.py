"""Measurements of speed, and reports of speed, quality and size."""

from __future__ import annotations
