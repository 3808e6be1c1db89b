"""How agents fare, over HTTP."""

import re

from breakwater.breakers.rules.breaker import Breaker
from breakwater.health.store import EndedCall, Healths
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import format_time, time_from_ms
from tests.services.request.conftest import HttpApi, put_breaker, redis_ms


async def test_every_agent_is_reported_with_its_health_in_a_bare_array(governed: HttpApi, redis: Redis) -> None:
    now = await redis_ms(redis)
    await put_breaker(redis, "reader", "m", Breaker(state="open", open_until_ms=now + 60_000, version=1))
    calls = [EndedCall(1, now - 2000, False), EndedCall(2, now - 1000, True)]
    await Healths(redis).note([Healths.note_command("writer", {"m": calls})])
    answer = await governed.ask("GET", "/api/v1/agents")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    by_id = {agent["agent_id"]: agent for agent in answer.json}
    assert list(by_id) == ["writer", "reader", "patient", "unguarded", "by-model", "by-provider", "never"]
    until = f"breaker open until {time_from_ms(now + 60_000):%H:%M:%S} UTC"
    assert {name: (agent["health"], agent["health_reason"]) for name, agent in by_id.items()} == {
        **dict.fromkeys(by_id, ("healthy", "no calls yet")),
        "writer": ("degraded", "m: the last call failed"),
        "reader": ("unhealthy", until),
        "never": ("unhealthy", "no call fits under a hard limit"),
    }
    assert by_id["reader"] == {
        "agent_id": "reader",
        "health": "unhealthy",
        "health_reason": until,
        "consecutive_failures": 0,
        "last_failure_at": None,
        "last_success_at": None,
        "circuit_open_until": format_time(time_from_ms(now + 60_000)),
        "models": [
            {
                "model": "m",
                "provider": "local",
                "health": "unhealthy",
                "health_reason": until,
                "breaker": "open",
                "consecutive_failures": 0,
                "last_failure_at": None,
                "last_success_at": None,
                "circuit_open_until": format_time(time_from_ms(now + 60_000)),
                "held_until": None,
            }
        ],
    }
    assert by_id["writer"]["consecutive_failures"] == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", by_id["writer"]["last_failure_at"])
    assert by_id["writer"]["last_success_at"] == format_time(time_from_ms(now - 2000))


async def test_other_methods_are_refused_by_name(governed: HttpApi) -> None:
    for method, path in [
        ("POST", "agents"),
        ("GET", "breakers/isolate"),
        ("DELETE", "breakers"),
        ("PUT", "guards"),
        *(("PUT", path) for path in ("budgets", "budgets/reconciliation", "budgets/raise")),
    ]:
        answer = await governed.ask(method, f"/api/v1/{path}")
        assert (answer.status, answer.code) == (405, "method_not_allowed")
