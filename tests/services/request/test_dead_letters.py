"""Dead letters over HTTP: what is seen of them, and running their jobs again."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats
import pytest
import pytest_asyncio
from nats.js.api import StreamConfig

from breakwater.alerts.rules.signals import of_dead_letter, of_execution
from breakwater.alerts.store.incidents import open_log
from breakwater.config import parse_config
from breakwater.config.servers import bus_plan
from breakwater.identity.api_keys import create_key
from breakwater.jobs.api import dead_letters as routes
from breakwater.jobs.contract.dead_letters import MAX_DEAD_LETTERS
from breakwater.jobs.contract.execution import Execution
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.contract import DeadLetter
from breakwater.kernel.nats.delivery import DelayedQueue
from breakwater.kernel.nats.lookup import Lookup
from breakwater.kernel.nats.permissions import GRANTS, inbox_prefix, render
from breakwater.kernel.nats.provision import provision
from breakwater.kernel.nats.publisher import Publisher
from breakwater.kernel.nats.subjects import Header, Stream
from breakwater.kernel.security.encryption import OFF, Cipher, new_key
from breakwater.kernel.types import format_time
from breakwater.local.ports import free_port
from tests.helpers import FIRST
from tests.kernel.nats.test_parking import no_turn
from tests.nats_node import start_nats
from tests.records import samples
from tests.server_sources import RunningServer
from tests.services.request.conftest import (
    CONFIG,
    ODD_AGENT,
    Answer,
    HttpApi,
    new_id,
    publish_result,
    result_of,
    running,
    settings_for,
)
from tests.tables import each_row

NOW = datetime.now(UTC)
AT = format_time(NOW)
JOB: dict[str, Any] = {"agent": "writer", "job_id": "order-1", "prompt": "a haiku"}


async def give_up(
    api: HttpApi,
    payload: Any = JOB,
    *,
    reason: str = "error",
    agent: str | None = "writer",
    stream: str = "JOBS",
    execution_id: str | None = "order-1",
    headers: dict[str, str] | None = None,
    error: str = "the provider answered 500",
    at: datetime = NOW,
    sequence: int = 1,
) -> int:
    """What a service does with what it can't handle. Returns the dead letter's number."""
    data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    dead_letter = DeadLetter(
        reason=reason,
        agent=agent,
        error=error,
        stream=stream,
        subject=f"bw.{stream.lower()}.{agent}",
        sequence=sequence,
        headers=headers or {},
        payload_base64=base64.b64encode(data).decode(),
        execution_id=execution_id,
        at=at,
    )
    ce = {Header.CE_ID.value: f"dlq/{stream}/{sequence}"}
    stored = await Publisher(lambda: api.bus, "worker").raw(
        subjects.dead_letter(reason, agent or "unknown"), dead_letter.json_bytes(), ce
    )
    return stored.sequence


async def listed(api: HttpApi, query: str = "") -> list[Any]:
    answer = await api.ask("GET", f"/api/v1/dlq{query}")
    assert answer.status == 200, answer.json
    return answer.json["dead_letters"]


async def replay(api: HttpApi, **body: Any) -> Any:
    answer = await api.act("dlq/replay", **body)
    assert answer.status == 200, answer.json
    return answer.json


async def dismiss(api: HttpApi, **body: Any) -> Any:
    answer = await api.act("dlq/dismiss", **body)
    assert answer.status == 200, answer.json
    return answer.json


async def jobs(api: HttpApi) -> list[Any]:
    """What JOBS holds, each with its subject and headers."""
    return [
        {**json.loads(found.data), "_subject": found.subject, "_headers": found.headers}
        async for found in Lookup(lambda: api.bus).scan(Stream.JOBS, "bw.jobs.>")
    ]


async def record(api: HttpApi, execution_id: str, agent: str = "writer", **more: Any) -> None:
    """The record of an execution, as a worker writes it."""
    result = result_of(execution_id, agent).model_dump() | more
    one = Execution.model_validate({name: result[name] for name in Execution.model_fields})
    await api.bus.jetstream().publish(subjects.execution(agent, execution_id), one.json_bytes(), headers=FIRST)


async def test_dead_letters_are_listed_the_latest_first_with_what_is_kept_in_all(api: HttpApi) -> None:
    assert (await api.ask("GET", "/api/v1/dlq")).json == {"dead_letters": [], "more": False, "counts": []}
    first = await give_up(api)
    second = await give_up(api, {"agent": ODD_AGENT, "prompt": "x"}, agent=ODD_AGENT, reason="timeout")
    third = await give_up(api, execution_id="order-3")
    answer = (await api.ask("GET", "/api/v1/dlq")).json
    assert [one["dead_letter_id"] for one in answer["dead_letters"]] == [third, second, first]
    assert answer["dead_letters"][2] == {
        "dead_letter_id": first,
        "kind": "job",
        "reason": "error",
        "agent": "writer",
        "execution_id": "order-1",
        "job_id": None,
        "error": "the provider answered 500",
        "at": AT,
        "replayable": True,
        "why_not": None,
        "replayed_as": None,
        "replay_status": None,
        "dismissed_by": None,
        "dismissed_at": None,
    }
    assert answer["counts"] == [
        {"reason": "error", "agent": "writer", "count": 2},
        {"reason": "timeout", "agent": ODD_AGENT, "count": 1},
    ]
    part = (await api.ask("GET", "/api/v1/dlq?limit=2")).json
    assert ([one["dead_letter_id"] for one in part["dead_letters"]], part["more"]) == ([third, second], True)
    assert [one["dead_letter_id"] for one in await listed(api, "?limit=3")] == [third, second, first]


async def test_only_those_that_are_meant_are_listed(api: HttpApi) -> None:
    error = await give_up(api)
    invalid = await give_up(api, reason="invalid")
    other = await give_up(api, agent="reader", execution_id="order-2")
    nobodys = await give_up(api, b"?", agent=None, reason="unreadable", stream="EVENTS", execution_id=None)
    for query, expected in {
        "?reason=error": [other, error],
        "?agent=writer": [invalid, error],
        "?reason=invalid&agent=writer": [invalid],
        "?agent=unknown": [nobodys],
        "?reason=none": [],
        "?execution_id=order-2": [other],
        "?execution_id=order-1&agent=writer": [invalid, error],
    }.items():
        assert [one["dead_letter_id"] for one in await listed(api, query)] == expected, query


async def test_the_last_seven_days_are_listed_or_those_since_a_time(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await give_up(api)
    await asyncio.sleep(0.01)
    message = await api.bus.jetstream().get_msg("DLQ", await give_up(api))
    assert message.time is not None
    since = message.time.astimezone(UTC).isoformat().replace("+00:00", "Z")
    assert [one["dead_letter_id"] for one in await listed(api, f"?since={since}")] == [message.seq]
    assert [one["dead_letter_id"] for one in await listed(api)] == [message.seq, before]
    monkeypatch.setattr(routes, "SHOWN_DAYS", -1)
    assert await listed(api) == []
    assert len(await listed(api, "?since=2020-01-01T00:00:00Z")) == 2


async def test_times_long_ago_and_far_away_mean_what_they_say(api: HttpApi) -> None:
    dead_letter = await give_up(api)
    for since, found in {
        "0001-01-01": [dead_letter],
        "1600-01-01": [dead_letter],
        "2300-01-01": [],
        "9999-12-31": [],
    }.items():
        assert [one["dead_letter_id"] for one in await listed(api, f"?since={since}T00:00:00Z")] == found, since
    assert (await replay(api, all=True, since="9999-12-31T00:00:00Z"))["replayed"] == []
    assert len((await replay(api, all=True, since="1600-01-01T00:00:00Z"))["replayed"]) == 1


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ("?limit=0", "limit"),
        ("?limit=1001", "limit"),
        ("?since=yesterday", "since"),
        ("?since=2026-11-21T10:00:00", "since"),
        ("?since=0001-01-01T00:00:00%2B14:00", "since"),
        ("?since=9999-12-31T23:59:59-14:00", "since"),
        ("?why=1", "why"),
    ],
)
async def test_a_parameter_that_is_wrong_is_said_so(api: HttpApi, query: str, path: str) -> None:
    answer = await api.ask("GET", f"/api/v1/dlq{query}")
    assert (answer.status, answer.code, answer.paths) == (422, "invalid_query", [path])


async def test_what_is_no_dead_letter_is_passed_over(api: HttpApi) -> None:
    dead_letter = await give_up(api)
    js = api.bus.jetstream()
    unreadable = [await js.publish("bw.dlq.error.writer", body) for body in (b"{}", b"\xff")]
    assert [one["dead_letter_id"] for one in await listed(api)] == [dead_letter]
    assert (await api.ask("GET", f"/api/v1/dlq/{unreadable[0].seq}")).code == "unknown_dead_letter"
    outcome = await replay(api, dead_letters=[dead_letter, unreadable[0].seq, 999])
    assert [one["dead_letter_id"] for one in outcome["replayed"]] == [dead_letter]
    assert outcome["skipped"] == [
        {"dead_letter_id": unreadable[0].seq, "why": "there is no such dead letter"},
        {"dead_letter_id": 999, "why": "there is no such dead letter"},
    ]
    outcome = await replay(api, all=True)
    assert (outcome["replayed"], outcome["already"], len(outcome["skipped"])) == ([], 1, 2)


async def test_one_dead_letter_is_shown_without_its_secrets(api: HttpApi) -> None:
    job = {
        **JOB,
        "prompt": "mail ann@example.com, the key is sk-proj-0123456789abcdefghijklmnop",
        "metadata": {"api_key": "hunter2hunter2"},
    }
    headers = {"Nats-Msg-Id": "order-1", "Authorization": "Bearer hunter2hunter2"}
    dead_letter = await give_up(api, job, headers=headers, error="refused ann@example.com")
    for path in (f"/api/v1/dlq/{dead_letter}", "/api/v1/dlq"):
        answer = await api.ask("GET", path)
        for secret in (b"ann@example", b"sk-proj", b"hunter2"):
            assert secret not in answer.body, path
            assert base64.b64encode(json.dumps(job).encode())[:40] not in answer.body
    shown = (await api.ask("GET", f"/api/v1/dlq/{dead_letter}")).json
    assert shown["payload"]["agent"] == "writer"
    assert shown["payload"]["metadata"] == {"api_key": "[REDACTED]"}
    assert shown["payload"]["prompt"].startswith("mail [REDACTED]")
    assert shown["headers"] == {"Nats-Msg-Id": "order-1", "Authorization": "[REDACTED]"}
    assert (shown["stream"], shown["subject"], shown["sequence"]) == ("JOBS", "bw.jobs.writer", 1)
    assert (shown["payload_bytes"], shown["payload_cut"]) == (len(json.dumps(job)), False)
    assert (shown["replayable"], shown["replayed_by"], shown["replayed_at"]) == (True, None, None)


async def test_what_is_no_json_is_shown_as_a_text_without_its_secrets(api: HttpApi) -> None:
    cut_off = await give_up(api, b'{"agent": "writer", "password": "hunter2hunter2", "prompt": "ann@example.com')
    shown = (await api.ask("GET", f"/api/v1/dlq/{cut_off}")).json
    assert shown["payload"].startswith('{"agent": "writer"')
    assert "hunter2" not in shown["payload"]
    assert "ann@" not in shown["payload"]
    binary = await give_up(api, b"\xff\x00NaN")
    shown = (await api.ask("GET", f"/api/v1/dlq/{binary}")).json
    assert (shown["payload"], shown["payload_cut"]) == ("\ufffd\x00NaN", False)
    assert shown["why_not"].startswith("this is not a job: the body is not UTF-8")


async def test_a_long_dead_letter_is_cut_and_says_so(api: HttpApi) -> None:
    messages = [{"role": "user", "content": f"{'é' * 1000} password=hunter2hunter2 {number}"} for number in range(100)]
    dead_letter = await give_up(api, {"agent": "writer", "messages": messages})
    answer = await api.ask("GET", f"/api/v1/dlq/{dead_letter}")
    shown = answer.json
    assert shown["payload_cut"] is True
    assert isinstance(shown["payload"], str)
    assert 65_000 < len(shown["payload"].encode()) <= routes.MAX_PAYLOAD
    assert shown["payload_bytes"] > 100_000
    assert "hunter2" not in shown["payload"]
    text = await give_up(api, b"no json: " + b"x" * 30_000)
    shown = (await api.ask("GET", f"/api/v1/dlq/{text}")).json
    assert shown["payload_cut"] is True
    assert len(shown["payload"]) < 30_000


@pytest.mark.parametrize("number", ["999", "0", "-1", "x", "%D9%A3", "9" * 30, "9" * 5_000, "replay"])
async def test_a_dead_letter_that_is_not_there_is_said_so(api: HttpApi, number: str) -> None:
    await give_up(api)
    answer = await api.ask("GET", f"/api/v1/dlq/{number}")
    assert (answer.status, answer.code, answer.paths) == (404, "unknown_dead_letter", ["dead_letter_id"])
    assert "breakwater dlq list" in answer.message


async def test_a_replay_is_the_same_job_under_an_id_of_its_own(api: HttpApi) -> None:
    job = {
        "agent": "writer",
        "job_id": "order-1",
        "messages": [{"role": "user", "content": "é", "x-mine": [1.5, None]}],
        "params": {"temperature": 0.5, "seed": 12345678901234567890123},
        "tenant": "acme",
        "task_id": "t1",
        "parent_execution_id": "parent",
        "reply_to": "_INBOX.abc.1",
        "metadata": {"order": 1},
        "skip_cache": True,
    }
    of_key = {
        "Breakwater-User": "ada",
        "Breakwater-Team": "search",
        "Breakwater-Tags": "%7B%22project%22%3A%22x%22%7D",
        "Breakwater-Residency": "eu",
    }
    dead_letter = await give_up(api, job, headers={"Nats-Msg-Id": "writer/order-1", **of_key})
    [outcome] = (await replay(api, dead_letters=[dead_letter, dead_letter]))["replayed"]
    [queued] = await jobs(api)
    assert outcome == {"dead_letter_id": dead_letter, "execution_id": queued["job_id"]}
    assert queued["job_id"].startswith("rpl_")
    headers = queued.pop("_headers")
    assert headers[Header.MSG_ID.value] == f"writer/{queued['job_id']}"
    assert of_key.items() <= headers.items()
    assert Header.UNIQUE_ID.value not in headers
    wanted = {**job, "job_id": queued["job_id"], "metadata": {"order": 1, "replay_of": "order-1"}}
    assert queued == {**wanted, "_subject": "bw.jobs.writer"}
    assert (await api.ask("GET", f"/api/v1/jobs/{queued['job_id']}")).json["status"] == "accepted"


async def test_a_dead_letter_is_replayed_once_however_often_and_by_whom(api: HttpApi) -> None:
    dead_letters = [await give_up(api, sequence=number) for number in range(1, 11)]
    answers = await asyncio.gather(*(replay(api, dead_letters=dead_letters) for _ in range(4)))
    assert sum(len(one["replayed"]) for one in answers) == 10
    assert all(len(one["replayed"]) + one["already"] == 10 for one in answers)
    assert len(await jobs(api)) == 10
    # Neither JOBS' memory for ids, nor a record, is what it goes by.
    js = api.bus.jetstream()
    await js.purge_stream("JOBS")
    info = await js.stream_info("JOBS")
    await js.update_stream(info.config.evolve(duplicate_window=0.1))
    await asyncio.sleep(0.3)
    outcome = await replay(api, reason="error")
    assert (outcome["replayed"], outcome["already"], outcome["skipped"]) == ([], 10, [])
    assert await jobs(api) == []


async def test_a_replay_that_was_not_noted_is_the_same_job(api: HttpApi) -> None:
    dead_letter = await give_up(api)
    [first] = (await replay(api, dead_letters=[dead_letter]))["replayed"]
    await api.bus.jetstream().purge_stream("DLQ", subject=subjects.replay(dead_letter))
    outcome = await replay(api, dead_letters=[dead_letter])
    assert (outcome["replayed"], outcome["already"]) == ([], 1)
    [queued] = await jobs(api)
    assert queued["job_id"] == first["execution_id"]
    assert (await listed(api))[0]["replayed_as"] == first["execution_id"]


async def test_dead_letters_of_the_same_place_at_other_times_are_other_replays(api: HttpApi) -> None:
    dead_letters = [await give_up(api), await give_up(api, at=NOW + timedelta(seconds=1))]
    outcome = await replay(api, dead_letters=dead_letters)
    assert len({one["execution_id"] for one in outcome["replayed"]}) == 2


async def test_how_a_replay_stands_is_reported(api: HttpApi) -> None:
    dead_letters = [await give_up(api, sequence=number, execution_id=f"order-{number}") for number in range(1, 5)]
    again = [one["execution_id"] for one in (await replay(api, dead_letters=dead_letters[:3]))["replayed"]]
    await record(api, again[1])
    await publish_result(api.bus, result_of(again[2], "writer").model_copy(update={"status": "dead_lettered"}))
    found = list(reversed(await listed(api)))
    assert [one["replay_status"] for one in found] == ["accepted", "succeeded", "dead_lettered", None]
    assert [one["replayed_as"] for one in found] == [*again, None]
    assert [one["replayable"] for one in found] == [False, False, False, True]
    assert found[0]["why_not"] == f"it was replayed before, as {again[0]}"
    shown = (await api.ask("GET", f"/api/v1/dlq/{dead_letters[0]}")).json
    assert (shown["replayed_by"], shown["replay_status"]) == ("tests", "accepted")
    assert abs(datetime.fromisoformat(shown["replayed_at"]) - datetime.now(UTC)) < timedelta(hours=1)


async def test_a_replay_whose_record_has_aged_out_is_not_called_accepted(api: HttpApi) -> None:
    dead_letter = await give_up(api)
    note = {
        "dead_letter_id": dead_letter,
        "execution_id": "rpl_1",
        "agent": "writer",
        "by": "ops",
        "at": format_time(NOW - timedelta(hours=73)),
    }
    await api.bus.jetstream().publish(subjects.replay(dead_letter), json.dumps(note).encode())
    [found] = await listed(api)
    assert (found["replayed_as"], found["replay_status"]) == ("rpl_1", None)


CANT_RUN: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no JSON": (b'{"agent": "writer", "prompt":', {}, "this is not a job: the body is not JSON: "),
    "no job": (
        {"agent": "writer"},
        {},
        "this is not a job: exactly one of prompt, messages, input and api_request is required",
    ),
    "agent gone": (
        {"agent": "wroter", "prompt": "x"},
        {"agent": "wroter"},
        "agent 'wroter' is not configured; did you mean 'writer'?",
    ),
    "of another subject": (
        {"agent": "reader", "prompt": "x"},
        {},
        "the job is for agent 'reader', and was published on the subject of 'writer'",
    ),
    "against the config": (
        {"agent": "writer", "input": 1},
        {},
        "input: agent 'writer' is a chat agent and needs prompt or messages",
    ),
    "too long": (
        {"agent": "writer", "prompt": "x" * 1_002_000},
        {},
        "the job has 1,002,033 bytes; at most 1,000,000 are accepted (limits.max_body_bytes)",
    ),
    "an alert": (
        b"{}",
        {"stream": "ALERTS", "agent": None, "headers": {Header.CHANNEL.value: "ops"}},
        "it is an alert that did not reach channel 'ops'; `breakwater alerts replay --dead-letter 1` tries it again",
    ),
    "an alert that can't be stored": (
        b"{}",
        {"stream": "ALERTS", "agent": None},
        "it is an alert that could not be handled, and no job; it stays in ALERTS, and here for 30 days",
    ),
    "an event": (
        b"{}",
        {"stream": "EVENTS", "reason": "unstorable"},
        "it is an event that could not be handled, and no job; it stays in EVENTS for 72 h and here for 30 days",
    ),
}


@pytest.mark.parametrize("case", CANT_RUN)
async def test_what_cannot_run_is_skipped_with_the_reason(api: HttpApi, case: str) -> None:
    payload, more, why = CANT_RUN[case]
    bad = await give_up(api, payload, **more)
    good = await give_up(api)
    [_, found] = await listed(api)
    assert found["kind"] == {"ALERTS": "alert", "EVENTS": "event"}.get(more.get("stream", ""), "job")
    assert found["replayable"] is False
    assert found["why_not"].startswith(why)
    for outcome in (await replay(api, dead_letters=[bad]), await replay(api, all=True)):
        assert outcome["skipped"] == [{"dead_letter_id": bad, "why": found["why_not"]}]
    assert [job["job_id"] for job in await jobs(api)] == [(await listed(api))[0]["replayed_as"]]
    assert good > bad


async def test_what_keeps_a_job_from_running_is_reported_without_its_secrets(api: HttpApi) -> None:
    await give_up(api, {"agent": "ann@example.com", "prompt": "x"}, agent="ann@example.com")
    [found] = await listed(api)
    assert "ann@" not in found["why_not"]


async def test_a_job_that_succeeded_after_all_is_not_run_again(api: HttpApi) -> None:
    dead_letter = await give_up(api)
    await record(api, "order-1")
    [found] = await listed(api)
    assert (found["replayable"], found["replayed_as"]) == (False, None)
    assert found["why_not"] == "its job succeeded after all, by another worker: there is nothing to replay"
    assert (await replay(api, dead_letters=[dead_letter]))["skipped"] == [
        {"dead_letter_id": dead_letter, "why": found["why_not"]}
    ]
    assert await jobs(api) == []


async def test_a_job_that_failed_is_run_again_though_it_has_a_record(api: HttpApi) -> None:
    dead_letter = await give_up(api)
    await record(api, "order-1", status="dead_lettered")
    assert len((await replay(api, dead_letters=[dead_letter]))["replayed"]) == 1


async def test_a_job_that_was_given_up_while_it_slept_can_be_replayed(api: HttpApi) -> None:
    """Its agent was taken out of the config, and has come back."""
    parked = {**JOB, "job_id": None}
    js = api.bus.jetstream()
    headers = {
        Header.EXECUTION_ID.value: "e1",
        Header.DUE.value: format_time(NOW - timedelta(hours=1)),
        Header.QUEUED_AT.value: format_time(NOW - timedelta(hours=2)),
    }
    await js.publish(subjects.parked("writer", "e1"), json.dumps(parked).encode(), headers=headers)
    info = await js.stream_info("JOBS")
    await js.update_stream(_without(info.config, "bw.jobs.writer"))
    subscription = await js.pull_subscribe_bind("worker-parked", "PARKED")
    from breakwater.kernel.nats.delivery import Delivery

    [message] = await subscription.fetch(1, timeout=60)
    await DelayedQueue(Publisher(lambda: api.bus, "worker"), (), no_turn).handle(Delivery(message))
    await js.update_stream(info.config)
    [found] = await listed(api)
    assert (found["kind"], found["reason"], found["execution_id"]) == ("job", "unknown_agent", "e1")
    assert found["replayable"] is True
    await replay(api, all=True)
    [queued] = await jobs(api)
    assert queued["metadata"] == {"replay_of": "e1"}
    assert queued["_headers"][Header.EXECUTION_ID.value] == queued["job_id"]
    assert not {Header.QUEUED_AT.value, Header.DUE.value} & set(queued["_headers"])


def _without(config: StreamConfig, subject: str) -> StreamConfig:
    return config.evolve(subjects=[one for one in config.subjects or [] if one != subject])


async def test_many_are_replayed_a_part_at_a_time(api: HttpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_DEAD_LETTERS", 3)
    monkeypatch.setattr(routes, "AT_ONCE", 2)
    for number in range(1, 9):
        await give_up(api, sequence=number)
        await give_up(api, sequence=100 + number, reason="invalid")
    parts: list[int] = []
    more: dict[str, Any] = {}
    while True:
        outcome = await replay(api, reason="error", why="the provider is back", **more)
        parts.append(len(outcome["replayed"]))
        # What fails again meanwhile is not meant.
        await give_up(api, sequence=1_000 + len(parts))
        if outcome["continue_after"] is None:
            assert outcome["up_to"] is None
            break
        more = {"after": outcome["continue_after"], "up_to": outcome["up_to"]}
    assert parts == [3, 3, 2]
    assert len(await jobs(api)) == 8


async def test_a_dismissed_dead_letter_leaves_the_list_and_its_counts_and_is_found_by_its_state(api: HttpApi) -> None:
    kept = await give_up(api)
    odd = await give_up(api, {"agent": ODD_AGENT, "prompt": "x"}, agent=ODD_AGENT, reason="timeout")
    event = await give_up(api, b"?", agent=None, stream="EVENTS", execution_id=None)
    result = await dismiss(api, dead_letters=[event, odd, odd], why="mail ann@example.com")
    assert result == {
        "dismissed": [odd, event],
        "already": 0,
        "skipped": [],
        "continue_after": None,
        "up_to": None,
    }
    counts = {
        "open": [("error", "writer", 1)],
        "dismissed": [("error", "unknown", 1), ("timeout", ODD_AGENT, 1)],
        "all": [("error", "unknown", 1), ("error", "writer", 1), ("timeout", ODD_AGENT, 1)],
    }
    for state, numbers in {"open": [kept], "dismissed": [event, odd], "all": [event, odd, kept]}.items():
        answer = (await api.ask("GET", f"/api/v1/dlq?state={state}")).json
        assert [one["dead_letter_id"] for one in answer["dead_letters"]] == numbers, state
        assert [(one["reason"], one["agent"], one["count"]) for one in answer["counts"]] == counts[state], state
        by = {one["dead_letter_id"]: one["dismissed_by"] for one in answer["dead_letters"]}
        assert by == {number: None if number == kept else "tests" for number in numbers}
    assert [one["dead_letter_id"] for one in await listed(api)] == [kept], "open ones are the default"
    assert [one["dead_letter_id"] for one in await listed(api, "?state=dismissed&reason=timeout")] == [odd]
    shown = (await api.ask("GET", f"/api/v1/dlq/{odd}")).json
    assert (shown["dismissed_by"], shown["dismissed_why"]) == ("tests", "mail [REDACTED]")
    assert abs(datetime.fromisoformat(shown["dismissed_at"]) - datetime.now(UTC)) < timedelta(hours=1)
    assert (await api.ask("GET", f"/api/v1/dlq/{kept}")).json["dismissed_at"] is None
    assert (await api.ask("GET", "/api/v1/dlq?state=gone")).paths == ["state"]


async def test_an_incident_ends_once_all_of_its_dead_letters_are_replayed_or_dismissed(api: HttpApi) -> None:
    config = parse_config(CONFIG)
    log, rules = open_log(lambda: api.bus, Publisher(lambda: api.bus, "alerter"), config.alerts, config.redaction)
    failed = samples.execution("order-1", status="dead_lettered", reason="error", attempts_count=1, completed_at=NOW)
    [firing] = of_execution(failed, None, None)
    await log.apply(firing, rules)
    unreadable = of_dead_letter(
        DeadLetter(
            reason="invalid", agent=None, error="no job", stream="JOBS", subject="bw.jobs.x", sequence=9,
            payload_base64="", at=NOW,
        ),
        "dlq/9",
    )[0]  # fmt: skip
    await log.apply(unreadable, rules)

    async def statuses() -> dict[str, str]:
        return {alert.key: alert.status for alert in (await log.catch_up()).all()}

    one, two, _ = [await give_up(api, execution_id=f"order-{number}", sequence=number) for number in (1, 2, 3)]
    other = await give_up(api, {"agent": ODD_AGENT, "prompt": "x"}, agent=ODD_AGENT)
    await give_up(api, b"no job", reason="invalid", agent=None, execution_id=None)
    both = {"job_dead_lettered/writer/error", "job_dead_lettered//invalid"}
    assert await statuses() == dict.fromkeys(both, "firing")
    await dismiss(api, dead_letters=[one, other])
    await replay(api, dead_letters=[two])
    assert await statuses() == dict.fromkeys(both, "firing"), "one is left"
    await replay(api, reason="error", agent="writer")
    await dismiss(api, reason="invalid", why="a test")
    assert await statuses() == dict.fromkeys(both, "resolved")
    ended = {alert.key: alert for alert in log.incidents.all()}
    assert {alert.resolved_by for alert in ended.values()} == {"tests"}
    assert ended["job_dead_lettered//invalid"].reason == "a test"


async def test_dismissing_again_changes_nothing_and_an_unknown_id_is_named(api: HttpApi) -> None:
    dead_letters = [await give_up(api, sequence=number) for number in range(1, 11)]
    answers = await asyncio.gather(*(dismiss(api, dead_letters=dead_letters) for _ in range(4)))
    assert sum(len(one["dismissed"]) for one in answers) == 10
    assert all(len(one["dismissed"]) + one["already"] == 10 for one in answers)
    before = (await api.ask("GET", f"/api/v1/dlq/{dead_letters[0]}")).json
    result = await dismiss(api, dead_letters=[dead_letters[0], 999], why="another reason")
    assert (result["dismissed"], result["already"]) == ([], 1)
    assert result["skipped"] == [{"dead_letter_id": 999, "why": "there is no such dead letter"}]
    assert (await api.ask("GET", f"/api/v1/dlq/{dead_letters[0]}")).json == before
    assert (await dismiss(api, all=True))["already"] == 0, "all are the open ones"


async def test_a_dismissed_dead_letter_is_replayed_if_it_is_named_and_left_out_by_a_replay_of_all(api: HttpApi) -> None:
    dismissed = await give_up(api)
    kept = await give_up(api, sequence=2, execution_id="order-2")
    await dismiss(api, dead_letters=[dismissed])
    outcome = await replay(api, all=True)
    assert [one["dead_letter_id"] for one in outcome["replayed"]] == [kept]
    assert (outcome["already"], outcome["skipped"]) == (0, [])
    [found] = await listed(api, "?state=dismissed")
    assert found["replayable"] is True
    [again] = (await replay(api, dead_letters=[dismissed]))["replayed"]
    [found] = await listed(api, "?state=dismissed")
    assert (found["replayed_as"], found["dismissed_by"]) == (again["execution_id"], "tests")
    assert (await dismiss(api, dead_letters=[kept]))["dismissed"] == [kept], "replayed ones can be cleared away, too"


async def test_a_dismissal_and_a_replay_at_the_same_moment_are_both_noted_and_the_job_runs_once(api: HttpApi) -> None:
    dead_letters = [await give_up(api, sequence=number, execution_id=f"order-{number}") for number in range(1, 21)]
    await asyncio.gather(
        *(action(api, dead_letters=dead_letters) for action in (dismiss, replay, dismiss, replay)),
    )
    found = await listed(api, "?state=dismissed")
    assert len(found) == 20
    assert all(one["replayed_as"] for one in found)
    assert len(await jobs(api)) == 20


async def test_many_are_dismissed_a_part_at_a_time_and_only_those_that_are_meant(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_DEAD_LETTERS", 2)
    meant = [await give_up(api, sequence=number) for number in range(1, 6)]
    other = await give_up(api, agent="reader", execution_id="order-2")
    await dismiss(api, dead_letters=[meant[1]])
    first = await dismiss(api, agent="writer")
    assert (first["dismissed"], first["continue_after"]) == ([meant[0], meant[2]], meant[2])
    later = await give_up(api, sequence=9)
    last = await dismiss(api, agent="writer", after=first["continue_after"], up_to=first["up_to"])
    assert (last["dismissed"], last["continue_after"]) == (meant[3:], None)
    assert [one["dead_letter_id"] for one in await listed(api)] == [later, other]
    assert (await dismiss(api, all=True, since="9999-12-31T00:00:00Z"))["dismissed"] == []
    answer = await api.act("dlq/dismiss", why="no selection")
    assert (answer.status, answer.code) == (422, "invalid_request")


async def test_the_dismissal_of_a_dead_letter_that_has_expired_counts_for_nothing(api: HttpApi) -> None:
    expired = await give_up(api)
    await dismiss(api, dead_letters=[expired])
    kept = await give_up(api, sequence=2)
    await api.bus.jetstream().purge_stream("DLQ", seq=expired + 1)
    for state, count in {"open": 1, "dismissed": 0, "all": 1}.items():
        answer = (await api.ask("GET", f"/api/v1/dlq?state={state}")).json
        assert (len(answer["dead_letters"]), sum(one["count"] for one in answer["counts"])) == (count, count), state
    assert [one["dead_letter_id"] for one in await listed(api)] == [kept]


async def test_a_request_that_takes_long_is_answered_with_what_is_done(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "REPLAY_S", 0.0)
    dead_letters = [await give_up(api, sequence=number) for number in range(1, 4)]
    outcome = await replay(api, all=True)
    assert ([one["dead_letter_id"] for one in outcome["replayed"]], outcome["continue_after"]) == (
        dead_letters[:1],
        dead_letters[0],
    )


async def test_only_those_that_are_meant_are_replayed(api: HttpApi) -> None:
    await give_up(api, {"agent": "reader", "prompt": "x"}, agent="reader", sequence=1)
    mine = await give_up(api, sequence=2)
    await give_up(api, sequence=3, reason="timeout")
    outcome = await replay(api, reason="error", agent="writer")
    assert [one["dead_letter_id"] for one in outcome["replayed"]] == [mine]
    assert await replay(api, agent="nobody") == {
        "replayed": [],
        "already": 0,
        "skipped": [],
        "continue_after": None,
        "up_to": None,
    }
    assert (await replay(api, all=True, since=format_time(NOW + timedelta(days=1))))["replayed"] == []
    assert len(await jobs(api)) == 1


@each_row(
    ("body", "said"),
    [
        ({}, "select dead letters by dead_letters, reason, agent, or all"),
        ({"why": "because"}, "select dead letters by"),
        ({"dead_letters": [1], "reason": "error"}, "dead_letters already selects by id"),
        ({"all": True, "after": 7}, "after needs up_to"),
        ({"dead_letters": []}, "dead_letters"),
        ({"dead_letters": [0]}, "dead_letters.0"),
        ({"dead_letters": [True]}, "dead_letters.0"),
        ({"dead_letters": ["1"]}, "dead_letters.0"),
        ({"all": True, "after": True, "up_to": 7}, "after"),
        ({"all": True, "up_to": True}, "up_to"),
        ({"all": True, "since": "0001-01-01T00:00:00+14:00"}, "since"),
        ({"all": True, "since": "9999-12-31T23:59:59-14:00"}, "since"),
        ({"dead_letters": [1] * 1_001}, "dead_letters"),
        ({"reason": "error", "dead_letter_id": 1}, "did you mean 'dead_letters'?"),
    ],
)
async def test_a_request_that_does_not_say_which_is_refused(api: HttpApi, body: dict[str, Any], said: str) -> None:
    await give_up(api)
    answer = await api.act("dlq/replay", **body)
    assert (answer.status, answer.code) == (422, "invalid_request")
    assert said in answer.message
    assert await jobs(api) == []


async def test_a_thousand_numbers_fit_into_a_request(api: HttpApi) -> None:
    outcome = await replay(api, dead_letters=[10**10 + number for number in range(MAX_DEAD_LETTERS)])
    assert len(outcome["skipped"]) == 1_000


async def test_when_jobs_are_full_nothing_is_lost_and_asking_again_goes_on(api: HttpApi) -> None:
    dead_letters = [await give_up(api, sequence=number) for number in range(1, 6)]
    js = api.bus.jetstream()
    config = (await js.stream_info("JOBS")).config
    await js.update_stream(config.evolve(max_msgs=2))
    answer: Answer = await api.act("dlq/replay", dead_letters=dead_letters)
    assert (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "refused", "1")
    assert "2 were replayed before this happened, and asking again replays none of them twice" in answer.message
    await js.update_stream(config)
    outcome = await replay(api, dead_letters=dead_letters)
    assert (len(outcome["replayed"]), outcome["already"]) == (3, 2)
    assert len(await jobs(api)) == 5


@pytest_asyncio.fixture(loop_scope="package")
async def guarded_bus(redis_server: RunningServer, tmp_path: Path) -> AsyncGenerator[tuple[HttpApi, HttpApi]]:
    """An API that may do on the bus what `request` may; and the same, whose bus may do what `worker` may."""
    folder, port = tmp_path / "nats", free_port()
    folder.mkdir()
    settings = f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}" }}\n'
    server = start_nats(folder, settings + render(GRANTS, lambda user: f'"secret-of-{user}"'), port)
    server.wait_until_ready()

    def url_of(user: str) -> str:
        return f"nats://{user}:secret-of-{user}@127.0.0.1:{port}"

    config = parse_config(CONFIG)
    await provision(url_of("setup"), bus_plan(config))
    worker = await nats.connect(url_of("worker"), inbox_prefix=inbox_prefix("worker"))
    surroundings = settings_for(url_of("request"), redis_server.url, tmp_path)
    key = create_key(surroundings.api_keys_file, "tests")
    async with running(surroundings, config, key) as api:
        yield api, HttpApi(api.url, api.http, worker, api.settings, api.stop)
    await worker.close()
    server.stop()


async def test_what_the_user_of_the_bus_may_do_is_enough_for_all_of_it(guarded_bus: tuple[HttpApi, HttpApi]) -> None:
    api, as_worker = guarded_bus
    dead_letter = await give_up(as_worker)
    [outcome] = (await replay(api, all=True))["replayed"]
    await record(as_worker, outcome["execution_id"])
    answer = (await api.ask("GET", "/api/v1/dlq")).json
    assert answer["counts"] == [{"reason": "error", "agent": "writer", "count": 1}]
    assert [one["replay_status"] for one in answer["dead_letters"]] == ["succeeded"]
    assert (await api.ask("GET", f"/api/v1/dlq/{dead_letter}")).json["replayed_by"] == "tests"
    assert (await dismiss(api, all=True))["dismissed"] == [dead_letter]
    assert (await api.ask("GET", "/api/v1/dlq")).json == {"dead_letters": [], "more": False, "counts": []}
    assert [one["dismissed_by"] for one in await listed(api, "?state=dismissed")] == ["tests"]


async def test_what_is_encrypted_under_a_key_that_is_missing_is_kept_and_the_key_is_named(api: HttpApi) -> None:
    cipher, job_id = Cipher([new_key()]), new_id()
    away = cipher.key_ids[0]
    number = await give_up(api, cipher.encrypt_document(json.dumps(JOB).encode()))
    shown = (await api.ask("GET", f"/api/v1/dlq/{number}")).json
    assert (shown["payload"], shown["payload_withheld"], shown["replayable"]) == (None, False, False)
    assert f"encrypted with key {away}, and encryption.keys has none" in shown["why_not"]
    [skipped] = (await replay(api, dead_letters=[number]))["skipped"]
    assert away in skipped["why"]
    # As a worker writes it that has the key, and not only the job in it.
    [found] = [one async for one in Lookup(lambda: api.bus).scan(Stream.DLQ, "bw.dlq.>")]
    await api.bus.jetstream().publish(found.subject, cipher.encrypt_document(found.data))
    assert [away in one["why_not"] for one in await listed(api)] == [True, True]
    result = cipher.encrypt_document(result_of(job_id, "writer", "the answer").json_bytes())
    await api.bus.jetstream().publish(subjects.result(job_id), result)
    answer = await api.ask("GET", f"/api/v1/jobs/{job_id}")
    assert (answer.status, answer.code) == (503, "undecryptable")
    assert away in answer.message
    assert await jobs(api) == []


async def test_a_dead_letter_whose_text_was_left_out_says_so_and_can_not_be_replayed(api: HttpApi) -> None:
    number = await give_up(api)
    [found] = [one async for one in Lookup(lambda: api.bus).scan(Stream.DLQ, "bw.dlq.>")]
    await api.bus.jetstream().publish(found.subject, OFF.encrypt_document(found.data, private=True))
    [whole] = [one for one in await listed(api) if one["dead_letter_id"] == number]
    [left_out] = [one for one in await listed(api) if one["dead_letter_id"] != number]
    assert (whole["replayable"], left_out["replayable"]) == (True, False)
    assert "set BREAKWATER_PLANE_KEY" in left_out["why_not"]
    assert (await replay(api, dead_letters=[left_out["dead_letter_id"]]))["replayed"] == []
