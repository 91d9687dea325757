"""The cache of weights in their memory layout (src/load/weight-cache.h) is used only if it is valid, never required."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from ggml_macko import convert, errors, system
from ggml_macko.native import library
from ggml_macko.native.cpu import cpu_kernels
from support import generators, other_device
from support.llama_logits import logits, open_model

TOKENS = list(range(3, 40))
N_WEIGHTS = 28  # of the bundled model
OLD_ENOUGH = 3.1  # seconds; a younger model gets no cache file


TYPES = ("macko", "packed", "sparse-lossless", "ec-csr", "sparse-q8", "sparse-q4")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of each type, old enough for a cache file."""
    folder, made = tmp_path_factory.mktemp("weights"), {}
    for kind in TYPES:
        made[kind] = folder / f"{kind}.gguf"
        convert(generators.DEMO, made[kind], kind)
    time.sleep(OLD_ENOUGH)
    return made


@pytest.fixture(scope="module")
def sparse(models):
    return models["macko"]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder of the cache files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ggml-macko"


def load(path, **kwargs):
    with contextlib.closing(open_model(path, logits_all=True, **kwargs)) as llama:
        return logits(llama, TOKENS)


class Loader:
    def __init__(self, capfd):
        self.capfd = capfd

    def __call__(self, path, **kwargs):
        """Logits, and the log's line about the cache: ("wrote", MiB), ("mapped", weights), ("no", reason) or None."""
        self.capfd.readouterr()
        got = load(path, weight_cache=True, verbose=True, **kwargs)
        said = re.findall(
            r"ggml-macko: (?:cache: (wrote) ([\d.]+) MiB to|cache: (mapped) (\d+) weights|(no) cache: (.*))",
            self.capfd.readouterr().err,
        )
        assert len(said) <= 1
        return got, next((tuple(part for part in line if part) for line in said), None)


@pytest.fixture
def cached(capfd):
    return Loader(capfd)


def the_file(kept: Path) -> Path:
    (found,) = kept.iterdir()
    return found


# ---- purpose ----


@pytest.mark.parametrize("kind", TYPES)
def test_second_load_maps_what_the_first_one_wrote(models, kept, cached, kind):
    want = load(models[kind])
    for expected in ("wrote", "mapped", "mapped"):
        got, said = cached(models[kind])
        assert said[0] == expected
        assert np.array_equal(got, want)
    assert int(said[1]) == N_WEIGHTS
    file = the_file(kept)
    assert file.name.startswith(f"{kind}-")
    assert file.stat().st_mode & 0o777 == 0o600 and kept.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kernels", ["portable", "avx2"])
def test_each_kernel_set_has_its_own_file(sparse, kept, cached, kernels):
    """A process on a CPU without avx2 reports that, and the test is skipped."""
    if kernels == cpu_kernels():
        pytest.skip(f"{kernels} is the set that this CPU uses by default")
    cached(sparse)
    program = (
        "import sys; from support.llama_logits import logits, open_model; import numpy as np\n"
        "def run(**k): return logits(open_model(sys.argv[1], logits_all=True, **k), list(range(3, 40)))\n"
        "want = run(); assert all(np.array_equal(run(weight_cache=True, verbose=True), want) for i in range(2))"
    )
    env = {**os.environ, "GGML_MACKO_CPU_KERNELS": kernels, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program, str(sparse)], env=env, capture_output=True, text=True)
    if "not supported by this CPU" in done.stderr or "no such kernel set" in done.stderr:
        pytest.skip(f"this CPU has no {kernels}")
    assert done.returncode == 0, done.stderr
    assert "cache: wrote" in done.stderr and f"cache: mapped {N_WEIGHTS} weights" in done.stderr
    assert len(list(kept.iterdir())) == 2


def test_weights_that_come_from_another_device_are_added(sparse, kept, cached):
    want = load(sparse)
    with other_device.place(r"blk\.[01]\."):
        _, said = cached(sparse)
    assert said[0] == "wrote"
    got, said = cached(sparse)
    assert said[0] == "wrote"  # all weights, including those that the file had
    assert np.array_equal(got, want)
    with other_device.place(r"blk\.[01]\."):
        assert cached(sparse)[1] == ("mapped", str(N_WEIGHTS // 2))
    assert cached(sparse)[1] == ("mapped", str(N_WEIGHTS))


def test_models_compressed_on_load_have_files_for_each_way(kept, cached):
    """The bundled model is old enough for a cache file."""
    for options in ({"compress": True}, {"compress": True, "keep_negative_zeros": True}):
        want = load(generators.DEMO, **options)
        for expected in ("wrote", "mapped"):
            got, said = cached(generators.DEMO, **options)
            assert said[0] == expected
            assert np.array_equal(got, want)
    assert len(list(kept.iterdir())) == 2


def test_option_of_commands_and_variable_ask_for_it(sparse, kept, macko, monkeypatch):
    say = ("generate", "-m", sparse, "-p", "The function", "-n", "8", "-t", "2", "--temp", "0")
    want = macko(*say)
    assert want.code == 0 and not kept.exists()
    assert macko(*say, "--cache").out == want.out
    before = the_file(kept).stat()
    monkeypatch.setenv("GGML_MACKO_LOAD", "cache")
    assert macko(*say).out == want.out
    assert the_file(kept).stat().st_ino == before.st_ino  # mapped, not written
    the_file(kept).unlink()
    assert macko(*say).out == want.out
    assert the_file(kept).stat().st_size == before.st_size


# ---- refusals ----


def damage(path: Path, rng: np.random.Generator) -> str:
    """Damages a file at random and returns a description."""
    data = bytearray(path.read_bytes())
    index = int.from_bytes(data[8:16], "little")
    at = int(rng.choice([rng.integers(40), rng.integers(index, len(data)), rng.integers(4096, index)]))
    how = str(rng.choice(["bit", "bytes", "cut", "longer", "zeros"]))
    if how == "bit":
        data[at] ^= 1 << int(rng.integers(8))
    elif how == "bytes":
        n = int(rng.integers(1, 9))
        data[at : at + n] = rng.bytes(n)
    elif how == "cut":
        del data[at:]
    elif how == "longer":
        data += rng.bytes(int(rng.integers(1, 5000)))
    else:
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    path.write_bytes(data)
    return f"{how} at {at} of {len(data)}, index {index}"


def padding(data: bytes) -> list[slice]:
    """The parts of a valid file that contain no data."""
    index, key = (int.from_bytes(data[at : at + 8], "little") for at in (8, 32))
    places, at = [(0, 40)], index + key
    while at < len(data):
        at += 4 + int.from_bytes(data[at : at + 4], "little") + 24
        begin, nbytes = (int.from_bytes(data[at - k : at - k + 8], "little") for k in (24, 16))
        places.append((begin, begin + nbytes))
    ends = [end for _, end in sorted(places)]
    return [slice(end, begin) for end, (begin, _) in zip(ends, sorted(places)[1:])]


def test_damaged_file_is_never_used_and_is_replaced(sparse, kept, cached):
    want = load(sparse)
    cached(sparse)
    good = the_file(kept).read_bytes()
    blank = bytearray(good)
    for unused in padding(good):
        blank[unused] = bytes(unused.stop - unused.start)
    assert blank == good  # the padding is zero
    rng = np.random.default_rng()
    for _ in range(30):
        the_file(kept).write_bytes(good)
        what = damage(the_file(kept), rng)
        got_bytes = bytearray(the_file(kept).read_bytes())
        if len(got_bytes) == len(good):
            for unused in padding(good):
                got_bytes[unused] = bytes(unused.stop - unused.start)
        got, said = cached(sparse)
        assert np.array_equal(got, want), what
        assert said[0] == ("mapped" if got_bytes == good else "wrote"), what
        assert cached(sparse)[1] == ("mapped", str(N_WEIGHTS)), what


def test_changed_model_is_read_again_even_with_the_old_times(sparse, kept, cached, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(sparse, path)
    time.sleep(OLD_ENOUGH)
    before, said = cached(path)
    assert said[0] == "wrote"
    values = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight.values")
    times = path.stat()
    with path.open("r+b") as f:  # the same inode and size
        f.seek(values.data_offset)
        bits = np.frombuffer(f.read(2000), dtype=np.uint16)
        f.seek(values.data_offset)
        f.write((bits ^ 0x8000 * (bits != 0).astype(np.uint16)).tobytes())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after, said = cached(path)
    assert said is None  # neither mapped nor written, because the model has just changed
    assert not np.array_equal(after, before) and np.array_equal(after, load(path))
    time.sleep(OLD_ENOUGH)
    for expected in ("wrote", "mapped"):
        got, said = cached(path)
        assert said[0] == expected
        assert np.array_equal(got, after)


def test_model_that_was_written_just_now_is_not_kept(sparse, kept, cached, tmp_path):
    path = tmp_path / "young.gguf"
    shutil.copy(sparse, path)
    assert cached(path)[1] is None
    assert list(kept.iterdir()) == []


def test_file_that_others_may_write_is_replaced(sparse, kept, cached):
    cached(sparse)
    file = the_file(kept)
    for mode in (0o620, 0o602):
        file.chmod(mode)
        assert cached(sparse)[1][0] == "wrote"
        assert the_file(kept).stat().st_mode & 0o777 == 0o600
    assert cached(sparse)[1][0] == "mapped"


@pytest.mark.parametrize("mode", [0o770, 0o703])
def test_folder_that_others_may_write_is_not_used(sparse, kept, cached, mode):
    want, _ = cached(sparse)
    kept.chmod(mode)
    got, said = cached(sparse)
    assert said == ("no", f"{kept}: another user owns or may write the folder")
    assert np.array_equal(got, want)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_not_used(sparse, kept, cached):
    cached(sparse)
    os.chown(the_file(kept), 12345, -1)
    assert cached(sparse)[1][0] == "wrote"
    os.chown(kept, 12345, -1)
    assert cached(sparse)[1] == ("no", f"{kept}: another user owns or may write the folder")


def test_link_in_place_of_the_folder_is_not_followed(sparse, kept, cached, tmp_path):
    """Another user may have created the link in a shared folder."""
    (tmp_path / "own").mkdir(mode=0o700)
    kept.parent.mkdir()
    kept.symlink_to(tmp_path / "own")
    assert cached(sparse)[1] == ("no", f"{kept}: Not a directory")
    assert list((tmp_path / "own").iterdir()) == []


def test_library_is_identified_by_its_code_in_memory_and_not_by_the_file_at_its_path(sparse, kept, tmp_path):
    """A process older than an upgrade writes the old library's layout, which the new library must not map."""
    shutil.copytree(library.PACKAGE, tmp_path / "ggml_macko", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "ggml_macko" / system.PLUGIN
    notes = subprocess.run(["readelf", "-n", path], capture_output=True, text=True, check=True).stdout
    build_id = re.search(r"Build ID: ([0-9a-f]{40})", notes)[1]
    program = (
        "import sys; from ggml_macko.native import library; library.lib()\n"
        "from support.llama_logits import open_model\n"
        "print('ready', flush=True); input()\n"
        "open_model(sys.argv[1], weight_cache=True, verbose=True)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", program, str(sparse)]

    def start() -> subprocess.Popen:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, env=env, text=True, **pipes)
        assert process.stdout.readline() == "ready\n"
        return process

    old = start()
    content = path.read_bytes()
    assert content.count(bytes.fromhex(build_id)) == 1
    path.unlink()
    path.write_bytes(content.replace(bytes.fromhex(build_id), bytes(20)))
    for process, said in ((old, "wrote"), (start(), "wrote"), (start(), "mapped")):
        err = process.communicate("\n")[1]
        assert process.returncode == 0 and f"cache: {said}" in err, err


@pytest.mark.parametrize("what", ["symlink", "fifo", "folder", "empty"])
def test_what_is_no_cache_file_is_not_opened_as_one(sparse, kept, cached, tmp_path, what):
    want, _ = cached(sparse)
    file = the_file(kept)
    if what == "symlink":
        file.rename(tmp_path / "target")
        file.symlink_to(tmp_path / "target")
    else:
        file.unlink()
        {"fifo": os.mkfifo, "folder": os.mkdir, "empty": Path.touch}[what](file)
    got, said = cached(sparse)
    assert np.array_equal(got, want)
    if what == "folder":
        assert said[0] == "no" and str(file) in said[1] and "Is a directory" in said[1]
        assert [p.name for p in kept.iterdir()] == [file.name]  # no partial file
    else:
        assert said[0] == "wrote" and not file.is_symlink()


def test_no_folder_for_it_is_said_and_the_load_goes_on(sparse, tmp_path, cached, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    assert cached(sparse)[1] == ("no", "neither XDG_CACHE_HOME nor HOME is an absolute path")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    assert cached(sparse)[1] == ("no", f"{tmp_path}/file/ggml-macko: Not a directory")


# ---- writing ----


def test_failed_load_keeps_nothing(sparse, kept, tmp_path):
    data = bytearray(sparse.read_bytes())
    data[-4096:] = b"\xff" * 4096
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    time.sleep(OLD_ENOUGH)
    with pytest.raises(errors.FileFormatError):
        open_model(path, weight_cache=True)
    assert list(kept.iterdir()) == []


def test_full_disk_is_said_and_the_load_goes_on(sparse, kept):
    """Runs in a process of its own, because the limit applies to all files of a process."""
    program = (
        "import resource, sys; from support.llama_logits import logits, open_model; import numpy as np\n"
        "def run(**k): return logits(open_model(sys.argv[1], logits_all=True, **k), list(range(3, 40)))\n"
        "want = run(); resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # Python ignores the signal\n"
        "assert np.array_equal(run(weight_cache=True, verbose=True), want)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program, str(sparse)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"no cache: .*\.weights: cannot write: File too large\n", done.stderr)
    assert list(kept.iterdir()) == []


def test_own_partial_files_are_removed_when_they_are_a_day_old(sparse, kept, cached):
    kept.mkdir(parents=True, mode=0o700)
    old, young = (kept / f".{stem}-{'0' * 16}.weights.{'a' * 16}.partial" for stem in "ab")
    others = [kept / name for name in (".model.gguf.0123456789abcdef.partial", ".x.partial", "c.weights")]
    for path in (old, young, *others):
        path.touch()
        if path != young:
            os.utime(path, (time.time() - 90000,) * 2)
    assert cached(sparse)[1][0] == "wrote"
    assert not old.exists() and all(path.exists() for path in (young, *others))


def test_processes_that_load_at_once_do_not_disturb_each_other(sparse, kept):
    program = (
        "import sys; from support.llama_logits import logits, open_model; import hashlib\n"
        "for i in range(3):\n"
        "    got = logits(open_model(sys.argv[1], logits_all=True, weight_cache=True), list(range(3, 40)))\n"
        "    print(hashlib.sha256(got.tobytes()).hexdigest())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(sparse)]
    running = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(3)
    ]
    said = [process.communicate()[0].split() for process in running]
    assert all(process.returncode == 0 for process in running)
    assert len({line for lines in said for line in lines}) == 1 and sum(map(len, said)) == 9
    assert the_file(kept).suffix == ".weights"
