"""The conformance files in ggml-macko/vectors/ and the reader there, which shares no code with the library."""

from __future__ import annotations

import ast
import filecmp
import re

import numpy as np
import pytest
import read_sparse_gguf as reader
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_macko import ConvertOptions, convert, errors, restore
from ggml_macko.native.file import File
from support import generators, make_vectors
from support import gguf_bytes as gb

FOLDER = make_vectors.FOLDER
PAGE = (FOLDER.parent / "FORMAT.md").read_text()
SCRIPT = FOLDER / "read_sparse_gguf.py"


def table(column: str) -> list[list[str]]:
    """The rows of a table of the README whose first column has this title."""
    text = (FOLDER / "README.md").read_text().split(f"| file in `{column}/` |")[1]
    return [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()[2:] if line.startswith("| ")][
        : len(list((FOLDER / column).glob("*.gguf")))
        - 1  # a split model has two files
    ]


ACCEPTED, REFUSED = table("accept"), table("refuse")


def read(path):
    return [(t.name, list(t.ne), t.type, t.data.tobytes()) for t in reader.read_dense(path).tensors]


def restored(path, folder):
    """The same tensors, as the library decodes them."""
    restore(path, folder / "dense.gguf")
    f = gb.read((folder / "dense.gguf").read_bytes())
    return [(t.name.decode(), t.ne, t.type, t.data) for t in f.tensors]


def test_script_writes_the_folder_again(tmp_path):
    make_vectors.write_all(tmp_path)
    made = {p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()}
    kept = {p.relative_to(FOLDER) for p in FOLDER.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert kept - made == {SCRIPT.relative_to(FOLDER)} and made <= kept
    _, different, missing = filecmp.cmpfiles(tmp_path, FOLDER, [str(p) for p in made], shallow=False)
    assert (different, missing) == ([], [])


def test_folder_is_small():
    sizes = [p.stat().st_size for p in FOLDER.rglob("*.gguf")]
    assert max(sizes) < 16 << 10 and sum(sizes) < 200_000


def test_reader_shares_no_code_with_the_library():
    imported = [n for n in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {a.name for n in imported if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in imported if isinstance(n, ast.ImportFrom)}
    assert names == {"__future__", "dataclasses", "math", "numpy", "pathlib", "re", "struct", "sys"}


def test_page_shows_the_bytes_of_the_example():
    lines = re.findall(r"^([0-9a-f]{3}): ((?:[0-9a-f]{8} ?)+)  ", PAGE, re.MULTILINE)
    assert [int(at, 16) for at, _ in lines] == list(range(0, 608, 32))
    assert bytes.fromhex("".join(text for _, text in lines)) == (FOLDER / "accept" / "example.gguf").read_bytes()


def test_every_file_is_in_a_table():
    for folder, rows in (("accept", ACCEPTED), ("refuse", REFUSED)):
        files = {p.stem for p in (FOLDER / folder).glob("*.gguf")} - {"split-00002-of-00002"}
        assert {row[0] for row in rows} == files


@pytest.mark.parametrize("name, dense, rule", ACCEPTED, ids=[row[0] for row in ACCEPTED])
def test_accepted_file_has_the_dense_values_on_file(tmp_path, name, dense, rule):
    path, expected = FOLDER / "accept" / f"{name}.gguf", read(FOLDER / "dense" / f"{dense}.gguf")
    assert read(path) == expected
    if "split" not in name:  # of split sparse models, only the loader reads all files
        assert restored(path, tmp_path) == expected


def check_all(path):
    """Every check of the library on a file."""
    with File(path) as f:
        for i in range(len(f.sparse())):
            f.check_payload(i)


@pytest.mark.parametrize("name, section, what", REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_file_breaks_the_section_in_the_table(name, section, what):
    path = FOLDER / "refuse" / f"{name}.gguf"
    with pytest.raises(errors.MackoError):
        check_all(path)
    with pytest.raises(reader.Refused, match=f"^section {section}:"):
        reader.read_dense(path)


TYPES = ["macko-d1", "macko-d2", "macko-d4", "macko-d8", "ec-csr-4", "ec-csr-8", "packed", "sparse-lossless"]
TYPES += [f"sparse-{name}" for name in ("q8", "q5", "q4", "q3")]


@pytest.mark.parametrize("kind", TYPES)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_reader_and_library_decode_random_models_alike(tmp_path_factory, kind, data):
    folder = tmp_path_factory.mktemp("random")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    make = generators.safe_bits if kind.startswith("sparse-q") else generators.random_bits
    tensors = {}
    for i, type_id in enumerate(generators.TYPES):
        rows, cols = data.draw(st.integers(4, 24)), data.draw(st.integers(200, 700))
        bits = make(rng, rows, cols, data.draw(st.sampled_from([0.02, 0.1, 0.4])), type_id)
        if data.draw(st.booleans()):  # rows that share columns
            bits[0::2][: rows // 2][bits[1::2] == 0] = 0
        tensors[f"blk.{i}.attn_q.weight"] = (bits, type_id)
    dense = generators.write_gguf(folder / "source.gguf", tensors)
    sparse = folder / "sparse.gguf"
    report = convert(dense, sparse, kind, options=ConvertOptions(keep_negative_zeros=not kind.startswith("sparse-q")))
    assert report.n_sparse > 0
    assert read(sparse) == restored(sparse, folder)


WHOLE = sorted(p for p in (FOLDER / "accept").glob("*.gguf") if "split" not in p.name)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_reader_and_library_judge_a_damaged_file_alike(tmp_path_factory, data):
    damaged = bytearray(data.draw(st.sampled_from(WHOLE)).read_bytes())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    code, refusal = 0, None
    try:
        check_all(path)
    except errors.MackoError as e:
        code = e.code
    try:
        reader.read_dense(path)
    except reader.Refused as e:
        refusal = str(e)
    assert code == errors.LIMIT or (code != 0) == (refusal is not None), (code, refusal)  # LIMIT: also SECURITY.md
