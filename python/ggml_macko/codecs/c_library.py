"""The C library's codecs, called by the name of the format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..values import Array
from .encoded import EncodedMatrix


def _twin(m: EncodedMatrix) -> Any:
    from . import ec_csr, macko, packed

    return {"macko": macko.MackoMatrix, "packed": packed.PackedMatrix, "ec-csr": ec_csr.EcCsrMatrix}[
        m.format
    ].from_encoded(m)


def encode(
    format: str, dense_bits: Array, type_id: int, options: Mapping[str, int] | None = None, n_threads: int = 0
) -> EncodedMatrix:
    from ..native import bindings
    from . import macko

    o = dict(options or {})
    if format == "macko":
        width = o.pop("delta_bits", 0)
        if not width:
            count = bindings.count_dense(dense_bits, type_id, n_threads)
            width = min(
                macko.DELTA_BITS,
                key=lambda b: (macko.matrix_nbytes(type_id, b, len(dense_bits), count.n_stored[b]), b),
            )
        return bindings.encode(dense_bits, type_id, width, n_threads=n_threads).encoded()
    if format == "packed":
        value_type = o.pop("value_type", -1)
        return bindings.packed_encode(
            dense_bits, type_id, type_id if value_type < 0 else value_type, o.pop("index_bits", -1), n_threads
        ).encoded()
    width = o.pop("delta_bits", 8)
    o["clip"] = bool(o.get("clip", 1))
    return bindings.ec_csr_encode(dense_bits, type_id, width, bindings.EcCsrOptions(**o), n_threads).encoded()


def validate(m: EncodedMatrix, n_threads: int = 0) -> None:
    from ..native import bindings

    bindings.validate(_twin(m), n_threads)


def decode(m: EncodedMatrix, n_threads: int = 0) -> Array:
    from ..native import bindings

    return bindings.decode(_twin(m), n_threads)


def gpu_cost(m: EncodedMatrix, n_threads: int = 0) -> tuple[float, float]:
    from ..native import bindings

    blocks, rows = bindings.ec_csr_gpu_us(_twin(m), n_threads)
    return float(blocks), float(rows)


def CpuMatrix(m: EncodedMatrix, n_threads: int = 0) -> Any:
    from ..native import bindings

    return bindings.CpuMatrix(_twin(m), n_threads)


def count_dense(dense_bits: Array, type_id: int, n_threads: int = 0) -> Any:
    from ..native import bindings

    return bindings.count_dense(dense_bits, type_id, n_threads)


def quantize_q4_nl(values: Array, weights: Array | None = None, n_threads: int = 0) -> Array:
    from ..native import bindings

    return bindings.quantize_q4_nl(values, weights, n_threads)
