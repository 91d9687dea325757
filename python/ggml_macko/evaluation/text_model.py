"""A model opened to evaluate text in chunks, as llama-imatrix and llama-perplexity do: the same tokens and the same
context settings, so that the same libllama gives the same numbers.

A text is tokenized as far as its chunks need, with the special tokens of the vocabulary (BOS), and split into chunks of
n_ctx tokens; the rest is dropped. Each chunk is a new sequence; BOS replaces its first token if the vocabulary has one.
An evaluation takes the chunks whose tokens fit into n_batch and n_ubatch, or a part of a chunk. llama-perplexity takes
n_batch / n_ctx, but llama.cpp moves the logits of all of them, gigabytes for a large vocabulary, if it splits a batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from .. import console, errors, system
from ..evaluation.activations import Consumer, InputTap, Tap
from ..evaluation.tokenizer import Tokenizer, Tokens
from ..native.file import File
from ..regular_files import read_bytes

N_CTX, N_BATCH, N_UBATCH = 512, 2048, 512  # defaults of llama-perplexity

N_CALIBRATION_CHUNKS = 128
"""Chunks of a calibration text, as in the Wanda and SparseGPT papers."""

MAX_TEXT = 2**30
"""Largest number of bytes of a text: llama_tokenize counts tokens in int32."""

Chunks = npt.NDArray[np.int32]
"""Tokens (chunks, n_ctx) of a text."""

Logits = npt.NDArray[np.float32]
"""Logits (..., n_vocab) of positions."""


_remembered: dict[tuple[object, ...], Tokens] = {}
"""The tokens of the last file and text, which each pass of `prune` reads again."""


class EvaluationOptions(TypedDict, total=False):
    """Keyword arguments of every measurement on a text, with the meaning and the defaults that they have in TextModel.
    Measurements put all layers on the GPU (n_gpu_layers=-1) unless told otherwise.
    """

    n_batch: int
    n_ubatch: int
    n_threads: int
    n_gpu_layers: int
    verbose: bool


class Batch(NamedTuple):
    """The chunks of one evaluation."""

    start: int  # index of the first chunk
    chunks: Chunks


class TextModel:
    """A model, dense or sparse, in a separate llama.cpp context.

    n_ctx: tokens per chunk. n_batch: tokens per evaluation (several chunks, one, or a part of one). n_ubatch: tokens
    per matrix product. n_threads: 0: all cores. n_gpu_layers: -1: all. consumer: receives the inputs of matrix
    products; there are no logits then (activations.InputTap). until: weight after whose product evaluations end. tap:
    replaces the consumer; each node is then computed on the device of its weights, never on a GPU that only helps with
    long prompts. verbose: show llama.cpp's log. Raises MackoError (file, memory) or OSError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        n_ctx: int = N_CTX,
        *,
        n_batch: int = N_BATCH,
        n_ubatch: int = N_UBATCH,
        n_threads: int = 0,
        n_gpu_layers: int = 0,
        consumer: Consumer | None = None,
        until: str = "",
        tap: Tap | None = None,
        verbose: bool = False,
    ) -> None:
        import llama_cpp.llama_cpp as api
        from llama_cpp._logger import set_verbose
        from llama_cpp._utils import suppress_stdout_stderr

        from ..native.llama_hook import register

        if not (2 <= n_ctx < 2**31 and 1 <= n_batch < 2**31 and 1 <= n_ubatch < 2**31):
            raise errors.bad_argument(f"a context of {n_ctx} tokens, batches of {n_batch} and {n_ubatch}")
        if not 0 <= n_threads <= system.MAX_THREADS:
            raise errors.bad_argument(f"{n_threads} threads; llama.cpp has at most {system.MAX_THREADS}")
        self._api = api
        self.path = Path(path)
        self.n_ctx = n_ctx
        self.n_seq = max(1, min(n_batch, n_ubatch) // n_ctx)
        self.n_batch = min(n_batch, self.n_seq * n_ctx)
        self._tap = InputTap(consumer, until) if consumer is not None else tap
        self._stack = contextlib.ExitStack()
        set_verbose(verbose)
        register()
        with File(self.path):  # gives clearer errors than llama.cpp
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
            threads = n_threads or system.available_cores()
            params = api.llama_context_default_params()
            params.n_ctx = self.n_seq * n_ctx
            params.n_batch = self.n_batch
            params.n_ubatch = n_ubatch
            params.n_seq_max = self.n_seq
            params.n_threads = params.n_threads_batch = threads
            params.swa_full = False
            if self._tap is not None:
                params.cb_eval = self._tap.callback
            if tap is not None:
                params.op_offload = False
            self._ctx = api.llama_init_from_model(self._model, params)
            if not self._ctx:
                raise errors.error(
                    errors.LOAD_FAILED,
                    f"{path}: llama.cpp could not create a context of {n_ctx} tokens; --verbose shows why",
                )
            on_error.callback(api.llama_free, self._ctx)
            self._vocab = api.llama_model_get_vocab(self._model)
            trained = int(api.llama_model_n_ctx_train(self._model))
            if api.llama_vocab_get_add_eos(self._vocab):
                raise errors.bad_argument(f"{path}: its vocabulary ends each text with EOS; not supported")
            self._stack = on_error.pop_all()
        if n_ctx > trained:
            console.log(f"warning: -c {n_ctx}: the model was trained with {trained} tokens")

    @property
    def n_vocab(self) -> int:
        """Tokens in the vocabulary."""
        return int(self._api.llama_vocab_n_tokens(self._vocab))

    def read_chunks(self, text_path: str | os.PathLike[str], n_chunks: int = -1) -> Chunks:
        """The first n_chunks chunks (chunks, n_ctx) of a UTF-8 file; -1: all.

        Raises MackoError if the text has fewer than two chunks, is empty or is not UTF-8, or OSError.
        """
        return self._chunks(read_text(text_path), text_path, n_chunks)

    def _chunks(self, text: bytes, text_path: str | os.PathLike[str], n_chunks: int, *, evenly: bool = False) -> Chunks:
        warn_of_crlf(text, text_path)
        text = text[:-1] if text.endswith(b"\n") else text  # llama.cpp's tools drop one newline
        tokens = self._tokens(text, -1 if n_chunks < 0 or evenly else max(n_chunks, 2) * self.n_ctx)
        if len(tokens) < 2 * self.n_ctx:
            raise errors.bad_argument(
                f"{text_path}: {len(tokens)} tokens; at least {2 * self.n_ctx} are needed for chunks of {self.n_ctx} "
                "(-c)"
            )
        n = len(tokens) // self.n_ctx
        chunks = tokens[: n * self.n_ctx].reshape(n, self.n_ctx)
        if n_chunks < 0:
            return chunks
        return spread(chunks, n_chunks) if evenly else chunks[:n_chunks]

    def _tokens(self, text: bytes, n: int) -> Tokens:
        """Tokenizer.tokens(), remembered while the same file and text are used."""
        file = os.stat(self.path)
        key = (file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, hashlib.sha256(text).digest(), n)
        if key not in _remembered:
            _remembered.clear()
            _remembered[key] = Tokenizer(self._api, self._model).tokens(text, n)
        return _remembered[key]

    @property
    def first_token(self) -> int | None:
        """The token that the vocabulary adds in front of a sequence, if any."""
        api = self._api
        return int(api.llama_vocab_bos(self._vocab)) if api.llama_vocab_get_add_bos(self._vocab) else None

    def as_sequences(self, chunks: Chunks) -> Chunks:
        """A copy of the chunks with first_token at the start of each chunk."""
        chunks = np.array(chunks, dtype=np.int32)
        if self.first_token is not None:
            chunks[:, 0] = self.first_token
        return chunks

    def batches(self, chunks: Chunks, start: int = 0) -> Iterator[Batch]:
        """Splits chunks into batches for evaluate(), from chunk `start` on. Shows progress."""
        batches = [Batch(i, chunks[i : i + self.n_seq]) for i in range(start, len(chunks), self.n_seq)]
        return console.tracked(batches, self.path.name, lambda b: len(b.chunks), "chunks", start)

    def evaluate(self, chunks: Chunks, first: int = 0) -> Logits:
        """Logits (len(chunks), n_ctx - first, n_vocab) of positions first ... n_ctx - 1.

        chunks: (at most n_seq, n_ctx). The result may be llama.cpp's memory: valid until the next call, and read-only.
        With a consumer, the result has no meaning, and first must be 0, because the last block computes only the
        requested positions. Raises MackoError if llama.cpp fails, and exceptions of the consumer.
        """
        api = self._api
        chunks = self.as_sequences(chunks)
        api.llama_memory_clear(api.llama_get_memory(self._ctx), True)
        parts = []
        for begin in range(0, self.n_ctx, self.n_batch):  # once, unless a chunk is longer than a batch
            positions = np.arange(begin, min(begin + self.n_batch, self.n_ctx))
            self._decode(chunks[:, positions], positions, first)
            n_outputs = len(chunks) * int((positions >= first).sum())
            if n_outputs:
                logits = np.ctypeslib.as_array(api.llama_get_logits(self._ctx), (n_outputs, self.n_vocab))
                parts.append(logits if self.n_batch >= self.n_ctx else logits.copy())
        out = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return out.reshape(len(chunks), self.n_ctx - first, self.n_vocab)

    def _decode(self, tokens: Chunks, positions: npt.NDArray[np.int_], first: int) -> None:
        """Evaluates tokens (sequences, positions), with logits from position `first` on."""
        n_seq, n = tokens.shape
        token = np.ascontiguousarray(tokens.reshape(-1))
        pos = np.tile(positions.astype(np.int32), n_seq)
        n_seq_id = np.ones(n_seq * n, dtype=np.int32)
        seq_id = np.repeat(np.arange(n_seq, dtype=np.int32), n)
        seq_id_at = seq_id.ctypes.data + 4 * np.arange(n_seq * n, dtype=np.uintp)
        output = (pos >= first).astype(np.int8)
        kinds: dict[str, Any] = {field[0]: field[1] for field in self._api.llama_batch._fields_}
        batch = self._api.llama_batch()
        batch.n_tokens = n_seq * n
        for name, array in (
            ("token", token), ("pos", pos), ("n_seq_id", n_seq_id), ("seq_id", seq_id_at), ("logits", output),
        ):  # fmt: skip
            setattr(batch, name, ctypes.cast(array.ctypes.data, kinds[name]))
        with self._tap.evaluation() if self._tap is not None else contextlib.nullcontext():
            status = self._api.llama_decode(self._ctx, batch)
            if self._tap is not None:
                self._api.llama_synchronize(self._ctx)
        if status != 0:
            raise errors.error(
                errors.LOAD_FAILED, f"{self.path}: llama.cpp could not evaluate a batch (status {status})"
            )

    @classmethod
    @contextlib.contextmanager
    def opened_with(
        cls,
        path: str | os.PathLike[str],
        text_path: str | os.PathLike[str],
        n_ctx: int,
        n_chunks: int,
        *,
        evenly: bool = False,
        **options: Any,
    ) -> Iterator[tuple[TextModel, Chunks]]:
        """The model, and the first n_chunks chunks of a text, as of read_chunks(). evenly: n_chunks chunks spread over
        the text. The text is checked before the model is loaded. options: of TextModel.
        """
        text = read_text(text_path)
        with cls(path, n_ctx, **options) as model:
            yield model, model._chunks(text, text_path, n_chunks, evenly=evenly)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> TextModel:
        return self

    def __exit__(self, *unused: Any) -> None:
        self.close()


def spread(chunks: Chunks, n: int) -> Chunks:
    """n evenly spread chunks, or all chunks if there are fewer."""
    n = min(n, len(chunks))
    return chunks[[i * len(chunks) // n for i in range(n)]]


def warn_of_crlf(text: bytes, path: str | os.PathLike[str]) -> None:
    if b"\r\n" in text:
        _warn_of_crlf(os.fspath(path))


@functools.cache  # a command can read a text many times
def _warn_of_crlf(path: str) -> None:
    console.log(f"warning: {path}: lines end in CRLF, which changes the tokens; dos2unix makes them LF")


def read_text(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a UTF-8 file. Raises MackoError if it is empty, too long, or not UTF-8, or OSError."""
    text = read_bytes(path)
    if not text:
        raise errors.bad_argument(f"{path}: is empty")
    if len(text) > MAX_TEXT:
        raise errors.error(errors.LIMIT, f"{path}: {len(text)} bytes; a text has at most {MAX_TEXT}")
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as e:
        raise errors.bad_argument(f"{path}: is not UTF-8 text: byte {e.start} is 0x{text[e.start]:02x}") from e
    return text
