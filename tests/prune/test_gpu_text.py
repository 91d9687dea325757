"""Calibration text evaluated by PyTorch: the statistics are llama.cpp's. On the CPU here, where arrays are NumPy's."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from ggml_macko.gguf.files import Model
from ggml_macko.gguf.outputs import AtomicOutput
from ggml_macko.pruning import gpu_text, hessians, layerwise
from ggml_macko.pruning.options import ParsedOptions
from ggml_macko.pruning.prune import tensors_to_prune
from support import gguf_bytes, tiny_models
from support.pruning import SUPPORTED

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no PyTorch")


def make(path, arch):
    path.write_bytes(gguf_bytes.write(tiny_models.make(arch)))
    return path


def options_for(text):
    return ParsedOptions(
        sparsity=0, method="alps", compare_within="tensor", text=str(text), n_chunks=5, n_ctx=32, device="none"
    )


def gather_on_cpu(path, consumer, options, until=""):
    import torch

    return gpu_text.gather_on(torch.device("cpu"), [gpu_text.Reader(path, consumer)], options, until=until)


@needs_torch
@pytest.mark.parametrize("arch", SUPPORTED)
def test_statistics_are_those_of_llama_cpp(tmp_path, text, arch):
    path, options = make(tmp_path / "model.gguf", arch), options_for(text)
    with Model(path) as m:
        tensors = tensors_to_prune(m)
    names = {t.name for t in tensors}
    ours, theirs = hessians.Hessians(names), hessians.Hessians(names)
    assert gather_on_cpu(path, ours, options) == 5
    assert layerwise.gather(path, options, theirs, n_chunks=5) == 5
    for t in tensors:
        got, want = (h.get(t.name, 0, t.cols) for h in (ours, theirs))
        assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()  # llama.cpp rounds activations to F16
    sums, expected = layerwise._SquareSumsOf(names), layerwise._SquareSumsOf(names)
    gather_on_cpu(path, sums, options)
    layerwise.gather(path, options, expected, n_chunks=5)
    for name, found in expected.entries().items():
        assert np.array_equal(sums.entries()[name].counts, found.counts)
        # the square of a ReLU is small where its input nearly cancels, and then has no relative precision
        np.testing.assert_allclose(sums.entries()[name].sums, found.sums, rtol=0.05, atol=1e-9 * found.sums.max())


@needs_torch
def test_nothing_is_evaluated_after_the_last_weight_that_is_wanted(tmp_path, text):
    path, options = make(tmp_path / "model.gguf", "llama"), options_for(text)
    with Model(path) as m:
        names = [t.name for t in tensors_to_prune(m)]
    found = hessians.Hessians(set(names))
    gather_on_cpu(path, found, options, until="blk.0.attn_output.weight")
    assert set(found._owner) == {f"blk.0.attn_{x}.weight" for x in ("q", "k", "v", "output")}


@needs_torch
@pytest.mark.parametrize("arch", SUPPORTED)
def test_last_weight_of_a_pass_brings_all_that_read_its_input(tmp_path, text, arch):
    """llama.cpp multiplies with q, v and k, in this order; PyTorch with q, k and v."""
    path, options = make(tmp_path / "model.gguf", arch), options_for(text)
    with Model(path) as m:
        groups = layerwise.passes_by_input(path, tensors_to_prune(m), options)
    assert {len(group) for group in groups} == ({1, 3} if arch == "arcee" else {1, 2, 3})  # arcee has no gate
    for group in groups:
        for last in group:
            found = hessians.Hessians({t.name for t in group})
            gather_on_cpu(path, found, options, until=last.name)
            assert set(found._owner) == {t.name for t in group} and len(found._sums) == 1


@needs_torch
def test_differences_are_those_of_llama_cpp(tmp_path, text, macko):
    """Of the inputs in the dense model and in a pruned one."""
    import torch

    path, options = make(tmp_path / "model.gguf", "llama"), options_for(text)
    pruned, name = tmp_path / "pruned.gguf", "blk.1.ffn_down.weight"
    assert macko("prune", path, pruned, "--sparsity", "0.6").code == 0
    found = []
    for on_cpu in (True, False):
        dense = hessians.DenseInputs(name)
        found.append(hessians.Hessians({name}, dense=dense))
        if on_cpu:
            readers = [gpu_text.Reader(path, dense), gpu_text.Reader(pruned, found[0])]
            assert gpu_text.gather_on(torch.device("cpu"), readers, options, until=name) == 5
        else:
            layerwise.gather_pairs(path, dense, pruned, found[1], options, until=name)
    got, want = (next(iter(h._differences.values())) for h in found)
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()


@needs_torch
def test_command_with_targets_prunes_as_with_llama_cpp(tmp_path, text, macko, monkeypatch):
    """Up to weights whose scores are close."""
    import torch

    path, outputs = make(tmp_path / "model.gguf", "llama"), [tmp_path / "theirs.gguf", tmp_path / "ours.gguf"]
    args = ["--sparsity", "0.5", "--method", "alps", "--asymmetric", "0.5", "-f", text, "--chunks", "5", "-c", "32"]
    assert macko("prune", path, outputs[0], *args).code == 0
    passes, gather_on = [], gpu_text.gather_on
    monkeypatch.setattr(gpu_text, "device_for", lambda options: torch.device("cpu"))
    monkeypatch.setattr(gpu_text, "gather_on", lambda *a, **k: passes.append(gather_on(*a, **k)) or passes[-1])
    done = macko("prune", path, outputs[1], *args)
    assert done.code == 0, done.err
    with Model(outputs[0]) as theirs, Model(outputs[1]) as ours:
        tensors = tensors_to_prune(theirs)
        assert passes == [5] * (4 * len(tensors) // 7)  # one for each input
        masks = [[t.read_bits() != 0 for t in tensors_to_prune(m)] for m in (theirs, ours)]
    for a, b in zip(*masks):
        assert a.sum() == b.sum() and (a == b).mean() > 0.98


@needs_torch
def test_model_whose_logits_are_others_is_left_to_llama_cpp(tmp_path, text, monkeypatch):
    from ggml_macko.evaluation import transformer

    monkeypatch.setattr(transformer, "_NEOX", {"llama"})
    path = make(tmp_path / "model.gguf", "llama")
    found = hessians.Hessians({"blk.0.attn_q.weight"})
    assert gather_on_cpu(path, found, options_for(text)) is None and not found._owner
    monkeypatch.undo()
    assert gather_on_cpu(make(path, "llama"), found, options_for(text)) == 5


@needs_torch
@pytest.mark.parametrize("arch", ["llama-moe", "phi3"])
def test_other_models_are_left_to_llama_cpp(tmp_path, text, arch):
    path = make(tmp_path / "model.gguf", arch)
    with Model(path) as m:
        found = hessians.Hessians({t.name for t in tensors_to_prune(m)})
    assert gather_on_cpu(path, found, options_for(text)) is None and not found._owner


@needs_torch
def test_losses_are_those_of_llama_cpp(tmp_path, text):
    import torch

    path, options = make(tmp_path / "model.gguf", "llama"), options_for(text)
    with Model(path) as m, AtomicOutput(tmp_path / "copy.gguf", [], force=True) as output:
        ours = gpu_text.open_losses_on(torch.device("cpu"), m, options, layerwise.N_LOSS_CHUNKS)
        theirs = layerwise._Losses(m, options, output)
        assert ours.dense == pytest.approx(theirs.dense, rel=1e-4)
        for t in tensors_to_prune(m)[:3]:
            bits = t.read_bits()
            bits[::2] = 0
            got, want = (losses.with_weights(t, bits) for losses in (ours, theirs))
            assert got == pytest.approx(want, rel=1e-4) and abs(got - ours.dense) > 1e-3 * got
        assert ours._measure() == ours.dense  # the weights are back
        theirs.close()
