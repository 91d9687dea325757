"""Fixtures of the tests of pruning."""

from __future__ import annotations

import numpy as np
import pytest

from ggml_macko.pruning import array_backend


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def xp(request):
    if request.param == "cpu":
        return np
    if array_backend.gpu() is None:
        pytest.skip("no CuPy, or no GPU for it")
    return array_backend.gpu()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    rng = np.random.default_rng(2)
    path.write_text("".join(rng.choice(list("ab ab\n"), 3000)))
    return path
