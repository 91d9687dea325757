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

from .. import console, system
from ..benchmark import plot
from ..benchmark.bench_worker import Workload
from ..benchmark.forms import Form, Forms, Recipe
from ..benchmark.models import LabelledModel, ModelResult, bench_models
from ..evaluation import likelihood
from ..evaluation.likelihood import Estimate
from ..evaluation.text_model import N_CTX, EvaluationOptions, TextModel, read_text
from ..gguf.files import shard_paths
from ..gguf.outputs import AtomicOutput, scratch_folder


@dataclass(frozen=True)
class FormResult(ModelResult):
    """One row of a report."""

    bpw: float  # bits of the file per parameter of the dense model
    kind: str  # dense, quantized, sparse or sparse quantized
    ppl: float
    ppl_error: float
    tokens: int  # scored tokens


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
    force: bool = False,
) -> list[FormResult]:
    """Measures the forms of a dense model; the dense model is the first result.

    dense: F16, BF16 or F32 GGUF. text: UTF-8 file for perplexity; n_chunks (-1: all) evenly spread chunks of n_ctx
    tokens are used. models: variants of the model, sparse or dense with zeros. types: of llama-quantize, to make and
    compare. prunings: ways to prune the dense model. conversions: ways to convert dense files with zeros. output: stem
    of the plot's files; force: replace them if they exist. n_prompt, n_gen: timed tokens in each of `repetitions`
    rounds. n_gpu_layers: -1: all, if there is a GPU. n_threads: 0: all cores.

    Logs progress. Raises MackoError or OSError.
    """
    n_threads = n_threads or system.available_cores()
    dense, text = Path(dense), Path(text)
    with contextlib.ExitStack() as stack:
        outputs = {}
        if output is not None:
            plot.figure_class()  # raises an error for missing matplotlib before any work
            inputs = [*(shard for model in (dense, *models) for shard in shard_paths(model)), text]
            for suffix in plot.REPORT_SUFFIXES:
                signature = plot.SIGNATURES[suffix]
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
        options = {"n_ctx": n_ctx, "n_threads": n_threads, "n_gpu_layers": n_gpu_layers}
        estimates = [_estimate(form, text, n_chunks, **options) for form in forms.list]
        labelled = [LabelledModel(form.label, form.path) for form in forms.list]
        speeds = bench_models(labelled, Workload(n_prompt, n_gen, n_threads, n_gpu_layers), repetitions)
        results = [_result(forms, *found) for found in zip(forms.list, estimates, speeds)]
        if output is not None:
            title = f"{results[0].model}: perplexity on {text.name} against size and speed, {n_threads} threads"
            plot.save(plot.draw(_panels(results, n_gen), title), outputs)
    return results


def perplexity_of(
    path: str | os.PathLike[str],
    text: str | os.PathLike[str],
    n_chunks: int,
    *,
    n_ctx: int = N_CTX,
    n_threads: int = 0,
    n_gpu_layers: int = -1,
) -> Estimate:
    """Perplexity on n_chunks evenly spread chunks of a text (-1: all). Raises MackoError or OSError.

    llama-perplexity uses the first chunks, which may be a single document.
    """
    run: EvaluationOptions = {"n_threads": n_threads, "n_gpu_layers": n_gpu_layers}
    with TextModel.opened_with(path, text, n_ctx, n_chunks, evenly=True, **run) as (model, chunks):
        return likelihood.estimate(model, chunks)


def _estimate(form: Form, text: Path, n_chunks: int, **options: int) -> Estimate:
    begin = time.monotonic()
    found = perplexity_of(form.path, text, n_chunks, **options)
    seconds = time.monotonic() - begin
    console.log(f"{form.label}: perplexity {found.ppl:.4f} +/- {found.error:.4f} ({seconds:.1f} s)")
    return found


def _result(forms: Forms, form: Form, estimate: Estimate, speed: ModelResult) -> FormResult:
    return FormResult(
        **vars(speed),
        bpw=speed.nbytes * 8 / forms.n_elements,
        kind=form.kind,
        ppl=estimate.ppl,
        ppl_error=estimate.error,
        tokens=estimate.n_tokens,
    )


def _panels(results: Sequence[FormResult], n_gen: int) -> list[plot.Panel]:
    """Perplexity over size, and over the speed of generation, if measured."""
    size = [plot.Point(r.model, r.kind, r.bpw, r.ppl) for r in results]
    speed = [plot.Point(r.model, r.kind, r.gen_tps, r.ppl) for r in results if r.gen_tps]
    panels = [plot.Panel("bits per weight, whole file", size)]
    return [*panels, plot.Panel(f"tokens/s, generating {n_gen}", speed)] if speed else panels
