"""Matrices and small model files for the Python tests. All test data are defined here."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import gguf
import numpy as np

from ggml_macko import values
from ggml_macko.values import TYPE_BF16, TYPE_F16, TYPE_F32

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO = ROOT / "models" / "docs-4m-s70-f16.gguf"
SAMPLE = ROOT / "models" / "sample.txt"
SHARED = ROOT.parent / "shared" / "models"

TYPES = (TYPE_F16, TYPE_BF16, TYPE_F32)
QUANTIZATION = {
    TYPE_F16: gguf.GGMLQuantizationType.F16,
    TYPE_BF16: gguf.GGMLQuantizationType.BF16,
    TYPE_F32: gguf.GGMLQuantizationType.F32,
}
# bit patterns that are easily lost: -0.0, smallest and largest subnormal, largest normal, one, minus one
SPECIAL = {
    TYPE_F16: [0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x3C00, 0xBC00],
    TYPE_BF16: [0x8000, 0x0001, 0x807F, 0x7F7F, 0xFF7F, 0x3F80, 0xBF80],
    TYPE_F32: [0x80000000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0xBF800000],
}


def random_bits(rng: np.random.Generator, rows: int, cols: int, density: float, type_id: int = TYPE_F16) -> np.ndarray:
    """Bit patterns with signs, outliers and (by chance) empty rows; non-zeros at independent places."""
    values = rng.standard_normal((rows, cols)) * np.where(rng.random((rows, cols)) < 0.01, 1000.0, 1.0)
    bits = from_float32(values.astype(np.float32), type_id)
    bits[bits == 0] = SPECIAL[type_id][1]
    special = rng.random((rows, cols)) < 0.02
    bits[special] = rng.choice(np.array(SPECIAL[type_id], dtype=bits.dtype), int(special.sum()))
    bits[rng.random((rows, cols)) >= density] = 0
    return bits


def from_float32(values: np.ndarray, type_id: int) -> np.ndarray:
    """Bit patterns of float32 values (BF16: truncated)."""
    if type_id == TYPE_F16:
        return values.astype(np.float16).view(np.uint16)
    if type_id == TYPE_BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.view(np.uint32).copy()


def to_float64(bits: np.ndarray, type_id: int) -> np.ndarray:
    if type_id == TYPE_F16:
        return bits.view(np.float16).astype(np.float64)
    if type_id == TYPE_BF16:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(np.float32).astype(np.float64)


def write_gguf(path: Path, tensors: dict, keys: dict | None = None) -> Path:
    """Writes a valid GGUF file that is not a model. tensors: name -> (bit patterns or quantized bytes, ggml type); the
    shape is that of the array.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a test")
    writer.add_array("test.list", [1, 2, 3])
    for name, value in (keys or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint16
        add(name, value)
    for name, (data, type_id) in tensors.items():
        kind = gguf.GGMLQuantizationType(type_id)
        if kind in QUANTIZATION.values():
            writer.add_tensor(name, data, raw_shape=data.shape, raw_dtype=kind)
        else:
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_tensors(seed: int = 0, density: float = 0.4) -> dict:
    """One tensor of each kind that the tools treat differently."""
    rng = np.random.default_rng(seed)

    def f(*shape: int, density: float = density, type_id: int = TYPE_F16) -> tuple:
        rows = int(np.prod(shape[:-1]))
        return random_bits(rng, rows, shape[-1], density, type_id).reshape(shape), type_id

    return {
        "token_embd.weight": f(50, 64, density=1.0),
        "blk.0.attn_norm.weight": f(64, density=1.0, type_id=TYPE_F32),
        "blk.0.attn_q.weight": f(64, 64),
        "blk.0.attn_k.weight": f(32, 64, type_id=TYPE_BF16),
        "blk.0.attn_v.weight": f(32, 64, type_id=TYPE_F32),
        "blk.0.attn_output.weight": f(64, 64, density=0.95),
        "blk.0.ffn_gate_inp.weight": f(4, 64, type_id=TYPE_F32),
        "blk.0.ffn_up_exps.weight": f(4, 48, 64),
        "blk.0.ffn_down_exps.weight": f(4, 64, 48),
        "output.weight": f(50, 64),
    }


def write_split(folder: Path, parts: list, name: str = "model") -> list:
    """Writes parts as llama-gguf-split does; returns their paths. parts: tensor dicts."""
    total = sum(len(p) for p in parts)
    paths = []
    for i, tensors in enumerate(parts):
        path = folder / f"{name}-{i + 1:05d}-of-{len(parts):05d}.gguf"
        write_gguf(path, tensors, {"split.no": i, "split.count": len(parts)})
        # split.tensors.count is i32, a type that write_gguf does not write
        data = path.read_bytes()
        key = b"split.tensors.count"
        record = struct.pack("<Q", len(key)) + key + struct.pack("<Ii", 5, total)
        paths.append(_insert_key(path, data, record))
    return paths


def _insert_key(path: Path, data: bytes, record: bytes) -> Path:
    """Inserts a metadata record before the others and moves the data section to its new aligned offset."""
    reader = gguf.GGUFReader(path)
    end = max(t.field.offset + sum(p.nbytes for p in t.field.parts) for t in reader.tensors)
    data_offset = reader.data_offset
    n_keys = struct.unpack_from("<Q", data, 16)[0]
    head = data[:16] + struct.pack("<Q", n_keys + 1) + record + data[24:end]
    path.write_bytes(head.ljust((len(head) + 31) // 32 * 32, b"\0") + data[data_offset:])
    return path


def dense_bytes(path: Path) -> dict:
    """name -> (type, shape, bytes) of a dense GGUF, as gguf-py reads it, independent of the code under test."""
    return {t.name: (int(t.tensor_type), t.shape.tolist(), t.data.tobytes()) for t in gguf.GGUFReader(path).tensors}


def matrix_cases() -> list:
    """(label, bits, type) of matrices whose shapes and positions of non-zeros are edge cases for codecs."""
    cases = []
    rng = np.random.default_rng(7)
    for type_id in TYPES:
        dtype = values.bits_dtype(type_id)
        one = SPECIAL[type_id][5]
        zero = np.zeros((5, 300), dtype=dtype)
        cases.append((f"all zero {type_id}", zero, type_id))
        for gap in (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 255, 256, 257):
            bits = np.zeros((3, 600), dtype=dtype)
            bits[1, [0, gap, min(599, 2 * gap + 1)]] = one  # first and last row stay empty
            cases.append((f"gap {gap} {type_id}", bits, type_id))
        last = zero.copy()
        last[:, -1] = one
        cases.append((f"last column only {type_id}", last, type_id))
        cases.append((f"specials {type_id}", np.array([SPECIAL[type_id] * 3], dtype=dtype), type_id))
        for rows, cols in ((1, 1), (1, 7), (7, 1), (1, 8), (9, 9), (2, 255), (33, 257), (16, 4096)):
            for density in (0.0, 0.05, 0.5, 1.0):
                bits = random_bits(rng, rows, cols, density, type_id)
                cases.append((f"{rows}x{cols} at {density} {type_id}", bits, type_id))
    return cases


def assert_same(a: object, b: object, label: str = "") -> None:
    """Asserts that two matrices of one dataclass are equal byte for byte."""
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), f"{label}: {field.name}"
        else:
            assert x == y, f"{label}: {field.name}"


def safe_bits(rng: np.random.Generator, rows: int, cols: int, density: float, type_id: int) -> np.ndarray:
    """Bit patterns without the largest values of the type, whose products would overflow float32."""
    values = rng.standard_normal((rows, cols)).astype(np.float32) * np.where(
        rng.random((rows, cols)) < 0.02, 100, 1
    ).astype(np.float32)
    bits = from_float32(values, type_id)
    bits[rng.random((rows, cols)) >= density] = 0
    return bits
