"""What is left of breakers and stopped tasks when Redis loses everything, or the event log is another one."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from breakwater.breakers.metrics import BreakerMetrics
from breakwater.breakers.rules.breaker import Breaker, BreakerKey, isolate
from breakwater.breakers.rules.transitions import transition
from breakwater.breakers.settings import BreakerRules
from breakwater.breakers.store import Breakers, Saving, shadows_in
from breakwater.config import load_config
from breakwater.config.servers import bus_plan
from breakwater.health.store import Healths
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.redis.connection import Redis, StateUnavailableError
from breakwater.limits.store.tasks import Tasks
from breakwater.services.breaker.handlers import BreakerHandler
from breakwater.services.breaker.rebuild import Rebuild
from tests.flow.fixtures import StartPlane
from tests.flow.kit import Plane, model
from tests.helpers import FIRST, until
from tests.servers import RunningServer

ONE_TRY = {"retry": {"max_attempts": 1}}
RULES = {"consecutive_failures": 3, "same_error": "off", "cooldown_s": 300}
MOMENT = "2026-11-21T10:00:00.000Z"

FAILING, ISOLATED, COUNTING = (BreakerKey(agent, "sim/m") for agent in ("failing", "isolated", "counting"))


@pytest.mark.parametrize("crash", [False, True], ids=["flushed", "restarted_empty"])
async def test_an_empty_redis_is_filled_with_what_was_open_stopped_and_counted(
    start_plane: StartPlane, own_redis_server: RunningServer, crash: bool
) -> None:
    models = {"sim/m": model({"status": 500}), "sim/well": model()}
    agents = {
        "failing": {"model": "sim/m", **ONE_TRY, "breaker": RULES},
        "isolated": {"model": "sim/m", **ONE_TRY, "breaker": RULES},
        "counting": {"model": "sim/m", **ONE_TRY, "breaker": RULES},
        "guarded": {"model": "sim/well", **ONE_TRY, "guard": {"max_iterations": 1}},
        "running": {"model": "sim/well", **ONE_TRY, "guard": {"max_iterations": 3}},
    }
    async with start_plane(models, agents, services=("worker", "breaker")) as plane, redis_of(plane) as redis:
        breakers = Breakers(redis)
        for number in range(3):
            assert await reason_of(plane, f"f{number}", "failing") == "error"
        await until(lambda: _stands(breakers, FAILING, "open"), what="the breaker to open")
        await force_open(breakers)
        assert await reason_of(plane, "i0", "isolated") == "breaker_open"
        for number in range(2):
            assert await reason_of(plane, f"c{number}", "counting") == "error"
        assert await reason_of(plane, "g0", "guarded", task_id="t") is None
        assert await reason_of(plane, "g1", "guarded", task_id="t") == "guard_tripped"
        assert [await reason_of(plane, f"r{number}", "running", task_id="r") for number in range(2)] == [None, None]
        await until(
            lambda: _reported(plane, ISOLATED), what="the isolation's event"
        )  # the breaker service publishes it
        await until(lambda: _counted(breakers, 2), what="two failures to be counted")
        [failing, isolated] = [loaded.breaker for loaded in await breakers.load([FAILING, ISOLATED])]
        fillings = plane.log("breaker").count('"breakers_filled"')

        await redis.client.flushall()
        for number in range(3):
            # At once: they must not meet the empty breaker and open it, or that would be its last event.
            await publish_attempt(plane, ISOLATED, f"late{number}", "error")
        if crash:
            own_redis_server.kill()
            await own_redis_server.restart_async()
        await until(lambda: _logged(plane, "breakers_filled", fillings + 1), what="the breakers to be filled")

        assert plane.log("breaker").count('"breakers_lost"') == 1
        [refilled, again] = [loaded.breaker for loaded in await breakers.load([FAILING, ISOLATED])]
        assert _essence(refilled) == _essence(failing)
        assert _essence(again) == _essence(isolated)
        assert again.state == "isolated"
        assert await reason_of(plane, "f3", "failing") == "breaker_open"
        assert await reason_of(plane, "i1", "isolated") == "breaker_open"
        assert await reason_of(plane, "g2", "guarded", task_id="t") == "guard_tripped"
        assert plane.sim.ledger.totals.by_status == {"500": 5, "200": 3}
        assert await reason_of(plane, "r2", "running", task_id="r") is None
        assert await reason_of(plane, "r3", "running", task_id="r") == "guard_tripped"
        assert await reason_of(plane, "c2", "counting") == "error"
        await until(lambda: _stands(breakers, COUNTING, "open"), what="the third failure to open it")
        [reported] = await plane.messages("EVENTS", subjects.breaker("counting", "sim/m"))
        assert reported["reason"] == "3 jobs in a row failed (threshold: 3)"


async def test_a_breaker_keeps_its_versions_when_redis_is_emptied_again_while_it_is_filled(
    start_plane: StartPlane,
) -> None:
    agents = {"counting": {"model": "sim/m", "breaker": RULES}}
    async with start_plane({"sim/m": model()}, agents, services=()) as plane, redis_of(plane) as redis:
        config = load_config(Path(plane.environment["BREAKWATER_CONFIG"]))
        breakers, healths, publisher = Breakers(redis), Healths(redis), Publisher(lambda: plane.client, "tests")
        handler = BreakerHandler(config, breakers, shadows_in(redis), healths, publisher, BreakerMetrics())

        class EmptiedRebuild(Rebuild):
            """Redis is emptied once more after the breakers were recalled."""

            async def recall_breakers(self) -> int:
                recalled = await super().recall_breakers()
                await redis.client.flushall()
                return recalled

        emptied_rebuild, rebuild = (
            kind(config, handler, breakers, healths, Tasks(redis), lambda: plane.client)
            for kind in (EmptiedRebuild, Rebuild)
        )
        for number in range(3):
            await publish_attempt(plane, COUNTING, f"c{number}", "error")
        await rebuild.fill("log", None)
        [opened] = await plane.messages("EVENTS", subjects.breaker("counting", "sim/m"))

        await redis.client.flushall()
        with pytest.raises(StateUnavailableError, match="emptied"):
            await emptied_rebuild.fill("log", None)
        await rebuild.fill("log", None)
        assert await plane.messages("EVENTS", subjects.breaker("counting", "sim/m")) == [opened]
        assert await _stands(breakers, COUNTING, "open")


@pytest.mark.parametrize(
    "restarted",
    [pytest.param(False, id="running", marks=pytest.mark.long(about_s=12)), pytest.param(True, id="restarted")],
)
async def test_breakers_count_again_when_the_log_is_another(
    start_plane: StartPlane, own_nats_server: RunningServer, restarted: bool
) -> None:
    agents = {"counting": {"model": "sim/m", "breaker": RULES}}
    async with start_plane({"sim/m": model()}, agents, services=("breaker",)) as plane, redis_of(plane) as redis:
        breakers = Breakers(redis)
        for number in range(10):
            await publish_attempt(plane, COUNTING, f"old{number}", "error" if number % 2 else "success")
        await until(lambda: _counted(breakers, 5), what="the failures in the old log to be counted")
        # Killed while it fills for the first time, it would not have noted yet what from.
        await until(lambda: _logged(plane, "breakers_filled", 1), what="the breakers to be filled")
        if restarted:
            plane.kill("breaker")
        await plane.jetstream.delete_stream("EVENTS")
        await provision(own_nats_server.url, bus_plan(load_config(Path(plane.environment["BREAKWATER_CONFIG"]))))
        for number in range(3):
            # Their sequences, 1 to 3, are those of outcomes that were counted in the old one.
            await publish_attempt(plane, COUNTING, f"new{number}", "error")
        if restarted:
            plane.start("breaker")
        await until(lambda: _stands(breakers, COUNTING, "open"), what="the breaker to open")
        assert plane.log("breaker").count('"log_replaced"') == 1
        [reported] = await plane.messages("EVENTS", subjects.breaker("counting", "sim/m"))
        assert reported["reason"] == "3 jobs in a row failed (threshold: 3)"


@asynccontextmanager
async def redis_of(plane: Plane) -> AsyncGenerator[Redis]:
    redis = Redis(plane.environment["BREAKWATER_REDIS_URL"])
    yield redis
    await redis.close()


async def reason_of(plane: Plane, job_id: str, agent: str, **more: Any) -> str | None:
    """Runs a job, and says why it failed."""
    await plane.publish({"agent": agent, "job_id": job_id, "prompt": "x", **more})
    return (await plane.result(job_id))["reason"]


async def force_open(breakers: Breakers) -> None:
    """As whoever dies before he can publish it."""
    rules = BreakerRules()
    [before] = await breakers.load([ISOLATED])
    after, change = isolate(before.breaker, by="ops", why="", rules=rules, now_ms=before.now_ms)
    assert change is not None
    event = transition(ISOLATED, change, rules, before.now_ms)
    assert all(await breakers.save([Saving(ISOLATED, before, after, f"[{event.model_dump_json(by_alias=True)}]")]))


async def publish_attempt(plane: Plane, key: BreakerKey, name: str, outcome: str) -> None:
    attempt: dict[str, Any] = {
        "attempt_id": f"{name}:1", "execution_id": name, "job_id": name, "agent": key.agent, "number": 1,
        "model": key.model, "provider": "sim", "started_at": MOMENT, "completed_at": MOMENT,
        "duration_ms": 0, "outcome": outcome,
        "counts_for_breaker": outcome == "error", "cause": "first",
    }  # fmt: skip
    await plane.jetstream.publish(subjects.attempt(key.agent, name, 1), json.dumps(attempt).encode(), headers=FIRST)


def _essence(breaker: Breaker) -> tuple[object, ...]:
    return breaker.state, breaker.version, breaker.open_until_ms, breaker.reason


async def _stands(breakers: Breakers, key: BreakerKey, state: str) -> bool:
    [loaded] = await breakers.load([key])
    return loaded.breaker.state == state and loaded.unpublished is None


async def _counted(breakers: Breakers, failures: int) -> bool:
    [loaded] = await breakers.load([COUNTING])
    return loaded.breaker.total_failures == failures


async def _reported(plane: Plane, key: BreakerKey) -> bool:
    return await plane.last("EVENTS", subjects.breaker(key.agent, key.model)) is not None


async def _logged(plane: Plane, event: str, times: int) -> bool:
    return plane.log("breaker").count(f'"{event}"') >= times
