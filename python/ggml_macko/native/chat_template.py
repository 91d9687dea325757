"""How llama_cpp compiles the chat templates of models: without evaluating anything in them.

Jinja computes constant expressions when it compiles a template, and llama_cpp.Llama compiles those of a model while it
loads: {{ 'x' * 10 ** 10 }} fills the memory. Rendering is Jinja's as it was; so are results.
"""

from __future__ import annotations

from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .. import errors

MAX_NBYTES = 1 << 18  # of a template; published ones have 40 KB at most


class _NoConstants(CodeGenerator):
    """Leaves every expression to the rendering."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:
        if not all(isinstance(option.value, nodes.Const) for option in node.options):
            raise jinja2.TemplateSyntaxError("autoescape takes true or false", node.lineno)
        super().visit_EvalContextModifier(node, frame)


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, compiling as said above."""

    code_generator_class = _NoConstants

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "optimized": False})

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> jinja2.Template:
        """Raises FileFormatError for a template that is too long to be one."""
        if isinstance(source, str) and len(source) > MAX_NBYTES:
            raise errors.error(errors.LIMIT, f"chat template: {len(source)} characters; the limit is {MAX_NBYTES}")
        return super().from_string(source, *args, **kwargs)


def install() -> None:
    """For all models that the llama_cpp of this process loads from now on."""
    import llama_cpp.llama_chat_format as chat_format

    setattr(chat_format, "ImmutableSandboxedEnvironment", Environment)  # noqa: B010  a name that it imported
