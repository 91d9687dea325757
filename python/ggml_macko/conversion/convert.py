"""Dense GGUF -> sparse GGUF: `macko convert IN OUT [TYPE] [nthreads]`.

Two passes over the source, one tensor in memory at a time: count (which decides the tensor table), then encode and
write. How large EC-CSR is shows only when it is made; what the first pass made waits in an unnamed file for the second.
The result is read back and compared with the source before it gets its name.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .. import console, errors, values
from ..codecs import ec_csr, ggml_quants, macko, packed, quantize
from ..conversion import bit_allocation as mixture
from ..conversion.verify import error_line, first_difference
from ..gguf import imatrix
from ..gguf import tensor_rules as weights
from ..gguf.files import (
    MAX_NAME,
    AtomicOutput,
    Model,
    NewTensor,
    Tensor,
    Writer,
    align,
    file_nbytes,
    make_key,
    type_name,
)
from ..native import bindings

MACKO, EC_CSR, PACKED, DENSE = "macko", "ec-csr", "packed", "dense"
# suffixes of the components, as FORMAT.md sections 3, 6 and 7 list them
COMPONENTS = {
    MACKO: ("values", "deltas", "row_ptr"),
    EC_CSR: ("values", "deltas", "bases", "blk_ptr", "rows", "sets"),
    PACKED: packed.ARRAYS,
}
FORMAT_VERSION = {MACKO: 1, EC_CSR: 2, PACKED: 3}
VALUE_VERSION = {packed.TYPE_Q5_0: 4, packed.TYPE_Q4_NL: 5}  # of value types that came later
MAX_SUFFIX = max(len(c) + 1 for components in COMPONENTS.values() for c in components)
TYPE_I8, TYPE_I16, TYPE_I32 = 24, 25, 26  # ggml type ids of components

_MACKO = tuple((MACKO, b) for b in macko.DELTA_BITS)
_EC_CSR = tuple((EC_CSR, b) for b in ec_csr.DELTA_BITS)
SMALLEST = -1  # delta_bits of packed: the codec chooses
# TYPE -> what to choose from, by real size: (format, delta_bits)
TYPES = {
    "macko": _MACKO,
    **{f"macko-d{b}": ((MACKO, b),) for b in macko.DELTA_BITS},
    "ec-csr": _EC_CSR,
    **{f"ec-csr-{b}": ((EC_CSR, b),) for b in ec_csr.DELTA_BITS},
    "auto": (*_MACKO, *_EC_CSR, (PACKED, SMALLEST)),
    "packed": ((PACKED, SMALLEST),),
    **{f"macko-{name}": ((PACKED, SMALLEST),) for name in packed.QUANT_NAMES.values()},
}
QUANT_TYPES = {f"macko-{name}": type_id for type_id, name in packed.QUANT_NAMES.items()}  # the lossy ones
# what --target-bpw chooses from; macko-q4_nl is Q4_0 where that is nearer
MIXED = ("macko", "packed", *(name for name in QUANT_TYPES if name != "macko-q4_0"))


def storage_name(fmt: str, delta_bits: int, value_type: int | None = None) -> str:
    """The TYPE of a tensor with its index: macko-d4, ec-csr-8, packed-bitmap, macko-q8_0-gaps4."""
    if fmt == PACKED:
        name = f"macko-{packed.QUANT_NAMES[value_type]}" if value_type in packed.QUANT_NAMES else PACKED
        return f"{name}-gaps{delta_bits}" if delta_bits else f"{name}-bitmap"
    return f"{fmt}-d{delta_bits}" if fmt == MACKO else f"{fmt}-{delta_bits}"


@dataclass(frozen=True)
class Plan:
    """What becomes of a tensor."""

    tensor: Tensor
    format: str  # MACKO, EC_CSR or DENSE
    delta_bits: int  # of packed 0 for a bitmap
    reason: str  # why it stays dense, or what else it could have been; empty if there was no choice
    nbytes: int  # in the new file
    count: bindings.Count | None = None
    n_negative_zeros: int = 0
    components: tuple = ()  # (ggml type, elements, bytes) of each
    spooled_at: int = -1  # where an EC-CSR or packed tensor's arrays wait
    value_type: int | None = None  # of packed
    dense_type: int | None = None  # ggml type that a dense tensor is quantized to
    error: float = 0.0  # if measured: quantize.error_of what is stored

    @property
    def density(self) -> float | None:
        return None if self.count is None else self.count.nnz / self.tensor.n_elements

    @property
    def type(self) -> str:
        if self.format == DENSE:
            return DENSE if self.dense_type is None else type_name(self.dense_type)
        return storage_name(self.format, self.delta_bits, self.value_type)

    @property
    def break_even(self) -> float | None:
        """Density of random non-zeros at which this tensor would be as large as dense in MACKO (delta_bits as here, or
        best).
        """
        if self.count is None:
            return None
        bits = values.value_bits(self.tensor.type)
        if self.format == PACKED:  # a bitmap; at most one bit per weight
            return 1.0 if self.value_type in packed.QUANT_NAMES else (bits - 1 - 32 / self.tensor.cols) / bits
        widths = (self.delta_bits,) if self.delta_bits else macko.DELTA_BITS
        return max(macko.break_even_density(self.tensor.cols, b, bits) for b in widths)

    def new_tensors(self) -> list:
        t = self.tensor
        if self.format == DENSE:
            return [NewTensor(t.name, *(self.components[0] if self.components else (t.type, t.ne, t.nbytes)))]
        return [
            NewTensor(f"{t.name}.{c}", type_id, (n,), nbytes)
            for c, (type_id, n, nbytes) in zip(COMPONENTS[self.format], self.components)
        ]


def _macko_components(t: Tensor, delta_bits: int, count: bindings.Count) -> tuple:
    n_stored = count.n_stored[delta_bits]
    n = macko.n_padded(n_stored)
    n_deltas = macko.deltas_nbytes(n_stored, delta_bits)
    return (
        (t.type, n, n * values.value_bits(t.type) // 8),
        (TYPE_I8, n_deltas, n_deltas),
        (TYPE_I32, t.rows + 1, 4 * (t.rows + 1)),
    )


def _ec_csr_components(m: ec_csr.EcCsrMatrix) -> tuple:
    bases = TYPE_I16 if m.bases.dtype.itemsize == 2 else TYPE_I32
    types = (m.type, TYPE_I8, bases, TYPE_I32, TYPE_I32, TYPE_I32)
    arrays = [getattr(m, name) for name in ec_csr.ARRAYS]
    return tuple((type_id, len(a), a.nbytes) for type_id, a in zip(types, arrays))


def _packed_components(m: packed.PackedMatrix) -> tuple:
    is_bytes = m.value_type == packed.TYPE_Q4_NL  # ggml has no such type
    return (
        (TYPE_I8 if is_bytes else m.value_type, m.values.nbytes if is_bytes else m.n_values, m.values.nbytes),
        (TYPE_I8, len(m.index), m.index.nbytes),
        (TYPE_I32, len(m.row_ptr), m.row_ptr.nbytes),
    )


def _arrays(m: ec_csr.EcCsrMatrix | packed.PackedMatrix) -> list:
    return [getattr(m, name) for name in (packed if isinstance(m, packed.PackedMatrix) else ec_csr).ARRAYS]


class Spool:
    """Encoded tensors between the two passes: a file without a name, in the folder of the output."""

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._file = None

    def __enter__(self) -> Spool:
        if self._folder is not None:
            self._file = tempfile.TemporaryFile(dir=self._folder)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._file is not None:
            self._file.close()

    def put(self, arrays: list) -> int:
        """Keeps them, one behind the other; returns where. Without a folder nothing is kept."""
        if self._file is None:
            return -1
        at = self._file.seek(0, 2)
        for array in arrays:
            self._file.write(memoryview(array).cast("B"))
        return at

    def get(self, at: int, nbytes: list) -> list:
        """uint8 arrays of these lengths."""
        self._file.seek(at)
        return [np.frombuffer(self._file.read(n), np.uint8) for n in nbytes]


@dataclass(frozen=True)
class Options:
    """How to convert. overrides: (compiled regex, type name); the first found in a tensor's name decides, else type."""

    type: str = "macko"
    overrides: tuple = ()
    drop_negative_zeros: bool = False
    n_threads: int = 0
    extraction: bindings.EcCsrOptions = bindings.EcCsrOptions()
    imatrix: imatrix.Imatrix | None = None  # what the error of a quantized weight counts
    dense_types: tuple = ()  # (tensor name, key of ggml_quants.DENSE_TYPES): dense tensors that are quantized
    target_bpw: float | None = None  # bits per weight of the file at most, with type auto
    measure: bool = False  # fill in Plan.error
    optimize: str = "size"  # what type auto looks at: size or speed

    def asked(self, t: Tensor) -> str | None:
        """The type that an override gives to a tensor."""
        return next((name for pattern, name in self.overrides if pattern.search(t.name)), None)

    def fixed(self, t: Tensor) -> bool:
        """The user has said what becomes of this tensor."""
        return self.asked(t) is not None or t.name in dict(self.dense_types)


def read_weights(t: Tensor, options: Options, quantize: bool = False) -> tuple:
    """(bit patterns (rows, cols), -0.0 that are kept). Quantized, a -0.0 would only take a place."""
    bits = t.read_bits(options.n_threads)
    negative = bits == values.NEGATIVE_ZERO[t.type]
    n = int(np.count_nonzero(negative))
    if n and (quantize or options.drop_negative_zeros):
        bits[negative] = 0
        n = 0
    return bits, n


def plan_tensor(t: Tensor, options: Options, alignment: int, spool: Spool) -> Plan:
    asked = options.asked(t)
    wanted = asked or options.type
    n_negative_zeros = 0

    def stay(reason: str, count: bindings.Count | None = None) -> Plan:
        return Plan(t, DENSE, 0, reason, align(t.nbytes, alignment), count, n_negative_zeros)

    dense_type = dict(options.dense_types).get(t.name)
    if dense_type is not None:
        return plan_dense(t, dense_type, options, alignment, spool)
    if not weights.is_multiplied(t.name, len(t.ne)):
        return stay("llama.cpp does not only multiply with it" if asked and asked != DENSE else "")
    if wanted == DENSE:
        return stay("asked for")
    if not weights.is_value_type(t.type):
        return stay(f"{type_name(t.type)} values; only f16, bf16 and f32 can be stored sparse")
    if len(t.name.encode()) + MAX_SUFFIX > MAX_NAME:
        return stay(f"its name is longer than {MAX_NAME - MAX_SUFFIX} bytes")
    try:
        bits, n_negative_zeros = read_weights(t, options, wanted in QUANT_TYPES)
        count = bindings.count_dense(bits, t.type, options.n_threads)
    except errors.MackoError as e:
        if e.code != errors.LIMIT:
            raise
        return stay(str(e))
    if count.n_nonfinite:
        return stay(f"{count.n_nonfinite} values are not finite", count)

    if any(fmt == EC_CSR for fmt, _ in TYPES[wanted]):  # takes seconds to minutes
        console.log(f"{t.name}: looking for blocks ..")
    found = []  # (bytes, format, delta_bits, components, encoded)
    value_type = QUANT_TYPES.get(wanted, t.type)
    for fmt, delta_bits in TYPES[wanted]:
        encoded = None
        if fmt == MACKO:
            if count.n_stored[delta_bits] > macko.MAX_STORED:
                continue
            components = _macko_components(t, delta_bits, count)
        elif fmt == PACKED:
            try:
                encoded = encode_packed(bits, t, value_type, options)
            except errors.MackoError as e:
                if e.code not in (errors.LIMIT, errors.NOT_FINITE):
                    raise
                if len(TYPES[wanted]) > 1:
                    continue
                return stay(str(e), count)
            delta_bits, components = encoded.index_bits, _packed_components(encoded)
        else:
            try:
                encoded = bindings.ec_csr_encode(bits, t.type, delta_bits, options.extraction, options.n_threads)
            except errors.MackoError as e:
                if e.code != errors.LIMIT:
                    raise
                continue
            components = _ec_csr_components(encoded)
        nbytes = sum(align(nbytes, alignment) for _, _, nbytes in components)
        found.append((nbytes, fmt, delta_bits, components, encoded))
    if not found:
        return stay(f"more than {macko.MAX_STORED} entries", count)
    chosen = min(found, key=lambda x: x[0])  # the first of equals
    why = _why(found) if wanted == "auto" else ""
    if wanted == "auto" and options.optimize == "speed":
        chosen, why = _fastest(found, options.n_threads)
    nbytes, fmt, delta_bits, components, encoded = chosen
    if nbytes >= align(t.nbytes, alignment):
        density = count.nnz / t.n_elements
        return stay(f"would not shrink: density {density:.3f}, {nbytes / t.nbytes:.3f} of dense", count)
    if fmt == PACKED and asked is None and not options.measure:
        same = packed.QUANT_NAMES.get(encoded.value_type)
        type_id = ggml_quants.DENSE_TYPES.get(same)
        # the index of a head, or of a layer that was not pruned, would say nothing
        if type_id is not None and ggml_quants.nbytes(type_id, t.rows, t.cols) <= nbytes:
            return plan_dense(t, same, options, alignment, spool)
    at = spool.put(_arrays(encoded)) if encoded is not None else -1
    error = 0.0
    if options.measure and value_type in packed.QUANT_NAMES:
        decoded = bindings.decode(encoded, options.n_threads)
        error = quantize.error_of(bits, decoded, t.type, quantize.column_weights(options.imatrix, t))
    reason = why or (f"error {math.sqrt(error):.2%}" if options.measure else "")
    value_type = encoded.value_type if fmt == PACKED else value_type
    return Plan(t, fmt, delta_bits, reason, nbytes, count, n_negative_zeros, components, at, value_type, None, error)


def encode_packed(bits: np.ndarray, t: Tensor, value_type: int, options: Options) -> packed.PackedMatrix:
    if value_type == t.type:
        return bindings.packed_encode(bits, t.type, value_type, SMALLEST, options.n_threads)
    counts = quantize.column_weights(options.imatrix, t)
    if value_type != packed.TYPE_Q4_NL:
        return quantize.non_zeros(bits, t.type, value_type, counts, options.n_threads)
    # its levels leave out what is near zero: a matrix that was not pruned, as many heads, is better off with Q4_0
    tried = [
        quantize.non_zeros(bits, t.type, kind, counts, options.n_threads) for kind in (value_type, packed.TYPE_Q4_0)
    ]
    return min(tried, key=lambda m: quantize.error_of(bits, bindings.decode(m, options.n_threads), t.type, counts))


def plan_dense(t: Tensor, name: str, options: Options, alignment: int, spool: Spool) -> Plan:
    """A tensor that stays dense, in a quantized type. Raises MackoError if it cannot have that type."""
    type_id = ggml_quants.DENSE_TYPES[name]
    block = ggml_quants.block_size(type_id)
    if not weights.is_value_type(t.type) or t.cols % block:
        why = f"{t.cols} columns are no multiple of {block}" if t.cols % block else f"it is {type_name(t.type)} already"
        raise errors.error(errors.BAD_ARGUMENT, f"{t.shard.path}: {t.name} cannot become {name}: {why}")
    bits = t.read_bits(options.n_threads)
    n_nonfinite = bindings.count_dense(bits, t.type, options.n_threads).n_nonfinite
    if n_nonfinite:
        raise errors.error(errors.NOT_FINITE, f"{t.shard.path}: {t.name}: {n_nonfinite} values are not finite")
    data = quantize.dense(bits, t, type_id, quantize.column_weights(options.imatrix, t), options.n_threads)
    new = ((type_id, t.ne, data.nbytes),)
    return Plan(t, DENSE, 0, "", align(data.nbytes, alignment), None, 0, new, spool.put([data]), None, type_id)


def _why(found: list) -> str:
    """What auto chose from: the smallest of each format."""
    best = [min((x for x in found if x[1] == fmt), default=None, key=lambda x: x[0]) for fmt in COMPONENTS]
    ranked = sorted((x for x in best if x is not None), key=lambda x: x[0])
    return "smallest: " + ", ".join(f"{storage_name(x[1], x[2])} {console.size(x[0]).strip()}" for x in ranked)


def _fastest(found: list, n_threads: int) -> tuple:
    """(what is fastest on a GPU, why). EC-CSR only where its blocks are faster than the rows that a GPU can keep instead."""
    rows = min((x for x in found if x[1] == MACKO), key=lambda x: x[0], default=found[0])
    timed = [(*bindings.ec_csr_gpu_us(x[4], n_threads), x) for x in found if x[1] == EC_CSR]
    timed = [x for x in timed if x[0] != float("inf")]
    if not timed:
        return rows, "fastest on a GPU: rows; no blocks of several rows"
    blocks_us, rows_us, chosen = min(timed, key=lambda x: x[0])
    blocks = f"{storage_name(chosen[1], chosen[2])} in blocks {blocks_us:.1f} us"
    if blocks_us < rows_us:
        return chosen, f"fastest on a GPU (model): {blocks}, as rows {rows_us:.1f} us"
    return rows, f"fastest on a GPU (model): {storage_name(rows[1], rows[2])} {rows_us:.1f} us, {blocks}"


def plan_model(model: Model, options: Options, spool: Spool) -> list:
    if options.target_bpw is not None:
        return plan_for_target(model, options, spool)
    return [plan_tensor(t, options, model.alignment, spool) for t in model.tensors]


def plan_for_target(model: Model, options: Options, spool: Spool) -> list:
    """The types with the least error, for each tensor, that keep the file within options.target_bpw. Each is tried; what
    is chosen is made again, so that no more than one form of a tensor is kept.
    """
    candidates = []
    for t in model.tensors:
        is_free = weights.is_multiplied(t.name, len(t.ne)) and not options.fixed(t)
        if is_free:
            console.log(f"{t.name}: trying types ..")
        names = MIXED if is_free else (options.type,)
        tried = [replace(options, type=name, measure=True) for name in names]
        candidates.append([(o.type, plan_tensor(t, o, model.alignment, Spool(None))) for o in tried])
    limit = int(options.target_bpw * sum(t.n_elements for t in model.tensors) / 8)
    chosen = mixture.choose(
        [[(p.nbytes, p.error * p.tensor.n_elements) for _, p in c] for c in candidates],
        lambda picks: output_nbytes(model, [c[i][1] for c, i in zip(candidates, picks)]),
        limit,
    )
    if isinstance(chosen, int):
        least = chosen * 8 / sum(t.n_elements for t in model.tensors)
        raise errors.error(
            errors.BAD_ARGUMENT, f"--target-bpw {options.target_bpw:g} cannot be reached; the least is {least:.3f}"
        )
    return [
        plan_tensor(c[i][1].tensor, replace(options, type=c[i][0], measure=True), model.alignment, spool)
        for c, i in zip(candidates, chosen)
    ]


def output_nbytes(model: Model, plans: list) -> int:
    """Size of the file."""
    return file_nbytes(
        model.keys + sparse_keys(plans), [new for p in plans for new in p.new_tensors()], model.alignment
    )


def sparse_keys(plans: list) -> list:
    """The macko.* metadata (FORMAT.md section 2) of the tensors that become sparse."""
    sparse = [p for p in plans if p.format != DENSE]
    if not sparse:
        return []
    ne = [x for p in sparse for x in (*p.tensor.ne, 1, 1, 1)[:4]]
    version = max(VALUE_VERSION.get(p.value_type, FORMAT_VERSION[p.format]) for p in sparse)
    return [
        make_key("macko.version", "u32", version),
        make_key("macko.min_reader_version", "u32", version),
        make_key("macko.tensor.name", "[str", [p.tensor.name for p in sparse]),
        make_key("macko.tensor.format", "[str", [p.format for p in sparse]),
        make_key("macko.tensor.type", "[u32", [p.tensor.type for p in sparse]),
        make_key("macko.tensor.ne", "[u64", ne),
        make_key("macko.tensor.delta_bits", "[u32", [p.delta_bits for p in sparse]),
        make_key("macko.tensor.nnz", "[u64", [p.count.nnz for p in sparse]),
    ]


def encode_as_planned(model: Model, p: Plan, options: Options) -> macko.MackoMatrix:
    t = p.tensor
    try:
        return bindings.encode(read_weights(t, options)[0], t.type, p.delta_bits, p.count, options.n_threads)
    except errors.MackoError:
        model.check_unchanged()  # if it has changed, that is the error: the tensor is not the one that was counted
        raise


def write_model(model: Model, plans: list, output: AtomicOutput, options: Options, spool: Spool) -> None:
    writer = Writer(
        output, model.keys + sparse_keys(plans), [new for p in plans for new in p.new_tensors()], model.alignment
    )
    for i, p in enumerate(plans):
        t = p.tensor
        if p.format == DENSE and p.dense_type is None:
            writer.write(t.blocks())
            what = f"size = {console.size(t.nbytes)}" + (f", stays dense: {p.reason}" if p.reason else "")
        else:
            if p.spooled_at >= 0:
                arrays = spool.get(p.spooled_at, [nbytes for _, _, nbytes in p.components])
            else:
                m = encode_as_planned(model, p, options)
                arrays = [m.values, m.deltas, m.row_ptr]
            if p.format == DENSE:
                writer.write(arrays)
            else:
                for array in arrays:
                    writer.write([array])
            nbytes = sum(a.nbytes for a in arrays)
            what = f"converting to {p.type} .. size = {console.size(t.nbytes)} -> {console.size(nbytes)}"
            what += f" ({p.reason})" if p.reason else ""
        console.progress(i + 1, len(plans), t.name, t.ne, type_name(t.type), what)
    writer.finish()
    model.check_unchanged()


def check_and_commit(model: Model, output: AtomicOutput, n_threads: int = 0, equal_zeros: bool = False) -> list:
    """Reads the sealed output back through the C library, compares it with the source, and gives it its name. Returns
    the errors of the quantized tensors.
    """
    output.seal()
    quantized: list = []
    try:
        with Model(output.partial) as written:
            difference = first_difference(model, written, n_threads, equal_zeros=equal_zeros, quantized=quantized)
    except errors.MackoError as e:
        raise errors.error(e.code, str(e).replace(str(output.partial), str(output.path))) from e
    if difference is not None:
        raise errors.error(errors.FILE_CHANGED, f"{output.path}: what was written is not what was read: {difference}")
    output.commit()
    return quantized


# ---- command ----

HELP = "store a pruned model sparse"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a sparse GGUF: weights of blocks (and output.weight) as MACKO or EC-CSR where that is smaller, "
        "everything else as it is. Lossless, but for the quantized types: the result is read back and compared bit for bit "
        "(quantized: within the type's error, zeros kept) before it gets its name."
    )
    parser.add_argument("input", metavar="IN", help="GGUF model; the first file of a split one")
    parser.add_argument("output", metavar="OUT", nargs="?", help="sparse GGUF to write (not needed with --dry-run)")
    parser.add_argument(
        "type",
        metavar="TYPE",
        nargs="?",
        default="macko",
        help="macko: the number of delta bits that makes each tensor smallest (default); "
        "macko-d1, macko-d2, macko-d4, macko-d8: that many. ec-csr, ec-csr-4, ec-csr-8: blocks of rows that share "
        "columns, in the same way; takes seconds per tensor. packed: non-zeros without fillers behind a bitmap or gap codes. "
        "auto: whatever of these lossless types is smallest for each tensor. macko-q8_0, macko-q5_0, macko-q4_nl, "
        "macko-q4_0: packed, with the non-zeros quantized (lossy), or dense in that type where there are next to no zeros; "
        "q4_nl is as large as q4_0, and loses less where zeros were pruned; elsewhere it is q4_0",
    )
    parser.add_argument("nthreads", nargs="?", type=int, default=0, help="threads (default: all cores)")
    parser.add_argument(
        "--tensor-type",
        metavar="REGEX=TYPE",
        action="append",
        default=[],
        help="TYPE, or dense, for tensors in whose name REGEX is found; may be repeated, the first match counts",
    )
    parser.add_argument(
        "--drop-negative-zeros",
        action="store_true",
        help="treat -0.0 as 0, else it is kept like any other value: smaller, same results, not bit for bit the source",
    )
    parser.add_argument(
        "--optimize",
        choices=["size", "speed"],
        default="size",
        help="what auto looks at: size, the bytes really encoded (default); speed, the time of a product on a GPU by a "
        "model that was fitted on an H200 (on a CPU MACKO and EC-CSR run alike)",
    )
    parser.add_argument(
        "--granularity",
        type=int,
        default=16,
        metavar="N",
        help="ec-csr: at most N rows in a block, 1, 2, 4 ... 64 (default: 16)",
    )
    parser.add_argument(
        "--min-columns",
        type=int,
        default=0,
        metavar="N",
        help="ec-csr: at least N columns in an extracted block, a multiple of 128 (default: as many as save bytes)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="ec-csr: of the order in which rows are paired (default: 0)"
    )
    parser.add_argument(
        "--imatrix",
        metavar="FNAME",
        help="quantized types: weigh errors by the inputs of a calibration text (macko calibrate, llama-imatrix)",
    )
    parser.add_argument(
        "--target-bpw",
        type=float,
        metavar="X",
        help=f"with auto: for each tensor one of {', '.join(MIXED)}, so that the whole file has at most X bits per weight "
        "and the sum of relative squared errors is least",
    )
    dense_types = ", ".join(ggml_quants.DENSE_TYPES)
    parser.add_argument(
        "--output-tensor-type",
        metavar="TYPE",
        help=f"quantize output.weight (or the embedding that stands for it) and keep it dense: {dense_types}",
    )
    parser.add_argument("--token-embedding-type", metavar="TYPE", help="the same for token_embd.weight")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be written")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def parse_type(name: str, more: tuple = ()) -> str:
    if name.lower() not in (*TYPES, *more):
        raise errors.error(errors.BAD_ARGUMENT, f"unknown type '{name}'; known: {', '.join((*TYPES, *more))}")
    return name.lower()


def parse_override(text: str) -> tuple:
    pattern, equals, name = text.rpartition("=")
    if not equals or not pattern:
        raise errors.error(errors.BAD_ARGUMENT, f"--tensor-type {text}: expected REGEX=TYPE")
    try:
        return re.compile(pattern), parse_type(name, (DENSE,))
    except re.error as e:
        raise errors.error(errors.BAD_ARGUMENT, f"--tensor-type {text}: {e}") from e


def dense_types_of(model: Model, output: str | None, embedding: str | None) -> tuple:
    """Options.dense_types: the embedding is the output head, too, in a model that has no other."""
    out = {}
    names = {t.name for t in model.tensors}
    for option, name in (("--output-tensor-type", output), ("--token-embedding-type", embedding)):
        if name is None:
            continue
        if name.lower() not in ggml_quants.DENSE_TYPES:
            known = ", ".join(ggml_quants.DENSE_TYPES)
            raise errors.error(errors.BAD_ARGUMENT, f"{option} {name}: unknown type; known: {known}")
        head = weights.HEAD if option == "--output-tensor-type" and weights.HEAD in names else weights.EMBEDDING
        out[head] = name.lower()
    return tuple(out.items())


def options_of(args: argparse.Namespace, model: Model) -> Options:
    """Raises MackoError for what does not fit together, or the model."""
    overrides = tuple(parse_override(text) for text in args.tensor_type)
    if not 0 <= args.seed < 2**64 or not all(0 <= n < 2**31 for n in (args.granularity, args.min_columns)):
        raise errors.error(errors.BAD_ARGUMENT, "--seed, --granularity or --min-columns is out of range")
    extraction = bindings.EcCsrOptions(args.granularity, args.min_columns, True, args.seed)
    kind = parse_type(args.type)
    if args.target_bpw is not None and (kind != "auto" or not 0 < args.target_bpw < 64):
        raise errors.error(
            errors.BAD_ARGUMENT, f"--target-bpw {args.target_bpw:g}: needs type auto and a number above 0"
        )
    statistics = imatrix.read(args.imatrix) if args.imatrix else None
    if statistics is not None:
        statistics.check_model(model)
    return Options(
        kind,
        overrides,
        args.drop_negative_zeros,
        args.nthreads,
        extraction,
        statistics,
        dense_types_of(model, args.output_tensor_type, args.token_embedding_type),
        args.target_bpw,
        optimize=args.optimize,
    )


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    if args.dry_run and args.output and args.output.lower() in TYPES:  # `convert IN macko --dry-run`
        args.output, args.type = None, args.output
    if not args.output and not args.dry_run:
        raise errors.error(errors.BAD_ARGUMENT, "OUT is missing (or use --dry-run)")
    with Model(args.input) as model:
        options = options_of(args, model)
        if args.dry_run:
            plans = plan_model(model, options, Spool(None))
            print_plan(plans)
            print_totals(model, plans, options)
            return 0
        with AtomicOutput(args.output, model.paths, args.force) as output, Spool(output.path.parent) as spool:
            plans = plan_model(model, options, spool)
            write_model(model, plans, output, options, spool)
            quantized = check_and_commit(model, output, args.nthreads, options.drop_negative_zeros)
        print_totals(model, plans, options)
        if quantized:
            console.log(f"lossy: {error_line(quantized)}")
    warn_if_not_loadable(output.path)
    console.log(f"total time  = {(time.monotonic() - started) * 1000:8.2f} ms")
    return 0


def print_plan(plans: list) -> None:
    rows = []
    for p in plans:
        t = p.tensor
        rows.append(
            [
                t.name,
                "x".join(map(str, t.ne)),
                type_name(t.type),
                p.density,
                console.size(t.nbytes).strip(),
                console.size(p.nbytes).strip(),
                p.type,
                round(p.nbytes * 8 / t.n_elements, 2),
                p.break_even,
                p.reason,
            ]
        )
    headers = [
        "tensor",
        "shape",
        "type",
        "density",
        "size",
        "new size",
        "new type",
        "BPW",
        "break-even density",
        "note",
    ]
    print(console.table(rows, headers))


def print_totals(model: Model, plans: list, options: Options) -> None:
    n_elements = sum(t.n_elements for t in model.tensors)
    nbytes = output_nbytes(model, plans)
    print(console.model_line("model size", model.nbytes, n_elements))
    print(console.model_line("macko size", nbytes, n_elements))
    n_dense = sum(bool(p.reason) and p.format == DENSE for p in plans)
    if all(p.format == DENSE for p in plans):
        console.log("warning: no tensor would shrink; the output is a dense file")
    elif n_dense:
        console.log(f"warning: {n_dense} of {len(plans)} tensor(s) stay dense, see above")
    n = sum(p.tensor.n_elements for p in plans if p.count)
    negative = sum(p.n_negative_zeros for p in plans)
    if negative > n / 1000:  # masks leave them: w * 0 is -0.0 for a negative w
        console.log(
            f"warning: {negative} weights ({negative / n:.1%}) are -0.0, which is kept as a value; "
            "--drop-negative-zeros makes the file smaller"
        )


def warn_if_not_loadable(path: object) -> None:
    """llama.cpp gets a sparse file only after stricter checks of its metadata: better to hear of it now."""
    try:
        bindings.File(path, require_model=True).close()
    except errors.MackoError as e:
        console.log(f"warning: ggml_macko will refuse to load this model: {e}")
