"""Anthropic's SDK as far as a stream matters to it: it puts a message together of events, and fails at odd ones."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json


class Accumulation:
    """The message of a stream so far. `add` fails where an SDK would, or where events are out of order."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self.stopped = False
        self._open: int | None = None
        self._inputs: dict[int, str] = {}

    def add(self, event: dict[str, Any]) -> None:
        assert not self.stopped, event
        match event["type"]:
            case "ping":
                pass
            case "message_start":
                assert not self.message
                self.message = copy.deepcopy(event["message"])
                assert self.message["content"] == []
                assert isinstance(self.message["usage"]["input_tokens"], int)
            case "content_block_start":
                assert self._open is None, "a block begins before the end of the one before it"
                assert event["index"] == len(self.message["content"])
                self._open = event["index"]
                self.message["content"].append(copy.deepcopy(event["content_block"]))
            case "content_block_delta":
                assert event["index"] == self._open
                self._grow(self.message["content"][event["index"]], event["index"], event["delta"])
            case "content_block_stop":
                assert event["index"] == self._open
                self._open = None
            case "message_delta":
                assert self._open is None
                self.message |= event["delta"]
                self.message["usage"] |= event["usage"]
                self.message |= {name: event[name] for name in ("context_management",) if name in event}
            case "message_stop":
                assert self.message["stop_reason"]
                self.stopped = True
            case other:
                raise AssertionError(f"an SDK knows no {other!r}")

    def _grow(self, block: dict[str, Any], index: int, delta: dict[str, Any]) -> None:
        match delta["type"]:
            case "text_delta":
                assert block["type"] == "text"
                block["text"] += delta["text"]
            case "thinking_delta":
                assert block["type"] == "thinking"
                block["thinking"] += delta["thinking"]
            case "signature_delta":
                assert block["type"] == "thinking"
                block["signature"] = delta["signature"]
            case "citations_delta":
                assert block["type"] == "text"
                block["citations"] = [*(block.get("citations") or []), delta["citation"]]
            case "input_json_delta":
                text = self._inputs[index] = self._inputs.get(index, "") + delta["partial_json"]
                if text.strip():
                    block["input"] = from_json(text, allow_partial=True)
                    assert isinstance(block["input"], dict)
            case "compaction_delta":
                block["content"] = (block.get("content") or "") + delta["content"]
            case other:
                raise AssertionError(f"an SDK knows no {other!r}")


def accumulated(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The whole message of a whole stream."""
    so_far = Accumulation()
    for event in events:
        so_far.add(event)
    assert so_far.stopped
    return so_far.message


def blocks_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Its blocks, without the fields that all of their kind have, whatever was said."""
    common = {"citations": None, "caller": {"type": "direct"}}
    return [
        {name: value for name, value in block.items() if name not in common or value != common[name]}
        for block in message["content"]
    ]
