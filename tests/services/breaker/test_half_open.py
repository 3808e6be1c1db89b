"""Breakers whose cool-down is over although no call has come."""

from __future__ import annotations

import json
from typing import Any

from breakwater.breakers.api import agents_health, breaker_statuses
from breakwater.breakers.contract import BreakerTransition
from breakwater.breakers.metrics import BreakerMetrics
from breakwater.breakers.rules.breaker import Breaker, BreakerKey
from breakwater.breakers.rules.transitions import breaker_after
from breakwater.breakers.store import Breakers, Saving, shadows_in
from breakwater.config import parse_config
from breakwater.health.store import Healths
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.telemetry.metrics import BREAKER_STATE, CollectorRegistry
from breakwater.limits.store.deployments import Deployments
from breakwater.services.breaker.handlers import BreakerHandler

KEY = BreakerKey("writer", "m")
CONFIG = parse_config('providers: {p: {base_url: "http://x/v1"}}\nagents: {writer: {model: m}}')


class RecordedEvents(Publisher):
    def __init__(self) -> None:
        self.events: list[BreakerTransition] = []

    async def event(self, subject: str, payload: Any, **_: Any) -> Any:
        assert subject == "bw.breakers.writer.m"
        self.events.append(payload)


async def put(redis: Redis, breaker: Breaker) -> None:
    breakers = Breakers(redis)
    [before] = await breakers.load([KEY])
    assert await breakers.save([Saving(KEY, before, breaker, None)]) == [True]


async def test_it_is_half_open_in_every_face_and_is_reported_once(redis: Redis) -> None:
    breakers, healths, published = Breakers(redis), Healths(redis), RecordedEvents()
    handler = BreakerHandler(
        CONFIG, breakers, shadows_in(redis), healths, published, BreakerMetrics(CollectorRegistry())
    )
    [loaded] = await breakers.load([KEY])
    opened = Breaker(
        state="open", open_until_ms=loaded.now_ms - 1, version=1, counts_from=1, reason="why", total_failures=3
    )
    await put(redis, opened)

    async def faces() -> dict[str, object]:
        [status] = await breaker_statuses(CONFIG, breakers, healths, Deployments(redis, None))
        [agent] = await agents_health(CONFIG, breakers, healths, Deployments(redis, None))
        gauge = (await handler.gauges())[BREAKER_STATE]
        assert (status.open_until, status.probe_until, status.reason) == (None, None, "why")
        assert agent.circuit_open_until is None
        return {
            "API, CLI, console: breakers": status.state,
            "API, CLI, console: agents": agent.models[0].breaker,
            "Prometheus, Grafana": [labels[-1] for labels, value in gauge.items() if value],
        }

    expected = {
        "API, CLI, console: breakers": "half_open",
        "API, CLI, console: agents": "half_open",
        "Prometheus, Grafana": ["half_open"],
    }
    assert await faces() == expected
    await handler.advance()
    await handler.advance()
    assert await faces() == expected
    [event] = published.events
    assert (event.from_state, event.to_state, event.waits, event.version) == ("open", "half_open", True, 2)
    assert event.reason == "the cool-down has ended; it waits for a call to try it"
    # The next call is its probe, whose outcome counts, also after a loss of Redis.
    [waits] = await breakers.load([KEY])
    rebuilt = breaker_after(BreakerTransition.model_validate(json.loads(event.model_dump_json())), 9)
    for breaker in (waits.breaker, rebuilt):
        assert (breaker.state, breaker.waits, breaker.probe, breaker.version) == ("half_open", True, None, 2)
    [answer] = await redis.run([Breakers.admit_command(KEY, "j:1", 60_000)])
    admitted = Breakers.read_admission(answer)
    assert (admitted.probe, admitted.version) == (True, 2)  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_probe_that_is_lost_makes_it_wait_for_another_call(redis: Redis) -> None:
    published = RecordedEvents()
    handler = BreakerHandler(
        CONFIG, Breakers(redis), shadows_in(redis), Healths(redis), published, BreakerMetrics(CollectorRegistry())
    )
    [loaded] = await Breakers(redis).load([KEY])
    probing = Breaker(
        state="half_open", probe="j:1", probe_until_ms=loaded.now_ms + 60_000, version=2, open_until_ms=1, openings=1
    )
    await put(redis, probing)
    await handler.advance()
    assert published.events == [], "a call tries it"
    await redis.run([Breakers.return_probe_command(KEY, "j:1")])
    for _ in range(3):
        await handler.advance()
        # Calls that are refused by something else take the probe and return it.
        await redis.run([Breakers.admit_command(KEY, "k:1", 60_000)])
        await redis.run([Breakers.return_probe_command(KEY, "k:1")])
    [event] = published.events
    assert (event.from_state, event.to_state, event.waits) == ("half_open", "half_open", True)
