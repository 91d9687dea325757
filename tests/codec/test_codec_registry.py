"""The registry of codecs: what each row must say, and a format that only this test knows.

The toy format stores coordinates and values, encoded and decoded by NumPy alone. The C library of this process does not
know it, so the header of its file is read by gguf-py in place of the C library; everything else, planning, writing,
reading, verifying, inspecting and restoring, is the code that all formats share.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import gguf
import numpy as np
import pytest

import ggml_macko
from ggml_macko import ConvertOptions, SparseMatrix, errors
from ggml_macko.codecs import registry
from ggml_macko.codecs.codec import Choice, Codec, Settings, Source, StoredArrays
from ggml_macko.gguf import files
from ggml_macko.native.codec import EncodedMatrix
from ggml_macko.native.file import FileSparse, FileTensor
from ggml_macko.values import TYPE_I32, Array, bits_dtype, value_bits
from support import generators


class CoordinateCodec(Codec):
    """Each non-zero with its place in the matrix, an int32."""

    name: ClassVar[str] = "coordinates"
    components: ClassVar[tuple[str, ...]] = ("place", "value")

    def types(self) -> Mapping[str, tuple[Choice, ...]]:
        return {"coordinates": (Choice(self),)}

    def storage_name(self, bits: int, value_type: int) -> str:
        return self.name

    def break_even_density(self, cols: int, type_id: int, bits: int | None, value_type: int) -> float:
        return value_bits(type_id) / (32 + value_bits(type_id))

    def encode(self, source: Source, bits: int | None, value_type: int | None, settings: Settings) -> EncodedMatrix:
        flat = source.bits.reshape(-1)
        place = np.flatnonzero(flat).astype(np.int32)
        return EncodedMatrix(
            format=self.name,
            rows=source.rows,
            cols=source.cols,
            type=source.type,
            value_type=source.type,
            index_bits=0,
            nnz=len(place),
            arrays=(place, flat[place]),
            types=(TYPE_I32, source.type),
        )

    def validate(self, m: EncodedMatrix, n_threads: int = 0) -> None:
        place = m.arrays[0]
        if np.any(np.diff(place) <= 0) or not np.all((place >= 0) & (place < m.rows * m.cols)):
            raise errors.error(errors.BAD_COLUMN, "places do not rise within the matrix")

    def decode(self, m: EncodedMatrix, n_threads: int = 0) -> Array:
        self.validate(m)
        dense = np.zeros(m.rows * m.cols, dtype=bits_dtype(m.type))
        dense[m.arrays[0]] = m.arrays[1]
        return dense.reshape(m.rows, m.cols)

    def n_stored(self, stored: StoredArrays) -> int:
        return stored.components[0].n_elements


class HeaderByGgufPy:
    """What File tells of a file, without its checks."""

    def __init__(self, path: object, require_model: bool = False):
        reader = gguf.GGUFReader(path)
        keys = {name: field.contents() for name, field in reader.fields.items()}
        self.is_sparse = "macko.tensor.name" in keys
        self.alignment, self.size = reader.alignment, reader.data.nbytes
        index = {t.name: i for i, t in enumerate(reader.tensors)}
        names = keys.get("macko.tensor.name", [])
        self._sparse = []
        owner = {}
        for i, name in enumerate(names):
            codec = registry.codec(keys["macko.tensor.format"][i])
            parts = tuple(index[f"{name}.{suffix}"] for suffix in codec.components)
            owner.update(dict.fromkeys(parts, i))
            ne = keys["macko.tensor.ne"][4 * i : 4 * i + 4]
            while len(ne) > 2 and ne[-1] == 1:
                ne = ne[:-1]
            type_id = keys["macko.tensor.type"][i]
            self._sparse.append(
                FileSparse(
                    name,
                    codec.name,
                    type_id,
                    type_id,
                    keys["macko.tensor.index_bits"][i],
                    tuple(ne),
                    keys["macko.tensor.nnz"][i],
                    sum(int(reader.tensors[p].n_bytes) for p in parts),
                    int(np.prod(ne)) * value_bits(type_id) // 8,
                    parts,
                )
            )
        self._tensors = [
            FileTensor(
                t.name,
                int(t.tensor_type),
                tuple(int(n) for n in t.shape),
                int(t.data_offset),
                int(t.n_bytes),
                owner.get(i, -1),
            )
            for i, t in enumerate(reader.tensors)
        ]

    def tensors(self) -> list[FileTensor]:
        return self._tensors

    def sparse(self) -> list[FileSparse]:
        return self._sparse

    def close(self) -> None:
        pass

    def __enter__(self) -> HeaderByGgufPy:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


@pytest.fixture
def coordinates(monkeypatch):
    codec = CoordinateCodec()
    monkeypatch.setattr(registry, "CODECS", [*registry.CODECS, codec])
    monkeypatch.setattr(files, "File", HeaderByGgufPy)
    return codec


@pytest.fixture
def pruned(tmp_path):
    """A dense model, most of whose matrices have one non-zero in ten."""
    return generators.write_gguf(tmp_path / "pruned.gguf", generators.tiny_tensors(density=0.1))


def test_new_codec_needs_a_row_of_the_registry_only(coordinates, pruned, tmp_path, macko):
    sparse, dense = tmp_path / "sparse.gguf", tmp_path / "dense.gguf"
    done = ggml_macko.convert(pruned, sparse, "coordinates", options=ConvertOptions(keep_negative_zeros=True))
    assert done.n_sparse > 0 and {t.storage for t in done.tensors if t.is_sparse} == {"coordinates"}
    assert ggml_macko.verify(pruned, sparse).is_identical
    shown = ggml_macko.inspect(sparse)
    assert shown.n_sparse == done.n_sparse and shown.nbytes == done.nbytes
    assert all(t.padding == 0 for t in shown.tensors if t.storage == "coordinates")
    ggml_macko.restore(sparse, dense)
    assert generators.dense_bytes(dense) == generators.dense_bytes(pruned)
    assert "coordinates" in macko("convert", pruned, "coordinates", "--dry-run").out


def test_arrays_of_a_new_codec_are_checked(coordinates):
    dense = np.eye(8, 64, dtype=np.float32)
    s = SparseMatrix.from_dense(dense, format="coordinates")
    np.testing.assert_array_equal(s.to_dense(), dense)
    assert s.format == "coordinates" and s.nbytes == 8 * (4 + 4)
    place, value = s.arrays.arrays
    with pytest.raises(errors.PayloadError, match="places do not rise"):
        SparseMatrix(replace(s.arrays, arrays=(place[::-1].copy(), value)))


def test_names_of_codecs_and_types_are_unique():
    names = [c.name for c in registry.CODECS]
    assert len(set(names)) == len(names)
    types = [list(c.types()) for c in registry.CODECS]
    assert len(set(itertools.chain(*types))) == sum(map(len, types))
    assert registry.AUTO not in itertools.chain(*types)
    assert set(registry.mixed_types()) <= set(registry.types())


def test_default_type_is_lossless_and_takes_no_search():
    choices = registry.types()[registry.AUTO]
    assert {c.codec.name for c in choices} == {"macko", "packed"}
    assert not any(c.is_lossy or c.codec.note for c in (*choices, *registry.types()["sparse-lossless"]))
    for name in ("macko", "sparse-lossless"):
        assert set(registry.types()[name]) <= set(choices)


def test_unknown_format_is_refused():
    with pytest.raises(errors.FileFormatError, match="unknown format 'csr'"):
        registry.codec("csr")
