"""Trained weights in the type of their file, computed on their device: a host takes minutes for a 7B model."""

from __future__ import annotations

import torch

from ..values import TYPE_BF16, TYPE_F16

DTYPES = {TYPE_F16: torch.float16, TYPE_BF16: torch.bfloat16}
"""ggml type -> type of PyTorch; others are float32."""


def rounded(values: torch.Tensor, type_id: int, significant: int) -> torch.Tensor:
    """The nearest values with so many significant bits in a type, of this type; zeros are +0.

    values: float32. The same bits as masks.from_float32(masks.with_significant_bits()). Values beyond the type become
    infinite.
    """
    dropped = 24 - significant
    if dropped:
        bits = values.contiguous().view(torch.int32)
        half = (1 << (dropped - 1)) - 1
        values = ((bits + half + ((bits >> dropped) & 1)) >> dropped << dropped).view(torch.float32)
    found = values.to(DTYPES.get(type_id, torch.float32))
    return torch.where(found == 0, torch.zeros_like(found), found)
