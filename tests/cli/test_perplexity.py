"""macko perplexity: the definitions and digits of llama-perplexity, KL divergence compared with float64, bad input."""

from __future__ import annotations

import json
import re
import signal
import struct
import subprocess
import sys
import time

import numpy as np
import pytest

from ggml_macko import errors
from ggml_macko.evaluation import kl_divergence, likelihood, perplexity
from ggml_macko.evaluation.text_model import TextModel
from support import generators, gguf_bytes, tiny_models, upstream
from support.bad_input import FILES, SAMPLE, one_line, texts_and_models

DEMO = generators.DEMO


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """The demo model with fewer non-zeros."""
    from ggml_macko.commands import cli

    path = tmp_path_factory.mktemp("pruned") / "pruned.gguf"
    assert cli.main(["prune", str(DEMO), str(path), "--sparsity", "0.8"]) == 0
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Log-probabilities of the demo model: 8 chunks of 128 tokens."""
    from ggml_macko.commands import cli

    path = tmp_path_factory.mktemp("base") / "base.bin"
    args = ["-m", DEMO, "-f", SAMPLE, "-c", 128, "--chunks", 8, "--kl-divergence-base", path]
    assert cli.main(["perplexity", *map(str, args)]) == 0
    return path


def log_softmax(logits):
    x = logits.astype(np.float64)
    return x - np.logaddexp.reduce(x, axis=-1)[..., None]


def all_logits(path, chunks, **options):
    """float32 logits of every position, computed with llama_cpp.Llama."""
    import llama_cpp

    from support.llama_logits import logits

    llama = llama_cpp.Llama(
        str(path), n_ctx=chunks.shape[1], n_batch=chunks.shape[1], logits_all=True, verbose=False, flash_attn=True
    )
    starts = [llama.token_bos()] if llama_cpp.llama_vocab_get_add_bos(llama._model.vocab) else []
    return np.array([logits(llama, [*starts, *c[len(starts) :]]) for c in chunks.tolist()])


# ---- figures ----


def test_perplexity_follows_its_definition():
    """The reference is float64 arithmetic: a BOS starts each chunk, and the second half is scored."""
    with TextModel(DEMO, 256) as model:
        chunks = model.read_chunks(SAMPLE, 5)
        found = likelihood.estimate(model, chunks)
    assert chunks.shape == (5, 256)
    log_p = log_softmax(all_logits(DEMO, chunks))[:, 128:-1]
    nll = -np.take_along_axis(log_p, chunks[:, 129:, None].astype(np.int64), axis=2).ravel()
    assert found.n_tokens == len(nll) == 5 * 127
    # llama.cpp rounds attention to F16, in an order that depends on the batch; a wrong BOS changes 50 times as much
    assert found.ppl == pytest.approx(np.exp(nll.mean()), rel=3e-4)
    assert found.error == pytest.approx(np.exp(nll.mean()) * nll.std() / np.sqrt(len(nll) - 1), rel=1e-3)


@pytest.mark.parametrize(("n", "n_vocab"), [(7, 1), (3, 30011), (5, 400_001), (2, 3)])
def test_likelihoods_are_those_of_float64(n, n_vocab):
    """Sums of terms that are rounded to float32; arrays of an earlier, larger call are used again."""
    rng = np.random.default_rng()
    logits = (rng.normal(0, 8, (n, n_vocab)) + rng.normal(0, 50, (n, 1))).astype(np.float32)
    tokens = rng.integers(0, n_vocab, n)
    (nll,) = likelihood.negative_log_likelihood(logits, tokens)
    np.testing.assert_allclose(nll, -log_softmax(logits)[np.arange(n), tokens], rtol=1e-6, atol=2e-7)
    largest = logits.max(axis=1)
    terms = np.exp((logits - largest[:, None]).astype(np.float64)).astype(np.float32)
    assert np.array_equal(likelihood.sum_exp(logits, largest, exact=True), terms.sum(axis=1, dtype=np.float64))


@pytest.mark.parametrize("position", [0, 3, -1])
def test_any_logit_that_is_nan_is_an_error(monkeypatch, position):
    """Also one after the last scored token, because a GPU that failed is not to be believed."""
    evaluate = TextModel.evaluate

    def failing(model, chunks, first=0):
        logits = np.array(evaluate(model, chunks, first))
        logits[-1, position, 5] = np.nan
        return logits

    with TextModel(DEMO, 64) as model:
        chunks = model.read_chunks(SAMPLE, 3)
        monkeypatch.setattr(TextModel, "evaluate", failing)
        with pytest.raises(errors.MackoError, match="its logits are not finite") as raised:
            likelihood.estimate(model, chunks)
    assert raised.value.code == errors.NOT_FINITE


def test_chunks_of_an_evaluation_fit_into_one_product():
    """llama.cpp would otherwise move all logits to put them into order."""
    for n_batch, n_ubatch, n_seq in ((2048, 512, 8), (2048, 2048, 32), (128, 512, 2), (2048, 63, 1), (32, 512, 1)):
        with TextModel(DEMO, 64, n_batch=n_batch, n_ubatch=n_ubatch) as model:
            assert model.n_seq == n_seq


def test_sparse_file_has_the_perplexity_of_its_source(tmp_path, macko):
    assert macko("convert", DEMO, tmp_path / "s.gguf").code == 0
    values = [perplexity.perplexity(path, SAMPLE, n_gpu_layers=0).ppl for path in (DEMO, tmp_path / "s.gguf")]
    assert values[1] == pytest.approx(values[0], rel=1e-4)


@pytest.mark.parametrize(
    "options", [{"n_batch": 64}, {"n_batch": 100}, {"n_batch": 256}, {"n_batch": 4096, "n_ubatch": 64}]
)
def test_perplexity_does_not_depend_on_batches(options):
    want = perplexity.perplexity(DEMO, SAMPLE, n_chunks=8, n_ctx=256, n_gpu_layers=0).ppl
    assert perplexity.perplexity(DEMO, SAMPLE, n_chunks=8, n_ctx=256, n_gpu_layers=0, **options).ppl == pytest.approx(
        want, rel=1e-4
    )


def test_divergence_follows_its_definition(base, pruned):
    """The reference is float64 softmaxes. The file stores log-probabilities in 16 bits: steps of 16 / 65535."""
    with TextModel(pruned, 128) as model:
        chunks = model.read_chunks(SAMPLE, 8)
    found = perplexity.kl_divergence(pruned, base, n_gpu_layers=0)
    p, q = (log_softmax(all_logits(path, chunks))[:, 64:-1] for path in (DEMO, pruned))
    kld = (np.exp(p) * (p - q)).sum(axis=-1).ravel()
    tokens = chunks[:, 65:, None].astype(np.int64)
    change = (np.exp(np.take_along_axis(q, tokens, 2)) - np.exp(np.take_along_axis(p, tokens, 2))).ravel()
    same = (p.argmax(-1) == q.argmax(-1)).mean()

    assert found.n_tokens == len(kld) == 8 * 63
    assert kld.mean() > 0.1  # the models differ
    assert found.kld.value == pytest.approx(kld.mean(), rel=2e-3)
    assert found.kld.error == pytest.approx(kld.std() / np.sqrt(len(kld) - 1), rel=2e-3)
    assert found.same_top.value == pytest.approx(same, abs=2 / len(kld))
    assert found.p_change.value == pytest.approx(change.mean(), abs=2e-4)
    assert found.p_change_rms.value == pytest.approx(np.sqrt((change**2).mean()), rel=1e-3)
    percents = [100, 90, 50, 10, 0]
    np.testing.assert_allclose(found.kld_percentiles(percents), np.percentile(kld, percents), rtol=2e-2, atol=1e-3)
    np.testing.assert_allclose(
        found.p_change_percentiles(percents), np.percentile(change, percents), rtol=2e-2, atol=1e-3
    )
    assert found.ppl.value == pytest.approx(np.exp(-np.take_along_axis(q, tokens, 2).mean()), rel=3e-4)


def test_model_does_not_diverge_from_itself(base):
    found = perplexity.kl_divergence(DEMO, base, n_gpu_layers=0)
    assert abs(found.kld.value) < 1e-5 and found.same_top.value > 0.99 and found.p_change_rms.value < 1e-4
    assert found.ratio.value == pytest.approx(1, abs=0.01)


def test_codes_are_right_to_a_step():
    """The error of decoded log-probabilities is at most a step, also for odd vocabularies, equal logits, outliers."""
    rng = np.random.default_rng(1)
    for n_vocab in (1, 2, 7, 100, 257):
        logits = (4 * rng.standard_normal((9, n_vocab))).astype(np.float32)
        logits[3] = 1.5  # all logits are equal: the scale is 0
        if n_vocab > 2:
            logits[4, 0], logits[5, 1] = 300, -300
        tokens = rng.integers(0, n_vocab, 9)
        nll, rows = kl_divergence.encode(logits, tokens)
        want = log_softmax(logits)
        np.testing.assert_allclose(nll, -want[np.arange(9), tokens], rtol=1e-5, atol=1e-5)
        assert rows.shape == (9, (n_vocab + 1) // 2 * 2 + 4)
        got = kl_divergence.compare(logits, tokens, rows)
        assert np.abs(got.kld).max() < 16 / 65535
        scale, offset = np.ascontiguousarray(rows[:, :4]).view("<f4").T.astype(np.float64)
        decoded = scale[:, None] * rows[:, 4 : 4 + n_vocab] + offset[:, None]
        cut = want > want.max(axis=1, keepdims=True) - 16
        assert np.abs(decoded - want)[cut].max() < 16 / 65535 / 2 + 1e-5
        if n_vocab % 2:
            assert not rows[:, -1].any()


# ---- llama-perplexity ----


def text_models(shared):
    yield DEMO, SAMPLE, 12
    for name in ("docs-4m-f16", "docs-23m-f16"):
        if (shared / f"{name}.gguf").exists():
            yield shared / f"{name}.gguf", shared / "held-out.txt", 32


def test_digits_are_those_of_llama_perplexity(macko):
    for model, text, chunks in text_models(generators.SHARED):
        args = ["-m", model, "-f", text, "--chunks", chunks]
        theirs = upstream.run("llama-perplexity", *args)
        ours = macko("perplexity", *args)
        final = re.search(r"Final estimate: PPL = \S+ \+/- \S+", theirs.stderr + theirs.stdout)[0]
        assert ours.out.strip() == final
        running = re.search(r"\[1\].*", theirs.stdout)[0]
        assert running in ours.err


def test_divergence_is_that_of_llama_perplexity(tmp_path, macko, pruned):
    """Both programs write the same file byte for byte, and print the same statistics for it."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    args = ["-m", DEMO, "-f", SAMPLE, "-c", 256, "--chunks", 10, "--kl-divergence-base"]
    upstream.run("llama-perplexity", *args, theirs)
    assert macko("perplexity", *args, ours).code == 0
    assert ours.read_bytes() == theirs.read_bytes()
    args = ["-m", pruned, "-c", 256, "--kl-divergence", "--kl-divergence-base", ours]
    want, got = upstream.run("llama-perplexity", *args).stdout, macko("perplexity", *args)
    assert got.out.strip() == want[want.index("======") :].strip()
    rows = re.findall(r"^ +\d+ .* %$", want, re.MULTILINE)
    assert len(rows) == 10 and all(row in got.err for row in rows)


# ---- bad input ----


def test_bad_text_or_model_is_refused_in_one_line(tmp_path, macko):
    out = tmp_path / "base"
    for args, parts in texts_and_models(tmp_path):
        one_line(macko("perplexity", *args, "--kl-divergence-base", out), *parts)
    for args, message in (
        (["-c", 8], "-f is missing"),
        (["-f", SAMPLE, "-c", 3], "-c 3"),
        (["-f", SAMPLE, "--chunks", 0], "--chunks 0"),
        (["--kl-divergence"], "--kl-divergence-base is missing"),
    ):
        one_line(macko("perplexity", "-m", DEMO, *args), message, code=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == FILES
    out.write_text("mine")
    one_line(macko("perplexity", "-m", DEMO, "-f", SAMPLE, "--kl-divergence-base", out), out, "exists; use --force")
    assert out.read_text() == "mine"


def test_bad_base_file_is_refused_in_one_line(tmp_path, macko, base):
    good = base.read_bytes()
    tiny = tmp_path / "tiny.gguf"
    tiny.write_bytes(gguf_bytes.write(tiny_models.make("llama")))
    rows_at = 20 + 4 * 8 * 128
    nan = struct.pack("<f", float("nan"))

    def changed(at, data):
        return good[:at] + data + good[at + len(data) :]

    for label, data, model, text in (
        ("magic", b"GGUF" + good[4:], DEMO, "does not look like"),
        ("empty", b"", DEMO, "does not look like"),
        ("header", good[:15], DEMO, "is truncated"),
        ("torn", good[:-1], DEMO, "truncated or damaged"),
        ("long", good + b"\0", DEMO, "truncated or damaged"),
        ("chunks", changed(16, struct.pack("<i", 0)), DEMO, "n_chunk 0 cannot be"),
        ("context", changed(8, struct.pack("<i", -1)), DEMO, "n_ctx -1"),
        ("huge", changed(8, struct.pack("<ii", 1 << 24, 1 << 24)), DEMO, "truncated or damaged"),
        ("token", changed(20, struct.pack("<i", 4096)), DEMO, "holds a token outside 0 ... 4095"),
        ("nan", changed(rows_at, nan), DEMO, "chunk 1: a scale or offset is not a finite number"),
        ("vocabulary", good, tiny, "4096 tokens in its vocabulary"),
    ):
        path = tmp_path / label
        path.write_bytes(data)
        done = macko("perplexity", "-m", model, "--kl-divergence", "--kl-divergence-base", path)
        one_line(done, path, text)
    few = macko("perplexity", "-m", DEMO, "--kl-divergence", "--kl-divergence-base", base, "--chunks", "1")
    one_line(few, base, "at least 100")


def test_interrupted_run_leaves_no_file(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(SAMPLE.read_bytes() * 20)
    args = ["-m", DEMO, "-f", text, "--kl-divergence-base", tmp_path / "base"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ggml_macko.commands.cli", "perplexity", *map(str, args)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    begin = time.monotonic()
    while (
        not any(p.stat().st_size > 100 for p in tmp_path.glob(".base.*.partial"))
        and process.poll() is None
        and time.monotonic() - begin < 120
    ):
        time.sleep(0.01)
    (partial,) = tmp_path.glob(".base.*.partial")
    assert partial.read_bytes()[:8] != b"_logits_"  # no reader accepts it as a complete file
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 130 and out == b""
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_failed_evaluation_is_an_error(tmp_path, monkeypatch):
    import llama_cpp.llama_cpp as api

    monkeypatch.setattr(api, "llama_decode", lambda context, batch: 1)
    with pytest.raises(errors.MackoError, match="could not evaluate"):
        perplexity.perplexity(DEMO, SAMPLE, n_chunks=2, n_gpu_layers=0)


def test_long_text_is_measured_in_part_by_default(tmp_path, macko):
    """Only the first 8192 tokens are measured, with a note."""
    text = tmp_path / "long.txt"
    text.write_text(SAMPLE.read_text() * 2)
    args = ["-m", DEMO, "-f", text, "-c", 128, "--json"]
    done = {chunks: macko("perplexity", *args, *chunks) for chunks in ((), ("--chunks", 64), ("--chunks", -1))}
    note = "note: the first 64 chunks of the text; --chunks -1 measures all of it"
    assert [note in d.err for d in done.values()] == [True, False, False]
    n_tokens = [json.loads(d.out)["n_tokens"] for d in done.values()]
    assert n_tokens[0] == n_tokens[1] == 64 * 63 < n_tokens[2]
    assert note not in macko("perplexity", "-m", DEMO, "-f", SAMPLE, "-c", 512).err
