"""Streamed answers: OpenAI's `chat.completion.chunk` objects put together, and what is left to send of a whole one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

Chunk = Mapping[str, Any]

OBJECT = "chat.completion.chunk"

_CALL = ("id", "type")
_NOT_HEAD = frozenset({"choices", "object"})
_NOT_MORE = frozenset({"index", "delta"})


class Assembly:
    """The chunks of an answer so far.

    Attributes:
        chunks: how many of them had content.
        length: characters of what was said.
    """

    def __init__(self) -> None:
        self.chunks = 0
        self.length = 0
        self._head: dict[str, Any] = {}
        self._choices: dict[int, _Choice] = {}

    def add(self, chunk: Chunk) -> bool:
        """Takes the next chunk. Returns whether it has content."""
        head, choices, before = self._head, self._choices, self.length
        for name, value in chunk.items():
            if value is not None and name not in _NOT_HEAD:
                head[name] = value
        for given in _choices(chunk):
            index = given.get("index")
            if not isinstance(index, int):
                index = 0
            if index not in choices:
                choices[index] = _Choice()
            self.length += choices[index].add(given)
        self.chunks += self.length > before
        return self.length > before

    @property
    def finished(self) -> bool:
        """Whether each choice has said why it ended."""
        return bool(self._choices) and all(choice.finish_reason is not None for choice in self._choices.values())

    @property
    def head(self) -> Mapping[str, Any]:
        """What a chunk says beside its choices: id, model and more."""
        return self._head

    @property
    def usage(self) -> Mapping[str, Any] | None:
        """As it was reported."""
        usage = self._head.get("usage")
        return cast(Mapping[str, Any], usage) if isinstance(usage, dict) else None

    def messages(self) -> dict[int, dict[str, Any]]:
        """The message of each choice, as far as it was said."""
        return {index: choice.message() for index, choice in sorted(self._choices.items())}

    def completion(self) -> dict[str, Any]:
        """The `chat.completion` that the chunks come to."""
        choices = [
            {"index": index, **choice.more, "message": choice.message(), "finish_reason": choice.finish_reason}
            for index, choice in sorted(self._choices.items())
        ]
        return {**self._head, "object": "chat.completion", "choices": choices}

    def finish_reason(self, index: int) -> str | None:
        """Why a choice ended."""
        return self._choices[index].finish_reason if index in self._choices else None


class _Choice:
    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.more: dict[str, Any] = {}
        self._texts: dict[str, list[str]] = {}
        self._fields: dict[str, Any] = {}
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, given: Mapping[str, Any]) -> int:
        """Takes a choice of a chunk. Returns how much it says."""
        said = 0
        for name, value in _delta(given).items():
            if name == "role" or value is None:
                continue
            if isinstance(value, str):
                if name not in self._texts:
                    self._texts[name] = []
                self._texts[name].append(value)
                said += len(value)
            elif name == "tool_calls" and isinstance(value, list):
                calls = [cast(dict[str, Any], call) for call in cast(list[Any], value) if isinstance(call, dict)]
                said += sum(self._add_call(number, call) for number, call in enumerate(calls))
            elif value:
                self._fields[name] = _merged(self._fields.get(name), value)
                said += 1
        for name, value in given.items():
            if value is None or name in _NOT_MORE:
                continue
            if name == "finish_reason":
                self.finish_reason = value
            else:
                self.more[name] = _merged(self.more.get(name), value)
        return said

    def _add_call(self, number: int, given: dict[str, Any]) -> int:
        index = given.get("index")
        call = self._calls.setdefault(index if isinstance(index, int) else number, {"function": {"arguments": []}})
        call |= {name: given[name] for name in _CALL if given.get(name)}
        function: dict[str, Any] = given.get("function") or {}
        if function.get("name"):
            call["function"]["name"] = function["name"]
        arguments = function.get("arguments") or ""
        call["function"]["arguments"].append(arguments)
        return len(arguments) + len(function.get("name") or "")

    def message(self) -> dict[str, Any]:
        texts = {name: "".join(parts) for name, parts in self._texts.items()}
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, **texts, **self._fields}
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {**call, "type": call.get("type", "function"), "function": _joined(call["function"])}
                for _, call in sorted(self._calls.items())
            ]
        return message


def _joined(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": "".join(function["arguments"])}


def _merged(known: Any, value: Any) -> Any:
    """Two parts of a value that is neither text nor a tool call: audio, log probabilities, details of reasoning."""
    if isinstance(known, list) and isinstance(value, list):
        return cast(list[Any], known) + cast(list[Any], value)
    if isinstance(known, dict) and isinstance(value, dict):
        both, more = cast(dict[str, Any], known), cast(dict[str, Any], value)
        return {**both, **{name: _merged(both.get(name), one) for name, one in more.items()}}
    if isinstance(known, str) and isinstance(value, str) and known != value:
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
    said, chunks = sent.messages(), list[dict[str, Any]]()
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
    """What of a message is not said yet, as a delta; None where another one was begun."""
    if said is None:
        calls = _numbered(whole.get("tool_calls") or (), 0)
        return {**whole, **({"tool_calls": calls} if calls else {})}
    delta: dict[str, Any] = {}
    for name in whole.keys() | said.keys():
        wanted, known = whole.get(name), said.get(name)
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
        arguments, begun = wanted["function"]["arguments"], known["function"]["arguments"]
        if wanted.get("id") != known.get("id") or not arguments.startswith(begun):
            return None
        if arguments != begun:
            found.append({"index": index, "function": {"arguments": arguments[len(begun) :]}})
    return [*found, *_numbered(whole[len(said) :], len(said))]


def _numbered(calls: Iterable[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    return [{"index": index, **call} for index, call in enumerate(calls, first)]


def _choices(chunk: Chunk) -> Sequence[Mapping[str, Any]]:
    choices = chunk.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else ()


def _delta(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    delta = choice.get("delta")
    return cast(dict[str, Any], delta) if isinstance(delta, dict) else {}
