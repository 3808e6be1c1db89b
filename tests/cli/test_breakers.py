"""`breakwater breakers`, against a stub of the HTTP interface."""

from __future__ import annotations

import pytest

from breakwater.breakers.commands import NO_BREAKER_SERVICE
from breakwater.breakers.store import Breakers
from breakwater.kernel.commands.errors import ExitCode
from breakwater.kernel.redis.connection import Redis
from tests.api_documents import AT, breaker
from tests.cli.api_stub import Stub
from tests.cli.conftest import Run, in_thread
from tests.server_sources import RunningServer

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
    "at": AT,
}


async def test_breakers_that_are_not_closed_come_first(run: Run, stub: Stub) -> None:
    breakers = [breaker("a"), breaker("writer", state="open"), breaker("*", "b/*", "isolated")]
    stub.answers["GET breakers"] = (200, {"breakers": breakers, "alive": True})
    rows = (await in_thread(run, "breakers")).out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["*", "writer", "a"]


async def test_that_no_breaker_service_is_alive_is_said_in_one_line(run: Run, stub: Stub) -> None:
    listed = {"breakers": [breaker()], "alive": False}
    stub.answers["GET breakers"] = (200, listed)
    ran = await in_thread(run, "breakers")
    assert (ran.code, ran.err) == (ExitCode.OK, f"{NO_BREAKER_SERVICE}\n")
    assert len(ran.out.splitlines()) == 2
    as_json = await in_thread(run, "breakers", "--json")
    assert (as_json.json, as_json.err) == (listed, "")


async def test_shadows_are_listed_apart_with_what_they_would_have_refused(run: Run, stub: Stub) -> None:
    shadow = {"agent": "writer", "model": "m", "state": "open", "reason": "1 job failed", "since": AT, "refused": 12}
    stub.answers["GET breakers"] = (200, {"breakers": [breaker()], "shadows": [shadow | {"version": 1}], "alive": True})
    ran = await in_thread(run, "breakers")
    assert ran.err == "shadows, which refuse nothing:\n"
    [headings, row] = ran.out.splitlines()[2:]
    assert "shadow" in headings
    assert "would have refused" in headings
    assert row.split()[:3] == ["writer", "m", "open"]
    assert " 12 " in row
    assert "1 job failed" in row


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
    as_it_is = breaker("writer", "a/large", "isolated", "isolated by ops", unchanged=True)
    stub.answers["POST breakers/isolate"] = (200, as_it_is)
    ran = await in_thread(run, "breakers", "isolate", "writer", "a/large")
    assert ran.out == "writer on a/large is already isolated: isolated by ops\n"


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
