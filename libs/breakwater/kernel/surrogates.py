r"""Joins halves of surrogate pairs, which JSON allows as escapes (RFC 8259, 8.2) and UTF-8 does not.

A stream may be cut between two tokens that share a character, and some servers then write the halves of its surrogate
pair as escapes: `"ok \ud83d"` and `"\ude00"`. Consecutive halves become their character, and a lone half becomes
U+FFFD, so no code after the JSON readers meets one. JSON without halves costs nothing: halves are only searched for
when the codec has refused a document.
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
    """Returns a text with its halves joined, and lone halves replaced."""
    if text.isascii() or not _HALF.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def whole_value(value: Any) -> Any:
    """Returns a JSON value with whole texts and names."""
    match value:
        case str():
            return whole_text(value)
        case dict():
            items = cast(dict[Any, Any], value).items()
            return {whole_value(name): whole_value(inner) for name, inner in items}
        case list() | tuple():
            return [whole_value(inner) for inner in cast(list[Any], value)]
        case _:
            return value


def whole_json(document: bytes) -> bytes | None:
    """Returns a JSON document with whole texts, otherwise unchanged; None if it has no lone half.

    Args:
        document: the document. Its halves are escapes, or three bytes each as in CESU-8.
    """
    is_whole = True

    def mend(run: re.Match[bytes]) -> bytes:
        nonlocal is_whole
        if run["raw"] is not None:
            is_whole = False
            return whole_text(run["raw"].decode("utf-8", "surrogatepass")).encode()
        mended = _mend_run(run["before"].decode(), run["escapes"].decode()).encode()
        is_whole = is_whole and mended == run[0]
        return mended

    mended = _RUNS.sub(mend, document)
    return None if is_whole else mended


def read_whole(read: Callable[[bytes], ReadT], document: bytes) -> ReadT:
    """Reads a document with a codec; if the codec refuses a lone half, reads the document with whole texts.

    Raises the errors of `read`.
    """
    try:
        return read(document)
    except ValueError:
        if (mended := whole_json(document)) is None:
            raise
    return read(mended)


def read_halves(document: bytes) -> Any:
    """Reads JSON and keeps the halves in its texts, for a joiner. Raises ValueError."""
    try:
        return orjson.loads(document)
    except ValueError:
        if whole_json(document) is None:
            raise
    return _with_halves(document)


def _with_halves(document: bytes) -> Any:
    # orjson reads the numbers, so that both codecs agree on them.
    return json.loads(document.decode("utf-8", "surrogatepass"), parse_int=orjson.loads, parse_float=orjson.loads)


def whole_escapes(text: str, *, is_last: bool = True) -> str:
    """Returns a JSON text, such as a tool call's arguments, without escapes of lone halves, which codecs refuse.

    Args:
        text: the text as far as it has come. The result for a longer text begins with the result for a shorter one.
        is_last: True if nothing follows. Otherwise an end that may be the first half of a pair is left out.
    """
    if "\\" not in text:
        return text
    undecided = None if is_last or "\\" not in text[-_LONGEST_END:] else _UNDECIDED.search(text)
    decided = text if undecided is None else text[: undecided.start("end")]
    return _RUNS_IN_TEXT.sub(lambda run: _mend_run(run["before"], run["escapes"]), decided)


def _mend_run(before: str, escapes: str) -> str:
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
        """Returns the next piece without a half at its end, which waits for the other half."""
        text = self._half + piece
        self._half = ""
        if _awaits_half(text):
            self._half = text[-1]
            text = text[:-1]
        return whole_text(text)

    def end(self) -> str:
        """Returns the half that still waits when no piece follows, as U+FFFD."""
        text = self._half
        self._half = ""
        return whole_text(text)


_Event = dict[str, Any]
_Path = tuple[Any, ...]


class EventJoiner:
    """Joins halves across the events of a stream, in each growing text of each choice, block or item.

    An event whose text ends with the first half waits for the next event of its place. All other events pass; check
    `is_idle` first, which is cheaper.
    """

    def __init__(self) -> None:
        self._waiting: dict[frozenset[Any], _Event] = {}
        self._has_halves = False

    @property
    def is_idle(self) -> bool:
        """Returns True if the event that was just read has no half, and no event waits."""
        return not self._has_halves and not self._waiting

    def read(self, document: bytes) -> Any:
        """Reads an event and keeps its halves. Apart from these it must be valid JSON."""
        self._has_halves = True
        return _with_halves(document)

    def put(self, event: _Event) -> Iterator[_Event]:
        """Yields the events that can be passed on now that this event has come."""
        places = _places(event)
        for waiting_places in tuple(self._waiting):
            if waiting_places and places and waiting_places.isdisjoint(places):
                continue
            waiting_event = self._waiting.pop(waiting_places)
            self._has_halves = _move_halves(waiting_event, event) or self._has_halves
            yield whole_value(waiting_event)
        if self._has_halves:
            self._has_halves = False
            if any(_awaits_half(container[name]) for container, name in _growing(event).values()):
                self._waiting[places] = event
                return
            event = whole_value(event)
        yield event

    def end(self) -> Iterator[_Event]:
        """Yields the events that still wait when no event follows."""
        waiting = self._waiting
        self._waiting = {}
        yield from map(whole_value, waiting.values())


def _move_halves(held_event: _Event, event: _Event) -> bool:
    """Moves halves from the ends of an event's texts to the next event's other halves; returns True if any moved."""
    following = _growing(event)
    is_moved = False
    for path, (container, name) in _growing(held_event).items():
        if not _awaits_half(container[name]) or path not in following:
            continue
        next_container, next_name = following[path]
        if next_container[next_name] == "" or _begins_with_half(next_container[next_name]):
            next_container[next_name] = container[name][-1] + next_container[next_name]
            container[name] = container[name][:-1]
            is_moved = True
    return is_moved


def _places(event: Mapping[str, Any]) -> frozenset[Any]:
    """Returns the choices, the block or the item that an event belongs to; empty for an event of the whole stream."""
    choices = event.get("choices")
    if isinstance(choices, list):
        return frozenset(_number(choice, "index") for choice in cast(list[Any], choices))
    numbers = (_number(event, name) for name in ("index", "output_index"))
    return frozenset(number for number in numbers if number is not None)


def _number(value: Any, name: str) -> int | None:
    number = cast(dict[str, Any], value).get(name) if isinstance(value, dict) else None
    return number if isinstance(number, int) else None


def _growing(event: _Event) -> dict[_Path, tuple[Any, Any]]:
    """Returns the texts that grow from event to event, which are below `delta`, by their container and key."""
    texts: dict[_Path, tuple[Any, Any]] = {}
    names = ("index", "output_index", "content_index", "summary_index")
    _collect(event, (str(event.get("type")), *(_number(event, name) for name in names)), texts, is_growing=False)
    return texts


def _collect(value: Any, path: _Path, texts: dict[_Path, tuple[Any, Any]], *, is_growing: bool) -> None:
    items = cast(dict[str, Any], value).items() if isinstance(value, dict) else enumerate(cast(list[Any], value))
    for name, inner in items:
        number = _number(inner, "index") if isinstance(value, list) else None
        inner_path = (*path, name if number is None else number)
        grows = is_growing or name == "delta"
        if isinstance(inner, str):
            if grows:
                texts[inner_path] = (value, name)
        elif isinstance(inner, dict | list):
            _collect(cast(Any, inner), inner_path, texts, is_growing=grows)
