"""Rate limits on a whole plane: jobs wait for their turn, or fail, as configured."""

from __future__ import annotations

import json
from typing import Any

import redis.asyncio as aioredis

from breakwater.jobs.store.executions import Claim
from tests.flow.kit import PRICE, Plane, model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker

FAIL = {"on_exceeded": "fail"}


async def submit(plane: Plane, count: int, prefix: str = "j", **more: Any) -> list[dict[str, Any]]:
    for number in range(count):
        await plane.publish({"agent": "writer", "job_id": f"{prefix}{number}", "prompt": "x", **more})
    return [await plane.result(f"{prefix}{number}") for number in range(count)]


async def test_over_the_limit_a_job_fails_at_once_where_that_is_asked_for(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "rate_limit": {"requests_per_minute": 5, **FAIL}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        results = await submit(plane, 20)
        assert sum(result["status"] == "succeeded" for result in results) == 5
        refused = next(result for result in results if result["reason"] == "rate_limited")
        [attempt] = refused["attempts"]
        assert (attempt["outcome"], attempt["refused_by"]) == ("short_circuited", "agent:writer")
        assert attempt["error"]["class"] == "RateLimitExceededError"
        assert 0 < attempt["error"]["retry_after_s"] <= 61
        assert plane.sim.ledger.totals.calls == 5


async def test_over_the_requests_of_an_hour_a_job_that_can_not_wait_so_long_is_refused(
    start_worker: StartWorker,
) -> None:
    agents = {"writer": {"model": "sim/m", "rate_limit": {"requests": 2, "per": "hour"}, "total_timeout_s": 60}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        results = await submit(plane, 3)
        assert plane.sim.ledger.totals.calls == 2
    [refused] = [result["error"] for result in results if result["reason"] == "rate_limited"]
    said = "the limit of agent writer on requests per hour has no room for this call; try again in "
    assert refused["message"].startswith(said)
    assert 3_500 < refused["retry_after_s"] <= 3_640


async def test_a_models_limit_holds_over_all_agents_and_the_chain_goes_on(start_worker: StartWorker) -> None:
    agents = {name: {"model": "sim/m", "fallback_models": ["sim/n"]} for name in ("writer", "reader")}
    limited = {"sim/m": {"price": PRICE, "rate_limit": {"requests_per_minute": 4, **FAIL}}}
    models = {"sim/m": model(), "sim/n": model()}
    async with start_worker(models, agents, more_models=limited) as plane:
        results = await submit(plane, 5) + await submit(plane, 5, "r", agent="reader")
        assert {result["status"] for result in results} == {"succeeded"}
        assert sorted(result["chosen_model"] for result in results) == ["sim/m"] * 4 + ["sim/n"] * 6


async def test_a_job_waits_for_its_turn_and_no_more_calls_are_under_way_than_allowed(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "rate_limit": {"concurrent_calls": 2}}}
    async with start_worker({"sim/m": model(latency_ms=100)}, agents) as plane:
        results = await submit(plane, 10)
        assert {result["status"] for result in results} == {"succeeded"}
        spans = sorted((a["started_at"], a["completed_at"]) for result in results for a in result["attempts"])
        most = max(sum(began <= moment < ended for began, ended in spans) for moment, _ in spans)
        assert most <= 2
        assert any(result["attempts"][0]["backoff_ms"] for result in results)
        assert {result["attempts_count"] for result in results} == {1}


async def test_whoever_waits_for_a_turn_has_no_call_under_way(start_worker: StartWorker) -> None:
    # A worker that takes it over after a crash would take such a call for lost, and its worst case for spent.
    agents = {"writer": {"model": "sim/m", "rate_limit": {"concurrent_calls": 1}}}
    async with start_worker({"sim/m": model({"requests": [1, 1], "hang_s": 1.5})}, agents) as plane:
        for name in ("first", "second"):
            await plane.publish({"agent": "writer", "job_id": name, "prompt": "x"})
        async with aioredis.from_url(plane.environment["BREAKWATER_REDIS_URL"], decode_responses=True) as redis:

            async def under_way() -> list[bool]:
                texts = [await redis.hget(Claim.new(name).key, "checkpoint") for name in ("first", "second")]
                return ["in_flight" in json.loads(text) for text in texts if text]

            async def one_waits() -> bool:
                return sorted(await under_way()) == [False, True]

            await until(one_waits, what="one call under way and one job that waits")
        assert (await plane.result("second"))["attempts_count"] == 1


async def test_a_long_wait_for_a_turn_sleeps_on_the_bus_and_does_not_fit_a_short_timeout(
    start_worker: StartWorker,
) -> None:
    agents = {"writer": {"model": "sim/m", "rate_limit": {"requests_per_minute": 1}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        [first] = await submit(plane, 1)
        assert first["status"] == "succeeded"
        await plane.publish({"agent": "writer", "job_id": "sleeper", "prompt": "x"})

        async def parked() -> int:
            return (await plane.jetstream.stream_info("PARKED")).state.messages

        await until(parked, what="the job to be parked")

        async def drained() -> bool:
            return await plane.pending_jobs() == 0

        await until(drained, what="an empty JOBS")
        # Nothing waits that could not be done in time.
        [hasty] = await submit(plane, 1, "hasty", total_timeout_s=20)
        assert hasty["reason"] == "rate_limited"


async def test_tokens_count_as_used_and_not_as_feared(start_worker: StartWorker) -> None:
    # A call may use some 4,100 tokens and does use 160: by its worst case one fits, by its use many do.
    agents = {"writer": {"model": "sim/m", "rate_limit": {"tokens_per_minute": 5000, **FAIL}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        for number in range(5):
            [result] = await submit(plane, 1, f"one-{number}-")
            assert result["status"] == "succeeded", number
        [result] = await submit(plane, 1, "big", params={"max_tokens": 6000})
        assert result["reason"] == "rate_limited"
        assert result["error"]["retry_after_s"] is None


async def test_cached_input_counts_only_towards_limits_that_count_it(start_worker: StartWorker) -> None:
    # Each call reads 1,000 of its 1,100 tokens from the cache; by its worst case it may use 200.
    cached = model(usage={"input_tokens": 1_060, "output_tokens": 40, "cached_tokens": 1_000})
    agent = {"model": "sim/m", "max_tokens": 100}
    limit = {"tokens_per_minute": 1_500, **FAIL}
    agents = {
        "writer": {**agent, "rate_limit": {**limit, "count_cached": False}},
        "reader": {**agent, "rate_limit": limit},
    }
    async with start_worker({"sim/m": cached}, agents) as plane:
        uncounted = [result for number in range(5) for result in await submit(plane, 1, f"a{number}-")]
        counted = [result for number in range(5) for result in await submit(plane, 1, f"b{number}-", agent="reader")]
    assert {result["status"] for result in uncounted} == {"succeeded"}
    assert [result["status"] for result in counted].count("succeeded") == 2
