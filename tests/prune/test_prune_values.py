"""`macko prune --quant-values`: weights that stay get values of a quantized type; `macko convert` finds them again."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_macko import values
from ggml_macko.native import codec as native_codec
from ggml_macko.pruning import array_backend, quantized
from ggml_macko.pruning.options import VALUES
from ggml_macko.values import TYPE_BF16, TYPE_F16, TYPE_F32
from support import generators
from support.pruning import damped64, interrupted, moments, problem_of, pruned_tensors, tiny_model

NUMBERS = {  # FORMAT.md section 9, 0 left out
    "q8": [[q for q in range(-127, 128) if q]],
    **{f"q{b}": [native_codec.standard_levels(1010 + b, table).tolist() for table in (0, 1)] for b in (3, 4, 5)},
}


def pruned_matrix(rng, rows, cols, density=0.5):
    w = rng.standard_normal((rows, cols)).astype(np.float32)
    return np.where(np.abs(w) > np.quantile(np.abs(w), 1 - density), w, 0).astype(np.float32)


def error(w, dense, h):
    difference = (w - dense).astype(np.float64)
    return float(np.einsum("ij,ij->", difference @ h, difference))


def slow_fit(w, dense, h, lattice, numbers, n_passes):
    """Each weight in turn becomes the value of its grid that is nearest to where the error, of all others as they are,
    is least. In float64, a row at a time, and the gradient anew for each weight.
    """
    w, dense = w.astype(np.float64), dense.astype(np.float64)

    def nearest(wanted, r, c):
        d = float(lattice.scale[r, c])
        return min((d * q for q in numbers[lattice.table]), key=lambda value: abs(value - wanted))

    for r in range(len(w)):
        kept = np.flatnonzero(w[r])
        w[r, kept] = [nearest(w[r, c], r, c) for c in kept]
        for _ in range(n_passes):
            for c in kept:
                w[r, c] = nearest(w[r, c] - (w[r] - dense[r]) @ h[:, c] / h[c, c], r, c)
    return w


# ---- fitting ----


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("rows,cols", [(9, 96), (5, 300)])
def test_error_is_that_of_a_float64_implementation(xp, rows, cols, name):
    rng = np.random.default_rng(cols)
    dense = rng.standard_normal((rows, cols)).astype(np.float32)
    w = np.where(np.abs(dense) > 0.6, dense, 0).astype(np.float32)
    h = moments(rng, cols)
    grid = quantized.Grid(name, xp)
    problem = problem_of(xp.asarray(dense), xp.asarray(h))
    [lattice] = quantized.lattices([xp.asarray(w)], [problem.hessian.diagonal()], grid)
    start = array_backend.to_host(quantized.nearest_weights(xp.asarray(w), lattice, grid))
    found = array_backend.to_host(quantized.fit(problem, xp.asarray(w), lattice, grid))
    on_host = lattice._replace(scale=array_backend.to_host(lattice.scale))
    want = slow_fit(w, dense, damped64(h), on_host, NUMBERS[name], quantized.PASSES)
    assert np.array_equal(found == 0, w == 0)
    ours, theirs = error(found, dense, damped64(h)), error(want, dense, damped64(h))
    assert abs(ours / theirs - 1) < 0.01 and ours < error(start, dense, damped64(h))
    assert (np.abs(found - want) < 1e-6).mean() > 0.95  # a tie may end differently, and changes what follows


@pytest.mark.parametrize("name", VALUES)
def test_no_weight_can_be_moved_alone(name):
    rng = np.random.default_rng(3)
    w = pruned_matrix(rng, 6, 130)
    h = moments(rng, 130)
    grid = quantized.Grid(name)
    problem = problem_of(w, h)
    [lattice] = quantized.lattices([w], [problem.hessian.diagonal()], grid)
    found = quantized.fit(problem, w, lattice, grid, n_passes=40)
    h = damped64(h)
    best = error(found, w, h)
    for r, c in zip(*np.nonzero(found)):
        for q in NUMBERS[name][lattice.table]:
            moved = found.copy()
            moved[r, c] = lattice.scale[r, c] * q
            assert error(moved[r : r + 1], w[r : r + 1], h) > error(found[r : r + 1], w[r : r + 1], h) - 1e-6 * best


# ---- finding values again ----


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(VALUES),
    type_id=st.sampled_from([TYPE_F16, TYPE_BF16, TYPE_F32]),
    table=st.integers(0, 1),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 400)),
    seed=st.integers(0, 2**32),
)
def test_windows_are_found_again(name, type_id, table, shape, seed):
    """Values on standard levels, also in a matrix of which some rows and windows are empty."""
    rng = np.random.default_rng(seed)
    value_type = quantized.VALUE_TYPES[name]
    w = np.where(rng.random(shape) < rng.choice([0.1, 0.5]), rng.standard_normal(shape), 0)
    bits = values.from_float((w * rng.choice([0.01, 3], (shape[0], 1))).astype(np.float32), type_id)
    levels = native_codec.standard_levels(value_type, table)
    dense = native_codec.decode(native_codec.encode_quantized(bits, type_id, value_type, levels=levels))
    found = native_codec.encode_quantized(dense, type_id, value_type)
    assert native_codec.decode(found).tobytes() == dense.tobytes()


# ---- the command ----

TEXT = ["--chunks", 2, "-c", 64]


@pytest.mark.parametrize("architecture", ["llama", "llama-moe"])
@pytest.mark.parametrize("name", VALUES)
def test_convert_finds_the_values_again(tmp_path, text, macko, architecture, name):
    model = tiny_model(tmp_path, architecture)
    out, sparse, back = (tmp_path / f"{n}.gguf" for n in ("out", "sparse", "back"))
    how = ["--method", "sparsegpt", "--sparsity", "0.6"]
    done = macko("prune", model, out, *how, "--quant-values", name, "-f", text, *TEXT)
    assert done.code == 0, done.err
    assert gguf.GGUFReader(out).fields["macko.prune.quant_values"].contents() == name
    assert macko("convert", out, sparse, f"sparse-{name}", "--tensor-type", "^(output|token_embd)=dense").code == 0
    assert macko("restore", sparse, back).code == 0
    assert generators.dense_bytes(back) == generators.dense_bytes(out)
    before, after = pruned_tensors(model), pruned_tensors(out)
    assert sum(int((b == 0).sum()) for b in after.values()) >= 0.59 * sum(b.size for b in after.values())
    for tensor, bits in after.items():
        assert not np.any(bits[before[tensor] == 0])


def test_only_values_keep_every_zero(tmp_path, text, macko):
    model = tiny_model(tmp_path)
    pruned, out = tmp_path / "pruned.gguf", tmp_path / "out.gguf"
    assert macko("prune", model, pruned, "--sparsity", "0.6").code == 0
    done = macko("prune", pruned, out, "--quant-values", "q4", "-f", text, *TEXT)
    assert done.code == 0, done.err
    before, after = pruned_tensors(pruned), pruned_tensors(out)
    assert all(np.array_equal(b == 0, after[name] == 0) for name, b in before.items())
    assert any(np.any(b != after[name]) for name, b in before.items())


def test_killed_run_goes_on_and_gives_the_same_bytes(tmp_path, text, macko):
    model = tiny_model(tmp_path)
    args = ["--method", "alps", "--sparsity", "0.6", "--quant-values", "q4", "-f", text, *TEXT]
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    assert macko("prune", model, whole, *args).code == 0
    checkpoint = tmp_path / "out.gguf.checkpoint"

    def has_tensors():
        if not checkpoint.exists():
            return False
        data = checkpoint.open("rb").read(4096)
        return data[data.index(b"macko.prune.done") + 20] >= 3

    assert interrupted(model, out, *args, when=has_tensors)
    assert checkpoint.exists() and not out.exists()
    done = macko("prune", model, out, *args)
    assert done.code == 0 and "continuing after" in done.err, done.err
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "args, message",
    [
        (["--quant-values", "q4"], "--quant-values q4 needs a calibration text"),
        (
            ["--quant-values", "q4", "-f", "x", "--keep-mantissa"],
            "--keep-mantissa does not go with --quant-values",
        ),
        (
            ["--quant-values", "q4", "-f", "x", "--sparsity", ".5", "--compare-within", "model"],
            "--compare-within model goes with none of",
        ),
        (["--quant-values", "q4", "-f", "x", "--allocation", "loss"], "--sparsity is missing"),
        (["--quant-values", "q6_k", "-f", "x"], "invalid choice: 'q6_k'"),
    ],
)
def test_bad_options_are_refused_at_once(tmp_path, macko, args, message):
    done = macko("prune", tiny_model(tmp_path), tmp_path / "out.gguf", *args)
    assert done.code == 2 and message in done.err, done.err
    assert len(done.err.splitlines()) == 1 or "invalid choice" in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]
