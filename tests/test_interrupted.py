"""Writers that are stopped at any instant: the final name is absent, the old file, or complete; nothing half-written
reads as a model.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time

import pytest

import fork_server as fork_server_module
import generators
from ggml_macko import errors
from ggml_macko.gguf import outputs, writer
from ggml_macko.gguf.outputs import AtomicOutput
from ggml_macko.native import bindings


@pytest.fixture(scope="module")
def fork_server():
    """fork_server(args, operation=..., before=...) or fork_server(args, delay=...) -> exit code of a forked macko."""
    process = subprocess.Popen(
        [sys.executable, fork_server_module.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def run(args: list, **request: object) -> int:
        print(json.dumps({"args": [str(a) for a in args], **request}), file=process.stdin, flush=True)
        return int(process.stdout.readline())

    yield run
    process.stdin.close()
    assert process.wait(30) == 0


def check_folder(out, want: bytes, old: bytes | None) -> bool:
    """True if the conversion was complete."""
    assert {p.name for p in out.parent.iterdir()} <= {"tiny.gguf", out.name, f".{out.name}.partial"}
    data = out.read_bytes() if out.exists() else None
    assert data in (old, want), "the final name holds something else"
    return data == want


@pytest.fixture
def wanted(tmp_path_factory, macko):
    folder = tmp_path_factory.mktemp("wanted")
    path = generators.write_gguf(folder / "tiny.gguf", generators.tiny_tensors())
    assert macko("convert", path, folder / "s.gguf").code == 0
    return (folder / "s.gguf").read_bytes()


@pytest.mark.parametrize("old", [None, b"the old file"])
def test_kill_at_any_operation_leaves_old_or_new_file(tmp_path, tiny, wanted, fork_server, old):
    out, partial = tmp_path / "out.gguf", tmp_path / ".out.gguf.partial"
    complete = []
    for operation in range(1, 400):
        for before in (True, False):
            out.unlink(missing_ok=True)
            if old is not None:
                out.write_bytes(old)
            code = fork_server(["convert", tiny, out, "--force"], operation=operation, before=before)
            assert code in (-signal.SIGKILL, 0)
            complete.append(check_folder(out, wanted, old))
            if partial.exists() and partial.read_bytes() != wanted:  # torn: no reader takes it
                with pytest.raises(errors.MackoError):
                    bindings.File(partial)
        if code == 0:
            break
    assert code == 0 and operation > 20
    assert not complete[0] and complete[-1]
    assert not partial.exists()  # the run that survived took over what the others left


def test_kill_at_any_instant_leaves_old_or_new_file(tmp_path, tiny, wanted, fork_server):
    out = tmp_path / "out.gguf"
    args = ["convert", tiny, out, "--force"]
    start = time.monotonic()
    assert fork_server(args) == 0
    duration = time.monotonic() - start
    rng = random.Random(1)
    killed = 0
    for _ in range(150):
        killed += fork_server(args, delay=rng.uniform(0, duration)) != 0
        check_folder(out, wanted, None if not out.exists() else wanted)
    assert killed > 20


def test_failure_of_any_operation_leaves_the_old_file(tmp_path, tiny, wanted, macko, monkeypatch):
    """A full disk, a quota or a broken disk, at every call: one line, no partial file, final name untouched."""
    out = tmp_path / "out.gguf"
    for operation in range(1, 400):
        out.write_bytes(b"the old file")
        count = 0

        failed = []

        def wrap(name, function, operation=operation, failed=failed):
            def run(*args, **kwargs):
                nonlocal count
                count += 1
                if count == operation:
                    failed.append(name)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return function(*args, **kwargs)

            return run

        with monkeypatch.context() as patch:
            for name in fork_server_module.OPERATIONS:
                patch.setattr(os, name, wrap(name, getattr(os, name)))
            done = macko("convert", tiny, out, "--force")
        if done.code == 0:
            break
        assert done.code == 1 and done.err.splitlines()[-1] == f"error: {out}: No space left on device", done.err
        assert not (tmp_path / ".out.gguf.partial").exists()
        if out.read_bytes() != b"the old file":  # it has its name already; only the folder could not be made durable
            assert out.read_bytes() == wanted and failed == ["fsync"]
    assert done.code == 0 and operation > 20 and out.read_bytes() == wanted


def test_file_size_limit_is_one_line(tmp_path, tiny, wanted, macko_process):
    out = tmp_path / "out.gguf"
    for part in (0, 1, 2, 3):  # of the file
        size = len(wanted) * part // 4 + 3
        done = macko_process(
            "convert", tiny, out, preexec_fn=lambda size=size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        )
        assert done.code == 1 and done.err.splitlines()[-1] == f"error: {out}: File too large", done.err
        assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.gguf"]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", [["convert"], ["restore"], ["prune", "--sparsity", "0.5"]])
def test_ctrl_c_leaves_nothing(tmp_path, command, number, code):
    """Stopped while it writes: it reports the first tensor on stderr, and then waits for us to read."""
    big = {f"blk.{i}.attn_q.weight": v for i, v in enumerate([generators.tiny_tensors()["blk.0.attn_q.weight"]] * 1000)}
    source = generators.write_gguf(tmp_path / "tiny.gguf", big)
    out = tmp_path / "out.gguf"
    process = subprocess.Popen(
        [sys.executable, "-m", "ggml_macko.commands.cli", *command[:1], str(source), str(out), *command[1:]],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell that runs the tests in the background leaves the signal ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    for line in process.stderr:
        if line.startswith("["):
            break
    partial = tmp_path / ".out.gguf.partial"
    assert struct.unpack("<I", partial.read_bytes()[:4])[0] == process.pid
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err and sorted(p.name for p in tmp_path.iterdir()) == ["tiny.gguf"]


def test_second_converter_of_one_output_is_refused(tmp_path, tiny, macko):
    out = tmp_path / "out.gguf"
    with AtomicOutput(out, [], True) as first:
        first.write(first.magic)
        done = macko("convert", tiny, out)
        assert done.code == 1 and f"in use by pid {os.getpid()}" in done.err
        assert first.partial.read_bytes() == first.magic  # and the second did no harm
    assert macko("convert", tiny, out).code == 0


def test_lock_on_a_file_that_was_renamed_is_not_used(tmp_path, monkeypatch):
    """We open the partial, its owner finishes and renames it: we must not truncate what is now the final file."""
    out = tmp_path / "out.gguf"
    owner = AtomicOutput(out, [], True).__enter__()
    owner.write(owner.magic + b"complete")
    lock = fcntl.flock
    calls = []

    def flock_after_the_owner_finished(fd, how):
        if not calls:
            owner.seal()
            owner.commit()
        calls.append(fd)
        return lock(fd, how)

    monkeypatch.setattr(outputs.fcntl, "flock", flock_after_the_owner_finished)
    with AtomicOutput(out, [], True) as second:
        second.write(b"other")
    assert len(calls) == 2 and out.read_bytes() == b"GGUFcomplete" and not second.partial.exists()


def test_stale_partial_file_is_taken_over(tmp_path, tiny, wanted, macko):
    partial = tmp_path / ".out.gguf.partial"
    partial.write_bytes(b"GGUF" + bytes(1_000_000))  # longer than what we shall write
    assert macko("convert", tiny, tmp_path / "out.gguf").code == 0
    assert (tmp_path / "out.gguf").read_bytes() == wanted and not partial.exists()
    partial.symlink_to(tiny)
    before = tiny.read_bytes()
    assert macko("convert", tiny, tmp_path / "other.gguf").code == 0
    assert macko("convert", tiny, tmp_path / "out.gguf", "--force").code == 1
    assert tiny.read_bytes() == before


def test_output_that_appears_meanwhile_is_not_replaced(tmp_path):
    out = tmp_path / "out.gguf"
    with pytest.raises(errors.MackoError, match="--force"), AtomicOutput(out, []) as output:
        output.write(output.magic)
        output.seal()
        out.write_bytes(b"precious")
        output.commit()
    assert out.read_bytes() == b"precious" and len(list(tmp_path.iterdir())) == 1


def test_input_that_changes_is_refused(tmp_path, tiny, macko, monkeypatch):
    """Appended to, shortened or replaced between the first read and the last: an error, and no output."""
    data = tiny.read_bytes()

    def append(*unused):
        tiny.write_bytes(data + bytes(32))

    def shorten(*unused):
        os.truncate(tiny, len(data) // 2)

    def rewrite(*unused):
        tiny.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    plan = writer.Writer.__init__
    for change in (append, shorten, rewrite):
        tiny.write_bytes(data)

        def change_then_write(self, *args, change=change):
            change()
            plan(self, *args)

        monkeypatch.setattr(writer.Writer, "__init__", change_then_write)
        done = macko("convert", tiny, tmp_path / "out.gguf")
        assert done.code == 1 and "while it was read" in done.err, (change, done.err)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.gguf"]


def test_written_file_that_reads_back_wrong_gets_no_name(tmp_path, tiny, macko, monkeypatch):
    """A disk that lies: one bit of what was written flips before it is verified."""
    seal = AtomicOutput.seal

    def flip_and_seal(self):
        seal(self)
        data = bytearray(self.partial.read_bytes())
        data[-70] ^= 0x40
        self.partial.write_bytes(data)

    monkeypatch.setattr(AtomicOutput, "seal", flip_and_seal)
    for command in (["convert"], ["restore"], ["prune", "--sparsity", "0.5"]):
        done = macko(*command, tiny, tmp_path / "out.gguf")
        assert done.code == 1 and "out.gguf" in done.err.splitlines()[-1], done.err
        assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.gguf"]
