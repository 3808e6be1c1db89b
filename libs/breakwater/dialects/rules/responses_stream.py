"""The events of a streamed Response, as one stream: those of its provider, and those made from a chat's chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from breakwater.dialects.rules.chat_chunks import Assembly, Chunk, missing_chunks_of
from breakwater.dialects.rules.chat_completions import completion_of, first_choice, is_overflow
from breakwater.dialects.rules.provider_state import AUTHOR, CarriedState, state_of_calls
from breakwater.dialects.rules.responses_answer import (
    THOUGHTS,
    EchoedRequest,
    Item,
    annotation,
    call_item,
    item_id,
    log_probabilities,
    message_item,
    native_response,
    normalized_item,
    output_of,
    pending_response,
    reasoning_item,
    response_of,
    sealed_thought,
    state_item,
)
from breakwater.jobs.rules.chat_messages import THOUGHT, encode_json, fields, is_end, objects
from breakwater.kernel.errors import BreakwaterError

ResponseEvent = dict[str, Any]

_LIFE = frozenset(
    f"response.{state}" for state in ("created", "queued", "in_progress", "completed", "incomplete", "failed")
)
"""Events about the whole response. The plane sends its own instead."""

_SAYS: Mapping[str, tuple[str, str]] = {
    "output_text": ("response.output_text", "text"),
    "refusal": ("response.refusal", "refusal"),
    "reasoning_text": ("response.reasoning_text", "text"),
    "summary_text": ("response.reasoning_summary_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
"""By the type of a part or tool call: the prefix of its events' names, and the field that has its text."""
_OF_ITEM: Mapping[str, tuple[str, ...]] = {
    "message": ("output_text", "refusal"),
    "reasoning": ("reasoning_text", "summary_text"),
    "function_call": ("function_call",),
    "custom_tool_call": ("custom_tool_call",),
}
"""The types of parts that an item may have, by the item's type."""
_DONE = frozenset(name for name, _ in _SAYS.values())
_INDEXED = frozenset({"output_item", "content_part", "reasoning_summary_part", *(name.split(".")[1] for name in _DONE)})
"""Kinds of events that are about an item."""
_OF_DELTA = {f"{name}.delta": kind for kind, (name, _) in _SAYS.items()} | {
    "response.reasoning.delta": "reasoning_text"
}
_FIELDS = {"output_text": "content", "refusal": "refusal"}
_ENDS = {"completed": "response.completed", "incomplete": "response.incomplete"}


class ContradictionError(BreakwaterError):
    """The job was decided by another answer than the one that was begun in the stream."""


def event_bytes(event: ResponseEvent) -> bytes:
    """Writes an event as a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))


@dataclass(slots=True)
class _Part:
    """A text of an item while it is streamed: part of a message's content, of reasoning, or of a tool call."""

    kind: str
    pieces: list[str] = field(default_factory=list[str])
    annotations: list[Item] = field(default_factory=list[Item])
    logprobs: list[Item] = field(default_factory=list[Item])
    is_done: bool = False

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def to_json(self) -> Item:
        part: Item = {"type": self.kind, _SAYS[self.kind][1]: self.text}
        if self.kind == "output_text":
            part |= {"annotations": [*self.annotations], "logprobs": [*self.logprobs]}
        return part


@dataclass(slots=True)
class _OpenItem:
    """An item while it is streamed. Parts of its content have numbers from 0 up, those of its summary from -1 down."""

    number: int
    item: Item
    parts: dict[int, _Part] = field(default_factory=dict[int, _Part])
    is_done: bool = False

    def to_json(self, status: str) -> Item:
        if self.is_done or not self.parts:
            return self.item
        item = {**self.item, "status": status} if "status" in self.item else dict(self.item)
        if (kind := item["type"]) in _SAYS:
            return {**item, _SAYS[kind][1]: self.parts[0].text}
        content = [part.to_json() for number, part in sorted(self.parts.items()) if number >= 0]
        summary = [part.to_json() for number, part in sorted(self.parts.items(), reverse=True) if number < 0]
        return {**item, **({"content": content} if content else {}), **({"summary": summary} if summary else {})}


class ResponseEvents:
    """The events of one response, numbered from 0.

    The same request, chunks and result make the same events, however the chunks are grouped. So a stream can be read
    again from any event.
    """

    def __init__(self, request: EchoedRequest) -> None:
        self._request = request
        self._number = 0
        self._ended = False
        self._items: list[_OpenItem] = []
        self._of_provider: dict[int, _OpenItem] = {}
        """Items by their index at the provider, for an attempt that passes on the provider's events."""
        self._reasoning: _OpenItem | None = None
        self._message: _OpenItem | None = None
        self._calls: dict[int, _OpenItem] = {}
        self._thought_in: str | None = None
        self._author: Any = None
        self._state = CarriedState()
        self._notes: list[Item] = []
        """Annotations that have come before their text."""
        self._in_progress = False
        self._events: list[ResponseEvent] = []

    def begin(self) -> list[ResponseEvent]:
        """Returns the events that follow the acceptance of the job."""
        first = "queued" if self._request.background else "in_progress"
        self._emit({"type": "response.created", "response": pending_response(self._request, first)})
        if self._request.background:
            self._emit({"type": "response.queued", "response": pending_response(self._request, first)})
        else:
            self._start()
        return self._take_events()

    def add(self, chunk: Chunk) -> list[ResponseEvent]:
        """Adds the next chunk. Returns its events."""
        self._start()
        self._author = chunk.get(AUTHOR) or self._author
        if event := fields(chunk.get("event")):
            self._pass_on(event)
        else:
            self._add_chunk(chunk)
        return self._take_events()

    def end(self, result: Mapping[str, Any], *, complete: bool = True) -> list[ResponseEvent]:
        """Returns the events of the missing rest of the answer, and the last event.

        Args:
            result: a `Result`, as JSON.
            complete: all chunks were added.

        Raises:
            ContradictionError: the result has another answer.
        """
        self._start()
        if result["status"] == "succeeded":
            self._catch_up(result, complete=complete)
        output = [item.to_json("completed") for item in self._items]
        response = response_of(self._request, result, output)
        if is_overflow(result):
            # OpenAI's stream has both events: its SDKs raise the error of the first, and Codex reads the second.
            error_fields = {**response["error"], "param": "input"}
            self._emit({"type": "error", **error_fields, "error": {"type": "invalid_request_error", **error_fields}})
        self._emit({"type": _ENDS.get(response["status"], "response.failed"), "response": response})
        return self._take_events()

    def error(self, code: str, message: str) -> list[ResponseEvent]:
        """Returns the last event of a stream that ends without its result.

        The event has the error twice: OpenAI's SDKs read its fields, and those of Open Responses raise its `error`.
        """
        error_fields = {"code": code, "message": message, "param": None}
        self._emit({"type": "error", **error_fields, "error": {"type": "server_error", **error_fields}})
        return self._take_events()

    def _catch_up(self, result: Mapping[str, Any], *, complete: bool) -> None:
        if native_response(result) is not None:
            output = output_of(self._request.job_id, result)
            if len(self._items) > len(output):
                raise ContradictionError
            for number, item in enumerate(output):
                open_item = self._items[number] if number < len(self._items) else self._open(_empty(item))
                self._complete(open_item, item)
            return
        completion = completion_of(result)
        self._author = self._author or fields(result.get("response")).get(AUTHOR)
        if not (complete and self._ended):
            missing = missing_chunks_of(completion, self._assemble())
            if missing is None:
                raise ContradictionError
            for chunk in missing:
                for choice in chunk["choices"]:
                    self._state.add(fields(choice.get("delta")))
                self._add_chunk({**chunk, "choices": [_reorder(chunk_choice) for chunk_choice in chunk["choices"]]})
        for item in self._items:
            self._close(item)
        token = state_of_calls(self._author, fields(first_choice(completion).get("message")))
        if token is not None and all(item.item.get("encrypted_content") != token for item in self._items):
            self._carry(token)

    def _complete(self, open_item: _OpenItem, final: Item) -> None:
        """Sends what is missing of an item. Raises ContradictionError: another item was begun in its place."""
        if open_item.item["type"] != final["type"]:
            raise ContradictionError
        own_ids = {name: open_item.item[name] for name in ("id", "call_id") if name in open_item.item}
        parts = list(_parts_of(final))
        texts = [(at, kind, part) for at, kind, part in parts if kind in _SAYS]
        final = {**final, **own_ids}
        sent_texts = {at: open_item.parts[at].text for at, _, _ in texts if at in open_item.parts}
        if len(sent_texts) < len(open_item.parts) or any(
            not part[_SAYS[kind][1]].startswith(sent_texts.get(at, ""))
            or (
                at in sent_texts
                and (
                    open_item.parts[at].kind != kind
                    or (open_item.parts[at].is_done and sent_texts[at] != part[_SAYS[kind][1]])
                )
            )
            for at, kind, part in texts
        ):
            raise ContradictionError
        if open_item.is_done:
            return
        for at, kind, part in parts:
            if kind not in _SAYS:
                self._send_whole(open_item, at, part)
                continue
            so_far = self._part(open_item, at, kind)
            if kind == "output_text":
                so_far.annotations = part["annotations"]
                so_far.logprobs = part["logprobs"]
            if missing_text := part[_SAYS[kind][1]][len(sent_texts.get(at, "")) :]:
                self._say(open_item, at, missing_text)
        self._close(open_item, final)

    # Events of the provider

    def _pass_on(self, event: Mapping[str, Any]) -> None:
        """Passes on an event of the provider with this stream's numbers. An unreadable event is left out."""
        kind = event.get("type")
        index = event.get("output_index")
        if not isinstance(kind, str) or not kind.startswith("response.") or kind in _LIFE:
            return
        if type(index) is not int:
            if kind.split(".")[1] not in _INDEXED:
                self._emit({name: value for name, value in event.items() if name != "response_id"})
            return
        open_item = self._of_provider.get(index)
        item = fields(event.get("item"))
        if open_item is None:
            begun_item = item if "item" in event else {"id": event.get("item_id"), "type": _item_type(kind)}
            if not isinstance(begun_item.get("type"), str):
                return
            open_item = self._open(_empty(normalized_item(begun_item, self._request.job_id, len(self._items))))
            self._of_provider[index] = open_item
        if not open_item.is_done and kind != "response.output_item.added":
            self._pass_on_about(open_item, kind, event)
        if open_item.item["type"] == "message":
            self._message = None if open_item.is_done else open_item
        elif open_item.item["type"] == "reasoning":
            self._reasoning = None if open_item.is_done else open_item

    def _pass_on_about(self, open_item: _OpenItem, kind: str, event: Mapping[str, Any]) -> None:
        at = _place(event)
        event_part = fields(event.get("part"))
        name = kind.rpartition(".")[0]
        if kind == "response.output_item.done":
            final = normalized_item(fields(event.get("item")), self._request.job_id, open_item.number)
            if final.get("type") == open_item.item["type"]:
                with suppress(ContradictionError):  # the end of the response shows which item is right
                    self._complete(open_item, final)
        elif (part_kind := _OF_DELTA.get(kind)) is not None:
            text = event.get("delta")
            if isinstance(text, str) and text and self._fits(open_item, at, part_kind):
                logprobs = objects(event.get("logprobs") or [])
                self._part(open_item, at, part_kind).logprobs += logprobs
                self._say(open_item, at, text, logprobs, event)
        elif kind in ("response.content_part.added", "response.reasoning_summary_part.added"):
            if self._fits(open_item, at, str(event_part.get("type"))):
                self._part(open_item, at, str(event_part.get("type")))
        elif name in _DONE or kind.endswith("_part.done"):
            if at in open_item.parts:
                self._close_part(open_item, at)
        elif kind == "response.output_text.annotation.added":
            part = open_item.parts.get(at)
            added_annotation = fields(event.get("annotation"))
            if added_annotation and part is not None and part.kind == "output_text" and not part.is_done:
                place = {**event, **self._place_of(open_item, at), "annotation_index": len(part.annotations)}
                part.annotations.append(dict(added_annotation))
                self._emit(place)
        else:
            self._emit({**event, "output_index": open_item.number, "item_id": open_item.item["id"]})

    def _fits(self, open_item: _OpenItem, at: int, kind: str) -> bool:
        """Returns True if an item may have a part of a type at a place: the part was begun there, or comes next."""
        if kind not in _OF_ITEM.get(open_item.item["type"], ()) or (at < 0) != (kind == "summary_text"):
            return False
        if (part := open_item.parts.get(at)) is not None:
            return part.kind == kind and not part.is_done
        return at == (0 if at >= 0 else -1) or (at - 1 if at > 0 else at + 1) in open_item.parts

    # Chunks of a chat

    def _add_chunk(self, chunk: Chunk) -> None:
        for choice in objects(chunk.get("choices") or []):
            if (choice.get("index") or 0) == 0:
                if self._author is not None:
                    self._state.add(fields(choice.get("delta")))
                self._add_delta(fields(choice.get("delta")), choice.get("logprobs"))
                self._ended = self._ended or is_end(choice.get("finish_reason"))

    def _assemble(self) -> Assembly:
        """Returns everything that was streamed, as a chat's message."""
        assembly = Assembly()
        delta = dict[str, Any]()
        calls = list[dict[str, Any]]()
        for item in self._items:
            if (kind := item.item["type"]) in _SAYS:
                name = "function" if kind == "function_call" else "custom"
                call_fields = {"name": item.item["name"], _SAYS[kind][1]: item.parts[0].text if item.parts else ""}
                calls.append({"index": len(calls), "id": item.item["call_id"], "type": name, name: call_fields})
                continue
            for part in item.parts.values():
                name = _FIELDS.get(part.kind) or self._thought_in or THOUGHT
                delta[name] = delta.get(name, "") + part.text
        if delta or calls:
            assembly.add({"choices": [{"index": 0, "delta": {**delta, **({"tool_calls": calls} if calls else {})}}]})
        return assembly

    def _add_delta(self, delta: Mapping[str, Any], logprobs: Any) -> None:
        for name, value in delta.items():
            copied = name == "reasoning" and self._thought_in != name and value == delta.get(THOUGHT)
            if not value or copied:
                continue
            if name == "content" and isinstance(value, str):
                message, at = self._text("output_text")
                new_logprobs = log_probabilities(logprobs) if logprobs else []
                message.parts[at].logprobs += new_logprobs
                self._say(message, at, value, new_logprobs)
            elif name == "refusal" and isinstance(value, str):
                self._say(*self._text("refusal"), value)
            elif name in THOUGHTS and isinstance(value, str):
                self._think(name, value)
            elif name == "tool_calls":
                for call in objects(value):
                    self._add_call(call)
            elif name == "annotations":
                self._notes += [note for reported in objects(value) if (note := annotation(reported)) is not None]
        if self._notes and self._message is not None:
            self._annotate(self._message)

    def _text(self, kind: str) -> tuple[_OpenItem, int]:
        """Returns the open message and the place of its part that continues; opens what is missing."""
        message = self._message
        if message is None:
            self._close_texts()
            message = self._message = self._open(message_item(self._new_id("msg"), [], "in_progress"))
        at = len(message.parts) - 1
        if at >= 0 and not (part := message.parts[at]).is_done and part.kind == kind:
            return message, at
        if at >= 0:
            self._close_part(message, at)
        self._part(message, at + 1, kind)
        return message, at + 1

    def _think(self, name: str, text: str) -> None:
        self._thought_in = self._thought_in or name
        if name != self._thought_in:
            return
        if self._reasoning is None:
            self._close_texts()
            self._reasoning = self._open(reasoning_item(self._new_id("rs"), "", "in_progress"))
        at = max((number for number in self._reasoning.parts if number >= 0), default=0)
        self._part(self._reasoning, at, "reasoning_text")
        self._say(self._reasoning, at, text)

    def _add_call(self, call: Mapping[str, Any]) -> None:
        index = call.get("index")
        number = index if isinstance(index, int) else len(self._calls)
        open_item = self._calls.get(number)
        if open_item is None:
            self._close_texts()
            if not self._calls and (token := self._state.token(self._author)) is not None:
                self._carry(token)
            empty = call_item(_call_without_text(call), self._request.job_id, len(self._items), "in_progress")
            open_item = self._calls[number] = self._open(empty)
        elif not open_item.item["name"] and (name := _call_fields(call).get("name")):
            open_item.item = {**open_item.item, "name": name}
        self._part(open_item, 0, open_item.item["type"])
        if text := _call_fields(call).get(_SAYS[open_item.item["type"]][1]):
            self._say(open_item, 0, str(text))

    def _carry(self, token: str) -> None:
        """Sends an item with the state that the author of the calls needs back with them."""
        item = state_item(token, self._request.job_id, len(self._items))
        self._close(self._open(_empty(item)), item)

    def _annotate(self, message: _OpenItem) -> None:
        at = next((number for number, part in reversed(message.parts.items()) if part.kind == "output_text"), None)
        if at is None:
            return
        for note in self._notes:
            place = {"item_id": message.item["id"], "output_index": message.number, "content_index": at}
            number = len(message.parts[at].annotations)
            message.parts[at].annotations.append(note)
            added = {"type": "response.output_text.annotation.added", **place}
            self._emit({**added, "annotation_index": number, "annotation": note})
        self._notes = []

    def _close_texts(self) -> None:
        """Ends the open text when something else begins. Tool calls may continue until the end."""
        for item in (self._reasoning, self._message):
            if item is not None:
                self._close(item)
        self._reasoning = self._message = None

    # Items

    def _new_id(self, kind: str) -> str:
        return item_id(self._request.job_id, kind, len(self._items))

    def _append(self, item: Item) -> _OpenItem:
        open_item = _OpenItem(len(self._items), item)
        self._items.append(open_item)
        return open_item

    def _open(self, item: Item) -> _OpenItem:
        open_item = self._append(item)
        self._emit({"type": "response.output_item.added", "output_index": open_item.number, "item": item})
        return open_item

    def _place_of(self, open_item: _OpenItem, at: int) -> ResponseEvent:
        place = {"item_id": open_item.item["id"], "output_index": open_item.number}
        if open_item.item["type"] in _SAYS:
            return place
        return place | ({"content_index": at} if at >= 0 else {"summary_index": -1 - at})

    def _part(self, open_item: _OpenItem, at: int, kind: str) -> _Part:
        part = open_item.parts.get(at)
        if part is None:
            part = open_item.parts[at] = _Part(kind)
            if kind not in ("function_call", "custom_tool_call"):
                name = "reasoning_summary_part" if at < 0 else "content_part"
                self._emit({"type": f"response.{name}.added", **self._place_of(open_item, at), "part": part.to_json()})
        return part

    def _send_whole(self, open_item: _OpenItem, at: int, part: Item) -> None:
        """Sends a part of a type that a newer version of the API has, so that clients count it."""
        name = "reasoning_summary_part" if at < 0 else "content_part"
        for step in ("added", "done"):
            self._emit({"type": f"response.{name}.{step}", **self._place_of(open_item, at), "part": part})

    def _say(
        self,
        open_item: _OpenItem,
        at: int,
        text: str,
        logprobs: Sequence[Item] = (),
        source_event: Mapping[str, Any] | None = None,
    ) -> None:
        part = open_item.parts[at]
        part.pieces.append(text)
        event = {
            **(source_event or {}),
            "type": f"{_SAYS[part.kind][0]}.delta",
            **self._place_of(open_item, at),
            "delta": text,
        }
        if part.kind == "output_text":
            event["logprobs"] = list(logprobs)
        self._emit(event)

    def _close_part(self, open_item: _OpenItem, at: int) -> None:
        part = open_item.parts[at]
        if part.is_done:
            return
        if part.kind == "function_call" and not part.text:
            self._say(open_item, at, "{}")  # clients expect JSON
        part.is_done = True
        name, field_name = _SAYS[part.kind]
        done_event = {"type": f"{name}.done", **self._place_of(open_item, at), field_name: part.text}
        if part.kind == "output_text":
            done_event["logprobs"] = part.logprobs
        if part.kind == "function_call":
            done_event["name"] = open_item.item["name"]
        self._emit(done_event)
        if part.kind not in ("function_call", "custom_tool_call"):
            name = "reasoning_summary_part" if at < 0 else "content_part"
            self._emit({"type": f"response.{name}.done", **self._place_of(open_item, at), "part": part.to_json()})

    def _close(self, open_item: _OpenItem, final: Item | None = None) -> None:
        if open_item.is_done:
            return
        for at in sorted(open_item.parts):
            self._close_part(open_item, at)
        open_item.item = open_item.to_json("completed") if final is None else final
        if open_item is self._reasoning and self._thought_in is not None and "encrypted_content" not in open_item.item:
            open_item.item = sealed_thought(open_item.item, self._thought_in, self._author)
        open_item.is_done = True
        self._emit({"type": "response.output_item.done", "output_index": open_item.number, "item": open_item.item})

    def _start(self) -> None:
        if not self._in_progress:
            self._in_progress = True
            self._emit({"type": "response.in_progress", "response": pending_response(self._request)})

    def _emit(self, event: ResponseEvent) -> None:
        event["sequence_number"] = self._number
        self._number += 1
        self._events.append(event)

    def _take_events(self) -> list[ResponseEvent]:
        events = self._events
        self._events = []
        return events


_ORDER = (*THOUGHTS, "content", "refusal", "annotations", "tool_calls")


def _reorder(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a choice whose delta has its fields in the order in which models write them."""
    delta = fields(choice.get("delta"))
    return {**choice, "delta": {name: delta[name] for name in _ORDER if name in delta}}


def _place(event: Mapping[str, Any]) -> int:
    index = event.get("content_index")
    summary = event.get("summary_index")
    if str(event.get("type")).startswith("response.reasoning_summary"):
        return -1 - summary if type(summary) is int and summary >= 0 else -1
    return index if type(index) is int and index >= 0 else 0


def _item_type(kind: str) -> str:
    """Returns the type of an item of which the beginning was missed, from an event about it."""
    part_kind = _OF_DELTA.get(kind)
    if part_kind in ("function_call", "custom_tool_call"):
        return part_kind
    return "reasoning" if "reasoning" in kind else "message"


def _call_fields(call: Mapping[str, Any]) -> Mapping[str, Any]:
    return fields(call.get("function" if call.get("custom") is None else "custom"))


def _call_without_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = "function" if call.get("custom") is None else "custom"
    return {"id": call.get("id"), kind: {"name": _call_fields(call).get("name")}}


def _empty(item: Item) -> Item:
    """Returns an item as it begins, without its texts."""
    begun = {**item, **({"status": "in_progress"} if "status" in item else {})}
    kind = item["type"]
    if kind in _SAYS:
        return {**begun, _SAYS[kind][1]: ""}
    lists = [name for name in ("content", "summary") if isinstance(item.get(name), list) and kind in _TEXTUAL]
    return {**begun, **{name: [] for name in lists}}


_TEXTUAL = ("message", "reasoning")


def _parts_of(item: Item) -> Iterable[tuple[int, str, Item]]:
    """Yields the place, type and content of each part of a complete item. A tool call is its own part."""
    kind = item["type"]
    if kind in _SAYS:
        yield 0, kind, item
    elif kind in _TEXTUAL:
        for number, part in enumerate(item.get("summary") or []):
            yield -1 - number, part["type"], part
        for number, part in enumerate(item.get("content") or []):
            yield number, part["type"], part
