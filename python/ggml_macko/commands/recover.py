"""The command line of `macko recover`."""

from __future__ import annotations

import argparse

from .. import console
from ..commands.arguments import add_quiet
from ..evaluation.text_model import N_CTX
from ..pruning.options import VALUES
from ..recovery import options
from ..recovery.recover import recover

HELP = "train the weights that pruning left, with the dense model as the teacher"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains the non-zeros of a pruned GGUF on a text, so that it behaves like the dense model that it was made "
        "from, and writes a dense GGUF with the same zeros; then use `macko convert`. Needs PyTorch (pip install "
        "'ggml-macko[train]'); uses a GPU where PyTorch finds one. Block matrices, norms and biases are trained, "
        "embeddings and head are not. Models: llama, arcee, qwen2, qwen3, gemma2, gemma3 without experts. An "
        "interrupted run leaves OUT.checkpoint; the same command continues from there."
    )
    parser.add_argument("input", metavar="IN", help="pruned GGUF, dense or sparse; the first file of a split one")
    parser.add_argument("output", metavar="OUT", help="GGUF to write")
    parser.add_argument("--dense", required=True, metavar="DENSE", help="the dense model that IN was made from")
    parser.add_argument("-f", "--file", required=True, metavar="FNAME", help="text to train on")
    _add_texts(parser.add_argument_group("texts"))
    _add_training(parser.add_argument_group("training"))
    parser.add_argument("-t", "--threads", type=int, default=0, metavar="N", help="threads (default: all cores)")
    parser.add_argument(
        "-dev", "--device", choices=["auto", "cpu"], default="auto", help="auto (default): a GPU, if there is one"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    add_quiet(parser)


def _add_texts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--chunks", type=int, default=-1, metavar="N", help="chunks of the text to use (default: %(default)s, all)"
    )
    group.add_argument(
        "-c", "--ctx-size", type=int, default=N_CTX, metavar="N", help=f"tokens of a chunk (default: {N_CTX})"
    )
    group.add_argument(
        "--held-out",
        metavar="FNAME",
        help="text that the best weights are chosen by (default: the last sixteenth of the text, which is then not "
        "trained on)",
    )
    group.add_argument(
        "--held-out-chunks",
        type=int,
        default=options.N_HELD_OUT,
        metavar="N",
        help="chunks of it at most, spread evenly (default: %(default)s)",
    )

    group.add_argument(
        "--self-generated",
        type=int,
        default=0,
        metavar="N",
        help="train on N chunks more that the dense model writes, each from a few tokens of the text (default: 0)",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    epochs = options.EPOCHS
    group.add_argument(
        "--method",
        choices=options.METHODS,
        default="distill",
        help="distill: the whole model learns the dense one's probabilities of the next token (default); blocks: one "
        "part of a block at a time learns its hidden states, which needs less memory and recovers less",
    )
    group.add_argument(
        "--epochs",
        type=int,
        default=0,
        metavar="N",
        help=f"how often the text is read (default: {epochs['distill']} for distill, {epochs['blocks']} for blocks)",
    )
    group.add_argument(
        "--batch-size",
        type=int,
        default=options.BATCH_SIZE,
        metavar="N",
        help="chunks of a training step (default: %(default)s)",
    )
    group.add_argument(
        "--learning-rate",
        type=float,
        default=0.0,
        metavar="R",
        help=f"the highest of the run (default: {options.RATE_TIMES_WIDTH:g} over the length of the embeddings)",
    )
    group.add_argument(
        "--evaluations",
        type=int,
        default=options.N_EVALUATIONS,
        metavar="N",
        help="distill: how often the model is measured on the held-out text (default: %(default)s)",
    )
    group.add_argument(
        "--patience",
        type=int,
        default=options.PATIENCE,
        metavar="N",
        help="distill: in the second half of the run, end after N evaluations without a better one (default: "
        "%(default)s)",
    )
    group.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="distill: compute the hidden states of a block a second time in place of keeping them: less memory, a "
        "third more time",
    )
    group.add_argument(
        "--quant-values",
        choices=VALUES,
        help="train with values of this quantized type in all matrices, and write them; `macko convert ... "
        "sparse-q4_nl` (and so on) finds them again",
    )
    group.add_argument(
        "--keep-mantissa",
        action="store_true",
        help="give weights all bits of their type; without it they are rounded to the significant bits that they had "
        "(8 from BF16, 11 from F16), so that `macko convert ... sparse-lossless` can make them small",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of the text (default: 0)")


def run(args: argparse.Namespace) -> int:
    given = options.RecoverOptions(
        text=args.file,
        method=args.method,
        held_out=args.held_out,
        n_held_out=args.held_out_chunks,
        n_chunks=args.chunks,
        n_ctx=args.ctx_size,
        n_self_generated=args.self_generated,
        n_epochs=args.epochs,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        n_evaluations=args.evaluations,
        patience=args.patience,
        gradient_checkpointing=args.gradient_checkpointing,
        quant_values=args.quant_values,
        keep_mantissa=args.keep_mantissa,
        seed=args.seed,
        device=args.device,
        n_threads=args.threads,
    )
    report = recover(args.input, args.output, given, dense=args.dense, force=args.force)
    if args.json:
        console.print_json(report.__dict__)
        return 0
    rows = [
        ["dense", report.perplexity_dense, 0.0],
        ["pruned", report.perplexity_before, report.divergence_before],
        ["recovered", report.perplexity_after, report.divergence_after],
    ]
    print(console.table(rows, ["model", "held-out perplexity", "divergence from the dense model"]))
    memory = f", with {report.gpu_nbytes / 2**30:.1f} GiB on the GPU" if report.gpu_nbytes else ""
    print(f"\n{report.n_trained} weights trained in {report.seconds:.0f} s on {report.n_tokens} tokens{memory}")
    return 0
