"""A JSON document without its secrets: copied, and its texts searched together, as each search has its price."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

from pydantic import JsonValue

from breakwater.policy.redaction.finders import TooMuchWorkError, Work
from breakwater.policy.redaction.scanner import TextRedactor
from breakwater.policy.redaction.values import SecretNames

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

    def redacted(self, value: JsonValue, work: Work, nesting: int = 0) -> JsonValue:
        """A redacted copy of a JSON value. What is left when there is no more work to spend is hidden."""
        return _Copy(self, work, nesting).of(value)


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
        self._is_secret: dict[str, bool] = {}
        self._renamed: dict[str, str] = {}

    def of(self, value: JsonValue) -> JsonValue:
        """The redacted copy."""
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
        known = self._is_secret
        for number, (name, item) in enumerate(value.items()):
            if self._work.values_left <= 0:
                return {**dict(islice(copy.items(), number)), self._placeholder: self._placeholder}
            if (is_secret := known.get(name)) is None:
                is_secret = known[name] = name in self._rules.names
                self._put_text((name, _NAME), name)
            if item is None:
                continue
            if is_secret:
                copy[name] = self._placeholder
            else:
                self._put(copy, name, item, depth)
        return copy

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
            self._put(copy, index, item, depth)
        return copy

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
            redacted = self._rules.redacted(inner, self._work, self._nesting + 1)
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
