"""The pages in docs/: their examples run, their links lead somewhere."""

from __future__ import annotations

import doctest
import re

import pytest

import generators

PAGES = [generators.ROOT / "README.md", *sorted((generators.ROOT / "docs").rglob("*.md"))]


def test_example_prints_something_else(tmp_path, macko, monkeypatch):
    assert macko("convert", generators.DEMO, tmp_path / "sparse.gguf").code == 0
    monkeypatch.chdir(tmp_path)
    page = (generators.ROOT / "docs" / "guide" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "docs/guide/python.md", None, None)
    assert len(test.examples) > 20
    output: list = []
    assert doctest.DocTestRunner(verbose=False).run(test, out=output.append).failed == 0, "".join(output)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(generators.ROOT)))
def test_link_leads_nowhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
