"""What others see a worker's jobs wait for."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from breakwater.breakers import gate
from breakwater.breakers.rules.breaker import Breaker
from breakwater.identity.operations import ApiRequest
from breakwater.identity.rules.callers import Caller
from breakwater.jobs.api.current_jobs import CurrentJobRoutes
from breakwater.jobs.contract.current_jobs import CurrentJob, CurrentJobQuery
from breakwater.services.worker import attempts
from breakwater.services.worker.slots import Slots
from breakwater.services.worker.turns import Turns
from tests.flow.kit import model
from tests.helpers import until
from tests.services.request.conftest import put_breaker, redis_ms
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane


async def jobs_now(plane: WorkerPlane, **query: Any) -> tuple[CurrentJob, ...]:
    worker = plane.worker
    routes = CurrentJobRoutes(worker.config, worker.lookup.as_stored(), worker.redis, worker.cipher, worker.redactor)
    caller = Caller("key", "1", "reader", ("read",), datetime.now(UTC))
    return (await routes.list_jobs(ApiRequest(CurrentJobQuery(**query), {}, caller, ""))).jobs


LONG = {"breaker": "off", "total_timeout_s": 600}
HARD = {"daily_usd": 1, "enforcement": "hard"}
AGENTS: dict[str, Any] = {
    "running": {"model": "sim/slow"},
    "back_off": {"model": "sim/down", **LONG, "retry": {"base_s": 6, "max_delay_s": 6}},
    "back_off-parked": {"model": "sim/down", **LONG, "retry": {"base_s": 60, "max_delay_s": 60}},
    "hold": {"model": "sim/held", **LONG},
    "rate_limit-parked": {"model": "sim/m", **LONG, "rate_limit": {"requests_per_minute": 1}},
    "budget": {"model": "sim/m", **LONG, "budget": HARD},
    "probe": {"model": "sim/probed", "total_timeout_s": 600},
    "dependency-parked": {"model": "sim/m", **LONG},
    "concurrency-parked": {"model": "sim/m", **LONG},
}
MODELS = {
    "sim/slow": model(latency_ms=60_000),
    "sim/down": model({"status": 503}),
    **{name: model() for name in ("sim/m", "sim/held", "sim/probed")},
}


async def test_a_job_says_what_it_waits_for(start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "PROBE_WAIT_S", 600.0)
    has_room = Slots.has_room
    monkeypatch.setattr(
        Slots, "has_room", lambda self, agent, *more: agent != "concurrency-parked" and has_room(self, agent, *more)
    )
    monkeypatch.setattr(Turns, "advance", lambda *_: None)
    async with start_worker(MODELS, AGENTS) as plane:
        worker = plane.worker
        await worker.redis.run([worker.deployments.hold_command("sim/held", 8.0)])
        until_ms = await redis_ms(worker.redis) + 600_000
        half_open = Breaker(state="half_open", version=2, probe="other:1", probe_until_ms=until_ms)
        await put_breaker(worker.redis, "probe", "sim/probed", half_open)
        await plane.run({"agent": "rate_limit-parked", "job_id": "the minute's", "prompt": "x"})
        for agent in AGENTS:
            depends_on = ["running"] if agent.startswith("dependency") else []
            await plane.publish({"agent": agent, "job_id": agent, "prompt": f"of {agent}", "depends_on": depends_on})
        seen: dict[str, CurrentJob] = {}

        async def all_seen() -> bool:
            for job in await jobs_now(plane):
                name = job.job_id
                kind, _, parked = name.partition("-p")
                state = "running" if name == "running" else "parked" if parked else "waiting"
                if job.state == state and (job.wait.kind if job.wait else "running") == kind:
                    seen[name] = job
            return seen.keys() == AGENTS.keys()

        await until(all_seen, "each job in its state")
    assert (seen["running"].wait, seen["running"].attempt, seen["running"].model) == (None, 1, "sim/slow")
    messages = {name: job.wait.message for name, job in seen.items() if job.wait is not None}
    assert messages["back_off"] == "a call of sim/down failed (ServiceUnavailableError), and is repeated"
    assert messages["hold"] == "sim/held is held until its provider's rate limit is over"
    assert messages["rate_limit-parked"].startswith("the limit of agent rate_limit-parked on requests per minute")
    of_rate = seen["rate_limit-parked"].wait
    assert of_rate is not None
    assert (of_rate.ahead, of_rate.frees) == (0, "each call that began a minute ago")
    assert messages["dependency-parked"] == "it depends on running"
    assert (seen["back_off-parked"].attempt, seen["back_off-parked"].prompt) == (1, "of back_off-parked")
    for name, job in seen.items():
        if name != "running":
            assert job.wait is not None
            assert (job.wait.until is None) is (name == "concurrency-parked"), "its turn has no time"
            assert job.wait.since is not None


async def test_a_job_is_listed_once_until_it_has_ended_while_jobs_run_wait_and_are_parked(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "LONG_WAIT_S", 0.2)
    models = {"sim/m": model({"rate": 0.3, "status": 503}, latency_ms=20)}
    agents = {"writer": {"model": "sim/m", "breaker": "off", "concurrency": 3, "retry": {"base_s": 0.5}}}
    async with start_worker(models, agents) as plane:
        names = {f"j{number}" for number in range(24)}
        for name in sorted(names):
            await plane.publish({"agent": "writer", "job_id": name, "prompt": "x"})
        seen: set[str] = set()
        undecided = names
        while undecided:
            listed = await jobs_now(plane, limit=200)
            assert len({job.job_id for job in listed}) == len(listed)
            seen |= {job.state for job in listed}
            missing = names - {job.job_id for job in listed}
            ended = {name for name in missing if await plane.last("RESULTS", f"bw.results.{name}") is not None}
            assert missing <= ended, "it is listed, or has ended"
            undecided = names - ended
    assert {"queued", "running", "parked"} <= seen
