"""Negative zeros, which pruning by W * mask produces, count as zeros unless the user keeps them. llama.cpp computes the
same results with both.
"""

from __future__ import annotations

import functools
import hashlib

import gguf
import numpy as np
import pytest

from ggml_macko import ConvertOptions, SparseMatrix, convert, errors, verify
from ggml_macko.native import codec
from ggml_macko.values import NEGATIVE_ZERO, TYPE_BF16, TYPE_F16, TYPE_F32, bits_dtype
from support import generators, llama_logits
from support.llama_functions import compress_log
from support.llama_logits import logits, logits_one_by_one

LOSSLESS = ("macko", "packed", "ec-csr", "auto")
QUANTIZED = ("sparse-q8", "sparse-q5", "sparse-q4", "sparse-q3")
open_model = functools.partial(llama_logits.open_model, n_ctx=256, logits_all=True)


def masked_bits(type_id, rows=64, cols=256, density=0.3):
    """Bit patterns of W * mask, and the same with positive zeros only."""
    rng = np.random.default_rng(1)
    w = generators.from_float32(rng.standard_normal((rows, cols)).astype(np.float32), type_id)
    sign = w & w.dtype.type(NEGATIVE_ZERO[type_id])
    pruned = rng.random((rows, cols)) >= density
    return np.where(pruned, sign, w).astype(w.dtype), np.where(pruned, 0, w).astype(w.dtype)


def with_negative_zeros(source, path, share):
    """Writes the model with this share of negative zeros among the zeros of its blocks. Returns their number."""
    data = bytearray(source.read_bytes())
    rng = np.random.default_rng(0)
    n = 0
    for t in gguf.GGUFReader(source).tensors:
        if t.name.startswith("blk.") and t.tensor_type == gguf.GGMLQuantizationType.F16:
            bits = np.frombuffer(data, np.uint16, t.n_elements, t.data_offset)
            bits[bits == 0x8000] = 0
            negative = (bits == 0) & (rng.random(bits.size) < share)
            bits[negative] = 0x8000
            n += int(negative.sum())
    path.write_bytes(data)
    return n


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The bundled model with -0.0 for half of its zeros, the same without -0.0, and the number of -0.0."""
    folder = tmp_path_factory.mktemp("zeros")
    negative, positive = folder / "negative.gguf", folder / "positive.gguf"
    n = with_negative_zeros(generators.DEMO, negative, 0.5)
    assert n > 1_000_000 and with_negative_zeros(generators.DEMO, positive, 0) == 0
    return negative, positive, n


# ---- storage ----


@pytest.mark.parametrize("type_id", [TYPE_F16, TYPE_BF16, TYPE_F32])
def test_negative_zeros_count_as_zeros_unless_they_are_kept(tmp_path, macko, type_id):
    bits, plain = masked_bits(type_id)
    n = int((bits == NEGATIVE_ZERO[type_id]).sum())
    paths = [
        generators.write_gguf(tmp_path / name, {"blk.0.attn_q.weight": (w, type_id)})
        for name, w in (("masked.gguf", bits), ("plain.gguf", plain))
    ]
    sparse, of_plain, kept = (tmp_path / name for name in ("sparse.gguf", "of-plain.gguf", "kept.gguf"))
    done = macko("convert", paths[0], sparse)
    share = f"{n / bits.size:.1%} of the sparse tensors' weights"
    assert f"{n} negative zeros ({share}) count as zeros; --keep-negative-zeros keeps them" in done.err
    assert f"{n} negative zeros" in macko("convert", paths[0], "--dry-run").err
    done = macko("convert", paths[1], of_plain)
    assert done.code == 0 and "negative zero" not in done.err
    assert sparse.read_bytes() == of_plain.read_bytes()
    done = macko("convert", paths[0], kept, "--keep-negative-zeros")
    assert done.code == 0 and "negative zero" not in done.err and kept.stat().st_size > 1.3 * sparse.stat().st_size


def test_verify_and_restore_count_signs_of_zeros(tmp_path, macko):
    bits, plain = masked_bits(TYPE_F16)
    n = int((bits == 0x8000).sum())
    path = generators.write_gguf(tmp_path / "masked.gguf", {"blk.0.attn_q.weight": (bits, TYPE_F16)})
    sparse, kept = tmp_path / "sparse.gguf", tmp_path / "kept.gguf"
    report = convert(path, sparse)
    assert report.n_negative_zeros == n
    assert convert(path, kept, options=ConvertOptions(keep_negative_zeros=True)).n_negative_zeros == 0
    for pair in ((path, sparse), (sparse, path)):
        done = macko("verify", *pair)
        assert done.code == 0 and done.out.startswith(f"identical, but for {n} negative zeros: 1 tensors")
        found = verify(*pair)
        assert found.is_equal and not found.is_identical and found.n_negative_zeros == n
    done = macko("verify", path, sparse, "--exact")
    first = int(np.argmax(bits.reshape(-1) == 0x8000))
    assert done.code == 1
    assert f"row {first // 256}, column {first % 256}: 0x8000 against 0x0000" in done.out
    assert macko("verify", path, kept, "--exact").out.startswith("identical: 1 tensors")
    for source, want in ((sparse, plain), (kept, bits)):
        dense = tmp_path / f"restored-{source.name}"
        assert macko("restore", source, dense).code == 0
        assert generators.dense_bytes(dense)["blk.0.attn_q.weight"][2] == want.tobytes()


def test_verify_finds_a_change_among_signs_of_zeros(tmp_path, macko):
    """Reports a weight that became zero or was zero, even after many elements that differ in the sign of zero only."""
    bits, plain = masked_bits(TYPE_F16)
    path = generators.write_gguf(tmp_path / "a.gguf", {"blk.0.attn_q.weight": (bits, TYPE_F16)})
    for place in (np.argwhere(plain != 0)[-1], np.argwhere(bits == 0x8000)[-1]):
        other = plain.copy()
        other[tuple(place)] = 0 if other[tuple(place)] else 1
        b = generators.write_gguf(tmp_path / "b.gguf", {"blk.0.attn_q.weight": (other, TYPE_F16)})
        done = macko("verify", path, b)
        assert done.code == 1 and f"row {place[0]}, column {place[1]}: " in done.out


@pytest.mark.parametrize("kind", LOSSLESS + QUANTIZED)
def test_every_type_stores_the_same_of_a_masked_and_a_plain_matrix(tmp_path, kind):
    bits, plain = masked_bits(TYPE_F16)
    files = []
    for name, w in (("masked", bits), ("plain", plain)):
        path = generators.write_gguf(tmp_path / f"{name}.gguf", {"blk.0.attn_q.weight": (w, TYPE_F16)})
        convert(path, tmp_path / f"{name}-s.gguf", kind)
        files.append((tmp_path / f"{name}-s.gguf").read_bytes())
    assert files[0] == files[1]
    matrices = [SparseMatrix.from_dense(x.view(np.float16), format=kind).arrays for x in (bits, plain)]
    for a, b in zip(matrices[0].arrays, matrices[1].arrays):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_sparse_matrix_says_how_many_and_leaves_its_source_alone():
    bits, plain = masked_bits(TYPE_F32)
    n = int((bits == 0x80000000).sum())
    w = bits.view(np.float32)
    before = hashlib.sha256(w.tobytes()).hexdigest()
    s = SparseMatrix.from_dense(w)
    assert hashlib.sha256(w.tobytes()).hexdigest() == before
    assert s.n_negative_zeros == n and f"{n} negative zeros counted as zeros" in repr(s)
    assert s.to_dense().tobytes() == plain.tobytes() and s.nnz == int((plain != 0).sum())
    kept = SparseMatrix.from_dense(w, keep_negative_zeros=True)
    assert kept.to_dense().tobytes() == bits.tobytes() and kept.n_negative_zeros == 0 and "negative" not in repr(kept)
    x = np.random.default_rng(2).standard_normal((256, 3)).astype(np.float32)
    np.testing.assert_allclose(s @ x, kept @ x, rtol=1e-5, atol=1e-5)


def test_drop_negative_zeros_agrees_with_numpy():
    rng = np.random.default_rng(3)
    for type_id in generators.TYPES:
        for n in (0, 1, 15, 16_383, 16_385, 70_000):
            bits = rng.choice(np.array([*generators.SPECIAL[type_id], 0], dtype=bits_dtype(type_id)), n)
            want = np.where(bits == NEGATIVE_ZERO[type_id], 0, bits).astype(bits.dtype)
            for n_threads in (1, 2):
                got = bits.copy()
                count = codec.drop_negative_zeros(got, type_id, n_threads)
                assert got.tobytes() == want.tobytes() and count == int((bits == NEGATIVE_ZERO[type_id]).sum())
    many = np.full(200_000, 0x8000, np.uint16)  # a count of 16 bits would wrap
    assert codec.drop_negative_zeros(many, TYPE_F16) == 200_000 and not many.any()
    for bad in (np.zeros(4, np.uint32), np.zeros((4, 4), np.uint16)[:, ::2]):
        with pytest.raises(errors.ArgumentError, match="contiguous"):
            codec.drop_negative_zeros(bad, TYPE_F16)


# ---- results of llama.cpp ----


def test_logits_are_the_same_with_either_sign_of_zero(demo, tmp_path):
    """Dense models: equal bit for bit, because (-0.0) * x adds nothing to a sum. Sparse models: the files are equal;
    kernels add kept negative zeros in another order.
    """
    negative, positive, n = demo
    sparse, of_positive, kept = (tmp_path / name for name in ("sparse.gguf", "of-positive.gguf", "kept.gguf"))
    assert convert(negative, sparse).n_negative_zeros == n
    convert(positive, of_positive)
    assert sparse.read_bytes() == of_positive.read_bytes()
    convert(negative, kept, options=ConvertOptions(keep_negative_zeros=True))
    dense_llama = open_model(negative)
    tokens = [int(t) for t in np.random.default_rng(3).integers(3, dense_llama.n_vocab(), 60)]
    for evaluate in (logits, logits_one_by_one):
        want = evaluate(dense_llama, tokens)
        np.testing.assert_array_equal(want, evaluate(open_model(positive), tokens))
        got, of_kept = (evaluate(open_model(path), tokens) for path in (sparse, kept))
        assert np.abs(got - want).max() < 0.02 * want.std()  # as for sparse and dense models without negative zeros
        assert np.abs(got - of_kept).max() < 0.02 * want.std()


def test_weights_compressed_on_load_are_those_of_the_converted_file(demo, tmp_path):
    negative, _, n = demo
    sparse, kept = tmp_path / "sparse.gguf", tmp_path / "kept.gguf"
    convert(negative, sparse)
    convert(negative, kept, options=ConvertOptions(keep_negative_zeros=True))
    tokens = list(range(5, 45))
    for path, keep in ((sparse, False), (kept, True), (sparse, False)):  # counts are cached per value of keep
        compressed = open_model(negative, compress=True, keep_negative_zeros=keep)
        np.testing.assert_array_equal(logits(compressed, tokens), logits(open_model(path), tokens))


def test_log_of_a_load_says_how_many_negative_zeros_count_as_zeros(demo):
    negative, positive, n = demo
    line = f"{n} negative zeros count as zeros; GGML_MACKO_LOAD=keep-negative-zeros keeps them"
    assert line in compress_log(negative)
    for path, keep in ((positive, False), (negative, True)):
        log = compress_log(path, keep_negative_zeros=keep)
        assert "while loading" in log and "negative zeros" not in log


# ---- a real checkpoint ----


def test_trained_checkpoint_is_half_as_large_and_writes_the_same_text(tmp_path, shared_models, macko):
    """W * mask leaves -0.0 for half of the pruned weights; this test reproduces that."""
    source = shared_models / "docs-23m-s70-f16.gguf"
    masked, sparse = tmp_path / "masked.gguf", tmp_path / "sparse.gguf"
    with_negative_zeros(source, masked, 0.5)
    assert macko("convert", masked, sparse).code == 0
    assert sparse.stat().st_size <= 0.50 * masked.stat().st_size
    args = ["-p", "The function returns", "-n", "24", "--temp", "0", "-t", "2"]
    texts = [macko("generate", "-m", path, *args).out for path in (masked, sparse)]
    assert texts[0] == texts[1] and len(texts[0]) > 60
