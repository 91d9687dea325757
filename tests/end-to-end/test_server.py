"""`python -m ggml_macko.server` with the openai package as client: sparse and dense models in one server, errors at
startup, and the end by a signal.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest

from support import generators, llama_faults

openai = pytest.importorskip("openai", reason="the openai package is the client")
for name in ("uvicorn", "fastapi", "sse_starlette"):
    pytest.importorskip(name, reason="llama-cpp-python[server] is not installed")

PROMPT = "The function returns"
CHAT = [{"role": "user", "content": "What is a pointer?"}]
GREEDY = {"max_tokens": 24, "temperature": 0}
REQUEST = {**GREEDY, "extra_body": {"repeat_penalty": 1.0}}  # llama_cpp.server's default is 1.1, llama_cpp.Llama's 1.0
SETTINGS = {"n_ctx": 512, "n_threads": 2, "n_threads_batch": 2, "verbose": False, "seed": 1}
SECONDS_TO_START, SECONDS_TO_STOP = 120, 10  # on a busy machine


def start(*args: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "ggml_macko.server", *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def is_open(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Model alias -> path."""
    from ggml_macko.commands import cli

    sparse = tmp_path_factory.mktemp("server") / "sparse.gguf"
    assert cli.main(["convert", str(generators.DEMO), str(sparse)]) == 0
    return {"sparse": sparse, "dense": generators.DEMO}


@contextlib.contextmanager
def running(make_arguments):
    """Starts a server on a free port; yields its process, port and client. make_arguments(port): its command line."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process = start(*make_arguments(port))
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0, timeout=120)
    try:
        end = time.monotonic() + SECONDS_TO_START
        while not is_open(port) and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        if not is_open(port):
            process.kill()
            pytest.fail(f"the server did not start: {process.stderr.read()[-2000:]}")
        yield SimpleNamespace(process=process, port=port, client=client)
    finally:
        client.close()
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """A server of all models, started from a configuration file."""
    entries = [{"model": str(path), "model_alias": alias, **SETTINGS} for alias, path in models.items()]
    entries.append({"model": str(models["sparse"]), "model_alias": "embedder", "embedding": True, **SETTINGS})
    config = tmp_path_factory.mktemp("config") / "config.json"

    def make_arguments(port: int) -> list:
        config.write_text(json.dumps({"host": "127.0.0.1", "port": port, "models": entries}))
        return ["--config_file", config]

    with running(make_arguments) as started:
        yield started


@pytest.fixture(scope="module")
def want(models):
    """Model alias -> (completion, chat) from the model in this process."""
    from ggml_macko import Llama

    answers = {}
    for alias, path in models.items():
        llama = Llama(str(path), **SETTINGS)
        completion = llama.create_completion(PROMPT, **GREEDY)["choices"][0]["text"]
        chat = llama.create_chat_completion(CHAT, **GREEDY)["choices"][0]["message"]["content"]
        answers[alias] = (completion, chat)
        llama.close()
    return answers


def complete(client, alias: str) -> str:
    return client.completions.create(model=alias, prompt=PROMPT, **REQUEST).choices[0].text


def test_models_are_listed_by_alias(server):
    assert [m.id for m in server.client.models.list()] == ["sparse", "dense", "embedder"]


@pytest.mark.parametrize("alias", ["sparse", "dense", "sparse"])
def test_answers_are_those_of_the_model_in_process(server, want, alias):
    """The server switches models from one request to the next."""
    client = server.client
    completion, chat = want[alias]
    assert complete(client, alias) == completion and len(completion) > 24
    assert client.chat.completions.create(model=alias, messages=CHAT, **REQUEST).choices[0].message.content == chat
    pieces = client.completions.create(model=alias, prompt=PROMPT, stream=True, **REQUEST)
    assert "".join(piece.choices[0].text for piece in pieces) == completion
    pieces = client.chat.completions.create(model=alias, messages=CHAT, stream=True, **REQUEST)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == chat


@llama_faults.EMBEDDINGS_OF_A_GENERATING_MODEL
def test_embeddings_are_those_of_the_model_in_process(server, models):
    from ggml_macko import Llama

    llama = Llama(str(models["sparse"]), embedding=True, **SETTINGS)
    texts = [PROMPT, "A pointer is an address."]
    want = [np.array(entry["embedding"]) for entry in llama.create_embedding(texts)["data"]]
    got = server.client.embeddings.create(model="embedder", input=texts, encoding_format="float").data
    assert [entry.index for entry in got] == [0, 1]
    for entry, vectors in zip(got, want):  # without pooling, each token has a vector
        np.testing.assert_allclose(np.array(entry.embedding), vectors, rtol=1e-4, atol=1e-4)


def test_concurrent_clients_get_the_same_answer(server, want):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: complete(server.client, "sparse"), range(8))) == {want["sparse"][0]}


def test_server_survives_a_request_that_fails(server, want):
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        server.client.completions.create(model="sparse", prompt="word " * 2000, max_tokens=4)
    assert complete(server.client, "sparse") == want["sparse"][0]


def test_sigterm_ends_the_server_and_frees_the_port(models, want):
    """The server ends during an answer and cuts off streams."""
    options = ["--n_ctx", 512, "--n_threads", 2, "--n_threads_batch", 2]
    with running(lambda port: ["--model", models["sparse"], "--port", port, *options]) as server:
        assert complete(server.client, "any") == want["sparse"][0]
        request = {**REQUEST, "max_tokens": 400}
        pieces = server.client.completions.create(model="any", prompt=PROMPT, stream=True, **request)
        next(pieces)
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(openai.APIConnectionError):
            for _ in pieces:
                pass
        assert server.process.wait(SECONDS_TO_STOP) in (0, -signal.SIGTERM)  # uvicorn signals itself at the end
        assert not is_open(server.port)
        assert "Traceback" not in server.process.stderr.read()


def refusal(*args: object) -> str:
    process = start(*args)
    _, err = process.communicate(timeout=SECONDS_TO_START)
    assert process.returncode == 1 and "Traceback" not in err
    return err.strip().splitlines()[-1]


def test_model_that_cannot_be_loaded_gives_one_line(models, tmp_path):
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(models["sparse"].read_bytes()[:-1000])
    assert refusal("--model", torn).startswith(f"error: {torn}: the file ends at ")
    missing = tmp_path / "missing.gguf"
    assert refusal("--model", missing) == f"error: Model path does not exist: {missing}"


def test_missing_package_is_named(models):
    code = (
        "import sys; sys.modules['uvicorn'] = None; from ggml_macko import server; "
        "sys.argv = ['server']; sys.exit(server.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == "error: the server needs the package uvicorn: pip install 'ggml-macko[server]'"


def post(server, path: str, body: dict) -> tuple[int, str]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= root",
        'root ::= a root "z"\na ::= b b\nb ::= "x"?',
        "root ::= nothing",
        'root ::= "',
        'root ::= "a"{3,1}',
        "root ::= [z-a]",
        'root ::= "yes" [z-a]',
        "root ::= <[100000]>",
        'root ::= "\ud800"',
    ],
)
def test_bad_grammar_is_answered(server, grammar):
    status, text = post(server, "/v1/completions", {"model": "sparse", "prompt": "a", "grammar": grammar})
    assert status == 400 and "grammar: " in json.loads(text)["error"]["message"]
    assert complete(server.client, "sparse")


@pytest.mark.parametrize("grammar", ["root ::= root", 'root ::= "yes" [z-a]'])
def test_bad_grammar_in_a_stream_leaves_the_server_running(server, grammar):
    body = {"model": "sparse", "prompt": "a", "grammar": grammar, "stream": True}
    with contextlib.suppress(OSError, http.client.HTTPException):  # the stream has begun and is cut off
        post(server, "/v1/completions", body)
    assert complete(server.client, "sparse")


@pytest.mark.parametrize("token", [-1, 4096, 2**31 - 1])
def test_token_outside_of_the_vocabulary_is_answered(server, token):
    status, text = post(server, "/extras/detokenize", {"model": "sparse", "tokens": [5, token]})
    assert status == 400 and f"token {token} is not in the vocabulary (0...4095)" in text
    assert post(server, "/extras/detokenize", {"model": "sparse", "tokens": [5, 4095]})[0] == 200


def test_streams_of_two_clients_are_complete(models, want):
    """By default, llama_cpp.server would cut off the first stream when the second request arrives."""

    def stream(client) -> str:
        pieces = client.completions.create(model="sparse", prompt=PROMPT, stream=True, **REQUEST)
        return "".join(piece.choices[0].text for piece in pieces)

    settings = [part for key, value in SETTINGS.items() for part in (f"--{key}", value)]

    def make_arguments(port: int) -> list:
        return ["--model", models["sparse"], "--port", port, *settings, "--interrupt_requests", "false"]

    with running(make_arguments) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(stream, [server.client] * 2)) == [want["sparse"][0]] * 2
