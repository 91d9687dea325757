#!/usr/bin/env python3
"""Writes a GGUF of the Llama architecture with random weights, of any size, for measurements of speed and memory.

Weights are normally distributed with standard deviation 1/sqrt(fan-in), which keeps logits in range. Zeros are at
independent random places of the block matrices, or at the smallest magnitudes. Memory holds 4 M weights at a time. The
vocabulary is a valid SentencePiece vocabulary with byte fallback. With --relu-zeros, the architecture is Arcee: the
feed-forward block is down(relu(up x)^2), and the mean of up makes about this share of the activations zero.

    Llama 1B:    --layers 16 --embd 2048 --ff 8192 --heads 32 --kv-heads 8 --vocab 32000 --tied --density 0.5 OUT
    ReLU, 7B:    --layers 32 --embd 4096 --ff 11008 --heads 32 --kv-heads 32 --density 0.5 --relu-zeros 0.9 OUT
    Llama 2 7B:  --layers 32 --embd 4096 --ff 11008 --heads 32 --kv-heads 32 --vocab 32000 --density 0.5 OUT
"""

from __future__ import annotations

import argparse
import itertools
import math
import string
import sys
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any, BinaryIO, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

BLOCK = 1 << 22
"""Weights per step."""

EMBEDDED = 8.0
"""Mean of embeddings with --relu-zeros."""

TYPES = {
    "f16": gguf.GGMLQuantizationType.F16,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "f32": gguf.GGMLQuantizationType.F32,
}


class Vocabulary(NamedTuple):
    tokens: list[str]
    scores: list[float]
    types: list[int]


def vocabulary(n: int) -> Vocabulary:
    """n tokens: control tokens, 256 bytes, then distinct words."""
    kinds = gguf.TokenType
    tokens = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    letters = (
        "".join(w) for length in itertools.count(1) for w in itertools.product(string.ascii_lowercase, repeat=length)
    )
    words = (prefix + word for word in letters for prefix in ("", "\u2581"))
    tokens += [(word, kinds.NORMAL) for word in itertools.islice(words, n - len(tokens))]
    return Vocabulary([t for t, _ in tokens], [-float(i) for i in range(n)], [int(k) for _, k in tokens])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("output", metavar="OUT")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--embd", type=int, default=2048, help="width")
    parser.add_argument("--ff", type=int, default=8192, help="width of the feed-forward part")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--ctx", type=int, default=4096, help="context length in the metadata")
    parser.add_argument("--experts", type=int, default=0, help="experts per layer; 0: dense feed-forward part")
    parser.add_argument("--experts-used", type=int, default=2, help="experts per token")
    parser.add_argument("--relu-zeros", type=float, metavar="SHARE", help="zero activations of a ReLU, above 0.5")
    parser.add_argument("--tied", action="store_true", help="use the token embeddings as the output head")
    parser.add_argument("--density", type=float, default=1.0, help="non-zeros in block matrices")
    parser.add_argument(
        "--smallest", action="store_true", help="make the smallest weights zero, as magnitude pruning does"
    )
    parser.add_argument("--alike", type=int, default=1, help="number of neighboring rows with the same places of zeros")
    parser.add_argument(
        "--same-layers", action="store_true", help="give all layers the weights of the first, which is faster"
    )
    parser.add_argument("--type", choices=sorted(TYPES), default="f16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.embd % args.heads or args.heads % args.kv_heads or args.embd // args.heads % 2:
        parser.error("--embd must be a multiple of 2 * --heads, and --heads of --kv-heads")
    if args.vocab < 300 or not 0 <= args.density <= 1:
        parser.error("--vocab must be at least 300, --density from 0 to 1")
    if args.smallest and (args.density == 0 or args.alike > 1):
        parser.error("--smallest: needs a density above 0, and no --alike")
    if args.relu_zeros is not None and (args.experts or not 0.5 < args.relu_zeros < 1):
        parser.error("--relu-zeros must be above 0.5 and below 1, and has no --experts")
    write(args)
    return 0


def write(args: argparse.Namespace) -> None:
    """Writes the file for parsed arguments."""
    head_dim = args.embd // args.heads
    writer = gguf.GGUFWriter(args.output, "llama" if args.relu_zeros is None else "arcee")
    writer.add_name(f"random llama {args.layers}x{args.embd}x{args.ff}, density {args.density:g}, seed {args.seed}")
    writer.add_block_count(args.layers)
    writer.add_context_length(args.ctx)
    writer.add_embedding_length(args.embd)
    writer.add_feed_forward_length(args.ff)
    writer.add_head_count(args.heads)
    writer.add_head_count_kv(args.kv_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(args.vocab)
    if args.experts:
        writer.add_expert_count(args.experts)
        writer.add_expert_used_count(args.experts_used)
    words = vocabulary(args.vocab)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words.tokens)
    writer.add_token_scores(words.scores)
    writer.add_token_types(words.types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    kv = args.kv_heads * head_dim
    experts = (args.experts,) if args.experts else ()
    suffix = "_exps" if args.experts else ""
    shapes = {"token_embd": (args.vocab, args.embd), "output_norm": (args.embd,)}
    if not args.tied:
        shapes["output"] = (args.vocab, args.embd)
    block = {
        "attn_norm": (args.embd,),
        "attn_q": (args.embd, args.embd),
        "attn_k": (kv, args.embd),
        "attn_v": (kv, args.embd),
        "attn_output": (args.embd, args.embd),
        "ffn_norm": (args.embd,),
    }
    if args.experts:
        block["ffn_gate_inp"] = (args.experts, args.embd)
    if args.relu_zeros is None:
        block[f"ffn_gate{suffix}"] = (*experts, args.ff, args.embd)
    block[f"ffn_up{suffix}"] = (*experts, args.ff, args.embd)
    block[f"ffn_down{suffix}"] = (*experts, args.embd, args.ff)
    shapes.update({f"blk.{i}.{name}": shape for i in range(args.layers) for name, shape in block.items()})

    def element(name: str) -> gguf.GGMLQuantizationType:
        return TYPES["f32"] if "norm" in name or "_inp" in name else TYPES[args.type]

    for name, shape in shapes.items():
        width = 4 if element(name) == TYPES["f32"] else 2
        writer.add_tensor_info(
            f"{name}.weight", shape, np.dtype(np.float32), int(np.prod(shape)) * width, element(name)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # GGUFWriter writes whole tensors only, so the data follow its header block by block
    out = writer.fout[0]
    rng = np.random.default_rng(args.seed)
    first_layer: dict[str, tuple[int, int]] = {}  # begin and end of its tensors in the file
    for name, shape in shapes.items():
        out.write(bytes(-out.tell() % writer.data_alignment))
        layer, _, part = name.removeprefix("blk.").partition(".")
        if args.same_layers and part in first_layer:
            copy(out, *first_layer[part])
            continue
        begin = out.tell()
        for block in weights(rng, name, shape, args):
            encode(block, element(name)).tofile(out)
        if layer == "0":
            first_layer[part] = begin, out.tell()
    out.write(bytes(-out.tell() % writer.data_alignment))
    writer.close()


def copy(out: BinaryIO, begin: int, end: int) -> None:
    """Appends bytes begin to end of the output file to it."""
    out.flush()
    with open(out.name, "rb") as written:
        written.seek(begin)
        for at in range(begin, end, BLOCK):
            out.write(written.read(min(BLOCK, end - at)))


def mean_of(name: str, args: argparse.Namespace) -> float:
    """The mean of a tensor's weights for this share of negative activations.

    The mean of embeddings exceeds the additions of layers to the hidden states, so their elements are about EMBEDDED
    times their deviation, and a mean of up shifts all activations equally.
    """
    if args.relu_zeros is None:
        return 0.0
    if name == "token_embd":
        return EMBEDDED
    if name.endswith("ffn_up"):
        return -NormalDist().inv_cdf(args.relu_zeros) / (args.embd * math.sqrt(args.density))
    return 0.0


def weights(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], args: argparse.Namespace
) -> Iterator[npt.NDArray[np.float32]]:
    """The weights of a tensor in row-major order, in blocks of up to BLOCK."""
    density, alike = args.density, args.alike
    if "norm" in name:
        yield np.ones(shape, dtype=np.float32)
        return
    n = int(np.prod(shape))
    scale, mean = np.float32(shape[-1] ** -0.5), np.float32(mean_of(name, args))
    sparse = name.startswith("blk.") and "_inp" not in name and density < 1
    mask = None
    if sparse and alike > 1:
        rows, cols = n // shape[-1], shape[-1]
        patterns = rng.random((-(-rows // alike), cols), dtype=np.float32) >= density
        mask = np.repeat(patterns, alike, axis=0)[:rows].reshape(-1)
    for begin in range(0, n, BLOCK):
        block = rng.standard_normal(min(BLOCK, n - begin), dtype=np.float32) * scale + mean
        if sparse and args.smallest:
            block[np.abs(block) < scale * NormalDist().inv_cdf(1 - density / 2)] = 0
        elif mask is not None:
            block[mask[begin : begin + len(block)]] = 0
        elif sparse:
            block[rng.random(len(block), dtype=np.float32) >= density] = 0
        yield block


def encode(block: npt.NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> npt.NDArray[Any]:
    """The block in the type of its tensor: F16, BF16 or F32."""
    if kind == TYPES["f16"]:
        return block.astype(np.float16)
    return gguf.quants.quantize(block, kind) if kind == TYPES["bf16"] else block


if __name__ == "__main__":
    sys.exit(main())
