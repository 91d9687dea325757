"""Training with the values of dense types: blocks are ggml's, scales are as good, and the written file has them."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from ggml_macko.benchmark.forms import quantize
from ggml_macko.codecs import dense_blocks, ggml_quants
from ggml_macko.codecs.dense_blocks import LAYOUTS, NAMES, pack
from ggml_macko.gguf.files import Model
from ggml_macko.values import TYPE_F32
from support import generators, gguf_bytes, tiny_models

torch = pytest.importorskip("torch", reason="no PyTorch: pip install 'ggml-macko[train]'")


def weights(rng, rows=48, cols=512):
    """Like those of a model; some parts are zero, constant, of one sign or far larger than the others."""
    w = (rng.standard_t(5, (rows, cols)) * 0.02).astype(np.float32)
    w[0], w[1, :300], w[2, 100:200], w[3, 256:] = 0, -0.01, 0.5, np.abs(w[3, 256:])
    w[4, 7] = 3.0
    return w


def values_of(blocks, w):
    """The trained values, and those of ggml for the packed blocks."""
    values = blocks.values(torch.from_numpy(w).reshape(-1))
    return values.numpy().reshape(w.shape), ggml_quants.dequantize(blocks.packed(values), blocks.layout.type, *w.shape)


@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_blocks_have_the_values_that_ggml_reads(name):
    layout, rng = LAYOUTS[name], np.random.default_rng(1)
    n, n_kinds = 50, 1 + layout.has_smallest
    q = rng.integers(layout.numbers[0], layout.numbers[1] + 1, (n, layout.block), dtype=np.int8)
    factors = rng.normal(size=(n, n_kinds)).astype(np.float16)
    parts = layout.block // layout.part
    multiples = rng.integers(layout.multiples[0], layout.multiples[1] + 1, (n, parts, n_kinds), dtype=np.int32)
    found = ggml_quants.dequantize(pack(layout, q, factors, multiples), layout.type, n, layout.block)
    scales = factors.astype(np.float32)[:, None] * multiples.astype(np.float32)
    want = scales[:, :, :1] * q.reshape(n, parts, layout.part)
    if layout.has_smallest:
        want -= scales[:, :, 1:]
    assert np.array_equal(found, want.reshape(n, -1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_scales_are_as_good_as_those_of_ggml(name):
    """At the start of a training: the squared error is at most 5 % larger."""
    from ggml_macko.recovery.dense_weights import DenseBlocks

    w = weights(np.random.default_rng(2))
    found, of_ggml = values_of(DenseBlocks(torch.from_numpy(w).reshape(-1), LAYOUTS[name]), w)
    assert np.array_equal(found, of_ggml) and not found[0].any()
    bits = w.view(np.uint32)
    theirs = ggml_quants.dequantize(
        ggml_quants.quantize(bits, TYPE_F32, LAYOUTS[name].type), LAYOUTS[name].type, *w.shape
    )
    errors = [np.square(x - w)[5:].sum() for x in (found, theirs)]
    assert errors[0] < 1.05 * errors[1]  # .78 (q2_k) to 1.03 (q4_k)


@pytest.mark.parametrize("name", LAYOUTS)
def test_scales_follow_the_weights(name):
    """As well as a new search, and in a checkpoint."""
    from ggml_macko.recovery.dense_weights import DenseBlocks

    rng = np.random.default_rng(3)
    w = weights(rng)
    blocks = DenseBlocks(torch.from_numpy(w).reshape(-1), LAYOUTS[name])
    for _ in range(40):
        w += rng.normal(size=w.shape).astype(np.float32) * np.float32(5e-4)
        blocks.follow(torch.from_numpy(w).reshape(-1))
    found, of_ggml = values_of(blocks, w)
    fresh, _ = values_of(DenseBlocks(torch.from_numpy(w).reshape(-1), LAYOUTS[name]), w)
    assert np.array_equal(found, of_ggml)
    assert np.square(found - w).sum() < 1.05 * np.square(fresh - w).sum()
    other = DenseBlocks(torch.from_numpy(w).reshape(-1) * 2, LAYOUTS[name])
    other.scale.copy_(blocks.scale)
    other.table.copy_(blocks.table)
    assert np.array_equal(values_of(other, w)[0], found)


# ---- the command ----


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model whose rows have blocks of 256."""
    monkeypatch.setattr(tiny_models, "N_EMBD", 256)
    monkeypatch.setattr(tiny_models, "N_EMBD_HEAD", 64)
    path = tmp_path / "dense.gguf"
    path.write_bytes(gguf_bytes.write(tiny_models.make("llama")))
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(np.random.default_rng(2).choice(["ab ", "a ", "b ab", "\n"], 1500)))
    return path


def recover(macko, source, text, out, *more):
    return macko("recover", source, out, "--dense", source, "-f", text, "-c", 32, "-t", 1, "--json", *more)


@pytest.mark.parametrize("name", NAMES)
def test_trained_file_is_better_than_a_quantized_one(tmp_path, macko, model, text, name):
    """It has the type, llama.cpp loads it, and the reported figures are those of its values."""
    from ggml_macko.evaluation import perplexity

    out, base, theirs = (tmp_path / n for n in ("out.gguf", "base.kld", "theirs.gguf"))
    done = recover(
        macko, model, text, out, "--epochs", 1, "--chunks", 96, "--learning-rate", "5e-3", "--quant-values", name
    )
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert 0 < report["divergence_after"] < 0.9 * report["divergence_before"]
    with Model(model) as before, Model(out) as after:
        assert report["n_trained"] == sum(t.n_elements for t in before.tensors if t.name.startswith("blk."))
        for a, b in zip(before.tensors, after.tensors):
            is_matrix = a.name.startswith("blk.") and len(a.ne) > 1
            assert b.type == (dense_blocks.layout_of(name, a.name, a.cols).type if is_matrix else a.type), a.name
        assert {t.type for t in after.tensors} > {LAYOUTS[name.partition("-")[2]].type}
    perplexity.perplexity(model, text, n_ctx=32, n_gpu_layers=0, kl_divergence_base=base)
    quantize(model, theirs, {"dense-q4_0": "Q4_0", "dense-q2_k": "Q2_K"}.get(name, name[6:].upper() + "_S"), 1)
    klds = [perplexity.kl_divergence(path, base, n_gpu_layers=0).kld.value for path in (out, theirs)]
    assert klds[0] < klds[1]


def test_quantized_start_counts_and_not_the_source(tmp_path, macko, model, text):
    """With a rate that ruins the model, the file has the quantized weights before the training, and a warning."""
    out = tmp_path / "out.gguf"
    options = ["--epochs", 1, "--chunks", 12, "--learning-rate", "0.9", "--quant-values", "dense-q4_k"]
    done = recover(macko, model, text, out, *options)
    assert done.code == 0 and "no evaluation was better than the quantized model" in done.err, done.err
    report = json.loads(done.out)
    assert (
        report["divergence_after"] == pytest.approx(report["divergence_before"], rel=1e-3)
        and report["divergence_after"] > 0
    )


def test_columns_without_blocks_are_refused(tmp_path, macko, text, monkeypatch):
    monkeypatch.setattr(tiny_models, "N_FF", 80)
    model = tmp_path / "dense.gguf"
    model.write_bytes(gguf_bytes.write(tiny_models.make("llama")))
    done = recover(macko, model, text, tmp_path / "out.gguf", "--quant-values", "dense-q4_k")
    message = "dense.gguf: blk.0.ffn_down.weight: 80 columns are no multiple of 32"
    assert done.code == 1 and message in done.err and not (tmp_path / "out.gguf").exists(), done.err


def test_dense_types_need_distillation(tmp_path, macko, model, text):
    done = recover(macko, model, text, tmp_path / "out.gguf", "--method", "blocks", "--quant-values", "dense-q4_0")
    assert done.code == 2 and "--quant-values dense-q4_0 does not go with --method blocks" in done.err


def test_contest_compares_trained_dense_and_sparse_types(tmp_path, model, text):
    """lab/scripts/contest.py; a second run keeps the files."""
    tool = generators.ROOT / "lab" / "scripts" / "contest.py"
    small = {
        "--prune": "--method magnitude",
        "--recover": "-c 32 --chunks 24 --epochs 1 --learning-rate 5e-3 -t 1",
        "--report": "-c 32 --chunks 10 -p 4 -n 4 -r 1 -t 1",
        "--dense": "q2_k", "--sparse": "q4", "--sparsities": "0.5", "--target-bpw": "8", "--types": "Q8_0",
    }  # fmt: skip
    command = [sys.executable, tool, model, "-f", text, "--held-out", text, "-o", tmp_path / "out"]
    command += [word for option in small.items() for word in option]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == ["dense", "Q8_0", "trained-q2_k", "s50-q4", "s50-8bpw"]
    assert all(row[7] and float(row[5]) >= 0 for row in rows[2:]) and float(rows[2][5]) == 0
    training = json.loads((tmp_path / "out" / "training.json").read_text())
    assert [t["n_tokens"] for t in training.values()] == [training["dense-q2_k"]["n_tokens"]] * 3
    again = subprocess.run(list(map(str, [*command, "--no-report"])), capture_output=True, text=True)
    assert again.returncode == 0 and "$ macko" not in again.stderr
