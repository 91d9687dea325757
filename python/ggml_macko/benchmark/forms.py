"""The forms of a model in a report: dense, quantized by llama.cpp, sparse, and sparse with quantized values.

Missing files are made in a temporary folder.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from .. import console, errors
from ..gguf.dense_copy import is_quantized
from ..gguf.files import Model

DENSE, QUANTIZED, SPARSE, SPARSE_QUANTIZED = "dense", "quantized", "sparse", "sparse quantized"


@dataclass(frozen=True)
class Form:
    """A file to measure."""

    label: str  # unique in a report
    kind: str  # DENSE, QUANTIZED, SPARSE or SPARSE_QUANTIZED
    path: Path


@dataclass(frozen=True)
class Recipe:
    """A way to make a model file from another one. `make(source, output)` raises MackoError.

    check(source) raises errors of the inputs beforehand. For a conversion, source is the dense model, which has the
    tensors of all converted files.
    """

    label: str
    make: Callable[[Path, Path], object]
    check: Callable[[Path], object]


class Forms:
    """The forms of one dense model, in the order in which they are added; the dense model is the first.

    folder: for new files. conversions: of dense files with zeros; each conversion gives a form.
    """

    def __init__(self, dense: Path, folder: Path, n_threads: int, conversions: Sequence[Recipe]) -> None:
        self._dense, self._folder, self._n_threads = dense, folder, n_threads
        self._conversions = conversions
        with Model(dense) as model:
            if model.is_sparse:
                raise errors.bad_argument(f"{dense}: is a sparse file; the dense model comes first")
            self.n_elements = sum(t.n_elements for t in model.tensors)
            self._shapes = {t.name: t.ne for t in model.tensors}
        self.list = [Form(dense.stem, DENSE, dense)]

    def check(self, types: Sequence[str], prunings: Sequence[Recipe], models: Sequence[Path]) -> None:
        """Raises MackoError or OSError for forms that cannot be added, before any work."""
        for name in types:
            ftype(name)
        for recipe in (*prunings, *self._conversions):
            recipe.check(self._dense)
        labels = [self.list[0].label, *types]
        for label, kind in [(p.label, DENSE) for p in prunings] + [(m.stem, self._kind(m)) for m in models]:
            labels += [label] if kind != DENSE else [self._converted_label(label, c) for c in self._conversions]
        for label in labels:
            if labels.count(label) > 1:
                raise _two_models(label)

    def _converted_label(self, label: str, conversion: Recipe) -> str:
        return f"{label} {conversion.label}" if len(self._conversions) > 1 else label

    def _kind(self, path: Path) -> str:
        """The kind of a variant. Raises MackoError if it and the dense model have different tensors."""
        with Model(path) as model:
            if {t.name: t.ne for t in model.tensors} != self._shapes:
                raise errors.bad_argument(
                    f"{path}: has other tensors than {self._dense}: not a variant of the same model"
                )
            if model.is_sparse:
                return sparse_kind(path, path)
            return QUANTIZED if any(is_quantized(t) for t in model.tensors) else DENSE

    def _add(self, label: str, kind: str, path: Path) -> None:
        if any(label == form.label for form in self.list):
            raise _two_models(label)
        self.list.append(Form(label, kind, path))

    def add_quantized(self, name: str) -> None:
        """Adds the dense model in a type of llama-quantize, such as Q4_K_M."""
        console.log(f"quantizing to {name} ...")
        path = self._folder / f"{name}.gguf"
        quantize(self._dense, path, name, self._n_threads)
        self._add(name, QUANTIZED, path)

    def add_file(self, path: Path, label: str = "") -> None:
        """Adds a variant of the same model: a sparse or quantized file, or a dense file with zeros, which is converted
        first.

        Raises MackoError if the file and the dense model have different tensors.
        """
        label = label or path.stem
        kind = self._kind(path)
        if kind != DENSE:
            self._add(label, kind, path)
            return
        for conversion in self._conversions:
            converted = self._folder / f"sparse-{len(self.list)}.gguf"
            console.log(f"converting {label} to {conversion.label} ...")
            with console.brief():
                conversion.make(path, converted)
            self._add(self._converted_label(label, conversion), sparse_kind(converted, path), converted)

    def add_pruned(self, pruning: Recipe) -> None:
        """Prunes the dense model and adds the result, converted."""
        path = self._folder / "pruned.gguf"
        console.log(f"pruning: {pruning.label} ...")
        with console.brief():
            pruning.make(self._dense, path)
        self.add_file(path, pruning.label)
        path.unlink()


def _two_models(label: str) -> errors.MackoError:
    return errors.bad_argument(f"two models would be called '{label}' in the table")


def sparse_kind(path: Path, source: Path) -> str:
    """SPARSE, or SPARSE_QUANTIZED if a tensor is not bit for bit equal to its source."""
    with Model(path) as model, Model(source) as dense:
        types = {t.name: t.type for t in dense.tensors}
        lossy = any(t.is_quantized or t.type != types[t.name] for t in model.tensors)
    return SPARSE_QUANTIZED if lossy else SPARSE


def ftype(name: str) -> int:
    """llama.cpp's number of a type of llama-quantize. Raises UsageError."""
    import llama_cpp.llama_cpp as api

    found = getattr(api, f"LLAMA_FTYPE_MOSTLY_{name}", None)
    if found is None:
        prefix = "LLAMA_FTYPE_MOSTLY_"
        known = [key[len(prefix) :] for key in dir(api) if key.startswith(prefix)]
        raise errors.usage_error(f"--types: llama.cpp has no type {name}{errors.did_you_mean(name.upper(), known)}")
    return int(found)


def quantize(source: Path, output: Path, name: str, n_threads: int) -> None:
    """Quantizes a model with libllama, as llama-quantize does. name: for example Q4_K_M. Raises MackoError."""
    import llama_cpp.llama_cpp as api
    from llama_cpp._logger import set_verbose
    from llama_cpp._utils import suppress_stdout_stderr

    set_verbose(False)
    params = api.llama_model_quantize_default_params()
    params.ftype, params.nthread = ftype(name), n_threads
    with suppress_stdout_stderr(disable=False):
        status = api.llama_model_quantize(os.fsencode(source), os.fsencode(output), ctypes.byref(params))
    if status:
        raise errors.error(errors.LOAD_FAILED, f"{source}: llama.cpp could not quantize it to {name}")
