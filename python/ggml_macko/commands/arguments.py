"""Options that several commands share, with llama.cpp's names."""

from __future__ import annotations

import argparse


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
        help="refuse sparse files of architectures whose metadata are checked in general only, as GGML_MACKO_STRICT=1",
    )
    parser.add_argument(
        "--cache",
        action="store_true",
        help="keep weights on the CPU in a file as they are in memory, and map it the next time, as GGML_MACKO_CACHE=1",
    )


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
