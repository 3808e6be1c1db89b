"""Providers that refuse a conversation as the real ones do where what they wrote in it is missing, or is another's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.calls.providers.kit import answering
from tests.strict_chat import addition, refusal, signature_of

AUTHORS = ("plain", "deepseek", "gemini", "kimi", "responses", "anthropic")
TEXT_TURNS = frozenset({3, 7})
"""Turns that answer the user; the others call a tool."""
DOWN = frozenset({5, 6})
"""Turns for which the models named `busy` are down."""
SKIP = "skip_thought_signature_validator"


@dataclass(slots=True)
class RefusedError(Exception):
    """A provider's 4xx."""

    message: str
    status: int = 400
    code: str | None = None


@dataclass(slots=True)
class StrictProviders:
    """All of them, on one server: `<url>/<author>/v1`.

    Attributes:
        url: of the server.
        calls: that were answered, by author.
        refusals: by author, with their words.
        own: turns of an author that came back with all that it wrote.
        bodies: of the requests.
        knows_own: providers tell what they wrote from a substitute; the real ones do not.
    """

    url: str = ""
    calls: Counter[str] = field(default_factory=Counter[str])
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    own: Counter[str] = field(default_factory=Counter[str])
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list[tuple[str, dict[str, Any]]])
    knows_own: bool = True

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        _, author, _, *path = request.path.split("/")
        body = json.loads(await request.read())
        self.bodies.append((author, body))
        native = path[0] if path[0] in ("responses", "messages") else "chat"
        count, check, write = _APIS[native]
        turn = count(body)
        if body["model"] == "busy" and turn in DOWN:
            return web.json_response({"error": {"message": "overloaded"}}, status=500)
        try:
            check(self, author, body)
        except RefusedError as refused:
            self.refusals[author, refused.message] += 1
            error = {"message": refused.message, "code": refused.code, "type": "invalid_request_error"}
            return web.json_response({"type": "error", "error": error}, status=refused.status)
        self.calls[author] += 1
        whole, events = write(author, turn, body["model"])
        if not body.get("stream"):
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            name = f"event: {event['type']}\n" if "type" in event else ""
            await response.write(f"{name}data: {json.dumps(event)}\n\n".encode())
        if native == "chat":
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


@asynccontextmanager
async def strict_providers() -> AsyncGenerator[StrictProviders]:
    """Starts them."""
    providers = StrictProviders()
    async with answering(providers.answer) as providers.url:
        yield providers


def _thought(author: str, turn: int) -> str:
    return f"{author} thinks of turn {turn}."


def _arguments(author: str, turn: int, model: str) -> dict[str, Any]:
    return {"by": f"{author}/{model}", "turn": turn}


# Chat completions

_FIELDS = {
    "plain": {"role", "content", "refusal", "tool_calls", "tool_call_id", "name", "annotations"},
    "deepseek": None,
    "gemini": None,
    "kimi": None,
    "responses": {"role", "content", "refusal", "tool_calls", "tool_call_id", "name", "annotations"},
}
"""Fields of messages that a provider knows; None for one that `strict_chat.refusal` knows, or that ignores others."""


def _id(author: str, turn: int) -> str:
    return addition(author, "look", turn).get("id") or f"call_{author}_{turn}"


def _check_chat(self: StrictProviders, author: str, body: dict[str, Any]) -> None:
    known = _FIELDS[author]
    for number, message in enumerate(body["messages"]):
        if known is not None and (unknown := message.keys() - known):
            name = sorted(unknown)[0]
            raise RefusedError(_UNKNOWN[author].format(name=name, number=number), 422 if author == "plain" else 400)
        if (reason := refusal(author, message, number, thinks=author == "deepseek")) is not None:
            raise RefusedError(reason)
        calls: list[Any] = message.get("tool_calls") or []
        for call in calls:
            if known is not None and "extra_content" in call:
                text = _UNKNOWN[author].format(name="extra_content", number=f"{number}.tool_calls.0")
                raise RefusedError(text)
        if calls:
            _check_calls(self, f"{author}/{body['model']}", message, calls, number)


_UNKNOWN = {
    "plain": "'messages.{number}' : for 'role:assistant' the following must be satisfied[('messages.{number}' : "
    "property '{name}' is unsupported)]",
    "responses": "Unknown parameter: 'messages[{number}].{name}'.",
}


def _check_calls(
    self: StrictProviders, deployment: str, message: dict[str, Any], calls: list[Any], number: int
) -> None:
    written, author = json.loads(calls[0]["function"]["arguments"]), deployment.partition("/")[0]
    is_own, turn = self.knows_own and written["by"] == deployment, written["turn"]
    if author == "deepseek":
        if is_own and message["reasoning_content"] != _thought(author, turn):
            raise RefusedError(f"reasoning_content at {number} is not what the model wrote")
    elif author == "gemini":
        signature = signature_of(calls[0])
        own = signature_of(addition(author, "look", turn))
        if signature != (own if is_own else SKIP) and not written["by"].startswith(author):
            raise RefusedError("Thought signature is not valid.")
        if is_own and signature == SKIP:
            raise RefusedError(f"the signature at {number} was left out")
    elif author == "kimi" and written["by"].startswith(author) and calls[0]["id"] != _id(author, turn):
        raise RefusedError(f"tool_call_id {calls[0]['id']} is not found")
    self.own[author] += is_own


def _turn_of_chat(body: dict[str, Any]) -> int:
    return 1 + sum(message["role"] == "assistant" for message in body["messages"])


def _write_chat(author: str, turn: int, model: str) -> tuple[dict[str, Any], Iterable[dict[str, Any]]]:
    thought = {"reasoning_content": _thought(author, turn)} if author == "deepseek" else {}
    function = {"name": "look", "arguments": json.dumps(_arguments(author, turn, model))}
    call: dict[str, Any] = {"id": _id(author, turn), "type": "function", "function": function}
    call |= addition(author, "look", turn)
    answers = turn in TEXT_TURNS
    said: dict[str, Any] = {"content": f"Answer {turn}."} if answers else {"content": None, "tool_calls": [call]}
    reason = "stop" if answers else "tool_calls"
    head = {"id": f"chatcmpl-{turn}", "created": 1, "model": model}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    choice = {"index": 0, "message": {"role": "assistant", **thought, **said}, "finish_reason": reason}
    whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if thought:
        text = thought["reasoning_content"]
        deltas += [{"reasoning_content": text[:9]}, {"reasoning_content": text[9:]}]
    if answers:
        deltas += [{"content": "Answer "}, {"content": f"{turn}."}]
    else:
        begun = {**call, "index": 0, "function": {"name": "look", "arguments": ""}}
        deltas += [{"tool_calls": [begun]}]
        text = function["arguments"]
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in (text[:7], text[7:])]
    chunk = {**head, "object": "chat.completion.chunk"}
    events: list[dict[str, Any]] = [
        {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    events.append({**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    return whole, [*events, {**chunk, "choices": [], "usage": usage}]


# Responses


def _turn_of_response(body: dict[str, Any]) -> int:
    items: list[dict[str, Any]] = body["input"] if isinstance(body["input"], list) else []
    answered = [
        one
        for one in items
        if one.get("type") == "function_call"
        or (one.get("type", "message") == "message" and one["role"] == "assistant")
    ]
    return 1 + len(answered)


def _check_response(self: StrictProviders, author: str, body: dict[str, Any]) -> None:
    items: list[dict[str, Any]] = body["input"] if isinstance(body["input"], list) else []
    for item in items:
        encrypted = item.get("encrypted_content")
        if item.get("type") == "reasoning" and not str(encrypted).startswith(f"gAAA-{body['model']}-"):
            text = f"The encrypted content {encrypted} could not be verified. Reason: it could not be decrypted."
            raise RefusedError(text, code="invalid_encrypted_content")
        if len(item.get("call_id") or "") > 64:
            raise RefusedError("Invalid 'input[1].call_id': string too long. Expected a string with maximum length 64")
        self.own[author] += item.get("type") == "reasoning"


def _write_response(author: str, turn: int, model: str) -> tuple[dict[str, Any], Iterable[dict[str, Any]]]:
    reasoning: dict[str, Any] = {
        "type": "reasoning",
        "id": f"rs_{turn}",
        "summary": [],
        "encrypted_content": f"gAAA-{model}-{turn}",
    }
    arguments = json.dumps(_arguments(author, turn, model))
    said: dict[str, Any]
    if turn in TEXT_TURNS:
        part = {"type": "output_text", "text": f"Answer {turn}.", "annotations": []}
        said = {"type": "message", "id": f"msg_{turn}", "role": "assistant", "status": "completed", "content": [part]}
    else:
        said = {"type": "function_call", "id": f"fc_{turn}", "call_id": _id(author, turn), "status": "completed"}
        said |= {"name": "look", "arguments": arguments}
    head = {"id": f"resp_{turn}", "object": "response", "created_at": 1, "model": model, "status": "completed"}
    usage = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
    whole = {**head, "output": [reasoning, said], "usage": usage}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": {**head, "status": "in_progress"}}]
    for number, item in enumerate((reasoning, said)):
        events.append({"type": "response.output_item.added", "output_index": number, "item": item})
        events.append({"type": "response.output_item.done", "output_index": number, "item": item})
    return whole, [*events, {"type": "response.completed", "response": whole}]


# Messages


def _turn_of_message(body: dict[str, Any]) -> int:
    return 1 + sum(turn["role"] == "assistant" for turn in body["messages"])


def _check_messages(self: StrictProviders, author: str, body: dict[str, Any]) -> None:
    thinks = body.get("thinking", {}).get("type") == "enabled"
    last = max((n for n, turn in enumerate(body["messages"]) if turn["role"] == "assistant"), default=-1)
    for number, turn in enumerate(body["messages"]):
        blocks = turn["content"] if isinstance(turn["content"], list) else []
        for block in blocks:
            if block["type"] == "thinking" and not block["signature"].startswith("anthropic-"):
                raise RefusedError(f"messages.{number}.content.0: Invalid `signature` in `thinking` block")
            if block["type"] == "redacted_thinking":
                raise RefusedError(f"messages.{number}.content.0: Invalid `data` in `redacted_thinking` block")
            own = block.get("id") or block.get("tool_use_id")
            if own is not None and not own.replace("_", "").replace("-", "").isalnum():
                place = f"messages.{number}.content.0.tool_use.id"
                raise RefusedError(f"{place}: String should match pattern '^[a-zA-Z0-9_-]+$'")
            self.own[author] += block["type"] == "thinking"
        kinds = [block["type"] for block in blocks]
        if thinks and number == last and "tool_use" in kinds and kinds[0] != "thinking":
            raise RefusedError(
                f"messages.{number}.content.0.type: Expected `thinking` or `redacted_thinking`, but found "
                f"`{kinds[0]}`. "
                "When `thinking` is enabled, a final `assistant` message must start with a thinking block"
            )


def _write_message(author: str, turn: int, model: str) -> tuple[dict[str, Any], Iterable[dict[str, Any]]]:
    thinking = {"type": "thinking", "thinking": _thought(author, turn), "signature": f"anthropic-{turn}"}
    said: dict[str, Any] = {"type": "text", "text": f"Answer {turn}."}
    if turn not in TEXT_TURNS:
        said = {"type": "tool_use", "id": _id(author, turn), "name": "look", "input": _arguments(author, turn, model)}
    reason = "end_turn" if turn in TEXT_TURNS else "tool_use"
    head = {"id": f"msg_{turn}", "type": "message", "role": "assistant", "model": model, "stop_sequence": None}
    usage = {"input_tokens": 10, "output_tokens": 5}
    whole = {**head, "content": [thinking, said], "stop_reason": reason, "usage": usage}
    begun = {**thinking, "thinking": "", "signature": ""}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**head, "content": [], "stop_reason": None, "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": begun},
        _delta(0, type="thinking_delta", thinking=thinking["thinking"]),
        _delta(0, type="signature_delta", signature=thinking["signature"]),
        {"type": "content_block_stop", "index": 0},
    ]
    if said["type"] == "text":
        events += [
            {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
            _delta(1, type="text_delta", text=said["text"]),
        ]
    else:
        events += [
            {"type": "content_block_start", "index": 1, "content_block": {**said, "input": {}}},
            _delta(1, type="input_json_delta", partial_json=json.dumps(said["input"])),
        ]
    events += [
        {"type": "content_block_stop", "index": 1},
        {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": usage},
        {"type": "message_stop"},
    ]
    return whole, events


def _delta(index: int, **delta: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


_Check = Callable[[StrictProviders, str, dict[str, Any]], None]
_Write = Callable[[str, int, str], tuple[dict[str, Any], Iterable[dict[str, Any]]]]
_APIS: dict[str, tuple[Callable[[dict[str, Any]], int], _Check, _Write]] = {
    "chat": (_turn_of_chat, _check_chat, _write_chat),
    "responses": (_turn_of_response, _check_response, _write_response),
    "messages": (_turn_of_message, _check_messages, _write_message),
}
