"""Rules that a job brings itself, and what its result says of what stopped it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from breakwater.contracts import subjects
from breakwater.policy.breaker import BreakerKey, Failure
from breakwater.state.breakers import Saving
from tests.flow.kit import Plane, model
from tests.services.worker.conftest import StartWorker

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
        assert refused["error"]["message"] == ("guard.max_iterations: is looser than the agent allows: at most 10")
        assert "10" not in refused["error"]["user_message"]
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
        assert statistics(refused) == (0, 0, 0, "the task has run as often as it may")
        assert "7" not in json.dumps({"reason": refused["statistics"], "error": refused["error"]})


async def test_a_result_that_ended_by_a_breaker_has_the_statistics_and_no_threshold(start_worker: StartWorker) -> None:
    agents = {"writer": {**AGENT, "breaker": {"consecutive_failures": 3}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        key = BreakerKey("writer", "sim/m")
        [before] = await plane.worker.breakers.load([key])
        after = replace(
            before.breaker,
            state="open",
            open_until_ms=10**13,
            failures=tuple(Failure(number, 1, "a3f1b2c4") for number in range(1, 4)),
            total_failures=5,
            errors_seen=("0badc0de", "a3f1b2c4"),
            reason="3 consecutive failures (threshold: 3)",
        )
        assert await plane.worker.breakers.save([Saving(key, before, after, None)]) == [True]
        refused = await run(plane, "j")
        assert refused["reason"] == "breaker_open"
        assert statistics(refused) == (3, 5, 2, "3 consecutive failures")
        assert refused["attempts"][0]["statistics"] == refused["statistics"]
