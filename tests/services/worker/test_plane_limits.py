"""Limits that the API sets: in force for the next call of every worker, whether it has heard of them or not."""

from __future__ import annotations

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
from breakwater.limits.store.budget_counters import BudgetCounters
from breakwater.limits.store.budgets import FILLED
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
        await editor.raise_limit(limit, "5", now + timedelta(hours=1), None, ADMIN, "launch", now)
        assert await status("raised") == ("succeeded", None)
        await editor.raise_limit(limit, "0", None, None, ADMIN, "over", now)
        assert await status("lowered") == ("dead_lettered", "budget_exceeded")
        rate = LimitSettings(scope="agent:writer", requests=1, per="minute")
        await editor.delete_limit("stop", ADMIN, None, now)
        assert await status("deleted") == ("succeeded", None)
        await editor.set_limit("one a minute", rate, ADMIN, None, now)
        assert [(await status(name))[0] for name in ("first", "second")] == ["succeeded", "dead_lettered"]
        await editor.delete_limit("one a minute", ADMIN, None, now)
        assert await status("dry", dry_run=True) == ("succeeded", None)


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
