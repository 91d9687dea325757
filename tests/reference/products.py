"""The error bound of float32 products compared with float64."""

from __future__ import annotations

import numpy as np


def assert_close_to_float64(y: np.ndarray, w: np.ndarray, x: np.ndarray) -> None:
    """Asserts that each element is within 2 gamma_n sum |w x| + half a unit in the last place: the bound for float32
    additions in any order.
    """
    exact = w @ x.astype(np.float64)
    gamma = w.shape[1] * 2.0**-24
    bound = 2 * gamma * (np.abs(w) @ np.abs(x.astype(np.float64))) + 0.5 * np.spacing(np.abs(exact).astype(np.float32))
    worst = np.argmax(np.abs(y - exact) - bound)
    assert np.all(np.abs(y - exact) <= bound), f"element {worst}: {y.flat[worst]} against {exact.flat[worst]}"
