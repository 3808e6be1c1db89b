"""Streamed answers: OpenAI's chunks put together, the rest of a whole answer, and seams of answers that broke off."""

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
    is_end,
    known_reason,
    made_call_id,
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
"""Texts in parts of a delta that come in pieces, of which two may be equal. Other texts are only repeated."""
_TEXTS = frozenset({"content", "refusal", "reasoning", THOUGHT})
_THOUGHTS = (THOUGHT, "reasoning")
_SPOKEN = {THOUGHT: 0, "reasoning": 0, "content": 1, "refusal": 2, "tool_calls": 3}
"""Fields of a message by their default order."""


class Assembly:
    """The chunks of an answer so far, of any shape.

    Attributes:
        chunks: how many of them had content.
        length: characters of what was said.
    """

    def __init__(self, seed: str = "") -> None:
        """Begins one. `seed`: of the ids of tool calls that come without, see `made_call_id`."""
        self.chunks = 0
        self.length = 0
        self._seed = seed
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _ChoiceSoFar] = {}

    def add(self, chunk: Chunk) -> Chunk:
        """Takes the next chunk. Returns it as a client is sent it: itself, where nothing is odd about it.

        Sent are choices with an index and a delta each, texts as texts, and of each tool call an index of its own, id
        and name once, and the arguments as text. That an answer is no good is no end of it.
        """
        head = self._head
        choices = self._choices
        before = self.length
        for name, value in chunk.items():
            if value is not None and name not in _NOT_HEAD:
                head[name] = value
        if (usage := chunk.get("usage")) is not None:
            head["usage"] = highest(head.get("usage"), usage)
        given: Any = chunk.get("choices")
        parts: list[dict[str, Any]] = given if isinstance(given, list) else []
        sent: list[dict[str, Any]] = []
        for part in parts:
            if type(part) is not dict:
                continue
            index: Any = part.get("index")
            number: int = index if isinstance(index, int) else 0
            choice = choices.get(number)
            if choice is None:
                choice = choices[number] = _ChoiceSoFar(self._seed, number)
            said = choice.length
            shown = choice.add(part)
            self.length += choice.length - said
            sent.append(shown if index is number else {**shown, "index": number})
        if self.length > before:
            self.chunks += 1
        return chunk if sent == given else {**chunk, "choices": sent}

    @property
    def finished(self) -> bool:
        """True if each choice has said why it ended."""
        return bool(self._choices) and all(choice.finish_reason is not None for choice in self._choices.values())

    @property
    def head(self) -> Mapping[str, Any]:
        """Fields of a chunk other than its choices: id, model and more."""
        return self._head

    @property
    def usage(self) -> Mapping[str, Any] | None:
        """The usage as it was reported."""
        usage = self._head.get("usage")
        return cast(Mapping[str, Any], usage) if isinstance(usage, dict) else None

    def messages(self) -> dict[int, dict[str, Any]]:
        """The message of each choice, as far as it was said."""
        return {index: choice.message() for index, choice in sorted(self._choices.items())}

    def completion(self) -> dict[str, Any]:
        """The `chat.completion` that the chunks come to."""
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
        """The reason why a choice ended."""
        return self._choices[index].finish_reason if index in self._choices else None


class _ChoiceSoFar:
    def __init__(self, seed: str, index: int) -> None:
        self.finish_reason: str | None = None
        self.more: dict[str, Any] = {}
        self.length = 0
        self._seed = seed
        self._index = index
        self._texts: dict[str, list[str]] = {}
        self._fields: dict[str, Any] = {}
        self._calls: list[_ToolCall] = []
        self._known: dict[Any, _ToolCall] = {}
        """The latest call at each index; and each by its index, or none, and its ids."""
        self._ids: set[str] = set()
        self._last = ""
        self._thought_in: str | None = None
        self._turns: list[tuple[str, int]] = []
        self._counted: dict[str, tuple[int, int]] = {}
        """By text: how many of its pieces are counted, and their characters."""

    def add(self, given: dict[str, Any]) -> dict[str, Any]:
        """Takes a choice of a chunk. Returns it as a client is sent it."""
        delta: dict[str, Any] = given.get("delta", {})
        if type(delta) is not dict or "delta" not in given:
            # Some answer whole, in one event.
            delta = objects([given.get("message"), {}])[0]
            given = {**given, "delta": delta}
        for name, value in delta.items():
            if value is None or name == "role":
                continue
            if isinstance(value, str) and name != "tool_calls":
                if name != self._last and value and not self._is_copy(name, delta):
                    self._turn_to(name)
                self._say(name, value)
            elif (shown := self._add_other(name, value)) is not None:
                given = {**given, "delta": _in_place(given["delta"], name, shown)}
        for name, value in given.items():
            if value is None or name in _NOT_MORE:
                continue
            if name != "finish_reason":
                self.more[name] = _merged(self.more.get(name), value)
                continue
            if is_end(value):
                self.finish_reason = value
            known = None if finish_reason(value) in INTERRUPTED else known_reason(value, called=bool(self._calls))
            if known != value:
                given = {**given, name: known}
        return given

    def _add_other(self, name: str, value: Any) -> dict[str, Any] | None:
        """Takes a field of a delta that is no text. Returns what a client is sent instead; None for the same."""
        if name == "tool_calls":
            calls = [self._add_call(number, call) for number, call in enumerate(objects(value))]
            return None if calls == value else {name: calls}
        if name not in _TEXTS:
            if value:
                self._keep(name, value)
            return None
        text, thought, others = parts_of(value)
        if name != "content":
            text = thought + text
            thought = ""
        shown: dict[str, Any] = {**({THOUGHT: thought} if thought else {}), name: text}
        for field_name, said in shown.items():
            if said and field_name != self._last:
                self._turn_to(field_name)
            self._say(field_name, said)
        if others:
            self._keep(OTHERS, others)
            shown[OTHERS] = others
        return shown

    def _say(self, name: str, text: str) -> None:
        texts = self._texts.get(name)
        if texts is None:
            texts = self._texts[name] = []
        texts.append(text)
        self.length += len(text)

    def _is_copy(self, name: str, delta: Mapping[str, Any]) -> bool:
        """True for thinking that some servers send under both of its names."""
        return name == "reasoning" and self._thought_in != name and delta[name] == delta.get(THOUGHT)

    def _turn_to(self, name: str) -> None:
        """Notes that something else is said now."""
        if name in _THOUGHTS:
            self._thought_in = self._thought_in or name
        if name not in _SPOKEN or (name in _THOUGHTS and name != self._thought_in):
            return
        if name == "tool_calls":
            start = len(self._calls)
        else:
            pieces, characters = self._counted.get(name, (0, 0))
            said = self._texts.get(name, [])
            start = characters + sum(map(len, said[pieces:]))
            self._counted[name] = (len(said), start)
        self._turns.append((name, start))
        self._last = name

    def order(self) -> dict[str, Any]:
        """The order in which the message was said, where it is not the default one."""
        ranks = [_SPOKEN[name] for name, _ in self._turns]
        is_default = ranks == sorted(set(ranks)) and not all(self._texts.get(name) for name in _THOUGHTS)
        return {} if is_default else {ORDER: [list(turn) for turn in self._turns]}

    def _keep(self, name: str, value: Any) -> None:
        self._fields[name] = _merged(self._fields.get(name), value)
        self.length += 1

    def _add_call(self, position: int, given: dict[str, Any]) -> dict[str, Any]:
        """Takes a piece of a tool call. Returns it as a client is sent it."""
        function: Any = given.get("function")
        if not isinstance(function, dict):
            function = {} if given.get("custom") is not None else given
        name = function.get("name")
        arguments = function.get("arguments")
        name = name if isinstance(name, str) and name else None
        text = arguments_text(arguments)
        call = self._call_of(position, given, name, text)
        begins = call is None
        if call is None:
            call = self._begin(position, given)
        elif name is None and given.keys() <= _PIECE and given.get("index") == call.number and arguments is text:
            call.arguments.append(text)
            self.length += len(text)
            return given
        more = {key: value for key, value in given.items() if key not in _OF_CALL}
        shown: dict[str, Any] = {"index": call.number, **more}
        if begins:
            shown |= {"id": self._own_id(call), "type": call.type}
        said: dict[str, Any] = {"arguments": text}
        if call.name is None and name is not None:
            call.name = said["name"] = name
        if "custom" not in given:
            shown["function"] = said
        for key, value in more.items():
            call.more[key] = _merged(call.more.get(key), value)
        if arguments not in (None, ""):
            call.arguments.append(arguments)
        self.length += len(text) + len(said.get("name", "")) + bool(more)
        return shown

    def _call_of(self, position: int, given: dict[str, Any], name: str | None, text: str) -> _ToolCall | None:
        """The call that a piece is of; None for one that begins.

        Some makers number all parallel calls 0, some repeat a call's name with each piece, some change its id.
        """
        index = given.get("index")
        own = call_id(given.get("id"))
        index = index if isinstance(index, int) else None
        call = None if own is None else self._known.get((index, own))
        call = call or self._known.get(position if index is None else index)
        if call is None:
            return None
        if name is not None and call.name is not None:
            known = call_id(call.id) or call.late_id
            if (own is not None and known is not None and own != known) or name != call.name:
                return None
            if text.startswith("{") and call.is_whole:
                return None
        if call.id is None:
            # The client has the one that was made of it.
            call.late_id = own
        if own is not None:
            self._known[index, own] = self._known[None, own] = call
        return call

    def _begin(self, position: int, given: dict[str, Any]) -> _ToolCall:
        index = given.get("index")
        own = call_id(given.get("id"))
        index = index if isinstance(index, int) else None
        if self._last != "tool_calls":
            self._turn_to("tool_calls")
        kind = given.get("type")
        call = _ToolCall(len(self._calls), given.get("id"), kind if isinstance(kind, str) and kind else "function")
        self._calls.append(call)
        self._known[position if index is None else index] = call
        if own is not None:
            self._known[index, own] = self._known[None, own] = call
        return call

    def _own_id(self, call: _ToolCall) -> str:
        own = call_id(call.id)
        if own is None or own in self._ids:
            own = made_call_id(self._seed, self._index, call.number)
        self._ids.add(own)
        return own

    def message(self) -> dict[str, Any]:
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, **texts, **self._fields}
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [call.whole() for call in self._calls]
        return message


def _in_place(delta: Mapping[str, Any], name: str, shown: Mapping[str, Any]) -> dict[str, Any]:
    """A delta with other fields in the place of one: their order says what came first."""
    return {
        key: one for given, value in delta.items() for key, one in (shown if given == name else {given: value}).items()
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
        """True if its arguments are an object already. A text in them may have `}{`, too."""
        text = "".join(map(arguments_text, self.arguments))
        try:
            return isinstance(orjson.loads(whole_escapes(text)), dict)
        except orjson.JSONDecodeError:
            return False

    def whole(self) -> dict[str, Any]:
        """The call, with its arguments as they came."""
        call = {**({} if self.id is None else {"id": self.id}), "type": self.type, **self.more}
        if call.get("custom") is not None and self.name is None:
            return call
        call.pop("custom", None)  # of a function: some servers write all fields
        parts = self.arguments
        arguments = parts[0] if len(parts) == 1 else "".join(map(arguments_text, parts))
        named = {} if self.name is None else {"name": self.name}
        return {**call, "function": {**named, "arguments": arguments}}


def _merged(known: Any, value: Any, name: str = "") -> Any:
    """Two parts of a value that is neither text nor a tool call: audio, log probabilities, details of reasoning."""
    if isinstance(known, list) and isinstance(value, list):
        return cast(list[Any], known) + cast(list[Any], value)
    if isinstance(known, dict) and isinstance(value, dict):
        both = cast(dict[str, Any], known)
        more = cast(dict[str, Any], value)
        return {**both, **{key: _merged(both.get(key), one, key) for key, one in more.items()}}
    if isinstance(known, str) and isinstance(value, str) and (known != value or name in _GROWING):
        return known + value
    return known if value is None else value


def rest_of(completion: Mapping[str, Any], sent: Assembly) -> list[dict[str, Any]] | None:
    """The chunks that are still to be sent of a whole answer; None where something else was said.

    Args:
        completion: the whole.
        sent: the chunks that were sent; nothing, for an answer that was not streamed.
    """
    head = {name: value for name, value in completion.items() if name not in {"choices", "object", "usage"}}
    head = {**head, **{name: value for name, value in sent.head.items() if name != "usage"}, "object": OBJECT}
    said = sent.messages()
    chunks = list[dict[str, Any]]()
    for choice in cast(Sequence[dict[str, Any]], completion["choices"]):
        index = int(choice.get("index") or 0)
        delta = _missing(choice["message"], said.get(index))
        if delta is None:
            return None
        more = {} if index in said else {"logprobs": choice.get("logprobs")}
        if delta:
            chunks.append({**head, "choices": [{"index": index, "delta": delta, "finish_reason": None, **more}]})
        if sent.finish_reason(index) is None:
            reason = choice.get("finish_reason") or "stop"
            chunks.append({**head, "choices": [{"index": index, "delta": {}, "finish_reason": reason}]})
    return chunks


def _missing(whole: Mapping[str, Any], said: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The part of a message that is not said yet, as a delta; None where another one was begun."""
    if said is None:
        calls = _numbered(whole.get("tool_calls") or (), 0)
        return {**whole, **({"tool_calls": calls} if calls else {})}
    delta: dict[str, Any] = {}
    for name in whole.keys() | said.keys():
        wanted = whole.get(name)
        known = said.get(name)
        if wanted == known or name == "role":
            continue
        if name == "tool_calls":
            calls = _missing_calls(wanted or (), known or ())
            if calls is None:
                return None
            delta[name] = calls
        elif isinstance(wanted, str) and wanted.startswith(known or ""):
            delta[name] = wanted[len(known or "") :]
        elif known:
            return None
        elif wanted is not None:
            delta[name] = wanted
    return delta


def _missing_calls(whole: Sequence[dict[str, Any]], said: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    if len(said) > len(whole):
        return None
    found: list[dict[str, Any]] = []
    for index, (wanted, known) in enumerate(zip(whole, said, strict=False)):
        whole_function = wanted.get("function", {})
        function = known.get("function", {})
        arguments = whole_function.get("arguments", "")
        begun = function.get("arguments", "")
        if whole_function.get("name", "") != function.get("name", "") or not arguments.startswith(begun):
            return None
        if arguments != begun:
            found.append({"index": index, "function": {"arguments": arguments[len(begun) :]}})
    return [*found, *_numbered(whole[len(said) :], len(said))]


def _numbered(calls: Iterable[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    return [{"index": index, **call} for index, call in enumerate(calls, first)]


MIN_OVERLAP = 8
"""Characters. A shorter repetition is as likely the text's own: `the the` may be meant, and two line breaks are.

Unless it is all that was said: then the model has begun again.
"""

CONTINUE = (
    "Your answer was cut off here. Continue it from exactly where it stopped, beginning with the next character. "
    "Repeat nothing of it, and write nothing about the interruption."
)


class Join:
    """The beginning of a continuation, held back for as long as it may be a repetition of the end of what was said.

    Models are asked to go on, and often begin with the last words again, or with the whole answer.
    """

    def __init__(self, said: str) -> None:
        self._said = said
        self._held: str | None = ""

    def feed(self, text: str) -> str:
        """Takes the next piece of the continuation. Returns what of it is new; what may be a repetition is held."""
        if self._held is None:
            return text
        self._held += text
        # Where in what was said the text so far may be a quotation that goes on to its end.
        at = self._said.find(self._held)
        if at >= 0 and at + len(self._held) < len(self._said):
            return ""
        return self.end()

    def end(self) -> str:
        """The held text that is new, once nothing more comes or it is clear."""
        held = self._held or ""
        self._held = None
        longest = min(len(held), len(self._said))
        shortest = min(MIN_OVERLAP, len(self._said))
        overlap = next((n for n in range(longest, shortest - 1, -1) if self._said.endswith(held[:n])), 0)
        return held[overlap:]
