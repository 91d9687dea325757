"""The functions of the package match the subcommands of `macko`."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import ggml_macko
from ggml_macko import ConvertOptions, PruneOptions, console, errors
from support import generators

RESULTS = {
    "convert": "ConversionReport",
    "restore": "RestorationReport",
    "verify": "Verification",
    "inspect": "ModelReport",
    "plan": "ModelPlan",
    "prune": "PruneReport",
    "recover": "RecoverReport",
    "calibrate": "Calibration",
    "decompress": "Decompression",
    "perplexity": "Estimate",
    "kl_divergence": "Divergence",
}


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_function_states_its_arguments_errors_and_result(name):
    function = getattr(ggml_macko, name)
    signature = inspect.signature(function)
    assert signature.return_annotation == RESULTS[name]
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())
    assert "Raises" in function.__doc__ and "MackoError" in function.__doc__
    for p in list(signature.parameters.values())[3:]:  # paths and the type may be positional
        shared = p.kind is inspect.Parameter.VAR_KEYWORD and p.annotation == "Unpack[EvaluationOptions]"
        assert shared or p.kind is inspect.Parameter.KEYWORD_ONLY, p


@pytest.mark.parametrize("name", sorted(set(RESULTS.values())))
def test_result_is_a_frozen_dataclass(name):
    result = getattr(ggml_macko, name)
    assert dataclasses.is_dataclass(result) and result.__dataclass_params__.frozen


def test_every_public_name_exists():
    assert sorted(ggml_macko.__all__) == ggml_macko.__all__
    for name in ggml_macko.__all__:
        assert getattr(ggml_macko, name) is not None
    assert set(ggml_macko.__all__) <= set(dir(ggml_macko))


def test_prune_convert_verify_restore(tmp_path, tiny, capsys):
    pruned, sparse, dense = (tmp_path / name for name in ("pruned.gguf", "sparse.gguf", "dense.gguf"))
    with console.quiet():
        ggml_macko.prune(tiny, pruned, PruneOptions(sparsity=0.7))
        plan = ggml_macko.convert(pruned, None, "auto")
        options = ConvertOptions(overrides=[("attn_q", "packed"), ("attn_k", "dense")], keep_negative_zeros=True)
        done = ggml_macko.convert(pruned, sparse, "auto", options=options)
        assert ggml_macko.verify(pruned, sparse).is_identical
        restored = ggml_macko.restore(sparse, dense)
    assert capsys.readouterr() == ("", "")
    assert plan.path is None and plan.n_sparse > done.n_sparse > 0
    assert done.path == sparse and sparse.stat().st_size == done.nbytes < done.nbytes_source
    storage = {t.name: t.storage for t in done.tensors}
    assert storage["blk.0.attn_q.weight"].startswith("packed") and storage["blk.0.attn_k.weight"] == "dense"
    assert generators.dense_bytes(dense) == generators.dense_bytes(pruned)
    assert not restored.was_dense and restored.nbytes == dense.stat().st_size
    report = ggml_macko.inspect(sparse)
    assert {t.name: t.storage for t in report.tensors} == storage
    assert report.n_sparse == done.n_sparse and report.n_parameters == done.n_parameters


def test_difference_is_a_result_and_no_error(tmp_path, tiny):
    pruned = tmp_path / "pruned.gguf"
    with console.quiet():
        ggml_macko.prune(tiny, pruned, PruneOptions(sparsity=0.9))
    found = ggml_macko.verify(tiny, pruned, metadata=False)
    assert not found.is_equal and not found.is_identical
    assert found.difference.startswith("blk.0.attn_q.weight: first difference at row 0, column ")


def test_output_that_exists_is_refused_without_force(tmp_path, tiny):
    out = tmp_path / "out.gguf"
    out.write_bytes(b"mine")
    with console.quiet():
        for function in (ggml_macko.convert, ggml_macko.restore):
            with pytest.raises(errors.ArgumentError, match="exists"):
                function(tiny, out)
            assert out.read_bytes() == b"mine"
        assert ggml_macko.convert(tiny, out, force=True).nbytes == out.stat().st_size


def test_wrong_option_names_the_choices(tmp_path, tiny):
    with pytest.raises(errors.ArgumentError, match="unknown type 'csr'; did you mean ec-csr\\?; known: macko, "):
        ggml_macko.convert(tiny, None, "csr")
