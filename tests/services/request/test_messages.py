"""Anthropic's Messages over HTTP; jobs are decided by the test instead of a worker."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from breakwater.identity.api_keys import create_key
from breakwater.kernel.redis.connection import Redis
from tests.anthropic_client import accumulated, blocks_of
from tests.recorded import Recorded, recorded
from tests.services.request.conftest import Answer, StartApi
from tests.services.request.test_openai import Decider, deciding, failing, key, left
from tests.tables import each_row

CONFIG = """
providers:
  openai: {base_url: "http://127.0.0.1:9/v1"}
  anthropic: {kind: anthropic}
agents:
  writer: {model: anthropic/claude, fallback_models: [openai/gpt-4o]}
  chat: {model: openai/gpt-4o}
  listed: {model: anthropic/claude, allowed_models: [anthropic/other]}
  paying: {model: anthropic/claude, budget: {daily_usd: 1, enforcement: hard}}
limits: {drain_s: 0.1, max_body_bytes: 200000}
"""
ASK: dict[str, Any] = {"model": "writer", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}]}


@pytest_asyncio.fixture(loop_scope="package")
async def plane(start_api: StartApi, redis: Redis) -> AsyncGenerator[Decider]:
    del redis  # empty
    async with start_api(CONFIG) as api, deciding(api) as decider:
        yield decider


async def ask(plane: Decider, path: str = "", headers: dict[str, str] | None = None, **body: Any) -> Answer:
    given = {"anthropic-version": "2023-06-01", "x-api-key": key(plane)} | (headers or {})
    sent = {name: value for name, value in given.items() if value}
    url = f"{plane.api.url}/v1/messages{path}"
    async with aiohttp.ClientSession() as http, http.post(url, json=ASK | body, headers=sent) as answer:
        return Answer(answer.status, dict(answer.headers), await answer.read())


def events(answer: Answer) -> list[dict[str, Any]]:
    found = [part.split("\n") for part in answer.body.decode().strip().split("\n\n")]
    parsed = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in found]
    assert all(name == event["type"] for name, event in parsed)
    return [event for _, event in parsed]


async def test_a_call_is_a_job_and_its_answer_a_message(plane: Decider) -> None:
    plane.end = {"chosen_model": "anthropic/claude", "attempts_count": 2, "total_cost": 42_000}
    body: dict[str, Any] = {"temperature": 0.5, "new_field": {"a": None}, "thinking": {"type": "adaptive"}}
    answer = await ask(plane, headers={"anthropic-beta": "one,two"}, **body)
    assert answer.status == 200, answer.body
    message = answer.json
    [job] = plane.jobs
    assert job["api_request"] == {
        "api": "messages",
        "body": {name: value for name, value in (ASK | body).items() if name != "model"},
        "headers": {"anthropic-beta": "one,two"},
    }
    assert (job["agent"], job["include_response"]) == ("writer", True)
    assert message["id"] == f"msg_{job['job_id']}"
    assert blocks_of(message) == [{"type": "text", "text": "done"}]
    assert (message["type"], message["stop_reason"]) == ("message", "end_turn")
    assert answer.headers["request-id"] == answer.headers["x-breakwater-execution-id"] == job["job_id"]
    assert answer.headers["x-breakwater-cost-usd"] == "0.000042000"
    assert "x-breakwater-dropped-params" not in answer.headers


async def test_a_stream_ends_with_the_message(plane: Decider) -> None:
    answer = await ask(plane, stream=True)
    assert answer.headers["Content-Type"] == "text/event-stream"
    found = events(answer)
    assert [event["type"] for event in found[:2]] == ["message_start", "content_block_start"]
    assert blocks_of(accumulated(found)) == [{"type": "text", "text": "done"}]
    assert plane.jobs[0]["stream"] is True


async def test_options_are_those_of_every_call(plane: Decider) -> None:
    headers = {"x-claude-code-session-id": "s1", "x-breakwater-tenant": "t"}
    answer = await ask(plane, headers=headers, breakwater={"metadata": {"order": 1}})
    assert answer.status == 200, answer.body
    [job] = plane.jobs
    assert (job["tenant"], job["metadata"]) == ("t", {"order": 1})
    assert job["session_id"].startswith("s1")
    assert "breakwater" not in job["api_request"]["body"]


async def test_a_key_is_sent_in_either_header(plane: Decider) -> None:
    known = key(plane)
    for headers in ({"x-api-key": known}, {"x-api-key": "", "Authorization": f"Bearer {known}"}):
        assert (await ask(plane, headers=headers)).status == 200
    for headers in ({"x-api-key": ""}, {"x-api-key": "bw_0_0"}, {"Authorization": "Bearer bw_0_0"}):
        refused = await ask(plane, headers=headers)
        assert (refused.status, refused.code) == (401, "authentication_error"), headers
    reader = create_key(plane.api.settings.api_keys_file, "reader", ("read",))
    refused = await ask(plane, headers={"x-api-key": reader})
    assert (refused.status, refused.code) == (403, "permission_error")
    unknown = await plane.api.ask("GET", "/api/v1/agents", headers={"x-api-key": known, "Authorization": ""})
    assert unknown.status == 401, "nowhere else"


@each_row(
    ("body", "status", "kind", "said"),
    [
        ({"model": "nobody"}, 404, "not_found_error", "model"),
        ({"model": 1}, 400, "invalid_request_error", "model: "),
        ({"model": 1, "max_tokens": 0}, 400, "invalid_request_error", "2 errors; the first: model: should be"),
        ({"messages": []}, 400, "invalid_request_error", "messages: "),
        ({"messages": ["Hello"]}, 400, "invalid_request_error", "messages[0]: "),
        ({"messages": [{"content": "Hello"}]}, 400, "invalid_request_error", "messages[0].role: "),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens: "),
        ({"stream": "yes"}, 400, "invalid_request_error", "stream: "),
        ({"breakwater": {"tenan": "t"}}, 400, "invalid_request_error", "breakwater.tenan: "),
        ({"model": "chat", "new_field": 1}, 400, "invalid_request_error", "new_field: "),
        ({"model": "chat", "tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "invalid_request_error",
         "tools[0].type: "),
        ({"model": "listed", "new_field": 1}, 400, "invalid_request_error", "new_field: "),
        ({"model": "paying", "mcp_servers": [{"url": "https://x"}]}, 400, "invalid_request_error", "mcp_servers: "),
        ({"service_tier": "priority"}, 400, "invalid_request_error", "service_tier: "),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, 413, "request_too_large", "at most"),
    ],
)  # fmt: skip
async def test_a_bad_request_is_refused_in_anthropics_shape(
    plane: Decider, body: dict[str, Any], status: int, kind: str, said: str
) -> None:
    answer = await ask(plane, **body)
    assert answer.status == status, answer.body
    assert answer.json.keys() == {"type", "error", "request_id"}
    assert answer.json["error"].keys() == {"type", "message"}
    assert (answer.json["type"], answer.json["error"]["type"]) == ("error", kind)
    assert said in answer.message
    if said.endswith(": "):
        assert answer.message.startswith(said)
    assert answer.json["request_id"] == answer.headers["request-id"]
    assert plane.jobs == []


async def test_answers_and_refusals_say_what_is_left_as_anthropics_do(plane: Decider) -> None:
    refusal = failing("rate_limited", "rate_limit", retry_after_s=7.25)
    for end, remaining in (({}, 59), (refusal, 0)):
        plane.end = end | {"limits": left(remaining, 800)}
        headers = (await ask(plane)).headers
        names = {name.lower() for name in headers if "ratelimit" in name.lower()}
        assert names == {
            f"anthropic-ratelimit-{unit}-{what}"
            for unit in ("requests", "tokens")
            for what in ("limit", "remaining", "reset")
        }
        assert headers["anthropic-ratelimit-requests-remaining"] == str(remaining)
        resets_in = datetime.fromisoformat(headers["anthropic-ratelimit-tokens-reset"]) - datetime.now(UTC)
        assert 20 < resets_in.total_seconds() <= 61
        assert headers.get("retry-after-ms") == ("7300" if end else None)


@each_row(
    ("reason", "kind", "error", "status", "name", "wait"),
    [
        ("budget_exceeded", "budget_exceeded", {"retry_after_s": 60.0}, 429, "rate_limit_error", "60"),
        ("rate_limited", "rate_limit", {"retry_after_s": 60.1}, 429, "rate_limit_error", "61"),
        ("breaker_open", "breaker_open", {}, 529, "overloaded_error", None),
        ("error", "server", {"status_code": 529}, 529, "overloaded_error", None),
        ("error", "server", {"status_code": 500}, 502, "api_error", None),
        ("error", "client", {"status_code": 400}, 400, "invalid_request_error", None),
        ("error", "client", {"status_code": 401}, 502, "api_error", None),
        ("error", "client", {"status_code": 413}, 413, "request_too_large", None),
        ("timeout", "timeout", {}, 504, "timeout_error", None),
        ("guard_tripped", "guard_tripped", {}, 403, "permission_error", None),
    ],
)
async def test_a_failed_job_is_an_error_in_anthropics_shape(
    plane: Decider, reason: str, kind: str, error: dict[str, Any], status: int, name: str, wait: str | None
) -> None:
    plane.end = failing(reason, kind, **error)
    for stream in (False, True):
        answer = await ask(plane, stream=stream)
        assert (answer.status, answer.json["error"]["type"]) == (status, name)
        assert answer.headers.get("Retry-After") == wait
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "one", [one for one in recorded("/v1/messages") if "thread" not in one.body], ids=lambda one: one.name
)
async def test_a_recorded_request_is_a_job(plane: Decider, one: Recorded) -> None:
    body = {**one.body, "model": "writer"}
    async with plane.api.http.post(
        plane.api.url + one.path, json=body, headers={**one.headers, "x-api-key": key(plane)}
    ) as answer:
        assert answer.status == 200, await answer.text()
    [job] = plane.jobs
    sent = {name: value for name, value in body.items() if name not in {"model", "stream"}}
    assert job["api_request"]["body"] == sent


async def test_a_thread_is_refused_in_a_way_that_anthropics_sdk_goes_on_without_it(plane: Decider) -> None:
    [one] = [one for one in recorded("/v1/messages") if "thread" in one.body]
    answer = await ask(plane, headers=None, **{**one.body, "model": "writer"})
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith("thread: ")
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert answer.json["error"]["details"] == details
    assert plane.jobs == []
    assert (await ask(plane, thread=None)).status == 200


async def test_tokens_are_counted(plane: Decider) -> None:
    async def count(text: str, **more: Any) -> int:
        answer = await ask(plane, "/count_tokens", messages=[{"role": "user", "content": text}], **more)
        assert answer.status == 200, answer.body
        assert answer.json.keys() == {"input_tokens"}
        return answer.json["input_tokens"]

    text = "The ferry leaves the harbour at noon, and is back before it is dark. " * 100
    alone = await count(text)
    assert 1_200 < alone < 2_000, "about four characters a token"
    tools = [{"name": "look", "description": "d" * 400, "input_schema": {"type": "object"}}]
    assert await count(text, tools=tools) > alone + 80
    assert await count(text * 10) > 9 * alone, "also in a long request"
    unknown = await ask(plane, "/count_tokens", model="nobody")
    assert (unknown.status, unknown.code) == (404, "not_found_error")
    wrong = await ask(plane, "/count_tokens", messages=[{"role": "user", "content": [1]}])
    assert (wrong.status, wrong.message) == (400, "messages[0].content[0]: must be an object with a `type`")


async def test_another_base_url_is_explained(plane: Decider) -> None:
    answer = await plane.api.ask("POST", "/v1/v1/messages", data=b"{}")
    assert (answer.status, answer.code) == (404, "not_found_error")
    assert "ends before /v1" in answer.message
