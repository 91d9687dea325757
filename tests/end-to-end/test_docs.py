"""README.md and the pages under docs/ and lab/: all links have a target; blocks of commands run from top to bottom.

A page runs in a folder of its own that has the names in the text: model-f16.gguf, mixture-f16.gguf, text.txt,
held-out.txt, examples/, models/, tools/. Blocks ```sh run as scripts; in ```console the lines after "$ " run and their
output must contain the other lines; ```python runs as a doctest, or as a script if it has no prompt. An HTML comment
before a block states what cannot run here, and why: "not run: REASON" or "output differs: REASON".
"""

from __future__ import annotations

import dataclasses
import doctest
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import generators, gguf_bytes, hf_checkpoint, tiny_models

ROOT = generators.ROOT
PAGES = [ROOT / "README.md", *(page for top in ("docs", "lab") for page in sorted((ROOT / top).rglob("*.md")))]
GUIDE = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- (not run|output differs): ([^>]+) -->\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGE_NAME = re.compile(r"\b(?:docs|lab)/[\w./-]+\.(?:md|txt|png|svg)\b")
LANGUAGES = {"sh", "console", "python"}


@dataclasses.dataclass(frozen=True)
class Block:
    page: Path
    line: int
    mark: str  # "", "not run" or "output differs"
    reason: str
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, m.start(4)), m[1] or "", m[2] or "", m[3], m[4])
        for m in BLOCK.finditer(text)
        if m[3] in LANGUAGES
    ]


def with_name(pages: list[Path]) -> list:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The prerequisites of the pages: an installed package, two models, two texts, a checkpoint and its converter."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in (("macko", "-m ggml_macko.commands.cli"), ("python3", ""), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (programs / name).chmod(0o755)
    (programs / "convert_hf_to_gguf.py").write_text(f"#!{sys.executable}\n{hf_checkpoint.AS_PROGRAM}")
    (programs / "convert_hf_to_gguf.py").chmod(0o755)
    scratch = tmp_path / "page"
    scratch.mkdir()
    hf_checkpoint.write(scratch / "checkpoint")
    for name in ("examples", "models", "tools"):
        (scratch / name).symlink_to(ROOT / name)
    dense = generators.SHARED / "docs-4m-f16.gguf"
    shutil.copyfile(dense if dense.exists() else generators.DEMO, scratch / "model-f16.gguf")
    (scratch / "mixture-f16.gguf").write_bytes(gguf_bytes.write(tiny_models.make("llama-moe")))
    for name in ("text.txt", "held-out.txt"):
        shutil.copyfile(ROOT / "models" / "sample.txt", scratch / name)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.chdir(scratch)
    return scratch


def run_shell(block: Block, script: str) -> str:
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, f"{block.name}: exit code {done.returncode}: {script}\n{done.stderr[-2000:]}"
    return done.stdout


def run_console(block: Block) -> None:
    """Runs commands and compares their output with the lines below each; "..." replaces omitted lines."""
    commands = re.findall(r"^\$ (.*(?:\\\n.*)*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE)
    assert commands, block.name
    for command, expected in commands:
        printed = run_shell(block, command)
        if block.mark != "output differs":
            for line in expected.splitlines():
                assert line.strip() in ("", "...") or line.strip() in printed, f"{block.name}: {line}\n{printed}"


def run_python(block: Block, names: dict) -> None:
    if ">>>" not in block.text:
        exec(compile(block.text, block.name, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(block.text, names, block.name, str(block.page), block.line)
    test.globs = names
    output: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(test, out=output.append, clear_globs=False).failed == 0, "".join(output)


@pytest.mark.parametrize("page", with_name(GUIDE))
def test_commands_of_a_page_run_from_top_to_bottom(page, folder):
    names: dict = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.mark == "not run":
            continue
        if block.language == "sh":
            run_shell(block, block.text)
        elif block.language == "console":
            run_console(block)
        else:
            run_python(block, names)


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=b.name) for page in GUIDE for b in blocks_of(page) if b.mark == "not run"]
)
def test_block_that_is_not_run_says_why(block):
    assert len(block.reason) > 10
    pytest.skip(block.reason)


@pytest.mark.parametrize("page", with_name(GUIDE))
def test_commands_stand_in_blocks_that_are_run(page):
    """The tests above do not find indented or unnamed blocks of commands."""
    text = re.sub(BLOCK, "", page.read_text(encoding="utf-8"))
    assert not re.findall(r"^(?: {4}|```).*\b(?:macko|pip|python3?) .*", text, re.MULTILINE)


@pytest.mark.parametrize("page", with_name(PAGES))
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(#[^)]*)?\)", page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {"#" + re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{target}{anchor}"


FIGURES = {  # README.md -> page of the guide, start of a row of its tables
    "pruned to 50 % and recovered: 10.7 MiB, perplexity 10.62": (
        "pruning",
        "50 % zeros, sparse-q4 | 19.9 | 10.7 MiB | 3.88 | 10.62",
    ),
    "dense Q3_K with the same training: 11.1 MiB, 10.63": (
        "pruning",
        "Q3_K in all blocks | 19.9 | 11.1 MiB | 4.05 | 10.63",
    ),
    "Dense Q4_K_M: 13.5 MiB, 11.00": ("pruning", "dense Q4_K_M | 13.5 MiB | 4.89 | 11.00"),
    "50 % of them zero, generate 1.6 times": ("performance", "sparse F16, 50 % zeros | 28.1 (1.63x) | 22.6 (1.60x)"),
    "4-bit values): 426 tokens/s": ("performance", "sparse-q4, 50 % zeros | 2.8 | 426 /"),
    "llama.cpp's Q4_K_M 292": ("performance", "llama.cpp Q4_K_M | 4.1 | 292 /"),
    "F16 219": ("performance", "llama.cpp F16 | 13.5 | 219 /"),
}


@pytest.mark.parametrize("figure", FIGURES)
def test_figure_of_readme_stands_in_the_guide(figure):
    page, row = FIGURES[figure]
    assert figure in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"\n| {row} " in (ROOT / "docs" / "guide" / f"{page}.md").read_text(encoding="utf-8")


def test_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 110 and max(map(len, lines)) <= 120 and len(text) <= 5120


def test_pictures_exist_for_light_and_dark_pages():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r'src(?:set)?="([^"]+)"', text)
    assert len(pictures) == 2 and "![" not in text
    for picture in pictures:
        assert (ROOT / picture).read_text(encoding="utf-8").startswith("<?xml")


def test_pages_that_the_tree_names_exist():
    names = ["*.cpp", "*.h", "*.cu", "*.cuh", "*.c", "*.py", "*.md", "*.toml", "*.txt", "*.inc", "Containerfile"]
    listed = subprocess.run(["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    missing = [
        f"{name} names {page}"
        for name in listed.stdout.split()
        for page in PAGE_NAME.findall((ROOT / name).read_text(encoding="utf-8", errors="replace"))
        if not (ROOT / page).exists()
    ]
    assert not missing


def test_command_line_reference_is_up_to_date():
    reference = ROOT / "docs" / "guide" / "command-line.md"
    script = ROOT / "tools" / "make_cli_reference.py"
    made = subprocess.run([sys.executable, script, "-"], check=True, capture_output=True, text=True).stdout
    assert made == reference.read_text(encoding="utf-8"), "run tools/make_cli_reference.py"
