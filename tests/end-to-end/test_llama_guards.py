"""Calls that end the process in llama_cpp.Llama are errors in ggml_macko.Llama."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import multiprocessing
import os
import pickle
import pkgutil
import re
import signal
import subprocess
import sys
import threading

import gguf
import llama_cpp
import numpy as np
import pytest

from ggml_macko import Llama, errors, grammar, guards
from ggml_macko import llama as llama_module
from ggml_macko.native import library, load_model
from support import generators, random_grammars


@pytest.mark.parametrize("guard", guards.GUARDS, ids=lambda guard: guard.function)
def test_guard_names_a_function_and_a_report_that_exist(guard):
    reports = (generators.ROOT / "lab" / "upstream-reports.md").read_text()
    assert guard.report is None or f"### {guard.report}\n" in reports
    module, _, name = guard.function.rpartition(":")
    if module.startswith("llama_cpp.server"):
        pytest.importorskip("llama_cpp.server.app")
    if guard.versions[1] == guards.NEWEST:
        assert pkgutil.resolve_name(f"{module or 'llama_cpp'}:{name.removesuffix('.*')}") is not None
    if not module and not name.endswith("*"):
        assert name.partition(".")[2] in vars(guards.GuardedLlama)


def test_guards_are_for_the_versions_that_the_plugin_is_for():
    assert library.llama_cpp_python_range() == (guards.OLDEST, guards.NEWEST)


@pytest.fixture
def llama():
    return Llama(str(generators.DEMO), n_ctx=128, verbose=False)


YES = llama_cpp.LlamaGrammar.from_string('root ::= "yes"')
NESTED = "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(40)) + '\nr40 ::= "a"'
NULLABLE = 'a ::= b b\nb ::= "x"?'
REFUSED, FAILED, DEAD_END = "llama.cpp refused it", "llama.cpp failed", "no token of the vocabulary can follow"
EXHAUSTED = f"({REFUSED}|{FAILED})"  # llama.cpp catches std::bad_alloc if the process has the memory to throw it
GRAMMARS = {
    "root ::= root": REFUSED,
    "root ::= nothing": REFUSED,
    'root ::= "': REFUSED,
    'root ::= "a"\nroot2 ::= (': REFUSED,
    'root ::= "' + "a" * 100_000 + '"{2000}': REFUSED,
    'root ::= "\ud800"': "half of a surrogate pair",
    'root ::= a root "z"\n' + NULLABLE: FAILED,
    'root ::= "yes" b2\nb2 ::= a b2 "z"\n' + NULLABLE: FAILED,  # fails after three tokens
    'root ::= "a"{3,1}': EXHAUSTED,
    "root ::= " + "(" * 200_000 + '"a"' + ")" * 200_000: EXHAUSTED,
    NESTED: FAILED,
    "root ::= [z-a]": DEAD_END,
    'root ::= "\\x00"': DEAD_END,
    "root ::= <[100000]>": DEAD_END,
    "root ::= [\\UFFFFFFFF]+": DEAD_END,
    'root ::= "yes" [z-a]': DEAD_END,
}


@pytest.fixture(scope="module")
def limited():
    """A model with small limits of time and memory for grammars."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar, "MAX_SECONDS", 1)
        patch.setattr(grammar, "MAX_NBYTES", 1 << 26)
        llama = Llama(str(generators.DEMO), n_ctx=128, verbose=False)
        assert llama("x", max_tokens=5, grammar=YES)["choices"][0]["text"] == "yes"
        return llama


@pytest.mark.parametrize("text", GRAMMARS, ids=range(len(GRAMMARS)))
def test_grammar_that_llama_cpp_does_not_survive_is_an_error(limited, text):
    for stream in (False, True):
        with pytest.raises(errors.ArgumentError, match=f"grammar: .*{GRAMMARS[text]}"):
            list(limited("x", max_tokens=9, grammar=llama_cpp.LlamaGrammar.from_string(text), stream=stream))
    assert limited("x", max_tokens=5, grammar=YES)["choices"][0]["text"] == "yes"


def test_excluding_all_tokens_that_may_follow_is_an_error(llama):
    nothing = llama_cpp.LogitsProcessorList([lambda _, scores: np.full_like(scores, -np.inf)])
    with pytest.raises(errors.ArgumentError, match="grammar: all tokens that can follow have the probability 0"):
        llama("x", max_tokens=5, grammar=YES, logits_processor=nothing)


WHAT_GRAMMARS_SAY = [
    'root ::= ("a"?)*',
    'root ::= ws* "a" root | ""\nws ::= [ ]*',
    'root ::= ["\\]a-z"]+ "\\"" [^"] . <[5]> !<[6]> # root ::= root "x"\n',
    'root ::= "a"{3} "b"{2,} "c"{0,4} ("d" | "e"){1,3}',
    'root ::= "a"{1,9999999999}',
    'root ::= [^] "a" { 3 }',
    "",
    *(text for name, text in vars(llama_cpp.llama_grammar).items() if name.endswith("_GBNF")),
]


def test_texts_are_those_of_llama_cpp():
    """The reference is llama_cpp, whose grammar sampler runs in the process. The overrides must reach the worker."""
    make = (
        "def make(Llama):\n"
        f"    llama = Llama({str(generators.DEMO)!r}, n_ctx=128, seed=7, verbose=False,\n"
        "        kv_overrides={'tokenizer.ggml.eos_token_id': 300})\n"
        f"    for text in {WHAT_GRAMMARS_SAY!r}:\n"
        "        g = llama_cpp.LlamaGrammar.from_string(text)\n"
        "        for t in (0, 1):\n"
        "            print(ascii(llama('x', max_tokens=20, grammar=g, temperature=t)['choices'][0]['text']))\n"
    )
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    want = run([sys.executable, "-c", f"import llama_cpp\n{make}make(llama_cpp.Llama)"])
    got = run([sys.executable, "-c", f"import llama_cpp, ggml_macko\n{make}make(ggml_macko.Llama)"])
    assert got.stdout == want.stdout and len(want.stdout.splitlines()) == 2 * len(WHAT_GRAMMARS_SAY)


def test_random_grammars_are_followed_or_refused():
    """tests/fuzz/fuzz.py grammars --count N tests more of them."""
    seen = random_grammars.run(generators.DEMO, 2000, seed=1, n_workers=2)
    assert sum(seen.values()) == 2000 and seen["followed"] > 300 and seen["llama.cpp refused it"] > 300


def test_worker_that_has_been_killed_is_replaced(llama):
    assert llama("x", max_tokens=5, grammar=YES)["choices"][0]["text"] == "yes"
    os.killpg(llama._model.grammar_worker._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the process that follows grammars has ended"):
        llama("x", max_tokens=5, grammar=YES)
    assert llama("x", max_tokens=5, grammar=YES)["choices"][0]["text"] == "yes"
    worker = llama._model.grammar_worker
    llama.close()
    assert worker._process.returncode == -signal.SIGKILL


def test_token_outside_of_the_vocabulary_is_an_error(llama):
    for token in (-1, llama.n_vocab(), 2**31 - 1):
        for part in (llama, llama.tokenizer(), llama.tokenizer_):
            with pytest.raises(errors.ArgumentError, match=f"token {token} is not in the vocabulary"):
                part.detokenize([token])
    assert llama.detokenize(llama.tokenize(b"The function", add_bos=False)).strip() == b"The function"


METHODS = sorted(
    name
    for name, value in vars(llama_cpp.Llama).items()
    if (inspect.isfunction(value) or isinstance(value, property)) and name not in ("__init__", "__del__", "close")
)


def test_use_of_a_closed_model_is_an_error(llama):
    """Every method and property is tested; introspection finds them."""
    tokenizers = llama.tokenizer(), llama.tokenizer_
    state = llama.save_state()
    llama.close()
    llama.close()
    arguments = {
        "tokenize": [b"x"], "detokenize": [[1]], "eval": [[1]], "generate": [[1]], "load_state": [state],
        "set_cache": [None], "set_seed": [1], "create_chat_completion": [[{"role": "user", "content": "x"}]],
        "create_chat_completion_openai_v1": [[{"role": "user", "content": "x"}]], "__setstate__": [{}],
    }  # fmt: skip
    texts = ("embed", "create_embedding", "create_completion", "_create_completion", "__call__")
    assert len(METHODS) > 30
    for name in METHODS:
        with pytest.raises(errors.ArgumentError, match="has been closed"):
            found = getattr(llama, name)
            list(found(*arguments.get(name, ["x"] if name in texts else [])))
    for tokenizer in tokenizers:
        with pytest.raises(errors.ArgumentError, match="has been closed"):
            tokenizer.tokenize(b"x")


def test_model_closed_while_it_streams_is_freed(llama):
    model = llama._model
    stream = llama("The", max_tokens=100, stream=True)
    next(stream)
    llama.close()
    assert type(model) is guards.Closed
    with pytest.raises(errors.ArgumentError, match="has been closed"):
        list(stream)


def test_model_closed_inside_a_call_is_freed_at_its_end(llama):
    model, seen = llama._model, []
    stop = llama_cpp.StoppingCriteriaList([lambda *_: llama.close() or seen.append(type(model))])
    with pytest.raises(errors.ArgumentError, match="has been closed"):
        llama("The", max_tokens=100, stopping_criteria=stop)
    assert seen == [llama_cpp._internals.LlamaModel] and type(model) is guards.Closed


def test_close_in_another_thread_ends_the_stream(llama):
    """Three attempts, because the result depends on timing."""
    for delay in (0, 1, 3):
        model = Llama(str(generators.DEMO), n_ctx=128, verbose=False)
        seen = threading.Event()
        result: list = []

        def generate(model=model, seen=seen, result=result, delay=delay) -> None:
            try:
                for i, _ in enumerate(model("The", max_tokens=100, stream=True)):
                    if i == delay:
                        seen.set()
            except errors.ArgumentError as e:
                result.append(str(e))

        thread = threading.Thread(target=generate)
        thread.start()
        assert seen.wait(60)
        model.close()
        thread.join(60)
        assert result == ["this Llama has been closed"]


def test_threads_take_turns(llama):
    """Three threads with ten calls each, including grammars, embeddings and states."""
    want = llama("The", max_tokens=8, temperature=0)["choices"][0]["text"]
    got: list = []

    def work() -> None:
        for _ in range(10):
            got.append(llama("The", max_tokens=8, temperature=0)["choices"][0]["text"])
            got.append(llama("The", max_tokens=8, grammar=YES)["choices"][0]["text"])
            llama.load_state(llama.save_state())
            llama.reset()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(got) == sorted([want, "yes"] * 30)


@pytest.mark.parametrize("call", ["generate", "eval", "reset", "load_state"])
def test_stream_whose_state_another_call_replaced_ends(llama, call):
    """In llama_cpp the text would be wrong, or the process would end."""
    stream = llama("The", max_tokens=20, temperature=0, stream=True)
    next(stream)
    llama.tokenize(b"x")
    next(stream)
    state = llama.save_state()
    next(stream)
    argument = {"generate": [[1, 2]], "eval": [[1]], "reset": [], "load_state": [state]}[call]
    result = getattr(llama, call)(*argument)
    if call == "generate":
        next(result)
    with pytest.raises(RuntimeError, match="another call has replaced the text"):
        list(stream)
    assert llama("The", max_tokens=3)["choices"][0]["text"]


def test_model_without_weights_is_an_error():
    llama = Llama(str(generators.DEMO), n_ctx=64, verbose=False, vocab_only=True, embedding=True)
    with pytest.raises(errors.ArgumentError, match="it was loaded with vocab_only"):
        llama.embed("x")
    assert llama.tokenize(b"x")


def test_sampling_without_logits_is_an_error(llama):
    llama.eval([1, 2, 3])
    with pytest.raises(RuntimeError, match="there are no logits"):
        llama.sample(idx=100)


@pytest.mark.parametrize("fault", ["missing", "shape", "tied", "fifo", "folder", "text"])
def test_lora_adapter_that_does_not_fit_is_an_error(tmp_path, fault):
    path = tmp_path / "adapter.gguf"
    names = {"tied": "output.weight", "shape": "blk.0.attn_q.weight"}
    if fault in names:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 4.0)
        for suffix, shape in ((".lora_a", (4, 8)), (".lora_b", (8, 4))):
            writer.add_tensor(names[fault] + suffix, np.ones(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    elif fault == "fifo":
        os.mkfifo(path)
    elif fault == "folder":
        path.mkdir()
    elif fault == "text":
        path.write_text("no adapter")
    with pytest.raises(errors.MackoError, match=re.escape(str(path))) as e:
        Llama(str(generators.DEMO), n_ctx=64, verbose=False, lora_path=str(path))
    assert isinstance(e.value, errors.FileAccessError if fault in ("fifo", "folder") else errors.ArgumentError)


OPTIONS = dict.fromkeys(["compress", "keep_negative_zeros", "sparse_only", "strict", "weight_cache"], True)


def print_options(llama: Llama) -> None:
    print(json.dumps({name: llama.__getstate__()[name] for name in OPTIONS}))


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "spawn"])
def test_copy_has_all_options(how, monkeypatch, tmp_path, capfd):
    """A copy in a new process also passes the same options to the load."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = []
    original = Llama(str(generators.DEMO), n_ctx=64, n_batch=16, seed=5, verbose=False, logits_all=True, **OPTIONS)
    original.set_seed(6)
    want = original.__getstate__()
    assert {name: want[name] for name in OPTIONS} == OPTIONS and want["seed"] == 6
    monkeypatch.setattr(llama_module, "run_with", lambda options, load: (seen.append(options), load()))
    if how == "spawn":
        process = multiprocessing.get_context("spawn").Process(target=print_options, args=(original,))
        process.start()
        process.join(120)
        assert process.exitcode == 0 and json.loads(capfd.readouterr().out.splitlines()[-1]) == OPTIONS
        return
    copied = pickle.loads(pickle.dumps(original)) if how == "pickle" else copy.deepcopy(original)
    assert copied.__getstate__() == want
    assert seen == [load_model.LoadOptions(True, True, True, True, True)]
