"""The command line of `macko perplexity`."""

from __future__ import annotations

import argparse

from .. import console, errors
from ..commands.arguments import add_quiet
from ..commands.text_arguments import add_text_arguments, text_arguments
from ..evaluation.perplexity import kl_divergence, perplexity
from ..evaluation.text_model import N_BATCH

HELP = "perplexity of a model, and its KL divergence from another"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Perplexity of a GGUF model, dense or sparse, on a text: the figure of llama-perplexity. With "
        "--kl-divergence-base it also writes the model's log-probabilities to a file; with --kl-divergence it compares "
        "the model with those of such a file, which holds the text too. The file is llama-perplexity's."
    )
    add_text_arguments(parser, N_BATCH, file_required=False)
    parser.add_argument(
        "--kl-divergence-base", metavar="FNAME", help="file of log-probabilities to write, or to compare with"
    )
    parser.add_argument(
        "--kl-divergence",
        action="store_true",
        help="compare with the model that wrote the file of --kl-divergence-base",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--force", action="store_true", help="replace FNAME if it exists")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    if args.kl_divergence:
        if args.kl_divergence_base is None:
            raise errors.usage_error("--kl-divergence-base is missing: the file to compare with")
        found = kl_divergence(args.model, args.kl_divergence_base, **text_arguments(args))
        if args.json:
            console.print_json(found.as_json())
        else:
            print(found.text())
        return 0
    if args.file is None:
        raise errors.usage_error("-f is missing: the text to measure on")
    estimate = perplexity(
        args.model,
        args.file,
        n_ctx=args.ctx_size,
        kl_divergence_base=args.kl_divergence_base,
        force=args.force,
        **text_arguments(args),
    )
    if args.json:
        values = {"ppl": estimate.ppl, "error": estimate.error, "nll": estimate.nll, "n_tokens": estimate.n_tokens}
        console.print_json({"model": args.model, "text": args.file, **values})
        return 0
    print(f"Final estimate: PPL = {estimate.ppl:.4f} +/- {estimate.error:.5f}")
    return 0
