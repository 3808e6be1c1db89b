"""Rules that a job brings itself, and what its result says of what stopped it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from breakwater.breakers.rules.breaker import BreakerKey, CountedFailure
from breakwater.breakers.store import Saving
from breakwater.kernel.nats import subjects
from tests.flow.kit import Plane, model
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

AGENT = {"model": "sim/m", "breaker": "off", "retry": {"max_attempts": 3, "base_s": 0.01, "max_delay_s": 0.01}}
DOWN = model({"requests": [1, 99], "status": 500})
COUNTS = ("consecutive_failures", "total_failures", "unique_errors", "reason")


async def run(plane: Plane, job_id: str, **more: Any) -> dict[str, Any]:
    await plane.publish({"agent": "writer", "job_id": job_id, "prompt": "x", **more})
    return await plane.result(job_id)


def statistics(result: dict[str, Any]) -> tuple[Any, ...] | None:
    found = result["statistics"]
    return None if found is None else tuple(found[name] for name in COUNTS)


async def test_a_job_may_bring_retry_settings(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": DOWN}, {"writer": AGENT}) as plane:
        assert (await run(plane, "own", retry={"max_attempts": 1}))["attempts_count"] == 1
        assert (await run(plane, "agent"))["attempts_count"] == 3


async def test_a_job_may_bring_guard_settings_for_its_own_checks_of_its_task(start_worker: StartWorker) -> None:
    agents = {"writer": {**AGENT, "overridable": {"guard.max_iterations": 20}}, "free": {**AGENT, "guard": "off"}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        for number in range(10):
            assert (await run(plane, f"j{number}", task_id="t"))["status"] == "succeeded"
        looser = await run(plane, "looser", task_id="t", guard={"max_iterations": 11})
        assert looser["status"] == "succeeded"
        assert (await run(plane, "agent", task_id="t"))["reason"] == "guard_tripped"
        # Its agent has none.
        results = [
            await run(plane, f"f{number}", agent="free", task_id="f", guard={"max_iterations": 1})
            for number in range(2)
        ]
        assert [result["reason"] for result in results] == [None, "guard_tripped"]


async def test_a_job_that_is_out_of_bounds_is_dead_lettered_as_invalid(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, {"writer": AGENT}) as plane:
        refused = await run(plane, "j", guard={"max_iterations": 11})
        assert (refused["status"], refused["reason"], refused["attempts"]) == ("dead_lettered", "invalid", [])
        why = "is looser than the agent allows; leave it out, or set a stricter one"
        assert refused["error"]["message"] == f"guard.max_iterations: {why}"
        assert "10" not in json.dumps(refused["error"])
        assert await plane.last("DLQ", subjects.dead_letter("invalid", "writer")) is not None
        assert plane.sim.ledger.totals.calls == 0


async def test_a_dry_run_shows_the_settings_that_a_job_brings(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, {"writer": AGENT}) as plane:
        planned = await run(plane, "j", dry_run=True, retry={"max_attempts": 2})
        assert planned["output"]["models"][0]["max_attempts"] == 2


async def test_a_result_that_ended_by_a_guard_has_the_statistics_and_no_limits(start_worker: StartWorker) -> None:
    models = {"sim/m": model({"requests": [1, 1], "status": 500}, {"requests": [2, 2], "status": 502})}
    agents = {"writer": {**AGENT, "retry": {"max_attempts": 1}, "guard": {"consecutive_failures": 2}}}
    async with start_worker(models, agents) as plane:
        first, last, refused = [await run(plane, f"j{number}", task_id="t") for number in range(3)]
        assert statistics(first) is None
        # The one that stopped the task says so itself.
        assert (last["reason"], refused["reason"]) == ("error", "guard_tripped")
        assert statistics(last) == statistics(refused) == (2, 2, 2, "2 consecutive failures")
        record = await plane.last("EVENTS", subjects.execution("writer", "j2"))
        assert record is not None
        assert record["statistics"] == refused["statistics"]
        assert "threshold" not in json.dumps(refused)


async def test_a_cap_is_not_in_the_statistics_of_who_reached_it(start_worker: StartWorker) -> None:
    agents = {"writer": {**AGENT, "guard": {"max_iterations": 7}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        *_, refused = [await run(plane, f"j{number}", task_id="t") for number in range(8)]
        assert statistics(refused) == (0, 0, 0, "the task has reached its limit of iterations")
        assert "7" not in json.dumps({"reason": refused["statistics"], "error": refused["error"]})


async def test_a_guard_that_a_job_brings_holds_for_it_alone_too(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, {"writer": {**AGENT, "guard": "off"}}) as plane:
        refused = await run(plane, "j", guard={"max_cost_usd": "0.000001"})
        assert refused["reason"] == "guard_tripped"
        assert statistics(refused) == (0, 0, 0, "the task's money is used up, or too little for another call")
        assert plane.sim.ledger.totals.calls == 0


async def test_a_result_that_ended_by_a_breaker_has_the_statistics_and_no_threshold(start_worker: StartWorker) -> None:
    agents = {"writer": {**AGENT, "breaker": {"consecutive_failures": 3}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        key = BreakerKey("writer", "sim/m")
        [before] = await plane.worker.breakers.load([key])
        after = replace(
            before.breaker,
            state="open",
            open_until_ms=10**13,
            failures=tuple(CountedFailure(number, 1, "a3f1b2c4") for number in range(1, 4)),
            total_failures=5,
            errors_seen=("0badc0de", "a3f1b2c4"),
            reason="3 jobs in a row failed (threshold: 3)",
        )
        assert await plane.worker.breakers.save([Saving(key, before, after, None)]) == [True]
        refused = await run(plane, "j")
        assert refused["reason"] == "breaker_open"
        assert statistics(refused) == (3, 5, 2, "3 jobs in a row failed")
        assert refused["attempts"][0]["statistics"] == refused["statistics"]


async def redis_keys(plane: WorkerPlane) -> set[str]:
    found: list[str] = [key async for key in plane.worker.redis.client.scan_iter("bw:breaker:*")]
    return set(found)


async def test_the_breaker_of_a_job_is_its_tasks_and_does_not_tighten_everyones(start_worker: StartWorker) -> None:
    agents = {"writer": {**AGENT, "retry": {"max_attempts": 1}, "guard": "off", "breaker": {"consecutive_failures": 9}}}
    once = {"consecutive_failures": 1, "cooldown_s": 600}
    async with start_worker({"sim/m": DOWN}, agents) as plane:
        await plane.worker.breakers.mark_filled("log")
        assert (await run(plane, "j1", task_id="t", breaker=once))["reason"] == "error"
        refused = await run(plane, "j2", task_id="t", breaker=once)
        assert (refused["reason"], refused["error"]["class"]) == ("breaker_open", "CircuitBreakerOpenError")
        assert statistics(refused) == (1, 1, 1, "1 call failed")
        assert 500 < refused["error"]["retry_after_s"] <= 600
        assert refused["error"]["user_message"].startswith("This task is temporarily unavailable")
        assert plane.sim.ledger.totals.calls == 1
        # Not that of another task, nor another tenant's, nor of whoever brings none.
        for number, more in enumerate([{"task_id": "u"}, {"task_id": "t", "tenant": "acme"}, {}]):
            assert (await run(plane, f"other{number}", breaker=once, **more))["reason"] == "error"
        assert (await run(plane, "none", task_id="t"))["reason"] == "error"
        # It is listed nowhere, and has an end.
        assert [key.task for key, _ in await plane.worker.breakers.all()] == [None]
        own = await redis_keys(plane) - {"bw:breaker:writer/sim%2Fm"}
        assert len(own) == 4
        assert all([0 < await plane.worker.redis.client.ttl(key) <= 49 * 3600 for key in own])
        assert await plane.messages("EVENTS", "bw.breakers.>") == []


async def test_a_job_s_own_retries_end_at_the_failure_that_opens_its_breaker(start_worker: StartWorker) -> None:
    models = {"sim/m": DOWN, "sim/n": model()}
    agents = {"writer": AGENT, "chain": {**AGENT, "fallback_models": ["sim/n"]}}
    async with start_worker(models, agents) as plane:
        result = await run(plane, "j", breaker={"preset": "migration-safety"})
        assert [attempt["outcome"] for attempt in result["attempts"]] == ["error", "short_circuited"]
        assert (result["reason"], result["error"]["status_code"]) == ("error", 500)
        assert statistics(result) == (1, 1, 1, "1 call failed")
        # A success on another model says nothing about this one, and is one.
        result = await run(plane, "k", agent="chain", breaker={"consecutive_failures": 1})
        assert [attempt["outcome"] for attempt in result["attempts"]] == ["error", "short_circuited", "success"]
        assert statistics(result) is None


async def test_failures_that_follow_from_the_request_count_for_the_task_s_breaker_and_for_no_other(
    start_worker: StartWorker,
) -> None:
    models = {"sim/m": model({"requests": [1, 99], "status": 400})}
    agents = {"writer": {**AGENT, "guard": "off", "breaker": {"consecutive_failures": 2}}}
    async with start_worker(models, agents) as plane:
        await plane.worker.breakers.mark_filled("log")
        own = {"consecutive_failures": 2}
        for number in range(2):
            assert (await run(plane, f"j{number}", task_id="t", breaker=own))["reason"] == "error"
        refused = await run(plane, "j2", task_id="t", breaker=own)
        assert (refused["reason"], statistics(refused)) == ("breaker_open", (2, 2, 1, "2 calls in a row failed"))
        for number in range(3):
            assert (await run(plane, f"other{number}"))["reason"] == "error"
        [of_agent] = await plane.worker.breakers.load([BreakerKey("writer", "sim/m")])
        assert (of_agent.breaker.state, of_agent.breaker.total_failures) == ("closed", 0)


async def test_a_task_s_breaker_lets_one_probe_pass_and_closes_with_its_success(start_worker: StartWorker) -> None:
    models = {"sim/m": model({"requests": [1, 1], "status": 500})}
    agents = {"writer": {**AGENT, "retry": {"max_attempts": 1}}}
    once = {"consecutive_failures": 1, "cooldown_s": 0.001}
    async with start_worker(models, agents) as plane:
        assert (await run(plane, "j1", task_id="t", breaker=once))["reason"] == "error"
        probe = await run(plane, "j2", task_id="t", breaker=once)
        assert (probe["status"], probe["attempts"][0]["cause"]) == ("succeeded", "probe")
        after = await run(plane, "j3", task_id="t", breaker=once)
        assert (after["status"], after["attempts"][0]["cause"]) == ("succeeded", "first")


async def test_the_breaker_of_the_agent_holds_for_jobs_that_bring_their_own(start_worker: StartWorker) -> None:
    agents = {"writer": {**AGENT, "breaker": {"consecutive_failures": 2}, "retry": {"max_attempts": 1}}}
    async with start_worker({"sim/m": DOWN}, agents) as plane:
        await plane.worker.breakers.mark_filled("log")
        own = {"consecutive_failures": 1}
        for number in range(2):
            assert (await run(plane, f"j{number}", task_id=f"t{number}", breaker=own))["reason"] == "error"
        refused = await run(plane, "last", task_id="t2", breaker=own)
        assert (refused["reason"], statistics(refused)) == ("breaker_open", (2, 2, 1, "2 jobs in a row failed"))
        assert "the breaker of agent writer for sim/m is open" in refused["error"]["message"]


async def test_a_looser_breaker_of_a_job_takes_effect_and_its_failures_still_stop_the_jobs_of_others(
    start_worker: StartWorker, subtests: pytest.Subtests
) -> None:
    """In one job with retries, and in a task of many jobs."""
    loose = {"consecutive_failures": 8, "same_error": 10}
    agent = {
        **AGENT,
        "breaker": {"consecutive_failures": 3, "same_error": 5, "count": "attempts"},
        "guard": "off",
        "overridable": {"breaker.consecutive_failures": 8, "breaker.same_error": 10, "retry.max_attempts": 20},
    }
    for breaker in (loose, {"preset": "scientific-method"}):
        for jobs, tries in ((1, 12), (12, 1)):
            with subtests.test(f"{breaker}, {jobs} jobs"):
                models = {"sim/m": model({"requests": [1, 99], "status": 500})}
                async with start_worker(models, {"writer": agent}, retry_budget="off") as plane:
                    await plane.worker.breakers.mark_filled("log")
                    more = {"breaker": breaker, "retry": {"max_attempts": tries}}
                    if jobs > 1:
                        more["task_id"] = "t"
                    results = [await run(plane, f"j{number}", **more) for number in range(jobs)]
                    assert plane.sim.ledger.totals.calls == 8
                    assert statistics(results[-1]) == (8, 8, 1, "8 calls in a row failed")
                    refused = await run(plane, "other", retry={"max_attempts": 1})
                    assert (refused["reason"], statistics(refused)) == (
                        "breaker_open",
                        (3, 3, 1, "3 calls in a row failed"),
                    )
                    assert "the breaker of agent writer for sim/m is open" in refused["error"]["message"]
                    # What others have opened stops it, too.
                    own = await run(plane, "own", **{**more, "task_id": "u"})
                    assert (own["reason"], plane.sim.ledger.totals.calls) == ("breaker_open", 8)


async def test_a_job_without_a_breaker_of_its_own_leaves_none(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, {"writer": {**AGENT, "breaker": {"consecutive_failures": 3}}}) as plane:
        await run(plane, "j", task_id="t")
        assert await redis_keys(plane) <= {"bw:breaker:writer/sim%2Fm"}, "the fleet's, which knows its callers"


async def test_a_task_has_a_rate_limit_of_its_own_from_its_job_or_its_agent(
    start_worker: StartWorker, subtests: pytest.Subtests
) -> None:
    limit = {"requests_per_minute": 2, "on_exceeded": "fail"}
    of_agent = {"guard": {"rate_limit": limit}}
    for agent, job in ((AGENT, {"rate_limit": limit}), (AGENT, of_agent), ({**AGENT, **of_agent}, {})):
        with subtests.test(f"{agent} {job}"):
            async with start_worker({"sim/m": model()}, {"writer": {"guard": "off", **agent}}) as plane:
                results = [await run(plane, f"j{number}", task_id="t", **job) for number in range(3)]
                assert [result["reason"] for result in results] == [None, None, "rate_limited"]
                refused = results[-1]
                assert refused["attempts"][0]["refused_by"] == "task:/t"
                assert refused["error"]["message"].startswith("the limit of task t on requests per minute has no room")
                assert "2" not in refused["error"]["message"].partition(";")[0]
                # Each task by itself, and each tenant's.
                for number, other in enumerate(({"task_id": "u"}, {}, {"task_id": "t", "tenant": "acme"})):
                    assert (await run(plane, f"o{number}", **other, **job))["status"] == "succeeded"


async def test_the_retries_of_a_job_count_towards_its_rate_limit(start_worker: StartWorker) -> None:
    limit = {"requests": 2, "per": "hour", "on_exceeded": "fail"}
    async with start_worker({"sim/m": DOWN}, {"writer": AGENT}) as plane:
        result = await run(plane, "j", rate_limit=limit)
        assert [attempt["outcome"] for attempt in result["attempts"]] == ["error", "error", "short_circuited"]
        assert plane.sim.ledger.totals.calls == 2
        wrong = await run(plane, "wrong", rate_limit={"requests": 2})
        assert wrong["error"]["message"].startswith("guard.rate_limit: requests and tokens need `per: hour`")
