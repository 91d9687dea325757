"""Magnitude pruning: which weights become zero, how many, and that everything else stays as it was."""

from __future__ import annotations

import re
from fractions import Fraction

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_macko import values
from ggml_macko.evaluation.calibrate import model_digest
from ggml_macko.gguf.dense_copy import dequantized
from ggml_macko.gguf.files import Model, type_name
from ggml_macko.pruning import masks, methods
from ggml_macko.values import TYPE_F16, TYPE_F32
from support import generators
from support.pruning import PRUNED, bits_of


def slow_prune(bits: np.ndarray, type_id: int, k: int) -> np.ndarray:
    """The definition: a stable sort of one row at a time."""
    out = bits.copy()
    for row in out:
        magnitude = np.abs(generators.to_float64(row, type_id))
        row[np.argsort(magnitude, kind="stable")[:k]] = 0
        row[row == values.NEGATIVE_ZERO[type_id]] = 0
    return out


@pytest.mark.parametrize("sparsity", ["0", "0.3", "0.5", "0.7", "1/3", "1"])
def test_smallest_weights_of_each_row_are_pruned(tmp_path, tiny, macko, sparsity):
    out = tmp_path / "out.gguf"
    done = macko("prune", tiny, out, "--sparsity", sparsity)
    assert done.code == 0, done.err
    before = generators.dense_bytes(tiny)
    for name, (type_id, shape, data) in generators.dense_bytes(out).items():
        assert (type_id, shape) == before[name][:2]
        if name not in PRUNED:
            assert data == before[name][2], name
            continue
        bits, _, _ = bits_of(tiny, name)
        want = slow_prune(bits, type_id, int(Fraction(sparsity) * shape[0]))
        assert data == want.tobytes(), name


def test_per_tensor_prunes_the_smallest_of_each_matrix(tmp_path, tiny, macko):
    out = tmp_path / "out.gguf"
    assert macko("prune", tiny, out, "--sparsity", "0.6", "--compare-within", "tensor").code == 0
    for name in PRUNED:
        bits, type_id, shape = bits_of(tiny, name)
        matrices = bits.reshape(-1, shape[0] * shape[1])  # an expert is a matrix
        got, _, _ = bits_of(out, name)
        assert got.tobytes() == slow_prune(matrices, type_id, int(Fraction("0.6") * matrices.shape[1])).tobytes(), name


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 30), st.integers(1, 60), st.integers(0, 60), st.integers(0, 2**32))
def test_ties_go_to_the_lowest_column(rows, cols, k, seed):
    """There are few distinct scores, so nearly all are ties."""
    k = min(k, cols)
    scores = np.random.default_rng(seed).integers(0, 4, (rows, cols)).astype(np.float32)
    mask = masks.lowest_per_row(scores, k)
    want = np.zeros_like(mask)
    for row, chosen in zip(scores, want):
        chosen[np.argsort(row, kind="stable")[:k]] = True
    assert np.array_equal(mask, want)


def test_result_does_not_depend_on_threads(tmp_path, tiny, macko, monkeypatch):
    monkeypatch.setattr(methods, "BLOCK_ELEMENTS", 100)  # many blocks
    outs = []
    for threads in (1, 2, 5):
        outs.append(tmp_path / f"{threads}.gguf")
        assert macko("prune", tiny, outs[-1], "--sparsity", "0.5", "-t", threads).code == 0
    assert len({o.read_bytes() for o in outs}) == 1


def test_include_and_exclude_choose_the_tensors(tmp_path, tiny, macko):
    def changed(*args):
        out = tmp_path / "out.gguf"
        done = macko("prune", tiny, out, "--sparsity", "0.9", "--force", *args)
        assert done.code == 0, done.err
        a, b = generators.dense_bytes(tiny), generators.dense_bytes(out)
        return {name for name in a if a[name] != b[name]}

    assert changed() == PRUNED
    assert changed("--exclude-weights", "attn", "--exclude-weights", "up_exps") == {"blk.0.ffn_down_exps.weight"}
    assert changed("--include-weights", "token_embd", "--include-weights", "ffn_gate_inp") == {
        "token_embd.weight",
        "blk.0.ffn_gate_inp.weight",
    }
    done = macko(
        "prune", tiny, tmp_path / "x.gguf", "--sparsity", "0.5", "--include-weights", "a", "--exclude-weights", "b"
    )
    assert done.code == 2 and "not allowed with" in done.err


def test_norm_is_never_pruned(tmp_path, tiny, macko):
    done = macko("prune", tiny, tmp_path / "out.gguf", "--sparsity", "0.5", "--include-weights", "attn_norm")
    assert done.code == 1 and "nothing to prune" in done.err and not (tmp_path / "out.gguf").exists()


def test_provenance_is_that_of_the_last_pruning(tmp_path, tiny, macko):
    once, twice = tmp_path / "1.gguf", tmp_path / "2.gguf"
    assert macko("prune", tiny, once, "--sparsity", "0.25").code == 0
    assert macko("prune", once, twice, "--sparsity", "0.5", "--compare-within", "tensor").code == 0
    fields = gguf.GGUFReader(twice).fields
    assert fields["macko.prune.method"].contents() == "magnitude"
    assert fields["macko.prune.sparsity"].contents() == 0.5
    assert fields["macko.prune.compare_within"].contents() == "tensor"
    assert sum(name.startswith("macko.") for name in fields) == 3
    assert fields["test.list"].contents() == [1, 2, 3]


def test_reported_zeros_are_those_in_the_file(tmp_path, tiny, macko):
    done = macko("prune", tiny, tmp_path / "out.gguf", "--sparsity", "0.5")
    rows = re.findall(r"^\| (blk\S+) +\| \S+ +\| \S+ +\| +(\d+) \| +(\d+) \| +([\d.]+) \|", done.out, re.MULTILINE)
    assert {r[0] for r in rows} == PRUNED
    for name, before, after, share in rows:
        old, _, _ = bits_of(tiny, name)
        new, _, _ = bits_of(tmp_path / "out.gguf", name)
        assert (int(before), int(after)) == ((old == 0).sum(), (new == 0).sum())
        assert float(share) == pytest.approx((new == 0).mean(), abs=1e-4)


def test_dry_run_writes_nothing(tmp_path, tiny, macko):
    files = sorted(tmp_path.iterdir())
    dry = macko("prune", tiny, "--sparsity", "0.5", "--dry-run")
    assert dry.code == 0 and sorted(tmp_path.iterdir()) == files
    assert dry.out == macko("prune", tiny, tmp_path / "out.gguf", "--sparsity", "0.5").out


@pytest.mark.parametrize("sparsity", ["-0.1", "1.01", "nan", "inf", "half", "", "1/0"])
def test_sparsity_out_of_range_is_refused(tmp_path, tiny, macko, sparsity):
    done = macko("prune", tiny, tmp_path / "out.gguf", "--sparsity=" + sparsity)
    assert done.code == 2 and done.err.startswith("error: --sparsity") and not (tmp_path / "out.gguf").exists()


QUANTIZED = [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S",
    "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
]  # fmt: skip


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_dequantized(tmp_path, macko, name):
    """gguf-py dequantizes what is expected."""
    kind = gguf.GGMLQuantizationType[name]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 64, (40, 512 // block, nbytes), dtype=np.uint8)  # scales are below 2
    if name == "MXFP4":
        data[:, :, 0] = 120  # the exponent
    data = data.reshape(40, -1)
    expected = gguf.quants.dequantize(data, kind)
    norm = generators.random_bits(np.random.default_rng(1), 1, 512, 1.0, TYPE_F32)[0]
    path = generators.write_gguf(
        tmp_path / "q.gguf",
        {
            "token_embd.weight": (data, int(kind)),
            "blk.0.attn_norm.weight": (norm, TYPE_F32),
            "blk.0.attn_q.weight": (data, int(kind)),
        },
        {"general.file_type": 15},
    )
    done = macko("prune", path, tmp_path / "out.gguf", "--sparsity", "0.5")
    assert done.code == 0, done.err
    found = re.findall("note: .*", done.err)
    assert len(found) == 1 and f"2 quantized tensors ({type_name(kind)}) are dequantized to f16" in found[0]
    embedding, type_id, _ = bits_of(tmp_path / "out.gguf", "token_embd.weight")
    assert type_id == TYPE_F16 and np.allclose(embedding.view(np.float16), expected, rtol=2**-10, atol=2**-24)
    pruned, type_id, _ = bits_of(tmp_path / "out.gguf", "blk.0.attn_q.weight")
    assert type_id == TYPE_F16 and ((pruned == 0) | (pruned == embedding)).all()
    assert ((pruned == 0).sum(axis=1) >= 256).all() and (pruned != 0).any()
    assert bits_of(tmp_path / "out.gguf", "blk.0.attn_norm.weight")[0].tobytes() == norm.tobytes()
    with Model(tmp_path / "out.gguf") as m:
        assert m.key("general.file_type").value() == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.gguf", "q.gguf"]


def test_dequantized_copies_of_a_model_are_alike(tmp_path):
    """So that a run that was interrupted goes on; the source itself is used if nothing is quantized."""
    data = gguf.quants.quantize(np.ones((32, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    path = generators.write_gguf(tmp_path / "q.gguf", {"blk.0.attn_q.weight": (data, 8)})
    digests = []
    (tmp_path / ".out.gguf.f16.0123456789abcdef.partial").write_bytes(b"left by a killed run")
    for _ in range(2):
        with dequantized(path, tmp_path / "out.gguf") as copy:
            assert copy.parent == tmp_path and len([*tmp_path.iterdir()]) == 2
            digests.append(model_digest(copy))
            with dequantized(copy, None) as again:
                assert again == copy
    assert digests[0] == digests[1] and [p.name for p in tmp_path.iterdir()] == ["q.gguf"]


def test_value_beyond_f16_is_refused(tmp_path, macko):
    data = np.zeros((8, 34), np.uint8)
    data[3, :2] = np.frombuffer(np.float16(60000).tobytes(), np.uint8)
    data[3, 2:] = 2
    path = generators.write_gguf(tmp_path / "q.gguf", {"blk.0.attn_q.weight": (data, 8)})
    done = macko("prune", path, tmp_path / "out.gguf", "--sparsity", "0.5")
    assert done.code == 1 and f"{path}: blk.0.attn_q.weight: values beyond f16, up to 12" in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["q.gguf"]


def test_non_finite_weights_are_refused(tmp_path, macko):
    bits = generators.random_bits(np.random.default_rng(0), 8, 32, 1.0)
    bits[3, 5] = 0x7E00
    path = generators.write_gguf(tmp_path / "n.gguf", {"blk.0.attn_q.weight": (bits, TYPE_F16)})
    done = macko("prune", path, tmp_path / "out.gguf", "--sparsity", "0.5")
    assert done.code == 1 and "blk.0.attn_q.weight: 1 values are not finite" in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["n.gguf"]


def test_sparse_input_is_refused(tmp_path, tiny, macko):
    sparse = tmp_path / "s.gguf"
    assert macko("convert", tiny, sparse).code == 0
    done = macko("prune", sparse, tmp_path / "out.gguf", "--sparsity", "0.5")
    assert done.code == 1 and "macko restore" in done.err


def test_magnitude_is_exact():
    """float32 weights that differ in the last bit are told apart."""
    one = np.float32(1)
    scores = masks.magnitude(np.array([[np.nextafter(one, 2), -one]], np.float32).view(np.uint32), TYPE_F32)
    assert masks.lowest_per_row(scores, 1).tolist() == [[False, True]]
