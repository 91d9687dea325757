"""Measuring speed, and reports that put speed beside quality and size."""

from __future__ import annotations
