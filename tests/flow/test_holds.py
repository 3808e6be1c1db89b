"""A model that refuses one call in ten, on a plane of two workers: it is busy, and not broken."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress

from bench.holds import RETRY_AFTER_S, admissions, hear_holds, under_holds
from tests.flow.fixtures import StartPlane
from tests.flow.kit import model

JOBS, WORKERS = 60, ("worker-1", "worker-2")


async def test_a_model_that_refuses_one_call_in_ten_serves_every_job_and_opens_no_breaker(
    start_plane: StartPlane,
) -> None:
    models = {"sim/m": model({"status": 429, "rate": 0.1, "retry_after_s": RETRY_AFTER_S}, latency_ms=20)}
    async with start_plane(models, {"writer": {"model": "sim/m", "concurrency": 64}}, services=("breaker",)) as plane:
        for name in WORKERS:
            plane.start("worker", name)
        for name in WORKERS:
            await plane.ready(name)
        ends_of_holds, listening = list[int](), asyncio.Event()
        hearing = asyncio.create_task(hear_holds(plane.environment["BREAKWATER_REDIS_URL"], ends_of_holds, listening))
        await listening.wait()
        for number in range(JOBS):
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": "x"})
            await asyncio.sleep(0.03)
        results = [await plane.result(f"j{number}") for number in range(JOBS)]
        hearing.cancel()
        with suppress(asyncio.CancelledError):
            await hearing
        changes = await plane.messages("EVENTS", "bw.breakers.>")
    assert Counter(result["status"] for result in results) == {"succeeded": JOBS}
    assert changes == []
    assert plane.sim.ledger.totals.calls == sum(result["attempts_count"] for result in results) > JOBS
    assert ends_of_holds
    assert under_holds(admissions(results), ends_of_holds) == 0
