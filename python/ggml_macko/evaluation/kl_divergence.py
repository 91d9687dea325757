"""Kullback-Leibler divergence of a model from a base model, token by token. A file has the base model's
log-probabilities.

The file, the statistics and the printed lines are those of llama-perplexity (--kl-divergence-base, --kl-divergence).
The file is little-endian:

    "_logits_"                       8 bytes
    n_ctx, n_vocab, n_chunk          3 x i32
    tokens                           n_chunk * n_ctx x i32
    one row per scored position      f32 scale, f32 offset, n_vocab x u16 code, one u16 of padding if n_vocab is odd

A code means the log-probability scale * code + offset. Log-probabilities are at least that of the likeliest token minus
16.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import errors
from ..evaluation.likelihood import MIN_CTX, Array, Tokens, n_scored, scored, sum_exp
from ..evaluation.text_model import Chunks, Logits, TextModel
from ..regular_files import named, open_regular, read_at

SIGNATURE = b"_logits_"

MIN_TOKENS = 100
"""Smallest number of scored tokens for statistics in llama-perplexity."""

_CUT = np.float32(16)  # natural logarithm
_HEADER = struct.Struct("<8siii")

Rows = npt.NDArray[np.uint16]
"""Rows of the file: uint16 (positions, row length)."""


def _row_length(n_vocab: int) -> int:
    """Length of a row in uint16."""
    return 2 * ((n_vocab + 1) // 2) + 4


# ---- the base model's file ----


def header(n_ctx: int, n_vocab: int, chunks: Chunks) -> bytes:
    """The bytes before the rows. chunks: int32 (chunks, n_ctx)."""
    return _HEADER.pack(SIGNATURE, n_ctx, n_vocab, len(chunks)) + chunks.astype("<i4").tobytes()


class Encoded(NamedTuple):
    nll: npt.NDArray[np.float64]  # (n,) negative log-likelihoods
    rows: Rows  # (n, row length)


def encode(logits: Logits, tokens: Tokens) -> Encoded:
    """A likelihood.Scorer that also makes the rows of the file. logits: float32 (n, n_vocab); tokens: (n,)."""
    n, n_vocab = logits.shape
    largest = logits.max(axis=1)
    smallest = np.maximum(logits.min(axis=1), largest - _CUT)
    log_sum_exp = np.log(sum_exp(logits, largest, exact=True)).astype(np.float32)
    rows = np.zeros((n, _row_length(n_vocab)), dtype="<u2")
    scale = (largest - smallest) / np.float32(65535)
    rows[:, :4] = np.stack([scale, smallest - largest - log_sum_exp], axis=1).astype("<f4").view("<u2")
    with np.errstate(divide="ignore", invalid="ignore"):  # if all logits are equal, the scale is 0, and every code too
        codes = np.rint((1 / scale)[:, None] * (logits - smallest[:, None]))
    rows[:, 4 : 4 + n_vocab] = np.where((logits > smallest[:, None]) & (scale[:, None] > 0), codes, 0)
    return Encoded((largest + log_sum_exp - logits[np.arange(n), tokens]).astype(np.float64), rows)


class BaseFile:
    """Log-probabilities of a base model, read chunk by chunk.

    n_ctx, n_vocab: of the model that wrote the file. chunks: int32 (chunks, n_ctx), the tokens of the text. Raises
    MackoError, with the file and the fault, or OSError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = open_regular(self.path)
        try:
            with named(self.path):
                self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        data = self._read(0, _HEADER.size)
        if not data.startswith(SIGNATURE):
            raise self._bad("does not look like a file of log-probabilities (--kl-divergence-base writes one)")
        if len(data) < _HEADER.size:
            raise self._bad("is truncated")
        self.n_ctx: int
        self.n_vocab: int
        _, self.n_ctx, self.n_vocab, n_chunk = _HEADER.unpack(data)
        if not MIN_CTX <= self.n_ctx <= 1 << 24 or not 1 <= self.n_vocab <= 1 << 24 or n_chunk < 1:
            raise self._bad(f"n_ctx {self.n_ctx}, n_vocab {self.n_vocab}, n_chunk {n_chunk} cannot be")
        self._chunk_nbytes = 2 * n_scored(self.n_ctx) * _row_length(self.n_vocab)
        self._data_at = _HEADER.size + 4 * self.n_ctx * n_chunk
        if size != self._data_at + n_chunk * self._chunk_nbytes:
            expected = self._data_at + n_chunk * self._chunk_nbytes
            raise self._bad(f"has {size} bytes, but {n_chunk} chunks take {expected}: it is truncated or damaged")
        stored = self._read(_HEADER.size, 4 * self.n_ctx * n_chunk)
        if len(stored) != 4 * self.n_ctx * n_chunk:
            raise self._bad("became shorter while it was read")
        tokens = np.frombuffer(stored, np.dtype("<i4"))
        if tokens.min() < 0 or tokens.max() >= self.n_vocab:
            raise self._bad(f"holds a token outside 0 ... {self.n_vocab - 1}")
        self.chunks: Chunks = tokens.reshape(n_chunk, self.n_ctx)

    def _read(self, offset: int, nbytes: int) -> bytearray:
        """The bytes at an offset; fewer at the end of the file."""
        data = bytearray(nbytes)
        with named(self.path):
            del data[read_at(self._file, offset, memoryview(data)) :]
        return data

    def _bad(self, text: str) -> errors.MackoError:
        return errors.bad_argument(f"{self.path}: {text}")

    def check_vocabulary(self, model_path: str | os.PathLike[str], n_vocab: int) -> None:
        """Raises MackoError unless the vocabularies of the model and of the base model have the same size."""
        if n_vocab != self.n_vocab:
            raise self._bad(f"is of a model with {self.n_vocab} tokens in its vocabulary; {model_path} has {n_vocab}")

    def rows(self, chunk: int) -> Rows:
        """The rows of the scored positions of a chunk. Raises MackoError if they are damaged."""
        data = self._read(self._data_at + chunk * self._chunk_nbytes, self._chunk_nbytes)
        if len(data) != self._chunk_nbytes:
            raise self._bad("became shorter while it was read")
        rows: Rows = np.frombuffer(data, np.dtype("<u2")).reshape(n_scored(self.n_ctx), -1)
        scales = np.ascontiguousarray(rows[:, :4]).view("<f4")
        if not np.isfinite(scales).all() or (scales[:, 0] < 0).any():
            raise self._bad(f"chunk {chunk + 1}: a scale or offset is not a finite number")
        return rows

    def __enter__(self) -> BaseFile:
        return self

    def __exit__(self, *unused: object) -> None:
        self._file.close()


# ---- comparing ----


class Comparison(NamedTuple):
    """The differences from the base model at each position; arrays (n,)."""

    nll: npt.NDArray[np.float32]  # negative log-likelihood of the next token of the text
    nll_base: npt.NDArray[np.float32]
    kld: npt.NDArray[np.float64]  # KL(base || model) = sum over the vocabulary of p_base * (log p_base - log p)
    p_change: npt.NDArray[np.float32]  # change of the probability of the next token of the text
    same_top: npt.NDArray[np.bool_]  # the same token is likeliest in both models


def compare(logits: Logits, tokens: Tokens, rows: Rows) -> Comparison:
    """A likelihood.Scorer. logits: float32 (n, n_vocab) of the model; tokens: (n,); rows: those of the base model.

    Sums are float64 and everything else float32, as in llama-perplexity.
    """
    n, n_vocab = logits.shape
    at = np.arange(n)
    scale, offset = np.ascontiguousarray(rows[:, :4]).view("<f4").T
    largest = logits.max(axis=1)
    log_sum_exp = np.log(sum_exp(logits, largest, exact=True)).astype(np.float32)
    nll = largest + log_sum_exp - logits[at, tokens]

    log_base = scale[:, None] * rows[:, 4 : 4 + n_vocab].astype(np.float32) + offset[:, None]
    nll_base = -log_base[at, tokens]
    p_base = np.exp(log_base.astype(np.float64)).astype(np.float32)
    terms = p_base * (log_base - logits + (largest + log_sum_exp)[:, None])
    kld = np.where(log_base > -_CUT, terms, 0).sum(axis=1, dtype=np.float64)

    p = np.exp(-nll.astype(np.float64)).astype(np.float32)
    p_change = p - np.exp(-nll_base.astype(np.float64)).astype(np.float32)
    return Comparison(nll, nll_base, kld, p_change, logits.argmax(axis=1) == log_base.argmax(axis=1))


class Measured(NamedTuple):
    """A figure and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class _Sum:
    """The sums of values and of their squares."""

    total: float = 0.0
    total2: float = 0.0

    def plus(self, values: Array, squares: Array) -> _Sum:
        return _Sum(
            self.total + float(values.sum(dtype=np.float64)), self.total2 + float(squares.sum(dtype=np.float64))
        )

    def mean(self, n: int) -> Measured:
        """The mean of n values, with an error for more than ten."""
        mean = self.total / n
        variance = self.total2 / n - mean * mean
        return Measured(mean, math.sqrt(variance / (n - 1)) if variance > 0 and n > 10 else 0.0)


def _root(x: float) -> float:
    return math.sqrt(max(x, 0.0))


def _exp(x: Measured) -> Measured:
    return Measured(math.exp(x.value), math.exp(x.value) * x.error)


def _percentile(ordered: npt.NDArray[np.float32], percent: float) -> float:
    """Linear interpolation between neighbours, in float32."""
    place = np.float32(percent / 100) * np.float32(len(ordered) - 1)
    i = min(int(place), len(ordered) - 1)  # float32 may round up
    part = np.float32(place - i)
    return float((np.float32(1) - part) * ordered[i] + part * ordered[min(i + 1, len(ordered) - 1)])


def _percentiles(parts: Sequence[npt.NDArray[np.float32]], percents: Sequence[float]) -> list[float]:
    ordered = np.sort(np.concatenate(parts))
    n = len(ordered)
    median = float(np.float32(0.5) * (ordered[n // 2] + ordered[(n - 1) // 2]))
    return [median if percent == 50 else _percentile(ordered, percent) for percent in percents]


_KLD_PERCENTS = (100, 99.9, 99, 95, 90, 50, 10, 5, 1, 0.1, 0)
_P_CHANGE_PERCENTS = (100, 99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1, 0)


@dataclass(frozen=True, eq=False)
class Divergence:
    """Statistics of the comparisons of all scored tokens."""

    n_tokens: int = 0
    _n_same_top: int = field(default=0, repr=False)
    _nll: _Sum = field(default=_Sum(), repr=False)
    _nll_base: _Sum = field(default=_Sum(), repr=False)
    _nll_product: float = field(default=0.0, repr=False)
    _kld: _Sum = field(default=_Sum(), repr=False)
    _p_change: _Sum = field(default=_Sum(), repr=False)
    _p_change2: _Sum = field(default=_Sum(), repr=False)
    _all_kld: tuple[npt.NDArray[np.float32], ...] = field(default=(), repr=False)  # of each chunk
    _all_p_change: tuple[npt.NDArray[np.float32], ...] = field(default=(), repr=False)

    def plus(self, found: Comparison) -> Divergence:
        """The statistics with one more chunk."""
        squares = (found.p_change * found.p_change).astype(np.float64)
        return Divergence(
            n_tokens=self.n_tokens + len(found.nll),
            _n_same_top=self._n_same_top + int(np.count_nonzero(found.same_top)),
            _nll=self._nll.plus(found.nll, found.nll * found.nll),
            _nll_base=self._nll_base.plus(found.nll_base, found.nll_base * found.nll_base),
            _nll_product=self._nll_product + float((found.nll * found.nll_base).sum(dtype=np.float64)),
            _kld=self._kld.plus(found.kld, found.kld * found.kld),
            _p_change=self._p_change.plus(found.p_change, squares),
            _p_change2=self._p_change2.plus(squares, squares**2),
            _all_kld=(*self._all_kld, found.kld.astype(np.float32)),
            _all_p_change=(*self._all_p_change, found.p_change),
        )

    @property
    def _log_ppl(self) -> Measured:
        return self._nll.mean(self.n_tokens)

    @property
    def _log_ppl_base(self) -> Measured:
        return self._nll_base.mean(self.n_tokens)

    @property
    def ppl(self) -> Measured:
        """Perplexity of the model."""
        return _exp(self._log_ppl)

    @property
    def ppl_base(self) -> Measured:
        """Perplexity of the base model."""
        return _exp(self._log_ppl_base)

    @property
    def covariance(self) -> float:
        """Covariance of the two mean log-likelihoods."""
        n = self.n_tokens
        if n < 10:
            return 0.0
        return (self._nll_product / n - self._nll.total / n * (self._nll_base.total / n)) / (n - 1)

    @property
    def correlation(self) -> float:
        """Correlation of the two mean log-likelihoods; NaN if one of them is constant."""
        product = self._log_ppl.error * self._log_ppl_base.error
        return self.covariance / product if product > 0 else math.nan

    @property
    def log_ratio(self) -> Measured:
        """Logarithm of the ratio of the perplexities, model over base."""
        (a, da), (b, db) = self._log_ppl, self._log_ppl_base
        return Measured(a - b, _root(da * da + db * db - 2 * self.covariance))

    @property
    def ratio(self) -> Measured:
        """Ratio of the perplexities, model over base."""
        return _exp(self.log_ratio)

    @property
    def difference(self) -> Measured:
        """Difference of the perplexities, model minus base."""
        (p, dp), (q, dq) = self.ppl, self.ppl_base
        return Measured(p - q, _root(dp * dp + dq * dq - 2 * p * q * self.covariance))

    @property
    def kld(self) -> Measured:
        """Mean Kullback-Leibler divergence, in nats."""
        return self._kld.mean(self.n_tokens)

    @property
    def p_change(self) -> Measured:
        """Mean change of the probability of the next token of the text."""
        return self._p_change.mean(self.n_tokens)

    @property
    def p_change_rms(self) -> Measured:
        """Root of the mean square of that change."""
        mean, error = self._p_change2.mean(self.n_tokens)
        return Measured(math.sqrt(mean), 0.5 / math.sqrt(mean) * error if mean > 0 else 0.0)

    @property
    def same_top(self) -> Measured:
        """Share of the positions at which the same token is likeliest in both models."""
        n = self.n_tokens
        share = self._n_same_top / n
        return Measured(share, math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else 0.0)

    def kld_percentiles(self, percents: Sequence[float]) -> list[float]:
        """Percentiles of the divergence of single tokens. percents: from 0 to 100."""
        return _percentiles(self._all_kld, percents)

    def p_change_percentiles(self, percents: Sequence[float]) -> list[float]:
        """Percentiles of the change of the probability of single tokens. percents: from 0 to 100."""
        return _percentiles(self._all_p_change, percents)

    def as_json(self) -> dict[str, object]:
        """Means with standard errors, and the largest divergence of a token; None for NaN, which JSON lacks."""
        numbers: dict[str, object] = {"n_tokens": self.n_tokens}
        for name in ("ppl", "ppl_base", "log_ratio", "kld", "p_change", "p_change_rms", "same_top"):
            value, error = getattr(self, name)
            numbers[name] = value if math.isfinite(value) else None
            numbers[f"{name}_error"] = error if math.isfinite(error) else None
        return {**numbers, "kld_max": self.kld_percentiles([100])[0]}

    def line(self) -> str:
        """llama-perplexity's line for a chunk, without its number."""
        return (
            f"    {self.ppl.value:9.4f} ± {self.ppl.error:9.4f}"
            f"    {self.log_ratio.value:10.5f} ± {self.log_ratio.error:10.5f}"
            f"    {self.kld.value:10.5f} ± {self.kld.error:10.5f}"
            f"    {100 * self.p_change_rms.value:6.3f} ± {100 * self.p_change_rms.error:6.3f} %"
            f"    {100 * self.same_top.value:6.3f} ± {100 * self.same_top.error:6.3f} %"
        )

    def text(self) -> str:
        """llama-perplexity's report."""

        def pair(x: Measured) -> str:
            return f"{x.value:10.6f} ± {x.error:10.6f}"

        def share(x: Measured) -> str:
            return f"{100 * x.value:6.3f} ± {100 * x.error:5.3f} %"

        def name(percent: float) -> str:
            names: dict[float, str] = {100: "Maximum", 50: "Median ", 0: "Minimum"}
            return names.get(percent, f"{percent:4.1f}%  ")

        klds = zip(_KLD_PERCENTS, self.kld_percentiles(_KLD_PERCENTS))
        changes = zip(_P_CHANGE_PERCENTS, self.p_change_percentiles(_P_CHANGE_PERCENTS))
        return "\n".join(
            [
                "====== Perplexity statistics ======",
                f"Mean PPL(Q)                   : {pair(self.ppl)}",
                f"Mean PPL(base)                : {pair(self.ppl_base)}",
                f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * self.correlation:6.2f}%",
                f"Mean ln(PPL(Q)/PPL(base))     : {pair(self.log_ratio)}",
                f"Mean PPL(Q)/PPL(base)         : {pair(self.ratio)}",
                f"Mean PPL(Q)-PPL(base)         : {pair(self.difference)}",
                "",
                "====== KL divergence statistics ======",
                f"Mean    KLD: {pair(self.kld)}",
                *(f"{name(at)} KLD: {value:10.6f}" for at, value in klds),
                "",
                "====== Token probability statistics ======",
                f"Mean    Δp: {share(self.p_change)}",
                *(f"{name(at)} Δp: {100 * value:6.3f}%" for at, value in changes),
                f"RMS Δp    : {share(self.p_change_rms)}",
                f"Same top p: {share(self.same_top)}",
            ]
        )


def divergence(
    model: TextModel,
    base: BaseFile,
    n_chunks: int = -1,
    on_chunk: Callable[[int, Divergence], None] | None = None,
) -> Divergence:
    """Divergence of a model from the base model, on the first n_chunks chunks of the base file's text (-1: all).

    model: opened with base.n_ctx. on_chunk: called after each chunk with its number and the statistics so far.
    Raises MackoError if the vocabularies differ or fewer than MIN_TOKENS tokens are scored.
    """
    base.check_vocabulary(model.path, model.n_vocab)
    chunks = base.chunks if n_chunks < 0 else base.chunks[:n_chunks]
    if len(chunks) * n_scored(base.n_ctx) < MIN_TOKENS:
        raise errors.bad_argument(
            f"{base.path}: {len(chunks)} chunks of {base.n_ctx} tokens; at least {MIN_TOKENS} scored tokens are needed"
        )
    found = Divergence()

    def rows_of(chunk: int) -> tuple[Array, ...]:
        return (base.rows(chunk),)

    for i, result in enumerate(scored(model, chunks, compare, rows_of)):
        found = found.plus(Comparison(*result))
        if on_chunk is not None:
            on_chunk(i + 1, found)
    return found
