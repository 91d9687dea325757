"""EC-CSR: blocks of rows that share columns (FORMAT.md section 6). Converts arrays to blocks and back, and has every
check of a reader. Only the C library divides a matrix into blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ggml_macko import errors
from ggml_macko.native.codec import EncodedMatrix
from ggml_macko.values import EXPONENT, TYPE_I8, TYPE_I16, TYPE_I32, Array, bits_dtype

LANES = 32
VECTOR = 4
MAX_SHORT = LANES * (VECTOR - 1)  # entries of a short block
GRANULARITIES = (1, 2, 4, 8, 16, 32, 64)
ARRAYS = ("values", "deltas", "bases", "blk_ptr", "block_rows", "sets")  # the order of the components in a file


def base_dtype(cols: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if cols <= 65536 else np.int32)


@dataclass(frozen=True)
class EcCsrMatrix:
    """The arrays of one matrix, exactly as in a file."""

    rows: int
    cols: int
    type: int
    delta_bits: int
    nnz: int
    values: Array  # bit patterns
    deltas: Array  # uint8
    bases: Array  # uint16, or int32 if cols > 65536
    blk_ptr: Array  # int32
    block_rows: Array  # int32; X.rows in a file
    sets: Array  # int32, four numbers per set

    @property
    def n_stored(self) -> int:
        return len(self.values)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays in file order."""
        return tuple(getattr(self, name) for name in ARRAYS)

    def encoded(self) -> EncodedMatrix:
        bases = TYPE_I16 if self.bases.dtype.itemsize == 2 else TYPE_I32
        return EncodedMatrix(
            format="ec-csr",
            rows=self.rows,
            cols=self.cols,
            type=self.type,
            value_type=self.type,
            index_bits=self.delta_bits,
            nnz=self.nnz,
            arrays=self.arrays,
            types=(self.type, TYPE_I8, bases, TYPE_I32, TYPE_I32, TYPE_I32),
        )

    @classmethod
    def from_encoded(cls, m: EncodedMatrix) -> EcCsrMatrix:
        return cls(m.rows, m.cols, m.type, m.index_bits, m.nnz, *m.arrays)


@dataclass(frozen=True)
class Block:
    """A block with its stored columns, including fillers and padding."""

    vector_size: int
    rows: Array  # g row indices
    cols: Array  # n columns
    values: Array  # (n, g) bit patterns
    bases: Array  # for the 32 lanes


def _places(n: int, vector_size: int) -> Array:
    """The position in the arrays, in columns, of column i of a block's list."""
    lane, k = np.divmod(np.arange(n), n // LANES)
    found: Array = k // vector_size * (LANES * vector_size) + lane * vector_size + k % vector_size
    return found


def _unpack(deltas: Array, delta_bits: int) -> Array:
    if delta_bits == 8:
        return deltas.astype(np.int64)
    codes: Array = np.stack([deltas & 15, deltas >> 4], axis=1).reshape(-1).astype(np.int64)
    return codes


def sets(m: EcCsrMatrix) -> Array:
    """(n_sets, 4): granularity, vector size, blocks, columns."""
    return m.sets.reshape(-1, 4).astype(np.int64)


def blocks(m: EcCsrMatrix) -> Iterator[Block]:
    """The blocks of a matrix with a valid structure, in the order of the arrays."""
    deltas = _unpack(m.deltas, m.delta_bits)
    bases = m.bases.astype(np.int64).reshape(-1, LANES)
    block = row = ptr = col = value = 0
    for g, v, n_blocks, n_cols in sets(m):
        for b in range(n_blocks):
            begin, end = (int(x) for x in m.blk_ptr[ptr + b : ptr + b + 2])
            n = end - begin
            places = _places(n, v)
            steps = deltas[col + begin : col + end][places].reshape(LANES, -1)
            cols = (bases[block][:, None] + np.cumsum(steps, axis=1)).reshape(-1)
            stored = m.values[value + begin * g : value + end * g].reshape(n, g)[places]
            yield Block(int(v), m.block_rows[row : row + g], cols, stored, bases[block])
            block += 1
            row += g
        ptr += n_blocks + 1
        col += n_cols
        value += n_cols * g


# ---- checks ----


def validate(m: EcCsrMatrix) -> None:
    """Raises PayloadError or FileFormatError unless m follows FORMAT.md section 6."""
    _check_structure(m)
    seen = np.zeros((m.rows, m.cols), dtype=bool)
    nnz = 0
    for block in blocks(m):
        _check_columns(m, block)
        real = np.any(block.values != 0, axis=1)
        if np.any((block.values & EXPONENT[m.type]) == EXPONENT[m.type]):
            raise errors.error(errors.NOT_FINITE, "a value is not finite")
        for row in block.rows:
            if np.any(seen[row, block.cols[real]]):
                raise errors.error(errors.OVERLAP, f"row {row} has an element in two blocks")
            seen[row, block.cols[real]] = True
        nnz += int(np.count_nonzero(real)) * len(block.rows)
    if nnz != m.nnz:
        raise errors.error(errors.BAD_NNZ, f"{nnz} non-zeros, the header says {m.nnz}")


def _check_structure(m: EcCsrMatrix) -> None:
    table = sets(m)
    if not 1 <= len(table) <= 8:
        raise errors.error(errors.BAD_BLOCK, f"{len(table)} sets")
    kinds = [(g, v) for g, v, _, _ in table.tolist()]
    for (g, v), (_, _, n_blocks, n_cols) in zip(kinds, table.tolist()):
        if g not in GRANULARITIES or not (v == VECTOR or (v == 1 and g == 1)) or n_blocks < 1 or n_cols < 1:
            raise errors.error(errors.BAD_BLOCK, f"set of granularity {g}, vector size {v}")
    if kinds != sorted(set(kinds), reverse=True):
        raise errors.error(errors.BAD_BLOCK, "the sets are out of order")
    g, _, n_blocks, n_cols = table.T
    lengths = {
        "values": (g * n_cols).sum(),
        "deltas": n_cols.sum() * m.delta_bits // 8,
        "bases": n_blocks.sum() * LANES,
        "blk_ptr": (n_blocks + 1).sum(),
        "block_rows": (g * n_blocks).sum(),
    }
    for name, n in lengths.items():
        if len(getattr(m, name)) != n:
            raise errors.error(errors.BAD_COMPONENT, f"{name} has {len(getattr(m, name))} elements, the sets need {n}")
    row = ptr = block = 0
    for g, v, n_blocks, n_cols in table.tolist():
        pointers = m.blk_ptr[ptr : ptr + n_blocks + 1].astype(np.int64)
        n = np.diff(pointers)
        unit = LANES * v
        if pointers[0] != 0 or pointers[-1] != n_cols or np.any((n < unit) | (n % unit != 0)):
            raise errors.error(errors.BAD_BLOCK, "blk_ptr")
        if v == 1 and np.any(n > MAX_SHORT):
            raise errors.error(errors.BAD_BLOCK, "a short block is long")
        rows = m.block_rows[row : row + g * n_blocks].reshape(n_blocks, g)
        if np.any((rows < 0) | (rows >= m.rows)) or np.any(np.diff(rows.astype(np.int64), axis=1) <= 0):
            raise errors.error(errors.BAD_BLOCK, "row indices")
        first = m.bases[block * LANES : (block + n_blocks) * LANES : LANES]
        keys = [(-int(n[b]), *rows[b].tolist(), int(first[b])) for b in range(n_blocks)]
        if any(a >= b for a, b in zip(keys, keys[1:])):
            raise errors.error(errors.NOT_CANONICAL, "the blocks of a set are out of order")
        row += g * n_blocks
        ptr += n_blocks + 1
        block += n_blocks
    if m.nnz == 0 and (len(m.values) != LANES or m.block_rows[0] != 0 or m.bases[0] != 0):
        raise errors.error(errors.NOT_CANONICAL, "values are stored, but nnz is 0")


def _check_columns(m: EcCsrMatrix, block: Block) -> None:
    """Checks columns, deltas, fillers and padding of one block."""
    n, g = block.values.shape
    if np.any((block.cols < 0) | (block.cols >= m.cols)):
        raise errors.error(errors.BAD_COLUMN, f"a column of row {block.rows[0]} is not below {m.cols}")
    if np.any(block.cols.reshape(LANES, -1)[:, 0] != block.bases):
        raise errors.error(errors.NOT_CANONICAL, "the first delta of a lane is not 0")
    zero = block.values == 0
    if g > 1:
        if np.any(zero):
            raise errors.error(errors.NOT_CANONICAL, "a zero in a block of several rows")
        if np.any(np.diff(block.cols) <= 0):
            raise errors.error(errors.NOT_CANONICAL, "columns do not rise")
        return
    real = block.cols[~zero[:, 0]]
    if np.any(np.diff(real) <= 0):
        raise errors.error(errors.NOT_CANONICAL, "columns do not rise")
    expected, is_real = stored_columns(real, block.vector_size, m.delta_bits)
    n_entries = int(np.flatnonzero(is_real)[-1]) + 1 if len(real) else 0
    is_short = n_entries <= MAX_SHORT
    if is_short != (block.vector_size == 1):
        raise errors.error(errors.NOT_CANONICAL, f"{n_entries} entries of row {block.rows[0]} in the wrong set")
    if len(expected) != n or np.any(expected != block.cols) or np.any(is_real == zero[:, 0]):
        raise errors.error(errors.NOT_CANONICAL, f"columns of row {block.rows[0]} are not stored as they must be")


def decode(m: EcCsrMatrix) -> Array:
    """The dense bit patterns (rows, cols) of a matrix that passes validate()."""
    validate(m)
    dense = np.zeros((m.rows, m.cols), dtype=bits_dtype(m.type))
    for block in blocks(m):
        real = np.any(block.values != 0, axis=1)
        dense[block.rows[:, None], block.cols[None, real]] = block.values[real].T
    return dense


def stored_columns(real: Array, vector_size: int, delta_bits: int) -> tuple[Array, Array]:
    """(columns, is it a non-zero) for a block of one row: fillers in wide gaps, padding to a whole unit."""
    widest = (1 << delta_bits) - 1
    step = np.diff(real, prepend=real[:1])
    n_fillers = np.maximum(step - 1, 0) // widest
    at = np.cumsum(n_fillers + 1) - 1
    n = int(at[-1]) + 1 if len(at) else 0
    unit = LANES * vector_size
    cols = np.full((max(n, 1) + unit - 1) // unit * unit, real[-1] if len(real) else 0)
    is_real = np.zeros(len(cols), dtype=bool)
    is_real[at] = True
    # filler j of a gap is j * widest columns after the non-zero before it
    owner = np.repeat(np.arange(len(real)), n_fillers + 1)
    back = at[owner] - np.arange(n)
    cols[:n] = np.where(back == 0, real[owner], real[owner - 1] + (n_fillers[owner] + 1 - back) * widest)
    return cols, is_real


class Part(NamedTuple):
    """The rows, columns and values of a block."""

    vector_size: int
    rows: Array
    cols: Array  # columns of its non-zeros


def take_apart(m: EcCsrMatrix) -> list[Part]:
    """The parts into which a matrix was divided."""
    return [Part(b.vector_size, b.rows, b.cols[np.any(b.values != 0, axis=1)]) for b in blocks(m)]


def assemble(dense: Array, type_id: int, delta_bits: int, parts: Sequence[Part]) -> EcCsrMatrix:
    """The canonical arrays for blocks (as take_apart returns them, in any order) of a matrix of bit patterns."""
    stored = []
    for v, rows, real in parts:
        if len(rows) > 1:
            cols, is_real = real, np.ones(len(real), dtype=bool)
        else:
            cols, is_real = stored_columns(real, v, delta_bits)
        of_block = np.where(is_real[:, None], dense[rows[:, None], cols[None, :]].T, 0).astype(dense.dtype)
        stored.append(Block(v, rows, cols, of_block, cols.reshape(LANES, -1)[:, 0]))
    stored.sort(key=lambda b: (-len(b.rows), -b.vector_size, -len(b.cols), b.rows.tolist(), int(b.cols[0])))

    table: list[list[int]] = []
    values, deltas, bases, blk_ptr, block_rows = [], [], [], [], []
    for b in stored:
        n, g = b.values.shape
        if not table or table[-1][:2] != [g, b.vector_size]:
            table.append([g, b.vector_size, 0, 0])
            blk_ptr.append(0)
        table[-1][2] += 1
        table[-1][3] += n
        places = _places(n, b.vector_size)
        steps = np.diff(b.cols.reshape(LANES, -1), axis=1, prepend=b.bases[:, None]).reshape(-1)
        in_place = np.zeros(n, dtype=np.uint8)
        in_place[places] = steps
        deltas.append(in_place if delta_bits == 8 else in_place[::2] | in_place[1::2] << 4)
        arranged = np.zeros((n, g), dtype=dense.dtype)
        arranged[places] = b.values
        values.append(arranged.reshape(-1))
        bases.append(b.bases)
        blk_ptr.append(table[-1][3])
        block_rows.append(b.rows)
    rows, cols = dense.shape
    return EcCsrMatrix(
        rows,
        cols,
        type_id,
        delta_bits,
        int(np.count_nonzero(dense)),
        np.concatenate(values),
        np.concatenate(deltas),
        np.concatenate(bases).astype(base_dtype(cols)),
        np.array(blk_ptr, dtype=np.int32),
        np.concatenate(block_rows).astype(np.int32),
        np.array(table, dtype=np.int32).reshape(-1),
    )
