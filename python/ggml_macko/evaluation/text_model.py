"""A model opened to evaluate text in chunks, exactly as llama-imatrix and llama-perplexity do: the same tokens, the
same batches, the same context settings, so that the same libllama gives the same numbers.

A text is tokenized once, special tokens of the vocabulary's own choice (BOS) included, and cut into chunks of n_ctx
tokens; a rest that fills no chunk is dropped. Each chunk is a fresh sequence; where the vocabulary wants a BOS, it
replaces the chunk's first token. n_batch / n_ctx chunks are evaluated together, or a chunk in several batches.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .. import errors
from ..commands.arguments import add_gpu_layers
from ..evaluation.activations import Consumer, Tap
from ..native import bindings

N_CTX = 512  # as llama-imatrix and llama-perplexity
MAX_TEXT = 2**30  # bytes; llama_tokenize counts in int32


class TextModel:
    """n_ctx: tokens of a chunk. n_batch: tokens per evaluation, at least one chunk or a part of one. n_threads 0: all
    cores. n_gpu_layers -1: all. consumer: gets the inputs of matrix products (see activations.py). The model may be
    dense or sparse. Raises MackoError (file, memory) or OSError."""

    def __init__(
        self,
        path: str | os.PathLike,
        n_ctx: int = N_CTX,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_threads: int = 0,
        n_gpu_layers: int = 0,
        consumer: Consumer | None = None,
        verbose: bool = False,
    ):
        import llama_cpp.llama_cpp as api
        from llama_cpp._logger import set_verbose
        from llama_cpp._utils import suppress_stdout_stderr

        from ..native.loader import register

        if n_ctx < 2 or n_batch < 1 or n_ubatch < 1:
            raise errors.error(errors.BAD_ARGUMENT, f"a context of {n_ctx} tokens, batches of {n_batch} and {n_ubatch}")
        self._api = api
        self.path = Path(path)
        self.n_ctx = n_ctx
        self.n_seq = max(1, n_batch // n_ctx)
        self.n_batch = min(n_batch, self.n_seq * n_ctx)
        self._tap = Tap(consumer) if consumer is not None else None
        self._stack = contextlib.ExitStack()
        set_verbose(verbose)
        register()
        with bindings.File(self.path):  # says what is wrong with a file better than llama.cpp does
            pass
        with contextlib.ExitStack() as on_error, suppress_stdout_stderr(disable=verbose):
            api.llama_backend_init()
            params = api.llama_model_default_params()
            params.n_gpu_layers = 0x7FFFFFFF if n_gpu_layers < 0 else n_gpu_layers
            self._model = api.llama_model_load_from_file(os.fsencode(self.path), params)
            if not self._model:
                raise errors.error(
                    errors.LOAD_FAILED, f"{path}: llama.cpp could not load the model; --verbose shows why"
                )
            on_error.callback(api.llama_model_free, self._model)
            threads = n_threads or len(os.sched_getaffinity(0))
            params = api.llama_context_default_params()
            params.n_ctx = self.n_seq * n_ctx
            params.n_batch = self.n_batch
            params.n_ubatch = n_ubatch
            params.n_seq_max = self.n_seq
            params.n_threads = params.n_threads_batch = threads
            params.swa_full = False
            if self._tap is not None:
                params.cb_eval = self._tap.callback
            self._ctx = api.llama_init_from_model(self._model, params)
            if not self._ctx:
                raise errors.error(
                    errors.LOAD_FAILED,
                    f"{path}: llama.cpp could not create a context of {n_ctx} tokens; --verbose shows why",
                )
            on_error.callback(api.llama_free, self._ctx)
            self._vocab = api.llama_model_get_vocab(self._model)
            if api.llama_vocab_get_add_eos(self._vocab):
                raise errors.error(
                    errors.BAD_ARGUMENT, f"{path}: its vocabulary ends each text with EOS; not supported"
                )
            self._stack = on_error.pop_all()

    @property
    def n_vocab(self) -> int:
        return self._api.llama_vocab_n_tokens(self._vocab)

    def tokenize(self, text: bytes) -> np.ndarray:
        """int32; with BOS in front where the vocabulary wants one. text: valid UTF-8, else llama.cpp may abort."""
        tokens = np.empty(len(text) + 16, dtype=np.int32)
        n = self._tokenize(text, tokens)
        if n < 0:  # a character can be several tokens; then -n is how many there are
            tokens = np.empty(-n, dtype=np.int32)
            n = self._tokenize(text, tokens)
        if n < 0:
            raise errors.error(errors.BAD_ARGUMENT, "the text could not be tokenized")
        return tokens[:n].copy()

    def _tokenize(self, text: bytes, tokens: np.ndarray) -> int:
        pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        return self._api.llama_tokenize(self._vocab, text, len(text), pointer, len(tokens), True, False)

    def read_chunks(self, text_path: str | os.PathLike, n_chunks: int = -1) -> np.ndarray:
        """(chunks, n_ctx) int32 of a file; at most n_chunks if that is not negative. Two chunks are the least."""
        text = _read_text(text_path)
        tokens = self.tokenize(text[:-1] if text.endswith(b"\n") else text)  # llama.cpp's tools drop one newline
        if len(tokens) < 2 * self.n_ctx:
            raise errors.error(
                errors.BAD_ARGUMENT,
                f"{text_path}: {len(tokens)} tokens; at least {2 * self.n_ctx} are needed for chunks of {self.n_ctx} "
                "(-c)",
            )
        n = len(tokens) // self.n_ctx
        if n_chunks >= 0:
            n = min(n, n_chunks)
        return tokens[: n * self.n_ctx].reshape(n, self.n_ctx)

    def batches(self, chunks: np.ndarray, start: int = 0) -> Iterator[tuple]:
        """(index of the first chunk, chunks of one evaluate()), from chunk `start` on."""
        for i in range(start, len(chunks), self.n_seq):
            yield i, chunks[i : i + self.n_seq]

    def evaluate(self, chunks: np.ndarray, first: int = 0) -> np.ndarray:
        """(len(chunks), n_ctx - first, n_vocab) float32 logits of positions first ... n_ctx - 1.

        chunks: at most n_seq. The result may be llama.cpp's own memory: valid until the next call, read only. With a
        consumer, first must be 0: the last block computes only what is asked for.
        """
        api = self._api
        chunks = np.array(chunks, dtype=np.int32)
        if api.llama_vocab_get_add_bos(self._vocab):
            chunks[:, 0] = api.llama_vocab_bos(self._vocab)
        api.llama_memory_clear(api.llama_get_memory(self._ctx), True)
        parts = []
        for begin in range(0, self.n_ctx, self.n_batch):  # one turn, unless a chunk is longer than a batch
            positions = np.arange(begin, min(begin + self.n_batch, self.n_ctx))
            self._decode(chunks[:, positions], positions, first)
            n_outputs = len(chunks) * int((positions >= first).sum())
            if n_outputs:
                logits = np.ctypeslib.as_array(api.llama_get_logits(self._ctx), (n_outputs, self.n_vocab))
                parts.append(logits if self.n_batch >= self.n_ctx else logits.copy())
        out = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return out.reshape(len(chunks), self.n_ctx - first, self.n_vocab)

    def _decode(self, tokens: np.ndarray, positions: np.ndarray, first: int) -> None:
        """tokens: (sequences, positions)"""
        n_seq, n = tokens.shape
        token = np.ascontiguousarray(tokens.reshape(-1))
        pos = np.tile(positions.astype(np.int32), n_seq)
        n_seq_id = np.ones(n_seq * n, dtype=np.int32)
        seq_id = np.repeat(np.arange(n_seq, dtype=np.int32), n)
        seq_id_at = seq_id.ctypes.data + 4 * np.arange(n_seq * n, dtype=np.uintp)
        output = (pos >= first).astype(np.int8)
        batch = self._api.llama_batch()
        batch.n_tokens = n_seq * n
        for name, array in (
            ("token", token), ("pos", pos), ("n_seq_id", n_seq_id), ("seq_id", seq_id_at), ("logits", output),
        ):  # fmt: skip
            kind = dict(self._api.llama_batch._fields_)[name]
            setattr(batch, name, ctypes.cast(array.ctypes.data, kind))
        with self._tap.evaluation() if self._tap is not None else contextlib.nullcontext():
            status = self._api.llama_decode(self._ctx, batch)
            if self._tap is not None:
                self._api.llama_synchronize(self._ctx)
        if status != 0:
            raise errors.error(
                errors.LOAD_FAILED, f"{self.path}: llama.cpp could not evaluate a batch (status {status})"
            )

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> TextModel:
        return self

    def __exit__(self, *unused: Any) -> None:
        self.close()


def _read_text(path: str | os.PathLike) -> bytes:
    text = Path(path).read_bytes()
    if not text:
        raise errors.error(errors.BAD_ARGUMENT, f"{path}: is empty")
    if len(text) > MAX_TEXT:
        raise errors.error(errors.LIMIT, f"{path}: {len(text)} bytes; a text has at most {MAX_TEXT}")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as e:
        raise errors.error(
            errors.BAD_ARGUMENT, f"{path}: is not UTF-8 text: byte {e.start} is 0x{text[e.start]:02x}"
        ) from e
    return text


def add_arguments(parser: argparse.ArgumentParser, n_batch: int, file_required: bool = True) -> None:
    """Options of the tools that evaluate a text, with llama.cpp's names."""
    parser.add_argument("-m", "--model", required=True, metavar="FNAME", help="GGUF model, dense or sparse")
    parser.add_argument("-f", "--file", required=file_required, metavar="FNAME", help="text file")
    parser.add_argument(
        "-c", "--ctx-size", type=int, default=N_CTX, metavar="N", help=f"tokens of a chunk (default: {N_CTX})"
    )
    parser.add_argument("--chunks", type=int, default=-1, metavar="N", help="chunks to evaluate (default: -1, all)")
    parser.add_argument(
        "-b", "--batch-size", type=int, default=n_batch, metavar="N", help=f"tokens per evaluation (default: {n_batch})"
    )
    parser.add_argument(
        "-ub", "--ubatch-size", type=int, default=512, metavar="N", help="tokens per matrix product (default: 512)"
    )
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads (default: all cores)")
    add_gpu_layers(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="show llama.cpp's log")


def open_model(args: argparse.Namespace, n_ctx: int | None = None, consumer: Consumer | None = None) -> TextModel:
    """The model of parsed arguments, once it is clear that there is a text."""
    if args.file is not None:
        _read_text(args.file)
    return TextModel(
        args.model,
        n_ctx or args.ctx_size,
        args.batch_size,
        args.ubatch_size,
        args.threads,
        args.gpu_layers,
        consumer,
        args.verbose,
    )
