"""Plans over HTTP: submitted as a whole, and looked up."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
import pytest_asyncio

from breakwater.breakers.rules.breaker import Breaker
from breakwater.config import parse_config
from breakwater.config.servers import bus_plan
from breakwater.identity.api_keys import create_key
from breakwater.jobs.contract.plans import PlanChange
from breakwater.jobs.rules.ids import key_of
from breakwater.jobs.store.plans import Plans
from breakwater.kernel.clickhouse.client import Analytics
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.redis.connection import Redis
from breakwater.records import rows, schema
from tests.records import samples
from tests.server_sources import RunningServer
from tests.services.request.conftest import (
    GOVERNED,
    Answer,
    HttpApi,
    new_id,
    publish_result,
    put_breaker,
    redis_ms,
    result_of,
    running,
    settings_for,
)
from tests.services.request.test_ownership import key


@dataclass(frozen=True, slots=True)
class Planning:
    """The API of a plane with ClickHouse."""

    api: HttpApi
    analytics: Analytics

    async def submit(self, *jobs: dict[str, Any], headers: dict[str, str] | None = None, **plan: Any) -> Answer:
        body = json.dumps({**plan, "jobs": list(jobs)}).encode()
        return await self.api.ask("POST", "/api/v1/plans", data=body, headers=headers or {})

    async def show(self, plan_id: str, **headers: str) -> Answer:
        return await self.api.ask("GET", f"/api/v1/plans/{plan_id}", headers=headers)

    async def state(self, plan_id: str) -> tuple[str, dict[str, int]]:
        plan = (await self.show(plan_id)).json
        return plan["state"], plan["jobs_by_status"]

    async def changes(self, plan_id: str) -> list[PlanChange]:
        """The published changes of a plan, which are then in ClickHouse, too."""
        found = [PlanChange.model_validate(one) for one in await self.api.events(subjects.plan(plan_id))]
        await self.analytics.insert(schema.PLAN_CHANGES, [rows.plan_row(one, 1) for one in found])
        return found

    async def record(self, job_id: str, **fields: Any) -> None:
        await self.analytics.insert(schema.EXECUTIONS, [rows.execution_row(samples.execution(job_id, **fields), 1)])


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def planning(
    module_nats_server: RunningServer,
    redis_server: RunningServer,
    clickhouse_server: RunningServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncGenerator[Planning]:
    config = parse_config(GOVERNED)
    await provision(module_nats_server.url, bus_plan(config))
    settings = settings_for(module_nats_server.url, redis_server.url, tmp_path_factory.mktemp("plans"))
    keys = create_key(settings.api_keys_file, "tests")
    async with samples.new_database(clickhouse_server.url) as analytics:
        url = f"{clickhouse_server.url.rstrip('/')}/{analytics.database}"
        fields = settings.model_dump() | {"clickhouse_url": url}
        async with running(type(settings).model_validate(fields), config, keys) as api:
            yield Planning(api, analytics)


def job(job_id: str | None = None, *depends_on: str, agent: str = "patient", **more: Any) -> dict[str, Any]:
    ids = {} if job_id is None else {"job_id": job_id}
    return {"agent": agent, "prompt": "x", **ids, **({"depends_on": depends_on} if depends_on else {}), **more}


async def test_a_plan_goes_from_draft_over_pending_and_running_to_its_end(planning: Planning, redis: Redis) -> None:
    plan, a, b = new_id(), new_id(), new_id()
    drafted = await planning.submit(plan_id=plan)
    assert (drafted.status, drafted.json) == (202, {"plan_id": plan, "plan_key": plan, "job_ids": []})
    assert drafted.headers["Location"] == f"/api/v1/plans/{plan}"
    assert await planning.state(plan) == ("draft", {})
    accepted = await planning.submit(job(a), job(b, a), plan_id=plan)
    assert (accepted.status, accepted.json["job_ids"]) == (202, [a, b])
    assert await planning.state(plan) == ("pending", {"pending": 2})
    drafted_change, accepted_change = await planning.changes(plan)
    assert (drafted_change.from_state, drafted_change.to_state) == (None, "draft")
    assert (accepted_change.from_state, accepted_change.to_state) == ("draft", "pending")
    assert (accepted_change.reason, accepted_change.owner) == ("2 jobs were accepted", "tests")
    assert json.loads((await planning.api.last_job("patient")).data)["plan_id"] == plan

    # A worker calls for the first one.
    await Plans(redis).change(plan, "running", {a: None})
    assert await planning.state(plan) == ("running", {"running": 1, "pending": 1})
    cost = {"total_cost": 3, "wasted_cost": 1, "cost_basis": "billed", "plan_id": plan, "plan_key": plan}
    await publish_result(planning.api.bus, result_of(a, "patient").model_copy(update=cost))
    assert await planning.state(plan) == ("running", {"succeeded": 1, "pending": 1})
    failed = cost | {"status": "dead_lettered", "reason": "error", "cost_basis": "estimated"}
    await publish_result(planning.api.bus, result_of(b, "patient").model_copy(update=failed))
    for _ in ("by its results", "by the record"):
        shown = (await planning.show(plan)).json
        assert (shown["state"], shown["jobs_by_status"]) == ("partial", {"succeeded": 1, "dead_lettered": 1})
        assert (shown["total_cost"], shown["wasted_cost"]) == ("0.000000006", "0.000000002")
        assert (shown["cost_basis"], [one["job_id"] for one in shown["jobs"]]) == ("estimated", sorted((a, b)))
        assert {one["job_id"]: one["depends_on"] for one in shown["jobs"]} == {a: [], b: [a]}
        for job_id, fields in ((a, cost), (b, failed)):
            await planning.record(job_id, agent="patient", completed_at=datetime.now(UTC), **fields)


async def test_a_plan_is_accepted_as_a_whole_or_not_at_all(planning: Planning, redis: Redis) -> None:
    before, plan = await planning.api.queued(), new_id()
    taken = new_id()
    await publish_result(planning.api.bus, result_of(taken, "reader"))
    for jobs, status, code, path in (
        ((job(), job(agent="riter")), 404, "unknown_agent", "jobs.1.agent"),
        ((job(), job(model="not-allowed")), 422, "invalid_job", "jobs.1.model"),
        ((job("a", "b"), job("b", "a")), 422, "invalid_job", "jobs"),
        ((job("a"), job("a")), 422, "invalid_job", "jobs"),
        ((job(plan_id="another"),), 422, "invalid_job", "jobs.0.plan_id"),
        ((job(), {"agent": "patient"}), 422, "invalid_request", "jobs.1"),
        ((job(), job(taken)), 409, "id_conflict", "jobs.1.job_id"),
    ):
        refused = await planning.submit(*jobs, plan_id=plan)
        assert (refused.status, refused.code, refused.paths) == (status, code, [path]), refused.body
    assert await planning.api.queued() == before
    assert (await planning.show(plan)).status == 404


async def test_sending_a_plan_again_changes_nothing_and_further_jobs_join_it(planning: Planning, redis: Redis) -> None:
    before, plan = await planning.api.queued(), new_id()
    first = await planning.submit(job(), job(None, f"{plan}.1"), plan_id=plan)
    assert first.json["job_ids"] == [f"{plan}.1", f"{plan}.2"]
    again = await planning.submit(job(), job(None, f"{plan}.1"), plan_id=plan)
    assert again.json == first.json
    assert await planning.api.queued() == before + 2
    changed = await planning.submit(job(prompt="another"), plan_id=plan)
    assert (changed.status, changed.code) == (409, "id_conflict")
    more = await planning.submit(job(f"{plan}.last"), plan_id=plan)
    assert (more.status, await planning.state(plan)) == (202, ("pending", {"pending": 3}))


async def test_a_refusal_by_an_unhealthy_agent_fails_the_plan_at_once_without_spawning_anything(
    planning: Planning, redis: Redis
) -> None:
    before, plan = await planning.api.queued(), new_id()
    # `patient` does not refuse single jobs.
    until_ms = await redis_ms(redis) + 60_000
    await put_breaker(redis, "patient", "m", Breaker(state="open", open_until_ms=until_ms, version=1))
    jobs = [job(dry_run=True), job(agent="unguarded"), job(None, f"{plan}.1")]
    refused = await planning.submit(*jobs, plan_id=plan)
    assert (refused.status, refused.code) == (503, "agent_unavailable")
    assert 50 <= int(refused.headers["Retry-After"]) <= 60
    why = "agent 'patient' is temporarily unavailable due to recent failures"
    assert refused.message == f"{why}: no job was accepted for the plan {plan!r}, failed if it has no others"
    [change] = await planning.changes(plan)
    correlation_id = refused.json["error"]["correlation_id"]
    assert refused.json["error"]["plan_id"] == plan
    assert (change.from_state, change.to_state, change.reason) == (None, "failed", why)
    assert (change.correlation_id, len(correlation_id)) == (correlation_id, 32)
    shown = (await planning.show(plan)).json
    assert (shown["state"], shown["refusal"], shown["jobs"]) == ("failed", why, [])
    assert await planning.api.queued() == before
    # Once the agent is well, the same plan is accepted.
    await redis.client.flushall()
    [recorded] = (await planning.show(plan)).json["changes"]
    assert (recorded["to_state"], recorded["reason"]) == ("failed", why)
    assert (await planning.show(plan)).json["state"] == "failed", "also without Redis"
    assert (await planning.submit(*jobs, plan_id=plan)).status == 202
    assert await planning.state(plan) == ("pending", {"pending": 2})


async def test_jobs_that_the_bus_did_not_take_are_not_of_the_plan(planning: Planning, redis: Redis) -> None:
    plan, nats_url = new_id(), planning.api.settings.nats_url.get_secret_value()
    await planning.submit(job(), plan_id=plan)
    await planning.api.bus.jetstream().delete_stream("JOBS")
    try:
        refused = await planning.submit(job(), job(), plan_id=plan)
        unknown = await planning.submit(job(), plan_id=plan + "-2")
    finally:
        await provision(nats_url, bus_plan(parse_config(GOVERNED)))
    assert (refused.status, unknown.status) == (503, 503)
    assert await planning.state(plan) == ("pending", {"pending": 1})
    assert (await planning.show(plan + "-2")).status == 404


async def test_jobs_submitted_one_by_one_are_of_the_plan_that_they_name(planning: Planning, redis: Redis) -> None:
    plan = new_id()
    for _ in range(2):
        assert (await planning.api.post(job(plan_id=plan))).status == 202
    await planning.api.post(job(plan_id=plan, dry_run=True))
    assert await planning.state(plan) == ("pending", {"pending": 2}), "as soon as they are accepted"
    [change] = await planning.changes(plan)
    assert (change.from_state, change.to_state) == (None, "pending")


async def test_plans_without_jobs_are_limited_for_each_key(
    planning: Planning, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.jobs.store.plans.MAX_ANNOUNCED", 2)
    drafts = [new_id() for _ in range(3)]
    answers = [await planning.submit(plan_id=plan) for plan in drafts]
    assert [answer.status for answer in answers] == [202, 202, 429]
    assert answers[2].code == "too_many_plans"
    assert await planning.changes(drafts[2]) == []
    assert (await planning.submit(plan_id=drafts[0])).status == 202, "one of the two"
    assert (await planning.submit(job(), plan_id=drafts[0])).status == 202
    assert (await planning.submit(plan_id=drafts[2])).status == 202, "the first has a job"


async def test_the_newest_plans_are_listed_whether_they_have_ended_or_not(planning: Planning, redis: Redis) -> None:
    old, ended, waiting, draft = (new_id() for _ in range(4))
    await planning.record(new_id(), plan_id=old)
    await planning.record(new_id(), plan_id=ended, completed_at=datetime.now(UTC))
    await planning.submit(job(), plan_id=waiting)
    await planning.submit(plan_id=draft)
    listed = (await planning.api.ask("GET", "/api/v1/plans?limit=3")).json["plans"]
    assert [(one["plan_id"], one["state"]) for one in listed] == [
        (draft, "draft"),
        (waiting, "pending"),
        (ended, "succeeded"),
    ]
    assert not any(one["jobs"] for one in listed)


async def test_a_key_sees_its_own_jobs_of_a_plan_and_one_that_may_read_sees_all(
    planning: Planning, redis: Redis
) -> None:
    plan, api = new_id(), planning.api
    one, other, third = key(api, "one"), key(api, "other"), key(api, "third")
    reader = key(api, "reader", scopes=("read",))
    assert (await planning.submit(job(f"{plan}-1"), plan_id=plan, headers=one)).status == 202
    assert (await planning.submit(job(f"{plan}-2"), plan_id=plan, headers=other)).status == 202
    for headers, name, job_id in ((one, "one", f"{plan}-1"), (other, "other", f"{plan}-2")):
        assert [job["job_id"] for job in (await planning.show(plan, **headers)).json["jobs"]] == [job_id]
        found = (await planning.show(key_of(f"key:{name}", plan), **reader)).json
        assert (found["plan_id"], [job["job_id"] for job in found["jobs"]]) == (plan, [job_id])
    hidden, unknown = await planning.show(plan, **third), await planning.show("unknown", **third)
    assert (hidden.status, hidden.code) == (404, "unknown_plan")
    assert hidden.message.replace(plan, "unknown") == unknown.message
    draft = new_id()
    assert (await planning.submit(plan_id=draft, headers=one)).status == 202
    assert [(await planning.show(draft, **headers)).status for headers in (one, other)] == [200, 404]
    assert (await planning.show(key_of("key:one", draft), **reader)).status == 200


async def test_a_key_of_several_tenants_sees_all_parts_of_its_plan(planning: Planning) -> None:
    both, plan = key(planning.api, "both", tenants=("acme", "rival")), new_id()
    jobs = [job(tenant=tenant) for tenant in ("acme", "rival")]
    assert (await planning.submit(*jobs, headers=both, plan_id=plan)).status == 202
    shown = (await planning.show(plan, **both)).json
    assert (shown["plan_id"], [one["job_id"] for one in shown["jobs"]]) == (plan, [f"{plan}.1", f"{plan}.2"])
