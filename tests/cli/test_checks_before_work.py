"""Inputs are checked before anything is pruned, quantized or measured, and names from the user must exist: a typo
costs no time and is never ignored.
"""

from __future__ import annotations

import re

import pytest

from ggml_macko import ConvertOptions, PruneOptions, convert, errors, prune
from ggml_macko.benchmark import forms
from ggml_macko.evaluation import text_model
from ggml_macko.gguf.files import Model
from ggml_macko.native import codec as native_codec
from support import generators
from support.generators import DEMO

SAMPLE = DEMO.parent / "sample.txt"


# ---- names of tensors ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--tensor-sparsity", "ffn_dwon_exps=0.7"],
            "ffn_dwon_exps=0.7: no tensor has such a name; did you mean ffn_down",
        ),
        (["--tensor-sparsity", r"blk\.0\.atn_q=0.7"], "did you mean blk.0.attn_q.weight, "),
        (
            ["--tensor-sparsity", "token_embd=0.7"],
            "token_embd=0.7: token_embd.weight is not pruned; see --include-weights",
        ),
        (["--exclude-weights", "atn_k"], "--exclude-weights atn_k: no tensor has such a name; did you mean attn_k"),
        (["--include-weights", "attn_q", "--include-weights", "ffn_upexps"], "--include-weights ffn_upexps: no tensor"),
        (["--include-weights", "xyzzy"], "--include-weights xyzzy: no tensor has such a name\n"),
    ],
)
def test_prune_refuses_a_pattern_that_no_name_matches(tmp_path, tiny, macko, options, message):
    done = macko("prune", tiny, tmp_path / "out.gguf", "--sparsity", "0.5", *options)
    assert done.code == 1 and message in done.err and done.err.count("\n") == 1, done.err
    assert done.out == "" and not (tmp_path / "out.gguf").exists()
    assert macko("prune", tiny, "--dry-run", "--sparsity", "0.5", *options).err == done.err


def test_convert_refuses_a_pattern_that_no_name_matches(tmp_path, tiny, macko):
    done = macko(
        "convert", tiny, tmp_path / "out.gguf", "--tensor-type", "attn_q=macko", "--tensor-type", "ffn_pu=dense"
    )
    assert done.code == 1 and not (tmp_path / "out.gguf").exists()
    assert "--tensor-type ffn_pu=dense: no tensor has such a name; did you mean ffn_up?" in done.err
    done = macko("convert", tiny, tmp_path / "out.gguf", "--tensor-type", "gate_inp=macko")
    assert done.code == 1
    assert "gate_inp=macko: blk.0.ffn_gate_inp.weight cannot be sparse: llama.cpp does not only" in done.err
    with pytest.raises(errors.ArgumentError, match="no tensor has such a name"):
        convert(tiny, None, options=ConvertOptions(overrides={"ffn_pu": "dense"}))
    with pytest.raises(errors.ArgumentError, match="no tensor has such a name"):
        prune(tiny, None, PruneOptions(sparsity=0.5, exclude=["ffn_pu"]))


# ---- numbers and types ----


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("50", "; did you mean 0.5?"),
        ("50%", "; did you mean 0.5?"),
        ("33.3", "; did you mean 0.333?"),
        ("500", ""),
        ("-1", ""),
    ],
)
def test_sparsity_in_per_cent_gets_the_number_that_was_meant(tmp_path, tiny, macko, value, hint):
    done = macko("prune", tiny, tmp_path / "out.gguf", f"--sparsity={value}")
    assert done.code == 2 and done.err == f"error: --sparsity {value}: expected a number from 0 to 1{hint}\n"
    done = macko("prune", tiny, tmp_path / "out.gguf", "--sparsity", "0.5", "--tensor-sparsity", f"attn={value}")
    assert done.code == 2 and done.err.endswith(f"expected a number from 0 to 1{hint}\n")


# ---- a size to reach ----


def test_unreachable_target_is_refused_before_the_search(tmp_path, macko, monkeypatch):
    def searched(*unused, **more):
        raise AssertionError("types were tried")

    with monkeypatch.context() as m:
        m.setattr(native_codec, "measure_error", searched)
        done = macko("convert", DEMO, tmp_path / "x.gguf", "auto", "--target-bpw", "2")
    found = re.fullmatch(r"error: --target-bpw 2 cannot be reached; the least is (\d+\.\d+)\n", done.err)
    assert done.code == 1 and found, done.err
    below = f"{float(found[1]) - 0.002:.3f}"
    assert macko("convert", DEMO, tmp_path / "x.gguf", "auto", "--target-bpw", below).code == 1
    assert not (tmp_path / "x.gguf").exists()
    assert macko("convert", DEMO, tmp_path / "x.gguf", "auto", "--target-bpw", found[1]).code == 0
    with Model(DEMO) as model:
        n = sum(t.n_elements for t in model.tensors)
    assert (tmp_path / "x.gguf").stat().st_size * 8 / n <= float(found[1])


# ---- report ----


@pytest.fixture
def no_work(monkeypatch):
    """Fails the test if a model is quantized or loaded."""

    def work(*unused, **more):
        raise AssertionError("work was begun")

    monkeypatch.setattr(forms, "quantize", work)
    monkeypatch.setattr(text_model.TextModel, "__init__", work)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--types", "Q8_0,q4_k_n"], 2, "--types: llama.cpp has no type q4_k_n; did you mean Q4_K_"),
        (["missing.gguf"], 1, "missing.gguf: No such file"),
        (["tiny.gguf"], 1, "tiny.gguf: has other tensors than"),
        (["--prune", "--sparsity 50"], 2, "did you mean 0.5?"),
        (["--prune", "--sparsity 0.5 --exclude-weights atn"], 1, "--exclude-weights atn: no tensor has such a name"),
        (["--prune", "--sparsity 0.5 --tensor-sparsity ffn_dwon=0.6"], 1, "ffn_dwon=0.6: no tensor has such a name"),
        (["--prune", "--sparsity 0.5 --method sparsegpt -f missing.txt"], 1, "missing.txt: No such file"),
        (["--prune", "--sparsity 0.5 --method wanda --imatrix missing.gguf"], 1, "missing.gguf: No such file"),
        (["--convert", "sparse-q8 --imatrix missing.gguf"], 1, "missing.gguf: No such file"),
        (["--convert", "macko --tensor-type atn_q=dense"], 1, "--tensor-type atn_q=dense: no tensor has such a name"),
        (["--prune", "--sparsity 0.5", "--prune", "--sparsity 0.5"], 1, "two models would be called 'magnitude 50%'"),
        (["--file", "missing.txt"], 1, "missing.txt: No such file"),
        (["--file", "empty.txt"], 1, "empty.txt: is empty"),
        (["-o", "no/plot"], 1, "there is no folder"),
    ],
)
def test_report_looks_at_all_inputs_first(tmp_path, macko, monkeypatch, no_work, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    generators.write_gguf(tmp_path / "tiny.gguf", generators.tiny_tensors())
    (tmp_path / "empty.txt").write_text("")
    before = sorted(tmp_path.iterdir())
    text = [] if "--file" in arguments else ["-f", SAMPLE]
    done = macko("report", DEMO, *arguments, *text)
    assert done.code == code and message in done.err and "Traceback" not in done.err, done.err
    assert "quantizing" not in done.err and sorted(tmp_path.iterdir()) == before
