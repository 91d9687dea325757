"""Measured speeds of generation: the figures of docs/guide/performance.md on which advice is based.

A test compares these numbers with the tables of that page, which describes the measurements. The machines are not the
reader's and the models have random weights, so the numbers are good for ratios, not for tokens per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

PAGE = "docs/guide/performance.md"

NEAR = 0.05
"""Largest distance of a density from the measured densities."""

F16, Q8_0, Q4_K_M = "F16", "Q8_0", "Q4_K_M"  # dense
BITS = {F16: 16.0, Q8_0: 8.5, Q4_K_M: 4.85}  # of a block weight
SPARSE_F16 = "sparse F16"
SPARSE_Q5, SPARSE_Q4 = "sparse-q5", "sparse-q4"


@dataclass(frozen=True)
class Machine:
    """Tokens per second on one machine."""

    name: str
    dense: Mapping[str, float]  # by type
    sparse: Mapping[str, Mapping[float, float]]  # by stored values: density -> tokens per second

    def ratio(self, stored: str, density: float, dense_type: str) -> float | None:
        """Speed at a density over the speed of the dense type. Between measured densities, the logarithm is
        interpolated. None without a measurement within NEAR.
        """
        points = sorted(self.sparse.get(stored, {}).items())
        if not points or dense_type not in self.dense:
            return None
        nearest = min(max(density, points[0][0]), points[-1][0])
        if abs(nearest - density) > NEAR:
            return None
        density = nearest
        for (d0, s0), (d1, s1) in zip(points, points[1:]):
            if d0 <= density <= d1:
                x = (density - d0) / (d1 - d0)
                return math.exp((1 - x) * math.log(s0) + x * math.log(s1)) / self.dense[dense_type]
        return points[0][1] / self.dense[dense_type]  # only one density

    def seconds(self, bits: float) -> float:
        """Time of a dense weight with this number of bits, up to a factor: in proportion to the nearest measured type
        that is not wider, or else the narrowest type.
        """
        nearest = max((name for name in self.dense if BITS[name] <= bits), key=lambda name: BITS[name], default=None)
        nearest = nearest or min(self.dense, key=lambda name: BITS[name])
        return bits / BITS[nearest] / self.dense[nearest]

    def break_even(self, stored: str, dense_type: str) -> float | None:
        """The density below which the sparse type generates faster than the dense type; None outside the measured
        densities.
        """
        points = sorted(self.sparse.get(stored, {}).items())
        limit = self.dense.get(dense_type)
        if limit is None:
            return None
        for (d0, s0), (d1, s1) in zip(points, points[1:]):
            if s0 >= limit > s1:
                return d0 + (d1 - d0) * math.log(s0 / limit) / math.log(s0 / s1)
        return None


AVX512_VBMI2 = Machine(
    "AVX-512 VBMI2 (AMD EPYC, Zen 5), 2 threads",
    {F16: 17.2, Q8_0: 30.6, Q4_K_M: 47.0},
    {SPARSE_F16: {0.5: 28.1, 0.3: 37.3, 0.1: 53.1}},
)
AVX512_VBMI2_4_BITS = Machine(
    "AVX-512 VBMI2 (Intel Xeon, Sapphire Rapids), 2 threads",
    {Q4_K_M: 19.4},
    {SPARSE_Q5: {0.5: 31.5}, SPARSE_Q4: {0.5: 29.9}},
)
AVX512_VBMI2_4_BITS_AMD = Machine(
    "AVX-512 VBMI2 (AMD EPYC, Zen 5), 2 threads, Llama2-7B shape",
    {Q4_K_M: 78.7},
    {SPARSE_Q4: {0.5: 74.6}},
)
AVX2_VNNI_4_BITS = Machine(
    "AVX2 with AVX-VNNI (Intel Xeon, Sapphire Rapids), 2 threads",
    {Q4_K_M: 18.6},
    {SPARSE_Q5: {0.5: 15.0}, SPARSE_Q4: {0.5: 16.6}},
)
AVX2_4_BITS = Machine(
    "AVX2 (Intel Xeon, Sapphire Rapids), 2 threads",
    {Q4_K_M: 20.4},
    {SPARSE_Q5: {0.5: 15.7}, SPARSE_Q4: {0.5: 18.0}},
)
AVX2_4_BITS_AMD = Machine(
    "AVX2 (AMD EPYC, Zen 5), 2 threads, Llama2-7B shape",
    {Q4_K_M: 73.5},
    {SPARSE_Q4: {0.5: 40.2}},
)
AVX2 = Machine(
    "AVX2 (AMD EPYC, Zen 4), 2 threads",
    {F16: 13.7, Q8_0: 17.7, Q4_K_M: 34.3},
    {SPARSE_F16: {0.5: 22.6, 0.3: 26.5, 0.1: 47.1}},
)
H200 = Machine(
    "NVIDIA H200, one sequence (Q8_0 and Q4_K_M: llama.cpp's own CUDA backend)",
    {F16: 219, Q8_0: 273, Q4_K_M: 297},
    {SPARSE_F16: {0.5: 423, 0.3: 585, 0.1: 934}},
)
H200_QUANTIZED = Machine(
    "another NVIDIA H200, one sequence (dense: llama.cpp's own CUDA backend)",
    {F16: 219, Q4_K_M: 292},
    {SPARSE_Q5: {0.5: 445}, SPARSE_Q4: {0.5: 426}},
)

BY_KERNELS: Mapping[str, tuple[Machine, ...]] = {
    "avx512-vbmi2": (AVX512_VBMI2, AVX512_VBMI2_4_BITS, AVX512_VBMI2_4_BITS_AMD),
    "avx2-vnni": (AVX2, AVX2_VNNI_4_BITS),
    "avx2": (AVX2, AVX2_4_BITS, AVX2_4_BITS_AMD),
}
"""CPU kernels, as `macko --version` prints them -> machines that use them."""
