#!/usr/bin/env python3
"""Runs llama.cpp's programs with a dense model and its sparse file, through `macko run`, and compares the results.

  python3 tools/build_llama_cpp.py
  python3 tools/checks/check_llama_cpp.py build/llama.cpp/bin [--dense MODEL.gguf] [--seconds 300]
  python3 tools/checks/check_llama_cpp.py build/llama.cpp-dl/bin --devices    # of tools/build_llama_cpp.py --dynamic

Greedy text and tokens must be equal, perplexity to four digits, and the model identical after splitting and merging.
llama-bench runs both models. Eight clients use a server at once: with one slot, all answers must equal those of a
single client; with eight slots, answers may differ only at nearly tied tokens. With --devices, the texts, the answer
of a server, and llama-bench are compared on every device of the build instead: on each device, on all of them, on
llama.cpp's own choice, and on an RPC server without the plugin. Prints a table; exits with 1 after a failure.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Callable

from tabulate import tabulate

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from support import llama_programs as programs  # noqa: E402
from support import rpc_servers  # noqa: E402

SAMPLE = ROOT / "models" / "sample.txt"

MAX_TIE = 0.05
"""Largest difference of two log-probabilities that counts as a tie. Each logit of an F16 model differs by up to about
0.02 between orders of rounding (tests/end-to-end/test_model_runs.py), and two of them decide."""


def macko(*args: object) -> str:
    return subprocess.run(
        [sys.executable, "-m", "ggml_macko.commands.cli", *map(str, args)], check=True, capture_output=True, text=True
    ).stdout


class Report:
    """The rows of the table."""

    def __init__(self) -> None:
        self.rows: list[tuple[object, ...]] = []
        self.failed = False

    def add(self, what: str, dense: object, sparse: object, same: bool | None) -> None:
        """Adds a row. same: None for figures that may differ."""
        self.rows.append((what, dense, sparse, {True: "same", False: "DIFFERENT", None: ""}[same]))
        self.failed |= same is False
        print(f"{what}: {dense} | {sparse}", file=sys.stderr, flush=True)


def check_texts(report: Report, folder: pathlib.Path, dense: pathlib.Path, sparse: pathlib.Path) -> None:
    def compare(what: str, run: Callable[[pathlib.Path], str]) -> str:
        a, b = run(dense), run(sparse)
        report.add(what, f"{len(a)} characters", f"{len(b)} characters", a == b)
        return a

    compare("llama-simple, greedy text", lambda m: programs.simple(folder, m))
    text = compare("llama-completion, greedy text", lambda m: programs.completion(folder, m))
    compressed = programs.completion(folder, dense, compress=True)
    sizes = (f"{len(x)} characters" for x in (text, compressed))
    report.add("llama-completion, macko run --compress", *sizes, text == compressed)
    compare("llama-cli, one turn", lambda m: chat(folder, m))
    spec = ("-p", programs.PROMPT, "-n", 48, "--temp", 0, "-t", 1, "-c", 512)
    draft = ("--spec-type", "draft-simple", "--spec-draft-n-max", 4)
    compare(
        "llama-speculative-simple, draft = model",
        lambda m: programs.whole_output(
            folder / "llama-speculative-simple", "accept ", "-m", dense, "-md", m, *spec, *draft
        ),
    )
    compare(
        "llama-speculative, draft = model",
        lambda m: programs.whole_output(folder / "llama-speculative", "accept ", "-m", m, "-md", m, *spec),
    )
    compare(
        "llama-tokenize",
        lambda m: programs.run(folder / "llama-tokenize", "-m", m, "-f", SAMPLE, "--ids", "--log-disable").stdout,
    )


def chat(folder: pathlib.Path, model: pathlib.Path) -> str:
    """The answer of llama-cli, without the banner before it and the speeds after it."""
    options = ("-n", 32, "--temp", 0, "-t", 1, "-c", 512, "--single-turn", "--simple-io", "--no-display-prompt")
    output = programs.run(folder / "llama-cli", "-m", model, "-p", "What is a pointer?", *options).stdout
    return output[output.find("What is a pointer?") :].split("[ Prompt:")[0]


def check_figures(
    report: Report, folder: pathlib.Path, dense: pathlib.Path, sparse: pathlib.Path, threads: int
) -> None:
    ppl = [programs.perplexity(folder, m, SAMPLE, "-t", threads) for m in (dense, sparse)]
    report.add("llama-perplexity", *ppl, abs(ppl[0] - ppl[1]) < 2e-4 * ppl[0])
    memory = [programs.host_memory(folder, m) for m in (dense, sparse)]
    report.add("llama-fit-params, MiB of weights", *memory, None)
    check_speed(report, folder, dense, sparse, "", "-t", threads, "-p", 128, "-n", 64, "-r", 5)


def check_speed(
    report: Report, folder: pathlib.Path, dense: pathlib.Path, sparse: pathlib.Path, prefix: str, *options: object
) -> None:
    speeds = [programs.bench(folder, m, *options) for m in (dense, sparse)]
    for test in speeds[0]:
        report.add(f"{prefix}llama-bench {test}, tok/s", f"{speeds[0][test]:.1f}", f"{speeds[1][test]:.1f}", None)


def check_files(
    report: Report, folder: pathlib.Path, dense: pathlib.Path, sparse: pathlib.Path, tmp: pathlib.Path
) -> None:
    split = programs.run(folder / "llama-gguf-split", "--split", "--split-max-tensors", 20, sparse, tmp / "part")
    (first,) = tmp.glob("part-00001-of-*.gguf")
    same = programs.simple(folder, first) == programs.simple(folder, dense) and split.returncode == 0
    report.add("llama-gguf-split, greedy text of the parts", "", f"{int(first.name[-10:-5])} parts", same)
    programs.run(folder / "llama-gguf-split", "--merge", first, tmp / "merged.gguf")
    verified = "identical" in macko("verify", dense, tmp / "merged.gguf")
    report.add("llama-gguf-split --merge, macko verify", "", "identical", verified)
    texts = [tmp / f"{name}.gguf" for name in ("dense-imatrix", "sparse-imatrix")]
    for model, out in zip((dense, sparse), texts):
        programs.run(folder / "llama-imatrix", "-m", model, "-f", SAMPLE, "-c", 256, "--chunks", 4, "-o", out)
    sizes = [path.stat().st_size for path in texts]
    report.add("llama-imatrix, bytes", *sizes, sizes[0] == sizes[1])


def check_server(
    report: Report, folder: pathlib.Path, dense: pathlib.Path, sparse: pathlib.Path, args: argparse.Namespace
) -> None:
    text = SAMPLE.read_text()
    prompts = [text[i * 500 : i * 500 + 40 + 23 * i] for i in range(16)]
    short = min(60, args.seconds)
    for model, name, slots, seconds in (
        (dense, "dense", args.clients, short),
        (sparse, "sparse", args.clients, args.seconds),
        (sparse, "sparse", 1, short),
    ):
        with programs.Server(
            folder, model, "-np", slots, "-t", args.threads, "-c", 512 * slots, "--metrics", *args.server_args
        ) as server:
            found = programs.soak(server, prompts, args.clients, seconds)
            metrics = server.get("/metrics")
        rss = [r / 2**20 for r in found.rss]
        third = max(1, len(rss) // 3)
        growth = max(rss[-third:]) - max(rss[third : 2 * third], default=rss[0])
        what = f"llama-server {name}, -np {slots}, {args.clients} clients, {seconds:.0f} s"
        ties = found.ties
        same = not found.errors and max(ties, default=0) < (MAX_TIE if slots > 1 else 0)
        report.add(f"{what}: answers, failed", "", f"{found.answers}, {len(found.errors)}", not found.errors)
        different = f"{len(ties)}; {max(ties, default=0):.4f}"
        report.add(f"{what}: different from one client's; log-probability at the tie", "", different, not ties or same)
        shown = ", ".join(f"{rss[min(i, len(rss) - 1)]:.1f}" for i in (third, 2 * third, len(rss) - 1))
        report.add(f"{what}: RSS MiB at 1/3, 2/3, end", "", shown, growth < 0.02 * max(rss) + 2)
        code, n_figures = server.process.returncode, metrics.count("llamacpp:") // 3
        ended = code == 0 and "llamacpp:" in metrics
        report.add(f"{what}: exit code after SIGTERM; /metrics", "", f"{code}; {n_figures} figures", ended)


def check_devices(report: Report, folder: pathlib.Path, dense: pathlib.Path, sparse: pathlib.Path) -> None:
    """A sparse model is dense on the devices that are not the plugin's."""
    listed = programs.run(folder / "llama-bench", "--list-devices")
    names = re.findall(r"^\s+(\S+): ", listed.stdout + listed.stderr, re.MULTILINE)
    names = [name for name in names if name != "MACKO_CPU"]
    check_place(report, folder, dense, sparse, "CPU", "-ngl", "0", "-dev", "none")
    for name in names + [",".join(names)] * (len(names) > 1):
        check_place(report, folder, dense, sparse, name, "-ngl", "99", "-dev", name)
    check_place(report, folder, dense, sparse, "no option but -ngl 99", "-ngl", "99")
    with rpc_servers.running(folder, sparse.parent / "server.log", plugin=False) as server:
        place = ("--rpc", server.address, "-ngl", "99", "-dev", "RPC0")
        check_place(report, folder, dense, sparse, "RPC, server without the plugin", *place)


def check_place(
    report: Report, folder: pathlib.Path, dense: pathlib.Path, sparse: pathlib.Path, name: str, *place: str
) -> None:
    """place: options of the programs that place the model."""
    options = (*place, "-fit", "off", "-c", "256")
    try:
        want = programs.completion(folder, dense, *options)
        done = programs.completion_logged(folder, sparse, *options)
        report.add(f"{name}: llama-completion", "", "", done.stdout.strip() == want)
        became = re.search(r"(\d+ of \d+) sparse tensors became dense", done.stdout + done.stderr)
        report.add(f"{name}: tensors that became dense", "", became[1] if became else "none", None)
        answers = []
        for model in (dense, sparse):
            with programs.Server(folder, model, *options, "-np", 1) as server:
                answers.append(server.complete(programs.PROMPT))
        report.add(f"{name}: llama-server", "", "", answers[0] == answers[1])
        bench = [option.replace(",", "/") for option in place]  # llama-bench needs this form for the devices of one run
        check_speed(report, folder, dense, sparse, f"{name}: ", *bench, "-t", 1, "-p", 64, "-n", 32, "-r", 3)
    except (RuntimeError, OSError, subprocess.SubprocessError) as e:
        report.add(f"{name}: {e}", "", "", False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, metavar="BIN", help="folder of llama.cpp's programs")
    parser.add_argument(
        "--dense",
        type=pathlib.Path,
        default=ROOT / "models" / "docs-4m-s70-f16.gguf",
        metavar="MODEL",
        help="default: the bundled model",
    )
    parser.add_argument("--seconds", type=float, default=300, help="for the server (dense: 60 at most); 0: no server")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--only-server", action="store_true")
    parser.add_argument("--devices", action="store_true", help="compare on every device of the build instead")
    parser.add_argument("server_args", nargs="*", metavar="-- ARG", help="more arguments for llama-server")
    args = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        tmp = pathlib.Path(folder)
        sparse = tmp / "sparse.gguf"
        macko("convert", args.dense, sparse)
        if args.devices:
            check_devices(report, args.folder, args.dense, sparse)
        elif not args.only_server:
            check_texts(report, args.folder, args.dense, sparse)
            check_figures(report, args.folder, args.dense, sparse, args.threads)
            check_files(report, args.folder, args.dense, sparse, tmp)
        if args.seconds > 0 and not args.devices:
            check_server(report, args.folder, args.dense, sparse, args)
    print(tabulate(report.rows, headers=["", "dense", "sparse", ""], tablefmt="github", disable_numparse=True))
    sys.exit(1 if report.failed else 0)


if __name__ == "__main__":
    main()
