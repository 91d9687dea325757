"""Whole models at every density: identical after restore, bounded logits, the same text up to ties and perplexity.

The bundled model is always tested; the other models are not in the repository, and are skipped if they are missing.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from ggml_macko.evaluation.perplexity import perplexity
from reference.llama_float64 import Float64Llama
from support import generators
from support.commands import run_macko
from support.llama_logits import greedy_tokens, open_model, prompt_logits

# llama.cpp rounds activations and the KV cache to F16. The distance of a logit from float64 then depends on the model
# (0.015 to 0.030 for these), so the bounds are multiples of the errors of dense llama.cpp on the same model.
LARGEST_RATIO, RMS_RATIO = 1.5, 1.1
PERPLEXITY_CHUNKS = 24

CASES = [("docs-4m-s70-f16", None)]
for name in ("docs-4m-f16", "docs-23m-f16"):
    CASES += [(name, density) for density in (1.0, 0.7, 0.5, 0.3, 0.1)]
CASES += [("docs-23m-s70-f16", None)]


def tensors(path):
    return {t.name: (t.tensor_type, tuple(t.shape), t.data.tobytes()) for t in gguf.GGUFReader(str(path)).tensors}


def perplexity_of(path):
    text = generators.SHARED / "held-out.txt"
    text = text if text.exists() else generators.DEMO.parent / "sample.txt"
    return perplexity(path, text, n_chunks=PERPLEXITY_CHUNKS, n_gpu_layers=0).ppl


@pytest.mark.slow
@pytest.mark.parametrize("name,density", CASES, ids=[f"{n}-{d or 'as-is'}" for n, d in CASES])
def test_sparse_model_is_equal_to_its_dense_twin(name, density, tmp_path, record_property):
    source = generators.DEMO if name == generators.DEMO.stem else generators.SHARED / f"{name}.gguf"
    if not source.exists():
        pytest.skip(f"no {source.name} beside the repository")
    dense, sparse, restored = source, tmp_path / "sparse.gguf", tmp_path / "restored.gguf"
    if density is not None:
        dense = tmp_path / "dense.gguf"
        run_macko("prune", source, dense, "--sparsity", 1 - density)
    run_macko("convert", dense, sparse, "--keep-negative-zeros")
    run_macko("restore", sparse, restored)
    run_macko("convert", dense, sparse, "--force")
    assert tensors(restored) == tensors(dense)

    tokens, got = prompt_logits(open_model(sparse, logits_all=True))
    reference = Float64Llama(str(dense))
    exact = reference.logits(tokens)
    off, dense_off = got - exact, prompt_logits(open_model(dense, logits_all=True))[1] - exact
    error, dense_error = np.abs(off).max(), np.abs(dense_off).max()
    record_property("max_logit_error", float(error))
    assert error <= LARGEST_RATIO * dense_error
    assert np.sqrt((off**2).mean()) <= RMS_RATIO * np.sqrt((dense_off**2).mean())

    # The two texts are equal up to a tie: two tokens whose logits are as close in float64 as the errors above allow.
    (start, wanted), (_, found) = [greedy_tokens(open_model(p)) for p in (dense, sparse)]
    if wanted != found:
        n_equal = next(i for i, (a, b) in enumerate(zip(wanted, found)) if a != b)
        last = reference.logits(start + wanted[:n_equal])[-1]
        assert abs(last[wanted[n_equal]] - last[found[n_equal]]) <= error + dense_error

    ppl = [perplexity_of(p) for p in (dense, sparse)]
    sizes = f"{dense.stat().st_size} -> {sparse.stat().st_size} bytes"
    print(f"{name} {density}: {sizes}, max logit error {error:.4f}, perplexity {ppl}")
    assert abs(ppl[1] / ppl[0] - 1) < 1e-4  # equal to four digits
