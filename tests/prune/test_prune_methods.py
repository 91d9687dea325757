"""Pruning beyond magnitude: Wanda's masks, exact allocation, and what is refused."""

from __future__ import annotations

import math
import shutil
from fractions import Fraction

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_macko import values
from ggml_macko.benchmark import forms
from ggml_macko.evaluation.text_model import TextModel
from ggml_macko.gguf.dense_copy import dequantized
from ggml_macko.pruning import allocation, array_backend, masks, torch_text
from ggml_macko.values import TYPE_BF16, TYPE_F16, TYPE_F32
from support import generators, gguf_bytes, tiny_models
from support.pruning import PRUNED, bits_of


def statistics_of(path, rng, unused: tuple = ()) -> dict:
    """Weight name -> (float32 sums (n_mat, cols), counts); some inputs are always zero.

    unused: experts that no token was routed to.
    """
    out = {}
    for name in PRUNED:
        _, shape, _ = generators.dense_bytes(path)[name]
        n_mat = shape[2] if len(shape) == 3 else 1
        sums = (rng.standard_normal((n_mat, shape[0])) ** 2 * 10.0 ** rng.integers(-3, 4, (n_mat, shape[0]))).astype(
            "f4"
        )
        sums[:, ::17] = 0
        counts = np.full(n_mat, 100)
        for i in unused if n_mat > 1 else ():
            sums[i], counts[i] = 0, 0
        out[name] = (sums, counts)
    return out


def write_imatrix(path, statistics: dict):
    """Writes the file of llama-imatrix with gguf-py."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["some/text.txt"])
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, (sums, counts) in sorted(statistics.items()):
        writer.add_tensor(name + ".in_sum2", np.asarray(sums, np.float32))
        writer.add_tensor(name + ".counts", np.asarray(counts, np.float32).reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def imatrix(tmp_path, tiny):
    return write_imatrix(tmp_path / "imatrix.gguf", statistics_of(tiny, np.random.default_rng(3)))


# ---- quantized models ----


@pytest.mark.parametrize("options", [["alps", "-f"], ["wanda", "--imatrix"]], ids=lambda options: options[0])
def test_quantized_model_is_pruned_as_its_values_are(tmp_path, macko, text, options):
    model, copy = tmp_path / "f16.gguf", tmp_path / "copy.gguf"
    model.write_bytes(gguf_bytes.write(tiny_models.make("llama")))
    forms.quantize(model, tmp_path / "q8_0.gguf", "Q8_0", 1)
    with dequantized(tmp_path / "q8_0.gguf", copy) as path:
        shutil.copyfile(path, copy)
    statistics = text
    if options[1] == "--imatrix":
        statistics = tmp_path / "imatrix.gguf"
        assert macko("calibrate", "-m", tmp_path / "q8_0.gguf", "-f", text, "-c", 32, "-o", statistics).code == 0
    arguments = ["--sparsity", 0.5, "-c", 32, "-dev", "none", "--method", *options, statistics]
    for source in (tmp_path / "q8_0.gguf", copy):
        done = macko("prune", source, tmp_path / f"pruned-{source.name}", *arguments)
        assert done.code == 0, done.err
    results = [(tmp_path / f"pruned-{name}").read_bytes() for name in ("q8_0.gguf", "copy.gguf")]
    assert results[0] == results[1]


# ---- which text ----


@pytest.mark.parametrize("n", [1, 3, 5, 99])
@pytest.mark.parametrize(
    "options",
    [
        ["wanda"],
        ["alps"],
        ["sparsegpt", "--sequential"],
        ["alps", "--asymmetric", 0.5],
        ["alps", "--allocation", "loss"],
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_chunks_are_spread_over_the_text(tmp_path, macko, monkeypatch, options, n):
    """Every model that evaluates the text reads chunk floor(i m / n) of m, or each if there are no more than n."""
    model, text = tmp_path / "model.gguf", tmp_path / "text.txt"
    model.write_bytes(gguf_bytes.write(tiny_models.make("llama")))
    text.write_text("".join(np.random.default_rng(4).choice(["ab ", "a ", "b ab", "\n"], 260)))
    with TextModel(model, 32) as llama:
        chunks = llama.read_chunks(text)
    m = len(chunks)
    assert m > 8 and len(np.unique(chunks, axis=0)) == m
    wanted = {chunks[i * m // min(n, m)].tobytes() for i in range(min(n, m))}
    evaluate, seen = TextModel.evaluate, set()

    def watched(self, batch, first=0):
        seen.update(chunk.tobytes() for chunk in batch)
        return evaluate(self, batch, first)

    monkeypatch.setattr(TextModel, "evaluate", watched)
    monkeypatch.setattr(torch_text, "device_for", lambda options: None)  # llama.cpp evaluates all
    arguments = ["--sparsity", 0.5, "-f", text, "-c", 32, "--chunks", n, "-dev", "none", "--method", *options]
    done = macko("prune", model, tmp_path / "out.gguf", *arguments)
    assert done.code == 0, done.err
    assert seen == wanted


# ---- which weights ----


def paper_wanda(bits: np.ndarray, type_id: int, sums: np.ndarray, sparsity: Fraction) -> np.ndarray:
    """Algorithm 1 of the paper on one matrix: metric = |W| * ||X||, sort each row, zero the first share."""
    with np.errstate(over="ignore"):
        metric = np.abs(generators.to_float64(bits, type_id).astype(np.float32)) * np.sqrt(sums)[None, :]
    order = np.argsort(metric, axis=-1, kind="stable")
    out = bits.copy()
    np.put_along_axis(out, order[:, : int(sparsity * bits.shape[1])], 0, axis=-1)
    out[out == values.NEGATIVE_ZERO[type_id]] = 0
    return out


@pytest.mark.parametrize("sparsity", ["0", "0.3", "0.5", "2/3", "1"])
def test_wanda_mask_is_that_of_the_paper(tmp_path, tiny, macko, sparsity):
    statistics = statistics_of(tiny, np.random.default_rng(5), unused=(2,))
    done = macko(
        "prune", tiny, tmp_path / "out.gguf", "--method", "wanda", "--sparsity", sparsity,
        "--imatrix", write_imatrix(tmp_path / "i.gguf", statistics),
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "blk.0.ffn_up_exps.weight: 1 of 4 experts got no token" in done.err
    for name in PRUNED:
        bits, type_id, shape = bits_of(tiny, name)
        got, _, _ = bits_of(tmp_path / "out.gguf", name)
        for i, (sums, count) in enumerate(zip(*statistics[name])):
            rows = slice(i * shape[1], (i + 1) * shape[1])
            if not count:  # magnitude decides
                sums = np.ones_like(sums)
            want = paper_wanda(bits[rows], type_id, sums, Fraction(sparsity))
            assert got[rows].tobytes() == want.tobytes(), (name, i)


def test_wanda_mask_of_a_real_model_is_that_of_the_paper(tmp_path, shared_models, macko):
    """Statistics from our own calibration, masks against the paper's rule, bit for bit."""
    model, text = shared_models / "docs-4m-f16.gguf", shared_models / "calibration.txt"
    imatrix_path, out = tmp_path / "i.gguf", tmp_path / "out.gguf"
    assert macko("calibrate", "-m", model, "-f", text, "--chunks", 4, "-o", imatrix_path).code == 0
    assert macko("prune", model, out, "--method", "wanda", "--sparsity", "0.6", "--imatrix", imatrix_path).code == 0
    sums = {t.name: t.data for t in gguf.GGUFReader(imatrix_path).tensors}
    n = 0
    for name, (type_id, _, data) in generators.dense_bytes(out).items():
        if name + ".in_sum2" in sums:
            bits, _, _ = bits_of(model, name)
            assert data == paper_wanda(bits, type_id, sums[name + ".in_sum2"].reshape(-1), Fraction("0.6")).tobytes(), (
                name
            )
            n += 1
    assert n == 28


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
@pytest.mark.parametrize("sparsity", ["0", "0.37", "0.6", "0.999", "1"])
def test_per_model_ranks_all_weights_together(tmp_path, tiny, macko, method, sparsity):
    statistics = statistics_of(tiny, np.random.default_rng(8))
    args = ["--imatrix", write_imatrix(tmp_path / "i.gguf", statistics)] if method == "wanda" else []
    out = tmp_path / "out.gguf"
    done = macko("prune", tiny, out, "--method", method, "--compare-within", "model", "--sparsity", sparsity, *args)
    assert done.code == 0, done.err
    scores, bits = [], []
    names = [name for name in generators.dense_bytes(tiny) if name in PRUNED]  # in the file's order
    for name in names:
        b, type_id, shape = bits_of(tiny, name)
        score = np.abs(generators.to_float64(b, type_id).astype(np.float32))
        if method == "wanda":
            with np.errstate(over="ignore"):
                score = score * np.sqrt(np.repeat(statistics[name][0], shape[1], axis=0))
        scores.append(score.reshape(-1))
        bits.append(b.reshape(-1) & ~np.uint64(0))  # one integer type for all
    joined = np.concatenate(bits)
    n = int(Fraction(sparsity) * len(joined))
    joined[np.argsort(np.concatenate(scores), kind="stable")[:n]] = 0
    at = 0
    for name in names:
        got, type_id, _ = bits_of(out, name)
        want = joined[at : at + got.size].astype(got.dtype)
        want[want == values.NEGATIVE_ZERO[type_id]] = 0
        assert got.tobytes() == want.tobytes(), name
        at += got.size


# ---- how many ----


@given(st.integers(0, 10**7), st.integers(1, 300))
def test_spread_adds_up_and_is_even(total, n):
    parts = masks.spread(total, n)
    assert parts.sum() == total and len(parts) == n and parts.max() - parts.min() <= 1


def zeros_by_tensor(path) -> dict:
    """Zeros of each pruned tensor; -0.0 counts as zero."""
    found = {name: bits_of(path, name)[:2] for name in PRUNED}
    return {name: int((generators.to_float64(bits, type_id) == 0).sum()) for name, (bits, type_id) in found.items()}


def test_first_match_in_the_table_decides(tmp_path, tiny, macko):
    dense = generators.write_gguf(tmp_path / "dense.gguf", generators.tiny_tensors(density=1.0))
    out = tmp_path / "out.gguf"
    done = macko(
        "prune", dense, out, "--sparsity", "0.5", "--tensor-sparsity", "attn_[qk]=0.25", "--tensor-sparsity", "attn=0"
    )
    assert done.code == 0, done.err
    before, after = zeros_by_tensor(dense), zeros_by_tensor(out)
    for name, n in after.items():
        share = 0.25 if "attn_q" in name or "attn_k" in name else 0 if "attn" in name else 0.5
        size = bits_of(dense, name)[0].size
        assert n == max(before[name], int(share * size)), name
    table = gguf.GGUFReader(out).fields["macko.prune.tensor_sparsity"].contents()
    assert table == ["attn_[qk]=0.25", "attn=0"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.fractions(0, 1)), min_size=1, max_size=9))
def test_distribution_adds_up_to_the_total(parts):
    class Tensor:
        def __init__(self, i, rows):
            self.name, self.ne, self.rows, self.cols, self.n_elements = str(i), (7, rows), rows, 7, 7 * rows

    tensors = [Tensor(i, rows) for i, (rows, _) in enumerate(parts)]
    exact = {t.name: s for t, (_, s) in zip(tensors, parts)}
    total = int(sum(exact[t.name] * t.n_elements for t in tensors))
    counts = allocation.distribute(tensors, exact, total)
    assert sum(int(c.sum()) for c in counts.values()) == total
    for t in tensors:
        assert abs(int(counts[t.name].sum()) - exact[t.name] * t.n_elements) < 1
        assert counts[t.name].sum() <= t.n_elements


class Matrix:
    """What allocation needs to know of a tensor."""

    def __init__(self, name, rows, cols=16):
        self.name, self.ne, self.rows, self.cols, self.n_elements = name, (cols, rows), rows, cols, rows * cols


def test_allocation_by_loss_is_the_least_of_all():
    """Against a search over all sparsities in steps of 1/160, with losses whose logarithms are linear in sparsity."""
    tensors = [Matrix(f"blk.{i}.attn_q.weight", rows) for i, rows in enumerate((10, 20, 10))]
    size = [t.n_elements for t in tensors]
    weight, slope = (1.0, 0.2, 3.0), (6.0, 8.0, 5.0)
    sparsity, shift = Fraction("0.6"), Fraction("0.2")

    def loss(i, s):
        return weight[i] * math.exp(slope[i] * float(s))

    grid = allocation.loss_grid(sparsity, shift)
    assert grid == [Fraction(x, 10) for x in (4, 5, 6, 7, 8)]
    losses = {t.name: [loss(i, s) for s in grid] for i, t in enumerate(tensors)}
    quotas = allocation.by_loss(tensors, sparsity, "tensor", losses, shift)
    counts = [int(quotas[t.name].sum()) for t in tensors]
    assert sum(counts) == sum(int(sparsity * n) for n in size)
    ours = sum(loss(i, n / size[i]) for i, n in enumerate(counts))
    steps = [Fraction(64 + k, 160) for k in range(65)]
    total = sparsity * sum(size)
    rivals = ((a, b, (total - a * size[0] - b * size[1]) / size[2]) for a in steps for b in steps)
    best = min(sum(loss(i, s) for i, s in enumerate(rival)) for rival in rivals if 0.4 <= rival[2] <= 0.8)
    assert ours < 1.001 * best < 0.9 * sum(loss(i, sparsity) for i in range(3))


@settings(max_examples=50, deadline=None)
@given(
    st.fractions(0, 1), st.fractions("1/100", 1), st.lists(st.tuples(st.integers(1, 9), st.floats(0, 9)), min_size=1)
)
def test_allocation_by_loss_adds_up_to_uniform(sparsity, shift, parts):
    tensors = [Matrix(f"blk.{i}.attn_q.weight", rows) for i, (rows, _) in enumerate(parts)]
    grid = allocation.loss_grid(sparsity, shift)
    losses = {t.name: [rise * float(s) ** 2 for s in grid] for t, (_, rise) in zip(tensors, parts)}
    quotas = allocation.by_loss(tensors, sparsity, "row", losses, shift)
    assert sum(int(n.sum()) for n in quotas.values()) == allocation.uniform_total(tensors, sparsity, "row")
    assert all(0 <= quotas[t.name].sum() <= t.n_elements for t in tensors)


# ---- values ----


@pytest.mark.parametrize("type_id", [TYPE_F16, TYPE_BF16, TYPE_F32])
def test_values_are_rounded_to_nearest_even(xp, type_id):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(5000) * 10.0 ** rng.integers(-8, 5, 5000)).astype(np.float32)
    want = gguf.quants.quantize(x, generators.QUANTIZATION[type_id]).view(values.bits_dtype(type_id))
    found = masks.from_float32(xp.asarray(x), type_id)
    assert np.array_equal(array_backend.to_host(found), want)
    assert np.array_equal(array_backend.to_host(masks.from_float32(masks.to_float32(found, type_id), type_id)), want)


@pytest.mark.parametrize("type_id", [TYPE_F16, TYPE_BF16, TYPE_F32])
@pytest.mark.parametrize("n", [8, 11, 24])
def test_significant_bits_are_those_of_next_to_all_weights(type_id, n):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(20000).astype(np.float32)
    x[rng.random(x.size) < 0.5] = 0
    full = values.SIGNIFICAND_BITS[type_id]
    bits = masks.from_float32(masks.with_significant_bits(x, n), type_id)
    assert masks.significant_bits(bits, type_id) == min(n, full)
    longer = rng.choice(np.flatnonzero(bits), 50, replace=False)  # .5 % of them: not enough to matter
    bits[longer] |= 1
    assert masks.significant_bits(bits, type_id) == min(n, full)
    bits[rng.random(x.size) < 0.1] |= 1
    assert masks.significant_bits(bits, type_id) == full


def test_rounding_to_significant_bits_is_to_nearest_even(xp):
    rng = np.random.default_rng(2)
    x = (rng.standard_normal(5000) * 10.0 ** rng.integers(-8, 5, 5000)).astype(np.float32)
    want = masks.to_float32(masks.from_float32(x, TYPE_BF16), TYPE_BF16)

    def rounded(n):
        return array_backend.to_host(masks.with_significant_bits(xp.asarray(x), n))

    assert np.array_equal(rounded(8), want)
    mantissa, exponent = np.frexp(x.astype(np.float64))
    assert np.array_equal(rounded(11), np.ldexp(np.rint(mantissa * 2048) / 2048, exponent))
    assert np.array_equal(rounded(24), x)


# ---- what is refused ----


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "--sparsity is missing"),
        (["--sparsity", "0.5", "--tensor-sparsity", "attn"], "--tensor-sparsity attn: expected REGEX=S"),
        (["--sparsity", "0.5", "--tensor-sparsity", "attn=2"], "--tensor-sparsity attn= 2: expected a number"),
        (["--sparsity", "0.5", "--tensor-sparsity", "(=0.5"], "--tensor-sparsity (=0.5: "),
        (["--sparsity", "0.5", "--method", "wanda"], "wanda needs statistics"),
        (["--sparsity", "0.5", "--method", "sparsegpt"], "sparsegpt needs a calibration text"),
        (
            ["--sparsity", "0.5", "--method", "sparsegpt", "--compare-within", "row"],
            "--compare-within row does not go with sparsegpt",
        ),
        (["--sparsity", "0.5", "--sequential"], "magnitude needs no statistics"),
        (["--sparsity", "0.5", "--method", "wanda", "--sequential"], "--sequential needs a calibration text"),
        (["--sparsity", "0.5", "--chunks", "0"], "--chunks 0"),
    ],
)
def test_bad_options_are_refused_at_once(tmp_path, tiny, macko, args, message):
    done = macko("prune", tiny, tmp_path / "out.gguf", *args)
    code = 1 if "has 64 columns" in message else 2  # that depends on the model
    assert done.code == code and message in done.err and len(done.err.splitlines()) == 1, done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.gguf"]


def edit(**changes):
    """Makes a function that changes a dict of statistics."""

    def change(statistics: dict) -> None:
        sums, counts = statistics["blk.0.attn_k.weight"]
        if "sums" in changes:
            sums = sums.copy()
            sums[...] = np.where(np.arange(sums.size).reshape(sums.shape) >= changes["at"], changes["sums"], sums)
        statistics["blk.0.attn_k.weight"] = (sums, counts)
        if "drop" in changes:
            del statistics["blk.0.attn_k.weight"]
        if "cols" in changes:
            statistics["blk.0.attn_k.weight"] = (np.ones((1, changes["cols"]), np.float32), counts)
        if "more" in changes:
            statistics[changes["more"]] = (np.ones((1, 8), np.float32), counts)

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (edit(drop=1), "did not find weights for blk.0.attn_k.weight"),
        (edit(cols=32), "blk.0.attn_k.weight"),
        (edit(more="blk.7.attn_k.weight"), "blk.7.attn_k.weight"),
        (edit(sums=np.nan, at=5), "blk.0.attn_k.weight: in_sum2[5] is nan"),
        (edit(sums=np.inf, at=5), "blk.0.attn_k.weight: in_sum2[5] is inf"),
        (edit(sums=-1.0, at=63), "blk.0.attn_k.weight: in_sum2[63] is -1"),
        (edit(sums=0.0, at=0), "blk.0.attn_k.weight: all sums are zero"),
    ],
    ids=["missing", "another shape", "another model", "nan", "inf", "negative", "all zero"],
)
def test_bad_statistics_are_refused(tmp_path, tiny, macko, change, message):
    statistics = statistics_of(tiny, np.random.default_rng(3))
    change(statistics)
    path = write_imatrix(tmp_path / "i.gguf", statistics)
    out = tmp_path / "out.gguf"
    done = macko("prune", tiny, out, "--sparsity", "0.5", "--imatrix", path, "--method", "wanda")
    assert done.code == 1 and message in done.err and len(done.err.splitlines()) == 1, done.err
    assert not out.exists()


def test_excluded_tensor_needs_no_statistics(tmp_path, tiny, macko):
    statistics = statistics_of(tiny, np.random.default_rng(3))
    edit(drop=1)(statistics)
    done = macko(
        "prune", tiny, tmp_path / "out.gguf", "--sparsity", "0.5", "--method", "wanda",
        "--imatrix", write_imatrix(tmp_path / "i.gguf", statistics), "--exclude-weights", "attn_k",
    )  # fmt: skip
    assert done.code == 0, done.err


def test_truncated_imatrix_is_refused(tmp_path, tiny, imatrix, macko):
    data = imatrix.read_bytes()
    for n in (0, 3, 24, len(data) // 2, len(data) - 1):
        imatrix.write_bytes(data[:n])
        done = macko("prune", tiny, tmp_path / "o.gguf", "--sparsity", "0.5", "--method", "wanda", "--imatrix", imatrix)
        assert done.code == 1 and len(done.err.splitlines()) == 1 and str(imatrix) in done.err, done.err


def test_output_must_not_be_the_imatrix(tmp_path, tiny, imatrix, macko):
    before = imatrix.read_bytes()
    done = macko("prune", tiny, imatrix, "--sparsity", "0.5", "--method", "wanda", "--imatrix", imatrix, "--force")
    assert done.code == 1 and "the same" in done.err and imatrix.read_bytes() == before
