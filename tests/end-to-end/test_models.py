"""Model-level helpers: random models, experts, generate, bench, and errors of loading."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import gguf
import numpy as np
import pytest

from ggml_macko import errors
from ggml_macko.gguf.files import type_name
from ggml_macko.native import library
from ggml_macko.native.file import File
from support import generators
from support.llama_logits import logits

MAKE = generators.ROOT / "tools" / "make_random_llama.py"
PROMPT = "abc def"


def make(path, *args):
    shape = ["--layers", "2", "--embd", "256", "--ff", "512", "--heads", "8", "--kv-heads", "2", "--vocab", "1000"]
    done = subprocess.run([sys.executable, str(MAKE), *shape, *args, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> dense random model"""
    folder = tmp_path_factory.mktemp("random")
    return {
        "tied": make(folder / "tied.gguf", "--tied", "--density", "0.5"),
        "bf16": make(folder / "bf16.gguf", "--density", "0.4", "--type", "bf16"),
        "f32": make(folder / "f32.gguf", "--density", "0.3", "--type", "f32"),
        "experts": make(folder / "experts.gguf", "--experts", "4", "--density", "0.4"),
        "smallest": make(folder / "smallest.gguf", "--tied", "--density", "0.3", "--smallest"),
    }


def test_layers_of_a_random_model_are_the_same_where_asked(tmp_path):
    tensors = {
        t.name: np.asarray(t.data)
        for t in gguf.GGUFReader(make(tmp_path / "same.gguf", "--density", "0.5", "--same-layers")).tensors
    }
    names = [name for name in tensors if name.startswith("blk.1.")]
    assert len(names) == 9
    for name in names:
        assert np.array_equal(tensors[name], tensors[name.replace("blk.1.", "blk.0.")]), name
    assert 0.45 < (tensors["blk.1.ffn_up.weight"] == 0).mean() < 0.55
    assert not np.array_equal(tensors["output.weight"], tensors["token_embd.weight"])


def test_smallest_non_zeros_are_where_pruning_cut(models):
    for t in gguf.GGUFReader(models["smallest"]).tensors:
        w = np.abs(np.asarray(t.data, dtype=np.float64))
        if t.name.startswith("blk.") and "norm" not in t.name:  # 70 % of normal values are below 1.036 deviations
            assert w[w != 0].min() * w.shape[1] ** 0.5 == pytest.approx(1.036, abs=0.005), t.name


def open_model(path, **kwargs):
    from ggml_macko import Llama

    return Llama(str(path), **{"n_ctx": 512, "n_batch": 512, "n_threads": 2, "verbose": False, **kwargs})


def test_random_model_has_the_zeros_asked_for(models, tmp_path):
    for name, density in (("tied", 0.5), ("bf16", 0.4), ("f32", 0.3), ("experts", 0.4), ("smallest", 0.3)):
        for t in gguf.GGUFReader(models[name]).tensors:
            bits = np.frombuffer(t.data.tobytes(), {0: np.uint32, 1: np.uint16, 30: np.uint16}[int(t.tensor_type)])
            want = density if t.name.startswith("blk.") and "norm" not in t.name and "_inp" not in t.name else 1.0
            assert np.count_nonzero(bits) / bits.size == pytest.approx(want, abs=0.02), t.name
    a, b, c = (
        make(tmp_path / f"{i}.gguf", "--tied", "--density", "0.5", "--seed", s).read_bytes()
        for i, s in enumerate("112")
    )
    assert a == b != c


@pytest.mark.parametrize("name", ["tied", "bf16", "f32", "experts"])
def test_sparse_random_model_agrees_with_dense(models, tmp_path, macko, name):
    """All value types and experts (MUL_MAT_ID), in one batch and token by token."""
    sparse = tmp_path / "s.gguf"
    assert macko("convert", models[name], sparse).code == 0
    dense_llama, sparse_llama = open_model(models[name], logits_all=True), open_model(sparse, logits_all=True)
    tokens = [(7919 * i + 300) % 1000 for i in range(40)]
    want, got = (logits(x, tokens) for x in (dense_llama, sparse_llama))
    assert np.isfinite(want).all() and want.std() > 0.1
    assert np.abs(got - want).max() < 0.02 * want.std(), np.abs(got - want).max() / want.std()
    one_by_one = [logits(sparse_llama, tokens[: i + 1])[-1] for i in (0, 6, 39)]
    assert np.abs(np.array(one_by_one) - got[[0, 6, 39]]).max() < 0.02 * want.std()


def test_generate_writes_the_same_text_dense_and_sparse(tmp_path, macko):
    sparse = tmp_path / "s.gguf"
    assert macko("convert", generators.DEMO, sparse).code == 0
    args = ["-p", "The function returns", "-n", "32", "--temp", "0", "-t", "2"]
    texts = [macko("generate", "-m", path, *args) for path in (generators.DEMO, sparse)]
    assert texts[0].code == 0, texts[0].err
    assert texts[0].out == texts[1].out and texts[0].out.startswith("The function returns") and len(texts[0].out) > 60
    assert texts[1].err == ""
    bare = macko("generate", "-m", sparse, *args, "--no-display-prompt")
    assert "The function returns" + bare.out == texts[1].out
    seeded = [
        macko("generate", "-m", sparse, "-p", "A", "-n", "16", "--seed", seed, "--no-display-prompt").out
        for seed in (1, 1, 2)
    ]
    assert seeded[0] == seeded[1] != seeded[2]
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The function returns")
    assert macko("generate", "-m", sparse, "-f", prompt, *args[2:]).out == texts[0].out
    done = macko("generate", "-m", sparse, "-p", "word " * 600)
    assert done.code == 1 and "the context 512" in done.err


def test_broken_sparse_file_never_reaches_llama_cpp(tmp_path, macko):
    """One line has the file and the reason, as MackoError and as the ValueError that llama_cpp users catch."""
    sparse = tmp_path / "s.gguf"
    assert macko("convert", generators.DEMO, sparse, "macko").code == 0
    data = sparse.read_bytes()
    with File(sparse) as f:
        row_ptr = next(t for t in f.tensors() if t.name.endswith("attn_q.weight.row_ptr"))
        values = next(t for t in f.tensors() if t.name.endswith("ffn_up.weight.values"))
    for offset, change, code in (
        (row_ptr.offset, b"\x01", errors.BAD_ROW_PTR),
        (values.offset + 1, b"\x7c", errors.NOT_FINITE),
    ):
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(data[:offset] + change + data[offset + 1 :])
        with pytest.raises(ValueError) as e:
            open_model(broken)
        assert isinstance(e.value, errors.MackoError) and e.value.code == code
        assert "broken.gguf" in str(e.value) and "blk.0." in str(e.value) and "\n" not in str(e.value)
    broken.write_bytes(data[:-5000])
    with pytest.raises(errors.FileAccessError, match="broken.gguf"):
        open_model(broken)
    assert open_model(sparse)("The", max_tokens=1)  # the process still works
    with pytest.raises(ValueError, match="does not exist"):
        open_model(tmp_path / "missing.gguf")


def test_caller_parameters_stay_as_they_are(tmp_path, macko):
    sparse = tmp_path / "s.gguf"
    assert macko("convert", generators.DEMO, sparse).code == 0
    llama = open_model(sparse, use_mmap=True)
    import llama_cpp

    params = llama.model_params  # use_mmap before llama-cpp-python 0.3.35
    assert params.load_mode == llama_cpp.LLAMA_LOAD_MODE_MMAP if hasattr(params, "load_mode") else params.use_mmap
    import pickle

    again = pickle.loads(pickle.dumps(llama))  # llama_cpp supports it
    assert (
        again("The", max_tokens=4, temperature=0)["choices"][0]["text"]
        == llama("The", max_tokens=4, temperature=0)["choices"][0]["text"]
    )


def test_other_llama_cpp_version_is_refused_if_asked_for(monkeypatch):
    import llama_cpp

    from ggml_macko.native import llama_hook

    monkeypatch.setattr(llama_hook, "_registered", False)
    monkeypatch.setattr(llama_cpp, "__version__", "9.9.9")
    monkeypatch.setenv("GGML_MACKO_ENABLE", "strict-versions")
    oldest, newest = library.llama_cpp_python_range()
    with pytest.raises(
        errors.VersionMismatchError, match=rf"is tested with llama-cpp-python {oldest} to {newest}, but 9\.9\.9"
    ):
        llama_hook.register()


def test_registering_twice_wraps_once():
    import llama_cpp.llama_cpp as api

    from ggml_macko import register

    register()
    function = api.llama_model_load_from_file
    register()
    assert (
        api.llama_model_load_from_file is function and sys.modules["llama_cpp"].llama_model_load_from_file is function
    )


def test_loading_is_silent_unless_verbose(tmp_path, macko):
    sparse = tmp_path / "s.gguf"
    assert macko("convert", generators.DEMO, sparse).code == 0
    code = f"from ggml_macko import Llama; Llama({str(sparse)!r}, verbose=False)('The', max_tokens=2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_bench_prints_its_figures(tmp_path, macko):
    args = ["-r", "2", "-t", "2"]
    done = macko("bench", "--shapes", "256x512", "--densities", "0.5,0.1", *args, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert [m["density"] for m in report["matrices"]] == [0.5, 0.1] and report["threads"] == 2
    for m in report["matrices"]:
        assert set(m["seconds"]) == {"macko", "F16", "Q8_0", "Q4_K"} and all(s > 0 for s in m["seconds"].values())
    table = macko("bench", "--shapes", "256x512", "--densities", "0.5", *args)
    assert re.search(r"\| 256x512 +\| +0\.5 ", table.out) and "speed vs F16" in table.out

    sparse = tmp_path / "s.gguf"
    assert macko("convert", generators.DEMO, sparse).code == 0
    done = macko("bench", "-m", sparse, "-p", "16", "-n", "4", *args, "--json")
    assert done.code == 0, done.err
    dense, measured = json.loads(done.out)["models"]
    assert dense["model"] == "s.gguf (dense)" and measured["model"] == "s.gguf"
    assert dense["nbytes"] == generators.DEMO.stat().st_size and measured["nbytes"] == sparse.stat().st_size
    for m in (dense, measured):
        assert len(m["samples"]) == 2 and min(m["load_s"], m["prompt_tps"], m["gen_tps"], m["rss"]) > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.gguf"]  # the restored copy was removed
    table = macko("bench", "-m", sparse, "--dense", generators.DEMO, "-p", "8", "-n", "0", "-r", "1")
    assert "(1.00x)" in table.out and "pp8 t/s" in table.out
    done = macko("bench", "-m", tmp_path / "missing.gguf")
    assert done.code == 1 and "missing.gguf" in done.err


def test_file_that_is_not_sparse_is_left_to_llama_cpp(tmp_path, macko, capfd, monkeypatch):
    """llama.cpp loads or refuses dense, split and broken files, also with a wrong GGML_MACKO_CPU_KERNELS. The
    plugin only adds the reason for a file that is not a GGUF.
    """
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    other_arch = generators.write_gguf(tmp_path / "other.gguf", generators.tiny_tensors())
    with pytest.raises(ValueError, match="Failed to load model from file") as e:
        open_model(other_arch)
    assert not isinstance(e.value, errors.MackoError)
    with pytest.raises(ValueError, match="Failed to load model from file: .*text.gguf: not a GGUF file") as e:
        open_model(text)
    assert isinstance(e.value, errors.FileFormatError)
    code = f"""
from ggml_macko import Llama, errors
Llama({str(generators.DEMO)!r}, verbose=False)("The", max_tokens=1)
try:
    Llama({str(tmp_path / "s.gguf")!r}, verbose=False)
except errors.MackoError as e:
    print(e)"""
    assert macko("convert", generators.DEMO, tmp_path / "s.gguf").code == 0
    monkeypatch.setenv("GGML_MACKO_CPU_KERNELS", "abacus")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "abacus" in done.stdout, done


def test_check_tensors_does_not_look_at_placeholders(tmp_path, macko):
    """llama.cpp must not check placeholders if a caller sets check_tensors."""
    import llama_cpp.llama_cpp as api

    from ggml_macko import register

    register()
    sparse = tmp_path / "s.gguf"
    assert macko("convert", generators.DEMO, sparse).code == 0
    for _ in range(20):  # the placeholder is random, and sometimes a NaN
        params = api.llama_model_default_params()
        params.check_tensors = True
        model = api.llama_model_load_from_file(str(sparse).encode(), params)
        assert model and params.check_tensors
        api.llama_model_free(model)


@pytest.mark.parametrize(
    "type_id, name",
    [(0, "f32"), (1, "f16"), (30, "bf16"), (8, "q8_0"), (12, "q4_K"), (16, "iq2_xxs"), (999, "type 999")],
)
def test_type_is_spelt_as_in_llama_cpp(type_id, name):
    assert type_name(type_id) == name


def test_backend_path_alone_opens_no_sparse_file(tmp_path, macko):
    """llama.cpp's own variable for plugins adds the devices only, so it refuses sparse files as before."""
    sparse = tmp_path / "s.gguf"
    assert macko("convert", generators.DEMO, sparse).code == 0
    code = f"""
import ctypes
import llama_cpp
ggml = ctypes.CDLL("libggml.so.0")
ggml.ggml_backend_load_all()
ggml.ggml_backend_dev_by_name.argtypes, ggml.ggml_backend_dev_by_name.restype = [ctypes.c_char_p], ctypes.c_void_p
print(ggml.ggml_backend_dev_by_name(b"MACKO_CPU") is not None)
print(len(llama_cpp.Llama({str(generators.DEMO)!r}, verbose=False)("The", max_tokens=2)["choices"]))
try:
    llama_cpp.Llama({str(sparse)!r}, verbose=False)
except ValueError:
    print("refused")"""
    environment = {**os.environ, "GGML_BACKEND_PATH": str(library.LIBRARY_PATH)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout.split() == ["True", "1", "refused"], done
