"""Guards against faults of llama-cpp-python: one table (GUARDS), and the code that puts each check in place.

The checks of `Llama` hold for the class of this package; the others for the whole process, from register() on.
The reports for the maintainers are sections of lab/upstream-reports.md.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pkgutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jinja2
import llama_cpp
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment

from . import errors, grammar

OLDEST, NEWEST = "0.3.21", "0.3.36"  # llama-cpp-python that the guards were tested with
MAX_TEMPLATE_NBYTES = 1 << 18  # of a chat template; published ones have 40 KB at most


@dataclass(frozen=True)
class Guard:
    """A function of llama_cpp, and the check in front of it."""

    function: str  # MODULE:NAME, or Llama.NAME: a method that GuardedLlama overrides
    failure: str  # of the function without the check
    report: str | None  # section of upstream-reports.md; None: not reported
    replace: Callable[[Any], Any]  # the function -> the one that takes its place
    versions: tuple[str, str] = (OLDEST, NEWEST)  # of llama-cpp-python that are known to fail


# ---- checks of Llama: context managers around a method ----


class Uses:
    """The calls in progress of a Llama: the model is freed after the last, and not while one of them reads it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._n = 0
        self._closed = False

    @contextlib.contextmanager
    def use(self, free: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise errors.error(errors.BAD_ARGUMENT, "this Llama has been closed")
            self._n += 1
        try:
            yield
        finally:
            with self._lock:
                self._n -= 1
                is_last = self._closed and self._n == 0
            if is_last:
                free()

    def close(self, free: Callable[[], None]) -> None:
        with self._lock:
            self._closed = True
            is_idle = self._n == 0
        if is_idle:
            free()


def _in_use(llama: GuardedLlama, *unused: Any, **also_unused: Any) -> AbstractContextManager[None]:
    return llama._uses.use(super(GuardedLlama, llama).close)


def _grammar_is_accepted(llama: GuardedLlama, *unused: Any, **options: Any) -> AbstractContextManager[None]:
    found = options.get("grammar")
    if found is not None:
        grammar.check(found._grammar)
        vocabulary, text, root = llama._model.vocab, found._grammar.encode(), found._root.encode()
        sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, text, root)
        if not sampler:
            raise errors.error(errors.BAD_ARGUMENT, "grammar: llama.cpp refused it; its log says why")
        llama_cpp.llama_sampler_free(sampler)
    return contextlib.nullcontext()


def _tokens_are_known(
    llama: GuardedLlama, tokens: Sequence[int], *unused: Any, **also_unused: Any
) -> AbstractContextManager[None]:
    n_vocab = llama.n_vocab()
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise errors.error(errors.BAD_ARGUMENT, f"token {token} is not in the vocabulary (0...{n_vocab - 1})")
    return contextlib.nullcontext()


@contextlib.contextmanager
def _logits_are_numbers(llama: GuardedLlama, *unused: Any, **also_unused: Any) -> Iterator[None]:
    yield
    logits = llama_cpp.llama_get_logits_ith(llama._ctx.ctx, -1)
    if logits and math.isnan(logits[0]):
        raise RuntimeError(
            "llama_decode left no logits: they are NaN; a GPU failed, or the model has weights that are not finite"
        )


def _inside(*checks: Callable[..., AbstractContextManager[None]]) -> Callable[[Any], Any]:
    """Runs a method inside of the checks, the first one outermost."""

    def replace(method: Any) -> Any:
        @functools.wraps(method)
        def guarded(self: GuardedLlama, *args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for check in checks:
                    stack.enter_context(check(self, *args, **kwargs))
                return method(self, *args, **kwargs)

        return guarded

    return replace


def _inside_while_iterating(check: Callable[..., AbstractContextManager[None]]) -> Callable[[Any], Any]:
    """The same for a method that is a generator."""

    def replace(method: Any) -> Any:
        @functools.wraps(method)
        def guarded(self: GuardedLlama, *args: Any, **kwargs: Any) -> Any:
            with check(self, *args, **kwargs):
                yield from method(self, *args, **kwargs)

        return guarded

    return replace


def _close_after_the_last_use(close: Any) -> Any:
    @functools.wraps(close)
    def guarded(self: GuardedLlama) -> None:
        self._uses.close(lambda: close(self))

    return guarded


# ---- chat templates ----


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


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which evaluates nothing while it compiles a template. Rendering and its results are Jinja's."""

    code_generator_class = _NoConstants

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "optimized": False})

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> jinja2.Template:
        """Raises FileFormatError for a template that is too long to be one."""
        if isinstance(source, str) and len(source) > MAX_TEMPLATE_NBYTES:
            text = f"chat template: {len(source)} characters; the limit is {MAX_TEMPLATE_NBYTES}"
            raise errors.error(errors.LIMIT, text)
        return super().from_string(source, *args, **kwargs)


# ---- the server ----


def _answer_bad_arguments(answer: Any) -> Any:
    def error_message_wrapper(self: Any, error: Exception, body: Any = None) -> Any:
        if isinstance(error, errors.ArgumentError):
            message = errors.one_line(error)
            return 400, {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return answer(self, error, body)

    return error_message_wrapper


# ---- the table ----

_FREED = "close() while another thread generates, and any use after it, read freed memory"
_USE_AFTER_CLOSE = "reads freed memory after close()"

GUARDS = (
    Guard(
        "Llama._init_sampler",
        "a grammar that llama.cpp refuses, loops on or fills the memory with ends the process",
        "A refused grammar ends the process",
        _inside(_grammar_is_accepted),
    ),
    Guard(
        "Llama.detokenize",
        "a token outside the vocabulary ends the process",
        "A token outside the vocabulary ends the process",
        _inside(_in_use, _tokens_are_known),
    ),
    Guard(
        "Llama.eval",
        "goes on with NaN for the logits that a failed GPU did not write",
        None,
        _inside(_in_use, _logits_are_numbers),
    ),
    Guard("Llama.sample", _USE_AFTER_CLOSE, _FREED, _inside(_in_use)),
    Guard("Llama.embed", _USE_AFTER_CLOSE, _FREED, _inside(_in_use)),
    Guard("Llama.tokenize", _USE_AFTER_CLOSE, _FREED, _inside(_in_use)),
    Guard("Llama.generate", _USE_AFTER_CLOSE, _FREED, _inside_while_iterating(_in_use)),
    Guard("Llama._create_completion", _USE_AFTER_CLOSE, _FREED, _inside_while_iterating(_in_use)),
    Guard("Llama.close", "frees a model that another thread reads", _FREED, _close_after_the_last_use),
    Guard(
        "llama_cpp.llama_chat_format:ImmutableSandboxedEnvironment",
        "computes constant expressions of a model's chat template while the model loads, for hours or in all memory",
        "A chat template of 25 bytes hangs the load",
        lambda _: TemplateEnvironment,
    ),
    Guard(
        "llama_cpp._internals:LlamaModel.sampler",
        "does not exist where a load failed; close() asks for it, and prints an exception",
        None,
        lambda _: None,
        (OLDEST, OLDEST),
    ),
    Guard(
        "llama_cpp.server.errors:RouteErrorHandler.error_message_wrapper",
        "answers a request that Llama refuses with status 500, as if the server had failed",
        None,
        _answer_bad_arguments,
    ),
)


class GuardedLlama(llama_cpp.Llama):
    """llama_cpp.Llama with the guards of its methods."""

    _uses: Uses

    def __new__(cls, *unused: Any, **also_unused: Any) -> GuardedLlama:
        """What close() needs, which __del__ calls even if __init__ has not begun."""
        self = super().__new__(cls)
        self._stack = contextlib.ExitStack()
        self._uses = Uses()
        return self


for _guard in GUARDS:
    _class, _, _name = _guard.function.partition(".")
    if _class == "Llama" and hasattr(llama_cpp.Llama, _name):  # register() refuses a version that has other methods
        setattr(GuardedLlama, _name, _guard.replace(getattr(llama_cpp.Llama, _name)))


@functools.cache
def install(package: str) -> None:
    """Puts the guards of "llama_cpp" (without its server) or "llama_cpp.server" in place, for the whole process."""
    for guard in GUARDS:
        module, _, name = guard.function.partition(":")
        if name and module.startswith("llama_cpp.server") == (package == "llama_cpp.server"):
            *holder, last = name.split(".")
            of = pkgutil.resolve_name(":".join([module, *holder]) if holder else module)
            setattr(of, last, guard.replace(getattr(of, last, None)))
