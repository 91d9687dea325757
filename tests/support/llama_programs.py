"""Runs llama.cpp's programs with the plugin, for check_llama_cpp.py and the tests."""

from __future__ import annotations

import json
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

PROMPT = "The function returns"


def command(program: pathlib.Path, *args: object, compress: bool = False) -> list[str]:
    """The command line of a program under `macko run`."""
    macko = [sys.executable, "-m", "ggml_macko.commands.cli", "run", *(["--compress"] if compress else []), "--"]
    return [*macko, str(program), *map(str, args)]


def run(
    program: pathlib.Path, *args: object, compress: bool = False, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs a program under `macko run`. Raises RuntimeError unless it exits with 0."""
    done = subprocess.run(
        command(program, *args, compress=compress), capture_output=True, text=True, timeout=timeout, errors="replace"
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program.name} exited with {done.returncode}: {done.stderr[-800:]}")
    return done


class Logged(NamedTuple):
    """A finished run, and the match of a pattern in its log."""

    done: subprocess.CompletedProcess[str]
    match: re.Match[str]


def run_logged(program: pathlib.Path, pattern: str, *args: object, **kwargs: Any) -> Logged:
    """Runs a program until it has logged a line with the pattern.

    A program that prints through llama.cpp's logger may lose the end of its output when it exits, even with a dense
    model: no code joins the logger's thread.
    """
    for _ in range(20):
        done = run(program, *args, **kwargs)
        match = re.search(pattern, done.stderr + done.stdout)
        if match:
            return Logged(done, match)
    raise RuntimeError(f"{program.name}: no '{pattern}' in its log in 20 runs")


def whole_output(program: pathlib.Path, last: str, *args: object, **kwargs: Any) -> str:
    """The output of a program without empty lines at the end. last: a pattern that the program logs after the text."""
    return run_logged(program, last, *args, **kwargs).done.stdout.rstrip()


def completion_logged(
    folder: pathlib.Path, model: pathlib.Path, *args: object, n: int = 48, **kwargs: Any
) -> subprocess.CompletedProcess[str]:
    """A run of llama-completion with greedy sampling and its complete output."""
    options = ("-m", model, "-p", PROMPT, "-n", n, "--temp", 0, "-no-cnv", "-t", 1, *args)
    return run_logged(folder / "llama-completion", "graphs reused", *options, **kwargs).done


def completion(folder: pathlib.Path, model: pathlib.Path, *args: object, n: int = 48, **kwargs: Any) -> str:
    """The greedy text of llama-completion."""
    return completion_logged(folder, model, *args, n=n, **kwargs).stdout.strip()


def simple(folder: pathlib.Path, model: pathlib.Path, n: int = 48) -> str:
    """The greedy text of llama-simple."""
    return run(folder / "llama-simple", "-m", model, "-n", n, PROMPT).stdout.strip()


def perplexity(folder: pathlib.Path, model: pathlib.Path, text: pathlib.Path, *args: object) -> float:
    """The perplexity that llama-perplexity prints."""
    pattern = r"PPL = ([0-9.]+)"
    found = run_logged(folder / "llama-perplexity", pattern, "-m", model, "-f", text, "-c", 256, *args)
    return float(found.match[1])


def bench(folder: pathlib.Path, model: pathlib.Path, *args: object) -> dict[str, float]:
    """Name of each test of llama-bench -> tokens per second."""
    done = run(folder / "llama-bench", "-m", model, "-o", "json", *args)
    return {f"pp{x['n_prompt']}" if x["n_prompt"] else f"tg{x['n_gen']}": x["avg_ts"] for x in json.loads(done.stdout)}


def host_memory(folder: pathlib.Path, model: pathlib.Path, *args: object, **kwargs: Any) -> int:
    """MiB of weights that llama-fit-params predicts for host memory."""
    pattern = r"Host +\| +\d+ = +(\d+) \+"
    program = folder / "llama-fit-params"
    found = run_logged(program, pattern, "-m", model, "-c", 512, "--verbose", *args, **kwargs)
    return int(found.match[1])


class Server:
    """A running llama-server with a model, as a context manager; the exit sends SIGTERM."""

    def __init__(self, folder: pathlib.Path, model: pathlib.Path, *args: object, compress: bool = False):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{s.getsockname()[1]}"
        port = self.url.rsplit(":", 1)[1]
        self.log: list[str] = []
        options = ("-m", model, "--host", "127.0.0.1", "--port", port, *args)
        self.process = subprocess.Popen(
            command(folder / "llama-server", *options, compress=compress),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def __enter__(self) -> Server:
        try:
            self._wait_until_ready()
        except BaseException:
            self.process.kill()
            raise
        return self

    def _wait_until_ready(self) -> None:
        for _ in range(600):
            if self.process.poll() is not None:
                raise RuntimeError("llama-server exited: " + "".join(self.log[-5:]))
            try:
                self.get("/health")
                return
            except OSError:  # not listening yet, or still loading
                time.sleep(0.1)
        raise RuntimeError("llama-server did not start in 60 s")

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self._reader.join(10)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def post(self, path: str, **body: object) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def complete(self, prompt: str, n: int = 24, **options: object) -> str:
        return self.post("/completion", prompt=prompt, n_predict=n, temperature=0, cache_prompt=False, **options)[
            "content"
        ]

    def tie(self, prompt: str, got: str, n: int = 24) -> float:
        """The difference of the log-probabilities of the top two tokens where `got` first differs from the greedy text;
        0 if `got` is the greedy text.
        """
        answer = self.post("/completion", prompt=prompt, n_predict=n, temperature=0, cache_prompt=False, n_probs=2)
        text = ""
        for token in answer["completion_probabilities"]:
            text += token["token"]
            if not got.startswith(text):
                best, second = (x["logprob"] for x in token["top_logprobs"])
                return best - second
        return 0.0

    def rss(self) -> int:
        """Resident memory of llama-server in bytes; `macko run` replaces its own process with llama-server."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        assert found is not None
        return 1024 * int(found[1])


class Difference(NamedTuple):
    """An answer that differs from the answer for a single client."""

    prompt: str
    alone: str
    got: str


@dataclass(frozen=True)
class Soaked:
    """The results of `soak`."""

    answers: int
    ties: list[float]  # for each answer that differs: result of Server.tie
    errors: list[str]
    rss: list[int]  # of the server, in bytes, about once per second


def soak(server: Server, prompts: Sequence[str], clients: int, seconds: float, n: int = 24) -> Soaked:
    """Sends each prompt once; then `clients` clients send the prompts at the same time, again and again.

    With several slots, llama.cpp computes prompts and tokens of several clients in one batch. Products then round in
    another order, with dense and sparse models, which may change the choice between two nearly tied tokens. With one
    slot (-np 1) the clients wait for each other, and every answer must equal that for a single client.
    """
    alone = {p: server.complete(p, n) for p in prompts}
    deadline = time.monotonic() + seconds
    answers = [0] * clients
    different: list[Difference] = []
    errors: list[str] = []
    rss: list[int] = []

    def client(i: int) -> None:
        k = i
        while time.monotonic() < deadline:
            prompt = prompts[k % len(prompts)]
            k += 1 + i
            try:
                got = server.complete(prompt, n)
            except OSError as e:
                errors.append(str(e))
                return
            answers[i] += 1
            if got != alone[prompt]:
                different.append(Difference(prompt, alone[prompt], got))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        rss.append(server.rss())
        time.sleep(min(1, seconds / 10))
    for t in threads:
        t.join()
    ties = [server.tie(d.prompt, d.got, n) for d in different]
    return Soaked(answers=sum(answers), ties=ties, errors=errors, rss=rss)
