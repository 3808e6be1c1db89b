"""A dry run: what would be called, at what cost, and which gate would refuse it; nothing is called or taken."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.breakers.store import Breakers, Saving
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.nats.subjects import Header
from breakwater.limits.rules.guard import Trip
from breakwater.limits.rules.ledger import AttemptSums
from breakwater.limits.store.budget_counters import BudgetCounters
from tests.flow.kit import PRICE, model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

JOB = {"agent": "writer", "prompt": "hello"}


async def planned(plane: WorkerPlane, **job: Any) -> list[dict[str, Any]]:
    result = await plane.run({**JOB, "job_id": "dry", "dry_run": True, **job})
    assert (result["status"], result["dry_run"], result["attempts"]) == ("succeeded", True, [])
    assert (result["total_cost"], result["cost_basis"]) == ("0.000000000", "none")
    return result["output"]["models"]


async def in_redis(plane: WorkerPlane) -> dict[str, Any]:
    """All that is kept there, but for how far jobs are: one that has been answered is forgotten a moment later."""
    client = plane.worker.redis.client
    return {key: await client.dump(key) for key in await client.keys() if not key.startswith("bw:execution:")}


async def open_breaker(plane: WorkerPlane, model_name: str, **more: Any) -> None:
    breakers, key = Breakers(plane.worker.redis), BreakerKey("writer", model_name)
    [before] = await breakers.load([key])
    fields = {"state": "open", "version": 1, "open_until_ms": before.now_ms + 60_000, **more}
    assert await breakers.save([Saving(key, before, replace(before.breaker, **fields), None)]) == [True]


async def test_where_nothing_stands_in_the_way_every_model_would_be_admitted(start_worker: StartWorker) -> None:
    agents = {
        "writer": {
            "model": "sim/m",
            "fallback_models": ["sim/n"],
            "guard": {"max_iterations": 2},
            "rate_limit": {"requests_per_minute": 1},
        }
    }
    async with start_worker({"sim/m": model(), "sim/n": model()}, agents) as plane:
        before = await in_redis(plane)
        models = await planned(plane, task_id="t1")
        assert [(one["model"], one["provider"], one["admission"]) for one in models] == [
            ("sim/m", "sim", "admitted"),
            ("sim/n", "sim", "admitted"),
        ]
        assert {one["refusal"] for one in models} == {None}
        assert float(models[0]["worst_case_cost"]) > 0
        assert plane.sim.ledger.totals.calls == 0
        assert await in_redis(plane) == before
        # It has used up neither an iteration nor the minute's one request.
        for number in range(3):
            [first, _] = await planned(plane, task_id="t1", job_id=f"again-{number}")
            assert first["admission"] == "admitted"
        assert (await plane.run({**JOB, "job_id": "real", "task_id": "t1"}))["status"] == "succeeded"


async def test_an_open_breaker_is_named_for_the_model_that_it_is_open_for(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "fallback_models": ["sim/n"]}}
    async with start_worker({"sim/m": model(), "sim/n": model()}, agents) as plane:
        await open_breaker(plane, "sim/m")
        before = await in_redis(plane)
        [first, second] = await planned(plane)
        assert (first["admission"], second["admission"]) == ("refused", "admitted")
        assert first["refusal"]["reason"] == "breaker_open"
        assert first["refusal"]["message"].startswith("the breaker of agent writer for sim/m is open until 20")
        assert 0 < first["refusal"]["retry_after_s"] <= 60
        assert await in_redis(plane) == before


async def test_a_dry_run_takes_no_probe(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, {"writer": {"model": "sim/m"}}) as plane:
        await open_breaker(plane, "sim/m", open_until_ms=1)
        before = await in_redis(plane)
        [only] = await planned(plane)
        assert only["admission"] == "admitted"
        assert await in_redis(plane) == before
        assert await plane.messages("EVENTS", "bw.breakers.>") == []


async def test_a_spent_budget_is_named(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "budget": {"daily_usd": "0.000001", "enforcement": "hard"}}}
    async with start_worker({"sim/m": model()}, agents) as plane:
        [only] = await planned(plane)
        assert (only["admission"], only["refusal"]["reason"]) == ("wait", "budget_exceeded")
        assert "being rebuilt" in only["refusal"]["message"]
        counters = BudgetCounters(plane.worker.redis, plane.worker.config.budgets.zone)
        await counters.fill(None, "log", 0, counters.periods(datetime.now(UTC)), {}, {})
        before = await in_redis(plane)
        [only] = await planned(plane, job_id="dry-2")
        assert (only["admission"], only["refusal"]["reason"]) == ("refused", "budget_exceeded")
        assert only["refusal"]["refused_by"] == "agent:writer/daily"
        assert await in_redis(plane) == before


@pytest.mark.parametrize("operator", [False, True])
async def test_what_is_left_of_caps_and_limits_is_told_to_operators_alone(
    start_worker: StartWorker, operator: bool
) -> None:
    """Anyone else learns from dry runs of any size what calls of theirs cost, and whether a budget is spent."""
    hard = {"daily_usd": "0.01", "enforcement": "hard"}
    agents = {
        "writer": {"model": "sim/m", "budget": hard},
        "careful": {"model": "sim/m", "guard": {"max_cost_usd": "0.01"}},
        "paced": {"model": "sim/m", "rate_limit": {"tokens_per_minute": 20_000}},
        "frugal": {"model": "sim/m", "max_cost_usd": "0.01"},
    }
    headers = {Header.SUBMITTED_BY.value: "k"} | ({Header.OPERATOR.value: "1"} if operator else {})
    async with start_worker({"sim/m": model()}, agents) as plane:
        counters = BudgetCounters(plane.worker.redis, plane.worker.config.budgets.zone)
        periods = counters.periods(datetime.now(UTC))
        await counters.fill(None, "log", 0, periods, {}, {})

        async def admission(job_id: str, agent: str, max_tokens: int) -> str:
            job = {"agent": agent, "job_id": job_id, "prompt": "x", "task_id": agent, "dry_run": True}
            await plane.publish({**job, "params": {"max_tokens": max_tokens}}, **headers)
            [only] = (await plane.result(job_id))["output"]["models"]
            assert (only["max_attempts"], only["max_corrections"]) == ((3, 0) if operator else (None, None))
            assert float(only["worst_case_cost"]) > max_tokens * 0.6e-6
            return only["admission"]

        for agent in agents:
            # 0.6 millionths of a dollar each: 16,000 fit, and 17,000 don't.
            answers = [await admission(f"{agent}-{n}", agent, n) for n in (100, 16_000, 21_000, 10_000_000)]
            assert answers[:2] == ["admitted"] * 2
            assert set(answers[2:]) == ({"refused"} if operator else {"admitted"}), agent
        spent = {(one.name, "agent:writer"): AttemptSums(spent=10_000_000) for one in periods}
        await counters.fill(await counters.source(), "log", 0, periods, spent, {})
        assert await admission("spent", "writer", 1) == "refused"


async def test_the_jobs_own_cap_and_a_model_without_a_price_are_named(start_worker: StartWorker) -> None:
    agents = {"writer": {"model": "sim/m", "fallback_models": ["sim/free"], "max_cost_usd": "0.000001"}}
    models = {"sim/m": model(), "sim/free": model()}
    async with start_worker(models, agents, more_models={"sim/free": {}}) as plane:
        [dear, free] = await planned(plane)
        assert dear["refusal"]["refused_by"] == free["refusal"]["refused_by"] == "execution"
        assert "does not fit under the job's own limit" in dear["refusal"]["message"]
        assert (free["worst_case_cost"], "has no price" in free["refusal"]["message"]) == (None, True)


async def test_a_stopped_task_and_one_that_is_at_its_end_are_named(start_worker: StartWorker) -> None:
    async with start_worker(
        {"sim/m": model()}, {"writer": {"model": "sim/m", "guard": {"max_iterations": 1}}}
    ) as plane:
        assert (await plane.run({**JOB, "job_id": "j1", "task_id": "t1"}))["status"] == "succeeded"
        [only] = await planned(plane, task_id="t1")
        assert (only["admission"], only["refusal"]["reason"]) == ("refused", "guard_tripped")
        assert await plane.messages("EVENTS", "bw.guards.>") == [], "a dry run stops no task"
        trip = Trip("max_iterations", "1 iteration (limit: 1)")
        await plane.worker.guards.tasks.trip(TaskKey(None, "t2"), trip, agent="writer", execution_id="j")
        [only] = await planned(plane, task_id="t2", job_id="dry-2")
        assert (only["admission"], only["refusal"]["reason"]) == ("refused", "guard_tripped")


@pytest.mark.parametrize(("on_exceeded", "admission"), [("fail", "refused"), ("wait", "wait")])
async def test_a_full_rate_limit_is_named(start_worker: StartWorker, on_exceeded: str, admission: str) -> None:
    limit = {"requests_per_minute": 1, "on_exceeded": on_exceeded}
    models = {"sim/m": {"price": PRICE, "rate_limit": limit}}
    agents = {"writer": {"model": "sim/m", "fallback_models": ["sim/n"]}}
    async with start_worker({"sim/m": model(), "sim/n": model()}, agents, more_models=models) as plane:
        assert (await plane.run({**JOB, "job_id": "j1"}))["chosen_model"] == "sim/m"
        # The breaker counts an outcome a moment after the result.
        await until(
            lambda: plane.worker.redis.client.exists(f"bw:breaker:{BreakerKey('writer', 'sim/m').name}"), what="j1"
        )
        before = await in_redis(plane)
        [full, free] = await planned(plane)
        assert (full["admission"], free["admission"]) == (admission, "admitted")
        assert (full["refusal"]["reason"], full["refusal"]["refused_by"]) == ("rate_limited", "model:sim/m")
        assert 0 < full["refusal"]["retry_after_s"] <= 61
        assert await in_redis(plane) == before
