"""The first hour of a llama.cpp user: commands as typed, including typos, with their output and exit codes, in order
and in one folder. Half of the model's pruned weights are negative zeros, as in many models.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple

import gguf
import numpy as np
import pytest

from support import generators

Done = namedtuple("Done", "code out err")
SAMPLE = generators.DEMO.parent / "sample.txt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the downloads: a pruned model, a text, and a file of the wrong format."""
    folder = tmp_path_factory.mktemp("hobbyist")
    shutil.copy(generators.DEMO, folder / "pruned.gguf")
    shutil.copy(SAMPLE, folder / "text.txt")
    header = b'{"w":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    return folder


@pytest.fixture(scope="module")
def sh(folder):
    """Runs a command line with the installed program."""
    program = shutil.which("macko", path=os.path.dirname(sys.executable))
    command = [program] if program else [sys.executable, "-m", "ggml_macko"]
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}  # absolute, because the commands run in another folder

    def run(line: str) -> Done:
        name, *words = line.split()
        assert name == "macko"
        words = [word.replace("_", " ") if word.startswith("The_") else word for word in words]
        done = subprocess.run([*command, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
        return Done(done.returncode, done.stdout, done.stderr)

    return run


def refused(done: Done, code: int, message: str) -> None:
    """One line with the fault, for a wrong command line also a hint at the help; nothing on stdout."""
    assert done.code == code and done.out == "", done
    assert done.err.startswith("error: ") and message in done.err.splitlines()[0], done.err
    assert "Traceback" not in done.err and len(done.err.splitlines()) <= 2


def test_first_minutes_show_what_there_is(sh):
    plain = sh("macko")
    assert plain.code == 0 and "usage: macko" in plain.out and plain.err == ""
    assert sh("macko help").out == plain.out
    helped = sh("macko help prune")
    assert helped.code == 0 and "--sparsity S" in helped.out and "alps" in helped.out
    assert helped.out == sh("macko prune -h").out
    version = sh("macko --version")
    assert version.code == 0 and re.match(r"macko \d+\.\d+\.\d+, with llama-cpp-python ", version.out)
    assert "does not fit" not in version.out


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        # options of llama.cpp's programs that macko lacks must not be read as -h, -c or -f
        ("macko generate -m pruned.gguf -p hi -fit off", 2, "unknown option -fit"),
        ("macko -hf org/model", 2, "unknown option -hf"),
        ("macko generate -m pruned.gguf -p hi -cb", 2, "unknown option -cb"),
        ("macko generate -m pruned.gguf -p hi -ngll 99", 2, "unknown option -ngll; did you mean -ngl?"),
        ("macko generate -m pruned.gguf", 2, "-p is missing"),
        # numbers, types and names
        ("macko prune pruned.gguf half.gguf --sparsity 50", 2, "from 0 to 1; did you mean 0.5?"),
        ("macko prune pruned.gguf half.gguf --sparsity 0.5 --exclude-weights ffn_dwon", 1, "did you mean ffn_down"),
        ("macko convert pruned.gguf sparse.gguf q8", 2, "unknown type 'q8'; did you mean sparse-q8?"),
        ("macko convert pruned.gguf sparse.gguf macko --tensor-type attn_qq=dense", 1, "did you mean attn_q"),
        ("macko convert pruned.gguf sparse.gguf auto --target-bpw 1", 1, "cannot be reached; the least is "),
        # files
        ("macko convert pruned.gguf out/sparse.gguf", 1, "there is no folder "),
        ("macko convert model.safetensors sparse.gguf", 1, "model.safetensors: a safetensors file, not a GGUF"),
        ("macko convert pruned.gguf", 2, "OUT is missing"),
        ("macko generate -m model.safetensors -p hi", 1, "model.safetensors: a safetensors file, not a GGUF"),
        ("macko generate -m text.txt -p hi", 1, "text.txt: not a GGUF file (starts with '"),
    ],
)
def test_slip_is_one_line_that_says_what_was_meant(sh, folder, line, code, message):
    before = sorted(folder.iterdir())
    refused(sh(line), code, message)
    assert sorted(folder.iterdir()) == before


def test_pruned_model_becomes_sparse_is_verified_and_runs(sh, folder):
    zeros = {"+": 0, "-": 0}
    for t in gguf.GGUFReader(folder / "pruned.gguf").tensors:
        if t.name.startswith("blk.") and len(t.shape) == 2:
            bits = np.frombuffer(t.data.tobytes(), np.uint16)
            zeros["-"] += int((bits == 0x8000).sum())
            zeros["+"] += int((bits == 0).sum())
    assert zeros["-"] > zeros["+"] / 2  # the model must have negative zeros

    dry = sh("macko convert pruned.gguf --dry-run")
    assert dry.code == 0 and not (folder / "sparse.gguf").exists()
    done = sh("macko convert pruned.gguf sparse.gguf")
    assert done.code == 0, done.err
    assert f"{zeros['-']} negative zeros (" in done.err and "--keep-negative-zeros keeps them" in done.err
    dense_size, sparse_size = ((folder / name).stat().st_size for name in ("pruned.gguf", "sparse.gguf"))
    mib, bpw = re.search(r"sparse size = +([\d.]+) MiB \(([\d.]+) BPW\)", done.out).groups()
    assert abs(float(mib) - sparse_size / 2**20) < 0.01 and sparse_size < 0.6 * dense_size
    assert [line for line in dry.out.splitlines() if line.startswith("sparse size")] == [done.out.splitlines()[-1]]
    refused(sh("macko convert pruned.gguf sparse.gguf"), 1, "sparse.gguf: exists; use --force to replace it")

    verified = sh("macko verify pruned.gguf sparse.gguf")
    assert verified.code == 0 and verified.out.startswith(
        f"identical, but for {zeros['-']} negative zeros: 38 tensors, "
    )
    exact = sh("macko verify pruned.gguf sparse.gguf --exact")
    assert exact.code == 1 and "0x8000 against 0x0000" in exact.out

    inspected = sh("macko inspect sparse.gguf")
    assert inspected.code == 0 and "28 stored sparse" in inspected.out and f"({bpw} BPW)" in inspected.out

    texts = [
        sh(f"macko generate -m {m} -p The_function_returns -n 16 --temp 0") for m in ("pruned.gguf", "sparse.gguf")
    ]
    assert texts[0].code == texts[1].code == 0 and texts[1].err == ""
    assert texts[0].out == texts[1].out and texts[0].out.startswith("The function returns ")
    # the default is -ngl all, which is harmless without a GPU
    assert sh("macko generate -m sparse.gguf -p The_function_returns -n 16 --temp 0 -ngl 0").out == texts[1].out


def test_every_bit_comes_back_for_those_who_ask(sh, folder):
    done = sh("macko convert pruned.gguf exact.gguf --keep-negative-zeros")
    assert done.code == 0 and "negative zeros (" not in done.err
    assert (folder / "exact.gguf").stat().st_size > 1.2 * (folder / "sparse.gguf").stat().st_size
    assert sh("macko verify pruned.gguf exact.gguf --exact").out.startswith("identical: 38 tensors, ")
    assert sh("macko restore exact.gguf restored.gguf").code == 0
    assert (folder / "restored.gguf").read_bytes() == (folder / "pruned.gguf").read_bytes()


def test_size_quantized_and_quality_measured(sh):
    done = sh("macko convert pruned.gguf small.gguf sparse-q8")
    assert done.code == 0 and "lossy: " in done.err
    verified = sh("macko verify pruned.gguf small.gguf")
    assert verified.code == 0 and "not identical: 29 tensors with q8, q8_0 values" in verified.out
    found = [sh(f"macko perplexity -m {m} -f text.txt -c 256 --chunks 4") for m in ("pruned.gguf", "small.gguf")]
    ppl = [float(re.search(r"PPL = ([\d.]+)", done.out)[1]) for done in found]
    assert all(done.code == 0 for done in found) and abs(ppl[1] / ppl[0] - 1) < 0.05


def test_completion_is_a_script_of_the_shell(sh, folder):
    pytest.importorskip("shtab")
    for shell in ("bash", "zsh"):
        done = sh(f"macko --print-completion {shell}")
        assert done.code == 0 and "--keep-negative-zeros" in done.out
    script = sh("macko --print-completion bash").out
    script += "COMP_WORDS=(macko conv)\nCOMP_CWORD=1\n_shtab_macko\necho ${COMPREPLY[@]}\n"
    if shutil.which("bash"):
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
        assert done.stdout.split() == ["convert"]
