"""Measures the contribution of each expert of a mixture to the hidden states of a text.

llama.cpp multiplies with down by the experts that the router chose, then adds biases, and then multiplies by the
router's weights. Each of these nodes reads the one before it, so the last of them has the contributions of the experts:
weight times output. This module reads only the norms of these rows.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .. import errors
from ..evaluation.activations import Tap, Tensor, weight_name
from ..evaluation.text_model import TextModel

DOWN = re.compile(r"(.*blk\.\d+\.)ffn_down_exps\.weight")
"""The weight whose product ends an expert; the group is the prefix of the names of its block."""


@dataclass
class ExpertStatistics:
    """The experts of one block."""

    n_tokens: npt.NDArray[np.int64]  # (n_expert,): tokens that were routed to each expert
    norms: npt.NDArray[np.float64]  # (n_expert,): sums over these tokens of the norms of the contributions

    @classmethod
    def zero(cls, n_expert: int) -> ExpertStatistics:
        return cls(np.zeros(n_expert, dtype=np.int64), np.zeros(n_expert))

    @property
    def mean_norms(self) -> npt.NDArray[np.float64]:
        """Mean norm of the contributions of each expert; 0 without tokens."""
        return self.norms / np.maximum(self.n_tokens, 1)


@dataclass
class _Contributions:
    """Contributions of the experts of a block to a micro-batch: (tokens, experts used)."""

    block: str
    n_expert: int
    node: str  # name of the node that has them so far
    ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    norms: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))


class ExpertTap(Tap):
    """Collects the statistics of all blocks with experts."""

    def __init__(self) -> None:
        super().__init__(ends_before_head=True)
        self._found: dict[str, ExpertStatistics] = {}  # by prefix of the block
        self._last: _Contributions | None = None

    def wants(self, node: Tensor) -> bool:
        if node.op == self.ggml.mul_mat_id:
            match = DOWN.fullmatch(weight_name(Tensor.from_address(node.src[0]).name))
            if match:
                self._add_last()
                n_expert = Tensor.from_address(node.src[0]).ne[2]
                self._last = _Contributions(match[1], n_expert, weight_name(node.name))
                return True
        elif node.op in (self.ggml.mul, self.ggml.add_id) and self._last is not None:
            if weight_name(Tensor.from_address(node.src[0]).name) == self._last.node:
                self._last.node = weight_name(node.name)
                return True
        return False

    def take(self, address: int, node: Tensor) -> bool:
        last = self._last
        assert last is not None
        if node.op == self.ggml.mul_mat_id:
            last.ids = self.array(node.src[2], np.int32)[0, 0].astype(np.int64)
        rows = self.array(address, np.float32)  # (1, tokens, experts used, n_embd)
        inside = last.ids.size > 0 and last.ids.min() >= 0 and last.ids.max() < last.n_expert
        if rows.shape[:3] != (1, *last.ids.shape) or not inside:
            raise errors.error(
                errors.LIMIT, f"{last.block}ffn_down_exps.weight: a product of this shape is not supported"
            )
        last.norms = np.sqrt(np.einsum("tue,tue->tu", rows[0], rows[0], dtype=np.float64))
        return True

    def _add_last(self) -> None:
        """Adds the contributions of the last block, which are complete when another block follows."""
        last, self._last = self._last, None
        if last is None:
            return
        if not np.isfinite(last.norms).all():
            raise errors.error(
                errors.NOT_FINITE, f"{last.block}ffn_down_exps.weight: the output of an expert is not finite"
            )
        found = self._found.setdefault(last.block, ExpertStatistics.zero(last.n_expert))
        ids = last.ids.ravel()
        found.n_tokens += np.bincount(ids, minlength=last.n_expert)
        found.norms += np.bincount(ids, last.norms.ravel(), last.n_expert)

    def statistics(self) -> dict[str, ExpertStatistics]:
        """Prefix of a block's names, such as "blk.3." -> its experts. For use after the last evaluation."""
        self._add_last()
        return self._found


@dataclass(frozen=True)
class ExpertsOfText:
    """The statistics of a model on a text."""

    by_block: dict[str, ExpertStatistics]
    n_chunks: int


def experts_of_text(
    path: str | os.PathLike[str], text: str | os.PathLike[str], *, n_ctx: int, n_chunks: int, n_threads: int = 0
) -> ExpertsOfText:
    """Evaluates n_chunks (-1: all) evenly spread chunks of n_ctx tokens of a text. Raises MackoError or OSError."""
    tap = ExpertTap()
    with TextModel.opened_with(
        path, text, n_ctx, n_chunks, evenly=True, n_batch=n_ctx, n_threads=n_threads, tap=tap
    ) as (llama, chunks):
        for _, batch in llama.batches(chunks):
            llama.evaluate(batch)
    return ExpertsOfText(tap.statistics(), len(chunks))
