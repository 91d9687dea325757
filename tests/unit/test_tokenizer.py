"""A text that is tokenized in pieces has the tokens that llama_tokenize gives for the whole text."""

from __future__ import annotations

import llama_cpp.llama_cpp as api
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp._logger import set_verbose

from ggml_macko.evaluation import tokenizer
from ggml_macko.evaluation.text_model import TextModel
from support import generators, tiny_models
from support import gguf_bytes as gb

DEMO = generators.ROOT / "models" / "docs-4m-s70-f16.gguf"
SAMPLE = generators.ROOT / "models" / "sample.txt"

PRE = [
    "a.x-4.0", "afmoe", "bailingmoe", "bloom", "chameleon", "chatglm-bpe", "codeshell", "cohere2moe", "command-r",
    "dbrx", "deepseek-coder", "deepseek-llm", "deepseek-r1-qwen", "deepseek-v3", "default", "exaone", "exaone-moe",
    "exaone4", "falcon", "falcon-h1", "falcon3", "gigachat", "glm4", "gpt-2", "gpt-4o", "gpt3-finnish",
    "granite-docling", "grok-2", "hunyuan", "hunyuan-dense", "jais", "jais-2", "jina-v2-code", "joyai-llm",
    "kimi-k2", "lfm2", "llama-bpe", "llama4", "megrez", "mellum2", "minerva-7b", "minimax-m2", "modern-bert", "mpt",
    "olmo", "phi-2", "pixtral", "poro-chat", "qwen2", "qwen35", "refact", "sarvam-moe", "seed-coder", "smaug-bpe",
    "smollm", "solar-open", "spark2_5", "stablelm2", "starcoder", "superbpe", "tekken", "tiny_aya", "trillion",
    "viking", "youtu",
]  # fmt: skip
"""Names of llama.cpp's regular expressions for BPE."""

WORDS = [
    "a", "b", "c", "ab", "ba", "it's", "Bc", "word", "é", "。", "漢字", "1", "123", "-", "...", "</x>", "<t>", "\n",
    "\n\n", " ", "  ", "\t", "▁",
]  # fmt: skip


def load(path):
    set_verbose(False)
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(str(path).encode(), params)
    assert model, path
    return model


def spm(space_prefix):
    """A vocabulary with a letter before a space, a line end before a letter, and user-defined tokens."""
    f = tiny_models.make("llama")
    more = [*"é。漢字\n1-.B", "\n\n", "\na", "▁▁", "b▁", "▁ab", "。漢", "</x>", "<t>", "a</x"]
    tokens = [*f.key("tokenizer.ggml.tokens").value, *(t.encode() for t in more)]
    kinds = [*f.key("tokenizer.ggml.token_type").value, *[1] * (len(more) - 9), 4, 1, 1, 1, 1, 1, 4, 4, 1]
    f.set("tokenizer.ggml.tokens", gb.ARRAY, tokens, gb.STRING)
    f.set("tokenizer.ggml.scores", gb.ARRAY, [-float(i * 7 % 11) for i in range(len(tokens))], gb.F32)
    f.set("tokenizer.ggml.token_type", gb.ARRAY, kinds, gb.I32)
    f.set("tokenizer.ggml.add_space_prefix", gb.BOOL, space_prefix)
    return f


def bpe(pre):
    """A vocabulary with a merge of a letter and a space."""
    f = tiny_models.make("qwen2")
    merges = ["a b", "b a", "Ġ a", "Ġ Ġ", "b Ġ", "Ġa b", "ab a", "Ċ Ċ", "Ċ a"]
    more = ["".join(m.split()) for m in merges]
    tokens = f.key("tokenizer.ggml.tokens").value
    new = [t.encode() for t in more if t.encode() not in tokens] + [b"</x>"]
    kinds = [*f.key("tokenizer.ggml.token_type").value, *[1] * (len(new) - 1), 4]
    f.set("tokenizer.ggml.tokens", gb.ARRAY, tokens + new, gb.STRING)
    f.set("tokenizer.ggml.token_type", gb.ARRAY, kinds, gb.I32)
    f.set("tokenizer.ggml.merges", gb.ARRAY, [m.encode() for m in merges], gb.STRING)
    f.set("tokenizer.ggml.pre", gb.STRING, pre.encode())
    return f


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabularies")
    files = {f"spm-{bool(p)}": spm(p) for p in (0, 1)} | {pre: bpe(pre) for pre in PRE}
    found = {"demo": load(DEMO)}
    for name, f in files.items():
        (folder / f"{name}.gguf").write_bytes(gb.write(f))
        found[name] = load(folder / f"{name}.gguf")
    yield found
    for model in found.values():
        api.llama_model_free(model)


@pytest.mark.parametrize("name", ["demo", "spm-False", "spm-True", *PRE])
def test_tokens_of_pieces_are_those_of_the_whole_text(name, models, monkeypatch):
    monkeypatch.setattr(tokenizer, "PIECE", 1)  # cuts at every allowed position
    of = tokenizer.Tokenizer(api, models[name])
    n_cuts = 0

    @settings(max_examples=60 if name in PRE else 1000, deadline=None, database=None)
    @given(st.lists(st.sampled_from(WORDS), max_size=30), st.sampled_from(["", " ", " "]))
    def check(words, between):
        nonlocal n_cuts
        text = between.join(words).encode()
        n_cuts += len([*of._pieces(text)]) - 1
        assert of.tokens(text).tolist() == of._llama_tokenize(text, True).tolist()

    for _ in range(20):  # some vocabularies allow few cuts, and 60 random texts may have none
        check()
        if n_cuts > 0:
            break
    assert n_cuts > 0


def test_only_as_many_pieces_as_needed_are_tokenized(models, monkeypatch):
    of = tokenizer.Tokenizer(api, models["demo"])
    text = SAMPLE.read_bytes() * 20
    whole, found = of.tokens(text), []
    monkeypatch.setattr(
        of, "_tokens_of_piece", lambda t, a, b, f=of._tokens_of_piece: found.append(b - a) or f(t, a, b)
    )
    monkeypatch.setattr(tokenizer.system, "available_cores", lambda: 64)
    for n in (1000, 10000):
        found.clear()
        assert np.array_equal(of.tokens(text, n), whole[:n])
        nbytes = len(text) * n / len(whole)
        assert max(found) < tokenizer.PIECE + 50 and sum(found) < 2 * nbytes + 2 * tokenizer.PIECE < len(text)


def test_text_is_tokenized_once_for_a_file(tmp_path, monkeypatch):
    """The tokens of a file are cached by its content; a changed file or another text is tokenized again."""
    calls, tokens = [], tokenizer.Tokenizer.tokens
    monkeypatch.setattr(tokenizer.Tokenizer, "tokens", lambda self, *args: calls.append(args) or tokens(self, *args))
    model, text, other = (tmp_path / name for name in ("model.gguf", "text.txt", "other.txt"))
    file = tiny_models.make("llama")
    model.write_bytes(gb.write(file))
    text.write_text("ab a " * 100)
    other.write_text("b ab " * 100)

    def read(path, n_chunks=-1):
        with TextModel.opened_with(model, path, 32, n_chunks) as (_, chunks):
            return chunks.tolist()

    first = read(text)
    assert read(text) == first and len(calls) == 1
    assert read(other) != first and len(calls) == 2
    assert read(other, 2) == read(other)[:2] and len(calls) == 4
    file.set("tokenizer.ggml.add_space_prefix", gb.BOOL, 0)
    model.write_bytes(gb.write(file))
    changed = read(text)
    assert changed != first and len(calls) == 5
