"""Guards against faults of llama-cpp-python: one table (GUARDS), and the code that puts each check in place.

The checks of `Llama` hold for the class of this package; the others for the whole process, from register() on.
The reports for the maintainers are sections of lab/upstream-reports.md.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
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

from . import errors, regular_files
from .grammar import Grammar, Worker

OLDEST, NEWEST = "0.3.21", "0.3.36"  # llama-cpp-python that the guards were tested with
MAX_TEMPLATE_NBYTES = 1 << 18  # of a chat template; published ones have 40 KB at most


@dataclass(frozen=True)
class Guard:
    """A function of llama_cpp, and the check in front of it."""

    function: str  # MODULE:NAME, or Llama.NAME: a method that GuardedLlama overrides; Llama.*: all, properties too
    failure: str  # of the function without the check
    report: str | None  # section of upstream-reports.md; None: not reported
    replace: Callable[[Any], Any]  # the function -> the one that takes its place
    versions: tuple[str, str] = (OLDEST, NEWEST)  # versions of llama-cpp-python that fail
    parameters: tuple[str, ...] | None = None  # of the function, if the check depends on them; forks have others

    def fits(self, function: Any) -> bool:
        """Whether the check can take the place of the function; None: the function does not exist."""
        if function is None:
            return self.versions[1] != NEWEST  # the newest version does without it
        return self.parameters is None or tuple(inspect.signature(function).parameters) == self.parameters


# ---- checks of Llama: context managers around a method ----


class Turns:
    """The calls of a Llama: threads take turns, and the model is freed when no call is in progress."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._closed = False
        self.sequence = 0  # counts the texts: see _sequence_begins
        self.is_generating = False

    @contextlib.contextmanager
    def use(self, free: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise closed()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._closed and self._depth == 0:
                    free()

    def close(self, free: Callable[[], None]) -> None:
        """A call in progress in another thread ends at its next token."""
        self._closed = True
        with self._lock:
            if self._depth == 0:
                free()


def closed() -> errors.MackoError:
    return errors.bad_argument("this Llama has been closed")


def _in_turn(llama: GuardedLlama, *unused: Any, **also_unused: Any) -> AbstractContextManager[None]:
    return llama._turns.use(llama._free)


@contextlib.contextmanager
def _logits_are_numbers(llama: GuardedLlama, *unused: Any, **also_unused: Any) -> Iterator[None]:
    yield
    logits = llama_cpp.llama_get_logits_ith(llama._ctx.ctx, -1)
    if logits and math.isnan(logits[0]):
        raise RuntimeError(
            "llama_decode left no logits: they are NaN; a GPU failed, or the model has weights that are not finite"
        )


def _inside(*checks: Callable[..., AbstractContextManager[None]]) -> Callable[[Any], Any]:
    """Runs a method inside the checks. The first check is the outermost."""

    def replace(method: Any) -> Any:
        @functools.wraps(method)
        def guarded(self: GuardedLlama, *args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for check in checks:
                    stack.enter_context(check(self, *args, **kwargs))
                return method(self, *args, **kwargs)

        return guarded

    return replace


@contextlib.contextmanager
def _sequence_begins(llama: GuardedLlama, *unused: Any, **also_unused: Any) -> Iterator[None]:
    """A text that generate() has begun cannot be continued after this call, unless generate() itself makes it."""
    if not llama._turns.is_generating:
        llama._turns.sequence += 1
    yield


def _only_with_its_own_state(generate: Any) -> Any:
    @functools.wraps(generate)
    def guarded(self: GuardedLlama, *args: Any, **kwargs: Any) -> Any:
        turns, sent = self._turns, None
        turns.sequence += 1
        mine = turns.sequence
        tokens = generate(self, *args, **kwargs)
        while True:
            if turns.sequence != mine:
                raise RuntimeError("another call has replaced the text that this one generates")
            turns.is_generating = True
            try:
                token = tokens.send(sent)
            except StopIteration:
                return
            finally:
                turns.is_generating = False
            sent = yield token

    return guarded


def _everything_in_turn(attribute: Any) -> Any:
    """A generator takes one turn per item, because the caller may never request another item."""
    if isinstance(attribute, property):
        return property(_inside(_in_turn)(attribute.fget), doc=attribute.__doc__)
    if not inspect.isgeneratorfunction(attribute):
        return _inside(_in_turn)(attribute)

    @functools.wraps(attribute)
    def guarded(self: GuardedLlama, *args: Any, **kwargs: Any) -> Any:
        items, sent = attribute(self, *args, **kwargs), None
        while True:
            with _in_turn(self):
                try:
                    item = items.send(sent)
                except StopIteration:
                    return
            sent = yield item

    return guarded


def _close_after_the_last_use(unused: Any) -> Any:
    def close(self: GuardedLlama) -> None:
        """Frees the model. Every later call raises ArgumentError."""
        self._turns.close(self._free)

    return close


# ---- what llama.cpp does not check ----


def _known_tokens_only(detokenize: Any) -> Any:
    @functools.wraps(detokenize)
    def guarded(self: Any, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        n_vocab = self.n_vocab()
        for token in tokens:
            if not 0 <= token < n_vocab:
                raise errors.bad_argument(f"token {token} is not in the vocabulary (0...{n_vocab - 1})")
        return detokenize(self, tokens, *args, **kwargs)

    return guarded


def _only_with_weights(decode: Any) -> Any:
    @functools.wraps(decode)
    def guarded(self: Any, batch: Any) -> Any:
        if self.model.params.vocab_only:
            raise errors.bad_argument("this Llama has no weights: it was loaded with vocab_only")
        return decode(self, batch)

    return guarded


# ---- NULL pointers, which ctypes does not turn into None ----


def _no_null_adapter(init: Any) -> Any:
    @functools.wraps(init)
    def llama_adapter_lora_init(model: Any, path_lora: bytes, /) -> Any:
        path = os.fsdecode(path_lora)
        if os.path.exists(path):
            regular_files.check_regular(path)
        adapter = init(model, path_lora)
        if not adapter:
            raise errors.bad_argument(f"{path}: llama.cpp refused this LoRA adapter; its log says why")
        return adapter

    return llama_adapter_lora_init


# ---- grammars ----


def _follow_in_a_worker(unused: Any) -> Any:
    def add_grammar(self: Any, model: Any, grammar: Any) -> None:
        worker = vars(model).get("grammar_worker")
        if worker is None or not worker.is_usable():
            worker = model.grammar_worker = Worker(model)
            model._exit_stack.callback(worker.close)
        self.grammar = Grammar(worker, grammar._grammar, grammar._root)
        self.add_custom(self.grammar.apply)

    return add_grammar


def _sample_what_may_follow(sample: Any) -> Any:
    @functools.wraps(sample)
    def guarded(self: Any, ctx: Any, idx: int = -1) -> int:
        if not llama_cpp.llama_get_logits_ith(ctx.ctx, idx):
            raise RuntimeError("there are no logits to choose a token from")
        grammar = vars(self).get("grammar")
        if grammar:
            grammar.advance()
        token: int = sample(self, ctx, idx)
        if grammar:
            grammar.choose(token)
        return token

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
_MIXED = "changes the state that generate() uses: wrong text, or a read of logits that do not exist"

GUARDS = (
    Guard(
        "llama_cpp._internals:LlamaModel.detokenize",
        "a token outside the vocabulary ends the process",
        "A token outside the vocabulary ends the process",
        _known_tokens_only,
    ),
    Guard(
        "llama_cpp._internals:LlamaContext.decode",
        "a model without weights ends the process",
        None,
        _only_with_weights,
    ),
    Guard(
        "Llama.eval",
        "continues with NaN for the logits that a failed GPU did not write; and " + _MIXED,
        None,
        _inside(_sequence_begins, _logits_are_numbers),
    ),
    Guard("Llama.reset", _MIXED, None, _inside(_sequence_begins)),
    Guard("Llama.load_state", _MIXED, None, _inside(_sequence_begins)),
    Guard("Llama.generate", "two that take turns use each other's state", None, _only_with_its_own_state),
    Guard("Llama.close", "frees a model that another thread reads", _FREED, _close_after_the_last_use),
    Guard(
        "Llama.*",
        "reads state that another thread changes, and freed memory after close()",
        "Threads that share a Llama end the process",
        _everything_in_turn,
    ),
    Guard(
        "llama_cpp.llama_cpp:llama_adapter_lora_init",
        "a LoRA adapter that cannot be used ends the process at the first token",
        "A LoRA adapter that cannot be used ends the process",
        _no_null_adapter,
    ),
    Guard(
        "llama_cpp._internals:LlamaSampler.add_grammar",
        "a grammar that llama.cpp refuses, loops on or fills the memory with ends the process",
        "A refused grammar ends the process",
        _follow_in_a_worker,
        parameters=("self", "model", "grammar"),
    ),
    Guard(
        "llama_cpp._internals:LlamaSampler.sample",
        "missing logits, and a grammar that no token can follow, end the process",
        "A grammar that no token can follow ends the process",
        _sample_what_may_follow,
        parameters=("self", "ctx", "idx"),
    ),
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

    _turns: Turns

    def __new__(cls, *unused: Any, **also_unused: Any) -> GuardedLlama:
        """Sets the members that close() needs. __del__ calls close() even if __init__ has not begun."""
        self = super().__new__(cls)
        self._stack = contextlib.ExitStack()
        self._turns = Turns()
        return self

    def _free(self) -> None:
        super().close()
        for part in ("_model", "_ctx", "_batch"):
            if part in vars(self):
                vars(self)[part].__class__ = Closed  # a tokenizer may still refer to it


class Closed:
    """A part of a Llama that has been closed."""

    def __getattribute__(self, name: str) -> Any:
        raise closed()


def _guard_methods() -> None:
    for guard in GUARDS:
        owner, _, name = guard.function.partition(".")
        if owner != "Llama":
            continue
        others = vars(llama_cpp.Llama).keys() - {
            "__init__",
            "__del__",
            "close",
            "abort",
        }  # abort: a fork's, for threads
        for method in others if name == "*" else [name]:
            found = vars(GuardedLlama).get(method) or vars(llama_cpp.Llama).get(method)
            if inspect.isfunction(found) or isinstance(found, property):  # register() refuses a version without it
                setattr(GuardedLlama, method, guard.replace(found))


_guard_methods()


@functools.cache
def install(package: str) -> tuple[str, ...]:
    """Puts the guards of "llama_cpp" (without its server) or "llama_cpp.server" in place, for the whole process.
    Returns the functions whose guards do not fit this llama_cpp, because they do not exist or have other parameters.
    """
    missing = []
    for guard in GUARDS:
        module, _, name = guard.function.partition(":")
        if name and module.startswith("llama_cpp.server") == (package == "llama_cpp.server"):
            *holder, last = name.split(".")
            try:
                of = pkgutil.resolve_name(":".join([module, *holder]) if holder else module)
            except (ImportError, AttributeError):
                missing.append(name)
                continue
            function = getattr(of, last, None)
            if guard.fits(function):
                setattr(of, last, guard.replace(function))
            else:
                missing.append(name)
    return tuple(missing)
