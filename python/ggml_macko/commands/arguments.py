"""Options that several commands share, with llama.cpp's names."""

from __future__ import annotations

import argparse
from typing import Any

from .. import errors
from ..conversion.model_memory import CACHE_TYPES, cache_type, is_quantized_cache


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Of every command that takes more than a moment; commands/cli.py obeys it."""
    parser.add_argument("--quiet", action="store_true", help="show no progress, logs and warnings, only errors")


def add_hub(group: argparse._ActionsContainer, what: str) -> None:
    """llama.cpp's option for a repository of the Hugging Face hub; args.hf holds REPO[:FILE]."""
    group.add_argument("-hf", "--hf-repo", dest="hf", metavar="REPO[:FILE]", help=what)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of everything that runs a model, with llama.cpp's names."""
    parser.add_argument(
        "-t", "--threads", type=int, default=0, metavar="N", help="threads (default: chosen by llama_cpp)"
    )
    parser.add_argument(
        "-c", "--ctx-size", type=int, default=0, metavar="N", help="context length (default: the model's own)"
    )
    add_gpu_layers(parser)
    add_load_options(parser)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Of every command that runs a model; commands/cli.py obeys them."""
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse sparse files of architectures whose metadata are checked in general only, as "
        "GGML_MACKO_LOAD=strict",
    )
    parser.add_argument(
        "--cache",
        action="store_true",
        help="keep weights on the CPU in a file as they are in memory, and map it the next time, as "
        "GGML_MACKO_LOAD=cache",
    )


def add_cache_types(parser: argparse.ArgumentParser) -> None:
    """llama.cpp's options for the types of the cache of keys and values."""
    for letter, what in (("k", "keys"), ("v", "values")):
        parser.add_argument(
            f"-ct{letter}",
            f"--cache-type-{letter}",
            choices=CACHE_TYPES,
            default="f16",
            metavar="TYPE",
            help=f"type of the cache of {what}: {', '.join(CACHE_TYPES)} (default: f16)",
        )


def add_attention(parser: argparse.ArgumentParser) -> None:
    """Of commands that run a model: flash attention and the cache. See attention_arguments()."""
    parser.add_argument(
        "-fa",
        "--flash-attn",
        choices=("on", "off", "auto"),
        default="auto",
        help="flash attention; auto: on a GPU, and where the cache of values is quantized (default)",
    )
    add_cache_types(parser)


def attention_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of Llama for the options of add_attention() and add_gpu_layers(). Raises UsageError."""
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
    """llama.cpp's option, with its default; all and auto are -1."""
    parser.add_argument(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        type=gpu_layers,
        default=-1,
        metavar="N",
        help="layers on the GPU; all or auto: as many as there are, where there is a GPU (default); 0: none",
    )


def gpu_layers(text: str) -> int:
    try:
        return -1 if text in ("all", "auto") else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor all or auto") from None
