"""Sparse files changed by other GGUF tools (split, merged, edited metadata, dumped) load, or give an error of one
line.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ggml_macko import errors
from ggml_macko.gguf.files import shard_paths
from support import generators, llama_logits
from support import gguf_bytes as gb
from support.llama_functions import as_c
from support.llama_logits import logits

open_model = functools.partial(llama_logits.open_model, n_ctx=256, logits_all=True)


def assert_same(a, b, **kwargs):
    first, second = open_model(a, **kwargs), open_model(b)
    tokens = [int(t) for t in np.random.default_rng(3).integers(3, first.n_vocab(), 40)]
    np.testing.assert_array_equal(logits(first, tokens), logits(second, tokens))


@pytest.mark.parametrize("counts", [[94], [1, 92, 1], [0, 50, 44], [4, 40, 50], [31, 31, 32]], ids=str)
def test_split_sparse_model_is_the_same_model(sparse, tmp_path, counts):
    """Includes a matrix with components in two parts, a first part without tensors, and a part with one tensor."""
    assert_same(gb.split(sparse, tmp_path, counts)[0], sparse)


def test_split_dense_model_is_compressed(sparse, tmp_path):
    assert_same(gb.split(generators.DEMO, tmp_path, [10, 10, 18])[0], sparse, compress=True)


REFUSED = {
    "a part is missing": (lambda parts: None, lambda paths: paths[1].unlink(), "00002-of-00003.gguf: No such file"),
    "another model's part": (lambda parts: parts[1].set("split.no", gb.U16, 2), None, "is not shard 2 of 3"),
    "another count": (lambda parts: parts[2].set("split.count", gb.U16, 4), None, "is not shard 3 of 3"),
    "a tensor too few": (
        lambda parts: parts[2].tensors.pop(),
        None,
        "the shards have 93 tensors, but split.tensors.count is 94",
    ),
    "a tensor twice": (
        lambda parts: parts[2].tensors.__setitem__(0, parts[1].tensors[0]),
        None,
        "is in two shards",
    ),
    "metadata in two parts": (
        lambda parts: parts[1].set("macko.version", gb.U32, 1),
        None,
        "belongs in the first shard",
    ),
    "thresholds in another part": (
        lambda parts: parts[2].set("macko.act.version", gb.U32, 1),
        None,
        "has the key macko.act.version, which belongs in the first shard",
    ),
    "parts in another alignment": (
        lambda parts: (parts[1].set("general.alignment", gb.U32, 64), setattr(parts[1], "alignment", 64)),
        None,
        "general.alignment differs from the first shard's",
    ),
    "components out of order": (lambda parts: parts[1].tensors.reverse(), None, "blk."),
    "a part that is cut off": (
        lambda parts: None,
        lambda paths: os.truncate(paths[2], paths[2].stat().st_size - 100),
        "00003-of-00003.gguf: the file ends at",
    ),
    "a part that is no GGUF": (
        lambda parts: None,
        lambda paths: paths[1].write_bytes(b"PK" * 99),
        "00002-of-00003.gguf: not a GGUF file",
    ),
    "a part that is a folder": (
        lambda parts: None,
        lambda paths: (paths[1].unlink(), paths[1].mkdir()),
        "not a regular file",
    ),
    "another name": (
        lambda parts: None,
        lambda paths: paths[0].rename(paths[0].with_name("model.gguf")),
        "give its first shard, NAME-00001-of-00003.gguf",
    ),
    "65535 parts": (lambda parts: [p.set("split.count", gb.U16, 65535) for p in parts], None, "of-65535.gguf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_broken_split_is_refused(name, sparse, tmp_path):
    change, after, text = REFUSED[name]
    paths = gb.split(sparse, tmp_path, [31, 31, 32], change)
    if after:
        after(paths)
    path = next(p for p in (paths[0], tmp_path / "model.gguf") if p.exists())
    with pytest.raises(errors.MackoError) as e:
        open_model(path)
    assert text in str(e.value) and "\n" not in str(e.value)


def test_second_part_alone_is_refused(sparse, tmp_path):
    """It has no macko.* key, so llama.cpp refuses it and requests the first part."""
    with pytest.raises(ValueError, match="Failed to load model"):
        open_model(gb.split(sparse, tmp_path, [47, 47])[1])


def test_number_of_parts_in_a_name_costs_no_time(tmp_path, monkeypatch):
    looked, exists = [], Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: looked.append(path) or exists(path))
    first = tmp_path / "m-00001-of-99999.gguf"
    first.touch()
    assert shard_paths(first) == [first] and len(looked) == 2


def test_part_that_changes_while_loading_is_refused(sparse, tmp_path, monkeypatch):
    import llama_cpp.llama_cpp as api

    from ggml_macko.native.llama_hook import register

    register()
    paths = gb.split(sparse, tmp_path, [47, 47])
    real = api.llama_model_load_from_file_ptr

    def load_and_change(stream, params):
        model = real(stream, params)
        os.utime(paths[1])
        return model

    monkeypatch.setattr(api, "llama_model_load_from_file_ptr", as_c(load_and_change))
    with pytest.raises(errors.MackoError, match="00002-of-00002.gguf: the file changed") as e:
        open_model(paths[0])
    assert e.value.code == errors.FILE_CHANGED


def test_tools_refuse_a_split_sparse_file_and_say_how_to_merge_it(sparse, tmp_path, macko):
    first = gb.split(sparse, tmp_path, [47, 47])[0]
    for command in (("verify", generators.DEMO, first), ("inspect", first), ("restore", first, tmp_path / "out.gguf")):
        done = macko(*command)
        assert done.code == 1 and "merge them first (llama-gguf-split --merge)" in done.err
    assert not (tmp_path / "out.gguf").exists()


def test_merged_file_is_read(sparse, tmp_path, macko):
    """llama-gguf-split --merge sets split.count to 0."""
    f = gb.read(sparse.read_bytes())
    f.set("split.count", gb.U16, 0)
    merged = tmp_path / "merged.gguf"
    merged.write_bytes(gb.write(f))
    assert macko("verify", generators.DEMO, merged).code == 0
    assert_same(merged, sparse)


# ---- gguf-py's tools ----


def gguf_tool(name: str, *args: object, check: bool = True) -> str:
    code = f"import sys; sys.argv[0] = {name!r}; from gguf.scripts.{name} import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, input="YES\n")
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout + done.stderr


def test_metadata_edited_in_place_is_accepted(sparse, tmp_path):
    path = tmp_path / "edited.gguf"
    path.write_bytes(sparse.read_bytes())
    gguf_tool("gguf_set_metadata", path, "general.file_type", 7, "--force")
    assert open_model(path).metadata["general.file_type"] == "7"
    assert_same(path, sparse)


def test_copy_with_new_metadata_is_accepted(sparse, tmp_path, macko):
    """The copy has additional keys and another order of keys."""
    path = tmp_path / "renamed.gguf"
    gguf_tool("gguf_new_metadata", sparse, path, "--general-name", "renamed", "--general-description", "by a test")
    assert open_model(path).metadata["general.name"] == "renamed"
    assert_same(path, sparse)


def test_metadata_that_lies_about_the_weights_is_refused(sparse, tmp_path):
    for key, value, text in (
        ("macko.version", 0, "macko.version"),
        ("macko.version", 2, "upgrade"),
        ("llama.block_count", 3, "could not load|block_count|tensor"),
    ):
        path = tmp_path / f"{key}.gguf"
        path.write_bytes(sparse.read_bytes())
        gguf_tool("gguf_set_metadata", path, key, value, "--force")
        with pytest.raises(errors.MackoError, match=text):
            open_model(path)


def test_dump_shows_components(sparse):
    out = gguf_tool("gguf_dump", sparse)
    for text in (
        "macko.version = 1",
        "macko.tensor.index_bits",
        "macko.tensor.nnz",
        "blk.0.attn_q.weight.values",
        "blk.0.attn_q.weight.index",
        "blk.0.attn_q.weight.row_ptr",
    ):
        assert text in out
