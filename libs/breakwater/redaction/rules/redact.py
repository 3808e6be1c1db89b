"""Removes secrets and personal data from everything that is stored or shown.

It runs in the worker, before the first publish. By the names and patterns of `redact.toml` it hides:

- the values of JSON fields with secret names, whatever they are;
- values after such names in texts (`password=…`, `"token": "…"`, `Authorization: …`, a line break after `Password:`),
  or next to them (`{"name": "password", "value": …}`, lists of headers);
- forms of secrets anywhere: keys of well-known services, JSON web tokens, private keys, card numbers, social security
  numbers, e-mail addresses and users in URLs.

JSON in texts is parsed, and texts with escapes of URLs and JSON are also searched unescaped. It does not hide telephone
numbers and IBANs unless `forms` names them, secrets in prose ("the password is …"), in Base64 or any other encoding,
nor, in a truncated text, secrets longer than 16 KiB that only their end reveals.

All work has a limit, and everything beyond it is hidden. Patterns run on RE2, in time linear in the text. In one
document at most 20,000 places are examined closely, and 100,000 texts, names, objects and arrays are copied. So the
record of a typical job takes 0.07 ms, and 10 MB made to be slow 1.6 s at most, with the built-in rules on one core of
the build machine (`python -m bench.redaction`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, repeat
from typing import Any, Self, cast

import orjson
from pydantic import JsonValue

from breakwater.kernel.surrogates import whole_text
from breakwater.redaction.patterns import Pattern, compile_user_pattern
from breakwater.redaction.rules.scanner import (
    MAX_SECRET_LENGTH,
    NO_KEY_IN_ID,
    NameKind,
    Scanner,
    TooMuchWorkError,
    WorkLimit,
    holds_key,
)
from breakwater.redaction.settings import RedactionRules

NO_MATCH_IN_ID = "matches one of redaction.patterns; ids are stored and shown as they are, so choose another"


def id_objection(rules: RedactionRules, identifier: str) -> str | None:
    """Returns why an id may not be used: ids are not redacted, and this one holds a key or matches a pattern."""
    if holds_key(identifier):
        return NO_KEY_IN_ID
    if not rules.patterns:
        return None
    data = identifier.encode(errors="surrogatepass")
    return NO_MATCH_IN_ID if any(_compile(pattern).search(data) for pattern in rules.patterns) else None


@lru_cache(maxsize=256)
def _compile(pattern: str) -> Pattern:
    return compile_user_pattern(pattern)[0]


ELLIPSIS = "…"


@dataclass(frozen=True, slots=True)
class Redactor:
    """Redaction rules, compiled once. Redacting twice changes nothing more."""

    scanner: Scanner
    placeholder: str
    max_length: int

    @classmethod
    def compile(cls, rules: RedactionRules) -> Self:
        """Prepares the rules for use on many values, which takes some milliseconds."""
        scanner = Scanner(
            rules.fields, rules.patterns, rules.forms, built_in=rules.built_in, placeholder=rules.placeholder
        )
        return cls(scanner, rules.placeholder, rules.max_value_length)

    def text(self, value: str) -> str:
        """Returns a text without secrets, of at most `max_value_length` characters, a placeholder and an ellipsis."""
        try:
            return self.redact(value, WorkLimit())
        except TooMuchWorkError:
            return self.placeholder

    def json(self, value: JsonValue) -> JsonValue:
        """Returns a copy of a JSON value without secrets, in its texts, its keys and the JSON in its texts.

        Numbers and booleans stay unless their field is secret or a pattern matches their digits; `null` always stays.
        Keys that become equal get a number.
        """
        return _Copy(self, WorkLimit(), 0).of(value)

    def redact(self, text: str, work: WorkLimit, *, is_json: bool = False) -> str:
        """Redacts a text of a document.

        Args:
            text: any text. Lone surrogates stay.
            work: the remaining work.
            is_json: True for JSON whose content has been redacted already.

        Raises:
            TooMuchWorkError: too many places may be secrets.
        """
        cut_text = self._cut(text, work, is_json=is_json)
        # Truncation can make harmless characters look like a secret; the stored text should pass a second redaction.
        return cut_text if len(text) <= self.max_length else self._cut(cut_text, work, is_json=False)

    def _cut(self, text: str, work: WorkLimit, *, is_json: bool) -> str:
        """Redacts and truncates a text, without splitting a placeholder.

        The search extends `MAX_SECRET_LENGTH` characters beyond the limit, so that a secret of up to that length is
        recognised if it begins before the limit. These characters are not returned.
        """
        end = self.max_length
        data = text[: end + MAX_SECRET_LENGTH].encode(errors="surrogatepass")
        if self.scanner.suspects(data):
            limit = len(text[:end].encode(errors="surrogatepass"))
            data, limit = self.scanner.redact((data, limit), work, is_json=is_json)
            text = data.decode(errors="surrogatepass")
            end = min(end, len(data[:limit].decode(errors="surrogatepass")))
        if end >= len(text):
            return text
        reach = len(self.placeholder) - 1
        straddling = text.find(self.placeholder, max(0, end - reach), end + reach)
        end = end if straddling < 0 else straddling + reach + 1
        return text if end >= len(text) else text[:end] + ELLIPSIS


MAX_DEPTH = 64
"""The deepest nesting of objects and arrays; everything deeper is hidden."""

MAX_NESTING = 8
"""The deepest nesting of JSON in texts in JSON; anything deeper is redacted as plain text."""

_SEARCHED_TOGETHER = 512
_MIN_CARD_NUMBER = 10**12
_MAX_WRITTEN_NUMBER = 10**300  # Python refuses to write out integers of a few thousand digits
_BEFORE_JSON = frozenset("{[ \t\r\n")
_JSON_TEXT_PLACES = 3
_NAME = object()

_Slot = tuple[Any, Any]
"""An object or array of the copy, and a key or index in it; or a field's name, and `_NAME`."""


class _Copy:
    """Redacts one document: copies its objects and arrays, and collects its texts and names to search them together."""

    def __init__(self, rules: Redactor, work: WorkLimit, nesting: int) -> None:
        self._rules = rules
        self._names = rules.scanner.names
        self._placeholder = rules.placeholder
        self._work = work
        self._nesting = nesting
        self._slots: list[_Slot] = []
        self._texts: list[str] = []
        self._deferred: list[tuple[_Slot, str]] = []
        self._kinds: dict[str, NameKind] = {}
        self._renamed: dict[str, str] = {}

    def of(self, value: JsonValue) -> JsonValue:
        """Returns the redacted copy. Once the limit of work is reached, everything that may be a secret is hidden."""
        copy = self._array([value], 0)
        for first in range(0, len(self._texts), _SEARCHED_TOGETHER):
            group = slice(first, first + _SEARCHED_TOGETHER)
            self._search(self._texts[group], self._slots[group])
        for slot, text in self._deferred:
            self._redact(slot, text)
        if self._renamed:
            self._rename_keys(copy)
        return copy[0]

    # Copying

    def _object(self, value: dict[str, JsonValue], depth: int) -> dict[str, JsonValue]:
        copy = value.copy()
        kinds = self._kinds
        for number, (name, item) in enumerate(value.items()):
            if self._work.values_left <= 0:
                return {**dict(islice(copy.items(), number)), self._placeholder: self._placeholder}
            if (kind := kinds.get(name)) is None:
                kind = kinds[name] = self._names.kind(name)
                self._put_text((name, _NAME), name)
            if item is None:
                continue
            if kind is NameKind.HARMLESS:
                secret = False
            elif kind is NameKind.PAIR_VALUE:
                secret = self._names.names_a_secret(value)
            else:
                secret = kind is NameKind.SECRET or not isinstance(item, bool)
            if secret:
                copy[name] = self._placeholder
            else:
                self._put(copy, name, item, depth)
        return copy

    def _array(self, value: list[JsonValue], depth: int) -> list[JsonValue]:
        copy = value.copy()
        if value and {*map(type, value)} <= {int, float} and self._passes(cast(list[float], value), copy):
            return copy
        for index, item in enumerate(value):
            if self._work.values_left <= 0:
                # One placeholder replaces all remaining items, of their kind: messages stay a list of objects.
                copy[index:] = [{self._placeholder: self._placeholder} if isinstance(item, dict) else self._placeholder]
                break
            match item:
                case [str(name), named] if named is not None and self._names.is_secret(name):  # as headers are listed
                    item = cast(JsonValue, [name, self._placeholder])
                case _:
                    pass
            self._put(copy, index, item, depth)
        return copy

    def _passes(self, numbers: list[float], copy: list[JsonValue]) -> bool:
        """Collects the numbers of an array, which may be many; returns False if one is too large to be written out."""
        lowest = min(numbers)
        highest = max(numbers)
        if not (self._may_be_secret(lowest) or self._may_be_secret(highest)):
            return True
        if not max(-lowest, highest) < _MAX_WRITTEN_NUMBER:
            return False
        lines = str(numbers)[1:-1].replace(", ", "\n")
        scanner = self._rules.scanner
        if scanner.any_number or scanner.suspects(lines.encode()):
            self._slots += zip(repeat(copy), range(len(copy)))
            self._texts += lines.split("\n")
        return True

    def _put(self, copy: Any, place: Any, item: JsonValue, depth: int) -> None:
        if isinstance(item, str):
            self._put_text((copy, place), item)
        elif isinstance(item, int | float):
            if isinstance(item, bool) or not self._may_be_secret(item):
                return
            if -_MAX_WRITTEN_NUMBER < item < _MAX_WRITTEN_NUMBER:  # never cut, however many digits it has
                self._work.values_left -= 1
                self._slots.append((copy, place))
                self._texts.append(str(item))
            elif isinstance(item, int):
                copy[place] = self._placeholder
        elif item is not None:
            self._work.values_left -= 1
            if depth == MAX_DEPTH:
                copy[place] = self._placeholder
            else:
                copy[place] = self._object(item, depth + 1) if isinstance(item, dict) else self._array(item, depth + 1)

    def _put_text(self, slot: _Slot, text: str) -> None:
        self._work.values_left -= 1
        if len(text) > self._rules.max_length or ("\\" in text and _looks_like_json(text)):
            self._deferred.append((slot, text))  # it must be truncated, or parsed
        else:
            self._slots.append(slot)
            self._texts.append(text)

    def _may_be_secret(self, number: float) -> bool:
        return self._rules.scanner.any_number or not -_MIN_CARD_NUMBER < number < _MIN_CARD_NUMBER

    # Searching

    def _search(self, texts: list[str], slots: list[_Slot]) -> None:
        try:
            suspects = self._rules.scanner.suspects_among(texts, self._work)
        except TooMuchWorkError:
            for slot in slots:
                self._set(slot, self._placeholder)
            return
        for index in suspects:
            self._redact(slots[index], texts[index])

    def _redact(self, slot: _Slot, text: str) -> None:
        try:
            redacted = self._redact_text(text)
        except TooMuchWorkError:
            redacted = self._placeholder
        if redacted != text:
            self._set(slot, redacted)

    def _set(self, slot: _Slot, text: str) -> None:
        container, place = slot
        if place is _NAME:
            self._renamed[container] = text
        else:
            container[place] = text if isinstance(container[place], str) else self._placeholder  # no half of a number

    def _redact_text(self, text: str) -> str:
        is_complete = len(text) <= self._rules.max_length + MAX_SECRET_LENGTH
        if self._nesting == MAX_NESTING or not is_complete or not _looks_like_json(text):
            return self._rules.redact(text, self._work)
        self._work.spend(_JSON_TEXT_PLACES)
        try:
            inner = cast(JsonValue, json.loads(text, object_pairs_hook=_distinct))
        except (ValueError, RecursionError):
            return self._rules.redact(text, self._work)
        redacted = _Copy(self._rules, self._work, self._nesting + 1).of(inner)
        if redacted != inner:
            text = whole_text(json.dumps(redacted, ensure_ascii=False))
        return self._rules.redact(text, self._work, is_json=True)

    def _rename_keys(self, value: dict[str, JsonValue] | list[JsonValue]) -> None:
        """Gives objects their redacted keys, in the old order and distinct, so that no value is lost."""
        for item in value if isinstance(value, list) else value.values():
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


def _looks_like_json(text: str) -> bool:
    return text[:1] in _BEFORE_JSON and text.lstrip()[:1] in {"{", "["}


def _distinct(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    """Builds an object. Raises ValueError for a repeated name: a parser would hide one value that a reader sees."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError
    return fields


# Secrets whose values are known

MIN_SECRET_LENGTH = 8
"""The fewest characters of a secret that is always hidden. A shorter one is hidden only as a word of its own, and if
it is neither a plain word nor a plain number."""
_MIN_ODD_LENGTH = 4
_OF_ANY = (b"\\u", b"\0")
"""Signs of an encoding that can hide any character: escapes of JSON, and the zero bytes of UTF-16."""
_GAP = r"(?:\s|\\[nrt])+"


class KnownSecrets:
    """Removes secrets of known value from texts: whole secrets, however their lines are broken, and each line of one.

    Texts must be truncated afterwards, never before.
    """

    def __init__(self, secrets: Iterable[str], placeholder: str) -> None:
        self._secrets = tuple(secrets)
        self._placeholder = placeholder
        parts = {part for secret in self._secrets for part in (secret, *secret.splitlines())}
        patterns = [pattern for part in sorted(parts, key=len, reverse=True) if (pattern := _pattern(part.strip()))]
        self._pattern = re.compile("|".join(patterns)) if patterns else None
        plain = all(part.isascii() and json.dumps(part) == f'"{part}"' and part.split() == [part] for part in parts)
        raw = [part.encode(errors="surrogatepass") for part in parts if part]
        self._in_json = raw if plain else None
        """The secrets as this process writes them in JSON; None if one needs escapes."""
        own_escapes = (b"\\",) if not plain else (b"\\/",) if any(b"/" in part for part in raw) else ()
        self._signs = (*raw, *_OF_ANY, *own_escapes)
        """Any JSON with a secret in it contains one of these, however it is written."""

    def hide(self, text: str) -> str:
        """Returns the text without secrets."""
        return text if self._pattern is None else self._pattern.sub(lambda _: self._placeholder, text)

    def hide_in(self, value: Any) -> Any:
        """Returns a JSON value without secrets in its names and texts; it is only searched if it may have one."""
        if self._pattern is None or not self._may_hold(value):
            return value
        return self._without(value)

    def _may_hold(self, value: Any) -> bool:
        if self._in_json is None or not isinstance(value, dict | list):
            return True
        try:
            written = orjson.dumps(value)
        except orjson.JSONEncodeError:
            return True
        return any(map(written.__contains__, self._in_json))

    def _without(self, value: Any) -> Any:
        match value:
            case str():
                return self.hide(value)
            case dict():
                fields = cast(dict[str, Any], value).items()
                return {self.hide(name): self._without(inner) for name, inner in fields}
            case list():
                return [self._without(inner) for inner in cast(list[Any], value)]
            case _:
                return value

    def hide_in_parsed(self, raw: bytes, value: Any) -> Any:
        """Returns a JSON value that was read from `raw`, without secrets; it is only searched if it may have one."""
        if self._pattern is None or not any(map(raw.__contains__, self._signs)):
            return value
        return self.hide_in(value)

    def hide_in_tail(self, text: str) -> str:
        """Returns a text without secrets, whose missing beginning may contain the beginning of a secret."""
        endings = (secret[begin : begin + len(text)] for secret in self._secrets for begin in range(1, len(secret)))
        cut = max((len(ending) for ending in endings if text.startswith(ending)), default=0)
        return self.hide(text[cut:])


def cut(text: str, length: int) -> str:
    """Truncates a text between two words: redaction would not recognise a part of a key."""
    return text if len(text) <= length else "".join((text[:length] + "…").rsplit(None, 1)[:-1])


def _pattern(secret: str) -> str | None:
    pattern = _GAP.join(map(re.escape, secret.split()))
    if len(secret) >= MIN_SECRET_LENGTH:
        return pattern
    return None if len(secret) < _MIN_ODD_LENGTH or secret.isalpha() or secret.isdigit() else rf"(?<!\w){pattern}(?!\w)"
