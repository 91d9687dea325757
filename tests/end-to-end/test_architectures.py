"""Architectures without rules: sparse models run like dense ones, and strict loading refuses them.

tools/checks/check_architectures.py compares the models. All of them take minutes, so the tests check a few families.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ggml_macko import Llama, PruneOptions, calibrate, convert, errors, prune
from ggml_macko.gguf import tensor_rules
from ggml_macko.native import library
from support import generators

TOOL = generators.ROOT / "tools" / "checks" / "check_architectures.py"
# fused qkv, MLA with experts and shared experts, state spaces, RWKV, short convolutions, linear attention, an encoder
# with a decoder, an encoder
FAMILIES = ("gptneox", "deepseek2", "mamba2", "rwkv7", "lfm2", "qwen3next", "t5", "bert")
# architectures that llama.cpp does not run dense either, or that have no sparse weights; the table has the reasons
WITHOUT = {
    "clip", "gptj", "gemma4-assistant", "eagle3", "dflash", "graniteswitch", "wavtokenizer-dec", "plm",
}  # fmt: skip


# factors of rotations, layer norms, state spaces with two kinds of decays, short convolutions, gated delta networks
# with one and with many gates, MLA, means, three kinds of RWKV, activations, parts of tensors, hyper-connections
ON_THE_GPU = (
    "llama", "starcoder2", "mamba", "mamba2", "lfm2", "qwen3next", "kimi-linear", "deepseek2", "gemma3n", "rwkv6",
    "rwkv7", "rwkv6qwen2", "apertus", "maple", "chameleon", "kimi-k3",
)  # fmt: skip


def check(*arguments: str) -> dict[str, dict]:
    done = subprocess.run([sys.executable, str(TOOL), "--json", *arguments], capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows, done.stderr[-2000:]
    return {row["arch"]: row for row in rows}


@pytest.mark.parametrize("name", FAMILIES)
def test_architecture_runs_sparse_as_dense(name):
    row = check(name)[name]
    assert row["why"] == "" and row["n_sparse"] > 0 and row["nmse"] <= 1e-4 < 1e-3 <= row["effect"], row


@pytest.mark.gpu
@pytest.mark.skipif(library.gpus().startswith("none"), reason=f"GPUs: {library.gpus()}")
@pytest.mark.parametrize("name", ON_THE_GPU)
def test_graph_stays_on_the_gpu(name):
    row = check("--gpu", name)[name]
    assert row["gpu_why"] == "" and row["splits"] == [2, 2] and row["cpu_ops"] == [], row


@pytest.mark.slow
def test_every_architecture_of_llama_cpp_runs_sparse_as_dense():
    rows = check()
    assert {name for name, row in rows.items() if row["why"]} == WITHOUT
    assert len(rows) >= 150


def make(folder, arch: str, experts: bool = False):
    """A pruned dense model of an architecture."""
    code = (
        f"import sys, pathlib; sys.path.insert(0, {str(generators.ROOT / 'tests')!r})\n"
        "from support import architectures, gguf_bytes\n"
        f"pathlib.Path(sys.argv[1]).write_bytes(gguf_bytes.write(architectures.make({arch!r}, {experts})))"
    )
    raw = folder / "raw.gguf"  # in a process of its own, because llama.cpp may abort
    done = subprocess.run([sys.executable, "-c", code, str(raw)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    prune(raw, folder / "dense.gguf", PruneOptions(sparsity=0.7))
    return folder / "dense.gguf"


@pytest.fixture(scope="module")
def falcon(tmp_path_factory):
    """A sparse file of an architecture without rules."""
    folder = tmp_path_factory.mktemp("falcon")
    report = convert(make(folder, "falcon"), folder / "sparse.gguf")
    assert report.load_error is None
    return folder / "sparse.gguf"


def load(path, **kwargs):
    return Llama(str(path), **{"n_ctx": 64, "verbose": False, **kwargs})


def test_strict_loading_refuses_an_architecture_without_rules(falcon, monkeypatch, macko):
    for model in (load(falcon), load(generators.DEMO, strict=True)):
        assert model([1, 2, 3], max_tokens=1)
    with pytest.raises(errors.FileFormatError, match="sparse.gguf: there are no rules .*'falcon', and strict") as e:
        load(falcon, strict=True)
    assert e.value.code == errors.UNSUPPORTED_ARCH and "\n" not in str(e.value)
    generate = ["generate", "-m", falcon, "-p", "a", "-n", "1", "-c", "64"]
    assert macko(*generate).code == 0
    done = macko(*generate, "--strict")
    assert done.code == 1 and "no rules for the metadata of architecture 'falcon'" in done.err
    assert macko(*generate).code == 0  # the option applies to one command only
    monkeypatch.setenv("GGML_MACKO_LOAD", "strict")
    with pytest.raises(errors.FileFormatError, match="strict"):
        load(falcon)


def test_log_says_that_an_architecture_has_no_rules(falcon):
    code = f"from ggml_macko import Llama; Llama({str(falcon)!r}, n_ctx=64)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if "no rules for the metadata of architecture" in line]
    assert done.returncode == 0 and len(lines) == 1 and "'falcon'" in lines[0] and "GGML_MACKO_LOAD=strict" in lines[0]


def test_unknown_architecture_is_an_error(falcon, tmp_path):
    """llama.cpp reports an error and does not abort."""
    other = tmp_path / "other.gguf"
    other.write_bytes(falcon.read_bytes().replace(b"falcon", b"eagles"))
    with pytest.raises(errors.LoadError, match="other.gguf"):
        load(other)


def test_sparse_tensor_of_an_unusual_name_becomes_dense(tmp_path, monkeypatch):
    """Files of other tools may store any tensor as sparse; only supported weights are sparse in memory."""
    raw = make(tmp_path, "rwkv7")
    raw = raw.rename(tmp_path / "raw.gguf")
    prune(raw, tmp_path / "dense.gguf", PruneOptions(sparsity=0.7, include=["time_mix_w1"]))
    monkeypatch.setattr(tensor_rules, "may_be_sparse", lambda name, n_dims: "time_mix_w1" in name)
    report = convert(tmp_path / "dense.gguf", tmp_path / "sparse.gguf")
    assert "blk.0.time_mix_w1.weight" in {t.name for t in report.tensors if t.is_sparse}
    command = [sys.executable, str(TOOL), "--step", "compare", str(tmp_path), "rwkv7"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["nmse"] <= 1e-4
    with pytest.raises(errors.LoadError, match="time_mix_w1.weight: sparse, but llama.cpp did not place it"):
        load(tmp_path / "sparse.gguf", sparse_only=True)


@pytest.mark.parametrize(
    "arch, experts", [("mamba2", False), ("rwkv7", False), ("lfm2", False), ("deepseek2", True), ("qwen3moe", True)]
)
def test_activations_of_an_architecture_are_measured(tmp_path, arch, experts):
    """Calibration and the methods that use it measure every weight that can be pruned."""
    dense = make(tmp_path, arch, experts)
    text = tmp_path / "text.txt"
    text.write_text("ab!?xyz" * 400)
    measured = calibrate(dense, text, tmp_path / "imatrix.gguf", n_ctx=64, n_chunks=2, n_threads=2)
    options = PruneOptions(sparsity=0.8, method="wanda", imatrix=tmp_path / "imatrix.gguf", n_threads=2)
    pruned = prune(dense, tmp_path / "wanda.gguf", options)
    names = {t.name for t in pruned.tensors}
    assert len(names) >= 4 and names <= set(measured.entries)
