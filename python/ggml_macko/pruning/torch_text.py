"""Evaluates a calibration text with PyTorch, and passes the inputs of matrix products to consumers.

If PyTorch and CuPy find a GPU and transformer.py supports the model, statistics stay on the GPU, which has the whole
models in the types of their files. Without a GPU, PyTorch evaluates the text on the CPU if many passes read it and half
of the memory has room for the models in float32, because it can continue a pass where the last one ended. Otherwise
Session.gather() does nothing, and llama.cpp evaluates the text. Products are float32, so sums differ from llama.cpp's
only because it rounds activations to F16.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import console, errors, system
from ..evaluation.activations import Consumer
from ..evaluation.text_model import Chunks, TextModel, spread
from ..gguf.files import Model, Tensor
from ..pruning import allocation, array_backend
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
    """The PyTorch device that evaluates the text: a GPU that PyTorch and CuPy find, if the options allow one, or the
    CPU if many passes read the text. None without PyTorch and for other options.
    """
    may_use_gpu = options.device != "none" and array_backend.gpu() is not None
    if may_use_gpu or options.repeats_text:
        with contextlib.suppress(ImportError):
            torch: Any = importlib.import_module("torch")
            if may_use_gpu and torch.cuda.is_available():
                return torch.device("cuda")
            if options.repeats_text:
                return torch.device("cpu")
    return None


def free_memory(options: ParsedOptions) -> float:
    """Half of the free bytes on the GPU; infinite without a GPU."""
    device = device_for(options)
    if device is None or device.type == "cpu":
        return math.inf
    free: int = importlib.import_module("torch").cuda.mem_get_info()[0]
    return free / 2


def _fits_host(paths: Sequence[Path]) -> bool:
    """Whether the models fit, in float32, into half of the memory. It must be all memory, not what is free, so that a
    run that is started again evaluates the text as before.
    """
    n_weights = 0
    for path in paths:
        with Model(path) as model:
            n_weights += sum(t.n_elements for t in model.tensors)
    return 4 * n_weights <= system.total_memory() // 2


class Session:
    """Evaluations of the options' text with PyTorch, in the passes of one run.

    The models stay in memory, with the hidden states at the start of the block that a pass begins with, if both take at
    most half of the free memory of a GPU; otherwise each pass reads the models and starts with the first block. The
    results are the same. The caller reports changes of the models to renew().
    """

    def __init__(self, options: ParsedOptions, device: torch.device | None = None) -> None:
        """device: of PyTorch; None: that of device_for(), if any."""
        self._options = options
        self._device = device_for(options) if device is None else device
        self._kept: dict[Path, _Evaluation] = {}

    def gather(self, readers: Sequence[Reader]) -> int | None:
        """Evaluates evenly spread chunks of the text with each model, as far as the consumers need.

        Returns the number of chunks, or None without a device or if transformer.py does not support the first model.
        Raises MackoError or OSError.
        """
        evaluations = self._evaluations([reader.path for reader in readers])
        if evaluations is None:
            return None
        batches = evaluations[0].batches
        for i in console.tracked(range(len(batches)), readers[0].path.name, lambda i: len(batches[i]), "chunks"):
            for evaluation, reader in zip(evaluations, readers):
                evaluation.listen(i, reader.consumer)
        return sum(map(len, batches))

    def losses(self, model: Path, n_chunks: int) -> Losses | None:
        """Losses on n_chunks evenly spread chunks of the text; None and errors as for gather()."""
        evaluations = self._evaluations([model])
        if evaluations is None:
            return None
        chunks = spread(np.concatenate(evaluations[0].batches), n_chunks)
        return Losses(_Evaluation(evaluations[0].model, self._batches_of(chunks), self._device, True))

    def renew(self, path: Path, t: Tensor, bits: Bits) -> None:
        """Changes the weights of a tensor as in the file of a model."""
        if path in self._kept:
            self._kept[path].renew(t, bits)

    def _evaluations(self, paths: Sequence[Path]) -> list[_Evaluation] | None:
        if self._device is None:
            return None
        if not self._kept.keys() >= set(paths):
            limit = free_memory(self._options)
            fits = self._device.type != "cpu" or _fits_host(paths)
            opened = _open(paths, self._options, self._device) if fits else None
            if opened is None:
                self._device = None  # in all passes
                return None
            models, sequences = opened
            batches = self._batches_of(sequences)
            weights = sum(w.nbytes for model in models for w in model.weights.values())
            fits = weights + len(models) * 4 * sequences.size * models[0].shape.n_embd <= limit
            evaluations = [_Evaluation(model, batches, self._device, fits) for model in models]
            if not fits:
                return evaluations
            self._kept = dict(zip(paths, evaluations))
        return [self._kept[path] for path in paths]

    def _batches_of(self, chunks: Chunks) -> list[Chunks]:
        """The chunks of each evaluation."""
        step = max(1, _N_TOKENS // self._options.n_ctx)
        return [chunks[i : i + step] for i in range(0, len(chunks), step)]


class _Evaluation:
    """A model and batches of tokens that it evaluates."""

    def __init__(self, model: Any, batches: Sequence[Chunks], device: torch.device, keeps_states: bool) -> None:
        """keeps_states: of each batch, from which an evaluation of the same or later blocks continues."""
        self.model = model
        self.batches = batches
        self._device = device
        self._keeps_states = keeps_states
        self._states: dict[int, _State] = {}  # by batch

    def tokens(self, i: int) -> torch.Tensor:
        """Batch i for the model."""
        from ..evaluation.transformer import as_tokens

        return as_tokens(self.batches[i], self._device)

    def before(self, layer: int, i: int) -> torch.Tensor:
        """The hidden states of batch i before a block."""
        start = self._states.get(i)
        if start is None or start.layer > layer:
            start = _State(0, self.model.embed(self.tokens(i)))
        x = start.x
        for k in range(start.layer, layer):
            x = self.model.block(k, x)
        if self._keeps_states and layer > 0:
            self._states[i] = _State(layer, x)
        return x

    def listen(self, i: int, consumer: Consumer) -> None:
        """Passes the inputs of the weights that a consumer wants, while the model evaluates batch i."""
        import torch

        block_of = {name: allocation.block_of(name) for name in self.model.weights if consumer.wants(name)}
        layers = {block for block in block_of.values() if block != allocation.AFTER_ALL_BLOCKS}
        if layers:
            blocks = range(min(layers), max(layers) + 1)
            with torch.no_grad():
                self.model.listen(self.before(blocks[0], i), blocks, consumer, set(block_of))

    def renew(self, t: Tensor, bits: Bits) -> torch.Tensor:
        """Changes the weights of a tensor. Returns the weights before."""
        from ..evaluation.transformer import as_values

        before: torch.Tensor = self.model.weights[t.name]
        self.model.weights[t.name] = as_values(bits, t.type).reshape(before.shape).to(before)
        first = _first_block(t.name)
        self._states = {i: state for i, state in self._states.items() if state.layer <= first}
        return before


class _State(NamedTuple):
    """Hidden states before a block."""

    layer: int
    x: torch.Tensor


class _Opened(NamedTuple):
    """Models of _listening_class() on a device, and the options' text."""

    models: list[Any]
    sequences: Chunks


def _open(paths: Sequence[Path], options: ParsedOptions, device: torch.device) -> _Opened | None:
    """None if PyTorch's results for the first model are not llama.cpp's. Raises MackoError or OSError."""
    import torch

    from ..evaluation.transformer import Shape, read_weights

    listening = _listening_class()
    dtype = None
    if device.type == "cpu":
        dtype = torch.float32  # products of others are slow
        torch.set_num_threads(options.n_threads or system.available_cores())
    models = []
    for path in paths:
        with Model(path) as model:
            try:
                shape = Shape.of(model)
                if shape.n_experts_used:  # their inputs differ between experts
                    raise errors.error(errors.UNSUPPORTED_ARCH, f"{path}: has experts")
                models.append(listening(shape, read_weights(model, device, dtype)))
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


class Losses:
    """The loss of a model on some chunks, also with changed weights in one tensor."""

    def __init__(self, evaluation: _Evaluation) -> None:
        self._evaluation = evaluation
        self.dense = self._measure(0)

    def with_weights(self, t: Tensor, bits: Bits) -> float:
        """The mean negative log-likelihood if the tensor has these weights. Fast for tensors in the order of blocks."""
        before = self._evaluation.renew(t, bits)
        found = self._measure(_first_block(t.name))
        self._evaluation.model.weights[t.name] = before
        return found

    def close(self) -> None:
        del self._evaluation

    def _measure(self, layer: int) -> float:
        """layer: the first block with changed weights."""
        import torch
        import torch.nn.functional as F

        model, found = self._evaluation.model, []
        with torch.no_grad():
            for i in range(len(self._evaluation.batches)):
                hidden = model.hidden_after(layer, self._evaluation.before(layer, i))
                for x, tokens in zip(hidden, self._evaluation.tokens(i)):  # the logits of many chunks take much memory
                    first = len(tokens) // 2  # of the tokens that llama-perplexity scores
                    found.append(F.cross_entropy(model.logits_of(x[first:-1]), tokens[first + 1 :]))
            return float(torch.stack(found).double().mean())


def _first_block(name: str) -> int:
    """The first block whose results depend on a tensor."""
    block = allocation.block_of(name)
    return 0 if block == allocation.AFTER_ALL_BLOCKS else block


def _listening_class() -> Any:
    """A subclass of Transformer, defined here because PyTorch is optional."""
    import torch.nn.functional as F

    from ..evaluation.activations import Weight
    from ..evaluation.transformer import Transformer

    class Listening(Transformer):
        """Passes the inputs of matrix products to a consumer."""

        consumer: Consumer | None = None
        wanted: set[str]  # weights whose inputs the consumer still gets

        def listen(self, x: torch.Tensor, layers: range, consumer: Consumer, wanted: set[str]) -> None:
            """x: hidden states before the first of these blocks."""
            self.consumer, self.wanted = consumer, wanted
            with contextlib.suppress(_Done):
                for layer in layers:
                    x = self.block(layer, x)
            self.consumer = None

        def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
            weight = self.weights[f"{name}.weight"]
            if self.consumer is not None and f"{name}.weight" in self.wanted:
                rows = x.float().reshape(-1, x.shape[-1]).contiguous()
                taken = Weight(f"{name}.weight", rows.shape[1], 1, False)
                self.consumer.take(taken, 0, array_backend.from_torch(rows))
                self.wanted.remove(taken.name)
                if not self.wanted:
                    raise _Done
            out, bias = F.linear(x, weight.float()), self.weights.get(f"{name}.bias")
            return out if bias is None else out + bias

    return Listening


class _Done(Exception):
    """Ends an evaluation whose remaining inputs are not needed."""
