"""Broken files in the Python package: File and Llama report the same status code as the C++ tests.

test-gguf-header.cpp has the full table of cases; this file has one case of each family, and those that need a file
system.
"""

from __future__ import annotations

import copy
import ctypes
import os
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest

from ggml_macko import errors
from ggml_macko.native import library
from ggml_macko.native.file import File
from support import generators, tiny_models
from support import gguf_bytes as gb

NAN = float("nan")
Q = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def sparse_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse")
    (folder / "dense.gguf").write_bytes(gb.write(tiny_models.make("llama")))
    command = [
        sys.executable,
        "-m",
        "ggml_macko.commands.cli",
        "convert",
        folder / "dense.gguf",
        folder / "sparse.gguf",
        "macko-d4",
    ]
    subprocess.run([str(c) for c in command], check=True, capture_output=True)
    return folder / "sparse.gguf"


@pytest.fixture
def base(sparse_path):
    return gb.read(sparse_path.read_bytes())


def check(path) -> int:
    """The code of the first failed check of the header or the payload; 0 if all pass."""
    try:
        with File(path, require_model=True) as file:
            for i in range(len(file.sparse())):
                file.check_payload(i)
    except errors.MackoError as e:
        assert "\n" not in str(e) and str(path) in str(e), str(e)
        assert isinstance(e, errors.error_class(e.code))
        return e.code
    return 0


def load(path) -> int:
    """The code of a full load in a process of its own; 0 if the model loads."""
    program = (
        "import sys, ggml_macko\n"
        "try:\n"
        "    ggml_macko.Llama(sys.argv[1], n_ctx=64, n_threads=1, verbose=False)\n"
        "    print(0)\n"
        "except ggml_macko.errors.MackoError as e:\n"
        "    print(e.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[-1])


def array_with(key, i, value):
    def change(f):
        f.key(key).value[i] = value

    return change


def row_ptr_with(i, value):
    def change(f):
        t = f.tensor(Q + ".row_ptr")
        numbers = np.frombuffer(t.data, np.int32).copy()
        numbers[i] = value
        t.data = numbers.tobytes()

    return change


def values_with(i, value):
    def change(f):
        t = f.tensor(Q + ".values")
        numbers = np.frombuffer(t.data, np.uint16).copy()
        numbers[i] = value
        t.data = numbers.tobytes()

    return change


def drop_tensor(name):
    return lambda f: f.tensors.remove(f.tensor(name))


def rename_tensor(old, new):
    def change(f):
        f.tensor(old).name = new.encode()

    return change


def retype_tensor(name, type_):
    def change(f):
        t = f.tensor(name)
        t.type = type_
        t.data = t.data[: gb.BLOCKS[type_][1] * int(np.prod(t.ne))]

    return change


def set_key(*args):
    return lambda f: f.set(*args)


CASES = {
    "valid": (0, lambda f: None),
    "duplicate key": (24, lambda f: f.keys.append(copy.copy(f.keys[0]))),
    "key name with a newline": (23, set_key("a\nb", gb.U32, 1)),
    "value type 13": (23, lambda f: f.keys.append(gb.Key(b"x", 13, 0))),
    "reserved key": (23, set_key("macko.secret", gb.U32, 1)),
    "alignment 0": (28, set_key("general.alignment", gb.U32, 0)),
    "tensor name of 64 bytes": (29, rename_tensor("output_norm.weight", "x" * 64)),
    "duplicate tensor": (30, rename_tensor("output_norm.weight", "blk.0.attn_norm.weight")),
    "dense beside sparse": (30, rename_tensor("output_norm.weight", Q)),
    "zero dimension": (32, lambda f: f.tensor("output_norm.weight").ne.__setitem__(0, 0)),
    "newer format": (41, set_key("macko.version", gb.U32, 2)),
    "macko called ec-csr": (43, array_with("macko.tensor.format", 0, b"ec-csr")),
    "index_bits 3": (42, array_with("macko.tensor.index_bits", 0, 3)),
    "missing sparse key": (27, lambda f: f.drop("macko.tensor.nnz")),
    "missing component": (43, drop_tensor(Q + ".deltas")),
    "unknown component": (44, rename_tensor("output_norm.weight", Q + ".scales")),
    "component of another type": (44, retype_tensor(Q + ".row_ptr", 24)),
    "bomb": (22, array_with("macko.tensor.ne", 0, 2**24)),
    "row_ptr[0]": (50, row_ptr_with(0, 1)),
    "row_ptr decreases": (50, row_ptr_with(5, -1)),
    "column": (51, lambda f: setattr(f.tensor(Q + ".deltas"), "data", b"\xff" * 4 + f.tensor(Q + ".deltas").data[4:])),
    "infinity": (53, values_with(0, 0x7C00)),
    "stored zero": (52, values_with(0, 0)),
    "nnz": (54, lambda f: f.key("macko.tensor.nnz").value.__setitem__(0, f.key("macko.tensor.nnz").value[0] - 1)),
    "block_count 0": (26, set_key("llama.block_count", gb.U32, 0)),
    "block_count 513": (26, set_key("llama.block_count", gb.U32, 513)),
    "expert_count 2^31": (26, set_key("llama.expert_count", gb.U32, 2**31)),
    "nextn_predict_layers": (26, set_key("llama.nextn_predict_layers", gb.U32, 3)),
    "rope.scaling.type": (26, set_key("llama.rope.scaling.type", gb.STRING, b"bogus")),
    "split.no of the wrong type": (25, set_key("split.no", gb.U32, 1)),
    "epsilon NaN": (26, set_key("llama.attention.layer_norm_rms_epsilon", gb.F32, NAN)),
    "freq_base 0": (26, set_key("llama.rope.freq_base", gb.F32, 0.0)),
    "split": (35, set_key("split.count", gb.U16, 2)),
    "architecture": (27, set_key("general.architecture", gb.STRING, b"mamba")),
    "token twice": (26, array_with("tokenizer.ggml.tokens", 261, b"a")),
    "byte token": (26, array_with("tokenizer.ggml.tokens", 10, b"<0x-1>")),
    "F16 norm": (31, retype_tensor("output_norm.weight", 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_broken_file_is_refused_with_its_code(name, base, tmp_path):
    expected, change = CASES[name]
    change(base)
    path = tmp_path / "broken.gguf"
    path.write_bytes(gb.write(base))
    assert check(path) == expected
    assert load(path) == expected


@pytest.mark.parametrize("n", [0, 3, 4, 20, 100, 4000, -33])
def test_truncated_file_is_refused(n, sparse_path, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(sparse_path.read_bytes()[:n])
    assert check(path) == 12


def test_trailing_data_is_refused(sparse_path, tmp_path):
    path = tmp_path / "long.gguf"
    path.write_bytes(sparse_path.read_bytes() + b"PK\5\6")
    assert check(path) == 34


@pytest.mark.parametrize("change", [lambda b: b + bytes(4096), lambda b: b[:4] + b"\2" + b[5:]], ids=["tail", "v2"])
def test_dense_file_that_llama_cpp_reads_is_read(change, sparse_path, tmp_path, macko):
    """A dense file may have data after the last tensor, or version 2, which equals version 3; a sparse file may not."""
    dense, sparse = tmp_path / "dense.gguf", tmp_path / "sparse.gguf"
    dense.write_bytes(change(generators.DEMO.read_bytes()))
    done = macko("convert", dense, sparse)
    assert done.code == 0, done.err
    assert macko("verify", sparse, generators.DEMO).code == 0
    sparse.write_bytes(change(sparse_path.read_bytes()))
    assert check(sparse) in (21, 34)


def test_names_are_escaped_in_messages(base, tmp_path):
    base.set("general.architecture", gb.STRING, b"\x1b[2J\nERROR: all good")
    path = tmp_path / "escape.gguf"
    path.write_bytes(gb.write(base))
    with pytest.raises(errors.FileFormatError) as e:
        File(path, require_model=True)
    assert "\x1b" not in str(e.value) and "\n" not in str(e.value) and "\\x1b[2J\\x0aERROR" in str(e.value)


EVIL = "\x1b[2J\x07\x9b1m\u202ename"


def test_names_of_files_reach_the_terminal_escaped(base, tmp_path, macko_process):
    """Messages of C++ and Python, the log and the results contain escaped names."""
    folder = tmp_path / EVIL
    folder.mkdir()
    base.set("general.name", gb.STRING, EVIL.encode())
    base.set("tokenizer.chat_template", gb.STRING, EVIL.encode())
    good, bad, text = folder / "good.gguf", folder / "bad.gguf", folder / "text.txt"
    good.write_bytes(gb.write(base))
    bad.write_bytes(b"GGUF" + bytes(20))
    text.write_text("short")
    compressed = {**os.environ, "GGML_MACKO_LOAD": "compress"}
    for arguments in (
        ("inspect", good),
        ("inspect", bad),
        ("inspect", folder / "missing"),
        ("generate", "-m", bad, "-p", "a"),
        ("convert", good, good),
        ("convert", bad, folder / "out"),
        ("perplexity", "-m", good, "-f", text),
        ("verify", good, bad),
    ):
        done = macko_process(*arguments, env=compressed)
        for c in "\x1b\x07\x9b\u202e":
            assert c not in done.out + done.err, (arguments, done)


def test_type_table_is_that_of_ggml(tmp_path):
    """The library has the block sizes of exactly the types of the installed ggml."""
    import llama_cpp  # noqa: F401  loads libggml-base

    if library.running_ggml() != library.ggml_range()[1]:
        pytest.skip("the table is that of the newest ggml of the range; an older one has fewer types")
    ggml = ctypes.CDLL("libggml-base.so.0")
    ggml.ggml_blck_size.restype = ctypes.c_int64
    ggml.ggml_type_size.restype = ctypes.c_size_t
    n_types = 0
    while ggml.ggml_blck_size(n_types) > 0 or any(
        ggml.ggml_blck_size(n_types + i) > 0 for i in range(1, 4) if n_types + i < 43
    ):
        block, nbytes = ggml.ggml_blck_size(n_types), ggml.ggml_type_size(n_types)
        path = tmp_path / "type.gguf"
        path.write_bytes(
            gb.write(gb.GGUF(tensors=[gb.Tensor(b"t", [max(block, 1), 3], n_types, bytes(3 * nbytes or 32))]))
        )
        if block > 0:
            with File(path) as file:
                assert file.tensors()[0].nbytes == 3 * nbytes, n_types
        else:
            with pytest.raises(errors.FileFormatError) as e:
                File(path)
            assert e.value.code == 31
        n_types += 1
        if n_types == 43:
            break
    assert n_types == 43


# ---- the file system ----


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path, code in ((tmp_path, 11), (tmp_path / "fifo", 11), ("/dev/zero", 11), (tmp_path / "nonesuch", 10)):
        signal.alarm(30)
        with pytest.raises(errors.FileAccessError) as e:
            File(path)
        signal.alarm(0)
        assert e.value.code == code


def test_unreadable_file_is_refused(sparse_path, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root can read everything")
    path = tmp_path / "secret.gguf"
    path.write_bytes(sparse_path.read_bytes())
    path.chmod(0)
    with pytest.raises(errors.FileAccessError, match="Permission denied") as e:
        File(path)
    assert e.value.code == 10


def test_symlink_to_a_file_is_read(sparse_path, tmp_path):
    (tmp_path / "link.gguf").symlink_to(sparse_path)
    assert check(tmp_path / "link.gguf") == 0
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    with pytest.raises(errors.FileAccessError):
        File(tmp_path / "loop.gguf")


DURING_LOAD = """
import os, sys
import ggml_macko, llama_cpp.llama_cpp as api
from ggml_macko import errors
from support.llama_functions import as_c
ggml_macko.register()
path, action = sys.argv[1], sys.argv[2]
real = api.llama_model_load_from_file_ptr
def change_and_load(stream, params):
    if action == "truncate":
        os.truncate(path, os.path.getsize(path) // 3)
    elif action == "replace":
        os.rename(path + ".other", path)
    elif action == "touch":
        os.utime(path, ns=(1, 1))
    elif action == "remove":
        os.remove(path)
    return real(stream, params)
api.llama_model_load_from_file_ptr = as_c(change_and_load)
try:
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    print("loaded" if model else "nothing")
    api.llama_model_free(model)
except errors.MackoError as e:
    print(e.code)
"""


ENDS = [
    ("none", ["loaded"]),
    ("truncate", ["12", "13"]),
    ("replace", ["loaded"]),
    ("touch", ["13"]),
    ("remove", ["loaded"]),
]


@pytest.mark.parametrize("action, answers", ENDS)
def test_file_that_changes_while_it_loads_is_refused(action, answers, sparse_path, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(sparse_path.read_bytes())
    (tmp_path / "model.gguf.other").write_bytes(struct.pack("<I", 0) * 1000)
    done = subprocess.run(
        [sys.executable, "-c", DURING_LOAD, str(path), action],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] in answers, done.stderr[-1000:]
