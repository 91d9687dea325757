"""Removes whole experts from a mixture: their matrices, their biases, and their rows of the router.

All blocks lose equally many experts, because a GGUF has one number of experts for all blocks (expert_count), and
llama.cpp expects it in the shape of each tensor. If the router chooses among groups of experts, all groups lose equally
many. The scores are those of REAP (arXiv 2510.13999): the mean, over the tokens of a text that are routed to an expert,
of the Euclidean norm of its output times the router's weight.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import console, errors
from ..evaluation.expert_statistics import DOWN, experts_of_text
from ..gguf.activation_keys import without_rule
from ..gguf.dense_copy import temporary_copy
from ..gguf.files import Key, Model, Tensor, make_key
from ..gguf.outputs import AtomicOutput
from ..gguf.writer import NewTensor, Writer
from ..pruning.options import ParsedOptions

Indices = npt.NDArray[np.int64]

PROVENANCE = "macko.prune.experts."
"""Prefix of the metadata about removed experts."""

_EXPERT_TENSOR = re.compile(
    r"(.*blk\.\d+\.)("
    r"ffn_(gate|up|down|gate_up)_exps\.(weight|bias|scale|input_scale)"
    r"|ffn_gate_inp\.(weight|bias)|exp_probs_b(_vl)?(\.bias)?)"
)
"""Tensors whose last dimension counts the experts."""

_UNIT_TENSOR = re.compile(r"(.*blk\.\d+\.)ffn_(gate|up|down)_chexps\.weight")
"""Tensors of GroveMoE whose last dimension counts groups of experts that share a matrix."""

_TABLE = "ffn_gate_tid2eid"  # the experts of each token of the vocabulary


class Mixture(NamedTuple):
    """The experts of a model, as its metadata describe them."""

    arch: str
    n_expert: int
    n_used: int  # by a token
    n_groups: int  # among which the router chooses first; 1: none
    n_groups_used: int  # by a token
    unit: int  # successive experts that can only be removed together
    blocks: tuple[str, ...]  # prefixes of the names of blocks with experts

    @classmethod
    def of(cls, model: Model) -> Mixture:
        """Raises MackoError if the model has no experts, or experts that cannot be removed."""
        keys = {key.name: key for key in model.keys}
        arch = str(keys["general.architecture"].value()) if "general.architecture" in keys else ""

        def number(name: str, default: int) -> int:
            key = keys.get(f"{arch}.{name}")
            value: Any = default if key is None else key.value()
            largest = max(value) if isinstance(value, list) and value else value
            if not isinstance(largest, int):
                raise errors.error(errors.BAD_KEY_VALUE, f"{model.path}: {arch}.{name} is not a number")
            return largest

        n_expert = number("expert_count", 0)
        blocks = dict.fromkeys(match[1] for t in model.tensors for match in [DOWN.fullmatch(t.name)] if match)
        if n_expert == 0 or not blocks:
            raise errors.bad_argument(f"{model.path}: --experts: the model has no experts")
        has_units = any(_UNIT_TENSOR.fullmatch(t.name) for t in model.tensors)
        unit = number("experts_per_group", 1) if has_units else 1
        n_groups = max(1, number("expert_group_count", 0))
        if unit < 1 or n_expert % (unit * n_groups):
            raise errors.error(
                errors.BAD_KEY_VALUE,
                f"{model.path}: {arch}.expert_count {n_expert} is not a multiple of {n_groups} groups of {unit}",
            )
        found = cls(
            arch=arch,
            n_expert=n_expert,
            n_used=number("expert_used_count", 0),
            n_groups=n_groups,
            n_groups_used=max(1, number("expert_group_used_count", 1)) if n_groups > 1 else 1,
            unit=unit,
            blocks=tuple(blocks),
        )
        found._check_tensors(model)
        return found

    def _check_tensors(self, model: Model) -> None:
        """Raises MackoError for a tensor that does not have all experts, or whose experts cannot be taken apart."""
        for t in model.tensors:
            if _TABLE in t.name:
                raise errors.error(
                    errors.UNSUPPORTED_ARCH, f"{model.path}: {t.name}: a table chooses the experts: --experts cannot"
                )
            n = self.length(t)
            if n and (t.ne[-1] != n or t.nbytes % n or _block_of(t) not in self.blocks):
                raise errors.error(
                    errors.LIMIT,
                    f"{model.path}: {t.name}: a last dimension of {t.ne[-1]} does not fit {self.arch}.expert_count "
                    f"{self.n_expert}",
                )

    def length(self, t: Tensor) -> int:
        """The number of experts, or of units of them, in the last dimension of a tensor; 0 for other tensors."""
        if _EXPERT_TENSOR.fullmatch(t.name):
            return self.n_expert
        return self.n_expert // self.unit if _UNIT_TENSOR.fullmatch(t.name) else 0

    def n_kept(self, share: Fraction, path: Path) -> int:
        """Experts per block that remain without floor(share * units) units of each group. Raises MackoError if none
        is removed, or if too few remain for a token.
        """
        n_units = self.n_expert // self.n_groups // self.unit
        n_removed = int(share * n_units)
        n_kept = (n_units - n_removed) * self.unit * self.n_groups
        among = f" in each of {self.n_groups} groups" if self.n_groups > 1 else ""
        if n_removed == 0:
            raise errors.bad_argument(
                f"{path}: --experts {float(share):g} removes none of {n_units} experts{among}; the least is "
                f"{1 / n_units:.4g}"
            )
        # units of a group; llama.cpp ranks groups by their two best experts, and refuses some models with one expert
        n_least = max(2, -(-self.n_used // (self.unit * self.n_groups_used)))
        if n_units - n_removed < n_least:
            n_needed = n_least * self.unit * self.n_groups
            most = f"the most is {(n_units - n_least) / n_units:.4g}" if n_units > n_least else "none can be removed"
            raise errors.bad_argument(
                f"{path}: --experts {float(share):g} leaves {n_kept} of {self.n_expert} experts, and {n_needed} are "
                f"needed ({self.arch}.expert_used_count {self.n_used}); {most}"
            )
        return n_kept

    def kept(self, scores: npt.NDArray[np.float64], n_kept: int) -> Indices:
        """The experts with the highest scores (n_expert,), ascending; equally many of each group. If scores are
        equal, the first expert is removed first.
        """
        by_unit = scores.reshape(self.n_groups, -1, self.unit).sum(axis=2)
        n = n_kept // (self.n_groups * self.unit)
        order = np.argsort(by_unit, axis=1, kind="stable")[:, by_unit.shape[1] - n :]
        units: Indices = (np.sort(order, axis=1) + np.arange(self.n_groups)[:, None] * by_unit.shape[1]).reshape(-1, 1)
        return np.asarray(units * self.unit + np.arange(self.unit)).ravel()


def _block_of(t: Tensor) -> str | None:
    """The prefix of the block of a tensor that has a part for each expert."""
    match = _EXPERT_TENSOR.fullmatch(t.name) or _UNIT_TENSOR.fullmatch(t.name)
    return match and match[1]


@dataclass(frozen=True)
class Selection:
    """The experts that remain, by prefix of the block, and the metadata about it."""

    mixture: Mixture
    kept: Mapping[str, Indices]
    provenance: tuple[Key, ...]

    @property
    def n_kept(self) -> int:
        return len(next(iter(self.kept.values())))

    def ne(self, t: Tensor) -> tuple[int, ...]:
        """The shape of a tensor without the removed experts."""
        n = self.mixture.length(t)
        return (*t.ne[:-1], n * self.n_kept // self.mixture.n_expert) if n else t.ne

    def pieces(self, t: Tensor) -> list[tuple[int, int]]:
        """(offset, bytes) in the file of what remains of a tensor."""
        n, block = self.mixture.length(t), _block_of(t)
        if block is None:
            return [(t.offset, t.nbytes)]
        indices = self.kept[block]
        if n != self.mixture.n_expert:
            indices = indices[:: self.mixture.unit] // self.mixture.unit
        return [(t.offset + int(i) * (t.nbytes // n), t.nbytes // n) for i in indices]


def select(model: Model, options: ParsedOptions) -> Selection:
    """Chooses the experts of a dense model that remain. Raises MackoError or OSError."""
    assert options.experts is not None
    mixture = Mixture.of(model)
    n_kept = mixture.n_kept(options.experts, model.path)
    scores, provenance = _scores(model, mixture, options)
    kept = {}
    for block in mixture.blocks:
        kept[block] = mixture.kept(scores[block], n_kept)
        removed = sorted({*range(mixture.n_expert)} - {*kept[block].tolist()})
        console.detail(f"{block:36s} - removed experts {', '.join(map(str, removed))}")
    provenance += [
        make_key(f"{PROVENANCE}score", "str", options.expert_score),
        make_key(f"{PROVENANCE}count_before", "u32", mixture.n_expert),
        make_key(f"{PROVENANCE}kept", "[u32", np.concatenate(list(kept.values())).tolist()),
    ]
    return Selection(mixture, kept, tuple(provenance))


def _scores(
    model: Model, mixture: Mixture, options: ParsedOptions
) -> tuple[dict[str, npt.NDArray[np.float64]], list[Key]]:
    """The scores of the experts of each block (n_expert,), and metadata about the text."""
    if options.expert_score == "random":
        rng = np.random.default_rng(options.seed)
        return {block: rng.random(mixture.n_expert) for block in mixture.blocks}, []
    assert options.text is not None
    console.log(f"experts from {options.text} ...")
    found = experts_of_text(
        model.path, options.text, n_ctx=options.n_ctx, n_chunks=options.n_chunks, n_threads=options.n_threads
    )
    scores = {}
    for block in mixture.blocks:
        statistics = found.by_block.get(block)
        if statistics is None:
            console.log(f"warning: {block}ffn_down_exps.weight: the text does not reach it: the last experts remain")
            scores[block] = np.zeros(mixture.n_expert)
        elif options.expert_score == "reap":
            scores[block] = statistics.mean_norms
        else:
            scores[block] = statistics.n_tokens.astype(np.float64)
    return scores, [
        make_key(f"{PROVENANCE}datasets", "[str", [Path(options.text).name]),
        make_key(f"{PROVENANCE}chunks_count", "u32", found.n_chunks),
    ]


# ---- writing ----


def write(model: Model, selection: Selection, output: AtomicOutput) -> None:
    """Writes the model without the removed experts, and seals and checks the output. Raises MackoError or OSError."""
    count = f"{selection.mixture.arch}.expert_count"
    keys = [key for key in without_rule(model.keys) if not key.name.startswith(PROVENANCE)]
    keys = [make_key(count, "u32", selection.n_kept) if key.name == count else key for key in keys]
    table = [NewTensor(t.name, t.type, selection.ne(t), sum(n for _, n in selection.pieces(t))) for t in model.tensors]
    writer = Writer(output, [*keys, *selection.provenance], table, model.alignment)
    for t in console.tracked(model.tensors, "removing experts", lambda t: t.nbytes, "B"):
        writer.write(block for at, n in selection.pieces(t) for block in t.shard.blocks(at, n))
    writer.finish()
    model.check_unchanged()
    output.seal()
    with Model(output.partial) as written:
        for t, result in zip(model.tensors, written.tensors):
            if not _is_written(t, result, selection):
                raise errors.error(
                    errors.FILE_CHANGED, f"{output.path}: {t.name}: the file does not hold what was written"
                )


def _is_written(t: Tensor, result: Tensor, selection: Selection) -> bool:
    at = result.offset
    same = (t.name, t.type, selection.ne(t)) == (result.name, result.type, result.ne)
    for begin, nbytes in selection.pieces(t) if same else ():
        same = same and all(map(np.array_equal, t.shard.blocks(begin, nbytes), result.shard.blocks(at, nbytes)))
        at += nbytes
    return same


def removed(
    model: Model, selection: Selection, near: str | os.PathLike[str] | None
) -> contextlib.AbstractContextManager[Path]:
    """A temporary_copy() of the model without the removed experts."""
    return temporary_copy(model, near, "experts", lambda output: write(model, selection, output))
