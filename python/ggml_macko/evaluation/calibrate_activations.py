"""Measures thresholds for skipping neurons on a text, and writes them into a copy of the model:
`calibrate_activations(model, output, skip)`. skipping.py defines them; FORMAT.md (section 10) has their format.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .. import console, errors
from ..evaluation.activations import MIN_ROWS
from ..evaluation.calibrate import N_BATCH
from ..evaluation.skipping import SkipOptions, SkippingModel
from ..evaluation.text_model import N_CTX, Chunks, EvaluationOptions, read_text
from ..gguf.activation_keys import SkipRule, read_rule, without_rule
from ..gguf.files import Model, shard_paths
from ..gguf.outputs import AtomicOutput
from ..gguf.writer import is_written, write_with_keys

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class ActivationCalibration:
    """The result of `calibrate_activations`."""

    path: Path
    rule: SkipRule


def calibrate_activations(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    skip: SkipOptions,
    *,
    n_ctx: int = N_CTX,
    force: bool = False,
    **options: Unpack[EvaluationOptions],
) -> ActivationCalibration:
    """Writes a copy of a GGUF model, dense or sparse, with thresholds below which feed-forward neurons may be skipped
    for a token. The copy gives the same results as the model until skipping is turned on.

    skip: share of neurons, score and calibration text. The thresholds replace existing ones; a split model becomes one
    file. n_ctx: tokens per chunk, at least 16. force: replace output if it exists. The other parameters are those of
    calibrate().

    Raises MackoError (as calibrate(); a model without feed-forward parts with a gate or a ReLU, or in GPU memory) or
    OSError.
    """
    if n_ctx < MIN_ROWS:
        raise errors.usage_error(f"-c {n_ctx}: at least {MIN_ROWS}")
    read_text(skip.text)  # checks the text before the model is loaded
    with Model(model) as source, AtomicOutput(output, [*shard_paths(model), skip.text], force) as opened:
        settings: EvaluationOptions = {"n_batch": N_BATCH, "n_gpu_layers": -1, **options}
        with SkippingModel(model, skip.score, n_ctx=n_ctx, **settings) as skipper:
            rule = take_thresholds(skipper, skip)
        write_with_keys(source, [*without_rule(source.stored_keys), *rule.keys()], opened)
        opened.seal()
        with Model(opened.partial) as written:
            if read_rule(written) != rule or not is_written(source, written):
                raise errors.error(errors.FILE_CHANGED, f"{opened.path}: the file does not hold what was written")
        opened.commit()
    return ActivationCalibration(opened.path, rule)


def take_thresholds(skipper: SkippingModel, skip: SkipOptions) -> SkipRule:
    """Makes a model skip neurons by the options, with thresholds from their text. Returns the rule."""
    chunks: Chunks = skipper.model.read_chunks(skip.text, skip.n_chunks)
    console.log(f"thresholds: {len(chunks)} chunks of {skip.text}")
    skipper.calibrate(chunks)
    skipper.skip(skipper.shares(skip, chunks))
    return skipper.rule(skip, len(chunks))
