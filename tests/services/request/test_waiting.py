"""Waiting for results, asking for them later, and submitting the same job again."""

import asyncio
import json
import time

import aiohttp
import nats
import pytest
import redis.asyncio

from breakwater.jobs.api.results import ResultReader, Waiters
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Execution
from breakwater.jobs.store.accepted import recent_keys
from breakwater.kernel.commands.connect import flush_subscriptions
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import BusUnavailableError
from tests.helpers import FIRST, until
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, answer_jobs, new_id, publish_result, result_of

JOB = {"agent": "writer", "prompt": "x"}


async def test_who_waits_gets_the_result_byte_for_byte(api: HttpApi) -> None:
    await answer_jobs(api.bus)
    answer = await api.post(JOB, query="?wait_s=60")
    assert answer.status == 200
    published = await api.bus.jetstream().get_last_msg("RESULTS", subjects.result(answer.json["job_id"]))
    assert answer.body == published.data
    assert answer.json["output"] == "answer to x"


async def test_only_results_that_somebody_waits_for_are_delivered(api: HttpApi) -> None:
    assert api.bus.connected_url is not None
    client = await nats.connect(api.bus.connected_url.geturl())
    own = new_id()
    try:
        results = ResultReader(lambda: client, lambda: 0)
        with Waiters(lambda: client, results).listen(own) as awaited:
            await flush_subscriptions(client)
            for job_id in (new_id(), own):
                await publish_result(api.bus, result_of(job_id, "writer", "x"))
            assert own in (await asyncio.wait_for(awaited.decided, 60) or b"").decode()
        await flush_subscriptions(client)
        await publish_result(api.bus, result_of(new_id(), "writer", "x"))
        await client.flush()
        assert client.stats["in_msgs"] == 1
    finally:
        await client.close()


async def test_who_waits_in_vain_gets_the_answer_that_the_job_is_accepted(api: HttpApi) -> None:
    async with asyncio.timeout(60):
        answer = await api.post(JOB, query="?wait_s=0.2")
    assert (answer.status, answer.json["status"]) == (202, "accepted")


async def test_a_job_that_was_decided_long_ago_is_answered_at_once(api: HttpApi) -> None:
    job_id = new_id()
    await publish_result(api.bus, result_of(job_id, "writer", "from before"))
    begun = time.monotonic()
    answer = await api.post(JOB | {"job_id": job_id}, query="?wait_s=60")
    assert (answer.status, answer.json["output"]) == (200, "from before")
    assert time.monotonic() - begun < 30


async def test_the_result_of_another_job_on_its_subject_is_no_answer(api: HttpApi) -> None:
    job_id = new_id()
    accepted = await api.post(JOB | {"job_id": job_id})
    assert accepted.status == 202
    other = result_of(new_id(), "writer", "of somebody else").json_bytes()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(api.post(JOB | {"job_id": job_id}, query="?wait_s=3"))
        for _ in range(10):
            await api.bus.jetstream().publish(subjects.result(job_id), other)
            await asyncio.sleep(0.1)
    assert (waiting.result().status, waiting.result().json["status"]) == (202, "accepted")
    assert (await api.ask("GET", f"/api/v1/jobs/{job_id}")).status == 202


async def test_fifty_submissions_of_one_job_are_one_job_and_fifty_equal_answers(api: HttpApi) -> None:
    await answer_jobs(api.bus, delay_s=0.2)
    job = JOB | {"job_id": new_id()}
    answers = await asyncio.gather(*(api.post(job, query="?wait_s=60") for _ in range(50)))
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert await api.queued() == 1


async def test_fifty_submissions_that_do_not_wait_are_one_accepted_job_and_49_duplicates(api: HttpApi) -> None:
    job = JOB | {"job_id": new_id()}
    answers = await asyncio.gather(*(api.post(job) for _ in range(50)))
    assert {answer.status for answer in answers} == {202}
    assert [answer.json["duplicate"] for answer in answers].count(False) == 1
    assert await api.queued() == 1


async def test_another_body_under_the_same_id_is_refused_whether_the_first_is_decided_or_not(api: HttpApi) -> None:
    job_id = new_id()
    assert (await api.post({"agent": "writer", "prompt": "zero", "job_id": f"{job_id}-0"})).status == 202
    for query in ("", "?wait_s=60"):
        refused = await api.post({"agent": "writer", "prompt": "two", "job_id": f"{job_id}-0"}, query=query)
        assert (refused.status, refused.code) == (409, "id_conflict")
    await answer_jobs(api.bus)
    job_id = new_id()
    first = await api.post({"agent": "writer", "prompt": "one", "job_id": job_id}, query="?wait_s=60")
    second = await api.post({"agent": "writer", "prompt": "two", "job_id": job_id}, query="?wait_s=60")
    assert first.json["output"] == "answer to one"
    assert (second.status, second.code) == (409, "id_conflict")
    same = await api.post(b'{"job_id": "%s", "prompt":"one","agent":"writer"}' % job_id.encode(), query="?wait_s=60")
    assert (same.status, same.body) == (200, first.body)


async def test_an_id_that_belongs_to_another_agent_is_refused_and_its_answer_kept_from_the_asker(api: HttpApi) -> None:
    await answer_jobs(api.bus)
    job_id = new_id()
    await api.post({"agent": "writer", "prompt": "one", "job_id": job_id}, query="?wait_s=60")
    refused = await api.post({"agent": "reader", "prompt": "two", "job_id": job_id}, query="?wait_s=60")
    assert (refused.status, refused.code) == (409, "id_conflict")
    assert b"answer to" not in refused.body


async def test_another_body_is_refused_at_once_also_when_jetstream_has_forgotten_the_id(api: HttpApi) -> None:
    async def queue_forgets() -> None:
        jetstream = api.bus.jetstream()
        queue = (await jetstream.stream_info("JOBS")).config
        await jetstream.delete_stream("JOBS")
        await jetstream.add_stream(queue)

    waits, decided = new_id(), new_id()
    await api.post({"agent": "writer", "prompt": "one", "job_id": waits})
    await answer_jobs(api.bus)
    await api.post({"agent": "writer", "prompt": "one", "job_id": decided}, query="?wait_s=60")
    for job_id in (waits, decided):
        for other in ({"agent": "writer", "prompt": "two"}, {"agent": "reader", "prompt": "one"}):
            await queue_forgets()
            refused = await api.post({**other, "job_id": job_id})
            assert (refused.status, refused.code, await api.queued()) == (409, "id_conflict", 0)
        same = await api.post({"agent": "writer", "prompt": "one", "job_id": job_id})
        assert (same.status, await api.queued()) == (202, 1)


@pytest.mark.parametrize("reconnects", [0, 1])
async def test_a_result_that_nobody_heard_of_is_looked_up(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch, reconnects: int
) -> None:
    monkeypatch.setattr("breakwater.jobs.api.results.CHECK_S", 0.02)
    monkeypatch.setattr("breakwater.jobs.api.results.MIN_POLL_S", 60 if reconnects else 0.02)
    count = iter([0])
    results = ResultReader(lambda: api.bus, lambda: next(count, reconnects))
    result = result_of(new_id(), "writer")
    await publish_result(api.bus, result)
    with Waiters(lambda: api.bus, results).listen(result.job_id) as awaited:
        assert await asyncio.wait_for(awaited.decided, 60) == result.json_bytes()


@pytest.mark.usefixtures("own_nats_server")
async def test_a_client_that_leaves_is_waited_for_no_longer(api: HttpApi) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3), api.http.post(f"{api.url}/api/v1/jobs?wait_s=200", json=JOB):
            pass
    async with asyncio.timeout(30):  # the drain waits for up to a minute while somebody waits
        await api.stop()


async def leave_and_stop(api: HttpApi, writer: asyncio.StreamWriter) -> None:
    """Closes a client's connection once its job is accepted, and stops the service, which then waits for nobody."""

    async def accepted() -> bool:
        return await api.queued() > 0

    await until(accepted)
    writer.close()
    async with asyncio.timeout(30):
        await api.stop()


@pytest.mark.usefixtures("own_nats_server")
async def test_a_client_that_leaves_after_it_has_sent_two_requests_at_once_is_waited_for_no_longer(
    api: HttpApi,
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", api.settings.http_port)
    body = json.dumps(JOB).encode()
    head = f"Host: plane\r\nAuthorization: {api.http.headers['Authorization']}\r\nContent-Length: {len(body)}"
    writer.write(2 * (f"POST /api/v1/jobs?wait_s=200 HTTP/1.1\r\n{head}\r\n\r\n".encode() + body))
    await leave_and_stop(api, writer)


@pytest.mark.usefixtures("own_nats_server")
async def test_a_client_that_leaves_after_a_large_body_is_waited_for_no_longer(api: HttpApi) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", api.settings.http_port)
    body = json.dumps(JOB | {"prompt": "x" * 100_000}).encode()
    head = f"Host: plane\r\nAuthorization: {api.http.headers['Authorization']}\r\nContent-Length: {len(body)}"
    writer.write(f"POST /api/v1/jobs?wait_s=200 HTTP/1.1\r\n{head}\r\n\r\n".encode())
    await asyncio.sleep(0.3)  # the server waits for the body, which then is there at once
    writer.write(body)
    await leave_and_stop(api, writer)


@pytest.mark.usefixtures("own_nats_server")
@pytest.mark.parametrize("drain_s", [1])
async def test_a_stopping_service_answers_who_still_waits_that_the_job_is_accepted(api: HttpApi) -> None:
    waiting = asyncio.create_task(api.post(JOB, query="?wait_s=200"))

    async def queued() -> bool:
        return await api.queued() == 1

    await until(queued)
    await api.stop()
    answer = await waiting
    assert (answer.status, answer.json["status"]) == (202, "accepted")
    with pytest.raises(aiohttp.ClientConnectionError):
        await api.post(JOB)


@pytest.mark.usefixtures("own_nats_server")
async def test_a_stopping_service_lets_a_result_arrive(api: HttpApi) -> None:
    job_id = new_id()
    waiting = asyncio.create_task(api.post(JOB | {"job_id": job_id}, query="?wait_s=200"))

    async def queued() -> bool:
        return await api.queued() == 1

    async def closed() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", api.settings.http_port)
        except ConnectionError:  # refused, or reset where it was about to be accepted
            return True
        writer.close()
        return False

    await until(queued)
    stopping = asyncio.create_task(api.stop())
    await until(closed)
    await publish_result(api.bus, result_of(job_id, "writer"))
    await stopping
    assert (await waiting).status == 200


async def test_a_job_is_shown_as_accepted_and_then_with_its_result(api: HttpApi) -> None:
    job_id = (await api.post(JOB)).json["job_id"]
    shown = await api.ask("GET", f"/api/v1/jobs/{job_id}")
    undecided = {"job_id": job_id, "execution_id": job_id, "status": "accepted", "attempts": []}
    assert (shown.status, shown.json) == (202, undecided)
    result = result_of(job_id, "writer")
    await publish_result(api.bus, result)
    shown = await api.ask("GET", f"/api/v1/jobs/{job_id}")
    assert (shown.status, shown.body) == (200, result.json_bytes())


async def test_who_asks_for_an_accepted_job_can_wait_for_its_result(api: HttpApi) -> None:
    job_id = (await api.post(JOB)).json["job_id"]
    path = f"/api/v1/jobs/{job_id}"
    shown = await api.ask("GET", f"{path}?wait_s=0.1")
    assert (shown.status, shown.json["status"]) == (202, "accepted")
    begun = time.monotonic()
    waiting = asyncio.create_task(api.ask("GET", f"{path}?wait_s=60"))
    await asyncio.wait([waiting], timeout=0.2)
    assert not waiting.done()
    result = result_of(job_id, "writer")
    await publish_result(api.bus, result)
    assert ((await waiting).status, waiting.result().body) == (200, result.json_bytes())
    assert (await api.ask("GET", f"{path}?wait_s=60")).status == 200
    assert time.monotonic() - begun < 30
    assert (await api.ask("GET", f"{path}?wait=60")).paths == ["wait"]
    assert (await api.ask("GET", f"/api/v1/jobs/{new_id()}?wait_s=60")).status == 404


async def test_a_job_is_shown_by_the_address_that_was_given_whatever_its_id_is(api: HttpApi) -> None:
    accepted = await api.post(JOB | {"job_id": f"a/b ?#%41.é{new_id()}"})
    shown = await api.ask("GET", accepted.headers["Location"])
    assert (shown.status, shown.json["job_id"]) == (202, accepted.json["job_id"])


async def test_a_job_whose_result_has_aged_out_is_shown_from_its_record(api: HttpApi) -> None:
    result = result_of(new_id(), "writer", "from the record")
    record = Execution.model_validate(result.model_dump())
    await api.bus.jetstream().publish(subjects.execution("writer", result.job_id), record.json_bytes(), headers=FIRST)
    shown = await api.ask("GET", f"/api/v1/jobs/{result.job_id}")
    assert (shown.status, shown.json["job_id"], shown.json["output"]) == (200, result.job_id, "from the record")


async def test_a_job_that_a_worker_has_is_known_however_it_came(api: HttpApi, redis_server: RunningServer) -> None:
    job_id = new_id()
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.hset(f"bw:execution:{job_id}", "owner", "1")
    await client.aclose()
    assert (await api.ask("GET", f"/api/v1/jobs/{job_id}")).status == 202


async def test_an_accepted_job_is_known_to_every_other_process_too(api: HttpApi, redis_server: RunningServer) -> None:
    job_id = (await api.post(JOB)).json["job_id"]
    client = redis.asyncio.Redis.from_url(redis_server.url)

    async def saved() -> bool:
        sets = [key for key in recent_keys(time.time()) if await client.hexists(key, job_id)]
        return [await client.ttl(key) > 24 * 3600 for key in sets] == [True]

    await until(saved)
    await client.aclose()


async def test_an_unknown_job_is_not_found(api: HttpApi) -> None:
    shown = await api.ask("GET", "/api/v1/jobs/nobody-knows-it")
    assert (shown.status, shown.code) == (404, "unknown_job")


async def test_a_refusal_is_answered_without_its_figures_while_these_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, api: HttpApi
) -> None:
    async def unread(*_: object) -> list[Attempt]:
        raise BusUnavailableError("no response")

    monkeypatch.setattr(ResultReader, "attempts", unread)
    job_id = new_id()
    error = ErrorInfo(kind="budget_exceeded", class_="BudgetExceededError", message="no room")
    ended = result_of(job_id, "writer")
    attempt = Attempt(
        attempt_id=f"{job_id}:1",
        execution_id=job_id,
        job_id=job_id,
        agent="writer",
        number=1,
        model="sim/m",
        provider="sim",
        started_at=ended.queued_at,
        completed_at=ended.completed_at,
        duration_ms=0,
        outcome="short_circuited",
        short_circuited=True,
        error=error,
        cause="first",
    )
    refused = {"status": "dead_lettered", "reason": "budget_exceeded", "error": error, "attempts": (attempt,)}
    await publish_result(api.bus, ended.model_copy(update=refused))
    for answer in (
        await api.post(JOB | {"job_id": job_id}, query="?wait_s=60"),
        await api.ask("GET", f"/api/v1/jobs/{job_id}"),
    ):
        assert (answer.status, answer.json["error"]["message"]) == (200, "no room")
