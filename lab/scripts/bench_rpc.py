#!/usr/bin/env python3
"""Measures a sparse model on servers of llama.cpp's RPC backend: text, memory, traffic, and the cost of a hop.

  python3 tools/build_llama_cpp.py
  python3 lab/scripts/bench_rpc.py build/llama.cpp/bin sparse.gguf    # servers on the loopback
  sudo python3 lab/scripts/bench_rpc.py --hosts build/llama.cpp/bin sparse.gguf   # each in a namespace of its own

The table has a row for this machine alone, and one each for 1, 2 ... servers that hold all layers. Exits with 1 if the
texts differ. The time per token is the minimum of the repetitions. The memory of a server is its anonymous memory
during generation; "sent" counts the bytes while loading, and --hosts is required to count traffic. With GPUs, each
server computes on one of them in turn; with --client-gpu, the client uses the first GPU for some of the layers, and the
servers use the others. GPU memory is that of a run on all GPUs, without the servers' permanent memory: contexts, and
buffers for dense copies of weights.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from tabulate import tabulate

from ggml_macko.native import devices

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "tests"))
from support import llama_programs as programs  # noqa: E402
from support import rpc_servers  # noqa: E402

MIB = 1 << 20
FEW, MANY = 16, 80  # tokens; the traffic of a token is the difference


class Run(NamedTuple):
    """A run of llama-completion."""

    text: str
    ms_per_token: float
    load_ms: float
    client_memory: int  # peak, bytes
    server_memory: list[int]  # during generation, bytes
    gpu_memory: int  # at most, of all processes, bytes
    traffic: list[int]  # bytes, by server


def free_on_gpu() -> int:
    """Free bytes of all GPUs; 0 without a GPU."""
    return sum(gpu.free for gpu in devices.gpus())


def run_once(
    folder: pathlib.Path,
    model: pathlib.Path,
    n: int,
    threads: int,
    servers: list[rpc_servers.Server],
    count: bool,
    client_gpu: str | None,
) -> Run | None:
    """client_gpu: number of the GPU on which the client computes some layers, or None.

    Returns None if the logger's thread lost the end of its output, which has the figures.
    """
    place = ["-ngl", "99" if servers or devices.gpus() else "0"]
    environment = dict(os.environ)
    if servers:
        names = [f"RPC{i}" for i in range(len(servers))]
        if client_gpu is not None:
            names.insert(0, "MACKO0")
            environment["CUDA_VISIBLE_DEVICES"] = client_gpu
        place += ["--rpc", ",".join(s.address for s in servers), "-dev", ",".join(names)]
    command = programs.command(
        folder / "llama-completion", "-m", model, "-p", programs.PROMPT, "-n", n, "--temp", 0, "-no-cnv",
        "--ignore-eos", "-t", threads, "-c", 256, "-ub", 32, "-fit", "off", *place
    )  # fmt: skip
    before = [s.host.traffic() if count else 0 for s in servers]
    lowest = free_before = free_on_gpu()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        samples: list[list[int]] = []
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            samples.append([s.memory() for s in servers])
            lowest = min(lowest, free_on_gpu())
            time.sleep(0.01)
        process.returncode = status  # os.wait4 has already waited
        out.seek(0)
        err.seek(0)
        text, log = out.read().decode(errors="replace"), err.read().decode(errors="replace")
    if status:
        raise RuntimeError(f"llama-completion failed: {log[-800:]}")
    figures = re.search(r"eval time = .*? runs +\( *([\d.]+) ms per token", log)
    load = re.search(r"load time = +([\d.]+) ms", log)
    if not figures or not load:
        return None
    middle = [sorted(s)[len(s) * 3 // 4] for s in zip(*samples)]
    traffic = [s.host.traffic() - b if count else 0 for s, b in zip(servers, before)]
    client = usage.ru_maxrss * 1024
    return Run(text.strip(), float(figures[1]), float(load[1]), client, middle, free_before - lowest, traffic)


def run(*args: Any) -> Run:
    """Repeats run_once() until its figures are complete."""
    for _ in range(20):
        found = run_once(*args)
        if found is not None:
            return found
    raise RuntimeError("llama-completion printed no figures in 20 runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="folder of llama.cpp's programs")
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--hosts", action="store_true", help="a network namespace for each server")
    parser.add_argument("--servers", default="0,1,2,3", metavar="N,N...", help="a row for each (default: %(default)s)")
    parser.add_argument("-t", "--threads", type=int, default=2, help="threads of the client, and of each server")
    parser.add_argument("-r", "--repetitions", type=int, default=3, metavar="N")
    parser.add_argument("--stock", action="store_true", help="servers without the plugin")
    parser.add_argument("--client-gpu", action="store_true", help="also use a GPU for the client")
    args = parser.parse_args()
    if args.client_gpu and not devices.gpus():
        parser.error("--client-gpu: there is no GPU")
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(i) for i in range(len(devices.gpus())))).split(",")
    rows, same, want = [], True, ""
    for n in map(int, args.servers.split(",")):
        with contextlib.ExitStack() as stack:
            logs = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            places = stack.enter_context(rpc_servers.hosts(n)) if args.hosts else [rpc_servers.THIS_MACHINE] * n
            servers = [
                stack.enter_context(
                    rpc_servers.running(
                        args.folder,
                        logs / f"{i}.log",
                        plugin=not args.stock,
                        threads=args.threads,
                        host=host,
                        CUDA_VISIBLE_DEVICES=gpus[(i + args.client_gpu) % len(gpus)],
                    )
                )
                for i, host in enumerate(places)
            ]
            common = (args.threads, servers, args.hosts, gpus[0] if args.client_gpu else None)
            few = run(args.folder, args.model, FEW, *common)
            runs = [run(args.folder, args.model, MANY, *common) for _ in range(args.repetitions)]
            want = want or runs[0].text
            same = same and all(r.text == want for r in runs)
            per_token = [(many - f) / (MANY - FEW) for many, f in zip(runs[0].traffic, few.traffic)]
            rows.append(
                (
                    n or "none",
                    min(r.ms_per_token for r in runs),
                    f"{min(r.load_ms for r in runs) / 1000:.2f}",
                    f"{max(r.client_memory for r in runs) / MIB:.0f}",
                    ", ".join(f"{m / MIB:.1f}" for m in runs[0].server_memory),
                    f"{runs[0].gpu_memory / MIB:.1f}" if devices.gpus() else "",
                    ", ".join(f"{(f - t * FEW) / MIB:.1f}" for f, t in zip(few.traffic, per_token))
                    if args.hosts
                    else "",
                    ", ".join(f"{t:.0f}" for t in per_token) if args.hosts else "",
                    "" if len(rows) == 0 else "same" if all(r.text == want for r in runs) else "DIFFERENT",
                )
            )
        print(rows[-1], file=sys.stderr, flush=True)
    headers = (
        "servers", "ms per token", "load s", "client peak MiB", "server MiB", "GPU MiB", "sent MiB", "bytes per token",
        "text"
    )  # fmt: skip
    print(tabulate(rows, headers, tablefmt="pipe", disable_numparse=True))
    sys.exit(not same)


if __name__ == "__main__":
    main()
