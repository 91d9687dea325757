"""Options for attention and its cache: `-fa`, `-ctk`, `-ctv`, and the depth of `macko bench`."""

from __future__ import annotations

import argparse
import json

import pytest

import ggml_macko
from ggml_macko import Llama, plan
from ggml_macko.commands import arguments
from ggml_macko.native import devices
from support import generators

Q8_0 = 8  # ggml's type id


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The bundled model, dense and sparse."""
    sparse = tmp_path_factory.mktemp("cache") / "sparse.gguf"
    ggml_macko.convert(generators.DEMO, sparse)
    return {"dense": generators.DEMO, "sparse": sparse}


@pytest.fixture
def parsed():
    def parse(*words):
        parser = argparse.ArgumentParser()
        arguments.add_gpu_layers(parser)
        arguments.add_attention(parser)
        return arguments.attention_arguments(parser.parse_args(words))

    return parse


def test_text_with_a_quantized_cache_is_that_of_llama_with_its_types(demo, macko):
    words = (
        "generate",
        "-m",
        demo["sparse"],
        "-p",
        "The function",
        "-n",
        8,
        "--temp",
        0,
        "--no-display-prompt",
        "-c",
        64,
    )
    done = macko(*words, "-ctk", "q8_0", "-ctv", "q8_0", "-ngl", 0)
    llama = Llama(str(demo["sparse"]), n_ctx=64, flash_attn=True, type_k=Q8_0, type_v=Q8_0, verbose=False)
    want = llama.create_completion("The function", max_tokens=8, temperature=0, repeat_penalty=1.0)["choices"][0][
        "text"
    ]
    assert (done.code, done.out) == (0, want + "\n")


def test_flash_attention_is_on_where_it_is_needed_or_pays(parsed, monkeypatch):
    monkeypatch.setattr(devices, "gpus", list)
    assert not parsed()["flash_attn"]
    assert parsed("-ctv", "q8_0")["flash_attn"]
    assert parsed("-fa", "on")["flash_attn"]
    monkeypatch.setattr(devices, "gpus", lambda: [devices.Gpu("MACKO0", "a GPU", 1, 1)])
    assert parsed()["flash_attn"]
    assert not parsed("-ngl", "0")["flash_attn"]
    assert not parsed("-fa", "off")["flash_attn"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-ctv", "q8_0", "-fa", "off"), "-ctv q8_0 needs flash attention, and -fa is off"),
        (("-ctk", "q9"), "argument -ctk/--cache-type-k: invalid choice: 'q9'"),
        (("-fa", "yes"), "argument -fa/--flash-attn: invalid choice: 'yes'"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(demo, macko, words, said):
    done = macko("generate", "-m", demo["sparse"], "-p", "x", *words)
    assert done.code != 0 and said in done.err


def test_bench_measures_behind_tokens_with_a_cache_of_another_type(demo, macko):
    words = ("bench", "-m", demo["sparse"], "--dense", demo["dense"], "-p", 8, "-n", 2, "-r", 1, "-ngl", 0, "-d", 40)
    done = macko(*words, "-ctk", "q8_0", "-ctv", "q4_0", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [found[k] for k in ("n_depth", "flash_attn", "type_k", "type_v")] == [40, True, "q8_0", "q4_0"]
    assert len(found["models"]) == 2 and all(m["gen_tps"] > 0 and m["prompt_tps"] > 0 for m in found["models"])
    assert "'-1' is not an integer from 0 to" in macko(*words[:-1], -1).err


def test_plan_counts_the_bytes_of_the_cache_types(demo, macko):
    def kv_cache(*types):
        keywords = dict(zip(("cache_type_k", "cache_type_v"), types))
        return plan(demo["sparse"], types=["macko"], n_ctx=256, **keywords).context.kv_cache

    f16 = kv_cache()
    assert kv_cache("q8_0", "q8_0") * 32 * 2 == f16 * 34
    assert kv_cache("f16", "q4_0") * 2 * 32 * 2 == f16 * (32 * 2 + 18)
    assert "(Q8_0 and F16, 256 tokens)" in macko("plan", demo["sparse"], "-c", 256, "-ctk", "q8_0").out
