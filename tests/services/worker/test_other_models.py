"""A model that answers in place of the one that was asked for: what its call costs, and who is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from breakwater.config import targets
from tests.calls.providers.kit import answering
from tests.flow.kit import PRICE, model
from tests.services.worker.conftest import StartWorker

PRICED = {"input_usd_per_mtok": "10", "output_usd_per_mtok": "20"}
TOKENS = 1000
ASKED = "0.000750000"
"""A thousand tokens in and out at PRICE."""
CASES: dict[str, tuple[str, str, str | None]] = {
    "m": (ASKED, "billed", None),
    "M-2026-01-02": (ASKED, "billed", None),
    "vendor/m": (ASKED, "billed", None),
    "/srv/models/other.gguf": (ASKED, "billed", None),
    "dear": ("0.030000000", "billed", "openai/dear"),
    "gpt-4o-2024-08-06": ("0.012500000", "billed", "gpt-4o"),
    "nobody-knows-it": (ASKED, "estimated", "nobody-knows-it"),
    "listed": (ASKED, "estimated", "openai/listed"),
}
"""By what the answer says: the cost, its basis, and what is recorded of the model."""
AGENT = {"retry": {"max_attempts": 1}, "breaker": "off", "guard": "off"}


def _answer(kind: str, name: str, *, streamed: bool) -> web.Response:
    if kind == "anthropic":
        usage = {"input_tokens": TOKENS, "output_tokens": TOKENS}
        message = {"id": "a", "model": name, "content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn"}
        events: list[Any] = [
            {"type": "message_start", "message": {**message, "content": [], "stop_reason": None, "usage": usage}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "hi"}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": TOKENS}},
            {"type": "message_stop"},
        ]
        whole = {**message, "usage": usage}
    else:
        usage = {"prompt_tokens": TOKENS, "completion_tokens": TOKENS}
        choice = {"index": 0, "finish_reason": "stop"}
        whole = {"model": name, "choices": [{**choice, "message": {"content": "hi"}}], "usage": usage}
        events = [{"model": name, "choices": [{**choice, "delta": {"content": "hi"}}]}]
        events.append({"model": name, "choices": [], "usage": usage})
    if not streamed:
        return web.json_response(whole)
    return web.Response(
        text="".join(f"data: {json.dumps(event)}\n\n" for event in events), content_type="text/event-stream"
    )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_another_model_is_priced_as_itself_or_estimated_and_told_once(
    start_worker: StartWorker, kind: str, streamed: bool
) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        content = (await request.json())["messages"][0]["content"]
        name = content if isinstance(content, str) else content[0]["text"]
        return _answer(kind, name, streamed=streamed)

    read = {"provider": "openai"}
    before = REGISTRY.get_sample_value("breakwater_usage_problems_total", read) or 0
    async with (
        answering(answer) as origin,
        start_worker(
            {"sim/m": model()},
            {"a": {"model": "openai/m", **AGENT}},
            more_providers={"openai": {"kind": kind, "base_url": f"{origin}/v1"}},
            more_models={"openai/m": {"price": PRICE}, "openai/dear": {"price": PRICED}, "openai/listed": {}},
        ) as plane,
    ):
        for number, (name, (cost, basis, told)) in enumerate(CASES.items()):
            for again in range(2):
                job_id = f"j{number}-{again}"
                job = {"agent": "a", "job_id": job_id, "prompt": name, "stream": streamed}
                [attempt] = (await plane.run(job))["attempts"]
                found = attempt["cost"], attempt["cost_basis"], attempt["response_model"]
                assert found == (cost, basis, told), name
                assert (attempt["usage_problem"] is None) == (basis == "billed")
        warned = [line["answered"] for line in plane.logs if line["event"] == "another_model_answers"]
    others = [told for _, _, told in CASES.values() if told is not None]
    assert warned == others, "once each"
    assert REGISTRY.get_sample_value("breakwater_usage_problems_total", read) == before + 2 * len(others)


async def test_a_model_that_says_a_new_name_each_time_fills_no_log(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "MAX_LOGGED", 20)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return _answer("openai", (await request.json())["messages"][0]["content"], streamed=False)

    async with (
        answering(answer) as origin,
        start_worker(
            {"sim/m": model()},
            {"a": {"model": "openai/m", **AGENT}},
            more_providers={"openai": {"base_url": f"{origin}/v1"}},
            more_models={"openai/m": {"price": PRICE}},
        ) as plane,
    ):
        names = [f"{'abcdefghij'[number // 3]}-{number}x" for number in range(30)]
        for name in names:
            await plane.publish({"agent": "a", "job_id": name, "prompt": name})
        for name in names:
            [attempt] = (await plane.result(name))["attempts"]
            assert (attempt["response_model"], attempt["cost_basis"]) == (name, "estimated")
        warned = [line for line in plane.logs if line["event"] == "another_model_answers"]
    assert len(warned) == 20


@pytest.mark.parametrize(
    ("kind", "model_id", "answered", "told"),
    [
        ("openai", "chat", "gpt-4o-mini-2024-07-18", "gpt-4o-mini"),
        ("openai", "chat", "prod-2", None),  # another deployment's name of the same model
        ("openai", "chat", "PROD-1-2024-08-06", None),
        ("azure", "gpt-4o", "gpt-4o-mini-2024-07-18", "gpt-4o-mini"),
        ("azure", "gpt-4o", "gpt-4o-2024-08-06", None),
        ("azure", "gpt-4o", "nobody-knows-it", None),
        ("azure", "chat", "gpt-4o-mini", None),  # what it is shows nowhere
    ],
)
async def test_a_deployment_that_answers_as_another_model_is_recorded_and_told_once(
    start_worker: StartWorker, kind: str, model_id: str, answered: str, told: str | None
) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return _answer("openai", answered if "/first/" in request.path else "prod-2", streamed=False)

    listed = [{"provider": "first", "name": "prod-1"}, {"provider": "second", "name": "prod-2", "price": PRICED}]
    models = {model_id: {"price": PRICE, "deployments": listed, "choose": "weighted", "affinity": "none"}}
    async with (
        answering(answer) as origin,
        start_worker(
            {"sim/m": model()},
            {"a": {"model": model_id, **AGENT}},
            more_providers={name: {"kind": kind, "base_url": f"{origin}/{name}"} for name in ("first", "second")},
            more_models=models,
        ) as plane,
    ):
        results = [await plane.run({"agent": "a", "job_id": f"j{number}", "prompt": "x"}) for number in range(12)]
        warned = [
            (line["model"], line["deployment"], line["answered"])
            for line in plane.logs
            if line["event"] == "another_model_answers"
        ]
    attempts = [attempt for result in results for attempt in result["attempts"]]
    models_of = {(attempt["deployment"], attempt["response_model"]) for attempt in attempts}
    assert models_of == {("first/prod-1", told), ("second/prod-2", None)}
    assert warned == ([] if told is None else [(model_id, "first/prod-1", told)])
    # gpt-4o-mini has its own price, and the second deployment one of its own.
    costs = {attempt["deployment"]: (attempt["cost"], attempt["cost_basis"]) for attempt in attempts}
    assert costs["first/prod-1"] == (ASKED, "billed")
    assert costs["second/prod-2"] == ("0.030000000", "billed")


@pytest.mark.parametrize(
    ("provider", "price"),
    [
        ({"kind": "azure"}, PRICE),
        ({"kind": "openai"}, {"input_usd_per_mtok": 0, "output_usd_per_mtok": 0}),
    ],
)
async def test_a_deployment_and_a_server_of_ones_own_may_call_their_model_anything(
    start_worker: StartWorker, provider: dict[str, Any], price: dict[str, Any]
) -> None:
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return _answer("openai", "gpt-4o", streamed=False)

    async with (
        answering(answer) as origin,
        start_worker(
            {"sim/m": model()},
            {"a": {"model": "p/prod", **AGENT}},
            more_providers={"p": {**provider, "base_url": origin}},
            more_models={"p/prod": {"price": price}},
        ) as plane,
    ):
        [attempt] = (await plane.run({"agent": "a", "job_id": "j", "prompt": "x"}))["attempts"]
    assert (attempt["response_model"], attempt["cost_basis"], attempt["usage_problem"]) == (None, "billed", None)
