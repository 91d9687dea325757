"""macko perplexity --skip: masks, outputs and thresholds are those of a NumPy implementation; a share of zero has no
effect; bad input.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import gguf
import numpy as np
import pytest

from ggml_macko import errors
from ggml_macko.evaluation import skipping
from ggml_macko.evaluation.perplexity import SkipOptions, perplexity, skipped_perplexity
from reference.feed_forward import FFN, MODELS, SCORES, Recorder, gate_up_and_norms
from support import generators, gguf_bytes, tiny_models
from support.bad_input import SAMPLE, one_line

DEMO = generators.DEMO


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")

    def path(name):
        if name == "docs-4m":
            return DEMO
        out = folder / f"{name}.gguf"
        if not out.exists():
            out.write_bytes(gguf_bytes.write(tiny_models.make(name)))
        return out

    return path


@pytest.fixture
def recorded(monkeypatch):
    """Creates a SkippingModel with small chunks whose tap is a Recorder."""
    monkeypatch.setattr(skipping, "FeedForwardTap", Recorder)

    def make(path, score):
        return skipping.SkippingModel(path, score, n_ctx=64, n_batch=64, n_threads=2)

    return make


@pytest.mark.parametrize("name, score", sorted({*itertools.product(MODELS, SCORES)} - {("arcee", "cats")}))
def test_masks_outputs_and_thresholds_equal_numpy(model_of, recorded, name, score):
    path, share = model_of(name), 0.7 if name == "arcee" else 0.4  # half of arcee's activations are already zero
    weights = {t.name: np.asarray(t.data, np.float64) for t in gguf.GGUFReader(path).tensors if t.name.endswith(FFN)}
    with recorded(path, score) as m:
        chunks = m.model.read_chunks(SAMPLE, 2)
        m.calibrate(chunks[:1])
        dense = dict(m._tap.products)
        m.skip(m.uniform(share))
        m.model.evaluate(chunks[1:])
        products = m._tap.products
        parts = m.skipped()
    assert [p.down for p in parts] == [f"blk.{i}.ffn_down.weight" for i in range(len(parts))] and len(parts) >= 2
    for layer, part in enumerate(parts):
        scores = SCORES[score](*gate_up_and_norms(name, weights, dense, layer))
        quantile = np.quantile(scores, share, method="inverted_cdf")
        assert part.threshold / quantile == pytest.approx(1, rel=skipping.BIN_WIDTH * 1.02)
        gated = np.multiply(*gate_up_and_norms(name, weights, dense, layer)[:2])
        np.testing.assert_allclose(dense[part.down][0], gated, rtol=1e-3, atol=1e-4)  # ggml's GELU is a table of F16

        activated, up, norms = gate_up_and_norms(name, weights, products, layer)
        scores = SCORES[score](activated, up, norms)
        tolerance = 1e-3 * scores + 1e-4 if name == "gemma2" and score != "cats" else 1e-5 * scores
        sure = np.abs(scores - part.threshold) > tolerance
        x, out = products[part.down]
        assert sure.mean() > 0.98
        np.testing.assert_array_equal((x == 0)[sure], (scores < part.threshold)[sure])
        np.testing.assert_allclose(x[x != 0], (activated * up)[x != 0], rtol=1e-3, atol=1e-4)
        want = x.astype(np.float64) @ weights[part.down].T
        np.testing.assert_allclose(out, want, rtol=2e-3, atol=2e-3 * np.abs(want).max())  # x is rounded to F16
        assert part.measured == (x == 0).mean() > 0.2


def test_logits_are_those_of_a_float64_model_that_skips(model_of):
    """The reference is a whole forward pass without llama.cpp: skipping in one layer changes all later layers."""
    from reference.llama_float64 import Float64Llama

    class Skipping(Float64Llama):
        thresholds = None

        def logits(self, tokens):
            self.layer = 0
            for name in [n for n in self.weights if n.endswith("ffn_down.weight")]:
                self.weights[name] = self.weights[name].view(Skipped)
                self.weights[name].threshold = self.thresholds[name]
            return np.asarray(super().logits(tokens))

    class Skipped(np.ndarray):
        """down: zeroes the small inputs of the product x @ down.T."""

        def __array_finalize__(self, other):
            self.threshold = getattr(other, "threshold", None)

        def __rmatmul__(self, x):
            x = np.where(np.abs(x) < self.threshold, 0, x)
            return x @ np.asarray(self)

    with skipping.SkippingModel(DEMO, "product", n_ctx=64, n_batch=64, n_threads=2) as m:
        chunks = m.model.read_chunks(SAMPLE, 2)
        m.calibrate(chunks[:1])
        dense = m.model.evaluate(chunks[1:])[0].copy()
        m.skip(m.uniform(0.6))
        got = m.model.evaluate(chunks[1:])[0].copy()
        llama = Skipping(str(DEMO))
        llama.thresholds = {p.down: p.threshold for p in m.skipped()}
        want = llama.logits(m.model.as_sequences(chunks[1:])[0].tolist())
    error, change = (np.sqrt(((x - want) ** 2).mean()) for x in (got, dense))
    # F16 rounding may move an input across a threshold in one of the two; with a layer left out, the ratio is 0.5
    assert error < 0.25 * change


@pytest.mark.parametrize("share", [0.0, 0.001, 0.25, 0.5, 0.7, 0.999, 1.0])
def test_threshold_is_the_quantile_within_a_bin(share):
    rng = np.random.default_rng(3)
    for scores in (
        rng.lognormal(0, 3, 9973),
        np.abs(rng.normal(0, 1, 1000)),
        rng.integers(0, 5, 777),  # ties, zeros
        np.array([0.7]),
        rng.random(50) * 1e-41,  # subnormal
    ):
        scores = scores.astype(np.float32)
        found = skipping.Distribution()
        for part in np.array_split(scores, 3):
            found.add(part)
        threshold = np.float32(found.threshold(share))
        assert found.n == len(scores)
        if share == 0:
            assert threshold == 0
            continue
        quantile = np.quantile(scores, share, method="inverted_cdf")
        smallest = float(np.array(1 << 12, np.uint32).view(np.float32))  # width of the first bin
        assert quantile < threshold <= quantile * (1 + skipping.BIN_WIDTH) + smallest
        assert (scores < threshold).mean() >= share - 1e-9


def test_nothing_skipped_changes_no_bit():
    options = {"n_ctx": 128, "n_chunks": 3, "n_threads": 2, "n_gpu_layers": 0}
    want = perplexity(DEMO, SAMPLE, **options)
    for score in skipping.SCORES:
        found = skipped_perplexity(DEMO, SAMPLE, SkipOptions(0, SAMPLE, score, n_chunks=2), **options)
        assert found.estimate == want and found.share == 0


def test_sparse_file_skips_as_its_source_does(tmp_path, macko):
    assert macko("convert", DEMO, tmp_path / "sparse.gguf").code == 0
    options = {"n_ctx": 128, "n_chunks": 10, "n_threads": 2, "n_gpu_layers": 0}
    for score in skipping.SCORES:
        skip = SkipOptions(0.5, SAMPLE, score, n_chunks=2)
        a, b = (skipped_perplexity(path, SAMPLE, skip, **options) for path in (DEMO, tmp_path / "sparse.gguf"))
        assert b.estimate.ppl == pytest.approx(a.estimate.ppl, rel=2e-3)
        assert b.share == pytest.approx(a.share, abs=2e-3)
        for p, q in zip(a.parts, b.parts):
            assert q.threshold == pytest.approx(p.threshold, rel=5e-3)


def test_norms_are_those_of_the_columns_whatever_the_type(tmp_path):
    rng = np.random.default_rng(0)
    w = rng.normal(0, 1, (48, 64)).astype(np.float32)
    q8 = gguf.quants.quantize(w, gguf.GGMLQuantizationType.Q8_0)
    tensors = {"f32": (w.view(np.uint32), 0), "f16": (w.astype(np.float16).view(np.uint16), 1), "q8_0": (q8, 8)}
    path = generators.write_gguf(tmp_path / "m.gguf", tensors)
    with skipping.Model(path) as file:
        for t in file.tensors:
            np.testing.assert_allclose(skipping.column_norms(t), np.sqrt((w**2).sum(axis=0)), rtol=2e-2)


def test_allocation_is_the_best_of_all():
    """The reference is every pair of shares in steps of 1 %."""
    losses = {"a": [0.001, 0.01, 0.05, 0.2, 2.0], "b": [0.01, 0.05, 0.1, 0.15, 0.3]}
    neurons = {"a": 300, "b": 100}
    curves = {part: skipping.interpolated(values) for part, values in losses.items()}
    for part, values in losses.items():
        for share, loss in zip(skipping.LOSS_SHARES, values):
            assert curves[part][round(100 * share)] == pytest.approx(loss)
        assert (np.diff(curves[part]) >= 0).all()
    for share in (0.0, 0.1, 0.25, 0.4, 0.5, 0.7, 0.9, 1.0):
        found = skipping.allocate(losses, neurons, share)
        assert sum(found[p] * neurons[p] for p in neurons) == pytest.approx(400 * share)
        at = {p: np.interp(found[p], skipping._GRID, curves[p]) for p in neurons}
        best = min(
            curves["a"][i] + curves["b"][j] for i in range(101) for j in range(101) if 3 * i + j >= 400 * share - 1e-9
        )
        assert at["a"] + at["b"] <= best * 1.05 + 1e-9


def test_costly_part_is_skipped_whole_or_not_at_all():
    """For a concave loss, half of a part costs more than half of the loss of the whole part."""
    losses = {part: [0.5, 0.6, 0.65, 0.68, 0.7] for part in "abc"}
    found = skipping.allocate(losses, dict.fromkeys("abc", 100), 2 / 3)
    assert sorted(found.values()) == pytest.approx([0, 1, 1])


def test_part_that_loses_nothing_is_skipped_first():
    found = skipping.allocate(
        {"relu": [0, 0, 0, 0.1, 1], "silu": [0.01, 0.1, 0.2, 0.3, 1]}, {"relu": 10, "silu": 10}, 0.35
    )
    assert found["relu"] >= 0.65


def test_greedy_allocation_measures_the_loss_of_each_layer():
    with skipping.SkippingModel(DEMO, "cats", n_ctx=64, n_batch=128, n_threads=2) as m:
        chunks = m.model.read_chunks(SAMPLE, 4)
        m.calibrate(chunks)
        losses = m.losses(chunks[:2])
        shares = m.greedy(0.5, losses)
        # the last loss is computed again from float64 probabilities
        last = {m.parts[3].node: skipping.LOSS_SHARES[2]}
        p, q = [], []
        for found, skip in ((p, {}), (q, last)):
            m.skip(skip)
            for chunk in chunks[:2]:
                x = m.model.evaluate(chunk[None], 32)[0].astype(np.float64)
                found.append(np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True))
        divergence = (np.array(p) * np.log(np.array(p) / np.array(q))).sum(axis=-1).mean()
    assert losses[m.parts[3].node][2] == pytest.approx(divergence, rel=1e-2)
    assert len(losses) == 4
    for values in losses.values():
        assert 0 < values[0] < values[1] < values[-1]
    assert np.mean(list(shares.values())) == pytest.approx(0.5) and len(set(shares.values())) > 1


def test_json_says_what_was_skipped_in_each_layer(macko):
    args = ["-m", DEMO, "-f", SAMPLE, "-ngl", 0, "-c", 128, "--chunks", 2, "--skip-text", SAMPLE, "--skip-chunks", 2]
    done = macko("perplexity", *args, "--skip", 0.5, "--skip-score", "product", "--json")
    assert done.code == 0 and "quality only: nothing is faster" in done.err
    found = json.loads(done.out)
    skip = found["skip"]
    assert (skip["share"], skip["score"], skip["allocation"], skip["n_chunks"]) == (0.5, "product", "uniform", 2)
    assert [p["down"] for p in skip["parts"]] == [f"blk.{i}.ffn_down.weight" for i in range(4)]
    assert skip["measured"] == pytest.approx(np.mean([p["measured"] for p in skip["parts"]]))
    for part in skip["parts"]:  # on the same text: at least the wanted share, at most one bin more
        assert part["wanted"] == 0.5 and part["threshold"] > 0
        assert part["measured"] == pytest.approx(0.5, abs=0.01)
    done = macko("perplexity", *args, "--skip", 0.5, "--skip-score", "product", "--skip-allocation", "greedy")
    first, second = done.out.splitlines()
    assert first.startswith("Final estimate: PPL = ")
    assert second.startswith("skipped: ") and second.endswith("% of the neurons in 4 layers (wanted: 50.00%)")


def test_neurons_without_a_gate_that_are_zero_go_first(model_of, macko):
    args = ["-m", model_of("arcee"), "-f", SAMPLE, "-ngl", 0, "-c", 64, "--chunks", 2, "--json", "--skip-text", SAMPLE]
    plain = json.loads(macko("perplexity", *args[:-2]).out)
    done = macko("perplexity", *args, "--skip", 0.3, "--skip-score", "product", "--skip-chunks", 2)
    assert done.code == 0
    found = json.loads(done.out)
    assert found["ppl"] == plain["ppl"]  # only zeros are skipped
    assert all(0.3 < part["measured"] < 0.6 for part in found["skip"]["parts"])


# ---- bad input ----


def test_bad_options_are_refused_in_one_line(macko):
    for args, message in (
        (["--skip", 0.5, "--skip-chunks", 0], "--skip-chunks 0"),
        (["--skip", 0.5, "--kl-divergence"], "--skip measures perplexity only"),
        (["--skip", 0.5, "--kl-divergence-base", "x"], "--skip measures perplexity only"),
    ):
        one_line(macko("perplexity", "-m", DEMO, "-f", SAMPLE, "--skip-text", SAMPLE, *args), message, code=2)
    one_line(macko("perplexity", "-m", DEMO, "-f", SAMPLE, "--skip", 0.5), "--skip-text is missing", code=2)
    for share in (1.5, -0.1, float("nan")):
        with pytest.raises(errors.UsageError, match=f"--skip {share:g}: a share of the neurons, 0 to 1"):
            skipping.SkipOptions(share, SAMPLE)
    one_line(macko("perplexity", "-m", DEMO, "--skip-text", SAMPLE, "--skip", 0.5), "-f is missing", code=2)
    for args in (["--skip-text", SAMPLE], ["--skip-score", "wina"], ["--skip-allocation", "uniform"]):
        one_line(macko("perplexity", "-m", DEMO, "-f", SAMPLE, *args), "--skip is missing", code=2)
    done = macko("perplexity", "-m", DEMO, "-f", SAMPLE, "--skip-text", SAMPLE, "--skip", 0.5, "--skip-score", "mine")
    assert done.code == 2 and "invalid choice: 'mine'" in done.err


def refused(path, score="product", **options):
    """The message of the error, one line."""
    options = {"n_ctx": 64, "n_chunks": 2, "n_threads": 2, "n_gpu_layers": 0, **options}
    with pytest.raises(errors.MackoError) as e:
        skipped_perplexity(path, SAMPLE, SkipOptions(0.5, SAMPLE, score, n_chunks=2), **options)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_calibration_text_that_is_too_short_is_refused(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("A word.")
    with pytest.raises(errors.MackoError, match="short.txt: .* tokens; at least 128 are needed"):
        skipped_perplexity(DEMO, SAMPLE, SkipOptions(0.5, short), n_ctx=64, n_gpu_layers=0)
    with pytest.raises(FileNotFoundError):
        skipped_perplexity(tmp_path / "none.gguf", SAMPLE, SkipOptions(0.5, tmp_path / "none.txt"))


def test_model_whose_experts_alone_have_gates_is_refused(model_of):
    message = refused(model_of("qwen3moe"))
    assert message.endswith("qwen3moe.gguf: only experts have a gate or a ReLU: there are no neurons to skip")


def test_model_without_gates_and_relus_is_refused(tmp_path):
    from support import architectures

    path = tmp_path / "starcoder2.gguf"
    path.write_bytes(gguf_bytes.write(architectures.make("starcoder2", False)))
    assert "no feed-forward part has a gate or a ReLU: there are no neurons to skip" in refused(path)


def test_infinite_or_nan_activations_are_refused(tmp_path, model_of):
    """The activations of the calibration text and those of the evaluated text are checked."""
    data = bytearray(model_of("qwen3").read_bytes())
    tensor = next(t for t in gguf.GGUFReader(model_of("qwen3")).tensors if t.name == "blk.1.ffn_gate.weight")
    for bits in (b"\x00\x7e", b"\x00\x7c"):  # NaN, infinity
        data[tensor.data_offset : tensor.data_offset + 2] = bits
        path = tmp_path / "bad.gguf"
        path.write_bytes(data)
        for score in skipping.SCORES:
            assert "blk.1.ffn_down.weight: the score of an input is not a finite number" in refused(path, score)


def test_activations_outside_host_memory_are_refused(monkeypatch):
    with skipping.SkippingModel(DEMO, "cats", n_ctx=64, n_batch=64, n_threads=2) as m:
        monkeypatch.setattr(m._tap.ggml, "is_host", lambda buffer: False)
        with pytest.raises(errors.MackoError, match="ffn_down.weight: its inputs are not .* in host memory; .* -ngl 0"):
            m.calibrate(m.model.read_chunks(SAMPLE, 1))


def test_score_of_a_gate_is_refused_where_there_is_none(model_of):
    message = refused(model_of("arcee"), "cats")
    assert message.endswith("blk.0.ffn_down.weight: its part has no gate to score; other scores need none")


def test_gate_with_an_unknown_activation_is_refused_for_cats_only(monkeypatch):
    monkeypatch.setattr(skipping, "ACTIVATIONS", {})
    assert "ffn_swiglu-0: no rule for the gate of SWIGLU" in refused(DEMO, "cats")
    skipped_perplexity(
        DEMO, SAMPLE, SkipOptions(0.5, SAMPLE, "product", n_chunks=1), n_ctx=64, n_chunks=1, n_gpu_layers=0
    )


# ---- the tool ----


def test_tables_are_complete_and_resume(model_of, tmp_path):
    """lab/scripts/skip_quality.py measures every score and allocation; a second run reuses the results on file."""
    pytest.importorskip("matplotlib", reason="matplotlib is optional")
    out = tmp_path / "table.md"
    command = [sys.executable, generators.ROOT / "lab" / "scripts" / "skip_quality.py", model_of("qwen3"), "-f", SAMPLE]
    command += ["--held-out", SAMPLE, "--chunks", 1, "--held-out-chunks", 1, "--shares", "0.5,0.9", "-o", out]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in out.read_text().splitlines() if line[:1] == "|"]
    assert rows[0] == ["score", "allocation", "0 %", "50 %", "90 %"]
    assert [r[:2] for r in rows[2:]] == [[s, a] for s in skipping.SCORES for a in skipping.ALLOCATIONS]
    results = json.loads(out.with_suffix(".json").read_text())
    assert len(results) == 1 + 3 * (1 + 1 + 2 * 2)  # the model itself; for each score nothing skipped, losses, shares
    assert results["qwen3, cats, uniform, 0.0"]["ppl"] == results["qwen3"]["ppl"]
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    before = out.read_text()
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0 and "uniform" not in done.stderr and out.read_text() == before
