"""Dense and sparse models on an NVIDIA GPU compared with the CPU: text, logits, equal bits in every run, memory.
Skipped if there is no GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from ggml_macko.native import devices, library
from support import generators, gguf_bytes, lora_files, tiny_models
from support.commands import run_macko
from support.gpu_models import FULL_GPU, OUT_OF_MEMORY, greedy, open_model
from support.llama_logits import PROMPT, logits, logits_one_by_one, nmse

pytestmark = pytest.mark.gpu

MAKE = generators.ROOT / "tools" / "make_random_llama.py"
Q8_0 = 8
QUANTIZED = ("sparse-q8", "sparse-q5", "sparse-q4", "sparse-q3")
# for logits compared with the CPU, which rounds activations to F16 or Q8; measured: 2e-7 to 5e-5 (q8_0 cache)
NMSE = 1e-4
NMSE_8_BITS = 2e-3
"""For quantized weights and 5 to 64 tokens, or prompts of small experts, whose x the GPU rounds to 8 bits."""


@pytest.fixture(scope="module", autouse=True)
def gpu():
    if not devices.gpus():
        pytest.skip(f"GPUs: {library.gpus()}")
    with pytest.MonkeyPatch.context() as patch:  # the reference is computed on the CPU alone
        patch.setenv("GGML_MACKO_DISABLE", "offload")
        yield


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Paths of the bundled model by kind: dense, sparse, and each quantized kind."""
    folder = tmp_path_factory.mktemp("demo")
    models = {"dense": generators.DEMO, "sparse": folder / "sparse.gguf"}
    run_macko("convert", generators.DEMO, models["sparse"], "macko")
    for kind in QUANTIZED:
        models[kind] = folder / f"{kind}.gguf"
        run_macko("convert", generators.DEMO, models[kind], kind)
        models[f"{kind} restored"] = folder / f"{kind}-restored.gguf"
        run_macko("restore", models[kind], models[f"{kind} restored"])
    return models


def on_cpu(demo, kind):
    """The model whose logits on the CPU are the reference for a kind. For quantized values, the CPU rounds the
    activations of several tokens more coarsely than the GPU, so the reference has dense weights.
    """
    return demo.get(f"{kind} restored", demo[kind])


def largest_nmse(kind, n, most=64):
    return NMSE_8_BITS if kind in QUANTIZED and 5 <= n <= most else NMSE


# an expert fills a panel of dense rows; several experts share one; experts are multiplied one by one
EXPERTS = [("256", "512"), ("256", "96"), ("1024", "4096")]


@pytest.fixture(scope="module", params=EXPERTS)
def experts(tmp_path_factory, request):
    """kind -> path of a random mixture of experts"""
    folder = tmp_path_factory.mktemp("experts")
    shape = [
        "--layers",
        "2",
        "--embd",
        request.param[0],
        "--ff",
        request.param[1],
        "--heads",
        "8",
        "--kv-heads",
        "2",
        "--vocab",
        "1000",
        "--experts",
        "4",
    ]
    subprocess.run(
        [sys.executable, str(MAKE), *shape, "--density", "0.4", str(folder / "dense.gguf")],
        check=True,
        capture_output=True,
    )
    run_macko("convert", folder / "dense.gguf", folder / "sparse.gguf", "macko")
    run_macko("convert", folder / "dense.gguf", folder / "sparse-q8.gguf", "sparse-q8")
    run_macko("restore", folder / "sparse-q8.gguf", folder / "sparse-q8 restored.gguf")
    return {kind: folder / f"{kind}.gguf" for kind in ("dense", "sparse", "sparse-q8", "sparse-q8 restored")}


@pytest.fixture(scope="module", params=["macko", "sparse-lossless"])
def squared_relu(tmp_path_factory, request):
    """Paths of a random model with nearly all activations zero: dense and sparse."""
    folder = tmp_path_factory.mktemp("relu")
    dense, sparse = folder / "dense.gguf", folder / "sparse.gguf"
    shape = "--layers 3 --embd 320 --ff 1100 --heads 5 --kv-heads 5 --vocab 1000 --density 0.5 --relu-zeros 0.97"
    subprocess.run([sys.executable, str(MAKE), *shape.split(), str(dense)], check=True, capture_output=True)
    run_macko("convert", dense, sparse, request.param)
    return dense, sparse


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_gpu_writes_the_text_of_the_cpu(demo, kind, flash):
    want = greedy(open_model(demo[kind], 0, flash_attn=flash))
    for layers in (-1, 2, 0):
        assert greedy(open_model(demo[kind], layers, flash_attn=flash)) == want, layers


def test_layers_are_in_gpu_memory(demo):
    def taken() -> int:
        before = devices.gpus()[0].free
        llama = open_model(demo["sparse"])
        after = devices.gpus()[0].free
        llama.close()
        return before - after

    # weights and cache; several attempts, because another process may free memory at the same time
    assert any(taken() >= 1 << 20 for _ in range(3))


@pytest.mark.parametrize("kind", ["dense", "sparse", *QUANTIZED])
@pytest.mark.parametrize("n", [1, 5, 13, 70, 300])
def test_logits_are_those_of_the_cpu_for_any_prompt_length(demo, kind, n):
    """The lengths cover each kind of product: one column, few columns, sparse weights made dense, tensor cores."""
    tokens = open_model(demo[kind], 0, vocab_only=True).tokenize(generators.SAMPLE.read_bytes(), add_bos=False)[:n]
    for kwargs in ({}, {"flash_attn": True}, {"flash_attn": True, "type_k": Q8_0, "type_v": Q8_0}):
        models = ((on_cpu(demo, kind), 0), (demo[kind], -1))
        want, got = (logits(open_model(path, layers, logits_all=True, **kwargs), tokens) for path, layers in models)
        assert nmse(got, want) < largest_nmse(kind, n), kwargs


@pytest.mark.parametrize("density", ["0.5", "0.1"])
def test_logits_of_a_wide_model_are_those_of_the_cpu_for_any_batch(tmp_path, density):
    """The matrices have the layouts of real models; the batches are near the limits of each kernel."""
    shape = ["--layers", "2", "--embd", "2048", "--ff", "2752", "--heads", "16", "--kv-heads", "4", "--vocab", "500"]
    dense, sparse = tmp_path / "dense.gguf", tmp_path / "sparse.gguf"
    subprocess.run(
        [sys.executable, str(MAKE), *shape, "--density", density, str(dense)], check=True, capture_output=True
    )
    run_macko("convert", dense, sparse, "macko")
    cpu, gpu = (open_model(sparse, layers, n_ctx=128, logits_all=True, flash_attn=True) for layers in (0, -1))
    for n in (1, 4, 8, 9, 16, 17, 20, 32, 33, 45):
        tokens = [(37 * i + n) % 400 + 50 for i in range(n)]
        assert nmse(logits(gpu, tokens), logits(cpu, tokens)) < NMSE, n


@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
def test_architecture_has_the_logits_of_the_cpu(tmp_path, name):
    dense, sparse = tmp_path / "dense.gguf", tmp_path / "sparse.gguf"
    dense.write_bytes(gguf_bytes.write(tiny_models.make(name)))
    run_macko("convert", dense, sparse, "macko")
    tokens = [(37 * i + 5) % 90 + 3 for i in range(40)]  # longer than the sliding windows
    for path in (dense, sparse):
        for flash in (False, True):
            models = [open_model(path, layers, n_ctx=128, logits_all=True, flash_attn=flash) for layers in (0, -1)]
            for evaluate in (logits, logits_one_by_one):
                want, got = (evaluate(llama, tokens) for llama in models)
                assert nmse(got, want) < NMSE, (path.name, flash, evaluate.__name__)


@pytest.mark.parametrize("value_type", ["f16", "f32"])
def test_ec_csr_has_the_logits_and_text_of_the_cpu(tmp_path, value_type):
    """F32 weights are in blocks, F16 weights in rows; each kind of product is tested, and text."""
    dense, sparse = tmp_path / "dense.gguf", tmp_path / "sparse.gguf"
    shape = {"layers": 2, "embd": 512, "ff": 1024, "heads": 8, "kv-heads": 4, "vocab": 600, "density": 0.4, "alike": 4}
    options = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
    subprocess.run([sys.executable, str(MAKE), *options, "--type", value_type, str(dense)], check=True)
    run_macko("convert", dense, sparse, "ec-csr-8")
    for n in (1, 4, 7, 40, 150):
        tokens = [(7919 * i + 300) % 600 for i in range(n)]
        want, got = (logits(open_model(sparse, layers, logits_all=True), tokens) for layers in (0, -1))
        assert nmse(got, want) < NMSE, n
    want = greedy(open_model(dense, 0), 24)
    texts = {greedy(open_model(sparse, -1), 24) for _ in range(3)}
    assert texts == {want}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_logits_follow_the_text_of_the_cpu(demo, kind):
    """Both models evaluate the CPU's text one token at a time, so that a tie cannot end the comparison."""
    cpu = open_model(on_cpu(demo, kind), 0, logits_all=True)
    gpu = open_model(demo[kind], -1, logits_all=True)
    tokens = cpu.tokenize(PROMPT.encode())
    for llama in (cpu, gpu):
        llama.reset()
        llama.eval(tokens)
    for _ in range(48):
        want, got = (np.array(llama.scores[llama.n_tokens - 1]) for llama in (cpu, gpu))
        assert nmse(got, want) < NMSE
        tokens = [int(want.argmax())]
        cpu.eval(tokens)
        gpu.eval(tokens)


def test_quantized_weights_take_less_memory_than_f16(demo, capfd):
    def taken(path):
        capfd.readouterr()
        open_model(path, n_ctx=64, verbose=True).close()
        return float(re.search(r"MACKO0 model buffer size = +([\d.]+) MiB", capfd.readouterr().err)[1])

    for kind in ("sparse-q8", "sparse-q4"):
        assert taken(demo[kind]) < taken(demo["sparse"]), kind


@pytest.mark.parametrize("kind", ["dense", "sparse", "sparse-q8"])
def test_experts_have_the_logits_of_the_cpu(experts, kind, request):
    tokens = [(7919 * i + 300) % 1000 for i in range(200)]
    models = ((on_cpu(experts, kind), 0), (experts[kind], -1))
    want, got = (open_model(path, layers, logits_all=True) for path, layers in models)
    most = 64 if request.node.callspec.params["experts"] == EXPERTS[-1] else 200  # of 8 bits
    for n in (200, 60, 7, 1):
        assert nmse(logits(got, tokens[:n]), logits(want, tokens[:n])) < largest_nmse(kind, n, most), n


class Sequences:
    """Several sequences in one context, through llama.cpp's own functions."""

    def __init__(self, path, n_gpu_layers, n_seq, flash):
        import llama_cpp

        self.api = llama_cpp
        self.llama = open_model(path, n_gpu_layers)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max, params.n_threads, params.n_threads_batch = (
            1024,
            512,
            n_seq,
            2,
            2,
        )
        params.flash_attn_type = 1 if flash else 0
        self.context = llama_cpp.llama_init_from_model(self.llama._model.model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.n_vocab = self.llama.n_vocab()

    def decode(self, entries):
        """Logits for entries (token, position, sequence), one row each."""
        batch = self.api.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for i, (token, position, sequence) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = (
                token,
                position,
                1,
                sequence,
                1,
            )
        assert self.api.llama_decode(self.context, batch) == 0
        rows = [
            np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.context, i), (self.n_vocab,)).copy()
            for i in range(len(entries))
        ]
        self.api.llama_batch_free(batch)
        return np.array(rows)

    def close(self):
        self.api.llama_free(self.context)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_sequences_and_context_shifts_are_independent(demo, kind, flash):
    """Sequences of unequal length; 30 positions of one are removed and the rest shifted; then more tokens follow."""
    out = []
    for layers in (0, -1):
        s = Sequences(demo[kind], layers, 3, flash)
        rows = [s.decode([(10 + 7 * q + 3 * i, i, q) for i in range(40 + 10 * q)]) for q in range(3)]
        rows.append(s.decode([(77 + q, 40 + 10 * q, q) for q in range(3)]))
        s.api.llama_memory_seq_rm(s.memory, 1, 5, 35)
        s.api.llama_memory_seq_add(s.memory, 1, 35, -1, -30)
        rows += [s.decode([(100 + i, 21 + i, 1)]) for i in range(3)]
        s.api.llama_memory_seq_cp(s.memory, 1, 2, -1, -1)
        s.api.llama_memory_seq_rm(s.memory, 0, -1, -1)
        rows.append(s.decode([(200 + i, i, 0) for i in range(20)]))
        s.close()
        out.append(np.concatenate(rows))
    assert nmse(out[1], out[0]) < NMSE


HASHES = """
import hashlib, json, sys
import numpy as np
import llama_cpp
sys.path.insert(0, {tests!r})
from support.generators import SAMPLE
from support.gpu_models import open_model
from support.llama_logits import logits
llama = open_model({path!r}, flash_attn=True, logits_all=True)
tokens = llama.tokenize(SAMPLE.read_bytes(), add_bos=False)[:60]
hashes = []
for i in range({n}):
    rows = [logits(llama, tokens[:40])]
    for token in tokens[40:]:
        llama.eval([token])
        rows.append(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama._ctx.ctx, 0), (llama.n_vocab(),)).copy())
    hashes.append(hashlib.sha256(b"".join(r.tobytes() for r in rows)).hexdigest())
print(json.dumps(hashes))
"""


def hashes_of(path, n, **environment):
    code = HASHES.format(tests=str(generators.ROOT / "tests"), path=str(path), n=n)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_logits_are_the_same_bits_in_every_run(demo, kind):
    """A prompt and 20 tokens, a hundred times; then three times without captured graphs."""
    hashes = hashes_of(demo[kind], 100)
    assert len(hashes) == 100 and len(set(hashes)) == 1
    assert set(hashes_of(demo[kind], 3, GGML_MACKO_DISABLE="graphs")) == set(hashes)


def test_lora_adapter_changes_the_text_as_on_the_cpu(demo, tmp_path):
    adapter = str(lora_files.write(tmp_path / "lora.gguf", demo["dense"]))
    want = greedy(open_model(demo["dense"], 0, lora_path=adapter), 32)
    assert want != greedy(open_model(demo["dense"], 0), 32)
    for layers in (-1, 2):
        assert greedy(open_model(demo["sparse"], layers, lora_path=adapter), 32) == want


def test_model_compressed_on_load_equals_the_sparse_file(demo):
    compressed, sparse = (
        open_model(demo["dense"], compress=True, logits_all=True),
        open_model(demo["sparse"], logits_all=True),
    )
    tokens = compressed.tokenize(generators.SAMPLE.read_bytes(), add_bos=False)[:70]
    np.testing.assert_array_equal(logits(compressed, tokens), logits(sparse, tokens))


def test_two_models_do_not_affect_each_other(demo, experts):
    tokens = [(37 * i + 5) % 900 for i in range(50)]
    want = [logits(open_model(path, logits_all=True), tokens) for path in (demo["sparse"], experts["sparse"])]
    first, second = (open_model(path, logits_all=True) for path in (demo["sparse"], experts["sparse"]))
    for _ in range(3):
        np.testing.assert_array_equal(logits(first, tokens), want[0])
        np.testing.assert_array_equal(logits(second, tokens), want[1])
    first.close()
    np.testing.assert_array_equal(logits(second, tokens), want[1])


@pytest.mark.parametrize("kind", ["dense", "sparse", "sparse-q8"])
def test_two_gpus_give_the_bits_of_one(demo, kind):
    free = [device[2] for device in devices.gpus()]
    if len(free) < 2:
        pytest.skip("there is one GPU only")
    kwargs = {"flash_attn": True, "logits_all": True}
    two = open_model(demo[kind], tensor_split=[0.5, 0.5], **kwargs)
    assert all(was - device[2] >= 1 << 20 for was, device in zip(free[:2], devices.gpus()))
    one = open_model(demo[kind], split_mode=0, **kwargs)
    tokens = one.tokenize(generators.SAMPLE.read_bytes(), add_bos=False)
    for n in (1, 13, 300):
        np.testing.assert_array_equal(logits(two, tokens[:n]), logits(one, tokens[:n]))
    assert greedy(two) == greedy(one)


BUSY_OUT_OF_MEMORY = (
    FULL_GPU
    + """
llama = open_model({path!r}, verbose=True) # or llama-cpp-python hides errors
before = greedy(llama, 16)
fill()
attempts = [lambda: open_model({path!r}, verbose=True)]
attempts.append(lambda: greedy(llama, 4, {prompt!r} * 8)) # its kernels are not loaded yet
for attempt in attempts:
    try:
        attempt()
        print("done")
    except (ValueError, MemoryError, RuntimeError) as e:
        print("refused:", e)
empty()
llama.reset()
print([greedy(llama, 16) == before, greedy(open_model({path!r}, verbose=True), 16) == before])
"""
)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_load_on_a_full_gpu_is_refused_with_one_line(demo, kind):
    """The line states the required and the free memory. The same process works again after memory is freed."""
    code = OUT_OF_MEMORY.format(tests=str(generators.ROOT / "tests"), path=str(demo[kind]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    refused, text = done.stdout.splitlines()[0], "\n".join(done.stdout.splitlines()[1:])
    assert refused.startswith("refused:"), done.stdout
    load = (
        done.stderr[done.stderr.index("llama_model_loader") :] if "llama_model_loader" in done.stderr else done.stderr
    )
    lines = [line for line in load.splitlines() if "MACKO0: out of memory" in line]
    assert lines and "MiB are needed" in lines[0] and "free" in lines[0], done.stderr[-2000:]
    assert text.strip() == greedy(open_model(demo[kind]), 16).strip()


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_running_model_survives_a_full_gpu(demo, kind):
    """A lack of memory fails only the request: neither the running model nor a later load fails."""
    code = BUSY_OUT_OF_MEMORY.format(prompt=PROMPT, tests=str(generators.ROOT / "tests"), path=str(demo[kind]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "MACKO" in line]
    assert done.returncode == 0, (done.stdout, said, done.stderr[-2000:])
    assert done.stdout.startswith("refused:") and done.stdout.splitlines()[-1] == "[True, True]", done.stdout


CYCLES = """
import gc, json, os, re, sys
sys.path.insert(0, {tests!r})
from ggml_macko.native import devices
from support.gpu_models import greedy, open_model
def rss():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])
seen = []
for i in range({n}):
    llama = open_model({path!r}, flash_attn=i % 2 == 0)
    greedy(llama, 8)
    llama.close()
    del llama
    gc.collect()
    counts = [len(os.listdir("/proc/self/" + what)) for what in ("fd", "task")]
    seen.append((rss(), devices.gpus()[0].free >> 10, *counts))
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_load_and_free_cycles_do_not_leak(demo):
    """500 cycles of load, generate, free. The test must run alone: it measures the GPU memory of all processes."""
    code = CYCLES.format(tests=str(generators.ROOT / "tests"), path=str(demo["sparse"]), n=500)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = np.array(json.loads(done.stdout))[20:]
    slope = np.polyfit(np.arange(len(seen)), seen[:, 0], 1)[0]
    assert slope < 16, f"host memory grows by {slope:.1f} KiB per cycle"
    assert seen[:, 1].max() - seen[-1, 1] <= 2048, "free GPU memory shrank (or another process took some)"
    assert (seen[-1, 2:] <= seen[0, 2:]).all(), "descriptors or threads"


def test_bench_reports_memory_of_the_gpu(demo, macko):
    done = macko("bench", "-m", demo["sparse"], "-p", "32", "-n", "8", "-r", "1", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    dense, sparse = report["models"]
    assert report["devices"]
    assert sparse["gpu_memory"] > 0 and dense["gpu_memory"] > 0 and sparse["gen_tps"] > 0


def test_a_squared_relu_has_the_logits_of_the_cpu(squared_relu):
    dense, sparse = squared_relu
    tokens = [int(t) for t in np.random.default_rng(8).integers(3, 900, 24)]
    found = logits_one_by_one(open_model(sparse), tokens)
    assert nmse(found, logits_one_by_one(open_model(dense, 0), tokens)) < NMSE
    assert nmse(found, logits(open_model(sparse, logits_all=True), tokens)) < NMSE
