"""Speed of whole models: load time, prompt and generation in tokens per second, peak memory.

Each run has a separate process (bench_worker.py). All models run once per round, in turn. Results are medians.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .. import console, errors
from ..benchmark.bench_worker import Sample, Workload
from ..conversion.restore import restore
from ..gguf.files import Model
from ..gguf.outputs import scratch_folder


class LabelledModel(NamedTuple):
    label: str  # unique in a list
    path: Path


@dataclass(frozen=True)
class ModelResult:
    """Medians over the runs of one model; None without a measurement (see Sample)."""

    model: str  # its label
    nbytes: int  # of the file, or of all shards of a split model
    load_s: float
    prompt_tps: float | None
    gen_tps: float | None
    rss: int | float  # the median of an even number of runs may be a fraction
    gpu_memory: int | float | None
    samples: tuple[Sample, ...]


def bench_models(models: Sequence[LabelledModel], work: Workload, repetitions: int) -> list[ModelResult]:
    """Runs every model once per round, and logs progress.

    Raises MackoError with the last line of a failed run.
    """
    samples: dict[str, list[Sample]] = {m.label: [] for m in models}
    runs = [(i, m) for i in range(repetitions) for m in models]
    for i, (label, path) in console.tracked(runs, "measuring speed", unit="runs"):
        console.note(label)
        if not console.shows_progress():
            console.log(f"round {i + 1}/{repetitions}: {label}")
        samples[label].append(_run(path, work))
    return [_summary(m, samples[m.label]) for m in models]


def _run(model: Path, work: Workload) -> Sample:
    request = {"model": str(model), **dataclasses.asdict(work)}
    done = subprocess.run(
        [sys.executable, "-m", "ggml_macko.benchmark.bench_worker", json.dumps(request)],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise errors.error(errors.LOAD_FAILED, f"{model}: {lines[-1]}")
    return Sample(**json.loads(done.stdout))


def _summary(model: LabelledModel, samples: list[Sample]) -> ModelResult:
    def median(values: Sequence[float | None]) -> float | None:
        measured = [v for v in values if v is not None]
        return statistics.median(measured) if measured else None

    with Model(model.path) as file:
        nbytes = file.nbytes
    return ModelResult(
        model=model.label,
        nbytes=nbytes,
        load_s=statistics.median(s.load_s for s in samples),
        prompt_tps=median([s.prompt_tps for s in samples]),
        gen_tps=median([s.gen_tps for s in samples]),
        rss=statistics.median(s.rss for s in samples),
        gpu_memory=median([s.gpu_memory for s in samples]),
        samples=tuple(samples),
    )


def as_json(result: object) -> dict[str, object]:
    """A result dataclass for JSON, with a list of samples."""
    assert dataclasses.is_dataclass(result) and not isinstance(result, type)
    return dataclasses.asdict(result)


@contextlib.contextmanager
def dense_twin(models: Sequence[LabelledModel]) -> Iterator[LabelledModel | None]:
    """A dense copy of the first sparse model, in a temporary folder next to it; None if no model is sparse."""
    for label, path in models:
        with Model(path) as model:
            if not model.is_sparse:
                continue
            with scratch_folder(path.resolve().parent, ".macko-bench-") as folder:
                console.log(f"restoring {label} ...")
                with console.quiet():
                    done = restore(path, folder / "dense.gguf")
                yield LabelledModel(f"{label} (dense)", done.path)
                return
    yield None
