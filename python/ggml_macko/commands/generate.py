"""The command line of `macko generate`: writes text with a model, dense or sparse."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .. import errors
from .arguments import Number, add_attention, add_hub, add_model_arguments, attention_arguments

HELP = "write text with a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continues a prompt with a GGUF model, dense or sparse. The text goes to stdout, everything else to stderr."
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("-m", "--model", metavar="FNAME", help="GGUF model")
    add_hub(model, "GGUF of a repository on the Hugging Face hub, downloaded once")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", metavar="PROMPT", help="text to continue")
    prompt.add_argument("-f", "--file", metavar="FNAME", help="file with the text to continue")
    add_model_arguments(parser)
    add_attention(parser)
    parser.add_argument(
        "-n",
        "--predict",
        "--n-predict",
        type=Number(-1),
        default=128,
        metavar="N",
        help="tokens to write (default: 128)",
    )
    parser.add_argument(
        "--temp",
        type=Number(0, kind=float),
        default=0.8,
        metavar="T",
        help="temperature; 0 always takes the likeliest token (default: 0.8)",
    )
    parser.add_argument(
        "--top-k", type=Number(0), default=40, metavar="N", help="keep the N likeliest tokens (default: 40)"
    )
    parser.add_argument(
        "--top-p",
        type=Number(0, 1, float),
        default=0.95,
        metavar="P",
        help="keep the likeliest tokens of joint probability P (default: 0.95)",
    )
    parser.add_argument(
        "-s",
        "--seed",
        type=Number(-1, 2**32 - 1),
        default=-1,
        metavar="SEED",
        help="seed of the random choices (default: -1, random)",
    )
    parser.add_argument("--no-display-prompt", action="store_true", help="print only what the model writes")
    parser.add_argument("-v", "--verbose", action="store_true", help="show llama.cpp's log")


def run(args: argparse.Namespace) -> int:
    from ..evaluation.text_model import read_text
    from ..gguf.files import Model
    from ..huggingface.hub import download
    from ..llama import Llama

    prompt = args.prompt
    if prompt is None:
        prompt = read_text(args.file).decode("utf-8")
    llama = Llama(
        str(download(args.hf)) if args.hf is not None else args.model,
        n_ctx=args.ctx_size,
        n_threads=args.n_threads,
        n_threads_batch=args.n_threads,
        n_gpu_layers=args.gpu_layers,
        seed=args.seed & 0xFFFFFFFF,
        verbose=args.verbose,
        **attention_arguments(args),
    )
    n_prompt = len(llama.tokenize(prompt.encode("utf-8"), special=True))
    if n_prompt >= llama._n_ctx:
        raise errors.error(errors.BAD_ARGUMENT, f"the prompt has {n_prompt} tokens, the context {llama._n_ctx}; see -c")
    if not args.no_display_prompt:
        sys.stdout.write(prompt)
    # llama_cpp takes 0 tokens for as many as fit
    chunks: Any = args.predict and llama.create_completion(  # an iterator, because stream is set
        prompt,
        max_tokens=args.predict,
        temperature=args.temp,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=0.05,
        repeat_penalty=1.0,
        seed=None if args.seed < 0 else args.seed,
        stream=True,
    )
    try:
        for chunk in chunks or ():
            assert isinstance(chunk, dict)  # with stream=True llama_cpp yields chunks
            sys.stdout.write(chunk["choices"][0]["text"])
            sys.stdout.flush()
    except RuntimeError as e:  # llama_decode failed
        with Model(llama.model_path) as model:
            found = model.not_finite()
        if found is None:
            raise
        raise errors.error(errors.NOT_FINITE, found) from e
    sys.stdout.write("\n")
    llama.close()
    return 0
