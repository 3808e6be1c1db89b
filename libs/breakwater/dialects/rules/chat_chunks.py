"""Streamed answers: assembling OpenAI's chunks, sending the missing rest, and joining an answer that was cut off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

from breakwater.jobs.rules.chat_messages import (
    INTERRUPTED,
    ORDER,
    OTHERS,
    THOUGHT,
    arguments_text,
    call_id,
    finish_reason,
    generated_call_id,
    is_end,
    known_reason,
    objects,
    parts_of,
)
from breakwater.kernel.surrogates import whole_escapes
from breakwater.prices.rules.usage import highest

Chunk = Mapping[str, Any]

OBJECT = "chat.completion.chunk"

_NOT_HEAD = frozenset({"choices", "event", "object", "usage"})
_NOT_MORE = frozenset({"index", "delta", "message"})
_PIECE = frozenset({"index", "function"})
_OF_CALL = frozenset({"index", "id", "type", "function", "name", "arguments"})
_GROWING = frozenset({"arguments", "data", "input", "transcript"})
"""Texts in parts of a delta that arrive in pieces, of which two may be equal. Other equal texts are repetitions."""
_TEXTS = frozenset({"content", "refusal", "reasoning", THOUGHT})
_THOUGHTS = (THOUGHT, "reasoning")
_SPOKEN = {THOUGHT: 0, "reasoning": 0, "content": 1, "refusal": 2, "tool_calls": 3}
"""Ranks of a message's fields in the default order."""


class Assembly:
    """Assembles the chunks of an answer, whatever their shape.

    Attributes:
        chunks: the number of chunks that had content.
        length: the number of characters so far.
    """

    def __init__(self, seed: str = "") -> None:
        """Begins an answer. `seed` is the execution's id, for tool calls without ids (see `generated_call_id`)."""
        self.chunks = 0
        self.length = 0
        self._seed = seed
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _ChoiceSoFar] = {}

    def add(self, chunk: Chunk) -> Chunk:
        """Takes the next chunk. Returns it as clients get it; the same object if nothing needs to change.

        Clients get choices with an index and a delta each, the role once, as OpenAI's SDKs join roles like texts, and
        texts as texts. Of each tool call they get an index of its own, its id and name once, and its arguments as text.
        A finish reason for an unusable answer is left out.
        """
        head = self._head
        choices = self._choices
        before = self.length
        for name, value in chunk.items():
            if value is not None and name not in _NOT_HEAD:
                head[name] = value
        if (usage := chunk.get("usage")) is not None:
            head["usage"] = highest(head.get("usage"), usage)
        reported: Any = chunk.get("choices")
        parts: list[dict[str, Any]] = reported if isinstance(reported, list) else []
        sent: list[dict[str, Any]] = []
        for part in parts:
            if type(part) is not dict:
                continue
            index: Any = part.get("index")
            number: int = index if isinstance(index, int) else 0
            choice = choices.get(number)
            if choice is None:
                choice = choices[number] = _ChoiceSoFar(self._seed, number)
            length_before = choice.length
            client_choice = choice.add(part)
            self.length += choice.length - length_before
            sent.append(client_choice if index is number else {**client_choice, "index": number})
        if self.length > before:
            self.chunks += 1
        return chunk if sent == reported else {**chunk, "choices": sent}

    @property
    def finished(self) -> bool:
        """Returns True if each choice has a finish reason."""
        return bool(self._choices) and all(choice.finish_reason is not None for choice in self._choices.values())

    @property
    def head(self) -> Mapping[str, Any]:
        """The fields of the chunks other than their choices, such as id and model."""
        return self._head

    @property
    def usage(self) -> Mapping[str, Any] | None:
        """The usage as it was reported; None without one."""
        usage = self._head.get("usage")
        return cast(Mapping[str, Any], usage) if isinstance(usage, dict) else None

    def messages(self) -> dict[int, dict[str, Any]]:
        """Returns the message of each choice, as far as it has arrived."""
        return {index: choice.message() for index, choice in sorted(self._choices.items())}

    def completion(self) -> dict[str, Any]:
        """Returns the chunks as one `chat.completion`."""
        choices = [
            {
                "index": index,
                **choice.more,
                "message": choice.message(),
                "finish_reason": choice.finish_reason,
                **choice.order(),
            }
            for index, choice in sorted(self._choices.items())
        ]
        return {**self._head, "object": "chat.completion", "choices": choices}

    def finish_reason(self, index: int) -> str | None:
        """Returns the reason why a choice ended; None if it has not."""
        return self._choices[index].finish_reason if index in self._choices else None


class _ChoiceSoFar:
    def __init__(self, seed: str, index: int) -> None:
        self.finish_reason: str | None = None
        self.more: dict[str, Any] = {}
        self.length = 0
        self._seed = seed
        self._index = index
        self._has_role = False
        self._texts: dict[str, list[str]] = {}
        self._fields: dict[str, Any] = {}
        self._calls: list[_ToolCall] = []
        self._call_by_key: dict[Any, _ToolCall] = {}
        """The latest call at each index; and each call by each of its ids, with and without its index."""
        self._ids: set[str] = set()
        self._last = ""
        self._thought_in: str | None = None
        self._turns: list[tuple[str, int]] = []
        self._counted: dict[str, tuple[int, int]] = {}
        """By field: the number of its pieces whose characters are counted, and their characters."""

    def add(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Takes a choice of a chunk. Returns it as clients get it."""
        delta: dict[str, Any] = choice.get("delta", {})
        if type(delta) is not dict or "delta" not in choice:
            # Some servers send the whole answer in one event.
            delta = objects([choice.get("message"), {}])[0]
            choice = {**choice, "delta": delta}
        for name, value in delta.items():
            if value is None:
                continue
            if name == "role":
                if self._has_role:
                    choice = {**choice, "delta": _replace_field(choice["delta"], name, {})}
                self._has_role = True
            elif isinstance(value, str) and name != "tool_calls":
                if name != self._last and value and not self._is_copy(name, delta):
                    self._turn_to(name)
                self._say(name, value)
            elif (replacement := self._add_other(name, value)) is not None:
                choice = {**choice, "delta": _replace_field(choice["delta"], name, replacement)}
        for name, value in choice.items():
            if value is None or name in _NOT_MORE:
                continue
            if name != "finish_reason":
                self.more[name] = _merge(self.more.get(name), value)
                continue
            if is_end(value):
                self.finish_reason = value
            client_reason = (
                None if finish_reason(value) in INTERRUPTED else known_reason(value, called=bool(self._calls))
            )
            if client_reason != value:
                choice = {**choice, name: client_reason}
        return choice

    def _add_other(self, name: str, value: Any) -> dict[str, Any] | None:
        """Takes a field of a delta that is not a text. Returns the fields that replace it for clients; None if none."""
        if name == "tool_calls":
            calls = [self._add_call(number, call) for number, call in enumerate(objects(value))]
            return None if calls == value else {name: calls}
        if name not in _TEXTS:
            if value:
                self._merge_field(name, value)
            return None
        text, thought, other_parts = parts_of(value)
        if name != "content":
            text = thought + text
            thought = ""
        replacement: dict[str, Any] = {**({THOUGHT: thought} if thought else {}), name: text}
        for field_name, field_text in replacement.items():
            if field_text and field_name != self._last:
                self._turn_to(field_name)
            self._say(field_name, field_text)
        if other_parts:
            self._merge_field(OTHERS, other_parts)
            replacement[OTHERS] = other_parts
        return replacement

    def _say(self, name: str, text: str) -> None:
        texts = self._texts.get(name)
        if texts is None:
            texts = self._texts[name] = []
        texts.append(text)
        self.length += len(text)

    def _is_copy(self, name: str, delta: Mapping[str, Any]) -> bool:
        """Returns True for a second copy of thinking, which some servers send under both of its names."""
        return name == "reasoning" and self._thought_in != name and delta[name] == delta.get(THOUGHT)

    def _turn_to(self, name: str) -> None:
        """Notes that another field of the message continues from here on."""
        if name in _THOUGHTS:
            self._thought_in = self._thought_in or name
        if name not in _SPOKEN or (name in _THOUGHTS and name != self._thought_in):
            return
        if name == "tool_calls":
            start = len(self._calls)
        else:
            pieces, characters = self._counted.get(name, (0, 0))
            texts = self._texts.get(name, [])
            start = characters + sum(map(len, texts[pieces:]))
            self._counted[name] = (len(texts), start)
        self._turns.append((name, start))
        self._last = name

    def order(self) -> dict[str, Any]:
        """Returns the order in which the model wrote the message; empty for the default order."""
        ranks = [_SPOKEN[name] for name, _ in self._turns]
        is_default = ranks == sorted(set(ranks)) and not all(self._texts.get(name) for name in _THOUGHTS)
        return {} if is_default else {ORDER: [list(turn) for turn in self._turns]}

    def _merge_field(self, name: str, value: Any) -> None:
        self._fields[name] = _merge(self._fields.get(name), value)
        self.length += 1

    def _add_call(self, position: int, piece: dict[str, Any]) -> dict[str, Any]:
        """Takes a piece of a tool call. Returns it as clients get it."""
        function: Any = piece.get("function")
        if not isinstance(function, dict):
            function = {} if piece.get("custom") is not None else piece
        name = function.get("name")
        arguments = function.get("arguments")
        name = name if isinstance(name, str) and name else None
        text = arguments_text(arguments)
        call = self._open_call(position, piece, name, text)
        is_new = call is None
        if call is None:
            call = self._begin(position, piece)
        elif name is None and piece.keys() <= _PIECE and piece.get("index") == call.number and arguments is text:
            call.arguments.append(text)
            self.length += len(text)
            return piece
        extra = {key: value for key, value in piece.items() if key not in _OF_CALL}
        client_piece: dict[str, Any] = {"index": call.number, **extra}
        if is_new:
            client_piece |= {"id": self._client_id(call), "type": call.type}
        client_function: dict[str, Any] = {"arguments": text}
        if call.name is None and name is not None:
            call.name = client_function["name"] = name
        if "custom" not in piece:
            client_piece["function"] = client_function
        for key, value in extra.items():
            call.more[key] = _merge(call.more.get(key), value)
        if arguments not in (None, ""):
            call.arguments.append(arguments)
        self.length += len(text) + len(client_function.get("name", "")) + bool(extra)
        return client_piece

    def _open_call(self, position: int, piece: dict[str, Any], name: str | None, text: str) -> _ToolCall | None:
        """Returns the call that a piece continues; None if the piece begins a call.

        Some providers number all parallel calls 0, some repeat a call's name in each piece, and some change its id.
        """
        index = piece.get("index")
        piece_id = call_id(piece.get("id"))
        index = index if isinstance(index, int) else None
        call = None if piece_id is None else self._call_by_key.get((index, piece_id))
        call = call or self._call_by_key.get(position if index is None else index)
        if call is None:
            return None
        if name is not None and call.name is not None:
            known_id = call_id(call.id) or call.late_id
            if (piece_id is not None and known_id is not None and piece_id != known_id) or name != call.name:
                return None
            if text.startswith("{") and call.is_whole:
                return None
        if call.id is None:
            # The client has a generated id already.
            call.late_id = piece_id
        if piece_id is not None:
            self._call_by_key[index, piece_id] = self._call_by_key[None, piece_id] = call
        return call

    def _begin(self, position: int, piece: dict[str, Any]) -> _ToolCall:
        index = piece.get("index")
        piece_id = call_id(piece.get("id"))
        index = index if isinstance(index, int) else None
        if self._last != "tool_calls":
            self._turn_to("tool_calls")
        kind = piece.get("type")
        call = _ToolCall(len(self._calls), piece.get("id"), kind if isinstance(kind, str) and kind else "function")
        self._calls.append(call)
        self._call_by_key[position if index is None else index] = call
        if piece_id is not None:
            self._call_by_key[index, piece_id] = self._call_by_key[None, piece_id] = call
        return call

    def _client_id(self, call: _ToolCall) -> str:
        client_id = call_id(call.id)
        if client_id is None or client_id in self._ids:
            client_id = generated_call_id(self._seed, self._index, call.number)
        self._ids.add(client_id)
        return client_id

    def message(self) -> dict[str, Any]:
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, **texts, **self._fields}
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [call.to_json() for call in self._calls]
        return message


def _replace_field(delta: Mapping[str, Any], name: str, replacements: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a delta with other fields in the place of one, as the order of fields says what came first."""
    return {
        key: field_value
        for field_name, value in delta.items()
        for key, field_value in (replacements if field_name == name else {field_name: value}).items()
    }


@dataclass(slots=True)
class _ToolCall:
    number: int
    id: Any
    type: str
    name: str | None = None
    late_id: str | None = None
    arguments: list[Any] = field(default_factory=list[Any])
    more: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_whole(self) -> bool:
        """Returns True if the arguments are a complete object. A search for `}{` would not do: texts may contain it."""
        text = "".join(map(arguments_text, self.arguments))
        try:
            return isinstance(orjson.loads(whole_escapes(text)), dict)
        except orjson.JSONDecodeError:
            return False

    def to_json(self) -> dict[str, Any]:
        """Returns the call, with its arguments as they were sent."""
        call = {**({} if self.id is None else {"id": self.id}), "type": self.type, **self.more}
        if call.get("custom") is not None and self.name is None:
            return call
        call.pop("custom", None)  # some servers write all fields, even for a function
        parts = self.arguments
        arguments = parts[0] if len(parts) == 1 else "".join(map(arguments_text, parts))
        name_field = {} if self.name is None else {"name": self.name}
        return {**call, "function": {**name_field, "arguments": arguments}}


def _merge(merged: Any, value: Any, name: str = "") -> Any:
    """Merges two parts of a value such as audio, log probabilities or details of reasoning."""
    if isinstance(merged, list) and isinstance(value, list):
        return cast(list[Any], merged) + cast(list[Any], value)
    if isinstance(merged, dict) and isinstance(value, dict):
        merged_fields = cast(dict[str, Any], merged)
        new_fields = cast(dict[str, Any], value)
        return {
            **merged_fields,
            **{key: _merge(merged_fields.get(key), new_value, key) for key, new_value in new_fields.items()},
        }
    if isinstance(merged, str) and isinstance(value, str) and (merged != value or name in _GROWING):
        return merged + value
    return merged if value is None else value


def missing_chunks_of(completion: Mapping[str, Any], sent: Assembly) -> list[dict[str, Any]] | None:
    """Returns the chunks of a whole answer that are still to be sent; None if another answer was sent.

    Args:
        completion: the whole answer.
        sent: the chunks that were sent; an empty assembly for an answer that was not streamed.
    """
    head = {name: value for name, value in completion.items() if name not in {"choices", "object", "usage"}}
    head = {**head, **{name: value for name, value in sent.head.items() if name != "usage"}, "object": OBJECT}
    sent_messages = sent.messages()
    chunks = list[dict[str, Any]]()
    for choice in cast(Sequence[dict[str, Any]], completion["choices"]):
        index = int(choice.get("index") or 0)
        delta = _missing(choice["message"], sent_messages.get(index))
        if delta is None:
            return None
        logprobs_field = {} if index in sent_messages else {"logprobs": choice.get("logprobs")}
        if delta:
            chunks.append(
                {**head, "choices": [{"index": index, "delta": delta, "finish_reason": None, **logprobs_field}]}
            )
        if sent.finish_reason(index) is None:
            reason = choice.get("finish_reason") or "stop"
            chunks.append({**head, "choices": [{"index": index, "delta": {}, "finish_reason": reason}]})
    return chunks


def _missing(final_message: Mapping[str, Any], sent_message: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns the part of a message that was not sent yet, as a delta; None if another message was begun."""
    if sent_message is None:
        calls = _number(final_message.get("tool_calls") or (), 0)
        return {**final_message, **({"tool_calls": calls} if calls else {})}
    delta: dict[str, Any] = {}
    for name in final_message.keys() | sent_message.keys():
        final = final_message.get(name)
        sent_value = sent_message.get(name)
        if final == sent_value or name == "role":
            continue
        if name == "tool_calls":
            calls = _missing_calls(final or (), sent_value or ())
            if calls is None:
                return None
            delta[name] = calls
        elif isinstance(final, str) and final.startswith(sent_value or ""):
            delta[name] = final[len(sent_value or "") :]
        elif sent_value:
            return None
        elif final is not None:
            delta[name] = final
    return delta


def _missing_calls(
    final_calls: Sequence[dict[str, Any]], sent_calls: Sequence[dict[str, Any]]
) -> list[dict[str, Any]] | None:
    if len(sent_calls) > len(final_calls):
        return None
    missing: list[dict[str, Any]] = []
    for index, (final_call, sent_call) in enumerate(zip(final_calls, sent_calls, strict=False)):
        final_function = final_call.get("function", {})
        sent_function = sent_call.get("function", {})
        final_arguments = final_function.get("arguments", "")
        sent_arguments = sent_function.get("arguments", "")
        if final_function.get("name", "") != sent_function.get("name", "") or not final_arguments.startswith(
            sent_arguments
        ):
            return None
        if final_arguments != sent_arguments:
            missing.append({"index": index, "function": {"arguments": final_arguments[len(sent_arguments) :]}})
    return [*missing, *_number(final_calls[len(sent_calls) :], len(sent_calls))]


def _number(calls: Iterable[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    return [{"index": index, **call} for index, call in enumerate(calls, first)]


MIN_OVERLAP = 8
"""The fewest characters that count as a repetition. A shorter one is often part of the text, such as two line breaks.

If the whole text is shorter, its repetition counts: the model has begun again.
"""

CONTINUE = (
    "Your answer was cut off here. Continue it from exactly where it stopped, beginning with the next character. "
    "Repeat nothing of it, and write nothing about the interruption."
)


class Join:
    """Joins a continuation to a text without repeating it.

    A model that is asked to continue often repeats the last words first, or the whole answer. So the beginning of the
    continuation is held back for as long as it may be a repetition of the end of the text.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._held_text: str | None = ""

    def feed(self, text: str) -> str:
        """Takes the next piece of the continuation. Returns what is certainly new, and holds back the rest."""
        if self._held_text is None:
            return text
        self._held_text += text
        # The held text may repeat the end of the text only if it occurs in it and does not reach its end yet.
        at = self._text.find(self._held_text)
        if at >= 0 and at + len(self._held_text) < len(self._text):
            return ""
        return self.end()

    def end(self) -> str:
        """Returns the new part of the held text, once nothing more comes or the repetition is over."""
        held_text = self._held_text or ""
        self._held_text = None
        longest = min(len(held_text), len(self._text))
        shortest = min(MIN_OVERLAP, len(self._text))
        overlap = next((n for n in range(longest, shortest - 1, -1) if self._text.endswith(held_text[:n])), 0)
        return held_text[overlap:]
