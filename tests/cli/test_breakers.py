"""`breakwater breakers`, against a stub of the HTTP interface."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from breakwater.breakers.commands import NO_BREAKER_SERVICE
from breakwater.breakers.store import Breakers
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.commands.formats import clock
from breakwater.kernel.redis.connection import Redis
from breakwater.kernel.types import format_time
from tests.cli.api_stub import Stub
from tests.cli.conftest import Run, in_thread
from tests.server_sources import RunningServer

NOW = datetime.now(UTC)
SINCE, LATER = NOW - timedelta(minutes=3), NOW + timedelta(hours=2)


def breaker(agent: str, model: str, state: str, **more: Any) -> dict[str, Any]:
    counts = {"consecutive_failures": 0, "total_failures": 0, "unique_errors": 0, "version": 1}
    health = "healthy" if state == "closed" else "unhealthy"
    return {"agent": agent, "model": model, "state": state, "health": health, "health_reason": "why", **counts, **more}


BREAKERS = [
    breaker("a-writer", "a/small", "closed", total_failures=2),
    breaker(
        "writer",
        "a/large",
        "open",
        reason="3 consecutive failures (threshold: 3)",
        since=format_time(SINCE),
        open_until=format_time(LATER),
        consecutive_failures=3,
        total_failures=12,
    ),
    breaker("*", "b/*", "isolated", reason="isolated by ops: outage"),
]
TRANSITION = {
    "transition_id": "writer/a%2Flarge#4@1",
    "agent": "writer",
    "model": "a/large",
    "from_state": "open",
    "to_state": "isolated",
    "reason": "isolated by ops: garbled",
    "by": "ops",
    "consecutive_failures": 3,
    "errors": 3,
    "cooldown_s": 60,
    "version": 4,
    "at": format_time(NOW),
}


@pytest.fixture
def stub(stub: Stub) -> Stub:
    stub.answers["GET breakers"] = (200, {"breakers": BREAKERS, "alive": True})
    return stub


@pytest.mark.parametrize("command", [["breakers"], ["breakers", "list"]], ids=" ".join)
async def test_breakers_that_are_not_closed_come_first(run: Run, stub: Stub, command: list[str]) -> None:
    ran = await in_thread(run, *command)
    assert (ran.code, ran.err) == (ExitCode.OK, "")
    _, shared, large, small = ran.out.splitlines()
    assert shared.split()[:5] == ["*", "b/*", "isolated", "unhealthy", "until"]
    assert large.split()[:3] == ["writer", "a/large", "open"]
    for part in (clock(LATER, NOW), clock(SINCE, NOW), "3        12  3 consecutive failures (threshold: 3)"):
        assert part in large
    assert small.split() == ["a-writer", "a/small", "closed", "healthy", "0", "2", "why"]


@pytest.mark.parametrize("command", [["breakers", "--json"], ["breakers", "list", "--json"]], ids=" ".join)
async def test_json_is_what_the_interface_reported(run: Run, stub: Stub, command: list[str]) -> None:
    stub.answers["GET breakers"] = (200, {"breakers": BREAKERS, "alive": False})
    ran = await in_thread(run, *command)
    assert ran.json == {"breakers": BREAKERS, "alive": False}
    assert ran.err == ""


async def test_that_no_breaker_service_is_alive_is_said_in_one_line(run: Run, stub: Stub) -> None:
    stub.answers["GET breakers"] = (200, {"breakers": BREAKERS, "alive": False})
    ran = await in_thread(run, "breakers")
    assert (ran.code, ran.err) == (ExitCode.OK, f"{NO_BREAKER_SERVICE}\n")
    assert len(ran.out.splitlines()) == 4


async def test_no_breakers_are_distinguished_from_no_answer(run: Run, stub: Stub) -> None:
    stub.answers["GET breakers"] = (200, {"breakers": [], "alive": True})
    ran = await in_thread(run, "breakers")
    assert (ran.code, ran.out) == (ExitCode.OK, "")
    assert "no agent has a breaker" in ran.err
    stub.answers["GET breakers"] = (200, [])
    assert (await in_thread(run, "breakers")).code == ExitCode.FAILED


async def test_one_is_forced_open_and_it_is_said_for_how_long(run: Run, stub: Stub) -> None:
    stub.answers["POST breakers/isolate"] = (200, TRANSITION)
    ran = await in_thread(run, "breakers", "isolate", "writer", "a/large", "--reason", "garbled")
    assert stub.asked == [("POST breakers/isolate", {"agent": "writer", "model": "a/large", "reason": "garbled"})]
    assert ran.out == "writer on a/large was open, is now isolated: isolated by ops: garbled\n"
    assert ran.err == "it stays isolated until `breakwater breakers reset writer a/large`\n"


async def test_one_is_reset_and_programs_get_the_transition(run: Run, stub: Stub) -> None:
    reported = TRANSITION | {"agent": "*", "model": "b/*", "to_state": "closed", "reason": "reset by ops"}
    stub.answers["POST breakers/reset"] = (200, reported)
    ran = await in_thread(run, "breakers", "reset", "*", "b/*")
    assert stub.asked == [("POST breakers/reset", {"agent": "*", "model": "b/*"})]
    assert (ran.out, ran.err) == ("* on b/* was open, is now closed: reset by ops\n", "")
    assert (await in_thread(run, "breakers", "reset", "*", "b/*", "--json")).json == reported


async def test_what_to_type_to_undo_it_can_be_pasted_into_a_shell(run: Run, stub: Stub) -> None:
    stub.answers["POST breakers/isolate"] = (200, TRANSITION | {"agent": "*", "model": "b/*"})
    ran = await in_thread(run, "breakers", "isolate", "*", "b/*")
    assert "`breakwater breakers reset '*' 'b/*'`" in ran.err


async def test_where_there_was_nothing_to_do_that_is_said(run: Run, stub: Stub) -> None:
    as_it_is = breaker("writer", "a/large", "isolated", reason="isolated by ops", unchanged=True)
    stub.answers["POST breakers/isolate"] = (200, as_it_is)
    ran = await in_thread(run, "breakers", "isolate", "writer", "a/large")
    assert ran.out == "writer on a/large is already isolated: isolated by ops\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rest"], "Did you mean 'reset'"),
        (["reset", "writer"], "Missing argument 'MODEL'"),
        (["isolate", "writer", "\udcff", "--url", "http://127.0.0.1:9"], "model is not UTF-8 text"),
        (["--nope"], "No such option"),
    ],
)
def test_wrong_usage_is_reported_before_anything_is_asked(run: Run, arguments: list[str], said: str) -> None:
    ran = run("breakers", *arguments)
    assert ran.code == ExitCode.USAGE
    assert said in ran.err


async def test_doctor_finds_that_no_breaker_service_is_alive(
    run: Run, own_redis_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAKWATER_REDIS_URL", own_redis_server.url)

    async def found() -> tuple[str, str]:
        findings = (await in_thread(run, "doctor", "--json")).json["findings"]
        [one] = [one for one in findings if one["area"] == "breakers"]
        return one["verdict"], one["text"]

    verdict, text = await found()
    assert verdict == "warn"
    assert text.startswith("no breaker service is running")
    redis = Redis(own_redis_server.url)
    await Breakers(redis).beat()
    await redis.close()
    assert await found() == ("ok", "a breaker service is running")
