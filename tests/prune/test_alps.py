"""ALPS and refits: errors as small as those of float64 implementations, exact zeros, and interrupted runs."""

from __future__ import annotations

import os
from fractions import Fraction

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_macko.evaluation.activations import Weight
from ggml_macko.gguf.files import Model
from ggml_macko.pruning import allocation, alps, array_backend, hessians, layerwise, methods, sparsegpt, working_copy
from ggml_macko.pruning import prune as prune_module
from ggml_macko.pruning.options import ParsedOptions
from ggml_macko.pruning.prune import tensors_to_prune
from support.pruning import damped64, interrupted, moments, problem_of, pruned_tensors, tiny_model


def slow_admm(w, h, n_zeros):
    """The paper's algorithm 1 in float64, column by column of W^T, with an inverse in each step; returns a mask."""
    h = damped64(h)
    scale = 1 / np.sqrt(np.diag(h))
    h = h * np.outer(scale, scale)
    dense = (w / scale).T.astype(np.float64)  # (cols, rows), as in the paper
    k = w.size - n_zeros

    def project(x):
        mask = np.ones(x.size, dtype=bool)
        mask[np.argsort(np.abs(x.T).reshape(-1), kind="stable")[: x.size - k]] = False
        return mask.reshape(x.T.shape).T

    rho, v, before = 0.1, np.zeros_like(dense), project(dense)
    d = dense * before
    for step in range(1, 301):
        free = np.linalg.inv(h + rho * np.eye(len(h))) @ (h @ dense - v + rho * d)
        mask = project(free + v / rho)
        d = (free + v / rho) * mask
        v = v + rho * (free - d)
        if step % 3 == 0:
            changed = int((mask & ~before).sum())
            before = mask
            if changed == 0:
                break
            rho *= 1.3 if changed >= 0.1 * k else 1.2 if changed >= 0.005 * k else 1.1
    return before.T


def least_squares(mask, h, target):
    """For each row, the weights on the mask that solve the problem exactly."""
    out = np.zeros(mask.shape)
    for i, kept in enumerate(mask):
        out[i, kept] = np.linalg.solve(h[np.ix_(kept, kept)], target[i, kept])
    return out


def objective(w, h, target):
    w = w.astype(np.float64)
    return np.einsum("ij,ij->", w @ h, w) - 2 * np.einsum("ij,ij->", w, target)


def error(w, dense, h):
    d = w.astype(np.float64) - dense
    return np.einsum("ij,ij->", d @ h, d)


@pytest.mark.parametrize("sparsity", [0.5, 0.7])
@pytest.mark.parametrize("rows,cols", [(40, 96), (7, 150)])
def test_layer_error_is_that_of_a_float64_implementation(xp, rows, cols, sparsity):
    rng = np.random.default_rng(rows * cols)
    w, h = rng.standard_normal((rows, cols)).astype(np.float32), moments(rng, cols)
    n = int(sparsity * w.size)
    problem = problem_of(xp.asarray(w), xp.asarray(h))
    pruned = alps.prune_matrix(problem, alps.spectrum(problem.hessian), n)
    got = array_backend.to_host(alps.refit(problem, pruned))
    h64 = damped64(h)
    want = least_squares(slow_admm(w, h, n), h64, w.astype(np.float64) @ h64)
    assert (got == 0).sum() == n
    ours, theirs = error(got, w, h64), error(want, w, h64)
    assert ours / theirs == pytest.approx(1, abs=0.01)
    rival = w.copy()
    sparsegpt.prune_matrix(rival, sparsegpt.inverse_factor(h), n)
    assert ours < 0.95 * error(rival, w, h64)  # a wrong penalty, sign or scale fails this


@pytest.mark.parametrize("rows,cols", [(30, 80), (9, 160)])
def test_refit_is_the_least_squares_solution_on_the_mask(xp, rows, cols):
    rng = np.random.default_rng(rows)
    w, h = rng.standard_normal((rows, cols)).astype(np.float32), moments(rng, cols)
    difference = (moments(rng, cols) * 0.02).astype(np.float32)
    problem = problem_of(xp.asarray(w), xp.asarray(h), xp.asarray(difference))
    mask = rng.random(w.shape) < 0.4
    start = np.where(mask, w, 0)
    got = array_backend.to_host(alps.refit(problem, xp.asarray(start)))
    h64 = damped64(h)
    target = w.astype(np.float64) @ (h64 + difference)
    want = least_squares(mask, h64, target)
    assert np.array_equal(got != 0, mask)
    least, first = objective(want, h64, target), objective(start, h64, target)
    assert objective(got, h64, target) - least < 0.01 * (first - least)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 60), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32))
def test_number_of_zeros_is_exact_and_zeros_stay(rows, cols, sparsity, zeros, seed):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, cols)).astype(np.float32)
    w[rng.random(w.shape) < zeros] = 0
    problem = problem_of(w, moments(rng, cols))
    n = int(sparsity * w.size)
    got = alps.refit(problem, alps.prune_matrix(problem, alps.spectrum(problem.hessian), n))
    assert np.isfinite(got).all() and not np.any(got[w == 0])
    assert (got == 0).sum() == max(n, (w == 0).sum())


def test_lowest_scores_are_the_first_of_a_stable_sort(xp):
    rng = np.random.default_rng(3)
    for n in range(61):
        scores = rng.integers(0, rng.integers(1, 80), (5, 12)).astype(np.float32)  # some of them equal
        zero = rng.random(scores.shape) < rng.choice([0, 0.3])
        want = zero.copy().reshape(-1)
        want[np.argsort(np.where(zero, 0, scores), axis=None, kind="stable")[:n]] = True
        found = array_backend.to_host(alps.lowest(xp.asarray(scores), xp.asarray(zero), n))
        assert np.array_equal(found, want.reshape(scores.shape))


def test_hessian_that_is_not_positive_definite_is_refused(xp):
    with pytest.raises(np.linalg.LinAlgError):
        alps.spectrum(xp.array([[1, 5], [5, 1]], dtype=np.float32))


# ---- targets ----


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_targets_are_the_outputs_of_the_dense_model(share):
    """The gradient at the dense weights is what the inputs have moved, times the share."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((5, 8)).astype(np.float32)
    dense = hessians.DenseInputs("a")
    found = hessians.Hessians({"a", "b"}, dense=dense, share=share)
    zs = [rng.standard_normal((20, 8), dtype=np.float32) for _ in range(3)]
    xs = [z + 0.1 * rng.standard_normal((20, 8), dtype=np.float32) for z in zs]
    for z, x in zip(zs, xs):
        dense.take(Weight("a", 8, 1, False), 0, z)
        found.take(Weight("a", 8, 1, False), 0, x)
        found.take(Weight("b", 8, 1, False), 0, x)
    assert not dense.wants("b")
    z, x = (np.concatenate(a).astype(np.float64) for a in (zs, xs))
    h = damped64((x.T @ x).astype(np.float32))
    for name in ("a", "b"):
        problem = found.problem(name, 0, w, 0.01)
        np.testing.assert_allclose(problem.hessian, h, rtol=1e-5)
        np.testing.assert_allclose(problem.target, w @ (h + share * (z - x).T @ x), rtol=1e-4, atol=1e-3)


def test_expert_has_no_targets_of_the_dense_model():
    rng = np.random.default_rng(1)
    dense = hessians.DenseInputs("up")
    found = hessians.Hessians({"up"}, dense=dense)
    w = rng.standard_normal((3, 4)).astype(np.float32)
    for consumer in (dense, found):
        consumer.take(Weight("up", 4, 3, True), 1, rng.standard_normal((8, 4), dtype=np.float32))
    problem = found.problem("up", 1, w, 0.01)
    np.testing.assert_array_equal(problem.target, w @ problem.hessian)


# ---- the command ----

ALPS = ["--method", "alps"]


@pytest.mark.parametrize(
    "architecture, more",
    [
        ("llama", ALPS),
        ("llama", [*ALPS, "--sequential"]),
        ("llama", [*ALPS, "--asymmetric", 0.5]),
        ("llama", [*ALPS, "--allocation", "loss", "--loss-shift", 0.05]),
        ("llama", ["--method", "sparsegpt", "--refit"]),
        ("llama", ["--refit"]),
        ("llama-moe", [*ALPS, "--asymmetric", 0.5]),
        ("llama-moe", ["--method", "wanda", "--refit", "--asymmetric", 1]),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else x,
)
def test_command_zeroes_the_number_asked_for(tmp_path, text, macko, architecture, more):
    model = tiny_model(tmp_path, architecture)
    out = tmp_path / "out.gguf"
    done = macko("prune", model, out, "--sparsity", "0.8", "-f", text, "--chunks", 2, "-c", 64, *more)
    assert done.code == 0, done.err
    assert {p.name for p in tmp_path.iterdir()} == {"model.gguf", "out.gguf", "text.txt"}
    before, after = pruned_tensors(model), pruned_tensors(out)
    n = sum(b.size for b in after.values())
    zeros = sum(int((b == 0).sum()) for b in after.values())
    assert abs(zeros - 0.8 * n) <= 0.01 * n
    assert all(not np.any(after[name][b == 0]) for name, b in before.items())
    assert any(np.any((after[name] != b) & (after[name] != 0)) for name, b in before.items())
    keys = gguf.GGUFReader(out).fields
    assert keys["macko.prune.chunks_count"].contents() == 2
    assert ("macko.prune.refit" in keys) == ("--refit" in more)
    if "--asymmetric" in more:
        assert keys["macko.prune.asymmetric"].contents() == more[-1]


@pytest.mark.parametrize("architecture", ["llama", "llama-moe"])
def test_weights_whose_loss_is_measured_have_the_wanted_sparsity(tmp_path, text, architecture):
    model = tiny_model(tmp_path, architecture)
    grid = [Fraction(n, 10) for n in (7, 8, 9)]
    with Model(model) as m:
        tensors = tensors_to_prune(m)
        found = hessians.Hessians({t.name for t in tensors})
        layerwise.gather(model, ParsedOptions(text=str(text), n_ctx=64), found, n_chunks=2)
        for t in tensors:
            bits, errors = methods.refitted(t, found, 0.01, grid, grid[1])
            zeros, before = ((b.reshape(allocation.n_matrices(t), -1) == 0) for b in (bits, t.read_bits()))
            wanted = int(grid[1] * t.ne[0] * t.ne[1])
            assert zeros.sum(axis=1).tolist() == [max(wanted, n) for n in before.sum(axis=1)] and zeros[before].all()
            assert list(errors) == grid and 0 <= errors[grid[0]] < errors[grid[1]] < errors[grid[2]]
            assert [methods.refitted(t, found, 0.01, [s], s).errors[s] for s in grid] == list(errors.values())
            assert np.array_equal(methods.refitted(t, found, 0.01, grid[1:2], grid[1]).bits, bits)


def test_weights_of_one_input_are_pruned_together(tmp_path, text):
    model = tiny_model(tmp_path)
    options = ParsedOptions(sparsity=Fraction(0), text=str(text), n_ctx=64)
    with Model(model) as m:
        groups = layerwise.passes_by_input(model, tensors_to_prune(m), options)
        names = [{t.name for t in group} for group in groups]
    parts = [{"attn_q", "attn_k", "attn_v"}, {"attn_output"}, {"ffn_gate", "ffn_up"}, {"ffn_down"}]
    assert names == [{f"blk.{b}.{part}.weight" for part in group} for b in (0, 1) for group in parts]


@pytest.mark.parametrize(
    "args, message",
    [
        (["--method", "alps"], "alps needs a calibration text"),
        (["--refit"], "--refit needs a calibration text"),
        (["--method", "alps", "--compare-within", "row"], "--compare-within row does not go with alps"),
        (["--method", "alps", "--refit"], "alps already fits the remaining weights"),
        (["--method", "wanda", "--asymmetric", "1"], "--asymmetric: wanda has no targets"),
        (["--method", "alps", "--asymmetric", "1", "--sequential"], "omit --sequential"),
        (["--refit", "--compare-within", "model"], "--compare-within model goes with none of"),
        (["--allocation", "loss", "--loss-shift", "0", "-f", "x"], "--loss-shift 0"),
        (["--allocation", "loss"], "--allocation loss needs a calibration text"),
    ],
)
def test_bad_options_are_refused_at_once(tmp_path, macko, args, message):
    done = macko("prune", tiny_model(tmp_path), tmp_path / "out.gguf", "--sparsity", "0.5", *args)
    assert done.code == 2 and message in done.err and len(done.err.splitlines()) == 1, done.err


# ---- interrupted runs ----


def test_many_passes_over_a_text_warn_once(tmp_path, text, macko):
    text.write_bytes(text.read_bytes().replace(b"\n", b"\r\n"))
    args = ["--sparsity", "0.5", *ALPS, "--asymmetric", 0.5, "-f", text, "--chunks", 2, "-c", 64]
    done = macko("prune", tiny_model(tmp_path), tmp_path / "out.gguf", *args)
    assert done.code == 0 and done.err.count("lines end in CRLF") == 1, done.err


@pytest.mark.parametrize("more", [[], ["--asymmetric", 0.5]], ids=["dense", "targets"])
def test_killed_run_goes_on_and_gives_the_same_bytes(tmp_path, text, macko, more):
    model = tiny_model(tmp_path)
    args = ["--method", "alps", "--sparsity", "0.8", "-f", text, "--chunks", 3, "-c", 64, *more]
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    assert macko("prune", model, whole, *args).code == 0
    checkpoint = tmp_path / "out.gguf.checkpoint"

    def n_done():
        with checkpoint.open("rb") as f:
            data = f.read(4096)
        return data[data.index(b"macko.prune.done") + 20]

    for at in (1, 5):
        assert interrupted(model, out, *args, when=lambda at=at: checkpoint.exists() and n_done() >= at)
        assert checkpoint.exists() and not out.exists()
    done = macko("prune", model, out, *args)
    assert done.code == 0 and "continuing after" in done.err, done.err
    assert out.read_bytes() == whole.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"model.gguf", "out.gguf", "text.txt", "whole.gguf"}


def test_failure_at_the_end_loses_no_work(tmp_path, text, macko, monkeypatch):
    """The name of the text is not UTF-8, which must not be the failure."""
    model, out = tiny_model(tmp_path), tmp_path / "out.gguf"
    text = text.rename(tmp_path / os.fsdecode(b"caf\xe9.txt"))
    args = ["prune", model, out, "--method", "alps", "--sparsity", "0.8", "-f", text, "--chunks", 3, "-c", 64]
    with monkeypatch.context() as m:
        m.setattr(prune_module, "write_model", lambda *unused: (_ for _ in ()).throw(OSError(28, "No space left")))
        done = macko(*args)
        assert done.code == 1 and "tensors are pruned; the same command continues" in done.err, done.err
    monkeypatch.setattr(working_copy.WorkingCopy, "count", None)  # nothing is pruned again
    done = macko(*args)
    assert done.code == 0 and "continuing after" in done.err, done.err
    with Model(out) as pruned:
        assert pruned.key("macko.prune.datasets").value() == ["caf\N{REPLACEMENT CHARACTER}.txt"]
    assert not (tmp_path / "out.gguf.checkpoint").exists()


def test_half_written_tensors_are_restored(tmp_path, text, macko, monkeypatch):
    """Killed while the second group of matrices was written: its weights must not reach the statistics."""
    model = tiny_model(tmp_path)
    args = ["--method", "alps", "--sparsity", "0.8", "-f", text, "--chunks", 3, "-c", 64, "--sequential"]
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    assert macko("prune", model, whole, *args).code == 0
    write, calls = working_copy.TensorFile.write, []

    def torn(self, t, bits):
        calls.append(t.name)
        if len(calls) == 17:
            bits = bits.copy()
            bits[0] = 0x7E00  # NaN
        write(self, t, bits)
        if len(calls) == 17:
            raise KeyboardInterrupt

    monkeypatch.setattr(working_copy.TensorFile, "write", torn)
    assert macko("prune", model, out, *args).code == 130
    monkeypatch.setattr(working_copy.TensorFile, "write", write)
    assert (tmp_path / "out.gguf.checkpoint").exists()
    assert macko("prune", model, out, *args).code == 0
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    "what, more",
    [("set of options", ["--damping", 0.02]), ("number of zeros", ["--tensor-sparsity", "attn_q=0.5"]), ("text", [])],
)
def test_checkpoint_of_another_run_is_refused(tmp_path, text, macko, monkeypatch, what, more):
    model = tiny_model(tmp_path)
    args = ["prune", model, tmp_path / "out.gguf", "--method", "alps", "--sparsity", "0.8", "-f", text, "-c", 64]
    count = working_copy.WorkingCopy.count

    def counted(self, *n):
        count(self, *n)
        raise KeyboardInterrupt

    monkeypatch.setattr(working_copy.WorkingCopy, "count", counted)
    assert macko(*args).code == 130
    monkeypatch.setattr(working_copy.WorkingCopy, "count", count)
    checkpoint = tmp_path / "out.gguf.checkpoint"
    kept = checkpoint.read_bytes()
    if what == "text":
        text.write_text(text.read_text() + "a")
    done = macko(*args, *more)
    assert done.code == 1 and f"out.gguf.checkpoint: is from a run with another {what}; delete it" in done.err, done.err
    assert checkpoint.read_bytes() == kept
    checkpoint.write_bytes(model.read_bytes())  # not a working copy
    done = macko(*args)
    assert done.code == 1 and "out.gguf.checkpoint" in done.err and checkpoint.exists()
