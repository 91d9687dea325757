"""The command line of `macko calibrate`."""

from __future__ import annotations

import argparse
from typing import Any

from .. import console, errors
from ..commands.arguments import Number, add_force, add_quiet
from ..commands.skip_arguments import add_skip_allocation, add_skip_score, given
from ..commands.text_arguments import add_text_arguments, text_arguments
from ..evaluation.calibrate import N_BATCH, calibrate
from ..evaluation.calibrate_activations import calibrate_activations
from ..evaluation.skipping import SkipOptions
from ..evaluation.text_model import N_CALIBRATION_CHUNKS

HELP = "measure activation statistics of a model on a text"

IMATRIX = "imatrix.gguf"
CHECKPOINT_EVERY = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a text through a GGUF model, dense or sparse, and writes an imatrix file with the sum of squares of each "
        "input column of each weight. `macko prune --imatrix` and llama-quantize --imatrix read it; llama-imatrix "
        "writes the same file. A run that stops early leaves OUT.checkpoint, and the same command resumes from it, "
        "even with a different number of --chunks. "
        "With --activations, the command writes a copy of the model instead. The copy has thresholds, measured on the "
        "text, below which a feed-forward neuron may be skipped for a token. Its results are the same until skipping "
        "is turned on; `macko perplexity --skip file` measures the cost."
    )
    add_text_arguments(parser, N_BATCH, n_chunks=N_CALIBRATION_CHUNKS)
    parser.add_argument(
        "-o",
        "--output",
        "--output-file",
        metavar="FNAME",
        help=f"file to write (default: {IMATRIX}; required with --activations)",
    )
    parser.add_argument(
        "-ofreq",
        "--output-frequency",
        type=Number(0),
        metavar="N",
        help=f"write a checkpoint every N chunks (default: {CHECKPOINT_EVERY})",
    )
    parser.add_argument("--process-output", action="store_true", help="measure output.weight too")
    parser.add_argument(
        "--activations", action="store_true", help="write a copy of the model with thresholds for neurons"
    )
    parser.add_argument(
        "--skip",
        type=Number(0, 1, float),
        metavar="SHARE",
        help="with --activations: the share of neurons to skip, 0 to 1",
    )
    add_skip_score(parser)
    add_skip_allocation(parser)
    add_force(parser, "FNAME")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    skip_options = given(share=args.skip, score=args.skip_score, allocation=args.skip_allocation)
    if args.activations:
        return run_activations(args, skip_options)
    if skip_options:
        raise errors.usage_error("--activations is missing: --skip options need it")
    found = calibrate(
        args.model,
        args.text,
        args.output or IMATRIX,
        n_ctx=args.n_ctx,
        process_output=args.process_output,
        checkpoint_every=CHECKPOINT_EVERY if args.output_frequency is None else args.output_frequency,
        force=args.force,
        **text_arguments(args),
    )
    for name, s in sorted(found.entries.items()):
        if s.n_unused:
            console.log(f"warning: {name}: {s.n_unused} of {len(s.counts)} experts got no token")
    print(f"{found.path}: {len(found.entries)} weights, {found.n_chunks} chunks of {found.n_ctx} tokens")
    return 0


def run_activations(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Writes thresholds. options: the fields of SkipOptions that the command line sets."""
    if args.process_output or args.output_frequency is not None:
        raise errors.usage_error("--process-output and --output-frequency do not go with --activations")
    for value, option, what in (
        (args.skip, "--skip", "the share of the neurons to skip"),
        (args.output, "-o", "the copy of the model to write"),
    ):
        if value is None:
            raise errors.usage_error(f"{option} is missing: {what}")
    if args.n_chunks == 0:
        raise errors.usage_error("--chunks 0 measures nothing")
    arguments = text_arguments(args)
    skip = SkipOptions(text=args.text, n_chunks=arguments.pop("n_chunks"), **options)
    found = calibrate_activations(args.model, args.output, skip, n_ctx=args.n_ctx, force=args.force, **arguments)
    rule = found.rule
    print(
        f"{found.path}: thresholds of {len(rule.parts)} layers for {rule.share:.2%} of the neurons, "
        f"{rule.n_chunks} chunks of {rule.n_ctx} tokens"
    )
    return 0
