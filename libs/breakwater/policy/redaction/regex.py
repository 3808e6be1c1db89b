"""Regular expressions on RE2: time linear in the text for one search, so that no pattern can hang a worker.

All of them work on bytes: Google's wrapper counts the characters before each match where it is given a `str`, which
triples its price.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import re2

MAX_PROGRAM = 2_000
"""The largest pattern of a person, in RE2's instructions.

Time is proportional to them where RE2 must simulate them, as for `(a|b)*a(a|b){250}c`, whose automaton would not fit.
"""

_NO_PERL = "invalid perl operator: "
_LOOK_AROUND = tuple(_NO_PERL + operator for operator in ("(?=", "(?!", "(?<"))
_PROBES_FOR_NOTHING = (b"", b"\x00", b"\x00\x00", b"\x00 \x00\n\x00", b"\x00a\x00", b"0", b"aa", b"_ _", b"\n\n")


class RegexMatch(Protocol):
    """Where a pattern matched, in bytes."""

    def start(self) -> int:
        """The first byte."""
        ...

    def end(self) -> int:
        """The byte after the last."""
        ...


class Pattern(Protocol):
    """The part of RE2's interface that is used here."""

    @property
    def programsize(self) -> int:
        """Instructions in the compiled program."""
        ...

    def search(self, text: bytes, pos: int | None = None, endpos: int | None = None) -> RegexMatch | None:
        """The leftmost match from `pos` to `endpos`, neither of which is an edge of the text."""
        ...

    def match(self, text: bytes, pos: int | None = None) -> RegexMatch | None:
        """The match that begins at `pos`."""
        ...

    def finditer(self, text: bytes) -> Iterator[RegexMatch]:
        """All matches from left to right."""
        ...


def built_in(pattern: str) -> Pattern:
    """Compiles one of our own patterns. They work on single bytes: what is not excluded, may be any."""
    options = _options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.max_mem = 64 << 20
    return cast(Pattern, re2.compile(pattern.encode("latin-1"), options))


@dataclass(frozen=True, slots=True)
class Own:
    """A pattern that a person wrote, and the same for texts that are searched together, each on lines of its own."""

    alone: Pattern
    in_lines: Pattern


def own(pattern: str) -> Own:
    """Compiles a pattern that a person wrote.

    Raises:
        ValueError: RE2 can't take it, it is too large, or it matches where there is nothing; with what to do.
    """
    try:
        # A text's edge is a line's there. What matches more than the other is sorted out by looking at the text alone.
        compiled = Own(_compiled(pattern), _compiled("(?m)" + re.sub(r"(?s)\\(.)", _line_edge, pattern)))
    except UnicodeEncodeError as error:
        raise ValueError(f"{pattern!r} is not a regular expression: it has half of a character") from error
    except re2.error as error:
        raise ValueError(
            f"{pattern!r} {_what_is_wrong(cast(bytes, error.args[0]).decode(errors='replace'))}"
        ) from error
    if compiled.alone.programsize > MAX_PROGRAM:
        raise ValueError(f"{pattern!r} is too large; lower its {{counts}}, or use + and * in their place")
    if re.search(r"\(\?[a-zA-Z]*-[a-zA-Z]*m", pattern):
        raise ValueError(f"{pattern!r} switches the flag m off, which it is anyway; leave that out")
    for probe in _PROBES_FOR_NOTHING:
        if any(found.start() == found.end() for found in compiled.alone.finditer(probe)):
            raise ValueError(f"{pattern!r} also matches where there is nothing to hide; write + for *, and leave out ?")
    return compiled


def _line_edge(escape: re.Match[str]) -> str:
    return {"A": "^", "z": "$"}.get(escape[1], escape[0])


def _compiled(pattern: str) -> Pattern:
    return cast(Pattern, re2.compile(pattern.encode(), _options()))


def _options() -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True  # only the whole match is asked for, which RE2's automata find fastest
    return options


def _what_is_wrong(words: str) -> str:
    if words.startswith(_LOOK_AROUND):
        construct = words.removeprefix(_NO_PERL)
        return f"looks around, with {construct}, which RE2 can't; match the surroundings, too, or mark an edge by \\b"
    if re.fullmatch(r"invalid escape sequence: \\[1-9]", words) or words.endswith("(?P"):
        return "refers back to a group, which RE2 can't; write out what is repeated"
    if words == r"invalid escape sequence: \Z":
        return r"has \Z, which is \z in RE2"
    if "too large" in words or "repetition size" in words:
        return f"is too large ({words}); lower its {{counts}}, or use + and * in their place"
    return f"is not a regular expression of RE2's syntax: {words}"
