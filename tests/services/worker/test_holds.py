"""A model that has answered with a rate limit is held for the whole fleet, and no other job finds out by a call."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from breakwater.kernel.nats.subjects import Header
from tests.flow.kit import PRICE, model, seconds_between
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

LIMITED_ONCE = {"requests": [1, 1], "status": 429}
AGENT = {"model": "sim/m", "retry": {"max_attempts": 2, "base_s": 0.3}, "total_timeout_s": 60}


async def test_no_job_of_any_agent_calls_a_held_model_and_all_succeed_when_the_hold_is_over(
    start_worker: StartWorker,
) -> None:
    models = {"sim/m": model({**LIMITED_ONCE, "retry_after_s": 1.5})}
    agents = {"writer": AGENT, "reader": {**AGENT, "model": "sim/alias"}}
    alias = {"sim/alias": {"price": PRICE, "name": "sim/m"}, "sim/m": {"price": PRICE, "name": "sim/m"}}
    async with start_worker(models, agents, more_models=alias) as plane:
        await plane.publish({"agent": "writer", "job_id": "first", "prompt": "x"})
        await until(lambda: _called(plane, 1), what="the first call")
        [refused] = await until(lambda: plane.attempts("writer", "first"), what="its attempt")
        others = [(agent, f"{agent}-{number}") for agent in agents for number in range(4)]
        for agent, name in others:
            await plane.publish({"agent": agent, "job_id": name, "prompt": "x"})
        results = [await plane.result(name) for name in ("first", *(name for _, name in others))]
        assert plane.sim.ledger.totals.calls == 1 + len(results)
    assert {result["status"] for result in results} == {"succeeded"}
    assert not refused["counts_for_breaker"]
    for result in results:
        last = result["attempts"][-1]
        assert seconds_between(refused["completed_at"], last["started_at"]) >= 1.4
        assert last["backoff_ms"] > 0
    assert {result["attempts_count"] for result in results[1:]} == {1}


async def _called(plane: Any, calls: int) -> bool:
    return plane.sim.ledger.totals.calls >= calls


@pytest.mark.parametrize(("hold_s", "chosen"), [(1.0, "sim/m"), (30, "sim/n")])
async def test_a_job_with_another_model_waits_for_a_short_hold_and_not_for_a_long_one(
    start_worker: StartWorker, hold_s: float, chosen: str
) -> None:
    models = {"sim/m": model({**LIMITED_ONCE, "retry_after_s": hold_s}), "sim/n": model()}
    async with start_worker(models, {"writer": {**AGENT, "fallback_models": ["sim/n"]}}) as plane:
        first = await plane.run({"agent": "writer", "job_id": "a", "prompt": "x"})
        await plane.worker.redis.run([plane.worker.deployments.hold_command("sim/m", hold_s)])
        second = await plane.run({"agent": "writer", "job_id": "b", "prompt": "x"})
        assert plane.sim.ledger.by_model["sim/m"].calls == (3 if chosen == "sim/m" else 1)
    assert (first["chosen_model"], second["chosen_model"]) == (chosen, chosen)
    if chosen == "sim/n":
        held, answered = second["attempts"]
        assert (held["outcome"], held["refused_by"], held["error"]["class"]) == (
            "short_circuited", "provider:sim", "ModelHeldError"
        )  # fmt: skip
        assert 25 < held["error"]["retry_after_s"] <= 30
        assert (answered["cause"], answered["backoff_ms"]) == ("fallback", 0)


async def test_a_job_without_time_for_the_hold_ends_at_once_and_calls_nothing(start_worker: StartWorker) -> None:
    models = {"sim/m": model({"status": 429, "retry_after_s": 600})}
    async with start_worker(models, {"writer": {**AGENT, "total_timeout_s": 5}}) as plane:
        first, second = [await plane.run({"agent": "writer", "job_id": name, "prompt": "x"}) for name in ("a", "b")]
        plan = await plane.run({"agent": "writer", "job_id": "c", "prompt": "x", "dry_run": True})
        assert plane.sim.ledger.totals.calls == 1
    assert (first["reason"], first["error"]["kind"]) == ("timeout", "rate_limit")
    assert (second["reason"], second["error"]["class"]) == ("rate_limited", "ModelHeldError")
    assert seconds_between(second["dispatched_at"], second["completed_at"]) < 4
    assert plan["output"]["models"][0]["admission"] == "wait"


async def test_a_long_hold_parks_a_job_that_has_no_other_model(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.services.worker.attempts.LONG_WAIT_S", 0.5)
    async with start_worker({"sim/m": model()}, {"writer": AGENT}) as plane:
        await plane.worker.redis.run([plane.worker.deployments.hold_command("sim/m", 2)])
        await plane.publish({"agent": "writer", "job_id": "j1", "prompt": "x"})

        async def parked() -> bool:
            sleeping = (await plane.jetstream.stream_info("PARKED")).state.messages > 0
            return sleeping and await plane.pending_jobs() == 0

        await until(parked)
        result = await plane.result("j1")
    assert (result["status"], result["attempts_count"]) == ("succeeded", 1)
    assert result["attempts"][0]["backoff_ms"] >= 1000


async def test_the_limit_of_one_caller_is_its_own_where_another_ones_call_succeeds(
    start_worker: StartWorker, subtests: pytest.Subtests
) -> None:
    """Two keys; and two tenants of one key."""
    models = {"sim/m": model({**LIMITED_ONCE, "retry_after_s": 3500})}
    callers: list[tuple[dict[str, str], dict[str, str]]] = [
        ({"key": "a"}, {"key": "b"}),
        ({"key": "k", "tenant": "a"}, {"key": "k", "tenant": "b"}),
    ]
    for limited, free in callers:
        with subtests.test(limited):
            async with start_worker(models, {"writer": AGENT}) as plane:

                async def run(job_id: str, key: str, plane: WorkerPlane = plane, **job: str) -> Any:
                    headers = {Header.SUBMITTED_BY.value: key, Header.OWNER.value: key}
                    await plane.publish({"agent": "writer", "job_id": job_id, "prompt": "x", **job}, **headers)
                    return await plane.result(job_id)

                assert (await run("limited", **limited))["reason"] == "timeout"
                # The probe, and all calls after it.
                results = [await run(f"free-{number}", **free) for number in range(2)]
                assert [(one["status"], one["attempts_count"]) for one in results] == [("succeeded", 1)] * 2
                assert all(one["attempts"][0]["backoff_ms"] == 0 for one in results)
                told = await run("told", **limited)
                assert (told["reason"], told["error"]["class"]) == ("rate_limited", "ModelHeldError")
                assert 3400 < told["error"]["retry_after_s"] <= 3500
                assert plane.sim.ledger.totals.calls == 3
                await plane.worker.deployments.release("sim/m")
                assert (await run("after", **limited))["status"] == "succeeded"


async def test_the_waits_that_a_job_wants_after_a_rate_limit_are_its_own(start_worker: StartWorker) -> None:
    agents = {"writer": {**AGENT, "retry": {"max_attempts": 2, "base_s": 0.1, "max_delay_s": 5}}}
    async with start_worker(
        {"sim/m": model({**LIMITED_ONCE, "headers": {"x-ratelimit-reset-requests": ""}})}, agents
    ) as plane:
        slow = {"base_s": 3600, "max_delay_s": 3600}
        first = await plane.run({"agent": "writer", "job_id": "slow", "prompt": "x", "retry": slow})
        assert first["reason"] == "timeout"
        assert await plane.worker.redis.client.pttl("bw:held:sim%2Fm") <= 100
        second = await plane.run({"agent": "writer", "job_id": "other", "prompt": "x"})
        assert second["status"] == "succeeded"
        assert second["attempts"][0]["backoff_ms"] <= 110


@pytest.mark.parametrize("at_config", [{}, {"breaker_counts_rate_limits": True}])
async def test_rate_limits_open_no_breaker_unless_the_config_says_so(
    start_worker: StartWorker, at_config: dict[str, Any]
) -> None:
    agent = {**AGENT, "retry": {"max_attempts": 1}, "breaker": {"consecutive_failures": 2, "same_error": 2}} | at_config
    async with start_worker({"sim/m": model({"status": 429, "retry_after_s": 0})}, {"writer": agent}) as plane:
        await plane.worker.breakers.mark_filled("log")
        results = [await plane.run({"agent": "writer", "job_id": f"j{n}", "prompt": "x"}) for n in range(4)]
    ends = ["error", "error", "breaker_open", "breaker_open"] if at_config else ["error"] * 4
    assert [result["reason"] for result in results] == ends


@pytest.mark.parametrize("answers", [True, False])
async def test_a_busy_model_that_answers_others_uses_up_no_tries(start_worker: StartWorker, answers: bool) -> None:
    models = {"sim/m": model({"requests": [1, 5], "status": 429, "retry_after_s": 0.2})}
    options: dict[str, Any] = {"retry_budget": {"ratio": 0, "floor": 1}, "fake_clock": True}
    # Redis holds the model by its own clock, and meanwhile the job asks again and again by the faster one.
    agent = {**AGENT, "total_timeout_s": 3600}
    async with start_worker(models, {"writer": agent}, **options) as plane:
        if answers:
            plane.worker.outcomes.answered["sim/m"] = plane.worker.now() + timedelta(minutes=1)
        result = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "x"})
    assert (result["status"], result["attempts_count"]) == (("succeeded", 6) if answers else ("dead_lettered", 2))
