"""The layers of the Python packages and of the C++ folders: a layer imports and includes only those below it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import generators

PACKAGE = generators.ROOT / "python" / "ggml_macko"
SOURCES = generators.ROOT / "ggml-macko" / "src"

# package -> packages that it may import, besides itself and modules without dependencies
BASE = {"errors", "console", "system", "values", "regular_files"}
PYTHON = {
    "errors": set(),
    "console": set(),
    "system": set(),
    "values": set(),
    "regular_files": set(),
    "_ffi": set(),
    "grammar": set(),
    "guards": {"grammar"},
    "native": {"_ffi", "guards"},
    "codecs": {"native"},
    "gguf": {"native", "codecs"},
    "llama": {"guards", "native"},
    "sparse_matrix": {"native", "codecs"},
    "huggingface": {"native", "codecs", "gguf"},
    "conversion": {"native", "codecs", "gguf"},
    "evaluation": {"native", "codecs", "gguf", "llama"},
    "pruning": {"native", "codecs", "gguf", "evaluation"},
    "recovery": {"native", "codecs", "gguf", "evaluation", "pruning"},
    "benchmark": {"native", "codecs", "gguf", "llama", "sparse_matrix", "conversion", "evaluation", "pruning"},
    "server": {"guards", "native", "llama", "huggingface"},
}
ANYTHING = {"commands", "__init__", "__main__"}  # the top layer: only the entry points import it

# folder -> folders whose headers it may include, besides its own and platform's; a name covers the folders inside
CPLUSPLUS = {
    "platform": set(),
    "codec": set(),
    "gguf": {"codec"},
    "load": {"codec", "gguf"},
    "gpu-layout": {"codec"},
    "abi": {"codec"},
    "backend": {"codec", "gguf", "load", "abi"},
    "rpc": {"codec", "gguf", "load", "abi", "backend"},
    "cpu/layout": {"codec"},
    "cpu/kernels": {"codec", "cpu/layout"},
    "cpu/device": {"codec", "gguf", "load", "abi", "backend", "rpc", "cpu/kernels", "cpu/layout"},
    "cuda": {"codec", "gguf", "load", "abi", "backend", "rpc", "gpu-layout"},
    "capi": {"codec", "gguf", "load", "abi", "backend", "rpc", "cpu", "gpu-layout"},
    "plugin": {"codec", "gguf", "load", "abi", "backend", "rpc", "cpu", "cuda", "gpu-layout", "capi"},
}


def imported(path: Path) -> Iterator[str]:
    """The top-level name of the package for each import statement of a module, including those in functions."""
    package = ["ggml_macko", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*module, alias.name] for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == "ggml_macko" and len(name) > 1:
                yield name[1]


def layer(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first[: -len(".py")] if first.endswith(".py") else first


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_imports_only_layers_below_its_own(path):
    own = layer(path)
    if own not in ANYTHING:
        allowed = {own, *BASE, *PYTHON[own]}
        assert set(imported(path)) <= allowed, f"{own} may import {sorted(allowed)}"


def test_every_package_has_a_layer():
    packages = {layer(path) for path in PACKAGE.rglob("*.py")}
    assert packages - ANYTHING <= set(PYTHON)


def test_architecture_page_lists_packages_above_those_that_they_import():
    page = (generators.ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"^## Python\n.*?^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    rows = [set(re.findall(r"\w+", line)) for line in block[1].splitlines()]
    assert rows[-1] == BASE
    assert set().union(*rows) == {*PYTHON, "commands"} - {"_ffi"}
    for i, row in enumerate(rows):
        for package in row - {"commands"}:
            assert PYTHON[package] - {"_ffi"} <= set().union(*rows[i + 1 :])


@pytest.mark.parametrize("folder", sorted(CPLUSPLUS))
def test_folder_includes_only_folders_below_it(folder):
    for path in sorted((SOURCES / folder).rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
            target = next((p for p in (path.parent / name, SOURCES / name) if p.exists()), None)
            if target is None:  # a header of ggml, or of the C API
                continue
            other = target.resolve().relative_to(SOURCES.resolve())
            allowed = {folder, "platform", *CPLUSPLUS[folder]}
            assert any(other.is_relative_to(r) for r in allowed), f"{path.relative_to(SOURCES)} includes {name}"


def test_every_folder_has_a_layer():
    suffixes = {".c", ".h", ".cpp", ".cu", ".cuh"}
    files = [p.relative_to(SOURCES) for p in SOURCES.rglob("*.*") if p.suffix in suffixes]
    for path in files:
        assert [folder for folder in CPLUSPLUS if path.is_relative_to(folder)], f"{path} belongs to no layer"
    for folder in CPLUSPLUS:
        assert any(path.is_relative_to(folder) for path in files), f"{folder} is empty"


def test_only_the_graph_of_a_running_model_uses_openmp():
    """OpenMP blocks forked children, and ends the process if it cannot start a thread; see team.h."""
    known = {"cpu/device/graph-plan.cpp", "cpu/device/graph-plan.h", "cpu/kernels/dispatch.cpp", "codec/team.cpp"}
    used = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.*")
        if re.search(r"#pragma omp|#include <omp\.h>", path.read_text())
    }
    assert used <= known


def test_no_test_module_imports_another():
    """Shared fixtures are in a conftest.py, other shared code in tests/support or tests/reference, also for the
    programs that tests write.
    """
    modules = sorted((generators.ROOT / "tests").rglob("*.py"))
    assert len(modules) > 80
    assert [p.name for p in modules if re.search(r"^\s*(from|import)\s+test_", p.read_text(), re.MULTILINE)] == []
