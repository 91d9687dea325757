"""Evaluates a calibration text with PyTorch on a GPU, and hands the inputs of matrix products to consumers there.

Where PyTorch and CuPy find a GPU and transformer.py knows the model, statistics never leave the GPU; elsewhere gather()
does nothing, and llama.cpp evaluates the text. Products are float32: no sum differs from llama.cpp's by more than the
activations that it rounds to F16. The models lie on the GPU whole, in the types of their files.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import console, errors
from ..evaluation.activations import Consumer
from ..evaluation.text_model import Chunks, TextModel, spread
from ..gguf.files import Model, Tensor
from ..pruning import array_backend
from ..pruning.masks import Bits
from ..pruning.options import ParsedOptions

if TYPE_CHECKING:
    import torch

_N_TOKENS = 8192
"""Tokens that are evaluated together, about."""


class Reader(NamedTuple):
    """A model, and what takes the inputs of its matrix products."""

    path: Path
    consumer: Consumer


def device_for(options: ParsedOptions) -> torch.device | None:
    """The GPU that PyTorch and CuPy find, if the options allow one; a device of PyTorch's."""
    if options.device == "none" or array_backend.gpu() is None:
        return None
    with contextlib.suppress(ImportError):
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            device: Any = torch.device("cuda")
            return device
    return None


def free_memory(options: ParsedOptions) -> float:
    """Bytes for sums on the GPU; infinite where none are kept there."""
    if device_for(options) is None:
        return math.inf
    free: int = importlib.import_module("torch").cuda.mem_get_info()[0]
    return free / 2


def gather(readers: Sequence[Reader], options: ParsedOptions, *, until: str = "") -> int | None:
    """Evaluates chunks of the options' text, spread evenly over it, with each model in turn, as far as the weight
    `until` and those that read the same input, which llama.cpp may multiply with in another order.

    Returns the number of chunks, or None if there is no GPU for it, or the first model is another than transformer.py
    knows. Raises MackoError or OSError.
    """
    device = device_for(options)
    return None if device is None else gather_on(device, readers, options, until=until)


def gather_on(
    device: torch.device, readers: Sequence[Reader], options: ParsedOptions, *, until: str = ""
) -> int | None:
    """gather() with a device of PyTorch's."""
    import torch

    from ..evaluation.transformer import as_tokens

    opened = _open([reader.path for reader in readers], options, device)
    if opened is None:
        return None
    step = max(1, _N_TOKENS // options.n_ctx)
    sequences = opened.sequences
    batches: list[Chunks] = [sequences[i : i + step] for i in range(0, len(sequences), step)]
    with torch.no_grad():
        for batch in console.tracked(batches, readers[0].path.name, len, "chunks"):
            for model, reader in zip(opened.models, readers):
                model.listen(as_tokens(batch, device), reader.consumer, until)
    return len(sequences)


class _Opened(NamedTuple):
    """Models on a device, of the class of _listening_class(), and the options' text for them."""

    models: list[Any]
    sequences: Chunks


def _open(paths: Sequence[Path], options: ParsedOptions, device: torch.device) -> _Opened | None:
    """None if the first model is not one that PyTorch evaluates as llama.cpp does. Raises MackoError or OSError."""
    from ..evaluation.transformer import Shape, read_weights

    listening = _listening_class()
    models = []
    for path in paths:
        with Model(path) as model:
            try:
                models.append(listening(Shape.of(model), read_weights(model, device, None)))
            except errors.MackoError as e:
                if e.code != errors.UNSUPPORTED_ARCH:
                    raise
                console.detail(f"{e}; llama.cpp evaluates the text")
                return None
    sequences = _text_for(models[0], paths[0], options, device)
    return None if sequences is None else _Opened(models, sequences)


_known: dict[tuple[object, ...], Chunks | None] = {}  # of the last model and text: passes read the same again and again


def _text_for(model: Any, path: Path, options: ParsedOptions, device: torch.device) -> Chunks | None:
    """The options' text in tokens, or None if the logits of the model are not llama.cpp's."""
    from ..evaluation.transformer import MAX_DIVERGENCE, divergence_from_llama_cpp

    assert options.text is not None
    files = [(str(p), s.st_ino, s.st_size, s.st_mtime_ns) for p in (path, Path(options.text)) for s in [p.stat()]]
    key = (*files, options.n_ctx, options.n_chunks, str(device))
    if key not in _known:
        _known.clear()
        settings: dict[str, Any] = {"n_batch": options.n_ctx, "n_threads": options.n_threads}
        with TextModel.opened_with(path, options.text, options.n_ctx, options.n_chunks, evenly=True, **settings) as (
            llama,
            chunks,
        ):
            found = divergence_from_llama_cpp(llama, model, chunks[:1], device)
            agrees = found <= MAX_DIVERGENCE
            if not agrees:
                console.log(f"{path}: PyTorch's logits differ from llama.cpp's, which evaluates the text")
            _known[key] = llama.as_sequences(chunks) if agrees else None
    return _known[key]


def open_losses(model: Model, options: ParsedOptions, n_chunks: int) -> Losses | None:
    """Losses on n_chunks of the options' text, spread over it; None as for gather()."""
    device = device_for(options)
    return None if device is None else open_losses_on(device, model, options, n_chunks)


def open_losses_on(device: torch.device, model: Model, options: ParsedOptions, n_chunks: int) -> Losses | None:
    """open_losses() with a device of PyTorch's."""
    opened = _open([model.path], options, device)
    return None if opened is None else Losses(opened.models[0], spread(opened.sequences, n_chunks), device)


class Losses:
    """The loss of a model on some chunks, and with other weights in one tensor."""

    def __init__(self, model: Any, chunks: Chunks, device: torch.device) -> None:
        self._model = model
        self._chunks = chunks
        self._device = device
        self.dense = self._measure()

    def with_weights(self, t: Tensor, bits: Bits) -> float:
        """The mean negative log-likelihood if the tensor has these weights."""
        from ..evaluation.transformer import as_values

        before = self._model.weights[t.name]
        self._model.weights[t.name] = as_values(bits, t.type).reshape(before.shape).to(self._device)
        found = self._measure()
        self._model.weights[t.name] = before
        return found

    def close(self) -> None:
        self._model = None

    def _measure(self) -> float:
        import torch
        import torch.nn.functional as F

        from ..evaluation.transformer import as_tokens

        first = self._chunks.shape[1] // 2  # llama-perplexity's choice of tokens
        total = 0.0
        with torch.no_grad():
            for chunk in self._chunks:
                tokens = as_tokens(chunk[None], self._device)
                logits = self._model.logits(tokens)[0, first:-1]
                total += float(F.cross_entropy(logits, tokens[0, first + 1 :]).double())
        return total / len(self._chunks)


def _listening_class() -> Any:
    """A class, made once PyTorch is known to be there."""
    import torch.nn.functional as F

    from ..evaluation.activations import Weight
    from ..evaluation.transformer import Transformer

    class Listening(Transformer):
        """Hands the inputs of matrix products to a consumer."""

        consumer: Consumer | None = None
        until = ""
        last_input: torch.Tensor | None = None  # that of `until`, once it is known

        def listen(self, tokens: torch.Tensor, consumer: Consumer, until: str) -> None:
            self.consumer, self.until = consumer, until
            with contextlib.suppress(_Done):
                x = self.embed(tokens)
                for layer in range(self.shape.n_layers):
                    x = self.block(layer, x)
            self.consumer = self.last_input = None

        def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
            weight = self.weights[f"{name}.weight"]
            if self.consumer is not None:
                if self.last_input is not None and x is not self.last_input:
                    raise _Done
                if self.consumer.wants(f"{name}.weight"):
                    rows = x.float().reshape(-1, x.shape[-1]).contiguous()
                    taken = Weight(f"{name}.weight", rows.shape[1], 1, False)
                    self.consumer.take(taken, 0, array_backend.from_torch(rows))
                if self.until == f"{name}.weight":
                    self.last_input = x
            return F.linear(x, weight.float()) + self.weights.get(f"{name}.bias", 0)

    return Listening


class _Done(Exception):
    """No more inputs are wanted of this evaluation."""
