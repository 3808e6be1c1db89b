"""OpenAI's Responses through the HTTP API: the unmodified `openai` package, a worker, and providers of all dialects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import openai
import orjson
import pytest
import pytest_asyncio

from breakwater.config import load_config
from breakwater.identity.api_keys import create_key
from tests.dialects.test_responses_stream import accumulated
from tests.flow.kit import model
from tests.openai_client import openai_client
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, running, settings_for
from tests.services.worker.harness import WorkerPlane, running_worker
from tests.tables import each_row

FIND: dict[str, Any] = {
    "type": "function",
    "name": "find_ship",
    "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    "strict": False,
}
TURN = [
    {"type": "thinking", "text": "Which ship?"},
    {"type": "text", "text": "Let me look."},
    {"type": "tool_call", "name": "find_ship", "arguments": {"name": "ferry"}},
]
TURNS = [TURN, [{"type": "text", "text": "At sea."}]]
MODELS = {
    "sim/chat": model(turns=TURNS),
    "native/r": model(turns=TURNS),
    "claude": model(turns=TURNS),
    "sim/down": model({"status": 500}),
    "sim/strict": model({"status": 400, "error": {"message": "too hot", "param": "temperature"}}),
    "sim/broken": model(
        {"stream": "error", "after_chunks": 3, "error": {"message": "broke"}}, answer="At sea, I think."
    ),
    "native/search": model(turns=[[{"type": "hosted", "query": "ferries"}, {"type": "text", "text": "At sea."}]]),
    "sim/short": model(answer="a" * 400),
    **{
        name: model({"status": 400, "error": {"message": "Input length (9011) exceeds the maximum length (8192)."}})
        for name in ("sim/full", "native/full", "full")
    },
}
NO_WAIT = {"max_attempts": 1}
PRICE = {"input_usd_per_mtok": "0.15", "output_usd_per_mtok": "0.60"}
FLEX = {"service_tiers": {"flex": {"input_usd_per_mtok": "0.07", "output_usd_per_mtok": "0.30"}}}
PRICES = {
    "native/search": {"price": PRICE},
    "native/priced": {"price": {**PRICE, **FLEX}, "tool_prices": {"web_search": "0.02"}, "name": "search"},
}
AGENTS = {
    "translated": {"model": "sim/chat", "retry": NO_WAIT},
    "native": {"model": "native/r", "retry": NO_WAIT},
    "claude": {"model": "anthropic/claude", "retry": NO_WAIT},
    "searching": {"model": "native/search", "retry": NO_WAIT},
    "failing": {"model": "sim/down", "retry": NO_WAIT, "breaker": "off"},
    "refused": {"model": "sim/strict", "retry": NO_WAIT},
    "broken": {"model": "sim/broken", "retry": NO_WAIT, "breaker": "off"},
    "short": {"model": "sim/short", "retry": NO_WAIT},
    "mixed": {"model": "sim/down", "fallback_models": ["native/r"], "retry": NO_WAIT, "breaker": "off"},
    "priced": {"model": "native/priced", "retry": NO_WAIT},
    "capped": {"model": "native/priced", "retry": NO_WAIT, "max_cost_usd": 1},
    "allowed": {"model": "native/priced", "retry": NO_WAIT, "max_cost_usd": 1, "allowed_params": ["tools"]},
}
FULL = ("sim/full", "native/full", "anthropic/full")
AGENTS |= {
    name.replace("/", "-"): {"model": name, "fallback_models": ["sim/strict"], "retry": NO_WAIT, "breaker": "off"}
    for name in FULL
}
COOL = ("sim/cool", "native/cool", "anthropic/cool")
UNSUPPORTED = {"message": "Unsupported parameter: 'top_p' is not supported with this model.", "param": "top_p"}
MODELS |= {
    name.removeprefix("anthropic/"): model({"requests": [1, 1], "status": 400, "error": UNSUPPORTED}) for name in COOL
}
AGENTS |= {
    name.replace("/", "-"): {"model": name, "on_unsupported_param": "drop", "retry": NO_WAIT, "breaker": "off"}
    for name in COOL
}
SPEAKERS = ("translated", "native", "claude")


@dataclass(frozen=True, slots=True)
class ResponsesPlane:
    """A request service, a worker, and a key."""

    api: HttpApi
    worker: WorkerPlane
    key: str

    @property
    def sdk(self) -> Any:
        return openai_client(f"{self.api.url}/v1", self.key, max_retries=0)

    async def post(self, body: Any, **headers: str) -> tuple[int, Any, Any]:
        answer = await self.api.ask(
            "POST", "/v1/responses", json=body, headers={"Authorization": f"Bearer {self.key}", **headers}
        )
        return answer.status, answer.json, answer.headers

    async def events(self, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, each with its name."""
        headers = {"Authorization": f"Bearer {self.key}"}
        async with self.api.http.post(
            f"{self.api.url}/v1/responses", json={**body, "stream": True}, headers=headers
        ) as response:
            text = (await response.read()).decode()
        found = list[dict[str, Any]]()
        for event in text.strip().split("\n\n"):
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[ResponsesPlane]:
    directory = tmp_path_factory.mktemp("responses")
    started = running_worker(
        directory,
        nats_url=module_nats_server.url,
        redis_url=redis_server.url,
        script={
            "models": {**MODELS, "r": MODELS["native/r"], "search": MODELS["native/search"], "full": MODELS["full"]}
        },
        agents=AGENTS,
        more_providers={
            "native": {"kind": "openai", "api": "responses", "base_url": "http://127.0.0.1:{sim_port}/v1"},
            "anthropic": {"kind": "anthropic", "base_url": "http://127.0.0.1:{sim_port}/v1"},
        },
        more_models=PRICES,
    )
    async with started as worker:
        settings = settings_for(module_nats_server.url, redis_server.url, directory)
        config = load_config(directory / "breakwater.yaml")
        async with running(settings, config, create_key(settings.api_keys_file, "tests")) as api:
            yield ResponsesPlane(api, worker, create_key(settings.api_keys_file, "app", ("submit",)))


@pytest.mark.parametrize("agent", SPEAKERS)
async def test_a_tool_loop_is_the_same_at_every_provider(plane: ResponsesPlane, agent: str) -> None:
    asked = {"model": agent, "tools": [FIND], "instructions": "Be brief."}
    first = await plane.sdk.responses.create(**asked, input="Where is the ferry?")

    assert first.status == "completed"
    assert first.output_text == "Let me look."
    call = first.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "find_ship", {"name": "ferry"})
    assert (first.instructions, first.tools[0].name, first.id[:5]) == ("Be brief.", "find_ship", "resp_")
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens

    turns = [{"role": "user", "content": "Where is the ferry?"}, *(item.to_dict() for item in first.output)]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "found"}]
    second = await plane.sdk.responses.create(**asked, input=[*turns, *results])
    assert second.output_text == "At sea."


@pytest.mark.parametrize("agent", SPEAKERS)
async def test_a_stream_comes_to_the_response_that_its_last_event_has(plane: ResponsesPlane, agent: str) -> None:
    events = await plane.events(model=agent, tools=[FIND], input="Where is the ferry?")

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert accumulated(events) == last["output"]
    assert last["usage"]["output_tokens"] > 0
    assert {event["response"]["id"] for event in events if "response" in event} == {last["id"]}
    async with plane.sdk.responses.stream(model=agent, tools=[FIND], input="Where is the ferry?") as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_response()
    assert {"response.output_text.delta", "response.function_call_arguments.done"} <= kinds
    assert final.output_text == "Let me look."


async def _refusal(plane: ResponsesPlane, path: str, agent: str, *, stream: bool) -> tuple[int, list[Any]]:
    """The status and the errors that a program gets for a conversation that is too long."""
    asked: dict[str, Any] = {"model": agent, "stream": stream, "max_tokens": 100, "messages": [USER]}
    if path == "responses":
        asked = {"model": agent, "stream": stream, "input": [USER]}
    headers = {"Authorization": f"Bearer {plane.key}"}
    async with plane.api.http.post(f"{plane.api.url}/v1/{path}", json=asked, headers=headers) as response:
        body = await response.read()
    if response.content_type == "application/json":
        return response.status, [orjson.loads(body)["error"]]
    events = [orjson.loads(line.removeprefix(b"data: ")) for line in body.split(b"\n") if line.startswith(b"data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    return response.status, [events[-2]["error"], events[-1]["response"]["error"]]


USER = {"role": "user", "content": "Where is the ferry?"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_header_names_the_parameters_that_the_model_did_not_know(
    plane: ResponsesPlane, path: str, stream: bool
) -> None:
    for name in COOL:
        script = {**MODELS, "r": MODELS["native/r"], "search": MODELS["native/search"], "cool": MODELS["sim/cool"]}
        plane.worker.sim.use({"models": script})  # counts from the start
        asked: dict[str, Any] = {"model": name.replace("/", "-"), "stream": stream, "top_p": 0.9, "max_tokens": 100}
        asked |= {"messages": [USER]} if path != "responses" else {"input": [USER]}
        if path == "responses":
            del asked["max_tokens"]
        headers = {"Authorization": f"Bearer {plane.key}"}
        async with plane.api.http.post(f"{plane.api.url}/v1/{path}", json=asked, headers=headers) as response:
            body = await response.read()
        assert response.status == 200, body
        assert response.headers["x-breakwater-dropped-params"] == "top_p"
        assert response.headers["x-breakwater-attempts"] == "2"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_conversation_that_is_too_long_is_refused_in_the_words_of_each_api(
    plane: ResponsesPlane, path: str, stream: bool
) -> None:
    for name in FULL:
        status, errors = await _refusal(plane, path, name.replace("/", "-"), stream=stream)
        if path == "messages":
            assert (status, [error["type"] for error in errors]) == (400, ["invalid_request_error"])
            assert errors[0]["message"] == "prompt is too long: 9011 tokens > 8192 maximum"
            continue
        # Codex reads it in a stream alone, as OpenAI sends it.
        assert (status, len(errors)) == ((200, 2) if path == "responses" and stream else (400, 1))
        for error in errors:
            assert error["code"] == "context_length_exceeded"
            assert "This model's maximum context length is 8192 tokens." in error["message"]
            assert "resulted in 9011 tokens" in error["message"]
        assert errors[0]["type"] == "invalid_request_error"
        assert errors[0]["param"] == ("input" if path == "responses" else "messages")


async def test_the_sdk_raises_a_full_context_in_a_stream_and_a_background_response_has_it(
    plane: ResponsesPlane,
) -> None:
    with pytest.raises(openai.APIError) as raised:
        async for _ in await plane.sdk.responses.create(model="sim-full", input="Where?", stream=True):
            pass
    assert raised.value.code == "context_length_exceeded"
    response = await plane.sdk.responses.create(model="sim-full", input="Where?", background=True)
    async with asyncio.timeout(60):
        while response.status in {"queued", "in_progress"}:
            await asyncio.sleep(0.05)
            response = await plane.sdk.responses.retrieve(response.id)
    assert (response.status, response.error.code) == ("failed", "context_length_exceeded")


async def test_reasoning_text_of_a_chat_is_an_item(plane: ResponsesPlane) -> None:
    response = await plane.sdk.responses.create(
        model="translated", input="Where?", reasoning={"effort": "low"}, tools=[FIND]
    )

    assert [item.type for item in response.output][-2:] == ["message", "function_call"]


async def test_hosted_tools_pass_to_a_provider_of_responses(plane: ResponsesPlane) -> None:
    response = await plane.sdk.responses.create(model="searching", input="Where?", tools=[{"type": "web_search"}])

    assert [item.type for item in response.output][-2:] == ["web_search_call", "message"]


SEARCH = {"input": "Where?", "tools": [{"type": "web_search"}]}


async def attempt_of(plane: ResponsesPlane, headers: Any) -> dict[str, Any]:
    """The attempt of a job, by the headers of its response."""
    record = await plane.api.ask("GET", f"/api/v1/jobs/{headers['x-breakwater-execution-id']}")
    return record.json["attempts"][-1]


async def test_a_hosted_tool_costs_its_price_in_addition_to_the_tokens(plane: ResponsesPlane) -> None:
    for agent in ("priced", "allowed"):
        status, _, headers = await plane.post({"model": agent, **SEARCH})

        tokens = Decimal("0.15") * 120 / 10**6 + Decimal("0.60") * 40 / 10**6
        assert (status, Decimal(headers["x-breakwater-cost-usd"])) == (200, tokens + Decimal("0.02"))
        assert (await attempt_of(plane, headers))["cost_basis"] == "billed"


async def test_the_cost_of_a_hosted_tool_without_a_price_is_unknown(plane: ResponsesPlane) -> None:
    status, _, headers = await plane.post({"model": "searching", **SEARCH})
    attempt = await attempt_of(plane, headers)

    assert (status, attempt["cost"], attempt["cost_basis"]) == (200, None, "unknown")
    assert "web_search" in attempt["usage_problem"]


async def test_a_hosted_tool_is_refused_under_a_hard_cap_with_the_setting(plane: ResponsesPlane) -> None:
    status, found, _ = await plane.post({"model": "capped", **SEARCH})

    assert (status, found["error"]["param"]) == (400, "tools[0].type")
    assert "agents.capped.allowed_params" in found["error"]["message"]


async def test_a_service_tier_is_asked_for_where_it_has_a_price(plane: ResponsesPlane) -> None:
    for agent, tier, status in (("priced", "flex", 200), ("priced", "priority", 400), ("native", "flex", 400)):
        found = await plane.post({"model": agent, "input": "Where?", "service_tier": tier})
        assert found[0] == status, (agent, tier)
        if status == 400:
            assert found[1]["error"]["param"] == "service_tier"
            assert f"price.service_tiers.{tier}" in found[1]["error"]["message"]
        else:
            assert found[1]["service_tier"] == tier
            tokens = Decimal("0.07") * 120 / 10**6 + Decimal("0.30") * 40 / 10**6
            assert Decimal(found[2]["x-breakwater-cost-usd"]) in (tokens, tokens + Decimal("0.02"))
    for tier in ("auto", "default"):
        assert (await plane.post({"model": "native", "input": "Where?", "service_tier": tier}))[0] == 200


async def test_an_answer_over_its_limit_is_incomplete(plane: ResponsesPlane) -> None:
    response = await plane.sdk.responses.create(model="short", input="Where?", max_output_tokens=16)

    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@each_row(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"never_heard_of": 1}, "never_heard_of"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": 5}, "input"),
        ({"input": None}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"stream": "yes"}, "stream"),
        ({"tools": "x"}, "tools"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
    ],
)
async def test_what_cannot_be_asked_names_its_field(plane: ResponsesPlane, body: dict[str, Any], param: str) -> None:
    status, found, _ = await plane.post({"model": "translated", "input": "Where?", **body})

    assert (status, found["error"]["param"]) == (400, param)
    assert found["error"]["type"] == "invalid_request_error"


async def test_an_unknown_field_goes_to_a_provider_of_responses(plane: ResponsesPlane) -> None:
    status, found, _ = await plane.post({"model": "native", "input": "Where?", "never_heard_of": 1})

    # The simulated provider takes no field that OpenAI does not have.
    assert (status, found["error"]["param"]) == (400, "never_heard_of")
    assert "translated" not in found["error"]["message"]


async def test_a_fallback_to_a_provider_of_responses_takes_what_a_chat_cannot(plane: ResponsesPlane) -> None:
    status, found, headers = await plane.post(
        {"model": "mixed", "input": "Where?", "include": ["web_search_call.results"]}
    )

    assert "x-breakwater-dropped-params" not in headers
    assert (status, found["status"], headers["x-breakwater-model"]) == (200, "completed", "native/r")


@pytest.mark.parametrize(
    ("agent", "status", "code", "param"),
    [
        ("failing", 502, "provider_error", None),
        ("refused", 400, "invalid_request", "temperature"),
        ("nobody", 404, "model_not_found", "model"),
    ],
)
async def test_errors_have_openais_shape(
    plane: ResponsesPlane, agent: str, status: int, code: str, param: str | None
) -> None:
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.APIStatusError) as caught:
            await plane.sdk.responses.create(model=agent, input="Where?", **more)

        assert (caught.value.status_code, caught.value.code, caught.value.param) == (status, code, param)


async def test_a_body_over_the_limit_is_413(plane: ResponsesPlane) -> None:
    status, found, _ = await plane.post({"model": "translated", "input": "x" * 40_000_000})

    assert (status, found["error"]["type"]) == (413, "invalid_request_error")


async def test_a_stream_that_breaks_ends_with_its_failure(plane: ResponsesPlane) -> None:
    events = await plane.events(model="broken", input="Where?")

    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))


async def test_fields_that_a_chat_goes_without_are_named_in_a_header(plane: ResponsesPlane) -> None:
    for agent, dropped in (("translated", "reasoning.summary"), ("native", None)):
        body = {"model": agent, "input": "Where?", "reasoning": {"summary": "auto"}}
        status, _, headers = await plane.post(body)
        assert (status, headers.get("x-breakwater-dropped-params")) == (200, dropped)


async def test_a_dry_run_makes_no_call(plane: ResponsesPlane) -> None:
    for more in ({}, {"stream": True}):
        for agent in ("translated", "native"):
            body = {"model": agent, "input": "Where?", "breakwater": {"dry_run": True}, **more}
            calls = len(plane.worker.sim.ledger.calls)
            if more:
                found = (await plane.events(**body))[-1]["response"]
            else:
                _, found, _ = await plane.post(body)
            plan = json.loads(found["output"][0]["content"][0]["text"])
            assert (found["status"], plan["dry_run"]) == ("completed", True)
            assert len(plane.worker.sim.ledger.calls) == calls


async def test_the_same_id_is_the_same_response(plane: ResponsesPlane) -> None:
    body = {"model": "translated", "input": "Where?"}
    first = await plane.post(body, **{"Idempotency-Key": "order-1"})
    again = await plane.post(body, **{"Idempotency-Key": "order-1"})

    assert first[:2] == again[:2]
    assert first[1]["id"] == "resp_order-1"


async def test_the_record_has_the_conversation_and_the_native_answer(plane: ResponsesPlane) -> None:
    _, found, headers = await plane.post({"model": "native", "input": "Where?", "metadata": {"a": "b"}})
    record = await plane.api.ask("GET", f"/api/v1/jobs/{headers['x-breakwater-execution-id']}")

    response = record.json["response"]
    assert (response["object"], response["output"]) == ("response", found["output"])
    assert response["id"] != found["id"]
    assert found["metadata"] == {"a": "b"}
    assert orjson.dumps(record.json["output"])
