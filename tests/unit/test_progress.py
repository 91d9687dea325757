"""Progress: a bar with the remaining time on a terminal; no bar elsewhere or with --quiet."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios

import numpy as np
import pytest

from ggml_macko import console
from support import gguf_bytes, tiny_models

BAR = re.compile(r"\d+%\|.*\[\d\d:\d\d<")  # share, bar, time taken and time left


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(model, pruned model, text)"""
    folder = tmp_path_factory.mktemp("progress")
    model, text = folder / "model.gguf", folder / "text.txt"
    model.write_bytes(gguf_bytes.write(tiny_models.make("llama")))
    text.write_text("".join(np.random.default_rng(1).choice(list("ab ab\n"), 3000)))
    return model, text


def on_a_terminal(*args: object) -> str:
    """The output of a command on a terminal of 120 columns."""
    command = [sys.executable, "-m", "ggml_macko.commands.cli", *map(str, args)]
    pid, master = pty.fork()
    if pid == 0:
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        os.execv(sys.executable, command)
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:  # Linux returns EIO when the other end is closed
        pass
    os.close(master)
    assert os.waitpid(pid, 0)[1] == 0, shown.decode(errors="replace")
    return shown.decode(errors="replace")


def commands(model, text, folder):
    pruned = folder / "pruned.gguf"
    common = ["-m", model, "-f", text, "-c", 32, "-t", 1]
    sparsegpt = ["--method", "sparsegpt", "-f", text, "-c", 32, "--chunks", 4, "--sparsity", 0.5]
    return {
        "restoring": ["restore", model, folder / "r.gguf"],
        "writing": ["convert", model, folder / "c.gguf"],
        "comparing": ["verify", model, model],
        "reading": ["inspect", model],
        "looking at weights": ["plan", model],
        "pruning": ["prune", model, pruned, "--sparsity", 0.5],
        "columns": ["prune", model, folder / "gpt.gguf", *sparsegpt],
        "comparing scores": ["prune", model, folder / "m.gguf", "--sparsity", 0.5, "--compare-within", "model"],
        "model.gguf": ["calibrate", *common, "-o", folder / "i.gguf"],
        "PPL = ": ["perplexity", *common],
    }


NAMES = [
    "restoring", "writing", "comparing", "reading", "looking at weights", "pruning", "columns", "comparing scores",
    "model.gguf", "PPL = ",
]  # fmt: skip


def test_progress_is_shown_on_a_terminal(files, tmp_path):
    shown = on_a_terminal(*commands(*files, tmp_path)["PPL = "])
    assert BAR.search(shown) and "PPL = " in shown, shown[-3000:]


@pytest.mark.parametrize("what", NAMES)
def test_every_long_command_shows_progress(files, tmp_path, macko, monkeypatch, what):
    monkeypatch.setattr(console, "shows_progress", lambda: True)  # as on a terminal
    done = macko(*commands(*files, tmp_path)[what])
    assert done.code == 0 and BAR.search(done.err) and what in done.err, done.err[-3000:]


def test_progress_is_not_shown_elsewhere(files, tmp_path, macko_process):
    done = macko_process(*commands(*files, tmp_path)["PPL = "])
    assert done.code == 0 and "%|" not in done.out + done.err and "\r" not in done.err


@pytest.mark.parametrize("what", ["restoring", "writing", "pruning", "columns", "model.gguf", "PPL = "])
def test_quiet_command_says_nothing_but_results(files, tmp_path, macko, what):
    done = macko(*commands(*files, tmp_path)[what], "--quiet")
    assert done.code == 0 and done.err == ""


def test_report_has_no_line_for_each_tensor(files, tmp_path, macko):
    model, text = files
    pruned = tmp_path / "pruned.gguf"
    assert macko("prune", model, pruned, "--sparsity", "0.6").code == 0
    pruning = f"--method sparsegpt --sparsity 0.5 -f {text} -c 32 --chunks 4"
    speed = ["-c", 32, "-p", 8, "-n", 4, "-r", 1, "-t", 2]
    done = macko("report", model, pruned, "-f", text, "--types", "", "--prune", pruning, *speed)
    assert done.code == 0 and "converting pruned to auto" in done.err
    assert "blk.0." not in done.err and len(done.err.splitlines()) < 20, done.err


def test_json_of_verify_and_perplexity(files, tmp_path, macko):
    model, text = files
    sparse, base = tmp_path / "sparse.gguf", tmp_path / "base.kld"
    assert macko("convert", model, sparse, "sparse-q8").code == 0
    found = json.loads(macko("verify", model, sparse, "--json").out)
    assert found["equal"] and not found["identical"] and found["quantized"][0]["value_type"] == "q8"
    other = tmp_path / "pruned.gguf"
    assert macko("prune", model, other, "--sparsity", "0.9").code == 0
    done = macko("verify", model, other, "--json", "--no-metadata")
    assert done.code == 1 and "first difference at row" in json.loads(done.out)["difference"]
    common = ["-f", text, "-c", 32, "--chunks", 16, "-t", 2, "--json"]
    done = macko("perplexity", "-m", model, *common, "--kl-divergence-base", base)
    found = json.loads(done.out)
    assert found["n_tokens"] == 16 * 15 and found["ppl"] == pytest.approx(np.exp(found["nll"]))
    done = macko("perplexity", "-m", sparse, "--kl-divergence", "--kl-divergence-base", base, "--json")
    found = json.loads(done.out)
    assert found["ppl_base"] == pytest.approx(np.exp(np.log(found["ppl"]) - found["log_ratio"]))
    assert 0 < found["kld"] < found["kld_max"]


def test_child_of_fork_does_not_wait_for_a_bar(monkeypatch):
    """tqdm's own lock is shared by all processes, and its monitor thread does not survive fork()."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with console.progress("outer", 2) as advance:
        advance(1)
        pid = os.fork()
        if pid == 0:
            try:
                with console.progress("inner", 1) as inner:
                    inner(1)
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
