"""Limits that the API sets: in force for the next call of every worker, whether it has heard of them or not."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from breakwater.config import LiveConfig
from breakwater.identity.rules.callers import Caller
from breakwater.kernel.nats.errors import BusUnavailableError
from breakwater.kernel.nats.publisher import Publisher
from breakwater.limits.contract import LimitSettings
from breakwater.limits.limit_editor import LimitEditor
from breakwater.limits.limit_log import LimitLog
from breakwater.limits.rules.ledger import AttemptSums
from breakwater.limits.rules.limit_changes import LimitRefusedError
from breakwater.limits.rules.scopes import CallNames, Dimension, Dimensions
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import FILLED, Budgets, LimitsChanged, OverBudget, Reserved
from tests.flow.kit import model
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

ADMIN = Caller("key", "id", "admin", ("limits",), datetime.now(UTC))


def editor_of(plane: WorkerPlane) -> LimitEditor:
    """Another process of the plane, in which people set limits."""
    live = LiveConfig(plane.worker.config)
    publisher = Publisher(lambda: plane.client, "request")
    log = LimitLog(lambda: plane.client, publisher)
    log.feed(live.change_limits)
    redis, zone = plane.worker.redis, plane.worker.config.budgets.zone
    counters = BudgetCounters(redis, zone)

    async def nothing_recorded(*_: object) -> dict[str, int]:
        return {}

    return LimitEditor((), {}, log, live.limits, counters, publisher, nothing_recorded)


async def fill(plane: WorkerPlane) -> None:
    counters = BudgetCounters(plane.worker.redis, plane.worker.config.budgets.zone)
    await counters.fill(await counters.source(), "log", 0, counters.periods(datetime.now(UTC)), {}, {})


async def test_a_limit_is_in_force_for_the_next_call_of_a_worker_that_has_not_heard_of_it(
    start_worker: StartWorker,
) -> None:
    async with start_worker(
        models={"sim/m": model()}, agents={"writer": {"model": "sim/m", "breaker": "off"}}
    ) as plane:
        await fill(plane)
        await plane.limit_log.catch_up()
        editor, now = editor_of(plane), datetime.now(UTC)

        async def status(job_id: str, **job: Any) -> tuple[str, str | None]:
            result = await plane.run({"agent": "writer", "job_id": job_id, "prompt": "x", **job})
            return result["status"], result["reason"]

        assert await status("before") == ("succeeded", None), "the first to ask notes the version"
        nothing = LimitSettings(scope="agent:writer", usd="0", per="day")  # pyright: ignore[reportArgumentType]  as it is written
        await editor.set_limit("stop", nothing, ADMIN, "it costs too much", now, stop=True)
        assert await status("stopped") == ("dead_lettered", "budget_exceeded")
        limit = editor.find("stop")
        assert limit is not None
        await editor.raise_limit(limit, limit.parts, "5", now + timedelta(hours=1), ADMIN, "launch", now)
        assert await status("raised") == ("succeeded", None)
        await editor.raise_limit(limit, limit.parts, "0", None, ADMIN, "over", now)
        assert await status("lowered") == ("dead_lettered", "budget_exceeded")
        rate = LimitSettings(scope="agent:writer", requests=1, per="minute")
        await editor.delete_limit("stop", ADMIN, None, now)
        assert await status("deleted") == ("succeeded", None)
        await editor.set_limit("one a minute", rate, ADMIN, None, now)
        assert [(await status(name))[0] for name in ("first", "second")] == ["succeeded", "dead_lettered"]
        await editor.delete_limit("one a minute", ADMIN, None, now)
        assert await status("dry", dry_run=True) == ("succeeded", None)


async def test_calls_under_a_limit_that_the_worker_can_not_read_wait_until_it_is_set_anew(
    start_worker: StartWorker,
) -> None:
    agents = {name: {"model": "sim/m", "total_timeout_s": 2} for name in ("writer", "reader")}
    async with start_worker(models={"sim/m": model()}, agents=agents) as plane:
        await fill(plane)
        editor, later = editor_of(plane), {"scope": "agent:writer", "usd": "9", "per": "day", "burst": 2}
        await plane.jetstream.publish("bw.limit-settings.later", json.dumps({"limit": later}).encode())
        await plane.limit_log.catch_up()
        refused = await plane.run({"agent": "writer", "job_id": "kept", "prompt": "x"})
        assert (refused["status"], refused["reason"]) == ("dead_lettered", "budget_exceeded")
        assert refused["error"]["class"] == "LimitUnreadableError"
        assert "'later' is not readable" in refused["error"]["message"]
        assert (await plane.run({"agent": "reader", "job_id": "free", "prompt": "x"}))["status"] == "succeeded"
        await editor.log.catch_up()
        bound = Caller("key", "id", "bot", ("limits",), datetime.now(UTC), team="search")
        for work in (
            editor.delete_limit("later", bound, None, datetime.now(UTC)),
            editor.set_limit(
                "later", LimitSettings(scope="agent:* within team:search", requests=1, per="hour"),
                bound, None, datetime.now(UTC),
            ),
        ):  # fmt: skip
            with pytest.raises(LimitRefusedError, match="may only limit parts of it"):
                await work
        await editor.delete_limit("later", ADMIN, None, datetime.now(UTC))
        assert (await plane.run({"agent": "writer", "job_id": "again", "prompt": "x"}))["status"] == "succeeded"


async def test_a_total_refuses_calls_once_it_is_spent(start_worker: StartWorker) -> None:
    async with start_worker(models={"sim/m": model()}, agents={"writer": {"model": "sim/m"}}) as plane:
        counters = BudgetCounters(plane.worker.redis, plane.worker.config.budgets.zone)
        dimensions = Dimensions(frozenset({Dimension(("model",), "total")}))
        periods = counters.periods(datetime.now(UTC), dimensions)
        spent = {("total", "model:sim/m"): AttemptSums(spent=4_999_999_999, calls=9)}
        await counters.fill(None, "log", 0, periods, spent, {}, dimensions=dimensions)
        await plane.limit_log.catch_up()
        limit = LimitSettings.model_validate({"scope": "model:sim/m", "usd": "5", "per": "total"})
        await editor_of(plane).set_limit("all", limit, ADMIN, None, datetime.now(UTC), stop=True)
        result = await plane.run({"agent": "writer", "job_id": "j", "prompt": "x"})
        assert (result["status"], result["reason"]) == ("dead_lettered", "budget_exceeded")
        assert "the limit of model sim/m on spend in total has no room" in result["error"]["message"]
        assert "it never resets" in result["error"]["message"]
        assert result["error"]["retry_after_s"] is None


async def test_a_worker_without_nats_waits_instead_of_admitting_under_older_limits(start_worker: StartWorker) -> None:
    async with start_worker(models={"sim/m": model()}, agents={"writer": {"model": "sim/m"}}, begin=False) as plane:
        await fill(plane)
        log, redis = plane.limit_log, plane.worker.redis
        counters = BudgetCounters(redis, plane.worker.config.budgets.zone)

        async def version() -> str:
            return str(await cast(Any, redis.client).hget(FILLED, "limits"))

        await log.catch_up()
        await log.read_on(log.version, "", counters)
        first = log.version
        limit = LimitSettings(scope="plane", usd="0", per="day")  # pyright: ignore[reportArgumentType]  as it is written
        await editor_of(plane).set_limit("stop", limit, ADMIN, None, datetime.now(UTC), stop=True)
        in_force = await version()
        assert in_force != first
        await fill(plane)
        assert await version() == in_force, "a rebuild keeps it"

        def away() -> Any:
            raise BusUnavailableError("NATS is away")

        with pytest.raises(BusUnavailableError):
            await LimitLog(away).read_on("None/0", in_force, counters)
        await log.read_on(first, in_force, counters)
        assert (log.version, set(log.states)) == (in_force, {"stop"})
        # After a loss of the stream, Redis has a version that nobody can reach.
        await cast(Any, redis.client).hset(FILLED, "limits", "1700000000.000000/999")
        await log.read_on(log.version, "1700000000.000000/999", counters)
        assert await version() == in_force
        await counters.note_limits(first)
        assert await version() == in_force, "an older one never replaces it"


async def test_no_call_is_admitted_under_older_limits_while_many_change_at_once(start_worker: StartWorker) -> None:
    keys = ("a", "b", "c")
    async with start_worker(models={"sim/m": model()}, agents={"writer": {"model": "sim/m"}}, begin=False) as plane:
        redis, config, editor = plane.worker.redis, plane.worker.config, editor_of(plane)
        zone = config.budgets.zone
        counters, dimensions = BudgetCounters(redis, zone), Dimensions(frozenset({Dimension(("key",), "daily")}))
        periods = counters.periods(datetime.now(UTC), dimensions)
        await counters.fill(await counters.source(), "log", 0, periods, {}, {}, dimensions=dimensions)
        stopped: dict[str, int] = dict.fromkeys(keys, 0)
        """By key, odd while its limit is zero and the change was answered: no call may be admitted then."""
        ends = asyncio.Event()
        admitted = refused = behind = 0

        async def call() -> None:
            nonlocal admitted, refused, behind
            live, log, budgets = LiveConfig(config), LimitLog(lambda: plane.client), Budgets(redis, zone)
            log.feed(live.change_limits)
            budgets.dimensions = dimensions
            await log.catch_up()
            number = 0
            while not ends.is_set():
                key = keys[(number := number + 1) % len(keys)]
                names, table, before = CallNames("writer", key=key), live.limits(), stopped[key]
                found = table.counters(names, dimensions)
                command = budgets.reserve_command(
                    *(f"{id(log)}-{number}:1", names, 1, found),
                    now=datetime.now(UTC),
                    lease_ms=60_000,
                    version=table.version,
                )
                [raw] = await redis.run([command])
                match budgets.read_reservation(raw, found, 1, now=datetime.now(UTC)):
                    case Reserved():
                        admitted += 1
                        assert not (before % 2 and stopped[key] == before), "admitted though its limit was zero"
                    case OverBudget():
                        refused += 1
                    case LimitsChanged(in_force):
                        behind += 1
                        await log.read_on(table.version, in_force, counters)
                    case answer:
                        raise AssertionError(answer)
                await asyncio.sleep(0)

        async def change(key: str) -> None:
            scope = f"key:{key}"
            for number in range(40):
                usd = "0" if number % 2 == 0 else "1"
                limit = LimitSettings.model_validate({"scope": scope, "usd": usd, "per": "day"})
                if number % 2:
                    stopped[key] += 1
                await editor.set_limit(scope, limit, ADMIN, None, datetime.now(UTC), stop=True)
                if number % 2 == 0:
                    stopped[key] += 1
                    await asyncio.sleep(0.001)

        calls = [asyncio.create_task(call()) for _ in range(3)]
        await asyncio.gather(*map(change, keys))
        ends.set()
        await asyncio.gather(*calls)
        assert min(admitted, refused, behind) > 10
