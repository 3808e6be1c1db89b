"""Requests with anything in any of their places: the simulated provider answers or refuses them."""

from __future__ import annotations

from typing import Any

import orjson

from breakwater.local.provider.app import API_PATHS
from breakwater.local.provider.behaviour import decide, make_plans
from breakwater.local.provider.openai import OpenAI, RequestRefusedError, seal
from breakwater.local.provider.reply import reply_to
from breakwater.local.provider.script import build_script
from tests.dialects.test_any_body import BODIES, ODD, changed, places
from tests.tables import each_row

from .provider_kit import MODEL, script

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "b"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["x"],
}
SIGNED = changed(BODIES["messages"], ("messages", 2, "content", 0, "signature"), seal("b"))
REQUESTS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": BODIES["responses"],
    "/v1/embeddings": BODIES["embeddings"],
    "/v1/messages": SIGNED,
}
PLAN = make_plans(build_script(script()))[MODEL]


def served(dialect: OpenAI, body: dict[str, Any]) -> bool:
    try:
        request = dialect.read(orjson.dumps({"model": MODEL, **body}))
    except RequestRefusedError:
        return False
    return reply_to(decide(PLAN, 1, 0.0, request), dialect, "req_1").status == 200


@each_row("path", API_PATHS)
def test_anything_in_any_place_is_answered_or_refused(path: str) -> None:
    assert served(API_PATHS[path], REQUESTS[path])
    for place in places(REQUESTS[path]):
        for odd in ODD:
            served(API_PATHS[path], changed(REQUESTS[path], place, odd))
