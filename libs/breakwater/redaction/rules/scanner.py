"""Finds secrets in a text: by the names and forms of `redact.toml`, and by the names and patterns of the config.

Regular expressions run on RE2, in time linear in the text for one search, so that no pattern can hang a worker. All of
them work on bytes: for a `str`, Google's wrapper counts the characters before each match, which triples the time.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache, partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, cast

import re2

from breakwater.kernel.errors import BreakwaterError
from breakwater.redaction.patterns import (
    SEPARATORS,
    Pattern,
    compile_user_pattern,
    program_size,
    re2_options,
    squash_name,
)

Extent = tuple[int, int]
"""The first byte, and the byte after the last; empty if they are equal."""

MAX_SECRET_LENGTH = 16 * 1024
"""The assumed maximum length of a secret, in bytes or characters."""

NO_KEY_IN_ID = "has the form of a known service's key or token; ids are stored and shown as they are, so choose another"

MAX_PLACES = 20_000
"""The most places that are examined closely in one text or document, at some ten microseconds each."""

MAX_VALUES = 100_000
"""The most texts, names, objects and arrays that are copied in one document, at some microseconds each."""


class TooMuchWorkError(BreakwaterError):
    """Too many places may be secrets to examine each."""


class WorkLimit:
    """The remaining work for one text or document."""

    def __init__(self) -> None:
        self._places_left = MAX_PLACES
        self.values_left = MAX_VALUES

    def spend(self, places: int = 1) -> None:
        """Spends work on some places. Raises TooMuchWorkError when none is left."""
        self._places_left -= places
        if self._places_left < 0:
            raise TooMuchWorkError

    def spend_on_simulation(self, pattern: Pattern, data: bytes) -> None:
        """Spends the work of a large user pattern in the worst case, in which RE2 simulates each instruction."""
        self.spend(max(0, program_size(pattern) - _FREE_INSTRUCTIONS) * len(data) // _SIMULATED_AT_A_PLACE)


# Patterns

_RULES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("redact.toml").read_text(encoding="utf-8"))
_NAMES: dict[str, list[str]] = _RULES["names"]


def _spellings(names: Iterable[str]) -> str:
    """Returns a pattern, on single bytes, of all spellings that `squash_name` maps to these names.

    It must be compiled to ignore the case of ASCII.
    """

    def cases(char: str) -> str:
        both = {char} if char.isascii() else {char, char.upper()}
        return _any([re.escape(case.encode().decode("latin-1")) for case in sorted(both)])

    return _any(["[-_. ]*".join(map(cases, squash_name(name).decode())) for name in names])


def _any(patterns: Sequence[str]) -> str:
    return f"(?:{'|'.join(patterns)})"


_PIECES = {name: _spellings(names) for name, names in _NAMES.items()}


def _fill(pattern: str | list[str], pieces: Mapping[str, str] = _PIECES) -> str:
    """Replaces the `<pieces>` of a pattern by their own patterns."""
    combined = pattern if isinstance(pattern, str) else _any(pattern)
    return re.sub(r"<(\w+)>", lambda piece: pieces[piece[1]], combined)


for _name, _piece in _RULES["pieces"].items():
    _PIECES[_name] = _fill(_piece)


def _compile(pattern: str | list[str]) -> Pattern:
    """Compiles a pattern of the file. It works on single bytes, so `[^…]` matches any other byte."""
    return _compile_filled(_fill(pattern))


@lru_cache(maxsize=64)
def _compile_filled(pattern: str) -> Pattern:
    """Compiles a pattern without pieces, once for all configs: the built-in ones take 20 ms."""
    options = re2_options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.max_mem = 64 << 20
    return cast(Pattern, re2.compile(pattern.encode("latin-1"), options))


_FREE_INSTRUCTIONS = 100
_SIMULATED_AT_A_PLACE = 1 << 15
"""The instructions times bytes that count as one place."""


# Names of fields


class NameKind(Enum):
    """The meaning of a field's name for its value."""

    HARMLESS = auto()
    SECRET = auto()
    SECRET_UNLESS_BOOLEAN = auto()
    PAIR_VALUE = auto()
    """Another field may name the value as secret."""


_QUOTED, _PAIR_VALUES = (frozenset(map(squash_name, _NAMES[kind])) for kind in ("quoted", "pair_values"))
_WHOLE = frozenset(map(squash_name, _NAMES["whole"] + _NAMES["common"]))
_ENDINGS, _WORDS, _WHOLE_LINE = (
    tuple(map(squash_name, names))
    for names in (_NAMES["endings"], _NAMES["words"] + _NAMES["words_alone"], _NAMES["whole_line"])
)
_LAST_WORD = _compile(r"(?:(?:^|[-_. ])(?i:<words>)|[a-z0-9](?:Pass|Pw)|^(?i:<words_alone>))[-_. 0-9]*\z")
_PAIR_NAMES = (*_NAMES["pair_names"], *map(str.capitalize, _NAMES["pair_names"]))
_LONGEST_REMEMBERED = 64
_LONGEST_NAMED = 48


class SecretNames:
    """Decides which names of fields are secret, by whole names and by endings. A number at the end does not matter."""

    def __init__(self, fields: Iterable[str], *, built_in: bool) -> None:
        self._own = frozenset(map(squash_name, fields))
        self._compile = built_in
        self._remembered = lru_cache(4096)(self._look)

    def kind(self, name: str) -> NameKind:
        """Returns the kind of a name."""
        return self._remembered(name) if len(name) <= _LONGEST_REMEMBERED else self._look(name)

    def is_secret(self, name: str) -> bool:
        """Returns True if a field's value is secret, unless it is a boolean."""
        return self.kind(name) in (NameKind.SECRET, NameKind.SECRET_UNLESS_BOOLEAN)

    def names_a_secret(self, pair: Mapping[str, object]) -> bool:
        """Returns True if a field of an object names its value as secret: `{"name": "password", "value": 1}`."""
        for field in _PAIR_NAMES:
            name = pair.get(field)
            if isinstance(name, str) and len(name) <= _LONGEST_NAMED and self.is_secret(name):
                return True
        return False

    def _look(self, name: str) -> NameKind:
        squashed = squash_name(name)
        unnumbered = squashed.rstrip(b"0123456789")
        if squashed in self._own:
            return NameKind.SECRET
        if self._compile and (squashed in _QUOTED or unnumbered in _WHOLE or unnumbered.endswith(_ENDINGS)):
            return NameKind.SECRET
        if self._compile and _LAST_WORD.search(name.encode(errors="surrogatepass")):
            return NameKind.SECRET_UNLESS_BOOLEAN
        return NameKind.PAIR_VALUE if squashed in _PAIR_VALUES else NameKind.HARMLESS


# Values behind names in texts

_VALUE = _RULES["value"] | {"bare": f"(?i:{_any(_RULES['value']['bare'])})"}
_BARE, _LINE, _OPENING_QUOTE, _LINE_BREAK, _ALONE_ON_LINE, _VALUE_OF_PAIR = (
    _compile(_VALUE[name]) for name in ("bare", "whole_line", "opening_quote", "line_break", "alone_on_line", "of_pair")
)
_HARMLESS = frozenset(value.encode() for value in _VALUE["harmless"])
_NO_WORD = re.compile(rb"(?=.{4})[^0-9]*[0-9]", re.DOTALL)
_QUOTES = (b'"', b"'", b"`")
_BEFORE_LINE_BREAK = frozenset(b"\r\n>|-+")
_BEFORE_QUOTED = frozenset(b"bBrRuUfF\\\"'`")
"""The bytes that the two patterns can begin with, which are far cheaper to test first."""
_UNESCAPED = {quote: _compile(rf"(?:[^{quote.decode()}\\]|\\\C)*") for quote in _QUOTES}
_ESCAPED = {
    (slashes, quote): _compile(rf"[^\\]\\{{0,{slashes}}}{quote.decode()}") for slashes in (1, 3, 7) for quote in _QUOTES
}
"""Inside JSON that was escaped once, twice, three times, a quote closes if no more backslashes precede it."""

_JSON = json.JSONDecoder()


def _value_behind(placeholder: bytes, data: bytes, name_start: int, start: int) -> Extent:
    """Returns the extent of the value after a name and its separator, which end at `start`; empty if it is harmless."""
    name = data[name_start:start].rstrip()
    named_in_quotes = name.rstrip(b":=> \t\r\n]").endswith(_QUOTES[:2])
    if named_in_quotes and data.startswith(placeholder, start):
        return start, start + len(placeholder)
    first = data[start] if start < len(data) else None
    if first in _BEFORE_LINE_BREAK and (line_break := _LINE_BREAK.match(data, start)) is not None:
        return _on_next_line(data, name, line_break.end())
    if first in _BEFORE_QUOTED and (quote := _OPENING_QUOTE.match(data, start)) is not None:
        return quote.end(), _closing_quote(data, quote.end())
    if named_in_quotes and data.startswith((b"{", b"["), start):
        return start, _json_end(data, start)
    word = name.rstrip(b":=*`~ \t").lower().translate(None, SEPARATORS)
    value = (_LINE if word.endswith(_WHOLE_LINE) else _BARE).match(data, start)
    bare = b"" if value is None else data[start : value.end()]
    if not bare.startswith((b"(", b"[", b"{")):
        bare = bare.rstrip(b",)]}")
    in_prose = name.rstrip(b"*`~ \t").endswith(b":") and word.rstrip(b"0123456789").endswith(_WORDS)
    harmless = bare.lower() in _HARMLESS or (in_prose and not _NO_WORD.match(bare))
    return start, start + (0 if harmless else len(bare))


def _value_of_pair(placeholder: bytes, data: bytes, start: int, end: int) -> Extent:
    """Returns the extent of the value next to a field whose value is a secret name: after it, or else before it."""
    if (behind := _VALUE_OF_PAIR.match(data, end)) is not None:
        return _value_behind(placeholder, data, behind.start(), behind.end())
    nearest = data.rfind(b"val", max(0, start - MAX_SECRET_LENGTH), start)
    before = None if nearest < 0 else _VALUE_OF_PAIR.match(data, nearest)
    if before is not None and before.end() < start:
        value_start, value_end = _value_behind(placeholder, data, before.start(), before.end())
        if value_end <= start and not data[value_end:start].strip(b"\"'\\ \t\r\n,;"):
            return value_start, value_end
    return end, end


def _on_next_line(data: bytes, name: bytes, start: int) -> Extent:
    """Returns the extent of the value alone on the line after `password:`. Prose has more than one word in a line."""
    name = name.rstrip(b"*_`~ \t")
    if not name.endswith(b":"):
        return start, start
    if data.startswith(_QUOTES, start):
        return start + 1, _closing_quote(data, start + 1)
    alone = _ALONE_ON_LINE.match(data, start)
    value = b"" if alone is None else data[start : alone.end()].rstrip()
    harmless = value.lower() in _HARMLESS or value.endswith(b":") or name[:-1].lower().endswith(_WORDS)
    return start, start + (0 if harmless else len(value))


def _closing_quote(data: bytes, start: int) -> int:
    """Returns the end of a quoted text; that of the data if the quote is not closed."""
    quote = data[start - 1 : start]
    before = data[max(0, start - 9) : start - 1]
    slashes = len(before) - len(before.rstrip(b"\\"))
    if slashes == 0:
        content = _UNESCAPED[quote].match(data, start)
        return content.end() if content is not None and data.startswith(quote, content.end()) else len(data)
    depth = next((depth for depth in (1, 3, 7) if slashes <= depth), None)
    closing = None if depth is None else _ESCAPED[depth, quote].search(data, start - 1)
    return len(data) if closing is None else max(start, closing.end() - 1 - slashes)


def _json_end(data: bytes, start: int) -> int:
    """Returns the end of an object or an array; that of the data if it is truncated, too long or no JSON."""
    text = data[start : start + MAX_SECRET_LENGTH].decode("utf-8", "surrogateescape")
    try:
        _, end = _JSON.raw_decode(text)
    except (ValueError, RecursionError):
        return len(data)
    return start + len(text[:end].encode("utf-8", "surrogateescape"))


# Forms


def _card(data: bytes, start: int, end: int) -> Extent:
    while not data[start : start + 1].isdigit():
        start += 1
    if not re.fullmatch(rb"[0-9][.-]", data[max(0, start - 2) : start]):  # a number's fraction, or the tail of an id
        without_last_group = max(data.rfind(b" ", start, end), data.rfind(b"-", start, end))
        for stop in (end, without_last_group):
            if _is_card_number(data[start:stop]) and not re.match(rb"[A-Za-z0-9]|-[0-9]", data[stop : stop + 2]):
                return start, stop
    return start, start


def _is_card_number(printed: bytes) -> bool:
    """Returns True for 13 to 19 digits with a valid check digit (Luhn's formula, ISO/IEC 7812-1)."""
    if not 13 <= len(printed) <= 19 + 18:
        return False
    digits = printed.translate(_DIGIT_VALUES, b" -")
    return 13 <= len(digits) <= 19 and (sum(digits[-1::-2]) + sum(digits[-2::-2].translate(_DOUBLED))) % 10 == 0


_DIGIT_VALUES = bytes.maketrans(b"0123456789", bytes(range(10)))
_DOUBLED = bytes.maketrans(bytes(range(10)), bytes(sum(divmod(2 * digit, 10)) for digit in range(10)))


def _iban(data: bytes, start: int, end: int) -> Extent:
    while not data[start : start + 2].isupper():
        start += 1
    length = _IBAN_LENGTHS.get(data[start : start + 2].decode(), 0)
    places = [place for place in range(start, end) if data[place : place + 1].isalnum()]
    if not 0 < length <= len(places):
        return start, start
    end = places[length - 1] + 1
    printed = data[start:end].translate(None, b" -").decode()
    # The remainder of 97 is 1, where A is 10 and Z is 35, and the first four characters come last.
    is_right = int("".join(str(int(char, 36)) for char in printed[4:] + printed[:4])) % 97 == 1
    return (start, end) if is_right and not data[end : end + 1].isalnum() else (start, start)


_IBAN_LENGTHS = {
    country: int(length) for length, countries in _RULES["iban_lengths"].items() for country in countries.split()
}


def _phone(data: bytes, start: int, end: int) -> Extent:
    digits = len(data[start:end].translate(None, _NO_DIGITS))
    return (start, end) if 7 <= digits <= 15 and not data[end : end + 1].isalnum() else (start, start)


_NO_DIGITS = bytes(set(range(256)) - set(b"0123456789"))
_CHECKS: dict[str, Callable[[bytes, int, int], Extent]] = {
    "card": _card,
    "iban": _iban,
    "phone": _phone,
    "user_info": lambda _, start, end: (start + len("://"), end - len("@")),
}


@dataclass(frozen=True, slots=True)
class _Finder:
    """A search for secrets.

    Attributes:
        search: the pattern to search for.
        match: the pattern that is then matched at the same place; None to use `search`.
        part: a function that narrows a match to its secret part; None if all of it is secret.
        needs: bytes that every match contains, which are far cheaper to look for.
        stretch: the number of bytes that are searched together. Stretches overlap by `MAX_SECRET_LENGTH`.
    """

    search: Pattern
    match: Pattern | None = None
    part: Callable[[bytes, int, int], Extent] | None = None
    needs: bytes = b""
    stretch: int = sys.maxsize

    def extents(self, data: bytes, work: WorkLimit) -> Iterator[Extent]:
        """Yields the secrets, from left to right."""
        if self.stretch == STRETCH:
            work.spend_on_simulation(self.search, data)
        position = 0 if self.needs in data else len(data)
        while position < len(data):
            stretch_end = position + self.stretch
            match = self.search.search(data, position, stretch_end)
            if match is None:
                position = stretch_end - MAX_SECRET_LENGTH if stretch_end < len(data) else len(data)
                continue
            begin, end = match.span()
            if end == stretch_end < len(data) and begin > position:
                position = begin  # the match may continue in the next stretch
                continue
            work.spend()
            if self.match is not None:
                extended = self.match.match(data, begin)
                end = begin if extended is None else extended.end()
            start, end = (begin, end) if self.part is None else self.part(data, begin, end)
            if start < end:
                yield start, end
            position = max(end, begin + 1)


_KEYS: list[list[str]] = _RULES["keys"]["forms"]
_BEARERS: list[list[str]] = _RULES["keys"]["allowed_in_ids"]


def _key_pattern(forms: Iterable[Sequence[str]]) -> str:
    return "<form_edge>" + _any([f"(?:{start})(?:{tail})" for start, tail in forms])


_KEY = _compile(_key_pattern(_KEYS))
_FORMS: dict[str, Any] = _RULES["forms"] | {
    "key": {
        "search": "<form_edge>" + _any([start for start, _ in _KEYS + _BEARERS]),
        "match": _key_pattern(_KEYS + _BEARERS),
    }
}
_FINDERS = {
    name: _Finder(
        _compile(form["search"]),
        _compile(form["match"]) if "match" in form else None,
        _CHECKS.get(name),
        form.get("needs", "").encode(),
    )
    for name, form in _FORMS.items()
}


def holds_key(text: str) -> bool:
    """Returns True if a part of the text has the form of a known service's key or token."""
    return _KEY.search(text.encode(errors="surrogatepass")) is not None


# The scanner

UNESCAPED_TIMES = 2
"""The number of times that a text may have been escaped: `%2540` is an @, escaped twice."""

MAX_ROUNDS = 3
"""The number of searches of a text. A placeholder is an edge, next to which another search may find more."""

STRETCH = 4 * MAX_SECRET_LENGTH
"""The bytes that a user pattern searches together. A pattern such as `a(.*z)?` reads to their end from each match."""

_ESCAPE = r"%[2-7][0-9A-Fa-f]|\\(?:u00|x)[2-7][0-9A-Fa-f]"
"""ASCII as URLs and JSON escape it."""
_ESCAPES = re.compile(_ESCAPE.encode())
_ESCAPES_A_PLACE = 4
_LONGEST_ESCAPE = 6

Text = tuple[bytes, int]
"""UTF-8, in which lone surrogates are allowed, and a limit in it, up to which the text may be shown."""


class Scanner:
    """All rules, ready for use on many texts.

    Every rule searches the same text, so that no replacement hides another secret's context; the extents are merged
    and replaced together.
    """

    def __init__(
        self, fields: Sequence[str], patterns: Sequence[str], forms: Sequence[str], *, built_in: bool, placeholder: str
    ) -> None:
        self.names = SecretNames(fields, built_in=built_in)
        self.any_number = bool(patterns)
        """True if any number may be a secret; of the built-in forms only card numbers are."""
        self._placeholder = placeholder.encode()
        user_patterns = [compile_user_pattern(pattern) for pattern in patterns]
        names = [name for name, form in _FORMS.items() if name in forms or (built_in and "optional" not in form)]
        self._forms = [_FINDERS[name] for name in names] + [
            _Finder(alone, stretch=STRETCH) for alone, _ in user_patterns
        ]
        self._all = list(self._forms)
        suspicious = [_ESCAPE, *(_fill(_FORMS[name]["search"]) for name in names)]
        pieces = _PIECES | {"own": _spellings(fields)}
        for place, part, needs in (("before_value", _value_behind, b""), ("in_pair", _value_of_pair, b"val")):
            if behind_names := [
                *(_RULES[place]["built_in"] if built_in else ()),
                *(_RULES[place]["own"] if fields else ()),
            ]:
                pattern = f"(?i:{_fill(behind_names, pieces)})"
                self._all.append(_Finder(_compile(pattern), part=partial(part, self._placeholder), needs=needs))
                suspicious.append(pattern)
        together = _compile(suspicious)
        self._suspicious = (together, *(alone for alone, _ in user_patterns))
        self._suspicious_in_lines = (together, *(in_lines for _, in_lines in user_patterns))

    def suspects(self, data: bytes) -> bool:
        """Returns True if a text may have a secret. Most texts have none, and this fast search settles it."""
        return any(pattern.search(data) is not None for pattern in self._suspicious)

    def suspects_among(self, texts: Sequence[str], work: WorkLimit) -> set[int]:
        """Returns the indexes of texts that may have secrets. They are joined, because each search has a fixed cost."""
        joined = "\n".join(texts).encode(errors="surrogatepass")
        suspects: set[int] = set()
        starts: list[int] = []
        for pattern in self._suspicious_in_lines[1:]:
            work.spend_on_simulation(pattern, joined)
        for pattern in self._suspicious_in_lines:
            position = 0
            while position < len(joined) and (match := pattern.search(joined, position)) is not None:
                work.spend()
                starts = starts or [0, *accumulate(len(text.encode(errors="surrogatepass")) + 1 for text in texts)]
                index = bisect_right(starts, match.start()) - 1
                suspects.add(index)
                position = starts[index + 1]
        return suspects

    def redact(self, text: Text, work: WorkLimit, *, is_json: bool) -> Text:
        """Returns the text without its secrets, with its limit moved along.

        With `is_json`, fields' names and escapes are ignored, because the parsed JSON was redacted before.

        Raises:
            TooMuchWorkError: too many places may be secrets.
        """
        work.spend()
        finders = self._forms if is_json else self._all
        for _ in range(MAX_ROUNDS):
            if (replaced := self._replace(text, finders, work)) is None:
                break
            text = replaced
        plain = text
        for _ in range(0 if is_json else UNESCAPED_TIMES):
            if (unescaped := _unescape(plain, work)) is None:
                break
            plain = unescaped
            if (uncovered := self._replace(plain, finders, work)) is not None:
                text = plain = uncovered  # the unescaped text replaces the original only if it had a secret
        return text

    def _replace(self, text: Text, finders: Iterable[_Finder], work: WorkLimit) -> Text | None:
        """Replaces all secrets; None if there are none. Extents that overlap or touch, or a placeholder, are merged."""
        (data, limit) = text
        placeholder = self._placeholder
        reach = len(placeholder) - 1
        merged = list[Extent]()
        for start, end in sorted(extent for finder in finders for extent in finder.extents(data, work)):
            first = data.find(placeholder, max(0, start - reach), start + reach)
            last = data.rfind(placeholder, max(0, end - reach), end + reach)
            begin = min(start, first) if first >= 0 else start
            stop = max(end, last + reach + 1) if last >= 0 else end
            while merged and begin <= merged[-1][1]:
                before = merged.pop()
                begin = min(begin, before[0])
                stop = max(stop, before[1])
            merged.append((begin, stop))
        extents = [(start, end) for start, end in merged if data[start:end] != placeholder]
        if not extents:
            return None
        edges = [0, *(edge for extent in extents for edge in extent), len(data)]
        pieces = [data[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
        in_limit = [(start, end) for start, end in extents if start < limit]
        limit = max([limit, *(end for _, end in in_limit)])
        return placeholder.join(pieces), limit + sum(len(placeholder) + start - end for start, end in in_limit)


def _unescape(text: Text, work: WorkLimit) -> Text | None:
    """Undoes one level of escapes, and moves the limit along; None if there are no escapes."""
    data, limit = text
    max_escapes = _ESCAPES_A_PLACE * MAX_PLACES + 1
    count = sum(1 for _ in islice(_ESCAPES.finditer(data), max_escapes)) if b"%" in data or b"\\" in data else 0
    work.spend(count // _ESCAPES_A_PLACE)
    if count == 0:
        return None
    around = _ESCAPES.finditer(data, max(0, limit - _LONGEST_ESCAPE), limit + _LONGEST_ESCAPE)
    limit = next((escape.end() for escape in around if escape.start() < limit < escape.end()), limit)
    head, tail = (
        _ESCAPES.sub(lambda escape: bytes((int(escape[0][-2:], 16),)), part) for part in (data[:limit], data[limit:])
    )
    return head + tail, len(head)
