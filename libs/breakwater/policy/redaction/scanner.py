"""Finds the secrets of a text, and takes them out.

Every rule looks at the same text, so that none hides from the next what it is recognised by; what they find is merged
and replaced at once.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from breakwater.policy.redaction import known
from breakwater.policy.redaction.finders import FINDERS, STARTS, Finder, OwnFinder, Span, Work, spend_for_simulation
from breakwater.policy.redaction.regex import RegexMatch, built_in, own
from breakwater.policy.redaction.values import LONGEST, before_values, value_after

Text = tuple[bytes, int]
"""UTF-8, in which lone surrogates pass, and a limit in it: what may be shown ends there."""

UNESCAPED_TIMES = 2
"""How often a text may have been escaped: `%2540` is an @, escaped twice."""

MOST_ROUNDS = 3

_ESCAPES_A_PLACE = 4
_LONGEST_ESCAPE = 6
_ESCAPES = re.compile(known.ESCAPES.encode())


class Scanner:
    """All rules, ready for use on many texts."""

    def __init__(
        self, fields: Sequence[str], patterns: Sequence[str], *, built_in_rules: bool, placeholder: bytes
    ) -> None:
        self._placeholder = placeholder
        self._unescapes = built_in_rules or bool(fields) or bool(patterns)
        owns = [own(pattern) for pattern in patterns]
        self._forms: list[Finder | OwnFinder] = [
            *(FINDERS if built_in_rules else ()),
            *(OwnFinder(pattern.alone) for pattern in owns),
        ]
        self._all = self._forms
        suspicious = [known.ESCAPES] if self._unescapes else []
        suspicious += STARTS if built_in_rules else ()
        if (names := before_values(fields, built_in_names=built_in_rules)) is not None:
            self._all = [*self._forms, Finder(built_in(names), self._value)]
            suspicious.append(names)
        at_once = [built_in("|".join(suspicious))] if suspicious else []
        self._suspicious = (*at_once, *(pattern.alone for pattern in owns))
        self._built_in = tuple(at_once)
        self._own_in_lines = tuple(pattern.in_lines for pattern in owns)

    def _value(self, data: bytes, found: RegexMatch) -> Span:
        return value_after(data, found, self._placeholder)

    def suspects(self, data: bytes) -> bool:
        """Whether there may be a secret: one fast look, after which most texts are done."""
        return any(pattern.search(data) is not None for pattern in self._suspicious)

    def suspects_among(self, texts: Sequence[str], work: Work) -> set[int]:
        """Which of many texts may have secrets. They are searched together, as each search has its price."""
        joined = "\n".join(texts).encode(errors="surrogatepass")
        suspects: set[int] = set()
        starts: list[int] = []
        for pattern in self._own_in_lines:
            spend_for_simulation(pattern, joined, work)
        for pattern in (*self._built_in, *self._own_in_lines):
            position = 0
            while position < len(joined) and (found := pattern.search(joined, position)) is not None:
                work.spend()
                starts = starts or [0, *accumulate(len(text.encode(errors="surrogatepass")) + 1 for text in texts)]
                number = bisect_right(starts, found.start()) - 1
                suspects.add(number)
                position = starts[number + 1]
        return suspects

    def redacted(self, data: bytes, limit: int, work: Work, *, is_json: bool) -> Text:
        """The text without its secrets, and where the limit is in it: behind what stood before it.

        In JSON that was parsed, names and escapes were dealt with.

        Raises:
            TooMuchWorkError: there are too many places to look at.
        """
        work.spend()
        finders = self._forms if is_json else self._all
        text = data, limit
        for _ in range(MOST_ROUNDS):  # a placeholder is an edge, behind which more may show
            if (replaced := self._replaced(*text, finders, work)) is None:
                break
            text = replaced
        if is_json or not self._unescapes:
            return text
        plain = text
        for _ in range(UNESCAPED_TIMES):
            if not _has_escapes(plain[0], work):
                break
            plain = _unescaped(*plain)
            if (uncovered := self._replaced(*plain, finders, work)) is not None:
                text = plain = uncovered  # shown unescaped only where that uncovered a secret
        return text

    def _replaced(self, data: bytes, limit: int, finders: Iterable[Finder | OwnFinder], work: Work) -> Text | None:
        """None if there is nothing to replace."""
        spans = self._merged(data, sorted(span for finder in finders for span in finder.spans(data, work)))
        if not spans:
            return None
        pieces: list[bytes] = []
        copied = shift = 0
        new_limit = None
        for start, end in spans:
            if new_limit is None and start >= limit:
                new_limit = limit + shift
            pieces += (data[copied:start], self._placeholder)
            shift += len(self._placeholder) - (end - start)
            if new_limit is None and end > limit:
                new_limit = end + shift
            copied = end
        pieces.append(data[copied:])
        return b"".join(pieces), limit + shift if new_limit is None else new_limit

    def _merged(self, data: bytes, spans: Iterable[Span]) -> list[Span]:
        """Spans that overlap or touch as one, and none that would put a placeholder into a placeholder."""
        merged: list[Span] = []
        for span in spans:
            start, end = self._around_placeholders(data, *span)
            while merged and start <= merged[-1][1]:
                before = merged.pop()
                start, end = min(start, before[0]), max(end, before[1])
            merged.append((start, end))
        return [(start, end) for start, end in merged if data[start:end] != self._placeholder]

    def _around_placeholders(self, data: bytes, start: int, end: int) -> Span:
        reach = len(self._placeholder) - 1
        first = data.find(self._placeholder, max(0, start - reach), start + reach)
        last = data.rfind(self._placeholder, max(0, end - reach), end + reach)
        return min(start, first) if first >= 0 else start, max(end, last + reach + 1) if last >= 0 else end


def _has_escapes(data: bytes, work: Work) -> bool:
    number = 0
    if b"%" in data or b"\\" in data:
        for number, _ in enumerate(_ESCAPES.finditer(data), 1):
            if number % _ESCAPES_A_PLACE == 0:
                work.spend()
    return number > 0


def _unescaped(data: bytes, limit: int) -> Text:
    """With one level of escapes undone, and the limit behind what it was behind."""
    around = _ESCAPES.finditer(data, max(0, limit - _LONGEST_ESCAPE), limit + _LONGEST_ESCAPE)
    limit = next((escape.end() for escape in around if escape.start() < limit < escape.end()), limit)
    shown, rest = (_ESCAPES.sub(_character, part) for part in (data[:limit], data[limit:]))
    return shown + rest, len(shown)


def _character(escape: re.Match[bytes]) -> bytes:
    return bytes((int(escape[0][-2:], 16),))


ELLIPSIS = "…"


@dataclass(frozen=True, slots=True)
class TextRedactor:
    """Redacts, then cuts.

    Of a text that is too long, as much is looked at as can be shown, and `LONGEST` characters more, of which none is
    shown: a secret that begins in what is shown and is no longer than that is recognised.
    """

    scanner: Scanner
    placeholder: str
    max_length: int

    def part_looked_at(self, text: str) -> str:
        """The beginning of a text that decides what is shown of it."""
        return text if len(text) <= self.max_length else text[: self.max_length + LONGEST]

    def redacted(self, text: str, work: Work, *, is_json: bool = False) -> str:
        """The text with placeholders for its secrets.

        Args:
            text: Any text. Lone surrogates pass.
            work: What may still be looked at closely.
            is_json: Whether the text is JSON whose content was redacted before.

        Raises:
            TooMuchWorkError: there are too many places to look at.
        """
        shown = self._once(text, work, is_json=is_json)
        # A cut can make of harmless characters what looks like a secret; what is stored should stand a second look.
        return shown if len(text) <= self.max_length else self._once(shown, work, is_json=False)

    def _once(self, text: str, work: Work, *, is_json: bool) -> str:
        data = self.part_looked_at(text).encode(errors="surrogatepass")
        if not self.scanner.suspects(data):
            return text if len(text) <= self.max_length else self._cut(text, self.max_length)
        limit = len(data)
        if len(text) > self.max_length:
            limit = len(text[: self.max_length].encode(errors="surrogatepass"))
        data, limit = self.scanner.redacted(data, limit, work, is_json=is_json)
        shown = data[:limit].decode(errors="surrogatepass")
        whole = data.decode(errors="surrogatepass")
        return self._cut(whole, min(len(shown), self.max_length))

    def _cut(self, text: str, length: int) -> str:
        """The beginning of a text, in which a placeholder that begins is whole."""
        reach = len(self.placeholder) - 1
        straddling = text.find(self.placeholder, max(0, length - reach), length + reach)
        end = length if straddling < 0 else straddling + reach + 1
        return text if end >= len(text) else text[:end] + ELLIPSIS
