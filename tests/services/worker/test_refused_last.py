"""Jobs of which a model was called and failed before a gate refused the next call: the refusal is why they end."""

from __future__ import annotations

from typing import Any

import pytest

from breakwater.breakers.rules.breaker import Breaker
from tests.flow.kit import model
from tests.services.request.conftest import put_breaker
from tests.services.worker.conftest import StartWorker
from tests.services.worker.test_outcomes import fill

DOWN = model({"requests": [1, 99], "status": 500})
ONCE = {"retry": {"max_attempts": 1}, "max_tokens": 1000}
BUDGET = {"budget": {"daily_usd": "0.000001", "enforcement": "hard"}}


@pytest.mark.parametrize("stream", [False, True])
async def test_by_a_budget_on_the_next_model(start_worker: StartWorker, stream: bool) -> None:
    cheap = {"price": {"input_usd_per_mtok": "0", "output_usd_per_mtok": "0"}}
    agents = {"writer": {"model": "sim/down", "fallback_models": ["sim/m"], **ONCE, **BUDGET}}
    async with start_worker({"sim/down": DOWN, "sim/m": model()}, agents, more_models={"sim/down": cheap}) as plane:
        await fill(plane)
        result = await plane.run({"agent": "writer", "job_id": "j", "prompt": "x", "stream": stream})
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["error", "short_circuited"]
    assert (result["reason"], result["error"]["class"]) == ("budget_exceeded", "CallOverCapError")


@pytest.mark.parametrize(
    ("agents_own", "reason"),
    [({}, "breaker_open"), ({"rate_limit": {"requests_per_minute": 1, "on_exceeded": "fail"}}, "rate_limited")],
)
async def test_by_another_gate(start_worker: StartWorker, agents_own: dict[str, Any], reason: str) -> None:
    agents = {"writer": {"model": "sim/down", "fallback_models": ["sim/m"], **ONCE, **agents_own}}
    async with start_worker({"sim/down": DOWN, "sim/m": model()}, agents) as plane:
        if reason == "breaker_open":
            await put_breaker(plane.worker.redis, "writer", "sim/m", Breaker(state="isolated", version=1))
        result = await plane.run({"agent": "writer", "job_id": "j", "prompt": "x"})
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["error", "short_circuited"]
    assert result["reason"] == reason
