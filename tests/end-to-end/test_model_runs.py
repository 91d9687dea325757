"""Sparse models in stock llama.cpp: the dense model's text, bounded logits, several models at once, no leaks."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys

import numpy as np
import pytest

from ggml_macko import errors
from ggml_macko.gguf.files import Model, make_key
from ggml_macko.gguf.outputs import AtomicOutput
from ggml_macko.gguf.writer import write_with_keys
from support import generators, llama_logits, upstream
from support.bad_input import one_line
from support.commands import run_macko
from support.llama_logits import PROMPT, greedy, open_model, prompt_logits


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The paths of the demo model, dense and sparse."""
    sparse = tmp_path_factory.mktemp("demo") / "sparse.gguf"
    run_macko("convert", generators.DEMO, sparse)
    return generators.DEMO, sparse


@pytest.fixture(scope="module")
def pruned_pair(tmp_path_factory):
    """The same for another model: fewer non-zeros, equal tensor names, other weights."""
    folder = tmp_path_factory.mktemp("pruned")
    run_macko("prune", generators.DEMO, folder / "dense.gguf", "--sparsity", "0.8")
    run_macko("convert", folder / "dense.gguf", folder / "sparse.gguf")
    return folder / "dense.gguf", folder / "sparse.gguf"


def test_sparse_model_writes_the_text_of_dense(pair):
    assert greedy(open_model(pair[1])) == greedy(open_model(pair[0]))


def test_logits_are_within_the_float64_bound(pair):
    """|logit - float64| <= 24 * 2^-10: llama.cpp rounds activations and the KV cache to F16, each by up to 2^-11.

    The error of the dense model is equally large.
    """
    from reference.llama_float64 import Float64Llama

    tokens, got = prompt_logits(open_model(pair[1], logits_all=True))
    with llama_logits.plain_dense_weights():
        _, dense = prompt_logits(open_model(pair[0], logits_all=True))
    want = Float64Llama(str(pair[0])).logits(tokens)
    assert np.abs(got - want).max() <= 24 * 2.0**-10
    rms = [float(np.sqrt(np.mean((x - want) ** 2))) for x in (got, dense)]
    assert rms[0] <= 1.1 * rms[1]  # as accurate as llama.cpp's kernels


def test_logits_that_are_not_a_number_are_an_error(pair, monkeypatch):
    """A failed GPU may return such logits, because ggml does not check the status when it reads them."""
    import llama_cpp

    llama = open_model(pair[1])
    get = llama_cpp.llama_get_logits_ith
    monkeypatch.setattr(llama_cpp, "llama_get_logits_ith", lambda *args: [float("nan")])
    with pytest.raises(RuntimeError, match="NaN"):
        greedy(llama, 4)
    monkeypatch.setattr(llama_cpp, "llama_get_logits_ith", get)
    assert greedy(llama, 4) == greedy(open_model(pair[0]), 4)


def test_weight_that_is_not_finite_is_named(tmp_path, macko):
    data = bytearray(generators.DEMO.read_bytes())
    with Model(generators.DEMO) as model:
        (t,) = (t for t in model.tensors if t.name == "blk.1.ffn_up.weight")
        data[t.offset : t.offset + 2] = b"\x00\x7e"
    path = tmp_path / "nan.gguf"
    path.write_bytes(data)
    for command in (["perplexity", "-f", generators.SAMPLE, "--chunks", 1], ["generate", "-p", "hi", "-n", 4]):
        one_line(macko(*command, "-m", path), path, "blk.1.ffn_up.weight: 1 values are not finite")


def test_context_is_as_long_as_asked_for(macko):
    """llama.cpp would make the context 256 tokens long, and llama_cpp would write past its arrays."""
    llama = open_model(generators.DEMO, n_ctx=64)
    assert llama("The", max_tokens=100)["usage"]["completion_tokens"] == 64 - len(llama.tokenize(b"The"))
    with pytest.raises(ValueError, match="exceed context window"):
        llama("one two three " * 30)
    done = macko("generate", "-m", generators.DEMO, "-c", 64, "-p", "one two three " * 30)
    one_line(done, "the prompt has ", " tokens, the context 64; see -c")


@pytest.mark.parametrize(
    "name, value", [("n_ctx", 2**32 + 512), ("n_batch", -1), ("n_threads", -1), ("n_threads", 513)]
)
def test_number_that_llama_cpp_would_cut_is_refused(name, value):
    with pytest.raises(errors.ArgumentError, match=f"{name}={value}: expected a number from 0 to"):
        open_model(generators.DEMO, **{name: value})


def test_no_tokens_are_none(macko):
    assert macko("generate", "-m", generators.DEMO, "-p", "The", "-n", 0, "-c", 64).out == "The\n"


@pytest.fixture
def chat_model(tmp_path):
    path = tmp_path / "chat.gguf"
    template = "{% for m in messages %}<{{m.role}}> {{m.content}}\n{% endfor %}"
    with Model(generators.DEMO) as model, AtomicOutput(path, []) as output:
        write_with_keys(model, [*model.keys, make_key("tokenizer.chat_template", "str", template)], output)
        output.seal()
        output.commit()
    return path


def test_conversation_remembers_what_was_said(chat_model, macko_process):
    llama, messages, want = open_model(chat_model), [{"role": "system", "content": "Be short."}], ""
    for text in ("What is a pointer?", "And a function?"):
        messages.append({"role": "user", "content": text})
        (choice,) = llama.create_chat_completion(
            messages, max_tokens=12, temperature=0, top_k=40, min_p=0.05, repeat_penalty=1.3
        )["choices"]
        messages.append(choice["message"])
        want += choice["message"]["content"] + "\n"
    options = ["-n", 12, "--temp", 0, "--repeat-penalty", 1.3, "-c", 512, "-t", 2]
    arguments = ["-m", chat_model, "-cnv", "-sys", "Be short.", "-p", "What is a pointer?", *options]
    done = macko_process("generate", *arguments, input="\nAnd a function?\n")
    assert done.code == 0 and done.out == want, done.err


def test_line_of_stdin_is_appended_to_the_text(macko_process):
    llama, text, want = open_model(generators.DEMO), "The function", "The function"
    for line in ("of a\n", "", "The"):
        piece = llama(text, max_tokens=6, temperature=0, min_p=0.05)["choices"][0]["text"]
        text, want = text + piece + line, want + piece + "\n"
    want += llama(text, max_tokens=6, temperature=0, min_p=0.05)["choices"][0]["text"] + "\n"
    arguments = ["-m", generators.DEMO, "-p", "The function", "-i", "-n", 6, "--temp", 0, "-c", 512, "-t", 2]
    assert macko_process("generate", *arguments, input="of a\n\nThe").out == want


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        ([], 2, "-p is missing"),
        (["-sys", "Be short.", "-p", "a"], 2, "-sys is the system message of a conversation: add -cnv"),
        (["-cnv"], 1, "has no chat template: a base model"),
    ],
)
def test_conversation_that_cannot_be_held_is_refused(macko, arguments, code, message):
    done = macko("generate", "-m", generators.DEMO, "-c", 64, *arguments)
    assert done.code == code and message in done.err and done.err.count("\n") == 1


def test_conversation_that_outgrows_the_context_is_refused(chat_model, macko_process):
    arguments = ["-m", chat_model, "-cnv", "-c", 64, "-p", "one two three " * 30]
    done = macko_process("generate", *arguments, input="")
    one_line(done, "the conversation does not fit into the context, 64 tokens; see -c")


def test_two_models_with_equal_tensor_names_stay_apart(pair, pruned_pair):
    want = [greedy(open_model(p), 32) for p in (pair[0], pruned_pair[0])]
    assert want[0] != want[1]
    first, second = open_model(pair[1]), open_model(pruned_pair[1])
    assert [greedy(first, 32), greedy(second, 32)] == want
    first.close()
    assert greedy(second, 32) == want[1]  # closing one does not change the other


def test_dense_model_is_unchanged_beside_a_sparse_one(pair):
    import llama_cpp

    before = subprocess.run(
        [sys.executable, "-c", f"""
import llama_cpp
m = llama_cpp.Llama({str(pair[0])!r}, n_ctx=512, n_threads=2, verbose=False, seed=1)
print(m({PROMPT!r}, max_tokens=32, temperature=0)["choices"][0]["text"], end="")"""],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    sparse = open_model(pair[1])
    dense = llama_cpp.Llama(str(pair[0]), n_ctx=512, n_threads=2, verbose=False, seed=1)
    assert greedy(dense, 32) == before
    assert greedy(sparse, 32) == before


def test_prefill_batch_sizes_give_the_same_text(pair):
    """Kernels differ for micro-batches of 1, 7, 64 and 512 tokens."""
    texts = {
        n: greedy(open_model(pair[1], n_batch=n, n_ubatch=n), 24, generators.SAMPLE.read_text()[:700])
        for n in (1, 7, 64, 512)
    }
    assert len(set(texts.values())) == 1, texts


@pytest.mark.parametrize("name", ["portable", "avx2"])
def test_forced_kernels_run(pair, name):
    code = f"""
from ggml_macko import Llama
from ggml_macko.native import cpu
m = Llama({str(pair[1])!r}, n_ctx=512, n_threads=2, verbose=False, seed=1)
assert cpu.cpu_kernels() == {name!r}, cpu.cpu_kernels()
print(m({PROMPT!r}, max_tokens=32, temperature=0)["choices"][0]["text"], end="")"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "GGML_MACKO_CPU_KERNELS": name}
    )
    if name != "portable" and "not supported" in done.stderr:
        pytest.skip(f"this CPU has no {name}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == greedy(open_model(pair[1]), 32)


def test_chat_stream_grammar_and_embedding_work(pair):
    import llama_cpp

    llama = open_model(pair[1])
    chat = llama.create_chat_completion(
        [{"role": "user", "content": "What is a pointer?"}], max_tokens=8, temperature=0
    )
    assert isinstance(chat["choices"][0]["message"]["content"], str)
    streamed = "".join(c["choices"][0]["text"] for c in llama(PROMPT, max_tokens=32, temperature=0, stream=True))
    assert streamed == greedy(llama, 32)
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= ("yes" | "no") "!"', verbose=False)
    assert llama("Is it? ", max_tokens=8, temperature=0, grammar=grammar)["choices"][0]["text"] in ("yes!", "no!")
    vectors = [np.array(open_model(p, embedding=True).create_embedding(PROMPT)["data"][0]["embedding"]) for p in pair]
    np.testing.assert_allclose(vectors[1], vectors[0], atol=0.02 * np.abs(vectors[0]).max())


@pytest.mark.parametrize("kind, limit", [("macko", 1e-3), ("sparse-q8", 3e-2)])
def test_embeddings_of_a_list_are_as_close_as_the_limits_page_states(tmp_path, kind, limit):
    import llama_cpp

    run_macko("convert", generators.DEMO, tmp_path / "sparse.gguf", kind)
    llama = open_model(tmp_path / "sparse.gguf", embedding=True, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN)
    words = generators.SAMPLE.read_text().split()
    texts = [" ".join(words[n * n : n * n + n]) for n in range(1, 16)]  # of 1 to 15 words
    got, alone = np.array(llama.embed(texts)), np.array([llama.embed(text) for text in texts])
    assert np.all(np.linalg.norm(got - alone, axis=1) <= limit * np.linalg.norm(alone, axis=1))


def test_vocab_only_loads(pair):
    assert open_model(pair[1], vocab_only=True).n_vocab() == 4096


def test_load_stopped_by_its_callback_leaves_the_library_usable(pair):
    import llama_cpp.llama_cpp as api

    from ggml_macko.native.llama_hook import register

    register()
    params = api.llama_model_default_params()
    stop = api.llama_progress_callback(lambda progress, user: progress < 0.5)
    params.progress_callback = stop
    with pytest.raises(errors.MackoError, match="could not load"):
        api.llama_model_load_from_file(str(pair[1]).encode(), params)
    assert greedy(open_model(pair[1]), 8)


def test_llama_cpp_without_the_plugin_refuses_a_sparse_file(pair):
    code = f"import llama_cpp; llama_cpp.Llama({str(pair[1])!r}, verbose=False)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "Failed to load model" in done.stderr


def test_threads_load_and_generate_at_once(pair, pruned_pair):
    paths = [pair[1], pruned_pair[1], pair[0], pair[1], pruned_pair[1], pair[1], pruned_pair[0], pair[1]]
    want = {p: greedy(open_model(p, n_threads=1, n_threads_batch=1), 16) for p in set(paths)}

    def work(path):
        return greedy(open_model(path, n_threads=1, n_threads_batch=1), 16)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, paths)) == [want[p] for p in paths]


def test_program_that_knows_only_llama_h_runs_a_sparse_file(pair, tmp_path):
    """`macko run` runs a C program that is linked to the wheel's libllama."""
    program = upstream.compile_program(generators.ROOT / "tests" / "support" / "run-llama.c", tmp_path / "run-llama")
    dense = subprocess.run([program, pair[0], "48", PROMPT], check=True, capture_output=True, text=True).stdout
    sparse = run_macko("run", "--", program, pair[1], "48", PROMPT).stdout
    assert sparse == dense and len(dense) > 48
    assert run_macko("run", "--", program, pair[0], "48", PROMPT).stdout == dense
    plain = subprocess.run([program, pair[1], "1", PROMPT], capture_output=True, text=True)
    assert plain.returncode == 1  # without `macko run` the file is refused


@pytest.mark.parametrize("how", ["ggml_macko.Llama", "llama_cpp.Llama", "macko run"])
def test_sparse_weights_are_not_split_over_devices(pair, tmp_path, how):
    """LLAMA_SPLIT_MODE_TENSOR (3), with which llama.cpp would abort."""
    if how == "macko run":
        source = generators.ROOT / "tests" / "support" / "run-llama.c"
        program = upstream.compile_program(source, tmp_path / "run-llama")
        command = ["-m", "ggml_macko.commands.cli", "run", "--", program, pair[1], "1", PROMPT, "3"]
    else:
        options = "n_gpu_layers=-1, split_mode=3, flash_attn=True, verbose=False"
        code = f"import ggml_macko, llama_cpp; ggml_macko.register(); {how}({str(pair[1])!r}, {options})"
        command = ["-c", code]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert f"{pair[1]}: split_mode tensor (-sm tensor) works with dense weights only: use layer" in done.stderr


@pytest.mark.slow
def test_memory_and_descriptors_are_stable_over_200_loads(pair):
    """After 20 loads, RSS grows by less than 1 KiB per load in most groups of 20, and by less than 512 KiB in total;
    descriptors and threads are constant. The heap grows once by 100 to 200 KiB, at any load.
    """
    code = f"""
import gc, os, ctypes
import numpy as np
from ggml_macko import Llama
def rss():
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
seen = []
for i in range(200):
    m = Llama({str(pair[1])!r}, n_ctx=64, n_threads=2, verbose=False, seed=1)
    m({PROMPT!r}, max_tokens=8, temperature=0)
    m.close()
    del m
    gc.collect()
    seen.append((rss(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
late = np.array(seen[20:])
groups = np.median(late[:, 0].reshape(-1, 20), axis=1)
growth = np.median(np.diff(groups)) / 20
print(growth, groups, late[0], late[-1])
assert (late[:, 1] == late[0, 1]).all() and (late[:, 2] == late[0, 2]).all(), late
assert growth < 1024 and groups[-1] - groups[0] < 512 << 10, growth
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
