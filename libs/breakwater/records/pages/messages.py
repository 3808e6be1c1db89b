"""A job's conversation as the page shows it. Pure: from a record to parts that are all text.

Nothing is left out: unknown shapes are shown as JSON. Files are named, and never loaded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, cast

from markupsafe import Markup
from pydantic import JsonValue

from breakwater.dialects.rules.conversation import PartPlace, tool_pairs
from breakwater.jobs.contract.execution import Execution
from breakwater.jobs.rules.chat_messages import FILES, content_of, payload_of
from breakwater.kernel.formats import counted, visible
from breakwater.kernel.json_values import NoJsonError, parse_json
from breakwater.kernel.pages.markdown import markdown
from breakwater.kernel.pages.words import json_text, size

LONG_CHARACTERS, LONG_LINES = 4_000, 60
"""A longer text is folded."""
SHORT_CHARACTERS, SHORT_LINES = 1_500, 12
"""Longer JSON is folded, object by object."""
MAX_LEVELS, MAX_ENTRIES, MAX_NODES = 5, 200, 2_000
"""Limits of folding: deeper or wider JSON is not folded further; the last is for a whole page."""
NAMED = 6
"""Keys of a folded object that are named."""
MAX_MARKDOWN = 60_000
"""Characters of a page that are read as Markdown: at the worst, it takes half a second."""

_Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextPart:
    """A text: as HTML if it is Markdown, otherwise as it is."""

    kind: ClassVar[str] = "text"
    plain: str
    html: Markup | None = None
    label: str = ""
    folded: str = ""
    """Summary that is shown until it is opened; empty for one that is open."""


@dataclass(frozen=True, slots=True)
class JsonPart:
    """JSON, with its large parts folded.

    Attributes:
        label: the key, index or name of the value.
        text: the value itself; empty where it is shown by its children.
        folded: the summary that is shown until it is opened; empty for one that is open.
        children: the values in it.
    """

    kind: ClassVar[str] = "json"
    text: str
    label: str = ""
    folded: str = ""
    children: tuple[JsonPart, ...] = ()


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A file: named, not loaded."""

    kind: ClassVar[str] = "media"
    what: str
    about: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallPart:
    """A tool call, with its result."""

    kind: ClassVar[str] = "call"
    name: str
    call_id: str
    arguments: tuple[MessagePart, ...]
    result: tuple[MessagePart, ...] | None
    result_in: int | None
    """The number of the message that the result is in."""
    awaited: bool
    """True in a response: the result is the caller's to send."""


@dataclass(frozen=True, slots=True)
class ResultPart:
    """A tool's result that answers no call."""

    kind: ClassVar[str] = "result"
    call_id: str
    parts: tuple[MessagePart, ...]


MessagePart: TypeAlias = TextPart | JsonPart | MediaPart | CallPart | ResultPart


@dataclass(frozen=True, slots=True)
class MessageView:
    """One message. `number`: from 1; None for the response."""

    role: str
    number: int | None
    parts: tuple[MessagePart, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A job's input and response; None for parts that are not stored. A message of results alone is at its calls."""

    messages: tuple[MessageView, ...] | None
    input: JsonPart | None
    response: MessageView | None


def conversation(execution: Execution) -> Conversation:
    """The conversation of a record. It may take a second: to be called in a thread."""
    reader = _Reader(execution.messages or [])
    return Conversation(
        None if execution.messages is None else reader.all(),
        None if execution.input is None else reader.json(execution.input),
        None if execution.output is None else reader.response(execution.output),
    )


def bare_json(value: JsonValue, label: str = "") -> JsonPart:
    """A value that belongs to no conversation, such as a job's metadata."""
    return _Reader([]).json(value, label)


@dataclass(slots=True)
class _Reader:
    messages: Sequence[_Fields]
    pairs: Mapping[PartPlace, PartPlace] = field(init=False)
    places: Mapping[int, PartPlace] = field(init=False)
    """Of the calls and results, by the identity of their objects."""
    markdown_left: int = MAX_MARKDOWN
    nodes_left: int = MAX_NODES

    def __post_init__(self) -> None:
        self.pairs = tool_pairs(self.messages)
        self.places = {
            id(cast(_Fields, one)): (index, part)
            for index, message in enumerate(self.messages)
            for part, one in enumerate((*_calls(message), *_results(message)))
            if isinstance(one, dict)
        }

    def all(self) -> tuple[MessageView, ...]:
        views: list[MessageView] = []
        for index, message in enumerate(self.messages):
            parts, role, name = tuple(self._parts(index, message)), message.get("role"), message.get("name")
            if parts or (index, 0) not in self.pairs:  # otherwise it is the result of a call, and shown there
                title = _name(role or "message") + (f" {_name(name)}" if name and role in ("tool", "function") else "")
                views.append(MessageView(title, index + 1, parts))
        return tuple(views)

    def response(self, output: JsonValue) -> MessageView:
        if isinstance(output, dict) and (
            output.get("role") == "assistant" or isinstance(output.get("tool_calls"), list)
        ):
            return MessageView("response", None, tuple(self._parts(None, {**output, "role": "assistant"})))
        part = self._text(output) if isinstance(output, str) else self.json(output)
        return MessageView("response", None, (part,))

    def json(self, value: JsonValue, label: str = "", level: int = 1) -> JsonPart:
        self.nodes_left -= 1
        text = visible(value) if isinstance(value, str) and "\n" in value else json_text(value)
        label = visible(label)
        if len(text) <= SHORT_CHARACTERS and text.count("\n") < SHORT_LINES:
            return JsonPart(text, label)
        if isinstance(value, dict):
            entries = list(value.items())
            names = [visible(name[:40]) for name in value][:NAMED] + ["…"] * (len(entries) > NAMED)
            folded = f"{counted(len(entries), 'key')}: {', '.join(names)}"
        elif isinstance(value, list):
            entries = [(str(index), one) for index, one in enumerate(value)]
            folded = counted(len(entries), "item")
        else:
            return JsonPart(text, label, counted(len(text), "character"))
        flat = not any(isinstance(one, dict | list) for _, one in entries)
        if flat or level == MAX_LEVELS or len(entries) > min(MAX_ENTRIES, self.nodes_left):
            return JsonPart(text, label, f"{folded}, {counted(text.count(chr(10)) + 1, 'line')}")
        return JsonPart("", label, folded, tuple(self.json(one, name, level + 1) for name, one in entries))

    def _parts(self, index: int | None, message: _Fields) -> Iterator[MessagePart]:
        """The parts of a message. `index`: None for the response."""
        role, content = message.get("role"), message.get("content")
        known = {"role", "content"}
        if role in ("tool", "function"):
            known |= {"tool_call_id", "name"}
            if index is None or (index, 0) not in self.pairs:
                about = message.get("tool_call_id") or message.get("name")
                yield ResultPart(_name(about), tuple(self._result(content)))
        else:
            yield from self._content(content, index, message)
        if role == "assistant":
            known |= {"tool_calls", "function_call", "refusal", "thinking_blocks", "reasoning_content", "reasoning"}
            yield from self._said(index, message)
        yield from self._rest(message, known)

    def _rest(self, fields: _Fields, known: Collection[str]) -> Iterator[MessagePart]:
        """The fields that are not shown otherwise."""
        rest = {name: value for name, value in fields.items() if name not in known and value is not None}
        if rest:
            yield self.json(rest, "other fields")

    def _said(self, index: int | None, message: _Fields) -> Iterator[MessagePart]:
        """The parts of a model's message in addition to its content."""
        for name in ("reasoning_content", "reasoning", "refusal"):
            value = message.get(name)
            if isinstance(value, str) and value:
                yield self._text(value, name.removesuffix("_content"))
            elif value:
                yield self.json(value, name)
        for name in ("thinking_blocks", "tool_calls", "function_call"):
            value = message.get(name)
            for one in cast(list[Any], value) if isinstance(value, list) else [value] if value else []:
                if name == "thinking_blocks":
                    yield from self._block(one, index, {})
                else:
                    yield self._call(one, index)

    def _content(self, content: Any, index: int | None, message: _Fields) -> Iterator[MessagePart]:
        match content:
            case None | "" | []:
                pass
            case str():
                yield self._text(content)
            case list():
                for block in cast(list[Any], content):
                    yield from self._block(block, index, message)
            case _:
                yield self.json(content, "content")

    def _block(self, block: Any, index: int | None, message: _Fields) -> Iterator[MessagePart]:
        """A part of a message's content."""
        if not isinstance(block, dict):
            yield self.json(block)
            return
        fields = cast(dict[str, Any], block)
        match fields:
            case {"type": "text" | "input_text" | "output_text", "text": str() as text}:
                yield self._text(text)
                yield from self._rest(fields, ("type", "text"))
            case {"type": "thinking", "thinking": str() as text}:
                yield self._text(text, "thinking", fold=True)
                yield from self._rest(fields, ("type", "thinking", "signature"))
            case {"type": "tool_use"} if message.get("role") == "assistant":
                yield self._call(fields, index)
            case {"type": "tool_result"} if message.get("role") == "user":
                if self.places.get(id(fields)) not in self.pairs:
                    yield ResultPart(_name(fields.get("tool_use_id")), tuple(self._result(fields.get("content"))))
                yield from self._rest(fields, ("type", "tool_use_id", "content"))
            case {"type": str() as kind} if kind in FILES:
                yield media_part(kind, fields)
            case _:
                yield self.json(fields)

    def _call(self, call: Any, index: int | None) -> MessagePart:
        if not isinstance(call, dict):
            return self.json(call, "tool call")
        given = cast(dict[str, Any], call)
        holder = next((name for name in ("function", "custom") if isinstance(given.get(name), dict)), None)
        function = given if holder is None else cast(dict[str, Any], given[holder])
        sent = "arguments" if "arguments" in function else "input"
        arguments = [*self._result(function.get(sent)), *self._rest(function, {*_OF_CALLS, "name", sent})]
        if holder is not None:
            arguments += self._rest(given, {*_OF_CALLS, holder})
        place = self.places.get(id(given))
        found, result = None if place is None else self.pairs.get(place), None
        if found is not None:
            answer = self.messages[found[0]]
            result = (_results(answer) or [answer])[found[1]]
        return CallPart(
            _name(function.get("name")),
            _name(given.get("id")),
            tuple(arguments),
            None if result is None else tuple(self._result(result.get("content"))),
            None if found is None else found[0] + 1,
            awaited=index is None,
        )

    def _result(self, content: Any) -> Iterator[MessagePart]:
        """Arguments or results of a tool: data, and no Markdown."""
        match content:
            case None | "" | []:
                pass
            case str():
                value = _json_in(content)
                yield _plain(visible(content)) if value is None else self.json(value)
            case [{"type": str()}, *_]:
                for block in cast(list[Any], content):
                    if _type(block) in {"text", "input_text", "output_text"}:
                        yield from self._result(block.get("text"))
                        yield from self._rest(block, ("type", "text"))
                    else:
                        yield from self._block(block, None, {})
            case _:
                yield self.json(content)

    def _text(self, text: str, label: str = "", *, fold: bool = False) -> MessagePart:
        if (value := _json_in(text)) is not None:
            return self.json(value, label)
        shown, html = visible(text), None
        if len(shown) <= self.markdown_left:
            html = markdown(shown)
            self.markdown_left -= len(shown) if html is not None else 0
        return _plain(shown, html, label, fold=fold)


_OF_CALLS = ("id", "type", "index")


def _plain(text: str, html: Markup | None = None, label: str = "", *, fold: bool = False) -> TextPart:
    if not fold and len(text) <= LONG_CHARACTERS and text.count("\n") < LONG_LINES:
        return TextPart(text, html, label)
    beginning = re.sub(r"\s+", " ", text[:200]).strip()[:100]
    return TextPart(text, html, label, f"{beginning}… {counted(len(text), 'character')}")


def media_part(kind: str, part: _Fields) -> MediaPart:
    """A file in a message. `kind`: the type of the part, one of `FILES`."""
    name, payload = payload_of(part)
    found = content_of(payload)
    what = next((word for word in ("image", "audio", "video") if word in f"{kind} {found.media_type}"), "file")
    form = payload.get("format")
    named = [payload.get("filename"), part.get("title"), payload.get("file_id"), part.get("name") if name else None]
    about = [
        found.media_type.partition(";")[0] or (form if isinstance(form, str) else ""),
        f"by URL: {found.url[:200]}" if found.url else size(found.size) if found.data is not None else "",
        *(text for text in named if isinstance(text, str)),
    ]
    return MediaPart(what, tuple(visible(text) for text in about if text))


def _calls(message: _Fields) -> list[Any]:
    """A message's tool calls, in the order of `Place`."""
    if message.get("role") != "assistant":
        return []
    return [*_list(message.get("tool_calls")), *_blocks(message, "tool_use"), message.get("function_call")]


def _results(message: _Fields) -> list[Any]:
    return _blocks(message, "tool_result") if message.get("role") == "user" else []


def _blocks(message: _Fields, kind: str) -> list[Any]:
    return [block for block in _list(message.get("content")) if _type(block) == kind]


def _json_in(text: str) -> JsonValue:
    """The object or array that a text is; None for any other."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return parse_json(text)
    except NoJsonError:
        return None


def _type(block: Any) -> Any:
    return cast(dict[str, Any], block).get("type") if isinstance(block, dict) else None


def _name(value: Any) -> str:
    return visible(value if isinstance(value, str) else "" if value is None else str(value))[:200]


def _list(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []
