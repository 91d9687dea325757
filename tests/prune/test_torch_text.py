"""Calibration text evaluated by PyTorch: the statistics are llama.cpp's. On the CPU here, where arrays are NumPy's."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math

import numpy as np
import pytest

from ggml_macko import system
from ggml_macko.gguf.files import Model
from ggml_macko.gguf.outputs import AtomicOutput
from ggml_macko.pruning import allocation, hessians, layerwise, torch_text
from ggml_macko.pruning.options import ParsedOptions
from ggml_macko.pruning.prune import tensors_to_prune
from ggml_macko.pruning.working_copy import TensorFile
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


def session_on_cpu(options):
    import torch

    return torch_text.Session(options, torch.device("cpu"))


def gather_on_cpu(path, consumer, options):
    return session_on_cpu(options).gather([torch_text.Reader(path, consumer)])


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
    names = {f"blk.0.attn_{x}.weight" for x in ("q", "k", "v", "output")}
    session = session_on_cpu(options)
    for _ in range(2):
        found = hessians.Hessians(names)
        assert session.gather([torch_text.Reader(path, found)]) == 5
        assert set(found._owner) == names
        weights = session._kept[path].model.weights
        for name in ("attn_output", "ffn_norm", "ffn_up"):  # a product with one of them would fail in the second pass
            weights[f"blk.0.{name}.weight"] = weights[f"blk.0.{name}.weight"][..., :1]


@needs_torch
@pytest.mark.parametrize("arch", SUPPORTED)
def test_weights_of_a_pass_share_one_input(tmp_path, text, arch):
    """As in llama.cpp, which multiplies with q, v and k, in this order; PyTorch with q, k and v."""
    path, options = make(tmp_path / "model.gguf", arch), options_for(text)
    with Model(path) as m:
        groups = layerwise.passes_by_input(path, tensors_to_prune(m), options)
    assert {len(group) for group in groups} == ({1, 3} if arch == "arcee" else {1, 2, 3})  # arcee has no gate
    session = session_on_cpu(options)
    for group in groups:
        found = hessians.Hessians({t.name for t in group})
        assert session.gather([torch_text.Reader(path, found)]) == 5
        assert set(found._owner) == {t.name for t in group} and len(found._sums) == 1


@needs_torch
@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
def test_passes_continue_from_a_block_with_the_same_results(tmp_path, text, arch, monkeypatch):
    """As passes that read the models and begin with the first block, while the copy is pruned."""
    from ggml_macko.evaluation.transformer import Transformer

    monkeypatch.setattr(torch_text, "_N_TOKENS", 64)  # 3 batches
    evaluated, block = [], Transformer.block
    monkeypatch.setattr(Transformer, "block", lambda m, i, x: evaluated.append(i) or block(m, i, x))
    path, copy, options = make(tmp_path / "model.gguf", arch), make(tmp_path / "copy.gguf", arch), options_for(text)
    session = session_on_cpu(options)

    def run(group, session):
        evaluated.clear()
        dense = hessians.DenseInputs(group[0].name)
        found = hessians.Hessians({t.name for t in group}, dense=dense)
        assert session.gather([torch_text.Reader(path, dense), torch_text.Reader(copy, found)]) == 5
        assert len(found._sums) == len(found._differences) == 1
        return [next(iter(h.values())) for h in (found._sums, found._differences)]

    with Model(path) as m, contextlib.closing(TensorFile(copy)) as file:
        groups = layerwise.passes_by_input(path, tensors_to_prune(m), options)
        run(groups[0], session_on_cpu(options))  # compares the logits with llama.cpp's
        reached = 0
        for group in groups:
            layer = allocation.block_of(group[0].name)
            found = run(group, session)
            assert set(evaluated) - {reached} <= {layer} and len(evaluated) == 6 * (layer - reached + 1)
            reached = layer
            for limit in (math.inf, 0):
                monkeypatch.setattr(torch_text, "free_memory", lambda options, limit=limit: limit)
                another = session_on_cpu(options)
                for _ in range(2):
                    assert all(map(np.array_equal, found, run(group, another)))
                assert set(another._kept) == ({path, copy} if limit else set())
                assert len(evaluated) == 6 * (1 if limit else layer + 1)
            for t in group:
                bits = t.read_bits()
                bits[:, ::2] = 0
                file.write(t, bits)
                session.renew(copy, t, bits)
        # a weight behind the block that was reached
        assert reached > 0 and all(
            map(np.array_equal, run(groups[0], session), run(groups[0], session_on_cpu(options)))
        )
        assert any(map(np.any, run(groups[-1], session)))


@needs_torch
def test_differences_are_those_of_llama_cpp(tmp_path, text, macko):
    """Of the inputs in the dense model and in a pruned one."""
    path, options = make(tmp_path / "model.gguf", "llama"), options_for(text)
    pruned, name = tmp_path / "pruned.gguf", "blk.1.ffn_down.weight"
    assert macko("prune", path, pruned, "--sparsity", "0.6").code == 0
    found = []
    for on_cpu in (True, False):
        dense = hessians.DenseInputs(name)
        found.append(hessians.Hessians({name}, dense=dense))
        if on_cpu:
            session = session_on_cpu(options)
            assert session.gather([torch_text.Reader(path, dense), torch_text.Reader(pruned, found[0])]) == 5
        else:
            session = torch_text.Session(options)
            assert layerwise.gather_pairs(path, dense, pruned, found[1], options, session, until=name) == 5
    got, want = (next(iter(h._differences.values())) for h in found)
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()


@needs_torch
def test_command_with_targets_prunes_as_with_llama_cpp(tmp_path, text, macko, monkeypatch):
    """Up to weights whose scores are close."""
    path, outputs = make(tmp_path / "model.gguf", "llama"), [tmp_path / "theirs.gguf", tmp_path / "ours.gguf"]
    args = ["--sparsity", "0.5", "--method", "alps", "--asymmetric", "0.5", "-f", text, "--chunks", "5", "-c", "32"]
    with monkeypatch.context() as without_torch:
        without_torch.setattr(torch_text, "device_for", lambda options: None)
        assert macko("prune", path, outputs[0], *args).code == 0
    passes, gather = [], torch_text.Session.gather
    args += ["--device", "none"]
    monkeypatch.setattr(torch_text.Session, "gather", lambda *a: passes.append(gather(*a)) or passes[-1])
    done = macko("prune", path, outputs[1], *args)
    assert done.code == 0, done.err
    with Model(outputs[0]) as theirs, Model(outputs[1]) as ours:
        tensors = tensors_to_prune(theirs)
        assert passes == [5] * (4 * len(tensors) // 7)  # one for each input
        masks = [[t.read_bits() != 0 for t in tensors_to_prune(m)] for m in (theirs, ours)]
    for a, b in zip(*masks):
        assert a.sum() == b.sum() and (a == b).mean() > 0.98


@needs_torch
def test_cpu_evaluates_only_what_many_passes_read_and_memory_holds(tmp_path, text, monkeypatch):
    path, once = make(tmp_path / "model.gguf", "llama"), options_for(text)
    assert torch_text.device_for(once) is None
    names = {"blk.0.attn_q.weight"}
    for change in ({"sequential": True}, {"asymmetric": 0.5}, {"allocation": "loss"}):
        options = dataclasses.replace(once, **change)
        with Model(path) as m:
            need = 8 * sum(t.n_elements for t in m.tensors)
        for memory, wanted in ((need - 1, None), (need, 5)):
            monkeypatch.setattr(system, "total_memory", lambda memory=memory: memory)
            assert torch_text.Session(options).gather([torch_text.Reader(path, hessians.Hessians(names))]) == wanted


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
    path, options = make(tmp_path / "model.gguf", "llama"), options_for(text)
    with Model(path) as m, AtomicOutput(tmp_path / "copy.gguf", [], force=True) as output:
        ours = session_on_cpu(options).losses(path, layerwise.N_LOSS_CHUNKS)
        theirs = layerwise._Losses(m, options, output)
        assert ours.dense == pytest.approx(theirs.dense, rel=1e-4)
        for t in tensors_to_prune(m)[:3]:
            bits = t.read_bits()
            bits[::2] = 0
            got, want = (losses.with_weights(t, bits) for losses in (ours, theirs))
            assert got == pytest.approx(want, rel=1e-4) and abs(got - ours.dense) > 1e-3 * got
        for t in tensors_to_prune(m):
            bits = t.read_bits()
            bits[::2] = 0
            found = ours.with_weights(t, bits)
            dense = ours._evaluation.renew(t, bits)
            assert ours._measure(0) == found
            ours._evaluation.model.weights[t.name] = dense
        assert ours._measure(0) == ours.dense  # the weights are back
        theirs.close()


@needs_torch
@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
def test_losses_do_not_depend_on_the_chunks_of_an_evaluation(tmp_path, text, arch, monkeypatch):
    """Up to the rounding of products with more rows."""
    path, options = make(tmp_path / "model.gguf", arch), options_for(text)
    losses = []
    for n_tokens in (32, 64, torch_text._N_TOKENS):  # 1, 2 and all 5 chunks
        monkeypatch.setattr(torch_text, "_N_TOKENS", n_tokens)
        of = session_on_cpu(options).losses(path, layerwise.N_LOSS_CHUNKS)
        assert len(of._evaluation.batches) == max(1, math.ceil(5 * 32 / n_tokens))
        losses.append([of.dense])
        with Model(path) as m:
            for t in tensors_to_prune(m):
                bits = t.read_bits()
                bits[::2] = 0
                losses[-1].append(of.with_weights(t, bits))
    assert np.ptp(losses[0]) > 1e-3
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-6)


@needs_torch
@pytest.mark.parametrize("n_tokens", [5, 32])
def test_divergence_of_some_tokens_at_a_time_is_that_of_all(tmp_path, text, monkeypatch, n_tokens):
    import torch

    from ggml_macko.evaluation import transformer
    from ggml_macko.evaluation.text_model import TextModel

    path = make(tmp_path / "model.gguf", "llama")
    with Model(path) as m:
        model = transformer.Transformer(transformer.Shape.of(m), transformer.read_weights(m, torch.device("cpu")))
    model.weights["output_norm.weight"] *= 1.5  # the logits differ
    with TextModel(path, 32, n_batch=32) as llama:
        chunk = llama.read_chunks(text, 1)
        expected = torch.from_numpy(np.array(llama.evaluate(chunk)))
        tokens = torch.from_numpy(llama.as_sequences(chunk).astype(np.int64))
        want = transformer.divergence(model.logits(tokens), expected)
        monkeypatch.setattr(transformer, "_CHECKED_TOKENS", n_tokens)
        found = transformer.divergence_from_llama_cpp(llama, model, chunk, torch.device("cpu"))
    assert float(want) > 1e-3 and found == pytest.approx(float(want), rel=1e-5)
