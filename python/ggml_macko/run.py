"""Runs a program that is linked to libllama so that it opens sparse GGUFs: `macko run -- llama-cli -m sparse.gguf`."""

from __future__ import annotations

import argparse
import os
import signal

from . import bindings, errors

HELP = "run a llama.cpp program with sparse models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs PROGRAM with the plugin preloaded, so that llama_model_load_from_file opens sparse GGUFs too. The "
        "program must use the shared libllama and libggml of the llama.cpp build that the plugin was made for (`macko"
        " --version` names it)."
    )
    parser.add_argument(
        "program", metavar="-- PROGRAM ARGS", nargs=argparse.REMAINDER, help="for example: -- llama-cli -m sparse.gguf"
    )


def run(args: argparse.Namespace) -> int:
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        raise errors.error(errors.BAD_ARGUMENT, "PROGRAM is missing: macko run -- PROGRAM ARGS")
    for path in (bindings.PRELOAD_PATH, bindings.LIBRARY_PATH):
        if not path.exists():
            raise errors.error(errors.IO, f"{path} is missing: install ggml-macko again")
    preload = os.environ.get("LD_PRELOAD")
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{bindings.PRELOAD_PATH}:{preload}" if preload else str(bindings.PRELOAD_PATH),
        "GGML_MACKO_PLUGIN": str(bindings.LIBRARY_PATH),
    }
    for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would pass that on
        signal.signal(name, signal.SIG_DFL)
    try:
        os.execvpe(program[0], program, environment)
    except OSError as e:
        raise errors.error(errors.IO, f"{program[0]}: {e.strerror}") from e
