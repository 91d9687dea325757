"""The command line of `macko generate`: writes text with a model, dense or sparse."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Callable

from .. import console, errors
from .arguments import Number, add_attention, add_hub, add_model_arguments, attention_arguments

if TYPE_CHECKING:
    from ..llama import Llama

HELP = "write text with a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Continues a prompt with a GGUF model, dense or sparse, or holds a conversation. The text goes to stdout, "
        "everything else to stderr."
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("-m", "--model", metavar="FNAME", help="GGUF model")
    add_hub(model, "GGUF of a repository on the Hugging Face hub, downloaded once")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="PROMPT", help="text to continue, or with -cnv the first message")
    prompt.add_argument("-f", "--file", metavar="FNAME", help="file with this text")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "-cnv",
        "--conversation",
        action="store_true",
        help="conversation in the model's chat template: each line of stdin is a message",
    )
    mode.add_argument(
        "-i", "--interactive", action="store_true", help="after each continuation, append a line of stdin to the text"
    )
    parser.add_argument("-sys", "--system-prompt", metavar="PROMPT", help="with -cnv: the system message")
    add_model_arguments(parser)
    add_attention(parser)
    parser.add_argument(
        "-n",
        "--predict",
        "--n-predict",
        type=Number(-1),
        metavar="N",
        help="tokens to write each time; -1: up to the end of the context (default: 128; with -cnv: -1)",
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
        "--min-p",
        type=Number(0, 1, float),
        default=0.05,
        metavar="P",
        help="keep tokens of at least P times the highest probability (default: 0.05)",
    )
    parser.add_argument(
        "--repeat-penalty",
        type=Number(0, kind=float),
        default=1.0,
        metavar="X",
        help="penalty of the last 64 tokens (default: 1, none)",
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
    from ..evaluation.text_model import read_text, warn_of_crlf
    from ..gguf.files import Model
    from ..huggingface.hub import download
    from ..llama import Llama

    if args.system_prompt is not None and not args.conversation:
        raise errors.usage_error("-sys is the system message of a conversation: add -cnv")
    prompt = args.prompt
    if args.file is not None:
        text = read_text(args.file)
        warn_of_crlf(text, args.file)
        prompt = text.decode("utf-8")
    if prompt is None and not (args.conversation or args.interactive):
        raise errors.usage_error("-p is missing: the text to continue (or use -f, -i or -cnv)")
    path = str(download(args.hf)) if args.hf is not None else args.model
    llama = Llama(
        path,
        n_ctx=chosen_n_ctx(path, args.ctx_size),
        n_threads=args.n_threads,
        n_threads_batch=args.n_threads,
        n_gpu_layers=args.gpu_layers,
        seed=args.seed & 0xFFFFFFFF,
        verbose=args.verbose,
        **attention_arguments(args),
    )
    n_tokens = args.predict if args.predict is not None else -1 if args.conversation else 128
    sampling = {
        "max_tokens": n_tokens,
        "temperature": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "repeat_penalty": args.repeat_penalty,
        "seed": None if args.seed < 0 else args.seed,
        "stream": True,
    }
    try:
        if args.conversation:
            converse(llama, prompt, args.system_prompt, sampling)
        else:
            continue_text(llama, prompt, args, sampling)
    except RuntimeError as e:  # llama_decode failed
        with Model(llama.model_path) as model:
            found = model.not_finite()
        if found is None:
            raise
        raise errors.error(errors.NOT_FINITE, found) from e
    llama.close()
    return 0


def chosen_n_ctx(path: str, asked: int | None) -> int:
    """Tokens of the context. Logs a default that is smaller than the limit of the model."""
    from ..conversion import model_memory
    from ..gguf.files import Model

    if asked is not None:
        return asked
    try:
        with Model(path) as model:
            trained = model_memory.trained_n_ctx(model)
    except errors.MackoError:  # Llama opens shards of a sparse model, which Model does not, and reports other errors
        return model_memory.DEFAULT_N_CTX
    if trained > model_memory.DEFAULT_N_CTX:
        console.log(f"context of {model_memory.DEFAULT_N_CTX} tokens; the model allows {trained}, see -c")
    return min(trained, model_memory.DEFAULT_N_CTX)


def continue_text(llama: Llama, prompt: str | None, args: argparse.Namespace, sampling: dict[str, Any]) -> None:
    """Continues a text; with -i again and again, each time after a line of stdin. An empty line adds nothing."""
    text = prompt if prompt is not None else next_line()
    if not args.no_display_prompt:
        sys.stdout.write(prompt or "")
    while text is not None:
        n_prompt = len(llama.tokenize(text.encode("utf-8"), special=True))
        if n_prompt >= llama._n_ctx:
            raise errors.bad_argument(f"the prompt has {n_prompt} tokens, the context {llama._n_ctx}; see -c")
        # llama_cpp treats 0 as no limit
        chunks = sampling["max_tokens"] and llama.create_completion(text, **sampling)
        text += printed(chunks, lambda choice: choice["text"])
        sys.stdout.write("\n")
        line = next_line() if args.interactive else None
        text = None if line is None else text + ("" if line == "\n" else line)


def converse(llama: Llama, prompt: str | None, system: str | None, sampling: dict[str, Any]) -> None:
    """Answers the prompt and then each line of stdin, in the model's chat template, to the end of the input."""
    if "tokenizer.chat_template" not in llama.metadata:
        raise errors.bad_argument(f"{llama.model_path}: has no chat template: a base model; -i continues text")
    messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    message = prompt if prompt is not None else next_line()
    while message is not None:
        if message.strip():
            messages.append({"role": "user", "content": message.rstrip("\n")})
            try:
                chunks = sampling["max_tokens"] and llama.create_chat_completion(messages, **sampling)
                answer = printed(chunks, lambda choice: choice["delta"].get("content") or "")
            except ValueError as e:
                if "context window" not in str(e):
                    raise
                text = f"the conversation does not fit into the context, {llama._n_ctx} tokens; see -c"
                raise errors.bad_argument(text) from e
            messages.append({"role": "assistant", "content": answer})
            sys.stdout.write("\n")
        message = next_line()


def next_line() -> str | None:
    """The next line of stdin, None at its end."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    sys.stdout.flush()
    return sys.stdin.readline() or None


def printed(chunks: Any, text_of: Callable[[Any], str]) -> str:
    """Prints chunks as they arrive. Returns their text."""
    text = ""
    for chunk in chunks or ():
        piece = text_of(chunk["choices"][0])
        text += piece
        sys.stdout.write(piece)
        sys.stdout.flush()
    return text
