"""The `macko` command: `macko SUBCOMMAND ...`.

Exit codes: 0 done, 1 any error (one line on stderr), 130, 143 and 129 after Ctrl-C, SIGTERM and SIGHUP.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from .. import console
from ..errors import one_line

# subcommand -> module with HELP, add_arguments(parser), run(args) -> exit code
COMMANDS = {
    "calibrate": "commands.calibrate",
    "perplexity": "commands.perplexity",
    "prune": "commands.prune",
    "decompress": "commands.decompress",
    "convert": "commands.convert",
    "restore": "commands.restore",
    "verify": "commands.verify",
    "inspect": "commands.inspect",
    "plan": "commands.plan",
    "generate": "commands.generate",
    "bench": "commands.bench",
    "report": "commands.report",
    "run": "commands.run",
    "env": "commands.env",
}


class Parser(argparse.ArgumentParser):
    """Bad usage exits with 1, as llama.cpp's tools do."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}\nto show complete usage, run with -h", file=sys.stderr)
        raise SystemExit(1)


class Version(argparse.Action):
    """Prints which library, llama.cpp, CPU kernels and GPUs this is. The C library is loaded only here."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> NoReturn:
        from ..native import bindings

        print(
            f"macko {bindings.version()}, for llama-cpp-python {bindings.built_for_llama_cpp_python()} "
            f"(ggml {bindings.built_for_ggml()}), CPU kernels: {bindings.cpu_kernels()}, GPU: {bindings.gpus()}"
        )
        parser.exit()


def make_parser() -> Parser:
    parser = Parser(prog="macko", description="Sparse LLM weights for stock llama.cpp.", allow_abbrev=False)
    parser.add_argument("--version", action=Version, nargs=0, help="print versions and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="SUBCOMMAND")
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(f"ggml_macko.{module_name}")
        sub = subparsers.add_parser(name, help=module.HELP, allow_abbrev=False)
        module.add_arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show a traceback with an error")
        sub.set_defaults(run=module.run)
    return parser


def on_signal(number: int, *unused: object) -> NoReturn:
    raise SystemExit(128 + number)  # unwinds, so that partial files go


def _identity_of_output(args: argparse.Namespace) -> tuple[int, int] | None:
    """Which file has the name of the output; an output appears under its name only when it is complete."""
    try:
        found = os.stat(args.output)
    except (AttributeError, TypeError, OSError):  # this command has none, or not yet
        return None
    return found.st_dev, found.st_ino


def main(argv: Sequence[str] | None = None) -> int:
    args, before = None, None
    try:
        signal.signal(signal.SIGTERM, on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
            signal.signal(signal.SIGHUP, on_signal)
        parser = make_parser()
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help()
            return 0
        before = _identity_of_output(args)
        with console.quiet() if getattr(args, "quiet", False) else contextlib.nullcontext():
            code = int(args.run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of our output has gone: `macko inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as e:
        if args is not None and args.debug:
            raise
        note = ""
        if args is not None and _identity_of_output(args) != before and "is complete" not in one_line(e):
            note = f" ({args.output} is complete)"  # only what came after it failed
        with contextlib.suppress(OSError):  # stderr may be a file on the disk that is full
            print(f"error: {one_line(e)}{note}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
