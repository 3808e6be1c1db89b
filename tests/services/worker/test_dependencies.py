"""Jobs that depend on others."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from breakwater.breakers.rules.breaker import Breaker
from breakwater.kernel.nats.subjects import Header, encode_token
from tests.flow.kit import model
from tests.helpers import until
from tests.services.request.conftest import put_breaker
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane
from tests.services.worker.test_cancelling import cancel, order

AGENTS: dict[str, Any] = {
    "writer": {
        "model": "sim/m",
        "breaker": "off",
        "retry": {"max_attempts": 1},
        "total_timeout_s": 60,
        "concurrency": 1,
    },
    "failing": {"model": "sim/bad", "breaker": "off", "retry": {"max_attempts": 1}},
}
MODELS = {"sim/m": model(), "sim/bad": model({"status": 400})}


def job(job_id: str, *depends_on: str, **more: Any) -> dict[str, Any]:
    return {"agent": "writer", "job_id": job_id, "prompt": job_id, "depends_on": list(depends_on), **more}


async def _sleeps(plane: WorkerPlane, job_id: str) -> bool:
    found = await plane.last("PARKED", f"bw.parked.*.{encode_token(job_id)}")
    return found is not None and await plane.pending_jobs() == 0


async def test_a_job_starts_when_those_it_depends_on_have_succeeded_and_holds_no_slot_until_then(
    start_worker: StartWorker,
) -> None:
    async with start_worker(MODELS, AGENTS) as plane:
        await plane.publish(job("last", "first", "second"))
        await until(lambda: _sleeps(plane, "last"), "the job to sleep")
        # The agent has one slot.
        await plane.publish(job("first"))
        first = await plane.result("first")
        assert await plane.last("RESULTS", "bw.results.last") is None
        second, last = await plane.run(job("second")), await plane.result("last")
        assert plane.sim.ledger.totals.calls == 3
    assert [one["status"] for one in (first, second, last)] == ["succeeded"] * 3
    started, ended = (datetime.fromisoformat(text) for text in (last["started_at"], second["completed_at"]))
    # It was woken: it would have looked by itself after a second.
    assert 0 <= (started - ended).total_seconds() < 0.9
    assert last["attempts_count"] == 1


async def test_a_job_whose_dependency_fails_ends_with_its_own_reason_and_calls_nothing(
    start_worker: StartWorker,
) -> None:
    async with start_worker(MODELS, AGENTS) as plane:
        for one in (job("c", "b"), job("b", "a"), job("a", agent="failing")):
            await plane.publish(one)
        a, b, c = [await plane.result(name) for name in "abc"]
        assert plane.sim.ledger.totals.calls == 1
        dead = await plane.messages("DLQ", "bw.dlq.dependency_failed.*", at_least=2)
    assert (a["status"], a["reason"]) == ("dead_lettered", "error")
    for one, of in ((b, "a"), (c, "b")):
        assert (one["status"], one["reason"], one["attempts_count"]) == ("dead_lettered", "dependency_failed", 0)
        assert one["error"]["message"] == f"the job {of!r}, which this one depends on, ended dead_lettered"
        assert (one["total_cost"], one["error"]["kind"]) == ("0.000000000", "dependency_failed")
    assert {one["execution_id"] for one in dead} == {"b", "c"}


async def test_jobs_that_depend_on_one_that_a_breaker_refuses_end_without_any_call(start_worker: StartWorker) -> None:
    agents = AGENTS | {"paused": {"model": "sim/m"}}
    async with start_worker(MODELS, agents) as plane:
        await put_breaker(plane.worker.redis, "paused", "sim/m", Breaker(state="isolated", version=1))
        await plane.publish(job("b", "a"))
        refused, result = await plane.run(job("a", agent="paused")), await plane.result("b")
        assert plane.sim.ledger.totals.calls == 0
    assert (refused["reason"], result["reason"]) == ("breaker_open", "dependency_failed")


async def test_a_dependency_that_nobody_knows_is_waited_for_as_long_as_the_job_has(start_worker: StartWorker) -> None:
    async with start_worker(MODELS, AGENTS) as plane:
        result = await plane.run(job("b", "never", total_timeout_s=1.5))
        assert plane.sim.ledger.totals.calls == 0
    assert (result["reason"], result["attempts_count"]) == ("dependency_failed", 0)
    assert result["error"]["message"] == "the job 'never', which this one depends on, did not come within 1.5 s"
    assert 1400 <= result["duration_ms"] < 4000


async def test_a_job_that_was_cancelled_fails_those_that_depend_on_it(start_worker: StartWorker) -> None:
    async with start_worker(MODELS, AGENTS) as plane:
        await plane.publish(job("b", "a"))
        await until(lambda: _sleeps(plane, "b"), "the job to sleep")
        await plane.publish(job("a", "never"))
        await until(lambda: _sleeps(plane, "a"), "the other job to sleep")
        await cancel(plane, order(job_id="a"))
        assert (await plane.result("b"))["error"]["message"].endswith("'a', which this one depends on, ended cancelled")


@pytest.mark.parametrize("circle", ["ab", "abc"])
async def test_jobs_that_depend_on_one_another_in_a_circle_end_and_say_so(
    start_worker: StartWorker, circle: str
) -> None:
    async with start_worker(MODELS, AGENTS) as plane:
        for name, on in zip(circle, circle[1:] + circle[0], strict=True):
            await plane.publish(job(name, on))
        results = [await plane.result(name, timeout_s=20) for name in circle]
        assert plane.sim.ledger.totals.calls == 0
    assert {one["reason"] for one in results} == {"dependency_failed"}
    assert sum("depends on this one in turn" in one["error"]["message"] for one in results) >= 1


async def test_what_became_of_the_job_of_another_owner_is_not_known_to_a_job_that_depends_on_it(
    start_worker: StartWorker,
) -> None:
    async with start_worker(MODELS, AGENTS) as plane:
        for job_id, owner, tenant in (("done", "alice", None), ("acme's", None, "acme")):
            headers = {} if owner is None else {Header.OWNER.value: encode_token(owner)}
            await plane.publish(job(job_id, tenant=tenant), **headers)
            assert (await plane.result(job_id))["status"] == "succeeded"
        mine = {Header.OWNER.value: encode_token("alice")}
        others = {Header.OWNER.value: encode_token("bob")}
        await plane.publish(job("own", "done"), **mine)
        await plane.publish(job("foreign", "done", total_timeout_s=1), **others)
        await plane.publish(job("unknown", "none", total_timeout_s=1), **others)
        await plane.publish(job("rival", "acme's", total_timeout_s=1, tenant="rival"))
        own, foreign, unknown, rival = [await plane.result(name) for name in ("own", "foreign", "unknown", "rival")]
    assert own["status"] == "succeeded"
    for one, of in ((foreign, "done"), (unknown, "none"), (rival, "acme's")):
        assert one["reason"] == "dependency_failed"
        assert one["error"]["message"] == f"the job {of!r}, which this one depends on, did not come within 1 s"


async def test_a_jobs_time_counts_from_when_it_may_start(start_worker: StartWorker) -> None:
    slow = MODELS | {"sim/slow": model() | {"latency_ms": 1500}}
    agents = AGENTS | {"slow": {"model": "sim/slow", "breaker": "off"}}
    async with start_worker(slow, agents) as plane:
        await plane.publish(job("a", agent="slow"))
        await plane.publish(job("b", "a", total_timeout_s=1))
        result = await plane.result("b")
    assert result["status"] == "succeeded"
    assert result["duration_ms"] > 1000


async def test_a_job_that_has_waited_is_answered_from_the_cache_as_any_other(start_worker: StartWorker) -> None:
    agents = AGENTS | {"writer": AGENTS["writer"] | {"cache": {"ttl_s": 60}}}
    async with start_worker(MODELS, agents) as plane:
        await plane.run(job("warm", prompt="same"))
        await plane.publish(job("b", "a", prompt="same"))
        await until(lambda: _sleeps(plane, "b"), "the job to sleep")
        await plane.run(job("a"))
        result = await plane.result("b")
    assert (result["status"], result["cached_from"]) == ("succeeded", "warm")


async def test_a_job_that_came_over_nats_is_of_its_plan_once_a_worker_has_it(start_worker: StartWorker) -> None:
    async with start_worker(MODELS, AGENTS) as plane:
        await plane.publish(job("b", "a", plan_id="p", tenant="acme"))
        await until(lambda: _sleeps(plane, "b"), "the job to sleep")
        known = (await plane.worker.plans.plans.notes_of(["p"]))["p"]
        noted = known.jobs
        assert {job_id: (one.agent, one.tenant) for job_id, one in noted.items()} == {"b": ("writer", "acme")}
        # Nothing was called for it: it counts as pending.
        assert known.begun == set()
        await plane.run(job("a", tenant="acme"))
        assert (await plane.result("b"))["plan_id"] == "p"
        [record] = await plane.messages("EVENTS", "bw.executions.writer.b", at_least=1)
        assert record["plan_id"] == "p"


async def test_a_job_that_nobody_waits_for_costs_no_more_commands_of_redis(start_worker: StartWorker) -> None:
    async with start_worker(MODELS, AGENTS) as plane:
        await plane.run(job("warm"))
        redis = plane.worker.redis.client
        await redis.config_resetstat()
        await plane.run(job("alone"))
        stats = await redis.info("commandstats")
    # Notices for whoever has a job are read where they were deleted before.
    assert stats.get("cmdstat_del", {"calls": 0})["calls"] == 0
    assert json.dumps(sorted(stats)).count("hvals") == 1
