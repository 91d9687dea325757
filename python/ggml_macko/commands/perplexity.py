"""The command line of `macko perplexity`."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from .. import console, errors
from ..commands.arguments import Number, add_force, add_quiet
from ..commands.skip_arguments import add_skip_allocation, add_skip_score, given
from ..commands.text_arguments import add_text_arguments, text_arguments
from ..evaluation.likelihood import Estimate
from ..evaluation.perplexity import kl_divergence, perplexity, skipped_perplexity
from ..evaluation.skipping import SkipOptions
from ..evaluation.text_model import N_BATCH

HELP = "measure perplexity, and KL divergence from another model"

N_TOKENS = 8192
"""Tokens that are evaluated by default: a model of 1 B weights takes about a minute on two cores."""

FROM_FILE = "file"
"""The value of --skip that is not a number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures the perplexity of a GGUF model, dense or sparse, on a text, as llama-perplexity does. With "
        "--kl-divergence-base, the command also writes the model's log-probabilities to a file. With --kl-divergence, "
        "it compares the model with such a file, which also contains the text. llama-perplexity reads and writes the "
        "same files. "
        "With --skip, the command measures the loss of quality if the least important feed-forward neurons are skipped "
        "for each token (parts with a gate, or with a ReLU and no gate). This measurement runs on the CPU and is not "
        "faster. `--skip file` uses the thresholds in the model file (macko calibrate --activations)."
    )
    default = f"as many as {N_TOKENS} tokens fill, with --kl-divergence all; -1: all"
    add_text_arguments(parser, N_BATCH, file_required=False, n_chunks=None, chunks_default=default)
    parser.add_argument(
        "--kl-divergence-base", metavar="FNAME", help="file of log-probabilities to write, or to compare with"
    )
    parser.add_argument(
        "--kl-divergence",
        action="store_true",
        help="compare with the model that wrote the file of --kl-divergence-base",
    )
    parser.add_argument(
        "--skip",
        type=share_or_file,
        metavar="SHARE",
        help="skip this share of the feed-forward neurons, 0 to 1; `file`: skip by the thresholds in the model file",
    )
    add_skip_score(parser)
    parser.add_argument("--skip-text", metavar="FNAME", help="text to derive thresholds from; not the measured text")
    parser.add_argument(
        "--skip-chunks",
        type=Number(-1),
        metavar="N",
        help=f"chunks of this text, from its start; -1: all (default: {SkipOptions.n_chunks})",
    )
    add_skip_allocation(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_force(parser, "FNAME")
    add_quiet(parser)


def share_or_file(text: str) -> float | str:
    """The value of --skip."""
    try:
        return FROM_FILE if text == FROM_FILE else Number(0, 1, float)(text)
    except argparse.ArgumentTypeError as e:
        raise argparse.ArgumentTypeError(f"{e}, nor {FROM_FILE}") from None


def run(args: argparse.Namespace) -> int:
    skip_options = given(
        text=args.skip_text, score=args.skip_score, allocation=args.skip_allocation, n_chunks=args.skip_chunks
    )
    args.limit = 0  # the default limit of chunks; 0: none
    if args.n_chunks is None:
        args.limit = 0 if args.kl_divergence else max(1, N_TOKENS // args.n_ctx)
        args.n_chunks = args.limit or -1
    if args.skip is not None:
        return run_skipping(args, skip_options)
    if skip_options:
        raise errors.usage_error("--skip is missing: the share of the neurons to skip")
    if args.kl_divergence:
        if args.kl_divergence_base is None:
            raise errors.usage_error("--kl-divergence-base is missing: the file to compare with")
        found = kl_divergence(args.model, args.kl_divergence_base, **text_arguments(args))
        if args.json:
            console.print_json(found.as_json())
        else:
            print(found.text())
        return 0
    if args.text is None:
        raise errors.usage_error("-f is missing: the text to measure on")
    estimate = perplexity(
        args.model,
        args.text,
        n_ctx=args.n_ctx,
        kl_divergence_base=args.kl_divergence_base,
        force=args.force,
        **text_arguments(args),
    )
    log_limit(args, estimate)
    if args.json:
        console.print_json({"model": args.model, "text": args.text, **estimate_values(estimate)})
        return 0
    print_estimate(estimate)
    return 0


def run_skipping(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Measures with skipped neurons. options: the fields of SkipOptions that the command line sets."""
    if args.kl_divergence or args.kl_divergence_base is not None:
        raise errors.usage_error("--skip measures perplexity only, no KL divergence")
    if args.text is None:
        raise errors.usage_error("-f is missing: the text to measure on")
    if args.skip == FROM_FILE:
        if options:
            raise errors.usage_error("--skip file: the file says the rest; no other --skip options")
        skip = None
    else:
        if args.skip_text is None:
            raise errors.usage_error("--skip-text is missing: the text to take thresholds from")
        skip = SkipOptions(args.skip, **options)
    console.log(
        "--skip measures quality only: nothing is faster; with GGML_MACKO_LOAD=act-thresholds the CPU skips by "
        "thresholds"
    )
    found = skipped_perplexity(args.model, args.text, skip, n_ctx=args.n_ctx, **text_arguments(args))
    log_limit(args, found.estimate)
    if args.json:
        console.print_json(
            {
                "model": args.model,
                "text": args.text,
                **estimate_values(found.estimate),
                "skip": {
                    **dataclasses.asdict(found.skip),
                    "measured": found.share,
                    "parts": [dataclasses.asdict(part) for part in found.parts],
                },
            }
        )
        return 0
    print_estimate(found.estimate)
    print(f"skipped: {found.share:.2%} of the neurons in {len(found.parts)} layers (wanted: {found.skip.share:.2%})")
    return 0


def estimate_values(estimate: Estimate) -> dict[str, float]:
    """For JSON."""
    return {"ppl": estimate.ppl, "error": estimate.error, "nll": estimate.nll, "n_tokens": estimate.n_tokens}


def log_limit(args: argparse.Namespace, estimate: Estimate) -> None:
    """Logs that the text may be longer than the measured part."""
    if args.limit and estimate.n_tokens >= args.limit * (args.n_ctx - 1 - args.n_ctx // 2):
        console.log(f"note: the first {args.limit} chunks of the text; --chunks -1 measures all of it")


def print_estimate(estimate: Estimate) -> None:
    print(f"Final estimate: PPL = {estimate.ppl:.4f} +/- {estimate.error:.5f}")
