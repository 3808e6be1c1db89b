"""Values that stand behind a name in a text: `password=hunter2`, `"token": "…"`, `Authorization: Basic …`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache

from breakwater.policy.redaction import known
from breakwater.policy.redaction.regex import RegexMatch, built_in

SEPARATORS = b"-_. "

_REMEMBERED = 4096
_LONGEST_REMEMBERED = 64


def squashed(name: str) -> bytes:
    """A name without what spellings differ in: `apiKey`, `Api-Key` and `API_KEY` are all `apikey`."""
    return name.lower().encode(errors="surrogatepass").translate(None, SEPARATORS)


class SecretNames:
    """Names that are secret as a whole, and endings of names that are."""

    def __init__(self, own: Iterable[str], *, built_in: bool) -> None:
        whole = [*own]
        if built_in:
            whole += (*known.SECRET_NAMES, *known.COMMON_NAMES, *known.QUOTED_NAMES)
        self._whole = frozenset(map(squashed, whole))
        self._endings = tuple(map(squashed, known.SECRET_ENDINGS)) if built_in else ()
        self._is_secret = lru_cache(_REMEMBERED)(self._look)

    def __contains__(self, name: str) -> bool:
        return self._is_secret(name) if len(name) <= _LONGEST_REMEMBERED else self._look(name)

    def _look(self, name: str) -> bool:
        name_only = squashed(name)
        return name_only in self._whole or name_only.endswith(self._endings)


LONGEST = 16 * 1024
"""How long a secret is at most taken to be, in bytes or characters."""

_BETWEEN = "[-_. ]*"
_ASSIGNS = r"(?::=|=>|={1,3}|:)"
_EDGE = r"(?:\b|\\[abfnrtv])"

_BARE = built_in(
    "(?i:"
    + "|".join(
        (
            r"(?:digest|aws4-hmac-sha256|signature|hawk|oauth)[ \t]+[^\r\n]+",
            r"\([^()\r\n]*\)|\[[^][\r\n]*\]|\{[^{}\r\n]*\}",  # auth=("user", "password")
            r"[+(]?[0-9][0-9().+-]*(?: [0-9().-]+)+",  # numbers in groups
            r"""(?:(?:bearer|basic|token|api-?key|negotiate|ntlm)[ \t]+)?"""
            r"""[^\s&;"'<>:=](?:[^\s&;"'<>]|["'][a-z0-9])*""",
        )
    )
    + ")"
)
_LINE = built_in(r"""[^\r\n"']+""")
_QUOTE = built_in(r"""(?i:b|r|u|f|br|rb)?\\*["']""")
_BEFORE_QUOTED = frozenset(b"bBrRuUfF\\\"'")
_UNESCAPED = {b'"': built_in(r'(?:[^"\\]|\\\C)*'), b"'": built_in(r"(?:[^'\\]|\\\C)*")}
_ESCAPED = {
    (slashes, quote): built_in(rf"[^\\]\\{{0,{slashes}}}{quote.decode()}")
    for slashes in (1, 3, 7)
    for quote in _UNESCAPED
}
"""Inside JSON that was escaped once, twice, three times, a quote closes if no more backslashes precede it."""

_JSON = json.JSONDecoder()


def before_values(own_names: Iterable[str], *, built_in_names: bool) -> str | None:
    """A pattern for secret names with what separates them from their values, or None if there are no names."""
    quotable, assignable = [*own_names], [*own_names]
    quoted = rf"""{_BETWEEN}\\*["']\]?\s*{_ASSIGNS}\s*"""
    forms: list[str] = []
    if built_in_names:
        strong = rf"(?:{_any_of(known.SECRET_ENDINGS)}|{_EDGE}{_any_of(known.SECRET_NAMES)})"
        forms.append(rf"{strong}(?:{quoted}|[ \t]*{_ASSIGNS}[ \t]*)")
        forms.append(rf"--[a-z0-9-]*{strong}[ \t]+")
        forms.append(rf"[?&]{_any_of(known.QUERY_NAMES)}=")
        quotable += (*known.SECRET_NAMES, *known.COMMON_NAMES, *known.QUOTED_NAMES)
        assignable += known.COMMON_NAMES
    if quotable:
        forms.append(rf"""["']{_BETWEEN}{_any_of(quotable)}{quoted}""")
    if assignable:
        forms.append(rf"{_EDGE}{_any_of(assignable)}[ \t]*={{1,3}}[ \t]*")
    return f"(?i:{'|'.join(forms)})" if forms else None


def value_after(data: bytes, found: RegexMatch, placeholder: bytes) -> tuple[int, int]:
    """The span of the value behind a name that was found. Empty if there is none, or nothing of interest."""
    start = found.end()
    name = data[found.start() : start].rstrip()
    named_in_quotes = name.rstrip(b":=> \t\r\n]").endswith((b'"', b"'"))
    if named_in_quotes and data.startswith(placeholder, start):
        return start, start + len(placeholder)
    if data[start : start + 1] and data[start] in _BEFORE_QUOTED and (quote := _QUOTE.match(data, start)) is not None:
        return quote.end(), _closing_quote(data, quote.end())
    if named_in_quotes and data[start : start + 1] in {b"{", b"["}:
        return start, _json_end(data, start)
    squashed_name = name.rstrip(b":= \t").translate(None, SEPARATORS).lower()
    pattern = _LINE if squashed_name.endswith(known.WHOLE_LINE_NAMES) else _BARE
    value = pattern.match(data, start)
    bare = b"" if value is None else data[start : value.end()]
    if not bare.startswith((b"(", b"[", b"{")):
        bare = bare.rstrip(b",)]}")
    return start, start + (0 if bare.lower() in known.HARMLESS_VALUES else len(bare))


def _closing_quote(data: bytes, start: int) -> int:
    """Where a quoted text ends. One that is cut ends with the data."""
    quote, before = data[start - 1 : start], data[max(0, start - 9) : start - 1]
    slashes = len(before) - len(before.rstrip(b"\\"))
    if slashes == 0:
        content = _UNESCAPED[quote].match(data, start)
        return content.end() if content is not None and data[content.end() : content.end() + 1] == quote else len(data)
    closing = None
    if (known := next((depth for depth in (1, 3, 7) if slashes <= depth), None)) is not None:
        closing = _ESCAPED[known, quote].search(data, start - 1)
    return len(data) if closing is None else max(start, closing.end() - 1 - slashes)


def _json_end(data: bytes, start: int) -> int:
    """Where an object or an array ends. One that is cut, too long or no JSON ends with the data."""
    text = data[start : start + LONGEST].decode("utf-8", "surrogateescape")
    try:
        _, end = _JSON.raw_decode(text)
    except (ValueError, RecursionError):
        return len(data)
    return start + len(text[:end].encode("utf-8", "surrogateescape"))


def _any_of(names: Iterable[str]) -> str:
    """The names in all spellings that `squashed` makes one, as single bytes."""
    return f"(?:{'|'.join(_BETWEEN.join(map(_either_case, squashed(name).decode())) for name in names)})"


def _either_case(char: str) -> str:
    cases = {char} if char.isascii() else {char, char.upper()}  # of ASCII, the pattern ignores the case
    return "(?:" + "|".join(re.escape(case.encode().decode("latin-1")) for case in sorted(cases)) + ")"
