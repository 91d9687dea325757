"""A README for a model hub, from the results of a report and the metadata of the files: `model_card(...)`.

The card lists the measurements with their text and machine, and missing measurements. Metadata of files are untrusted
and quoted as plain text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import console
from ..benchmark.forms import DENSE, QUANTIZED, SPARSE_QUANTIZED
from ..benchmark.report import FormResult
from ..conversion.inspect import inspect
from ..gguf.files import Model, shard_paths

SIGNATURE = b"---\n"
"""The start of the front matter and of the file."""

_HUB = re.compile(r"https?://huggingface\.co/([\w.-]+/[\w.-]+)/?")


@dataclass(frozen=True)
class ModelFile:
    """A model that the card describes."""

    path: Path
    metadata: Mapping[str, Any]  # general.* and macko.prune.*
    is_sparse: bool
    n_parameters: int
    density: float | None  # non-zeros over weights, in blocks
    storage: Mapping[str, int]  # storage of tensors in blocks -> number of tensors

    def get(self, name: str) -> Any:
        return self.metadata.get(name)


@dataclass(frozen=True)
class Measurement:
    """The conditions of the measurements."""

    text: str  # name of the text
    n_chunks: int  # of the text; -1: all
    n_ctx: int  # tokens of a chunk
    n_prompt: int
    n_gen: int
    repetitions: int
    n_threads: int
    gpus: tuple[str, ...]  # the GPUs in use
    kernels: str  # of the CPU
    version: str  # of ggml-macko
    llama_cpp_python: str  # the installed version


def read_model(path: str | os.PathLike[str], n_threads: int = 0) -> ModelFile:
    """The data of a model file, dense or sparse, for a card. Raises MackoError or OSError."""
    report = inspect(path, n_threads=n_threads)
    blocks = [t for t in report.tensors if t.name.startswith("blk.") and len(t.shape) > 1 and t.density is not None]
    n = sum(t.n_elements for t in blocks)
    storage: dict[str, int] = {}
    for t in blocks:
        name = t.type if t.storage == "dense" else t.storage
        storage[name] = storage.get(name, 0) + 1
    with Model(path) as model:
        wanted = [k for k in model.keys if k.name.startswith(("general.", "macko.prune."))]
        metadata = {k.name: k.value() for k in wanted}
    return ModelFile(
        path=Path(path),
        metadata=metadata,
        is_sparse=report.is_sparse,
        n_parameters=report.n_parameters,
        density=sum((t.density or 0) * t.n_elements for t in blocks) / n if n else None,
        storage=storage,
    )


def model_card(
    dense: ModelFile, models: Sequence[ModelFile], results: Sequence[FormResult], how: Measurement, plot: str = ""
) -> str:
    """The text of a README.md. dense: the baseline. models: the published models; the first one gives the name.
    results: of a report, the dense model first. plot: path of a picture, if any.
    """
    first = models[0] if models else dense
    measured = [*_results(results, how)]
    if plot:
        measured += ["", f"![perplexity over size and speed]({_escaped(plot)})"]
    sections: list[tuple[str, Iterable[str]]] = [
        (f"# {_plain(_name(first))}", _summary(first, models)),
        ("## Files", _files(models or [dense])),
        ("## Measured", measured),
        ("## How to run it", _commands(first)),
        ("## Where it comes from", (f"* {line}" for line in _provenance(first, dense))),
        ("## What was not measured", (f"* {line}" for line in _not_measured(first, results, how))),
    ]
    parts = [*_front_matter(first)]
    for title, lines in sections:
        parts += ["", title, "", *lines]
    return "\n".join([*parts, ""])


# ---- parts ----


def _name(model: ModelFile) -> str:
    return str(model.get("general.name") or model.path.stem)


def _front_matter(model: ModelFile) -> Iterator[str]:
    """YAML with JSON strings, which are valid YAML."""
    yield "---"
    licence = model.get("general.license")
    if isinstance(licence, str) and licence:
        yield f"license: {json.dumps(licence.lower())}"
    bases = [base for _, base in base_models(model) if base]
    if bases:
        yield f"base_model: {json.dumps(bases)}"
    yield "pipeline_tag: text-generation"
    yield "tags: " + json.dumps(["gguf", "sparse", "pruned", "llama.cpp", "ggml-macko"])
    yield "---"


def base_models(model: ModelFile) -> list[tuple[str, str]]:
    """(name, USER/NAME on the hub or empty) of the base models in the metadata of a file."""
    count = model.get("general.base_model.count")
    out = []
    for i in range(min(count, 16) if isinstance(count, int) else 0):
        name = str(model.get(f"general.base_model.{i}.name") or "")
        links = [str(model.get(f"general.base_model.{i}.{kind}") or "") for kind in ("repo_url", "url")]
        found = next((m[1] for m in map(_HUB.fullmatch, links) if m), "")
        if name or found:
            out.append((name or found, found))
    return out


def _summary(model: ModelFile, models: Sequence[ModelFile]) -> Iterator[str]:
    architecture = _plain(str(model.get("general.architecture") or "unknown"))
    zeros = "" if model.density is None else f"; {1 - model.density:.1%} of the weights in its blocks are zero"
    yield f"{_millions(model.n_parameters)} parameters, architecture {architecture}{zeros}."
    if any(m.is_sparse for m in models):
        yield (
            "The weights are stored sparse. Stock llama.cpp opens this GGUF with the plugin ggml-macko. Without the "
            "plugin, it reports an error."
        )


def _files(models: Sequence[ModelFile]) -> Iterator[str]:
    rows = []
    for m in models:
        nbytes = sum(p.stat().st_size for p in shard_paths(m.path))
        stored = ", ".join(f"{n} x {name}" for name, n in sorted(m.storage.items(), key=lambda x: -x[1]))
        rows.append([_plain(m.path.name), f"{nbytes / console.MIB:.1f}", f"{nbytes * 8 / m.n_parameters:.2f}", stored])
    yield console.table(rows, ["file", "MiB", "bits per weight", "matrices of blocks"], "g")


def _results(results: Sequence[FormResult], how: Measurement) -> Iterator[str]:
    base = results[0]
    with_speed = any(r.gen_tps or r.prompt_tps for r in results)
    rows = []
    for r in results:
        row = [
            _plain(r.model),
            r.kind,
            f"{r.nbytes / console.MIB:.1f}",
            f"{r.bpw:.2f}",
            f"{r.ppl:.3f} ± {r.ppl_error:.3f}",
            f"{r.ppl / base.ppl - 1:+.1%}",
        ]
        rows.append([*row, *(_speed(r.prompt_tps), _speed(r.gen_tps))] if with_speed else row)
    headers = ["model", "kind", "MiB", "bits per weight", "perplexity", "against dense"]
    headers += [f"prompt of {how.n_prompt}, tok/s", f"generating {how.n_gen}, tok/s"] if with_speed else []
    yield console.table(rows, headers, "g")
    yield ""
    part = "the whole text" if how.n_chunks < 0 else f"{how.n_chunks} evenly spread chunks"
    yield (
        f"Perplexity on `{_code(how.text)}`: {base.tokens} scored tokens in chunks of {how.n_ctx} ({part}); ± is the "
        "standard error. The error of a difference between two models on the same text is smaller."
    )
    if with_speed:
        where = f"with {_plain(', '.join(how.gpus))}" if how.gpus else "all on the CPU"
        yield (
            f"Speed: {how.n_threads} threads, {where}, CPU kernels {how.kernels}; medians of {how.repetitions} "
            "interleaved runs, each in a separate process."
        )
    if any(r.kind == QUANTIZED for r in results):
        yield "The quantized models were made from the dense model for comparison, without an imatrix."
    yield f"Measured with ggml-macko {how.version} (llama-cpp-python {how.llama_cpp_python})."


def _speed(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f}"


def _commands(model: ModelFile) -> Iterator[str]:
    name = _code(model.path.name)
    if not model.is_sparse:
        yield "The file is dense. This command stores it sparse without loss:"
        yield from ("", "```sh", f"macko convert {_quoted(name)} sparse.gguf", "```", "")
        name = "sparse.gguf"
    yield "```sh"
    yield f"macko generate -m {_quoted(name)} -p 'Once upon a time' -n 64"
    yield f"macko run -- llama-server -m {_quoted(name)}"
    yield from ("```", "", "```python", "from ggml_macko import Llama", "")
    yield f'print(Llama({json.dumps(name)})("Once upon a time", max_tokens=64)["choices"][0]["text"])'
    yield "```"


_PRUNING = {
    "macko.prune.method": "method",
    "macko.prune.sparsity": "sparsity",
    "macko.prune.compare_within": "compared within each",
    "macko.prune.allocation": "allocation",
    "macko.prune.sequential": "sequential",
    "macko.prune.tensor_sparsity": "of single tensors",
    "macko.prune.datasets": "calibration text",
    "macko.prune.chunks_count": "chunks of it",
    "macko.prune.experts.count_before": "experts before",
    "macko.prune.experts.score": "experts removed by",
    "macko.prune.experts.datasets": "text that the experts were scored on",
    "macko.prune.recover.method": "recovery",
    "macko.prune.recover.datasets": "text of the recovery",
    "macko.prune.recover.n_tokens": "tokens of it",
}


def _provenance(model: ModelFile, dense: ModelFile) -> Iterator[str]:
    bases = base_models(model)
    if bases:
        yield "Base model: " + ", ".join(f"{_plain(name)}" + (f" ({repo})" if repo else "") for name, repo in bases)
    else:
        yield "Base model: the metadata does not name one."
    if model.path != dense.path:
        yield f"Compared with: {_plain(_name(dense))} ({_plain(dense.path.name)})"
    found = [f"{label} {_value(model.get(key))}" for key, label in _PRUNING.items() if model.get(key) is not None]
    if found:
        yield "Pruning, according to the metadata: " + "; ".join(found)
    else:
        yield "Pruning: the metadata does not describe it."
    licence = model.get("general.license")
    yield f"License: {_plain(str(licence))}" if licence else "License: the metadata does not name one."


def _not_measured(model: ModelFile, results: Sequence[FormResult], how: Measurement) -> Iterator[str]:
    datasets = model.get("macko.prune.datasets")
    if isinstance(datasets, list) and how.text in [Path(str(d)).name for d in datasets]:
        yield (
            f"Perplexity on texts other than `{_code(how.text)}`, which was also the calibration text of the pruning: "
            "expect worse values"
        )
    else:
        yield f"Perplexity on texts other than `{_code(how.text)}`"
        if not datasets:
            yield "Whether that text was part of the training or calibration data"
    if how.n_chunks >= 0:
        yield "The rest of that text"
    yield "Tasks: no benchmark of questions, code or instructions was run, and no generated text was checked"
    yield (
        "Speed"
        + (" on any other machine" if any(r.gen_tps for r in results) else ": on any machine")
        + ("" if how.gpus else " and on GPUs")
    )
    if not any(r.kind == DENSE for r in results[1:]) and any(r.kind == SPARSE_QUANTIZED for r in results):
        yield "KL divergence of the quantized models from the dense model"


# ---- text from files ----


def _plain(text: str) -> str:
    """One line without markup, in which no address or @name becomes a link."""
    return re.sub(r"@|:(?=//)|www(?=\.)", r"\g<0><!-- -->", _escaped(text), flags=re.IGNORECASE)


def _escaped(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:500]).split())
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", line)


def _code(text: str) -> str:
    """Text for a span or a block of code."""
    return "".join(c if c.isprintable() and c != "`" else " " for c in text[:500])


def _quoted(name: str) -> str:
    """Text for a shell."""
    return name if re.fullmatch(r"[\w./+-]+", name) else "'" + name.replace("'", "'\\''") + "'"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_value(v) for v in value[:20])
    return f"{value:g}" if isinstance(value, float) else _plain(str(value))


def _millions(n: int) -> str:
    return f"{n / 1e9:.2f} billion" if n >= 10**9 else f"{n / 1e6:.1f} million"
