"""The divergence of two models without the logits of a whole batch: a vocabulary can have 262,144 entries.

Positions are taken in pieces. While a piece has its logits, the gradient of its hidden states is computed, too, so that
the backward pass needs no logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ..evaluation.transformer import Transformer, capped

_PIECE_NBYTES = 1 << 28
"""Memory for the float32 logits of a piece; there are four arrays of this size at a time."""

_MEASURED = 16
"""The loss of a step is that of every sixteenth position: its gradient needs no logarithms, which take long."""

_SMALLEST = 1e-37
"""Probabilities below are taken for this one in a logarithm."""


def pieces(n: int, n_vocab: int) -> Iterator[slice]:
    """Splits n positions."""
    step = max(1, _PIECE_NBYTES // (4 * n_vocab))
    return (slice(i, i + step) for i in range(0, n, step))


def log_probabilities(model: Transformer, x: torch.Tensor) -> torch.Tensor:
    """The logarithms (positions, n_vocab) of the next tokens' probabilities. x: hidden() (positions, n_embd)."""
    return F.log_softmax(_scores(F.linear(x, model.head), model.shape.logit_cap), dim=-1, dtype=torch.float32)


def _scores(logits: torch.Tensor, cap: float) -> torch.Tensor:
    return capped(logits.float(), cap) if cap else logits


class _Divergence(torch.autograd.Function):
    """Arguments: hidden states (positions, n_embd) and heads of the student and the teacher, and their logit caps."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        head: torch.Tensor,
        wanted: torch.Tensor,
        head_of_teacher: torch.Tensor,
        cap: float,
        cap_of_teacher: float,
    ) -> torch.Tensor:
        total, n_measured = torch.zeros((), device=x.device), 0
        x_gradient = torch.empty_like(x)
        head_gradient = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for piece in pieces(len(x), len(head)):
            logits = F.linear(x[piece], head)
            p = F.softmax(_scores(logits, cap), dim=-1, dtype=torch.float32)
            q = F.softmax(
                _scores(F.linear(wanted[piece], head_of_teacher), cap_of_teacher), dim=-1, dtype=torch.float32
            )
            measured = q[::_MEASURED]
            total += F.kl_div(p[::_MEASURED].clamp(min=_SMALLEST).log_(), measured, reduction="sum")
            n_measured += len(measured)
            gradient = torch.empty_like(p, dtype=x.dtype)
            torch.sub(p, q, out=gradient)
            if cap:
                gradient.mul_(1 - torch.tanh(logits.float() / cap).square())
            x_gradient[piece] = gradient @ head.to(x.dtype)
            if head_gradient is not None:
                head_gradient += gradient.T @ x[piece]
        ctx.save_for_backward(x_gradient, head_gradient)
        return total / n_measured

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        scale = gradient / len(ctx.saved_tensors[0])
        return (*(g if g is None else (g * scale).to(g.dtype) for g in ctx.saved_tensors), None, None, None, None)


def divergence_of_hidden(
    student: Transformer, x: torch.Tensor, teacher: Transformer, wanted: torch.Tensor
) -> torch.Tensor:
    """Mean over positions of KL(teacher || student), with the gradient of all positions and the value of a part of
    them. x, wanted: hidden() of the models: (..., n_embd).
    """
    return _Divergence.apply(
        x.flatten(0, -2),
        student.head,
        wanted.flatten(0, -2),
        teacher.head,
        student.shape.logit_cap,
        teacher.shape.logit_cap,
    )
