"""What ends the process in llama_cpp.Llama and is an error in ours: grammars, tokens, close()."""

from __future__ import annotations

import pkgutil
import threading

import llama_cpp
import pytest

from ggml_macko import Llama, errors, grammar, guards
from ggml_macko.native import bindings
from support import generators

REFUSED = {
    'root ::= root "a"': "left recursion (root)",
    'root ::= a "z"\na ::= b root\nb ::= "x"?': "left recursion (a, root)",
    'root ::= a root "z"\na ::= b b\nb ::= "x"?': "left recursion (root)",
    'root ::= ( "" | root "x")+': "left recursion (root)",
    "root ::= " + "(" * 600 + '"a"' + ")" * 600: "more than 500 parentheses",
    'root ::= "' + "a" * 1000 + '"{2000}': "more than 1000000 elements",
    'root ::= "a"\n' + "x" * (1 << 20): "the limit is 1048576",
    "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(40)) + '\nr40 ::= "a"': "too many rules",
    "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(11_000)) + '\nr11000 ::= "a"': "too many rules",
}
ACCEPTED = [
    'root ::= ("a"?)*',
    'root ::= ws* "a" root | ""\nws ::= [ ]*',
    'root ::= ["\\]a-z"]+ "\\"" [^"] . <[5]> !<[6]> # root ::= root "x"\n',
    'root ::= "a"{3} "b"{2,} "c"{0,4} ("d" | "e"){1,3}',
    'root ::= "x" root',
    "root ::= nothing",  # llama.cpp's to refuse
    "this is no grammar",
]


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_grammar_that_llama_cpp_would_not_survive_is_refused(text):
    with pytest.raises(errors.ArgumentError) as e:
        grammar.check(text)
    assert REFUSED[text] in str(e.value)


@pytest.mark.parametrize("text", ACCEPTED, ids=range(len(ACCEPTED)))
def test_other_grammars_are_left_to_llama_cpp(text):
    grammar.check(text)


def test_grammars_of_llama_cpp_python_are_accepted():
    known = {name: text for name, text in vars(llama_cpp.llama_grammar).items() if name.endswith("_GBNF")}
    assert len(known) > 5
    for text in known.values():
        grammar.check(text)


@pytest.mark.parametrize("guard", guards.GUARDS, ids=lambda guard: guard.function)
def test_guard_names_a_function_and_a_report_that_exist(guard):
    reports = (generators.ROOT / "lab" / "upstream-reports.md").read_text()
    assert guard.report is None or f"### {guard.report}\n" in reports
    module, _, name = guard.function.rpartition(":")
    if module.startswith("llama_cpp.server"):
        pytest.importorskip("llama_cpp.server.app")
    if guard.versions[1] == guards.NEWEST:
        assert pkgutil.resolve_name(f"{module or 'llama_cpp'}:{name}") is not None
    if not module:
        assert name.partition(".")[2] in vars(guards.GuardedLlama)


def test_guards_are_for_the_versions_that_the_plugin_is_for():
    assert bindings.llama_cpp_python_range() == (guards.OLDEST, guards.NEWEST)


@pytest.fixture
def llama():
    return Llama(str(generators.DEMO), n_ctx=128, verbose=False)


def test_refused_grammar_is_an_error_and_the_model_works_on(llama):
    for text in ("root ::= root", "root ::= nothing", 'root ::= "', *list(REFUSED)[:2]):
        with pytest.raises(errors.ArgumentError, match="grammar: "):
            llama("x", max_tokens=3, grammar=llama_cpp.LlamaGrammar.from_string(text))
    yes = llama_cpp.LlamaGrammar.from_string('root ::= "yes"')
    assert llama("x", max_tokens=5, grammar=yes)["choices"][0]["text"] == "yes"


def test_token_outside_of_the_vocabulary_is_an_error(llama):
    for token in (-1, llama.n_vocab(), 2**31 - 1):
        with pytest.raises(errors.ArgumentError, match=f"token {token} is not in the vocabulary"):
            llama.detokenize([token])
    assert llama.detokenize(llama.tokenize(b"The function", add_bos=False)).strip() == b"The function"


def test_closed_model_is_an_error(llama):
    llama.close()
    llama.close()
    for use in (lambda: llama("x"), lambda: llama.tokenize(b"x"), lambda: llama.eval([1]), lambda: llama.embed("x")):
        with pytest.raises(errors.ArgumentError, match="has been closed"):
            use()


def test_model_closed_while_it_streams_is_freed_later(llama):
    stream = llama("The", max_tokens=100, stream=True)
    next(stream)
    llama.close()
    assert llama._model.model is not None
    with pytest.raises(errors.ArgumentError, match="has been closed"):
        list(stream)
    assert llama._model.model is None
    dropped = Llama(str(generators.DEMO), n_ctx=128, verbose=False)
    stream = dropped("The", max_tokens=100, stream=True)
    next(stream)
    dropped.close()
    del stream
    assert dropped._model.model is None


def test_close_in_another_thread_ends_the_stream(llama):
    """Three times, since it is a matter of timing."""
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
        assert result == ["this Llama has been closed"] and model._model.model is None
