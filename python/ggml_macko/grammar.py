"""Grammars (GBNF) that llama.cpp would not survive, found before it sees them.

llama.cpp refuses plain left recursion itself. It misses recursion behind what may be empty, where its stacks grow until
memory ends; it follows every path of leftmost rules, whose number can be exponential; and it parses and copies without
a limit. What is no grammar at all is left to llama.cpp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from . import errors

MAX_NBYTES = 1 << 20  # of the text
MAX_DEPTH = 500  # of parentheses
MAX_ELEMENTS = 1_000_000  # characters, ranges and references, repetitions written out
MAX_CHAIN = 10_000  # leftmost rules below one another
MAX_PATHS = 100_000_000  # of leftmost rules
_UNBOUNDED_FROM = 2000  # llama.cpp takes a larger maximum for none

_WORD = re.compile(
    r"""(?P<space> [ \t\r\n]+ | \#[^\r\n]*) | (?P<define> [a-zA-Z0-9-]+ (?: [ \t]* ::= ))
      | (?P<literal> "(?: \\. | [^"\\] )*") | (?P<characters> \[ (?: \\. | [^\]\\] )* \]) | (?P<name> [a-zA-Z0-9-]+)
      | (?P<token> !?<[^>]*>) | (?P<any> \.) | (?P<open> \() | (?P<close> \)) | (?P<or> \|)
      | (?P<repeat> [*+?] | \{ \s* [0-9]{1,9} \s* (?: , \s* (?: [0-9]{1,9} )? \s* )? \} )""",
    re.VERBOSE | re.DOTALL,
)
_TERMINAL = -1


def _refuse(why: str) -> errors.MackoError:
    return errors.error(errors.BAD_ARGUMENT, f"grammar: {why}")


def _times(text: str) -> tuple[int, int | None]:
    """The least and the largest number of repetitions; None: no maximum."""
    if text in "*+?":
        return (1 if text == "+" else 0), (1 if text == "?" else None)
    numbers = [int(x) for x in re.findall("[0-9]+", text)]
    most = numbers[-1] if len(numbers) > 1 or "," not in text else None
    return numbers[0], None if most is not None and most > _UNBOUNDED_FROM else most


@dataclass
class _Rule:
    alternates: list[list[int]] = field(default_factory=list)  # numbers of rules, or _TERMINAL


@dataclass
class _Open:
    """A rule that is being read."""

    rule: int
    last: int = 0  # where the item that a repetition would repeat begins in the last alternate
    size: int = 0  # its elements


class _Reader:
    def __init__(self) -> None:
        self.rules: list[_Rule] = []
        self.names: dict[str, int] = {}
        self.n_elements = 0
        self.stack: list[_Open] = []

    def rule(self, *alternates: list[int]) -> int:
        self.rules.append(_Rule(list(alternates)))
        return len(self.rules) - 1

    def named(self, name: str) -> int:
        if name not in self.names:
            self.names[name] = self.rule()
        return self.names[name]

    def add(self, items: list[int], size: int) -> None:
        top = self.stack[-1]
        alternate = self.rules[top.rule].alternates[-1]
        top.last, top.size = len(alternate), size
        alternate += items
        self.count(size)

    def count(self, size: int) -> None:
        self.n_elements += size
        if self.n_elements > MAX_ELEMENTS:
            raise _refuse(f"more than {MAX_ELEMENTS} elements, repetitions written out")

    def repeat(self, text: str) -> None:
        """S{m,n} as llama.cpp writes it: S m times, and a rule for the others."""
        top = self.stack[-1]
        alternate = self.rules[top.rule].alternates[-1]
        items = alternate[top.last :]
        least, most = _times(text)
        n_more = 1 if most is None else max(most - least, 0)
        self.count(top.size * max(least - 1, 0) + (top.size + 3) * n_more)
        del alternate[top.last :]
        alternate += items * min(least, 2)
        if n_more:
            more = self.rule([], [])
            behind = [more] if most is None else [self.rule(list(items), [])] if n_more > 1 else []
            self.rules[more].alternates[0] = [*items, *behind]
            alternate.append(more)
        top.size = top.size * max(least, 1) + 1

    def read(self, text: str) -> bool:
        """False if this is no grammar."""
        at = 0
        while at < len(text):
            word = _WORD.match(text, at)
            if word is None:
                return False
            at, kind = word.end(), word.lastgroup
            if kind == "space":
                continue
            if kind == "define":
                self.stack = [_Open(self.named(word.group()[:-3].rstrip()))]
                self.rules[self.stack[0].rule].alternates = [[]]
            elif not self.stack:
                return False
            elif kind == "open":
                group = self.rule([])
                self.stack.append(_Open(group))
                if len(self.stack) > MAX_DEPTH:
                    raise _refuse(f"more than {MAX_DEPTH} parentheses inside one another")
            elif kind == "close":
                if len(self.stack) == 1:
                    return False
                group = self.stack.pop().rule
                self.add([group], 1)
            elif kind == "or":
                self.rules[self.stack[-1].rule].alternates.append([])
                self.stack[-1].last = self.stack[-1].size = 0
            elif kind == "repeat":
                self.repeat(word.group())
            elif kind == "name":
                self.add([self.named(word.group())], 1)
            else:
                size = len(word.group()) - 2 if kind in ("literal", "characters") else 1
                self.add([_TERMINAL] if size > 0 else [], size)
        return len(self.stack) == 1


def _nullable(rules: list[_Rule]) -> list[bool]:
    """Which rules may produce nothing."""
    empty = [False] * len(rules)
    uses: list[list[list[int]]] = [[] for _ in rules]  # of a rule: counters of alternates with only rules, and theirs
    ready = []
    for number, rule in enumerate(rules):
        for alternate in rule.alternates:
            if _TERMINAL not in alternate:
                counter = [len(alternate), number]
                for item in alternate:
                    uses[item].append(counter)
                if not alternate:
                    ready.append(number)
    while ready:
        number = ready.pop()
        if empty[number]:
            continue
        empty[number] = True
        for counter in uses[number]:
            counter[0] -= 1
            if counter[0] == 0:
                ready.append(counter[1])
    return empty


def _leftmost(rules: list[_Rule], empty: list[bool]) -> list[list[tuple[int, bool]]]:
    """Of each rule, the rules that it may begin with, and whether something follows each."""
    edges: list[list[tuple[int, bool]]] = []
    for rule in rules:
        found = []
        for alternate in rule.alternates:
            for i, item in enumerate(alternate):
                if item == _TERMINAL:
                    break
                found.append((item, i + 1 < len(alternate)))
                if not empty[item]:
                    break
        edges.append(found)
    return edges


def _components(edges: list[list[tuple[int, bool]]]) -> list[list[int]]:
    """Strongly connected components, those that others lead to first (Tarjan's algorithm without recursion)."""
    index = [-1] * len(edges)
    low = [0] * len(edges)
    on_stack = [False] * len(edges)
    stack: list[int] = []
    result: list[list[int]] = []
    count = 0
    for root in range(len(edges)):
        if index[root] >= 0:
            continue
        work = [(root, 0)]
        while work:
            node, at = work.pop()
            if at == 0:
                index[node] = low[node] = count
                count += 1
                stack.append(node)
                on_stack[node] = True
            elif on_stack[edges[node][at - 1][0]]:
                low[node] = min(low[node], low[edges[node][at - 1][0]])
            if at < len(edges[node]):
                work.append((node, at + 1))
                target = edges[node][at][0]
                if index[target] < 0:
                    work.append((target, 0))
                continue
            if low[node] == index[node]:
                component: list[int] = []
                while not component or component[-1] != node:
                    component.append(stack.pop())
                    on_stack[component[-1]] = False
                result.append(component)
    return result


def check(text: str) -> None:
    """Raises ArgumentError for a grammar that llama.cpp would loop on, or run out of memory or stack with."""
    text = text.split("\0", 1)[0]
    if len(text) > MAX_NBYTES:
        raise _refuse(f"{len(text)} characters; the limit is {MAX_NBYTES}")
    reader = _Reader()
    if not reader.read(text):
        return
    edges = _leftmost(reader.rules, _nullable(reader.rules))
    names = {number: name for name, number in reader.names.items()}
    paths, chain = [1] * len(edges), [1] * len(edges)
    total = 0
    for component in _components(edges):
        inside = set(component)
        for number in component:
            for target, followed in edges[number]:
                if target in inside:
                    if followed:
                        known = sorted(names[n] for n in component if n in names)
                        raise _refuse(f"left recursion ({', '.join(known[:5]) or 'in a group'})")
                else:
                    paths[number] += paths[target]
                    chain[number] = max(chain[number], chain[target] + 1)
            total += paths[number]
            if total > MAX_PATHS or chain[number] > MAX_CHAIN:
                raise _refuse("too many rules that begin with one another")
