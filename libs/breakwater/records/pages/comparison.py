"""Two executions side by side: the differences of their records and of their texts. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Literal

from pydantic import JsonValue

from breakwater.jobs.contract.execution import Attempt, Execution
from breakwater.jobs.rules.chat_messages import FILES
from breakwater.kernel import formats
from breakwater.kernel.columns import Column, with_display
from breakwater.kernel.formats import counted
from breakwater.kernel.pages import words
from breakwater.records.pages.messages import media_part
from breakwater.records.views.executions import FACTS, cost

MAX_LINES = 2_000
"""Of a text that is compared."""
LONGEST_LINE = 2_000
CONTEXT = 3
"""Equal lines around a difference that are shown."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One value of both."""

    name: str
    left: str
    right: str

    @property
    def differs(self) -> bool:
        """True if the two are not equal."""
        return self.left != self.right


@dataclass(frozen=True, slots=True)
class DiffLine:
    """A line of a text: in both, in one only, or the number of equal ones that are left out."""

    sign: Literal[" ", "-", "+", "…"]
    text: str


@dataclass(frozen=True, slots=True)
class TextDiff:
    """The differences of a text.

    Attributes:
        name: of the text.
        lines: the differences with some of the lines around them; empty where nothing differs.
        cut: True if it was too long to be compared as a whole.
        missing: those of A and B that have no such text.
    """

    name: str
    lines: tuple[DiffLine, ...]
    cut: bool
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """All of it, in the order of the page."""

    facts: tuple[Fact, ...]
    params: tuple[Fact, ...]
    attempts: tuple[tuple[Attempt | None, Attempt | None], ...]
    texts: tuple[TextDiff, ...]


def compare(left: Execution, right: Execution) -> Comparison:
    """Compares two records. It may take seconds: to be called in a thread."""
    facts = with_display(FACTS, ["cost"], lambda one: cost(one, formats.exact_money))
    return Comparison(
        (
            *(Fact(one.heading, *(_text(one, side) for side in (left, right))) for one in facts if one.page),
            Fact("Metadata", *(words.json_text(side.metadata) if side.metadata else "–" for side in (left, right))),
        ),
        tuple(_merged(left.params or {}, right.params or {})),
        tuple(zip_longest(left.attempts, right.attempts)),
        (
            text_diff("Messages", _lines(left), _lines(right)),
            text_diff("Response", _value_lines(left.output), _value_lines(right.output)),
        ),
    )


def _text(column: Column[Execution], execution: Execution) -> str:
    shown = column.cell(execution)
    return formats.visible(shown if isinstance(shown, str) else words.humanize(shown[0])) or "–"


def _merged(left: Mapping[str, JsonValue], right: Mapping[str, JsonValue]) -> Iterator[Fact]:
    for name in dict.fromkeys((*left, *right)):
        sides = (words.json_text(side[name]) if name in side else "not set" for side in (left, right))
        yield Fact(formats.visible(name), *sides)


def _lines(one: Execution) -> list[str] | None:
    """The messages as lines, each under its role; None if they are not stored."""
    if one.messages is None and one.input is None:
        return None
    lines: list[str] = []
    for message in one.messages or []:
        rest = {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
        lines += [f"[{words.pretty(message.get('role', 'message'))}]"]
        lines += [*_content_lines(message.get("content")), *(_value_lines(rest or None) or ())]
    return [*lines, *(["[input]", *(_value_lines(one.input) or ())] if one.input is not None else [])]


def _content_lines(content: JsonValue) -> Iterator[str]:
    """Texts as they are; kinds and digests of files."""
    for block in content if isinstance(content, list) else [content]:
        match block:
            case {"type": str() as kind} if kind in FILES:
                file = media_part(kind, block)
                digest = hashlib.sha256(words.json_text(block).encode()).hexdigest()[:8]
                yield f"[{', '.join((file.what, *file.about))}; {digest}]"
            case {"type": "text", "text": str() as text, **rest}:
                yield from (*(_value_lines(text) or ()), *(_value_lines(rest or None) or ()))
            case _:
                yield from _value_lines(block) or ()


def _value_lines(value: object) -> list[str] | None:
    return None if value is None else words.pretty(value).splitlines()


def text_diff(name: str, left: Sequence[str] | None, right: Sequence[str] | None) -> TextDiff:
    """The differences between two texts.

    Args:
        name: of the texts.
        left: the lines of A; None if there is no such text.
        right: the lines of B; likewise.
    """
    missing = tuple(side for side, lines in (("A", left), ("B", right)) if lines is None)
    if left is None or right is None:
        return TextDiff(name, (), False, missing)
    cut = max(len(left), len(right)) > MAX_LINES or any(len(line) > LONGEST_LINE for line in (*left, *right))
    old, new = ([line[:LONGEST_LINE] for line in side[:MAX_LINES]] for side in (left, right))
    return TextDiff(name, () if old == new else tuple(_grouped(old, new)), cut)


def _grouped(old: list[str], new: list[str]) -> Iterator[DiffLine]:
    shown = 0
    for group in SequenceMatcher(None, old, new).get_grouped_opcodes(CONTEXT):
        if skipped := group[0][1] - shown:
            yield DiffLine("…", counted(skipped, "equal line"))
        for kind, old_from, old_to, new_from, new_to in group:
            if kind == "equal":
                yield from (DiffLine(" ", line) for line in old[old_from:old_to])
            else:
                yield from (DiffLine("-", line) for line in old[old_from:old_to])
                yield from (DiffLine("+", line) for line in new[new_from:new_to])
        shown = group[-1][2]
    if skipped := len(old) - shown:
        yield DiffLine("…", counted(skipped, "equal line"))
