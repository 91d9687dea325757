"""Prompts for weights in host memory, computed on an NVIDIA GPU and compared with the CPU. Skipped without a GPU.

The last created context decides for all contexts which products the GPU computes, so CPU results come first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from ggml_macko.native import devices
from support import generators, lora_files
from support.llama_logits import logits, logits_one_by_one, nmse, open_model

pytestmark = pytest.mark.gpu

MAKE = generators.ROOT / "tools" / "make_random_llama.py"
SAMPLE = generators.ROOT / "models" / "sample.txt"
OFF = "GGML_MACKO_DISABLE"
MIN_BATCH = "GGML_OP_OFFLOAD_MIN_BATCH"
N_EXPERTS = 4
TOKENS = [(7919 * i + 300) % 600 for i in range(300)]
NMSE = 1e-4  # for logits compared with those of plain weights on the CPU, which rounds activations to F16
NMSE_8_BITS = 2e-3
"""For quantized layers on the CPU, which rounds their activations to 8 bits. Measured: 3e-4, with experts 7e-4."""


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if not devices.gpus():
        pytest.skip("no NVIDIA GPU was found")


def run_macko(*args):
    subprocess.run(
        [sys.executable, "-m", "ggml_macko.commands.cli", *map(str, args)], check=True, capture_output=True, text=True
    )


def make_models(folder, *options, types=("f16",), kinds=()):
    """kind -> path: random models of 3 layers, dense and sparse; the columns of ffn_down are not a multiple of 64"""
    shape = {"layers": 3, "embd": 512, "ff": 1032, "heads": 8, "kv-heads": 4, "vocab": 600, "density": 0.4}
    shape_options = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
    models = {}
    for value_type in types:
        dense, sparse = (folder / f"{value_type}-{kind}.gguf" for kind in ("dense", "sparse"))
        subprocess.run(
            [sys.executable, str(MAKE), *shape_options, *options, "--type", value_type, str(dense)],
            check=True,
            capture_output=True,
        )
        run_macko("convert", dense, sparse, "macko")
        models[f"{value_type} dense"], models[f"{value_type} sparse"] = dense, sparse
    for kind in kinds:
        models[kind] = folder / f"{kind}.gguf"
        run_macko("convert", models["f16 dense"], models[kind], kind)
        if kind.startswith("sparse-q"):
            models[f"{kind} restored"] = folder / f"{kind}-restored.gguf"
            run_macko("restore", models[kind], models[f"{kind} restored"])
    return models


def reference(models, kind):
    """The model whose logits on the CPU are expected: for quantized values, one with the same values in F16."""
    return models.get(f"{kind} restored", models[kind])


def limit(kind, is_on_cpu):
    """The largest NMSE if the CPU may compute layers of the model."""
    return NMSE_8_BITS if is_on_cpu and kind.startswith("sparse-q") else NMSE


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    kinds = ("sparse-q8", "sparse-q4", "ec-csr-8")
    return make_models(tmp_path_factory.mktemp("models"), types=("f16", "bf16", "f32"), kinds=kinds)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("experts"), "--experts", str(N_EXPERTS), kinds=("sparse-q8",))


def logits_of_cpu(monkeypatch, path, tokens, evaluate=logits, **kwargs):
    with monkeypatch.context() as patch:
        patch.setenv(OFF, "offload")
        llama = open_model(path, n_gpu_layers=0, logits_all=True, **kwargs)
        out = evaluate(llama, tokens)
        llama.close()
    return out


KINDS = ["f16 dense", "f16 sparse", "bf16 dense", "bf16 sparse", "f32 sparse", "sparse-q8", "sparse-q4", "ec-csr-8"]


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_have_the_logits_of_the_cpu(models, monkeypatch, kind, flash):
    path = reference(models, kind)
    want = {n: logits_of_cpu(monkeypatch, path, TOKENS[:n], flash_attn=flash) for n in (300, 33, 31)}
    for layers in (0, 1, 2):
        llama = open_model(models[kind], n_gpu_layers=layers, logits_all=True, flash_attn=flash)
        for n in want:
            assert nmse(logits(llama, TOKENS[:n]), want[n]) < limit(kind, n < 32), (layers, n)
        llama.close()


@pytest.mark.parametrize("kind", ["f16 dense", "f16 sparse", "sparse-q8"])
def test_experts_have_the_logits_of_the_cpu(experts, monkeypatch, kind):
    # with two experts per token: 40 columns for each, and too few columns
    want = {n: logits_of_cpu(monkeypatch, reference(experts, kind), TOKENS[:n]) for n in (80, 40)}
    for layers in (0, 2):
        llama = open_model(experts[kind], n_gpu_layers=layers, logits_all=True)
        for n in want:
            got = logits(llama, TOKENS[:n])
            # rounding may choose another of two equally good experts; this affects few tokens
            errors = [nmse(*rows) for rows in zip(got, want[n], strict=True)]
            assert np.quantile(errors, 0.9) < limit(kind, n == 40), (layers, n)
        llama.close()


@pytest.mark.parametrize("kwargs", [{"offload_kqv": False}, {"op_offload": False}, {"n_batch": 64, "n_ubatch": 64}])
@pytest.mark.parametrize("kind", ["f16 dense", "f16 sparse"])
def test_options_of_llama_cpp_keep_the_logits(models, monkeypatch, kind, kwargs):
    want = logits_of_cpu(monkeypatch, models[kind], TOKENS[:64])
    llama = open_model(models[kind], n_gpu_layers=1, logits_all=True, **kwargs)
    assert nmse(logits(llama, TOKENS[:64]), want) < NMSE


@pytest.mark.parametrize("kind", ["f16 dense", "f16 sparse"])
def test_single_tokens_are_not_replayed_with_old_weights(models, monkeypatch, kind):
    """Each token has the same graph, so a graph with new weights must not be captured."""
    want = logits_of_cpu(monkeypatch, models[kind], TOKENS[:24], logits_one_by_one)
    monkeypatch.setenv(MIN_BATCH, "1")
    llama = open_model(models[kind], n_gpu_layers=1, logits_all=True)
    assert nmse(logits_one_by_one(llama, TOKENS[:24]), want) < NMSE


@pytest.mark.parametrize("kind", ["f16 dense", "f16 sparse", "sparse-q8"])
def test_threads_do_not_change_a_bit(models, kind):
    out = []
    for n_threads in (1, 2, 5, 1):
        llama = open_model(models[kind], n_gpu_layers=1, logits_all=True, n_threads_batch=n_threads)
        out += [logits(llama, TOKENS) for _ in range(2)]
        llama.close()
    assert len({rows.tobytes() for rows in out}) == 1


def test_lora_adapter_has_the_logits_of_the_cpu(tmp_path, monkeypatch):
    sparse, adapter = tmp_path / "sparse.gguf", str(lora_files.write(tmp_path / "lora.gguf", generators.DEMO))
    run_macko("convert", generators.DEMO, sparse)
    tokens = [(37 * i + 5) % 900 + 3 for i in range(60)]
    want = logits_of_cpu(monkeypatch, generators.DEMO, tokens, lora_path=adapter)
    assert nmse(logits_of_cpu(monkeypatch, generators.DEMO, tokens), want) > NMSE
    for layers in (0, 2):
        llama = open_model(sparse, n_gpu_layers=layers, logits_all=True, lora_path=adapter)
        assert nmse(logits(llama, tokens), want) < NMSE, layers


def test_two_contexts_share_the_memory(models, monkeypatch):
    kinds = ("f16 sparse", "sparse-q8")
    want = [logits_of_cpu(monkeypatch, reference(models, kind), TOKENS) for kind in kinds]
    llamas = [open_model(models[kind], n_gpu_layers=1, logits_all=True) for kind in kinds]
    for _ in range(3):
        for llama, rows in zip(llamas, want, strict=True):
            assert nmse(logits(llama, TOKENS), rows) < NMSE


def test_tokens_after_a_long_prompt_have_the_logits_of_the_cpu(tmp_path, monkeypatch):
    """The GPU computes the prompt; the device of the layer reads the cache."""
    sparse = tmp_path / "sparse.gguf"
    run_macko("convert", generators.DEMO, sparse)
    n_generated = 24

    def evaluate(llama, tokens):
        logits(llama, tokens[:-n_generated])
        rows = []
        for token in tokens[-n_generated:]:
            llama.eval([token])
            rows.append(np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(llama.n_vocab(),)).copy())
        return np.array(rows)

    llama = open_model(generators.DEMO, n_gpu_layers=0, vocab_only=True)
    tokens = llama.tokenize(SAMPLE.read_bytes())[:300]
    llama.close()
    want = logits_of_cpu(monkeypatch, generators.DEMO, tokens, evaluate)
    for path in (generators.DEMO, sparse):
        for layers in (0, 2):
            llama = open_model(path, n_gpu_layers=layers, logits_all=True)
            assert nmse(evaluate(llama, tokens), want) < NMSE, (path.name, layers)
            llama.close()


EVALUATE = """
import sys
sys.path.insert(0, {tests!r})
from support.llama_logits import open_model
llama = open_model({path!r}, n_gpu_layers=1, verbose=True)
print("EVALUATE", file=sys.stderr, flush=True)
llama.eval(list(range(50, 50 + {n})))
"""


def places(path, n, **environment):
    """Nodes and copies in the scheduler's log of a prompt of n tokens: node -> backend, copied tensor -> backend."""
    code = EVALUATE.format(tests=str(generators.ROOT / "tests"), path=str(path), n=n)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment, "GGML_SCHED_DEBUG": "2"},
    )
    assert done.returncode == 0, done.stderr
    nodes, copies = {}, {}
    backend = None
    for line in done.stderr.split("EVALUATE")[1].splitlines():
        if split := re.match(r"## SPLIT #\d+: (\w+)", line):
            backend = split[1]
            copies.update(dict.fromkeys(re.findall(r"\[([^\s\]]+)", line), backend))
        elif node := re.match(r"node #\s*\d+ \(\s*\w+\):\s*(\S+)", line):
            nodes[node[1]] = backend
    return nodes, copies


@pytest.mark.parametrize("kind", ["f16 sparse", "sparse-q8"])
def test_large_batches_with_sparse_weights_of_the_host_are_on_the_gpu(models, kind):
    near = ("attn_norm-0", "Qcur-0", "ffn_norm-0", "ffn_up-0", "ffn_out-0", "l_out-0")
    nodes, copies = places(models[kind], 32)
    assert {nodes[name] for name in near} == {"MACKO0"}
    assert not any("ffn_up" in name for name in copies)
    for n, environment in ((31, {}), (32, {OFF: "offload"}), (99, {MIN_BATCH: "100"})):
        nodes, _ = places(models[kind], n, **environment)
        assert nodes["ffn_up-0"] == "MACKO", (n, environment)
        assert nodes["attn_norm-1"] != "MACKO0", (n, environment)
    assert places(models[kind], 2, **{MIN_BATCH: "2"})[0]["ffn_up-0"] == "MACKO0"


def test_large_batches_with_dense_weights_of_the_host_are_on_the_gpu(models):
    nodes, copies = places(models["f16 dense"], 32)
    assert nodes["ffn_up-0"] == nodes["ffn_norm-0"] == copies["blk.0.ffn_up.weight"] == "MACKO0"
    for n, environment in ((31, {}), (32, {OFF: "offload"})):
        nodes, copies = places(models["f16 dense"], n, **environment)
        assert nodes["ffn_up-0"] == "CPU" and "blk.0.ffn_up.weight" not in copies


def test_values_in_float32_stay_on_the_cpu(models):
    nodes, _ = places(models["f32 sparse"], 64)
    assert nodes["ffn_up-0"] == nodes["ffn_out-0"] == "MACKO"
    assert nodes["ffn_norm-0"] != "MACKO0"
