"""After an interruption at any time, the final name is absent, the old file, or complete; no incomplete file can be
read as a model.
"""

from __future__ import annotations

import errno
import fcntl
import gc
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

from ggml_macko import errors
from ggml_macko.gguf import outputs, writer
from ggml_macko.gguf.outputs import AtomicOutput
from ggml_macko.native.file import File
from support import fork_server as fork_server_module
from support import generators


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


def partials(out) -> list:
    return list(out.parent.glob(f".{out.name}.*.partial"))


def check_folder(out, want: bytes, old: bytes | None) -> bool:
    """Returns whether the conversion was complete."""
    others = {p.name for p in out.parent.iterdir()} - {"tiny.gguf", out.name, *(p.name for p in partials(out))}
    assert not others
    data = out.read_bytes() if out.exists() else None
    assert data in (old, want), "the file is neither the old one nor complete"
    return data == want


@pytest.fixture
def wanted(tmp_path_factory, macko):
    folder = tmp_path_factory.mktemp("wanted")
    path = generators.write_gguf(folder / "tiny.gguf", generators.tiny_tensors())
    assert macko("convert", path, folder / "s.gguf").code == 0
    return (folder / "s.gguf").read_bytes()


@pytest.mark.parametrize("old", [None, b"the old file"])
def test_kill_at_any_operation_leaves_old_or_new_file(tmp_path, tiny, wanted, fork_server, old):
    out = tmp_path / "out.gguf"
    complete = []
    for operation in range(1, 400):
        for before in (True, False):
            out.unlink(missing_ok=True)
            if old is not None:
                out.write_bytes(old)
            force = [] if old is None else ["--force"]  # a file gets its name in two different ways
            code = fork_server(["convert", tiny, out, *force], operation=operation, before=before)
            assert code in (-signal.SIGKILL, 0)
            complete.append(check_folder(out, wanted, old))
            for partial in partials(out):
                if partial.read_bytes() != wanted:  # incomplete: every reader must refuse it
                    with pytest.raises(errors.MackoError):
                        File(partial)
        if code == 0:
            break
    assert code == 0 and operation > 20
    assert not complete[0] and complete[-1]
    assert not partials(out)  # each run removed the files of the previous ones


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
    """After a failure at any call, as on a full disk: one line, no partial file, and the old file unchanged."""
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
        line = done.err.splitlines()[-1]
        assert done.code == 1 and line.startswith(f"error: {out}: "), done.err
        assert line.endswith("No space left on device"), done.err
        assert not partials(out)
        if out.read_bytes() != b"the old file":  # the file already has its name; only the fsync of the folder failed
            assert out.read_bytes() == wanted and failed == ["fsync"] and "is complete and in its place" in line
    assert done.code == 0 and operation > 20 and out.read_bytes() == wanted


@pytest.mark.parametrize("kind", ["macko", "ec-csr"])  # the arrays of EC-CSR are in a temporary file first
def test_file_size_limit_is_one_line(tmp_path, tiny, wanted, macko_process, kind):
    out = tmp_path / "out.gguf"
    for part in (0, 1, 2, 3):  # quarters of the file
        size = len(wanted) * part // 4 + 3
        done = macko_process(
            *("convert", tiny, out, kind),
            preexec_fn=lambda size=size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        )
        assert done.code == 1 and done.err.splitlines()[-1] == f"error: {out}: File too large", done.err
        assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.gguf"]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("command", [["convert"], ["restore"], ["prune", "--sparsity", "0.5"]])
def test_ctrl_c_leaves_nothing(tmp_path, command, number, code):
    """The signal arrives during the write: the command reports the first tensor on stderr and then blocks."""
    big = {f"blk.{i}.attn_q.weight": v for i, v in enumerate([generators.tiny_tensors()["blk.0.attn_q.weight"]] * 1000)}
    source = generators.write_gguf(tmp_path / "tiny.gguf", big)
    out = tmp_path / "out.gguf"
    process = subprocess.Popen(
        [sys.executable, "-m", "ggml_macko.commands.cli", *command[:1], str(source), str(out), *command[1:]],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell that runs the tests in the background passes on the signal as ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    for line in process.stderr:
        if line.startswith("["):
            break
    (partial,) = partials(out)
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
        assert done.code == 1 and f"{out}: in use by pid {os.getpid()}" in done.err
        assert first.partial.read_bytes() == first.magic  # the second run did no harm
    assert macko("convert", tiny, out).code == 0


def test_lock_on_a_file_that_was_renamed_is_not_used(tmp_path, monkeypatch):
    """The other run gives the opened partial file its final name; the complete file must not be removed."""
    out = tmp_path / "out.gguf"
    owner = AtomicOutput(out, [], True).__enter__()
    owner.write(owner.magic + b"complete")
    lock = fcntl.flock
    calls = []

    def flock_after_the_owner_finished(fd, how):
        calls.append(fd)
        if len(calls) == 2:
            owner.seal()
            owner.commit()
        return lock(fd, how)

    monkeypatch.setattr(outputs.fcntl, "flock", flock_after_the_owner_finished)
    with AtomicOutput(out, [], True) as second:
        second.write(b"other")
    assert len(calls) == 2 and out.read_bytes() == b"GGUFcomplete" and not partials(out)


def test_partial_file_removed_by_another_run_is_made_again(tmp_path, monkeypatch):
    """Another run removes the new partial file before the first one has locked it."""
    out = tmp_path / "out.gguf"
    lock = fcntl.flock
    calls = []

    def flock_after_the_other_run(fd, how):
        calls.append(fd)
        if len(calls) == 1:
            (partial,) = partials(out)
            partial.unlink()
        return lock(fd, how)

    monkeypatch.setattr(outputs.fcntl, "flock", flock_after_the_other_run)
    with AtomicOutput(out, []) as output:
        output.write(output.magic + b"data")
        output.seal()
        output.commit()
    assert len(calls) == 2 and out.read_bytes() == b"GGUFdata" and not partials(out)


RANDOM = "0123456789abcdef"


def test_partial_file_of_a_killed_run_is_removed(tmp_path, tiny, wanted, macko):
    out, partial = tmp_path / "out.gguf", tmp_path / f".out.gguf.{RANDOM}.partial"
    other = tmp_path / f".other.gguf.{RANDOM}.partial"
    for content in (b"", struct.pack("<I", 1) + bytes(100), b"GGUF" + bytes(1_000_000)):
        partial.write_bytes(content)
        other.write_bytes(content)
        done = macko("convert", tiny, out, "--force")
        assert done.code == 0 and f"{partial}: removed" in done.err
        assert out.read_bytes() == wanted and not partial.exists() and other.read_bytes() == content


@pytest.mark.parametrize("name", [".u.gguf.partial", f".u.gguf.{RANDOM}.partial"])
def test_input_named_like_a_partial_file_is_kept(tmp_path, tiny, wanted, macko, name):
    source = tiny.rename(tmp_path / name)
    before = source.read_bytes()
    assert macko("convert", source, tmp_path / "u.gguf").code == 0
    assert source.read_bytes() == before and (tmp_path / "u.gguf").read_bytes() == wanted


@pytest.mark.parametrize("name", [".out.gguf.partial", f".out.gguf.{RANDOM}.partial"])
def test_planted_partial_file_is_neither_followed_nor_written(tmp_path, tiny, wanted, macko, name):
    """Another user of the folder may have created a link or a FIFO with the name of a partial file."""
    out, planted, precious = tmp_path / "out.gguf", tmp_path / name, tmp_path / "precious"
    precious.write_bytes(b"precious")
    for plant in (
        lambda: planted.symlink_to(precious),
        lambda: planted.symlink_to(tmp_path / "missing"),
        lambda: os.link(precious, planted),
        lambda: os.mkfifo(planted),
        planted.mkdir,
    ):
        plant()
        assert macko("convert", tiny, out, "--force").code == 0
        assert out.read_bytes() == wanted and precious.read_bytes() == b"precious"
        assert not (tmp_path / "missing").exists()
        if planted.is_dir():
            planted.rmdir()
        elif planted.is_symlink() or planted.exists():
            planted.unlink()


def test_random_name_that_exists_is_not_used(tmp_path, tiny, macko, monkeypatch):
    planted = tmp_path / f".out.gguf.{RANDOM}.partial"
    planted.write_bytes(b"precious")
    monkeypatch.setattr(outputs.secrets, "token_hex", lambda n: RANDOM)
    done = macko("convert", tiny, tmp_path / "out.gguf")
    assert done.code == 1 and f"{tmp_path / 'out.gguf'}: File exists" in done.err
    assert planted.read_bytes() == b"precious"


def test_forked_child_leaves_the_partial_file_of_its_parent(tmp_path):
    with AtomicOutput(tmp_path / "out.gguf", []) as output:
        pid = os.fork()
        if pid == 0:
            del output
            gc.collect()
            os._exit(0)
        os.waitpid(pid, 0)
        assert output.partial.exists()


class Interrupt:
    """Raises KeyboardInterrupt before the n-th instruction that Python executes in outputs.py."""

    def __init__(self, n: int):
        self.left = n

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename != outputs.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("force", [False, True])
def test_ctrl_c_at_any_bytecode_leaves_no_partial_file(tmp_path, force):
    out = tmp_path / "out.gguf"

    def write():
        with AtomicOutput(out, [], force) as output:
            output.write(output.magic + b"data")
            output.seal()
            output.commit()

    def scratch():
        with outputs.scratch_folder(tmp_path, ".scratch-") as folder:
            (folder / "file").write_bytes(b"data")

    before = sys.gettrace()
    for work in (write, scratch):
        for n in range(1, 10_000):
            out.unlink(missing_ok=True)
            sys.settrace(Interrupt(n))
            try:
                work()
                stopped = False
            except KeyboardInterrupt:
                stopped = True
            finally:
                sys.settrace(before)
            left = {p.name for p in tmp_path.iterdir()}
            assert left <= {"out.gguf"} and (not left or out.read_bytes() == b"GGUFdata"), f"instruction {n}"
            if not stopped:
                break
        assert n > 50


def test_output_that_appears_meanwhile_is_not_replaced(tmp_path):
    out = tmp_path / "out.gguf"
    with pytest.raises(errors.MackoError, match="--force"), AtomicOutput(out, []) as output:
        output.write(output.magic)
        output.seal()
        out.write_bytes(b"precious")
        output.commit()
    assert out.read_bytes() == b"precious" and len(list(tmp_path.iterdir())) == 1


def test_input_that_changes_is_refused(tmp_path, tiny, macko, monkeypatch):
    """The input grows, shrinks or is replaced between the first read and the last: an error, and no output."""
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
    """One bit of the written data changes before they are verified, as on a faulty disk."""
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
