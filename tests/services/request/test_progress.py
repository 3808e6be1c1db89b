"""A job followed live: what a reader is sent by when it joins, and what ends a stream."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import aiohttp
import nats.errors
import pytest
import redis.asyncio
from yarl import URL

from breakwater.identity.api_keys import create_key, revoke_key
from breakwater.jobs.contract.execution import Attempt, ErrorInfo, Progress
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.publisher import Publisher
from tests.helpers import FIRST, until
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, new_id, publish_result, result_of
from tests.services.request.test_metrics import REQUESTS, SECONDS, key, samples

JOB = {"agent": "writer", "prompt": "x"}
ROUTE = "/api/v1/jobs/{job_id}/progress"
NOW = datetime(2026, 11, 21, 10, 0, tzinfo=UTC)


@dataclass
class Follower:
    """A reader of one stream."""

    response: aiohttp.ClientResponse
    comments: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    async def next(self) -> tuple[str, Any] | None:
        """The next event, by its name and data; None at the end."""
        fields: dict[str, str] = {}
        while line := (await self.response.content.readline()).decode():
            name, _, value = line.rstrip("\n").partition(": ")
            if line == "\n" and fields:
                self.ids.append(int(fields["id"]))
                return fields["event"], json.loads(fields["data"])
            if line.startswith(":"):
                self.comments.append(line[2:].strip())
            elif line != "\n":
                fields[name] = value
        return None

    async def step(self) -> tuple[str, str | None, int | None]:
        """The next event, which is a step: its state, its event, its attempt."""
        event = await self.next()
        assert event is not None
        assert event[0] == "progress"
        return event[1]["state"], event[1]["event"], event[1]["attempt"]

    async def rest(self) -> list[tuple[str, Any]]:
        events: list[tuple[str, Any]] = []
        while (event := await self.next()) is not None:
            events.append(event)
        return events


@asynccontextmanager
async def following(api: HttpApi, job_id: str, path: str = "", **headers: str) -> AsyncGenerator[Follower]:
    url = URL(api.url + (path or f"/api/v1/jobs/{quote(job_id, safe='')}/progress"), encoded=True)
    timeout = aiohttp.ClientTimeout(total=120)
    async with api.http.get(url, timeout=timeout, headers=headers) as response:
        assert response.status == 200, await response.read()
        yield Follower(response)


def attempt_of(job_id: str, number: int, *, fails: bool = False) -> Attempt:
    error = ErrorInfo(kind="server", class_="ServerError", message="503", status_code=503, retryable=True)
    return Attempt(
        attempt_id=f"{job_id}:{number}",
        execution_id=job_id,
        job_id=job_id,
        agent="writer",
        number=number,
        model="m",
        provider="local",
        started_at=NOW,
        completed_at=NOW + timedelta(seconds=number),
        duration_ms=1000,
        outcome="error" if fails else "success",
        error=error if fails else None,
        cause="first" if number == 1 else "retry",
    )


async def record(api: HttpApi, attempt: Attempt) -> None:
    subject = subjects.attempt("writer", attempt.execution_id, attempt.number)
    await api.bus.jetstream(timeout=60).publish(subject, attempt.json_bytes(), headers=FIRST)


async def publish_step(api: HttpApi, job_id: str, state: str, **more: Any) -> None:
    fields = {"execution_id": job_id, "job_id": job_id, "agent": "writer", "state": state, "at": NOW, **more}
    await Publisher(lambda: api.bus, "tests").transient(
        subjects.progress("writer", job_id), Progress.model_validate(fields)
    )


async def submitted(api: HttpApi, job_id: str | None = None) -> str:
    answer = await api.post(JOB | {"job_id": job_id or new_id()})
    assert answer.status == 202
    return answer.json["job_id"]


async def test_who_joins_before_it_begins_receives_everything_in_its_order(api: HttpApi) -> None:
    job_id = await submitted(api)
    async with following(api, job_id) as reader:
        assert reader.response.headers["Content-Type"] == "text/event-stream"
        assert reader.response.headers["Cache-Control"] == "no-store"
        assert reader.response.headers["X-Accel-Buffering"] == "no"
        event = await reader.next()
        assert event is not None
        queued = Progress.model_validate(event[1])
        assert (queued.execution_id, queued.agent, queued.state) == (job_id, "writer", "queued")
        assert abs(datetime.now(UTC) - queued.at) < timedelta(hours=1)
        await publish_step(api, job_id, "dispatched")
        assert await reader.step() == ("dispatched", None, None)
        await publish_step(api, job_id, "in_progress", event="agent.attempt.start", attempt=1, model="m")
        assert await reader.step() == ("in_progress", "agent.attempt.start", 1)
        await record(api, attempt_of(job_id, 1))
        await publish_step(api, job_id, "in_progress", event="agent.attempt.finish", attempt=1, model="m")
        assert await reader.step() == ("in_progress", "agent.attempt.finish", 1)
        await publish_result(api.bus, result_of(job_id, "writer", "a secret answer"))
        await publish_step(api, job_id, "succeeded")
        assert await reader.step() == ("succeeded", None, None)
        decided = {"execution_id": job_id, "job_id": job_id, "status": "succeeded", "reason": None}
        assert await reader.rest() == [("decided", decided)]
        assert reader.ids == list(range(1, 7))


async def test_who_joins_in_the_middle_receives_what_is_recorded_and_then_what_happens_each_once(api: HttpApi) -> None:
    job_id = await submitted(api)
    await record(api, attempt_of(job_id, 1, fails=True))
    await record(api, attempt_of(job_id, 2, fails=True))
    async with following(api, job_id) as reader:
        queued = await reader.next()
        event = await reader.next()
        assert queued is not None
        assert event is not None
        failed = event[1]
        assert (queued[1]["state"], queued[1]["at"] <= failed["at"]) == ("queued", True)
        assert (failed["event"], failed["attempt"], failed["at"]) == (
            "agent.attempt.error",
            1,
            "2026-11-21T10:00:01.000Z",
        )
        assert (failed["error_class"], failed["error_type"], failed["status_code"]) == ("ServerError", "Server", 503)
        assert await reader.step() == ("in_progress", "agent.attempt.error", 2)
        # Heard late, and recorded already.
        await publish_step(api, job_id, "in_progress", event="agent.attempt.start", attempt=2)
        await publish_step(api, job_id, "in_progress", event="agent.attempt.error", attempt=2)
        await publish_step(api, job_id, "queued")
        for _ in range(2):
            await publish_step(api, job_id, "retried", event="llm_retry_attempt", attempt=2, delay_ms=5)
            await publish_step(api, job_id, "in_progress", event="agent.attempt.start", attempt=3)
        assert await reader.step() == ("retried", "llm_retry_attempt", 2)
        assert await reader.step() == ("in_progress", "agent.attempt.start", 3)
        await publish_result(api.bus, result_of(job_id, "writer"))
        await publish_step(api, job_id, "succeeded")
        assert await reader.step() == ("succeeded", None, None)


async def test_a_job_that_is_not_decided_is_shown_with_its_attempts_so_far(api: HttpApi) -> None:
    job_id = await submitted(api)
    shown = await api.ask("GET", f"/api/v1/jobs/{job_id}")
    assert (shown.status, shown.json["status"], shown.json["attempts"]) == (202, "accepted", [])
    await record(api, attempt_of(job_id, 1, fails=True))
    await record(api, attempt_of(job_id, 2, fails=True))
    shown = await api.ask("GET", f"/api/v1/jobs/{job_id}")
    assert [(one["number"], one["outcome"]) for one in shown.json["attempts"]] == [(1, "error"), (2, "error")]


async def test_who_joins_after_the_end_receives_what_was_and_how_it_ended(api: HttpApi) -> None:
    job_id = new_id()  # published to NATS: the API has never heard of it
    await record(api, attempt_of(job_id, 1))
    result = result_of(job_id, "writer").model_copy(update={"status": "dead_lettered", "reason": "timeout"})
    await publish_result(api.bus, result)
    async with following(api, job_id) as reader:
        assert await reader.step() == ("queued", None, None)
        assert await reader.step() == ("in_progress", "agent.attempt.finish", 1)
        decided = {"execution_id": job_id, "job_id": job_id, "status": "dead_lettered", "reason": "timeout"}
        assert await reader.rest() == [("decided", decided)]


async def test_attempts_and_a_decision_that_nobody_heard_of_are_looked_up(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.jobs.api.progress.LOOK_S", 0.05)
    job_id = await submitted(api)
    async with following(api, job_id) as reader:
        assert await reader.step() == ("queued", None, None)
        await record(api, attempt_of(job_id, 1, fails=True))
        assert await reader.step() == ("in_progress", "agent.attempt.error", 1)
        await record(api, attempt_of(job_id, 2))
        await publish_result(api.bus, result_of(job_id, "writer"))
        assert await reader.step() == ("in_progress", "agent.attempt.finish", 2)
        assert [event for event, _ in await reader.rest()] == ["decided"]


async def test_a_job_that_a_worker_has_is_reported_from_its_checkpoint(
    api: HttpApi, redis_server: RunningServer
) -> None:
    job_id = await submitted(api)
    checkpoint = {
        "dispatched_at": "2026-11-21T10:00:00.000Z",
        "in_flight": {"number": 1, "model": "m", "started_at": "2026-11-21T10:00:00.500Z"},
    }
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.hset(f"bw:execution:{job_id}", mapping={"owner": "1", "checkpoint": json.dumps(checkpoint)})
    async with following(api, job_id) as reader:
        assert await reader.step() == ("queued", None, None)
        assert await reader.step() == ("dispatched", None, None)
        event = await reader.next()
        assert event is not None
        assert (event[1]["event"], event[1]["attempt"], event[1]["model"]) == ("agent.attempt.start", 1, "m")
        assert event[1]["at"] == "2026-11-21T10:00:00.500Z"
    later = datetime.now(UTC) + timedelta(hours=1)
    waiting = {"dispatched_at": "2026-11-21T10:00:00.000Z", "resume_at": later.isoformat()}
    await client.hset(f"bw:execution:{job_id}", "checkpoint", json.dumps(waiting))
    await record(api, attempt_of(job_id, 1, fails=True))
    async with following(api, job_id) as reader:
        assert await reader.step() == ("queued", None, None)
        assert await reader.step() == ("in_progress", "agent.attempt.error", 1)
        event = await reader.next()
        assert event is not None
        assert event[1]["state"] == "waiting"
        assert 0 < event[1]["delay_ms"] <= 3_600_000
    await client.aclose()


async def test_a_job_that_came_over_nats_and_has_no_attempt_yet_is_followed_all_the_same(
    api: HttpApi, redis_server: RunningServer
) -> None:
    job_id = new_id()
    client = redis.asyncio.Redis.from_url(redis_server.url)
    await client.hset(f"bw:execution:{job_id}", "owner", "1")
    await client.aclose()
    async with following(api, job_id) as reader:
        await publish_step(api, job_id, "in_progress", event="agent.attempt.start", attempt=1)
        assert await reader.step() == ("in_progress", "agent.attempt.start", 1)


async def test_the_last_step_waits_for_those_that_were_not_received(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.jobs.api.progress.LOOK_S", 60)
    job_id = await submitted(api)
    async with following(api, job_id) as reader:
        assert await reader.step() == ("queued", None, None)
        await record(api, attempt_of(job_id, 1))
        await publish_result(api.bus, result_of(job_id, "writer"))
        await publish_step(api, job_id, "succeeded")
        assert await reader.step() == ("in_progress", "agent.attempt.finish", 1)
        assert await reader.step() == ("succeeded", None, None)
        assert [event for event, _ in await reader.rest()] == ["decided"]


async def test_an_unknown_job_is_not_found(api: HttpApi) -> None:
    for job_id in ("nobody-knows-it", "a%00b", ""):
        answer = await api.ask("GET", f"/api/v1/jobs/{job_id}/progress")
        assert (answer.status, answer.code) == (404, "unknown_job")
    assert (await api.ask("POST", "/api/v1/jobs/x/progress")).status == 405


async def test_ids_with_slashes_are_followed_and_a_job_that_is_called_progress_is_still_shown(api: HttpApi) -> None:
    unique = new_id()
    for job_id in (f"a/b {unique}", f"{unique}/progress", f"{unique}/progress/progress", "progress"):
        await submitted(api, job_id)
        async with following(api, job_id) as reader:
            event = await reader.next()
            assert event is not None
            assert (event[1]["execution_id"], event[1]["state"]) == (job_id, "queued")
        shown = await api.ask("GET", f"/api/v1/jobs/{quote(job_id, safe='')}")
        assert (shown.status, shown.json["job_id"]) == (202, job_id)
    # Unescaped, the last name is what is asked for and all before it is the job.
    async with following(api, "", f"/api/v1/jobs/{unique}/progress/progress") as reader:
        event = await reader.next()
        assert event is not None
        assert event[1]["execution_id"] == f"{unique}/progress"
    async with following(api, "", f"/api/v1/jobs/{unique}%2Fprogress/%70rogress") as reader:
        event = await reader.next()
        assert event is not None
        assert event[1]["execution_id"] == f"{unique}/progress"


async def test_an_encoded_slash_does_not_open_an_answer_to_a_key_that_may_see_progress_only(api: HttpApi) -> None:
    job_id = f"{new_id()}/progress"
    await publish_result(api.bus, result_of(job_id, "writer", "a secret answer"))
    header = {"Authorization": f"Bearer {create_key(api.settings.api_keys_file, 'reader', scopes=('read',))}"}
    shown = await api.ask("GET", f"/api/v1/jobs/{quote(job_id, safe='')}", headers=header)
    assert (shown.status, shown.code) == (403, "forbidden")
    followed = await api.ask("GET", f"/api/v1/jobs/{quote(job_id, safe='')}/progress", headers=header)
    assert followed.status == 200
    assert b"a secret answer" not in followed.body


async def test_a_stream_ends_once_its_key_is_revoked_and_those_of_other_keys_go_on(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.identity.event_stream.KEY_LOOK_S", 0.05)
    revoked = create_key(api.settings.api_keys_file, "leaving", scopes=("read",))
    job_id = await submitted(api)
    async with following(api, job_id) as stays, following(api, job_id, Authorization=f"Bearer {revoked}") as reader:
        assert await stays.step() == await reader.step() == ("queued", None, None)
        revoke_key(api.settings.api_keys_file, revoked.split("_")[1])
        async with asyncio.timeout(60):
            assert await reader.rest() == []
        assert reader.comments[-1] == "this API key was revoked"
        await publish_step(api, job_id, "dispatched")
        assert await stays.step() == ("dispatched", None, None)


async def test_a_stream_ends_once_its_key_may_not_see_progress_any_more(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.identity.event_stream.KEY_LOOK_S", 0.05)
    path = api.settings.api_keys_file
    narrowed = create_key(path, "narrowed", scopes=("read",))
    job_id = await submitted(api)
    async with following(api, job_id, Authorization=f"Bearer {narrowed}") as reader:
        assert await reader.step() == ("queued", None, None)
        document = json.loads(path.read_text())
        document["keys"][-1]["scopes"] = ["operate"]
        path.write_text(json.dumps(document))
        async with asyncio.timeout(60):
            assert await reader.rest() == []
        assert reader.comments[-1] == "this API key no longer has access to this"


async def test_head_answers_at_once(api: HttpApi) -> None:
    answer = await api.ask("HEAD", f"/api/v1/jobs/{await submitted(api)}/progress")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")


async def test_there_are_so_many_streams_and_who_leaves_makes_room(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.identity.event_stream.MAX_STREAMS", 2)
    job_id = await submitted(api)
    path = f"/api/v1/jobs/{job_id}/progress"
    async with following(api, job_id) as first, following(api, job_id):
        assert await first.step() == ("queued", None, None)
        refused = await api.ask("GET", path)
        assert (refused.status, refused.code) == (503, "too_many_streams")
        assert int(refused.headers["Retry-After"]) > 0
        assert (await api.ask("GET", f"/api/v1/jobs/{job_id}")).status == 202
        first.response.close()

        async def room() -> bool:
            async with api.http.get(api.url + path) as response:
                return response.status == 200

        await until(room)


async def test_one_key_leaves_streams_to_others(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakwater.identity.event_stream.MAX_OF_A_KEY", 2)
    other = create_key(api.settings.api_keys_file, "other")
    job_id = await submitted(api)
    path = f"/api/v1/jobs/{job_id}/progress"
    async with following(api, job_id) as first, following(api, job_id) as second:
        assert await first.step() == await second.step() == ("queued", None, None)
        refused = await api.ask("GET", path)
        assert (refused.status, refused.code) == (429, "too_many_streams")
        async with following(api, job_id, Authorization=f"Bearer {other}") as reader:
            assert await reader.step() == ("queued", None, None)


async def test_a_client_that_goes_away_ends_its_subscription(api: HttpApi) -> None:
    job_id = await submitted(api)

    async def subscribed() -> bool:
        return await _listeners(api, job_id) > 0

    async def forgotten() -> bool:
        return await _listeners(api, job_id) == 0

    async with following(api, job_id) as reader:
        assert await reader.step() == ("queued", None, None)
        assert await subscribed()
    await until(forgotten)


async def _listeners(api: HttpApi, job_id: str) -> int:
    """Whether anybody hears the job's progress: the server answers a request without a subscriber."""
    try:
        await api.bus.request(subjects.progress("writer", job_id), b"{}", timeout=0.2)
    except nats.errors.NoRespondersError:
        return 0
    except TimeoutError:
        return 1
    raise AssertionError("nobody answers progress")


@pytest.mark.usefixtures("own_nats_server")
@pytest.mark.parametrize("drain_s", [600])
async def test_a_stopping_service_ends_streams_at_once_and_says_why(api: HttpApi) -> None:
    job_id = await submitted(api)
    async with following(api, job_id) as reader:
        assert await reader.step() == ("queued", None, None)
        stopping = asyncio.create_task(api.stop())
        assert await reader.rest() == []
        assert "the service stops; connect again" in reader.comments
    async with asyncio.timeout(120):
        await stopping


async def test_a_lost_connection_ends_no_stream(api: HttpApi, own_nats_server: RunningServer) -> None:
    job_id = await submitted(api)
    async with following(api, job_id) as reader:
        assert await reader.step() == ("queued", None, None)
        own_nats_server.kill()
        await own_nats_server.restart_async()

        async def back() -> bool:
            return api.bus.is_connected

        await until(back)
        # The tests are back long before the API's connection, which tries once a second: this is not heard.
        await record(api, attempt_of(job_id, 1, fails=True))
        assert await reader.step() == ("in_progress", "agent.attempt.error", 1)

        async def heard_again() -> bool:
            return await _listeners(api, job_id) > 0

        await until(heard_again)
        await publish_step(api, job_id, "in_progress", event="agent.attempt.start", attempt=2)
        assert await reader.step() == ("in_progress", "agent.attempt.start", 2)
        await publish_result(api.bus, result_of(job_id, "writer"))
        await publish_step(api, job_id, "succeeded")
        assert [event for event, _ in await reader.rest()] == ["progress", "decided"]


async def test_a_stream_that_is_silent_is_kept_alive(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakwater.identity.event_stream.KEEP_ALIVE_S", 0.05)
    job_id = await submitted(api)
    async with following(api, job_id) as reader:
        reading = asyncio.create_task(reader.rest())

        async def commented() -> bool:
            return reader.comments.count("still here") >= 3

        await until(commented)
        await publish_result(api.bus, result_of(job_id, "writer"))
        await publish_step(api, job_id, "succeeded")
        assert [event for event, _ in await reading][-1] == "decided"


async def test_a_reader_that_is_too_slow_is_asked_to_connect_again(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.jobs.api.progress.MAX_UNSENT", 3)
    job_id = await submitted(api)
    async with following(api, job_id) as reader:
        assert await reader.step() == ("queued", None, None)
        # It reads nothing, until all buffers on the way are full and the API can send no more.
        detail = "x" * 100_000
        received = 0

        async def forgotten() -> bool:
            nonlocal received
            for _ in range(20):
                await publish_step(api, job_id, "waiting", detail=detail)
            received += 20
            return await _listeners(api, job_id) == 0

        await until(forgotten)
        with suppress(aiohttp.ClientPayloadError):
            assert len(await reader.rest()) < received
    async with following(api, job_id) as again:
        assert await again.step() == ("queued", None, None)


async def test_what_is_no_progress_is_passed_over(api: HttpApi) -> None:
    job_id = await submitted(api)
    async with following(api, job_id) as reader:
        assert await reader.step() == ("queued", None, None)
        await api.bus.publish(subjects.progress("writer", job_id), b'{"output": "x"}')
        await publish_step(api, job_id, "dispatched")
        assert await reader.step() == ("dispatched", None, None)


async def test_a_stream_is_counted_when_it_begins_and_its_length_is_no_latency(api: HttpApi) -> None:
    job_id = await submitted(api)
    before = await samples(api)
    counted = key(REQUESTS, route=ROUTE, method="GET", status="200")
    async with following(api, job_id) as reader:
        assert await reader.step() == ("queued", None, None)
        during = await samples(api)
        assert during[counted] - before.get(counted, 0) == 1
        await publish_result(api.bus, result_of(job_id, "writer"))
        await publish_step(api, job_id, "succeeded")
        await reader.rest()
    after = await samples(api)
    seconds = key(SECONDS, route=ROUTE, method="GET")
    total = key(SECONDS.replace("_count", "_sum"), route=ROUTE, method="GET")
    assert after[counted] == during[counted]
    assert (after[seconds], after[total]) == (during[seconds], during[total])
    shown = key(REQUESTS, route="/api/v1/jobs/{job_id}", method="GET", status="404")
    await api.ask("GET", f"/api/v1/jobs/{new_id()}%2Fprogress")
    assert (await samples(api)).get(shown, 0) - before.get(shown, 0) == 1


async def test_without_nats_no_stream_begins(api: HttpApi, own_nats_server: RunningServer) -> None:
    job_id = await submitted(api)
    own_nats_server.kill()

    async def refused() -> bool:
        answer = await api.ask("GET", f"/api/v1/jobs/{job_id}/progress")
        return answer.status == 503 and answer.code == "unavailable"

    await until(refused)


async def test_without_redis_what_is_not_known_is_not_claimed(redis_away: HttpApi) -> None:
    answer = await redis_away.ask("GET", f"/api/v1/jobs/{new_id()}/progress")
    assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "unavailable", "1")
    job_id = await submitted(redis_away)
    async with following(redis_away, job_id) as reader:
        assert await reader.step() == ("queued", None, None)
