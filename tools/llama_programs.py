"""Runs llama.cpp's programs with the plugin, for check_llama_cpp.py and the tests: texts, figures, and a server."""

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
from typing import Any

PROMPT = "The function returns"


def command(program: pathlib.Path, *args: object, compress: bool = False) -> list[str]:
    """The command line that runs a program with the plugin."""
    macko = [sys.executable, "-m", "ggml_macko.commands.cli", "run", *(["--compress"] if compress else []), "--"]
    return [*macko, str(program), *map(str, args)]


def run(
    program: pathlib.Path, *args: object, compress: bool = False, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs a program; RuntimeError with the end of its log if it fails."""
    done = subprocess.run(
        command(program, *args, compress=compress), capture_output=True, text=True, timeout=timeout, errors="replace"
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program.name} exited with {done.returncode}: {done.stderr[-800:]}")
    return done


def run_logged(
    program: pathlib.Path, pattern: str, *args: object, **kwargs: Any
) -> tuple[subprocess.CompletedProcess[str], re.Match[str]]:
    """Runs a program; returns the finished process and the first match of the pattern in its log.

    The logger of llama.cpp is a thread that some programs do not join when they exit, so that the end of the log may be
    missing, with dense and with sparse models. The program runs again, up to 20 times, until the pattern is logged.
    """
    for _ in range(20):
        done = run(program, *args, **kwargs)
        match = re.search(pattern, done.stderr + done.stdout)
        if match:
            return done, match
    raise RuntimeError(f"{program.name}: no '{pattern}' in its log in 20 runs")


def whole_output(program: pathlib.Path, last: str, *args: object, **kwargs: Any) -> str:
    """What a program prints in a run that logged `last`, which comes after the text; without newlines at the end."""
    return run_logged(program, last, *args, **kwargs)[0].stdout.rstrip()


def completion(folder: pathlib.Path, model: pathlib.Path, *args: object, n: int = 48, **kwargs: Any) -> str:
    """The greedy continuation of PROMPT by llama-completion: n tokens."""
    options = ("-m", model, "-p", PROMPT, "-n", n, "--temp", 0, "-no-cnv", "-t", 1)
    return whole_output(folder / "llama-completion", "graphs reused", *options, *args, **kwargs).strip()


def simple(folder: pathlib.Path, model: pathlib.Path, n: int = 48) -> str:
    """The greedy continuation of PROMPT by llama-simple: n tokens."""
    return run(folder / "llama-simple", "-m", model, "-n", n, PROMPT).stdout.strip()


def perplexity(folder: pathlib.Path, model: pathlib.Path, text: pathlib.Path, *args: object) -> float:
    """Of the text, in chunks of 256 tokens."""
    options = ("-m", model, "-f", text, "-c", 256)
    return float(run_logged(folder / "llama-perplexity", r"PPL = ([0-9.]+)", *options, *args)[1][1])


def bench(folder: pathlib.Path, model: pathlib.Path, *args: object) -> dict[str, float]:
    """Name of the test (pp128, tg64, ...) -> tok/s."""
    done = run(folder / "llama-bench", "-m", model, "-o", "json", *args)
    return {f"pp{x['n_prompt']}" if x["n_prompt"] else f"tg{x['n_gen']}": x["avg_ts"] for x in json.loads(done.stdout)}


def host_memory(folder: pathlib.Path, model: pathlib.Path, *args: object, **kwargs: Any) -> int:
    """MiB of weights that llama-fit-params expects on the host."""
    options = ("-m", model, "-c", 512, "--verbose")
    pattern = r"Host +\| +\d+ = +(\d+) \+"
    return int(run_logged(folder / "llama-fit-params", pattern, *options, *args, **kwargs)[1][1])


class Server:
    """llama-server with a model, on a free port. A context manager: waits until it answers; ends it with SIGTERM."""

    def __init__(self, folder: pathlib.Path, model: pathlib.Path, *args: object, compress: bool = False):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{s.getsockname()[1]}"
        port = self.url.rsplit(":", 1)[1]
        self.log: list[str] = []
        options = ("-m", model, "--host", "127.0.0.1", "--port", port)
        self.process = subprocess.Popen(
            command(folder / "llama-server", *options, *args, compress=compress),
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
        """The difference between the log-probabilities of the best two tokens where `got` leaves the greedy text.

        Small values are ties, which the order of rounding decides. 0 if `got` does not leave the text.
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
        """Bytes of memory of llama-server: `macko run` replaces its process with the program."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])


def soak(server: Server, prompts: list[str], clients: int, seconds: float, n: int = 24) -> dict[str, Any]:
    """Asks for each prompt alone; then `clients` threads ask for them again and again. Records the memory every second.

    Returns the number of answers, the errors, the memory (rss), and the answers that differ from the one to a single
    client: (prompt, answer to one client, answer, tie). With several slots, llama.cpp computes prompts and tokens of
    several clients in one batch, where products are rounded in another order, dense or sparse; near a tie of two tokens
    that may change the choice. With one slot (-np 1) clients wait for each other, and no answer may differ.
    """
    alone = {p: server.complete(p, n) for p in prompts}
    deadline = time.monotonic() + seconds
    answers, different, errors, rss = [0] * clients, [], [], []

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
                different.append((prompt, alone[prompt], got))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        rss.append(server.rss())
        time.sleep(min(1, seconds / 10))
    for t in threads:
        t.join()
    different = [(*d, server.tie(d[0], d[2], n)) for d in different]
    return {"answers": sum(answers), "different": different, "errors": errors, "rss": rss}
