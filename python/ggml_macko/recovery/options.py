"""The options of `recover` and their checks. Errors name the options of the command line."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass

from ..codecs import dense_blocks
from ..evaluation import likelihood
from ..evaluation.text_model import N_CTX
from ..pruning.options import VALUES, check_choice, check_values, refuse_if

METHODS = ("distill", "blocks")

ALL_VALUES = (*VALUES, *dense_blocks.NAMES)
"""The quantized types whose values weights may have in training."""

FIRST_RATE, RATE_FACTOR = 3e-3, math.sqrt(10)
"""The learning rate that is tried first if none is given, relative to the weights of a tensor, and the factor between
two that are tried. The best of short trials was that of whole runs for docs-4m and docs-23m with 50 and 70 % zeros.
"""

MAX_POWER = 6
"""Largest power of RATE_FACTOR that is tried, up or down."""

TRIAL_STEPS, TRIAL_SHARE = 32, 1 / 28
"""The steps of the trial of a rate: the larger of this number and this share of the run, in short runs a sixteenth. A
trial that is shorter relative to its run prefers rates that are too low: with 32 of 7,400 steps, a tenth of the best.
"""

TRIAL_TOLERANCE = 0.1
"""The highest rate is chosen whose trial lacks at most this share of what the best trial recovers, because the noise of
a high rate fades in a run, and the progress of a low one ends.
"""

BLOCKS_RATE = 1e-2
"""Default of the highest learning rate of --method blocks."""

EPOCHS = {"distill": 4, "blocks": 4}
"""Method -> default number of passes over the text."""

BATCH_SIZES, LEAST_STEPS = (8, 4, 2), 1500
"""Chunks per training step: the first of them with which a run has at least this number of steps, else the last. Few
large steps recover less than many small ones, but a long run of small ones needs a low rate, and recovers less too.
"""

N_HELD_OUT = 32
"""Largest number of chunks of the held-out text."""

N_EVALUATIONS = 10
"""Measurements on the held-out text during a run."""

PATIENCE = 3
"""Measurements without improvement after which a run ends, in its second half."""

WARMUP = 0.05
"""Share of the steps in which the learning rate rises from 0; then it falls along half a cosine to FINAL_RATE."""

FINAL_RATE = 0.05
"""The last learning rate, as a share of the highest."""

HELD_OUT_SHARE = 1 / 16
"""Share of the text, at its end, that replaces a missing held-out text."""


@dataclass(frozen=True)
class RecoverOptions:
    """How to recover a model.

    text: UTF-8, split into chunks of n_ctx tokens; n_chunks: number of chunks (-1: all). method: "distill": the whole
    model learns the dense model's probabilities of the next token; "blocks": each attention and feed-forward part in
    turn learns the hidden states. held_out: text that selects the best weights, up to n_held_out chunks of it (default:
    the last sixteenth of the text). n_self_generated: additional training chunks that the dense model writes, each
    starting with a few tokens of the text. n_epochs: passes over the text; 0: EPOCHS of the method. batch_size: chunks
    per step; 0: by the length of the run (BATCH_SIZES). learning_rate: the highest one, relative to the root mean
    square of each tensor; 0: a trial chooses it. n_evaluations: on the held-out text during a run; patience: in the
    second half of the run, the number without improvement that ends it. gradient_checkpointing: less memory for a third
    more time. quant_values: "q8", "q5", "q4" or "q3": train matrices with values of this type, which `convert` to its
    sparse type finds; "dense-q4_0", "dense-q4_k", "dense-q3_k" or "dense-q2_k": train all weights of a dense model with
    values of this type of ggml, and write the matrices in it (q4_0 if their columns are no multiple of 256).
    keep_mantissa: give weights all bits of their type (default: round them to their former significant bits). seed: of
    the order of the text. device: "auto" for a GPU if PyTorch finds one, or "cpu". n_threads: of the CPU; 0: all cores.
    """

    text: str | os.PathLike[str]
    method: str = "distill"
    held_out: str | os.PathLike[str] | None = None
    n_held_out: int = N_HELD_OUT
    n_chunks: int = -1
    n_ctx: int = N_CTX
    n_self_generated: int = 0
    n_epochs: int = 0
    batch_size: int = 0
    learning_rate: float = 0.0
    n_evaluations: int = N_EVALUATIONS
    patience: int = PATIENCE
    gradient_checkpointing: bool = False
    quant_values: str | None = None
    keep_mantissa: bool = False
    seed: int = 0
    device: str = "auto"
    n_threads: int = 0

    @property
    def epochs(self) -> int:
        return self.n_epochs or EPOCHS[self.method]

    def with_batch_size(self, n_chunks: int) -> RecoverOptions:
        """These options with a batch size. n_chunks: of one pass over the text."""
        fitting = (size for size in BATCH_SIZES if n_chunks * self.epochs >= LEAST_STEPS * size)
        return dataclasses.replace(self, batch_size=self.batch_size or next(fitting, BATCH_SIZES[-1]))

    @property
    def start(self) -> str:
        """The model before the training."""
        return "quantized" if self.quant_values is not None and self.method == "distill" else "pruned"

    def check(self) -> None:
        """Raises UsageError for a value out of range."""
        check_choice("--method", self.method, METHODS)
        check_choice("--device", self.device, ("auto", "cpu"))
        check_values(self.quant_values, self.keep_mantissa, ALL_VALUES)
        refuse_if(
            self.method != "distill" and self.quant_values in dense_blocks.NAMES,
            f"--quant-values {self.quant_values} does not go with --method {self.method}",
        )
        refuse_if(self.n_ctx < likelihood.MIN_CTX, f"-c {self.n_ctx}: at least {likelihood.MIN_CTX}")
        refuse_if(self.n_chunks == 0, "--chunks 0 trains nothing")
        for option, number, least in (
            ("--epochs", self.n_epochs, 0),
            ("--self-generated", self.n_self_generated, 0),
            ("--batch-size", self.batch_size, 0),
            ("--held-out-chunks", self.n_held_out, 1),
            ("--evaluations", self.n_evaluations, 1),
            ("--patience", self.patience, 1),
            ("--seed", self.seed, 0),
        ):
            refuse_if(number < least, f"{option} {number}: at least {least}")
        refuse_if(
            not 0 <= self.learning_rate < 1, f"--learning-rate {self.learning_rate:g}: expected a number from 0 to 1"
        )
