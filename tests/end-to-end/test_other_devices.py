"""Sparse weights that llama.cpp places on a device of another backend become dense there, or are refused."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest

from ggml_macko import errors
from support import generators, other_device, tiny_models
from support import gguf_bytes as gb
from support.llama_logits import logits, open_model

TOKENS = list(range(3, 60))
ALL = r"^blk\.|^output"  # every weight that can be sparse


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    from ggml_macko import convert

    path = tmp_path_factory.mktemp("other") / "sparse.gguf"
    convert(generators.DEMO, path)
    return path


@contextlib.contextmanager
def opened(path, **kwargs):
    with contextlib.closing(open_model(path, **kwargs)) as llama:
        yield llama


def logits_of(path, **kwargs):
    with opened(path, logits_all=True, **kwargs) as llama:
        return logits(llama, TOKENS)


@pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
def test_logits_are_those_of_the_dense_file(sparse, host):
    want = logits_of(generators.DEMO)
    with other_device.place(ALL, host):
        got = logits_of(sparse)
    assert np.array_equal(got, want)


@pytest.mark.parametrize("kind", ["macko", "packed", "sparse-lossless", "ec-csr", "sparse-q8"])
def test_every_format_becomes_dense(kind, macko, tmp_path):
    path, restored = tmp_path / "sparse.gguf", tmp_path / "restored.gguf"
    assert macko("convert", generators.DEMO, path, kind).code == 0
    assert macko("restore", path, restored).code == 0
    with other_device.place(ALL):
        assert np.array_equal(logits_of(path), logits_of(restored))


def test_some_weights_become_dense_and_the_others_stay_sparse(sparse, capfd):
    with opened(generators.DEMO) as llama:
        want = llama("The function", max_tokens=48, temperature=0)["choices"][0]["text"]
    with other_device.place(r"ffn_(up|down)"), opened(sparse, verbose=True) as llama:
        assert llama("The function", max_tokens=48, temperature=0)["choices"][0]["text"] == want
    found = re.search(
        r"(\d+) of (\d+) sparse tensors became dense, ([\d.]+) MiB -> ([\d.]+) MiB", capfd.readouterr().err
    )
    assert found
    n, n_all, stored, dense = (float(x) for x in found.groups())
    assert n == 8 and n_all == 28 and stored < 0.6 * dense


def test_experts_become_dense(macko, tmp_path):
    dense, path = tmp_path / "dense.gguf", tmp_path / "sparse.gguf"
    dense.write_bytes(gb.write(tiny_models.make("llama-moe")))
    assert macko("convert", dense, path).code == 0
    with other_device.place(ALL):
        assert np.array_equal(logits_of(path), logits_of(dense))


@pytest.mark.parametrize("arch", ["llama-moe", "gpt-oss"])
@pytest.mark.parametrize(
    "patterns",
    [[other_device.EXPERTS], [rf"blk\.0{other_device.EXPERTS}"], ["exps"]],
    ids=["--cpu-moe", "--n-cpu-moe 1", "-ot exps=CPU"],
)
@pytest.mark.parametrize("kind", ["macko", "sparse-q8"])
def test_experts_in_host_memory_stay_sparse(macko, tmp_path, arch, patterns, kind):
    """sparse_only refuses weights that become dense."""
    dense, path = tmp_path / "dense.gguf", tmp_path / "sparse.gguf"
    dense.write_bytes(gb.write(tiny_models.make(arch)))
    assert macko("convert", dense, path, kind).code == 0
    want = logits_of(path)
    with other_device.place_in_host_memory(patterns):
        assert np.array_equal(logits_of(path, sparse_only=True), want)


def test_compressed_on_load_stays_dense_there():
    with other_device.place(ALL):
        assert np.array_equal(logits_of(generators.DEMO, compress=True), logits_of(generators.DEMO))


@pytest.mark.parametrize("host", [True, False], ids=["host", "device"])
def test_sparse_only_refuses_another_device(sparse, host):
    with (
        other_device.place("attn_q", host),
        pytest.raises(errors.LoadError, match=r"blk\.0\.attn_q\.weight: sparse, but llama\.cpp did not place it on a"),
    ):
        open_model(sparse, sparse_only=True)


def test_sparse_only_accepts_the_plugins_device(sparse):
    assert np.isfinite(logits_of(sparse, sparse_only=True)).all()


def test_damaged_weights_are_refused_there_too(macko, tmp_path):
    import gguf

    sparse = tmp_path / "sparse.gguf"
    assert macko("convert", generators.DEMO, sparse, "macko").code == 0
    reader = gguf.GGUFReader(sparse)
    values = next(t for t in reader.tensors if t.name == "blk.1.ffn_up.weight.values")
    data = bytearray(sparse.read_bytes())
    data[values.data_offset : values.data_offset + 8] = b"\xff" * 8
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(data)
    with other_device.place("ffn_up"), pytest.raises(errors.FileFormatError, match=r"blk\.1\.ffn_up\.weight: row 0"):
        open_model(damaged)
