#!/usr/bin/env python3
"""Trains a dense model of any width and depth, for measurements of pruning and activation sparsity.

    lab/scripts/train_dense.py docs-23m-f16.gguf OUT -f calibration.txt --layers 12 --embd 768 --ff 2048 --heads 12 \\
        --kv-heads 6 --self-generated 38000 --batch-size 16 --epochs 1 --learning-rate 4e-2

The teacher is another model, usually a smaller one: the new model has its vocabulary, and learns its probabilities of
the next token on a text and on chunks that the teacher writes, as in `macko recover`. The architecture is llama, or
arcee: a Llama with feed-forward blocks down(relu(up(h))^2), so that most inputs of down become exactly zero. With
--experts, a Llama is a mixture like Mixtral. Weights are random at the start; with --from-teacher, tensors with the
shape of the teacher's are copies of the teacher's, and each expert has neurons of the teacher's feed-forward block,
chosen at random. Needs PyTorch. The result has F16 matrices.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ggml_macko import console, errors
from ggml_macko.gguf.files import Key, Model, Tensor, make_key
from ggml_macko.gguf.outputs import AtomicOutput
from ggml_macko.gguf.writer import NewTensor, Writer
from ggml_macko.recovery.options import RecoverOptions
from ggml_macko.recovery.recover import RecoverReport, Task, train_file
from ggml_macko.values import TYPE_F16, TYPE_F32, Array, to_float

ARCHITECTURES = ("llama", "arcee")

EMBEDDING_DEVIATION = 0.02
"""Standard deviation of embeddings and head at the start: all tokens are about equally likely."""


class Size(NamedTuple):
    """The dimensions of a model."""

    layers: int
    embd: int
    ff: int
    heads: int
    kv_heads: int
    experts: int = 0  # 0: dense
    experts_used: int = 0  # by a token

    @property
    def head_dim(self) -> int:
        return self.embd // self.heads


def metadata(teacher: Model, arch: str, size: Size) -> list[Key]:
    """The keys of a model of this architecture and size with the teacher's vocabulary and context."""
    kept = [key for key in teacher.keys if key.name.startswith("tokenizer.")]
    keys = {key.name: key.value() for key in teacher.keys}
    numbers = {
        "block_count": size.layers,
        "context_length": keys[f"{keys['general.architecture']}.context_length"],
        "embedding_length": size.embd,
        "feed_forward_length": size.ff,
        "attention.head_count": size.heads,
        "attention.head_count_kv": size.kv_heads,
        "rope.dimension_count": size.head_dim,
        "vocab_size": next(t.ne[1] for t in teacher.tensors if t.name == "token_embd.weight"),
    }
    if size.experts:
        numbers.update(expert_count=size.experts, expert_used_count=size.experts_used)
    return [
        make_key("general.architecture", "str", arch),
        make_key("general.name", "str", f"{arch} {size.layers}x{size.embd}x{size.ff}"),
        *(make_key(f"{arch}.{name}", "u32", value) for name, value in numbers.items()),
        make_key(f"{arch}.attention.layer_norm_rms_epsilon", "f32", 1e-5),
        make_key(f"{arch}.rope.freq_base", "f32", 10000.0),
        *kept,
    ]


def tensors(arch: str, size: Size, n_vocab: int) -> list[NewTensor]:
    """The tensors of a model: matrices in F16, vectors in F32."""
    kv = size.kv_heads * size.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (size.embd, n_vocab),
        "output_norm": (size.embd,),
        "output": (size.embd, n_vocab),
    }
    gate = {} if arch == "arcee" else {"ffn_gate": (size.embd, size.ff)}
    feed_forward: dict[str, tuple[int, ...]] = {
        **gate,
        "ffn_up": (size.embd, size.ff),
        "ffn_down": (size.ff, size.embd),
    }
    if size.experts:
        feed_forward = {f"{name}_exps": (*ne, size.experts) for name, ne in feed_forward.items()}
        feed_forward["ffn_gate_inp"] = (size.embd, size.experts)
    for i in range(size.layers):
        of_block: dict[str, tuple[int, ...]] = {
            "attn_norm": (size.embd,),
            "attn_q": (size.embd, size.embd),
            "attn_k": (size.embd, kv),
            "attn_v": (size.embd, kv),
            "attn_output": (size.embd, size.embd),
            "ffn_norm": (size.embd,),
            **feed_forward,
        }
        shapes.update({f"blk.{i}.{name}": ne for name, ne in of_block.items()})
    return [
        NewTensor(f"{name}.weight", TYPE_F32, ne, 4 * ne[0])
        if len(ne) == 1
        else NewTensor(f"{name}.weight", TYPE_F16, ne, 2 * math.prod(ne))
        for name, ne in shapes.items()
    ]


def deviation(t: NewTensor, size: Size) -> float:
    """Standard deviation of a matrix's random weights; additions to the hidden states do not grow with the depth."""
    if not t.name.startswith("blk."):
        return EMBEDDING_DEVIATION
    is_added = "attn_output" in t.name or "ffn_down" in t.name
    return 1 / math.sqrt(3 * t.ne[0] * (2 * size.layers if is_added else 1))


def of_teacher(model: Model) -> dict[str, Tensor]:
    """The teacher's tensors by name, including its head, which may be the embeddings."""
    found = {t.name: t for t in model.tensors}
    found.setdefault("output.weight", found["token_embd.weight"])
    return found


def neurons_of_teacher(t: NewTensor, given: Mapping[str, Tensor], seed: int) -> Array | None:
    """The experts (experts, rows, cols) of a tensor, each with random neurons of the teacher's matrix, the same in all
    tensors of its block; None for other tensors. Down is divided by the share of the neurons.
    """
    source = given.get(t.name.replace("_exps", ""))
    if "_exps" not in t.name or source is None:
        return None
    is_down = "ffn_down" in t.name
    w = to_float(source.read_bits(), source.type)
    n, width = (w.shape[1], t.ne[0]) if is_down else (w.shape[0], t.ne[1])
    if width > n:
        return None
    block = int(t.name.split(".")[1])
    chosen = [np.random.default_rng([seed, block, i]).permutation(n)[:width] for i in range(t.ne[2])]
    return np.stack([w[:, i] * (n / width) if is_down else w[i] for i in chosen])


def write_start(
    path: Path, teacher: Path, size: Size, seed: int, *, arch: str = "llama", from_teacher: bool = False
) -> None:
    """Writes a model with random weights and the teacher's vocabulary. from_teacher: copies the teacher's tensors of
    the same shape, and neurons of its feed-forward blocks into experts.
    """
    rng = np.random.default_rng(seed)
    with Model(teacher) as model, AtomicOutput(path, [teacher], force=True) as output:
        given = of_teacher(model)
        keys = metadata(model, arch, size)
        table = tensors(arch, size, given["token_embd.weight"].ne[1])
        writer = Writer(output, keys, table, model.alignment)
        for t in table:
            values: Array
            experts = neurons_of_teacher(t, given, seed) if from_teacher else None
            if experts is not None:
                values = experts
            elif from_teacher and t.name in given and given[t.name].ne == t.ne:
                values = to_float(given[t.name].read_bits(), given[t.name].type)
            elif len(t.ne) == 1:
                values = np.ones(t.ne[0], dtype=np.float32)
            else:
                values = rng.standard_normal(t.ne[::-1], dtype=np.float32) * np.float32(deviation(t, size))
            writer.write([values.astype(np.float32 if len(t.ne) == 1 else np.float16)])
        writer.finish()
        output.seal()
        output.commit()


def check_vocabulary(model: Model, teacher: Model) -> None:
    """Raises MackoError unless the two models have the same vocabulary."""
    found, wanted = (
        {key.name: key.record for key in m.keys if key.name.startswith("tokenizer.ggml.")} for m in (model, teacher)
    )
    if found != wanted:
        raise errors.bad_argument(f"{model.path}: another vocabulary than {teacher.path} has")


def imitate(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: RecoverOptions,
    *,
    teacher: str | os.PathLike[str],
) -> RecoverReport:
    """Trains all weights of a dense GGUF, including embeddings and head, to behave like `teacher`, a model of any shape
    with the same vocabulary; see recover.recover(). Weights that are zero stay zero.
    """
    options.check()
    task = Task(check_vocabulary, lambda model: model.tensors, lambda options, report: [])
    return train_file(task, source, output, teacher, options, False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("teacher", metavar="TEACHER", type=Path, help="dense model whose vocabulary the new one has")
    parser.add_argument("output", metavar="OUT", type=Path)
    parser.add_argument("-f", "--file", required=True, help="text to train on")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="llama", help="architecture (default: %(default)s)")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--embd", type=int, required=True, help="width")
    parser.add_argument("--ff", type=int, required=True, help="width of the feed-forward blocks")
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--kv-heads", type=int, required=True)
    parser.add_argument("--experts", type=int, default=0, help="experts of a block, each of width --ff (default: none)")
    parser.add_argument("--experts-used", type=int, default=2, help="experts of a token (default: %(default)s)")
    parser.add_argument(
        "--from-teacher",
        action="store_true",
        help="start from the teacher's tensors where they have the same shape, and experts from its neurons",
    )
    parser.add_argument("-c", "--ctx-size", type=int, default=512, help="tokens of a chunk (default: %(default)s)")
    parser.add_argument("--self-generated", type=int, default=0, help="additional chunks that the teacher writes")
    parser.add_argument("--batch-size", type=int, default=16, help="chunks of a step (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=1, help="number of passes over the text (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.0, help="maximum rate (default: as `macko recover`)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the order of the text")
    args = parser.parse_args()
    used = args.experts_used if args.experts else 0
    size = Size(args.layers, args.embd, args.ff, args.heads, args.kv_heads, args.experts, used)
    if args.experts and (args.arch != "llama" or not 0 < used <= args.experts):
        parser.error("--experts needs --arch llama, and at least as many experts as --experts-used")
    if min(size[:5]) < 1 or args.embd % (2 * args.heads) or args.heads % args.kv_heads:
        parser.error("--embd must be a multiple of 2 * --heads, and --heads of --kv-heads")
    options = RecoverOptions(
        text=args.file,
        n_ctx=args.ctx_size,
        n_self_generated=args.self_generated,
        batch_size=args.batch_size,
        n_epochs=args.epochs,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / "start.gguf"
        write_start(start, args.teacher, size, args.seed, arch=args.arch, from_teacher=args.from_teacher)
        found = imitate(start, args.output, options, teacher=args.teacher)
    console.log(
        f"{found.n_trained} weights, {found.n_tokens} tokens, {found.seconds:.0f} s: held-out perplexity "
        f"{found.perplexity_after:.2f}, of the teacher {found.perplexity_dense:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
