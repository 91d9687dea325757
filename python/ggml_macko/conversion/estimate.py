"""Predicts size, memory and speed of a model that is stored sparse: `plan(model)`.

Sizes come from the codecs themselves, on the real weights. A sample of the rows of a large tensor is encoded and scaled
up; EC-CSR is omitted, because its gain depends on groups of rows anywhere in a matrix, and it takes seconds per tensor.
Speeds are those of measured_speed.py, on other machines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .. import console, errors
from ..codecs import ggml_quants, registry
from ..codecs.codec import Candidate, Choice, EncodedArrays, Settings, Source, ValueCoding
from ..gguf import tensor_rules
from ..gguf.files import Model, Tensor, type_name
from ..gguf.writer import NewTensor, align, file_nbytes
from ..native import codec as native_codec
from ..native import cpu
from ..values import NEGATIVE_ZERO, TYPE_F16, Array, bits_dtype
from . import measured_speed, model_memory
from .model_memory import ContextMemory, DeviceMemory
from .tensor_plan import dense_instead, dense_nbytes, end_type, stored_nbytes

SAMPLE_WEIGHTS = 1 << 20
"""Number of encoded weights of a tensor. A larger tensor has rows in evenly spread blocks encoded."""

_BLOCK_ROWS = 16

Q8_0, Q4_K_M = "Q8_0", "Q4_K_M"
"""Types of llama-quantize for comparison."""

_K_TYPES = {"q4_k": "q5_0", "q6_k": "q8_0"}  # llama-quantize's types if the number of columns is not a multiple of 256

# ---- results ----


@dataclass(frozen=True)
class GroupPlan:
    """Tensors of the same role in all layers."""

    name: str  # such as ffn_down
    n_tensors: int
    n_parameters: int
    type: str  # of the dense tensors
    density: float | None  # non-zeros over weights, -0.0 counted as zero; None for types without a pattern for zero
    n_negative_zeros: int
    nbytes: int  # in this file
    nbytes_as: Mapping[str, int]  # TYPE of `macko convert`, or of llama-quantize -> bytes in a file
    value_bits: float | None  # of a non-zero in sparse-lossless; None if no tensor would be stored in it
    coverage: float | None  # share of those non-zeros that are not outliers


@dataclass(frozen=True)
class TypePlan:
    """The whole model in one type."""

    type: str  # TYPE of `macko convert`, or one of llama-quantize
    is_sparse: bool
    is_lossless: bool
    n_sparse: int  # tensors that would be stored sparse
    nbytes: int  # of all tensors
    nbytes_file: int  # with the metadata
    ends: str  # type of embeddings and head
    nbytes_gpu: int  # of the tensors in GPU memory, as the plugin reserves it
    nbytes_cpu: int  # in memory of the process
    bits_per_weight: float
    below: Mapping[str, float]  # dense type -> density of block weights below which the file is smaller
    speed: Mapping[str, Mapping[str, float]]  # machine -> dense type -> measured speed relative to that type


@dataclass(frozen=True)
class ModelPlan:
    """The prediction for a model."""

    path: str
    n_parameters: int
    nbytes: int  # of the file
    density: float | None  # of the weights that can be stored sparse
    n_sparse_parameters: int  # weights in tensors that can be stored sparse
    n_negative_zeros: int
    sampled: float  # share of the read weights; 1: sizes are exact except for metadata
    groups: tuple[GroupPlan, ...]
    types: tuple[TypePlan, ...]
    context: ContextMemory | None  # None: the metadata lack the dimensions
    gpus: tuple[DeviceMemory, ...]
    host: DeviceMemory | None
    advice: tuple[str, ...]  # recommendations, in sentences


# ---- planning ----


def plan(
    model: str | os.PathLike[str],
    *,
    types: Sequence[str] = (),
    n_ctx: int = 0,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    all_rows: bool = False,
    n_threads: int = 0,
) -> ModelPlan:
    """Predicts the results of storing a GGUF model sparse: size, memory and speed for each type, and recommendations.

    model: dense or sparse; the first file of a split one. types: TYPEs of convert() to try; by default all but ec-csr
    and auto. n_ctx: tokens of the context for the estimate of memory; 0: 4096, or the model's own length if that is
    less. cache_type_k, cache_type_v: types of its KV cache, with llama.cpp's names. all_rows: read all weights, not a
    sample of those of large tensors. n_threads: 0 uses all cores.

    -0.0 counts as zero. Shows its progress. Raises MackoError for an unknown type or an invalid model, OSError if it
    cannot be read.
    """
    names = [_checked(name) for name in types] or default_types()
    with Model(model) as file:
        frame = _Frame.of(file)
        looked = [
            _look(t, names, frame, all_rows, n_threads)
            for t in console.tracked(file.tensors, "looking at weights", lambda t: t.nbytes_stored, "B")
        ]
        gpus = model_memory.gpu_memory()
        smallest = min((gpu.total for gpu in gpus), default=None)
        context = model_memory.context_memory(file, n_ctx, cache_type_k, cache_type_v, smallest)
        found = ModelPlan(
            path=str(file.path),
            n_parameters=sum(x.tensor.n_elements for x in looked),
            nbytes=file.nbytes,
            density=_mean_density([x for x in looked if x.can_be_sparse]),
            n_sparse_parameters=sum(x.tensor.n_elements for x in looked if x.can_be_sparse),
            n_negative_zeros=sum(x.n_negative_zeros for x in looked),
            sampled=_share_looked_at(looked),
            groups=tuple(_groups(looked)),
            types=tuple(_type_plan(name, looked, frame, n_threads) for name in (*names, Q8_0, Q4_K_M)),
            context=context,
            gpus=tuple(gpus),
            host=model_memory.host_memory(),
            advice=(),
        )
    return replace(found, advice=(*_advice(found), *_ends_advice(looked)))


def default_types() -> list[str]:
    """TYPEs of fast codecs, which choose the index themselves."""
    return [
        name
        for name, choices in registry.types().items()
        if name != registry.AUTO
        and all(c.codec.note is None for c in choices)
        and any(c.codec.type_name(c.value_type or TYPE_F16) == name for c in choices)
    ]


def _checked(name: str) -> str:
    found = registry.type_named(name)
    if found is None:
        raise errors.bad_argument(f"unknown type '{name}'; known: {', '.join(registry.types())}")
    return found


# ---- one tensor ----


@dataclass(frozen=True)
class _Frame:
    """Settings that influence the size of a tensor."""

    alignment: int
    head: str  # the output head, or the embedding that replaces it
    n_layer: int
    nbytes: int  # of the metadata and the tensor table

    @classmethod
    def of(cls, model: Model) -> _Frame:
        names = {t.name for t in model.tensors}
        head = tensor_rules.HEAD if tensor_rules.HEAD in names else tensor_rules.EMBEDDING
        n_layer = sum(name.endswith("attn_norm.weight") for name in names)
        empty = [NewTensor(t.name, t.type, t.ne, 0) for t in model.tensors]
        return cls(model.alignment, head, n_layer, file_nbytes(model.keys, empty, model.alignment))


@dataclass(frozen=True)
class _Stored:
    """A tensor in one type."""

    nbytes: int
    is_sparse: bool
    nbytes_memory: int  # with the CPU's kernels
    nbytes_gpu: int  # reserved on a GPU
    name: str = ""  # of the storage, such as packed-d0
    coding: ValueCoding | None = None


def _dense(nbytes: int) -> _Stored:
    return _Stored(nbytes, False, nbytes, nbytes)


@dataclass(frozen=True)
class _Looked:
    """A tensor and its counts."""

    tensor: Tensor
    can_be_sparse: bool
    n_looked_at: int  # number of read weights
    nnz: float | None  # estimated from the read weights, without -0.0
    n_negative_zeros: int
    stored: Mapping[str, _Stored]


def sample_rows(t: Tensor, all_rows: bool, n_threads: int = 0) -> Array:
    """Bit patterns (rows, cols) of all rows of an F16, BF16 or F32 tensor, or of evenly spread blocks of rows."""
    dtype, row_nbytes = bits_dtype(t.type), t.nbytes // t.rows
    n = t.rows if all_rows else min(t.rows, max(_BLOCK_ROWS, SAMPLE_WEIGHTS // t.cols))
    if t.sparse is not None or n == t.rows:
        bits = t.read_bits(n_threads)
        return bits if n == t.rows else bits[_sampled(t.rows, n)]
    blocks = [t.shard.read(t.offset + int(at) * row_nbytes, _BLOCK_ROWS * row_nbytes) for at in _starts(t.rows, n)]
    return np.concatenate(blocks).view(dtype).reshape(-1, t.cols)


def _starts(rows: int, n: int) -> Array:
    """First rows of the blocks that have about n of the rows."""
    return np.linspace(0, rows - _BLOCK_ROWS, max(1, n // _BLOCK_ROWS)).astype(np.int64)


def _sampled(rows: int, n: int) -> Array:
    return (_starts(rows, n)[:, None] + np.arange(_BLOCK_ROWS)).reshape(-1)


def _look(t: Tensor, names: Sequence[str], of: _Frame, all_rows: bool, n_threads: int) -> _Looked:
    ends = {name: end_type(t, name) for name in names}
    dense = {
        name: _dense(align(int(dense_nbytes(t, end)) if end else t.nbytes, of.alignment)) for name, end in ends.items()
    }
    dense.update({name: _dense(int(_quantized_nbytes(t, name, of))) for name in (Q8_0, Q4_K_M)})
    if not tensor_rules.is_value_type(t.type):
        return _Looked(t, False, t.n_elements, None, 0, dense)
    bits = sample_rows(t, all_rows, n_threads)
    scale = t.n_elements / bits.size
    negative = bits == NEGATIVE_ZERO[t.type]
    n_negative = int(np.count_nonzero(negative))
    if n_negative:
        bits = np.where(negative, 0, bits).astype(bits.dtype)
    nnz = int(np.count_nonzero(bits)) * scale
    can_be_sparse = tensor_rules.may_be_sparse(t.name, len(t.ne)) and not tensor_rules.is_unpruned_embedding(
        t.name, nnz / t.n_elements
    )
    if can_be_sparse:
        count = native_codec.count_dense(bits, t.type, n_threads)
        if not count.n_nonfinite:
            source = Source(np.ascontiguousarray(bits), t.type, count)
            for name in names:
                dense[name] = _stored(t, source, name, of.alignment, scale, n_threads)
    return _Looked(t, can_be_sparse, bits.size, nnz, round(n_negative * scale), dense)


def _stored(t: Tensor, source: Source, wanted: str, alignment: int, scale: float, n_threads: int) -> _Stored:
    """The tensor after `macko convert`: the smallest choice, or dense if that is smaller."""
    settings = Settings(n_threads, search=False)  # the search for scales changes no size
    found = []
    for choice in registry.types()[wanted]:
        try:
            found.append(choice.codec.plan(source, choice, settings))
        except errors.MackoError as e:
            if e.code not in (errors.LIMIT, errors.NOT_FINITE):
                raise
    stays = _dense(align(t.nbytes, alignment))
    if not found:
        return stays
    chosen = min(found, key=lambda c: stored_nbytes(c, alignment))
    header = chosen.codec.header(chosen, source, t.rows)
    nbytes = sum(align(n, alignment) for n in header.nbytes)
    expanded = max(nbytes, round(chosen.codec.nbytes_expanded(chosen, source) * scale))
    if expanded >= stays.nbytes:
        return stays
    instead = dense_instead(t, wanted, source, chosen, nbytes)
    if instead is not None:
        return _dense(align(int(dense_nbytes(t, instead)), alignment))
    on_gpu = native_codec.gpu_nbytes(header)
    return _Stored(nbytes, True, expanded, on_gpu, chosen.name, _coding(chosen, scale))


def _coding(c: Candidate, scale: float) -> ValueCoding | None:
    """The coding of the whole tensor; the read part is smaller by the factor `scale`."""
    if c.matrix is None:
        return None
    found = c.codec.coding(EncodedArrays(c.matrix, c.components), c.value_type, c.matrix.nnz)
    return found and replace(found, n_values=found.n_values * scale, n_outliers=found.n_outliers * scale)


def _quantized_nbytes(t: Tensor, name: str, of: _Frame) -> float:
    """Bytes of the tensor in a file of llama-quantize (its rules for models of the llama architecture)."""
    if len(t.ne) < 2 or not tensor_rules.is_value_type(t.type) or not t.name.endswith(".weight"):
        return t.nbytes
    if t.name.endswith("ffn_gate_inp.weight"):  # a router
        return t.nbytes
    type_name_ = "q8_0" if name == Q8_0 else _q4_k_m_type(t.name, of)
    nbytes = dense_nbytes(t, type_name_)
    if nbytes == float("inf"):
        nbytes = dense_nbytes(t, _K_TYPES.get(type_name_))
    return min(nbytes, t.nbytes)


def _q4_k_m_type(name: str, of: _Frame) -> str:
    """Q6_K for the output head and for half of the most sensitive tensors, otherwise Q4_K."""
    layer = re.match(r"blk\.(\d+)\.(attn_v|ffn_down)", name)
    if layer is None:
        return "q6_k" if name == of.head else "q4_k"
    i, n = int(layer[1]), of.n_layer
    return "q6_k" if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 else "q4_k"


# ---- the whole model ----


def _mean_density(looked: Sequence[_Looked]) -> float | None:
    counted = [x for x in looked if x.nnz is not None]
    n = sum(x.tensor.n_elements for x in counted)
    return sum(x.nnz or 0.0 for x in counted) / n if n else None


def _share_looked_at(looked: Sequence[_Looked]) -> float:
    n = sum(x.tensor.n_elements for x in looked)
    return sum(x.n_looked_at for x in looked) / n if n else 1.0


def group_name(t: Tensor) -> str:
    """The role of a tensor, the same in all layers."""
    if len(t.ne) < 2:
        return "norms and biases"
    return re.sub(r"^blk\.\d+\.|\.weight$", "", t.name)


def _groups(looked: Sequence[_Looked]) -> Iterator[GroupPlan]:
    by_name: dict[str, list[_Looked]] = {}
    for x in looked:
        by_name.setdefault(group_name(x.tensor), []).append(x)
    for name, members in by_name.items():
        value_bits, coverage = _coding_of_group(members)
        yield GroupPlan(
            name=name,
            n_tensors=len(members),
            n_parameters=sum(x.tensor.n_elements for x in members),
            type=", ".join(sorted({type_name(x.tensor.type) for x in members})),
            density=_mean_density(members),
            n_negative_zeros=sum(x.n_negative_zeros for x in members),
            nbytes=sum(x.tensor.nbytes_stored for x in members),
            nbytes_as={k: sum(x.stored[k].nbytes for x in members) for k in members[0].stored},
            value_bits=value_bits,
            coverage=coverage,
        )


def _coding_of_group(members: Sequence[_Looked]) -> tuple[float | None, float | None]:
    """(bits of a value, share of values that are not outliers) of the lossless coded type."""
    found = [x.coding for member in members for x in member.stored.values() if x.coding is not None]
    n = sum(c.n_values for c in found)
    if not n:
        return None, None
    return sum(c.value_bits * c.n_values for c in found) / n, 1 - sum(c.n_outliers for c in found) / n


def _type_plan(name: str, looked: Sequence[_Looked], frame: _Frame, n_threads: int) -> TypePlan:
    nbytes = sum(x.stored[name].nbytes for x in looked)
    n_parameters = sum(x.tensor.n_elements for x in looked)
    choices = registry.types().get(name, ())
    is_lossy = any(c.is_lossy for c in choices)
    dense = sum(x.stored[name].nbytes for x in looked if not x.stored[name].is_sparse)
    sparse = sum(x.stored[name].nbytes_memory for x in looked if x.stored[name].is_sparse)
    by_density = _mean_density([x for x in looked if x.stored[name].is_sparse])
    kind = _measured_kind(name, looked)
    return TypePlan(
        type=name,
        is_sparse=bool(choices),
        is_lossless=bool(choices) and not is_lossy,
        n_sparse=sum(x.stored[name].is_sparse for x in looked),
        nbytes=nbytes,
        nbytes_file=nbytes + frame.nbytes,
        ends=", ".join(dict.fromkeys(_end(name, x) for x in looked if x.tensor.name in tensor_rules.ENDS)),
        nbytes_gpu=sum(x.stored[name].nbytes_gpu for x in looked) - _host_nbytes(name, looked),
        nbytes_cpu=dense + sparse,
        bits_per_weight=(nbytes + frame.nbytes) * 8 / n_parameters if n_parameters else 0.0,
        below=_break_evens(name, looked, n_threads),
        speed=_speeds(kind, by_density, name, looked, frame),
    )


def _end(name: str, x: _Looked) -> str:
    """The type of the stored embedding or head."""
    if x.stored[name].is_sparse:
        return x.stored[name].name
    t, nbytes = x.tensor, x.stored[name].nbytes
    kinds = (kind for kind in ggml_quants.DENSE_TYPES if 0 <= nbytes - dense_nbytes(t, kind) < 64)
    return type_name(t.type) if nbytes >= t.nbytes else next(kinds, "")


def _host_nbytes(name: str, looked: Sequence[_Looked]) -> int:
    """Bytes that no GPU gets: llama.cpp looks up embeddings on the CPU, and only a model without a head multiplies by a
    copy of them."""
    stored = {x.tensor.name: x.stored[name] for x in looked}
    embedding = stored.get(tensor_rules.EMBEDDING)
    return 0 if embedding is None or tensor_rules.HEAD not in stored else embedding.nbytes_gpu


def _break_evens(name: str, looked: Sequence[_Looked], n_threads: int) -> dict[str, float]:
    """For random non-zeros in rows of the usual length: the density below which the file is smaller; 0: none."""
    choices = registry.types().get(name, ())
    candidates = [x for x in looked if x.can_be_sparse and x.nnz is not None]
    if not choices or not candidates:
        return {}
    largest = max(candidates, key=lambda x: x.tensor.n_elements).tensor
    out = {}
    n = sum(x.tensor.n_elements for x in candidates)
    others = [x for x in looked if x not in candidates]
    for dense_type in (Q8_0, Q4_K_M):
        room = sum(x.stored[dense_type].nbytes for x in looked) - sum(x.stored[name].nbytes for x in others)
        out[dense_type] = _random_break_even(choices, largest.cols, largest.type, room * 8 / n, n_threads)
    return out


def _random_break_even(choices: Sequence[Choice], cols: int, type_id: int, limit: float, n_threads: int) -> float:
    """The density of random non-zeros at which a type needs `limit` bits per weight, to 0.01."""
    rows = max(1, (1 << 18) // cols)
    rng = np.random.default_rng(0)
    places = rng.random((rows, cols))
    one = {TYPE_F16: 0x3C00}.get(type_id, 0x3F800000 >> (0 if type_id == 0 else 16))

    def bits_per_weight(density: float) -> float:
        dense = np.where(places < density, one, 0).astype(bits_dtype(type_id))
        source = Source(dense, type_id, native_codec.count_dense(dense, type_id, n_threads))
        settings = Settings(n_threads, search=False)
        return min(stored_nbytes(c.codec.plan(source, c, settings), 1) for c in choices) * 8 / dense.size

    if bits_per_weight(1.0) < limit or bits_per_weight(0.0) > limit:
        return float(limit > bits_per_weight(0.0))
    low, high = 0.0, 1.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if bits_per_weight(middle) < limit else (low, middle)
    return round((low + high) / 2, 2)


def _measured_kind(name: str, looked: Sequence[_Looked]) -> str | None:
    """The name of a type in measured_speed.py: the same for lossless values in any format, the type if quantized."""
    if any(choice.is_lossy for choice in registry.types().get(name, ())):
        return name
    is_f16 = any(x.can_be_sparse and x.tensor.type == TYPE_F16 for x in looked)
    return measured_speed.SPARSE_F16 if is_f16 and name in registry.types() else None


def machines() -> tuple[measured_speed.Machine, ...]:
    """The measured machines that resemble this one."""
    return (*measured_speed.BY_KERNELS.get(cpu.cpu_kernels(), ()), measured_speed.H200, measured_speed.H200_QUANTIZED)


def _speeds(
    kind: str | None, density: float | None, name: str, looked: Sequence[_Looked], frame: _Frame
) -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {}
    if kind is None or density is None:
        return out
    head = next((x for x in looked if x.tensor.name == frame.head and not x.stored[name].is_sparse), None)
    n_head = head.tensor.n_elements if head else 0
    n_blocks = sum(x.tensor.n_elements for x in looked if x.can_be_sparse and x is not head)

    def with_head(machine: measured_speed.Machine, dense: str) -> float | None:
        ratio = machine.ratio(kind, density, dense)
        if ratio is None or head is None:
            return ratio
        blocks = n_blocks * machine.seconds(measured_speed.BITS[dense])
        in_dense = head.stored[dense].nbytes if dense in head.stored else head.tensor.nbytes
        heads = [n_head * machine.seconds(n * 8 / n_head) for n in (in_dense, head.stored[name].nbytes)]
        return (blocks + heads[0]) / (blocks / ratio + heads[1])

    for machine in machines():
        ratios = {dense: with_head(machine, dense) for dense in machine.dense}
        known = {dense: round(r, 2) for dense, r in ratios.items() if r is not None}
        if known:
            out[machine.name] = known
    return out


# ---- advice ----

_PRUNED = 0.95  # models of a higher density are not pruned


def _advice(p: ModelPlan) -> Iterator[str]:
    by_type = {t.type: t for t in p.types}
    if p.density is None:
        yield (
            "Its weights are quantized already: only F16, BF16 and F32 weights can be stored sparse. `macko prune` "
            "dequantizes and prunes them; the F16 or BF16 model is a better source."
        )
        return
    quantized = by_type[Q4_K_M]
    if p.density > _PRUNED:
        yield (
            f"Not pruned: {p.density:.1%} of its weights are not zero, and storing it sparse brings nothing. To make "
            f"it small, use llama-quantize: Q8_0 ({console.size(by_type[Q8_0].nbytes_file)}) or Q4_K_M "
            f"({console.size(quantized.nbytes_file)})."
        )
        return
    if p.n_negative_zeros:
        share = p.n_negative_zeros / p.n_parameters
        yield f"{p.n_negative_zeros} weights ({share:.1%}) are -0.0 and count as zeros here."
    lossless = [t for t in p.types if t.is_lossless]
    sparse = [t for t in p.types if t.is_sparse and not t.is_lossless]
    if lossless:
        yield from _lossless_advice(p, min(lossless, key=lambda t: t.nbytes), quantized)
    smaller = [t for t in sparse if t.nbytes_file < quantized.nbytes_file]
    q4_k_m = console.size(quantized.nbytes_file)
    if smaller:
        t = max(smaller, key=lambda t: t.nbytes_file)  # the one with the least loss
        yield (
            f"{t.type} ({console.size(t.nbytes_file)}) is smaller than dense Q4_K_M ({q4_k_m}); it quantizes the "
            "non-zeros, embeddings and head: measure perplexity."
        )
    elif sparse:
        yield f"No sparse type is smaller than Q4_K_M ({q4_k_m}): use Q4_K_M where size counts."
    yield from _speed_advice(p)
    yield from _memory_advice(p)


def _ends_advice(looked: Sequence[_Looked]) -> Iterator[str]:
    for t in (
        x.tensor for x in looked if x.tensor.name in tensor_rules.ENDS and tensor_rules.is_value_type(x.tensor.type)
    ):
        if dense_nbytes(t, "q6_k") == float("inf"):
            yield f"{t.name} cannot become Q6_K or another K-quant: {t.cols} columns are no multiple of 256."


def _lossless_advice(p: ModelPlan, best: TypePlan, quantized: TypePlan) -> Iterator[str]:
    q4_k_m = console.size(quantized.nbytes_file)
    if not best.n_sparse:
        yield f"At density {p.density:.2f} no lossless type is smaller than the dense file."
        return
    share = best.nbytes_file / p.nbytes
    yield f"Smallest lossless type: {best.type}, {console.size(best.nbytes_file)}, {share:.2f} of this file."
    if best.nbytes_file > quantized.nbytes_file:
        below = best.below.get(Q4_K_M)
        limit = f"below density {below:.2f}" if below else f"at no density, because embeddings and head are {best.ends}"
        yield f"If it need not be lossless, dense Q4_K_M is smaller ({q4_k_m}); a lossless file is smaller {limit}."
    else:
        yield f"It is smaller than dense Q4_K_M ({q4_k_m}), and nothing is lost."


def _speed_advice(p: ModelPlan) -> Iterator[str]:
    """The measured speeds of the planned types, relative to dense Q4_K_M."""
    for machine in machines():
        parts: list[str] = []
        for t in p.types:
            ratio = t.speed.get(machine.name, {}).get(Q4_K_M)
            kind = measured_speed.SPARSE_F16 if t.is_lossless else t.type
            if ratio is not None and not any(kind in part for part in parts):
                parts.append(f"{kind} {ratio:.2f} times")
        limit = machine.break_even(measured_speed.SPARSE_F16, Q4_K_M)
        if parts:
            below = f"; without the head, sparse F16 is faster below density {limit:.2f}" if limit is not None else ""
            yield f"Generation against dense Q4_K_M, measured on {machine.name}: {', '.join(parts)}{below}."


def _memory_advice(p: ModelPlan) -> Iterator[str]:
    if p.context is None:
        return
    rest = p.context.kv_cache + p.context.compute
    for device in p.gpus:
        fits = [t.type for t in p.types if t.nbytes_gpu + rest + p.context.gpu <= device.free]
        yield (
            f"{device.name} has {console.size(device.free)} free; with a context of {p.context.n_ctx} tokens "
            + (f"these fit: {', '.join(fits)}." if fits else "nothing fits.")
        )
    if not p.gpus and p.host is not None:
        rest = p.context.kv_cache + p.context.host
        fits = [t.type for t in p.types if t.nbytes_cpu + rest <= p.host.free]
        yield (
            f"No GPU here. RAM: {console.size(p.host.free)} free; with a context of {p.context.n_ctx} tokens "
            + (f"these fit: {', '.join(fits)}." if fits else "nothing fits.")
        )
