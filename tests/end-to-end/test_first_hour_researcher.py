"""A researcher's first hour with a pruned checkpoint from the Hugging Face hub: every command as typed, its output and
exit code, and common mistakes.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ggml_macko.benchmark import card
from ggml_macko.native import devices
from support import hf_checkpoint

pytest.importorskip("safetensors")


class Shell:
    """Runs commands in a folder of its own with `macko` and convert_hf_to_gguf.py on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        programs = folder / "bin"
        programs.mkdir()
        (programs / "macko").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ggml_macko.commands.cli "$@"\n')
        (programs / "convert_hf_to_gguf.py").write_text(f"#!{sys.executable}\n{hf_checkpoint.AS_PROGRAM}")
        for program in programs.iterdir():
            program.chmod(0o755)
        self.programs = programs
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.environment.pop("GGML_MACKO_CONVERT_HF", None)

    def run(self, command: str, code: int = 0) -> str:
        """Runs a command and returns its output, including stderr if code is not 0; stderr must then be one line."""
        done = subprocess.run(
            shlex.split(command), cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        if code:
            assert len(done.stderr.strip().splitlines()) == 1, done.stderr
            return done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    shell = Shell(tmp_path_factory.mktemp("hour"))
    hf_checkpoint.write(shell.folder / "checkpoint")
    (shell.folder / "held-out.txt").write_text("".join(np.random.default_rng(1).choice(list("ab ab\n"), 3000)))
    return shell


def test_pruned_checkpoint_is_published_within_the_hour(shell):
    run = shell.run

    # in two steps: a dense checkpoint, then llama.cpp's own converter
    assert "14 of them decompressed" in run("macko decompress checkpoint dense-checkpoint")
    run("convert_hf_to_gguf.py dense-checkpoint --outfile pruned.gguf --outtype f16")

    planned = run("macko plan pruned.gguf")
    assert "density 0." in planned and "Smallest lossless type: sparse-lossless" in planned

    assert "sparse size" in run("macko convert pruned.gguf sparse.gguf packed")
    verified = run("macko verify pruned.gguf sparse.gguf")
    assert verified.startswith("identical: 21 tensors") and "16 in B" in verified

    measure = "-f held-out.txt -c 32"
    dense, sparse = (run(f"macko perplexity -m {name} {measure} -t 2") for name in ("pruned.gguf", "sparse.gguf"))
    values = [float(re.search(r"Final estimate: PPL = ([\d.]+) \+/- [\d.]+", text)[1]) for text in (dense, sparse)]
    assert values[0] == pytest.approx(values[1], rel=1e-4)

    # in one step: the same file
    run("macko convert checkpoint one-step.gguf packed --hf-outtype f16")
    assert (shell.folder / "one-step.gguf").read_bytes() == (shell.folder / "sparse.gguf").read_bytes()

    # the model card
    run(f"macko report pruned.gguf sparse.gguf {measure} --types Q8_0 -p 8 -n 4 -r 1 -t 2 --card README.md")
    text = (shell.folder / "README.md").read_text()
    assert text.startswith('---\nbase_model: ["USER/tiny"]\npipeline_tag: text-generation\n')
    nbytes = (shell.folder / "sparse.gguf").stat().st_size
    row = next(line for line in text.splitlines() if line.startswith("| sparse.gguf "))
    assert f"{nbytes / 2**20:.1f}" in row and "14 x packed" in row
    assert f"{values[1]:.2f}" in next(line for line in text.splitlines() if line.startswith("| sparse "))
    for command in (
        "macko generate -m sparse.gguf",
        "macko run -- llama-server -m sparse.gguf",
        'Llama("sparse.gguf")',
    ):
        assert command in text
    for part in (
        "Pruning: the metadata does not describe it.",
        "## What was not measured",
        "no benchmark of",
        "held-out.txt",
    ):
        assert part in text, part
    assert ("all on the CPU" in text) == (not devices.gpus())
    generated = run(shlex.join(shlex.split(re.search(r"^macko generate .*$", text, re.MULTILINE)[0])) + " --temp 0")
    assert generated.startswith("Once upon a time")
    left = {p.name for p in shell.folder.iterdir()}
    assert left == {
        "checkpoint", "dense-checkpoint", "held-out.txt", "pruned.gguf", "sparse.gguf", "one-step.gguf", "README.md",
    }  # fmt: skip


def test_mistakes_of_the_hour_are_one_line_each(shell):
    run = shell.run
    (shell.folder / "plain").mkdir()
    (shell.folder / "plain" / "config.json").write_text("{}")
    assert "has no safetensors files" in run("macko decompress plain out", 1)
    run("macko decompress checkpoint out2")
    assert "out2: exists" in run("macko decompress checkpoint out2", 1)
    assert "it is dense already" in run("macko decompress out2 out3", 1)
    assert "missing.gguf" in run("macko plan missing.gguf", 1)
    mine = shell.folder / "MINE.md"
    mine.write_text("mine")
    run("convert_hf_to_gguf.py out2 --outfile dense.gguf")
    command = "macko report dense.gguf -f held-out.txt -c 32 --types '' -p 8 -n 4 -r 1 -t 2 --card MINE.md"
    assert "MINE.md: exists; use --force" in run(command, 1) and mine.read_text() == "mine"
    (shell.programs / "convert_hf_to_gguf.py").unlink()
    assert "GGML_MACKO_CONVERT_HF=FILE names it" in run("macko convert checkpoint x.gguf", 1)
    assert not [p for p in shell.folder.iterdir() if p.name.startswith(".") or p.name in ("x.gguf", "out", "out3")]


def test_card_quotes_metadata_as_text():
    """A name with markup, front matter or a table remains text."""
    evil = "x\n---\nlicense: mit\n# <script>|`[a](b)"
    model = card.ModelFile(
        path=Path("m`x.gguf"),
        metadata={"general.name": evil, "general.license": evil, "macko.prune.method": evil},
        is_sparse=True,
        n_parameters=10**6,
        density=0.3,
        storage={"packed": 2},
    )
    head = list(card._front_matter(model))
    assert (
        head[0] == head[-1] == "---" and all("\n" not in line for line in head) and head[1].startswith('license: "x\\n')
    )
    for line in (
        *card._summary(model, [model]),
        *card._provenance(model, model),
        f"# {card._plain(card._name(model))}",
    ):
        assert "\n" not in line and "<script>" not in line.replace("\\<", "")
    assert "`" not in "".join(card._commands(model)).replace("```", "")
    live = "see https://x.org/a, WWW.x.org, ftp://x.org or mail me@x.org, @user"
    assert not re.search(r"://|www\.|@\w", card._plain(live), re.IGNORECASE)
