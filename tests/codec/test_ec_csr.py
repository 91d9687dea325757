"""EC-CSR through the package: the C codec against its NumPy twin, files, tools, products, text."""

from __future__ import annotations

import dataclasses
import json
import re

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_macko import SparseMatrix, errors, values
from ggml_macko.codecs.ec_csr import DELTA_BITS
from ggml_macko.native.file import File
from ggml_macko.values import TYPE_BF16, TYPE_F16, TYPE_F32
from reference import ec_csr
from reference.products import assert_close_to_float64
from support import c_codecs, generators
from support import gguf_bytes as gb
from support.generators import DEMO
from support.llama_logits import greedy, open_model


def patterned(
    rng: np.random.Generator, rows: int, cols: int, density: float, type_id: int, noise: float = 0.03
) -> np.ndarray:
    """Rows that share columns, so that blocks of several rows come up; some rows are empty."""
    bits = generators.random_bits(rng, rows, cols, 1.0, type_id)
    patterns = rng.random((3, cols)) < density
    mask = patterns[rng.integers(0, 3, rows)] ^ (rng.random((rows, cols)) < noise)
    bits[~mask] = 0
    bits[rng.random(rows) < 0.1] = 0
    return bits


# ---- codec ----


@pytest.mark.parametrize("delta_bits", DELTA_BITS)
def test_c_and_numpy_give_the_same_bytes(delta_bits):
    for label, bits, type_id in generators.matrix_cases():
        m = c_codecs.ec_csr(bits, type_id, delta_bits, n_threads=1)
        assert c_codecs.decode(m, 1).tobytes() == bits.tobytes(), label
        assert ec_csr.decode(m).tobytes() == bits.tobytes(), label
        generators.assert_same(ec_csr.assemble(bits, type_id, delta_bits, ec_csr.take_apart(m)), m)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_matrices_round_trip(data):
    type_id = data.draw(st.sampled_from(generators.TYPES))
    delta_bits = data.draw(st.sampled_from(DELTA_BITS))
    rows, cols = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 900))
    density = data.draw(st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    make = data.draw(st.sampled_from([generators.random_bits, patterned]))
    bits = make(rng, rows, cols, density, type_id)
    options = {
        "max_granularity": data.draw(st.sampled_from([1, 2, 8, 64])),
        "min_columns": data.draw(st.sampled_from([0, 128, 384])),
        "clip": data.draw(st.booleans()),
        "seed": data.draw(st.integers(0, 2**64 - 1)),
    }
    m = c_codecs.ec_csr(bits, type_id, delta_bits, options, 1)
    generators.assert_same(m, c_codecs.ec_csr(bits, type_id, delta_bits, options, 3))
    assert c_codecs.decode(m, 2).tobytes() == bits.tobytes() == ec_csr.decode(m).tobytes()
    generators.assert_same(ec_csr.assemble(bits, type_id, delta_bits, ec_csr.take_apart(m)), m)
    assert max(ec_csr.sets(m)[:, 0]) <= options["max_granularity"]
    assert m.nnz == np.count_nonzero(bits)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_one_changed_byte_is_judged_alike(data):
    """C and NumPy accept the same arrays; what they accept gives the same bytes when it is put together again."""
    type_id = data.draw(st.sampled_from(generators.TYPES))
    delta_bits = data.draw(st.sampled_from(DELTA_BITS))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bits = patterned(rng, data.draw(st.integers(1, 6)), data.draw(st.integers(1, 400)), 0.5, type_id)
    m = c_codecs.ec_csr(bits, type_id, delta_bits, n_threads=1)
    name = data.draw(st.sampled_from(ec_csr.ARRAYS))
    array = getattr(m, name).copy()
    raw = array.view(np.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    changed = dataclasses.replace(m, **{name: array})

    def verdict(validate, *n_threads):
        try:
            validate(changed, *n_threads)
        except errors.FileFormatError:
            return False
        return True

    assert verdict(c_codecs.validate, 1) == verdict(ec_csr.validate)
    if verdict(ec_csr.validate):
        dense = c_codecs.decode(changed, 1)
        assert dense.tobytes() == ec_csr.decode(changed).tobytes()
        generators.assert_same(ec_csr.assemble(dense, type_id, delta_bits, ec_csr.take_apart(changed)), changed)


def broken_matrices() -> list:
    """(status, matrix): one lie of each kind that both codecs must name alike."""
    bits = np.zeros((4, 300), dtype=np.uint16)
    bits[:2, :256] = 0x3C00
    bits[2, [0, 5, 200]] = 0xBC00
    bits[3, 10:30] = 0x4000
    m = c_codecs.ec_csr(bits, TYPE_F16, 8)
    assert ec_csr.sets(m)[:, :2].tolist() == [[2, 4], [1, 1]]

    def change(name: str, at: int, value: int) -> ec_csr.EcCsrMatrix:
        array = getattr(m, name).copy()
        array[at] = value
        return dataclasses.replace(m, **{name: array})

    def cut(name: str, n: int) -> ec_csr.EcCsrMatrix:
        return dataclasses.replace(m, **{name: getattr(m, name)[:-n].copy()})

    overlapping = ec_csr.assemble(
        bits, TYPE_F16, 8, [*ec_csr.take_apart(m), (1, np.array([3], dtype=np.int32), np.arange(11, 20))]
    )
    row = np.full((1, 128), 0x3C00, dtype=np.uint16)
    one_row = np.zeros(1, dtype=np.int32)
    return [
        (errors.BAD_BLOCK, ec_csr.assemble(row, TYPE_F16, 8, [ec_csr.Part(1, one_row, np.arange(128))])),
        (errors.NOT_CANONICAL, ec_csr.assemble(row[:, :96], TYPE_F16, 8, [ec_csr.Part(4, one_row, np.arange(96))])),
        (errors.BAD_BLOCK, change("sets", 0, 3)),
        (errors.BAD_BLOCK, change("sets", 1, 1)),
        (errors.BAD_COMPONENT, change("sets", 0, 1)),
        (errors.BAD_BLOCK, change("sets", 2, 0)),
        (errors.BAD_COMPONENT, change("sets", 2, 3)),
        (errors.BAD_COMPONENT, cut("values", 1)),
        (errors.BAD_COMPONENT, cut("deltas", 1)),
        (errors.BAD_COMPONENT, cut("bases", 32)),
        (errors.BAD_COMPONENT, cut("blk_ptr", 1)),
        (errors.BAD_COMPONENT, cut("block_rows", 1)),
        (errors.BAD_BLOCK, change("blk_ptr", 0, 128)),
        (errors.BAD_BLOCK, change("block_rows", 1, 0)),  # a row twice in a block
        (errors.BAD_BLOCK, change("block_rows", 0, 4)),
        (errors.BAD_BLOCK, change("block_rows", 0, -1)),
        (errors.NOT_CANONICAL, dataclasses.replace(m, block_rows=m.block_rows[[0, 1, 0, 1, 3, 2]].copy())),
        (errors.BAD_COLUMN, change("bases", 31, 299)),
        (errors.NOT_CANONICAL, change("deltas", 0, 1)),
        (errors.NOT_CANONICAL, change("values", 0, 0)),
        (errors.NOT_CANONICAL, change("values", len(m.values) - 1, 0x3C00)),  # hidden data
        (errors.NOT_FINITE, change("values", 0, 0x7C00)),
        (errors.BAD_NNZ, dataclasses.replace(m, nnz=m.nnz + 1)),
        (errors.OVERLAP, overlapping),
    ]


@pytest.mark.parametrize("code, matrix", broken_matrices())
def test_broken_matrix_is_refused_with_its_code(code, matrix):
    for validate in (c_codecs.validate, ec_csr.validate):
        with pytest.raises(errors.FileFormatError) as e:
            validate(matrix)
        assert e.value.code == code, str(e.value)
    with pytest.raises(errors.FileFormatError):
        c_codecs.decode(matrix)
    with pytest.raises(errors.FileFormatError):
        c_codecs.cpu_matrix(matrix)
    with pytest.raises(errors.FileFormatError):
        SparseMatrix(matrix.encoded())


@pytest.mark.parametrize(
    "code, call",
    [
        (errors.BAD_FORMAT, lambda bits: c_codecs.ec_csr(bits, TYPE_F16, 2)),
        (errors.BAD_ARGUMENT, lambda bits: c_codecs.ec_csr(bits, TYPE_F32, 4)),
        (errors.BAD_ARGUMENT, lambda bits: c_codecs.ec_csr(bits, TYPE_F16, 4, {"max_granularity": 3})),
        (errors.BAD_ARGUMENT, lambda bits: c_codecs.ec_csr(bits, TYPE_F16, 4, {"min_columns": 100})),
        (errors.NOT_FINITE, lambda bits: c_codecs.ec_csr(bits | 0x7C00, TYPE_F16, 4)),
        (errors.BAD_ARGUMENT, lambda bits: SparseMatrix.from_dense(bits.view(np.float16), format="csr")),
    ],
)
def test_wrong_argument_is_refused(code, call):
    with pytest.raises(errors.MackoError) as e:
        call(np.ones((3, 200), np.uint16))
    assert e.value.code == code


@pytest.mark.parametrize("delta_bits", DELTA_BITS)
def test_extraction_never_makes_a_matrix_larger(delta_bits):
    """Rows that are alike pay with 8 bits; with 4 bits the columns that fill no block cost more in fillers."""
    rng = np.random.default_rng(4)
    alike = generators.random_bits(rng, 200, 2048, 1.0)
    alike[np.repeat(rng.random((50, 2048)) >= 0.3, 4, axis=0)] = 0
    for bits in (alike, generators.random_bits(rng, 100, 2048, 0.3)):
        plain = c_codecs.ec_csr(bits, TYPE_F16, delta_bits, {"max_granularity": 1})
        m = c_codecs.ec_csr(bits, TYPE_F16, delta_bits)
        assert m.nbytes <= plain.nbytes
        asked = c_codecs.ec_csr(bits, TYPE_F16, delta_bits, {"min_columns": 128})
        assert ec_csr.sets(asked)[0, 0] > 1  # who asks for blocks gets them
    assert ec_csr.sets(c_codecs.ec_csr(alike, TYPE_F16, 8))[0, 0] >= 4


# ---- SparseMatrix ----


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_product_is_within_rounding_of_float64(data):
    type_id = data.draw(st.sampled_from(generators.TYPES))
    rows, cols, n = (
        data.draw(st.integers(1, 70)),
        data.draw(st.integers(1, 600)),
        data.draw(st.sampled_from([1, 2, 8, 33])),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bits = generators.safe_bits(rng, rows, cols, data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), type_id)
    dense = bits if type_id == TYPE_BF16 else bits.view(np.float16 if type_id == TYPE_F16 else np.float32)
    s = SparseMatrix.from_dense(
        dense,
        data.draw(st.sampled_from([None, 4, 8])),
        type_id == TYPE_BF16,
        format="ec-csr",
        keep_negative_zeros=True,
    )
    assert s.format == "ec-csr" and s.to_dense().tobytes() == bits.tobytes()
    x = rng.standard_normal((cols, n), dtype=np.float32)
    assert_close_to_float64(s @ x, generators.to_float64(bits, type_id), x)


def test_auto_takes_the_smallest_format():
    """40 shapes and densities, with and without structure: never larger than the best of the others. Half of the
    matrices are F32, whose long mantissas leave nothing to code.
    """
    rng = np.random.default_rng(3)
    chosen = set()
    for rows, cols in ((1, 40), (32, 300), (64, 2048), (100, 3000)):
        for i, density in enumerate((0.05, 0.1, 0.3, 0.6, 0.95)):
            type_id = (TYPE_F16, TYPE_F32)[i % 2]
            for bits in (
                generators.random_bits(rng, rows, cols, density, type_id),
                patterned(rng, rows, cols, density, type_id, noise=0),
            ):
                w = bits.view(np.float16 if type_id == TYPE_F16 else np.float32)
                made = {f: SparseMatrix.from_dense(w, format=f) for f in ("macko", "packed", "sparse-lossless", "auto")}
                sizes = {f: s.nbytes for f, s in made.items()}
                assert sizes.pop("auto") == min(sizes.values())
                chosen.add(made["auto"].format)
    assert chosen == {"macko", "packed", "sparse-lossless"}, chosen


# ---- files and tools ----


@pytest.fixture
def wide(tmp_path):
    """A dense GGUF whose weights are wide enough for blocks: experts, all types, rows that share columns."""
    rng = np.random.default_rng(11)

    def f(*shape: int, density: float = 0.5, type_id: int = TYPE_F16, noise: float = 0.03) -> tuple:
        return patterned(rng, int(np.prod(shape[:-1])), shape[-1], density, type_id, noise).reshape(shape), type_id

    tensors = {
        "token_embd.weight": f(20, 512),
        "blk.0.attn_norm.weight": (generators.random_bits(rng, 1, 512, 1.0, TYPE_F32)[0], TYPE_F32),
        "blk.0.attn_q.weight": f(64, 512, noise=0),
        "blk.0.attn_k.weight": f(33, 512, type_id=TYPE_BF16),
        "blk.0.attn_v.weight": f(32, 512, density=0.2, type_id=TYPE_F32),
        "blk.0.ffn_up_exps.weight": f(3, 40, 512, density=0.3),
        "blk.0.ffn_down_exps.weight": f(3, 64, 384),
        "output.weight": (generators.random_bits(rng, 50, 512, 0.98), TYPE_F16),
    }
    return generators.write_gguf(tmp_path / "wide.gguf", tensors)


def sparse_formats(path):
    with File(path) as f:
        return {s.name: s.format for s in f.sparse()}


@pytest.mark.parametrize("kind", ["ec-csr", "ec-csr-4", "ec-csr-8", "auto", "EC-CSR-8"])
def test_round_trip_keeps_every_bit(tmp_path, wide, macko, kind):
    sparse, dense = tmp_path / "s.gguf", tmp_path / "d.gguf"
    done = macko("convert", wide, sparse, kind, "--keep-negative-zeros")
    assert done.code == 0, done.err
    assert kind == "auto" or set(sparse_formats(sparse).values()) == {"ec-csr"}
    assert len(sparse_formats(sparse)) >= 4
    assert macko("restore", sparse, dense).code == 0
    assert dense.read_bytes() == wide.read_bytes()
    assert macko("verify", wide, sparse).code == 0
    again = tmp_path / "again.gguf"  # deterministic, also from a sparse source
    assert macko("convert", sparse, again, kind, 1, "--keep-negative-zeros").code == 0
    assert again.read_bytes() == sparse.read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_file_is_what_the_specification_says(tmp_path, wide, macko):
    """Read with gguf-py and decoded with the NumPy twin: nothing of the C library."""
    sparse = tmp_path / "s.gguf"
    assert macko("convert", wide, sparse, "ec-csr-8", "--keep-negative-zeros").code == 0
    reader = gguf.GGUFReader(sparse)
    keys = {name: field.contents() for name, field in reader.fields.items() if name.startswith("macko.")}
    assert keys["macko.version"] == 1
    dense = generators.dense_bytes(wide)
    parts = {t.name: t for t in reader.tensors}
    order = [t.name for t in reader.tensors]
    granularities = set()
    for i, name in enumerate(keys["macko.tensor.name"]):
        at = order.index(name + ".values")
        assert order[at : at + 6] == [f"{name}.{c}" for c in ("values", "deltas", "bases", "blk_ptr", "rows", "sets")]
        type_id, ne = keys["macko.tensor.type"][i], keys["macko.tensor.ne"][4 * i : 4 * i + 4]
        dtypes = (values.bits_dtype(type_id), np.uint8, np.uint16, np.int32, np.int32, np.int32)
        arrays = [np.ascontiguousarray(parts[n].data).reshape(-1).view(d) for n, d in zip(order[at : at + 6], dtypes)]
        rows = int(np.prod(ne[1:]))
        m = ec_csr.EcCsrMatrix(
            rows, ne[0], type_id, keys["macko.tensor.index_bits"][i], keys["macko.tensor.nnz"][i], *arrays
        )
        assert ec_csr.decode(m).tobytes() == dense[name][2], name
        granularities |= set(ec_csr.sets(m)[:, 0].tolist())
    assert {1, 2} < granularities and max(granularities) >= 8


def test_one_file_may_hold_both_formats(tmp_path, wide, macko):
    sparse = tmp_path / "s.gguf"
    done = macko(
        "convert", wide, sparse, "ec-csr-8", "--tensor-type", "attn_q=macko-d4", "--tensor-type", "attn_v=dense"
    )
    assert done.code == 0, done.err
    found = sparse_formats(sparse)
    assert found["blk.0.attn_q.weight"] == "macko" and found["blk.0.attn_k.weight"] == "ec-csr"
    assert "blk.0.attn_v.weight" not in found
    assert macko("verify", wide, sparse).code == 0


def test_block_options_reach_the_encoder(tmp_path, wide, macko):
    files = {}
    for label, args in {
        "": [],
        "g2": ["--granularity", 2],
        "min": ["--min-columns", 512],
        "seed": ["--seed", 5],
    }.items():
        files[label] = tmp_path / f"{label}.gguf"
        assert macko("convert", wide, files[label], "ec-csr-8", *args).code == 0
    assert len({p.read_bytes() for p in files.values()}) == 4
    report = json.loads(macko("inspect", files["g2"], "--json").out)
    sets = [s for t in report["tensors"] for s in t.get("sets", [])]
    assert max(s["granularity"] for s in sets) == 2
    for bad in (
        ["--granularity", 3],
        ["--min-columns", 100],
        ["--seed", -1],
        ["--granularity", 2**40],
    ):
        done = macko("convert", wide, tmp_path / "x.gguf", "ec-csr-8", *bad)
        assert done.code == (1 if bad[1] in (3, 100) else 2) and not (tmp_path / "x.gguf").exists(), bad


def test_inspect_shows_the_block_sets(tmp_path, wide, macko):
    sparse = tmp_path / "s.gguf"
    assert macko("convert", wide, sparse, "ec-csr-4").code == 0
    report = json.loads(macko("inspect", sparse, "--json").out)
    for t in report["tensors"]:
        assert (t["storage"] == "ec-csr-4") == ("sets" in t)
        if "sets" in t:
            assert sum(s["coverage"] for s in t["sets"]) == pytest.approx(1)
            assert sum(s["blocks"] for s in t["sets"]) > 0 and 0 <= t["padding"] < 1
    text = macko("inspect", sparse).out
    assert "coverage" in text and "ec-csr-4" in text and "rows of a block" in text


def test_auto_says_what_it_chose_from(tmp_path, wide, macko):
    done = macko("convert", wide, tmp_path / "s.gguf", "auto")
    lines = [line for line in done.err.splitlines() if "converting to" in line]
    assert len(lines) >= 4
    for line in lines:
        kind, reason = re.search(r"converting to (\S+) .*\(smallest: (.*)\)", line).groups()
        forms = re.findall(r"(\S+) ([\d.]+) MiB", reason)
        sizes = [float(size) for _, size in forms]
        assert kind == forms[0][0] and sizes == sorted(sizes)
        names = {name.rsplit("-", 1)[0] for name, _ in forms}
        assert len(forms) == 2 and names - {"packed", "sparse-lossless"} == {"macko"}
    assert "looking for blocks" not in done.err
    dry = macko("convert", wide, "auto", "--dry-run")
    assert dry.code == 0 and "smallest: " in dry.out
    with File(tmp_path / "s.gguf") as f:
        auto = sum(s.nbytes for s in f.sparse())
    for kind in ("macko", "packed", "sparse-lossless"):
        assert macko("convert", wide, tmp_path / f"{kind}.gguf", kind).code == 0
        with File(tmp_path / f"{kind}.gguf") as f:
            assert auto <= sum(s.nbytes for s in f.sparse())


BLOCK_LIES = {
    "nothing": (0, lambda f, name: None),
    "rows": (errors.BAD_BLOCK, lambda f, name: patch(f, name + ".rows", np.int32, 0, -1)),
    "row twice": (errors.BAD_BLOCK, lambda f, name: patch(f, name + ".rows", np.int32, 1, 0)),
    "sets": (errors.BAD_BLOCK, lambda f, name: patch(f, name + ".sets", np.int32, 0, 5)),
    "counts": (errors.BAD_COMPONENT, lambda f, name: patch(f, name + ".sets", np.int32, 3, 256)),
    "blk_ptr": (errors.BAD_BLOCK, lambda f, name: patch(f, name + ".blk_ptr", np.int32, 1, 7)),
    "column": (errors.BAD_COLUMN, lambda f, name: patch(f, name + ".bases", np.uint16, 31, 512)),
    "zero": (errors.NOT_CANONICAL, lambda f, name: patch(f, name + ".values", np.uint16, 0, 0)),
    "infinity": (errors.NOT_FINITE, lambda f, name: patch(f, name + ".values", np.uint16, 0, 0x7C00)),
}


def patch(f: gb.GGUF, name: str, dtype: type, at: int, value: int) -> None:
    array = np.frombuffer(f.tensor(name).data, dtype).copy()
    if name.endswith(".rows") and value == 0:
        value = array[0]
    array[at] = value
    f.tensor(name).data = array.tobytes()


@pytest.mark.parametrize("name", BLOCK_LIES)
def test_broken_file_is_refused_with_its_code(name, wide, macko, tmp_path):
    expected, change = BLOCK_LIES[name]
    assert macko("convert", wide, tmp_path / "s.gguf", "ec-csr-8", "--keep-negative-zeros").code == 0
    f = gb.read((tmp_path / "s.gguf").read_bytes())
    change(f, "blk.0.attn_q.weight")
    path = tmp_path / "broken.gguf"
    path.write_bytes(gb.write(f))
    code = 0
    try:
        with File(path) as file:
            for i in range(len(file.sparse())):
                file.check_payload(i)
    except errors.MackoError as e:
        code = e.code
        assert str(path) in str(e) and "\n" not in str(e)
    assert code == expected
    if expected:
        done = macko("restore", path, tmp_path / "d.gguf")
        assert done.code == 1 and not (tmp_path / "d.gguf").exists()


# ---- models ----


@pytest.mark.parametrize("kind", ["ec-csr-4", "ec-csr-8", "auto"])
def test_sparse_model_writes_the_text_of_the_dense_one(tmp_path, macko, kind):
    sparse, dense = tmp_path / "s.gguf", tmp_path / "d.gguf"
    assert macko("convert", DEMO, sparse, kind).code == 0
    assert kind == "auto" or list(sparse_formats(sparse).values()) == ["ec-csr"] * 28
    assert macko("restore", sparse, dense).code == 0
    assert greedy(open_model(sparse)) == greedy(open_model(dense)) == greedy(open_model(DEMO))
    prompt = (DEMO.parent / "sample.txt").read_text()[:600]
    assert greedy(open_model(sparse), 24, prompt) == greedy(open_model(dense), 24, prompt)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["docs-4m-f16", "docs-23m-f16", "docs-23m-s70-f16"])
@pytest.mark.parametrize("kind", ["ec-csr-4", "ec-csr-8"])
def test_real_sparse_model_writes_the_text_of_the_dense_one(tmp_path, macko, name, kind):
    source = generators.SHARED / f"{name}.gguf"
    if not source.exists():
        pytest.skip(f"no {source.name} beside the repository")
    dense, sparse = source, tmp_path / "s.gguf"
    if "s70" not in name:
        dense = tmp_path / "pruned.gguf"
        assert macko("prune", source, dense, "--sparsity", 0.5).code == 0
    assert macko("convert", dense, sparse, kind).code == 0
    assert len(sparse_formats(sparse)) >= 28
    assert greedy(open_model(sparse)) == greedy(open_model(dense))
