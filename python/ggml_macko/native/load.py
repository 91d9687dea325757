"""Loads into llama.cpp: begin, llama_model_load_from_file_ptr(stream), end, all on one thread."""

from __future__ import annotations

import os
from typing import Any

from .library import check, ffi, lib


class Load:
    """A load in progress on this thread. `stream` is the address of the FILE that serves the dense GGUF."""

    def __init__(
        self,
        path: str | os.PathLike[str] | bytes,
        compress: bool = False,
        no_alloc: bool = False,
        keep_negative_zeros: bool = False,
    ):
        out = ffi().new("struct ggml_macko_load **")
        stream = ffi().new("FILE **")
        flags = (
            (lib().GGML_MACKO_LOAD_COMPRESS if compress else 0)
            | (lib().GGML_MACKO_LOAD_NO_ALLOC if no_alloc else 0)
            | (lib().GGML_MACKO_LOAD_KEEP_NEGATIVE_ZEROS if keep_negative_zeros else 0)
        )
        check(lib().ggml_macko_load_begin(os.fsencode(path), flags, out, stream))
        self._c: Any = out[0]
        self.stream = int(ffi().cast("uintptr_t", stream[0]))

    def end(self, model_loaded: bool, with_weights: bool) -> None:
        """Closes the stream and raises the first error of the load, if there was one; the caller frees the model."""
        load, self._c = self._c, None
        check(lib().ggml_macko_load_end(load, model_loaded, with_weights))
