"""Cancelling jobs over HTTP and NATS: what is left for the workers, what they hear, and what the caller gets."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from nats.aio.client import Client

from breakwater.config import parse_config
from breakwater.identity.api_keys import create_key
from breakwater.jobs.api import cancels
from breakwater.jobs.api.cancels import CancelRequests, Cancels, _user_and_job
from breakwater.jobs.api.results import JobLookup, ResultReader, Waiters
from breakwater.jobs.contract.execution import PendingCancel
from breakwater.jobs.rules.ids import key_of
from breakwater.jobs.store import executions
from breakwater.jobs.store.accepted import AcceptedJobs
from breakwater.jobs.store.executions import Claim, Claimed, Executions
from breakwater.kernel import ids
from breakwater.kernel.http.problems import RequestError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream, encode_token
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import format_time
from breakwater.redaction.rules.redact import Redactor
from breakwater.redaction.settings import RedactionRules
from tests.helpers import until
from tests.services.request.conftest import CONFIG, HttpApi, new_id, publish_result, result_of

SECRET = "sk-proj-abcdefghijklmnopqrstuvwx1234"
JOB = {"agent": "writer", "prompt": "x"}


@asynccontextmanager
async def requests_heard(api: HttpApi) -> Any:
    """What workers hear meanwhile."""
    heard: list[PendingCancel] = []

    async def hear(message: Any) -> None:
        heard.append(PendingCancel.model_validate_json(message.data))

    await api.bus.subscribe("bw.cancel-requests.*", cb=hear)
    await api.bus.jetstream().account_info()
    yield heard


async def cancels_kept(redis: Redis, job_id: str) -> tuple[PendingCancel, ...]:
    claimed = await Executions(redis).claim(Claim.new(job_id))
    assert isinstance(claimed, Claimed)
    return claimed.cancels


def cancelled(job_id: str, order: PendingCancel) -> Any:
    fields: dict[str, Any] = {"status": "cancelled", "reason": "cancelled", "cancellation": order.cancellation}
    return result_of(job_id, "writer").model_copy(update=fields)


async def accepted(api: HttpApi, **more: Any) -> str:
    answer = await api.post(JOB | more)
    assert answer.status == 202
    return answer.json["job_id"]


async def test_an_order_is_kept_for_whoever_takes_the_job_and_heard_by_whoever_has_it(
    api: HttpApi, redis: Redis
) -> None:
    async with requests_heard(api) as heard:
        job_id = await accepted(api)
        answer = await api.act(
            f"jobs/{job_id}/cancel", reason="  a wrong prompt; sk-proj-abcdefghijklmnopqrstuvwx1234 "
        )
        assert (answer.status, answer.json["status"]) == (202, "cancelling")
        await until(lambda: len(heard) == 1)
    [kept] = await cancels_kept(redis, job_id)
    assert kept == heard[0]
    said = kept.cancellation
    assert (said.by, said.name) == ("api_key", "tests")
    assert said.reason is not None
    assert said.reason.startswith("a wrong prompt; ")
    assert SECRET not in said.reason
    assert answer.json["cancellation"] == json.loads(said.model_dump_json())
    # Again: what stands is the first, whatever the reason.
    again = await api.ask("POST", f"/api/v1/jobs/{job_id}/cancel")
    assert (again.status, again.json) == (202, answer.json)


async def test_who_waits_gets_how_the_job_has_ended(api: HttpApi, redis: Redis) -> None:
    async with requests_heard(api) as heard:
        job_id = await accepted(api)
        waiting = asyncio.create_task(api.ask("POST", f"/api/v1/jobs/{job_id}/cancel?wait_s=60"))
        await until(lambda: len(heard) == 1)
        await publish_result(api.bus, cancelled(job_id, heard[0]))
        answer = await waiting
    assert (answer.status, answer.json["status"], answer.json["reason"]) == (200, "cancelled", "cancelled")
    assert answer.json["cancellation"]["name"] == "tests"


async def test_a_late_cancel_says_what_had_been_decided_and_shows_no_output(api: HttpApi, redis: Redis) -> None:
    job_id = new_id()
    await publish_result(api.bus, result_of(job_id, "writer", "a secret answer"))
    answer = await api.act(f"jobs/{job_id}/cancel")
    assert (answer.status, answer.json["status"], answer.json["cancellation"]) == (200, "succeeded", None)
    assert answer.json["completed_at"]
    assert b"secret" not in answer.body
    assert await cancels_kept(redis, job_id) == ()


async def test_unknown_jobs_and_wrong_requests_are_refused(api: HttpApi) -> None:
    job_id = await accepted(api)
    for path, body, refusal in (
        (f"jobs/{new_id()}/cancel", {}, (404, "unknown_job")),
        (f"jobs/{'x' * 200}/cancel", {}, (404, "unknown_job")),
        (f"jobs/{job_id}/cancel", {"why": "no"}, (422, "invalid_request")),
        (f"jobs/{job_id}/cancel", {"reason": "x" * 501}, (422, "invalid_request")),
        (f"jobs/{job_id}/cancel?wait_s=no", {}, (422, "invalid_query")),
    ):
        answer = await api.act(path, **body)
        assert (answer.status, answer.code) == refusal
    assert (await api.ask("GET", f"/api/v1/jobs/{job_id}/cancel")).status == 404


async def test_a_key_cancels_the_jobs_that_it_sees(api: HttpApi) -> None:
    job_id = await accepted(api)
    keys, path = api.settings.api_keys_file, f"/api/v1/jobs/{job_id}/cancel"
    for scope, status, code in (("read", 403, "forbidden"), ("submit", 404, "unknown_job"), ("operate", 202, None)):
        key = create_key(keys, scope, scopes=(scope,))
        answer = await api.ask("POST", path, headers={"Authorization": f"Bearer {key}"})
        assert (answer.status, answer.json.get("error", {}).get("code")) == (status, code)


async def test_an_id_may_hold_slashes(api: HttpApi) -> None:
    job_id = f"{new_id()}/cancel"
    await accepted(api, job_id=job_id)
    answer = await api.act(f"jobs/{job_id.replace('/', '%2F')}/cancel")
    assert (answer.status, answer.json["job_id"]) == (202, job_id)


async def test_a_job_that_sleeps_goes_back_into_its_queue(api: HttpApi) -> None:
    job_id = await accepted(api)
    due = format_time(datetime.now(UTC) + timedelta(hours=1))
    headers = {Header.DUE.value: due, Header.EXECUTION_ID.value: encode_token(job_id), Header.QUEUED_AT.value: due}
    body = json.dumps(JOB | {"job_id": job_id}).encode()
    await Publisher(lambda: api.bus, "tests").raw(subjects.parked("writer", job_id), body, headers)
    for _ in range(2):  # twice is once
        assert (await api.act(f"jobs/{job_id}/cancel")).status == 202
    assert await api.queued() == 2
    woken = await Lookup(lambda: api.bus).last(Stream.JOBS, subjects.job("writer"))
    assert woken is not None
    assert (woken.data, woken.headers[Header.EXECUTION_ID.value]) == (body, encode_token(job_id))
    assert woken.headers[Header.QUEUED_AT.value] == due
    assert Header.DUE.value not in woken.headers


async def test_a_program_asks_over_nats(api: HttpApi, redis: Redis) -> None:
    job_id = new_id()  # of which nothing is known here: it may have come over NATS, too
    answer = await api.bus.request(subjects.cancel(job_id), b'{"reason": "over"}', timeout=60)
    assert json.loads(answer.data)["status"] == "cancelling"
    [kept] = await cancels_kept(redis, job_id)
    assert (kept.cancellation.by, kept.cancellation.name, kept.agents) == ("program", "client", ())
    decided = new_id()
    await publish_result(api.bus, result_of(decided, "writer"))
    answer = await api.bus.request(subjects.cancel(decided), b"", timeout=60)
    assert json.loads(answer.data)["status"] == "succeeded"
    answer = await api.bus.request(subjects.cancel(decided), b"{", timeout=60)
    assert json.loads(answer.data)["error"]["code"] == "not_json"


async def test_the_order_of_a_program_is_for_jobs_of_its_agents_alone(redis: Redis, start_api: Any) -> None:
    config = """
providers: {local: {base_url: "http://127.0.0.1:9/v1"}}
defaults: {model: m}
agents: {writer: {}, reader: {}}
programs: {desk: {agents: [reader]}}
"""

    def by(user: str, job_id: str) -> str:
        return subjects.cancels_by(user).removesuffix("*") + encode_token(job_id)

    async with start_api(config) as api:
        job_id, decided = new_id(), new_id()
        answer = await api.bus.request(by("program-desk", job_id), b"", timeout=60)
        assert json.loads(answer.data)["status"] == "cancelling"
        [kept] = await cancels_kept(redis, key_of("program-desk", job_id))
        assert (kept.cancellation.name, kept.agents, kept.owner) == ("program-desk", ("reader",), "program-desk")
        await publish_result(api.bus, result_of(key_of("program-desk", decided), "writer"))
        await publish_result(api.bus, result_of(key_of("program-desk", anothers := new_id()), "reader"))
        for subject in (by("program-desk", decided), by("program-desk", anothers), by("program-gone", new_id())):
            answer = await api.bus.request(subject, b"", timeout=60)
            assert json.loads(answer.data)["error"]["code"] == "unknown_job"


async def test_a_tenants_program_is_told_how_a_job_of_its_tenant_has_ended(start_api: Any) -> None:
    config = f"{CONFIG}\nprograms: {{acme: {{agents: [writer], tenants: [acme]}}}}\n"
    async with start_api(config) as api:
        for tenant, status in (("acme", "succeeded"), ("rival", "cancelling")):
            made = ids.new_id()
            await publish_result(api.bus, result_of(made, "writer").model_copy(update={"tenant": tenant}))
            subject = subjects.cancels_by("program-acme").removesuffix("*") + encode_token(made)
            answer = await api.bus.request(subject, b"", timeout=60)
            assert json.loads(answer.data)["status"] == status


async def test_a_running_job_that_came_over_nats_is_cancelled_by_its_execution_id(start_api: Any, redis: Redis) -> None:
    bounds = "{desk: {agents: [writer]}, other: {agents: [writer]}, acme: {agents: [writer], tenants: [acme]}}"
    async with start_api(f"{CONFIG}\nprograms: {bounds}\n") as api:
        for owner, tenant, users in (
            ("program-desk", None, ("program-desk", "client")),
            (None, "acme", ("program-acme", "client")),
        ):
            for user in ("program-desk", "program-other", "program-acme", "client"):
                execution_id = key_of(owner or "program-acme", new_id())
                claim = Claim.new(execution_id)
                await Executions(redis).claim(claim, "digest", tenant=tenant, owner=owner)
                await Executions(redis).release(claim)
                prefix = "bw.cancel." if user == "client" else subjects.cancels_by(user).removesuffix("*")
                answer = json.loads((await api.bus.request(f"{prefix}{execution_id}", b"", timeout=60)).data)
                assert answer["status"] == "cancelling"
                kept = await cancels_kept(redis, execution_id)
                assert [one.cancellation.name for one in kept] == ([user] if user in users else [])
                assert (answer["execution_id"] == execution_id) == (user in users)


async def test_no_program_cancels_a_job_whose_owner_redis_has_lost(start_api: Any, redis: Redis) -> None:
    async with start_api(f"{CONFIG}\nprograms: {{desk: {{agents: [writer]}}}}\n") as api:
        execution_id = key_of("program-desk", new_id())
        await redis.client.hset(Claim.new(execution_id).key, "checkpoint", "{}")
        subject = subjects.cancels_by("program-desk").removesuffix("*") + execution_id
        answer = json.loads((await api.bus.request(subject, b"", timeout=60)).data)
        assert answer["execution_id"] == key_of("program-desk", execution_id)


def test_who_asks_is_read_from_the_subject() -> None:
    assert _user_and_job("bw.cancel.a%2Fb") == ("client", "a/b")
    assert _user_and_job("bw.cancel-by.program-desk.j1") == ("program-desk", "j1")
    with pytest.raises(RequestError):
        _user_and_job("bw.cancel.%FF")


async def test_without_redis_nothing_is_cancelled_and_the_caller_knows(redis_away: HttpApi) -> None:
    job_id = await accepted(redis_away)
    answer = await redis_away.act(f"jobs/{job_id}/cancel")
    assert (answer.status, answer.code) == (503, "unavailable")


def requests_of(api: HttpApi, redis: Redis) -> CancelRequests:
    def connection() -> Client:
        return api.bus

    results = ResultReader(connection, lambda: 0)
    lookup = JobLookup(results, Waiters(connection, results), AcceptedJobs(redis))
    sending = Cancels(lookup, Executions(redis), Publisher(connection, "tests"), connection)
    config = f"{CONFIG}\nprograms: {{desk: {{agents: [writer]}}}}\n"
    return CancelRequests(sending, parse_config(config), Redactor.compile(RedactionRules()))


async def test_a_program_that_asks_without_end_neither_delays_others_nor_waits_without_end(
    api: HttpApi, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancels, "MAX_AT_ONCE", 3)
    requests, held, answers = requests_of(api, redis), asyncio.Event(), list[dict[str, Any]]()

    async def slowly(answer: bytes) -> None:
        answers.append(json.loads(answer))
        await held.wait()

    def at_once() -> tuple[asyncio.Future[bytes], Any]:
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def respond(answer: bytes) -> None:
            answered.set_result(answer)

        return answered, respond

    for _ in range(3):
        await requests.receive(subjects.cancel(new_id()), b"", slowly)
    await until(lambda: len(answers) == 3)
    refused, respond = at_once()
    await requests.receive(subjects.cancel(new_id()), b"", respond)
    assert json.loads(refused.result())["error"]["code"] == "too_many_requests"
    other, respond = at_once()
    await requests.receive(f"bw.cancel-by.program-desk.{new_id()}", b"", respond)
    assert json.loads(await asyncio.wait_for(other, 60))["status"] == "cancelling"
    held.set()
    await requests.stop()


async def test_orders_for_jobs_that_nobody_has_seen_are_bounded_for_each_user(
    api: HttpApi, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executions, "MAX_UNSEEN", 3)
    await redis.client.delete("bw:unseen-cancels:client")
    requests, unseen = requests_of(api, redis), [new_id() for _ in range(4)]

    async def ask(job_id: str, user: str = "") -> str:
        subject = f"bw.cancel-by.{user}.{job_id}" if user else subjects.cancel(job_id)
        answer = json.loads(await requests.response_to(subject, b""))
        return answer.get("status") or answer["error"]["code"]

    assert [await ask(job_id) for job_id in (*unseen, unseen[0])] == [
        *["cancelling"] * 3,
        "too_many_requests",
        "cancelling",
    ]
    known = await accepted(api)
    await until(lambda: is_marked(redis, known))
    assert await ask(known) == "cancelling", "what is known is not counted"
    assert await ask(new_id(), "program-desk") == "cancelling", "nor what others have asked"
    # A worker takes one of them, and ends it: its request is gone.
    claim = Claim.new(unseen[1])
    await Executions(redis).claim(claim)
    await Executions(redis).finish(claim)
    assert await ask(unseen[3]) == "cancelling"
    assert await ask(new_id()) == "too_many_requests"


async def is_marked(redis: Redis, job_id: str) -> bool:
    return await AcceptedJobs(redis).status(job_id, just_now=False) is not None
