"""Money under kills and losses: what the provider billed, what stands in Redis, in EVENTS and in ClickHouse."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats.errors
import nats.js.errors
import pytest

from breakwater.jobs.contract.execution import Attempt, Cancellation, PendingCancel
from breakwater.jobs.store.executions import Executions
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.nats import subjects
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import format_time, usd_from_nano
from breakwater.limits.rules.ledger import AttemptSums, ledger
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import NotFilledError
from breakwater.records.reconciliation import BudgetComparison, RecordedSpend, compare
from tests.flow.fixtures import StartPlane
from tests.flow.kit import Plane, model, seconds_between
from tests.helpers import POLL_MOST_S, ZONE, until
from tests.records.samples import new_database, url_of
from tests.servers import RunningServer
from tests.shown import Show

PROMPT = "Tell me of the sea. " * 30
"""Long enough that the estimate of its tokens is above what the simulated provider counts."""

SERVICES = ("worker", "budget", "sink")
WORKERS = ("worker", "worker-2")
BUDGET_SERVICES = ("budget", "budget-2")


@dataclass(frozen=True, slots=True)
class Money:
    """A plane, and what says what it spent."""

    plane: Plane
    redis: Redis
    analytics: Analytics
    record: RecordedSpend

    async def compared(self) -> BudgetComparison:
        return await compare(self.record, BudgetCounters(self.redis, ZONE), datetime.now(UTC))

    async def agree(self) -> BudgetComparison | None:
        """The comparison, once nothing is held any more and all of it agrees."""
        try:
            found = await self.compared()
        except NotFilledError:
            return None
        return found if found.reconciliation().equal and found.reconciliation().reserved == 0 else None

    async def stored(self, calls: int) -> dict[str, tuple[int, str]] | None:
        """Cost and basis of every call, by attempt, once ClickHouse has as many."""
        query = (
            "SELECT attempt_id, toInt64(cost * 1000000000) AS nano, cost_basis FROM attempts FINAL "
            "WHERE NOT short_circuited"
        )
        found = await self.analytics.query(query)
        rows = {attempt_id: (nano, basis) for attempt_id, nano, basis in found.rows}
        return rows if len(rows) == calls else None

    async def events(self) -> list[Attempt]:
        return [Attempt.model_validate(one) for one in await self.plane.messages("EVENTS", "bw.attempts.>")]


@pytest.fixture
def start_money(start_plane: StartPlane, clickhouse_server: RunningServer) -> Any:
    @asynccontextmanager
    async def start(models: dict[str, Any], agents: dict[str, Any], **more: Any) -> AsyncGenerator[Money]:
        async with new_database(clickhouse_server.url) as analytics:
            # Killed workers are missed within a second.
            variables = {"BREAKWATER_CLICKHOUSE_URL": url_of(analytics, clickhouse_server), "BREAKWATER_PACE": "4"}
            environment = variables | more.pop("environment", {})
            async with start_plane(models, agents, services=SERVICES, environment=environment, **more) as plane:
                plane.start("worker", "worker-2")
                plane.start("budget", "budget-2")
                redis = Redis(plane.environment["BREAKWATER_REDIS_URL"])
                try:
                    yield Money(plane, redis, analytics, RecordedSpend(lambda: plane.client, analytics, ZONE))
                finally:
                    await redis.close()

    return start


class Load:
    """Jobs without end; what was acknowledged is accepted."""

    def __init__(self, plane: Plane, job: Callable[[int], Mapping[str, Any]], every_s: float) -> None:
        self.accepted: list[str] = []
        self._plane, self._job, self._every_s = plane, job, every_s
        self._enough = False
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._enough:
            job_id = f"j{len(self.accepted) + 1}"
            try:
                await self._plane.publish(
                    {**self._job(len(self.accepted)), "job_id": job_id}, **{"Nats-Msg-Id": job_id}
                )
            except (TimeoutError, nats.errors.Error, nats.js.errors.Error):
                await asyncio.sleep(0.2)
                continue
            self.accepted.append(job_id)
            await asyncio.sleep(self._every_s)

    async def more(self, jobs: int) -> None:
        """Waits until so many more are accepted."""
        wanted = len(self.accepted) + jobs

        async def there() -> bool:
            assert not self._task.done(), self._task.exception()
            return len(self.accepted) >= wanted

        await until(there, what="load")

    async def stop(self) -> None:
        """Not in the middle of a job, which may be stored and not be known as accepted."""
        self._enough = True
        await self._task


async def calling(plane: Plane, model_name: str, calls: int) -> bool:
    """Whether so many calls of a model are under way."""
    totals = plane.sim.ledger.by_model.get(model_name)
    return totals is not None and totals.in_progress >= calls


def dollars(nano: int) -> str:
    return f"${usd_from_nano(nano)}"


def bills(costs: Mapping[str, int], *calls: Iterable[str]) -> list[str]:
    """What some calls cost by one of the records; those that it lacks cost nothing there."""
    return [dollars(sum(costs.get(name, 0) for name in names)) for names in calls]


@pytest.mark.chaos
@pytest.mark.timeout(600)  # some 100 jobs and five crashes: long on a slow machine
async def test_all_records_of_spend_agree_to_the_nano_dollar_when_worker_budget_service_and_redis_are_killed_in_turn(
    start_money: Any, own_redis_server: RunningServer, show: Show
) -> None:
    faults = (
        {"status": 500, "rate": 0.25},
        {"kind": "reset", "rate": 0.1},
        # Billed though nobody waited for the answer.
        {"hang_s": 3, "rate": 0.05, "billed_when_abandoned": True},
    )
    models = {
        "sim/a": model(*faults, latency_ms=40),
        "sim/b": model({"status": 503, "rate": 0.1}, latency_ms=20),
        # For the one job of which it is sure that its worker is killed in the middle of its call.
        "sim/stuck": model({"requests": [1, 1], "hang_s": 600}),
    }
    common = {"breaker": "off", "concurrency": 12, "timeout_s": 1, "max_tokens": 100}
    hard = {"daily_usd": 1000, "monthly_usd": 1000, "enforcement": "hard"}
    retry = {"max_attempts": 2, "base_s": 0.05, "max_delay_s": 0.1}
    agents = {
        "writer": {"model": "sim/a", "fallback_models": ["sim/b"], "retry": retry, "budget": hard, **common},
        "tagger": {"model": "sim/b", "retry": retry, **common},
        "stuck": {"model": "sim/stuck", **common, "timeout_s": 280},
    }
    budgets = {"timezone": ZONE.key, "global": hard, "tenants": {"*": hard}}

    def job(number: int) -> dict[str, Any]:
        given: dict[str, Any] = {"agent": ("writer", "tagger")[number % 3 == 0], "prompt": PROMPT}
        if number % 4:
            given["tenant"] = ("acme", "globex", "initech")[number % 3]
        if number % 10 == 0:
            given["total_timeout_s"] = 0.06  # cancelled in the middle of its call, often
        return given

    async with start_money(models, agents, budgets=budgets, retry_budget="off") as money:
        plane: Plane = money.plane
        load = Load(plane, job, every_s=0.1)
        await plane.result("j1")
        for killed in (WORKERS[:1], WORKERS):
            await load.more(15)
            if killed == WORKERS:
                await plane.publish({"agent": "stuck", "job_id": "stuck", "prompt": PROMPT})
                await until(lambda: calling(plane, "sim/stuck", 1), what="a call under way")
            for worker in killed:
                plane.kill(worker)
            await load.more(8)
            for worker in killed:
                plane.start("worker", worker)
            await load.more(8)
            plane.kill("budget")
            await load.more(8)
            plane.start("budget")
            own_redis_server.kill()
            await asyncio.sleep(0.5)
            await own_redis_server.restart_async()
        await load.more(15)
        await load.stop()
        results = [await plane.result(job_id) for job_id in (*load.accepted, "stuck")]
        summed = {attempt["attempt_id"] for result in results for attempt in result["attempts"]}
        events = await money.events()
        assert [one for one in events if one.attempt_id not in summed] == []
        assert len(events) == len(summed)
        calls = sum(not one.short_circuited for one in events)
        rows: dict[str, tuple[int, str]] = await until(lambda: money.stored(calls), what="all calls in ClickHouse")
        compared: BudgetComparison = await until(money.agree, what="counters that agree with the record")
        theirs = {call.client_request_id or "": call.cost_nano for call in plane.sim.ledger.calls}
        billed = {name: cost for name, (cost, basis) in rows.items() if basis == "billed"}
        estimated = {name: cost for name, (cost, basis) in rows.items() if basis == "estimated"}
        budgets = {one.budget: one for one in compared.reconciliation().budgets if one.budget.endswith("monthly")}
        total, reported = budgets["global/monthly"], sum(one.cost or 0 for one in events)
        show(
            f"Money after {len(results)} jobs, with two workers, two budget services and redis killed in turn",
            ["", "calls", "of known bill", f"{len(estimated)} that nobody heard of", "all"],
            [
                ("provider", len(theirs), *bills(theirs, billed, estimated, theirs)),
                ("ClickHouse", len(rows), *bills({**billed, **estimated}, billed, estimated, rows)),
                ("EVENTS", calls, "", "", dollars(reported)),
                ("Redis", total.counted_calls, "", "", dollars(total.counted)),
            ],
        )
        # Every bill is known to the nano-dollar, but for calls whose answer nobody got.
        assert set(theirs) <= set(rows)
        assert {name: theirs.get(name, 0) for name in billed} == billed
        assert all(theirs.get(name, 0) <= cost for name, cost in estimated.items())
        assert {basis for _, basis in rows.values()} <= {"billed", "estimated"}
        # Redis, EVENTS and ClickHouse say the same of every budget.
        assert {place: one.spent for place, one in compared.snapshot.figures.items() if one != AttemptSums()} == {
            place: one.spent for place, one in ledger(events, ZONE).items()
        }
        assert total.counted == sum(cost for cost, _ in rows.values())
        assert {one.outcome for one in events} >= {"success", "error"}
        assert [attempt["outcome"] for attempt in results[-1]["attempts"]] == ["worker_lost", "success"]
        assert {one.cause for one in events} >= {"first", "retry", "fallback"}
        assert set(budgets) >= {"agent:writer/monthly", "tenant:acme/monthly"}
        assert not [event for event in await plane.messages("EVENTS", "bw.budgets.>") if event["kind"] == "repaired"]


HELD_NANO = 10_000_000
HELD = """
import asyncio
from pathlib import Path

async def held(request):
    begun, release = map(Path, request["input"])
    begun.touch()
    while not release.exists():
        await asyncio.sleep(0.05)
    return "done"
"""


@pytest.mark.chaos
@pytest.mark.timeout(600)  # some 100 jobs: long on a slow machine
async def test_after_a_flush_no_call_is_made_before_the_budgets_are_rebuilt_and_the_cap_holds(
    start_money: Any, tmp_path: Path, show: Show
) -> None:
    # Three calls are under way until the budgets are rebuilt: their reservations are lost with Redis.
    (tmp_path / "held_agents.py").write_text(HELD)
    holding = {f"held-{number}": tmp_path / f"begun-{number}" for number in range(3)}
    release = tmp_path / "release"
    providers = {
        "held": {"kind": "python", "callable": "held_agents:held", "cost_per_call_usd": usd_from_nano(HELD_NANO)}
    }
    held = {"provider": "held", "timeout_s": 280, "budget": {"daily_usd": 1, "enforcement": "hard"}}
    cap = 3_000_000
    writer = {
        "model": "sim/m",
        "max_tokens": 40,
        "concurrency": 24,
        "breaker": "off",
        "budget": {"daily_usd": usd_from_nano(cap), "monthly_usd": 5, "enforcement": "hard", "soft_at_percent": [20]},
    }
    async with start_money(
        {"sim/m": model(latency_ms=20)},
        {"writer": writer, "held": held},
        budgets={"timezone": ZONE.key},
        more_providers=providers,
        environment={"PYTHONPATH": str(tmp_path)},
    ) as money:
        plane: Plane = money.plane

        async def all_held() -> bool:
            return all(begun.exists() for begun in holding.values())

        for job_id, begun in holding.items():
            await plane.publish({"agent": "held", "job_id": job_id, "input": [str(begun), str(release)]})
        load = Load(plane, lambda _: {"agent": "writer", "prompt": PROMPT}, every_s=0.05)
        await plane.result("j1")
        await load.more(30)
        reported_before = await plane.messages("EVENTS", "bw.budgets.>", at_least=1)
        await until(all_held, what="three calls under way")
        await money.redis.client.flushall()
        flushed_at = datetime.now(UTC)

        async def filled() -> bool:
            return await BudgetCounters(money.redis, ZONE).source() is not None

        await until(filled, what="rebuilt budgets")
        filled_at = datetime.now(UTC)
        release.touch()
        await load.more(20)

        async def exhausted() -> bool:
            return any(event["threshold_percent"] == 100 for event in await plane.messages("EVENTS", "bw.budgets.>"))

        await until(exhausted, what="a limit that is reached")
        await load.stop()
        results = [await plane.result(job_id) for job_id in (*load.accepted, *holding)]
        compared: BudgetComparison = await until(money.agree, what="counters that agree with the record")
        events = {one.attempt_id: one for one in await money.events()}
        late = [
            call
            for call in plane.sim.ledger.calls
            if flushed_at < datetime.fromisoformat(call.received_at) < filled_at - timedelta(seconds=2 * POLL_MOST_S)
            and (reserved_at := events[call.client_request_id].reserved_at) is not None
            and reserved_at > flushed_at
        ]
        under_way = [one for one in events.values() if one.started_at < flushed_at and one.completed_at > filled_at]
        spent = plane.sim.ledger.totals.cost_nano
        refused = sum(result["reason"] == "budget_exceeded" for result in results)
        took_s, counted = (filled_at - flushed_at).total_seconds(), _daily(compared, "agent:writer")
        show(
            "FLUSHALL in the middle of the load, under a hard limit",
            ["jobs", "refused", "rebuilt in", "calls meanwhile", "calls over it", "cap", "billed", "Redis"],
            [
                (
                    len(results),
                    refused,
                    f"{took_s:.1f} s",
                    len(late),
                    len(under_way),
                    *map(dollars, (cap, spent, counted)),
                )
            ],
        )
        assert late == []
        assert {one.execution_id for one in under_way} >= set(holding)
        assert {result["status"] for result in results if result["reason"] is None} == {"succeeded"}
        assert refused > 0
        assert spent == counted <= cap
        assert _daily(compared, "agent:held") == 3 * HELD_NANO
        # What had been reported stays reported.
        events_reported = await plane.messages("EVENTS", "bw.budgets.>")
        day = f"agent:writer/daily/{reported_before[0]['period']}"
        # Where many calls were held at once, a first one was refused before the flush already.
        assert reported_before[0]["event_id"] == f"{day}/20/{cap}"
        assert [one["event_id"] for one in events_reported] == [f"{day}/20/{cap}", f"{day}/100/{cap}"]
        assert not [one for one in events_reported if one["kind"] == "repaired"]


def _daily(compared: BudgetComparison, key: str) -> int:
    [spent] = [
        one.figures[key].spent
        for one in compared.snapshot.periods
        if one.period.window == "daily" and key in one.figures
    ]
    return spent


async def test_counters_that_are_wrong_are_repaired_from_the_record_and_the_repair_is_reported(
    start_money: Any,
) -> None:
    agents = {"writer": {"model": "sim/m", "budget": {"daily_usd": 1, "enforcement": "hard"}}}
    async with start_money({"sim/m": model()}, agents, budgets={"timezone": ZONE.key}) as money:
        plane: Plane = money.plane
        for number in range(8):
            await plane.publish({"agent": "writer", "job_id": f"j{number}", "prompt": PROMPT})
        for number in range(8):
            await plane.result(f"j{number}")

        async def all_counted() -> BudgetComparison | None:
            # What was foreseen of a call is counted after what it has cost.
            found = await money.agree()
            return found if found and all(one.gauged == 8 for one in found.snapshot.figures.values()) else None

        right: BudgetComparison = await until(all_counted, what="counters that agree with the record")
        [key] = [one async for one in money.redis.client.scan_iter("bw:limits:daily:*")]
        for name in BUDGET_SERVICES:
            await plane.terminate(name)
        await money.redis.client.hincrby(key, "spent:agent:writer", 7)
        await money.redis.client.hincrby(key, "reserved:global", 5)
        wrong = await money.compared()
        assert [one.difference for one in wrong.reconciliation().budgets if one.difference] == [7]
        assert not wrong.reconciliation().equal
        for name in BUDGET_SERVICES:
            plane.start("budget", name)

        async def reported() -> list[dict[str, Any]]:
            events = await plane.messages("EVENTS", "bw.budgets.>")
            found = [event for event in events if event["kind"] == "repaired"]
            return found if len(found) == 2 else []

        repaired = await until(reported, timeout_s=100, what="a repair")
        assert {(one["scope"], one["reason"]) for one in repaired} == {
            ("agent", "$0.000000007 too much was counted"),
            ("global", "$0.000000005 too much was held"),
        }
        now = await money.compared()
        assert now.snapshot.figures == right.snapshot.figures
        assert now.reconciliation().equal


async def test_a_cap_that_is_changed_in_the_file_holds_a_moment_later(start_money: Any) -> None:
    agents = {"writer": {"model": "sim/m", "budget": {"daily_usd": "0.000001", "enforcement": "hard"}}}
    async with start_money({"sim/m": model()}, agents) as money:
        plane: Plane = money.plane
        await plane.publish({"agent": "writer", "job_id": "before", "prompt": PROMPT})
        assert (await plane.result("before"))["reason"] == "budget_exceeded"
        file = plane.directory / "breakwater.yaml"
        file.write_text(file.read_text().replace("'0.000001'", "'1'").replace("0.000001", "1"))
        for process in plane.processes.values():
            os.kill(process.pid, signal.SIGHUP)
        number = 0

        async def succeeds() -> bool:
            nonlocal number
            number += 1
            await plane.publish({"agent": "writer", "job_id": f"after-{number}", "prompt": PROMPT})
            return (await plane.result(f"after-{number}"))["status"] == "succeeded"

        await until(succeeds, what="the new limit")
        assert "config_taken_over" in plane.log("worker") + plane.log("worker-2")


def cancel_request(job_id: str) -> PendingCancel:
    by = Cancellation(by="program", name="client", reason="withdrawn", at=datetime.now(UTC))
    return PendingCancel(execution_id=job_id, cancellation=by)


async def test_a_cancelled_job_costs_the_same_everywhere_also_if_its_worker_is_killed_before_it_has_ended(
    start_money: Any,
) -> None:
    hard = {"daily_usd": 1, "enforcement": "hard"}
    agents = {"writer": {"model": "sim/m", "budget": hard, "timeout_s": 120}}
    budgets = {"timezone": ZONE.key}
    async with start_money({"sim/m": model({"hang_s": 600})}, agents, budgets=budgets) as money:
        plane: Plane = money.plane
        executions = Executions(money.redis)
        await plane.publish({"agent": "writer", "job_id": "killed", "prompt": PROMPT})
        await until(lambda: calling(plane, "sim/m", 1), what="a call under way")
        # Kept, and heard by nobody: as where the worker dies in the same moment.
        await executions.cancel(cancel_request("killed"))
        for name in ("worker", "worker-2"):
            plane.kill(name)
        plane.start("worker", "worker-3")
        killed = await plane.result("killed")
        await plane.publish({"agent": "writer", "job_id": "heard", "prompt": PROMPT})
        await until(lambda: calling(plane, "sim/m", 1), what="a call under way")
        order = await executions.cancel(cancel_request("heard"))
        asked_at = format_time(datetime.now(UTC))
        await plane.client.publish(subjects.cancel_request("heard"), order.json_bytes())
        heard = await plane.result("heard")
        assert seconds_between(asked_at, heard["completed_at"]) < 1
        await until(money.agree, what="counters that agree with the record")
        rows: dict[str, tuple[int, str]] = await until(lambda: money.stored(2), what="both calls in ClickHouse")
        assert plane.sim.ledger.totals.calls == 2
    for result, outcome in ((killed, "worker_lost"), (heard, "cancelled")):
        [attempt] = result["attempts"]
        assert (result["status"], result["cancellation"]["reason"]) == ("cancelled", "withdrawn")
        assert (attempt["outcome"], attempt["cost"]) == (outcome, attempt["reserved"])
        nano, basis = rows[attempt["attempt_id"]]
        assert (usd_from_nano(nano), basis) == (result["total_cost"], "estimated")


@pytest.mark.timeout(600)
async def test_a_storm_under_a_cap_of_twenty_worst_cases_uses_the_cap_and_is_refused_by_spend_alone(
    start_money: Any, own_redis_server: RunningServer, show: Show
) -> None:
    answers = model(latency_ms=200, usage={"input_tokens": 1, "output_tokens": 500})
    # A call may cost $0.0012 and its input, and costs a quarter of that.
    cap, jobs = 20 * 1_210_000, 105
    hard = {"daily_usd": usd_from_nano(cap), "enforcement": "hard"}
    agents = {"writer": {"model": "sim/m", "breaker": "off", "max_tokens": 2000, "concurrency": 60, "budget": hard}}
    zone = {"timezone": ZONE.key}
    async with start_money({"sim/m": answers}, agents, budgets=zone, retry_budget="off") as money:
        plane: Plane = money.plane
        await asyncio.gather(
            *(plane.publish({"agent": "writer", "job_id": f"j{n}", "prompt": "x"}) for n in range(jobs))
        )
        await until(lambda: calling(plane, "sim/m", 5), what="calls under way", brief=True)
        for worker in WORKERS:
            plane.kill(worker)
            plane.start("worker", worker)
        own_redis_server.kill()
        await own_redis_server.restart_async()
        results = [await plane.result(f"j{n}") for n in range(jobs)]
        await until(money.agree, what="counters that agree with the record")
        events = await money.events()
        spent = sum(one.cost or 0 for one in events)
        lost = sum(one.outcome == "worker_lost" for one in events)
        classes = {one.error.class_ for one in events if one.short_circuited and one.error is not None}
        succeeded = sum(result["status"] == "succeeded" for result in results)
        show(
            f"A storm of {jobs} jobs under a limit of {dollars(cap)}, with both workers and Redis killed",
            ["spent", "of the limit", "succeeded", "refused", "lost calls at their worst case"],
            [(dollars(spent), f"{100 * spent / cap:.1f} %", succeeded, jobs - succeeded, lost)],
        )
        assert 0.95 * cap <= spent <= cap
        # Each was refused because spend alone left no room for it, and none because of what calls in flight held.
        assert classes == {"BudgetExceededError"}
