"""Feed-forward blocks in float64, computed from the products of llama.cpp."""

from __future__ import annotations

import math

import numpy as np

from ggml_macko.evaluation import feed_forward_parts
from ggml_macko.evaluation.activations import Tensor, weight_name

FFN = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")


class Recorder(feed_forward_parts.FeedForwardTap):
    """Also stores the inputs and results of the products with feed-forward weights: name -> (input, result)."""

    def __init__(self):
        super().__init__()
        self.products = {}

    def wants(self, node):
        wanted = super().wants(node)
        is_ffn = node.op == self.ggml.mul_mat and weight_name(Tensor.from_address(node.src[0]).name).endswith(FFN)
        return wanted or (self.on_part is not None and is_ffn)

    def take(self, address, node):
        if weight_name(node.name) in self.parts:
            return super().take(address, node)
        name = weight_name(Tensor.from_address(node.src[0]).name)
        self.products[name] = tuple(self.array(a, np.float32)[0, 0].copy() for a in (node.src[1], address))
        return True


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def squared_relu(x):
    return np.maximum(x, 0) ** 2


# file -> (activation function, source of its argument: product with gate, product with up before up, or all of it)
MODELS = {
    "docs-4m": (silu, "gate"),
    "qwen3": (silu, "gate"),
    "gemma2": (gelu, "gate"),
    "phi3": (silu, "halves"),
    "arcee": (squared_relu, "up"),
}

SCORES = {
    "cats": lambda activated, up, norms: np.abs(activated),
    "product": lambda activated, up, norms: np.abs(activated * up),
    "wina": lambda activated, up, norms: np.abs(activated * up) * norms,
}


def gate_up_and_norms(name, weights, products, layer):
    """Activated gate, up and the norms of the columns of down in float64, from the products of llama.cpp. Without a
    gate: activated up, and ones.
    """
    act, place = MODELS[name]
    up = products[f"blk.{layer}.ffn_up.weight"][1].astype(np.float64)
    if place == "halves":
        gate, up = np.split(up, 2, axis=1)
    elif place == "up":
        gate, up = up, np.ones_like(up)
    else:
        gate = products[f"blk.{layer}.ffn_gate.weight"][1].astype(np.float64)
    down = weights[f"blk.{layer}.ffn_down.weight"]
    return act(gate), up, np.sqrt((down**2).sum(axis=0))
