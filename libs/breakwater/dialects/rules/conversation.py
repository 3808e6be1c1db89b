"""Mends conversations that a provider refuses: torn tool calls are taken out, and too long ones are shortened.

Messages are plain JSON in OpenAI's chat format. Its older function calls and Anthropic's content blocks are understood,
too: a provider may take them, and a torn pair of them is refused in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from pydantic import JsonValue

from breakwater.jobs.rules.chat_messages import fields

JsonMessage = Mapping[str, JsonValue]

_Key = tuple[str, str] | None
"""The form and the id that a call and its result have in common. None belongs to nothing."""
PartPlace = tuple[int, int]
"""A call or a result: the message's index, and the how-manieth one in it.

A message's calls are those of `tool_calls`, then its `tool_use` blocks, then its `function_call`; its results are
itself, or its `tool_result` blocks.
"""


def prune_orphans(messages: Sequence[JsonMessage]) -> tuple[list[JsonMessage], int]:
    """Takes out tool calls that have no result and results that have no call.

    A result counts if it follows its call with nothing but other results in between, as providers demand; of several
    results for one call, the first. A message of which nothing is left goes too.

    Returns:
        The conversation, and how many calls and results were taken out. Nothing that was given is changed.
    """
    paired = tool_pairs(messages)
    kept: list[JsonMessage] = []
    count = 0
    for index, message in enumerate(messages):
        parts = len(_calls(message)) + len(_results(message))
        lost = parts - sum((index, part) in paired for part in range(parts))
        count += lost
        rest = message if not lost else _without(message, lambda part, index=index: (index, part) not in paired)
        if rest is not None:
            kept.append(rest)
    return kept, count


def tool_pairs(messages: Sequence[JsonMessage]) -> dict[PartPlace, PartPlace]:
    """The calls that have a result and the results that have a call, each to its other; by `prune_orphans`'s rule."""
    paired: dict[PartPlace, PartPlace] = {}
    waiting: dict[_Key, list[PartPlace]] = {}
    for index, message in enumerate(messages):
        answered = False
        results = _results(message)
        for part, key in enumerate(results):
            if key is not None and waiting.get(key):
                call = waiting[key].pop(0)
                result = (index, part)
                paired |= {call: result, result: call}
                answered = True
        if not answered and not (results and _is_only_results(message)):
            # Something else follows: what has no result by now gets none. A message of orphans alone will be gone.
            waiting = {}
        for part, key in enumerate(_calls(message)):
            waiting.setdefault(key, []).append((index, part))
    return paired


def _calls(message: JsonMessage) -> list[_Key]:
    if message.get("role") != "assistant":
        return []
    calls = [_key("call", fields(call).get("id")) for call in _list(message.get("tool_calls"))]
    calls += [_key("call", fields(block).get("id")) for block in _blocks(message, "tool_use")]
    if message.get("function_call"):
        calls.append(_key("function", fields(message["function_call"]).get("name")))
    return calls


def _results(message: JsonMessage) -> list[_Key]:
    match message.get("role"):
        case "tool":
            return [_key("call", message.get("tool_call_id"))]
        case "function":
            return [_key("function", message.get("name"))]
        case "user":
            return [_key("call", fields(block).get("tool_use_id")) for block in _blocks(message, "tool_result")]
        case _:
            return []


def _key(form: str, name: JsonValue) -> _Key:
    return (form, name) if isinstance(name, str) else None


def _is_only_results(message: JsonMessage) -> bool:
    return message.get("role") != "user" or len(_results(message)) == len(_list(message.get("content")))


def _without(message: JsonMessage, is_lost: Callable[[int], bool]) -> JsonMessage | None:
    """The message without its lost calls and results; None where it then says nothing."""
    if message.get("role") in {"tool", "function"}:
        return None
    rest = dict(message)
    parts = iter(range(len(_calls(message)) + len(_results(message))))
    if isinstance(calls := message.get("tool_calls"), list):
        rest["tool_calls"] = [call for call in calls if not is_lost(next(parts))]
        if calls and not rest["tool_calls"]:
            del rest["tool_calls"]  # providers refuse an empty list
    if isinstance(content := message.get("content"), list):
        kind = "tool_use" if message.get("role") == "assistant" else "tool_result"
        rest["content"] = [block for block in content if fields(block).get("type") != kind or not is_lost(next(parts))]
    if message.get("role") == "assistant" and message.get("function_call") and is_lost(next(parts)):
        del rest["function_call"]
    return rest if _says_something(rest) else None


def _says_something(message: JsonMessage) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        # A model's thoughts alone are no message: Anthropic refuses them without what they led to.
        content = [block for block in content if fields(block).get("type") not in {"thinking", "redacted_thinking"}]
    return any((content, *(message.get(name) for name in ("tool_calls", "function_call", "refusal", "audio"))))


def trim(messages: Sequence[JsonMessage], keep_ratio: float) -> tuple[list[JsonMessage], int]:
    """Drops the oldest turns until no more than a part of the conversation is left.

    A turn is a user's message and all up to the next one. System messages stay, and so does the last turn; where that
    alone is too long, its older tool calls go, each with all its results. No call is parted from its results.

    Args:
        messages: the conversation.
        keep_ratio: how much may be left, as a part of the bytes of all but the system messages.

    Returns:
        The conversation, and how many messages were dropped: 0 where nothing may be. Nothing given is changed.
    """
    texts = (json.dumps(message, ensure_ascii=False, separators=(",", ":")) for message in messages)
    sizes = [
        0 if _is_system(message) else len(text.encode(errors="surrogatepass"))
        for message, text in zip(messages, texts, strict=True)
    ]
    excess = sum(sizes) - keep_ratio * sum(sizes)
    dropped: set[int] = set()
    for group in _droppable(messages):
        if excess <= 0:
            break
        dropped.update(group)
        excess -= sum(sizes[index] for index in group)
    return [message for index, message in enumerate(messages) if index not in dropped], len(dropped)


def _droppable(messages: Sequence[JsonMessage]) -> Iterator[list[int]]:
    """Indexes of messages that may be dropped together, the first to go first."""
    indexes = [index for index, message in enumerate(messages) if not _is_system(message)]
    starts = [
        place
        for place, index in enumerate(indexes)
        if messages[index].get("role") == "user" and not _results(messages[index])
    ]
    bounds = [0, *starts] if starts and starts[0] > 0 else starts or [0]
    for first, following in pairwise(bounds):
        yield indexes[first:following]
    exchanges: list[list[int]] = []
    group: list[int] | None = None
    for index in indexes[bounds[-1] :]:
        message = messages[index]
        if _calls(message):
            group = [index]
            exchanges.append(group)
        elif group is not None and _results(message):
            group.append(index)
        else:
            group = None
    # The last one is what the model has just learnt: without it, it would only call again.
    for exchange in exchanges[:-1]:
        if len(exchange) > 1 and all(_is_only_results(messages[index]) for index in exchange[1:]):
            yield exchange


def _is_system(message: JsonMessage) -> bool:
    return message.get("role") in {"system", "developer"}


def _blocks(message: JsonMessage, kind: str) -> list[JsonValue]:
    return [block for block in _list(message.get("content")) if fields(block).get("type") == kind]


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []
