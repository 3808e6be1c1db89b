"""Parameters that models refuse, over every API, native and translated: what was added to a request costs no answer."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from breakwater.kernel.nats import subjects
from tests.calls.providers.kit import answering
from tests.flow.kit import PRICE, model
from tests.server_sources import RunningServer
from tests.services.worker.harness import WorkerPlane, running_worker

pytestmark = pytest.mark.asyncio(loop_scope="module")
ONCE = {"retry": {"max_attempts": 1}, "breaker": "off", "guard": "off"}
AGENT_PARAMS = {"temperature": 0.2, "reasoning_effort": "low", "verbosity": "low", "user": "u", "store": False}
USER = {"role": "user", "content": "Where?"}
REQUESTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER]},
    "responses": {"api_request": {"api": "responses", "body": {"input": "Where?"}}},
    "messages": {"api_request": {"api": "messages", "body": {"max_tokens": 100, "messages": [USER]}}},
    "embeddings": {"api_request": {"api": "embeddings", "body": {"input": "Where?"}}},
}
PLAIN = frozenset({
    "model", "messages", "input", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens", "system",
    "stream_options",
})  # fmt: skip
"""Fields that every model takes."""


OUTPUT_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def _fields(body: Mapping[str, Any]) -> list[str]:
    """The fields of a body by their full names."""
    return [
        path
        for name, value in body.items()
        for path in ([f"{name}.{inner}" for inner in value] if isinstance(value, dict) else [name])
    ]


def _refusal(body: Mapping[str, Any], path: str) -> tuple[str, str | None] | None:
    """The words in which a model refuses a body, by its name, and the field at fault."""
    match body["model"]:
        case "both" if {"temperature", "top_p"} <= body.keys():
            return "`temperature` and `top_p` cannot both be specified for this model. Please use only one.", None
        case "default" if body.get("temperature", 1) != 1:
            words = "Only the default (1) value is supported."
            return f"Unsupported value: 'temperature' does not support 0.2 with this model. {words}", "temperature"
        case "strict" if unknown := [name for name in _fields(body) if name.partition(".")[0] not in PLAIN]:
            named = unknown[0]
            if path.endswith("/messages"):
                return f"{named}: Extra inputs are not permitted", None
            return f"Unsupported parameter: '{named}' is not supported with this model.", named
        case "small" if (most := max(body.get(name) or 0 for name in ("max_tokens", "max_output_tokens"))) > 50:
            return f"max_tokens: {most} > 50, which is the maximum allowed number of output tokens for small", None
        case "limitless" if limits := [name for name in OUTPUT_FIELDS if name in body]:
            return f"Unsupported parameter: {limits[0]}", limits[0]
        case "never":
            return f"temperature and top_k and {len(body)} others are not supported", None
        case _:
            return None


def _answer(path: str, *, stream: bool) -> web.StreamResponse:
    usage = {"input_tokens": 1, "output_tokens": 1, "prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    if path.endswith("/embeddings"):
        return web.json_response({"data": [{"index": 0, "embedding": [0.5]}], "usage": usage})
    if stream:
        chunk = {"choices": [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}], "usage": usage}
        text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")
    if path.endswith("/messages"):
        content = [{"type": "text", "text": "yes"}]
        return web.json_response({"id": "m", "content": content, "stop_reason": "end_turn", "usage": usage})
    if path.endswith("/responses"):
        message = {"type": "message", "content": [{"type": "output_text", "text": "yes"}]}
        return web.json_response(
            {"id": "r", "object": "response", "status": "completed", "output": [message], "usage": usage}
        )
    return web.json_response(
        {"choices": [{"index": 0, "message": {"content": "yes"}, "finish_reason": "stop"}], "usage": usage}
    )


@dataclass(frozen=True, slots=True)
class PickyPlane:
    worker: WorkerPlane
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    async def run(self, agent: str, api: str, **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Runs a job; its result, and the bodies that its calls had."""
        self.bodies.clear()
        job_id = more.pop("job_id", f"{agent}-{api}-{len(json.dumps(more))}")
        job: dict[str, Any] = {"agent": agent, "job_id": job_id, **REQUESTS[api]}
        params = more.pop("params", {})
        if api == "chat":
            job["params"] = params
        else:
            request = job["api_request"]
            job["api_request"] = {**request, "body": {**request["body"], **params}}
        await self.worker.publish({**job, **more})
        return await self.worker.result(job["job_id"], timeout_s=30), list(self.bodies)


KINDS = ("both", "default", "strict", "small", "limitless", "never")
PROVIDERS = {"chat": "chat", "responses": "responses", "messages": "messages"}
MODELS = [f"{provider}/{name}" for provider in PROVIDERS for name in KINDS]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane(
    module_nats_server: RunningServer, redis_server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[PickyPlane]:
    bodies = list[dict[str, Any]]()

    async def picky(request: web.BaseRequest) -> web.StreamResponse:
        body: dict[str, Any] = json.loads(await request.read())
        bodies.append(body)
        if (refused := _refusal(body, request.path)) is None:
            return _answer(request.path, stream=body.get("stream") is True)
        words, param = refused
        error = {"type": "invalid_request_error", "message": words, "param": param, "code": "unsupported_value"}
        return web.json_response({"type": "error", "error": error}, status=400)

    agents: dict[str, Any] = {}
    for name in MODELS:
        slug = name.replace("/", "-")
        params = {"temperature": 0.2} if slug.endswith(("both", "default", "never")) else AGENT_PARAMS
        agents[slug] = {"model": name, "params": params, "max_tokens": 100, **ONCE}
        agents[f"{slug}-drop"] = {"model": name, "on_unsupported_param": "drop", "max_tokens": 100, **ONCE}
        agents[f"{slug}-capped"] = {**agents[slug], "max_cost_usd": 1}
    agents["fallback"] = {
        "model": "sim/down", "fallback_models": ["messages/default"], "params": {"frequency_penalty": 0.3}, **ONCE
    }  # fmt: skip
    async with answering(picky) as origin:
        providers: dict[str, Any] = {
            "chat": {"base_url": f"{origin}/v1"},
            "responses": {"base_url": f"{origin}/v1", "api": "responses"},
            "messages": {"base_url": f"{origin}/v1", "kind": "anthropic"},
        }
        started = running_worker(
            tmp_path_factory.mktemp("picky"),
            nats_url=module_nats_server.url,
            redis_url=redis_server.url,
            script={"models": {"sim/down": model({"status": 500})}},
            agents=agents,
            more_providers=providers,
            more_models={name: {"price": PRICE} for name in MODELS},
        )
        async with started as worker:
            yield PickyPlane(worker, bodies)


def causes(result: Mapping[str, Any]) -> list[str]:
    return [attempt["cause"] for attempt in result["attempts"]]


def routes(*apis: str) -> list[tuple[str, str]]:
    """Each API with each provider that can be sent it."""
    return [(api, provider) for api in apis for provider in PROVIDERS if api != "embeddings" or provider != "messages"]


async def test_a_temperature_of_the_agent_gives_way_to_the_clients_top_p(
    plane: PickyPlane, subtests: pytest.Subtests
) -> None:
    for api, provider in routes("chat", "responses", "messages"):
        with subtests.test(api=api, provider=provider):
            result, bodies = await plane.run(f"{provider}-both", api, params={"top_p": 0.9})
            assert (result["output"], causes(result)) == ("yes", ["first", "parameter"])
            assert [("temperature" in body, body["top_p"]) for body in bodies] == [(True, 0.9), (False, 0.9)]
            assert [attempt["dropped_params"] for attempt in result["attempts"]] == [[], ["temperature"]]
            alone, bodies = await plane.run(f"{provider}-both", api)
            assert causes(alone) == ["first"], "without the other one it stays"
            assert bodies[0]["temperature"] == 0.2


async def test_a_value_of_the_agents_that_a_model_does_not_take_is_left_out_from_then_on(
    plane: PickyPlane, subtests: pytest.Subtests
) -> None:
    for api, provider in routes("chat", "responses", "messages"):
        with subtests.test(api=api, provider=provider):
            first, _ = await plane.run(f"{provider}-default", api, skip_cache=True)
            again, bodies = await plane.run(f"{provider}-default", api)
            assert (first["status"], again["status"], causes(again)) == ("succeeded", "succeeded", ["first"])
            assert ("temperature" in bodies[0], again["attempts"][0]["dropped_params"]) == (False, ["temperature"])


async def test_every_parameter_that_the_client_did_not_send_is_left_out_once(
    plane: PickyPlane, subtests: pytest.Subtests
) -> None:
    for api, provider in routes("chat", "responses", "messages", "embeddings"):
        with subtests.test(api=api, provider=provider):
            result, bodies = await plane.run(f"{provider}-strict", api)
            assert result["status"] == "succeeded", result["error"]
            assert set(causes(result)[1:]) <= {"parameter"}
            assert not [name for name in _fields(bodies[-1]) if name.partition(".")[0] not in PLAIN]
            assert len(bodies) <= 1 + len(AGENT_PARAMS)
            again, _ = await plane.run(f"{provider}-strict", api, skip_cache=True)
            assert causes(again) == ["first"], "it is remembered"


async def test_an_output_limit_of_the_agent_is_lowered_to_the_models(
    plane: PickyPlane, subtests: pytest.Subtests
) -> None:
    for api, provider in [*routes("chat", "responses"), ("messages", "chat"), ("messages", "responses")]:
        with subtests.test(api=api, provider=provider):
            result, bodies = await plane.run(f"{provider}-small", api)
            assert (result["output"], causes(result)[-1]) == ("yes", "output_limit")
            assert max(bodies[-1].get(name) or 0 for name in ("max_tokens", "max_output_tokens")) == 50


async def test_an_output_limit_that_a_model_does_not_know_goes_unless_a_cap_needs_it(
    plane: PickyPlane, subtests: pytest.Subtests
) -> None:
    for api, provider in (("chat", "chat"), ("responses", "responses"), ("responses", "chat")):
        with subtests.test(api=api, provider=provider):
            result, bodies = await plane.run(f"{provider}-limitless", api)
            assert (result["status"], bool(bodies[-1].keys() & {*OUTPUT_FIELDS})) == ("succeeded", False)
            capped, bodies = await plane.run(f"{provider}-limitless-capped", api)
            assert capped["status"] == "dead_lettered"
            assert all(body.keys() & {*OUTPUT_FIELDS} for body in bodies)


async def test_parameters_of_the_clients_are_left_out_where_the_agent_says_so(
    plane: PickyPlane, subtests: pytest.Subtests
) -> None:
    for api, provider in routes("chat", "responses", "messages", "embeddings"):
        params = {"temperature": 0.2, "top_p": 0.9}
        with subtests.test(api=api, provider=provider):
            kept, _ = await plane.run(f"{provider}-strict", api, params=params)
            assert (kept["status"], kept["error"]["param"] in {None, *params}) == ("dead_lettered", True)
            result, bodies = await plane.run(f"{provider}-strict-drop", api, params=params)
            assert (result["status"], causes(result)) == ("succeeded", ["first", "parameter", "parameter"])
            assert result["attempts"][-1]["dropped_params"] == ["temperature", "top_p"]
            assert not {"temperature", "top_p"}.intersection(bodies[-1])
    nested = {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}, "include": []}
    result, bodies = await plane.run("responses-strict-drop", "responses", params=nested)
    assert result["status"] == "succeeded", result["error"]
    assert not {"reasoning", "text"}.intersection(bodies[-1])


async def test_what_a_translation_lacks_is_left_out_as_well(plane: PickyPlane) -> None:
    result, bodies = await plane.run("fallback", "chat")
    assert (result["status"], causes(result)) == ("succeeded", ["first", "fallback", "parameter"])
    assert [body["model"] for body in bodies] == ["default"], "the refusal was our own: no call was made for it"
    own, _ = await plane.run("messages-default-drop", "chat", params={"seed": 1, "presence_penalty": 1})
    assert own["status"] == "succeeded", own["error"]
    assert own["attempts"][-1]["dropped_params"] == ["presence_penalty"]
    lost, bodies = await plane.run("chat-default-drop", "messages", params={"container": "c"})
    assert (lost["status"], lost["attempts"][-1]["dropped_params"]) == ("succeeded", ["container"])


async def test_a_model_that_refuses_all_the_same_is_asked_no_more_often_than_there_are_parameters(
    plane: PickyPlane,
) -> None:
    result, bodies = await plane.run("chat-never", "chat")
    assert (result["status"], len(bodies)) == ("dead_lettered", 2)
    many = {f"param_{number}": 1 for number in range(30)}
    refusing, bodies = await plane.run("chat-strict-drop", "chat", params=many)
    assert (refusing["status"], len(bodies)) == ("dead_lettered", 9)


async def test_a_stream_goes_without_them_too_and_says_so_with_its_first_chunk(plane: PickyPlane) -> None:
    messages: list[dict[str, Any]] = []

    async def listen(message: Any) -> None:
        messages.append(json.loads(message.data))

    subscription = await plane.worker.client.subscribe(subjects.chunks("chat-strict-drop", "stream"), cb=listen)
    await plane.worker.client.flush()
    result, _ = await plane.run("chat-strict-drop", "chat", params={"top_k": 5}, stream=True, job_id="stream")
    await plane.worker.client.flush()
    await subscription.unsubscribe()
    assert (result["output"], causes(result)) == ("yes", ["first", "parameter"])
    assert [message["dropped_params"] for message in messages] == [["top_k"]]
