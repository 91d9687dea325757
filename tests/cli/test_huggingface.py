"""Hugging Face checkpoints: safetensors files, compressed-tensors weights, the converter, the hub.

The references are the safetensors package, in both directions, and a definition of the bitmask bit by bit. No test
uses the network: huggingface_hub is replaced by a fake module.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import types

import numpy as np
import pytest

from ggml_macko import errors, server
from ggml_macko.commands import cli
from ggml_macko.huggingface import bitmask, decompress, hub, tensor_files, to_gguf
from ggml_macko.huggingface.tensor_files import NewTensor, TensorFile
from support import generators, hf_checkpoint

safetensors = pytest.importorskip("safetensors")
from safetensors.numpy import load_file, save_file  # noqa: E402


def unpacked_by_definition(mask: np.ndarray, values: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Bit j % 8 of byte j // 8 of a row is 1 if column j has the next stored value."""
    out, following = np.zeros((rows, cols), values.dtype), iter(values)
    for i in range(rows):
        for j in range(cols):
            if int(mask.reshape(rows, -1)[i, j // 8]) >> (j % 8) & 1:
                out[i, j] = next(following)
    assert next(following, None) is None
    return out


def packed(w: np.ndarray, is_24: bool = False) -> dict[str, np.ndarray]:
    """The tensors of a weight in compressed-tensors: the two largest magnitudes of four, or all non-zeros."""
    mask = w != 0
    if is_24:
        order = np.argsort(-np.abs(w.reshape(-1, 4)), axis=1, kind="stable")
        mask = (np.argsort(order, axis=1) < 2).reshape(w.shape)
    counts = mask.sum(axis=-1)
    shape = np.array(w.shape, np.int64)
    out = {
        "shape": shape.reshape(-1, 1) if is_24 else shape,
        "compressed": w[mask].reshape(len(w), -1) if is_24 else w[mask],
        "bitmask": np.packbits(mask, axis=-1, bitorder="little"),
    }
    return out if is_24 else {**out, "row_offsets": (np.cumsum(counts) - counts).astype(np.int64)}


def sparse(rng, rows, cols, dtype=np.float16, density=0.4):
    w = rng.normal(size=(rows, cols)).astype(dtype)
    w[rng.random(w.shape) >= density] = 0
    return w


INDEX = "model.safetensors.index.json"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def write_checkpoint(folder, tensors, sparsity="sparse-bitmask", n_files=1, **config):
    folder.mkdir()
    quantization = {"quant_method": "compressed-tensors", "sparsity_config": {"format": sparsity}}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization, **config}))
    (folder / "tokenizer.json").write_text("{}")
    names = sorted(tensors)
    files = [f"model-{i + 1:05d}-of-{n_files:05d}.safetensors" for i in range(n_files)]
    weight_map = {name: files[i % n_files] for i, name in enumerate(names)}
    for file in files:
        save_file({n: np.ascontiguousarray(tensors[n]) for n in names if weight_map[n] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def parts_of(weights: dict[str, np.ndarray], is_24: bool = False) -> dict[str, np.ndarray]:
    return {f"{name}.{part}": a for name, w in weights.items() for part, a in packed(w, is_24).items()}


# ---- bitmasks ----


@pytest.mark.parametrize("cols", [1, 7, 8, 9, 64, 100])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_bitmask_is_decoded_as_defined(cols, dtype):
    rng = np.random.default_rng(cols)
    w = rng.integers(0, 2**16, (13, cols)).astype(dtype)  # bit patterns, including NaN and -0.0
    w[rng.random(w.shape) < 0.6] = 0
    p = packed(w)
    name = "F16" if dtype is np.uint16 else "F32"
    found = bitmask.unpack(
        bitmask.Packed("w", w.shape, name, p["bitmask"].reshape(-1), p["compressed"], p["row_offsets"], False)
    )
    assert np.array_equal(found, unpacked_by_definition(p["bitmask"], p["compressed"], *w.shape))
    assert np.array_equal(found, w)


# ---- whole checkpoints ----


@pytest.mark.parametrize("is_24", [False, True])
@pytest.mark.parametrize("n_files", [1, 3])
def test_checkpoint_becomes_what_it_was(tmp_path, macko, is_24, n_files):
    rng = np.random.default_rng(0)
    weights = {
        "model.layers.0.mlp.up_proj": sparse(rng, 24, 20),
        "model.layers.1.mlp.up_proj": sparse(rng, 8, 64, np.float32),
    }
    if is_24:  # the format can store at most two non-zeros of four
        weights = {
            k: np.where(np.arange(w.shape[1]) % 4 < 2, w + np.sign(w) + 1, 0).astype(w.dtype)
            for k, w in weights.items()
        }
    dense = {
        "model.norm.weight": rng.normal(size=20).astype(np.float32),
        "lm_head.weight": sparse(rng, 4, 20, density=1),
    }
    kind = "sparse-24-bitmask" if is_24 else "sparse-bitmask"
    folder = write_checkpoint(tmp_path / "in", {**parts_of(weights, is_24), **dense}, kind, n_files)
    done = macko("decompress", folder, tmp_path / "out")
    assert done.code == 0 and "4 tensors, 2 of them decompressed" in done.out, done.err
    found = load_file(tmp_path / "out" / "model.safetensors")  # the package reads the written file
    expected = {**{f"{k}.weight": w for k, w in weights.items()}, **dense}
    assert set(found) == set(expected)
    for name, w in expected.items():
        assert found[name].dtype == w.dtype and np.array_equal(found[name], w), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == CONFIG and (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_bf16_keeps_every_bit(tmp_path, macko):
    """The safetensors package reads no BF16 data into NumPy, so TensorFile does; the package checks the header."""
    bits = np.array([[0x8000, 0, 0x7FC1, 0x3F80], [0, 0, 0, 0xFF80]], np.uint16)
    p = packed(bits)
    folder = write_checkpoint(tmp_path / "in", {"x": np.zeros(1, np.float32)})
    kinds = {"shape": "I64", "compressed": "BF16", "bitmask": "U8", "row_offsets": "I64"}
    new = [NewTensor(f"w.{part}", kinds[part], p[part].shape) for part in p]
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    tensor_files.write(folder / "model.safetensors", [], new, list(p.values()))
    assert macko("decompress", folder, tmp_path / "out").code == 0
    with TensorFile(tmp_path / "out" / "model.safetensors") as file:
        assert np.array_equal(file.read("w.weight").view(np.uint16).reshape(2, 4), bits)
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        s = file.get_slice("w.weight")
        assert (s.get_dtype(), s.get_shape()) == ("BF16", [2, 4])


def test_large_checkpoint_has_several_files(tmp_path, macko, monkeypatch):
    monkeypatch.setattr(decompress, "SHARD_NBYTES", 1000)
    rng = np.random.default_rng(1)
    weights = {f"layer{i}": sparse(rng, 16, 16) for i in range(4)}
    folder = write_checkpoint(tmp_path / "in", parts_of(weights))
    assert macko("decompress", folder, tmp_path / "out").code == 0
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert len(set(index["weight_map"].values())) == 4 and index["metadata"]["total_size"] == 4 * 512
    for name, file in index["weight_map"].items():
        assert np.array_equal(load_file(tmp_path / "out" / file)[name], weights[name[: -len(".weight")]])


def changed(name, change):
    def apply(tensors):
        tensors[name] = change(tensors[name])

    return apply


def with_bit_behind(mask):
    mask = mask.copy()
    mask[3, -1] |= 0x80
    return mask


def moved_bit(mask):
    """The same number of bits, but one bit is in another row."""
    bits = np.unpackbits(mask, axis=1, bitorder="little")[:, :20]
    i = int(np.argmax(bits[0]))
    k = int(np.argmin(bits[1]))
    bits[0, i], bits[1, k] = 0, 1
    return np.packbits(bits, axis=1, bitorder="little")


LIES = {
    "shape too large": (changed("w.shape", lambda a: a * 2), "does not fit|bytes for"),
    "shape of 2^62": (changed("w.shape", lambda a: a * 0 + 2**62), "does not fit a bitmask"),
    "negative shape": (changed("w.shape", lambda a: -a), "does not fit"),
    "shape of floats": (changed("w.shape", lambda a: a.astype(np.float64)), "expected some I64"),
    "no shape": (lambda t: t.pop("w.shape"), "not w.shape"),
    "no values": (lambda t: t.pop("w.compressed"), "not w.compressed"),
    "a value less": (changed("w.compressed", lambda a: a[1:]), "values for"),
    "integers": (changed("w.compressed", lambda a: a.astype(np.int32)), "I32 values; known: F32, F16, BF16"),
    "short bitmask": (changed("w.bitmask", lambda a: a[1:]), "does not fit|bytes for"),
    "wide bitmask": (changed("w.bitmask", lambda a: a.astype(np.int32)), "expected U8"),
    "bit behind the row": (changed("w.bitmask", with_bit_behind), "row 3: its bitmask has bits behind the last"),
    "bit in another row": (changed("w.bitmask", moved_bit), "row_offsets are not the sums"),
    "wrong offsets": (changed("w.row_offsets", lambda a: a + 1), "row_offsets are not the sums"),
    "short offsets": (changed("w.row_offsets", lambda a: a[1:]), "row_offsets are not the sums"),
    "stored twice": (
        lambda t: t.update({"w.weight": np.zeros((2, 2), np.float16)}),
        "w.weight is stored dense and comp",
    ),
    "nothing compressed": (lambda t: [t.pop(k) for k in list(t) if k.startswith("w.")], "it is dense already"),
}


@pytest.mark.parametrize("lie", LIES)
def test_contradiction_in_a_checkpoint_is_refused(tmp_path, macko, lie):
    apply, message = LIES[lie]
    tensors = {**parts_of({"w": sparse(np.random.default_rng(2), 24, 20)}), "other": np.ones(3, np.float32)}
    apply(tensors)
    done = macko("decompress", write_checkpoint(tmp_path / "in", tensors), tmp_path / "out")
    assert done.code == 1 and done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    assert re.search(message, done.err), done.err
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    "config, message",
    [
        (
            {"quantization_config": {"config_groups": {"g": {}}, "format": "float-quantized"}},
            "quantized (float-quantized)",
        ),
        ({"quantization_config": {"sparsity_config": {"format": "marlin-24"}}}, "sparsity format 'marlin-24'; known: "),
    ],
)
def test_other_compression_is_refused(tmp_path, macko, config, message):
    folder = write_checkpoint(tmp_path / "in", parts_of({"w": sparse(np.random.default_rng(2), 24, 20)}), **config)
    done = macko("decompress", folder, tmp_path / "out")
    assert done.code == 1 and message in done.err


def test_three_of_four_is_not_24(tmp_path, macko):
    w = np.zeros((4, 8), np.float16)
    w[:, :2] = w[:, 4:6] = 1
    w[2] = [1, 1, 1, 0, 1, 0, 0, 0]
    folder = write_checkpoint(tmp_path / "in", parts_of({"w": w}), "sparse-24-bitmask")
    done = macko("decompress", folder, tmp_path / "out")
    assert done.code == 1 and "row 2, columns 0 to 3: 3 values, not 2" in done.err


def test_name_that_is_not_utf8_is_printed_with_escapes(tmp_path):
    write_checkpoint(tmp_path / "in", parts_of({"w": sparse(np.random.default_rng(2), 24, 20)}))
    command = [sys.executable, "-m", "ggml_macko", "decompress", tmp_path / "in", os.fsencode(tmp_path) + b"/caf\xe9"]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and "caf\\udce9: 1 tensors, 1 of them decompressed" in done.stdout, done.stderr


def test_output_folder_that_exists_is_kept(tmp_path, macko):
    folder = write_checkpoint(tmp_path / "in", parts_of({"w": sparse(np.random.default_rng(2), 24, 20)}))
    (tmp_path / "out").mkdir()
    done = macko("decompress", folder, tmp_path / "out")
    assert done.code == 1 and "exists" in done.err and not list((tmp_path / "out").iterdir())


def test_index_that_leads_out_of_the_folder_is_refused(tmp_path, macko):
    folder = write_checkpoint(tmp_path / "in", parts_of({"w": sparse(np.random.default_rng(2), 24, 20)}))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "../secret.safetensors"}}))
    done = macko("decompress", folder, tmp_path / "out")
    assert done.code == 1 and "names '../secret.safetensors', which is not there" in done.err


@pytest.mark.parametrize("command", ["decompress", "convert"])
@pytest.mark.parametrize(
    "name, target", [("tokens.txt", "/proc/self/environ"), ("tokens.txt", "secret"), ("folder", "/etc"), ("more", ".")]
)
def test_link_out_of_a_checkpoint_is_not_followed(tmp_path, macko, monkeypatch, command, name, target):
    """A checkpoint from a tar or git archive may contain links."""
    monkeypatch.setenv("GGML_MACKO_CONVERT_HF", __file__)
    folder = write_checkpoint(tmp_path / "in", parts_of({"w": sparse(np.random.default_rng(2), 24, 20)}))
    (tmp_path / "secret").write_text("s")
    (folder / name).symlink_to(tmp_path / target if target == "secret" else target)
    done = macko(command, folder, tmp_path / "out")
    assert done.code == 1 and f"{folder / name}: is a link to " in done.err, done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "secret"]


def test_links_of_the_cache_of_huggingface_hub_are_followed(tmp_path, macko):
    cache = tmp_path / "models--USER--NAME"
    (cache / "snapshots").mkdir(parents=True)
    folder = write_checkpoint(cache / "snapshots" / "rev", parts_of({"w": sparse(np.random.default_rng(2), 24, 20)}))
    (cache / "blobs").mkdir()
    for path in [*folder.iterdir()]:
        path.rename(cache / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    assert macko("decompress", folder, tmp_path / "out").code == 0
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_symlink()]


def test_output_is_no_more_readable_than_its_source(tmp_path, macko, monkeypatch):
    hf_checkpoint.write(tmp_path / "in")
    for path in [*(tmp_path / "in").iterdir(), tmp_path / "in"]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert macko("decompress", tmp_path / "in", tmp_path / "out").code == 0
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    script = tmp_path / "convert.py"
    script.write_text(hf_checkpoint.AS_PROGRAM)
    monkeypatch.setenv("GGML_MACKO_CONVERT_HF", str(script))
    assert macko("convert", tmp_path / "in", tmp_path / "out.gguf", "macko").code == 0
    for path in [*(tmp_path / "out").iterdir(), tmp_path / "out.gguf"]:
        assert path.stat().st_mode & 0o777 == 0o600, path


# ---- safetensors headers ----


def safetensors_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BAD_HEADERS = {
    "empty file": b"",
    "short": b"\1\2\3",
    "length beyond the file": safetensors_bytes({}, length=1000),
    "length of 2^63": safetensors_bytes({}, length=2**63),
    "no JSON": safetensors_bytes(b"not json"),
    "no UTF-8": safetensors_bytes(b'{"\xff": 1}'),
    "a list": safetensors_bytes(b"[]"),
    "deep": safetensors_bytes(b'{"a":' * 20000),
    "unknown dtype": safetensors_bytes({"a": entry("F31")}, bytes(8)),
    "size that does not fit": safetensors_bytes({"a": entry(shape=(3,))}, bytes(8)),
    "shape that overflows": safetensors_bytes({"a": entry(shape=(2**62, 2**62))}, bytes(8)),
    "negative shape": safetensors_bytes({"a": entry(shape=(-1, -2))}, bytes(8)),
    "offsets backwards": safetensors_bytes({"a": entry(offsets=(8, 0))}, bytes(8)),
    "beyond the end": safetensors_bytes({"a": entry(offsets=(4, 12))}, bytes(8)),
    "gap": safetensors_bytes({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "overlap": safetensors_bytes({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "bytes left over": safetensors_bytes({"a": entry()}, bytes(9)),
    "no offsets": safetensors_bytes({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_safetensors_header_is_refused(tmp_path, macko, name):
    """The safetensors package refuses it, too."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(BAD_HEADERS[name])
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(folder / "model.safetensors", "numpy"):
        pass
    done = macko("decompress", folder, tmp_path / "out")
    assert done.code == 1 and done.err.startswith("error: ") and done.err.count("\n") == 1, done.err
    assert "model.safetensors" in done.err and "Traceback" not in done.err


def test_tensor_that_stands_twice_is_refused(tmp_path):
    """The safetensors package uses the last one."""
    one = json.dumps(entry())
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(f'{{"a":{one},"a":{one}}}'.encode(), bytes(8)))
    with pytest.raises(Exception, match="'a' stands twice"):
        TensorFile(path)


def test_file_of_the_package_is_read(tmp_path):
    rng = np.random.default_rng(3)
    arrays = {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "b": np.array(7, np.int64),
        "c": np.zeros((0, 4), np.float16),
    }
    save_file(arrays, tmp_path / "x.safetensors", {"format": "pt"})
    with TensorFile(tmp_path / "x.safetensors") as file:
        for name, a in arrays.items():
            assert file.tensors[name].shape == a.shape and file.read(name).tobytes() == a.tobytes()


# ---- the converter ----


def test_missing_converter_says_what_to_do(tmp_path, macko, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("GGML_MACKO_CONVERT_HF", raising=False)
    folder = write_checkpoint(tmp_path / "in", {"w": np.zeros(1, np.float32)})
    done = macko("convert", folder, tmp_path / "out.gguf")
    assert done.code == 1 and "convert_hf_to_gguf.py of llama.cpp" in done.err and "GGML_MACKO_CONVERT_HF" in done.err
    monkeypatch.setenv("GGML_MACKO_CONVERT_HF", str(tmp_path / "missing.py"))
    done = macko("convert", folder, tmp_path / "out.gguf")
    assert done.code == 1 and "missing.py: there is no such file" in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_failing_converter_is_one_line(tmp_path, macko, monkeypatch):
    script = tmp_path / "convert.py"
    script.write_text("import sys\nprint('loading')\nsys.exit('NotImplementedError: Architecture X not supported!')\n")
    monkeypatch.setenv("GGML_MACKO_CONVERT_HF", str(script))
    folder = write_checkpoint(tmp_path / "in", {"w": np.zeros(1, np.float32)})
    done = macko("convert", folder, tmp_path / "out.gguf")
    assert done.code == 1 and "convert.py: NotImplementedError: Architecture X not supported!" in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["convert.py", "in"]


def test_mask_of_torch_that_is_not_applied_is_refused(tmp_path, macko, monkeypatch):
    """torch.nn.utils.prune without prune.remove leaves such a checkpoint."""
    monkeypatch.setenv("GGML_MACKO_CONVERT_HF", __file__)
    tensors = {f"l.weight_{kind}": np.ones((4, 4), np.float32) for kind in ("orig", "mask")}
    folder = write_checkpoint(tmp_path / "in", tensors)
    done = macko("convert", folder, tmp_path / "out")
    assert done.code == 1 and "l.weight_mask is not applied to its weights; call torch.nn.utils.prune" in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("command", ["plan", "inspect", "verify", "restore", "prune"])
def test_folder_is_to_be_converted_first(tmp_path, macko, command):
    folder = write_checkpoint(tmp_path / "in", {"w": np.zeros(1, np.float32)})
    more = {"verify": [folder], "restore": ["out"], "prune": ["out", "--sparsity", 0.5]}.get(command, [])
    done = macko(command, folder, *more)
    assert done.code == 1 and "in: is a directory, not a regular file; `macko convert` makes a GGUF" in done.err


def test_converter_runs_under_a_python_that_has_pytorch(tmp_path, macko, monkeypatch):
    """Without such a Python, one line names the Python and the missing packages."""
    script = tmp_path / "convert.py"
    script.write_text("import sys, torch\nsys.exit('runs under ' + torch.__name__)\n")
    folder = write_checkpoint(tmp_path / "in", {"w": np.zeros(1, np.float32)})
    monkeypatch.setenv("GGML_MACKO_CONVERT_HF", str(script))
    python = make_python(tmp_path / "python-without", [])
    make_python(tmp_path / "bin" / "python3", to_gguf.NEEDED)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(python))
    done = macko("convert", folder, tmp_path / "out.gguf")
    assert done.code == 1 and done.err.splitlines()[-1].endswith(
        f"No module named 'torch' ({python} lacks torch, transformers, sentencepiece)"
    ), done.err
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert "convert.py: runs under torch" in macko("convert", folder, tmp_path / "out.gguf").err


def make_python(path, packages):
    """A Python with these packages, which are empty, and no others."""
    path.parent.mkdir(exist_ok=True)
    for name in packages:
        (path.parent / f"{name}.py").write_text("")
    path.write_text(f'#!/bin/sh\nPYTHONPATH={path.parent if packages else ""} exec "{sys.executable}" -S "$@"\n')
    path.chmod(0o755)
    return path


def test_folder_without_a_config_is_refused(tmp_path, macko, monkeypatch):
    monkeypatch.setenv("GGML_MACKO_CONVERT_HF", __file__)
    (tmp_path / "in").mkdir()
    done = macko("convert", tmp_path / "in", tmp_path / "out.gguf")
    assert done.code == 1 and "has no config.json: not a Hugging Face checkpoint" in done.err


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["x.Tokenizer", None]}}),
        ("config.json", {**CONFIG, "auto_map": {"AutoConfig": "USER/OTHER--x.Config"}}),
        ("processor_config.json", {"deep": [{"auto_map": {}}]}),
        ("tokenizer_config.json", '{"auto\\u005fmap": {}}'),
    ],
)
def test_checkpoint_that_names_code_is_refused(tmp_path, macko, monkeypatch, name, content):
    """llama.cpp's converter loads tokenizers with trust_remote_code."""
    script, ran = tmp_path / "convert.py", tmp_path / "ran"
    script.write_text(f"open({str(ran)!r}, 'w')\nimport sys\nsys.exit('the converter ran')\n")
    monkeypatch.setenv("GGML_MACKO_CONVERT_HF", str(script))
    folder = write_checkpoint(tmp_path / "in", {"w": np.zeros(1, np.float32)})
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    done = macko("convert", folder, tmp_path / "out.gguf")
    assert done.code == 1 and f"{name}: has auto_map" in done.err and not ran.exists()
    done = macko("convert", folder, tmp_path / "out.gguf", "--trust-remote-code")
    assert done.code == 1 and "the converter ran" in done.err and ran.exists()


def test_converter_may_not_download(tmp_path, macko, monkeypatch):
    script = tmp_path / "convert.py"
    script.write_text("import os, sys\nsys.exit(os.environ['HF_HUB_OFFLINE'] + os.environ['TRANSFORMERS_OFFLINE'])\n")
    monkeypatch.setenv("GGML_MACKO_CONVERT_HF", str(script))
    folder = write_checkpoint(tmp_path / "in", {"w": np.zeros(1, np.float32)})
    assert "convert.py: 11" in macko("convert", folder, tmp_path / "out.gguf").err


def test_converter_sees_neither_pickles_nor_code(tmp_path, macko, monkeypatch):
    """The converter reads pytorch_model*.bin if no safetensors file begins with "model"."""
    script = tmp_path / "convert.py"
    script.write_text("import os, sys\nsys.exit(str(sorted(os.listdir(sys.argv[1]))))\n")
    monkeypatch.setenv("GGML_MACKO_CONVERT_HF", str(script))
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"w": np.zeros(1, np.float32)}, folder / "x.safetensors")
    names = ("pytorch_model.bin", "a.pt", "a.pth", "consolidated.ckpt", "a.pkl", "code.py", "tokenizer.model")
    for name in (*names, "config.json"):
        (folder / name).write_text("{}")
    done = macko("convert", folder, tmp_path / "out.gguf")
    assert done.code == 1 and f"{folder}: convert.py: ['config.json', 'tokenizer.model', 'x.safetensors']" in done.err
    assert "code.py" in macko("convert", folder, tmp_path / "out.gguf", "--trust-remote-code").err


# ---- the hub ----


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    """huggingface_hub with one repository, USER/NAME, whose files are in the returned folder."""
    folder = tmp_path / "hub"
    folder.mkdir()
    module = types.ModuleType("huggingface_hub")

    def check(repo):
        if repo != "USER/NAME":
            raise OSError(f"404 Client Error: Repository Not Found for {repo}")

    def list_repo_files(repo):
        check(repo)
        return [p.name for p in folder.iterdir()]

    def hf_hub_download(repo, name):
        check(repo)
        return str(folder / name)

    module.list_repo_files, module.hf_hub_download = list_repo_files, hf_hub_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return folder


def add(folder, *names):
    for name in names:
        (folder / name).write_bytes(generators.DEMO.read_bytes() if name.endswith(".gguf") else b"{}")


def test_file_of_a_repository_is_chosen_by_its_name(fake_hub):
    add(fake_hub, "m-Q8_0.gguf", "m-F16.gguf", "README.md")
    assert hub.download("USER/NAME:m-F16.gguf") == fake_hub / "m-F16.gguf"
    assert hub.download("USER/NAME:q8_0") == fake_hub / "m-Q8_0.gguf"


@pytest.mark.parametrize(
    "spec, message",
    [
        ("USER/NAME", "2 files match; there are: m-F16.gguf, m-Q8_0.gguf"),
        ("USER/NAME:Q4", "no file matches"),
        ("USER/NAME:m", "2 files match"),
        ("NAME", "expected USER/NAME"),
        ("USER/NAME/x", "expected USER/NAME"),
        ("USER/OTHER", "404 Client Error"),
    ],
)
def test_unclear_repository_is_one_line(fake_hub, macko, spec, message):
    add(fake_hub, "m-Q8_0.gguf", "m-F16.gguf")
    done = macko("generate", "-hf", spec, "-p", "x")
    assert done.code in (1, 2) and message in done.err and done.err.count("\n") == 1, done.err


def test_all_parts_of_a_split_model_are_downloaded(fake_hub):
    names = [f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    add(fake_hub, *names)
    assert hub.choose("r", sorted(names), "") == names
    assert hub.download("USER/NAME") == fake_hub / names[0]
    with pytest.raises(Exception, match="m-00003-of-00003.gguf is not there"):
        hub.choose("r", names[:2], "")


@pytest.mark.parametrize(
    "names, message",
    [
        (["sub/config.json", "sub/model.safetensors"], "there is no GGUF; there are: sub/config.json"),
        (["config.json", "sub/model.safetensors"], "there is no GGUF"),
        (["m-00001-of-00002.gguf"], "m-00002-of-00002.gguf is not there"),
        ([], "there is no GGUF"),
    ],
)
def test_repository_without_a_model_is_refused(names, message):
    with pytest.raises(errors.MackoError, match=re.escape(message)):
        hub.choose("r", names, "")


def test_file_of_no_parts_is_one_file():
    assert hub.choose("r", ["m-00001-of-00000.gguf"], "") == ["m-00001-of-00000.gguf"]


def test_checkpoint_of_a_repository_is_a_folder(fake_hub):
    add(fake_hub, "config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin")
    assert hub.download("USER/NAME") == fake_hub
    assert "pytorch_model.bin" not in hub.choose("r", sorted(p.name for p in fake_hub.iterdir()), "")


def test_generate_and_convert_take_a_repository(fake_hub, macko, tmp_path):
    add(fake_hub, "m.gguf")
    expected = macko("generate", "-m", generators.DEMO, "-p", "The", "-n", 4, "--temp", 0, "-t", 2)
    done = macko("generate", "-hf", "USER/NAME", "-p", "The", "-n", 4, "--temp", 0, "-t", 2)
    assert done.code == 0 and done.out == expected.out != "The\n", done.err
    done = macko("convert", "-hf", "USER/NAME:m.gguf", tmp_path / "out.gguf", "packed", 2)
    assert done.code == 0, done.err
    assert macko("verify", generators.DEMO, tmp_path / "out.gguf").code == 0
    done = macko("convert", "-hf", "USER/NAME", tmp_path / "out2.gguf")
    assert done.code == 0 and (tmp_path / "out2.gguf").exists()


def test_server_takes_a_repository(fake_hub):
    add(fake_hub, "m.gguf")
    assert server.with_download(["--port", "1", "-hf", "USER/NAME", "--n_ctx", "8"]) == [
        "--port", "1", "--model", str(fake_hub / "m.gguf"), "--n_ctx", "8",
    ]  # fmt: skip
    assert server.with_download(["--model", "x.gguf"]) == ["--model", "x.gguf"]


def test_run_passes_the_file_of_a_repository_on(fake_hub, monkeypatch):
    add(fake_hub, "m.gguf")
    called = []
    monkeypatch.setattr(os, "execvpe", lambda name, arguments, environment: called.append(arguments))
    cli.main(["run", "-hf", "USER/NAME", "--", "llama-cli", "-p", "x"])
    assert called == [["llama-cli", "-p", "x", "-m", str(fake_hub / "m.gguf")]]


def test_missing_huggingface_hub_says_what_to_install(macko, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    done = macko("generate", "-hf", "USER/NAME", "-p", "x")
    assert done.code == 1 and "pip install 'ggml-macko[huggingface]'" in done.err
