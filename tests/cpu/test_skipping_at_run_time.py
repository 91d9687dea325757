"""GGML_MACKO_LOAD=act-thresholds on the CPU: one token at a time, an input of down below its file's threshold counts as
zero, as `macko perplexity --skip file` measures it; otherwise nothing changes. That bits do not depend on the number of
threads for other shapes, on columns being used, and what is no neuron, is checked by test-graph-plan.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import gguf
import numpy as np
import pytest

from ggml_macko import convert, errors
from ggml_macko.evaluation import skipping
from ggml_macko.evaluation.activations import Tap, Tensor, weight_name
from ggml_macko.evaluation.calibrate_activations import calibrate_activations
from ggml_macko.evaluation.text_model import TextModel
from ggml_macko.gguf.activation_keys import read_rule
from ggml_macko.gguf.files import Model
from support import generators, tiny_models
from support import gguf_bytes as gb
from support.activation_keys import HOSTILE, set_act
from support.bad_input import SAMPLE
from support.llama_logits import logits, logits_one_by_one, open_model

OPTIONS = {"n_ctx": 64, "n_threads": 2, "n_gpu_layers": 0}
ONE_BY_ONE = {"n_ctx": 64, "n_batch": 64, "n_ubatch": 1}
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-149  # only zeros are below it
OLD_ENOUGH = 3.1  # seconds, for a model whose weights are kept in a cache
DOWN = "ffn_down.weight"


class Downs(Tap):
    """Keeps the inputs and the results of the products with down: name -> [(x, y), ...], one of each ubatch."""

    def __init__(self):
        super().__init__()
        self.products = {}

    def wants(self, node):
        return node.op == self.ggml.mul_mat and weight_name(Tensor.from_address(node.src[0]).name).endswith(DOWN)

    def take(self, address, node):
        x, y = (self.array(a, np.float32)[0, 0].copy() for a in (node.src[1], address))
        self.products.setdefault(weight_name(Tensor.from_address(node.src[0]).name), []).append((x, y))
        return True


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """Dense models 70 % of whose weights are zero: name -> path. Another seed each time."""
    folder = tmp_path_factory.mktemp("models")
    seed = int(np.random.SeedSequence().entropy % 2**31)
    print("seed", seed)  # pytest shows it if a test fails

    def path(name):
        out = folder / f"{name}.gguf"
        if not out.exists():
            if name == "docs-4m":
                return generators.DEMO
            out.write_bytes(gb.write(tiny_models.make(name, seed)))
        return out

    return path


@pytest.fixture(scope="module")
def calibrated(source_of, tmp_path_factory):
    """Makes a sparse file with thresholds: (name, score, share, type of convert) -> path."""
    folder = tmp_path_factory.mktemp("calibrated")

    def make(name, score="product", share=0.7, kind="macko"):
        dense, out = (folder / f"{name}-{score}-{share}-{k}.gguf" for k in ("dense", kind))
        if not out.exists():
            skip = skipping.SkipOptions(share, SAMPLE, score, n_chunks=2)
            calibrate_activations(source_of(name), dense, skip, force=True, **OPTIONS)
            convert(dense, out, kind)
        return out

    return make


def with_thresholds(path, out, value):
    """A copy with one threshold for all parts."""
    file = gb.read(path.read_bytes())
    n = len(file.key("macko.act.part.threshold").value)
    set_act(file, "act.part.threshold", gb.F32, [value] * n)
    out.write_bytes(gb.write(file))
    return out


def without_keys(path, out):
    file = gb.read(path.read_bytes())
    for name in [k.name for k in file.keys if k.name.startswith(b"macko.act.")]:
        file.drop(name.decode())
    out.write_bytes(gb.write(file))
    return out


def rule_of(path):
    with Model(path) as model:
        return read_rule(model)


def text(path):
    with TextModel(path, **ONE_BY_ONE) as model:
        return model.read_chunks(SAMPLE, 3)[2:]


def evaluated(path, tap=None, n_threads=2, **options):
    """Logits of a chunk of the text, one token at a time unless the options say otherwise."""
    with TextModel(path, tap=tap, n_threads=n_threads, **{**ONE_BY_ONE, **options}) as model:
        return model.evaluate(model.read_chunks(SAMPLE, 3)[2:]).copy()


def measured(path, score, rules):
    """The same of a model whose neurons are zeroed in llama.cpp's graph by the thresholds of another file."""
    with skipping.SkippingModel(path, score, n_threads=2, **ONE_BY_ONE) as m:
        chunks = m.model.read_chunks(SAMPLE, 3)
        m.find_parts(chunks[:1])
        m.skip_by(rule_of(rules))
        found = m.model.evaluate(chunks[2:]).copy()
        assert 0.5 < skipping.skipped_share(m.skipped()) < 0.9
    return found


def assert_same_bits(found, want):
    np.testing.assert_array_equal(found.view(np.uint32), want.view(np.uint32))


def load_log(path, capfd):
    """What a load says of act-thresholds or of thresholds."""
    capfd.readouterr()
    open_model(path, 64, verbose=True)
    return [line for line in capfd.readouterr().err.splitlines() if "act-thresholds" in line or "thresholds" in line]


# ---- the product ----


@pytest.mark.parametrize("share", [0.0, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("score", ["product", "wina"])
@pytest.mark.parametrize("name", ["docs-4m", "qwen3", "gemma2", "phi3", "arcee"])
def test_product_is_that_of_numpy_with_small_inputs_zeroed(
    source_of, calibrated, tmp_path, monkeypatch, name, score, share
):
    monkeypatch.setenv("GGML_MACKO_LOAD", "act-thresholds")
    path = calibrated(name, score, 0.0 if share == 1 else share)
    if share == 1:
        path = with_thresholds(path, tmp_path / "all.gguf", LARGEST)
    thresholds = {part.down: np.float32(part.threshold) for part in rule_of(path).parts}
    tap = Downs()
    evaluated(path, tap)
    weights = {
        t.name: np.asarray(t.data, np.float64) for t in gguf.GGUFReader(source_of(name)).tensors if DOWN in t.name
    }
    assert weights.keys() == thresholds.keys() == tap.products.keys() and len(weights) >= 2
    n_below = n = 0
    for down, products in tap.products.items():
        w = weights[down]
        norms = np.sqrt((w**2).sum(axis=0)).astype(np.float32) if score == "wina" else np.float32(1)
        assert len(products) == 64
        for x, y in products:
            below = np.abs(x) * norms < thresholds[down]
            n_below += below.sum()
            n += x.size
            x = np.where(below, 0, x).astype(np.float64)
            want, magnitude = x @ w.T, np.abs(x) @ np.abs(w).T
            # x is rounded to F16, and sums to float32
            assert (np.abs(y - want) <= magnitude * (2.0**-11 + x.size * 2.0**-24) + 1e-6 * np.abs(w).max()).all()
    assert n_below / n == pytest.approx(share, abs=0.1 if 0 < share < 1 else 0)


@pytest.mark.parametrize("score", ["product", "wina"])
@pytest.mark.parametrize("name", ["docs-4m", "qwen3", "gemma2", "phi3", "arcee"])
def test_logits_have_the_bits_of_the_python_measurement(calibrated, tmp_path, monkeypatch, name, score):
    """There, neurons are zeroed in llama.cpp's graph. Its model keeps columns, too, but skips nothing by itself."""
    monkeypatch.setenv("GGML_MACKO_LOAD", "act-thresholds")
    path = calibrated(name, score)
    other = with_thresholds(path, tmp_path / "other.gguf", SMALLEST)
    want = measured(other, score, path)
    assert np.isfinite(want).all() and (want != evaluated(other)).any()
    for n_threads in (1, 2):
        assert_same_bits(evaluated(path, n_threads=n_threads), want)
    with monkeypatch.context() as patch:
        patch.delenv("GGML_MACKO_LOAD")
        by_rows = measured(path, score, path)
    if name == "docs-4m":  # what down adds to the others is small
        assert (by_rows != want).any()  # another order of sums: columns were used
    monkeypatch.setenv("GGML_MACKO_DISABLE", "relu-skip")  # all columns are read, those of a zero, too
    assert_same_bits(evaluated(path), want)


def test_logits_are_those_of_a_float64_model_that_skips(calibrated, monkeypatch):
    """The whole forward pass, which shares no code with llama.cpp."""
    from reference.llama_float64 import Float64Llama

    class Skipped(np.ndarray):
        """down: zeroes the small inputs of the product x @ down.T."""

        def __array_finalize__(self, other):
            self.threshold = getattr(other, "threshold", None)

        def __rmatmul__(self, x):
            return np.where(np.abs(x) < self.threshold, 0, x) @ np.asarray(self)

    path = calibrated("docs-4m")
    llama = Float64Llama(str(generators.DEMO))
    for part in rule_of(path).parts:
        down = llama.weights[part.down].view(Skipped)
        down.threshold = part.threshold
        llama.weights[part.down] = down
    tokens = text(path)
    with TextModel(path, **ONE_BY_ONE) as model:
        want = llama.logits(model.as_sequences(tokens)[0].tolist())
    plain = evaluated(path)[0]
    monkeypatch.setenv("GGML_MACKO_LOAD", "act-thresholds")
    error, change = (np.sqrt(((x - want) ** 2).mean()) for x in (evaluated(path)[0], plain))
    # an input that F16 rounding moves across a threshold is zero in one of the two
    assert error < 0.25 * change


# ---- where nothing is skipped ----


@pytest.mark.parametrize("value", [None, "", "strict", "strict,sparse-only"])
def test_nothing_changes_unless_the_variable_has_the_word(calibrated, tmp_path, monkeypatch, capfd, value):
    if value is not None:
        monkeypatch.setenv("GGML_MACKO_LOAD", value)
    path = calibrated("docs-4m")
    assert load_log(path, capfd) == []
    assert_same_bits(evaluated(path), evaluated(without_keys(path, tmp_path / "plain.gguf")))


def test_nothing_is_skipped_of_several_tokens_at_once(calibrated, monkeypatch):
    path = calibrated("docs-4m")
    tokens = text(path)[0].tolist()
    want = logits(open_model(path, 64, logits_all=True), tokens)
    monkeypatch.setenv("GGML_MACKO_LOAD", "act-thresholds")
    assert_same_bits(logits(open_model(path, 64, logits_all=True), tokens), want)


def test_thresholds_of_zero_skip_nothing(calibrated, tmp_path, monkeypatch):
    path = calibrated("docs-4m", share=0.0)
    want = evaluated(without_keys(path, tmp_path / "plain.gguf"))
    monkeypatch.setenv("GGML_MACKO_LOAD", "act-thresholds")
    assert_same_bits(evaluated(path), want)


@pytest.mark.parametrize(
    "what, message",
    [
        ("cats", "its thresholds are for the gate (score cats), for which there is no kernel"),
        ("no keys", "the file has no thresholds"),
        ("later version", "its thresholds have a later version: upgrade"),
        ("quantized", "no weight with a threshold is sparse with values that are not quantized"),
        ("no columns", "GGML_MACKO_DISABLE=csc"),
        ("dense", ""),
    ],
)
def test_one_line_says_why_nothing_is_skipped(calibrated, tmp_path, monkeypatch, capfd, what, message):
    kind = "sparse-q8" if what == "quantized" else "macko"
    path = calibrated("docs-4m", "cats" if what == "cats" else "product", kind=kind)
    if what == "no keys":
        path = without_keys(path, tmp_path / "plain.gguf")
    elif what == "later version":
        file = gb.read(path.read_bytes())
        file.set("macko.act.version", gb.U32, 2)
        path = tmp_path / "later.gguf"
        path.write_bytes(gb.write(file))
    elif what == "no columns":
        monkeypatch.setenv("GGML_MACKO_DISABLE", "csc")
    elif what == "dense":
        path = path.with_name(path.name.replace("macko", "dense"))
    want = evaluated(path)
    monkeypatch.setenv("GGML_MACKO_LOAD", "act-thresholds")
    (line,) = load_log(path, capfd)
    assert "GGML_MACKO_LOAD=act-thresholds skips nothing: " in line and str(path) in line and line.endswith(message)
    assert_same_bits(evaluated(path), want)


def test_one_line_says_how_many_weights_have_thresholds(calibrated, monkeypatch, capfd):
    monkeypatch.setenv("GGML_MACKO_LOAD", "act-thresholds")
    path = calibrated("docs-4m")
    assert load_log(path, capfd) == [
        f"ggml-macko: {path}: on the CPU, inputs below the thresholds of 4 weights count as zero, one token at a time"
    ]


def test_parts_that_are_not_named_are_not_skipped(calibrated, tmp_path, monkeypatch):
    monkeypatch.setenv("GGML_MACKO_LOAD", "act-thresholds")
    file = gb.read(with_thresholds(calibrated("docs-4m"), tmp_path / "two.gguf", LARGEST).read_bytes())
    for name in ("down", "share", "threshold"):
        del file.key(f"macko.act.part.{name}").value[1:3]
    (tmp_path / "two.gguf").write_bytes(gb.write(file))
    tap = Downs()
    evaluated(tmp_path / "two.gguf", tap)
    for layer in range(4):
        is_zero = [not y.any() for _, y in tap.products[f"blk.{layer}.{DOWN}"]]
        assert all(is_zero) if layer in (0, 3) else not any(is_zero)


# ---- keys from strangers ----


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_keys_are_refused_in_one_line(calibrated, tmp_path, monkeypatch, name):
    monkeypatch.setenv("GGML_MACKO_LOAD", "act-thresholds")
    file = gb.read(calibrated("docs-4m").read_bytes())
    *change, message = HOSTILE[name]
    set_act(file, *change)
    path = tmp_path / "bad.gguf"
    path.write_bytes(gb.write(file))
    with pytest.raises(errors.MackoError) as e:
        open_model(path, 64)
    assert message in str(e.value) and str(path) in str(e.value) and "\n" not in str(e.value)


def test_part_that_is_no_matrix_is_refused_in_one_line(calibrated, tmp_path, monkeypatch):
    path = tmp_path / "bad.gguf"
    for other in (b"blk.9.ffn_down.weight", b"blk.0.attn_norm.weight", b"\x1b[2J\n"):
        file = gb.read(calibrated("docs-4m").read_bytes())
        file.key("macko.act.part.down").value[2] = other
        path.write_bytes(gb.write(file))
        monkeypatch.delenv("GGML_MACKO_LOAD", raising=False)
        open_model(path, 64)  # nobody asks for its thresholds
        monkeypatch.setenv("GGML_MACKO_LOAD", "act-thresholds")
        with pytest.raises(errors.MackoError) as e:
            open_model(path, 64)
        shown = other.decode().replace("\x1b", "\\x1b").replace("\n", "\\x0a")
        assert f"macko.act.part.down: element 2 is '{shown}' (a matrix of the model)" in str(e.value)
        assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_matrix_that_is_no_down_is_multiplied_as_it_is(calibrated, tmp_path, monkeypatch):
    path = calibrated("docs-4m", share=0.0)
    want = evaluated(without_keys(path, tmp_path / "plain.gguf"))
    file = gb.read(path.read_bytes())
    names = [b"blk.0.attn_q.weight", b"blk.1.ffn_up.weight", b"blk.2.attn_output.weight", b"blk.3.ffn_gate.weight"]
    file.set("macko.act.part.down", gb.ARRAY, names, gb.STRING)
    set_act(file, "act.part.threshold", gb.F32, [LARGEST] * 4)
    (tmp_path / "bad.gguf").write_bytes(gb.write(file))
    monkeypatch.setenv("GGML_MACKO_LOAD", "act-thresholds")
    found = evaluated(tmp_path / "bad.gguf")
    # those whose inputs have zeros may be multiplied by columns, in another order
    assert np.abs(found - want).max() <= 2e-3 * want.std()


# ---- with other features ----


@pytest.mark.parametrize("score", ["product", "wina"])
def test_cached_weights_skip_as_those_that_were_read(calibrated, tmp_path, monkeypatch, capfd, score):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(calibrated("docs-4m", score).read_bytes())
    tokens = text(path)[0, :16].tolist()
    plain = logits_one_by_one(open_model(path, 64), tokens)
    monkeypatch.setenv("GGML_MACKO_LOAD", "act-thresholds")
    skipped = logits_one_by_one(open_model(path, 64), tokens)
    assert (skipped != plain).any()
    time.sleep(OLD_ENOUGH)

    def load():
        capfd.readouterr()
        got = logits_one_by_one(open_model(path, 64, weight_cache=True, verbose=True), tokens)
        return got, re.findall(r"ggml-macko: cache: (wrote|mapped)", capfd.readouterr().err)

    for want in (skipped, plain):  # what has norms and columns serves no load without them
        for expected in ("wrote", "mapped"):
            got, said = load()
            assert said == [expected]
            assert_same_bits(got, want)
        monkeypatch.delenv("GGML_MACKO_LOAD", raising=False)


def test_compressed_weights_skip_like_a_sparse_file(calibrated, monkeypatch):
    monkeypatch.setenv("GGML_MACKO_LOAD", "act-thresholds")
    path = calibrated("docs-4m")
    dense = path.with_name(path.name.replace("macko", "dense"))
    tokens = text(path)[0, :16].tolist()
    assert_same_bits(
        logits_one_by_one(open_model(dense, 64, compress=True), tokens),
        logits_one_by_one(open_model(path, 64), tokens),
    )


# ---- the tool ----


def test_table_is_complete_and_resumes(tmp_path):
    """lab/scripts/skip_speed.py; a model without zeros has no shares, and nobody measures it twice."""
    pytest.importorskip("matplotlib", reason="matplotlib is optional")
    dense, sparse = tmp_path / "dense.gguf", generators.DEMO
    file = tiny_models.make("llama")
    for t in file.tensors:
        t.data = t.data if len(t.ne) == 1 else (np.frombuffer(t.data, np.uint16) | np.uint16(1)).tobytes()
    dense.write_bytes(gb.write(file))
    quality = {f"{dense.stem}, product, uniform, 0.0": 14.0}
    quality |= {f"{sparse.stem}, product, uniform, {share}": 16 + share for share in (0.0, 0.5, 0.7)}
    (tmp_path / "quality.json").write_text(json.dumps({name: {"ppl": ppl} for name, ppl in quality.items()}))
    out = tmp_path / "speed.md"
    tool = generators.ROOT / "lab" / "scripts" / "skip_speed.py"
    command = [sys.executable, tool, dense, sparse, "-f", SAMPLE, "-c", 64]
    command += ["--chunks", 2, "--held-out", SAMPLE, "--quality", tmp_path / "quality.json", "--shares", "0.5,0.7"]
    command += ["-n", 4, "--rounds", 2, "--type", "macko", "-o", out]
    for _ in range(2):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        rows = [[c.strip() for c in line.split("|")[1:-1]] for line in out.read_text().splitlines() if line[:1] == "|"]
        assert rows[0] == ["model", "skipped", "tokens/s", "speed", "perplexity"]
        shares = [[dense.stem, "0 %"], *([sparse.stem, share] for share in ("0 %", "50 %", "70 %"))]
        assert [row[:2] for row in rows[2:]] == shares
        assert rows[2][3] == "1.00x" and rows[5][4] == "16.70 (+19.3 %)"
        assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
        assert len(json.loads(out.with_suffix(".json").read_text())["ms"]) == 4
        kept = json.loads(out.with_suffix(".json").read_text())
        kept["kernels"] = "as kept"
        out.with_suffix(".json").write_text(json.dumps(kept))
    assert "as kept" in out.read_text()
