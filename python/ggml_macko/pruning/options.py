"""The options of `prune`, parsed and checked.

Every module of this package may import this one. Errors name the option of the command line, for example --loss-shift
for the parameter loss_shift.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Union

from .. import errors, system
from ..codecs.value_types import VALUE_NAMES
from ..evaluation import likelihood
from ..evaluation.text_model import N_CALIBRATION_CHUNKS, N_CTX

Sparsity = Union[str, float, Fraction]
"""A share of zeros from 0 to 1. A float counts as the decimal number that Python prints for it: 0.7 is 7/10."""

METHODS = {"magnitude": "row", "wanda": "row", "sparsegpt": "tensor", "alps": "tensor"}
"""Pruning method -> default of compare_within."""

ALLOCATIONS = ("uniform", "loss")

EXPERT_SCORES = ("reap", "frequency", "random")
"""Scores by which whole experts are removed."""

VALUES = tuple(VALUE_NAMES.values())
"""The quantized types that weights may be fitted to."""

LOSS_SHIFT = Fraction("0.2")
"""Largest distance of a tensor's sparsity from the mean for `--allocation loss`."""

DAMPING = 0.01
"""Addition to the diagonal of the Hessian, as a multiple of its mean; the value of the SparseGPT paper."""

MIN_HESSIAN_MEMORY = 2 << 30
"""Smallest default number of bytes for Hessians."""


def hessian_memory(root: Path = Path("/")) -> int:
    """The default number of bytes for Hessians: half of the free memory, for few passes over the text.

    root: parent of proc/ and sys/. A memory limit of a container counts.
    """
    machine, container = system.memory(root), system.container_memory(root)
    free = [n for n in (machine and machine.free, container) if n is not None]
    return max(min(free, default=0) // 2, MIN_HESSIAN_MEMORY)


class TableEntry(NamedTuple):
    """The sparsity of the tensors whose names match the regular expression."""

    regex: re.Pattern[str]
    sparsity: Fraction


@dataclass(frozen=True)
class PruneOptions:
    """How to prune a model.

    By default, the matrices of all transformer blocks are pruned, each expert as a separate matrix; embeddings, output
    head, norms, biases and routers are not. include: prune only tensors of two or more dimensions whose names contain
    one of these texts. exclude: do not prune tensors whose names contain one of these texts.

    sparsity: share of zeros; exactly floor(S * n) weights of each row or matrix of n weights become zero.
    tensor_sparsity: (regular expression, sparsity) pairs; the first match with a tensor's name counts. allocation:
    "uniform", or "loss": the sparsities, at most loss_shift from the mean, at which the loss on a few chunks of the
    text rises least, measured with one tensor pruned at a time. method: "magnitude": prune the smallest |w|; "wanda":
    the smallest |w_ij| * ||x_j|| (arXiv 2306.11695, section 3); "sparsegpt": the weights whose loss the others can best
    compensate (arXiv 2301.00774, section 3); "alps": the same by ADMM over the whole matrix (arXiv 2406.07831). refit:
    with the other methods, fit the remaining weights as ALPS does. compare_within: "row", "tensor" (a matrix) or
    "model"; sparsegpt always compares within 128 columns of a matrix, alps within the matrix.

    experts: share of the experts of each block to remove before any zeros are made: floor(share * n) of n experts.
    With experts and without a sparsity, prune() makes no zeros. expert_score: "reap": remove the experts with the
    lowest mean norm of router weight times output, over the tokens of the text that are routed to them (arXiv
    2510.13999, REAP); "frequency": those of the fewest tokens; "random": any, by seed.

    imatrix: statistics for wanda, a file of calibrate() or llama-imatrix. text: calibration text, of which n_chunks
    (-1: all) evenly spread chunks of n_ctx tokens are evaluated. sequential: repeat this after each pruned block.
    asymmetric: for alps and refit, repeat this for each input of a block, and fit outputs to those of the dense model;
    the value is the share (0 to 1) of the change of the inputs that is corrected. quant_values: "q8", "q5", "q4" or
    "q3": after pruning, fit the remaining weights to values of this type, which `convert` to its sparse type finds;
    without a sparsity, only existing zeros stay zero. keep_mantissa: give weights that sparsegpt, alps and refit change
    all bits of their type (default: round them to the 8 or 11 significant bits of 99 % of the tensor's weights, if they
    have so few, for a small sparse-lossless file). damping: addition to the diagonal of the Hessians of sparsegpt, alps
    and refit, as a multiple of its mean. hessian_memory: bytes for Hessians (default: half of the free memory); less
    memory means more passes over the text and the same result. device: "auto" uses a GPU if CuPy finds one, "none" the
    CPU. n_threads: 0: all cores.
    """

    sparsity: Sparsity | None = None
    method: str = "magnitude"
    compare_within: str | None = None
    allocation: str = "uniform"
    loss_shift: Sparsity = LOSS_SHIFT
    tensor_sparsity: Iterable[tuple[str, Sparsity]] = ()
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    experts: Sparsity | None = None
    expert_score: str = "reap"
    seed: int = 0
    imatrix: str | os.PathLike[str] | None = None
    text: str | os.PathLike[str] | None = None
    n_chunks: int = N_CALIBRATION_CHUNKS
    n_ctx: int = N_CTX
    sequential: bool = False
    refit: bool = False
    asymmetric: float | None = None
    quant_values: str | None = None
    keep_mantissa: bool = False
    damping: float = DAMPING
    hessian_memory: int | None = None
    device: str = "auto"
    n_threads: int = 0


@dataclass(frozen=True)
class ParsedOptions(PruneOptions):
    """Parsed options, the result of parse()."""

    sparsity: Fraction = Fraction(0)
    compare_within: str = "row"
    loss_shift: Fraction = LOSS_SHIFT
    table: tuple[TableEntry, ...] = ()  # the first matching entry counts, otherwise sparsity
    experts: Fraction | None = None
    makes_zeros: bool = True  # False: only removes experts
    imatrix: str | None = None
    text: str | None = None
    hessian_memory: int = MIN_HESSIAN_MEMORY

    @property
    def needs_passes(self) -> bool:
        """Whether more is needed than the sums of squares of the dense model."""
        return self.needs_hessians or self.sequential

    @property
    def needs_hessians(self) -> bool:
        """Whether remaining weights change, or the selection needs more than a score."""
        return self.refit or self.method in ("sparsegpt", "alps") or self.quant_values is not None

    @property
    def repeats_text(self) -> bool:
        """Whether each pass over the text begins where another ended."""
        return self.sequential or self.asymmetric is not None or self.allocation == "loss"

    def check(self) -> None:
        """Raises UsageError for a value out of range and for options that do not go together."""
        check_choice("--compare-within", self.compare_within, ("row", "tensor", "model"))
        check_choice("--allocation", self.allocation, ALLOCATIONS)
        check_choice("--device", self.device, ("auto", "none"))
        refuse_if(
            self.method in ("sparsegpt", "alps") and self.compare_within != "tensor",
            f"--compare-within {self.compare_within} does not go with {self.method}, which compares within "
            + ("a matrix" if self.method == "alps" else "128 columns of a matrix"),
        )
        check_values(self.quant_values, self.keep_mantissa)
        self._check_experts()
        refuse_if(
            self.compare_within == "model"
            and (self.allocation != "uniform" or self.sequential or self.refit or self.quant_values is not None),
            "--compare-within model goes with none of --allocation loss, --sequential, --refit and --quant-values",
        )
        refuse_if(self.refit and self.method == "alps", "--refit: alps already fits the remaining weights")
        if self.asymmetric is not None:
            refuse_if(
                not (self.refit or self.method == "alps" or self.quant_values is not None),
                f"--asymmetric: {self.method} has no targets; use --method alps, --refit or --quant-values",
            )
            refuse_if(self.sequential, "--asymmetric already renews the statistics for each input; omit --sequential")
            wrong = not 0 <= self.asymmetric <= 1
            refuse_if(wrong, f"--asymmetric {self.asymmetric}: expected a number from 0 to 1")
        refuse_if(
            self.sequential and self.method == "magnitude" and not self.needs_hessians,
            "--sequential: magnitude needs no statistics",
        )
        users = {
            "--sequential": self.sequential,
            "--refit": self.refit,
            f"--quant-values {self.quant_values}": self.quant_values,
        }
        user = next((option for option, is_set in users.items() if is_set), self.method)
        if self.text is None:
            refuse_if(self.needs_passes, f"{user} needs a calibration text: -f FNAME")
            refuse_if(self.allocation == "loss", "--allocation loss needs a calibration text: -f FNAME")
            is_lacking = self.imatrix is None and self.method == "wanda"
            refuse_if(is_lacking, "wanda needs statistics: --imatrix FILE (see `macko calibrate`) or -f FNAME")
        refuse_if(self.n_chunks == 0 or self.n_ctx < 2, "--chunks 0 or -c below 2 measures nothing")
        refuse_if(not 0 < self.damping < float("inf"), f"--damping {self.damping:g}: expected a positive number")
        refuse_if(self.hessian_memory < 1, "--hessian-memory: expected at least 1")
        refuse_if(self.loss_shift == 0, "--loss-shift 0 is uniform allocation")
        refuse_if(
            self.allocation == "loss" and self.n_ctx < likelihood.MIN_CTX,
            f"-c {self.n_ctx}: --allocation loss needs at least {likelihood.MIN_CTX}",
        )

    def _check_experts(self) -> None:
        check_choice("--expert-score", self.expert_score, EXPERT_SCORES)
        is_random = self.expert_score == "random"
        refuse_if(self.experts is None and self.expert_score != "reap", "--expert-score needs --experts")
        refuse_if(self.seed != 0 and not is_random, "--seed needs --expert-score random")
        refuse_if(self.seed < 0, f"--seed {self.seed}: expected at least 0")
        if self.experts is not None:
            refuse_if(
                self.text is None and not is_random,
                "--experts needs a calibration text: -f FNAME, or --expert-score random",
            )
            refuse_if(
                self.imatrix is not None,
                "--experts does not go with --imatrix, whose statistics are those of all experts; use -f FNAME",
            )


def parse(given: PruneOptions) -> ParsedOptions:
    """Parses and checks options. Raises UsageError."""
    check_choice("--method", given.method, METHODS)
    table = parse_table(given.tensor_sparsity)
    is_only_values = given.quant_values is not None and not table and given.allocation == "uniform"
    sparsity = given.sparsity
    if sparsity is None and is_only_values and given.compare_within is None:
        sparsity = 0.0
    makes_zeros = given.experts is None or sparsity is not None or bool(table) or _says_how(given)
    if not makes_zeros:
        sparsity = 0.0
    if sparsity is None:
        raise errors.usage_error("--sparsity is missing")
    parsed: dict[str, Any] = {
        "sparsity": parse_sparsity(sparsity),
        "compare_within": given.compare_within or METHODS[given.method],
        "loss_shift": parse_sparsity(given.loss_shift, "--loss-shift"),
        "tensor_sparsity": (),
        "table": table,
        "experts": None if given.experts is None else parse_sparsity(given.experts, "--experts"),
        "makes_zeros": makes_zeros,
        "imatrix": path_or_none(given.imatrix),
        "text": path_or_none(given.text),
        "hessian_memory": hessian_memory() if given.hessian_memory is None else given.hessian_memory,
    }
    options = ParsedOptions(**{**vars(given), **parsed})
    options.check()
    return options


def _says_how(given: PruneOptions) -> bool:
    """Whether an option is set that says where zeros go, so that --sparsity is missing without them."""
    names = ("method", "compare_within", "allocation", "sequential", "refit", "asymmetric", "keep_mantissa")
    default = PruneOptions()
    return bool(given.include or given.exclude) or any(getattr(given, n) != getattr(default, n) for n in names)


def refuse_if(wrong: bool, text: str) -> None:
    """Raises UsageError with the text if options are wrong."""
    if wrong:
        raise errors.usage_error(text)


def check_choice(option: str, value: str, choices: Iterable[str]) -> None:
    """Raises UsageError unless value is one of the choices."""
    choices = list(choices)
    refuse_if(value not in choices, f"{option} {value}: expected one of {', '.join(choices)}")


def check_values(quant_values: str | None, keep_mantissa: bool, choices: Sequence[str] = VALUES) -> None:
    """Raises UsageError for options of the values that are wrong or do not go together."""
    if quant_values is not None:
        check_choice("--quant-values", quant_values, choices)
        refuse_if(keep_mantissa, "--keep-mantissa does not go with --quant-values")


def parse_sparsity(value: Sparsity, option: str = "--sparsity") -> Fraction:
    """The exact fraction: 0.7 of 10 weights is 7, in spite of binary floating point. Raises UsageError unless the value
    is a number from 0 to 1.
    """
    text = str(value)
    fraction = _fraction(text.rstrip("%"))
    is_share = fraction is not None and 0 <= fraction <= 1 and not text.endswith("%")
    if fraction is None or not is_share:
        is_percentage = fraction is not None and 0 < fraction <= 100 and (fraction > 1 or text.endswith("%"))
        hint = f"; did you mean {float((fraction or 0) / 100):g}?" if is_percentage else ""
        raise errors.usage_error(f"{option} {value}: expected a number from 0 to 1{hint}")
    return fraction


def _fraction(text: str) -> Fraction | None:
    try:
        return None if re.search(r"[eE][-+]?\d{4}", text) else Fraction(text)  # 1e-999999999 takes all memory
    except (ValueError, ZeroDivisionError):
        return None


def parse_table(entries: Iterable[tuple[str, Sparsity]]) -> tuple[TableEntry, ...]:
    """(regular expression, sparsity) pairs, compiled and checked. Raises UsageError."""
    table = []
    for regex, sparsity in entries:
        try:
            table.append(TableEntry(re.compile(regex), parse_sparsity(sparsity, f"--tensor-sparsity {regex}=")))
        except re.error as e:
            raise errors.usage_error(f"--tensor-sparsity {regex}={sparsity}: {e}") from e
    return tuple(table)


def path_or_none(path: str | os.PathLike[str] | None) -> str | None:
    """A path as text; an empty one counts as none."""
    return os.fspath(path) or None if path is not None else None
