"""The command line of `macko recover`."""

from __future__ import annotations

import argparse
import contextlib
import os

from .. import console
from ..benchmark import plot
from ..commands.arguments import Number, add_chunks, add_force, add_quiet, add_threads, options_of
from ..pruning.options import refuse_if
from ..recovery import options
from ..recovery.recover import recover

HELP = "train the remaining weights of a pruned model, with the dense model as the teacher"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains the non-zeros of a pruned GGUF on a text, so that it behaves like the dense model that it was made "
        "from, and writes a dense GGUF with the same zeros; then use `macko convert`. The command needs PyTorch (pip "
        "install 'ggml-macko[train]') and uses a GPU if PyTorch finds one. It trains block matrices, norms and biases, "
        "but not embeddings and head. Supported models: llama (also with experts), arcee, qwen2, qwen3, qwen3moe, "
        "gemma2, gemma3, lfm2. A run that stops early leaves OUT.checkpoint, and the same command resumes from it."
    )
    parser.add_argument("input", metavar="IN", help="pruned GGUF, dense or sparse; the first file of a split model")
    parser.add_argument("output", metavar="OUT", help="GGUF to write")
    parser.add_argument("--dense", required=True, metavar="DENSE", help="dense or quantized model of IN")
    parser.add_argument("-f", "--file", dest="text", required=True, metavar="FNAME", help="text to train on")
    _add_texts(parser.add_argument_group("texts"))
    _add_training(parser.add_argument_group("training"))
    add_threads(parser)
    parser.add_argument(
        "-dev", "--device", choices=["auto", "cpu"], default="auto", help="auto: a GPU if there is one (default)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--plot",
        metavar="FNAME",
        help="distill: also draw the divergence and the learning rate of the run into this file (.png, .svg or .pdf; "
        "needs matplotlib)",
    )
    add_force(parser)
    add_quiet(parser)


def _add_texts(group: argparse._ArgumentGroup) -> None:
    add_chunks(group, -1, "chunks of the text to use")
    group.add_argument(
        "--held-out",
        metavar="FNAME",
        help="text that selects the best weights (default: the last sixteenth of the training text, which is then not "
        "trained on)",
    )
    group.add_argument(
        "--held-out-chunks",
        dest="n_held_out",
        type=Number(1),
        default=options.N_HELD_OUT,
        metavar="N",
        help="largest number of held-out chunks, spread evenly (default: %(default)s)",
    )
    group.add_argument(
        "--self-generated",
        dest="n_self_generated",
        type=Number(0),
        default=0,
        metavar="N",
        help="also train on N chunks that the dense model writes, each starting with a few tokens of the text "
        "(default: 0)",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    epochs = options.EPOCHS
    group.add_argument(
        "--method",
        choices=options.METHODS,
        default="distill",
        help="distill: the whole model learns the dense model's probabilities of the next token (default); blocks: one "
        "part of a block at a time learns the dense model's hidden states, which needs less memory and recovers less",
    )
    for option, name, default, what in (
        ("--epochs", "n_epochs", 0, f"passes over the text (default: {epochs['distill']}; blocks: {epochs['blocks']})"),
        (
            "--batch-size",
            "batch_size",
            0,
            f"chunks per training step (default: {', '.join(map(str, options.BATCH_SIZES))}: the first with which the "
            f"run has {options.LEAST_STEPS} steps or more)",
        ),
        (
            "--evaluations",
            "n_evaluations",
            options.N_EVALUATIONS,
            "distill: measurements on the held-out text during the run (default: %(default)s)",
        ),
        (
            "--patience",
            "patience",
            options.PATIENCE,
            "distill: in the second half of the run, stop after N evaluations without improvement (default: "
            "%(default)s)",
        ),
        ("--seed", "seed", 0, "seed of the order of the text (default: 0)"),
    ):
        group.add_argument(option, dest=name, type=Number(0), default=default, metavar="N", help=what)
    group.add_argument(
        "--learning-rate",
        type=Number(0, 1, float),
        default=0.0,
        metavar="R",
        help="highest learning rate of the run, relative to the root mean square of each tensor's weights (default: "
        f"the best of several rates in short trials; blocks: {options.BLOCKS_RATE:g})",
    )
    group.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="distill: compute the hidden states of each block twice instead of storing them, which takes less memory "
        "and a third more time",
    )
    group.add_argument(
        "--quant-values",
        choices=options.ALL_VALUES,
        help="train and write matrices with values of this quantized type; `macko convert ... sparse-q4` (and so "
        "on) finds the same values; dense-...: IN is a dense model (usually DENSE), all weights are trained, and OUT "
        "has its matrices in this type of llama.cpp",
    )
    group.add_argument(
        "--keep-mantissa",
        action="store_true",
        help="give weights all bits of their type (default: round them to their former significant bits, 8 from BF16, "
        "11 from F16, for a small sparse-lossless file)",
    )


def run(args: argparse.Namespace) -> int:
    given = options_of(options.RecoverOptions, args)
    is_first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts
    if args.plot:
        refuse_if(given.method != "distill", f"--plot does not go with --method {given.method}")
        plot.check_output(args.plot, args.force, [args.input, args.dense, args.text])
    with contextlib.nullcontext() if is_first else console.quiet():
        report = recover(args.input, args.output, given, dense=args.dense, force=args.force)
    if not is_first:
        return 0
    if args.plot:
        title = f"{args.output}: perplexity {report.perplexity_before:.2f} to {report.perplexity_after:.2f}"
        plot.save_as(
            plot.draw_recovery(report.evaluations, report.divergence_before, title),
            args.plot,
            args.force,
            [args.input, args.dense, args.text, args.output],
        )
    if args.json:
        console.print_json(report.__dict__)
        return 0
    rows = [
        ["dense", report.perplexity_dense, 0.0],
        [given.start, report.perplexity_before, report.divergence_before],
        ["recovered", report.perplexity_after, report.divergence_after],
    ]
    print(console.table(rows, ["model", "held-out perplexity", "divergence from the dense model"]))
    memory = f", with {report.gpu_nbytes / 2**30:.1f} GiB on the GPU" if report.gpu_nbytes else ""
    print(f"\n{report.n_trained} weights trained in {report.seconds:.0f} s on {report.n_tokens} tokens{memory}")
    return 0
