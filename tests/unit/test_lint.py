"""The pinned versions of formatters and linters agree in two files; git tracks no builds and no local paths."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support import generators

PIN = re.compile(r'"((?:clang-format|mypy|ruff|types-\w+)==[\w.]+)(?:; [^"]+)?"')


def test_pre_commit_uses_the_versions_of_pyproject():
    pinned = set(PIN.findall((generators.ROOT / "pyproject.toml").read_text()))
    hooks = set(PIN.findall((generators.ROOT / ".pre-commit-config.yaml").read_text()))
    assert hooks <= pinned
    # mypy and its stubs run in .venv, where tools/dev.py installs the requirements of pyproject.toml
    assert {name.split("==")[0] for name in pinned - hooks} == {"mypy", "types-tabulate", "types-tqdm"}


def git(*args):
    """The output lines of a git command in this repository."""
    if not (generators.ROOT / ".git").exists():
        pytest.skip("not a clone of the repository")
    done = subprocess.run(["git", "-C", str(generators.ROOT), *args], capture_output=True, text=True)
    assert done.returncode == 0 or (args[0] == "grep" and done.returncode == 1), done.stderr  # 1: nothing found
    return done.stdout.splitlines()


def test_caches_and_builds_are_not_tracked():
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard") == []


def test_tracked_files_do_not_name_the_folder_of_the_clone():
    assert git("grep", "--files-with-matches", "--fixed-strings", f"{generators.ROOT}/") == []


@pytest.mark.parametrize(
    "schema, pattern",
    [("github-workflows", "workflows/*.yml"), ("github-issue-forms", "ISSUE_TEMPLATE/[!c]*.yml")],
)
def test_files_for_github_follow_their_schema(schema, pattern):
    """The workflows cannot run here; check-jsonschema comes with the schemas."""
    files = sorted((generators.ROOT / ".github").glob(pattern))
    assert len(files) > 1
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_run_what_contributors_run():
    text = (generators.ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert set(re.findall(r"^      - run: (.*)$", text, re.MULTILINE)) == {"python3 tools/dev.py check", ".ci/run"}
