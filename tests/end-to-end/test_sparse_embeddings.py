"""Models whose embeddings were pruned: convert stores them sparse, and the CPU device looks up their rows. In a tied
model, they are also the output head.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import gguf
import numpy as np
import pytest

import ggml_macko
from ggml_macko.codecs.packed import TYPE_CODED
from ggml_macko.native import library
from ggml_macko.native.cpu import cpu_kernels
from ggml_macko.native.file import File
from support import generators
from support.llama_logits import greedy, logits, logits_one_by_one, nmse, open_model

EMBEDDINGS = "token_embd.weight"
MAKE = generators.ROOT / "tools" / "make_random_llama.py"
SHAPE = ["--layers", "1", "--embd", "320", "--ff", "256", "--heads", "8", "--kv-heads", "2", "--vocab", "500"]
LOSSLESS = ("macko", "packed", "sparse-lossless", "ec-csr")
QUANTIZED = ("sparse-q8", "sparse-q5", "sparse-q4", "sparse-q3")
MAX_NMSE = 5e-4 if cpu_kernels() == "avx512-vbmi2" else 1e-4
"""Of quantized values: batches of more than four tokens have x in 8 bits with VBMI2, as in llama.cpp, else in 16."""
PROMPT = "A list of"
"""The first choice for each of the next eight tokens of the bundled model leads by .3 and more."""


def prune_embeddings(macko, path, folder, sparsity="0.5"):
    out = folder / "pruned.gguf"
    done = macko("prune", path, out, "--sparsity", sparsity, "--include-weights", EMBEDDINGS)
    assert done.code == 0 and "warning" not in done.err, done.err
    return out


@pytest.fixture
def pruned(macko, tmp_path, request):
    """A tied or an untied model, half of whose embeddings are zero."""
    path = tmp_path / "random.gguf"
    tied = ["--tied"] if request.param == "tied" else []
    subprocess.run([sys.executable, str(MAKE), *SHAPE, "--density", "0.4", *tied, str(path)], check=True)
    return prune_embeddings(macko, path, tmp_path)


def sparse_names(path):
    with File(path) as f:
        return {m.name for m in f.sparse()}


def all_logits(path, tokens, **kwargs):
    """Of a batch of prompt tokens, and of tokens one by one."""
    with contextlib.closing(open_model(path, logits_all=True, **kwargs)) as llama:
        return np.concatenate([logits(llama, tokens), logits_one_by_one(llama, tokens[:8])])


@pytest.mark.parametrize(
    "pruned, kind",
    [*(("tied", kind) for kind in LOSSLESS + QUANTIZED), ("untied", "packed"), ("untied", "sparse-q4")],
    indirect=["pruned"],
)
def test_sparse_embeddings_agree_with_dense(pruned, kind, macko, tmp_path):
    """sparse_only refuses weights that become dense; tokens are the first, the last, and others several times."""
    sparse, restored = tmp_path / "sparse.gguf", tmp_path / "restored.gguf"
    assert macko("convert", pruned, sparse, kind, "--tensor-type", f"{EMBEDDINGS}={kind}").code == 0
    assert EMBEDDINGS in sparse_names(sparse)
    assert macko("verify", pruned, sparse).code == 0
    assert macko("restore", sparse, restored).code == 0
    assert (restored.read_bytes() == pruned.read_bytes()) == (kind in LOSSLESS)
    tokens = [0, 499, *np.random.default_rng(1).integers(0, 500, 60).tolist(), 499, 0, 0]
    want = all_logits(restored, tokens)
    found = [all_logits(sparse, tokens, sparse_only=True, n_threads_batch=n, n_threads=n) for n in (1, 3)]
    assert np.array_equal(found[0], found[1])
    assert nmse(found[0], want) < (1e-6 if kind in LOSSLESS else MAX_NMSE)


@pytest.mark.gpu
@pytest.mark.skipif(library.gpus().startswith("none"), reason=f"GPUs: {library.gpus()}")
@pytest.mark.parametrize("pruned", ["tied", "untied"], indirect=True)
@pytest.mark.parametrize("kind", ["macko", "sparse-lossless", "sparse-q4", "sparse-q8"])
def test_sparse_embeddings_beside_a_gpu_agree_with_dense(pruned, kind, macko, tmp_path):
    """The CPU looks up rows, and the GPU multiplies by the same weights if they are also the head."""
    sparse, restored = tmp_path / "sparse.gguf", tmp_path / "restored.gguf"
    assert macko("convert", pruned, sparse, kind, "--tensor-type", f"{EMBEDDINGS}={kind}").code == 0
    assert macko("restore", sparse, restored).code == 0
    tokens = [0, 499, *np.random.default_rng(1).integers(0, 500, 60).tolist(), 499, 0, 0]
    want = all_logits(restored, tokens, n_gpu_layers=0)
    found = [all_logits(sparse, tokens, sparse_only=True, n_gpu_layers=n) for n in (-1, 1)]
    assert max(nmse(f, want) for f in found) < 1e-4


def test_text_of_a_tied_model_is_that_of_dense(macko, tmp_path):
    pruned, sparse = prune_embeddings(macko, generators.DEMO, tmp_path), tmp_path / "sparse.gguf"
    assert macko("convert", pruned, sparse).code == 0
    assert EMBEDDINGS in sparse_names(sparse)
    assert greedy(open_model(sparse, sparse_only=True), 64) == greedy(open_model(pruned), 64)
    assert greedy(open_model(pruned, compress=True, sparse_only=True), 64) == greedy(open_model(sparse), 64)


@pytest.mark.parametrize("kind, embeddings", [("packed", "dense"), ("sparse-q4", "q8_0")])
def test_embeddings_that_are_not_pruned_stay_dense(macko, tmp_path, kind, embeddings):
    """Zeros in a tenth of the weights may be rows of tokens that do not occur."""
    rng, dense, sparse = np.random.default_rng(0), tmp_path / "dense.gguf", tmp_path / "sparse.gguf"
    tensors = {EMBEDDINGS: 0.91, "blk.0.attn_q.weight": 0.5}
    generators.write_gguf(dense, {n: (generators.random_bits(rng, 64, 96, d), 1) for n, d in tensors.items()})
    assert macko("convert", dense, sparse, kind).code == 0
    assert sparse_names(sparse) == {"blk.0.attn_q.weight"}
    stored = next(t for t in gguf.GGUFReader(sparse).tensors if t.name == EMBEDDINGS)
    assert stored.tensor_type.name.lower() == embeddings.replace("dense", "f16")
    done = macko("convert", dense, sparse, kind, "--tensor-type", f"{EMBEDDINGS}={kind}", "--force")
    assert done.code == 0 and "stays dense: it is not pruned" in done.err
    (planned,) = (t for t in ggml_macko.plan(dense, types=[kind]).types if t.type == kind)
    assert planned.n_sparse == 1


def test_pruned_embeddings_are_no_part_of_the_search_for_a_size(macko, tmp_path):
    pruned, sparse = prune_embeddings(macko, generators.DEMO, tmp_path), tmp_path / "sparse.gguf"
    assert macko("convert", pruned, sparse, "--target-bpw", "7").code == 0
    with File(sparse) as f:
        (embeddings,) = (m for m in f.sparse() if m.name == EMBEDDINGS)
    assert embeddings.value_type in (embeddings.type, TYPE_CODED)  # lossless


def test_link_has_the_sparse_embeddings(macko, tmp_path):
    pruned, sparse = prune_embeddings(macko, generators.DEMO, tmp_path), tmp_path / "sparse.gguf"
    assert macko("convert", pruned, sparse).code == 0 and macko("link", sparse).code == 0
    code = """
import sys, llama_cpp
llama_cpp.llama_cpp._lib.ggml_backend_load_all()
llama = llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False)
print(llama(sys.argv[-1], max_tokens=8, temperature=0)["choices"][0]["text"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "sparse.link.gguf", PROMPT], capture_output=True, text=True,
        env={**os.environ, "GGML_BACKEND_PATH": str(library.LIBRARY_PATH)},
    )  # fmt: skip
    assert done.stdout == greedy(open_model(pruned), 8, PROMPT) + "\n", done.stderr


BESIDE_A_GPU = """
import ctypes, sys
import llama_cpp.llama_cpp as api
from ggml_macko import Llama
base, loader = ctypes.CDLL("libggml-base.so.0"), ctypes.CDLL("libggml.so.0")
text = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(lambda _: b"OTHER")
kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 1)  # a GPU
pointer = lambda function: ctypes.cast(function, ctypes.c_void_p).value
reg = (ctypes.c_void_p * 6)(2, pointer(text))  # api_version, get_name
device = (ctypes.c_void_p * 17)(pointer(text), pointer(text), None, pointer(kind))
device[15] = ctypes.addressof(reg)
loader.ggml_backend_device_register.argtypes = [ctypes.c_void_p]
if sys.argv[2] == "gpu":
    loader.ggml_backend_device_register(ctypes.addressof(device))
none = (ctypes.c_void_p * 1)(None)
default = api.llama_model_default_params
def params():
    p = default()
    p.devices = ctypes.cast(none, ctypes.c_void_p)
    return p
api.llama_model_default_params = params
llama = Llama(sys.argv[1], n_ctx=64, verbose=True)
print(llama(sys.argv[-1], max_tokens=8, temperature=0)["choices"][0]["text"])
"""


@pytest.mark.parametrize("beside", ["gpu", "none"])
def test_tied_embeddings_are_dense_beside_a_gpu_of_another_backend(macko, tmp_path, beside):
    """llama.cpp may create a second tensor on that GPU, which would read the placeholder of a claimed one."""
    pruned, sparse = prune_embeddings(macko, generators.DEMO, tmp_path), tmp_path / "sparse.gguf"
    assert macko("convert", pruned, sparse).code == 0
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_A_GPU, sparse, beside, PROMPT], capture_output=True, text=True, errors="replace"
    )
    assert done.stdout == greedy(open_model(pruned), 8, PROMPT) + "\n", done.stderr[-3000:]
    assert ("1 of 29 sparse tensors became dense" in done.stderr) == (beside == "gpu"), done.stderr[-3000:]
