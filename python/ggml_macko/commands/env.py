"""Prints the variables that `macko run` sets, for service files, containers and shells: `eval "$(macko env)"`."""

from __future__ import annotations

import argparse
import shlex

from .. import system
from ..commands import run as run_command

HELP = "print the environment variables that `macko run` sets"


def shell_line(name: str, value: str) -> str:
    """Keeps other preloaded libraries."""
    rest = f"${{{name}:+:${name}}}" if name == system.PRELOAD_VARIABLE else ""
    return f"export {name}={shlex.quote(value)}{rest}"


def systemd_line(name: str, value: str) -> str:
    """For the [Service] section; systemd.exec(5) and systemd.syntax(7) have the rules of quoting."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'Environment="{name}={escaped}"'


def docker_line(name: str, value: str) -> str:
    """For `docker run --env-file`, which reads lines without quoting."""
    return f"{name}={value}"


FORMATS = {"sh": shell_line, "systemd": systemd_line, "docker": docker_line}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        'Prints the variables that `macko run` sets: `eval "$(macko env)"` in a shell, --format systemd for the '
        "[Service] section of a unit, --format docker for `docker run --env-file` (the paths must exist in the "
        "container)."
    )
    run_command.add_load_arguments(parser)
    parser.add_argument("--format", choices=sorted(FORMATS), default="sh", help="default: sh")


def run(args: argparse.Namespace) -> int:
    for name, value in run_command.variables(run_command.load_options(args)).items():
        print(FORMATS[args.format](name, value))
    return 0
