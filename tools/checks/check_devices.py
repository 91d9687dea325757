#!/usr/bin/env python3
"""Compares a dense model and its sparse file on every device of a llama.cpp build, with its programs.

  python3 tools/build_llama_cpp.py --dynamic
  python3 tools/checks/check_devices.py build/llama.cpp-dl/bin [--dense MODEL.gguf] [--rpc]

`macko run -- llama-bench --list-devices` lists the devices, with those of the plugin; a sparse model is dense on the
others. For each device, for all devices together, and for llama.cpp's own choice, the greedy text of llama-completion
and the answer of llama-server must equal those of the dense model, and llama-bench runs both models. --rpc adds a
server of llama.cpp without the plugin, with its devices. Prints a table; exits with 1 if a text differs or a program
fails.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

from tabulate import tabulate

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from support import llama_programs as programs  # noqa: E402
from support import rpc_servers  # noqa: E402

RPC = "RPC, server without the plugin"


class Place(NamedTuple):
    """The placement of a model: options of llama-completion and llama-server, and of llama-bench."""

    name: str
    options: tuple[str, ...]
    bench: tuple[str, ...]


def devices(folder: pathlib.Path) -> list[str]:
    """The devices for layers."""
    listed = programs.run(folder / "llama-bench", "--list-devices")
    names = re.findall(r"^\s+(\S+): ", listed.stdout + listed.stderr, re.MULTILINE)
    return [name for name in names if name != "MACKO_CPU"]


def places(names: list[str]) -> list[Place]:
    """The CPU, each device, all of them, and llama.cpp's own choice."""
    layers = ("-ngl", "99")
    found = [Place("CPU", ("-ngl", "0", "-dev", "none"), ("-ngl", "0", "-dev", "none"))]
    found += [Place(name, (*layers, "-dev", name), (*layers, "-dev", name)) for name in names]
    if len(names) > 1:
        joined = ",".join(names)
        found.append(Place(joined, (*layers, "-dev", joined), (*layers, "-dev", joined.replace(",", "/"))))
    return [*found, Place("no option but -ngl 99", layers, layers)]


def check(folder: pathlib.Path, dense: pathlib.Path, sparse: pathlib.Path, place: Place) -> tuple[str, ...]:
    """A row of the table."""
    options = (*place.options, "-fit", "off", "-c", "256")
    want = programs.completion(folder, dense, *options)
    done = programs.completion_logged(folder, sparse, *options)
    line = re.search(r"(\d+) of (\d+) sparse tensors became dense", done.stdout + done.stderr)
    became = f"{line[1]} of {line[2]}" if line else "none"
    answers = []
    for model in (dense, sparse):
        with programs.Server(folder, model, *options, "-np", 1) as server:
            answers.append(server.complete(programs.PROMPT))
    bench = [programs.bench(folder, m, *place.bench, "-t", 1, "-p", 64, "-n", 32, "-r", 3) for m in (dense, sparse)]
    speeds = [f"{x['pp64']:.0f} / {x['tg32']:.0f}" for x in bench]
    texts = ["same" if same else "DIFFERENT" for same in (done.stdout.strip() == want, answers[0] == answers[1])]
    return (place.name, *texts, became, *speeds)


def with_rpc_server(folder: pathlib.Path, dense: pathlib.Path, sparse: pathlib.Path) -> tuple[str, ...]:
    """A row of the table."""
    log = sparse.parent / "server.log"
    with rpc_servers.running(folder, log, plugin=False) as server:
        options = ("--rpc", server.address, "-ngl", "99", "-dev", "RPC0")
        return check(folder, dense, sparse, Place(RPC, options, options))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="folder of llama.cpp's programs")
    parser.add_argument("--dense", type=pathlib.Path, default=ROOT / "models" / "docs-4m-s70-f16.gguf")
    parser.add_argument("--rpc", action="store_true", help="also use a server without the plugin")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as tmp:
        sparse = pathlib.Path(tmp, "sparse.gguf")
        subprocess.run(
            [sys.executable, "-m", "ggml_macko.commands.cli", "convert", args.dense, sparse],
            check=True, capture_output=True,
        )  # fmt: skip
        todo = [(p.name, functools.partial(check, place=p)) for p in places(devices(args.folder))]
        todo += [(RPC, with_rpc_server)] if args.rpc else []
        for name, row in todo:
            try:
                rows.append(row(args.folder, args.dense, sparse))
            except (RuntimeError, OSError, subprocess.SubprocessError) as e:
                rows.append((name, f"FAILED: {e}", "", "", "", ""))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    headers = ("device", "text", "server", "became dense", "dense pp64 / tg32, tok/s", "sparse pp64 / tg32, tok/s")
    print(tabulate(rows, headers, tablefmt="pipe", disable_numparse=True))
    return int(any(word in cell for row in rows for cell in row for word in ("DIFFERENT", "FAILED")))


if __name__ == "__main__":
    sys.exit(main())
