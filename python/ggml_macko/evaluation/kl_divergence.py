"""How far a model's predictions are from another's: Kullback-Leibler divergence, token by token, from the base model's
log-probabilities in a file.

llama-perplexity's file, statistics and printed lines (--kl-divergence-base, --kl-divergence). The file holds, little
endian: "_logits_"; i32 n_ctx, n_vocab, n_chunk; the tokens (i32); then for each scored position one row of uint16
codes that stand for log-probabilities: 4 places with f32 scale and f32 offset, n_vocab codes, one of padding where
n_vocab is odd. log p = scale * code + offset; what is e^-16 below the likeliest token is cut off there.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Callable

import numpy as np

from .. import errors
from ..evaluation.likelihood import MIN_CTX, n_scored, scored, sum_exp
from ..evaluation.text_model import TextModel

SIGNATURE = b"_logits_"
MIN_TOKENS = 100  # scored tokens, below which llama-perplexity prints no statistics

_CUT = np.float32(16)  # natural logarithm
_HEADER = struct.Struct("<8siii")


def _row_length(n_vocab: int) -> int:
    """uint16 places of a row."""
    return 2 * ((n_vocab + 1) // 2) + 4


# ---- the base model's file ----


def header(n_ctx: int, n_vocab: int, chunks: np.ndarray) -> bytes:
    """What stands before the rows of codes."""
    return _HEADER.pack(SIGNATURE, n_ctx, n_vocab, len(chunks)) + chunks.astype("<i4").tobytes()


def encode(logits: np.ndarray, tokens: np.ndarray) -> tuple:
    """A likelihood.Scorer: negative log-likelihoods (float64 of float32), rows of the file (uint16)."""
    n, n_vocab = logits.shape
    largest = logits.max(axis=1)
    smallest = np.maximum(logits.min(axis=1), largest - _CUT)
    log_sum_exp = np.log(sum_exp(logits, largest)).astype(np.float32)
    rows = np.zeros((n, _row_length(n_vocab)), dtype="<u2")
    scale = (largest - smallest) / np.float32(65535)
    rows[:, :4] = np.stack([scale, smallest - largest - log_sum_exp], axis=1).astype("<f4").view("<u2")
    with np.errstate(divide="ignore", invalid="ignore"):  # all logits equal: every code is 0
        codes = np.rint((1 / scale)[:, None] * (logits - smallest[:, None]))
    rows[:, 4 : 4 + n_vocab] = np.where((logits > smallest[:, None]) & (scale[:, None] > 0), codes, 0)
    return (largest + log_sum_exp - logits[np.arange(n), tokens]).astype(np.float64), rows


class BaseFile:
    """Log-probabilities of a base model, read chunk by chunk. Raises MackoError naming the file and what is wrong."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._file = open(self.path, "rb")  # noqa: SIM115
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        data = self._file.read(_HEADER.size)
        if not data.startswith(SIGNATURE):
            raise self._bad("does not look like a file of log-probabilities (--kl-divergence-base writes one)")
        if len(data) < _HEADER.size:
            raise self._bad("is truncated")
        _, self.n_ctx, self.n_vocab, n_chunk = _HEADER.unpack(data)
        if not MIN_CTX <= self.n_ctx <= 1 << 24 or not 1 <= self.n_vocab <= 1 << 24 or n_chunk < 1:
            raise self._bad(f"n_ctx {self.n_ctx}, n_vocab {self.n_vocab}, n_chunk {n_chunk} cannot be")
        self._chunk_nbytes = 2 * n_scored(self.n_ctx) * _row_length(self.n_vocab)
        self._data_at = _HEADER.size + 4 * self.n_ctx * n_chunk
        if size != self._data_at + n_chunk * self._chunk_nbytes:
            expected = self._data_at + n_chunk * self._chunk_nbytes
            raise self._bad(f"has {size} bytes, but {n_chunk} chunks take {expected}: it is truncated or damaged")
        tokens = np.frombuffer(self._file.read(4 * self.n_ctx * n_chunk), "<i4")
        if tokens.min() < 0 or tokens.max() >= self.n_vocab:
            raise self._bad(f"holds a token outside 0 ... {self.n_vocab - 1}")
        self.chunks = tokens.reshape(n_chunk, self.n_ctx)

    def _bad(self, text: str) -> errors.MackoError:
        return errors.error(errors.BAD_ARGUMENT, f"{self.path}: {text}")

    def check_vocabulary(self, model_path: str | os.PathLike, n_vocab: int) -> None:
        if n_vocab != self.n_vocab:
            raise self._bad(f"is of a model with {self.n_vocab} tokens in its vocabulary; {model_path} has {n_vocab}")

    def rows(self, chunk: int) -> np.ndarray:
        """uint16 rows of the scored positions of a chunk."""
        self._file.seek(self._data_at + chunk * self._chunk_nbytes)
        data = self._file.read(self._chunk_nbytes)
        if len(data) != self._chunk_nbytes:
            raise self._bad("became shorter while it was read")
        rows = np.frombuffer(data, "<u2").reshape(n_scored(self.n_ctx), -1)
        scales = np.ascontiguousarray(rows[:, :4]).view("<f4")
        if not np.isfinite(scales).all() or (scales[:, 0] < 0).any():
            raise self._bad(f"chunk {chunk + 1}: a scale or offset is not a finite number")
        return rows

    def __enter__(self) -> BaseFile:
        return self

    def __exit__(self, *unused: object) -> None:
        self._file.close()


# ---- comparing ----


def compare(logits: np.ndarray, tokens: np.ndarray, rows: np.ndarray) -> tuple:
    """A likelihood.Scorer: of each position the negative log-likelihoods (model, base; float32), KL divergence
    (float64), change of the token's probability (float32), and whether both models find the same token likeliest."""
    n, n_vocab = logits.shape
    at = np.arange(n)
    scale, offset = np.ascontiguousarray(rows[:, :4]).view("<f4").T
    largest = logits.max(axis=1)
    log_sum_exp = np.log(sum_exp(logits, largest)).astype(np.float32)
    nll = largest + log_sum_exp - logits[at, tokens]

    log_base = scale[:, None] * rows[:, 4 : 4 + n_vocab].astype(np.float32) + offset[:, None]
    nll_base = -log_base[at, tokens]
    p_base = np.exp(log_base.astype(np.float64)).astype(np.float32)
    terms = p_base * (log_base - logits + (largest + log_sum_exp)[:, None])
    kld = np.where(log_base > -_CUT, terms, 0).sum(axis=1, dtype=np.float64)

    p_change = np.exp(-nll.astype(np.float64)).astype(np.float32) - np.exp(-nll_base.astype(np.float64)).astype(
        np.float32
    )
    return nll, nll_base, kld, p_change, logits.argmax(axis=1) == log_base.argmax(axis=1)


def _mean(total: float, total2: float, n: int) -> tuple:
    """(mean, its standard error) from the sums of n values and of their squares"""
    mean = total / n
    variance = total2 / n - mean * mean
    return mean, math.sqrt(variance / (n - 1)) if variance > 0 and n > 10 else 0.0


def _root(x: float) -> float:
    return math.sqrt(max(x, 0.0))


def _percentile(ordered: np.ndarray, percent: float) -> float:
    """Linear interpolation between neighbours, in float32."""
    place = np.float32(percent / 100) * np.float32(len(ordered) - 1)
    i = min(int(place), len(ordered) - 1)  # float32 may round up
    part = np.float32(place - i)
    return float((np.float32(1) - part) * ordered[i] + part * ordered[min(i + 1, len(ordered) - 1)])


def _percentiles(parts: list, percents: list) -> list:
    ordered = np.sort(np.concatenate(parts))
    n = len(ordered)
    median = float(np.float32(0.5) * (ordered[n // 2] + ordered[(n - 1) // 2]))
    return [median if percent == 50 else _percentile(ordered, percent) for percent in percents]


class Divergence:
    """What compare() found, chunk after chunk. Pairs are (value, standard error)."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self._n_same = 0
        self._sums = np.zeros(10)
        self._kld: list = []
        self._p_change: list = []

    def add(self, result: tuple) -> None:
        """result: compare()'s."""
        nll, nll_base, kld, p_change, same_top = result
        squares = (p_change * p_change).astype(np.float64)
        summed = (
            nll,
            nll * nll,
            nll_base,
            nll_base * nll_base,
            nll * nll_base,
            kld,
            kld * kld,
            p_change,
            squares,
            squares**2,
        )
        self._sums += [float(x.sum(dtype=np.float64)) for x in summed]
        self.n_tokens += len(nll)
        self._n_same += int(np.count_nonzero(same_top))
        self._kld.append(kld.astype(np.float32))
        self._p_change.append(p_change)

    def _mean(self, first: int) -> tuple:
        return _mean(self._sums[first], self._sums[first + 1], self.n_tokens)

    @property
    def ppl(self) -> tuple:
        mean, error = self._mean(0)
        return math.exp(mean), math.exp(mean) * error

    @property
    def ppl_base(self) -> tuple:
        mean, error = self._mean(2)
        return math.exp(mean), math.exp(mean) * error

    @property
    def covariance(self) -> float:
        """Of the two mean log-likelihoods."""
        n = self.n_tokens
        if n < 10:
            return 0.0
        return (self._sums[4] / n - self._sums[0] / n * (self._sums[2] / n)) / (n - 1)

    @property
    def correlation(self) -> float:
        product = self._mean(0)[1] * self._mean(2)[1]
        return self.covariance / product if product > 0 else math.nan

    @property
    def log_ratio(self) -> tuple:
        """Of the perplexities."""
        (a, da), (b, db) = self._mean(0), self._mean(2)
        return a - b, _root(da * da + db * db - 2 * self.covariance)

    @property
    def ratio(self) -> tuple:
        value, error = self.log_ratio
        return math.exp(value), math.exp(value) * error

    @property
    def difference(self) -> tuple:
        """Of the perplexities."""
        (p, dp), (q, dq) = self.ppl, self.ppl_base
        return p - q, _root(dp * dp + dq * dq - 2 * p * q * self.covariance)

    @property
    def kld(self) -> tuple:
        return self._mean(5)

    @property
    def p_change(self) -> tuple:
        """Of the probability of the token that came."""
        return self._mean(7)

    @property
    def p_change_rms(self) -> tuple:
        mean, error = self._mean(8)
        return math.sqrt(mean), 0.5 / math.sqrt(mean) * error if mean > 0 else 0.0

    @property
    def same_top(self) -> tuple:
        """Share of the positions where both models find the same token likeliest."""
        share, n = self._n_same / self.n_tokens, self.n_tokens
        return share, math.sqrt(share * (1 - share) / (n - 1)) if n > 1 else 0.0

    def kld_percentiles(self, percents: list) -> list:
        return _percentiles(self._kld, percents)

    def p_change_percentiles(self, percents: list) -> list:
        return _percentiles(self._p_change, percents)

    def line(self) -> str:
        """llama-perplexity's line of a chunk, without its number."""
        return (
            f"    {self.ppl[0]:9.4f} ± {self.ppl[1]:9.4f}    {self.log_ratio[0]:10.5f} ± {self.log_ratio[1]:10.5f}"
            f"    {self.kld[0]:10.5f} ± {self.kld[1]:10.5f}    {100 * self.p_change_rms[0]:6.3f} ± "
            f"{100 * self.p_change_rms[1]:6.3f} %    {100 * self.same_top[0]:6.3f} ± {100 * self.same_top[1]:6.3f} %"
        )

    def text(self) -> str:
        """llama-perplexity's report."""

        def pair(value: tuple) -> str:
            return f"{value[0]:10.6f} ± {value[1]:10.6f}"

        names = {100: "Maximum", 50: "Median ", 0: "Minimum"}
        kld_at = [100, 99.9, 99, 95, 90, 50, 10, 5, 1, 0.1, 0]
        change_at = [100, 99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1, 0]

        def name(percent: float) -> str:
            return names.get(percent, f"{percent:4.1f}%  ")

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
                *(f"{name(at)} KLD: {value:10.6f}" for at, value in zip(kld_at, self.kld_percentiles(kld_at))),
                "",
                "====== Token probability statistics ======",
                f"Mean    Δp: {100 * self.p_change[0]:6.3f} ± {100 * self.p_change[1]:5.3f} %",
                *(
                    f"{name(at)} Δp: {100 * value:6.3f}%"
                    for at, value in zip(change_at, self.p_change_percentiles(change_at))
                ),
                f"RMS Δp    : {100 * self.p_change_rms[0]:6.3f} ± {100 * self.p_change_rms[1]:5.3f} %",
                f"Same top p: {100 * self.same_top[0]:6.3f} ± {100 * self.same_top[1]:5.3f} %",
            ]
        )


def of_file(
    model_path: str | os.PathLike, base_path: str | os.PathLike, n_chunks: int = -1, **options: int
) -> Divergence:
    """Of a model from the one that wrote base_path. options: those of TextModel. Raises MackoError or OSError."""
    with BaseFile(base_path) as base, TextModel(model_path, base.n_ctx, **options) as model:
        return divergence(model, base, n_chunks)


def divergence(
    model: TextModel,
    base: BaseFile,
    n_chunks: int = -1,
    on_chunk: Callable[[int, Divergence], None] = lambda done, so_far: None,
) -> Divergence:
    """model: opened with base.n_ctx. on_chunk is told how many chunks are done and the figures so far."""
    base.check_vocabulary(model.path, model.n_vocab)
    chunks = base.chunks if n_chunks < 0 else base.chunks[:n_chunks]
    if len(chunks) * n_scored(base.n_ctx) < MIN_TOKENS:
        raise errors.error(
            errors.BAD_ARGUMENT,
            f"{base.path}: {len(chunks)} chunks of {base.n_ctx} tokens; at least {MIN_TOKENS} scored tokens are needed",
        )
    found = Divergence()
    for i, result in enumerate(scored(model, chunks, compare, lambda i: (base.rows(i),))):
        found.add(result)
        on_chunk(i + 1, found)
    return found
