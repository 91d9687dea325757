"""Compress on load: a dense model with many zeros has the same logits as its converted file, bit for bit, and its file
is unchanged.
"""

from __future__ import annotations

import functools
import os
import resource
import subprocess
import sys

import gguf
import numpy as np
import pytest

from ggml_macko import errors
from ggml_macko.native import load_model
from ggml_macko.native.file import File
from support import generators, llama_faults, llama_logits, tiny_models
from support import gguf_bytes as gb
from support.llama_functions import as_c, compress_log
from support.llama_logits import logits

MAKE = generators.ROOT / "tools" / "make_random_llama.py"
SHAPE = ["--layers", "2", "--embd", "256", "--ff", "512", "--heads", "8", "--kv-heads", "2", "--vocab", "1000"]
open_model = functools.partial(llama_logits.open_model, n_ctx=256, logits_all=True)


def make(path, *args, shape=SHAPE):
    subprocess.run([sys.executable, str(MAKE), *shape, *args, str(path)], check=True, capture_output=True)
    return path


def tokens_of(llama):
    return [int(t) for t in np.random.default_rng(3).integers(3, llama.n_vocab(), 60)]


def save(llama, path):
    """The tensors of a loaded model, as llama.cpp writes them to a file."""
    import llama_cpp

    llama_cpp.llama_model_save_to_file(llama._model.model, str(path).encode())
    return {t.name: t.data.tobytes() for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("name", llama_faults.running(("llama", "llama-moe", "gemma3", "phi3", "gpt-oss")))
def test_logits_are_those_of_the_converted_file(name, macko, tmp_path):
    dense, sparse = tmp_path / "dense.gguf", tmp_path / "sparse.gguf"
    dense.write_bytes(gb.write(tiny_models.make(name)))
    assert macko("convert", dense, sparse).code == 0
    compressed = open_model(dense, compress=True)
    tokens = tokens_of(compressed)
    np.testing.assert_array_equal(logits(compressed, tokens), logits(open_model(sparse), tokens))


@pytest.mark.parametrize("type_name", ["f16", "bf16", "f32"])
def test_weights_in_memory_are_the_bits_on_file(type_name, macko, tmp_path):
    """Weights in memory equal those on file, and the same tensors are sparse as in the converted file."""
    dense, sparse = make(tmp_path / "dense.gguf", "--density", "0.4", "--type", type_name), tmp_path / "sparse.gguf"
    assert macko("convert", dense, sparse).code == 0
    n = len(File(sparse).sparse())
    log = compress_log(dense)
    assert f"compressing {n} of" in log
    held = save(open_model(dense, compress=True), tmp_path / "saved.gguf")
    for t in gguf.GGUFReader(dense).tensors:
        assert held[t.name] == t.data.tobytes(), t.name


def test_model_of_many_blocks_is_put_together_in_order(macko, tmp_path):
    """Includes rows longer than a block of the reader, empty rows, and one value in a row of zeros."""
    rng = np.random.default_rng(5)
    f = tiny_models.make("llama")
    for t in f.tensors:
        if t.name.endswith(b"ffn_down.weight"):
            w = np.frombuffer(t.data, np.float16).copy().reshape(t.ne[::-1])
            w[::2] = 0
            w[1] = 0
            w[1, -1] = 1
            t.data = w.tobytes()
        if t.name == b"output.weight":
            t.data = np.where(rng.random(len(t.data) // 2) < 0.001, np.float16(-0.0), np.float16(0)).tobytes()
    path = tmp_path / "dense.gguf"
    path.write_bytes(gb.write(f))
    held = save(open_model(path, compress=True, keep_negative_zeros=True), tmp_path / "saved.gguf")
    assert all(held[t.name.decode()] == t.data for t in f.tensors)


def test_memory_is_bounded_by_the_compressed_size(tmp_path):
    """124 MiB of weights with 95 % zeros are never all in memory as dense weights, and are not stored twice."""
    dense = make(
        tmp_path / "dense.gguf",
        "--density",
        "0.05",
        shape=["--layers", "8", "--embd", "1024", "--ff", "4096", "--heads", "8", "--kv-heads", "8", "--vocab", "300"],
    )
    code = f"""
import resource
from ggml_macko import Llama
from ggml_macko.native import llama_hook
llama_hook.register()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Llama({str(dense)!r}, n_ctx=64, n_batch=64, n_threads=2, verbose=False, compress=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"""
    grown = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout) * 1024
    assert dense.stat().st_size > 240 << 20 and grown < 110 << 20, (dense.stat().st_size >> 20, grown >> 20)


def test_dense_model_without_zeros_loads(tmp_path):
    path = make(tmp_path / "full.gguf", "--density", "1")
    assert "no weight would shrink" in compress_log(path)
    a, b = open_model(path, compress=True), open_model(path)
    tokens = tokens_of(a)
    np.testing.assert_array_equal(logits(a, tokens), logits(b, tokens))


def test_sparse_file_ignores_compress(macko, tmp_path):
    sparse = tmp_path / "sparse.gguf"
    assert macko("convert", generators.DEMO, sparse).code == 0
    a, b = open_model(sparse, compress=True), open_model(generators.DEMO, compress=True)
    tokens = tokens_of(a)
    np.testing.assert_array_equal(logits(a, tokens), logits(b, tokens))


def test_weight_with_nan_stays_dense(tmp_path):
    f = tiny_models.make("llama")
    bad = f.tensor("blk.1.ffn_up.weight")
    bad.data = b"\x00\x7e" + bad.data[2:]
    path = tmp_path / "nan.gguf"
    path.write_bytes(gb.write(f))
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(gb.write(tiny_models.make("llama")))
    counts = [int(compress_log(p).split("compressing ")[1].split(" of")[0]) for p in (path, whole)]
    assert counts[0] == counts[1] - 1


def test_other_architecture_or_broken_file_is_a_clear_error(tmp_path):
    f = tiny_models.make("llama")
    f.set("general.architecture", gb.STRING, b"mamba")
    (tmp_path / "mamba.gguf").write_bytes(gb.write(f))
    assert "mamba" in compress_log(tmp_path / "mamba.gguf")
    data = gb.write(tiny_models.make("llama"))
    for name, content in (("short", data[:-5000]), ("magic", b"GGML" + data[4:]), ("header", data[:100])):
        (tmp_path / name).write_bytes(content)
        assert "not compressed" in compress_log(tmp_path / name)
        with pytest.raises(ValueError, match="Failed to load model"):  # llama.cpp's own message, as without compress
            open_model(tmp_path / name, compress=True)


def test_file_that_changes_after_it_was_counted_is_refused(tmp_path, monkeypatch):
    import llama_cpp.llama_cpp as api

    path = tmp_path / "dense.gguf"
    f = tiny_models.make("llama")
    path.write_bytes(gb.write(f))
    real = api.llama_model_load_from_file_ptr

    def change_and_load(stream, params):
        f.tensor("blk.0.ffn_up.weight").data = np.ones(64 * 96, np.float16).tobytes()
        path.write_bytes(gb.write(f))  # the same inode and size
        return real(stream, params)

    monkeypatch.setattr(api, "llama_model_load_from_file_ptr", as_c(change_and_load))
    with pytest.raises(errors.MackoError, match="has changed since|changed while") as e:
        open_model(path, compress=True)
    assert e.value.code == errors.FILE_CHANGED


def test_environment_variable_or_argument_alone_compresses(tmp_path):
    for argument, variable in ((True, ""), (False, "compress"), (False, "")):
        arguments = f"{str(generators.DEMO)!r}, n_ctx=64, verbose=True, compress={argument}"
        code = f"from ggml_macko import Llama; Llama({arguments})"
        env = {**os.environ, "GGML_MACKO_LOAD": variable}
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
        assert ("compressing 28 of 38 tensors while loading: 6.0 MiB -> 2.3 MiB" in done.stderr) == (
            argument or variable == "compress"
        )


def test_loading_sizes_only_reads_no_weights(macko, tmp_path):
    """With params.no_alloc, as for llama.cpp's estimate of memory: sparse and compressed models."""
    import llama_cpp.llama_cpp as api

    from ggml_macko.native.llama_hook import register, run_with

    sparse = tmp_path / "sparse.gguf"
    assert macko("convert", generators.DEMO, sparse).code == 0
    register()
    params = api.llama_model_default_params()
    params.no_alloc = True
    if hasattr(params, "load_mode"):
        params.load_mode = api.LLAMA_LOAD_MODE_NONE
    else:
        params.use_mmap = False  # before llama-cpp-python 0.3.35
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path, compress in ((sparse, False), (generators.DEMO, True)):
        for _ in range(3):
            models = []
            load = api.llama_model_load_from_file
            options = load_model.LoadOptions(compress)
            run_with(options, lambda: models.append(load(str(path).encode(), params)))  # noqa: B023  now
            assert models[0]
            context = api.llama_init_from_model(models[0], api.llama_context_default_params())
            assert context
            api.llama_free(context)
            api.llama_model_free(models[0])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
