"""macko calibrate --activations, the keys macko.act.* and macko perplexity --skip file: thresholds are quantiles, the
copy has the same weights, measured shares equal those on file, invalid keys are refused.
"""

from __future__ import annotations

import json
import os

import gguf
import numpy as np
import pytest

from ggml_macko import PruneOptions, convert, errors, prune
from ggml_macko.conversion.verify import verify
from ggml_macko.evaluation import skipping
from ggml_macko.evaluation.calibrate_activations import calibrate_activations
from ggml_macko.evaluation.perplexity import SkipOptions, perplexity, skipped_perplexity
from ggml_macko.gguf.activation_keys import read_rule
from ggml_macko.gguf.files import Model, make_key
from ggml_macko.gguf.outputs import AtomicOutput
from ggml_macko.recovery import recover
from reference.feed_forward import FFN, MODELS, SCORES, Recorder, gate_up_and_norms
from support import generators, tiny_models
from support import gguf_bytes as gb
from support.activation_keys import HOSTILE, set_act
from support.bad_input import FILES, SAMPLE, one_line, texts_and_models

DEMO = generators.DEMO
DOWNS = [f"blk.{i}.ffn_down.weight" for i in range(4)]
OPTIONS = {"n_ctx": 64, "n_threads": 2, "n_gpu_layers": 0}
NAMES = (
    "version",
    "kind",
    "share",
    "allocation",
    "text",
    "chunks",
    "n_ctx",
    "part.down",
    "part.share",
    "part.threshold",
)
KEYS = {"macko.act." + name for name in NAMES}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """The demo model with thresholds for half of the neurons."""
    out = tmp_path_factory.mktemp("calibrated") / "model.gguf"
    calibrate_activations(DEMO, out, SkipOptions(0.5, SAMPLE, "product", n_chunks=4), **OPTIONS)
    return out


@pytest.fixture(scope="module")
def sparse(calibrated):
    """The same model as a sparse file."""
    convert(calibrated, calibrated.with_name("sparse.gguf"))
    return calibrated.with_name("sparse.gguf")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", ["docs-4m", "gemma2", "phi3"])
def test_thresholds_on_file_are_quantiles_of_numpy_scores(tmp_path, monkeypatch, name, score, share):
    """gguf-py reads the thresholds; the scores are computed in float64 from the products of one chunk."""
    taps = []

    def make_tap():
        taps.append(Recorder())
        return taps[-1]

    monkeypatch.setattr(skipping, "FeedForwardTap", make_tap)
    path = DEMO
    if name != "docs-4m":
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(gb.write(tiny_models.make(name)))
    found = calibrate_activations(
        path, tmp_path / "out.gguf", SkipOptions(share, SAMPLE, score, n_chunks=1), n_batch=64, **OPTIONS
    )
    file = gguf.GGUFReader(tmp_path / "out.gguf")
    value = {key: field.contents() for key, field in file.fields.items() if key.startswith("macko.act.")}
    weights = {t.name: np.asarray(t.data, np.float64) for t in file.tensors if t.name.endswith(FFN)}
    assert value["macko.act.kind"] == score and value["macko.act.share"] == np.float32(share)
    downs = value["macko.act.part.down"]
    assert downs == [f"blk.{i}.ffn_down.weight" for i in range(len(downs))] and len(downs) >= 2
    assert value["macko.act.part.share"] == [np.float32(share)] * len(downs)
    assert value["macko.act.part.threshold"] == [part.threshold for part in found.rule.parts]
    for layer, threshold in enumerate(value["macko.act.part.threshold"]):
        scores = SCORES[score](*gate_up_and_norms(name, weights, taps[0].products, layer))
        if share == 0:
            assert threshold == 0
            continue
        quantile = np.quantile(scores, share, method="inverted_cdf")
        # llama.cpp computes gate and product in float32, and GELU from a table of F16 values
        rounding = 3e-3 * quantile if MODELS[name][0].__name__ == "gelu" else 1e-5 * quantile
        assert quantile - rounding <= threshold <= quantile * (1 + skipping.BIN_WIDTH) + rounding


def test_file_skips_as_the_calibration_that_made_it(calibrated):
    options = {**OPTIONS, "n_chunks": 6}
    for skip in (SkipOptions(0.5, SAMPLE, "product", n_chunks=4), None):
        found = skipped_perplexity(calibrated, SAMPLE, skip, **options)
        if skip is not None:
            want = found
    assert found.estimate == want.estimate and found.share == want.share > 0.4
    assert found.estimate != perplexity(calibrated, SAMPLE, **options)
    for a, b in zip(found.parts, want.parts):
        assert (a.down, a.threshold, a.measured, a.n_neurons) == (b.down, b.threshold, b.measured, b.n_neurons)
    assert found.skip == SkipOptions(0.5, SAMPLE.name, "product", n_chunks=4)


def test_provenance_says_what_the_thresholds_were_taken_from(tmp_path):
    text = tmp_path / os.fsdecode(b"caf\xe9.txt")  # not UTF-8
    text.write_bytes(SAMPLE.read_bytes())
    skip = SkipOptions(0.7, text, "wina", "greedy", n_chunks=3)
    rule = calibrate_activations(DEMO, tmp_path / "out.gguf", skip, **OPTIONS).rule
    with Model(tmp_path / "out.gguf") as model:
        assert read_rule(model) == rule
    assert (rule.score, rule.allocation, rule.text, rule.n_chunks, rule.n_ctx) == (
        "wina", "greedy", "caf\N{REPLACEMENT CHARACTER}.txt", 3, 64,
    )  # fmt: skip
    assert rule.share == np.float32(0.7)
    shares = [part.share for part in rule.parts]
    assert np.mean(shares) == pytest.approx(0.7, abs=1e-6) and len(set(shares)) > 1
    assert [part.down for part in rule.parts] == DOWNS


@pytest.mark.parametrize("kind", ["macko", "ec-csr", "sparse-q8", "sparse-lossless", "split", "old rule"])
def test_copy_is_the_same_model(tmp_path, macko, calibrated, kind):
    """The copy has the same storage and additional keys only. A rule in the model is replaced."""
    source = tmp_path / "source.gguf"
    if kind == "old rule":
        source = calibrated
    elif kind == "split":
        source = gb.split(DEMO, tmp_path, [5, 20, 13])[0]
    else:
        assert macko("convert", DEMO, source, kind).code == 0
    out = tmp_path / "out.gguf"
    calibrate_activations(source, out, SkipOptions(0.25, SAMPLE, n_chunks=2), **OPTIONS)
    with Model(source) as a, Model(out) as b:
        assert [(t.name, t.storage_name, t.nbytes_stored) for t in a.tensors] == [
            (t.name, t.storage_name, t.nbytes_stored) for t in b.tensors
        ]
        keys = [{k.name: k.record for k in m.keys if k.name not in KEYS} for m in (a, b)]
        assert keys[0] == keys[1]
        assert {k.name for k in b.keys} - set(keys[1]) == KEYS
        assert read_rule(b).share == 0.25 and read_rule(b).score == "cats"
    assert verify(source, out, metadata=False, exact=True).is_identical
    assert perplexity(out, SAMPLE, n_chunks=2, **OPTIONS) == perplexity(source, SAMPLE, n_chunks=2, **OPTIONS)
    if kind == "macko":  # the dense copy also has the keys
        assert macko("restore", out, tmp_path / "dense.gguf").code == 0
        with Model(tmp_path / "dense.gguf") as c, Model(out) as b:
            assert read_rule(c) == read_rule(b)


def test_pruned_model_has_no_thresholds_of_other_weights(tmp_path, calibrated):
    prune(calibrated, tmp_path / "pruned.gguf", PruneOptions(sparsity=0.5))
    with Model(tmp_path / "pruned.gguf") as model:
        assert read_rule(model) is None
        assert model.key("macko.prune.method") is not None


def test_recovered_model_has_no_thresholds_of_other_weights(tmp_path, calibrated):
    """`recover` writes the file; the training before that requires PyTorch and is left out."""
    recovered = make_key("macko.prune.recover.method", "str", "distill")
    with Model(calibrated) as source, AtomicOutput(tmp_path / "recovered.gguf", [calibrated], False) as output:
        recover._write(source, {}, [recovered], output)
        output.seal()
        output.commit()
    with Model(tmp_path / "recovered.gguf") as model:
        assert read_rule(model) is None
        assert model.key("macko.prune.recover.method") is not None


# ---- commands ----


def test_commands_write_show_and_measure(tmp_path, macko):
    out = tmp_path / "out.gguf"
    args = ["-m", DEMO, "-f", SAMPLE, "-ngl", 0, "-t", 2, "-c", 64]
    done = macko(
        "calibrate", "--activations", *args, "--chunks", 3, "--skip", 0.5, "--skip-score", "product", "-o", out
    )
    assert done.code == 0, done.err
    assert done.out == f"{out}: thresholds of 4 layers for 50.00% of the neurons, 3 chunks of 64 tokens\n"
    with Model(out) as model:
        rule = read_rule(model)

    shown = macko("inspect", out).out
    assert "score product, uniform shares, 50.00% of the neurons" in shown
    assert f"thresholds from 3 chunks of 64 tokens of {SAMPLE.name!r}" in shown
    rows = [line.split("|")[1:-1] for line in shown.splitlines() if line.startswith("| blk.") and line.count("|") == 5]
    assert [row[0].strip() for row in rows] == DOWNS
    assert [float(row[3]) for row in rows] == pytest.approx([part.threshold for part in rule.parts], rel=1e-3)
    assert "macko.act." not in shown
    metadata = json.loads(macko("inspect", "--json", out).out)["metadata"]
    assert metadata["macko.act.part.threshold"] == [part.threshold for part in rule.parts]
    assert "may be skipped" not in macko("inspect", DEMO).out

    done = macko("perplexity", *args, "-m", out, "--chunks", 2, "--skip", "file")
    assert done.code == 0 and "quality only: nothing is faster" in done.err
    assert done.out.splitlines()[1].endswith("% of the neurons in 4 layers (wanted: 50.00%)")
    done = macko("perplexity", *args, "-m", out, "--chunks", 2, "--skip", "file", "--json")
    skip = json.loads(done.out)["skip"]
    assert (skip["share"], skip["score"], skip["text"], skip["n_chunks"]) == (0.5, "product", SAMPLE.name, 3)
    assert [part["threshold"] for part in skip["parts"]] == [part.threshold for part in rule.parts]


def test_bad_options_are_refused_in_one_line(tmp_path, macko):
    args = ["calibrate", "-m", DEMO, "-f", SAMPLE]
    out = ["-o", tmp_path / "out.gguf"]
    for more, message in (
        (["--activations", *out], "--skip is missing: the share of the neurons"),
        (["--activations", "--skip", 0.5], "-o is missing: the copy of the model"),
        (["--activations", "--skip", 0.5, "--chunks", 0, *out], "--chunks 0 measures nothing"),
        (["--activations", "--skip", 0.5, "-c", 8, *out], "-c 8: at least 16"),
        (["--activations", "--skip", 0.5, "--process-output", *out], "do not go with --activations"),
        (["--activations", "--skip", 0.5, "-ofreq", 5, *out], "do not go with --activations"),
        (["--skip", 0.5, *out], "--activations is missing"),
        (["--skip-score", "wina", *out], "--activations is missing"),
        (["--skip-allocation", "greedy", *out], "--activations is missing"),
    ):
        one_line(macko(*args, *more), message, code=2)
    for more in (["--skip-text", SAMPLE], ["--skip-score", "cats"], ["--skip-chunks", 3]):
        done = macko("perplexity", "-m", DEMO, "-f", SAMPLE, "--skip", "file", *more)
        one_line(done, "--skip file: the file says the rest", code=2)
    one_line(macko("perplexity", "-m", DEMO, "--skip", "file"), "-f is missing", code=2)
    done = macko("perplexity", "-m", DEMO, "-f", SAMPLE, "--skip", "file", "--quiet")
    one_line(done, DEMO, "key macko.act.kind is missing")
    done = macko("perplexity", "-m", DEMO, "-f", SAMPLE, "--skip", "fil")
    assert done.code == 2 and "--skip: 'fil' is not a number from 0 to 1, nor file" in done.err
    assert not os.listdir(tmp_path)


def test_bad_texts_and_models_are_refused_and_leave_nothing(tmp_path, macko):
    for args, parts in texts_and_models(tmp_path):
        done = macko("calibrate", "--activations", *args, "--skip", 0.5, "-ngl", 0, "-o", tmp_path / "out.gguf")
        one_line(done, *parts)
    assert sorted(os.listdir(tmp_path)) == sorted(FILES)


def test_output_is_replaced_only_if_asked_to(tmp_path, macko):
    out = tmp_path / "out.gguf"
    out.write_bytes(b"mine")
    args = ["calibrate", "--activations", "-m", DEMO, "-f", SAMPLE, "--skip", 0.5, "-ngl", 0, "-c", 64, "--chunks", 1]
    one_line(macko(*args, "-o", out), out, "exists; use --force")
    assert out.read_bytes() == b"mine"
    assert macko(*args, "-o", out, "--force").code == 0
    one_line(macko(*args, "-o", DEMO, "--force"), "input and output files are the same")


# ---- hostile keys ----


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_keys_are_refused_in_one_line(calibrated, sparse, tmp_path, macko, name, is_sparse):
    file = gb.read((sparse if is_sparse else calibrated).read_bytes())
    *change, message = HOSTILE[name]
    set_act(file, *change)
    path = tmp_path / "bad.gguf"
    path.write_bytes(gb.write(file))
    one_line(macko("inspect", path), path, message)
    one_line(macko("perplexity", "-m", path, "-f", SAMPLE, "-ngl", 0, "--skip", "file", "--quiet"), path, message)


@pytest.mark.parametrize("name", NAMES)
def test_missing_key_is_refused(calibrated, tmp_path, macko, name):
    file = gb.read(calibrated.read_bytes())
    file.drop("macko.act." + name)
    path = tmp_path / "bad.gguf"
    path.write_bytes(gb.write(file))
    one_line(macko("inspect", path), path, f"key macko.act.{name} is missing, but other macko.act.* keys are present")


def test_part_that_is_none_of_the_model_is_refused(calibrated, tmp_path, macko):
    path = tmp_path / "bad.gguf"
    for other, message in (
        (b"blk.9.ffn_down.weight", "element 2 is 'blk.9.ffn_down.weight' (a matrix of the model)"),
        (b"blk.0.attn_norm.weight", "element 2 is 'blk.0.attn_norm.weight' (a matrix of the model)"),
        (
            b"blk.0.ffn_up.weight",
            "has 'blk.0.ffn_up.weight', which no feed-forward part of the model is multiplied with",
        ),
    ):
        file = gb.read(calibrated.read_bytes())
        file.key("macko.act.part.down").value[2] = other
        path.write_bytes(gb.write(file))
        done = macko("perplexity", "-m", path, "-f", SAMPLE, "-ngl", 0, "-c", 64, "--skip", "file", "--quiet")
        one_line(done, path, "key macko.act.part.down", message)


def test_later_version_is_ignored_unless_neurons_are_skipped(calibrated, sparse, tmp_path, macko):
    path = tmp_path / "later.gguf"
    for source in (calibrated, sparse):
        file = gb.read(source.read_bytes())
        file.set("macko.act.version", gb.U32, 2)
        file.set("macko.act.kind", gb.U32, 7)
        file.set("macko.act.later", gb.STRING, b"what version 1 does not have")
        path.write_bytes(gb.write(file))
        assert macko("inspect", path).code == 0
        done = macko("perplexity", "-m", path, "-f", SAMPLE, "-ngl", 0, "--skip", "file", "--quiet")
        one_line(done, path, "key macko.act.kind is missing or of a later version")


def test_parts_that_are_not_named_are_not_skipped(calibrated, tmp_path):
    file = gb.read(calibrated.read_bytes())
    for name in ("down", "share", "threshold"):
        del file.key(f"macko.act.part.{name}").value[1:3]
    path = tmp_path / "two.gguf"
    path.write_bytes(gb.write(file))
    found = skipped_perplexity(path, SAMPLE, None, n_chunks=2, **OPTIONS)
    assert [part.down for part in found.parts] == [DOWNS[0], DOWNS[3]] and found.share > 0.4


def test_every_score_and_allocation_is_one_of_the_format(calibrated, tmp_path):
    for key, words in (("kind", skipping.SCORES), ("allocation", skipping.ALLOCATIONS)):
        for word in words:
            file = gb.read(calibrated.read_bytes())
            file.set(f"macko.act.{key}", gb.STRING, word.encode())
            (tmp_path / "model.gguf").write_bytes(gb.write(file))
            with Model(tmp_path / "model.gguf") as model:
                rule = read_rule(model)
            assert word in (rule.score, rule.allocation)


def test_model_without_gates_and_relus_is_refused(tmp_path):
    from support import architectures

    path = tmp_path / "starcoder2.gguf"
    path.write_bytes(gb.write(architectures.make("starcoder2", False)))
    with pytest.raises(
        errors.MackoError, match="no feed-forward part has a gate or a ReLU: there are no neurons to skip"
    ):
        calibrate_activations(path, tmp_path / "out.gguf", SkipOptions(0.5, SAMPLE, n_chunks=1), **OPTIONS)
    assert os.listdir(tmp_path) == ["starcoder2.gguf"]
