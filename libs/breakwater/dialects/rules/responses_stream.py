"""The events of a streamed Response: those of its provider, and those that a chat's chunks come to, as one stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from breakwater.dialects.rules.chat_chunks import Assembly, Chunk, rest_of
from breakwater.dialects.rules.chat_completions import completion_of, first_choice, is_overflow
from breakwater.dialects.rules.provider_state import AUTHOR, CarriedState, state_of_calls
from breakwater.dialects.rules.responses_answer import (
    THOUGHTS,
    Asked,
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
from breakwater.jobs.rules.chat_messages import THOUGHT, encoded, fields, is_end, objects
from breakwater.kernel.errors import BreakwaterError

ResponseEvent = dict[str, Any]

_LIFE = frozenset(
    f"response.{state}" for state in ("created", "queued", "in_progress", "completed", "incomplete", "failed")
)
"""Events about the response as a whole, which the plane says itself."""

_SAYS: Mapping[str, tuple[str, str]] = {
    "output_text": ("response.output_text", "text"),
    "refusal": ("response.refusal", "refusal"),
    "reasoning_text": ("response.reasoning_text", "text"),
    "summary_text": ("response.reasoning_summary_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
"""By the type of a part, or of a tool call: the beginning of its events' names, and the field with its text."""
_OF_ITEM: Mapping[str, tuple[str, ...]] = {
    "message": ("output_text", "refusal"),
    "reasoning": ("reasoning_text", "summary_text"),
    "function_call": ("function_call",),
    "custom_tool_call": ("custom_tool_call",),
}
"""Parts of items, by their type."""
_DONE = frozenset(name for name, _ in _SAYS.values())
_INDEXED = frozenset({"output_item", "content_part", "reasoning_summary_part", *(name.split(".")[1] for name in _DONE)})
"""Kinds of events that are about an item."""
_OF_DELTA = {f"{name}.delta": kind for kind, (name, _) in _SAYS.items()} | {
    "response.reasoning.delta": "reasoning_text"
}
_FIELDS = {"output_text": "content", "refusal": "refusal"}
_ENDS = {"completed": "response.completed", "incomplete": "response.incomplete"}


class ContradictionError(BreakwaterError):
    """Another answer decided the job than the one that was begun in the stream."""


def event_bytes(event: ResponseEvent) -> bytes:
    """An event as one of a server-sent stream."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encoded(event))


@dataclass(slots=True)
class _Part:
    """A text of an item, while it is said: of a message's content, of reasoning, or of a tool call."""

    kind: str
    pieces: list[str] = field(default_factory=list[str])
    annotations: list[Item] = field(default_factory=list[Item])
    logprobs: list[Item] = field(default_factory=list[Item])
    done: bool = False

    @property
    def text(self) -> str:
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def whole(self) -> Item:
        part: Item = {"type": self.kind, _SAYS[self.kind][1]: self.text}
        if self.kind == "output_text":
            part |= {"annotations": [*self.annotations], "logprobs": [*self.logprobs]}
        return part


@dataclass(slots=True)
class _OpenItem:
    """An item, while it is said. `parts`: of its content; of its summary at negative numbers from -1 on."""

    number: int
    item: Item
    parts: dict[int, _Part] = field(default_factory=dict[int, _Part])
    done: bool = False

    def whole(self, status: str) -> Item:
        if self.done or not self.parts:
            return self.item
        item = {**self.item, "status": status} if "status" in self.item else dict(self.item)
        if (kind := item["type"]) in _SAYS:
            return {**item, _SAYS[kind][1]: self.parts[0].text}
        content = [part.whole() for number, part in sorted(self.parts.items()) if number >= 0]
        summary = [part.whole() for number, part in sorted(self.parts.items(), reverse=True) if number < 0]
        return {**item, **({"content": content} if content else {}), **({"summary": summary} if summary else {})}


class ResponseEvents:
    """The events of one response, numbered from 0.

    The same request, chunks and result make the same events, in whatever portions the chunks come: a stream can be
    read again from any event.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._number = 0
        self._ended = False
        self._items: list[_OpenItem] = []
        self._of_provider: dict[int, _OpenItem] = {}
        """Items by their index at the provider, of the attempt that sends its events."""
        self._reasoning: _OpenItem | None = None
        self._message: _OpenItem | None = None
        self._calls: dict[int, _OpenItem] = {}
        self._thought_in: str | None = None
        self._author: Any = None
        self._state = CarriedState()
        self._notes: list[Item] = []
        """Annotations that came before their text."""
        self._in_progress = False
        self._out: list[ResponseEvent] = []

    def begin(self) -> list[ResponseEvent]:
        """The events at the acceptance of the job."""
        first = "queued" if self._asked.background else "in_progress"
        self._emit({"type": "response.created", "response": pending_response(self._asked, first)})
        if self._asked.background:
            self._emit({"type": "response.queued", "response": pending_response(self._asked, first)})
        else:
            self._start()
        return self._taken()

    def add(self, chunk: Chunk) -> list[ResponseEvent]:
        """The events of the next chunk."""
        self._start()
        self._author = chunk.get(AUTHOR) or self._author
        if event := fields(chunk.get("event")):
            self._pass_on(event)
        else:
            self._add_chunk(chunk)
        return self._taken()

    def end(self, result: Mapping[str, Any], *, whole: bool = True) -> list[ResponseEvent]:
        """The missing rest of the answer, and the last event.

        Args:
            result: a `Result`, as JSON.
            whole: all chunks were added.

        Raises:
            ContradictionError: the result is another answer.
        """
        self._start()
        if result["status"] == "succeeded":
            self._catch_up(result, whole=whole)
        output = [item.whole("completed") for item in self._items]
        response = response_of(self._asked, result, output)
        if is_overflow(result):
            # As OpenAI's stream has it: its SDKs raise the one, and Codex reads the other.
            named = {**response["error"], "param": "input"}
            self._emit({"type": "error", **named, "error": {"type": "invalid_request_error", **named}})
        self._emit({"type": _ENDS.get(response["status"], "response.failed"), "response": response})
        return self._taken()

    def error(self, code: str, message: str) -> list[ResponseEvent]:
        """The last event of a stream that ends without its result.

        OpenAI's SDKs read the fields; they raise an error, as Open Responses has it, only where the event has one.
        """
        named = {"code": code, "message": message, "param": None}
        self._emit({"type": "error", **named, "error": {"type": "server_error", **named}})
        return self._taken()

    def _catch_up(self, result: Mapping[str, Any], *, whole: bool) -> None:
        if native_response(result) is not None:
            output = output_of(self._asked.job_id, result)
            if len(self._items) > len(output):
                raise ContradictionError
            for number, item in enumerate(output):
                known = self._items[number] if number < len(self._items) else self._open(_empty(item))
                self._complete(known, item)
            return
        completion = completion_of(result)
        self._author = self._author or fields(result.get("response")).get(AUTHOR)
        if not (whole and self._ended):
            rest = rest_of(completion, self._said())
            if rest is None:
                raise ContradictionError
            for chunk in rest:
                for choice in chunk["choices"]:
                    self._state.add(fields(choice.get("delta")))
                self._add_chunk({**chunk, "choices": [_ordered(one) for one in chunk["choices"]]})
        for item in self._items:
            self._close(item)
        token = state_of_calls(self._author, fields(first_choice(completion).get("message")))
        if token is not None and all(item.item.get("encrypted_content") != token for item in self._items):
            self._carry(token)

    def _complete(self, known: _OpenItem, whole: Item) -> None:
        """Says what is missing of an item. Raises ContradictionError: another one was begun."""
        if known.item["type"] != whole["type"]:
            raise ContradictionError
        kept = {name: known.item[name] for name in ("id", "call_id") if name in known.item}
        whole, texts = {**whole, **kept}, list(_texts_of(whole))
        said = {at: known.parts[at].text for at, _, _ in texts if at in known.parts}
        if len(said) < len(known.parts) or any(
            not part[_SAYS[kind][1]].startswith(said.get(at, ""))
            or (
                at in said
                and (known.parts[at].kind != kind or (known.parts[at].done and said[at] != part[_SAYS[kind][1]]))
            )
            for at, kind, part in texts
        ):
            raise ContradictionError
        if known.done:
            return
        for at, kind, part in texts:
            so_far = self._part(known, at, kind)
            if kind == "output_text":
                so_far.annotations = part["annotations"]
                so_far.logprobs = part["logprobs"]
            if rest := part[_SAYS[kind][1]][len(said.get(at, "")) :]:
                self._say(known, at, rest)
        self._close(known, whole)

    # Events of the provider

    def _pass_on(self, event: Mapping[str, Any]) -> None:
        """Says what an event of the provider says, in this stream's numbers. What can't be read is left out."""
        kind = event.get("type")
        index = event.get("output_index")
        if not isinstance(kind, str) or not kind.startswith("response.") or kind in _LIFE:
            return
        if type(index) is not int:
            if kind.split(".")[1] not in _INDEXED:
                self._emit({name: value for name, value in event.items() if name != "response_id"})
            return
        known = self._of_provider.get(index)
        item = fields(event.get("item"))
        if known is None:
            given = item if "item" in event else {"id": event.get("item_id"), "type": _item_type(kind)}
            if not isinstance(given.get("type"), str):
                return
            known = self._open(_empty(normalized_item(given, self._asked.job_id, len(self._items))))
            self._of_provider[index] = known
        if not known.done and kind != "response.output_item.added":
            self._pass_on_about(known, kind, event)
        if known.item["type"] == "message":
            self._message = None if known.done else known
        elif known.item["type"] == "reasoning":
            self._reasoning = None if known.done else known

    def _pass_on_about(self, known: _OpenItem, kind: str, event: Mapping[str, Any]) -> None:
        at = _place(event)
        part = fields(event.get("part"))
        name = kind.rpartition(".")[0]
        if kind == "response.output_item.done":
            whole = normalized_item(fields(event.get("item")), self._asked.job_id, known.number)
            if whole.get("type") == known.item["type"]:
                with suppress(ContradictionError):  # the end of the response shows which one it is
                    self._complete(known, whole)
        elif (said := _OF_DELTA.get(kind)) is not None:
            text = event.get("delta")
            if isinstance(text, str) and text and self._fits(known, at, said):
                logprobs = objects(event.get("logprobs") or [])
                self._part(known, at, said).logprobs += logprobs
                self._say(known, at, text, logprobs, event)
        elif kind in ("response.content_part.added", "response.reasoning_summary_part.added"):
            if self._fits(known, at, str(part.get("type"))):
                self._part(known, at, str(part.get("type")))
        elif name in _DONE or kind.endswith("_part.done"):
            if at in known.parts:
                self._close_part(known, at)
        elif kind == "response.output_text.annotation.added":
            so_far = known.parts.get(at)
            noted = fields(event.get("annotation"))
            if noted and so_far is not None and so_far.kind == "output_text" and not so_far.done:
                place = {**event, **self._place_of(known, at), "annotation_index": len(so_far.annotations)}
                so_far.annotations.append(dict(noted))
                self._emit(place)
        else:
            self._emit({**event, "output_index": known.number, "item_id": known.item["id"]})

    def _fits(self, known: _OpenItem, at: int, kind: str) -> bool:
        """True if an item may have a part of a type at a place, as what was begun there, or as the next one."""
        if kind not in _OF_ITEM.get(known.item["type"], ()) or (at < 0) != (kind == "summary_text"):
            return False
        if (part := known.parts.get(at)) is not None:
            return part.kind == kind and not part.done
        return at == (0 if at >= 0 else -1) or (at - 1 if at > 0 else at + 1) in known.parts

    # Chunks of a chat

    def _add_chunk(self, chunk: Chunk) -> None:
        for choice in objects(chunk.get("choices") or []):
            if (choice.get("index") or 0) == 0:
                if self._author is not None:
                    self._state.add(fields(choice.get("delta")))
                self._add_delta(fields(choice.get("delta")), choice.get("logprobs"))
                self._ended = self._ended or is_end(choice.get("finish_reason"))

    def _said(self) -> Assembly:
        """All that was said, as a chat's message."""
        said = Assembly()
        delta = dict[str, Any]()
        calls = list[dict[str, Any]]()
        for item in self._items:
            if (kind := item.item["type"]) in _SAYS:
                name = "function" if kind == "function_call" else "custom"
                called = {"name": item.item["name"], _SAYS[kind][1]: item.parts[0].text if item.parts else ""}
                calls.append({"index": len(calls), "id": item.item["call_id"], "type": name, name: called})
                continue
            for part in item.parts.values():
                name = _FIELDS.get(part.kind) or self._thought_in or THOUGHT
                delta[name] = delta.get(name, "") + part.text
        if delta or calls:
            said.add({"choices": [{"index": 0, "delta": {**delta, **({"tool_calls": calls} if calls else {})}}]})
        return said

    def _add_delta(self, delta: Mapping[str, Any], logprobs: Any) -> None:
        for name, value in delta.items():
            copied = name == "reasoning" and self._thought_in != name and value == delta.get(THOUGHT)
            if not value or copied:
                continue
            if name == "content" and isinstance(value, str):
                message, at = self._text("output_text")
                more = log_probabilities(logprobs) if logprobs else []
                message.parts[at].logprobs += more
                self._say(message, at, value, more)
            elif name == "refusal" and isinstance(value, str):
                self._say(*self._text("refusal"), value)
            elif name in THOUGHTS and isinstance(value, str):
                self._think(name, value)
            elif name == "tool_calls":
                for call in objects(value):
                    self._call(call)
            elif name == "annotations":
                self._notes += [note for one in objects(value) if (note := annotation(one)) is not None]
        if self._notes and self._message is not None:
            self._annotate(self._message)

    def _text(self, kind: str) -> tuple[_OpenItem, int]:
        """The message, and its part that goes on, or a new one."""
        message = self._message
        if message is None:
            self._close_texts()
            message = self._message = self._open(message_item(self._new_id("msg"), [], "in_progress"))
        at = len(message.parts) - 1
        if at >= 0 and not (part := message.parts[at]).done and part.kind == kind:
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

    def _call(self, given: Mapping[str, Any]) -> None:
        index = given.get("index")
        number = index if isinstance(index, int) else len(self._calls)
        known = self._calls.get(number)
        if known is None:
            self._close_texts()
            if not self._calls and (token := self._state.token(self._author)) is not None:
                self._carry(token)
            empty = call_item(_call_without_text(given), self._asked.job_id, len(self._items), "in_progress")
            known = self._calls[number] = self._open(empty)
        elif not known.item["name"] and (name := _called(given).get("name")):
            known.item = {**known.item, "name": name}
        self._part(known, 0, known.item["type"])
        if text := _called(given).get(_SAYS[known.item["type"]][1]):
            self._say(known, 0, str(text))

    def _carry(self, token: str) -> None:
        """Sends an item with what the author of the calls wants back with them."""
        item = state_item(token, self._asked.job_id, len(self._items))
        self._close(self._open(_empty(item)), item)

    def _annotate(self, message: _OpenItem) -> None:
        at = next((number for number, one in reversed(message.parts.items()) if one.kind == "output_text"), None)
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
        """Ends what is said when something else begins. Tool calls may go on until the end."""
        for item in (self._reasoning, self._message):
            if item is not None:
                self._close(item)
        self._reasoning = self._message = None

    # Items

    def _new_id(self, kind: str) -> str:
        return item_id(self._asked.job_id, kind, len(self._items))

    def _opened(self, item: Item) -> _OpenItem:
        known = _OpenItem(len(self._items), item)
        self._items.append(known)
        return known

    def _open(self, item: Item) -> _OpenItem:
        known = self._opened(item)
        self._emit({"type": "response.output_item.added", "output_index": known.number, "item": item})
        return known

    def _place_of(self, known: _OpenItem, at: int) -> ResponseEvent:
        place = {"item_id": known.item["id"], "output_index": known.number}
        if known.item["type"] in _SAYS:
            return place
        return place | ({"content_index": at} if at >= 0 else {"summary_index": -1 - at})

    def _part(self, known: _OpenItem, at: int, kind: str) -> _Part:
        part = known.parts.get(at)
        if part is None:
            part = known.parts[at] = _Part(kind)
            if kind not in ("function_call", "custom_tool_call"):
                name = "reasoning_summary_part" if at < 0 else "content_part"
                self._emit({"type": f"response.{name}.added", **self._place_of(known, at), "part": part.whole()})
        return part

    def _say(
        self,
        known: _OpenItem,
        at: int,
        text: str,
        logprobs: Sequence[Item] = (),
        given: Mapping[str, Any] | None = None,
    ) -> None:
        part = known.parts[at]
        part.pieces.append(text)
        event = {**(given or {}), "type": f"{_SAYS[part.kind][0]}.delta", **self._place_of(known, at), "delta": text}
        if part.kind == "output_text":
            event["logprobs"] = list(logprobs)
        self._emit(event)

    def _close_part(self, known: _OpenItem, at: int) -> None:
        part = known.parts[at]
        if part.done:
            return
        if part.kind == "function_call" and not part.text:
            self._say(known, at, "{}")  # clients expect JSON
        part.done = True
        name, field_name = _SAYS[part.kind]
        done = {"type": f"{name}.done", **self._place_of(known, at), field_name: part.text}
        if part.kind == "output_text":
            done["logprobs"] = part.logprobs
        if part.kind == "function_call":
            done["name"] = known.item["name"]
        self._emit(done)
        if part.kind not in ("function_call", "custom_tool_call"):
            name = "reasoning_summary_part" if at < 0 else "content_part"
            self._emit({"type": f"response.{name}.done", **self._place_of(known, at), "part": part.whole()})

    def _close(self, known: _OpenItem, whole: Item | None = None) -> None:
        if known.done:
            return
        for at in sorted(known.parts):
            self._close_part(known, at)
        known.item = known.whole("completed") if whole is None else whole
        if known is self._reasoning and self._thought_in is not None and "encrypted_content" not in known.item:
            known.item = sealed_thought(known.item, self._thought_in, self._author)
        known.done = True
        self._emit({"type": "response.output_item.done", "output_index": known.number, "item": known.item})

    def _start(self) -> None:
        if not self._in_progress:
            self._in_progress = True
            self._emit({"type": "response.in_progress", "response": pending_response(self._asked)})

    def _emit(self, event: ResponseEvent) -> None:
        event["sequence_number"] = self._number
        self._number += 1
        self._out.append(event)

    def _taken(self) -> list[ResponseEvent]:
        out = self._out
        self._out = []
        return out


_ORDER = (*THOUGHTS, "content", "refusal", "annotations", "tool_calls")


def _ordered(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """A choice whose delta has its fields in the order in which a model says them."""
    delta = fields(choice.get("delta"))
    return {**choice, "delta": {name: delta[name] for name in _ORDER if name in delta}}


def _place(event: Mapping[str, Any]) -> int:
    index = event.get("content_index")
    summary = event.get("summary_index")
    if str(event.get("type")).startswith("response.reasoning_summary"):
        return -1 - summary if type(summary) is int and summary >= 0 else -1
    return index if type(index) is int and index >= 0 else 0


def _item_type(kind: str) -> str:
    """The type of an item that was never begun, by an event about it."""
    said = _OF_DELTA.get(kind)
    if said in ("function_call", "custom_tool_call"):
        return said
    return "reasoning" if "reasoning" in kind else "message"


def _called(call: Mapping[str, Any]) -> Mapping[str, Any]:
    return fields(call.get("function" if call.get("custom") is None else "custom"))


def _call_without_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = "function" if call.get("custom") is None else "custom"
    return {"id": call.get("id"), kind: {"name": _called(call).get("name")}}


def _empty(item: Item) -> Item:
    """An item as it begins."""
    begun = {**item, **({"status": "in_progress"} if "status" in item else {})}
    kind = item["type"]
    if kind in _SAYS:
        return {**begun, _SAYS[kind][1]: ""}
    lists = [name for name in ("content", "summary") if isinstance(item.get(name), list) and kind in _TEXTUAL]
    return {**begun, **{name: [] for name in lists}}


_TEXTUAL = ("message", "reasoning")


def _texts_of(item: Item) -> Iterable[tuple[int, str, Item]]:
    """The texts of a whole item: their places, types and parts; a tool call is its own part."""
    kind = item["type"]
    if kind in _SAYS:
        yield 0, kind, item
    elif kind in _TEXTUAL:
        for number, part in enumerate(item.get("summary") or []):
            yield -1 - number, part["type"], part
        for number, part in enumerate(item.get("content") or []):
            yield number, part["type"], part
