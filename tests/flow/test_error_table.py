"""Every failure of the table, through the real worker, NATS, Redis and the simulated provider."""

from __future__ import annotations

import asyncio

from tests.flow.fixtures import StartPlane
from tests.flow.kit import model
from tests.services.worker.error_table import MAX_ATTEMPTS

BASE_S = 0.05
AGENT = {
    "retry": {"max_attempts": MAX_ATTEMPTS, "backoff": "constant", "base_s": BASE_S},
    "breaker": "off",
    "total_timeout_s": 60,
    "max_tokens": 100,
}


async def test_retries_of_the_whole_fleet_stay_within_their_budget(start_plane: StartPlane) -> None:
    jobs, floor = 40, 5
    agents = {"writer": {**AGENT, "model": "sim/down", "fallback_models": ["sim/up"]}}
    models = {"sim/down": model({"status": 503}), "sim/up": model()}
    budget = {"ratio": 0.2, "floor": floor, "window_s": 60}
    async with start_plane(models, agents, services=("worker",), retry_budget=budget) as plane:
        plane.start("worker", "worker-2")
        for index in range(jobs):
            await plane.publish({"agent": "writer", "job_id": f"j{index}", "prompt": "hello"})
        results = await asyncio.gather(*(plane.result(f"j{index}") for index in range(jobs)))
        calls = plane.sim.ledger.by_model["sim/down"].calls
    assert {result["status"] for result in results} == {"succeeded"}
    retries = calls - jobs
    assert 0 < retries <= max(floor, 0.2 * jobs)
    refused = [a for result in results for a in result["attempts"] if a["short_circuited"]]
    assert {attempt["error"]["class"] for attempt in refused} == {"RetryBudgetExceededError"}
