"""The environment variables of ggml-macko. The C library has the table and checks the words."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from .library import ffi, lib, text

LOAD = "GGML_MACKO_LOAD"
ENABLE = "GGML_MACKO_ENABLE"


@dataclass(frozen=True)
class Setting:
    variable: str
    word: str | None
    """An allowed word of the variable, which holds words with commas between them; None: the variable holds a path."""
    help: str


def settings() -> list[Setting]:
    """All variables and their words."""
    row = ffi().new("struct ggml_macko_setting *")
    found: list[Setting] = []
    while lib().ggml_macko_setting_at(len(found), row):
        word = None if row.word == ffi().NULL else text(row.word)
        found.append(Setting(text(row.variable), word, text(row.help)))
    return found


def with_words(variable: str, added: Iterable[str]) -> dict[str, str]:
    """The variable with its present words and the added ones; empty without any word."""
    words = [*filter(None, os.environ.get(variable, "").split(",")), *added]
    return {variable: ",".join(dict.fromkeys(words))} if words else {}


def is_enabled(feature: str) -> bool:
    return feature in os.environ.get(ENABLE, "").split(",")
