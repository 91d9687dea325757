"""After exceptions during loads, and loads inside loads, the thread can load again and no memory is lost."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import threading
from pathlib import Path

import llama_cpp.llama_cpp as api
import numpy as np
import pytest

from ggml_macko import errors, register
from ggml_macko.native import library
from support import generators, llama_logits, tiny_models
from support import gguf_bytes as gb
from support.llama_logits import logits

open_model = functools.partial(llama_logits.open_model, n_ctx=32, logits_all=True)
TOKENS = [1, 5, 7, 9]
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in finalizers


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Small models (dense, sparse) whose tensors have equal names, types and shapes."""
    folder = tmp_path_factory.mktemp("tiny")
    dense, sparse = folder / "dense.gguf", folder / "sparse.gguf"
    dense.write_bytes(gb.write(tiny_models.make("llama")))
    command = [sys.executable, "-m", "ggml_macko.commands.cli", "convert", str(dense), str(sparse)]
    subprocess.run(command, check=True, capture_output=True)
    return dense, sparse


def interrupt_at(event: int, function, each: str = "opcode") -> bool:
    """Calls function with a KeyboardInterrupt at the event-th instruction, or line, of this package. Returns whether
    the call reached that event.
    """
    count = 0

    def trace(frame, what, arg):
        nonlocal count
        if not frame.f_code.co_filename.startswith(str(library.PACKAGE)):
            return None
        frame.f_trace_opcodes = each == "opcode"
        count += what == each
        if what == each and count == event:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        assert count == event
    finally:
        sys.settrace(before)
    return count >= event


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("compress", [False, True])
def test_thread_loads_again_after_an_exception_at_any_instruction(models, compress):
    path = models[0] if compress else models[1]
    expected = logits(open_model(path, compress=compress), TOKENS)
    before = descriptors()
    event = 1
    while interrupt_at(event, lambda: open_model(path, compress=compress)):
        model = api.llama_model_load_from_file(str(models[1]).encode(), vocab_only())
        assert model, f"after instruction {event}"
        api.llama_model_free(model)
        event += 1
    assert event > 100
    np.testing.assert_array_equal(logits(open_model(path, compress=compress), TOKENS), expected)
    assert descriptors() == before


def test_a_dense_model_after_an_exception_is_not_compressed(models):
    """compress=True of an interrupted call has no effect on later calls."""
    from ggml_macko.native.llama_hook import _options

    event = 1
    while interrupt_at(event, lambda: open_model(models[0], compress=True)):
        assert _options.get(None) is None
        event += 1


def test_interrupted_register_lists_the_devices_once(models, monkeypatch):
    from ggml_macko.native import llama_hook

    ggml = ctypes.CDLL("libggml.so.0")
    register()
    before = ggml.ggml_backend_dev_count()
    event = 1
    while True:
        monkeypatch.setattr(llama_hook, "_registered", False)
        if not interrupt_at(event, register, "line"):
            break
        register()
        event += 1
    assert event > 20 and ggml.ggml_backend_dev_count() == before
    assert open_model(models[1])


def vocab_only():
    params = api.llama_model_default_params()
    params.vocab_only = True
    return params


def load(path: Path, params=None) -> int | None:
    return api.llama_model_load_from_file(str(path).encode(), params or api.llama_model_default_params())


@pytest.mark.parametrize("outer, inner", [("sparse", "sparse"), ("sparse", "dense"), ("dense", "sparse")])
def test_progress_callback_may_load_another_model(models, outer, inner):
    """The inner model has its own logits, although its tensors have the names and shapes of the outer model's."""
    register()
    path = dict(zip(("dense", "sparse"), models))
    expected = logits(open_model(path[inner]), TOKENS)
    loaded = []

    @api.llama_progress_callback
    def callback(progress, user_data):
        if not loaded:
            loaded.append(open_model(path[inner]))
        return True

    params = api.llama_model_default_params()
    params.progress_callback = callback
    model = load(path[outer], params)
    assert model and loaded
    np.testing.assert_array_equal(logits(loaded[0], TOKENS), expected)
    context = api.llama_init_from_model(model, api.llama_context_default_params())
    assert context
    api.llama_free(context)
    api.llama_model_free(model)
    assert open_model(path[outer])


def test_progress_callback_that_raises_ends_only_its_own_load(models):
    register()

    @api.llama_progress_callback
    def callback(progress, user_data):
        return False

    params = api.llama_model_default_params()
    params.progress_callback = callback
    for _ in range(3):
        with pytest.raises(errors.LoadError):
            load(models[1], params)
    assert open_model(models[1])


def test_threads_load_at_once(models):
    results: list = []

    def work() -> None:
        for path in models * 3:
            results.append(logits(open_model(path), TOKENS))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 18
    for result in results:
        np.testing.assert_allclose(result, results[0], rtol=1e-2, atol=1e-2)


def test_path_that_is_no_regular_file_is_refused_at_once(tmp_path, macko_process):
    import socket

    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    for path in (tmp_path / "fifo", tmp_path / "folder", tmp_path / "socket", Path("/dev/zero")):
        done = macko_process("generate", "-m", path, "-p", "x", "-n", "1")
        assert (done.code, done.err.strip()) == (1, f"error: {path}: not a regular file")
    assert generators.DEMO.is_file()
