"""The feed-forward parts of a model while llama.cpp evaluates a text: down(act(gate(h)) * up(h)) with a gate, or
down(relu(up(h))) and down(relu(up(h))^2) without.

A part is a node of llama.cpp's graph (GLU, RELU or SQR of RELU) whose result is the input of one matrix product. Each
element of the result is a neuron: a row of gate and up, and a column of down. A caller can read the gate and change the
result in place before the product with down.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import numpy.typing as npt

from .. import errors
from ..evaluation.activations import Tap, Tensor, weight_name
from ..values import TYPE_F32

Rows = npt.NDArray[np.float32]
"""Activations (tokens, neurons) of a part."""


class FeedForwardPart(NamedTuple):
    """A feed-forward part."""

    node: str  # name of the input of down in llama.cpp's graph
    down: str  # name of the weight down in the model file
    kind: str  # ggml's name of the gated operation, such as SWIGLU; RELU or RELU_SQR without a gate
    n_neurons: int

    @property
    def has_gate(self) -> bool:
        return self.kind not in _WITHOUT_GATE


_WITHOUT_GATE = ("RELU", "RELU_SQR")

OnPart = Callable[[FeedForwardPart, Optional[Rows], Rows], None]
"""A function of a part, its gate before the activation function (None without a gate), and the input of down, which the
function may change in place. Both arrays are valid during the call only.
"""


class FeedForwardTap(Tap):
    """Finds the feed-forward parts while on_part is None, and later calls on_part for each part of a micro-batch.

    Routed experts are counted in n_routed (nodes) and not passed to on_part.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_part: OnPart | None = None
        self.parts: dict[str, FeedForwardPart] = {}  # by node
        self.n_routed = 0
        self._kinds: dict[str, str] = {}  # node -> kind, for all nodes that may be parts

    def wants(self, node: Tensor) -> bool:
        if self.on_part is not None:
            may_be_part = node.op in (self.ggml.glu, self.ggml.unary, self.ggml.sqr)
            return may_be_part and weight_name(node.name) in self.parts
        if node.op in (self.ggml.mul_mat, self.ggml.mul_mat_id):
            self._find(node)
        elif node.type == TYPE_F32 and (kind := self._kind(node)) is not None:
            self._kinds[weight_name(node.name)] = kind
        return False

    def _kind(self, node: Tensor) -> str | None:
        """The kind of a node that is a part if its result is the input of a matrix product; None for other nodes."""
        ggml = self.ggml
        if node.op == ggml.glu:
            name: bytes = ggml.glu_op_name(node.op_params[0])
            return name.decode()
        if node.op == ggml.unary and ggml.unary_op_name(node.op_params[0]) == b"RELU":
            return "RELU"
        if node.op == ggml.sqr and self._kinds.get(weight_name(Tensor.from_address(node.src[0]).name)) == "RELU":
            return "RELU_SQR"
        return None

    def _find(self, product: Tensor) -> None:
        """Adds the part whose result is the input of a matrix product, if there is one."""
        weight, x = (Tensor.from_address(product.src[i]) for i in (0, 1))
        name, down = weight_name(x.name), weight_name(weight.name)
        if name not in self._kinds:
            return
        if product.op == self.ggml.mul_mat_id:
            self.n_routed += 1
            return
        if x.ne[2] * x.ne[3] * weight.ne[2] * weight.ne[3] != 1 or self.parts.get(name, (name, down))[1] != down:
            raise errors.error(errors.LIMIT, f"{down}: a feed-forward part of this shape is not supported")
        self.parts[name] = FeedForwardPart(name, down, self._kinds[name], x.ne[0])

    def take(self, address: int, node: Tensor) -> bool:
        part = self.parts[weight_name(node.name)]
        operands = [a for a in (node.src[0], node.src[1]) if a]
        for tensor in (node, *map(Tensor.from_address, operands)):
            if not self.ggml.is_host(tensor.buffer) or tensor.type != TYPE_F32:
                raise errors.error(
                    errors.LIMIT,
                    f"{part.down}: its inputs are not float32 in host memory; on the CPU they are: -ngl 0",
                )
        product = self._rows(address)
        product.flags.writeable = True
        gate = None
        if part.has_gate:
            gate = self._rows(node.src[0])
            if len(operands) == 1:  # the halves of one tensor
                swapped = node.op_params[1] != 0
                gate = gate[:, part.n_neurons :] if swapped else gate[:, : part.n_neurons]
        assert self.on_part is not None
        self.on_part(part, gate, product)
        return True

    def _rows(self, address: int) -> Any:
        return self.array(address, np.float32)[0, 0]
