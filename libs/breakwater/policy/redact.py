"""Takes secrets and personal data out of what is stored or shown. Runs in the worker, before the first publish.

What is hidden: the values of JSON fields with secret names, whatever they are; values that stand behind such names in
texts (`password=…`, `"token": "…"`, `Authorization: …`, a line break behind `Password:`), or that such names stand
beside (`{"name": "password", "value": …}`, lists of headers); and forms of secrets wherever they stand: keys of
well-known services, JSON web tokens, private keys, card numbers, social security numbers, e-mail addresses, users in
URLs. JSON in texts is parsed, and what URLs and JSON escape is looked at unescaped.

What is not: telephone numbers and IBANs unless `forms` names them, secrets in prose ("the password is …"), in Base64 or
any other encoding, and of a text that is cut, secrets longer than 16 KiB which only their end gives away.

Everything has a bound, and what is beyond it is hidden. Patterns run on RE2, in time linear in the text. In one
document at most 20,000 places are looked at closely, and 100,000 texts, names, objects and arrays are copied. So the
record of a typical job takes 0.07 ms, and 10 MB made to be slow 1.6 s at most, with the built-in rules on one core of
the build machine (`python -m tests.bench.redaction`).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, Literal, Self, cast

from pydantic import Field, JsonValue, field_validator

from breakwater.contracts.types import Message
from breakwater.policy.redact_patterns import (
    ESCAPES,
    FINDERS,
    LONGEST,
    OPTIONAL_FINDERS,
    STARTS,
    Finder,
    NameKind,
    OwnFinder,
    RegexMatch,
    SecretNames,
    Span,
    TooMuchWorkError,
    Work,
    before_values,
    built_in,
    in_pairs,
    own,
    spend_for_simulation,
    squashed,
    value_after,
    value_of_pair,
)

OptionalForm = Literal["iban", "phone"]


class RedactionRules(Message):
    """What to hide. The built-in names and forms of secrets always apply unless `built_in` is off."""

    built_in: bool = True
    fields: tuple[str, ...] = Field(
        default=(), description="Names of JSON fields, in any spelling (apiKey, API_KEY), whose values are replaced."
    )
    patterns: tuple[str, ...] = Field(
        default=(),
        description="Regular expressions in RE2's syntax; what they match in a text is replaced. (?i) ignores case.",
    )
    forms: tuple[OptionalForm, ...] = Field(
        default=(),
        description="Further forms to replace in any text: iban (with right check digits), and phone, which also takes "
        "some other numbers for phone numbers.",
    )
    placeholder: str = Field(default="[REDACTED]", min_length=1, max_length=100)
    max_value_length: int = Field(default=20_000, ge=16, description="Longer texts are truncated, with an ellipsis.")

    @field_validator("fields")
    @classmethod
    def _names(cls, fields: tuple[str, ...]) -> tuple[str, ...]:
        for name in fields:
            if not squashed(name) or not name.isprintable():
                raise ValueError(f"{name!r} is no name of a field")
        return fields

    @field_validator("patterns")
    @classmethod
    def _compilable(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            own(pattern)
        return patterns


DEFAULT_REDACTION = RedactionRules()


@dataclass(frozen=True, slots=True)
class Redactor:
    """Redaction rules, compiled once. Redacting twice changes nothing more."""

    texts: TextRedactor
    documents: DocumentRedactor

    @classmethod
    def compile(cls, rules: RedactionRules) -> Self:
        """Prepares the rules for use on many values, which takes some milliseconds."""
        scanner = Scanner(
            rules.fields,
            rules.patterns,
            rules.forms,
            built_in_rules=rules.built_in,
            placeholder=rules.placeholder.encode(),
        )
        texts = TextRedactor(scanner, rules.placeholder, rules.max_value_length)
        names = SecretNames(rules.fields, built_in=rules.built_in)
        return cls(texts, DocumentRedactor(texts, names, all_numbers=bool(rules.patterns)))

    def text(self, value: str) -> str:
        """A text without secrets, of at most `max_value_length` characters, a last placeholder and an ellipsis."""
        try:
            return self.texts.redacted(value, Work())
        except TooMuchWorkError:
            return self.texts.placeholder

    def json(self, value: JsonValue) -> JsonValue:
        """A copy without secrets, in its texts, its keys and the JSON that stands in texts.

        Numbers and booleans stay what they are unless their field is secret or a pattern matches them as they are
        written; `null` always stays. Keys that become the same are distinguished by a number.
        """
        return _Copy(self.documents, Work(), 0).of(value)


Text = tuple[bytes, int]
"""UTF-8, in which lone surrogates pass, and a limit in it: what may be shown ends there."""

UNESCAPED_TIMES = 2
"""How often a text may have been escaped: `%2540` is an @, escaped twice."""

MOST_ROUNDS = 3

_ESCAPES_A_PLACE = 4
_LONGEST_ESCAPE = 6
_ESCAPES = re.compile(ESCAPES.encode())


class Scanner:
    """All rules, ready for use on many texts.

    Every rule looks at the same text, so that none hides from the next what it is recognised by; what they find is
    merged and replaced at once.
    """

    def __init__(
        self,
        fields: Sequence[str],
        patterns: Sequence[str],
        forms: Sequence[OptionalForm],
        *,
        built_in_rules: bool,
        placeholder: bytes,
    ) -> None:
        self._placeholder = placeholder
        self._unescapes = built_in_rules or bool(fields) or bool(patterns) or bool(forms)
        owns = [own(pattern) for pattern in patterns]
        self._forms: list[Finder | OwnFinder] = [
            *(FINDERS if built_in_rules else ()),
            *(OPTIONAL_FINDERS[form][0] for form in forms),
            *(OwnFinder(pattern.alone) for pattern in owns),
        ]
        self._all = self._forms
        suspicious = [ESCAPES] if self._unescapes else []
        suspicious += STARTS if built_in_rules else ()
        suspicious += (OPTIONAL_FINDERS[form][1] for form in forms)
        if (names := before_values(fields, built_in_names=built_in_rules)) is not None:
            pairs = in_pairs(fields, built_in_names=built_in_rules) or names
            self._all = [
                *self._forms,
                Finder(built_in(names), self._value),
                Finder(built_in(pairs), self._value_of_pair, needs=b"val"),
            ]
            suspicious += (names, pairs)
        at_once = [built_in("|".join(suspicious))] if suspicious else []
        self._suspicious = (*at_once, *(pattern.alone for pattern in owns))
        self._built_in = tuple(at_once)
        self._own_in_lines = tuple(pattern.in_lines for pattern in owns)

    def _value(self, data: bytes, found: RegexMatch) -> Span:
        return value_after(data, found, self._placeholder)

    def _value_of_pair(self, data: bytes, found: RegexMatch) -> Span:
        return value_of_pair(data, found, self._placeholder)

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


MAX_DEPTH = 64
"""Objects and arrays in one another. What is deeper is hidden."""

MAX_NESTING = 8
"""JSON in a text in JSON in a text. What is deeper is redacted as any text."""

_SEARCHED_AT_ONCE = 64 * 1024
_LEAST_CARD_NUMBER = 10**12
_BEFORE_JSON = frozenset("{[ \t\r\n")
_JSON_TEXT_PLACES = 3
_NAME = object()
_LARGEST = 10**300  # Python refuses to write out integers of a few thousand digits
_NUMBERS_AT_ONCE = 4096

Place = tuple[Any, Any]
"""An object or array of the copy, and where in it; or the name of fields, and `_NAME`."""


@dataclass(frozen=True, slots=True)
class DocumentRedactor:
    """The rules for documents."""

    texts: TextRedactor
    names: SecretNames
    all_numbers: bool
    """Whether any number may match; of the built-in forms only those of cards are numbers."""


class _Copy:
    """One document on its way: its objects and arrays are copied, its texts and names wait to be searched."""

    def __init__(self, rules: DocumentRedactor, work: Work, nesting: int) -> None:
        self._rules = rules
        self._placeholder = rules.texts.placeholder
        self._work = work
        self._nesting = nesting
        self._places: list[Place] = []
        self._texts: list[str] = []
        self._surely: list[tuple[Place, str]] = []
        self._series: list[list[Any]] = []
        self._kinds: dict[str, NameKind] = {}
        self._renamed: dict[str, str] = {}

    def of(self, value: JsonValue) -> JsonValue:
        """The redacted copy. What is left when there is no more work to spend is hidden."""
        copy = self._array([value], 0)
        for group in self._groups():
            self._search(self._texts[group], self._places[group])
        for series in self._series:
            for start in range(0, len(series), _NUMBERS_AT_ONCE):
                numbers = range(start, min(start + _NUMBERS_AT_ONCE, len(series)))
                self._search([str(series[number]) for number in numbers], [(series, number) for number in numbers])
        for place, text in self._surely:
            self._redact(place, text)
        if self._renamed:
            self._rename_keys(copy)
        return copy[0]

    # Copying

    def _object(self, value: dict[str, JsonValue], depth: int) -> dict[str, JsonValue]:
        copy = value.copy()
        known = self._kinds
        for number, (name, item) in enumerate(value.items()):
            if self._work.values_left <= 0:
                return {**dict(islice(copy.items(), number)), self._placeholder: self._placeholder}
            if (kind := known.get(name)) is None:
                kind = known[name] = self._rules.names.kind(name)
                self._put_text((name, _NAME), name)
            if item is None:
                continue
            if kind is not NameKind.HARMLESS and self._is_secret(kind, item, value):
                copy[name] = self._placeholder
            else:
                self._put(copy, name, item, depth)
        return copy

    def _is_secret(self, kind: NameKind, item: JsonValue, beside: dict[str, JsonValue]) -> bool:
        if kind is NameKind.PAIR_VALUE:
            return self._rules.names.names_a_secret(beside)
        return kind is NameKind.SECRET or not isinstance(item, bool)

    def _array(self, value: list[JsonValue], depth: int) -> list[JsonValue]:
        copy = value.copy()
        if (magnitude := _magnitude(value)) is not None:
            if self._rules.all_numbers or magnitude >= _LEAST_CARD_NUMBER:
                self._series.append(copy)
            return copy
        for index, item in enumerate(value):
            if self._work.values_left <= 0:
                # One for the rest, of the same kind: messages stay a list of objects.
                copy[index:] = [{self._placeholder: self._placeholder} if isinstance(item, dict) else self._placeholder]
                break
            if isinstance(item, list) and self._is_named_secret(item):
                item = [item[0], self._placeholder]
            self._put(copy, index, item, depth)
        return copy

    def _is_named_secret(self, pair: list[JsonValue]) -> bool:
        """Whether this is a name with its value, as headers are listed: `["Authorization", "…"]`."""
        match pair:
            case [str(name), value]:
                return value is not None and self._rules.names.is_secret(name)
            case _:
                return False

    def _put(self, copy: Any, slot: Any, item: JsonValue, depth: int) -> None:
        if isinstance(item, str):
            self._put_text((copy, slot), item)
        elif isinstance(item, int | float):
            if (self._rules.all_numbers or abs(item) >= _LEAST_CARD_NUMBER) and not isinstance(item, bool):
                self._put_number((copy, slot), item)
        elif item is not None:
            self._work.values_left -= 1
            if depth == MAX_DEPTH:
                copy[slot] = self._placeholder
            else:
                copy[slot] = self._object(item, depth + 1) if isinstance(item, dict) else self._array(item, depth + 1)

    def _put_text(self, place: Place, text: str) -> None:
        self._work.values_left -= 1
        if len(text) > self._rules.texts.max_length or (text[:1] in _BEFORE_JSON and _escapes_in_json(text)):
            self._surely.append((place, text))  # it must be cut, or parsed
        else:
            self._places.append(place)
            self._texts.append(text)

    def _put_number(self, place: Place, number: float) -> None:
        self._work.values_left -= 1
        if -_LARGEST < number < _LARGEST:
            self._places.append(place)
            self._texts.append(str(number))
        elif isinstance(number, int):
            self._set(place, self._placeholder)

    # Searching

    def _groups(self) -> Iterator[slice]:
        """Which texts are searched together: so few that a pattern which looks far ahead does not look at all."""
        start = size = 0
        for end, text in enumerate(self._texts, 1):
            size += len(text)
            if size >= _SEARCHED_AT_ONCE:
                yield slice(start, end)
                start, size = end, 0
        if start < len(self._texts):
            yield slice(start, len(self._texts))

    def _search(self, texts: list[str], places: list[Place]) -> None:
        if self._work.is_spent:
            for place in places:
                self._set(place, self._placeholder)
            return
        try:
            suspects = self._rules.texts.scanner.suspects_among(texts, self._work)
        except TooMuchWorkError:
            self._search(texts, places)
            return
        for number in suspects:
            self._redact(places[number], texts[number])

    def _redact(self, place: Place, text: str) -> None:
        try:
            redacted = self._placeholder if self._work.is_spent else self._redacted(text)
        except TooMuchWorkError:
            redacted = self._placeholder
        if redacted != text:
            self._set(place, redacted)

    def _set(self, place: Place, text: str) -> None:
        container, slot = place
        if slot is _NAME:
            self._renamed[container] = text
        else:
            container[slot] = text if isinstance(container[slot], str) else self._placeholder  # no half of a number

    def _redacted(self, text: str) -> str:
        texts = self._rules.texts
        if self._nesting < MAX_NESTING and _looks_like_json(text) and len(texts.part_looked_at(text)) == len(text):
            self._work.spend(_JSON_TEXT_PLACES)
            try:
                inner = cast(JsonValue, json.loads(text, object_pairs_hook=_without_duplicates))
            except (ValueError, RecursionError):
                return texts.redacted(text, self._work)
            redacted = _Copy(self._rules, self._work, self._nesting + 1).of(inner)
            if redacted != inner:
                text = json.dumps(redacted, ensure_ascii=False)
            return texts.redacted(text, self._work, is_json=True)
        return texts.redacted(text, self._work)

    def _rename_keys(self, value: dict[str, JsonValue] | list[JsonValue]) -> None:
        """Gives objects their redacted keys, in the old order and distinct, so that no value is lost."""
        items = value if isinstance(value, list) else list(value.values())
        for item in items:
            if isinstance(item, dict | list):
                self._rename_keys(item)
        if isinstance(value, dict):
            fields = list(value.items())
            value.clear()
            used: dict[str, int] = {}
            for name, item in fields:
                new = distinct = self._renamed.get(name, name)
                while distinct in value:
                    used[new] = used.get(new, 1) + 1
                    distinct = f"{new} ({used[new]})"
                value[distinct] = item


def _magnitude(series: list[Any]) -> float | None:
    """The largest of nothing but numbers, long series of which pass quickly. None if they are out of all measure."""
    if not series or not {*map(type, series)} <= {int, float}:
        return None
    magnitude = max(max(series), -min(series))
    return magnitude if magnitude < _LARGEST else None


def _looks_like_json(text: str) -> bool:
    return text[:1] in _BEFORE_JSON and text.lstrip()[:1] in {"{", "["}


def _escapes_in_json(text: str) -> bool:
    """Whether only a parser sees what the text says. Without escapes, names and secrets stand there as they are."""
    return "\\" in text and _looks_like_json(text)


def _without_duplicates(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in an object: a parser sees one of the values, a reader both")
    return found
