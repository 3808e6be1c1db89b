"""Anthropic's streams: its events as OpenAI's chunks, and assembled as a message."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from breakwater.calls.providers.failures import read_json
from breakwater.dialects.rules.chat_chunks import OBJECT, Chunk
from breakwater.dialects.rules.chat_completions import finish_reason_of
from breakwater.jobs.rules.chat_messages import (
    INTERRUPTED,
    OTHERS,
    THOUGHT,
    arguments_text,
    fields,
    finish_reason,
    is_end,
)
from breakwater.prices.rules.usage import Usage, highest

_GROWS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
    "compaction_delta": "content",
}
_HOLDERS = {"text": "text", "thinking": "thinking", "signature": "thinking", "content": "compaction"}
"""Types of blocks by the fields that arrive in pieces."""
_IN_CHAT = ("text", "thinking", "tool_use")
"""Types of blocks for which chunks have fields."""


class MessageEvents:
    """Reads the events of one message.

    The chunks of a chat lack thinking, and everything else for which OpenAI's format has no field. If the answer calls
    tools, the chunks with the calls have the thinking, as clients must send it back. The chunks of a native call have
    everything, and each has its event, with the number of the block in the message.
    """

    def __init__(self, usage_of: Callable[[Mapping[str, Any]], Usage | None], *, native: bool = False) -> None:
        self.ended = False
        self._native = native
        self._usage_of = usage_of
        self._message: dict[str, Any] = {}
        self._first_usage: Mapping[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._blocks: list[_BlockSoFar] = []
        self._latest: dict[int, _BlockSoFar] = {}
        """The open block at each index, as some gateways number all blocks 0."""
        self._calls = 0
        self._thinking_sent = 0
        """The number of blocks whose thinking was sent in chunks."""
        self._created = int(time.time())

    @property
    def whole(self) -> bool:
        """Returns True if the message has ended, or has a stop reason."""
        return self.ended or is_end(self._message.get("stop_reason"))

    def read(self, event: Mapping[str, Any] | None) -> Iterable[Chunk]:
        """Returns the chunks of an event. Unknown events have none, as Anthropic may add some."""
        event = event or {}
        match event.get("type"):
            case "message_start":
                # A message with `choices` would be taken for a chat completion.
                self._message = {
                    name: value for name, value in fields(event.get("message")).items() if name != "choices"
                }
                self._first_usage = fields(self._message.pop("usage", None))
                # Its output tokens are only those of the beginning.
                self._usage = {**self._first_usage, "output_tokens": None}
                return self._chunks({"role": "assistant", "content": ""}, event)
            case "content_block_start":
                return self._begin(_index(event), dict(fields(event.get("content_block"))))
            case "content_block_delta":
                return self._add_delta(_index(event), fields(event.get("delta")))
            case "content_block_stop":
                return self._end(_index(event))
            case "message_delta":
                changes = fields(event.get("delta")).items()
                delta = {name: value for name, value in changes if value is not None and name != "choices"}
                if (edits := event.get("context_management")) is not None:
                    delta["context_management"] = edits
                self._message |= delta
                if usage := fields(event.get("usage")):
                    self._usage = highest(highest(self._first_usage, self._usage), usage)
                reason = delta.get("stop_reason")
                if not is_end(reason) or (reason := finish_reason(reason)) in INTERRUPTED:
                    return ()
                new_thinking = self._new_thinking() if self._calls else {}
                return (self._chunk(new_thinking, finish_reason_of(reason, called=bool(self._calls))),)
            case "message_stop":
                self.ended = True
                return self._usage_chunk()
            case _:
                return ()

    def _new_thinking(self) -> dict[str, Any]:
        """Returns the blocks of thinking since the last call, which Anthropic needs back with the tools' results."""
        kinds = ("thinking", "redacted_thinking")
        first = self._thinking_sent
        self._thinking_sent = len(self._blocks)
        blocks = [block.to_json() for block in self._blocks[first:] if block.start.get("type") in kinds]
        return {"thinking_blocks": blocks} if blocks and not self._native else {}

    def _begin(self, index: int, start: dict[str, Any]) -> Iterable[Chunk]:
        ended = self._end(index)  # some gateways do not send the end of a block
        block = self._latest[index] = _BlockSoFar(start, len(self._blocks))
        self._blocks.append(block)
        event = {"type": "content_block_start", "index": block.number, "content_block": start}
        kind = start.get("type")
        if kind == "tool_use":
            block.call = self._calls
            self._calls += 1
            # Some gateways send the whole input here.
            function = {"name": start.get("name"), "arguments": arguments_text(start.get("input") or "")}
            delta = self._new_thinking() | _call(
                block, {"id": start.get("id"), "type": "function", "function": function}
            )
        elif self._native and isinstance(kind, str) and kind not in _IN_CHAT:
            delta = {OTHERS: [start]}
        else:
            delta = {"content": text} if (text := text_of(start)) else None
        return (*ended, *self._chunks(delta, event))

    def _add_delta(self, index: int, delta: Mapping[str, Any]) -> Iterable[Chunk]:
        kind = str(delta.get("type"))
        grows = _GROWS.get(kind)
        citation = delta.get("citation") if kind == "citations_delta" else None
        text = delta.get(grows) if grows is not None else None
        if grows == "partial_json":
            text = arguments_text(text)
        block = self._latest.get(index)
        opening_chunks = list[Chunk]()
        if isinstance(text, str) and text and grows == "text" and (block is None or block.start.get("type") != "text"):
            opening_chunks += self._begin(index, {"type": "text", "text": ""})
            block = self._latest[index]
        if block is None:
            return ()
        event = {"type": "content_block_delta", "index": block.number, "delta": delta}
        if citation is not None and block.start.get("type") == "text":
            block.citations.append(citation)
            return self._chunks({"annotations": [citation]} if self._native else None, event)
        if grows is None or not isinstance(text, str) or not text:
            return ()
        if _HOLDERS.get(grows, block.start.get("type")) != block.start.get("type"):
            return ()  # the delta belongs to another block, and has a wrong index
        if grows == "partial_json" and (not block.takes_input or block.start.get("input")):
            return ()
        if grows == "signature":
            block.signature = text
        else:
            block.parts.setdefault(grows, []).append(text)
        event["delta"] = {**delta, grows: text}
        if grows == "partial_json" and block.call is not None:
            return self._chunks(_call(block, {"function": {"arguments": text}}), event)
        name = {"text": "content", "thinking": THOUGHT}.get(grows)
        return (*opening_chunks, *self._chunks(None if name is None else {name: text}, event))

    def _end(self, index: int) -> Iterable[Chunk]:
        block = self._latest.pop(index, None)
        if block is None:
            return ()
        event = {"type": "content_block_stop", "index": block.number}
        if block.call is None or block.parts or block.start.get("input"):
            return self._chunks(None, event)
        # A call without arguments has no deltas, but OpenAI's clients expect JSON.
        block.parts["partial_json"] = ["{}"]
        return self._chunks(_call(block, {"function": {"arguments": "{}"}}), event)

    def answer(self) -> dict[str, Any]:
        """Returns the message. Its tool calls also have their arguments as the model wrote them, as `partial_json`."""
        usage = {"usage": self._usage} if self._usage else {}
        return {**self._message, "content": [block.to_json() for block in self._blocks], **usage}

    def _chunks(self, delta: dict[str, Any] | None, event: Mapping[str, Any]) -> Iterable[Chunk]:
        """Returns the chunk of an event. A chat has none for an event without a delta."""
        if not self._native:
            return () if delta is None else (self._chunk(delta),)
        chunk = {**self._head(), "choices": []} if delta is None else self._chunk(delta)
        return ({**chunk, "event": event},)

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


@dataclass(slots=True)
class _BlockSoFar:
    start: dict[str, Any]
    number: int
    call: int | None = None
    """The number of the tool call; None for another block."""
    parts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    citations: list[Any] = field(default_factory=list[Any])
    signature: str | None = None
    """The latest signature, which arrives whole, as Anthropic's SDKs read it."""

    @property
    def takes_input(self) -> bool:
        """Returns True for the use of a tool, even of the provider's own."""
        return "input" in self.start or self.call is not None

    def to_json(self) -> dict[str, Any]:
        block = dict(self.start)
        if self.citations:
            reported = block.get("citations")
            block["citations"] = [*(cast(list[Any], reported) if isinstance(reported, list) else ()), *self.citations]
        if self.signature is not None:
            block["signature"] = self.signature
        for name, parts in self.parts.items():
            begun = block.get(name)
            block[name] = f"{begun if isinstance(begun, str) else ''}{''.join(parts)}"
            if name == "partial_json":
                # A model may write something that is not JSON.
                with suppress(ValueError):
                    block["input"] = read_json(block[name].encode())
        return block


def _call(block: _BlockSoFar, call: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"index": block.call, **call}]}


def text_of(block: Mapping[str, Any]) -> str | None:
    """Returns the text of a text block; None for another block."""
    text = block.get("text")
    return text if block.get("type") == "text" and isinstance(text, str) else None


def _index(event: Mapping[str, Any]) -> int:
    index = event.get("index")
    return index if isinstance(index, int) else 0
