"""What waits on the bus, over HTTP."""

import asyncio
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from breakwater.jobs.api.queues import REUSE_S, QueueRoutes
from breakwater.kernel.http.contract import Queues
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.topology import worker_consumer
from tests.helpers import until
from tests.server_sources import RunningServer
from tests.services.request.conftest import ODD_AGENT, Answer, HttpApi


async def put(bus: Client, subject: str, times: int) -> None:
    for number in range(times):
        await bus.jetstream().publish(subject, b"{}", headers={"Nats-Msg-Id": f"{subject}/{number}"})


async def take(bus: Client, stream: str, durable: str, times: int) -> None:
    """Takes messages and keeps them, as one who is at work on them."""
    subscription = await bus.jetstream().pull_subscribe_bind(durable, stream)
    assert len(await subscription.fetch(times, timeout=60)) == times


async def queues_when(api: HttpApi, condition: Any) -> Any:
    """What waits, once it is as it should be: answers are up to a second old."""
    answers: list[Answer] = []

    async def so() -> bool:
        answers.append(await api.ask("GET", "/api/v1/queues"))
        return answers[-1].status == 200 and condition(answers[-1].json)

    await until(so)
    return answers[-1].json


async def test_every_agent_is_reported_with_the_jobs_that_wait_and_those_in_work(api: HttpApi) -> None:
    await put(api.bus, subjects.job("writer"), 5)
    await put(api.bus, subjects.job(ODD_AGENT), 2)
    await take(api.bus, "JOBS", worker_consumer("writer"), 3)
    reported = await queues_when(api, lambda queues: sum(one["in_progress"] for one in queues["agents"]) == 3)
    by_name = {one["agent"]: (one["waiting"], one["in_progress"]) for one in reported["agents"]}
    assert by_name == {"writer": (2, 3), "reader": (0, 0), ODD_AGENT: (2, 0)}
    assert {one["concurrency"] for one in reported["agents"]} == {16}


async def test_parked_jobs_count_whether_or_not_a_worker_has_them_in_mind(api: HttpApi) -> None:
    await put(api.bus, "bw.parked.writer.e1", 3)
    await take(api.bus, "PARKED", "worker-parked", 2)
    reported = await queues_when(api, lambda queues: queues["parked"] == 3)
    assert sum(one["waiting"] + one["in_progress"] for one in reported["agents"]) == 0


async def test_how_far_services_and_alert_channels_are_behind(alerting: HttpApi) -> None:
    await put(alerting.bus, "bw.attempts.writer.e1.a1", 4)
    await put(alerting.bus, "bw.alerts.breaker_open", 1)
    await take(alerting.bus, "EVENTS", "sink-events", 3)
    reported = await queues_when(
        alerting, lambda queues: {one["consumer"]: one["in_progress"] for one in queues["services"]}["sink-events"] == 3
    )
    by_name = {one["consumer"]: (one["service"], one["waiting"], one["in_progress"]) for one in reported["services"]}
    assert by_name == {
        "breaker": ("breaker", 4, 0),
        "budget": ("budget", 4, 0),
        "alerter": ("alerter", 0, 0),
        "alerter-executions": ("alerter", 0, 0),
        "alerter-dead-letters": ("alerter", 0, 0),
        "alerter-replays": ("alerter", 0, 0),
        "sink-events": ("sink", 1, 3),
        "sink-alerts": ("sink", 1, 0),
        "sink-audit": ("sink", 0, 0),
        "alerter-channel-ops": ("alerter", 1, 0),
        f"alerter-channel-{subjects.encode_token('second.line')}": ("alerter", 1, 0),
    }


@pytest.mark.usefixtures("own_nats_server")
async def test_a_queue_that_was_never_made_is_not_reported_as_an_empty_one(api: HttpApi) -> None:
    await api.bus.jetstream().delete_consumer("JOBS", worker_consumer("reader"))
    with pytest.raises(NotFoundError):
        await api.bus.jetstream().consumer_info("JOBS", worker_consumer("reader"))
    reported = await queues_when(api, lambda queues: queues["agents"][1]["waiting"] is None)
    assert [one["in_progress"] is None for one in reported["agents"]] == [False, True, False]


async def test_an_answer_serves_everybody_for_a_second_and_no_longer(api: HttpApi) -> None:
    seconds, connections = 100.0, 0

    def connection() -> Client:
        nonlocal connections
        connections += 1
        return api.bus

    routes = QueueRoutes({"writer": 8}, (), connection, lambda: seconds)

    async def ask() -> Queues:
        return await routes.list_queues(None)  # pyright: ignore[reportArgumentType]

    first, *others = await asyncio.gather(*(ask() for _ in range(20)))
    asked_once = connections
    assert asked_once > 0
    assert others == [first] * 19
    await put(api.bus, subjects.job("writer"), 1)
    seconds += REUSE_S * 0.9
    assert await ask() == first
    assert connections == asked_once
    seconds += REUSE_S * 0.2
    assert (await ask()).agents[0].waiting == 1
    assert connections == 2 * asked_once


async def test_without_nats_nothing_is_claimed(own_nats_server: RunningServer, api: HttpApi) -> None:
    assert (await api.ask("GET", "/api/v1/queues")).status == 200
    own_nats_server.kill()
    answers: list[Answer] = []

    async def refused() -> bool:
        answers.append(await api.ask("GET", "/api/v1/queues"))
        return answers[-1].status != 200

    await until(refused)
    assert (answers[-1].status, answers[-1].code, answers[-1].headers["Retry-After"]) == (503, "unavailable", "1")
