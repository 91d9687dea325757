"""lab/scripts/train_dense.py: a model of another shape with the teacher's vocabulary learns from it."""

from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np
import pytest

from ggml_macko import errors
from ggml_macko.gguf.files import Model
from ggml_macko.recovery.options import RecoverOptions
from support import generators, gguf_bytes, tiny_models

TOOL = generators.ROOT / "lab" / "scripts" / "train_dense.py"
SHAPE = {"layers": 3, "embd": 96, "ff": 160, "heads": 4, "kv-heads": 2}

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no PyTorch")


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("train_dense", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_dense"] = module  # its annotations are looked up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_dense"]


@pytest.fixture
def files(tmp_path):
    """(teacher, text)"""
    teacher, text = tmp_path / "teacher.gguf", tmp_path / "text.txt"
    teacher.write_bytes(gguf_bytes.write(tiny_models.make("llama")))
    text.write_text("".join(np.random.default_rng(2).choice(["ab ", "a ", "b ab", "\n"], 1500)))
    return teacher, text


def command(teacher, out, text, **shape):
    options = [x for name, value in {**SHAPE, **shape}.items() for x in (f"--{name}", str(value))]
    return ["train_dense.py", str(teacher), str(out), "-f", str(text), "-c", "32", "--batch-size", "4", *options]


@needs_torch
@pytest.mark.parametrize("arch, n_experts", [("llama", 0), ("arcee", 0), ("llama", 4)])
def test_model_of_another_shape_learns_from_the_teacher(tmp_path, macko, tool, files, monkeypatch, arch, n_experts):
    teacher, text = files
    start, out, base = (tmp_path / name for name in ("start.gguf", "out.gguf", "base.kld"))
    size = tool.Size(*SHAPE.values(), experts=n_experts, experts_used=2 if n_experts else 0)
    tool.write_start(start, teacher, size, 0, arch=arch)
    options = ["--arch", arch, "--epochs", "3", "--learning-rate", "5e-2", "--experts", str(n_experts)]
    monkeypatch.setattr(sys, "argv", [*command(teacher, out, text), *options])
    assert tool.main() == 0
    assert macko("perplexity", "-m", teacher, "-f", text, "-c", 32, "--kl-divergence-base", base).code == 0

    def divergence(path):
        done = macko("perplexity", "-m", path, "--kl-divergence-base", base, "--kl-divergence", "--json")
        return json.loads(done.out)["kld"]

    assert divergence(out) < 0.5 * divergence(start)
    with Model(teacher) as wanted, Model(start) as before, Model(out) as found:
        tokens = [{k.name: k.record for k in m.keys if k.name.startswith("tokenizer.")} for m in (wanted, found)]
        assert tokens[0] == tokens[1] and "tokenizer.ggml.tokens" in tokens[0]
        keys = {key.name: key.value() for key in found.keys}
        assert keys["general.architecture"] == arch
        assert (keys[f"{arch}.block_count"], keys[f"{arch}.embedding_length"]) == (3, 96)
        assert any("ffn_gate" in t.name for t in found.tensors) == (arch == "llama")
        assert any("exps" in t.name for t in found.tensors) == (n_experts > 0)
        assert keys.get(f"{arch}.expert_count", 0) == n_experts
        for a, b in zip(before.tensors, found.tensors):
            assert (a.name, a.ne) == (b.name, b.ne)
            # embeddings, head and norms are trained, too
            assert not np.array_equal(a.read_bits(), b.read_bits()), a.name


def test_same_seed_makes_the_same_weights_of_the_stated_deviation(tmp_path, tool, files):
    a, b, c = (tmp_path / f"{name}.gguf" for name in "abc")
    size = tool.Size(*SHAPE.values())
    for path, seed in ((a, 5), (b, 5), (c, 6)):
        tool.write_start(path, files[0], size, seed)
    assert a.read_bytes() == b.read_bytes() != c.read_bytes()
    with Model(a) as model:
        found = {t.name: t.read_bits().view(np.float16).astype(np.float64) for t in model.tensors if len(t.ne) == 2}
    assert abs(found["blk.1.ffn_up.weight"].std() * np.sqrt(3 * 96) - 1) < 0.05
    assert abs(found["blk.1.ffn_down.weight"].std() * np.sqrt(3 * 160 * 6) - 1) < 0.05
    assert abs(found["output.weight"].std() / 0.02 - 1) < 0.05


def test_start_from_the_teacher_has_its_tensors_of_the_same_shape(tmp_path, tool, files):
    start = tmp_path / "start.gguf"
    shape = {"layers": 3, "embd": tiny_models.N_EMBD, "ff": 160, "heads": tiny_models.N_HEAD, "kv_heads": 2}
    tool.write_start(start, files[0], tool.Size(**shape), 0, arch="arcee", from_teacher=True)
    with Model(files[0]) as teacher, Model(start) as model:
        given = {t.name: t for t in teacher.tensors}
        equal = {
            t.name for t in model.tensors if t.name in given and t.read().tobytes() == given[t.name].read().tobytes()
        }
        others = {t.name for t in model.tensors} - equal
    of_feed_forward = {f"blk.{i}.ffn_{which}.weight" for i in range(2) for which in ("up", "down")}
    assert others - of_feed_forward == {name for name in others if name.startswith("blk.2.")}
    assert of_feed_forward < others and "output.weight" in equal and "blk.1.attn_k.weight" in equal


def test_experts_from_the_teacher_have_its_neurons(tmp_path, tool, files):
    start = tmp_path / "start.gguf"
    size = tool.Size(2, tiny_models.N_EMBD, 48, tiny_models.N_HEAD, 2, experts=4, experts_used=2)
    tool.write_start(start, files[0], size, 0, from_teacher=True)
    with Model(files[0]) as teacher, Model(start) as model:
        given = {t.name: t.read_values() for t in teacher.tensors}
        found = {t.name: t.read_values().reshape(t.ne[::-1]) for t in model.tensors if "exps" in t.name}
    gate, up, down = (given[f"blk.1.ffn_{x}.weight"] for x in ("gate", "up", "down"))
    rows = [[row.tobytes() for row in w] for w in (gate, up, down.T * 2)]  # 48 of 96 neurons
    assert all(len(set(r)) == tiny_models.N_FF for r in rows)
    chosen = set()
    for e in range(4):
        parts = [found[f"blk.1.ffn_{x}_exps.weight"][e] for x in ("gate", "up", "down")]
        places = [[r.index(row.tobytes()) for row in w] for r, w in zip(rows, (parts[0], parts[1], parts[2].T))]
        assert places[0] == places[1] == places[2] and len(set(places[0])) == 48
        chosen.add(tuple(places[0]))
    assert len(chosen) == 4


def test_head_of_a_teacher_that_has_none_is_its_embeddings(tmp_path, tool):
    teacher, start = tmp_path / "teacher.gguf", tmp_path / "start.gguf"
    file = tiny_models.make("llama")
    file.tensors = [t for t in file.tensors if t.name != b"output.weight"]
    teacher.write_bytes(gguf_bytes.write(file))
    tool.write_start(start, teacher, tool.Size(2, tiny_models.N_EMBD, 160, 4, 2), 0, from_teacher=True)
    with Model(start) as model:
        found = {t.name: t.read_bits() for t in model.tensors}
    np.testing.assert_array_equal(found["output.weight"], found["token_embd.weight"])


@needs_torch
def test_teacher_with_another_vocabulary_is_refused(tmp_path, tool, files):
    teacher, text = files
    other, start = tmp_path / "other.gguf", tmp_path / "start.gguf"
    data = gguf_bytes.write(tiny_models.make("llama"))
    assert b"<s>" in data
    other.write_bytes(data.replace(b"<s>", b"<t>", 1))
    tool.write_start(start, other, tool.Size(*SHAPE.values()), 0)
    options = RecoverOptions(text=str(text), n_ctx=32)
    with pytest.raises(errors.MackoError, match="another vocabulary"):
        tool.imitate(start, tmp_path / "out.gguf", options, teacher=teacher)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("shape", [{"heads": 5}, {"kv-heads": 3}, {"layers": 0}, {"embd": 98}, {"experts": 1}])
def test_impossible_shape_is_refused(tmp_path, tool, files, monkeypatch, capsys, shape):
    monkeypatch.setattr(sys, "argv", command(files[0], tmp_path / "out.gguf", files[1], **shape))
    with pytest.raises(SystemExit) as e:
        tool.main()
    err = capsys.readouterr().err
    assert e.value.code == 2 and ("--embd must be a multiple" in err or "at least as many experts as" in err)
    assert not (tmp_path / "out.gguf").exists()
