"""Models with ReLU gates on the CPU: leaving rows of up out changes no bit. Which rows are left out, and when, is what
test-graph-plan and test-cpu-kernels check.
"""

from __future__ import annotations

import numpy as np
import pytest

import architectures
import gguf_bytes as gb
from ggml_macko import convert
from ggml_macko.evaluation.activations import Tap
from ggml_macko.evaluation.text_model import TextModel
from llama_logits import logits_one_by_one, open_model

TOKENS = [int(t) for t in np.random.default_rng(3).integers(3, 120, 16)]


class ZeroCounter(Tap):
    """Counts the zeros of gated nodes."""

    n = n_zeros = 0

    def wants(self, node):
        return node.op == self.ggml.glu

    def take(self, address, node):
        x = self.array(address, np.float32)
        self.n += x.size
        self.n_zeros += x.size - int(np.count_nonzero(x))
        return True


def smallthinker(path, shift):
    """Experts with ReLU gates, half of the weights zero. The embeddings have a mean, and the gates' weights another one
    with `shift` subtracted, so that it decides how many gates are closed.
    """
    f = architectures.make("smallthinker", True)
    rng = np.random.default_rng(5)
    for t in f.tensors:
        if t.name == b"token_embd.weight":
            dtype = np.float16 if t.type == architectures.TYPE_F16 else np.float32
            t.data = (np.frombuffer(t.data, dtype) + dtype(1)).tobytes()
        elif len(t.ne) > 1 and t.type == architectures.TYPE_F16:
            x = np.frombuffer(t.data, np.float16).astype(np.float32)
            x[rng.random(x.size) < 0.5] = 0
            if b"gate_exps" in t.name:
                x = np.where(x == 0, 0, x - np.float32(shift))
            t.data = x.astype(np.float16).tobytes()
    path.write_bytes(gb.write(f))
    return path


@pytest.mark.parametrize("kind", ["macko", "sparse-q8_0"])
@pytest.mark.parametrize("shift, least, most", [(0.0, 0.4, 0.6), (0.01, 0.65, 0.999), (0.3, 1.0, 1.0)])
def test_skipping_changes_no_bit(tmp_path, monkeypatch, kind, shift, least, most):
    path = tmp_path / "sparse.gguf"
    convert(smallthinker(tmp_path / "dense.gguf", shift), path, kind)
    counter = ZeroCounter()
    with TextModel(path, n_ctx=16, n_batch=16, n_ubatch=16, n_threads=2, tap=counter) as model:
        model.evaluate(np.array([TOKENS], np.int32))
    assert least <= counter.n_zeros / counter.n <= most
    with_skipping = logits_one_by_one(open_model(path, 64), TOKENS)
    one_thread = logits_one_by_one(open_model(path, 64, n_threads=1), TOKENS)
    monkeypatch.setenv("GGML_MACKO_NO_SKIP", "1")
    want = logits_one_by_one(open_model(path, 64), TOKENS)
    assert np.isfinite(want).all() and want.std() > 0
    for found in (with_skipping, one_thread):
        np.testing.assert_array_equal(found.view(np.uint32), want.view(np.uint32))
