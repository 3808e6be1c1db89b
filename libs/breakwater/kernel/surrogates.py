r"""Halves of surrogate pairs, which the grammar of JSON allows (RFC 8259, 8.2) and UTF-8 does not.

A model's answer is cut between two of its tokens, and so is a pair, whose halves some servers then write as escapes:
`"ok \ud83d"` and `"\ude00"`. Halves that follow one another become their character; each that stays alone becomes
U+FFFD. So nothing behind the readers of JSON meets one. JSON without any is read as before, at no cost: one is
looked for only where the codec has refused a document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import orjson

ReadT = TypeVar("ReadT")

_ESCAPES = r"(?:\\u[dD][89a-fA-F][0-9a-fA-F]{2})++"
_UNESCAPED = r"(?<!\\)(?P<before>(?:\\\\)*+)"
"""An escaped backslash begins no escape."""
_RUNS = re.compile(
    # UTF-8 has no such bytes.
    rf"{_UNESCAPED}(?P<escapes>{_ESCAPES})|(?P<raw>(?:\xed[\xa0-\xbf][\x80-\xbf])++)".encode("latin-1")
)
_RUNS_IN_TEXT = re.compile(rf"{_UNESCAPED}(?P<escapes>{_ESCAPES})")
_OF_A_PAIR = (
    r"\\",
    "u",
    "[dD]",
    "[89abAB]",
    "[0-9a-fA-F]",
    "[0-9a-fA-F]",
    r"\\",
    "u",
    "[dD]",
    "[c-fC-F]",
    "[0-9a-fA-F]",
)
_UNDECIDED = re.compile(
    rf"{_UNESCAPED}(?P<end>{''.join(f'(?:{part}' for part in _OF_A_PAIR)}{')?' * 10})"
    r"|\\u[dD][c-fC-F][0-9a-fA-F]?)\Z"
)
"""The end of a text that is the beginning of an escape of a half, or of two."""
_LONGEST_END = 11
_PAIR_OR_HALF = re.compile(r"(?P<pair>\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|\\u....")
_HALF = re.compile("[\ud800-\udfff]")


def whole_text(text: str) -> str:
    """A text in which halves are joined, and those that stay alone replaced."""
    if text.isascii() or not _HALF.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def whole_value(value: Any) -> Any:
    """A JSON value with whole texts and names."""
    match value:
        case str():
            return whole_text(value)
        case dict():
            named = cast(dict[Any, Any], value).items()
            return {whole_value(name): whole_value(inner) for name, inner in named}
        case list() | tuple():
            return [whole_value(inner) for inner in cast(list[Any], value)]
        case _:
            return value


def whole_json(document: bytes) -> bytes | None:
    """A document of JSON with whole texts, otherwise byte for byte; None where it has no half that is alone.

    Args:
        document: its halves are escapes, or three bytes each as in CESU-8.
    """
    is_whole = True

    def mend(run: re.Match[bytes]) -> bytes:
        nonlocal is_whole
        if run["raw"] is not None:
            is_whole = False
            return whole_text(run["raw"].decode("utf-8", "surrogatepass")).encode()
        mended = _mended_run(run["before"].decode(), run["escapes"].decode()).encode()
        is_whole = is_whole and mended == run[0]
        return mended

    mended = _RUNS.sub(mend, document)
    return None if is_whole else mended


def read_whole(read: Callable[[bytes], ReadT], document: bytes) -> ReadT:
    """Reads a document with a codec; where that refuses it for half of a pair, the same document with whole texts.

    Raises what `read` does.
    """
    try:
        return read(document)
    except ValueError:
        if (mended := whole_json(document)) is None:
            raise
    return read(mended)


def read_halves(document: bytes) -> Any:
    """JSON whose texts may have halves, for a joiner. Raises ValueError."""
    try:
        return orjson.loads(document)
    except ValueError:
        if whole_json(document) is None:
            raise
    return _with_halves(document)


def _with_halves(document: bytes) -> Any:
    # Numbers as the other codec reads them.
    return json.loads(document.decode("utf-8", "surrogatepass"), parse_int=orjson.loads, parse_float=orjson.loads)


def whole_escapes(text: str, *, is_last: bool = True) -> str:
    """A text of JSON, such as the arguments of a call, with whole escapes: codecs refuse half of a pair in them.

    Args:
        text: as far as it has come; what is returned begins with what was returned for a beginning of it.
        is_last: nothing follows. Otherwise an end that may be the first half of a pair is left out.
    """
    if "\\" not in text:
        return text
    undecided = None if is_last or "\\" not in text[-_LONGEST_END:] else _UNDECIDED.search(text)
    decided = text if undecided is None else text[: undecided.start("end")]
    return _RUNS_IN_TEXT.sub(lambda run: _mended_run(run["before"], run["escapes"]), decided)


def _mended_run(before: str, escapes: str) -> str:
    return before + _PAIR_OR_HALF.sub(lambda escape: escape["pair"] or "\ufffd", escapes)


def _awaits_half(text: str) -> bool:
    return "\ud800" <= text[-1:] <= "\udbff"


def _begins_with_half(text: str) -> bool:
    return "\udc00" <= text[:1] <= "\udfff"


class TextJoiner:
    """Joins halves over the pieces of one text."""

    def __init__(self) -> None:
        self._half = ""

    def put(self, piece: str) -> str:
        """The next piece: without a half at its end, which waits for the other."""
        text = self._half + piece
        self._half = ""
        if _awaits_half(text):
            text, self._half = text[:-1], text[-1]
        return whole_text(text)

    def end(self) -> str:
        """The half that waited, when no piece follows."""
        text = self._half
        self._half = ""
        return whole_text(text)


_Event = dict[str, Any]
_Path = tuple[Any, ...]


class EventJoiner:
    """Joins halves over the events of a stream: per choice, block or item, and in each of their texts that grow.

    An event whose text ends with the first half waits for the next one of its place. All others pass through: a
    reader of events asks `is_idle` first.
    """

    def __init__(self) -> None:
        self._held: dict[frozenset[Any], _Event] = {}
        self._has_halves = False

    @property
    def is_idle(self) -> bool:
        """True if the event that was just read has no half, and none waits."""
        return not self._has_halves and not self._held

    def read(self, document: bytes) -> Any:
        """Reads an event that has halves, and keeps them. It is valid JSON but for these."""
        self._has_halves = True
        return _with_halves(document)

    def put(self, event: _Event) -> Iterator[_Event]:
        """The events that can be passed on once this one has come."""
        places = _places(event)
        for held_places in [held for held in self._held if not (held and places and held.isdisjoint(places))]:
            held = self._held.pop(held_places)
            self._has_halves = _moved_half(held, event) or self._has_halves
            yield whole_value(held)
        if self._has_halves:
            self._has_halves = False
            if any(_awaits_half(container[name]) for container, name in _growing(event).values()):
                self._held[places] = event
                return
            event = whole_value(event)
        yield event

    def end(self) -> Iterator[_Event]:
        """The events that wait, when no event follows."""
        held = self._held
        self._held = {}
        yield from map(whole_value, held.values())


def _moved_half(held: _Event, event: _Event) -> bool:
    """Moves halves from the ends of an event's texts to the beginnings with the other half; True if there was one."""
    following = _growing(event)
    is_moved = False
    for path, (container, name) in _growing(held).items():
        if not _awaits_half(container[name]) or path not in following:
            continue
        next_container, next_name = following[path]
        if next_container[next_name] == "" or _begins_with_half(next_container[next_name]):
            next_container[next_name] = container[name][-1] + next_container[next_name]
            container[name] = container[name][:-1]
            is_moved = True
    return is_moved


def _places(event: Mapping[str, Any]) -> frozenset[Any]:
    """The choices, the block or the item that an event is of; none for an event of the whole stream."""
    choices = event.get("choices")
    if isinstance(choices, list):
        return frozenset(_number(choice, "index") for choice in cast(list[Any], choices))
    of = (_number(event, name) for name in ("index", "output_index"))
    return frozenset(number for number in of if number is not None)


def _number(value: Any, name: str) -> int | None:
    number = cast(dict[str, Any], value).get(name) if isinstance(value, dict) else None
    return number if isinstance(number, int) else None


def _growing(event: _Event) -> dict[_Path, tuple[Any, Any]]:
    """The texts that grow from event to event, each by its object and its name there: those below `delta`."""
    found: dict[_Path, tuple[Any, Any]] = {}
    names = ("index", "output_index", "content_index", "summary_index")
    _collect(event, (str(event.get("type")), *(_number(event, name) for name in names)), found, is_growing=False)
    return found


def _collect(value: Any, path: _Path, found: dict[_Path, tuple[Any, Any]], *, is_growing: bool) -> None:
    items = cast(dict[str, Any], value).items() if isinstance(value, dict) else enumerate(cast(list[Any], value))
    for name, inner in items:
        number = _number(inner, "index") if isinstance(value, list) else None
        inner_path = (*path, name if number is None else number)
        grows = is_growing or name == "delta"
        if isinstance(inner, str):
            if grows:
                found[inner_path] = (value, name)
        elif isinstance(inner, dict | list):
            _collect(cast(Any, inner), inner_path, found, is_growing=grows)
