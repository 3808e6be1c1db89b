"""Anthropic's streams: its events as OpenAI's chunks, and as the message that they come to."""

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
"""Types of the blocks that have these fields."""
_IN_CHAT = ("text", "thinking", "tool_use")
"""Types of blocks that chunks have fields for."""


class MessageEvents:
    """Reads the events of one message.

    In the chunks of a chat, its thinking is missing, as is all that OpenAI's format has no field for; of an answer that
    calls tools, the calls have it, as clients are to send it back. Those of a native call have it, and each has the
    event that it is made of: with the number of its block in the message.
    """

    def __init__(self, usage_of: Callable[[Mapping[str, Any]], Usage | None], *, native: bool = False) -> None:
        self.done = False
        self._native = native
        self._usage_of = usage_of
        self._message: dict[str, Any] = {}
        self._begun: Mapping[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._blocks: list[_BlockSoFar] = []
        self._latest: dict[int, _BlockSoFar] = {}
        """The open block at each index: some gateways number all blocks 0."""
        self._calls = 0
        self._shown = 0
        """Number of blocks whose thinking is in the chunks."""
        self._created = int(time.time())

    @property
    def whole(self) -> bool:
        """True if it has ended, or said why it will."""
        return self.done or is_end(self._message.get("stop_reason"))

    def read(self, event: Mapping[str, Any] | None) -> Iterable[Chunk]:
        """The chunks that an event means; unknown events mean nothing, as Anthropic may add some."""
        event = event or {}
        match event.get("type"):
            case "message_start":
                # With choices, it would be taken for a chat completion.
                self._message = {
                    name: value for name, value in fields(event.get("message")).items() if name != "choices"
                }
                self._begun = fields(self._message.pop("usage", None))
                # What it says of the output is only its beginning.
                self._usage = {**self._begun, "output_tokens": None}
                return self._chunks({"role": "assistant", "content": ""}, event)
            case "content_block_start":
                return self._begin(_index(event), dict(fields(event.get("content_block"))))
            case "content_block_delta":
                return self._grow(_index(event), fields(event.get("delta")))
            case "content_block_stop":
                return self._end(_index(event))
            case "message_delta":
                changed = fields(event.get("delta")).items()
                delta = {name: value for name, value in changed if value is not None and name != "choices"}
                if (edits := event.get("context_management")) is not None:
                    delta["context_management"] = edits
                self._message |= delta
                if used := fields(event.get("usage")):
                    self._usage = highest(highest(self._begun, self._usage), used)
                reason = delta.get("stop_reason")
                if not is_end(reason) or (reason := finish_reason(reason)) in INTERRUPTED:
                    return ()
                more = self._new_thinking() if self._calls else {}
                return (self._chunk(more, finish_reason_of(reason, called=bool(self._calls))),)
            case "message_stop":
                self.done = True
                return self._usage_chunk()
            case _:
                return ()

    def _new_thinking(self) -> dict[str, Any]:
        """The blocks of thinking since the last call, which Anthropic wants back with the tools' results."""
        kinds = ("thinking", "redacted_thinking")
        first = self._shown
        self._shown = len(self._blocks)
        blocks = [block.whole() for block in self._blocks[first:] if block.given.get("type") in kinds]
        return {"thinking_blocks": blocks} if blocks and not self._native else {}

    def _begin(self, index: int, given: dict[str, Any]) -> Iterable[Chunk]:
        ended = self._end(index)  # where its maker did not say so
        block = self._latest[index] = _BlockSoFar(given, len(self._blocks))
        self._blocks.append(block)
        event = {"type": "content_block_start", "index": block.number, "content_block": given}
        kind = given.get("type")
        if kind == "tool_use":
            block.call = self._calls
            self._calls += 1
            # Some say all of the input here.
            function = {"name": given.get("name"), "arguments": arguments_text(given.get("input") or "")}
            delta = self._new_thinking() | _call(
                block, {"id": given.get("id"), "type": "function", "function": function}
            )
        elif self._native and isinstance(kind, str) and kind not in _IN_CHAT:
            delta = {OTHERS: [given]}
        else:
            delta = {"content": text} if (text := text_of(given)) else None
        return (*ended, *self._chunks(delta, event))

    def _grow(self, index: int, delta: Mapping[str, Any]) -> Iterable[Chunk]:
        kind = str(delta.get("type"))
        grows = _GROWS.get(kind)
        citation = delta.get("citation") if kind == "citations_delta" else None
        text = delta.get(grows) if grows is not None else None
        if grows == "partial_json":
            text = arguments_text(text)
        block = self._latest.get(index)
        begun = list[Chunk]()
        if grows == "text" and text and (block is None or block.given.get("type") != "text"):
            begun += self._begin(index, {"type": "text", "text": ""})
            block = self._latest[index]
        if block is None:
            return ()
        event = {"type": "content_block_delta", "index": block.number, "delta": delta}
        if citation is not None and block.given.get("type") == "text":
            block.citations.append(citation)
            return self._chunks({"annotations": [citation]} if self._native else None, event)
        if grows is None or not isinstance(text, str) or not text:
            return ()
        if _HOLDERS.get(grows, block.given.get("type")) != block.given.get("type"):
            return ()  # of another block, whose number it lacks
        if grows == "partial_json" and (not block.takes_input or block.given.get("input")):
            return ()
        if grows == "signature":
            block.signature = text
        else:
            block.parts.setdefault(grows, []).append(text)
        event["delta"] = {**delta, grows: text}
        if grows == "partial_json" and block.call is not None:
            return self._chunks(_call(block, {"function": {"arguments": text}}), event)
        if grows == "thinking" and self._native:
            return self._chunks({THOUGHT: text}, event)
        return (*begun, *self._chunks({"content": text} if grows == "text" else None, event))

    def _end(self, index: int) -> Iterable[Chunk]:
        block = self._latest.pop(index, None)
        if block is None:
            return ()
        event = {"type": "content_block_stop", "index": block.number}
        if block.call is None or block.parts or block.given.get("input"):
            return self._chunks(None, event)
        # Of a call without arguments no more is said; OpenAI's clients expect JSON.
        block.parts["partial_json"] = ["{}"]
        return self._chunks(_call(block, {"function": {"arguments": "{}"}}), event)

    def answer(self) -> dict[str, Any]:
        """The message; its tool calls have their arguments as they were written, too, as `partial_json`."""
        usage = {"usage": self._usage} if self._usage else {}
        return {**self._message, "content": [block.whole() for block in self._blocks], **usage}

    def _chunks(self, delta: dict[str, Any] | None, event: Mapping[str, Any]) -> Iterable[Chunk]:
        """The chunk of an event, as far as there is one."""
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
    given: dict[str, Any]
    number: int
    call: int | None = None
    """Number among the calls, where it is one."""
    parts: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    citations: list[Any] = field(default_factory=list[Any])
    signature: str | None = None
    """The latest, as Anthropic's SDKs take it: it comes whole."""

    @property
    def takes_input(self) -> bool:
        """True for a tool, the provider's own included."""
        return "input" in self.given or self.call is not None

    def whole(self) -> dict[str, Any]:
        block = dict(self.given)
        if self.citations:
            given = block.get("citations")
            block["citations"] = [*(cast(list[Any], given) if isinstance(given, list) else ()), *self.citations]
        if self.signature is not None:
            block["signature"] = self.signature
        for name, parts in self.parts.items():
            begun = block.get(name)
            block[name] = f"{begun if isinstance(begun, str) else ''}{''.join(parts)}"
            if name == "partial_json":
                # A model may write what is no JSON.
                with suppress(ValueError):
                    block["input"] = read_json(block[name].encode())
        return block


def _call(block: _BlockSoFar, call: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [{"index": block.call, **call}]}


def text_of(block: Mapping[str, Any]) -> str | None:
    """The text of a block of text; None for another."""
    text = block.get("text")
    return text if block.get("type") == "text" and isinstance(text, str) else None


def _index(event: Mapping[str, Any]) -> int:
    index = event.get("index")
    return index if isinstance(index, int) else 0
