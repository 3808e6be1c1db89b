"""All events live: what a reader is sent, where it goes on, and what ends a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from breakwater.breakers.contract import BreakerTransition
from breakwater.identity.api_keys import create_key, revoke_key
from breakwater.jobs.contract.execution import ErrorInfo, Execution
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.types import Event
from breakwater.limits.contract import BudgetEvent, GuardEvent
from breakwater.records.api.events import LogTail
from tests.helpers import FIRST, until
from tests.server_sources import RunningServer
from tests.services.request.conftest import HttpApi, new_id, publish_alert
from tests.services.request.test_progress import NOW, Follower, attempt_of, following

PATH = "/api/v1/events"


@dataclass
class Reader(Follower):
    """Who follows events."""

    places: list[str] = field(default_factory=list[str])
    """The ids, those of comments among them."""

    async def next(self) -> tuple[str, Any] | None:
        fields: dict[str, str] = {}
        while line := (await self.response.content.readline()).decode():
            name, _, value = line.rstrip("\n").partition(": ")
            if line.startswith(":"):
                self.comments.append(line[2:].strip())
            elif name == "id":
                self.places.append(value)
            elif line != "\n":
                fields[name] = value
            elif fields:
                return fields["event"], json.loads(fields["data"])
        return None

    async def executions(self, number: int) -> list[str]:
        """The executions of the next events."""
        found: list[str] = []
        while len(found) < number:
            event = await self.next()
            assert event is not None
            found.append(event[1]["execution_id"])
        return found


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakwater.records.api.events.POLL_S", 0.02)


@asynccontextmanager
async def reading(api: HttpApi, query: str = "", **headers: str) -> AsyncGenerator[Reader]:
    """A reader, once its stream has begun."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    async with following(api, "", PATH + query, **sent) as follower:
        reader = Reader(follower.response)
        line = (await reader.response.content.readline()).decode()
        assert line.startswith("id: "), line
        reader.places.append(line[4:].strip())
        yield reader


async def attempted(api: HttpApi, execution_id: str, number: int = 1, agent: str = "writer", message: str = "") -> None:
    error = ErrorInfo(kind="server", class_="ServerError", message=message) if message else None
    attempt = attempt_of(execution_id, number, fails=bool(message)).model_copy(update={"agent": agent, "error": error})
    await stored(api, subjects.attempt(agent, execution_id, number), attempt)


async def stored(api: HttpApi, subject: str, event: Event | bytes) -> None:
    data = event if isinstance(event, bytes) else event.json_bytes()
    await api.bus.jetstream(timeout=60).publish(subject, data, headers=FIRST)


def record(execution_id: str, **fields: Any) -> Execution:
    times = {"queued_at": NOW, "dispatched_at": NOW, "completed_at": NOW}
    return Execution.model_validate(
        {
            "execution_id": execution_id,
            "job_id": execution_id,
            "agent": "writer",
            "status": "succeeded",
            "duration_ms": 1,
            **times,
            **fields,
        }
    )


async def published(api: HttpApi, subject: str, event: Event) -> None:
    await Publisher(lambda: api.bus, "tests").event(subject, event, id=new_id(), at=NOW)


async def one_of_each(api: HttpApi) -> None:
    """An event of each kind, in the order of their names in the docs; those of reader's in between."""
    await attempted(api, "e1")
    await attempted(api, "e2", agent="reader")
    await stored(
        api,
        subjects.execution("writer", "e1"),
        record("e1", output="a text", messages=[{"role": "user", "content": "another"}], encrypted="bwe1.00000000.x"),
    )
    transition = {
        "transition_id": "t",
        "model": "m",
        "from_state": "closed",
        "to_state": "open",
        "reason": "3 failures",
    }
    counts = {"consecutive_failures": 3, "errors": 3, "cooldown_s": 60, "version": 1, "at": NOW}
    for agent in ("writer", "*"):
        await published(
            api,
            subjects.breaker(agent, "m"),
            BreakerTransition.model_validate({"agent": agent, **transition, **counts}),
        )
    crossing = {"event_id": "b", "kind": "hard_cap", "scope": "global", "agent": "writer", "window": "daily"}
    amounts = {"period": "2026-11-21", "limit": 5, "total": 5, "enforcement": "hard", "at": NOW}
    await published(api, subjects.budget("global", "daily"), BudgetEvent.model_validate({**crossing, **amounts}))
    trip = {
        "event_id": "g",
        "kind": "tripped",
        "agent": "writer",
        "task_id": "t",
        "task_key": "t",
        "reason": "10 iterations",
        "cost": 0,
    }
    names = ("iterations", "tokens", "consecutive_failures", "total_failures", "unique_errors")
    await published(
        api, subjects.guard("writer"), GuardEvent.model_validate({**trip, "at": NOW, **dict.fromkeys(names, 1)})
    )


async def test_each_kind_comes_under_its_name_and_filters_leave_what_is_asked_for(api: HttpApi) -> None:
    everything = reading(api)
    of_kinds = reading(api, "?kinds=breakers,alerts")
    of_agent = reading(api, "?agent=writer&kinds=attempts,breakers,guards,executions,budgets")
    async with everything as all_events, of_kinds as some, of_agent as writers:
        assert all_events.response.headers["Content-Type"] == "text/event-stream"
        assert all_events.response.headers["Cache-Control"] == "no-store"
        await one_of_each(api)
        found = [await all_events.next() for _ in range(7)]
        await publish_alert(api, agent="writer")
        assert [event and event[0] for event in [*found, await all_events.next()]] == [
            "attempts",
            "attempts",
            "executions",
            "breakers",
            "breakers",
            "budgets",
            "guards",
            "alerts",
        ]
        assert all_events.places[1:] == [*(f"{number}-0" for number in range(1, 8)), "7-1"]
        execution = found[2] and found[2][1]
        assert execution["total_cost"] is None
        assert set(execution) >= {"execution_id", "status", "cost_basis", "error_kind"}
        assert not set(execution) & {"output", "messages", "input", "attempts", "encrypted"}
        assert [(event := await some.next()) and event[0] for _ in range(3)] == ["breakers", "breakers", "alerts"]
        agents = [(event := await writers.next()) and (event[0], event[1]["agent"]) for _ in range(5)]
        assert agents == [(kind, "writer") for kind in ("attempts", "executions", "breakers", "budgets", "guards")]


async def test_who_comes_back_goes_on_where_it_was_from_memory_and_from_the_store(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.records.api.events.MAX_IN_MEMORY", 4)
    monkeypatch.setattr("breakwater.records.api.events.AT_ONCE", 3)
    names = [f"e{number}" for number in range(12)]
    async with reading(api) as stays:
        for name in names:
            await attempted(api, name)
        assert await stays.executions(12) == names
        for at in (0, 1, 7, 9, 12):
            async with reading(api, Last_Event_ID=f"{at}-0") as back:
                assert back.places == [f"{at}-0"]
                assert await back.executions(12 - at) == names[at:]
    # Nobody was there in between, and what was published then is not in memory.
    await attempted(api, "e12")
    async with reading(api, Last_Event_ID="12-0") as back:
        assert await back.executions(1) == ["e12"]


async def test_two_who_read_on_at_once_keep_each_event_once(api: HttpApi) -> None:
    # As when a follower comes while the task of the last one is being stopped: it may read on for half a second.
    tail = LogTail("EVENTS", lambda: api.bus)
    await tail.look()
    for number in range(5):
        await attempted(api, f"e{number}")
    await asyncio.gather(tail.read_on(), tail.read_on())
    batch = await tail.after(0, asyncio.Semaphore())
    assert [event.sequence for event in batch.events] == [1, 2, 3, 4, 5]


async def test_what_is_not_stored_any_more_is_reported(api: HttpApi) -> None:
    for number in range(1, 5):
        await attempted(api, f"e{number}")
    await api.bus.jetstream().purge_stream("EVENTS", seq=4)
    async with reading(api, Last_Event_ID="1-0") as reader:
        assert await reader.next() == ("gap", {"stream": "EVENTS", "after": 1, "next": 4})
        assert reader.places[-1] == "3-0"
        assert await reader.executions(1) == ["e4"]
    # Of a stream that was deleted since: what it says next is not known to follow.
    async with reading(api, Last_Event_ID="900-3") as reader:
        assert await reader.next() == ("gap", {"stream": "EVENTS", "after": 900, "next": 5})
        assert await reader.next() == ("gap", {"stream": "ALERTS", "after": 3, "next": 1})
        await attempted(api, "e5")
        assert await reader.executions(1) == ["e5"]


async def test_what_is_no_event_is_passed_over(api: HttpApi) -> None:
    async with reading(api) as reader:
        await stored(api, subjects.attempt("writer", "e1", 1), b'{"secret": 1}')
        # On another's subject, as somebody would who forges it.
        await stored(api, subjects.attempt("writer", "e1", 2), attempt_of("e9", 1))
        await attempted(api, "e3")
        assert await reader.executions(1) == ["e3"]
        assert reader.places[-1] == "3-0"


@pytest.mark.parametrize(
    ("query", "place", "code", "says"),
    [
        ("?kinds=attempt", "", "invalid_query", "kinds"),
        ("?kinds=", "", "invalid_query", "kinds"),
        ("?kind=attempts", "", "invalid_query", "kind"),
        ("", "17", "invalid_last_event_id", "1042-17"),
        ("", "1-2-3", "invalid_last_event_id", "1042-17"),
        ("", "-1-2", "invalid_last_event_id", "1042-17"),
        ("", "9" * 20 + "-1", "invalid_last_event_id", "1042-17"),
    ],
)
async def test_a_wrong_request_is_refused_before_the_stream_begins(
    api: HttpApi, query: str, place: str, code: str, says: str
) -> None:
    answer = await api.ask("GET", PATH + query, headers={"Last-Event-ID": place})
    assert (answer.status, answer.code) == (422, code)
    assert says in answer.message


async def test_a_silent_stream_says_where_it_is(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakwater.identity.event_stream.KEEP_ALIVE_S", 0.02)
    async with reading(api, "?kinds=guards") as reader:
        await attempted(api, "e1")
        waiting = asyncio.create_task(reader.next())
        # Of what it was not sent it knows all the same that it has passed.
        await until(lambda: _passed(reader, "1-0"))
        await until(lambda: _was_still(reader, times=2))
        waiting.cancel()
    assert (await api.ask("HEAD", PATH)).headers["Content-Type"] == "text/event-stream"


async def _passed(reader: Reader, place: str) -> bool:
    return place in reader.places


async def _was_still(reader: Reader, *, times: int) -> bool:
    return reader.comments.count("still here") >= times


async def test_streams_are_limited_for_each_key_and_end_with_it(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("breakwater.identity.event_stream.MAX_OF_A_KEY", 2)
    monkeypatch.setattr("breakwater.identity.event_stream.KEY_LOOK_S", 0.05)
    # Keys of its own: a stream of another test, whose reader has just left, may not have ended yet.
    leaving, staying = (
        create_key(api.settings.api_keys_file, name, scopes=("read",)) for name in ("leaving", "staying")
    )
    as_leaving, as_staying = ({"Authorization": f"Bearer {one}"} for one in (leaving, staying))
    async with reading(api, **as_staying), reading(api, **as_staying) as stays:
        refused = await api.ask("GET", PATH, headers=as_staying)
        assert (refused.status, refused.code) == (429, "too_many_streams")
        async with reading(api, **as_leaving) as reader:
            revoke_key(api.settings.api_keys_file, leaving.split("_")[1])
            assert await reader.rest() == []
            assert reader.comments[-1] == "this API key was revoked"
        await attempted(api, "e1")
        assert await stays.executions(1) == ["e1"]


async def test_no_key_without_read_is_sent_an_event(api: HttpApi) -> None:
    await attempted(api, "e1")
    file = api.settings.api_keys_file
    keys = [
        create_key(file, "program", ("submit",)),
        create_key(file, "bound", ("submit",), tenants=("acme",), agents=("writer",)),
        create_key(file, "on-call", ("operate", "audit")),
    ]
    for key in keys:
        for path in (PATH, f"{PATH}?agent=writer", "/api/v1/%65vents", "/api/v1/jobs/../events", f"{PATH}/"):
            headers = {"Authorization": f"Bearer {key}", "Last-Event-ID": "0-0"}
            answer = await api.ask("GET", path, headers=headers)
            assert answer.status in (403, 404), path
            assert b"e1" not in answer.body


async def test_a_reader_that_takes_nothing_is_cut_off_and_misses_nothing_when_it_comes_back(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakwater.identity.event_stream.SEND_TIMEOUT_S", 0.2)
    number, text = 0, "x" * 200_000
    with capture_logs() as log:
        async with reading(api) as reader:

            async def cut() -> bool:
                nonlocal number
                for _ in range(10):
                    number += 1
                    await attempted(api, f"e{number}", message=text)
                return any(line["event"] == "stream_cut" for line in log)

            await until(cut)
            with suppress(aiohttp.ClientPayloadError):
                await reader.rest()
    taken = int(reader.places[-1].partition("-")[0])
    assert taken < number
    async with reading(api, Last_Event_ID=f"{taken}-0") as back:
        assert await back.executions(number - taken) == [f"e{one}" for one in range(taken + 1, number + 1)]


async def test_a_lost_connection_to_nats_loses_no_event(api: HttpApi, own_nats_server: RunningServer) -> None:
    async with reading(api) as reader:
        await attempted(api, "e1")
        assert await reader.executions(1) == ["e1"]
        own_nats_server.kill()
        await own_nats_server.restart_async()

        async def back() -> bool:
            return api.bus.is_connected

        await until(back)
        await attempted(api, "e2")
        assert await reader.executions(1) == ["e2"]
    own_nats_server.kill()

    async def refused() -> bool:
        answer = await api.ask("GET", PATH)
        return answer.status == 503 and answer.code == "unavailable"

    await until(refused)
