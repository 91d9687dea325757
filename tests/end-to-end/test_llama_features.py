"""LoRA adapters, session state, draft models and grammars give the same results for sparse and dense models."""

from __future__ import annotations

import ctypes
import functools
import json

import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from support import generators, llama_logits, lora_files

PROMPT = "The function returns"
open_model = functools.partial(llama_logits.open_model, n_ctx=256, seed=1)


@pytest.fixture(scope="module")
def pair(sparse):
    """The paths of the demo model, dense and sparse."""
    return generators.DEMO, sparse


def greedy(llama, n=40, prompt=PROMPT, **kwargs):
    return llama(prompt, max_tokens=n, temperature=0, **kwargs)["choices"][0]["text"]


def test_lora_adapter_adapts_a_sparse_base(pair, tmp_path):
    adapter = str(lora_files.write(tmp_path / "lora.gguf", generators.DEMO))
    dense, sparse = (greedy(open_model(p, lora_path=adapter)) for p in pair)
    assert sparse == dense
    assert sparse != greedy(open_model(pair[1]))
    compressed = open_model(pair[0], lora_path=adapter, compress=True)
    assert greedy(compressed) == dense
    weak = [greedy(open_model(p, lora_path=adapter, lora_scale=0.3)) for p in pair]
    assert weak[0] == weak[1]


def test_closed_adapter_leaves_the_base_unchanged(pair, tmp_path):
    before = greedy(open_model(pair[1]))
    adapted = open_model(pair[1], lora_path=str(lora_files.write(tmp_path / "lora.gguf", generators.DEMO)))
    assert greedy(adapted) != before
    adapted.close()
    assert greedy(open_model(pair[1])) == before


def test_saved_state_continues_the_same_text(pair):
    llama = open_model(pair[1])
    want = greedy(llama, 30)
    llama.reset()
    llama.eval(llama.tokenize(PROMPT.encode()))
    state = llama.save_state()
    greedy(llama, 20, "Something else that fills the cache: ")
    llama.load_state(state)
    tokens = []
    for token in llama.generate([int(t) for t in llama._input_ids], temp=0.0):
        tokens.append(token)
        if len(tokens) == 30:
            break
    assert llama.detokenize(tokens).decode() == want


def test_session_file_continues_in_a_fresh_model(pair, tmp_path):
    """llama_state_save_file saves the session, llama_state_load_file loads it into a new model and context."""
    import llama_cpp

    path = str(tmp_path / "session.bin").encode()
    llama = open_model(pair[1])
    tokens = llama.tokenize(PROMPT.encode())
    llama.eval(tokens)
    array = (llama_cpp.llama_token * len(tokens))(*tokens)
    assert llama_cpp.llama_state_save_file(llama._ctx.ctx, path, array, len(tokens))
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(llama._ctx.ctx), (llama.n_vocab(),)).copy()
    llama.eval([int(logits.argmax())])
    want = np.ctypeslib.as_array(llama_cpp.llama_get_logits(llama._ctx.ctx), (llama.n_vocab(),)).copy()

    other = open_model(pair[1])
    found, n = (llama_cpp.llama_token * 256)(), ctypes.c_size_t()
    assert llama_cpp.llama_state_load_file(other._ctx.ctx, path, found, 256, ctypes.byref(n))
    assert list(found[: n.value]) == tokens
    other.n_tokens = len(tokens)
    other.eval([int(logits.argmax())])
    got = np.ctypeslib.as_array(llama_cpp.llama_get_logits(other._ctx.ctx), (other.n_vocab(),))
    np.testing.assert_array_equal(got, want)


class Draft:
    """A draft model for another model: it proposes its own greedy continuation."""

    def __init__(self, llama, n=4):
        self.llama, self.n, self.calls = llama, n, 0

    def __call__(self, input_ids, /, **kwargs):
        self.calls += 1
        out = []
        for token in self.llama.generate([int(t) for t in input_ids], temp=0.0):
            out.append(token)
            if len(out) == self.n:
                break
        return np.array(out, dtype=np.intc)


def test_sparse_draft_model_keeps_the_text(pair):
    want = greedy(open_model(pair[0]))
    for target, draft in ((pair[0], pair[1]), (pair[1], pair[1])):
        drafter = Draft(open_model(draft))
        assert greedy(open_model(target, draft_model=drafter)) == want
        assert 0 < drafter.calls < 20  # the draft had most of the 40 tokens


class Lookup(LlamaPromptLookupDecoding):
    """Proposes what followed the last words before, and counts the tokens that it proposed."""

    n_proposed = 0

    def __call__(self, input_ids, /, **kwargs):
        found = super().__call__(input_ids, **kwargs)
        self.n_proposed += len(found)
        return found


def test_lookup_of_earlier_words_keeps_the_text(pair):
    want = [greedy(open_model(path)) for path in pair]
    lookup = Lookup(num_pred_tokens=5)
    assert want[0] == want[1] == greedy(open_model(pair[1], draft_model=lookup))
    assert lookup.n_proposed > 0


def test_grammar_and_json_schema_are_followed(pair):
    import llama_cpp

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
        "required": ["name", "size"],
    }
    grammars = [
        llama_cpp.LlamaGrammar.from_json_schema(json.dumps(schema), verbose=False),
        llama_cpp.LlamaGrammar.from_string('root ::= "[" [0-9]{3} ("," [0-9]{3}){2} "]"', verbose=False),
    ]
    for grammar in grammars:
        dense, sparse = (greedy(open_model(p), 64, "Give a value: ", grammar=grammar) for p in pair)
        assert sparse == dense
        parsed = json.loads(sparse)
    assert len(parsed) == 3
    assert set(json.loads(greedy(open_model(pair[1]), 64, "Give a value: ", grammar=grammars[0]))) == {"name", "size"}
