"""The simulated provider's other interfaces: Anthropic's Messages, and Azure's deployments."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from breakwater.local.provider import SimulatedProvider
from tests.tables import each_row

from .provider_kit import COST_NANO, PRICE, USAGE

VERSION = {"anthropic-version": "2023-06-01"}
USER = {"role": "user", "content": "hello"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]


def script(*faults: dict[str, Any], names: tuple[str, ...] = ("anthropic/claude",), **more: Any) -> dict[str, Any]:
    rules = {"price": PRICE, "usage": USAGE, "faults": list(faults), **more}
    return {"seed": 7, "models": dict.fromkeys(names, rules)}


def message(*said: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "claude", "max_tokens": 100, "messages": list(said) or [USER], **more}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def post(
    session: aiohttp.ClientSession, url: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    async with session.post(url, json=body, headers=VERSION if headers is None else headers) as response:
        names = {name.lower(): value for name, value in response.headers.items()}
        return response.status, await response.json(), names


async def test_an_answer_has_anthropics_shape_and_is_in_the_ledger(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script()) as sim:
        status, body, headers = await post(session, f"{sim.url}/messages", message())
        [call] = sim.ledger.calls
    assert status == 200
    assert headers["request-id"].startswith("req_")
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "anthropic/claude",
        "content": [{"type": "text", "text": "Simulated answer 1 of anthropic/claude to: hello", "citations": None}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": 100,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 20,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": 40,
            "output_tokens_details": None,
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
        },
    }
    assert (call.model, call.input_tokens, call.cached_tokens, call.cost_nano) == (
        "anthropic/claude",
        120,
        20,
        COST_NANO,
    )


async def test_a_conversation_means_the_same_over_both_interfaces(session: aiohttp.ClientSession) -> None:
    content = script(usage={}, tool_calls=[{"name": "f", "arguments": {"a": 1}}], answer="{prompt}")
    async with SimulatedProvider(content) as sim:
        _, asked, _ = await post(session, f"{sim.url}/messages", message(tools=TOOLS))
        [block] = asked["content"]
        assert (asked["stop_reason"], block["name"], block["input"]) == ("tool_use", "f", {"a": 1})
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "four"}]}
        turns = [USER, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        _, reported, _ = await post(session, f"{sim.url}/messages", message(*turns, tools=TOOLS, system="be brief"))
        assert reported["content"] == [{"type": "text", "text": "hello", "citations": None}]
        function = {"name": "f", "arguments": "{}"}
        chat = {
            "model": "claude",
            "messages": [
                {"role": "system", "content": "be brief"},
                USER,
                {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
                {"role": "tool", "tool_call_id": "1", "content": "four"},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        }
        _, same, _ = await post(session, f"{sim.url}/chat/completions", chat)
    assert same["choices"][0]["message"]["content"] == "hello"
    assert same["usage"]["prompt_tokens"] == reported["usage"]["input_tokens"]


TURN: list[dict[str, Any]] = [
    {"type": "thinking", "text": "Which ship?"},
    {"type": "thinking", "text": "secret", "redacted": True},
    {"type": "hosted", "query": "ferries"},
    {"type": "text", "text": "It is {prompt}.", "cites": ["https://example.org/a"]},
    {"type": "tool_call", "name": "f", "arguments": {"name": "ferry"}},
]
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


async def stream_of(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The message that the events of a stream come to."""
    content: list[dict[str, Any]] = []
    message: dict[str, Any] = {}
    async with session.post(url, json={**body, "stream": True}, headers=VERSION) as response:
        async for line in response.content:
            event = orjson.loads(line[6:]) if line.startswith(b"data: ") else {"type": "none"}
            match event:
                case {"type": "message_start", "message": begun}:
                    message = begun
                case {"type": "content_block_start", "content_block": block}:
                    content.append(block | ({"input": ""} if "input" in block else {}))
                case {"delta": {"type": kind, **given}}:
                    block = content[event["index"]]
                    for name, value in given.items():
                        field = {"partial_json": "input", "citation": "citations"}.get(name, name)
                        block[field] = (
                            (block[field] or []) + [value] if kind == "citations_delta" else block[field] + value
                        )
                case {"type": "message_delta", "delta": ended, "usage": usage}:
                    message |= ended
                    message["usage"] |= usage
                case _:
                    pass
    return {**message, "content": [b | ({"input": orjson.loads(b["input"])} if "input" in b else {}) for b in content]}


async def test_blocks_of_each_kind_come_whole_and_in_pieces_alike(session: aiohttp.ClientSession) -> None:
    usage = {"input_tokens": 100, "output_tokens": 40, "cached_tokens": 20, "cache_write_tokens": 30}
    usage["cache_write_1h_tokens"] = 10
    price = {**PRICE, "cache_write_usd_per_mtok": "0.2", "hosted_usd": {"web_search": "0.01"}}
    asked = message(tools=TOOLS, **THINKS)
    async with SimulatedProvider(script(turns=[TURN], usage=usage, price=price)) as sim:
        _, whole, _ = await post(session, f"{sim.url}/messages", asked)
        streamed = await stream_of(session, f"{sim.url}/messages", asked)
        [first, second] = sim.ledger.calls
    assert [block["type"] for block in whole["content"]] == [
        "thinking",
        "redacted_thinking",
        "server_tool_use",
        "web_search_tool_result",
        "text",
        "tool_use",
    ]
    assert whole["content"][4]["text"] == "It is hello."
    ids = r'"(?:toolu|srvtoolu|msg)_\w+"'
    assert re.sub(ids, "", json.dumps(streamed, sort_keys=True)) == re.sub(ids, "", json.dumps(whole, sort_keys=True))
    assert whole["usage"] == {
        "input_tokens": 40,
        "cache_creation_input_tokens": 40,
        "cache_read_input_tokens": 20,
        "output_tokens": 40,
        "output_tokens_details": {"thinking_tokens": 5},
        "cache_creation": {"ephemeral_5m_input_tokens": 30, "ephemeral_1h_input_tokens": 10},
        "server_tool_use": {"web_search_requests": 1, "web_fetch_requests": 0},
        "service_tier": "standard",
        "inference_geo": None,
    }
    assert first.cost_nano == 40 * 150 + 20 * 75 + 30 * 200 + 10 * 300 + 40 * 600 + 10_000_000
    assert second.cost_nano == first.cost_nano


async def test_thoughts_come_when_asked_for_and_are_taken_back_unchanged_alone(session: aiohttp.ClientSession) -> None:
    asked = message(tools=TOOLS, **THINKS)
    turns = [TURN, [{"type": "text", "text": "in port"}]]
    async with SimulatedProvider(script(turns=turns, answer="short")) as sim:
        url = f"{sim.url}/messages"
        _, first, _ = await post(session, url, asked)
        result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "found"}
        said = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        _, second, _ = await post(session, url, asked | {"messages": said})
        assert [block["type"] for block in second["content"]] == ["thinking", "text"]
        assert second["content"][0]["thinking"] == "Thinking about: hello"
        _, omitted, _ = await post(session, url, message(thinking={"type": "adaptive", "display": "omitted"}))
        assert omitted["content"][0]["thinking"] == ""
        assert omitted["content"][0]["signature"] != ""
        for index, change in ((0, {"thinking": "Which boat?"}), (0, {"signature": "c2lnbmVk"}), (1, {"data": "x"})):
            changed = [dict(block) for block in first["content"]]
            changed[index] |= change
            said[1] = {"role": "assistant", "content": changed}
            status, body, _ = await post(session, url, asked | {"messages": said})
            assert (status, f"messages.1.content.{index}" in body["error"]["message"]) == (400, True)
        _, plain, _ = await post(session, url, message())
    assert plain["content"] == [{"type": "text", "text": "short", "citations": None}]


@each_row(
    ("turn", "change", "reason", "sequence"),
    [
        ([{"type": "text", "text": "one two"}], {"stop_sequences": ["two", "x"]}, "stop_sequence", "two"),
        ([{"type": "text", "text": "one two"}], {"stop_sequences": ["three"]}, "end_turn", None),
        ([{"type": "refusal", "text": "no"}], {}, "refusal", None),
        ([], {"tools": TOOLS, "tool_choice": {"type": "any"}}, "tool_use", None),
        ([], {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_use", None),
        ([], {"tools": TOOLS, "tool_choice": {"type": "auto"}}, "end_turn", None),
        ([], {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "end_turn", None),
        ([TURN[4]], {"max_tokens": 1, "tools": TOOLS}, "max_tokens", None),
    ],
)
async def test_the_reason_of_the_end_is_named(
    session: aiohttp.ClientSession, turn: list[Any], change: dict[str, Any], reason: str, sequence: str | None
) -> None:
    async with SimulatedProvider(script(turns=[turn])) as sim:
        _, body, _ = await post(session, f"{sim.url}/messages", message() | change)
        streamed = await stream_of(session, f"{sim.url}/messages", message() | change)
    for one in (body, streamed):
        assert (one["stop_reason"], one["stop_sequence"]) == (reason, sequence)
        searched = any(block["type"] == "web_search_tool_result" for block in one["content"])
        assert searched == (change.get("tools") == [SEARCH])


async def test_tokens_are_counted_without_a_call(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider({**script(usage={}), "api_keys": ["sk-a"]}) as sim:
        url, key = f"{sim.url}/messages/count_tokens", VERSION | {"x-api-key": "sk-a"}
        asked = {"model": "claude", "messages": [{"role": "user", "content": "a" * 400}], "system": "b" * 40}
        assert (await post(session, url, asked, key))[:2] == (200, {"input_tokens": 110})
        assert (await post(session, url, asked))[0] == 401
        assert (await post(session, url, asked, {"x-api-key": "sk-a"}))[0] == 400
        assert (await post(session, url, asked | {"model": "none"}, key))[0] == 404
        assert (await post(session, url, asked | {"messages": []}, key))[0] == 400
        assert sim.ledger.calls == ()


@pytest.mark.parametrize(("effort", "thoughts"), [("low", 6), ("none", 0), (None, 0)])
async def test_chat_counts_thoughts_that_it_does_not_show(
    session: aiohttp.ClientSession, effort: str | None, thoughts: int
) -> None:
    asked = {"model": "claude", "messages": [USER], "reasoning_effort": effort}
    async with SimulatedProvider(script(usage={})) as sim:
        _, body, _ = await post(session, f"{sim.url}/chat/completions", asked)
    details = body["usage"].get("completion_tokens_details", {"reasoning_tokens": 0})
    assert details == {"reasoning_tokens": thoughts}
    assert "reasoning_content" not in body["choices"][0]["message"]


async def test_chat_shows_of_a_turn_what_it_can(session: aiohttp.ClientSession) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = {"model": "claude", "messages": [USER], "tools": tools}
    async with SimulatedProvider(script(turns=[TURN], headers={"x-ratelimit-remaining-requests": "9"})) as sim:
        _, body, headers = await post(session, f"{sim.url}/chat/completions", asked)
    [choice] = body["choices"]
    said = choice["message"]
    assert (choice["finish_reason"], said["content"], said["reasoning_content"]) == (
        "tool_calls",
        "It is hello.",
        "Which ship?",
    )
    assert said["annotations"][0]["url_citation"]["url"] == "https://example.org/a"
    assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"name":"ferry"}'}
    assert headers["x-ratelimit-remaining-requests"] == "9"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"status": 401}, "authentication_error"),
        ({"status": 429, "retry_after_s": 2}, "rate_limit_error"),
        ({"status": 500}, "api_error"),
        ({"status": 503}, "api_error"),
        ({"status": 418}, "invalid_request_error"),
        ({"status": 529}, "overloaded_error"),
    ],
)
async def test_an_error_has_anthropics_shape(session: aiohttp.ClientSession, fault: dict[str, Any], kind: str) -> None:
    async with SimulatedProvider(script(fault)) as sim:
        status, body, headers = await post(session, f"{sim.url}/messages", message())
    assert (status, body["type"], body["error"]["type"]) == (fault["status"], "error", kind)
    assert set(body["error"]) == {"type", "message"}
    assert body["request_id"] == headers["request-id"]
    assert headers.get("retry-after") == ("2" if status == 429 else None)
    assert ("anthropic-ratelimit-requests-reset" in headers) == (status == 429)


@each_row(
    ("change", "words"),
    [
        ({"model": None}, "model: Field required"),
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"frequency_penalty": 1}, "frequency_penalty: Extra inputs are not permitted"),
    ],
)
async def test_a_request_that_anthropic_would_refuse_is_refused(
    session: aiohttp.ClientSession, change: dict[str, Any], words: str
) -> None:
    async with SimulatedProvider(script()) as sim:
        asked = {name: value for name, value in (message() | change).items() if value is not None}
        status, body, _ = await post(session, f"{sim.url}/messages", asked)
        assert sim.ledger.totals.billed_calls == 0
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert words in body["error"]["message"]


async def test_the_version_has_to_be_named_over_both_interfaces(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script()) as sim:
        status, body, _ = await post(session, f"{sim.url}/messages", message(), headers={})
        assert (status, body["error"]["message"]) == (400, "anthropic-version: header is required")
        deployment = f"{sim.url.removesuffix('/v1')}/openai/deployments/claude/chat/completions"
        status, body, _ = await post(session, deployment, {"messages": [USER]})
        assert (status, body["error"]["message"]) == (404, "Resource not found")


async def test_a_deployments_model_is_in_the_url(session: aiohttp.ClientSession) -> None:
    async with SimulatedProvider(script(names=("azure/gpt:1", "b"))) as sim:
        origin = sim.url.removesuffix("/v1")
        for name in ("gpt:1", "azure%2Fgpt:1"):
            url = f"{origin}/openai/deployments/{name}/chat/completions?api-version=2024-10-21"
            status, body, _ = await post(session, url, {"messages": [USER], "model": "ignored"})
            assert (status, body["model"]) == (200, "azure/gpt:1")
        assert [call.number for call in sim.ledger.calls] == [1, 2]


@each_row(
    ("path", "headers", "status"),
    [
        ("/v1/messages", {"x-api-key": "sk-a"}, 200),
        ("/v1/messages", {"Authorization": "Bearer sk-a"}, 200),
        ("/v1/messages", {"x-api-key": "sk-b", "Authorization": "Bearer sk-a"}, 401),
        ("/v1/messages", {"api-key": "sk-a"}, 401),
        ("/v1/messages", {"Authorization": "sk-a"}, 401),
        ("/v1/chat/completions", {"Authorization": "Bearer sk-a"}, 200),
        ("/v1/chat/completions", {"x-api-key": "sk-a"}, 401),
        ("/openai/deployments/claude/chat/completions?api-version=1", {"api-key": "sk-a"}, 200),
        ("/openai/deployments/claude/chat/completions?api-version=1", {"x-api-key": "sk-a"}, 401),
    ],
)
async def test_each_interface_has_its_own_header_for_the_key(
    session: aiohttp.ClientSession, path: str, headers: dict[str, str], status: int
) -> None:
    async with SimulatedProvider({**script(), "api_keys": ["sk-a"]}) as sim:
        url = sim.url.removesuffix("/v1") + path
        assert (await post(session, url, message(), headers=VERSION | headers))[0] == status


@each_row(
    ("names", "asked", "found"),
    [
        (("a/m", "b/n"), "m", "a/m"),
        (("a/m", "b/n"), "a/m", "a/m"),
        (("a/b/m",), "m", "a/b/m"),
        (("a/b/m",), "b/m", "a/b/m"),
        (("m", "a/m"), "m", "m"),
        (("a/m", "b/m"), "m", None),
        (("a/xm",), "m", None),
        (("a/m",), "b/m", None),
    ],
)
async def test_a_model_is_found_without_its_providers_name_where_that_is_clear(
    session: aiohttp.ClientSession, names: tuple[str, ...], asked: str, found: str | None
) -> None:
    async with SimulatedProvider(script(names=names)) as sim:
        status, body, _ = await post(session, f"{sim.url}/messages", message() | {"model": asked})
        [call] = sim.ledger.calls
    assert (status, call.model) == ((200, found) if found else (404, asked))
    if found is None:
        assert body["error"] == {"type": "not_found_error", "message": f"model: {asked}"}
