#!/usr/bin/env python3
"""Writes docs/guide/command-line.md from the parsers of `macko` and the plugin's table of environment variables.

tests/end-to-end/test_docs.py fails if the page differs from the output.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import textwrap

from ggml_macko.commands.cli import make_parser
from ggml_macko.native import environment

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "guide" / "command-line.md"
HEAD = """# Command-line reference

`tools/make_cli_reference.py` makes this page from the parsers of the program. Results go to standard output, progress
and warnings to standard error. Exit codes: 0 success; 1 an error (one line on standard error); 2 a command line that is
wrong for any file; 130 and 143 after Ctrl-C and SIGTERM. `macko --version` prints versions, CPU kernels and GPUs.
`macko help SUBCOMMAND` prints a section of this page. `--debug` shows a traceback with an error. `macko
--print-completion bash` (or `zsh`, `tcsh`) prints a script that completes options and files in a shell; it needs `pip
install ggml-macko[completion]`.
"""
ENVIRONMENT = """## Environment variables

The library reads these variables in every program: `macko`, Python and programs under `macko run`. A value is a path or
a list of words with commas between them: `GGML_MACKO_DISABLE=graphs,fusion`. An unknown word, or another variable whose
name begins with `GGML_MACKO_`, is an error: one line names it, and sparse models do not load.
"""


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def argument_row(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """A row of a table: | `-n N, --n-gen N` | description |"""
    if action.option_strings:
        value = "" if action.nargs == 0 else " " + formatter._format_args(action, action.dest.upper())
        name = ", ".join(action.option_strings) + value
    else:
        name = formatter._format_args(action, action.dest.upper())
    help_text = formatter._expand_help(action) if action.help else ""
    return f"| `{cell(name)}` | {cell(help_text)} |"


def usage_of(parser: argparse.ArgumentParser) -> str:
    """`macko convert [options] IN OUT [TYPE] ...`: arguments without a dash; options are abbreviated."""
    formatter = argparse.HelpFormatter(parser.prog)
    names = [formatter._format_args(a, a.dest.upper()) for a in positionals(parser)]
    return " ".join([parser.prog, "[options]", *names])


def positionals(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [a for a in parser._actions if not a.option_strings]


def section(name: str, parser: argparse.ArgumentParser) -> str:
    formatter = argparse.HelpFormatter(parser.prog)
    actions = [a for a in parser._actions if a.dest not in ("help", "debug") and a.help != argparse.SUPPRESS]
    lines = [f"## macko {name}", "", f"`{usage_of(parser)}`", "", paragraph(parser.description or ""), ""]
    if actions:
        lines += ["| argument | |", "|---|---|", *(argument_row(a, formatter) for a in actions), ""]
    if parser.epilog:
        lines += [paragraph(parser.epilog), ""]
    return "\n".join(lines)


def environment_section() -> str:
    lines = [ENVIRONMENT, "| variable | word | |", "|---|---|---|"]
    for s in environment.settings():
        lines.append(f"| `{s.variable}` | {f'`{s.word}`' if s.word else 'a path'} | {cell(s.help)} |")
    return "\n".join([*lines, ""])


def make_page() -> str:
    parser = make_parser()
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    summary = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    table = ["| command | |", "|---|---|", *(f"| [{n}](#macko-{n}) | {cell(h)} |" for n, h in summary.items()), ""]
    sections = [section(name, sub) for name, sub in commands.choices.items() if name in summary]
    return "\n".join([HEAD, *table, *sections, environment_section()]).rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", default=str(PAGE), metavar="FILE", help="- for standard output")
    args = parser.parse_args()
    if args.output == "-":
        sys.stdout.write(make_page())
    else:
        pathlib.Path(args.output).write_text(make_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
