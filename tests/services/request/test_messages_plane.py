"""Anthropic's Messages through a plane: the request service, a worker, and a provider of either dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from breakwater.config import load_config
from breakwater.dialects.rules.messages import UNSIGNED, message_of
from breakwater.identity.api_keys import create_key
from tests.anthropic_client import Accumulation, accumulated
from tests.flow.kit import model
from tests.server_sources import RunningServer
from tests.services.request.conftest import Answer, HttpApi, new_id, running, settings_for
from tests.services.request.test_messages import events
from tests.services.worker.harness import WorkerPlane, running_worker

TOOL: dict[str, Any] = {
    "name": "find_ship",
    "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}
ASK: dict[str, Any] = {
    "max_tokens": 2000,
    "messages": [{"role": "user", "content": "Where is the ferry?"}],
    "tools": [TOOL],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
SHIPS = ("ferry", "tug", "yacht")
TURNS = [
    [
        {"type": "thinking", "text": f"I look for the {ship}."},
        {"type": "tool_call", "name": "find_ship", "arguments": {"name": ship}},
    ]
    for ship in SHIPS
] + [[{"type": "thinking", "text": "Found."}, {"type": "text", "text": "At sea."}]]
CACHE = {
    "input_tokens": 1000,
    "output_tokens": 10,
    "cached_tokens": 300,
    "cache_write_tokens": 200,
    "cache_write_1h_tokens": 100,
}
PRICES = {
    "input_usd_per_mtok": "1",
    "output_usd_per_mtok": "10",
    "cached_input_usd_per_mtok": "0.1",
    "cache_write_usd_per_mtok": "1.25",
    "cache_write_1h_usd_per_mtok": "2",
}
MODELS = {
    "claude": model(turns=TURNS, answer="Done."),
    "claude-busy": model({"requests": [2, 2], "status": 529}, turns=TURNS, answer="Done."),
    "claude-broken": model(
        {"stream": "cut", "after_chunks": 20}, answer="".join(f"{number:03d} " for number in range(60))
    ),
    "claude-cut": model({"requests": [1, 1], "stream": "cut", "after_chunks": 2}, turns=TURNS, answer="Done."),
    "claude-cached": {**model(answer="Hi", usage=CACHE), "price": PRICES},
    "claude-search": model(
        turns=[
            [
                {"type": "hosted", "query": "ferry"},
                {"type": "text", "text": "At sea.", "cites": ["https://example.org"]},
            ]
        ]
    ),
    "sim/plain": model(
        {
            "requests": [1, 1],
            "status": 400,
            "error": {
                "message": "Unsupported parameter: 'reasoning_effort' is not supported with this model.",
                "code": "unsupported_parameter",
                "param": "reasoning_effort",
            },
        },
        answer="Done.",
    ),
    "sim/gpt": model(turns=TURNS, answer="Done."),
    "sim/fast": model(answer="".join(f"{number:03d} " for number in range(60))),
}
SHIPS_AT_SEA = """cat > /dev/null; echo '{"status": "success", "code": 0, "result": {"ships": 3}}'"""
ONCE = {"retry": {"max_attempts": 1}, "breaker": "off"}
AGENTS = {
    "claude": {"model": "anthropic/claude", **ONCE},
    "chat": {"model": "sim/gpt", **ONCE},
    "backed-up": {"model": "anthropic/claude-busy", "fallback_models": ["sim/gpt"], **ONCE},
    "continued": {
        "model": "anthropic/claude-broken",
        "fallback_models": ["sim/fast"],
        "on_stream_break": "continue",
        **ONCE,
    },
    "thinking-on": {
        "model": "anthropic/claude-cut",
        "fallback_models": ["sim/gpt"],
        "on_stream_break": "continue",
        **ONCE,
    },
    "plain": {"model": "sim/plain", **ONCE},
    "cached": {"model": "anthropic/claude-cached", **ONCE},
    "remembering": {"model": "anthropic/claude", "cache": {"ttl_s": 60}, **ONCE},
    "counting": {"provider": "tool"},
    "searching": {"model": "anthropic/claude-search", **ONCE},
}


@dataclass(frozen=True, slots=True)
class MessagesPlane:
    api: HttpApi
    worker: WorkerPlane

    async def ask(self, agent: str, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        key = create_key(self.api.settings.api_keys_file, "app", ("submit",))
        sent = {"x-api-key": key, **(headers or {})}
        asked = {"model": agent, **ASK, **body}
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.api.url}/v1/messages", json=asked, headers=sent) as answer,
        ):
            return Answer(answer.status, dict(answer.headers), await answer.read())


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[MessagesPlane]:
    directory = tmp_path_factory.mktemp("messages")
    started = running_worker(
        directory,
        nats_url=module_nats_server.url,
        redis_url=redis_server.url,
        script={"models": MODELS},
        agents=AGENTS,
        more_models={"anthropic/claude-cached": {"price": PRICES}},
        more_providers={
            "anthropic": {"kind": "anthropic", "base_url": "http://127.0.0.1:{sim_port}/v1"},
            "tool": {"kind": "process", "command": ["sh", "-c", SHIPS_AT_SEA]},
        },
    )
    async with started as worker:
        settings = settings_for(module_nats_server.url, redis_server.url, directory)
        config = load_config(directory / "breakwater.yaml")
        async with running(settings, config, create_key(settings.api_keys_file, "tests")) as api:
            yield MessagesPlane(api, worker)


async def stored(plane: MessagesPlane, answer: Answer) -> dict[str, Any]:
    """The message that the record of a call comes to."""
    return message_of(await plane.worker.result(answer.headers["x-breakwater-execution-id"]))


def without_usage(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "usage"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", ["claude", "chat", "backed-up"])
async def test_a_tool_loop_with_thinking_is_the_same_in_record_and_stream(
    plane: MessagesPlane, agent: str, stream: bool
) -> None:
    plane.worker.sim.use({"models": MODELS})  # counts from the start
    messages: list[Any] = list(ASK["messages"])
    answered: list[str] = []
    for turn in range(4):
        answer = await plane.ask(agent, messages=messages, stream=stream)
        assert answer.status == 200, answer.body
        message = accumulated(events(answer)) if stream else answer.json
        answered.append(answer.headers["x-breakwater-model"])
        recorded = await stored(plane, answer)
        assert without_usage(message) == without_usage(recorded)
        for name in ("input_tokens", "output_tokens"):
            assert message["usage"][name] == recorded["usage"][name] > 0
        *thoughts, last = message["content"]
        if answered[-1] != "sim/gpt":
            assert [block["type"] for block in thoughts] == ["thinking"]
            assert thoughts[0]["signature"] not in {"", UNSIGNED}
        if turn == 3:
            assert (last["text"], message["stop_reason"]) == ("At sea.", "end_turn")
            break
        assert (last["type"], last["input"], message["stop_reason"]) == ("tool_use", {"name": SHIPS[turn]}, "tool_use")
        messages += [
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": last["id"], "content": "at sea"}]},
        ]
    if agent == "backed-up":
        assert answered == ["anthropic/claude-busy", "sim/gpt", "anthropic/claude-busy", "anthropic/claude-busy"]


async def test_an_answer_that_breaks_off_is_continued_by_another_dialect(plane: MessagesPlane) -> None:
    answer = await plane.ask("continued", stream=True, tools=[], thinking={"type": "disabled"})
    message = accumulated(events(answer))
    text = "".join(block["text"] for block in message["content"])
    assert text.startswith("".join(f"{number:03d} " for number in range(20)))
    assert message["content"] == (await stored(plane, answer))["content"]
    assert [
        attempt["outcome"]
        for attempt in (await plane.worker.result(answer.headers["x-breakwater-execution-id"]))["attempts"]
    ] == [
        "error",
        "success",
    ]


async def test_a_thought_that_breaks_off_goes_on_in_another_dialect_and_back(plane: MessagesPlane) -> None:
    answer = await plane.ask("thinking-on", stream=True)
    message = accumulated(events(answer))
    thought, call = message["content"]
    assert message["content"] == (await stored(plane, answer))["content"]
    assert (thought["type"], thought["signature"][:11]) == ("thinking", "breakwater:")
    assert (call["type"], call["input"]) == ("tool_use", {"name": "ferry"})
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "at sea"}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    back = await plane.ask("thinking-on", messages=messages, stream=True)
    assert back.headers["x-breakwater-model"] == "anthropic/claude-cut"
    assert [block["type"] for block in accumulated(events(back))["content"]] == ["thinking", "tool_use"]


async def test_reads_and_writes_of_a_cache_have_their_prices(plane: MessagesPlane) -> None:
    answer = await plane.ask("cached", thinking=None, tools=[])
    usage = answer.json["usage"]
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": 200, "ephemeral_1h_input_tokens": 100}
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (400, 300)
    nano = 400 * 1000 + 300 * 100 + 200 * 1250 + 100 * 2000 + 10 * 10_000
    assert answer.headers["x-breakwater-cost-usd"] == f"{nano / 1e9:.9f}"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_providers_own_tools_and_what_they_found_are_passed_on(plane: MessagesPlane, stream: bool) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    answer = await plane.ask("searching", stream=stream, thinking=None, tools=tools)
    assert answer.status == 200, answer.body
    message = accumulated(events(answer)) if stream else answer.json
    assert [block["type"] for block in message["content"]] == ["server_tool_use", "web_search_tool_result", "text"]
    assert message["content"][0]["input"] == {"query": "ferry"}
    assert message["content"][2]["citations"][0]["url"] == "https://example.org"
    assert message["usage"]["server_tool_use"]["web_search_requests"] == 1
    result = await plane.worker.result(answer.headers["x-breakwater-execution-id"])
    assert int(result["attempts"][0]["cost"].replace(".", "")) >= 10_000_000, "a search has a price"


async def test_a_field_that_a_chat_lacks_is_refused_by_name_and_passes_to_anthropic(plane: MessagesPlane) -> None:
    refused = await plane.ask("chat", container="c1")
    assert (refused.status, refused.code) == (400, "invalid_request_error")
    assert refused.message.startswith("container: ")
    assert (await plane.ask("claude", container="c1")).status == 200
    dropped = "x-breakwater-dropped-params"
    wished = {"metadata": {"user_id": "u"}, "service_tier": "auto"}
    assert (await plane.ask("chat", **wished)).headers[dropped] == "metadata, thinking"
    assert dropped not in (await plane.ask("claude", **wished)).headers
    unknown = await plane.ask("claude", new_field=1)
    assert (unknown.status, unknown.code) == (400, "invalid_request_error"), "Anthropic's own refusal"
    assert "new_field" in unknown.message


@pytest.mark.parametrize("stream", [False, True])
async def test_whatever_answers_it_is_a_message(plane: MessagesPlane, stream: bool) -> None:
    async def said(agent: str, **body: Any) -> tuple[Answer, list[dict[str, Any]]]:
        answer = await plane.ask(agent, stream=stream, **body)
        assert answer.status == 200, answer.body
        return answer, (accumulated(events(answer)) if stream else answer.json)["content"]

    _, [counted] = await said("counting", tools=[], thinking=None)
    assert json.loads(counted["text"]) == {"ships": 3}
    _, [planned] = await said("claude", breakwater={"dry_run": True})
    assert "anthropic/claude" in planned["text"]
    question = {"messages": [{"role": "user", "content": f"Where is ship {stream}?"}]}
    first, called = await said("remembering", **question)
    again, remembered = await said("remembering", **question)
    assert [answer.headers["x-breakwater-cache"] for answer in (first, again)] == ["miss", "hit"]
    assert remembered == called


async def test_an_effort_is_a_wish(plane: MessagesPlane) -> None:
    answer = await plane.ask("plain", output_config={"effort": "low"})
    assert (answer.status, answer.headers["x-breakwater-attempts"]) == (200, "2"), answer.body


async def test_an_output_limit_that_the_model_does_not_reach_is_lowered(plane: MessagesPlane) -> None:
    refusal = "max_tokens is too large: 2000. This model supports at most 1000 completion tokens."
    fault = {"requests": [1, 1], "status": 400, "error": {"message": refusal, "param": "max_tokens"}}
    plane.worker.sim.use({"models": {**MODELS, "sim/gpt": model(fault, answer="Done.")}})
    answer = await plane.ask("chat", tools=[])
    assert (answer.status, answer.headers["x-breakwater-attempts"]) == (200, "2"), answer.body
    result = await plane.worker.result(answer.headers["x-breakwater-execution-id"])
    assert [attempt["cause"] for attempt in result["attempts"]] == ["first", "output_limit"]


async def test_a_break_in_the_middle_is_an_error_event(plane: MessagesPlane) -> None:
    plane.worker.sim.use({"models": {**MODELS, "claude": model({"stream": "cut", "after_chunks": 2}, turns=TURNS)}})
    try:
        answer = await plane.ask("claude", stream=True, headers={"idempotency-key": new_id()})
    finally:
        plane.worker.sim.use({"models": MODELS})
    *begun, last = events(answer)
    so_far = Accumulation()
    for event in begun:
        so_far.add(event)
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    assert json.dumps(last).count("request_id") == 1
