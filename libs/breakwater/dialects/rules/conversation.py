"""Repairs of conversations that a provider refuses: removing unpaired tool calls and results, and shortening.

Messages are plain JSON in OpenAI's chat format. OpenAI's older function calls and Anthropic's content blocks count,
too, as some providers accept them and refuse unpaired ones in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from pydantic import JsonValue

from breakwater.jobs.rules.chat_messages import fields

JsonMessage = Mapping[str, JsonValue]

_Key = tuple[str, str] | None
"""The form and the id that a call and its result have in common. None has no counterpart."""
PartPlace = tuple[int, int]
"""The place of a call or a result: the index of its message, and its number in that message.

A message's calls are those of `tool_calls`, then its `tool_use` blocks, then its `function_call`. Its results are the
message itself, or its `tool_result` blocks.
"""


def prune_orphans(messages: Sequence[JsonMessage]) -> tuple[list[JsonMessage], int]:
    """Removes tool calls that have no result and results that have no call.

    A result counts if only other results stand between it and its call, as providers demand. Of several results for one
    call, the first counts. A message of which nothing is left is removed, too.

    Returns:
        The conversation, and the number of calls and results that were removed. The arguments are not changed.
    """
    paired = tool_pairs(messages)
    pruned: list[JsonMessage] = []
    count = 0
    for index, message in enumerate(messages):
        parts = len(_calls(message)) + len(_results(message))
        lost = parts - sum((index, part) in paired for part in range(parts))
        count += lost
        remaining = message if not lost else _without(message, lambda part, index=index: (index, part) not in paired)
        if remaining is not None:
            pruned.append(remaining)
    return pruned, count


def tool_pairs(messages: Sequence[JsonMessage]) -> dict[PartPlace, PartPlace]:
    """Maps each call to its result and each result to its call, by the rule of `prune_orphans`."""
    paired: dict[PartPlace, PartPlace] = {}
    waiting: dict[_Key, list[PartPlace]] = {}
    for index, message in enumerate(messages):
        has_answer = False
        results = _results(message)
        for part, key in enumerate(results):
            if key is not None and waiting.get(key):
                call = waiting[key].pop(0)
                result = (index, part)
                paired |= {call: result, result: call}
                has_answer = True
        if not has_answer and not (results and _is_only_results(message)):
            # Another message follows, so calls without a result by now get none. A message that has nothing but
            # orphaned results does not count, as it will be removed.
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
    """Returns a message without its unpaired calls and results; None if nothing is left."""
    if message.get("role") in {"tool", "function"}:
        return None
    remaining = dict(message)
    parts = iter(range(len(_calls(message)) + len(_results(message))))
    if isinstance(calls := message.get("tool_calls"), list):
        remaining["tool_calls"] = [call for call in calls if not is_lost(next(parts))]
        if calls and not remaining["tool_calls"]:
            del remaining["tool_calls"]  # providers refuse an empty list
    if isinstance(content := message.get("content"), list):
        kind = "tool_use" if message.get("role") == "assistant" else "tool_result"
        remaining["content"] = [
            block for block in content if fields(block).get("type") != kind or not is_lost(next(parts))
        ]
    if message.get("role") == "assistant" and message.get("function_call") and is_lost(next(parts)):
        del remaining["function_call"]
    return remaining if _says_something(remaining) else None


def _says_something(message: JsonMessage) -> bool:
    content = message.get("content")
    if isinstance(content, list):
        # Thinking alone is not a message: Anthropic refuses it without the text or call that follows it.
        content = [block for block in content if fields(block).get("type") not in {"thinking", "redacted_thinking"}]
    return any((content, *(message.get(name) for name in ("tool_calls", "function_call", "refusal", "audio"))))


def trim(messages: Sequence[JsonMessage], keep_ratio: float) -> tuple[list[JsonMessage], int]:
    """Drops the oldest turns until at most a fraction of the conversation is left.

    A turn is a user's message with everything up to the next one. System messages and the last turn stay. If the last
    turn alone is too long, its older tool calls are dropped, each with all its results.

    Args:
        messages: the conversation.
        keep_ratio: the fraction that may be left, of the bytes of all messages except system messages.

    Returns:
        The conversation, and the number of dropped messages: 0 if none may be dropped. The arguments are not changed.
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
    """Yields groups of indexes of messages that may be dropped together, in the order in which to drop them."""
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
    # The last exchange stays: without what the model has just learnt, it would only repeat the call.
    for exchange in exchanges[:-1]:
        if len(exchange) > 1 and all(_is_only_results(messages[index]) for index in exchange[1:]):
            yield exchange


def _is_system(message: JsonMessage) -> bool:
    return message.get("role") in {"system", "developer"}


def _blocks(message: JsonMessage, kind: str) -> list[JsonValue]:
    return [block for block in _list(message.get("content")) if fields(block).get("type") == kind]


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []
