"""Every reader refuses FIFOs, sockets, devices and folders at once, and names a file that cannot be read."""

from __future__ import annotations

import errno
import os
import shutil
import socket

import pytest

from ggml_macko import errors, regular_files
from support import generators
from support.bad_input import SAMPLE, one_line

MODEL = generators.DEMO


@pytest.fixture(params=["FIFO", "socket", "device", "directory"])
def special(request, tmp_path):
    """(path, expected message)"""
    path = tmp_path / "special"
    if request.param == "FIFO":
        os.mkfifo(path)
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(path))
    elif request.param == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return path, f"is a {request.param}, not a regular file"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "args",
    [
        ["convert", "SPECIAL", "OUT"],
        ["convert", MODEL, "OUT", "sparse-q8", "--imatrix", "SPECIAL"],
        ["restore", "SPECIAL", "OUT"],
        ["verify", MODEL, "SPECIAL"],
        ["inspect", "SPECIAL"],
        ["prune", "SPECIAL", "OUT", "--sparsity", "0.5"],
        ["prune", MODEL, "OUT", "--sparsity", "0.5", "--method", "wanda", "-f", "SPECIAL"],
        ["prune", MODEL, "OUT", "--sparsity", "0.5", "--method", "wanda", "--imatrix", "SPECIAL"],
        ["calibrate", "-m", MODEL, "-f", "SPECIAL", "-o", "OUT"],
        ["perplexity", "-m", MODEL, "-f", "SPECIAL"],
        ["perplexity", "-m", MODEL, "--kl-divergence", "--kl-divergence-base", "SPECIAL"],
        ["generate", "-m", MODEL, "-f", "SPECIAL"],
    ],
    ids=lambda args: " ".join(map(str, args[:1] + args[-2:])).replace(str(MODEL), "MODEL"),
)
def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path, special, macko, args):
    path, message = special
    if path.is_dir() and args[:2] == ["convert", "SPECIAL"]:
        pytest.skip("a folder is a Hugging Face checkpoint")
    args = [{"SPECIAL": path, "OUT": tmp_path / "out.gguf"}.get(a, a) for a in args]
    one_line(macko(*args), path, message)
    assert [p.name for p in tmp_path.iterdir()] == ["special"]


def test_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_text("text")

    class Broken(regular_files.io.FileIO):
        def readall(self):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(regular_files.io, "FileIO", Broken)
    with pytest.raises(OSError) as e:
        regular_files.read_bytes(path)
    assert errors.one_line(e.value) == f"{path}: Input/output error"


@pytest.mark.parametrize(
    "args",
    [
        ["convert", MODEL, "INPUT", "sparse-q8", "--imatrix", "INPUT"],
        ["calibrate", "-m", MODEL, "-f", "INPUT", "-o", "INPUT"],
        ["calibrate", "-m", "SPLIT", "-f", SAMPLE, "-o", "PART"],
        ["perplexity", "-m", "SPLIT", "-f", SAMPLE, "--kl-divergence-base", "PART"],
        ["prune", MODEL, "INPUT", "--sparsity", "0.5", "--method", "wanda", "--imatrix", "INPUT"],
        ["inspect", "IMAGE", "--plot", "IMAGE"],
    ],
    ids=lambda args: " ".join(map(str, args[:1] + args[-1:])).replace(str(MODEL), "MODEL"),
)
def test_output_never_replaces_an_input(tmp_path, macko, args):
    imatrix = tmp_path / "input"
    assert macko("calibrate", "-m", MODEL, "-f", SAMPLE, "--chunks", 1, "-o", imatrix).code == 0
    tensors = list(generators.tiny_tensors().items())
    first, second = generators.write_split(tmp_path, [dict(tensors[:5]), dict(tensors[5:])])
    image = tmp_path / "model.png"
    shutil.copy(MODEL, image)
    before = {p: p.read_bytes() for p in (MODEL, imatrix, first, second, image)}
    words = {"INPUT": imatrix, "SPLIT": first, "PART": second, "IMAGE": image}
    done = macko(*(words.get(a, a) for a in args), "--force")
    one_line(done, "input and output files are the same")
    assert {p: p.read_bytes() for p in before} == before


def test_plot_that_cannot_be_written_leaves_the_old_one(tmp_path, macko, monkeypatch):
    plot = tmp_path / "plot.png"
    plot.write_bytes(b"old")
    write = os.write

    def full(fd, data):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        one_line(macko("inspect", MODEL, "--plot", plot, "--force"), plot, "No space left on device")
    assert plot.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["plot.png"]
    assert macko("inspect", MODEL, "--plot", plot, "--force").code == 0 and plot.read_bytes()[:4] == b"\x89PNG"
