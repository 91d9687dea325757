"""Random grammars for grammar.Worker: variants of valid grammars, and grammars that end llama.cpp's process."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import llama_cpp
from llama_cpp import llama_grammar

from ggml_macko import errors, grammar

SEEDS = [text for name, text in vars(llama_grammar).items() if name.endswith("_GBNF")] + [
    'root ::= ("a"?)*',
    'root ::= ws* "a" root | ""\nws ::= [ ]*',
    'root ::= "a"{3} "b"{2,} "c"{0,4} ("d" | "e"){1,3}',
    'root ::= a root2 "z"\na ::= b b\nb ::= "x"?\nroot2 ::= "y"',
    'root ::= "a" root "b" | "a" root "c" | ""',
    'root ::= ["\\]a-z"]+ "\\"" [^"] . <[5]> !<[6]> # root ::= root "x"\n',
]
NASTY = [
    'root ::= a root "z"\na ::= b b\nb ::= "x"?',
    'root ::= . c\nc ::= a c "z"\na ::= b b\nb ::= "x"?',
    'root ::= "a"{3,1}',
    'root ::= "' + "a" * 3000 + '"{2000}',
    "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000,
    "root ::= [z-a]",
    "root ::= . [z-a]",
    'root ::= "\\x00"',
]
PIECES = [
    'root ::= "', "\nroot ::= ", "\na ::= ", " root ", " a ", " b ", "| ", "()", "(", ")", "*", "+", "?", "{3,1}",
    "{0}", "{2000}", "{,}", ' "a"{3,1}', ' a a root "z"', "{9999999999,99999999999}", "{18446744073709551615}",
    "{ # x\n3}", "{1", "[^]", "[]", "[z-a]", "[a-", '"\\x00"', "\\", "\\U", "[\\UFFFFFFFF]", "<[100000]>",
    "<[4294967296]>", "!<[1]>", "<s>", "<", "!", ".", '""', "#", "\0", "\ud800", "\u20ac", "\U0001f600", "\r", "\t",
    "::=", '("" | a)', "-", "0", "_", "root-1", "\nroot-1 ::= a a",
]  # fmt: skip


def random_grammar(rng: random.Random) -> str:
    if rng.random() < 0.0005:
        return rng.choice(NASTY)
    text = rng.choice(SEEDS)
    for _ in range(rng.choice((0, 1, 1, 2, 3, 6))):
        i = rng.randrange(len(text) + 1)
        j = min(len(text), i + rng.choice((0, 1, 4, 30)))
        other = rng.choice(SEEDS)
        k = rng.randrange(len(other))
        new = rng.choice((rng.choice(PIECES), rng.choice(PIECES), "", text[i:j] * 2, other[k : k + 20]))
        text = text[:i] + new + text[j:]
    return text


def _follow(worker: grammar.Worker, count: int, rng: random.Random) -> Counter:
    seen: Counter = Counter()
    for i in range(count):
        text = random_grammar(rng)
        try:
            following = grammar.Grammar(worker, text, "root")
            for _ in range(rng.randrange(3)):
                following.advance()
                following.choose(int(rng.choice(following._allowed.nonzero()[0])))
            seen["followed"] += 1
        except errors.ArgumentError as e:
            seen[re.sub(r"character \d+ |grammar: |;.*", "", str(e))] += 1
        if i % 1000 == 0:
            check = grammar.Grammar(worker, 'root ::= "a"', "root")
            check.advance()
            assert check._allowed.any() and not check._allowed.all(), f"after {text!r}"
    return seen


def _with_a_worker(model: pathlib.Path, count: int, seed: int) -> Counter:
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    loaded = llama_cpp._internals.LlamaModel(path_model=str(model), params=params, verbose=False)
    with contextlib.closing(loaded), contextlib.closing(grammar.Worker(loaded)) as worker:
        return _follow(worker, count, random.Random(seed))


@contextlib.contextmanager
def _without_stderr():
    """Hides stderr, because llama.cpp prints every grammar that it refuses."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def run(model: pathlib.Path, count: int, seed: int, n_workers: int = 1) -> Counter:
    """Follows each grammar for up to two tokens. Returns the count of each result; any other exception is a fault."""
    limits = mock.patch.multiple(grammar, MAX_SECONDS=1, MAX_NBYTES=1 << 24)
    with limits, _without_stderr(), ThreadPoolExecutor(n_workers) as pool:
        parts = pool.map(lambda i: _with_a_worker(model, count // n_workers, seed + i), range(n_workers))
        return sum(parts, Counter())
