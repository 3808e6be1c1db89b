"""The built-in forms of secrets, and what of each must be hidden."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from breakwater.policy.redaction import known
from breakwater.policy.redaction.regex import Pattern, RegexMatch, built_in
from breakwater.policy.redaction.values import LONGEST

Span = tuple[int, int]
"""First byte, and the byte after the last. Nothing if they are one."""

STRETCH = 4 * LONGEST
"""How many bytes a person's pattern sees at once."""

_FREE_INSTRUCTIONS = 100
_SIMULATED_AT_A_PLACE = 1 << 15
"""Instructions times bytes."""

MAX_PLACES = 20_000
"""Places that are looked at closely in one text or document, at some ten microseconds each."""

MAX_VALUES = 100_000
"""Texts, names, objects and arrays that are copied in one document, at some microseconds each."""


class TooMuchWorkError(Exception):
    """So many places may be secrets that it would take too long to look at each."""


class Work:
    """What may still be done for one text or document."""

    __slots__ = ("_places_left", "values_left")

    def __init__(self) -> None:
        self._places_left = MAX_PLACES
        self.values_left = MAX_VALUES

    @property
    def is_spent(self) -> bool:
        """Whether no more places can be looked at."""
        return self._places_left < 0

    def spend(self, places: int = 1) -> None:
        """Raises TooMuchWorkError when all is spent."""
        self._places_left -= places
        if self._places_left < 0:
            raise TooMuchWorkError


@dataclass(frozen=True, slots=True)
class Finder:
    """A built-in pattern, and which part of what it finds must be hidden."""

    pattern: Pattern
    part: Callable[[bytes, RegexMatch], Span]
    needs: bytes = b""
    """What is in any match: to look for it is far cheaper."""

    def spans(self, data: bytes, work: Work) -> Iterator[Span]:
        """What must be hidden, from left to right."""
        position = 0 if self.needs in data else len(data)
        while position < len(data) and (found := self.pattern.search(data, position)) is not None:
            work.spend()
            start, end = self.part(data, found)
            if start < end:
                yield start, end
            position = max(end, found.start() + 1)


@dataclass(frozen=True, slots=True)
class OwnFinder:
    """A pattern that a person wrote. Such as `a(.*z)?` look from each of many matches to the end of what they see.

    So they see stretches of long texts, which overlap by what a secret is at most taken to be long.
    """

    pattern: Pattern

    def spans(self, data: bytes, work: Work) -> Iterator[Span]:
        """What must be hidden, from left to right."""
        spend_for_simulation(self.pattern, data, work)
        position = 0
        while position < len(data):
            seen = min(len(data), position + STRETCH)
            found = self.pattern.search(data, position, seen)
            if found is None:
                position = len(data) if seen == len(data) else seen - LONGEST
            elif found.end() == seen < len(data) and found.start() > position:
                position = found.start()  # it may go on
            else:
                work.spend()
                if found.start() < found.end():
                    yield found.start(), found.end()
                position = max(found.end(), position + 1)


def spend_for_simulation(pattern: Pattern, data: bytes, work: Work) -> None:
    """Pays for what a large pattern of a person costs at worst, when RE2 has to follow each of its instructions."""
    work.spend(max(0, pattern.programsize - _FREE_INSTRUCTIONS) * len(data) // _SIMULATED_AT_A_PLACE)


def _whole(_: bytes, found: RegexMatch) -> Span:
    """All that was found."""
    return found.start(), found.end()


def _user_info(_: bytes, found: RegexMatch) -> Span:
    return found.start() + len("://"), found.end() - len("@")


_FORMS = built_in(rf"{known.EDGE}(?:{'|'.join(f'(?:{start})(?:{rest})' for start, rest in known.SECRET_FORMS)})")
_FORM_STARTS = rf"{known.EDGE}(?:{'|'.join(start for start, _ in known.SECRET_FORMS)})"


def _secret_form(data: bytes, found: RegexMatch) -> Span:
    secret = _FORMS.match(data, found.start())
    return (found.start(), found.start()) if secret is None else (secret.start(), secret.end())


def _card_number(data: bytes, found: RegexMatch) -> Span:
    start, end = found.start(), found.end()
    while not data[start : start + 1].isdigit():
        start += 1
    if not re.fullmatch(rb"[0-9][.-]", data[max(0, start - 2) : start]):  # a number's fraction, or the tail of an id
        without_last_group = max(data.rfind(b" ", start, end), data.rfind(b"-", start, end))
        for stop in (end, without_last_group):
            if is_card_number(data[start:stop]) and not re.match(rb"[A-Za-z0-9]|-[0-9]", data[stop : stop + 2]):
                return start, stop
    return found.start(), found.start()


_VALUES = bytes.maketrans(b"0123456789", bytes(range(10)))
_DOUBLED = bytes.maketrans(bytes(range(10)), bytes(sum(divmod(2 * digit, 10)) for digit in range(10)))


def is_card_number(printed: bytes) -> bool:
    """Whether these are 13 to 19 digits, of which the last checks the others (Luhn's formula, ISO/IEC 7812-1)."""
    if not 13 <= len(printed) <= 19 + 18:
        return False
    digits = printed.translate(_VALUES, b" -")
    return 13 <= len(digits) <= 19 and (sum(digits[-1::-2]) + sum(digits[-2::-2].translate(_DOUBLED))) % 10 == 0


FINDERS = (
    Finder(built_in(_FORM_STARTS), _secret_form),
    Finder(built_in(known.CARD), _card_number),
    Finder(built_in(known.EMAIL), _whole, needs=b"@"),
    Finder(built_in(known.USER_INFO), _user_info, needs=b"://"),
    Finder(built_in(known.PRIVATE_KEY), _whole, needs=b"-----BEGIN "),
)
STARTS = (_FORM_STARTS, known.CARD, known.EMAIL, known.USER_INFO, known.PRIVATE_KEY_START)
"""Patterns one of which is in any text that has a secret. They look no farther than they must."""
