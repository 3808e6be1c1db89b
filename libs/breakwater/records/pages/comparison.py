"""The comparison of two executions: the differences of their records and of their texts. Pure."""

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
from breakwater.kernel.formats import quantity
from breakwater.kernel.pages import words
from breakwater.records.pages.messages import media_part
from breakwater.records.views.executions import FACTS, cost

MAX_LINES = 2_000
"""Maximum number of lines of a text that are compared."""
LONGEST_LINE = 2_000
CONTEXT = 3
"""Number of equal lines that are shown around a difference."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A value of both executions."""

    name: str
    a: str
    b: str

    @property
    def differs(self) -> bool:
        """Returns True if the values are not equal."""
        return self.a != self.b


@dataclass(frozen=True, slots=True)
class DiffLine:
    """A line of a text that is in both or in one, or the number of omitted equal lines."""

    sign: Literal[" ", "-", "+", "…"]
    text: str


@dataclass(frozen=True, slots=True)
class TextDiff:
    """The differences between two texts.

    Attributes:
        name: name of the texts.
        lines: the differences, with some lines around them; empty if nothing differs.
        cut: True if the texts are too long for a complete comparison.
        missing: the executions, A or B, that have no such text.
    """

    name: str
    lines: tuple[DiffLine, ...]
    cut: bool
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison, in the order of the page."""

    facts: tuple[Fact, ...]
    params: tuple[Fact, ...]
    attempts: tuple[tuple[Attempt | None, Attempt | None], ...]
    texts: tuple[TextDiff, ...]


def compare(a: Execution, b: Execution) -> Comparison:
    """Compares two records. Call it in a thread, because it may take seconds."""
    columns = with_display(FACTS, ["cost"], lambda execution: cost(execution, formats.exact_money))
    return Comparison(
        (
            *(Fact(column.heading, _text(column, a), _text(column, b)) for column in columns if column.page),
            Fact("Metadata", _metadata_text(a), _metadata_text(b)),
        ),
        tuple(_param_facts(a.params or {}, b.params or {})),
        tuple(zip_longest(a.attempts, b.attempts)),
        (
            text_diff("Messages", _lines(a), _lines(b)),
            text_diff("Response", _value_lines(a.output), _value_lines(b.output)),
        ),
    )


def _text(column: Column[Execution], execution: Execution) -> str:
    cell = column.cell(execution)
    return formats.visible(cell if isinstance(cell, str) else words.humanize(cell[0])) or "–"


def _metadata_text(execution: Execution) -> str:
    return words.json_text(execution.metadata) if execution.metadata else "–"


def _param_facts(a: Mapping[str, JsonValue], b: Mapping[str, JsonValue]) -> Iterator[Fact]:
    for name in dict.fromkeys((*a, *b)):
        yield Fact(formats.visible(name), _param_text(a, name), _param_text(b, name))


def _param_text(params: Mapping[str, JsonValue], name: str) -> str:
    return words.json_text(params[name]) if name in params else "not set"


def _lines(execution: Execution) -> list[str] | None:
    """Writes the messages as lines, each below its role; None if they are not stored."""
    if execution.messages is None and execution.input is None:
        return None
    lines: list[str] = []
    for message in execution.messages or []:
        other_fields = {
            name: value for name, value in message.items() if name not in ("role", "content") and value is not None
        }
        lines += [f"[{words.pretty(message.get('role', 'message'))}]"]
        lines += [*_content_lines(message.get("content")), *(_value_lines(other_fields or None) or ())]
    return [*lines, *(["[input]", *(_value_lines(execution.input) or ())] if execution.input is not None else [])]


def _content_lines(content: JsonValue) -> Iterator[str]:
    """Writes content as lines; files as their kinds and digests."""
    for block in content if isinstance(content, list) else [content]:
        match block:
            case {"type": str() as kind} if kind in FILES:
                file = media_part(kind, block)
                digest = hashlib.sha256(words.json_text(block).encode()).hexdigest()[:8]
                yield f"[{', '.join((file.media_kind, *file.details))}; {digest}]"
            case {"type": "text", "text": str() as text, **other_fields}:
                yield from (*(_value_lines(text) or ()), *(_value_lines(other_fields or None) or ()))
            case _:
                yield from _value_lines(block) or ()


def _value_lines(value: object) -> list[str] | None:
    return None if value is None else words.pretty(value).splitlines()


def text_diff(name: str, a: Sequence[str] | None, b: Sequence[str] | None) -> TextDiff:
    """Compares two texts.

    Args:
        name: name of the texts.
        a: the lines of A; None if it has no such text.
        b: the lines of B; None if it has no such text.
    """
    if a is None or b is None:
        missing = tuple(label for label, lines in (("A", a), ("B", b)) if lines is None)
        return TextDiff(name, (), False, missing)
    cut = max(len(a), len(b)) > MAX_LINES or any(len(line) > LONGEST_LINE for line in (*a, *b))
    cut_a = [line[:LONGEST_LINE] for line in a[:MAX_LINES]]
    cut_b = [line[:LONGEST_LINE] for line in b[:MAX_LINES]]
    return TextDiff(name, () if cut_a == cut_b else tuple(_diff_lines(cut_a, cut_b)), cut)


def _diff_lines(a: list[str], b: list[str]) -> Iterator[DiffLine]:
    end_of_last_group = 0
    for group in SequenceMatcher(None, a, b).get_grouped_opcodes(CONTEXT):
        if omitted := group[0][1] - end_of_last_group:
            yield DiffLine("…", quantity(omitted, "equal line"))
        for kind, a_start, a_end, b_start, b_end in group:
            if kind == "equal":
                yield from (DiffLine(" ", line) for line in a[a_start:a_end])
            else:
                yield from (DiffLine("-", line) for line in a[a_start:a_end])
                yield from (DiffLine("+", line) for line in b[b_start:b_end])
        end_of_last_group = group[-1][2]
    if omitted := len(a) - end_of_last_group:
        yield DiffLine("…", quantity(omitted, "equal line"))
