"""macko calibrate: sums compared with float64 and with llama-imatrix, experts, resuming, damaged files, bad input."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import gguf
import numpy as np
import pytest

from ggml_macko import errors
from ggml_macko.evaluation import activations
from ggml_macko.evaluation.text_model import TextModel
from ggml_macko.gguf import imatrix
from ggml_macko.gguf.files import Model
from ggml_macko.gguf.outputs import AtomicOutput
from support import generators, gguf_bytes, tiny_models, upstream
from support.bad_input import FILES, SAMPLE, one_line, texts_and_models

DEMO = generators.DEMO


def tensors(path):
    """Tensor name -> float64 array, read by gguf-py."""
    return {t.name: t.data.astype(np.float64) for t in gguf.GGUFReader(path).tensors}


def tiny_model(tmp_path, name, change=lambda f: None):
    f = tiny_models.make(name)
    change(f)
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(gguf_bytes.write(f))
    return path


@pytest.fixture
def letters(tmp_path):
    """A text of about 1280 tokens for tiny vocabularies."""
    path = tmp_path / "letters.txt"
    path.write_text("".join(np.random.default_rng(3).choice(list("abab cdefgh"), 1500)))
    return path


@pytest.fixture(scope="module")
def demo_imatrix(tmp_path_factory):
    from ggml_macko.commands import cli

    path = tmp_path_factory.mktemp("imatrix") / "demo.gguf"
    assert cli.main(["calibrate", "-m", str(DEMO), "-f", str(SAMPLE), "-o", str(path), "--chunks", "4"]) == 0
    return path


# ---- sums ----


def test_sums_are_those_of_the_activations(demo_imatrix):
    """The expected inputs of the first block are computed without the model: normalized embeddings, BOS first."""
    with TextModel(DEMO) as model:
        tokens = model.read_chunks(SAMPLE, 4).copy()
    reader = gguf.GGUFReader(DEMO)
    weights = {t.name: t.data.astype(np.float64) for t in reader.tensors}
    if (
        reader.fields["tokenizer.ggml.add_bos_token"].contents()
        if "tokenizer.ggml.add_bos_token" in reader.fields
        else True
    ):
        tokens[:, 0] = reader.fields["tokenizer.ggml.bos_token_id"].contents()
    x = weights["token_embd.weight"][tokens.ravel()]
    x /= np.sqrt(
        (x**2).mean(axis=1, keepdims=True) + reader.fields["llama.attention.layer_norm_rms_epsilon"].contents()
    )
    want = ((x * weights["blk.0.attn_norm.weight"]) ** 2).sum(axis=0)
    found = tensors(demo_imatrix)
    np.testing.assert_allclose(found["blk.0.attn_q.weight.in_sum2"].ravel(), want, rtol=1e-5)

    for i in range(4):
        for a, b in (("attn_q", "attn_k"), ("attn_q", "attn_v"), ("ffn_gate", "ffn_up")):  # the same inputs
            np.testing.assert_array_equal(found[f"blk.{i}.{a}.weight.in_sum2"], found[f"blk.{i}.{b}.weight.in_sum2"])
    matrices = {t.name for t in reader.tensors if t.name.startswith("blk.") and t.data.ndim == 2}
    assert set(found) == {name + s for name in matrices for s in (".in_sum2", ".counts")}
    assert all(v.ravel().tolist() == [4 * 512] for k, v in found.items() if k.endswith(".counts"))


@pytest.mark.parametrize("name", ["llama-moe", "qwen3moe", "gpt-oss"])
def test_experts_have_sums_of_their_own(tmp_path, macko, letters, name):
    """Each row of the router goes to two experts: over all experts, sums and counts are twice the router's."""
    out = tmp_path / "i.gguf"
    done = macko("calibrate", "-m", tiny_model(tmp_path, name), "-f", letters, "-c", 64, "-o", out)
    assert done.code == 0, done.err
    found = tensors(out)
    for i in range(tiny_models.N_LAYER):
        router, gate, up, down = (f"blk.{i}.ffn_{x}.weight" for x in ("gate_inp", "gate_exps", "up_exps", "down_exps"))
        rows = found[router + ".counts"].item()
        for w in (gate, up, down):
            assert found[w + ".counts"].shape == (tiny_models.N_EXPERT, 1)
            assert found[w + ".counts"].sum() == 2 * rows
        assert len(set(found[gate + ".counts"].ravel())) > 1  # the experts have different counts
        np.testing.assert_allclose(
            found[gate + ".in_sum2"].sum(axis=0), 2 * found[router + ".in_sum2"].ravel(), rtol=1e-6
        )
        np.testing.assert_array_equal(found[gate + ".in_sum2"], found[up + ".in_sum2"])
        assert found[down + ".in_sum2"].shape == (tiny_models.N_EXPERT, tiny_models.N_FF)


def test_unused_expert_has_count_zero(tmp_path, macko, letters):
    """An expert that the router never chooses has count 0 and is reported; the others are measured."""

    def change(f):
        for i in range(tiny_models.N_LAYER):
            bias = f.tensor(f"blk.{i}.ffn_gate_inp.bias")
            values = np.frombuffer(bias.data, np.float32).copy()
            values[3] = -1e4
            bias.data = values.tobytes()

    model = tiny_model(tmp_path, "gpt-oss", change)
    out = tmp_path / "i.gguf"
    warning = "blk.1.ffn_up_exps.weight: 1 of 4 experts got no token"
    text = ["-f", letters, "-c", 64]
    for method in (["wanda", "--sequential"], ["sparsegpt"], ["alps"]):
        done = macko("prune", model, tmp_path / "p.gguf", "--sparsity", 0.5, "--force", *text, "--method", *method)
        assert done.code == 0 and done.err.count(f"warning: {warning}: magnitude decides") == 1, done.err
    done = macko("calibrate", "-m", model, *text, "-o", out)
    assert done.code == 0 and warning in done.err
    with Model(model) as m:
        read = imatrix.read(out)
        read.check_model(m)
        s = read.of(next(t for t in m.tensors if t.name == "blk.1.ffn_up_exps.weight"))
    assert s.counts[3] == 0 and not s.sums[3].any() and (s.counts[:3] > 0).all() and s.n_unused == 1


def test_sparse_model_has_the_statistics_of_its_dense_twin(tmp_path, macko, demo_imatrix):
    assert macko("convert", DEMO, tmp_path / "s.gguf").code == 0
    out = tmp_path / "i.gguf"
    assert macko("calibrate", "-m", tmp_path / "s.gguf", "-f", SAMPLE, "-o", out, "--chunks", 4).code == 0
    want, got = tensors(demo_imatrix), tensors(out)
    assert list(want) == list(got)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-2)  # the kernels round in another order
        assert abs(got[name].sum() / want[name].sum() - 1) < 1e-4


def test_quantized_values_without_an_imatrix_have_a_note(tmp_path, macko, demo_imatrix):
    for kind, options, has_note in [
        ("sparse-q4", [], True), ("sparse-q4", ["--imatrix", demo_imatrix], False), ("auto", [], False)
    ]:  # fmt: skip
        done = macko("convert", DEMO, tmp_path / "out.gguf", kind, *options, "--force")
        assert done.code == 0 and ("note: an imatrix" in done.err) == has_note, done.err


def test_sums_do_not_depend_on_batches(tmp_path, macko, demo_imatrix):
    """Batches contain several chunks or parts of one; no token is lost or counted twice, also with micro-batches."""
    for i, args in enumerate((["-b", 2048], ["-ub", 96], ["-b", 200])):
        out = tmp_path / f"{i}.gguf"
        assert macko("calibrate", "-m", DEMO, "-f", SAMPLE, "-o", out, "--chunks", 4, *args).code == 0
        want, got = tensors(demo_imatrix), tensors(out)
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-2)
            assert abs(got[name].sum() / want[name].sum() - 1) < 1e-4


def test_output_head_is_measured_on_request_only(tmp_path, macko, letters):
    model = tiny_model(tmp_path, "llama")
    out = tmp_path / "i.gguf"
    assert macko("calibrate", "-m", model, "-f", letters, "-c", 64, "-o", out).code == 0
    assert "output.weight.in_sum2" not in tensors(out)
    assert macko("calibrate", "-m", model, "-f", letters, "-c", 64, "-o", out, "--process-output", "--force").code == 0
    found = tensors(out)
    assert found["output.weight.counts"].item() == found["blk.0.attn_q.weight.counts"].item()


@pytest.mark.parametrize("wanted", ["blk.1.ffn_down.weight", "output.weight"])
def test_output_head_is_computed_only_if_its_inputs_are_wanted(tmp_path, letters, monkeypatch, wanted):
    class Inputs:
        taken = 0

        def wants(self, name):
            return name == wanted

        def take(self, weight, index, x):
            self.taken += len(x)

    asked = []
    on_node = activations.Tap._on_node

    def recorded(tap, address, ask, unused):
        if ask:
            asked.append(activations.Tensor.from_address(address).name)
        return on_node(tap, address, ask, unused)

    monkeypatch.setattr(activations.Tap, "_on_node", recorded)
    inputs = Inputs()
    with TextModel(tiny_model(tmp_path, "llama"), 64, n_ubatch=64, consumer=inputs) as model:
        for batch in model.batches(model.read_chunks(letters, 2)):
            model.evaluate(batch.chunks)
    assert inputs.taken == 2 * 64
    assert asked.count(b"result_norm") == 2
    assert asked.count(b"result_output") == (2 if wanted == "output.weight" else 0)


def test_consumer_sees_the_rows_of_the_products(tmp_path, letters):
    """The rows that a consumer gets have the products that llama.cpp computes next."""

    class Rows:
        def __init__(self):
            self.rows = {}

        def wants(self, name):
            return name.startswith("blk.0.")

        def take(self, weight, index, x):
            assert x.dtype == np.float32 and (weight.routed or not x.flags.writeable)
            self.rows.setdefault((weight, index), []).append(x.copy())

    rows = Rows()
    with TextModel(tiny_model(tmp_path, "llama-moe"), 64, n_batch=64, consumer=rows) as model:
        model.evaluate(model.read_chunks(letters, 1))
    shape = {w.name: (w.cols, w.n_mat, w.routed) for w, _ in rows.rows}
    assert shape["blk.0.attn_q.weight"] == (tiny_models.N_EMBD, 1, False)
    assert shape["blk.0.ffn_down_exps.weight"] == (tiny_models.N_FF, tiny_models.N_EXPERT, True)
    n = {key: sum(map(len, x)) for key, x in rows.rows.items()}
    assert sum(v for (w, i), v in n.items() if w.name == "blk.0.ffn_up_exps.weight") == 2 * 64
    # gated inputs of ffn_down from the rows of ffn_gate and ffn_up, expert by expert, in float64
    weights = {t.name: t.data.astype(np.float64) for t in gguf.GGUFReader(tmp_path / "llama-moe.gguf").tensors}
    for (w, i), parts in rows.rows.items():
        if w.name == "blk.0.ffn_down_exps.weight":
            x = np.concatenate(
                rows.rows[w._replace(name="blk.0.ffn_up_exps.weight", cols=tiny_models.N_EMBD), i]
            ).astype(np.float64)
            gate = x @ weights["blk.0.ffn_gate_exps.weight"][i].T
            want = gate / (1 + np.exp(-gate)) * (x @ weights["blk.0.ffn_up_exps.weight"][i].T)
            np.testing.assert_allclose(np.concatenate(parts), want, atol=1e-2 * np.abs(want).max())


def test_rows_in_device_memory_are_copied(tmp_path, macko, letters, monkeypatch):
    """The function is_host of ggml is replaced, so that all activations seem to be outside of host memory."""
    model = tiny_model(tmp_path, "qwen3moe")
    args = ["-m", model, "-f", letters, "-c", 64, "-o"]
    assert macko("calibrate", *args, tmp_path / "a.gguf").code == 0
    monkeypatch.setattr(activations._ggml(), "is_host", lambda buffer: False)
    assert macko("calibrate", *args, tmp_path / "b.gguf").code == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_error_in_a_consumer_is_raised():
    class Broken:
        def wants(self, name):
            return True

        def take(self, weight, index, x):
            raise RuntimeError(f"at {weight.name}")

    with TextModel(DEMO, consumer=Broken()) as model, pytest.raises(RuntimeError, match="at blk.0.attn_"):
        model.evaluate(model.read_chunks(SAMPLE, 1))


def test_signal_takes_effect_after_the_evaluation():
    class Interrupts:
        calls = 0

        def wants(self, name):
            return True

        def take(self, weight, index, x):
            Interrupts.calls += 1
            if Interrupts.calls == 1:
                os.kill(os.getpid(), signal.SIGINT)

    with TextModel(DEMO, consumer=Interrupts()) as model:
        with pytest.raises(KeyboardInterrupt):
            model.evaluate(model.read_chunks(SAMPLE, 1))
        assert Interrupts.calls > 20  # the evaluation was completed first
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- llama-imatrix ----


def assert_equal_statistics(ours, theirs):
    """llama-imatrix sums in float32: the error of n terms is at most n * 2^-24."""
    a, b = gguf.GGUFReader(ours), gguf.GGUFReader(theirs)
    fields = [{f.name: f.contents() for f in r.fields.values() if not f.name.startswith("GGUF.")} for r in (a, b)]
    assert fields[0] == fields[1]
    assert [(t.name, t.shape.tolist(), t.tensor_type) for t in a.tensors] == [
        (t.name, t.shape.tolist(), t.tensor_type) for t in b.tensors
    ]
    counts = {t.name: t.data.max() for t in b.tensors}
    for x, y in zip(a.tensors, b.tensors):
        if x.name.endswith(".counts"):
            assert x.data.tolist() == y.data.tolist()
        else:
            n = counts[x.name.replace(".in_sum2", ".counts")]
            np.testing.assert_allclose(x.data, y.data, rtol=min(n * 2.0**-24, 1e-4))


@pytest.mark.parametrize("name", ["demo", "docs-23m-f16", *tiny_models.ARCHITECTURES])
def test_imatrix_is_that_of_llama_imatrix(tmp_path, macko, letters, name):
    if name == "demo":
        args = ["-m", DEMO, "-f", SAMPLE]
    elif name == "docs-23m-f16":
        if not (generators.SHARED / f"{name}.gguf").exists():
            pytest.skip(f"no {name}.gguf in {generators.SHARED}")
        args = ["-m", generators.SHARED / f"{name}.gguf", "-f", generators.SHARED / "calibration.txt", "--chunks", 32]
    else:
        args = ["-m", tiny_model(tmp_path, name), "-f", letters, "-c", 64, "-b", 128]
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    upstream.run("llama-imatrix", *args, "-o", theirs, "--process-output", "--no-ppl")
    done = macko("calibrate", *args, "-o", ours, "--process-output")
    assert done.code == 0, done.err
    assert_equal_statistics(ours, theirs)


def test_each_tool_reads_the_others_file(tmp_path, macko, demo_imatrix):
    theirs = tmp_path / "theirs.gguf"
    upstream.run("llama-imatrix", "-m", DEMO, "--in-file", demo_imatrix, "-o", theirs)  # copies the file
    want, got = tensors(demo_imatrix), tensors(theirs)
    assert list(want) == list(got) and all(np.array_equal(want[k], got[k]) for k in want)
    with Model(DEMO) as model:
        imatrix.read(theirs).check_model(model)
    done = upstream.run("llama-quantize", "--imatrix", demo_imatrix, DEMO, tmp_path / "q.gguf", "Q4_K_M")
    assert "loaded 28 importance matrix entries" in done.stdout + done.stderr


# ---- resuming ----


def start(args):
    return subprocess.Popen(
        [sys.executable, "-m", "ggml_macko.commands.cli", "calibrate", *map(str, args)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_continues_to_the_same_bytes(tmp_path, macko, number):
    text = tmp_path / "text.txt"
    text.write_bytes(SAMPLE.read_bytes() * 8)
    args = ["-m", DEMO, "-f", text, "-ofreq", 1]
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    assert macko("calibrate", *args, "-o", whole).code == 0
    checkpoint = tmp_path / "out.gguf.checkpoint"
    process = start([*args, "-o", out])
    begin = time.monotonic()
    while not checkpoint.exists() and process.poll() is None and time.monotonic() - begin < 120:
        time.sleep(0.001)
    process.send_signal(number)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[number], err
    assert checkpoint.exists() and not out.exists()
    if number != signal.SIGKILL:
        assert "the same command continues" in err and not list(tmp_path.glob(".*"))
    done = macko("calibrate", *args, "-o", out)
    assert done.code == 0 and "continuing after" in done.err
    assert out.read_bytes() == whole.read_bytes()
    assert not checkpoint.exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("n, n_measured", [(1, 2), (2, 2), (3, 3), (-1, 4), (1000, 4)])
def test_interrupted_run_continues_with_another_number_of_chunks(tmp_path, macko, monkeypatch, n, n_measured):
    """With more chunks, the result equals an uninterrupted run byte for byte. With fewer, finished chunks remain."""
    from ggml_macko.evaluation import calibrate

    def stop(self, sums, chunks, save=calibrate.Checkpoint.save):
        save(self, sums, chunks)
        raise KeyboardInterrupt

    out, whole, text = (tmp_path / name for name in ("out.gguf", "whole.gguf", "text.txt"))
    text.write_bytes(SAMPLE.read_bytes()[:3800])  # 4 chunks
    args = ["-m", DEMO, "-f", text, "-c", 256, "-b", 256]
    with monkeypatch.context() as m:
        m.setattr(calibrate.Checkpoint, "save", stop)
        assert macko("calibrate", *args, "-o", out, "-ofreq", 2, "--chunks", 3).code == 130
    done = macko("calibrate", *args, "-o", out, "--chunks", n)
    assert done.code == 0 and f"{n_measured} chunks of 256 tokens" in done.out, done.err
    more = n < 0 or n >= 2
    assert ("continuing after 2 of" if more else "2 chunks are measured already, more than --chunks 1") in done.err
    assert macko("calibrate", *args, "-o", whole, "--chunks", n_measured).code == 0
    assert out.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "out.gguf.checkpoint").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError(), SystemExit(143)])
def test_failure_at_the_end_loses_no_work(tmp_path, macko, monkeypatch, error):
    """The name of the text is not UTF-8, which must not cause the failure."""
    out, text = tmp_path / "out.gguf", tmp_path / os.fsdecode(b"caf\xe9.txt")
    text.write_bytes(SAMPLE.read_bytes()[:3800])
    args = ["calibrate", "-m", DEMO, "-f", text, "-c", 256, "-o", out]
    with monkeypatch.context() as m:
        m.setattr(imatrix, "write", lambda *unused: (_ for _ in ()).throw(error))
        done = macko(*args)
        assert done.code not in (0, 2) and "4 of 4 chunks are done; the same command continues" in done.err, done.err
    monkeypatch.setattr(TextModel, "evaluate", None)  # must not be called again
    done = macko(*args)
    assert done.code == 0 and "continuing after 4 of 4 chunks" in done.err, done.err
    assert imatrix.read(out).datasets == [str(tmp_path / "caf\N{REPLACEMENT CHARACTER}.txt")]
    assert not (tmp_path / "out.gguf.checkpoint").exists()


def test_checkpoint_of_another_run_is_refused(tmp_path, macko, monkeypatch):
    """The checkpoint is of another model, text or batch size; the error names the difference."""
    from ggml_macko.evaluation import calibrate

    def stop(self, sums, chunks, save=calibrate.Checkpoint.save):
        save(self, sums, chunks)
        raise KeyboardInterrupt

    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_bytes(SAMPLE.read_bytes())
    other.write_bytes(SAMPLE.read_bytes()[600:])
    out = tmp_path / "out.gguf"
    checkpoint = tmp_path / "out.gguf.checkpoint"
    with monkeypatch.context() as m:
        m.setattr(calibrate.Checkpoint, "save", stop)
        assert macko("calibrate", "-m", DEMO, "-f", text, "-o", out, "-ofreq", 2).code == 130
    assert checkpoint.exists()
    pruned = tmp_path / "pruned.gguf"
    assert macko("prune", DEMO, pruned, "--sparsity", "0.8").code == 0
    for args, what in (
        (["-m", pruned, "-f", text], "model"),
        (["-m", DEMO, "-f", other], "text"),
        (["-m", DEMO, "-f", text, "-c", 256], "-c"),
        (["-m", DEMO, "-f", text, "-b", 1024], "-b"),
        (["-m", DEMO, "-f", text, "--process-output"], "--process-output"),
    ):
        one_line(macko("calibrate", *args, "-o", out), checkpoint, f"another {what}; delete it")
    data = bytearray(checkpoint.read_bytes())
    data[len(data) // 2] ^= 1  # in the sums
    checkpoint.write_bytes(data)
    one_line(macko("calibrate", "-m", DEMO, "-f", text, "-o", out), checkpoint, "is damaged")
    checkpoint.write_bytes(data[:5000])
    one_line(macko("calibrate", "-m", DEMO, "-f", text, "-o", out), checkpoint)
    assert not out.exists()


# ---- damaged and inconsistent files ----


def small_imatrix() -> gguf_bytes.GGUF:
    """An imatrix file for the model generators.tiny_tensors()."""
    f = gguf_bytes.GGUF()
    f.set("general.type", gguf_bytes.STRING, b"imatrix")
    f.set("imatrix.datasets", gguf_bytes.ARRAY, [b"text"], gguf_bytes.STRING)
    f.set("imatrix.chunk_count", gguf_bytes.U32, 2)
    f.set("imatrix.chunk_size", gguf_bytes.U32, 64)
    rng = np.random.default_rng(1)
    for name, cols, n_mat in (("blk.0.attn_q", 64, 1), ("blk.0.ffn_up_exps", 64, 4)):
        add(f, f"{name}.weight.in_sum2", [cols, n_mat], rng.random((n_mat, cols)) + 0.1)
        add(f, f"{name}.weight.counts", [1, n_mat], np.full(n_mat, 128.0))
    return f


def add(f, name, ne, values, type_id=0):
    dtype = {0: np.float32, 1: np.float16}[type_id]
    f.tensors.append(gguf_bytes.Tensor(name.encode(), list(ne), type_id, np.asarray(values).astype(dtype).tobytes()))


def change_value(name, at, value):
    def change(f):
        t = f.tensor(name)
        a = np.frombuffer(t.data, np.float32).copy()
        a[at] = value
        t.data = a.tobytes()

    return change


def change_tensor(name, ne, values, type_id=0):
    def change(f):
        f.tensors.remove(f.tensor(name))
        if ne is not None:
            add(f, name, ne, values, type_id)

    return change


Q, E = "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"


@pytest.mark.parametrize(
    "change, parts",
    [
        (change_value(Q + ".in_sum2", 5, np.nan), [Q, "in_sum2[5] is nan"]),
        (change_value(E + ".in_sum2", 64, np.inf), [E, "in_sum2[64] is inf"]),
        (change_value(Q + ".in_sum2", 63, -0.5), [Q, "in_sum2[63] is -0.5"]),
        (change_value(Q + ".in_sum2", slice(None), 0), [Q, "all sums are zero, over 128 rows"]),
        (change_value(E + ".in_sum2", slice(64, 128), 0), [E, "all sums of matrix 1 are zero"]),
        (change_value(Q + ".counts", 0, np.nan), [Q, "counts[0] is nan"]),
        (change_value(Q + ".counts", 0, -1), [Q, "counts[0] is -1"]),
        (change_value(Q + ".counts", 0, 1.5), [Q, "counts[0] is 1.5; a whole number"]),
        (change_value(Q + ".counts", 0, 1e30), [Q, "a whole number up to 2^53"]),
        (change_value(Q + ".counts", 0, 0), [Q, "all counts are 0"]),
        (change_value(E + ".counts", 2, 0), [E, "matrix 2 has sums, but its count is 0"]),
        (change_tensor(Q + ".counts", None, None), [Q, "counts is missing"]),
        (change_tensor(E + ".in_sum2", None, None), [E, "in_sum2 is missing"]),
        (change_tensor(E + ".counts", [1, 3], [1, 1, 1]), [E, "3 counts for 4 x 64 sums"]),
        (change_tensor(Q + ".counts", [2], [1, 1]), [Q, "2 counts for 1 x 64 sums"]),
        (change_tensor(Q + ".in_sum2", [64], np.ones(64), 1), [Q, "in_sum2 is not f32"]),
        (lambda f: f.tensors.clear(), ["holds no statistics"]),
        (lambda f: f.set("general.type", gguf_bytes.STRING, b"model"), ["general.type is 'model'"]),
        (lambda f: f.set("imatrix.chunk_count", gguf_bytes.STRING, b"2"), ["imatrix.chunk_count has another type"]),
        # valid files for another model
        (change_tensor(Q + ".in_sum2", [32], np.ones(32)), [Q, "1 x 32 sums and 1 counts", "has 1 x 64 columns"]),
        (
            lambda f: (
                change_tensor(E + ".in_sum2", [64, 2], np.ones((2, 64)))(f),
                change_tensor(E + ".counts", [1, 2], [1, 1])(f),
            ),
            [E, "2 x 64 sums and 2 counts", "has 4 x 64 columns"],
        ),
        (
            lambda f: (
                add(f, "blk.9.attn_q.weight.in_sum2", [64], np.ones(64)),
                add(f, "blk.9.attn_q.weight.counts", [1], [1]),
            ),
            ["blk.9.attn_q.weight", "has no such tensor", "another model"],
        ),
    ],
)
def test_bad_imatrix_is_refused_in_one_line(tmp_path, tiny, change, parts):
    f = small_imatrix()
    path = tmp_path / "i.gguf"
    path.write_bytes(gguf_bytes.write(f))
    with Model(tiny) as model:
        imatrix.read(path).check_model(model)  # the file was valid before the change
        change(f)
        path.write_bytes(gguf_bytes.write(f))
        with pytest.raises(errors.MackoError) as caught:
            imatrix.read(path).check_model(model)
    for part in [path, *parts]:
        assert str(part) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_imatrix_cut_anywhere_is_refused(tmp_path):
    whole = gguf_bytes.write(small_imatrix())
    path = tmp_path / "i.gguf"
    for n in [*range(0, 400, 7), *range(400, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:n])
        with pytest.raises(errors.MackoError, match="i.gguf"):
            imatrix.read(path)
    path.write_bytes(b"\x03\x00\x00\x00" + bytes(100))
    with pytest.raises(errors.MackoError, match="old format"):
        imatrix.read(path)
    with pytest.raises(OSError, match="missing"):
        imatrix.read(tmp_path / "missing")


def test_missing_statistics_are_named(tmp_path, tiny):
    path = tmp_path / "i.gguf"
    path.write_bytes(gguf_bytes.write(small_imatrix()))
    found = imatrix.read(path)
    with Model(tiny) as model:
        by_name = {t.name: t for t in model.tensors}
        with pytest.raises(errors.MackoError, match="did not find weights for blk.0.attn_k.weight"):
            found.of(by_name["blk.0.attn_k.weight"])
        s = found.of(by_name[E])
        assert s.sums.shape == (4, 64) and s.counts.tolist() == [128] * 4


def test_imatrix_is_written_as_it_was_read(tmp_path, demo_imatrix):
    copy = tmp_path / "copy.gguf"
    with AtomicOutput(copy, []) as output:
        imatrix.write(imatrix.read(demo_imatrix), output)
        output.seal()
        output.commit()
    assert copy.read_bytes() == demo_imatrix.read_bytes()


# ---- bad input ----


def test_bad_input_is_refused_in_one_line(tmp_path, macko):
    out = tmp_path / "out.gguf"
    for args, parts in (
        *texts_and_models(tmp_path),
        (["-m", DEMO, "-f", SAMPLE, "-o", tmp_path / "no" / "out.gguf"], [f"there is no folder {tmp_path / 'no'}"]),
    ):
        one_line(macko("calibrate", "-o", out, *args), *parts)
    for option, message in (
        (["-c", 8], "-c 8: at least 16"),
        (["-ofreq", 0], "--output-frequency"),
        (["--chunks", 0], "--chunks 0"),
    ):
        one_line(macko("calibrate", "-m", DEMO, "-f", SAMPLE, *option, "-o", out), message, code=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == FILES
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(DEMO.read_bytes())
    one_line(macko("calibrate", "-m", copy, "-f", SAMPLE, "-o", copy, "--force"), "input and output files are the same")
    out.write_text("mine")
    one_line(macko("calibrate", "-m", DEMO, "-f", SAMPLE, "-o", out), out, "exists; use --force")
    assert out.read_text() == "mine" and copy.read_bytes() == DEMO.read_bytes()


def test_model_that_computes_nan_gives_no_file(tmp_path, macko, letters):
    def change(f):
        norm = f.tensor("blk.1.ffn_norm.weight")
        values = np.frombuffer(norm.data, np.float32).copy()
        values[7] = np.nan
        norm.data = values.tobytes()

    out = tmp_path / "i.gguf"
    done = macko("calibrate", "-m", tiny_model(tmp_path, "llama", change), "-f", letters, "-c", 64, "-o", out)
    one_line(done, "blk.1.ffn_", "is not finite")
    assert not out.exists() and not list(tmp_path.glob(".i.gguf*")) and not list(tmp_path.glob("*.checkpoint"))


def test_name_of_a_copy_on_a_device_is_that_of_the_weight():
    assert activations.weight_name(b"CUDA0#blk.0.attn_k.weight#0") == "blk.0.attn_k.weight"
    assert activations.weight_name(b"blk.0.attn_k.weight") == "blk.0.attn_k.weight"
