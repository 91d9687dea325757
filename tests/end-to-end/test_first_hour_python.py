"""A Python developer's first hour: code for llama-cpp-python moves to a sparse model step by step, with common
mistakes. All steps run in one process, as in an interactive session.
"""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

import ggml_macko
from ggml_macko import Llama, SparseMatrix, console
from support import generators

PROMPT = "The function returns"
CHAT = [{"role": "user", "content": "What is a pointer?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the developer's files: a pruned model, and others."""
    folder = tmp_path_factory.mktemp("hour")
    shutil.copyfile(generators.DEMO, folder / "dense.gguf")
    (folder / "notes.txt").write_text("a text, no model\n")
    with console.quiet():
        ggml_macko.convert(folder / "dense.gguf", folder / "sparse.gguf")
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    llama = Llama(str(folder / "sparse.gguf"), n_ctx=512, seed=1, verbose=False)
    yield llama
    llama.close()


@pytest.fixture(scope="module")
def dense_llm(folder):
    llama = llama_cpp.Llama(str(folder / "dense.gguf"), n_ctx=512, seed=1, verbose=False)
    yield llama
    llama.close()


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=120
    )


# ---- import ----


def test_import_is_light():
    code = "import ggml_macko, sys; print(*[m for m in ('llama_cpp', 'numpy', 'gguf') if m in sys.modules])"
    done = run_python(code)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
    assert ggml_macko.__version__ and {"Llama", "convert", "verify", "SparseMatrix"} <= set(dir(ggml_macko))


def test_signatures_are_typed():
    assert (Path(ggml_macko.__file__).parent / "py.typed").exists()
    assert issubclass(Llama, llama_cpp.Llama)
    hints = typing.get_type_hints(Llama.__init__)
    assert hints["model_path"] is str and hints["compress"] is bool
    for function in (ggml_macko.convert, ggml_macko.verify, ggml_macko.inspect, SparseMatrix.from_dense):
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty and function.__doc__
        assert all(p.annotation is not inspect.Parameter.empty for n, p in signature.parameters.items() if n != "cls")


# ---- converting ----


def test_conversion_returns_a_record(folder, capsys):
    report = ggml_macko.convert(folder / "dense.gguf", folder / "again.gguf")
    printed = capsys.readouterr()
    assert printed.out == ""  # a library prints no results; progress is on stderr
    assert report.path == folder / "again.gguf" and report.n_sparse == 28
    assert report.nbytes == report.path.stat().st_size < report.nbytes_source
    by_name = {t.name: t for t in report.tensors}
    weight = by_name["blk.0.ffn_up.weight"]
    assert weight.is_sparse and 0.25 < weight.density < 0.35 and weight.nbytes < weight.nbytes_source
    assert (folder / "again.gguf").read_bytes() == (folder / "sparse.gguf").read_bytes()


def test_verify_says_identical_or_where_it_differs(folder):
    with console.quiet():
        found = ggml_macko.verify(folder / "dense.gguf", folder / "sparse.gguf")
        assert found.is_equal and found.difference is None and found.n_sparse == (0, 28)
        ggml_macko.convert(folder / "dense.gguf", folder / "q8.gguf", "sparse-q8")
        lossy = ggml_macko.verify(folder / "dense.gguf", folder / "q8.gguf")
        assert lossy.is_equal and not lossy.is_identical and 0 < lossy.quantized[0].rms_relative < 0.02
        ggml_macko.prune(folder / "dense.gguf", folder / "other.gguf", ggml_macko.PruneOptions(sparsity=0.9))
        other = ggml_macko.verify(folder / "sparse.gguf", folder / "other.gguf", metadata=False)
    assert not other.is_equal and other.difference.startswith("blk.0.")


# ---- generating ----


def test_completion_is_that_of_the_dense_model(llm, dense_llm):
    got = llm.create_completion(PROMPT, max_tokens=16, temperature=0)
    want = dense_llm.create_completion(PROMPT, max_tokens=16, temperature=0)
    assert got["choices"] == want["choices"] and got["usage"] == want["usage"]
    assert got.keys() == want.keys()
    assert llm(PROMPT, max_tokens=16, temperature=0)["choices"][0]["text"] == got["choices"][0]["text"]


def test_chat_and_streams_are_those_of_the_dense_model(llm, dense_llm):
    got, want = (
        [
            m.create_chat_completion(CHAT, max_tokens=8, temperature=0)["choices"],
            [
                c["choices"][0]["delta"]
                for c in m.create_chat_completion(CHAT, max_tokens=8, temperature=0, stream=True)
            ],
            [piece["choices"][0]["text"] for piece in m(PROMPT, max_tokens=8, temperature=0, stream=True)],
        ]
        for m in (llm, dense_llm)
    )
    assert got == want
    whole = llm(PROMPT, max_tokens=8, temperature=0)["choices"][0]["text"]
    assert "".join(got[2]) == whole and got[1][0] == {"role": "assistant"}


def test_tokens_and_embeddings_are_those_of_the_dense_model(folder, llm, dense_llm):
    tokens = llm.tokenize(PROMPT.encode())
    assert tokens == dense_llm.tokenize(PROMPT.encode()) and llm.detokenize(tokens).decode().strip() == PROMPT
    options = {"embedding": True, "pooling_type": llama_cpp.LLAMA_POOLING_TYPE_MEAN, "n_ctx": 64, "verbose": False}
    vectors = []
    for kind, name in ((Llama, "sparse.gguf"), (llama_cpp.Llama, "dense.gguf")):
        embedder = kind(str(folder / name), **options)
        vectors.append(embedder.create_embedding("A pointer is an address.")["data"][0]["embedding"])
        embedder.close()
    assert np.allclose(*vectors, atol=2e-3 * np.abs(vectors[1]).max()) and len(vectors[0]) == llm.n_embd()


def test_dense_model_is_compressed_while_it_is_loaded(folder, llm):
    compressed = Llama(str(folder / "dense.gguf"), n_ctx=512, compress=True, verbose=False)
    text = compressed(PROMPT, max_tokens=8, temperature=0)["choices"][0]["text"]
    compressed.close()
    assert text == llm(PROMPT, max_tokens=8, temperature=0)["choices"][0]["text"]


def test_llama_cpp_itself_opens_sparse_models_after_register(folder):
    """A program with its own llama_cpp.Llama needs register(); without it, the file is refused."""
    code = """
import sys, llama_cpp
try:
    llama_cpp.Llama(sys.argv[1], verbose=False)
except ValueError as e:
    print("refused:", str(e)[:28])
import ggml_macko
ggml_macko.register()
print(llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False).n_vocab())
"""
    done = run_python(code, folder / "sparse.gguf")
    assert done.stdout == "refused: Failed to load model from fi\n4096\n", done.stderr


# ---- arrays ----


def test_sparse_matrix_is_used_like_an_array():
    rng = np.random.default_rng(0)
    dense = np.where(rng.random((128, 300)) < 0.3, rng.standard_normal((128, 300)), 0)  # float64, NumPy's default
    sparse = SparseMatrix.from_dense(dense, format="auto")
    x = rng.standard_normal(300)
    assert sparse.shape == dense.shape and sparse.nnz == np.count_nonzero(dense) and sparse.nbytes < dense.nbytes / 4
    assert np.allclose(sparse @ x, dense @ x, atol=1e-4)
    assert np.array_equal(sparse.to_dense(), dense.astype(np.float32))
    assert "128x300 f32" in repr(sparse)


# ---- mistakes ----

MISTAKES = [
    ("Llama('missing.gguf', verbose=False)", ValueError, "missing.gguf"),
    ("Llama('notes.txt', verbose=False)", ValueError, "notes.txt"),
    ("Llama('torn.gguf', verbose=False)", ValueError, "torn.gguf: the file ends at 1000000, its tensors need"),
    ("convert('missing.gguf', 'out.gguf')", FileNotFoundError, "missing.gguf"),
    ("convert('notes.txt', 'out.gguf')", ValueError, "notes.txt: not a GGUF file"),
    ("convert('dense.gguf', 'out.gguf', 'sparse-q9')", ValueError, "unknown type 'sparse-q9'"),
    ("convert('dense.gguf', 'sparse.gguf')", ValueError, "sparse.gguf: exists"),
    ("convert('dense.gguf', 'dense.gguf', force=True)", ValueError, "dense.gguf"),
    (
        "prune('sparse.gguf', 'out.gguf', PruneOptions(sparsity=0.5))",
        ValueError,
        "is a sparse file; use `macko restore` first",
    ),
    ("prune('dense.gguf', 'out.gguf', PruneOptions(sparsity=50))", ValueError, "50"),
    ("SparseMatrix.from_dense([1, 2, 3])", ValueError, r"2-D array, got shape \(3,\)"),
    ("SparseMatrix.from_dense([[0, 16777217]])", ValueError, "16777217, which would be rounded"),
    ("SparseMatrix.from_dense([[1.0, 2.0]]) @ [1.0, 2.0, 3.0]", ValueError, r"got \(3,\)"),
]


@pytest.mark.parametrize("call, kind, message", MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistake_is_one_line_that_says_what(folder, monkeypatch, call, kind, message):
    monkeypatch.chdir(folder)
    (folder / "torn.gguf").write_bytes((folder / "sparse.gguf").read_bytes()[:1_000_000])
    before = sorted(p.name for p in folder.iterdir())
    with console.quiet(), pytest.raises(kind, match=message) as raised:
        eval(call, {**vars(ggml_macko), "Llama": Llama, "SparseMatrix": SparseMatrix,
                    "convert": ggml_macko.convert, "prune": ggml_macko.prune,
                    "PruneOptions": ggml_macko.PruneOptions})  # fmt: skip
    assert len(str(raised.value).splitlines()) == 1
    assert sorted(p.name for p in folder.iterdir()) == before  # no partial files
