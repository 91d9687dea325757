"""Models with a ReLU in their feed-forward part on the CPU: leaving out rows of up and columns of down changes no bit.
Which are left out, and when, is what test-graph-plan and test-cpu-kernels check.
"""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from ggml_macko import convert
from ggml_macko.evaluation.activations import Tap
from ggml_macko.evaluation.text_model import TextModel
from support.llama_logits import logits_one_by_one, open_model
from support.relu_models import RELU, TOKENS, relu_model

OLD_ENOUGH = 3.1  # seconds, for a model whose weights are kept in a cache


class ZeroCounter(Tap):
    """Counts the zeros of gated or squared nodes, which down is multiplied by."""

    n = n_zeros = 0

    def wants(self, node):
        return node.op == self.ggml.glu or node.name.startswith(b"ffn_sqr(relu)")

    def take(self, address, node):
        x = self.array(address, np.float32)
        self.n += x.size
        self.n_zeros += x.size - int(np.count_nonzero(x))
        return True


@pytest.mark.parametrize("arch", RELU)
@pytest.mark.parametrize("kind", ["macko", "sparse-q8"])
@pytest.mark.parametrize("shift, least, most", [(0.0, 0.4, 0.6), (0.01, 0.65, 0.999), (0.3, 1.0, 1.0)])
def test_skipping_changes_no_bit(tmp_path, monkeypatch, arch, kind, shift, least, most):
    path = tmp_path / "sparse.gguf"
    convert(relu_model(arch, tmp_path / "dense.gguf", shift), path, kind)
    counter = ZeroCounter()
    with TextModel(path, n_ctx=16, n_batch=16, n_ubatch=16, n_threads=2, tap=counter) as model:
        model.evaluate(np.array([TOKENS], np.int32))
    assert least <= counter.n_zeros / counter.n <= most
    with_skipping = logits_one_by_one(open_model(path, 64), TOKENS)
    one_thread = logits_one_by_one(open_model(path, 64, n_threads=1), TOKENS)
    monkeypatch.setenv("GGML_MACKO_DISABLE", "relu-skip")
    want = logits_one_by_one(open_model(path, 64), TOKENS)
    assert np.isfinite(want).all() and want.std() > 0
    for found in (with_skipping, one_thread):
        np.testing.assert_array_equal(found.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("arch", RELU)
@pytest.mark.parametrize("kind", ["macko", "sparse-lossless"])
def test_columns_give_the_numbers_of_the_rows(tmp_path, monkeypatch, arch, kind):
    path = tmp_path / "sparse.gguf"
    convert(relu_model(arch, tmp_path / "dense.gguf", 0.01), path, kind)
    with_columns = logits_one_by_one(open_model(path, 64), TOKENS)
    monkeypatch.setenv("GGML_MACKO_DISABLE", "csc")
    want = logits_one_by_one(open_model(path, 64), TOKENS)
    # the next product rounds x to F16: a float's last bit may become one of F16's, 2^-11
    assert np.abs(with_columns - want).max() <= 2e-3 * want.std()
    assert (with_columns != want).any()  # another order of sums: they were used


def test_columns_are_cached_with_the_rows(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "sparse.gguf"
    convert(relu_model("arcee", tmp_path / "dense.gguf", 0.01), path, "macko")
    want = logits_one_by_one(open_model(path, 64), TOKENS)
    time.sleep(OLD_ENOUGH)

    def load():
        capfd.readouterr()
        got = logits_one_by_one(open_model(path, 64, weight_cache=True, verbose=True), TOKENS)
        return got, re.findall(r"ggml-macko: cache: (wrote|mapped)", capfd.readouterr().err)

    for expected in ("wrote", "mapped"):
        got, said = load()
        assert said == [expected]
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    monkeypatch.setenv("GGML_MACKO_DISABLE", "csc")
    rows = logits_one_by_one(open_model(path, 64), TOKENS)
    for expected in ("wrote", "mapped"):  # what has columns serves no load without them
        got, said = load()
        assert said == [expected]
        np.testing.assert_array_equal(got.view(np.uint32), rows.view(np.uint32))
