"""Faults and other words of older versions of the range, with dense models, too: what is skipped there, and why."""

from __future__ import annotations

import pytest

VERSION = tuple(int(n) for n in pytest.importorskip("llama_cpp").__version__.split("+")[0].split("."))

WINDOWS_ONLY = pytest.mark.skipif(
    VERSION < (0, 3, 24), reason="llama.cpp aborts on a model in which every layer has a window (before 0.3.24)"
)
EMBEDDINGS_OF_A_GENERATING_MODEL = pytest.mark.skipif(
    VERSION < (0, 3, 22), reason="create_embedding of a generating model fails (in 0.3.21)"
)
OTHER_WORDS = pytest.mark.skipif(VERSION < (0, 3, 36), reason="an older version says it in other words")


def running(names: tuple[str, ...]) -> list:
    """Of tiny_models.ARCHITECTURES, as parameters of a test that runs these models. gemma3 has windows in both of its
    layers.
    """
    return [pytest.param(name, marks=WINDOWS_ONLY if name == "gemma3" else ()) for name in names]
