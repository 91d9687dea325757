"""An image encoder (mmproj) of libmtmd with a sparse text model: logits and text are those of the dense model."""

from __future__ import annotations

import contextlib
import ctypes

import llama_cpp
import numpy as np
import pytest

from ggml_macko.native import library
from support import generators, tiny_models
from support import gguf_bytes as gb
from support.llama_logits import nmse, open_model, plain_dense_weights

try:
    from llama_cpp import mtmd_cpp as mtmd
except (ImportError, FileNotFoundError) as e:
    pytest.skip(f"llama_cpp without libmtmd: {e}", allow_module_level=True)

SIDE, N_TOKENS = 64, 8


@contextlib.contextmanager
def freed(pointer, free):
    assert pointer
    try:
        yield pointer
    finally:
        free(pointer)


def evaluate(llama, mmproj, image, use_gpu):
    """Evaluates a text with an image inside, and returns the number of positions."""
    params = mtmd.mtmd_context_params_default()
    params.use_gpu, params.n_threads, params.warmup, params.print_timings = use_gpu, 2, False, False
    text = b"The picture " + mtmd.mtmd_default_marker() + b" shows that the function returns"
    pixels = image.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    with (
        freed(mtmd.mtmd_init_from_file(bytes(mmproj), llama.model, params), mtmd.mtmd_free) as encoder,
        freed(mtmd.mtmd_bitmap_init(SIDE, SIDE, pixels), mtmd.mtmd_bitmap_free) as bitmap,
        freed(mtmd.mtmd_input_chunks_init(), mtmd.mtmd_input_chunks_free) as chunks,
    ):
        given = mtmd.mtmd_input_text(text, len(text), True, True)
        assert mtmd.mtmd_tokenize(encoder, chunks, given, (ctypes.c_void_p * 1)(bitmap), 1) == 0
        assert mtmd.mtmd_input_chunks_size(chunks) == 3
        n_past = llama_cpp.llama_pos()
        assert mtmd.mtmd_helper_eval_chunks(encoder, llama.ctx, chunks, 0, 0, llama.n_batch, True, n_past) == 0
    return n_past.value


def answer(path, mmproj, image, gpu, **kwargs):
    """Logits after the text and after each token of its greedy continuation, and these tokens."""
    rows, tokens = [], []
    with plain_dense_weights(), contextlib.closing(open_model(path, n_gpu_layers=-gpu, **kwargs)) as llama:
        llama.n_tokens = evaluate(llama, mmproj, image, gpu)
        while True:
            rows.append(np.ctypeslib.as_array(llama._ctx.get_logits(), shape=(llama.n_vocab(),)).copy())
            if len(tokens) == N_TOKENS:
                return np.array(rows), tokens
            tokens.append(int(rows[-1].argmax()))
            llama.eval(tokens[-1:])


HAS_GPU = not library.gpus().startswith("none")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason=f"GPUs: {library.gpus()}")]


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=ON_GPU)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("compress", [False, True], ids=["sparse file", "compressed on load"])
def test_answer_to_an_image_is_that_of_the_dense_model(sparse, tmp_path, gpu, compress):
    """The encoder is random: the answer depends on the image, but does not describe it."""
    mmproj = tmp_path / "mmproj.gguf"
    mmproj.write_bytes(gb.write(tiny_models.make_image_encoder(SIDE, n_embd=256)))
    image, other = np.random.default_rng(1).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8)
    want, tokens = answer(generators.DEMO, mmproj, image, gpu)
    path = generators.DEMO if compress else sparse
    found, found_tokens = answer(path, mmproj, image, gpu, sparse_only=True, compress=compress)
    assert found_tokens == tokens and nmse(found, want) < (1e-4 if gpu else 1e-6)
    assert nmse(answer(path, mmproj, other, gpu, compress=compress)[0][0], want[0]) > 1e-3
