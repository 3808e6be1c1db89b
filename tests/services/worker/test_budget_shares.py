"""Callers that share a budget under a hard cap: none of them holds what the others need."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from breakwater.kernel.nats.subjects import Header
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import HELD
from tests.flow.kit import model, until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

HARD = {"daily_usd": "1", "enforcement": "hard"}
AGENTS = {
    "slow": {"model": "sim/slow", "breaker": "off", "concurrency": 50},
    "writer": {"model": "sim/m", "max_tokens": 1000, "breaker": "off"},
}
MODELS = {"sim/slow": model(latency_ms=30_000), "sim/m": model()}
ALL_THAT_IS_LEFT = 1_600_000
"""Output tokens of nearly a dollar."""


async def fill(plane: WorkerPlane) -> None:
    counters = BudgetCounters(plane.worker.redis, plane.worker.config.budgets.zone)
    await counters.fill(None, "log", 0, counters.periods(datetime.now(UTC)), {}, {})


async def send(plane: WorkerPlane, job_id: str, key: str, agent: str = "writer", **job: Any) -> None:
    headers = {Header.SUBMITTED_BY.value: key}
    await plane.publish({"agent": agent, "job_id": job_id, "prompt": "x", **job}, **headers)


async def small_jobs_go_on(plane: WorkerPlane, name: str, key: str, tenant: str | None) -> None:
    """Their calls are made without a wait for the budget, however long a busy machine takes for them."""
    for number in range(5):
        await send(plane, f"{name}-{number}", key, tenant=tenant)
        result = await plane.result(f"{name}-{number}")
        assert (result["status"], [attempt["backoff_ms"] for attempt in result["attempts"]]) == ("succeeded", [0])


async def a_small_call_is_under_way(plane: WorkerPlane, key: str, tenant: str | None) -> None:
    await send(plane, "under-way", key, "slow", tenant=tenant, params={"max_tokens": 10})
    await until(lambda: asyncio.sleep(0, plane.sim.ledger.totals.in_progress == 1), "a call under way")


async def held(plane: WorkerPlane) -> Mapping[str, str]:
    return await plane.worker.redis.client.hgetall(HELD)  # pyright: ignore[reportGeneralTypeIssues]  redis' own stub


async def calls(plane: WorkerPlane) -> int:
    return plane.sim.ledger.totals.in_progress


async def hostile(plane: WorkerPlane, jobs: list[dict[str, Any]]) -> None:
    """The hostile caller's jobs come, and what may be called of them is under way for 30 s."""
    await asyncio.gather(*(send(plane, f"hostile-{n}", agent="slow", **job) for n, job in enumerate(jobs)))
    await until(lambda: plane.pending_jobs(), "jobs of the hostile caller")


async def test_a_job_whose_worst_case_is_all_that_is_left_keeps_no_other_tenant_waiting(
    start_worker: StartWorker,
) -> None:
    async with start_worker(MODELS, AGENTS, budgets={"global": HARD}) as plane:
        await fill(plane)
        await a_small_call_is_under_way(plane, "b", "b")
        big = {"key": "a", "tenant": "a", "params": {"max_tokens": ALL_THAT_IS_LEFT}}
        await hostile(plane, [big | {"total_timeout_s": 6}])
        await small_jobs_go_on(plane, "after", "b", "b")
        refused = await plane.result("hostile-0")
        assert (refused["reason"], refused["error"]["class"]) == ("budget_exceeded", "BudgetHeldError")
        assert "at most half" in refused["error"]["message"]
        assert await plane.messages("EVENTS", "bw.budgets.>") == []
        assert list(await held(plane)) == ["global\nb\nb"]


async def test_many_calls_of_one_key_under_names_of_many_tenants_hold_half_of_what_is_left(
    start_worker: StartWorker,
) -> None:
    async with start_worker(MODELS, AGENTS, budgets={"global": HARD}) as plane:
        await fill(plane)
        await a_small_call_is_under_way(plane, "b", "b")
        some = {"key": "a", "params": {"max_tokens": ALL_THAT_IS_LEFT // 16}}
        await hostile(plane, [some | {"tenant": f"t{n}"} for n in range(30)])
        await until(lambda: asyncio.sleep(0, plane.sim.ledger.totals.in_progress >= 8), "calls of the hostile key")
        await small_jobs_go_on(plane, "after", "b", "b")
        assert await calls(plane) <= 9


async def test_many_keys_of_one_tenant_hold_half_of_what_is_left(start_worker: StartWorker) -> None:
    async with start_worker(MODELS, AGENTS, budgets={"global": HARD}) as plane:
        await fill(plane)
        await a_small_call_is_under_way(plane, "b", "b")
        some = {"tenant": "a", "params": {"max_tokens": ALL_THAT_IS_LEFT // 16}}
        await hostile(plane, [some | {"key": f"a{n}"} for n in range(30)])
        await until(lambda: asyncio.sleep(0, plane.sim.ledger.totals.in_progress >= 8), "calls of the hostile tenant")
        await small_jobs_go_on(plane, "after", "b", "b")
        assert await calls(plane) <= 9


async def test_one_key_takes_no_more_than_half_of_a_tenants_own_budget(start_worker: StartWorker) -> None:
    budgets = {"tenants": {"shared": HARD}}
    async with start_worker(MODELS, AGENTS, budgets=budgets) as plane:
        await fill(plane)
        await a_small_call_is_under_way(plane, "b", "shared")
        some = {"key": "a", "tenant": "shared", "params": {"max_tokens": ALL_THAT_IS_LEFT // 16}}
        await hostile(plane, [some] * 30)
        await until(lambda: asyncio.sleep(0, plane.sim.ledger.totals.in_progress >= 8), "calls of the hostile key")
        await small_jobs_go_on(plane, "after", "b", "shared")
        assert await calls(plane) <= 9


@pytest.mark.parametrize("enforcement", ["hard", "none"])
async def test_a_key_that_names_ever_more_tenants_fills_redis_with_so_many_and_no_more(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, enforcement: str
) -> None:
    monkeypatch.setattr("breakwater.limits.gate.budget.MAX_MADE_UP_SCOPES", 5)
    everyone = HARD | {"enforcement": enforcement}
    async with start_worker(MODELS, AGENTS, budgets={"tenants": {"*": everyone, "known": everyone}}) as plane:
        await fill(plane)
        for number in range(5):
            await small_jobs_go_on(plane, f"a{number}", "a", f"t{number}")
        for number in range(5, 10):
            await send(plane, f"a{number}", "a", tenant=f"t{number}")
            refused = await plane.result(f"a{number}", timeout_s=10)
            assert refused["error"]["class"] == "TooManyTenantsError"
        # Those it has named go on, and so do those of the config, and all of other keys.
        await small_jobs_go_on(plane, "again", "a", "t0")
        await small_jobs_go_on(plane, "known", "a", "known")
        await small_jobs_go_on(plane, "without", "a", None)
        await small_jobs_go_on(plane, "other", "b", "t9")
        counters = BudgetCounters(plane.worker.redis, plane.worker.config.budgets.zone)
        snapshot = await counters.snapshot(counters.periods(datetime.now(UTC)))
        named = {key for one in snapshot.periods for key in one.reserved if key.startswith("tenant:")}
        assert named == {*(f"tenant:t{number}" for number in (*range(5), 9)), "tenant:known"}


async def test_a_lone_caller_may_hold_all_that_is_left(start_worker: StartWorker) -> None:
    async with start_worker(MODELS | {"sim/slow": model()}, AGENTS, budgets={"global": HARD}) as plane:
        await fill(plane)
        await send(plane, "j", "a", "slow", tenant="a", params={"max_tokens": ALL_THAT_IS_LEFT})
        assert (await plane.result("j", timeout_s=10))["status"] == "succeeded"


async def test_who_called_a_moment_ago_and_holds_nothing_has_no_share(start_worker: StartWorker) -> None:
    async with start_worker(MODELS, AGENTS, budgets={"global": HARD}) as plane:
        await fill(plane)
        await small_jobs_go_on(plane, "before", "b", "b")
        more_than_half = {"max_tokens": ALL_THAT_IS_LEFT // 2 + 100_000}
        await send(plane, "j", "a", tenant="a", params=more_than_half, total_timeout_s=5)
        result = await plane.result("j", timeout_s=10)
        assert (result["status"], result["attempts_count"]) == ("succeeded", 1)
        assert result["attempts"][0]["backoff_ms"] == 0


async def test_where_only_one_call_fits_each_caller_has_its_turn(start_worker: StartWorker) -> None:
    """None of them needs less than half of what is left, so none has a share that others could take."""
    async with start_worker(MODELS, AGENTS, budgets={"global": HARD | {"daily_usd": "0.001"}}) as plane:
        await fill(plane)
        for number in range(6):
            await send(plane, f"j{number}", "ab"[number % 2], tenant="ab"[number % 2])
        results = [await plane.result(f"j{number}", timeout_s=10) for number in range(6)]
        assert results[0]["status"] == "succeeded"
        assert {"BudgetHeldError"}.isdisjoint(one["error"]["class"] for one in results if one["error"])
