"""`macko prune --experts`: which experts are removed, that nothing else changes, and what is refused."""

from __future__ import annotations

import json
import string
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_macko.benchmark import forms
from ggml_macko.evaluation.expert_statistics import experts_of_text
from ggml_macko.evaluation.text_model import TextModel
from ggml_macko.gguf.files import Model
from ggml_macko.pruning.experts import Mixture
from support import generators, gguf_bytes, tiny_models
from support.architectures import EXPERTS
from support.bad_input import one_line
from support.gguf_bytes import U32, Tensor

MIXTURES = ("llama-moe", "qwen3moe", "gpt-oss")
N_EXPERT = 8


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Writes a tiny mixture; change: a function of the file."""
    monkeypatch.setattr(tiny_models, "N_EXPERT", N_EXPERT)

    def write(arch, change=lambda f: None, name="model.gguf"):
        f = tiny_models.make(arch)
        change(f)
        (tmp_path / name).write_bytes(gguf_bytes.write(f))
        return tmp_path / name

    return write


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(np.random.default_rng(2).choice(list(string.ascii_letters), 3000)))
    return path


def values(t: Tensor) -> np.ndarray:
    return np.frombuffer(t.data, np.float16 if t.type == 1 else np.float32).reshape(t.ne[::-1]).copy()


def logits(path, n=40):
    with TextModel(path, n, n_batch=n, n_threads=2) as llama:
        return np.array(llama.evaluate(np.random.default_rng(1).integers(5, 90, (1, n))))[0]


def shapes(path):
    with Model(path) as m:
        return {t.name: t.ne for t in m.tensors}, {k.name: k.value() for k in m.keys}


# ---- which experts ----


def never_chosen(doomed):
    """Changes a model so that its routers never choose these experts: they score them by the negative of the first
    hidden state, which no part of the model changes.
    """

    def change(f):
        for t in f.tensors:
            name, w = t.name.decode(), values(t)
            if name == "token_embd.weight":
                w[:, 0] = 1
            elif name.endswith(("attn_output.weight", "attn_output.bias")):
                w[0] = 0
            elif name.endswith(("ffn_down_exps.weight", "ffn_down_exps.bias")):
                w[:, 0] = 0
            elif name.endswith("ffn_gate_inp.weight"):
                w[:, 0] = 0
                w[doomed, 0] = -1000
            t.data = w.tobytes()

    return change


@pytest.mark.parametrize("score", ["reap", "frequency"])
@pytest.mark.parametrize("arch", MIXTURES)
def test_model_without_experts_that_are_never_chosen_has_the_same_logits(tmp_path, macko, make, text, arch, score):
    doomed = [0, 3, 4, 7]
    model, out = make(arch, never_chosen(doomed)), tmp_path / "out.gguf"
    done = macko("prune", model, out, "--experts", 0.5, "--expert-score", score, "-f", text, "-c", 32)
    assert done.code == 0 and done.out.startswith("4 of 8 experts remain in each of 2 blocks"), done.err + done.out
    keys = shapes(out)[1]
    assert keys["macko.prune.experts.kept"] == [1, 2, 5, 6] * tiny_models.N_LAYER
    name = keys["general.architecture"]
    assert (keys[f"{name}.expert_count"], keys[f"{name}.expert_used_count"]) == (4, 2)
    np.testing.assert_allclose(logits(out), logits(model), atol=2e-3)  # llama.cpp rounds activations to F16
    other = tmp_path / "other.gguf"
    assert macko("prune", model, other, "--experts", 0.5, "--expert-score", "random", "--seed", 1).code == 0
    assert np.abs(logits(other) - logits(model)).max() > 0.1  # the experts matter


class _Inputs:
    """A Consumer that keeps the inputs of the experts of the first block."""

    def __init__(self):
        self.rows = {}

    def wants(self, name):
        return name == "blk.0.ffn_up_exps.weight"

    def take(self, weight, index, x):
        self.rows.setdefault(index, []).append(np.array(x, dtype=np.float64))


def activation(arch, gate, up):
    if arch != "gpt-oss":
        return gate / (1 + np.exp(-gate)) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


@pytest.mark.parametrize("arch", MIXTURES)
def test_score_is_the_mean_norm_of_weight_times_output_over_the_routed_tokens(make, text, arch):
    model = make(arch)
    found = experts_of_text(model, text, n_ctx=32, n_chunks=3)
    assert found.n_chunks == 3 and set(found.by_block) == {"blk.0.", "blk.1."}
    statistics, inputs = found.by_block["blk.0."], _Inputs()
    with TextModel.opened_with(model, text, 32, 3, evenly=True, n_batch=32, consumer=inputs) as (llama, chunks):
        for _, batch in llama.batches(chunks):
            llama.evaluate(batch)
    with Model(model) as m:
        w = {t.name: t.read_values().reshape(t.ne[::-1]).astype(np.float64) for t in m.tensors}

    def of(kind, e):
        return w[f"blk.0.{kind}.weight"][e].T, w.get(f"blk.0.{kind}.bias", np.zeros(N_EXPERT))[e]

    assert sum(len(x) for rows in inputs.rows.values() for x in rows) == 2 * 3 * 32
    for e in range(N_EXPERT):
        rows = np.concatenate(inputs.rows.get(e, [np.zeros((0, tiny_models.N_EMBD))]))
        scores = rows @ w["blk.0.ffn_gate_inp.weight"].T + w.get("blk.0.ffn_gate_inp.bias", 0)
        best = np.sort(scores, axis=1)[:, -2:]  # a softmax over the chosen ones, in all three architectures
        weight = np.exp(scores[:, e]) / np.exp(best).sum(axis=1)
        gate, up = (rows @ m + b for m, b in (of("ffn_gate_exps", e), of("ffn_up_exps", e)))
        down, bias = of("ffn_down_exps", e)
        norms = weight * np.linalg.norm(activation(arch, gate, up) @ down + bias, axis=1)
        assert statistics.n_tokens[e] == len(rows)
        wanted = norms.mean() if len(rows) else 0.0
        assert statistics.mean_norms[e] == pytest.approx(wanted, rel=0.01)  # llama.cpp rounds inputs to F16
    assert len(set(statistics.n_tokens)) > 2 and len(set(statistics.mean_norms)) > 2


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_lowest_scores_of_each_group_are_removed(data):
    n_groups, unit = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2]))
    n_units = data.draw(st.integers(3, 8))
    n = n_groups * n_units * unit
    mixture = Mixture("x", n, 1, n_groups, 1, unit, ("blk.0.",))
    share = Fraction(data.draw(st.integers(0, 100)), 100)
    n_removed = int(share * n_units)
    scores = np.array(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)), dtype=np.float64)
    if not 0 < n_removed <= n_units - 2:
        with pytest.raises(ValueError, match="--experts"):
            mixture.n_kept(share, Path("x"))
        return
    n_kept = mixture.n_kept(share, Path("x"))
    assert n_kept == n - n_removed * n_groups * unit
    kept = mixture.kept(scores, n_kept)
    wanted = set(range(n))
    for group in range(n_groups):
        units = range(group * n_units, (group + 1) * n_units)
        worst = sorted(units, key=lambda u: (scores[u * unit : (u + 1) * unit].sum(), u))[:n_removed]
        wanted -= {u * unit + i for u in worst for i in range(unit)}
    assert kept.tolist() == sorted(wanted)


# ---- what is written ----


def with_selection_bias_and_scales(f):
    rng = np.random.default_rng(9)
    for i in range(tiny_models.N_LAYER):
        for name in ("exp_probs_b.bias", "ffn_down_exps.scale"):
            data = rng.random(N_EXPERT, dtype=np.float32).tobytes()
            f.tensors.append(Tensor(f"blk.{i}.{name}".encode(), [N_EXPERT], 0, data))


@pytest.mark.parametrize("arch", MIXTURES)
def test_remaining_experts_and_all_other_tensors_are_those_of_the_model(tmp_path, macko, make, arch):
    model, out = make(arch, with_selection_bias_and_scales), tmp_path / "out.gguf"
    done = macko("prune", model, out, "--experts", 0.4, "--expert-score", "random", "--seed", 2)
    assert done.code == 0, done.err
    keys = shapes(out)[1]
    kept = np.array(keys["macko.prune.experts.kept"]).reshape(tiny_models.N_LAYER, 5)
    assert all(np.all(np.diff(row) > 0) for row in kept) and kept[0].tolist() != kept[1].tolist()
    before, after = generators.dense_bytes(model), generators.dense_bytes(out)
    assert list(before) == list(after)
    n_sliced = 0
    for name, (type_id, shape, data) in before.items():
        if "exp" not in name and "ffn_gate_inp" not in name:
            assert after[name] == before[name], name
            continue
        n_sliced += 1
        experts = np.frombuffer(data, np.uint8).reshape(N_EXPERT, -1)
        assert tuple(after[name][1]) == (*shape[:-1], 5) and after[name][0] == type_id, name
        assert after[name][2] == experts[kept[int(name.split(".")[1])]].tobytes(), name
    assert n_sliced == tiny_models.N_LAYER * (6 + 4 * (arch == "gpt-oss"))


def test_quantized_experts_keep_their_type(tmp_path, macko, make):
    forms.quantize(make("qwen3moe"), tmp_path / "q8_0.gguf", "Q8_0", 1)
    done = macko("prune", tmp_path / "q8_0.gguf", tmp_path / "out.gguf", "--experts", 0.5, "--expert-score", "random")
    assert done.code == 0 and "dequantized" not in done.err, done.err
    before, after = (generators.dense_bytes(tmp_path / name) for name in ("q8_0.gguf", "out.gguf"))
    name = "blk.1.ffn_down_exps.weight"
    assert before[name][0] == after[name][0] == 8 and len(after[name][2]) * 2 == len(before[name][2])
    assert np.isfinite(logits(tmp_path / "out.gguf")).all()


@pytest.mark.parametrize("method", ["magnitude", "wanda", "alps"])
def test_zeros_are_made_in_the_remaining_experts(tmp_path, macko, make, text, method):
    """One command does what two do, one after the other."""
    model, small, twice, once = make("qwen3moe"), *(tmp_path / f"{x}.gguf" for x in ("small", "twice", "once"))
    experts = ["--experts", 0.5, "-f", text, "-c", 32, "--chunks", 4]
    zeros = ["--sparsity", 0.9, "--method", method, "-f", text, "-c", 32, "--chunks", 4, "-dev", "none"]
    assert macko("prune", model, small, *experts).code == 0
    assert macko("prune", small, twice, *zeros).code == 0
    done = macko("prune", model, once, *experts, *zeros)
    assert done.code == 0 and "4 of 8 experts remain" in done.out and "per " in done.out, done.err
    assert once.read_bytes() == twice.read_bytes()
    keys = shapes(once)[1]
    assert keys["macko.prune.experts.score"] == "reap" and keys["macko.prune.method"] == method
    assert {p.name for p in tmp_path.iterdir()} == {"model.gguf", "small.gguf", "twice.gguf", "once.gguf", "text.txt"}


def test_dry_run_prints_the_same_report_and_writes_nothing(tmp_path, macko, make, text):
    model = make("llama-moe")
    for more in ([], ["--sparsity", 0.5]):
        options = ["--experts", 0.5, "-f", text, "-c", 32, *more]
        files = sorted(tmp_path.iterdir())
        dry = macko("prune", model, *options, "--dry-run")
        assert dry.code == 0 and sorted(tmp_path.iterdir()) == files, dry.err
        assert dry.out == macko("prune", model, tmp_path / "out.gguf", *options).out
        assert macko("prune", model, tmp_path / "out.gguf", *options).code == 1  # it exists
        (tmp_path / "out.gguf").unlink()


def test_seed_decides_the_random_choice(tmp_path, macko, make):
    model, outs = make("qwen3moe"), []
    for seed in (0, 0, 1):
        outs.append(tmp_path / f"{len(outs)}.gguf")
        options = ["--experts", 0.5, "--expert-score", "random", "--seed", seed]
        assert macko("prune", model, outs[-1], *options).code == 0
    a, b, c = (out.read_bytes() for out in outs)
    assert a == b != c


@pytest.mark.parametrize("arch", MIXTURES)
def test_model_whose_experts_another_tool_removed_converts_and_runs(tmp_path, macko, monkeypatch, arch):
    """Any number of experts will do, also an odd one."""
    monkeypatch.setattr(tiny_models, "N_EXPERT", 3)
    model, out = tmp_path / "model.gguf", tmp_path / "sparse.gguf"
    model.write_bytes(gguf_bytes.write(tiny_models.make(arch)))
    assert macko("convert", model, out).code == 0 and macko("verify", model, out).code == 0
    with Model(out) as m:
        assert any(t.sparse and t.name.endswith("exps.weight") for t in m.tensors)
    np.testing.assert_allclose(logits(out), logits(model), rtol=0.02, atol=0.02)


def test_table_of_scores_is_complete(make, text):
    """lab/scripts/expert_quality.py"""
    tool = generators.ROOT / "lab" / "scripts" / "expert_quality.py"
    command = [sys.executable, tool, make("qwen3moe"), "-f", text, "--held-out", text, "-c", "32", "--chunks", "2"]
    more = ["--held-out-chunks", "2", "--seeds", "2", "--experts", "0.25,0.75", "--sparsity", "0.9"]
    done = subprocess.run([*command, *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert rows[0] == ["experts removed by", "25%", "75%"]
    assert [row[0] for row in rows[2:]] == ["all experts", "reap", "frequency", "random, seed 0", "random, seed 1"]
    assert len({cell for row in rows[3:] for cell in row[1:]}) > 4


# ---- architectures ----

# MLA with shared experts, weights before the experts, fused gate and up with scales, experts that share matrices,
# linear attention, experts without a gate
FAMILIES = ("deepseek2", "llama4", "gemma4", "grovemoe", "qwen3next", "nemotron_h_moe")


def remove_half(folder, arch, **keys):
    """The report of a model of 8 experts, made and evaluated in a process of its own, because llama.cpp may abort.
    keys: numbers for its metadata.
    """
    code = f"""
import json, pathlib, sys
sys.path.insert(0, {str(generators.ROOT / "tests")!r})
import numpy as np
from support import architectures, gguf_bytes
from ggml_macko import PruneOptions, console, prune
from ggml_macko.evaluation.text_model import TextModel
folder, arch = pathlib.Path(sys.argv[1]), sys.argv[2]
model, text, out = (folder / name for name in ("model.gguf", "text.txt", "out.gguf"))
f = architectures.make(arch, True, n_experts=8)
for name, value in {keys!r}.items():
    f.set(arch + "." + name, gguf_bytes.U32, value)
model.write_bytes(gguf_bytes.write(f))
text.write_text("ab!?xyz" * 100)
with console.quiet():
    report = prune(model, out, PruneOptions(experts=0.5, text=text, n_ctx=64, n_threads=2))
with TextModel(out, 64, n_batch=64, n_threads=2) as llama:
    finite = bool(np.isfinite(llama.evaluate(np.arange(3, 67, dtype=np.int32)[None])).all())
print(json.dumps([*report.experts, finite]))
"""
    command = [sys.executable, "-c", code, str(folder), arch]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("arch", FAMILIES)
def test_experts_of_an_architecture_are_scored_and_removed(tmp_path, arch):
    done = remove_half(tmp_path, arch)
    assert done.returncode == 0, done.stderr[-2000:]
    n_before, n_after, n_blocks, finite = json.loads(done.stdout)
    assert (n_before, n_after) == (8, 4) and n_blocks >= 1 and finite
    before, after = shapes(tmp_path / "model.gguf")[0], shapes(tmp_path / "out.gguf")[0]
    changed = {name for name in before if before[name] != after[name]}
    assert sum("down_exps.weight" in name for name in changed) == n_blocks
    assert all(after[name] == (*before[name][:-1], before[name][-1] // 2) for name in changed)


def test_groups_of_experts_lose_equally_many(tmp_path):
    """The router of DeepSeek V3 chooses two groups, by their two best experts."""
    done = remove_half(tmp_path, "deepseek2", expert_group_count=4, expert_group_used_count=2)
    assert done.returncode == 1 and "leaves 4 of 8 experts, and 8 are needed" in done.stderr
    done = remove_half(tmp_path, "deepseek2", expert_group_count=2, expert_group_used_count=1)
    assert done.returncode == 0 and json.loads(done.stdout)[3], done.stderr[-2000:]
    kept = np.array(shapes(tmp_path / "out.gguf")[1]["macko.prune.experts.kept"]).reshape(-1, 4)
    assert ((kept < 4).sum(axis=1) == 2).all()


@pytest.mark.slow
def test_experts_of_every_architecture_are_scored_and_removed(tmp_path):
    failed = {}
    for arch in set(EXPERTS) - {"nomic-bert-moe"}:  # its test model has no experts
        (tmp_path / arch).mkdir()
        done = remove_half(tmp_path / arch, arch)
        if done.returncode or json.loads(done.stdout)[3] is not True:
            failed[arch] = done.stderr.strip().splitlines()[-1:] or done.stdout
    assert not failed


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--experts", "50"], "--experts 50: expected a number from 0 to 1; did you mean 0.5?"),
        (["--experts", "0.5"], "--experts needs a calibration text: -f FNAME, or --expert-score random"),
        (["--experts", "0.5", "--expert-score", "frequency"], "--experts needs a calibration text"),
        (["--experts", "0.5", "-f", "TEXT", "--imatrix", "TEXT"], "--experts does not go with --imatrix"),
        (["--experts", "0.5", "-f", "TEXT", "--seed", "1"], "--seed needs --expert-score random"),
        (["--sparsity", "0.5", "--expert-score", "random"], "--expert-score needs --experts"),
        (["--experts", "0.5", "-f", "TEXT", "--method", "alps"], "--sparsity is missing"),
        (["--experts", "0.5", "-f", "TEXT", "--include-weights", "exps"], "--sparsity is missing"),
        (["--experts", "0.5", "-f", "TEXT", "--tensor-sparsity", "exps=0.5"], "--sparsity is missing"),
    ],
)
def test_options_that_do_not_go_together_are_refused(tmp_path, macko, make, text, options, message):
    options = [str(text) if x == "TEXT" else x for x in options]
    done = macko("prune", make("qwen3moe"), tmp_path / "out.gguf", *options)
    one_line(done, message, code=2)
    assert not (tmp_path / "out.gguf").exists()


def set_key(name, value):
    return lambda f: f.set(name, U32, value)


def add_table(f):
    f.tensors.append(Tensor(b"blk.0.ffn_gate_tid2eid.weight", [2, 4], 0, bytes(32)))


def shorten_router(f):
    router = next(t for t in f.tensors if t.name == b"blk.1.ffn_gate_inp.weight")
    router.ne, router.data = [router.ne[0], N_EXPERT - 1], router.data[: -2 * router.ne[0]]


def orphan(f):
    f.tensors.append(Tensor(b"blk.5.exp_probs_b.bias", [N_EXPERT], 0, bytes(4 * N_EXPERT)))


@pytest.mark.parametrize(
    ("share", "change", "parts"),
    [
        (0.1, None, ["--experts 0.1 removes none of 8 experts; the least is 0.125"]),
        (0.9, None, ["leaves 1 of 8 experts, and 2 are needed (qwen3moe.expert_used_count 2); the most is 0.75"]),
        (1, None, ["leaves 0 of 8 experts"]),
        (0.5, set_key("qwen3moe.expert_used_count", 5), ["leaves 4 of 8 experts, and 5 are needed"]),
        (0.5, set_key("qwen3moe.expert_used_count", 8), ["none can be removed"]),
        (0.5, add_table, ["blk.0.ffn_gate_tid2eid.weight: a table chooses the experts"]),
        (0.5, shorten_router, ["blk.1.ffn_gate_inp.weight: a last dimension of 7 does not fit", "expert_count 8"]),
        (0.5, orphan, ["blk.5.exp_probs_b.bias"]),
    ],
)
def test_experts_that_cannot_be_removed_are_an_error(tmp_path, macko, make, share, change, parts):
    model = make("qwen3moe", change or (lambda f: None))
    done = macko("prune", model, tmp_path / "out.gguf", "--experts", share, "--expert-score", "random")
    one_line(done, str(model), *parts)
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


def test_model_without_experts_is_refused(tmp_path, macko, make):
    done = macko("prune", make("llama"), tmp_path / "out.gguf", "--experts", 0.5, "--expert-score", "random")
    one_line(done, "model.gguf: --experts: the model has no experts")


def test_sparse_model_is_refused(tmp_path, macko, make):
    assert macko("convert", make("qwen3moe"), tmp_path / "sparse.gguf").code == 0
    done = macko("prune", tmp_path / "sparse.gguf", tmp_path / "out.gguf", "--experts", 0.5, "--expert-score", "random")
    one_line(done, "is a sparse file; use `macko restore` first")
