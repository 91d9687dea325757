#!/usr/bin/env python3
"""Runs llama.cpp's programs from Debian's packages with the plugin, in a chroot for each suite.

  python3 tools/checks/check_debian.py [SUITE ...]      default: sid testing

Needs root, debootstrap, and the package installed in this Python (`tools/dev.py check` does that). Makes
build/debian/SUITE with debootstrap and installs the programs there, unless that folder exists. Runs each program with a
dense model and its sparse file, with `macko run`, and again with only GGML_BACKEND_PATH, which is llama.cpp's own
variable for plugins. Text must be equal, and the perplexity and the log-probabilities of a server's top tokens nearly
so. Prints a table; exits with 1 after a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from tabulate import tabulate

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools" / "checks")]
import check_llama_cpp  # noqa: E402

from ggml_macko.native import library  # noqa: E402
from support import llama_programs as programs  # noqa: E402

OUT = ROOT / "build" / "debian"
MODEL = ROOT / "models" / "docs-4m-s70-f16.gguf"
PACKAGES = ("llama.cpp-tools", "llama.cpp-tools-extra")
# a mirror may be older than the suite's files say
APT = ("apt-get", "-y", "-qq", "-o", "Acquire::Check-Valid-Until=false", "--no-install-recommends")
MAX_DIFFERENCE = 0.02
"""Natural logarithms of probabilities; 0.014 was measured on Debian sid (AVX2)."""


def run(*command: object) -> None:
    print("+", " ".join(map(str, command)), file=sys.stderr, flush=True)
    subprocess.run([str(c) for c in command], check=True, stdout=sys.stderr)


def make_chroot(suite: str, mirror: str) -> pathlib.Path:
    root = OUT / suite
    if not (root / "usr" / "bin" / "llama-cli").exists():
        OUT.mkdir(parents=True, exist_ok=True)
        run("debootstrap", "--variant=minbase", suite, root, *filter(None, [mirror]))
        run("chroot", root, *APT, "update")
        run("chroot", root, "env", "DEBIAN_FRONTEND=noninteractive", *APT, "install", *PACKAGES)
    return root


def version_of(root: pathlib.Path, package: str) -> str:
    query = ("dpkg-query", "-W", "-f", "${Version}", package)
    return subprocess.run(["chroot", root, *query], check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def entered(root: pathlib.Path, *shared: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder with a script for each program, which runs it in the chroot. There, /proc and the shared folders are at
    their own paths.
    """
    mounted = []
    try:
        for path in (pathlib.Path("/proc"), *shared):
            inside = root / path.relative_to("/")
            inside.mkdir(parents=True, exist_ok=True)
            run("mount", "--bind", path, inside)
            mounted.append(inside)
        with tempfile.TemporaryDirectory() as folder:
            for program in (root / "usr" / "bin").glob("llama-*"):
                script = pathlib.Path(folder, program.name)
                script.write_text(f'#!/bin/sh\nexec chroot {root} /usr/bin/{program.name} "$@"\n')
                script.chmod(0o755)
            yield pathlib.Path(folder)
    finally:
        for inside in reversed(mounted):
            run("umount", inside)


def answer(folder: pathlib.Path, model: pathlib.Path) -> tuple[str, list[dict[int, float]]]:
    """A server's greedy text, and the log-probabilities of the top tokens at each of its tokens."""
    with programs.Server(folder, model, "-np", 1, "-t", 1, "-c", 512) as server:
        got = server.post("/completion", prompt=programs.PROMPT, n_predict=24, temperature=0, n_probs=5)
    tops = [{t["id"]: t["logprob"] for t in token["top_logprobs"]} for token in got["completion_probabilities"]]
    return got["content"], tops


def largest_difference(a: list[dict[int, float]], b: list[dict[int, float]]) -> float:
    return max(abs(x[t] - y[t]) for x, y in zip(a, b) for t in x.keys() & y.keys())


def check_macko_run(
    report: check_llama_cpp.Report, suite: str, folder: pathlib.Path, dense: pathlib.Path, sparse: pathlib.Path
) -> None:
    for what, text in (("llama-completion", programs.completion), ("llama-cli", check_llama_cpp.chat)):
        texts = [text(folder, model) for model in (dense, sparse)]
        report.add(
            f"{suite}, `macko run`: {what}, text", *(f"{len(t)} characters" for t in texts), texts[0] == texts[1]
        )
    figures = [programs.perplexity(folder, m, check_llama_cpp.SAMPLE, "-t", 1) for m in (dense, sparse)]
    same = abs(figures[0] - figures[1]) < 2e-4 * figures[0]
    report.add(f"{suite}, `macko run`: llama-perplexity", *figures, same)
    (text, tops), (sparse_text, sparse_tops) = [answer(folder, model) for model in (dense, sparse)]
    report.add(f"{suite}, `macko run`: llama-server, text", len(text), len(sparse_text), text == sparse_text)
    difference = largest_difference(tops, sparse_tops)
    what = f"{suite}, `macko run`: llama-server, largest difference of top 5 log-probabilities"
    report.add(what, "", f"{difference:.1e}", difference < MAX_DIFFERENCE)
    check_llama_cpp.check_speed(
        report, folder, dense, sparse, f"{suite}, `macko run`: ", "-t", 1, "-p", 128, "-n", 64, "-r", 3
    )


def check_backend_path(
    report: check_llama_cpp.Report, suite: str, folder: pathlib.Path, dense: pathlib.Path, sparse: pathlib.Path
) -> None:
    """Only the plugin, without the preload library."""

    def output(program: str, *args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(folder / program), *map(str, args)], capture_output=True, text=True,
            env={**os.environ, "GGML_BACKEND_PATH": str(library.LIBRARY_PATH)},
        )  # fmt: skip

    what = f"{suite}, `GGML_BACKEND_PATH`: "
    listed = output("llama-bench", "--list-devices")
    report.add(what + "llama-bench --list-devices", "", "", "MACKO_CPU" in listed.stdout + listed.stderr)
    options = ("-p", programs.PROMPT, "-n", 24, "--temp", 0, "-no-cnv", "-t", 1)
    done = output("llama-completion", "-m", dense, *options)
    want = programs.completion(folder, dense, n=24)
    report.add(what + "llama-completion, text", len(want), "", done.stdout.strip() == want)
    done = output("llama-bench", "-m", dense, "-p", 16, "-n", 8, "-r", 1, "-o", "json")
    report.add(what + "llama-bench", "", "", done.returncode == 0 and len(json.loads(done.stdout)) == 2)
    refused = output("llama-completion", "-m", sparse, *options).returncode != 0
    report.add(what + "a sparse file", "", "refused" if refused else "opened", refused)
    link = sparse.with_name("sparse.link.gguf")
    check_llama_cpp.macko("link", sparse, link)
    linked = output("llama-completion", "-m", link, *options).stdout.strip()
    report.add(what + "llama-completion, text of a link", len(want), len(linked), linked == want)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", default=["sid", "testing"])
    parser.add_argument("--mirror", default="", help="default: debootstrap's")
    args = parser.parse_args()
    report = check_llama_cpp.Report()
    for suite in args.suites:
        root = make_chroot(suite, args.mirror)
        what = (
            f"{suite}: llama.cpp-tools {version_of(root, 'llama.cpp-tools')}, libggml0 {version_of(root, 'libggml0')}"
        )
        report.add(what, "", "", None)
        with tempfile.TemporaryDirectory() as folder:
            tmp = pathlib.Path(folder)
            dense, sparse = tmp / "dense.gguf", tmp / "sparse.gguf"
            shutil.copy(MODEL, dense)
            check_llama_cpp.macko("convert", dense, sparse)
            plugin = (library.LIBRARY_PATH.parent, library.LIBRARY_PATH.resolve().parent)
            shared = (tmp, *plugin, check_llama_cpp.SAMPLE.parent)
            with entered(root, *dict.fromkeys(shared)) as programs_folder:
                check_macko_run(report, suite, programs_folder, dense, sparse)
                check_backend_path(report, suite, programs_folder, dense, sparse)
    print(tabulate(report.rows, headers=["", "dense", "sparse", ""], tablefmt="github", disable_numparse=True))
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
