"""Servers that go away, and come back."""

import asyncio
import json
import time
from pathlib import Path

import pytest
import structlog.testing

from breakwater.config import parse_config
from breakwater.services.request.app import build
from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.request.conftest import (
    CONFIG,
    HttpApi,
    lose_nats,
    new_api,
    new_id,
    publish_result,
    result_of,
    settings_for,
    until_ready,
)

JOB = {"agent": "writer", "prompt": "x"}


async def test_without_nats_nothing_is_accepted_and_with_it_everything_is_again(
    api: HttpApi, own_nats_server: RunningServer
) -> None:
    await lose_nats(api, own_nats_server)
    took: list[float] = []
    with structlog.testing.capture_logs() as logs:
        answer = await api.post(JOB)
        for _ in range(3):  # what a busy machine adds to one of them is not the API's
            begun = time.monotonic()
            answer = await api.post(JOB)
            took.append(time.monotonic() - begun)
    assert [line["event"] for line in logs if line.get("what") == "accepting jobs"] == ["unavailable"]
    assert min(took) < 1, took
    assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "unavailable", "1")
    shown = await api.ask("GET", "/api/v1/jobs/x")
    assert (shown.status, shown.code) == (503, "unavailable")
    assert (await api.ask("GET", "/healthz")).status == 200
    await own_nats_server.restart_async()
    await until_ready(api)
    assert (await api.post(JOB)).status == 202


async def test_stored_responses_cannot_be_read_without_nats_and_none_is_created(
    api: HttpApi, own_nats_server: RunningServer
) -> None:
    await lose_nats(api, own_nats_server)
    response = "/v1/responses/resp_x"
    ask = {"model": "writer", "input": "x"}
    for method, path, body in (
        ("GET", response, None),
        ("GET", f"{response}?stream=true", None),
        ("GET", f"{response}/input_items", None),
        ("POST", f"{response}/cancel", None),
        ("DELETE", response, None),
        ("POST", "/v1/responses", {**ask, "background": True}),
        ("POST", "/v1/responses", {**ask, "background": True, "stream": True}),
        ("POST", "/v1/responses", {**ask, "previous_response_id": "resp_x"}),
    ):
        answer = await api.ask(method, path, data=b"" if body is None else json.dumps(body).encode())
        assert (answer.status, answer.json["error"]["code"]) == (503, "unavailable"), (method, path, body)


async def test_a_job_that_is_under_way_when_nats_dies_is_accepted_for_sure_or_refused(
    api: HttpApi, own_nats_server: RunningServer
) -> None:
    job_ids = [new_id() for _ in range(200)]
    posting = [asyncio.create_task(api.post(JOB | {"job_id": job_id})) for job_id in job_ids]
    await asyncio.wait(posting, return_when=asyncio.FIRST_COMPLETED)
    own_nats_server.kill()
    answers = await asyncio.gather(*posting)
    assert {answer.status for answer in answers} <= {202, 503}
    accepted = sum(answer.status == 202 for answer in answers)
    assert accepted > 0
    await own_nats_server.restart_async()
    await until_ready(api)
    assert await api.queued() >= accepted


async def test_a_result_that_came_while_the_connection_was_lost_still_reaches_who_waits(
    api: HttpApi, own_nats_server: RunningServer
) -> None:
    job_id = new_id()
    waiting = asyncio.create_task(api.post(JOB | {"job_id": job_id}, query="?wait_s=120"))

    async def queued() -> bool:
        return await api.queued() == 1

    await until(queued)
    own_nats_server.kill()
    await own_nats_server.restart_async()

    async def back() -> bool:
        return api.bus.is_connected

    # The publisher is back long before the API's connection, which tries once a second: the news is missed.
    await until(back)
    await publish_result(api.bus, result_of(job_id, "writer"))
    answer = await waiting
    assert (answer.status, answer.json["job_id"]) == (200, job_id)


async def test_a_full_queue_refuses_and_says_so(api: HttpApi) -> None:
    jetstream = api.bus.jetstream()
    config = (await jetstream.stream_info("JOBS")).config
    await jetstream.update_stream(config.evolve(max_msgs=1))
    assert (await api.post(JOB)).status == 202
    answer = await api.post(JOB)
    assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "refused", "1")
    assert "maximum messages exceeded" in answer.message


async def test_a_service_that_starts_before_nats_answers_and_accepts_once_it_is_there(
    own_nats_server: RunningServer, redis_server: RunningServer, tmp_path: Path
) -> None:
    async with new_api(own_nats_server.url, redis_server.url, tmp_path, CONFIG) as first:
        await first.stop()
        own_nats_server.kill()
        service = build(first.settings, parse_config(CONFIG))
        serving = asyncio.create_task(service.run())

        async def answers() -> bool:
            try:
                return (await first.post(JOB)).status == 503
            except OSError:
                return False

        await until(answers)
        await own_nats_server.restart_async()
        await until_ready(first)
        assert (await first.post(JOB)).status == 202
        service.stop()
        await serving


async def test_without_redis_jobs_are_accepted_and_what_is_not_known_is_not_claimed(
    own_nats_server: RunningServer, own_redis_server: RunningServer, tmp_path: Path
) -> None:
    with structlog.testing.capture_logs() as logs:
        async with new_api(own_nats_server.url, own_redis_server.url, tmp_path, CONFIG) as api:
            own_redis_server.kill()
            job_ids = [(await api.post(JOB)).json["job_id"] for _ in range(3)]
            assert (await api.ask("GET", f"/api/v1/jobs/{job_ids[0]}")).status == 202
            unknown = await api.ask("GET", f"/api/v1/jobs/{new_id()}")
            assert (unknown.status, unknown.code) == (503, "unavailable")

            async def reported() -> bool:
                return any(log["event"] == "unavailable" and log["what"] == "redis" for log in logs)

            await until(reported)
            await own_redis_server.restart_async()

            async def known_again() -> bool:
                return any(log["event"] == "available_again" for log in logs)

            await until(known_again)
            assert (await api.ask("GET", f"/api/v1/jobs/{new_id()}")).status == 404
    assert [log["event"] for log in logs if log.get("what") == "redis"] == ["unavailable", "available_again"]


async def test_an_address_that_can_be_no_server_ends_the_service(redis_server: RunningServer, tmp_path: Path) -> None:
    settings = settings_for("nats://127.0.0.1:notaport", redis_server.url, tmp_path)
    with pytest.raises(Exception, match="BREAKWATER_NATS_URL: an address of the URL"):
        await asyncio.wait_for(build(settings, parse_config(CONFIG)).run(), 60)
