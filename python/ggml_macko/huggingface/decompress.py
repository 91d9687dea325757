"""Makes a checkpoint with compressed-tensors weights dense: `decompress(folder, output)`.

The dense weights are equal bit for bit, and all other files of the folder are copied. The output folder gets its name
only when it is complete.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .. import console, errors
from ..gguf.outputs import scratch_folder
from ..regular_files import check_regular, named, new_file, open_regular, read_bytes
from ..values import Array
from . import bitmask, tensor_files
from .tensor_files import NewTensor, TensorEntry, TensorFile

INDEX = "model.safetensors.index.json"
FORMATS = {"sparse-bitmask": False, "sparse-24-bitmask": True}  # of sparsity_config -> two of every four
SHARD_NBYTES = 4 << 30
_MAX_JSON = 64 << 20
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")  # suffixes
_WEIGHTS = (".safetensors", ".gguf", ".onnx", ".h5", ".msgpack", *PICKLES)  # files that are not copied


@dataclass(frozen=True)
class Decompression:
    """A checkpoint that was made dense."""

    path: Path
    n_tensors: int
    n_decompressed: int
    nbytes_source: int  # of all tensors
    nbytes: int


def decompress(folder: str | os.PathLike[str], output: str | os.PathLike[str]) -> Decompression:
    """Writes a dense copy of a Hugging Face checkpoint whose weights compressed-tensors stored sparse.

    folder: config.json and safetensors files with weights in sparse-bitmask or sparse-24-bitmask, values F32, F16 or
    BF16. output: a folder that does not exist yet.

    Shows its progress. Raises MackoError if the checkpoint is quantized, has no such weights, or is not valid, or if
    the output exists; OSError if a file cannot be read or written. After an error there is no output.
    """
    folder, output = Path(folder), Path(os.path.realpath(output))
    if output.exists():
        raise errors.bad_argument(f"{output}: exists; name a folder that does not")
    if not output.parent.is_dir():
        raise errors.error(errors.IO, f"{output.parent}: is not a folder")
    config = read_config(folder)
    check_files(folder)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(TensorFile(path)) for path in shard_paths(folder)]
        checkpoint = _Checkpoint(folder, files, _is_24(folder, config))
        scratch = stack.enter_context(scratch_folder(output.parent, f".{output.name}."))
        partial = scratch / output.name
        partial.mkdir(folder.stat().st_mode & 0o777 | 0o700)
        _write(checkpoint, config, partial)
        if output.exists():
            raise errors.bad_argument(f"{output}: exists; name a folder that does not")
        os.rename(partial, output)
    return Decompression(
        path=output,
        n_tensors=len(checkpoint.weights),
        n_decompressed=sum(w.is_packed for w in checkpoint.weights),
        nbytes_source=sum(t.nbytes for f in files for t in f.tensors.values()),
        nbytes=sum(w.new.nbytes for w in checkpoint.weights),
    )


# ---- contents of the folder ----


def check_files(folder: Path) -> None:
    """Raises MackoError if the checkpoint has a file that is not regular, or a link to a folder or to a file that is
    not part of the checkpoint. In the cache of huggingface-hub, it consists of links to `blobs` of its repository.
    """
    top = Path(os.path.realpath(folder))
    blobs = top.parent.parent / "blobs" if top.parent.name == "snapshots" else top
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in folders + files):
            target = Path(os.path.realpath(path))
            if path.is_symlink() and (target.is_dir() or not {top, blobs} & {target.parent, *target.parents}):
                raise errors.bad_argument(f"{path}: is a link to {target}, which is not followed")
            if not path.is_dir():
                check_regular(path)


def parse_json(path: Path) -> Any:
    """The value in a JSON file. Raises MackoError if it is not valid or very large, or OSError."""
    check_regular(path)
    if path.stat().st_size > _MAX_JSON:
        raise errors.error(errors.LIMIT, f"{path}: more than {_MAX_JSON} bytes")
    try:
        return json.loads(read_bytes(path).decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise errors.error(errors.BAD_FORMAT, f"{path}: is not valid JSON: {errors.one_line(e)[:200]}") from e


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises MackoError or OSError."""
    found = parse_json(path)
    if not isinstance(found, dict):
        raise errors.error(errors.BAD_FORMAT, f"{path}: is not a JSON object")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises MackoError or OSError."""
    if not (folder / "config.json").is_file():
        raise errors.error(errors.BAD_FORMAT, f"{folder}: has no config.json: not a Hugging Face checkpoint")
    return read_json(folder / "config.json")


def shard_paths(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of its index, or all in the folder. Raises MackoError or OSError."""
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise errors.error(errors.BAD_FORMAT, f"{folder / INDEX}: has no weight_map")
        named = sorted(set(weight_map.values()))
        missing = [name for name in named if name not in names]
        if missing:
            raise errors.error(errors.BAD_FORMAT, f"{folder / INDEX}: names {missing[0][:200]!r}, which is not there")
        names = named
    if not names:
        raise errors.error(errors.BAD_FORMAT, f"{folder}: has no safetensors files")
    return [folder / name for name in names]


def has_packed_weights(folder: Path) -> bool:
    """Whether compressed-tensors stored some of the weights. Raises MackoError, for example for weights with a mask
    that is not applied yet, or OSError.
    """
    found = False
    for path in shard_paths(folder):
        with TensorFile(path) as file:
            found = found or any(name.endswith(".bitmask") for name in file.tensors)
            masks = [name for name in file.tensors if name.endswith("_mask")]
            mask = next((name for name in masks if f"{name[:-5]}_orig" in file.tensors), None)
            if mask is not None:
                hint = "call torch.nn.utils.prune.remove(module, name) for each module, then save_pretrained"
                raise errors.error(errors.BAD_FORMAT, f"{path}: {mask} is not applied to its weights; {hint}")
    return found


def _is_24(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the config names sparse-24-bitmask. Raises MackoError if the config describes quantized weights."""
    settings = [config.get(name) for name in ("quantization_config", "compression_config")]
    found = False
    for setting in settings:
        if not isinstance(setting, dict):
            continue
        sparsity = setting.get("sparsity_config")
        name = sparsity.get("format") if isinstance(sparsity, dict) else None
        if setting.get("config_groups"):
            how = str(setting.get("format"))[:60]
            raise errors.error(
                errors.BAD_FORMAT, f"{folder}: its weights are quantized ({how}); only F32, F16 and BF16 are supported"
            )
        if name not in (None, "dense") and name not in FORMATS:
            known = ", ".join(FORMATS)
            raise errors.error(errors.BAD_FORMAT, f"{folder}: sparsity format {str(name)[:60]!r}; known: {known}")
        found = found or FORMATS.get(str(name), False)
    return found


@dataclass(frozen=True)
class _Weight:
    """A tensor of the dense checkpoint, and its source."""

    new: NewTensor
    source: str  # its name, or that of its parts without their suffix
    is_packed: bool


class _Checkpoint:
    """The tensors of all files, with their names in the dense checkpoint."""

    def __init__(self, folder: Path, files: Sequence[TensorFile], is_24: bool) -> None:
        self.folder = folder
        self.paths = [file.path for file in files]
        self._is_24 = is_24
        self._home: dict[str, TensorFile] = {}
        for file in files:
            for name in file.tensors:
                if name in self._home:
                    raise self._bad(f"{name} stands in {self._home[name].path.name} and in {file.path.name}")
                self._home[name] = file
        self.weights = [w for name in self._home for w in self._weights_at(name)]
        twins = [name for name, n in Counter(w.new.name for w in self.weights).items() if n > 1]
        if twins:
            raise self._bad(f"{twins[0]} is stored dense and compressed")
        if not any(w.is_packed for w in self.weights):
            raise errors.bad_argument(
                f"{folder}: has no compressed-tensors weights (NAME.bitmask); it is dense already"
            )

    def _bad(self, what: str) -> errors.MackoError:
        return errors.error(errors.BAD_FORMAT, f"{self.folder}: {what}")

    def entry(self, name: str) -> TensorEntry:
        return self._home[name].tensors[name]

    def _weights_at(self, name: str) -> Iterator[_Weight]:
        """The tensor of the dense checkpoint for a tensor of a file: itself, or for a bitmask its weight. Other parts
        of a sparse weight have none.
        """
        base, dot, part = name.rpartition(".")
        is_part = bool(dot) and part in (*bitmask.PARTS, bitmask.ROW_OFFSETS) and f"{base}.bitmask" in self._home
        if not is_part:
            t = self.entry(name)
            yield _Weight(NewTensor(name, t.dtype, t.shape), name, False)
        elif part == "bitmask":
            yield _Weight(self._dense(base), base, True)

    def _dense(self, base: str) -> NewTensor:
        missing = [part for part in bitmask.PARTS if f"{base}.{part}" not in self._home]
        if missing:
            raise self._bad(f"{base}.bitmask is there, but not {base}.{missing[0]}")
        shape, values = self.entry(f"{base}.shape"), self.entry(f"{base}.compressed")
        if shape.dtype != "I64" or not 1 <= shape.n_elements <= tensor_files.MAX_DIMS:
            raise self._bad(f"{base}.shape: {shape.dtype} {list(shape.shape)}, expected some I64")
        sizes = tuple(int(n) for n in self._home[f"{base}.shape"].read(f"{base}.shape").view(np.int64))
        n_bits = 8 * self.entry(f"{base}.bitmask").nbytes
        if min(sizes) < 1 or any(n > n_bits for n in sizes):
            raise self._bad(f"{base}.shape: {list(sizes)} does not fit a bitmask of {n_bits} bits")
        if values.dtype not in bitmask.DTYPES:
            raise self._bad(f"{base}.compressed: {values.dtype} values; known: {', '.join(bitmask.DTYPES)}")
        for part, dtype in (("bitmask", "U8"), (bitmask.ROW_OFFSETS, "I64")):
            name = f"{base}.{part}"
            if name in self._home and self.entry(name).dtype != dtype:
                raise self._bad(f"{name}: {self.entry(name).dtype}, expected {dtype}")
        return NewTensor(base if base.endswith(".weight") else f"{base}.weight", values.dtype, sizes)

    def read(self, weight: _Weight) -> Array:
        """The bytes of a tensor of the dense checkpoint."""
        if not weight.is_packed:
            return self._home[weight.source].read(weight.source)

        def part(name: str) -> Array:
            full = f"{weight.source}.{name}"
            return self._home[full].read(full)

        has_offsets = f"{weight.source}.{bitmask.ROW_OFFSETS}" in self._home
        packed = bitmask.Packed(
            name=f"{self._home[f'{weight.source}.bitmask'].path}: {weight.source}",
            shape=weight.new.shape,
            dtype=weight.new.dtype,
            bitmask=part("bitmask"),
            values=part("compressed").view(bitmask.DTYPES[weight.new.dtype]),
            row_offsets=part(bitmask.ROW_OFFSETS).view(np.int64) if has_offsets else None,
            is_24=self._is_24,
        )
        return bitmask.unpack(packed)


# ---- writing ----


def _shards(weights: Sequence[_Weight]) -> list[list[_Weight]]:
    out: list[list[_Weight]] = [[]]
    used = 0
    for w in weights:
        if out[-1] and used + w.new.nbytes > SHARD_NBYTES:
            out.append([])
            used = 0
        out[-1].append(w)
        used += w.new.nbytes
    return out


def _write(checkpoint: _Checkpoint, config: dict[str, Any], folder: Path) -> None:
    shards = _shards(checkpoint.weights)
    weight_map = {}
    nbytes = sum(w.new.nbytes for w in checkpoint.weights)
    with console.progress("decompressing", nbytes, "B") as advance:
        for i, shard in enumerate(shards):
            name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"

            def data(shard: Sequence[_Weight] = shard) -> Iterator[Array]:
                for w in shard:
                    yield checkpoint.read(w)
                    advance(w.new.nbytes)

            tensor_files.write(folder / name, checkpoint.paths, [w.new for w in shard], data())
            weight_map.update({w.new.name: name for w in shard})
    if len(shards) > 1:
        index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
        _copy(io.BytesIO(_json(index)), folder / INDEX, checkpoint.paths)
    dropped = ("quantization_config", "compression_config")
    new_config = io.BytesIO(_json({k: v for k, v in config.items() if k not in dropped}))
    _copy(new_config, folder / "config.json", [checkpoint.folder / "config.json"])
    for path in sorted(checkpoint.folder.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHTS and path.name not in ("config.json", INDEX):
            with open_regular(path) as file:
                _copy(file, folder / path.name, [path])


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def _copy(file: BinaryIO | io.FileIO, path: Path, sources: Sequence[Path]) -> None:
    with named(path), new_file(path, "x", sources) as out:
        shutil.copyfileobj(file, out)
