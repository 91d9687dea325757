"""The keys macko.act.*: thresholds below which neurons may be skipped for a token (FORMAT.md section 10).

The C library checks types and ranges when it opens a file. This module checks that the keys fit the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .. import errors
from .files import Key, Model, make_key

_PREFIX = "macko.act."
_VERSION = 1


@dataclass(frozen=True)
class PartRule:
    """The threshold of one feed-forward part."""

    down: str  # name of the weight
    share: float  # requested share of the part's neurons
    threshold: float  # neurons with a smaller score are skipped


@dataclass(frozen=True)
class SkipRule:
    """The neurons that may be skipped, and the origin of the thresholds."""

    score: str
    share: float  # requested share of all neurons
    allocation: str
    text: str  # name of the calibration text's file
    n_chunks: int
    n_ctx: int
    parts: tuple[PartRule, ...]

    def keys(self) -> list[Key]:
        """The rule as metadata of a model."""
        return [
            make_key(_PREFIX + "version", "u32", _VERSION),
            make_key(_PREFIX + "kind", "str", self.score),
            make_key(_PREFIX + "share", "f32", self.share),
            make_key(_PREFIX + "allocation", "str", self.allocation),
            make_key(_PREFIX + "text", "str", self.text),
            make_key(_PREFIX + "chunks", "u32", self.n_chunks),
            make_key(_PREFIX + "n_ctx", "u32", self.n_ctx),
            make_key(_PREFIX + "part.down", "[str", [part.down for part in self.parts]),
            make_key(_PREFIX + "part.share", "[f32", [part.share for part in self.parts]),
            make_key(_PREFIX + "part.threshold", "[f32", [part.threshold for part in self.parts]),
        ]


def read_rule(model: Model) -> SkipRule | None:
    """The rule of a model, if any in this version. Raises MackoError if the model lacks a weight of the rule."""
    found = {k.name[len(_PREFIX) :]: k.value() for k in model.keys if k.name.startswith(_PREFIX)}
    if not found or found["version"] > _VERSION:
        return None
    matrices = {t.name for t in model.tensors if len(t.ne) == 2}
    for i, name in enumerate(found["part.down"]):
        if name not in matrices:
            raise errors.error(
                errors.BAD_KEY_VALUE,
                f"{model.path}: key {_PREFIX}part.down: element {i} is {name!r} (a matrix of the model)",
            )
    return SkipRule(
        score=found["kind"],
        share=found["share"],
        allocation=found["allocation"],
        text=found["text"],
        n_chunks=found["chunks"],
        n_ctx=found["n_ctx"],
        parts=tuple(map(PartRule, found["part.down"], found["part.share"], found["part.threshold"])),
    )


def without_rule(keys: Iterable[Key]) -> list[Key]:
    """The keys without those of a rule, whose thresholds are wrong after a change of weights."""
    return [key for key in keys if not is_rule_key(key.name)]


def is_rule_key(name: str) -> bool:
    return name.startswith(_PREFIX)
