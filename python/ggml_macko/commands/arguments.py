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


def add_gpu_layers(
    parser: argparse.ArgumentParser,
    default: int | None = -1,
    which: str = "all or auto: as many as there are (default)",
) -> None:
    """llama.cpp's option; all and auto are -1."""
    names = ("-ngl", "--gpu-layers", "--n-gpu-layers")
    parser.add_argument(*names, type=gpu_layers, default=default, metavar="N", help=f"layers on the GPU; {which}")


def gpu_layers(text: str) -> int:
    return -1 if text in ("all", "auto") else int(text)
