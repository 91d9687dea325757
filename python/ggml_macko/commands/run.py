"""Runs a program that uses libllama, and lets it open sparse GGUFs: `macko run -- llama-cli -m sparse.gguf`."""

from __future__ import annotations

import argparse
import os
import pathlib
import signal

from .. import errors, system
from ..commands.arguments import add_hub, add_load_options
from ..huggingface.hub import download
from ..native import environment, library, load_model

HELP = "run a llama.cpp program with sparse models"
RPC_SERVERS = ("rpc-server", "ggml-rpc-server")
"""Names of llama.cpp's RPC server in different versions. The plugin gives it another kind of device."""


def variables(options: load_model.LoadOptions) -> dict[str, str]:
    """The environment variables of a program. The caller adds other preloaded libraries."""
    for path in (library.PRELOAD_PATH, library.LIBRARY_PATH):
        if not path.exists():
            raise errors.error(errors.IO, f"{path} is missing: install ggml-macko again")
        if set(str(path)) & set(system.PRELOAD_SEPARATORS):  # the dynamic linker would split the path
            text = f"{path}: {system.PRELOAD_VARIABLE} cannot name a path with a space or a colon"
            raise errors.error(errors.IO, text)
    return {
        system.PRELOAD_VARIABLE: str(library.PRELOAD_PATH),
        "GGML_MACKO_PLUGIN": str(library.LIBRARY_PATH),
        **({environment.LOAD: ",".join(options.words())} if options.words() else {}),
    }


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compress", action="store_true", help="compress dense F16, BF16 and F32 models while they load"
    )
    parser.add_argument(
        "--keep-negative-zeros",
        action="store_true",
        help="with --compress: keep -0.0 as a value, which takes memory (default: -0.0 counts as 0)",
    )
    parser.add_argument(
        "--sparse-only",
        action="store_true",
        help="fail if llama.cpp places a sparse weight on a device of another backend (default: make it dense there)",
    )
    add_load_options(parser)


def load_options(args: argparse.Namespace) -> load_model.LoadOptions:
    return load_model.LoadOptions(args.compress, args.keep_negative_zeros, args.sparse_only, args.strict, args.cache)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs PROGRAM with the plugin preloaded, so that llama_model_load_from_file also opens sparse GGUFs. The "
        "program must use the shared libraries libllama and libggml of the llama.cpp build that the plugin was made "
        "for (`macko --version` prints it)."
    )
    add_load_arguments(parser)
    add_hub(
        parser, "add -m with a GGUF from a repository on the Hugging Face hub, downloaded once, to PROGRAM's arguments"
    )
    parser.add_argument(
        "program", metavar="-- PROGRAM ARGS", nargs=argparse.REMAINDER, help="for example: -- llama-cli -m sparse.gguf"
    )


def run(args: argparse.Namespace) -> int:
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        raise errors.usage_error("PROGRAM is missing: macko run -- PROGRAM ARGS")
    if args.hf is not None:
        program = [*program, "-m", str(download(args.hf))]
    serves_rpc = pathlib.PurePath(program[0]).name in RPC_SERVERS
    options = load_options(args)
    environ = {**os.environ, **variables(options), **environment.with_words(environment.LOAD, options.words())}
    if serves_rpc:
        environ.update(environment.with_words(environment.ENABLE, ["rpc-server"]))
    if others := os.environ.get(system.PRELOAD_VARIABLE):
        environ[system.PRELOAD_VARIABLE] += f":{others}"
    for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would pass that on
        if name != signal.SIGPIPE or not serves_rpc:  # SIGPIPE would end llama.cpp's server
            signal.signal(name, signal.SIG_DFL)
    try:
        os.execvpe(program[0], program, environ)
    except OSError as e:
        is_missing = isinstance(e, FileNotFoundError) and pathlib.PurePath(program[0]).name.startswith("llama-")
        hint = "; docs/guide/programs.md says how to get llama.cpp's programs" if is_missing else ""
        raise errors.error(errors.IO, f"{program[0]}: {e.strerror}{hint}") from e
