"""Marks for tests that older versions of llama.cpp in the range fail with dense models, too, with the reasons."""

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
    """The names as parameters of a test that runs models of these architectures. Both layers of the gemma3 model have
    windows.
    """
    return [pytest.param(name, marks=WINDOWS_ONLY if name == "gemma3" else ()) for name in names]
