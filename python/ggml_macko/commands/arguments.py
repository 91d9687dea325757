"""Options that several commands share, with llama.cpp's names."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any, TypeVar

from .. import errors, system
from ..conversion.model_memory import CACHE_TYPES, cache_type, is_quantized_cache
from ..evaluation.text_model import N_CTX

Options = TypeVar("Options")


def options_of(cls: type[Options], args: argparse.Namespace, **others: Any) -> Options:
    """The dataclass cls, each field from `others` or from the argument of the same name."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return cls(**{name: others[name] if name in others else getattr(args, name) for name in names})


@dataclasses.dataclass(frozen=True)
class Number:
    """The type of an option that takes numbers of a range."""

    least: float
    most: float = 2**31 - 1
    kind: type[int] | type[float] = int

    def __call__(self, text: str) -> int | float:
        try:
            number = self.kind(text)
        except ValueError:
            number = math.nan
        if not self.least <= number <= self.most:
            what = "an integer" if self.kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {self.least} to {self.most}")
        return number


def threads(text: str) -> int:
    """llama.cpp's numbers of threads: -1 means all usable cores, and so does 0."""
    n = int(Number(-1, system.MAX_THREADS)(text))
    return n if n > 0 else system.available_cores()


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """For every command that runs for more than a moment; commands/cli.py applies it."""
    parser.add_argument("--quiet", action="store_true", help="show errors only: no progress, logs or warnings")


def add_force(parser: argparse.ArgumentParser, output: str = "OUT") -> None:
    parser.add_argument("--force", action="store_true", help=f"replace {output} if it exists")


def add_threads(parser: argparse.ArgumentParser, *names: str, **more: Any) -> None:
    """The number of threads: -t, or the argument of that name."""
    if not names:
        names, more = ("-t", "--threads"), {"dest": "n_threads", "metavar": "N"}
    help_text = f"threads, at most {system.MAX_THREADS} (default: -1, all usable cores)"
    parser.add_argument(*names, type=threads, default="-1", help=help_text, **more)


def add_chunks(group: argparse._ActionsContainer, n_chunks: int | None, what: str, default: str = "all") -> None:
    """-c and --chunks for commands that read a text in chunks. n_chunks: the default number. default: the text for the
    help if the default is not a number.
    """
    group.add_argument(
        "-c",
        "--ctx-size",
        dest="n_ctx",
        type=Number(2),
        default=N_CTX,
        metavar="N",
        help=f"tokens per chunk (default: {N_CTX})",
    )
    if n_chunks is not None and n_chunks >= 0:
        default = f"{n_chunks}; -1: all"
    group.add_argument(
        "--chunks", dest="n_chunks", type=Number(-1), default=n_chunks, metavar="N", help=f"{what} (default: {default})"
    )


def add_hub(group: argparse._ActionsContainer, what: str) -> None:
    """llama.cpp's option for a repository on the Hugging Face hub; args.hf becomes REPO[:FILE]."""
    group.add_argument("-hf", "--hf-repo", dest="hf", metavar="REPO[:FILE]", help=what)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Threads, context length and load options, with llama.cpp's names."""
    add_threads(parser)
    parser.add_argument(
        "-c",
        "--ctx-size",
        type=Number(0),
        metavar="N",
        help="context length; 0: the model's own (default: the model's own, at most 4096)",
    )
    add_gpu_layers(parser)
    add_load_options(parser)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """For every command that runs a model; commands/cli.py applies them."""
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse sparse files of architectures without architecture-specific checks of the metadata (same as "
        "GGML_MACKO_LOAD=strict)",
    )
    parser.add_argument(
        "--cache",
        action="store_true",
        help="store CPU weights in a file in their memory layout, and map this file at the next load (same as "
        "GGML_MACKO_LOAD=cache)",
    )


def add_cache_types(parser: argparse.ArgumentParser) -> None:
    """llama.cpp's options for the types of the KV cache."""
    for letter, what in (("k", "keys"), ("v", "values")):
        parser.add_argument(
            f"-ct{letter}",
            f"--cache-type-{letter}",
            choices=CACHE_TYPES,
            default="f16",
            metavar="TYPE",
            help=f"type of the cached {what}: {', '.join(CACHE_TYPES)} (default: f16)",
        )


def add_attention(parser: argparse.ArgumentParser) -> None:
    """Flash attention and the KV cache; attention_arguments() reads them."""
    parser.add_argument(
        "-fa",
        "--flash-attn",
        choices=("on", "off", "auto"),
        default="auto",
        help="flash attention; auto: on for a GPU or a quantized cache of values (default)",
    )
    add_cache_types(parser)


def attention_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of Llama from the options of add_attention() and add_gpu_layers(). Raises UsageError."""
    from ..native import devices

    needs_flash = is_quantized_cache(args.cache_type_v)
    if args.flash_attn == "off" and needs_flash:
        raise errors.usage_error(f"-ctv {args.cache_type_v} needs flash attention, and -fa is off")
    flash = args.flash_attn == "on" or (
        args.flash_attn == "auto" and (needs_flash or bool(args.gpu_layers and devices.gpus()))
    )
    return {
        "flash_attn": flash,
        "type_k": int(cache_type(args.cache_type_k)),
        "type_v": int(cache_type(args.cache_type_v)),
    }


def add_gpu_layers(parser: argparse.ArgumentParser) -> None:
    """llama.cpp's option and default; all and auto become -1."""
    parser.add_argument(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        type=gpu_layers,
        default=-1,
        metavar="N",
        help="layers on the GPU; all or auto: every layer if there is a GPU (default); 0: none",
    )


def gpu_layers(text: str) -> int:
    return -1 if text in ("all", "auto") else int(Number(-1)(text))
