"""Anthropic's streams: its events as OpenAI's chunks, and as the message that they come to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import orjson

from breakwater.policy.chat_chunks import OBJECT, Chunk
from breakwater.policy.chat_completions import finish_reason_of
from breakwater.policy.finish import finish_reason
from breakwater.policy.price import Usage
from breakwater.providers.base import fields

_GROWS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


class MessageEvents:
    """Reads the events of one message. Thinking is kept, and is no part of the chunks."""

    def __init__(self, usage_of: Callable[[Mapping[str, Any]], Usage | None]) -> None:
        self.done = False
        self._usage_of = usage_of
        self._message: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._parts: dict[int, dict[str, list[str]]] = {}
        self._calls: list[int] = []
        self._created = int(time.time())

    @property
    def whole(self) -> bool:
        """Whether it said why it ended."""
        return self._message.get("stop_reason") is not None

    def read(self, event: Mapping[str, Any] | None) -> Iterable[Chunk]:
        """The chunks that an event means; unknown events mean nothing, as Anthropic may add some."""
        event = event or {}
        match event.get("type"):
            case "message_start":
                self._message = {**fields(event.get("message"))}
                # What it says of the output is only its beginning.
                self._usage = {**fields(self._message.pop("usage", None)), "output_tokens": None}
                return (self._chunk({"role": "assistant", "content": ""}),)
            case "content_block_start":
                return self._begin(_index(event), dict(fields(event.get("content_block"))))
            case "content_block_delta":
                return self._grow(_index(event), fields(event.get("delta")))
            case "message_delta":
                self._message |= fields(event.get("delta"))
                used = fields(event.get("usage"))
                self._usage |= {name: value for name, value in used.items() if value is not None}
                if not self.whole:
                    return ()
                reason = finish_reason(self._message["stop_reason"])
                return (self._chunk({}, finish_reason_of(reason, called=bool(self._calls))),)
            case "message_stop":
                self.done = True
                return self._usage_chunk()
            case _:
                return ()

    def _begin(self, index: int, block: dict[str, Any]) -> Iterable[Chunk]:
        self._blocks[index], self._parts[index] = block, {}
        if block.get("type") == "tool_use":
            self._calls.append(index)
            function = {"name": block.get("name"), "arguments": ""}
            return (self._call_chunk(index, {"id": block.get("id"), "type": "function", "function": function}),)
        return self._chunk_of_text(str(block["text"])) if block.get("text") else ()

    def _grow(self, index: int, delta: Mapping[str, Any]) -> Iterable[Chunk]:
        kind = str(delta.get("type"))
        field = _GROWS.get(kind)
        text = delta.get(field) if field is not None else None
        if field is None or not isinstance(text, str) or not text or index not in self._parts:
            return ()
        self._parts[index].setdefault(field, []).append(text)
        if kind == "text_delta":
            return self._chunk_of_text(text)
        return (self._call_chunk(index, {"function": {"arguments": text}}),) if kind == "input_json_delta" else ()

    def answer(self) -> dict[str, Any]:
        """The message; its tool calls have their arguments as they were written, too, as `partial_json`."""
        usage = {"usage": self._usage} if self._usage else {}
        return {**self._message, "content": [self._block(index) for index in sorted(self._blocks)], **usage}

    def _block(self, index: int) -> dict[str, Any]:
        block = dict(self._blocks[index])
        for field, parts in self._parts[index].items():
            block[field] = f"{block.get(field) or ''}{''.join(parts)}"
            if field == "partial_json":
                # A model may write what is no JSON.
                with suppress(orjson.JSONDecodeError):
                    block["input"] = orjson.loads(block[field])
        return block

    def _chunk_of_text(self, text: str) -> Iterable[Chunk]:
        return (self._chunk({"content": text}),)

    def _call_chunk(self, index: int, call: dict[str, Any]) -> Chunk:
        number = self._calls.index(index) if index in self._calls else 0
        return self._chunk({"tool_calls": [{"index": number, **call}]})

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> Chunk:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head(), "choices": [choice]}

    def _usage_chunk(self) -> Iterable[Chunk]:
        usage = self._usage_of({"usage": self._usage})
        if usage is None or usage.input_tokens is None or usage.output_tokens is None:
            return ()
        reported: dict[str, Any] = {
            "prompt_tokens": usage.input_tokens,
            "completion_tokens": usage.output_tokens,
            "total_tokens": usage.input_tokens + usage.output_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
        }
        return ({**self._head(), "choices": [], "usage": reported},)

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._message.get("id"),
            "object": OBJECT,
            "created": self._created,
            "model": self._message.get("model"),
        }


def _index(event: Mapping[str, Any]) -> int:
    index = event.get("index")
    return index if isinstance(index, int) else 0
