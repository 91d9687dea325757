"""Dense GGUF -> sparse GGUF: `macko convert IN OUT [TYPE] [nthreads]`.

Two passes over the source, one tensor in memory at a time: count (which decides the tensor table), then encode and
write. The result is read back and compared with the source before it gets its name.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass

import numpy as np

from . import bindings, console, errors, formats, weights
from .gguf_files import (
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
from .verify import first_difference

COMPONENTS = ("values", "deltas", "row_ptr")
TYPE_I8, TYPE_I32 = 24, 26  # ggml type ids of deltas and row_ptr

# TYPE -> delta_bits to choose from
TYPES = {"macko": formats.DELTA_BITS, **{f"macko-d{b}": (b,) for b in formats.DELTA_BITS}}
DENSE = "dense"


@dataclass(frozen=True)
class Plan:
    """What becomes of a tensor."""

    tensor: Tensor
    delta_bits: int  # 0: stays dense
    reason: str  # why it stays dense; empty for a tensor that nobody would store sparse
    nbytes: int  # in the new file
    count: bindings.Count | None = None
    n_negative_zeros: int = 0

    @property
    def density(self) -> float | None:
        return None if self.count is None else self.count.nnz / self.tensor.n_elements

    @property
    def type(self) -> str:
        return f"macko-d{self.delta_bits}" if self.delta_bits else DENSE

    @property
    def break_even(self) -> float | None:
        """Density of random non-zeros at which this tensor would be as large as dense (delta_bits as here, or best)."""
        if self.count is None:
            return None
        bits = formats.value_bits(self.tensor.type)
        widths = (self.delta_bits,) if self.delta_bits else formats.DELTA_BITS
        return max(formats.break_even_density(self.tensor.cols, b, bits) for b in widths)

    def new_tensors(self) -> list:
        t = self.tensor
        if not self.delta_bits:
            return [NewTensor(t.name, t.type, t.ne, t.nbytes)]
        return [
            NewTensor(f"{t.name}.{c}", type_id, (n,), nbytes)
            for c, (type_id, n, nbytes) in zip(COMPONENTS, _components(t, self.delta_bits, self.count))
        ]


def _components(t: Tensor, delta_bits: int, count: bindings.Count) -> list:
    """(ggml type, elements, bytes) of each component."""
    n_stored = count.n_stored[delta_bits]
    n = formats.n_padded(n_stored)
    n_deltas = formats.deltas_nbytes(n_stored, delta_bits)
    return [
        (t.type, n, n * formats.value_bits(t.type) // 8),
        (TYPE_I8, n_deltas, n_deltas),
        (TYPE_I32, t.rows + 1, 4 * (t.rows + 1)),
    ]


@dataclass(frozen=True)
class Options:
    """How to convert. overrides: (compiled regex, type name); the first found in a tensor's name decides, else type."""

    type: str = "macko"
    overrides: tuple = ()
    drop_negative_zeros: bool = False
    n_threads: int = 0


def read_weights(t: Tensor, options: Options) -> tuple:
    """(bit patterns (rows, cols), -0.0 among them before any were dropped)."""
    bits = t.read_bits(options.n_threads)
    negative = bits == formats.NEGATIVE_ZERO[t.type]
    n = int(np.count_nonzero(negative))
    if n and options.drop_negative_zeros:
        bits[negative] = 0
    return bits, n


def plan_tensor(t: Tensor, options: Options, alignment: int) -> Plan:
    asked = next((name for pattern, name in options.overrides if pattern.search(t.name)), None)
    wanted = asked or options.type
    n_negative_zeros = 0

    def stay(reason: str, count: bindings.Count | None = None) -> Plan:
        return Plan(t, 0, reason, align(t.nbytes, alignment), count, n_negative_zeros)

    if not weights.is_multiplied(t.name, len(t.ne)):
        return stay("llama.cpp does not only multiply with it" if asked and asked != DENSE else "")
    if wanted == DENSE:
        return stay("asked for")
    if not weights.is_value_type(t.type):
        return stay(f"{type_name(t.type)} values; only f16, bf16 and f32 can be stored sparse")
    longest = max(len(c) for c in COMPONENTS) + 1
    if len(t.name.encode()) + longest > MAX_NAME:
        return stay(f"its name is longer than {MAX_NAME - longest} bytes")
    try:
        bits, n_negative_zeros = read_weights(t, options)
        count = bindings.count_dense(bits, t.type, options.n_threads)
    except errors.MackoError as e:
        if e.code != errors.LIMIT:
            raise
        return stay(str(e))
    if count.n_nonfinite:
        return stay(f"{count.n_nonfinite} values are not finite", count)

    def nbytes(delta_bits: int) -> int:
        return sum(align(nbytes, alignment) for _, _, nbytes in _components(t, delta_bits, count))

    allowed = [b for b in TYPES[wanted] if count.n_stored[b] <= formats.MAX_STORED]
    if not allowed:
        return stay(f"more than {formats.MAX_STORED} entries", count)
    best = min(allowed, key=lambda b: (nbytes(b), b))
    if nbytes(best) >= align(t.nbytes, alignment):
        density = count.nnz / t.n_elements
        return stay(f"would not shrink: density {density:.3f}, {nbytes(best) / t.nbytes:.3f} of dense", count)
    return Plan(t, best, "", nbytes(best), count, n_negative_zeros)


def plan_model(model: Model, options: Options) -> list:
    return [plan_tensor(t, options, model.alignment) for t in model.tensors]


def sparse_keys(plans: list) -> list:
    """The macko.* metadata (FORMAT.md section 2) of the tensors that become sparse."""
    sparse = [p for p in plans if p.delta_bits]
    if not sparse:
        return []
    ne = [x for p in sparse for x in (*p.tensor.ne, 1, 1, 1)[:4]]
    return [
        make_key("macko.version", "u32", 1),
        make_key("macko.min_reader_version", "u32", 1),
        make_key("macko.tensor.name", "[str", [p.tensor.name for p in sparse]),
        make_key("macko.tensor.format", "[str", ["macko"] * len(sparse)),
        make_key("macko.tensor.type", "[u32", [p.tensor.type for p in sparse]),
        make_key("macko.tensor.ne", "[u64", ne),
        make_key("macko.tensor.delta_bits", "[u32", [p.delta_bits for p in sparse]),
        make_key("macko.tensor.nnz", "[u64", [p.count.nnz for p in sparse]),
    ]


def encode_as_planned(model: Model, p: Plan, options: Options) -> formats.MackoMatrix:
    t = p.tensor
    try:
        return bindings.encode(read_weights(t, options)[0], t.type, p.delta_bits, p.count, options.n_threads)
    except errors.MackoError:
        model.check_unchanged()  # if it has changed, that is the error: the tensor is not the one that was counted
        raise


def write_model(model: Model, plans: list, output: AtomicOutput, options: Options) -> None:
    writer = Writer(
        output, model.keys + sparse_keys(plans), [new for p in plans for new in p.new_tensors()], model.alignment
    )
    for i, p in enumerate(plans):
        t = p.tensor
        if not p.delta_bits:
            writer.write(t.blocks())
            what = f"size = {console.size(t.nbytes)}" + (f", stays dense: {p.reason}" if p.reason else "")
        else:
            m = encode_as_planned(model, p, options)
            for array in (m.values, m.deltas, m.row_ptr):
                writer.write([array])
            what = f"converting to {p.type} .. size = {console.size(t.nbytes)} -> {console.size(m.nbytes)}"
        console.progress(i + 1, len(plans), t.name, t.ne, type_name(t.type), what)
    writer.finish()
    model.check_unchanged()


def check_and_commit(model: Model, output: AtomicOutput, n_threads: int = 0, equal_zeros: bool = False) -> None:
    """Reads the sealed output back through the C library, compares it with the source, and gives it its name."""
    output.seal()
    try:
        with Model(output.partial) as written:
            difference = first_difference(model, written, n_threads, equal_zeros=equal_zeros)
    except errors.MackoError as e:
        raise errors.error(e.code, str(e).replace(str(output.partial), str(output.path))) from e
    if difference is not None:
        raise errors.error(errors.FILE_CHANGED, f"{output.path}: what was written is not what was read: {difference}")
    output.commit()


# ---- command ----

HELP = "store a pruned model sparse"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a sparse GGUF: weights of blocks (and output.weight) in MACKO format where that is smaller, "
        "everything else as it is. Lossless: the result is read back and compared bit for bit before it gets its "
        "name."
    )
    parser.add_argument("input", metavar="IN", help="GGUF model; the first file of a split one")
    parser.add_argument("output", metavar="OUT", nargs="?", help="sparse GGUF to write (not needed with --dry-run)")
    parser.add_argument(
        "type",
        metavar="TYPE",
        nargs="?",
        default="macko",
        help="macko: the number of delta bits that makes each tensor smallest (default); "
        "macko-d1, macko-d2, macko-d4, macko-d8: that many",
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


def run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    if args.dry_run and args.output and args.output.lower() in TYPES:  # `convert IN macko --dry-run`
        args.output, args.type = None, args.output
    overrides = tuple(parse_override(text) for text in args.tensor_type)
    options = Options(parse_type(args.type), overrides, args.drop_negative_zeros, args.nthreads)
    if not args.output and not args.dry_run:
        raise errors.error(errors.BAD_ARGUMENT, "OUT is missing (or use --dry-run)")
    with Model(args.input) as model:
        if args.dry_run:
            plans = plan_model(model, options)
            print_plan(plans)
            print_totals(model, plans, options)
            return 0
        with AtomicOutput(args.output, model.paths, args.force) as output:
            plans = plan_model(model, options)
            write_model(model, plans, output, options)
            check_and_commit(model, output, args.nthreads, options.drop_negative_zeros)
        print_totals(model, plans, options)
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
    tensors = [new for p in plans for new in p.new_tensors()]
    nbytes = file_nbytes(model.keys + sparse_keys(plans), tensors, model.alignment)
    print(console.model_line("model size", model.nbytes, n_elements))
    print(console.model_line("macko size", nbytes, n_elements))
    n_dense = sum(bool(p.reason) for p in plans)
    if not any(p.delta_bits for p in plans):
        console.log("warning: no tensor would shrink; the output is a dense file")
    elif n_dense:
        console.log(f"warning: {n_dense} of {len(plans)} tensor(s) stay dense, see above")
    n = sum(p.tensor.n_elements for p in plans if p.count)
    negative = sum(p.n_negative_zeros for p in plans)
    if negative > n / 1000 and not options.drop_negative_zeros:  # masks leave them: w * 0 is -0.0 for a negative w
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
