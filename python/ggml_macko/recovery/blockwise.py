"""Recovery part by part: attention and feed-forward parts learn the hidden states of the dense model.

For each part in turn, the input is the output of the recovered parts before it, and the target is the hidden state of
the dense model. Only one part is trained at a time, which needs little memory, but all hidden states of the text are
stored twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from .. import console, errors
from ..evaluation.transformer import PARTS, Transformer
from ..recovery.distillation import Arithmetic, Trained, Training
from ..recovery.masked_adam import MaskedAdam
from ..recovery.options import BLOCKS_RATE
from ..recovery.schedule import learning_rate

Hidden = list[torch.Tensor]
"""Hidden states of each chunk (1, tokens, n_embd), in host memory."""

_TENSORS = {"attention": ("attn_", "shortconv.", "post_attention_"), "feed_forward": ("ffn_", "post_ffw_")}
"""Part -> prefixes of its tensors' names after blk.N."""


def fit_blocks(training: Training) -> Trained:
    """Resumes from the checkpoint, if there is one. Raises MackoError if an error is not finite."""
    student, teacher, trained, texts, _, arithmetic, checkpoint, *_ = training
    chunks = texts.train.copy()
    if texts.first_token is not None:
        chunks[:, 0] = texts.first_token
    with torch.no_grad():
        wanted = [teacher.embed(arithmetic.tokens(chunk[None])).cpu() for chunk in chunks]
    found = wanted
    parts = [(layer, name) for layer in range(student.shape.n_layers) for name in PARTS]
    n_done = 0
    saved = checkpoint.load()
    if saved is not None:
        n_done = saved.state["parts"]
        with torch.no_grad():
            for name, array in saved.arrays.items():
                trained[name].copy_(torch.from_numpy(array))
        console.log(f"{checkpoint.path}: continuing after {n_done} of {len(parts)} parts")
    with console.progress("recovering", len(parts), "parts") as advance:
        for i, (layer, name) in enumerate(parts):
            target = _outputs(teacher, layer, name, wanted, arithmetic)
            mine = {n: w for n, w in trained.items() if _belongs(n, layer, name)}
            if i >= n_done and mine:
                before, after = _fit_part(training, layer, name, mine, States(found, target, wanted))
                console.detail(f"block {layer}, {name.replace('_', '-')}: relative error {before:.4f} -> {after:.4f}")
                checkpoint.save({"parts": i + 1}, {n: w.detach().cpu().numpy() for n, w in trained.items()})
            found = _outputs(student, layer, name, found, arithmetic)
            wanted = target
            advance(1)
    return Trained(_rate(training), training.before)


def _rate(training: Training) -> float:
    return training.options.learning_rate or BLOCKS_RATE


def _belongs(tensor: str, layer: int, part: str) -> bool:
    return tensor.startswith(tuple(f"blk.{layer}.{prefix}" for prefix in _TENSORS[part]))


def _outputs(model: Transformer, layer: int, part: str, inputs: Hidden, arithmetic: Arithmetic) -> Hidden:
    with torch.no_grad(), arithmetic.mixed_precision():
        return [model.part(layer, part, x.to(arithmetic.device)).float().cpu() for x in inputs]


class States(NamedTuple):
    """Hidden states around a part."""

    inputs: Hidden  # of the student's
    targets: Hidden  # outputs of the dense part for dense_inputs
    dense_inputs: Hidden


def _fit_part(
    training: Training, layer: int, part: str, trained: Mapping[str, torch.Tensor], states: States
) -> tuple[float, float]:
    """The squared errors of the part's outputs before and after training, over the energy of the dense part's addition
    to the hidden states.
    """
    student, options, arithmetic = training.student, training.options, training.arithmetic
    inputs, targets, dense_inputs = states
    energy = sum(float((t - x).double().square().sum()) for t, x in zip(targets, dense_inputs))
    per_token = energy / sum(t.numel() for t in targets)

    def error() -> float:
        outputs = _outputs(student, layer, part, inputs, arithmetic)
        return sum(float((y - t).double().square().sum()) for y, t in zip(outputs, targets)) / energy

    optimizer = MaskedAdam(trained, options.quant_values)
    before = error()
    start = optimizer.weights()
    n_steps = -(-len(inputs) // options.batch_size) * options.epochs
    for epoch in range(options.epochs):
        order = np.random.default_rng([options.seed, layer, PARTS.index(part), epoch]).permutation(len(inputs))
        for begin in range(0, len(order), options.batch_size):
            picks = order[begin : begin + options.batch_size]
            x, target = (torch.cat([of[i] for i in picks]).to(arithmetic.device) for of in (inputs, targets))
            optimizer.prepare(learning_rate(optimizer.n_steps, n_steps, _rate(training)))
            with arithmetic.mixed_precision():
                loss = (student.part(layer, part, x) - target).square().mean() / per_token
            loss.backward()
    after = error()
    if not after < before:  # also for NaN
        optimizer.set_weights(start)
        after = before
    optimizer.close()
    if not np.isfinite(after):
        raise errors.error(errors.NOT_FINITE, f"the error of block {layer}, {part}, is {after}")
    return before, after
