"""Evaluates a calibration text with PyTorch on a GPU, and passes the inputs of matrix products to consumers.

If PyTorch and CuPy find a GPU and transformer.py supports the model, statistics stay on the GPU; otherwise gather()
does nothing, and llama.cpp evaluates the text. Products are float32, so sums differ from llama.cpp's only because it
rounds activations to F16. The whole models are in GPU memory, in the types of their files.
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
"""Approximate number of tokens per evaluation."""


class Reader(NamedTuple):
    """A model and the receiver of the inputs of its matrix products."""

    path: Path
    consumer: Consumer


def device_for(options: ParsedOptions) -> torch.device | None:
    """The PyTorch device of a GPU that PyTorch and CuPy find, if the options allow one."""
    if options.device == "none" or array_backend.gpu() is None:
        return None
    with contextlib.suppress(ImportError):
        torch = importlib.import_module("torch")
        if torch.cuda.is_available():
            device: Any = torch.device("cuda")
            return device
    return None


def free_memory(options: ParsedOptions) -> float:
    """Bytes for sums on the GPU; infinite if sums are in host memory."""
    if device_for(options) is None:
        return math.inf
    free: int = importlib.import_module("torch").cuda.mem_get_info()[0]
    return free / 2


def gather(readers: Sequence[Reader], options: ParsedOptions, *, until: str = "") -> int | None:
    """Evaluates evenly spread chunks of the options' text with each model, up to the weight `until` and the weights
    with the same input, whose order may differ in llama.cpp.

    Returns the number of chunks, or None without a GPU or if transformer.py does not support the first model. Raises
    MackoError or OSError.
    """
    device = device_for(options)
    return None if device is None else gather_on(device, readers, options, until=until)


def gather_on(
    device: torch.device, readers: Sequence[Reader], options: ParsedOptions, *, until: str = ""
) -> int | None:
    """gather() on a PyTorch device."""
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
    """Models of _listening_class() on a device, and the options' text."""

    models: list[Any]
    sequences: Chunks


def _open(paths: Sequence[Path], options: ParsedOptions, device: torch.device) -> _Opened | None:
    """None if PyTorch's results for the first model are not llama.cpp's. Raises MackoError or OSError."""
    from ..evaluation.transformer import Shape, read_weights

    listening = _listening_class()
    models = []
    for path in paths:
        with Model(path) as model:
            try:
                shape = Shape.of(model)
                if shape.n_experts_used:  # their inputs differ between experts
                    raise errors.error(errors.UNSUPPORTED_ARCH, f"{path}: has experts")
                models.append(listening(shape, read_weights(model, device, None)))
            except errors.MackoError as e:
                if e.code != errors.UNSUPPORTED_ARCH:
                    raise
                console.detail(f"{e}; llama.cpp evaluates the text")
                return None
    sequences = _text_for(models[0], paths[0], options, device)
    return None if sequences is None else _Opened(models, sequences)


_known: dict[tuple[object, ...], Chunks | None] = {}  # the last model and text, which every pass reads again


def _text_for(model: Any, path: Path, options: ParsedOptions, device: torch.device) -> Chunks | None:
    """The tokens of the options' text, or None if the logits of the model are not llama.cpp's."""
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
    """Losses on n_chunks evenly spread chunks of the options' text; None as for gather()."""
    device = device_for(options)
    return None if device is None else open_losses_on(device, model, options, n_chunks)


def open_losses_on(device: torch.device, model: Model, options: ParsedOptions, n_chunks: int) -> Losses | None:
    """open_losses() on a PyTorch device."""
    opened = _open([model.path], options, device)
    return None if opened is None else Losses(opened.models[0], spread(opened.sequences, n_chunks), device)


class Losses:
    """The loss of a model on some chunks, also with changed weights in one tensor."""

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

        first = self._chunks.shape[1] // 2  # the tokens that llama-perplexity scores
        total = 0.0
        with torch.no_grad():
            for chunk in self._chunks:
                tokens = as_tokens(chunk[None], self._device)
                logits = self._model.logits(tokens)[0, first:-1]
                total += float(F.cross_entropy(logits, tokens[0, first + 1 :]).double())
        return total / len(self._chunks)


def _listening_class() -> Any:
    """A subclass of Transformer, defined here because PyTorch is optional."""
    import torch.nn.functional as F

    from ..evaluation.activations import Weight
    from ..evaluation.transformer import Transformer

    class Listening(Transformer):
        """Passes the inputs of matrix products to a consumer."""

        consumer: Consumer | None = None
        until = ""
        last_input: torch.Tensor | None = None  # the input of `until`, when known

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
    """Ends an evaluation whose remaining inputs are not needed."""
