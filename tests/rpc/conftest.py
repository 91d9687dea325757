"""Fixtures of the tests with RPC servers."""

from __future__ import annotations

import os
import pathlib

import pytest

from support import generators, rpc_servers


@pytest.fixture(scope="module")
def folder():
    """The folder of llama.cpp's programs."""
    path = pathlib.Path(os.environ.get("LLAMA_CPP_BIN", "/nonesuch"))
    if not (path / rpc_servers.PROGRAM).exists():
        pytest.skip(f"LLAMA_CPP_BIN names no folder with {rpc_servers.PROGRAM}")
    return path


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    from ggml_macko import convert

    path = tmp_path_factory.mktemp("demo") / "sparse.gguf"
    convert(generators.DEMO, path)
    return path
