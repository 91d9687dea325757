"""Perplexity, size and speed of each form of a model: `report(dense, text, models)`.

The forms are the dense model, its quantized types (made by libllama), and sparse variants: given files, and files that
are pruned here. New files are in a temporary folder, which is removed at the end. Speeds are measured as by `macko
bench`: each run in a separate process, all models in turn.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .. import console, system
from ..benchmark import page, plot
from ..benchmark.bench_worker import Workload
from ..benchmark.forms import Form, Forms, Recipe
from ..benchmark.models import LabelledModel, ModelResult, bench_models
from ..evaluation.perplexity import kl_divergence, perplexity
from ..evaluation.text_model import N_CTX, EvaluationOptions, read_text
from ..gguf.files import shard_paths
from ..gguf.outputs import AtomicOutput, scratch_folder
from ..llama import Llama

_N_WORDS = 16
"""Words of a text that models continue."""


@dataclass(frozen=True)
class FormResult(ModelResult):
    """One row of a report."""

    bpw: float  # bits of the file per parameter of the dense model
    kind: str  # dense, quantized, sparse or sparse quantized
    ppl: float
    ppl_error: float
    tokens: int  # scored tokens
    kld: float | None = None  # KL divergence from the dense model, nats per token; None: not measured
    same_top: float | None = None  # share of the tokens at which the dense model has the same most probable token


def report(
    dense: str | os.PathLike[str],
    text: str | os.PathLike[str],
    models: Sequence[str | os.PathLike[str]] = (),
    *,
    types: Sequence[str] = (),
    prunings: Sequence[Recipe] = (),
    conversions: Sequence[Recipe],
    output: str | None = None,
    n_chunks: int = -1,
    n_ctx: int = N_CTX,
    n_prompt: int = 128,
    n_gen: int = 64,
    n_gpu_layers: int = -1,
    n_threads: int = 0,
    repetitions: int = 5,
    prompts: Sequence[str] = (),
    with_kld: bool = False,
    force: bool = False,
) -> list[FormResult]:
    """Measures the forms of a dense model; the dense model is the first result.

    dense: F16, BF16 or F32 GGUF. text: UTF-8 file for perplexity; n_chunks (-1: all) evenly spread chunks of n_ctx
    tokens are used. models: variants of the model, sparse, quantized or dense with zeros. types: of llama-quantize, to
    make and compare. prunings: ways to prune the dense model. conversions: ways to convert dense files with zeros.
    output: stem of the files of the plot and the page; force: replace them if they exist. n_prompt, n_gen: timed tokens
    in each of `repetitions` rounds. n_gpu_layers: -1: all, if there is a GPU. n_threads: 0: all cores. prompts: texts
    that each model continues with n_gen tokens on the page (none: words from two places of the text). with_kld: also
    compare the probabilities of all tokens with those of the dense model, which a temporary file holds.

    Logs progress. Raises MackoError or OSError.
    """
    n_threads = n_threads or system.available_cores()
    dense, text = Path(dense), Path(text)
    with contextlib.ExitStack() as stack:
        outputs = {}
        if output is not None:
            plot.figure_class()  # raises an error for missing matplotlib before any work
            inputs = [*(shard for model in (dense, *models) for shard in shard_paths(model)), text]
            for suffix in (*plot.REPORT_SUFFIXES, page.SUFFIX):
                signature = plot.SIGNATURES.get(suffix, page.SIGNATURE)
                outputs[suffix] = stack.enter_context(AtomicOutput(output + suffix, inputs, force, signature))
        parent = Path(output).resolve().parent if output is not None else tempfile.gettempdir()
        folder = stack.enter_context(scratch_folder(parent, ".macko-report-"))
        forms = Forms(dense, folder, n_threads, conversions)
        forms.check(types, prunings, [Path(path) for path in models])
        read_text(text)
        for name in types:
            forms.add_quantized(name)
        for pruning in prunings:
            forms.add_pruned(pruning)
        for path in models:
            forms.add_file(Path(path))
        run: EvaluationOptions = {"n_threads": n_threads, "n_gpu_layers": n_gpu_layers}
        base = folder / "dense.kld" if with_kld else None
        found = [_quality(form, text, n_chunks, n_ctx, base, run) for form in forms.list]
        labelled = [LabelledModel(form.label, form.path) for form in forms.list]
        speeds = bench_models(labelled, Workload(n_prompt, n_gen, n_threads, n_gpu_layers), repetitions)
        results = [_result(forms, *of_form) for of_form in zip(forms.list, found, speeds)]
        if output is not None:
            title = f"{results[0].model}: perplexity on {text.name} against size and speed, {n_threads} threads"
            panels = _panels(results, n_gen)
            about = conditions(results, text, n_threads, repetitions)
            texts = (
                _continuations(forms.list, prompts or _beginnings(text), n_gen, n_threads, n_gpu_layers)
                if n_gen
                else []
            )
            shown = page.page(title, about, *_table(results), panels, texts)
            of_page = outputs.pop(page.SUFFIX)
            plot.save(plot.draw(panels, title), outputs)
            of_page.commit_whole(shown.encode())
            console.log(f"page: {of_page.path}")
    return results


def conditions(results: Sequence[FormResult], text: Path, n_threads: int, repetitions: int) -> str:
    """How the figures were measured."""
    return (
        f"perplexity over {results[0].tokens} tokens of {text.name}; {n_threads} threads, medians of {repetitions} "
        "interleaved runs, each in its own process"
    )


class _Quality(NamedTuple):
    ppl: float
    ppl_error: float
    tokens: int
    kld: float | None = None
    same_top: float | None = None


def _quality(
    form: Form, text: Path, n_chunks: int, n_ctx: int, base: Path | None, options: EvaluationOptions
) -> _Quality:
    """base: file of the probabilities of the dense model, which is measured first and writes it."""
    begin = time.monotonic()
    if base is not None and base.exists():
        with console.quiet():
            kl = kl_divergence(form.path, base, **options)
        found = _Quality(*kl.ppl, kl.n_tokens, kl.kld.value, kl.same_top.value)
    else:
        with console.quiet():
            of_text = perplexity(
                form.path, text, n_ctx=n_ctx, n_chunks=n_chunks, evenly=True, kl_divergence_base=base, **options
            )
        found = _Quality(of_text.ppl, of_text.error, of_text.n_tokens, *((0.0, 1.0) if base is not None else ()))
    seconds = time.monotonic() - begin
    console.log(f"{form.label}: perplexity {found.ppl:.4f} +/- {found.ppl_error:.4f} ({seconds:.1f} s)")
    return found


def _result(forms: Forms, form: Form, quality: _Quality, speed: ModelResult) -> FormResult:
    return FormResult(**vars(speed), **quality._asdict(), bpw=speed.nbytes * 8 / forms.n_elements, kind=form.kind)


_COLUMNS = [
    page.Column(*column)
    for column in (
        ("model",), ("kind",), ("MiB", ",.2f"), ("bits per weight", ".2f"), ("perplexity", ".3f"),
        ("± standard error", ".3f"), ("against dense", "+.1%"), ("KL divergence", ".4f"), ("same top token", ".1%"),
        ("prompt, tokens/s", ",.1f"), ("generating, tokens/s", ",.1f"),
    )
]  # fmt: skip


def _table(results: Sequence[FormResult]) -> tuple[list[page.Column], list[page.Row]]:
    """The columns and rows of the page, without columns that are empty."""
    base = results[0].ppl
    rows = [
        (r.model, r.kind, r.nbytes / console.MIB, r.bpw, r.ppl, r.ppl_error, r.ppl / base - 1, r.kld, r.same_top,
         r.prompt_tps, r.gen_tps)
        for r in results
    ]  # fmt: skip
    filled = [i for i in range(len(_COLUMNS)) if any(row[i] is not None for row in rows)]
    return [_COLUMNS[i] for i in filled], [[row[i] for i in filled] for row in rows]


def _panels(results: Sequence[FormResult], n_gen: int) -> list[plot.Panel]:
    """Perplexity over size, and over the speed of generation, if measured."""
    size = [plot.Point(r.model, r.kind, r.bpw, r.ppl) for r in results]
    speed = [plot.Point(r.model, r.kind, r.gen_tps, r.ppl) for r in results if r.gen_tps]
    panels = [plot.Panel("bits per weight, whole file", size)]
    return [*panels, plot.Panel(f"tokens/s, generating {n_gen}", speed)] if speed else panels


def _beginnings(text: Path) -> list[str]:
    """Words from the start and from the middle of a text."""
    words = read_text(text).decode().split()
    return [" ".join(words[at : at + _N_WORDS]) for at in (0, len(words) // 2)]


def _continuations(
    forms: Sequence[Form], prompts: Sequence[str], n_gen: int, n_threads: int, n_gpu_layers: int
) -> list[page.Continuation]:
    """The most probable n_gen tokens after each prompt, for each form."""
    texts: list[list[tuple[str, str]]] = [[] for _ in prompts]
    n_ctx = max(len(prompt.encode()) for prompt in prompts) + n_gen + 8  # a byte has at most one token
    for form in console.tracked(forms, "generating text", unit="models"):
        with contextlib.closing(
            Llama(str(form.path), n_ctx=n_ctx, n_threads=n_threads, n_gpu_layers=n_gpu_layers, verbose=False)
        ) as llama:
            for prompt, found in zip(prompts, texts):
                done: Any = llama(prompt, max_tokens=n_gen, temperature=0)
                found.append((form.label, done["choices"][0]["text"]))
    return [page.Continuation(prompt, found) for prompt, found in zip(prompts, texts)]
