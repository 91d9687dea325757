"""macko convert, restore, verify, inspect: no data are lost, figures are true, and every error is one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import time

import gguf
import numpy as np
import pytest

import ggml_macko
from ggml_macko.codecs import macko as macko_codec
from ggml_macko.conversion import tensor_plan
from ggml_macko.gguf.files import Model
from ggml_macko.native.file import File
from ggml_macko.values import TYPE_BF16, TYPE_F16, TYPE_F32, bits_dtype
from reference import macko as macko_reference
from support import generators

SPARSE = {  # of tiny; attn_output has too few zeros
    "blk.0.attn_q.weight",
    "blk.0.attn_k.weight",
    "blk.0.attn_v.weight",
    "blk.0.ffn_up_exps.weight",
    "blk.0.ffn_down_exps.weight",
    "output.weight",
}


def sparse_names(path):
    with File(path) as f:
        return {s.name for s in f.sparse()}


@pytest.mark.parametrize("kind", ["macko", "macko-d1", "macko-d2", "macko-d4", "macko-d8", "MACKO-D4"])
def test_round_trip_keeps_every_bit(tmp_path, tiny, macko, kind):
    sparse, dense = tmp_path / "s.gguf", tmp_path / "d.gguf"
    done = macko("convert", tiny, sparse, kind, "--keep-negative-zeros")
    assert done.code == 0, done.err
    assert sparse_names(sparse) <= SPARSE and sparse_names(sparse)
    assert macko("restore", sparse, dense).code == 0
    assert dense.read_bytes() == tiny.read_bytes()
    assert macko("verify", tiny, sparse).code == 0
    assert macko("verify", sparse, dense).code == 0


def test_file_is_what_the_specification_says(tmp_path, tiny, macko):
    """gguf-py reads the file and the NumPy reference decodes it, without the C library."""
    sparse = tmp_path / "s.gguf"
    assert macko("convert", tiny, sparse, "macko", "--keep-negative-zeros").code == 0
    reader = gguf.GGUFReader(sparse)
    keys = {name: field.contents() for name, field in reader.fields.items() if name.startswith("macko.")}
    assert keys["macko.version"] == 1
    names = keys["macko.tensor.name"]
    assert set(names) == SPARSE and set(keys["macko.tensor.format"]) == {"macko"}
    dense = generators.dense_bytes(tiny)
    parts = {t.name: t for t in reader.tensors}
    order = [t.name for t in reader.tensors]
    assert [
        re.sub(r"\.(values|deltas|row_ptr)$", "", n) for n in order if not n.endswith((".deltas", ".row_ptr"))
    ] == list(dense)
    for i, name in enumerate(names):
        at = order.index(name + ".values")
        assert order[at : at + 3] == [f"{name}.{c}" for c in ("values", "deltas", "row_ptr")]
        type_id, ne = keys["macko.tensor.type"][i], keys["macko.tensor.ne"][4 * i : 4 * i + 4]
        assert ne == (dense[name][1] + [1, 1, 1])[:4]
        values, deltas, row_ptr = (parts[f"{name}.{c}"].data for c in ("values", "deltas", "row_ptr"))
        rows = int(np.prod(ne[1:]))
        m = macko_reference.MackoMatrix(
            rows, ne[0], type_id, keys["macko.tensor.index_bits"][i], keys["macko.tensor.nnz"][i], int(row_ptr[-1]),
            np.ascontiguousarray(values).reshape(-1).view(bits_dtype(type_id)),
            np.ascontiguousarray(deltas).view(np.uint8), np.ascontiguousarray(row_ptr),
        )  # fmt: skip
        assert macko_reference.decode(m).tobytes() == dense[name][2], name


@pytest.mark.parametrize("kind", ["macko", "auto"])
def test_converting_a_sparse_file_again_gives_the_same_file(tmp_path, tiny, macko, kind):
    first, second, other, back = (tmp_path / f"{i}.gguf" for i in range(4))
    assert macko("convert", tiny, first, kind).code == 0
    assert macko("convert", first, second, kind).code == 0
    assert second.read_bytes() == first.read_bytes()
    assert macko("convert", first, other, "macko-d8").code == 0
    assert macko("convert", other, back, kind).code == 0
    assert back.read_bytes() == first.read_bytes()


def test_without_a_type_each_tensor_has_its_smallest_lossless_one(tmp_path, macko):
    """One tensor for each of the three types, and one whose rows share zeros, for which EC-CSR would be smaller."""
    rng = np.random.default_rng(8)
    normal = np.where(rng.random((64, 512)) < 0.5, rng.standard_normal((64, 512)), 0).astype(np.float32)
    regular = np.where(np.arange(512) % 2, rng.standard_normal((64, 512)), 0).astype(np.float32)
    alike = np.where(rng.random(8192) < 0.3, rng.standard_normal((16, 8192)), 0).astype(np.float32)
    tensors = {
        "blk.0.attn_q.weight": (normal.astype(np.float16).view(np.uint16), TYPE_F16),
        "blk.0.attn_k.weight": (normal.view(np.uint32), TYPE_F32),
        "blk.0.attn_v.weight": (regular.view(np.uint32), TYPE_F32),
        "blk.0.ffn_up.weight": (alike.view(np.uint32), TYPE_F32),
    }
    dense = generators.write_gguf(tmp_path / "dense.gguf", tensors)
    path = tmp_path / "sparse.gguf"
    done = macko("convert", dense, path)
    assert done.code == 0 and "looking for blocks" not in done.err
    assert macko("verify", dense, path).out.startswith("identical")
    found = {t["name"]: t for t in json.loads(macko("inspect", path, "--json").out)["tensors"]}
    assert [found[name]["storage"] for name in tensors] == [
        "sparse-lossless-bitmap", "packed-bitmap", "macko-d1", "packed-gaps2"
    ]  # fmt: skip
    nbytes = {}
    for kind in ("macko", "packed", "sparse-lossless", "ec-csr"):
        for t in ggml_macko.convert(dense, None, kind).tensors:
            nbytes[t.name, kind] = t.nbytes
    for name in tensors:
        assert found[name]["nbytes"] <= min(nbytes[name, kind] for kind in ("macko", "packed", "sparse-lossless"))
    assert nbytes["blk.0.ffn_up.weight", "ec-csr"] < nbytes["blk.0.ffn_up.weight", "packed"]
    assert ggml_macko.convert(dense, tmp_path / "named.gguf", "auto").nbytes == path.stat().st_size
    assert (tmp_path / "named.gguf").read_bytes() == path.read_bytes()


def test_odd_metadata_is_kept(tmp_path, macko):
    """Empty arrays, NaN, and strings that are not UTF-8 are copied as bytes."""
    path = generators.write_gguf(tmp_path / "t.gguf", generators.tiny_tensors())

    def key(name, kind, value):
        return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value

    odd = (
        key(b"test.empty", 9, struct.pack("<IQ", 4, 0))
        + key(b"test.nan", 6, b"\x01\x00\xa0\x7f")
        + key(b"test.latin", 8, struct.pack("<Q", 2) + b"\xe9\x00")
        + key(b"test.strings", 9, struct.pack("<IQ", 8, 2) + struct.pack("<Q", 0) + struct.pack("<Q", 1) + b"x")
    )
    data = path.read_bytes()
    generators._insert_key(path, data, odd)
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack("<Q", struct.unpack("<Q", data[16:24])[0] + 3)  # _insert_key counted one of them
    path.write_bytes(data)
    sparse, dense = tmp_path / "s.gguf", tmp_path / "d.gguf"
    done = macko("convert", path, sparse, "--keep-negative-zeros")
    assert done.code == 0, done.err
    assert odd in sparse.read_bytes()
    assert macko("restore", sparse, dense).code == 0 and dense.read_bytes() == path.read_bytes()


def test_alignment_is_kept(tmp_path, macko):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_custom_alignment(256)
    for name, (bits, type_id) in generators.tiny_tensors().items():
        writer.add_tensor(name, bits, raw_shape=bits.shape, raw_dtype=generators.QUANTIZATION[type_id])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert macko("convert", tmp_path / "a.gguf", tmp_path / "s.gguf", "--keep-negative-zeros").code == 0
    with File(tmp_path / "s.gguf") as f:
        assert f.alignment == 256 and all(t.offset % 256 == 0 for t in f.tensors())
    assert macko("restore", tmp_path / "s.gguf", tmp_path / "d.gguf").code == 0
    assert (tmp_path / "d.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_what_stays_dense_is_named_with_its_reason(tmp_path, macko):
    rng = np.random.default_rng(0)
    nan = generators.random_bits(rng, 8, 64, 0.3)
    nan[1, 2] = 0x7C00
    long_name = "blk.0.attn_" + "x" * 42 + ".weight"  # 60 bytes; + ".row_ptr" is more than 63
    q8 = gguf.quants.quantize(np.ones((8, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    tensors = {
        "token_embd.weight": (generators.random_bits(rng, 8, 64, 0.95), TYPE_F16),
        "blk.0.ffn_gate_inp.weight": (generators.random_bits(rng, 8, 64, 0.1), TYPE_F16),
        "blk.0.attn_q.weight": (nan, TYPE_F16),
        "blk.0.attn_k.weight": (generators.random_bits(rng, 8, 64, 0.97), TYPE_F16),
        "blk.0.attn_v.weight": (q8, 8),
        long_name: (generators.random_bits(rng, 8, 64, 0.1), TYPE_F16),
        "blk.0.attn_output.weight": (generators.random_bits(rng, 8, 64, 0.1), TYPE_F16),
    }
    path = generators.write_gguf(tmp_path / "t.gguf", tensors)
    done = macko("convert", path, tmp_path / "s.gguf", "--tensor-type", "token_embd|_inp|attn_output=macko")
    assert done.code == 0, done.err
    assert sparse_names(tmp_path / "s.gguf") == {"blk.0.attn_output.weight"}
    lines = {
        line.split()[2]: line for line in re.sub(r"\[ *\d+/ *\d+\]", "x x", done.err).splitlines() if " - [" in line
    }
    for name, reason in {
        "token_embd.weight": "it is not pruned",
        "blk.0.ffn_gate_inp.weight": "llama.cpp does not only multiply with it",
        "blk.0.attn_q.weight": "1 values are not finite",
        "blk.0.attn_k.weight": "would not shrink: density 0.9",
        "blk.0.attn_v.weight": "q8_0 values",
        long_name: "its name is longer than 55 bytes",
    }.items():
        assert f"stays dense: {reason}" in lines[name]
    assert "stays dense" not in lines["blk.0.attn_output.weight"]
    assert "warning: 6 of 7 tensor(s) stay dense" in done.err
    assert "\nwarning: 1 tensor(s) with values that are not finite: blk.0.attn_q.weight\n" in done.err


@pytest.mark.parametrize("change", ["content", "name"])
def test_source_that_changes_in_place_is_refused_even_with_the_old_times(tmp_path, macko, monkeypatch, change):
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    shutil.copy(generators.DEMO, source)
    (tmp_path / "other").touch()
    before, check = source.stat(), Model.check_unchanged
    time.sleep(0.05)  # longer than the resolution of ctime

    def late(self):
        if change == "content":
            with source.open("r+b") as f:
                f.seek(-1, os.SEEK_END)
                f.write(b"\1")
            os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
        else:
            os.replace(tmp_path / "other", source)  # the open file is unchanged
        check(self)

    monkeypatch.setattr(Model, "check_unchanged", late)
    done = macko("convert", source, out)
    assert done.code == (change == "content") and ("source.gguf: changed while it was read" in done.err) == done.code
    assert out.exists() == (change == "name")


def test_model_that_does_not_shrink_stays_dense(tmp_path, macko):
    path = generators.write_gguf(tmp_path / "t.gguf", generators.tiny_tensors(density=1.0))
    done = macko("convert", path, tmp_path / "out.gguf")
    assert done.code == 0 and "no tensor would shrink" in done.err
    assert (tmp_path / "out.gguf").read_bytes() == path.read_bytes()
    assert macko("restore", tmp_path / "out.gguf", tmp_path / "d.gguf").code == 0


def test_first_matching_override_wins(tmp_path, tiny, macko):
    done = macko(
        "convert", tiny, tmp_path / "s.gguf", "macko-d8", "--tensor-type", "attn_q=macko-d1",
        "--tensor-type", r"blk\.\d+\.attn=dense", "--tensor-type", "attn_k=macko-d2",
    )  # fmt: skip
    assert done.code == 0, done.err
    with File(tmp_path / "s.gguf") as f:
        assert {s.name: s.index_bits for s in f.sparse()} == {
            "blk.0.attn_q.weight": 1,
            "blk.0.ffn_up_exps.weight": 8,
            "blk.0.ffn_down_exps.weight": 8,
            "output.weight": 8,
        }


@pytest.mark.parametrize(
    "args, message",
    [
        (["macko-d3"], "unknown type 'macko-d3'; did you mean macko-d8?; known: macko, macko-d1"),
        (["q4"], "unknown type 'q4'; did you mean sparse-q4?"),
        (["Q4_K_M"], "unknown type 'Q4_K_M' (a dense type, of llama-quantize)"),
        (["sparse-q5_k"], "unknown type 'sparse-q5_k'; did you mean sparse-q5?"),
        (["dense"], "unknown type 'dense'; known"),
        (["macko", "--tensor-type", "attn"], "expected REGEX=TYPE"),
        (["macko", "--tensor-type", "attn=q8_0"], "unknown type"),
        (["macko", "--tensor-type", "(=macko"], "--tensor-type (=macko:"),
        (["macko", "two"], "'two' is not an integer from -1 to 512"),
        (["macko", "--dry"], "--dry"),  # not abbreviations
    ],
)
def test_bad_argument_is_one_line_and_no_file(tmp_path, tiny, macko, args, message):
    done = macko("convert", tiny, tmp_path / "s.gguf", *args)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.gguf"]


@pytest.mark.parametrize("kind", ["macko", "auto"])
def test_dry_run_prints_what_the_real_run_does(tmp_path, tiny, macko, kind):
    named = [] if kind == "auto" else [kind]
    real = macko("convert", tiny, tmp_path / "s.gguf", *named)
    files = sorted(tmp_path.iterdir())
    for args in (named, [tmp_path / "x.gguf", *named], [kind]):
        dry = macko("convert", tiny, *args, "--dry-run")
        assert dry.code == 0 and sorted(tmp_path.iterdir()) == files
        assert [line for line in dry.out.splitlines() if " size " in line and "=" in line] == real.out.splitlines()
    n = sum(int(np.prod(t.shape)) for t in gguf.GGUFReader(tiny).tensors)
    size = (tmp_path / "s.gguf").stat().st_size
    assert f"sparse size = {size / 2**20:8.2f} MiB ({size * 8 / n:.2f} BPW)" in real.out
    with Model(tiny) as model:
        plans = tensor_plan.plan_model(model, tensor_plan.Options(kind), tensor_plan.Spool(None))
        assert tensor_plan.output_nbytes(model, plans) == size
    real_types = dict(re.findall(r"(\S+) +- \[.*converting to (\S+) ", real.err))
    header, *rows = (re.split(r" *\| *", line)[1:-1] for line in dry.out.splitlines() if line.startswith("|"))
    planned = {row[0]: dict(zip(header, row)) for row in rows}
    assert set(real_types) == SPARSE
    for name, stored in real_types.items():
        row = planned[name]
        assert row["new type"] == stored
        cols, bits = int(row["shape"].split("x")[0]), 32 if row["type"] == "f32" else 16
        bitmap = (bits - 1 - 32 / cols) / bits
        even = macko_codec.break_even_density(cols, int(stored[-1]), bits) if kind == "macko" else bitmap
        assert float(row["break-even density"]) == pytest.approx(even, abs=1e-4)


# ---- errors that all writers share ----


@pytest.mark.parametrize("command", [["convert"], ["restore"], ["prune", "--sparsity", "0.5"]])
def test_output_that_exists_or_is_the_input_is_refused(tmp_path, tiny, macko, command):
    before = tiny.read_bytes()
    same, link, hard, other = (
        tmp_path / "tiny.gguf",
        tmp_path / "link.gguf",
        tmp_path / "hard.gguf",
        tmp_path / "other.gguf",
    )
    link.symlink_to(tiny)
    os.link(tiny, hard)
    other.write_bytes(b"precious")
    for out in (same, link, hard):
        done = macko(*command, tiny, out, "--force")
        assert done.code == 1 and "input and output files are the same" in done.err
    done = macko(*command, tiny, other)
    assert done.code == 1 and "use --force" in done.err and other.read_bytes() == b"precious"
    done = macko(*command, tiny, tmp_path, "--force")
    assert done.code == 1 and "not a regular file" in done.err
    done = macko(*command, tiny, tmp_path / "no" / "such" / "folder.gguf")
    assert done.code == 1 and f"there is no folder {tmp_path / 'no' / 'such'}\n" in done.err
    assert tiny.read_bytes() == before
    assert macko(*command, tiny, other, "--force").code == 0 and other.read_bytes()[:4] == b"GGUF"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("command", ["convert", "restore", "prune", "verify", "inspect"])
def test_bad_input_is_one_line(tmp_path, tiny, macko, command):
    def run(path):
        more = {
            "convert": ["o.gguf"],
            "restore": ["o.gguf"],
            "prune": ["o.gguf", "--sparsity", "0.5"],
            "verify": [tiny],
        }
        return macko(command, path, *(tmp_path / a if a == "o.gguf" else a for a in more.get(command, [])))

    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(tiny.read_bytes()[:-100])
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    for path in (truncated, text, tmp_path / "missing.gguf", tmp_path):
        done = run(path)
        assert done.code == 1, path
        assert done.err.startswith("error: ") and len(done.err.strip().splitlines()) == 1, done.err
        assert path.name in done.err
    assert not (tmp_path / "o.gguf").exists() and not list(tmp_path.glob(".*"))


# ---- split models ----


def halves() -> list:
    tensors = list(generators.tiny_tensors().items())
    return [dict(tensors[:4]), dict(tensors[4:6]), dict(tensors[6:])]


def test_split_model_is_read_whole(tmp_path, macko):
    paths = generators.write_split(tmp_path, halves())
    whole = generators.write_gguf(tmp_path / "whole.gguf", generators.tiny_tensors())
    assert macko("convert", paths[0], tmp_path / "s.gguf").code == 0
    assert macko("verify", whole, tmp_path / "s.gguf").code == 0
    assert macko("verify", paths[0], tmp_path / "s.gguf").code == 0
    assert macko("restore", paths[0], tmp_path / "merged.gguf").code == 0
    assert generators.dense_bytes(tmp_path / "merged.gguf") == generators.dense_bytes(whole)
    assert not any(name.startswith("split.") for name in gguf.GGUFReader(tmp_path / "s.gguf").fields)
    assert macko("prune", paths[0], tmp_path / "p.gguf", "--sparsity", "0.5").code == 0
    report = json.loads(macko("inspect", paths[0], "--json").out)
    assert report["n_tensors"] == 10 and report["nbytes"] == sum(p.stat().st_size for p in paths)


def test_split_model_with_wrong_parts_is_refused(tmp_path, macko):
    def refused(path, message):
        done = macko("convert", path, tmp_path / "s.gguf")
        assert done.code == 1 and message in done.err, done.err
        assert not (tmp_path / "s.gguf").exists()

    paths = generators.write_split(tmp_path, halves())
    refused(paths[1], "is not the first shard")
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(paths[0].read_bytes())
    refused(renamed, "not named NAME-00001-of-0000N.gguf")
    third = paths[2].read_bytes()
    paths[2].write_bytes(paths[1].read_bytes())
    refused(paths[0], "is not shard 3 of 3")
    paths[2].unlink()
    refused(paths[0], paths[2].name)
    paths[2].write_bytes(third)
    parts = halves()
    parts[1].update(dict([next(iter(parts[0].items()))]))
    for new in generators.write_split(tmp_path, parts, "double"):
        assert new.exists()
    refused(tmp_path / "double-00001-of-00003.gguf", "a tensor is in two shards")
    for p, n in zip(generators.write_split(tmp_path, halves(), "few"), range(3)):
        if n == 0:
            data = p.read_bytes()
            at = data.index(b"split.tensors.count") + len("split.tensors.count") + 4
            p.write_bytes(data[:at] + (11).to_bytes(4, "little") + data[at + 4 :])
    refused(tmp_path / "few-00001-of-00003.gguf", "the shards hold 10 tensors, not 11")


# ---- verify ----


def test_first_difference_is_named(tmp_path, macko):
    def write(name, tensors, keys=None):
        return generators.write_gguf(tmp_path / name, tensors, keys)

    base = generators.tiny_tensors()
    a = write("a.gguf", base)
    sparse = tmp_path / "s.gguf"
    assert macko("convert", a, sparse).code == 0

    def differs(tensors, line, keys=None):
        b = write("b.gguf", tensors, keys)
        for x in (a, sparse):
            done = macko("verify", x, b)
            assert done.code == 1 and re.search(line, done.out), done.out

    for name, type_id, row, col in (
        ("blk.0.attn_v.weight", TYPE_F32, 7, 63),
        ("blk.0.ffn_up_exps.weight", TYPE_F16, 150, 0),
        ("token_embd.weight", TYPE_F16, 49, 63),
    ):
        bits = base[name][0].copy()
        flat = bits.reshape(-1, bits.shape[-1])
        old = int(flat[row, col])
        flat[row, col] ^= 1
        digits = 8 if type_id == TYPE_F32 else 4
        differs(
            {**base, name: (bits, type_id)},
            f"{re.escape(name)}: first difference at row {row}, column {col}: "
            f"0x{old:0{digits}x} against 0x{old ^ 1:0{digits}x}",
        )
    q = base["blk.0.attn_q.weight"][0]
    differs(
        {**base, "blk.0.attn_q.weight": (q[:63], TYPE_F16)},
        r"attn_q\.weight: type 1 \[64, 64\] against type 1 \[64, 63\]",
    )
    differs({**base, "blk.0.attn_q.weight": (q, TYPE_BF16)}, "type 1 .* against type 30")
    differs({k: v for k, v in base.items() if k != "output.weight"}, r"output\.weight: only in .*[as]\.gguf")
    differs({**base, "extra.weight": base["output.weight"]}, r"extra\.weight: only in .*b\.gguf")
    differs(base, "metadata test.more: only in .*b.gguf", {"test.more": "x"})
    shuffled = write("c.gguf", dict(reversed(list(base.items()))))
    assert macko("verify", sparse, shuffled).code == 0
    b = write("b.gguf", base, {"test.more": "x"})
    assert macko("verify", a, b, "--no-metadata").code == 0


# ---- inspect ----


def test_inspect_prints_true_numbers(tmp_path, tiny, macko):
    sparse = tmp_path / "s.gguf"
    assert macko("convert", tiny, sparse, "macko", "--keep-negative-zeros").code == 0
    done = macko("inspect", sparse, "--json")
    report = json.loads(done.out)
    assert (
        done.err == ""
        and report["sparse"]
        and report["nbytes"] == sparse.stat().st_size
        and report["n_sparse"] == len(SPARSE)
    )
    dense = generators.dense_bytes(tiny)
    parts = {t.name: t for t in gguf.GGUFReader(sparse).tensors}
    for t in report["tensors"]:
        type_id, shape, data = dense[t["name"]]
        bits = np.frombuffer(data, bits_dtype(type_id))
        assert (
            t["shape"] == shape
            and t["density"] == np.count_nonzero(bits) / bits.size
            and t["nbytes_dense"] == len(data)
        )
        if t["name"] in SPARSE:
            components = [parts[f"{t['name']}.{c}"] for c in ("values", "deltas", "row_ptr")]
            assert t["nbytes"] == sum(int(c.n_bytes) for c in components)
            n_stored = int(components[2].data[-1])
            assert t["padding"] == (n_stored - np.count_nonzero(bits)) / n_stored
            assert t["storage"].startswith("macko-d")
        else:
            assert t["nbytes"] == len(data) and t["storage"] == "dense" and t["padding"] is None
        assert t["effective_density"] == t["nbytes"] / len(data)
        assert t["bits_per_weight"] == t["nbytes"] * 8 / bits.size
    table = macko("inspect", sparse).out
    for name in dense:
        assert name in table
    assert "6 stored sparse" in table and f"{sparse.stat().st_size / 2**20:.2f} MiB" in table
    assert json.loads(macko("inspect", tiny, "--json").out)["sparse"] is False


def test_inspect_takes_a_quantized_tensor(tmp_path, macko):
    q8 = gguf.quants.quantize(np.ones((8, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    path = generators.write_gguf(tmp_path / "q.gguf", {"blk.0.attn_q.weight": (q8, 8)})
    (t,) = json.loads(macko("inspect", path, "--json").out)["tensors"]
    assert t["type"] == "q8_0" and t["density"] is None and t["bits_per_weight"] == 8.5
    assert macko("inspect", path, "--plot", tmp_path / "p.png").code == 1


def test_plot_is_a_picture(tmp_path, macko):
    pytest.importorskip("matplotlib", reason="matplotlib is optional")
    picture = tmp_path / "density.png"
    done = macko("inspect", generators.DEMO, "--plot", picture)
    assert done.code == 0, done.err
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 5000


def test_plot_without_matplotlib_is_one_line(tmp_path, macko, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    done = macko("inspect", generators.DEMO, "--plot", tmp_path / "p.png")
    assert done.code == 1 and "pip install 'ggml-macko[plot]'" in done.err


# ---- real models ----


def test_real_model_survives_the_round_trip(tmp_path, macko):
    sparse, dense = tmp_path / "s.gguf", tmp_path / "d.gguf"
    assert macko("convert", generators.DEMO, sparse, "--keep-negative-zeros").code == 0
    assert macko("restore", sparse, dense).code == 0
    assert dense.read_bytes() == generators.DEMO.read_bytes()


@pytest.mark.parametrize("name", ["docs-4m-f16", "docs-23m-f16", "docs-23m-s70-f16"])
def test_real_models_pruned_and_converted(tmp_path, macko, shared_models, name):
    source = shared_models / f"{name}.gguf"
    for sparsity in ("0", "0.3", "0.5", "0.7", "0.9"):
        pruned, sparse, dense = (tmp_path / f"{kind}.gguf" for kind in "psd")
        assert macko("prune", source, pruned, "--sparsity", sparsity, "--force").code == 0
        assert macko("convert", pruned, sparse, "--force").code == 0
        assert macko("restore", sparse, dense, "--force").code == 0
        assert dense.read_bytes() == pruned.read_bytes()
        weights = [t for t in json.loads(macko("inspect", sparse, "--json").out)["tensors"] if t["storage"] != "dense"]
        if sparsity == "0.5" and "s70" not in name:
            assert sum(t["nbytes"] for t in weights) <= 0.64 * sum(t["nbytes_dense"] for t in weights)
