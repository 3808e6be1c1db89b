from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest
import redis.asyncio as aioredis
from faststream.nats import TestNatsBroker
from pydantic import SecretStr

from breakwater.breakers.rules.breaker import BreakerKey
from breakwater.breakers.store import UNSAVED, Breakers, shadows_in
from breakwater.config import parse_config
from breakwater.health.store import Healths
from breakwater.jobs.contract.execution import Attempt
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.publisher import PublishAck, Publisher
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process.settings import Settings
from breakwater.kernel.redis.connection import Redis
from breakwater.services.breaker.app import build
from breakwater.services.breaker.handlers import BreakerHandler
from breakwater.services.breaker.rebuild import Heartbeat
from tests.flow.fixtures import StartPlane
from tests.flow.kit import Plane, model
from tests.helpers import FIRST, all_acknowledged, deliver, until
from tests.servers import RunningServer

AGENTS = {"writer": {"model": "sim/m", "breaker": {"consecutive_failures": 3, "cooldown_s": 60}}}
MOMENT = "2026-11-21T10:00:00.000Z"
KEY = BreakerKey("writer", "sim/m")


def attempt_of(name: str, outcome: str, *, counted: bool = True, model: str = "sim/m") -> dict[str, Any]:
    return {
        "attempt_id": f"{name}:1", "execution_id": name, "job_id": name, "agent": "writer", "number": 1, "model": model,
        "provider": "sim", "started_at": MOMENT, "completed_at": MOMENT, "duration_ms": 0, "outcome": outcome,
        "counts_for_breaker": counted and outcome == "error", "cause": "first",
    }  # fmt: skip


async def publish_attempt(plane: Plane, name: str, outcome: str, *, counted: bool = True, model: str = "sim/m") -> None:
    attempt = attempt_of(name, outcome, counted=counted, model=model)
    await plane.jetstream.publish(subjects.attempt("writer", name, 1), json.dumps(attempt).encode(), headers=FIRST)


async def transitions(plane: Plane) -> list[tuple[str, str]]:
    found = await plane.messages("EVENTS", subjects.breaker("writer", "sim/m"))
    return [(event["from_state"], event["to_state"]) for event in found]


async def handled(plane: Plane) -> bool:
    return await all_acknowledged(plane.jetstream, "EVENTS", "breaker")


async def test_only_failures_that_say_something_of_the_model_count(
    own_redis_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(json.dumps({"providers": {"sim": {"base_url": "http://x"}}, "agents": AGENTS}))
    published, numbers = list[tuple[str, Any]](), count(1)

    async def publish(_: Publisher, subject: str, payload: bytes, _headers: Any) -> PublishAck:
        published.append((subject, json.loads(payload)["to_state"]))
        return PublishAck("EVENTS", 1, duplicate=False)

    async def is_log(*_: Any) -> bool:
        return True

    monkeypatch.setattr(Publisher, "raw", publish)
    monkeypatch.setattr(Heartbeat, "is_log", is_log)
    service = build(Settings(redis_url=SecretStr(own_redis_server.url)), config)
    async with TestNatsBroker(service.broker) as broker:

        async def attempted(name: str, outcome: str, **more: Any) -> None:
            body = json.dumps(attempt_of(name, outcome, **more)).encode()
            await deliver(broker, Stream.EVENTS, subjects.attempt("writer", name, 1), body, sequence=next(numbers))

        for number in range(5):
            await attempted(f"client-{number}", "error", counted=False)
            await attempted(f"lost-{number}", "worker_lost")
            await attempted(f"other-{number}", "error", model="sim/unused")
            assert published == ([] if number < 2 else [(subjects.breaker("writer", "sim/unused"), "open")])
        for number in range(3):
            await attempted(f"server-{number}", "error")
        assert published[1:] == [(subjects.breaker("writer", "sim/m"), "open")]


async def test_replays_of_a_failure_count_for_nothing(start_plane: StartPlane) -> None:
    async with start_plane({"sim/m": model()}, AGENTS, services=("breaker",)) as plane:
        await publish_attempt(plane, "server-1", "error")
        failure = (await plane.jetstream.get_last_msg("EVENTS", subjects.attempt("writer", "server-1", 1))).data
        for number in range(20):
            await plane.jetstream.publish(subjects.attempt("writer", "server-1", 1), failure)
            await plane.jetstream.publish(subjects.attempt("writer", f"other-{number}", 1), failure, headers=FIRST)
        await until(lambda: handled(plane), what="all attempts handled")
        assert await transitions(plane) == []
        await publish_attempt(plane, "server-2", "error")
        await until(lambda: handled(plane), what="the second failure handled")
        assert await transitions(plane) == []
        await publish_attempt(plane, "server-3", "error")
        await until(lambda: transitions(plane), what="the transition that three failures make")


async def test_events_that_are_delivered_again_open_it_once(start_plane: StartPlane) -> None:
    async with start_plane({"sim/m": model()}, AGENTS, services=()) as plane:
        for number in range(3):
            await publish_attempt(plane, f"server-{number}", "error")
        # Somebody took them and died before acknowledging.
        subscription = await plane.jetstream.pull_subscribe_bind("breaker", "EVENTS")
        for delivery in await subscription.fetch(3, timeout=60):
            await delivery.nak()
        for name in ("breaker", "breaker-2"):
            plane.start("breaker", name)
        await until(lambda: transitions(plane), what="a transition")
        await until(lambda: handled(plane), what="all attempts handled")
        assert await transitions(plane) == [("closed", "open")]


async def test_a_transition_that_was_saved_and_not_published_is_published_with_the_next_event(
    start_plane: StartPlane,
) -> None:
    async with start_plane({"sim/m": model()}, AGENTS, services=("breaker",)) as plane:
        for number in range(3):
            await publish_attempt(plane, f"server-{number}", "error")
        await until(lambda: transitions(plane), what="a transition")
        await until(lambda: handled(plane), what="all attempts handled")
        [opened] = await plane.messages("EVENTS", subjects.breaker("writer", "sim/m"))
        opened.pop("_subject")
        await plane.jetstream.purge_stream("EVENTS", subject=subjects.breaker("writer", "sim/m"))
        client = aioredis.Redis.from_url(plane.environment["BREAKWATER_REDIS_URL"])
        lost = opened | {"transition_id": "the crash came here"}
        await client.hset(f"bw:breaker:{KEY.name}", "unpublished", json.dumps([lost]))
        await client.aclose()
        await publish_attempt(plane, "late", "error")
        [found] = await until(
            lambda: plane.messages("EVENTS", subjects.breaker("writer", "sim/m")), what="the lost transition"
        )
        assert found["transition_id"] == "the crash came here"


async def test_an_unreadable_attempt_is_passed_over_and_reported(start_plane: StartPlane) -> None:
    async with start_plane({"sim/m": model()}, AGENTS, services=("breaker",)) as plane:
        await plane.jetstream.publish("bw.attempts.writer.x.1", b"not json")
        for number in range(3):
            await publish_attempt(plane, f"server-{number}", "error")
        await until(lambda: transitions(plane), what="a transition")
        await until(lambda: handled(plane), what="all attempts handled")
        assert "record_unreadable" in plane.log("breaker")


class PipelinesCounted(Redis):
    pipelines = 0

    async def _pipeline(self, packed: Sequence[bytes]) -> list[Any]:
        self.pipelines += 1
        return await super()._pipeline(packed)


async def test_a_batch_takes_two_round_trips_and_counts_for_nothing_before_redis_is_of_its_log(
    redis_server: RunningServer,
) -> None:
    redis = PipelinesCounted(redis_server.url)
    await redis.client.flushall()
    breakers, healths = Breakers(redis), Healths(redis)
    config = parse_config(json.dumps({"providers": {"sim": {"base_url": "http://x"}}, "agents": AGENTS}))
    publisher = Publisher(Mock(side_effect=AssertionError("nothing is to be published")), "tests")
    handler, known = BreakerHandler(config, breakers, shadows_in(redis), healths, publisher, Mock()), list[str | None]()

    async def is_log(filled_from: str | None) -> bool:
        if filled_from != "log":
            known.append(filled_from)
            assert [(await breakers.load([KEY]))[0].revision, await healths.of(["writer"])] == [UNSAVED, [{}]]
            await breakers.mark_filled("other log" if filled_from is None else "log")
        return filled_from == "log"

    for sequence in (1, 2):
        attempt = Attempt.model_validate(attempt_of(f"job-{sequence}", "error"))
        redis.pipelines = 0
        await handler.apply(handler.batch_of([(sequence, 1000, attempt)]), is_log)
    assert (known, redis.pipelines) == ([None, "other log"], 2)
    assert [len(one.breaker.failures) for one in await breakers.load([KEY])] == [2]
    assert (await healths.of(["writer"]))[0][""].consecutive_failures == 2
    await redis.close()
