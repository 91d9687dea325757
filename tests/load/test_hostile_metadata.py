"""Vocabularies and templates whose cost in llama.cpp or Jinja far exceeds their size are refused, or harmless.

Each file loads in a process with 3 GB of address space and some seconds; without the check, the process fails.
"""

from __future__ import annotations

import resource
import struct
import subprocess
import sys

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ggml_macko import guards
from support import gguf_bytes as gb
from support import tiny_models

LIMIT = 22
MASK = 2**64 - 1
MURMUR = 0xC6A4A7935BD1E995  # libstdc++'s std::hash<std::string>: MurmurHash64A
MURMUR_INVERSE = pow(MURMUR, -1, 2**64)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """name of a tokenizer -> the GGUF of a sparse model with this tokenizer"""
    folder = tmp_path_factory.mktemp("bases")
    found = {}
    for tokenizer, arch in (("llama", "llama"), ("gpt2", "qwen2")):
        dense, sparse = folder / f"{arch}.gguf", folder / f"{arch}-sparse.gguf"
        dense.write_bytes(gb.write(tiny_models.make(arch)))
        command = [sys.executable, "-m", "ggml_macko.commands.cli", "convert", str(dense), str(sparse)]
        subprocess.run(command, check=True, capture_output=True)
        found[tokenizer] = sparse.read_bytes()
    return found


LOAD = """
import sys, ggml_macko
try:
    llama = ggml_macko.Llama(sys.argv[1], n_ctx=32, n_threads=1, verbose=False)
    print(0)
except ggml_macko.errors.MackoError as e:
    print(e.code, e)
"""


def load(data: bytes, tmp_path, timeout: int = 20) -> str:
    """ "0", or the code and the message of the error."""
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)],
        capture_output=True,
        text=True,
        timeout=timeout,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)),
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-1000:]}"
    return done.stdout.strip()


def with_tokens(f: gb.GGUF, more: list, kind: int = 1) -> gb.GGUF:
    """The file with additional tokens at the end of its vocabulary; the embedding has no rows for them."""
    for name, value in (("tokens", more), ("scores", [0.0] * len(more)), ("token_type", [kind] * len(more))):
        key = f.key("tokenizer.ggml." + name)
        if key is not None:
            key.value = list(key.value) + value
    return f


def with_merges(f: gb.GGUF, more: list) -> gb.GGUF:
    key = f.key("tokenizer.ggml.merges")
    key.value = list(key.value) + more
    return f


def colliding(n: int) -> list:
    """n strings of 16 bytes without NUL that all have the same hash value in libstdc++."""

    def unmix(k: int) -> int:  # inverse of: k *= m; k ^= k >> 47; k *= m
        k = k * MURMUR_INVERSE & MASK
        return (k ^ k >> 47) * MURMUR_INVERSE & MASK

    def mix(k: int) -> int:
        k = k * MURMUR & MASK
        return (k ^ k >> 47) * MURMUR & MASK

    start = 0xC70F6907 ^ 16 * MURMUR & MASK
    found, i = [], 0x0101010101010101
    while len(found) < n:
        i += 0x9E3779B97F4A7C15
        first = i & MASK
        state = (start ^ mix(first)) * MURMUR & MASK
        text = struct.pack("<QQ", first, unmix(0x1234567890ABCDEF ^ state))
        if 0 not in text:
            found.append(text)
    return found


MANY = [b"x%d" % i for i in range(70_000)]
CASES = {  # tokenizer, change, part of the message
    "long token": ("gpt2", lambda f: with_tokens(f, [b"\x01" * 47_000]), "is too long (47000 vs 4096 bytes)"),
    "long tokens": (
        "gpt2",
        lambda f: with_tokens(f, [b"\x01" * 4000 + b"%d" % i for i in range(100)]),
        "too many long tokens",
    ),
    "long merge": ("gpt2", lambda f: with_merges(f, [b"a " + b"b" * 9000]), "is too long (9002 vs 8193 bytes)"),
    "tokens of one hash": ("gpt2", lambda f: with_tokens(f, colliding(60_000)), "tokens: too many strings with equal"),
    "tokens of one hash, spm": ("llama", lambda f: with_tokens(f, colliding(60_000)), "tokens: too many strings"),
    "merges of one hash": (
        "gpt2",
        lambda f: with_merges(f, [b"a " + text for text in colliding(60_000) if b" " not in text]),
        "merges: too many strings with equal",
    ),
    "special tokens": ("llama", lambda f: with_tokens(f, MANY, kind=3), "too many special tokens (70003 vs 65536)"),
}


@pytest.mark.parametrize("name", CASES)
def test_vocabulary_that_costs_more_than_its_bytes_is_refused(name, bases, tmp_path):
    tokenizer, change, message = CASES[name]
    f = change(gb.read(bases[tokenizer]))
    answer = load(gb.write(f), tmp_path)
    assert answer.startswith(f"{LIMIT} ") and message in answer, answer


@pytest.mark.parametrize("tokenizer", ["llama", "gpt2"])
def test_vocabulary_within_the_limits_is_accepted(tokenizer, bases, tmp_path):
    """llama.cpp then finds a fault: the embedding has too few rows."""
    more = [b"y%d" % i for i in range(100_000)] + [b"\x01" * 4096, b"z" * 4096]
    f = with_tokens(gb.read(bases[tokenizer]), more)
    assert "llama.cpp could not load the model" in load(gb.write(f), tmp_path)
    assert load(bases[tokenizer], tmp_path) == "0"


TEMPLATES = [
    "{% set x = 7**(7**9) %}",
    "{{ 7**(7**9) }}",
    "{{ 'x' * 10000000000 }}",
    "{{ 'x'|center(10000000000) }}",
    "{{ '%10000000000d'|format(1) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ ['x' * 10000000000]|join }}",
    "{{ [0] * 10000000000 }}",
    "{{ ('x' * 10000000000) ~ 'y' }}",
    "{% if 7**(7**9) > 1 %}a{% endif %}",
    "{% for i in [0] * 10000000000 %}a{% endfor %}",
    "{{ 'x'.__class__('y' * 10000000000) }}",
    "{% filter center(7**(7**9)) %}a{% endfilter %}",
    "{% set x %}{{ 'x' * 10000000000 }}{% endset %}",
    "{% macro m(a='x' * 10000000000) %}{{ a }}{% endmacro %}",
]


def test_template_is_not_evaluated_while_loading(bases, tmp_path):
    """All templates load in one process: the evaluation of each would hang or exceed the memory."""
    f = gb.read(bases["llama"])
    f.set("tokenizer.chat_template", gb.STRING, TEMPLATES[0].encode())
    for i, template in enumerate(TEMPLATES[1:]):
        f.set(f"tokenizer.chat_template.t{i}", gb.STRING, template.encode())
    assert load(gb.write(f), tmp_path) == "0"


def test_autoescape_of_an_expression_and_a_huge_template_are_refused(bases, tmp_path):
    f = gb.read(bases["llama"])
    f.set("tokenizer.chat_template", gb.STRING, b"x" * ((1 << 18) + 1))
    assert load(gb.write(f), tmp_path) == "22 chat template: 262145 characters; the limit is 262144"
    environment = guards.TemplateEnvironment()
    assert environment.from_string("{% autoescape true %}{{ a }}{% endautoescape %}").render(a="<") == "&lt;"
    with pytest.raises(jinja2.TemplateSyntaxError, match="true or false"):
        environment.from_string("{% autoescape 7**(7**9) %}{% endautoescape %}")


def test_templates_render_as_without_the_check():
    """Includes constants of each kind, and the templates in llama-cpp-python."""
    from llama_cpp import llama_chat_format as known

    messages = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "ho"}]
    templates = [value for name, value in vars(known).items() if name.endswith("_TEMPLATE") and isinstance(value, str)]
    assert len(templates) > 2
    templates += [
        "{{ 1 + 2 }}{{ 'a' * 3 }}{{ 'b' ~ 4 }}{{ '%03d' % 7 }}{{ 'x'|upper }}{{ [1, 2]|join('-') }}{{ 7 // 2 }}",
        "{{ 'c' if true else 'd' }}{{ none is none }}{{ not false }}{{ 1 < 2 <= 3 }}{{ {'a': 1}['a'] }}{{ -3 }}",
        "{% for m in messages %}{{ loop.index0 ~ m.content|trim }}{% if loop.last %}{{ '!' }}{% endif %}{% endfor %}",
    ]
    for template in templates:
        values = {"messages": messages, "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
        options = {"trim_blocks": True, "lstrip_blocks": True}
        results = [
            environment(**options).from_string(template).render(raise_exception=str, **values)
            for environment in (ImmutableSandboxedEnvironment, guards.TemplateEnvironment)
        ]
        assert results[0] == results[1], template
