"""Trains the remaining weights of a pruned model: `recover(pruned, output, RecoverOptions(text=...), dense=...)`.

The dense model is the teacher, and a text is the only data; zeros stay zero. The forward pass runs in PyTorch and is
compared with llama.cpp's before training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import numpy as np

from .. import console, errors
from ..codecs import dense_blocks, ggml_quants
from ..evaluation.calibrate import model_digest
from ..evaluation.text_model import Chunks, TextModel, read_text, spread
from ..gguf import tensor_rules
from ..gguf.activation_keys import without_rule
from ..gguf.dense_copy import dequantized
from ..gguf.files import Key, Model, Tensor, make_key
from ..gguf.outputs import AtomicOutput
from ..gguf.writer import NewTensor, Writer
from ..pruning import masks
from ..pruning.methods import read_finite
from ..recovery.checkpoint import Checkpoint
from ..recovery.options import HELD_OUT_SHARE, RecoverOptions
from ..recovery.schedule import Texts
from ..values import NEGATIVE_ZERO, Array, bits_dtype

if TYPE_CHECKING:
    import torch

    from ..evaluation.transformer import Transformer
    from ..recovery.distillation import Arithmetic


@dataclass(frozen=True)
class RecoverReport:
    """The result of `recover`. Perplexities and divergences (nats per token) are those of the held-out chunks."""

    perplexity_dense: float
    perplexity_before: float
    perplexity_after: float  # of the written weights
    divergence_before: float  # from the dense model
    divergence_after: float
    n_trained: int  # weights
    n_tokens: int  # of the text, in one epoch
    learning_rate: float  # the highest
    evaluations: list[dict[str, float]]  # of --method distill: step, rate, loss (on the text), divergence, perplexity
    gpu_nbytes: int = field(default=0, compare=False)  # peak memory of PyTorch on a GPU
    seconds: float = field(default=0.0, compare=False)


def recover(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: RecoverOptions,
    *,
    dense: str | os.PathLike[str],
    force: bool = False,
) -> RecoverReport:
    """Trains the non-zeros of a pruned GGUF (dense or sparse; the first file of a split one) so that it behaves like
    `dense`, the model that it was made from, and writes a dense GGUF with the same zeros.

    Block matrices, norms and biases are trained; embeddings and head are not.

    An interrupted run resumes from OUTPUT.checkpoint; on the same CPU, it writes the same bytes. Raises UsageError (an
    option out of range), MackoError (no PyTorch, unsupported or different models, a bad text, values that are not
    finite) or OSError.
    """
    options.check()
    return train_file(Task(check_pair, trained_tensors, provenance), source, output, dense, options, force)


class Task(NamedTuple):
    """The differences between recovery and training of a whole model."""

    check: Callable[[Model, Model], None]  # checks the model to train and the teacher; raises MackoError
    tensors: Callable[[Model], list[Tensor]]  # the trained tensors
    keys: Callable[[RecoverOptions, RecoverReport], list[Key]]  # metadata of the result


def train_file(
    task: Task,
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    dense: str | os.PathLike[str],
    asked: RecoverOptions,
    force: bool,
) -> RecoverReport:
    """Trains the tensors of a task and writes the model; raises as recover() does."""
    with contextlib.ExitStack() as stack:
        pruned, teacher = (stack.enter_context(Model(path)) for path in (source, dense))
        texts_in = [asked.text] + ([asked.held_out] if asked.held_out is not None else [])
        out = AtomicOutput(output, [*pruned.paths, *teacher.paths, *texts_in], force)
        task.check(pruned, teacher)
        for text in texts_in:
            read_text(text)
        torch = import_torch()
        from ..recovery import ranks

        ranks.check(asked)
        asked = ranks.with_share_of_cores(asked)
        names = {".pruned": source, ".dense": dense}
        suffix = f".{ranks.RANK}" if ranks.RANK else ""
        copies = [stack.enter_context(dequantized(path, f"{out.path}{name}{suffix}")) for name, path in names.items()]
        pruned, teacher = (stack.enter_context(Model(path)) for path in copies)
        if asked.quant_values in dense_blocks.NAMES:
            for t in (t for t in task.tensors(pruned) if len(t.ne) > 1):
                dense_blocks.layout_of(asked.quant_values, f"{source}: {t.name}", t.cols)
        start = time.monotonic()
        torch.manual_seed(asked.seed)
        if asked.n_threads:
            torch.set_num_threads(asked.n_threads)
        device = torch.device("cpu")
        if asked.device == "auto" and torch.cuda.is_available():
            device = torch.device("cuda", ranks.LOCAL_RANK)
            torch.cuda.set_device(device)
        checkpoint = Checkpoint(out.path.with_name(out.path.name + ".checkpoint"), _run(pruned, teacher, asked))
        new, report = _train(pruned, teacher, task.tensors(pruned), asked, device, checkpoint)
        if ranks.RANK == 0:
            with out:
                _write(pruned, new, task.keys(asked, report), out)
                out.seal()
                check_written(pruned, out, new)
                out.commit()
            checkpoint.remove()
    return dataclasses.replace(report, seconds=time.monotonic() - start)


def import_torch() -> Any:
    """The module torch. Raises MackoError if it is not installed."""
    try:
        import torch
    except ImportError as e:
        raise errors.bad_argument("recover needs PyTorch: pip install 'ggml-macko[train]'") from e
    return torch


def _run(pruned: Model, teacher: Model, options: RecoverOptions) -> dict[str, str]:
    """The inputs that determine the result."""
    texts = {"text": options.text, "held-out text": options.held_out}
    return {
        "model": model_digest(pruned.path),
        "dense model": model_digest(teacher.path),
        **{what: hashlib.sha256(read_text(path)).hexdigest() for what, path in texts.items() if path is not None},
        "option": repr({**options.__dict__, "text": "", "held_out": options.held_out is not None, "n_threads": 0}),
    }


def check_pair(pruned: Model, teacher: Model) -> None:
    """Raises MackoError unless the two models have the same shape."""
    shapes = [{t.name: t.ne for t in model.tensors} for model in (pruned, teacher)]
    for name in dict.fromkeys([*shapes[0], *shapes[1]]):
        found, wanted = (shape.get(name) for shape in shapes)
        if found != wanted:
            raise errors.bad_argument(
                f"{pruned.path}: {name}: shape {found or 'none'}, but {wanted or 'none'} in {teacher.path}: it was not "
                "made from that model"
            )


# ---- training ----


class NewData(NamedTuple):
    """A trained tensor."""

    type: int
    data: Array  # bit patterns (rows, cols), or blocks of a quantized type, uint8 (blocks, bytes)

    def values(self, t: Tensor) -> Array:
        """float32 (rows, cols)."""
        if self.type == t.type:
            return masks.to_float32(self.data, self.type)
        return ggml_quants.dequantize(self.data, self.type, t.rows, t.cols)


def trained_tensors(model: Model) -> list[Tensor]:
    """Block matrices, norms and biases."""

    def is_trained(t: Tensor) -> bool:
        is_vector = t.name.startswith("blk.") and len(t.ne) == 1
        return tensor_rules.is_value_type(t.type) and (is_vector or tensor_rules.is_block_weight(t.name, len(t.ne)))

    return [t for t in model.tensors if is_trained(t)]


def _train(
    pruned: Model,
    dense: Model,
    tensors: list[Tensor],
    options: RecoverOptions,
    device: torch.device,
    checkpoint: Checkpoint,
) -> tuple[dict[str, NewData], RecoverReport]:
    """(the trained tensors, in the first process, report)."""
    import torch

    from ..evaluation.transformer import Shape, Transformer, as_bits, read_weights
    from ..recovery.blockwise import fit_blocks
    from ..recovery.distillation import Arithmetic, HeldOut, Training, distill
    from ..recovery.ranks import RANK, Ranks, assign, whole
    from ..recovery.ranks import check as check_ranks
    from ..recovery.sampling import sample

    ranks = Ranks(device)
    shape, shape_of_teacher = Shape.of(pruned), Shape.of(dense)
    significant = {t.name: _significant_bits(t, options) for t in tensors}
    arithmetic = Arithmetic(device)
    teacher = Transformer(shape_of_teacher, read_weights(dense, device))
    texts = _read_texts(dense.path, teacher, arithmetic, options)
    if device.type == "cuda":  # after the comparison with llama.cpp, which has selected other GPUs
        torch.cuda.set_device(device)
        teacher = Transformer(shape_of_teacher, read_weights(dense, device, arithmetic.product_type))
    if options.n_self_generated:
        n = options.n_self_generated
        written = sample(teacher, texts.train, n, texts.first_token, device, options.seed, ranks)
        texts = texts._replace(train=np.concatenate([texts.train, written]))
    options = options.with_batch_size(len(texts.train))
    check_ranks(options)
    weights = read_weights(pruned, device)
    trained: Mapping[str, torch.Tensor] = {t.name: weights[t.name] for t in tensors}
    # fixed matrices as the teacher's
    weights = {n: w if n in trained or w.dim() < 2 else w.to(arithmetic.product_type) for n, w in weights.items()}
    student = Transformer(shape, weights, gradient_checkpointing=options.gradient_checkpointing)
    trains_all = options.quant_values in dense_blocks.NAMES
    n_trained = sum(w.numel() if trains_all or w.dim() < 2 else int((w != 0).sum()) for w in trained.values())
    student, trained = ranks.split(student, trained)
    del weights
    held_out = HeldOut(teacher, texts.held_out, arithmetic)
    of_dense, before = held_out.of_dense, held_out.evaluate(student)
    console.log(f"held-out perplexity: dense {of_dense.perplexity:.4f}, pruned {before.perplexity:.4f}")
    training = Training(student, teacher, trained, texts, options, arithmetic, checkpoint, held_out, before, ranks)
    done = distill(training) if options.method == "distill" else fit_blocks(training)
    new = {}
    for t in tensors:
        if t.name in done.packed:
            new[t.name] = NewData(*done.packed[t.name])
            values = torch.from_numpy(new[t.name].values(t)).reshape(tuple(reversed(t.ne)))
        else:
            values = _rounded(t, whole(trained[t.name]), significant[t.name])
            if RANK == 0:  # which writes the file
                new[t.name] = NewData(t.type, as_bits(values).reshape(t.rows, t.cols))
        assign(trained[t.name], values.float())
    after = held_out.evaluate(student)
    return new, RecoverReport(
        perplexity_dense=of_dense.perplexity,
        perplexity_before=done.before.perplexity,
        perplexity_after=after.perplexity,
        divergence_before=done.before.divergence,
        divergence_after=after.divergence,
        n_trained=n_trained,
        n_tokens=texts.train.size,
        learning_rate=done.rate,
        evaluations=[point._asdict() for point in done.points],
        gpu_nbytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
    )


def _significant_bits(t: Tensor, options: RecoverOptions) -> int:
    """The significant bits of a matrix, for a small `sparse-lossless` file; all bits for a vector."""
    bits = read_finite(t)
    has_all = options.keep_mantissa or options.quant_values is not None
    return 24 if has_all or len(t.ne) == 1 else masks.significant_bits(bits, t.type)


def _rounded(t: Tensor, values: torch.Tensor, significant: int) -> torch.Tensor:
    """rounded() for a tensor of the model. Raises MackoError if a value is out of range."""
    from ..recovery.rounding import rounded

    found = rounded(values, t.type, significant)
    if not found.isfinite().all():
        raise errors.error(errors.NOT_FINITE, f"{t.name}: its new weights are not finite in its type")
    return found


def _read_texts(path: Path, teacher: Transformer, arithmetic: Arithmetic, options: RecoverOptions) -> Texts:
    """The training and held-out chunks. Raises MackoError if the dense model's logits are not llama.cpp's."""
    with TextModel.opened_with(
        path, options.text, options.n_ctx, options.n_chunks, n_batch=options.n_ctx, n_threads=options.n_threads
    ) as (llama, chunks):
        held_out = chunks
        if options.held_out is not None:
            held_out = llama.read_chunks(options.held_out)
        else:
            n = max(1, round(HELD_OUT_SHARE * len(chunks)))
            chunks, held_out = chunks[:-n], chunks[-n:]
        held_out = llama.as_sequences(spread(held_out, options.n_held_out))
        _check_forward_pass(path, llama, teacher, arithmetic, held_out[:1])
        return Texts(chunks, held_out, llama.first_token)


def _check_forward_pass(
    path: Path, llama: TextModel, teacher: Transformer, arithmetic: Arithmetic, chunks: Chunks
) -> None:
    from ..evaluation.transformer import MAX_DIVERGENCE, divergence_from_llama_cpp

    found = divergence_from_llama_cpp(llama, teacher, chunks, arithmetic.device)
    console.detail(f"logits differ from llama.cpp's by {found:.2g} nats per token")
    if not found <= MAX_DIVERGENCE:
        raise errors.error(
            errors.UNSUPPORTED_ARCH,
            f"{path}: the logits that recover computes differ from llama.cpp's by {found:.3g} nats per token "
            f"(at most {MAX_DIVERGENCE:g}): this kind of model is not supported",
        )


# ---- the new file ----


def provenance(options: RecoverOptions, report: RecoverReport) -> list[Key]:
    """The metadata about the recovery of a model."""
    return [
        make_key("macko.prune.recover.method", "str", options.method),
        make_key("macko.prune.recover.datasets", "[str", [Path(options.text).name]),
        make_key("macko.prune.recover.n_tokens", "u64", report.n_tokens),
        make_key("macko.prune.recover.epochs", "u32", options.epochs),
        make_key("macko.prune.recover.learning_rate", "f32", report.learning_rate),
        *(
            [make_key("macko.prune.recover.quant_values", "str", options.quant_values)]
            if options.quant_values is not None
            else []
        ),
    ]


def _blocks(t: Tensor, new: Mapping[str, NewData]) -> Iterator[Array]:
    if t.name in new:
        yield new[t.name].data.reshape(-1).view(np.uint8)
    else:
        yield from t.blocks()


def _write(model: Model, new: Mapping[str, NewData], keys: list[Key], output: AtomicOutput) -> None:
    stored = {t.name: (t.type, t.nbytes) for t in model.tensors}
    stored.update({name: (found.type, found.data.nbytes) for name, found in new.items()})
    tensors = [NewTensor(t.name, stored[t.name][0], t.ne, stored[t.name][1]) for t in model.tensors]
    others = [key for key in without_rule(model.keys) if not key.name.startswith("macko.prune.recover.")]
    writer = Writer(output, [*others, *keys], tensors, model.alignment)
    for t in console.tracked(model.tensors, "writing", lambda t: t.nbytes, "B"):
        writer.write(_blocks(t, new))
    writer.finish()
    model.check_unchanged()


def check_written(model: Model, output: AtomicOutput, new: Mapping[str, NewData]) -> None:
    """Reads the sealed output. Trained tensors must be equal to `new` and, without a dense type, have the zeros of the
    pruned model; the others must be unchanged. Raises MackoError (FILE_CHANGED).
    """
    with Model(output.partial) as written:
        for source, result in zip(model.tensors, written.tensors):
            found = result.read()
            wanted = source.read() if source.name not in new else new[source.name].data.reshape(-1).view(np.uint8)
            same = np.array_equal(found, wanted)
            if source.name in new and result.type == source.type and len(source.ne) > 1:
                before, after = source.read_bits(), found.view(bits_dtype(source.type))
                same = same and not any(
                    np.any(((a == 0) | (a == NEGATIVE_ZERO[source.type])) & (b != 0))
                    for a, b in zip(masks.pieces(before), masks.pieces(after))
                )
            if not same or (source.name, source.ne) != (result.name, result.ne):
                raise errors.error(
                    errors.FILE_CHANGED, f"{output.path}: {source.name}: the file does not hold what was written"
                )
