"""SparseGPT: outputs as close as those of an independent dense implementation, exact numbers of zeros, passes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_macko.errors import MackoError
from ggml_macko.evaluation.activations import Weight
from ggml_macko.evaluation.perplexity import perplexity
from ggml_macko.pruning import array_backend, hessians, layerwise, options, sparsegpt
from ggml_macko.pruning.options import METHODS
from support import generators, gguf_bytes, tiny_models
from support.pruning import inputs, pruned_tensors


def dense_sparsegpt(w, h, sparsity_of_block, block=128, damping=0.01):
    """The paper's algorithm 1 in float64, without its Cholesky factor.

    After column j is done, the inverse Hessian of the columns right of it is computed anew.
    """
    w, h = w.astype(np.float64).copy(), h.astype(np.float64).copy()
    d = np.einsum("ii->i", h)
    d[d == 0] = 1
    d += damping * d.mean()
    cols = w.shape[1]
    for begin in range(0, cols, block):
        end = min(begin + block, cols)
        inverses = [np.linalg.inv(h[j:, j:]) for j in range(begin, end)]
        cost = w[:, begin:end] ** 2 / np.array([inverse[0, 0] for inverse in inverses])
        n = sparsity_of_block(begin, end)
        mask = np.zeros(cost.size, dtype=bool)
        mask[np.argsort(cost.reshape(-1), kind="stable")[:n]] = True
        mask = mask.reshape(cost.shape)
        for j, inverse in zip(range(begin, end), inverses):
            error = np.where(mask[:, j - begin], w[:, j], 0) / inverse[0, 0]
            w[:, j:] -= np.outer(error, inverse[0])
            w[mask[:, j - begin], j] = 0
    return w


def relative_error(before, after, h):
    difference, before, h = (a.astype(np.float64) for a in (before - after, before, h))
    return np.einsum("ij,ij->", difference @ h, difference) / np.einsum("ij,ij->", before @ h, before)


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("rows,cols", [(40, 96), (33, 200), (7, 260)])
def test_outputs_are_as_close_as_those_of_a_dense_implementation(xp, rows, cols, sparsity):
    rng = np.random.default_rng(rows * cols)
    w = rng.standard_normal((rows, cols)).astype(np.float32)
    x = inputs(rng, 4 * cols, cols)
    h = x.T @ x
    n = int(sparsity * w.size)
    want = dense_sparsegpt(w, h, lambda begin, end: n * end // cols - n * begin // cols)
    got = xp.array(w)
    sparsegpt.prune_matrix(got, sparsegpt.inverse_factor(xp.asarray(h)), n)
    energy = sparsegpt.energy(xp.asarray(w) - got, xp.asarray(h)) / sparsegpt.energy(xp.asarray(w), xp.asarray(h))
    got = array_backend.to_host(got)
    assert (got == 0).sum() == n
    ours, theirs = relative_error(w, got, h), relative_error(w, want, h)
    assert abs(ours / theirs - 1) < 0.01, (ours, theirs)
    assert energy == pytest.approx(ours, rel=1e-3)
    magnitude = np.where(np.abs(w) >= np.sort(np.abs(w), axis=None)[n], w, 0)
    assert ours < 0.9 * relative_error(w, magnitude, h)  # an update with a wrong sign or factor fails this


def test_outputs_of_a_real_layer_are_as_close(shared_models):
    """A layer of a real model, with inputs that llama.cpp computed from a real text."""
    name = "blk.1.attn_output.weight"
    path = shared_models / "docs-4m-f16.gguf"
    moments = hessians.Hessians({name})
    text = options.PruneOptions(0.5, "sparsegpt", text=shared_models / "calibration.txt")
    layerwise.gather(path, options.parse(text), moments, n_chunks=4)
    w = next(t.data for t in gguf.GGUFReader(path).tensors if t.name == name).astype(np.float32)
    h = moments.get(name, 0, w.shape[1])
    for sparsity in (0.5, 0.7):
        n = int(sparsity * w.size)
        want = dense_sparsegpt(w, h, lambda begin, end, n=n: n * end // w.shape[1] - n * begin // w.shape[1])
        got = w.copy()
        sparsegpt.prune_matrix(got, moments.inverse_factor(name, 0, w.shape[1], 0.01), n)
        assert abs(relative_error(w, got, h) / relative_error(w, want, h) - 1) < 0.01


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 150), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32))
def test_number_of_zeros_is_exact_and_zeros_stay(rows, cols, sparsity, zeros, seed):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, cols)).astype(np.float32)
    zero = rng.random(w.shape) < zeros
    w[zero] = 0
    x = inputs(rng, 2 * cols, cols)
    n = int(sparsity * w.size)
    sparsegpt.prune_matrix(w, sparsegpt.inverse_factor(x.T @ x), n)
    assert np.isfinite(w).all() and not np.any(w[zero])
    want = 0
    for begin in range(0, cols, 128):
        end = min(begin + 128, cols)
        want += max(n * end // cols - n * begin // cols, int(zero[:, begin:end].sum()))
    assert (w == 0).sum() == want


def test_hessian_without_inverse_is_refused(xp):
    with pytest.raises(np.linalg.LinAlgError):
        sparsegpt.inverse_factor(xp.array([[1, 5], [5, 1]], dtype=np.float32))


@pytest.mark.slow
def test_alps_beats_sparsegpt_beats_wanda_beats_magnitude(tmp_path, shared_models, macko):
    """By perplexity of a real model on text that was not used for calibration."""
    found = {}
    for sparsity in ("0.5", "0.7"):
        for method in METHODS:
            text = [] if method == "magnitude" else ["-f", shared_models / "calibration.txt", "--chunks", 32]
            out = tmp_path / "out.gguf"
            done = macko(
                "prune", shared_models / "docs-4m-f16.gguf", out, "--force",
                "--method", method, "--sparsity", sparsity, *text,
            )  # fmt: skip
            assert done.code == 0, done.err
            found[method] = perplexity(out, shared_models / "held-out.txt", n_chunks=16, evenly=True).ppl
        assert 0 < found["alps"] < found["sparsegpt"] < found["wanda"] < found["magnitude"], (sparsity, found)


# ---- second moments ----


def test_shared_inputs_are_counted_once():
    rng = np.random.default_rng(0)
    h = hessians.Hessians({"q", "k", "o"})
    batches = [
        (rng.standard_normal((20, 6), dtype=np.float32), rng.standard_normal((20, 6), dtype=np.float32)) for _ in "123"
    ]
    for a, o in batches:
        memory = a.copy()
        for name in ("q", "k"):
            h.take(Weight(name, 6, 1, False), 0, memory)
        memory[:] = np.nan  # llama.cpp reuses the memory of its graph
        h.take(Weight("o", 6, 1, False), 0, o)
    assert not h.wants("v")
    for name, i in (("q", 0), ("k", 0), ("o", 1)):
        want = sum(b[i].astype(np.float64).T @ b[i] for b in batches)
        np.testing.assert_allclose(h.get(name, 0, 6), want, rtol=1e-5, atol=1e-5)
    assert h.get("q", 0, 6) is h.get("k", 0, 6)
    with pytest.raises(MackoError, match="only at times"):
        h.take(Weight("k", 6, 1, False), 0, batches[0][1])
    with pytest.raises(MackoError, match="v: llama.cpp did not multiply"):
        h.get("v", 0, 6)


def test_experts_have_hessians_of_their_own():
    rng = np.random.default_rng(1)
    h = hessians.Hessians({"gate", "up"})
    xs = {i: rng.standard_normal((8, 4), dtype=np.float32) for i in (0, 2)}
    for name in ("gate", "up"):
        for i, x in xs.items():
            h.take(Weight(name, 4, 3, True), i, x)
    for i, x in xs.items():
        np.testing.assert_allclose(h.get("up", i, 4), x.T @ x, rtol=1e-6)
    assert np.array_equal(h.get("up", 1, 4), np.eye(4))  # never routed to: magnitude decides


# ---- the command ----


@pytest.fixture(params=["llama", "llama-moe"])
def model(request, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes.write(tiny_models.make(request.param)))
    return path


@pytest.mark.parametrize("n", [257, 600, 1030])
def test_factor_of_a_large_matrix_is_that_of_its_inverse(xp, n):
    """Beyond the size that is inverted at once."""
    x = inputs(np.random.default_rng(n), 2 * n, n).astype(np.float64)
    h = (x.T @ x).astype(np.float32)
    u = array_backend.to_host(sparsegpt.inverse_factor(xp.asarray(h))).astype(np.float64)
    assert np.array_equal(u, np.triu(u)) and np.all(u.diagonal() > 0)
    damped = h.astype(np.float64)
    damped[n // 2, n // 2] = 1  # of the input that is always zero
    damped += 0.01 * damped.diagonal().mean() * np.eye(n)
    assert np.allclose(u @ damped @ u.T, np.eye(n), atol=1e-3)


def test_half_of_the_free_memory_is_for_hessians(tmp_path):
    (tmp_path / "proc").mkdir()
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    assert options.hessian_memory(tmp_path) == 2 << 30  # nothing is known
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  99 kB\nMemAvailable:   67108864 kB\nCached: 5 kB\n")
    assert options.hessian_memory(tmp_path) == 32 << 30
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1073741824\n")
    assert options.hessian_memory(tmp_path) == 32 << 30
    (group / "memory.max").write_text(f"{13 << 30}\n")
    assert options.hessian_memory(tmp_path) == 6 << 30
    (group / "memory.max").write_text(f"{2 << 30}\n")
    assert options.hessian_memory(tmp_path) == 2 << 30
    assert options.hessian_memory() >= 2 << 30


@pytest.mark.parametrize("more", [[], ["--sequential"], ["--hessian-memory", 1]])
def test_command_zeroes_the_number_asked_for(tmp_path, model, text, macko, more):
    out = tmp_path / "out.gguf"
    args = ["--method", "sparsegpt", "--sparsity", "0.8", "-f", text, "--chunks", 3, "-c", 64, *more]
    done = macko("prune", model, out, *args)
    assert done.code == 0, done.err
    before, after = pruned_tensors(model), pruned_tensors(out)
    assert {p.name for p in tmp_path.iterdir()} == {"model.gguf", "out.gguf", "text.txt"}
    total = sum(b.size for b in after.values())
    zeros = sum(int((b == 0).sum()) for b in after.values())
    matrices = sum(b.size // 64 for b in after.values())  # a matrix rounds down, a block of columns may have had more
    assert -matrices <= zeros - 0.8 * total <= 0.01 * total
    assert all(not np.any(after[name][b == 0]) for name, b in before.items())
    assert any(np.any((after[name] != b) & (after[name] != 0)) for name, b in before.items())
    untouched = set(generators.dense_bytes(model)) - set(before)
    for name in untouched:
        assert generators.dense_bytes(out)[name] == generators.dense_bytes(model)[name]
    keys = gguf.GGUFReader(out).fields
    assert keys["macko.prune.method"].contents() == "sparsegpt" and keys["macko.prune.chunks_count"].contents() == 3
    assert keys["macko.prune.datasets"].contents() == ["text.txt"]
    dry = macko("prune", model, "--dry-run", *args)
    assert dry.code == 0
    total_line = [line for line in done.out.splitlines() if line.startswith("| total")][0].split("|")
    dry_line = [line for line in dry.out.splitlines() if line.startswith("| total")][0].split("|")
    assert abs(int(total_line[5]) - int(dry_line[5])) <= 0.01 * total


def test_changed_weights_have_the_significant_bits_of_the_source(tmp_path, model, text, macko):
    """Those of BF16 here, but for subnormal numbers; all of F16 if they are asked for."""
    short = tmp_path / "short.gguf"
    data = bytearray(model.read_bytes())
    for t in gguf.GGUFReader(model).tensors:
        if t.name.endswith(".weight") and t.tensor_type == gguf.GGMLQuantizationType.F16:
            view = np.frombuffer(data, np.uint16, t.n_elements, t.data_offset)
            view &= np.uint16(0xFFF8)
    short.write_bytes(data)

    def longer(more: list[str]) -> tuple[int, int]:
        """(changed weights with more than 8 significant bits, changed weights)"""
        out = tmp_path / "out.gguf"
        args = ["--method", "sparsegpt", "--sparsity", "0.8", "-f", text, "--chunks", 2, "-c", 64, "--force", *more]
        done = macko("prune", short, out, *args)
        assert done.code == 0, done.err
        before, after = pruned_tensors(short), pruned_tensors(out)
        changed = [after[n][(after[n] != b) & (after[n] & 0x7C00 != 0)] for n, b in before.items()]
        return sum(int(np.count_nonzero(c & 7)) for c in changed), sum(c.size for c in changed)

    rounded, n_changed = longer([])
    assert rounded == 0 and n_changed > 1000
    kept, n_changed = longer(["--keep-mantissa"])
    assert kept > 0.8 * n_changed


def test_result_does_not_depend_on_the_memory_limit(tmp_path, model, text, macko):
    outs = []
    for memory in (2048, 1):
        outs.append(tmp_path / f"{memory}.gguf")
        assert macko(
            "prune", model, outs[-1], "--method", "sparsegpt", "--sparsity", "0.8", "-f", text, "--chunks", 2,
            "-c", 64, "--hessian-memory", memory,
        ).code == 0  # fmt: skip
    a, b = (pruned_tensors(o) for o in outs)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def test_sequential_statistics_come_from_the_pruned_blocks(tmp_path, model, text, macko):
    """Block 0 agrees with a run of one pass; block 1 does not, because its inputs come from a pruned block 0."""
    out = {}
    for more in ([], ["--sequential"]):
        path = tmp_path / f"{len(more)}.gguf"
        done = macko(
            "prune", model, path, "--method", "wanda", "--sparsity", "0.8", "-f", text, "--chunks", 2, "-c", 64, *more
        )
        assert done.code == 0, done.err
        out[len(more)] = pruned_tensors(path)
    same = {b: all(np.array_equal(out[0][n], out[1][n]) for n in out[0] if n.startswith(f"blk.{b}.")) for b in (0, 1)}
    assert same == {0: True, 1: False}


def test_text_that_is_too_short_is_refused(tmp_path, model, macko):
    short = tmp_path / "short.txt"
    short.write_text("ab")
    done = macko("prune", model, tmp_path / "o.gguf", "--method", "sparsegpt", "--sparsity", "0.5", "-f", short)
    assert done.code == 1 and "short.txt" in done.err and done.err.count("error:") == 1
    assert {p.name for p in tmp_path.iterdir()} == {"model.gguf", "short.txt"}


def test_weight_that_is_never_multiplied_is_refused(tmp_path, model, text, macko):
    done = macko(
        "prune", model, tmp_path / "o.gguf", "--method", "sparsegpt", "--sparsity", "0.5", "-f", text, "-c", 64,
        "--include-weights", "token_embd",
    )  # fmt: skip
    assert done.code == 1 and "token_embd.weight: llama.cpp did not multiply with it" in done.err
    assert {p.name for p in tmp_path.iterdir()} == {"model.gguf", "text.txt"}


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("more", [[], ["--sequential"]])
def test_interrupted_run_removes_the_working_copy(tmp_path, text, number, code, more):
    """The run is stopped in its first pass over the text, which takes minutes."""
    model = tmp_path / "model.gguf"
    model.write_bytes(gguf_bytes.write(tiny_models.make("llama")))
    text.write_text(text.read_text() * 2000)
    args = ["--method", "sparsegpt", "--sparsity", "0.5", "-f", text, "--chunks", "-1", "-c", "64", *more]
    process = subprocess.Popen(
        [sys.executable, "-m", "ggml_macko.commands.cli", "prune", model, tmp_path / "out.gguf", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stderr:
        if line.startswith("pass 1/"):
            break
    assert (tmp_path / "out.gguf.checkpoint").exists()
    time.sleep(1)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err and {p.name for p in tmp_path.iterdir()} == {"model.gguf", "text.txt"}
