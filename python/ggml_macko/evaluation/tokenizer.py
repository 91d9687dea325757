"""Tokenizes long texts: the tokens of llama_tokenize, in linear time and in threads.

llama_tokenize needs time that grows faster than the text, and returns all tokens or none. So a text is cut into pieces,
at places that no token can cross:

* SPM: no token contains the two characters beside the cut, so no merge joins them. Tokens that the user defined are
  searched for beforehand, and obey the same rule. Some of them remove white space beside them, so white space is beside
  a letter or digit only. In a vocabulary that adds a space in front of a text and after such a token, the piece before
  the cut does not end in the last character of such a token.
* BPE: as SPM, and the cut is between an ASCII letter and a space before another one, where each regular expression of
  llama.cpp ends a word.
* Texts for other kinds of vocabularies are not cut.

A piece is tokenized behind the last character of the piece before it, whose own tokens are dropped: what a vocabulary
adds in front of a text is in front of that character.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import console, errors, system

Tokens = npt.NDArray[np.int32]

PIECE = 8192
"""Bytes of a piece, about: larger ones take longer per byte."""

_TOKEN_NBYTES = 4  # of English text, about

_SPM, _BPE = "llama", ("gpt2", "gemma4")
"""Values of tokenizer.ggml.model."""

_USER_DEFINED = 16  # enum llama_token_attr
_SPACES = (" ", "▁", "Ġ")
"""A space in a text, in the tokens of SPM, and in those of BPE."""


class Tokenizer:
    """The vocabulary of a llama_model. api: llama_cpp.llama_cpp."""

    def __init__(self, api: Any, model: Any) -> None:
        self._api = api
        self._vocab = api.llama_model_get_vocab(model)
        kind = ctypes.create_string_buffer(16)
        api.llama_model_meta_val_str(model, b"tokenizer.ggml.model", kind, len(kind))
        self._kind = kind.value.decode()
        self._may_cut = functools.cache(self._no_token_crosses)
        self._tokens_of_context = functools.cache(lambda context: self._llama_tokenize(context, False))

    def tokens(self, text: bytes, n: int = -1) -> Tokens:
        """The first n tokens of a text (-1: all), after a BOS if the vocabulary adds one. Shows progress.

        text: valid UTF-8; llama.cpp may abort on other text.
        """
        pieces = self._pieces(text)
        n_threads = system.available_cores()
        found: list[Tokens] = []
        n_found = 0
        with (
            ThreadPoolExecutor(n_threads) as pool,
            console.progress("tokenizing", len(text), "B") as advance,
        ):
            while n < 0 or n_found < n:
                n_pieces = n_threads if n < 0 else min(n_threads, 1 + (n - n_found) * _TOKEN_NBYTES // PIECE)
                some = [*itertools.islice(pieces, n_pieces)]
                if not some:
                    break
                for part in pool.map(lambda piece: self._tokens_of_piece(text, *piece), some):
                    found.append(part)
                    n_found += len(part)
                advance(sum(end - begin for begin, end in some))
        tokens = np.concatenate(found)
        return tokens if n < 0 else tokens[:n]

    def _tokens_of_piece(self, text: bytes, begin: int, end: int) -> Tokens:
        if begin == 0:
            return self._llama_tokenize(text[:end], True)
        context = _last_character(text, begin)
        tokens = self._llama_tokenize(context + text[begin:end], False)
        return tokens[len(self._tokens_of_context(context)) :]

    def _llama_tokenize(self, text: bytes, add_special: bool) -> Tokens:
        tokens = np.empty(len(text) + 16, dtype=np.int32)
        for _ in range(2):
            pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            n = int(self._api.llama_tokenize(self._vocab, text, len(text), pointer, len(tokens), add_special, False))
            if n >= 0:
                return tokens[:n].copy()
            tokens = np.empty(-n, dtype=np.int32)  # one byte can become several tokens; -n is the number of tokens
        raise errors.bad_argument("the text could not be tokenized")

    # ---- cuts ----

    def _pieces(self, text: bytes) -> Iterator[tuple[int, int]]:
        """The first and the last byte + 1 of each piece."""
        begin, end = 0, self._cut(text, PIECE)
        yield begin, end
        while end < len(text):
            begin, end = end, self._cut(text, end + PIECE)
            yield begin, end

    def _cut(self, text: bytes, at: int) -> int:
        """The first place from `at` on where the text may be cut, or its end."""
        if self._kind == _SPM or self._kind in _BPE:
            while at < len(text):
                while at < len(text) and text[at] & 0xC0 == 0x80:  # inside of a character
                    at += 1
                around = (_last_character(text, at) + text[at : at + 8]).decode("utf-8", errors="ignore")
                if at < len(text) and self._may_cut(*around[:3].ljust(3, "\0")):
                    return at
                at += 1
        return len(text)

    def _no_token_crosses(self, before: str, after: str, next: str) -> bool:
        """Whether no token crosses the place between the first two of three characters."""
        letters = f"{before}{next}"
        if self._kind in _BPE and not (after == " " and letters.isascii() and letters.isalpha()):
            return False
        if (before.isspace() and not after.isalnum()) or (after.isspace() and not before.isalnum()):
            return False
        if before in self._ends:
            return False
        pairs = itertools.product(*(_SPACES if c in _SPACES else (c,) for c in (before, after)))
        return not any("".join(pair).encode() in self._texts for pair in pairs)

    @functools.cached_property
    def _texts(self) -> bytes:
        """The texts of all tokens."""
        text = self._api.llama_vocab_get_text
        return b"\0".join([text(self._vocab, i) for i in range(self._api.llama_vocab_n_tokens(self._vocab))])

    @functools.cached_property
    def _ends(self) -> set[str]:
        """The last characters of the tokens that the user defined, if a space is added after them."""
        first = self._llama_tokenize(b"a", False)[0]
        if not self._api.llama_vocab_get_text(self._vocab, first).startswith("▁".encode()):
            return set()
        attributes = self._api.llama_vocab_get_attr
        ids = range(self._api.llama_vocab_n_tokens(self._vocab))
        special = [i for i in ids if attributes(self._vocab, i) & _USER_DEFINED]
        texts = [self._api.llama_vocab_get_text(self._vocab, i).decode("utf-8", errors="replace") for i in special]
        ends = {text[-1:] for text in texts}
        return ends | set(_SPACES) if ends & set(_SPACES) else ends


def _last_character(text: bytes, end: int) -> bytes:
    """The UTF-8 character before a byte."""
    begin = end - 1
    while text[begin] & 0xC0 == 0x80:
        begin -= 1
    return text[begin:end]
