"""`GET /api/v1/jobs`: the jobs that have not ended."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from nats.aio.msg import Msg

from breakwater.config import parse_config
from breakwater.identity.operations import ApiRequest
from breakwater.identity.rules.callers import Caller
from breakwater.jobs.api.current_jobs import MAX_READ, CurrentJobRoutes
from breakwater.jobs.contract.current_jobs import CurrentJobQuery, JobWait
from breakwater.jobs.store.executions import Claim, Executions
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import Delivery, park, wake_early
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.nats.topology import worker_consumer
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.security.encryption import OFF
from breakwater.redaction.rules.redact import Redactor
from tests.services.request.conftest import HttpApi, StartApi, publish_result, result_of
from tests.services.request.test_ownership import key

PRIVATE = """
providers: {local: {base_url: "http://127.0.0.1:9/v1"}}
defaults: {model: m}
agents: {writer: {}, private: {persist_prompts: false}}
"""
SECRET = "sk-proj-abcdefghijklmnopqrstuvwx1234"
LEASE_MS = 12_000


async def submit(api: HttpApi, agent: str = "writer", headers: dict[str, str] | None = None, **job: Any) -> str:
    answer = await api.post({"agent": agent, "prompt": "x", **job}, **(headers or {}))
    assert answer.status == 202, answer.body
    return answer.json["execution_id"]


async def listed(api: HttpApi, headers: dict[str, str] | None = None, **query: Any) -> dict[str, Any]:
    parameters = {name: str(value).lower() if value is True else str(value) for name, value in query.items()}
    answer = await api.ask("GET", "/api/v1/jobs", params=parameters, headers=headers)
    assert answer.status == 200, answer.body
    return answer.json


async def states(api: HttpApi, **query: Any) -> dict[str, str]:
    """The state of each job by its own id. A job that is listed twice fails the test."""
    jobs = (await listed(api, limit=200, **query))["jobs"]
    assert not [name for name, count in Counter(job["execution_id"] for job in jobs).items() if count > 1]
    return {job["job_id"]: job["state"] for job in jobs}


async def take(api: HttpApi, agent: str = "writer") -> Msg:
    """Takes the next message of an agent, as a worker does."""
    subscription = await api.bus.jetstream().pull_subscribe_bind(worker_consumer(agent), Stream.JOBS.value)
    [message] = await subscription.fetch(1, timeout=5)
    return message


async def claim(redis: Redis, execution_id: str, worker: str = "worker") -> Claim:
    claim = Claim.new(execution_id, worker)
    await Executions(redis).claim(claim, "digest")
    return claim


def wait(kind: Any, seconds: float) -> JobWait:
    now = datetime.now(UTC)
    return JobWait(kind=kind, message=f"a {kind}", since=now, until=now + timedelta(seconds=seconds))


CHECKPOINT = json.dumps(
    {
        "dispatched_at": "2026-11-20T12:00:00Z",
        "deadline": "2026-11-20T13:00:00Z",
        "in_flight": {"number": 2, "model": "n", "started_at": "2026-11-20T12:00:01Z"},
    }
)


async def test_a_job_is_listed_in_exactly_one_state_from_its_acceptance_to_its_end(api: HttpApi, redis: Redis) -> None:
    executions = Executions(redis)
    publisher = Publisher(lambda: api.bus, "tests")
    execution_id = await submit(api, job_id="j1")
    assert await states(api) == {"j1": "queued"}
    message = await take(api)
    assert await states(api) == {"j1": "waiting"}, "it is delivered, and no worker has claimed it yet"
    holder = await claim(redis, execution_id)
    await executions.checkpoint(holder, CHECKPOINT)
    [running] = (await listed(api, state="running"))["jobs"]
    assert (running["attempt"], running["model"], running["wait"]) == (2, "n", None)
    await executions.checkpoint(holder, "", wait("budget", 5))
    [waiting] = (await listed(api))["jobs"]
    assert (waiting["state"], waiting["wait"]["kind"], waiting["wait"]["message"]) == ("waiting", "budget", "a budget")
    assert [await states(api, state=state) for state in ("running", "parked", "queued")] == [{}, {}, {}]
    await executions.release(holder, wait("hold", 60))
    due = datetime.now(UTC) + timedelta(seconds=60)
    names = {"agent": "writer", "execution_id": execution_id, "job_id": "j1"}
    await park(publisher, Delivery(message), **names, due=due)
    await message.ack_sync()
    [parked] = (await listed(api))["jobs"]
    assert (parked["state"], parked["wait"]["kind"], parked["attempt"]) == ("parked", "hold", 2)
    assert abs(datetime.fromisoformat(parked["wait"]["until"]) - due) < timedelta(milliseconds=2)
    assert parked["queued_at"] == running["queued_at"], "it is as old as before"
    sequence = await wake_early(publisher, Lookup(lambda: api.bus), execution_id)
    assert sequence is not None
    await executions.note_woken({execution_id: sequence})
    assert await states(api) == {"j1": "queued"}, "its message on PARKED stays, and says nothing of it"
    message = await take(api)
    holder = await claim(redis, execution_id)
    assert await states(api) == {"j1": "running"}
    await publish_result(api.bus, result_of(execution_id, "writer"))
    await executions.finish(holder)
    assert await states(api) == {}, "it has ended, also while its messages are still there"
    await message.ack_sync()
    await redis.client.delete(holder.key)  # as after a minute
    await Publisher(lambda: api.bus, "tests").event(
        subjects.execution("writer", execution_id), result_of(execution_id, "writer"), id=execution_id,
        at=datetime.now(UTC),
    )  # fmt: skip
    assert await states(api) == {}


async def test_a_worker_that_died_leaves_its_job_waiting_for_its_claim_to_end(api: HttpApi, redis: Redis) -> None:
    execution_id = await submit(api, job_id="j1")
    await take(api)
    holder = await claim(redis, execution_id, "dead")
    now_ms = round(datetime.now(UTC).timestamp() * 1000)
    await redis.client.hset("bw:workers", "dead", f"{now_ms} nats")
    assert await states(api) == {"j1": "running"}
    await redis.client.hset("bw:workers", "dead", f"{now_ms - 7_000} nats")
    [job] = (await listed(api, state="waiting"))["jobs"]
    assert job["wait"]["kind"] == "claim"
    assert "silent for 7 s" in job["wait"]["message"]
    await redis.client.hdel("bw:workers", "dead")
    await redis.client.hincrby(holder.key, "lease_until", -LEASE_MS - 1_000)
    assert await states(api) == {"j1": "waiting"}
    assert await Executions(redis).free("dead", [execution_id]) == ["freed"]
    [job] = (await listed(api))["jobs"]
    assert (job["state"], job["wait"]["kind"]) == ("waiting", "worker")


async def test_programs_on_nats_and_callers_of_http_are_both_listed_with_their_own_ids(
    api: HttpApi, redis: Redis
) -> None:
    await submit(api, job_id="over-http", tenant="acme", model="allowed")
    jetstream = api.bus.jetstream()
    body = {"agent": "writer", "prompt": "x", "tenant": "acme"}
    for user, job_id, headers in (
        ("client", "over-nats", {}),
        ("program-orders", None, {Header.MSG_ID.value: "by-header", "Breakwater-Owner": "forged"}),
    ):
        job = json.dumps(body | {"job_id": job_id}).encode()
        await jetstream.publish(subjects.job_by("writer", user), job, headers=headers)
    jobs = {job["job_id"]: job for job in (await listed(api))["jobs"]}
    assert [(name, job["submitted_by"]) for name, job in jobs.items()] == [
        ("over-http", "tests"),
        ("over-nats", None),
        ("by-header", "program-orders"),
    ]
    assert {job["tenant"] for job in jobs.values()} == {"acme"}
    assert [job["model"] for job in jobs.values()] == ["allowed", "m", "m"]
    assert jobs["by-header"]["execution_id"] != "by-header", "its id is one of its program"
    assert all(0 <= job["age_ms"] < 60_000 and job["attempt"] is None for job in jobs.values())
    assert [job["job_id"] for job in (await listed(api, key="program-orders"))["jobs"]] == ["by-header"]
    for message_count in range(3):
        await take(api)
        held = Counter((await states(api)).values())
        assert held == Counter(waiting=message_count + 1, queued=2 - message_count)


async def test_a_key_lists_only_what_it_may_see(start_api: StartApi, redis: Redis) -> None:
    async with start_api(PRIVATE) as api:
        one, other = key(api, "one"), key(api, "other")
        acme, bound = key(api, "acme", tenants=("acme",)), key(api, "bound", agents=("writer",))
        operator, reader = key(api, "op", scopes=("submit", "operate")), key(api, "reader", scopes=("read",))
        approver = key(api, "approver", scopes=("approve",))
        await submit(api, headers=one, job_id="of-one")
        await submit(api, "private", one, job_id="private-of-one")
        await submit(api, headers=acme, job_id="of-acme")
        await submit(api, headers=operator, job_id="of-operator")

        async def seen(headers: dict[str, str], **query: Any) -> set[str]:
            return {job["job_id"] for job in (await listed(api, headers, **query))["jobs"]}

        everything = {"of-one", "private-of-one", "of-acme", "of-operator"}
        assert await seen(one) == {"of-one", "private-of-one"}
        assert await seen(other) == await seen(bound) == set()
        assert await seen(one, key="op") == set()
        assert await seen(acme) == {"of-acme"}
        assert await seen(operator) == await seen(reader) == everything
        assert await seen(reader, agent="private") == {"private-of-one"}
        assert await seen(reader, tenant="acme") == {"of-acme"}
        assert await seen(reader, key="one") == {"of-one", "private-of-one"}
        assert await seen(reader, agent="unknown") == set()
        refused = await api.ask("GET", "/api/v1/jobs", headers=approver)
        assert (refused.status, refused.code) == (403, "forbidden")
        counts = [(await listed(api, headers, counts=True))["counts"] for headers in (reader, one)]
        assert counts[1] is None, "how much others do is not for it"
        assert counts[0] == {"running": 0, "waiting": 0, "in_progress": 0, "parked": 0, "queued": 4}


async def test_the_beginning_of_a_prompt_is_shown_redacted_and_only_where_its_agent_keeps_prompts(
    start_api: StartApi, redis: Redis
) -> None:
    async with start_api(PRIVATE) as api:
        long = f"Use {SECRET} to write about tides. " * 9
        for agent in ("writer", "private"):
            await submit(api, agent, prompt=long)
        await submit(api, api_request={"api": "messages", "body": {"messages": [{"role": "user", "content": "Hi"}]}},
                     prompt=None)  # fmt: skip
        private, first, second = (job["prompt"] for job in (await listed(api))["jobs"])
    assert private is None
    assert SECRET[:12] not in first
    assert first.startswith("Use [REDACTED] to write about tides.")
    assert len(first) <= 121
    assert second == "Hi"


async def test_pages_list_each_job_once_while_jobs_move(api: HttpApi, redis: Redis) -> None:
    staying = [
        await submit(api, agent, job_id=f"{agent}-{number}") for agent in ("reader", "writer") for number in range(7)
    ]
    moving = [await submit(api, job_id=f"moving-{number}") for number in range(3)]
    pages: list[list[str]] = []
    after: dict[str, str] = {}
    while True:
        page = await listed(api, limit=4, **after)
        pages.append([job["execution_id"] for job in page["jobs"]])
        if page["next"] is None:
            break
        after = {"after": page["next"]}
        if len(pages) == 1:
            # Two jobs that were listed are taken, and others come.
            for _ in range(2):
                await take(api, "reader")
            moving += [await submit(api, agent) for agent in ("reader", "writer")]
    every = [execution_id for page in pages for execution_id in page]
    assert len(every) == len(set(every))
    assert set(staying) <= set(every) <= {*staying, *moving}
    assert every[:7] == staying[:7], "of each agent, the oldest first"
    assert [len(page) for page in pages[:-1]] == [4] * (len(pages) - 1)


async def test_a_filter_reads_a_limited_number_of_jobs_and_says_where_to_go_on(api: HttpApi, redis: Redis) -> None:
    jetstream = api.bus.jetstream()
    body = json.dumps({"agent": "writer", "prompt": "x"}).encode()
    for _ in range(MAX_READ):
        await jetstream.publish_async(subjects.job("writer"), body)
    await jetstream.publish_async_completed()
    await submit(api, tenant="acme", job_id="the-one")
    first = await listed(api, tenant="acme")
    assert (first["jobs"], first["next"]) == ([], f"queued.writer.{MAX_READ + 1}")
    second = await listed(api, tenant="acme", after=first["next"])
    assert ([job["job_id"] for job in second["jobs"]], second["next"]) == (["the-one"], None)


async def test_a_page_of_many_queued_jobs_costs_as_much_as_one_of_a_few(api: HttpApi, redis: Redis) -> None:
    jetstream = api.bus.jetstream()
    body = json.dumps({"agent": "writer", "prompt": "x"}).encode()
    costs = []
    async with reading_here(api, redis) as list_jobs:
        for more in (20, 1_980):
            for _ in range(more):
                await jetstream.publish_async(subjects.job("writer"), body)
            await jetstream.publish_async_completed()
            sent, received = api.bus.stats["out_msgs"], api.bus.stats["in_msgs"]
            assert len((await list_jobs(CurrentJobQuery(limit=10))).jobs) == 10
            costs.append((api.bus.stats["out_msgs"] - sent, api.bus.stats["in_msgs"] - received))
    assert costs[0] == costs[1]


@asynccontextmanager
async def reading_here(api: HttpApi, redis: Redis) -> AsyncGenerator[Any]:
    """The list as a reader gets it, over this process' own connection."""
    config = parse_config(PRIVATE)
    routes = CurrentJobRoutes(config, Lookup(lambda: api.bus), redis, OFF, Redactor.compile(config.redaction))
    caller = Caller("key", "1", "reader", ("read",), datetime.now(UTC))

    async def list_jobs(query: CurrentJobQuery) -> Any:
        return await routes.list_jobs(ApiRequest(query, {}, caller, ""))

    yield list_jobs


async def test_jobs_are_counted_by_state(api: HttpApi, redis: Redis) -> None:
    for number in range(5):
        await submit(api, job_id=f"j{number}")
    await submit(api, "reader")
    held = [await take(api) for _ in range(3)]
    await claim(redis, name_of(held[0]))
    await claim(redis, name_of(held[1]))
    names = {"agent": "writer", "execution_id": name_of(held[2]), "job_id": "j2"}
    due = datetime.now(UTC) + timedelta(seconds=60)
    await park(Publisher(lambda: api.bus, "tests"), Delivery(held[2]), **names, due=due)
    await held[2].ack_sync()
    every = (await listed(api, counts=True, limit=1))["counts"]
    assert every == {"running": 2, "waiting": 0, "in_progress": 2, "parked": 1, "queued": 3}
    of_reader = (await listed(api, counts=True, agent="reader"))["counts"]
    assert of_reader == {"running": 0, "waiting": 0, "in_progress": 0, "parked": 0, "queued": 1}


def name_of(message: Msg) -> str:
    return subjects.decode_token((message.headers or {})[Header.EXECUTION_ID.value])


async def test_a_job_that_is_to_be_cancelled_says_so(api: HttpApi, redis: Redis) -> None:
    await submit(api, job_id="j1")
    await submit(api, job_id="j2")
    assert (await api.act("jobs/j1/cancel")).status == 202
    jobs = (await listed(api))["jobs"]
    assert [(job["job_id"], job["cancelling"]) for job in jobs] == [("j1", True), ("j2", False)]


@pytest.mark.parametrize("query", ["state=ended", "after=queued.writer", "limit=0", "limit=201", "status=queued"])
async def test_a_query_that_is_wrong_is_refused_with_the_parameter(api: HttpApi, query: str) -> None:
    answer = await api.ask("GET", f"/api/v1/jobs?{query}")
    assert (answer.status, answer.code, answer.paths) == (422, "invalid_query", [query.partition("=")[0]])
