"""Whatever a provider answers: the call ends in an attempt, and a client is told what it can read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings

from tests.any_answers import AnyAnswer, agents, any_provider_server, check_examples
from tests.flow.kit import model
from tests.services.worker.conftest import StartWorker


async def test_whatever_is_answered_ends_in_an_attempt(start_worker: StartWorker) -> None:
    async with (
        any_provider_server() as (bodies, providers),
        start_worker({"sim/m": model()}, agents(), more_providers=providers, retry_budget="off") as plane,
    ):
        outcomes = await check_examples(plane, bodies, max_examples=settings.default.max_examples // 4)
    assert {"success", "BrokenAnswerError"} <= outcomes.keys()


@pytest.mark.parametrize(
    ("text", "size", "error"), [("Here.", 3_500_000, None), (None, 2_500_000, None), (None, 3_500_000, "too large")]
)
async def test_an_image_is_never_left_out_of_a_response(
    start_worker: StartWorker, text: str | None, size: int, error: str | None
) -> None:
    items: list[dict[str, Any]] = [{"type": "image_generation_call", "id": "i1", "result": "A" * size}]
    if text is not None:
        items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})
    used = {"input_tokens": 5, "output_tokens": 7}
    body = json.dumps({"object": "response", "status": "completed", "output": items, "usage": used}).encode()
    async with (
        any_provider_server() as (bodies, providers),
        start_worker({"sim/m": model()}, agents(), more_providers=providers, retry_budget="off") as plane,
    ):
        bodies["j1"] = AnyAnswer("responses", False, body)
        request = {"api": "responses", "body": {"input": "j1"}}
        job = {"agent": "responses-fail", "job_id": "j1", "api_request": request, "include_response": True}
        result = await plane.run(job)
    if error is None:
        assert result["response"]["output"] == items
    else:
        assert (result["error"]["class"], result["response"]) == ("AnswerTooLargeError", None)
