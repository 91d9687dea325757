"""The pinned versions of the formatters and linters, which stand in two files."""

from __future__ import annotations

import re

import generators

PIN = re.compile(r'"((?:clang-format|mypy|ruff|types-\w+)==[\w.]+)"')


def test_pre_commit_uses_the_versions_of_pyproject():
    pinned = set(PIN.findall((generators.ROOT / "pyproject.toml").read_text()))
    hooks = set(PIN.findall((generators.ROOT / ".pre-commit-config.yaml").read_text()))
    assert hooks <= pinned
    # mypy and its stubs run in .venv, where tools/dev.py installs what pyproject.toml says
    assert {name.split("==")[0] for name in pinned - hooks} == {"mypy", "types-tabulate", "types-tqdm"}
