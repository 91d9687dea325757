"""The `macko` command: `macko SUBCOMMAND ...`.

Exit codes: 0 success; 1 an error (one line on stderr); 2 a command line that is wrong for any file; 130, 143 and 129
after Ctrl-C, SIGTERM and SIGHUP.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from .. import console, errors
from ..errors import one_line

# Each is a module in commands/ with HELP, add_arguments(parser), run(args) -> exit code.
COMMANDS = (
    "calibrate", "perplexity", "prune", "recover", "decompress", "convert", "restore", "verify", "inspect", "plan",
    "generate", "bench", "report", "run", "env", "link",
)  # fmt: skip

USAGE = 2
"""Exit code for a wrong command line, the same as argparse's."""

LOAD_OPTIONS = ("strict", "cache")
"""Options of arguments.add_load_options(); each is a word of GGML_MACKO_LOAD and holds for all loads of the process."""

SHELLS = ("bash", "zsh", "tcsh")

FILES = ("IN", "OUT", "A", "B", "MODEL", "DENSE", "FNAME", "FILE", "FILE.png", "STEM")
"""Metavars of arguments that are files, for shell completion."""


class Parser(argparse.ArgumentParser):
    """Prints an error as one line. A value attached to an option must be a number (-t4), so that -hf is not read as
    -h with a value.
    """

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}\nto show complete usage, run with -h", file=sys.stderr)
        raise SystemExit(USAGE)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # argparse calls this for every argument that begins with a dash and is not an option, to find abbreviations
        # and attached values. Arguments of a subcommand pass through the main parser, those of `macko run PROGRAM`
        # through both parsers.
        name = option_string.split("=")[0]
        is_value = " " in option_string or not option_string.lstrip("-")[:1].isalpha()
        is_number = len(name) > 2 and name[1] != "-" and name[2:].isdigit() and name[:2] in self._option_string_actions
        passes_on = any(a.nargs in (argparse.REMAINDER, argparse.PARSER) for a in self._actions)
        if is_number or is_value or passes_on:
            return super()._get_option_tuples(option_string) if is_number else []
        self.unknown_option(name)

    def unknown_option(self, name: str) -> NoReturn:
        known = [option for option in self._option_string_actions if len(option) > 2]
        self.error(f"unknown option {name}{errors.did_you_mean(name, known)}")

    def checked(self, arguments: Sequence[str]) -> Sequence[str]:
        """The arguments. Exits with an error if the first one is an unknown option."""
        first = arguments[0].split("=")[0] if arguments else ""
        if first.startswith("-") and first not in self._option_string_actions:
            self.unknown_option(first)
        return arguments


class Version(argparse.Action):
    """Prints the versions of the library and of llama.cpp, the CPU kernels and the GPUs. Loads the C library."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> NoReturn:
        import llama_cpp

        from ..native import cpu, library, llama_hook

        installed = llama_cpp.__version__
        print(
            f"macko {library.version()}, with llama-cpp-python {installed} (ggml {library.running_ggml()}), "
            f"CPU kernels: {cpu.cpu_kernels()}, GPU: {library.gpus()}"
        )
        if not llama_hook.is_tested(installed):
            print(llama_hook.untested(installed))
        parser.exit()


class PrintCompletion(argparse.Action):
    """Prints a script that completes subcommands, options and file names in a shell."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, shell: Any, *unused: object) -> NoReturn:
        try:
            import shtab
        except ImportError as e:
            raise errors.bad_argument("--print-completion needs shtab: pip install 'ggml-macko[completion]'") from e
        for command in parser._actions:
            subparsers = command.choices.values() if isinstance(command, argparse._SubParsersAction) else ()
            for action in (action for subparser in subparsers for action in subparser._actions):
                if action.metavar in FILES:
                    action.complete = shtab.FILE  # shtab reads this member
        print(shtab.complete(parser, shell))
        parser.exit()


def make_parser(command: str | None = None) -> Parser:
    """command: the only subcommand that the parser needs, if it is one; the modules of the others are not imported."""
    parser = Parser(prog="macko", description="Sparse LLM weights for stock llama.cpp.", allow_abbrev=False)
    parser.add_argument("--version", action=Version, nargs=0, help="print versions and exit")
    parser.add_argument(
        "--print-completion", action=PrintCompletion, choices=SHELLS, help="print a completion script and exit"
    )
    subparsers = parser.add_subparsers(dest="command", metavar="SUBCOMMAND")
    for name in COMMANDS:
        if command in COMMANDS and name != command:
            subparsers.add_parser(name)
            continue
        module = importlib.import_module(f"ggml_macko.commands.{name}")
        sub = subparsers.add_parser(name, help=module.HELP, allow_abbrev=False)
        module.add_arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show a traceback with an error")
        sub.set_defaults(run=module.run)
    helper = subparsers.add_parser("help", help="show the arguments of a subcommand", allow_abbrev=False)
    helper.description = "Shows the subcommands, or the arguments of one subcommand."
    helper.add_argument(
        "subcommand", metavar="SUBCOMMAND", nargs="?", choices=COMMANDS, help="one of the subcommands above"
    )
    helper.add_argument("--debug", action="store_true", help="show a traceback with an error")
    helper.set_defaults(run=lambda args: parser.parse_args([*filter(None, [args.subcommand]), "--help"]))
    return parser


def on_signal(number: int, *unused: object) -> NoReturn:
    raise SystemExit(128 + number)  # unwinds the stack, which removes partial files


def _identity_of_output(args: argparse.Namespace) -> tuple[int, int] | None:
    """Device and inode of the output. An output gets its name only when it is complete."""
    try:
        found = os.stat(args.output)
    except (AttributeError, TypeError, OSError):  # the command has no output, or it does not exist yet
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _load_with(words: Sequence[str]) -> Iterator[None]:
    """Sets words of GGML_MACKO_LOAD for this process and the processes that it starts."""
    from ..native import environment

    before = os.environ.get(environment.LOAD)
    os.environ.update(environment.with_words(environment.LOAD, words))
    try:
        yield
    finally:
        del os.environ[environment.LOAD]
        if before is not None:
            os.environ[environment.LOAD] = before


def _prepare_streams() -> None:
    """Opens /dev/null for each closed standard stream; otherwise an output file could get the number of a stream, and C
    libraries would print into it. Names that are not UTF-8 are printed with escapes.
    """
    while True:
        fd = os.open(os.devnull, os.O_RDWR)
        if fd > 2:
            os.close(fd)
            break
        os.set_inheritable(fd, True)
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def main(argv: Sequence[str] | None = None) -> int:
    args, before = None, None
    _prepare_streams()
    try:
        signal.signal(signal.SIGTERM, on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, on_signal)
        arguments = sys.argv[1:] if argv is None else argv
        parser = make_parser(arguments[0] if arguments else None)
        parsed = parser.parse_args(parser.checked(arguments))
        if parsed.command is None:
            parser.print_help()
            return 0
        before = _identity_of_output(parsed)
        args = parsed
        with contextlib.ExitStack() as options:
            if getattr(args, "quiet", False):
                options.enter_context(console.quiet())
            if words := [word for word in LOAD_OPTIONS if getattr(args, word, False)]:
                options.enter_context(_load_with(words))
            code = int(args.run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has closed the pipe: `macko inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as e:
        if args is not None and args.debug:
            raise
        note = ""
        if args is not None and _identity_of_output(args) != before and "is complete" not in one_line(e):
            note = f" ({args.output} is complete)"  # a later step failed
        with contextlib.suppress(OSError):  # stderr may be a file on a full disk
            print(f"error: {one_line(e)}{note}", file=sys.stderr)
        return USAGE if isinstance(e, errors.UsageError) else 1


if __name__ == "__main__":
    sys.exit(main())
