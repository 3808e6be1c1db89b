"""The conversation of a job, as parts that are all text. Pure.

Nothing is omitted: unknown shapes become JSON. Files are named, and never loaded.
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
from breakwater.kernel.formats import quantity, visible
from breakwater.kernel.json_values import NoJsonError, parse_json
from breakwater.kernel.pages.markdown import markdown
from breakwater.kernel.pages.words import json_text, size

MAX_TEXT_CHARACTERS = 4_000
MAX_TEXT_LINES = 60
"""Longer texts are folded."""
MAX_JSON_CHARACTERS = 1_500
MAX_JSON_LINES = 12
"""Longer JSON is folded, object by object."""
MAX_LEVELS = 5
MAX_ENTRIES = 200
"""JSON that is nested deeper, or has more entries, is not folded further."""
MAX_NODES = 2_000
"""Maximum number of nodes of JSON on a page; beyond it, JSON is not folded further."""
MAX_NAMED_KEYS = 6
"""Maximum number of keys that the summary of a folded object names."""
MAX_MARKDOWN = 60_000
"""Maximum number of characters on a page that are rendered as Markdown, which takes at most half a second."""

_Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextPart:
    """A text, also as HTML if it is Markdown."""

    kind: ClassVar[str] = "text"
    plain: str
    html: Markup | None = None
    label: str = ""
    summary: str = ""
    """The summary that a folded text shows; empty for an open one."""


@dataclass(frozen=True, slots=True)
class JsonPart:
    """JSON, with its large parts folded.

    Attributes:
        label: the key, index or name of the value.
        text: the value itself; empty if the children show it.
        summary: the summary that a folded value shows; empty for an open one.
        children: the values inside.
    """

    kind: ClassVar[str] = "json"
    text: str
    label: str = ""
    summary: str = ""
    children: tuple[JsonPart, ...] = ()


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A file, which is named but not loaded."""

    kind: ClassVar[str] = "media"
    media_kind: str
    """The kind of media: `image`, `audio`, `video` or `file`."""
    details: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallPart:
    """A tool call, with its result."""

    kind: ClassVar[str] = "call"
    name: str
    call_id: str
    arguments: tuple[MessagePart, ...]
    result: tuple[MessagePart, ...] | None
    result_in: int | None
    """The number of the message with the result; None if there is no result."""
    awaited: bool
    """True in a response, because the caller has yet to send the result."""


@dataclass(frozen=True, slots=True)
class ResultPart:
    """A tool's result without a call."""

    kind: ClassVar[str] = "result"
    call_id: str
    parts: tuple[MessagePart, ...]


MessagePart: TypeAlias = TextPart | JsonPart | MediaPart | CallPart | ResultPart


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message. `number` starts at 1; it is None for the response."""

    role: str
    number: int | None
    parts: tuple[MessagePart, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A job's input and response; None for parts that are not stored.

    A message that only contains results is shown at their calls.
    """

    messages: tuple[MessageView, ...] | None
    input: JsonPart | None
    response: MessageView | None


def conversation(execution: Execution) -> Conversation:
    """Builds the conversation of a record. Call it in a thread, because it may take a second."""
    reader = _Reader(execution.messages or [])
    return Conversation(
        None if execution.messages is None else reader.all(),
        None if execution.input is None else reader.json(execution.input),
        None if execution.output is None else reader.response(execution.output),
    )


def bare_json(value: JsonValue, label: str = "") -> JsonPart:
    """Builds the part of a value outside a conversation, such as a job's metadata."""
    return _Reader([]).json(value, label)


@dataclass(slots=True)
class _Reader:
    messages: Sequence[_Fields]
    pairs: Mapping[PartPlace, PartPlace] = field(init=False)
    places: Mapping[int, PartPlace] = field(init=False)
    """The places of calls and results, by the `id()` of their objects."""
    markdown_left: int = MAX_MARKDOWN
    nodes_left: int = MAX_NODES

    def __post_init__(self) -> None:
        self.pairs = tool_pairs(self.messages)
        self.places = {
            id(cast(_Fields, call_or_result)): (index, part)
            for index, message in enumerate(self.messages)
            for part, call_or_result in enumerate((*_calls(message), *_results(message)))
            if isinstance(call_or_result, dict)
        }

    def all(self) -> tuple[MessageView, ...]:
        views: list[MessageView] = []
        for index, message in enumerate(self.messages):
            parts = tuple(self._parts(index, message))
            role = message.get("role")
            name = message.get("name")
            if parts or (index, 0) not in self.pairs:  # otherwise it is the result of a call, which shows it
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
        if len(text) <= MAX_JSON_CHARACTERS and text.count("\n") < MAX_JSON_LINES:
            return JsonPart(text, label)
        if isinstance(value, dict):
            entries = list(value.items())
            names = [visible(name[:40]) for name in value][:MAX_NAMED_KEYS] + ["…"] * (len(entries) > MAX_NAMED_KEYS)
            summary = f"{quantity(len(entries), 'key')}: {', '.join(names)}"
        elif isinstance(value, list):
            entries = [(str(index), item) for index, item in enumerate(value)]
            summary = quantity(len(entries), "item")
        else:
            return JsonPart(text, label, quantity(len(text), "character"))
        flat = not any(isinstance(value, dict | list) for _, value in entries)
        if flat or level == MAX_LEVELS or len(entries) > min(MAX_ENTRIES, self.nodes_left):
            return JsonPart(text, label, f"{summary}, {quantity(text.count(chr(10)) + 1, 'line')}")
        return JsonPart("", label, summary, tuple(self.json(value, name, level + 1) for name, value in entries))

    def _parts(self, index: int | None, message: _Fields) -> Iterator[MessagePart]:
        """Yields the parts of a message. `index` is None for the response."""
        role = message.get("role")
        content = message.get("content")
        shown_fields = {"role", "content"}
        if role in ("tool", "function"):
            shown_fields |= {"tool_call_id", "name"}
            if index is None or (index, 0) not in self.pairs:
                call_id = message.get("tool_call_id") or message.get("name")
                yield ResultPart(_name(call_id), tuple(self._result(content)))
        else:
            yield from self._content(content, index, message)
        if role == "assistant":
            shown_fields |= {
                "tool_calls",
                "function_call",
                "refusal",
                "thinking_blocks",
                "reasoning_content",
                "reasoning",
            }
            yield from self._assistant_parts(index, message)
        yield from self._other_fields(message, shown_fields)

    def _other_fields(self, fields: _Fields, shown_fields: Collection[str]) -> Iterator[MessagePart]:
        """Yields the fields that no other part shows."""
        other_fields = {name: value for name, value in fields.items() if name not in shown_fields and value is not None}
        if other_fields:
            yield self.json(other_fields, "other fields")

    def _assistant_parts(self, index: int | None, message: _Fields) -> Iterator[MessagePart]:
        """Yields the parts of a model's message other than its content."""
        for name in ("reasoning_content", "reasoning", "refusal"):
            value = message.get(name)
            if isinstance(value, str) and value:
                yield self._text(value, name.removesuffix("_content"))
            elif value:
                yield self.json(value, name)
        for name in ("thinking_blocks", "tool_calls", "function_call"):
            value = message.get(name)
            for item in cast(list[Any], value) if isinstance(value, list) else [value] if value else []:
                if name == "thinking_blocks":
                    yield from self._block(item, index, {})
                else:
                    yield self._call(item, index)

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
        """Yields the parts of a block of a message's content."""
        if not isinstance(block, dict):
            yield self.json(block)
            return
        fields = cast(dict[str, Any], block)
        match fields:
            case {"type": "text" | "input_text" | "output_text", "text": str() as text}:
                yield self._text(text)
                yield from self._other_fields(fields, ("type", "text"))
            case {"type": "thinking", "thinking": str() as text}:
                yield self._text(text, "thinking", fold=True)
                yield from self._other_fields(fields, ("type", "thinking", "signature"))
            case {"type": "tool_use"} if message.get("role") == "assistant":
                yield self._call(fields, index)
            case {"type": "tool_result"} if message.get("role") == "user":
                if self.places.get(id(fields)) not in self.pairs:
                    yield ResultPart(_name(fields.get("tool_use_id")), tuple(self._result(fields.get("content"))))
                yield from self._other_fields(fields, ("type", "tool_use_id", "content"))
            case {"type": str() as kind} if kind in FILES:
                yield media_part(kind, fields)
            case _:
                yield self.json(fields)

    def _call(self, call: Any, index: int | None) -> MessagePart:
        if not isinstance(call, dict):
            return self.json(call, "tool call")
        call_fields = cast(dict[str, Any], call)
        wrapper = next((name for name in ("function", "custom") if isinstance(call_fields.get(name), dict)), None)
        function = call_fields if wrapper is None else cast(dict[str, Any], call_fields[wrapper])
        arguments_name = "arguments" if "arguments" in function else "input"
        shown_fields = {*_CALL_FIELDS, "name", arguments_name}
        arguments = [*self._result(function.get(arguments_name)), *self._other_fields(function, shown_fields)]
        if wrapper is not None:
            arguments += self._other_fields(call_fields, {*_CALL_FIELDS, wrapper})
        call_place = self.places.get(id(call_fields))
        result_place = None if call_place is None else self.pairs.get(call_place)
        result = None
        if result_place is not None:
            result_message = self.messages[result_place[0]]
            result = (_results(result_message) or [result_message])[result_place[1]]
        return CallPart(
            _name(function.get("name")),
            _name(call_fields.get("id")),
            tuple(arguments),
            None if result is None else tuple(self._result(result.get("content"))),
            None if result_place is None else result_place[0] + 1,
            awaited=index is None,
        )

    def _result(self, content: Any) -> Iterator[MessagePart]:
        """Yields the parts of a tool's arguments or result, which are data and not Markdown."""
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
                        yield from self._other_fields(block, ("type", "text"))
                    else:
                        yield from self._block(block, None, {})
            case _:
                yield self.json(content)

    def _text(self, text: str, label: str = "", *, fold: bool = False) -> MessagePart:
        value = _json_in(text)
        if value is not None:
            return self.json(value, label)
        visible_text = visible(text)
        html = None
        if len(visible_text) <= self.markdown_left:
            html = markdown(visible_text)
            self.markdown_left -= len(visible_text) if html is not None else 0
        return _plain(visible_text, html, label, fold=fold)


_CALL_FIELDS = ("id", "type", "index")


def _plain(text: str, html: Markup | None = None, label: str = "", *, fold: bool = False) -> TextPart:
    if not fold and len(text) <= MAX_TEXT_CHARACTERS and text.count("\n") < MAX_TEXT_LINES:
        return TextPart(text, html, label)
    beginning = re.sub(r"\s+", " ", text[:200]).strip()[:100]
    return TextPart(text, html, label, f"{beginning}… {quantity(len(text), 'character')}")


def media_part(kind: str, part: _Fields) -> MediaPart:
    """Describes a file in a message. `kind` is the type of the part, one of `FILES`."""
    name, payload = payload_of(part)
    content = content_of(payload)
    media_kind = next((word for word in ("image", "audio", "video") if word in f"{kind} {content.media_type}"), "file")
    file_format = payload.get("format")
    names = [payload.get("filename"), part.get("title"), payload.get("file_id"), part.get("name") if name else None]
    details = [
        content.media_type.partition(";")[0] or (file_format if isinstance(file_format, str) else ""),
        f"by URL: {content.url[:200]}" if content.url else size(content.size) if content.data is not None else "",
        *(text for text in names if isinstance(text, str)),
    ]
    return MediaPart(media_kind, tuple(visible(text) for text in details if text))


def _calls(message: _Fields) -> list[Any]:
    """The tool calls of a message, in the order of `PartPlace`."""
    if message.get("role") != "assistant":
        return []
    return [*_list(message.get("tool_calls")), *_blocks(message, "tool_use"), message.get("function_call")]


def _results(message: _Fields) -> list[Any]:
    return _blocks(message, "tool_result") if message.get("role") == "user" else []


def _blocks(message: _Fields, kind: str) -> list[Any]:
    return [block for block in _list(message.get("content")) if _type(block) == kind]


def _json_in(text: str) -> JsonValue:
    """Parses a text that is a JSON object or array; None for any other."""
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
