"""What `recover` is asked to do: the options, checked. Errors name an option as the command line spells it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..evaluation import likelihood
from ..evaluation.text_model import N_CTX
from ..pruning.options import VALUES, check_choice, refuse_if

METHODS = ("distill", "blocks")

RATE_TIMES_WIDTH = 0.256
"""The highest learning rate of a run, times the length of the model's embeddings, where no rate is given: 1e-3 was the
best of 3e-4, 1e-3 and 3e-3 at a length of 256, and the wider a model, the smaller its weights.
"""

EPOCHS = {"distill": 4, "blocks": 4}
"""Method -> how often the text is read where nothing is said."""

BATCH_SIZE = 2
"""Chunks of a training step. With 8, and as often the same text, far less was recovered."""

N_HELD_OUT = 32
"""Chunks of the held-out text, at most."""

N_EVALUATIONS = 10
"""Measurements on the held-out text during a run."""

PATIENCE = 3
"""Measurements in a row without a better one after which a run ends, in its second half."""

WARMUP = 0.05
"""Share of the steps in which the learning rate rises from 0; then it falls along half a cosine to FINAL_RATE."""

FINAL_RATE = 0.05
"""The last learning rate, as a share of the highest."""

HELD_OUT_SHARE = 1 / 16
"""Share of the text's chunks, from its end, that the result is chosen by where no held-out text is given."""


@dataclass(frozen=True)
class RecoverOptions:
    """How to recover a model.

    text: UTF-8, cut into chunks of n_ctx tokens; n_chunks: how many of them, -1 is all. method: "distill": the whole
    model learns the dense one's probabilities of the next token; "blocks": each attention and feed-forward part in
    turn learns the hidden states. held_out: the text that the best weights are chosen by, n_held_out chunks of it at
    most; without it, the last sixteenth of the text. n_self_generated: so many chunks more to train on, which the dense
    model writes: each goes on from a few tokens of the text. n_epochs: how often the text is read; 0: EPOCHS of the
    method. batch_size: chunks of a step. learning_rate: the highest; 0: RATE_TIMES_WIDTH over the length of the
    embeddings. n_evaluations: on the held-out text during a run; patience: how many without a better one end it, in its
    second half. gradient_checkpointing: less memory for a third more time. quant_values: "q8_0", "q5_0", "q4_nl" or
    "q4_0": matrices are trained with values of this type, which `convert` to its sparse type finds again.
    keep_mantissa: without it, weights are rounded to the significant bits that they had. seed: of the order of the
    text. device: "auto", a GPU where PyTorch finds one, or "cpu". n_threads: of the CPU; 0 is all.
    """

    text: str | os.PathLike[str]
    method: str = "distill"
    held_out: str | os.PathLike[str] | None = None
    n_held_out: int = N_HELD_OUT
    n_chunks: int = -1
    n_ctx: int = N_CTX
    n_self_generated: int = 0
    n_epochs: int = 0
    batch_size: int = BATCH_SIZE
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

    def rate(self, n_embd: int) -> float:
        """The highest learning rate for a model whose embeddings have this length."""
        return self.learning_rate or RATE_TIMES_WIDTH / n_embd

    def check(self) -> None:
        """Raises UsageError for a value out of range."""
        check_choice("--method", self.method, METHODS)
        check_choice("--device", self.device, ("auto", "cpu"))
        if self.quant_values is not None:
            check_choice("--quant-values", self.quant_values, VALUES)
        refuse_if(
            self.quant_values is not None and self.keep_mantissa,
            "--keep-mantissa does not go with --quant-values",
        )
        refuse_if(self.n_ctx < likelihood.MIN_CTX, f"-c {self.n_ctx}: at least {likelihood.MIN_CTX}")
        refuse_if(self.n_chunks == 0, "--chunks 0 trains nothing")
        for option, number, least in (
            ("--epochs", self.n_epochs, 0),
            ("--self-generated", self.n_self_generated, 0),
            ("--batch-size", self.batch_size, 1),
            ("--held-out-chunks", self.n_held_out, 1),
            ("--evaluations", self.n_evaluations, 1),
            ("--patience", self.patience, 1),
            ("--seed", self.seed, 0),
        ):
            refuse_if(number < least, f"{option} {number}: at least {least}")
        refuse_if(
            not 0 <= self.learning_rate < 1, f"--learning-rate {self.learning_rate:g}: expected a number from 0 to 1"
        )
