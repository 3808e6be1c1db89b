"""Stopped tasks over HTTP: listed, reset, and what is published and recorded."""

import asyncio

import pytest
import structlog.testing

from breakwater.identity.api_keys import create_key
from breakwater.jobs.store.task_keys import TaskKey
from breakwater.kernel.nats import subjects
from breakwater.kernel.redis.connection import Redis, StateUnavailableError
from breakwater.kernel.types import time_from_ms
from breakwater.limits.contract import GuardEvent, StoppedTask
from breakwater.limits.rules.guard import Task, Trip
from breakwater.limits.store import tasks as tasks_module
from breakwater.limits.store.tasks import JobOutcome, Tasks, TripRecord
from tests.services.request.conftest import HttpApi

KEY = TaskKey("acme", "research 4711")
OF_ACME = {"task_id": "research 4711", "tenant": "acme"}


async def trip(redis: Redis, key: TaskKey = KEY, agent: str = "writer") -> TripRecord:
    tasks = Tasks(redis)
    await redis.run([tasks.enter_command(key, "x")])
    await tasks.record(
        key, "x", JobOutcome(tokens=40, cost=1_500_000, failed=True, called=True, error_hash="aa", confidence=None)
    )
    return await tasks.trip(key, Trip("max_iterations", "1 iteration (limit: 1)"), agent=agent, execution_id="x")


async def test_stopped_tasks_are_listed_in_the_order_in_which_they_were(governed: HttpApi, redis: Redis) -> None:
    assert (await governed.ask("GET", "/api/v1/guards")).json == {"stopped": []}
    first = await trip(redis)
    await Tasks(redis).restore(
        TaskKey(None, "nightly"), TripRecord(Trip("max_cost", "why"), "reader", "", first.at_ms + 5, published=True)
    )
    answer = await governed.ask("GET", "/api/v1/guards")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert [StoppedTask.model_validate(one) for one in answer.json["stopped"]] == [
        StoppedTask(
            task_id="research 4711",
            task_key="research 4711",
            tenant="acme",
            agent="writer",
            execution_id="x",
            rule="max_iterations",
            reason="1 iteration (limit: 1)",
            since=time_from_ms(first.at_ms),
        ),
        StoppedTask(
            task_id="nightly",
            task_key="nightly",
            agent="reader",
            rule="max_cost",
            reason="why",
            since=time_from_ms(first.at_ms + 5),
        ),
    ]


async def test_a_task_that_is_reset_goes_on_and_everybody_is_notified(governed: HttpApi, redis: Redis) -> None:
    tripped = await trip(redis)
    key_id = str(governed.http.headers["Authorization"]).split("_")[1]
    with structlog.testing.capture_logs() as logs:
        answer = await governed.act("guards/reset", **OF_ACME, reason="the loop was a bug")
    assert answer.status == 200
    reported = GuardEvent.model_validate_json(answer.body)
    assert reported.event_id == f"{KEY.name}@{tripped.at_ms}#reset/{key_id}"
    assert (reported.kind, reported.agent, reported.tenant, reported.task_id) == (
        "reset",
        "writer",
        "acme",
        "research 4711",
    )
    assert (reported.execution_id, reported.rule, reported.by) == ("x", "max_iterations", "tests")
    assert reported.reason == "reset by tests: the loop was a bug"
    assert (reported.iterations, reported.tokens, reported.cost, reported.total_failures, reported.unique_errors) == (
        1,
        40,
        1_500_000,
        1,
        1,
    )
    assert answer.json["cost"] == "0.001500000"
    assert await governed.events(subjects.guard("writer")) == [answer.json]
    assert await Tasks(redis).load(KEY) == (Task(), None)
    assert (await governed.ask("GET", "/api/v1/guards")).json == {"stopped": []}
    [noted] = [log for log in logs if log["event"] == "guard_reset"]
    assert noted == {
        "event": "guard_reset",
        "log_level": "info",
        "by": "tests",
        "key_id": key_id,
        "why": "the loop was a bug",
        "task_id": "research 4711",
        "tenant": "acme",
        "agent": "writer",
        "rule": "max_iterations",
    }


async def test_a_task_is_reset_by_the_name_that_its_caller_gave_it(governed: HttpApi, redis: Redis) -> None:
    tasks = Tasks(redis)
    trip = Trip("max_iterations", "1 iteration (limit: 1)")
    for key in ("x-1", "x-2"):
        await tasks.trip(TaskKey("acme", key), trip, agent="writer", execution_id="x", task_id="nightly")
    several = await governed.act("guards/reset", task_id="nightly", tenant="acme")
    assert (several.status, several.code) == (404, "unknown_task")
    assert "x-1, x-2" in several.body.decode()
    for name, key in (("x-2", "x-2"), ("nightly", "x-1")):
        answer = await governed.act("guards/reset", task_id=name, tenant="acme")
        assert (answer.json["task_id"], answer.json["task_key"]) == ("nightly", key)
    assert await tasks.stopped_tasks() == []


async def test_a_reset_by_name_prefers_the_stopped_task_to_one_that_goes_on(governed: HttpApi, redis: Redis) -> None:
    tasks = Tasks(redis)
    running = TaskKey("acme", "nightly")
    outcome = JobOutcome(tokens=40, cost=1, failed=False, called=True, error_hash=None, confidence=None)
    await redis.run([tasks.enter_command(running, "x")])
    counted = await tasks.record(running, "x", outcome)
    trip = Trip("max_iterations", "1 iteration (limit: 1)")
    await tasks.trip(TaskKey("acme", "x-1"), trip, agent="writer", execution_id="x", task_id="nightly")
    answer = await governed.act("guards/reset", task_id="nightly", tenant="acme")
    assert (answer.json["task_id"], answer.json["task_key"]) == ("nightly", "x-1")
    assert (await tasks.stopped_tasks(), await tasks.load(running)) == ([], (counted, None))


async def test_a_reset_whose_answer_was_lost_is_answered_again_and_published_once(
    governed: HttpApi, redis: Redis
) -> None:
    await trip(redis)
    first = await governed.act("guards/reset", **OF_ACME)
    again = await governed.act("guards/reset", **OF_ACME)
    assert (first.status, again.status) == (200, 200)
    assert again.json["event_id"] == first.json["event_id"]
    assert await governed.events("bw.guards.>") == [first.json]


async def test_many_who_reset_it_at_once_are_each_on_record_once(governed: HttpApi, redis: Redis) -> None:
    await trip(redis)
    other = {"Authorization": f"Bearer {create_key(governed.settings.api_keys_file, 'other')}"}
    body = b'{"task_id": "research 4711", "tenant": "acme"}'
    answers = await asyncio.gather(
        *(
            governed.ask("POST", "/api/v1/guards/reset", data=body, headers=other if number % 2 else {})
            for number in range(10)
        )
    )
    assert {answer.status for answer in answers} == {200}
    assert sorted(event["by"] for event in await governed.events("bw.guards.>")) == ["other", "tests"]


async def test_a_task_that_trips_again_can_be_reset_again(governed: HttpApi, redis: Redis) -> None:
    first = await trip(redis)
    await governed.act("guards/reset", **OF_ACME)
    while (await trip(redis)).at_ms == first.at_ms:
        await Tasks(redis).reset(KEY)
    await governed.act("guards/reset", **OF_ACME)
    reported = await governed.events("bw.guards.>")
    assert len({event["event_id"] for event in reported}) == len(reported) == 2


async def test_a_task_that_is_not_stopped_may_be_given_a_fresh_start(governed: HttpApi, redis: Redis) -> None:
    await redis.run([Tasks(redis).enter_command(TaskKey(None, "t"), "x")])
    answer = await governed.act("guards/reset", task_id="t", reason="wants more turns")
    assert (answer.status, answer.json["agent"], answer.json["rule"]) == (200, "*", None)
    assert (answer.json["execution_id"], answer.json["iterations"]) == (None, 1)
    assert await governed.events(subjects.guard("*")) == [answer.json]
    assert await Tasks(redis).load(TaskKey(None, "t")) == (Task(), None)


async def test_what_nobody_knows_is_answered_with_what_may_be_meant(governed: HttpApi, redis: Redis) -> None:
    nothing = await governed.act("guards/reset", task_id="t")
    assert (nothing.status, nothing.code, nothing.paths) == (404, "unknown_task", ["task_id"])
    assert nothing.message == "nothing is known of a task 't'; no task is stopped"
    await trip(redis)
    for body, path, hint in [
        ({"task_id": "research 4711"}, "tenant", "one of that id is stopped, of tenant 'acme'"),
        ({"task_id": "research 471", "tenant": "acme"}, "task_id", "did you mean 'research 4711'?"),
    ]:
        answer = await governed.act("guards/reset", **body)
        assert (answer.status, answer.code, answer.paths) == (404, "unknown_task", [path])
        assert answer.message.endswith(f"; {hint}")
    assert await governed.events("bw.guards.>") == []


async def test_one_that_is_published_but_not_done_is_published_once_when_it_is_done(
    governed: HttpApi, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trip(redis)

    async def away(_tasks: Tasks, _key: TaskKey) -> tuple[Task, TripRecord | None]:
        raise StateUnavailableError("Redis did not answer")

    with monkeypatch.context() as patch:
        patch.setattr(Tasks, "reset", away)
        answer = await governed.act("guards/reset", **OF_ACME)
    assert (answer.status, answer.code) == (503, "unavailable")
    assert (await Tasks(redis).load(KEY))[1] is not None
    assert (await governed.act("guards/reset", **OF_ACME)).status == 200
    assert len(await governed.events("bw.guards.>")) == 1
    assert await Tasks(redis).load(KEY) == (Task(), None)


async def test_a_trip_that_a_reset_meets_on_its_way_is_reported_as_reset_too(
    governed: HttpApi, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await redis.run([Tasks(redis).enter_command(KEY, "x")])
    resetting, tripped = Tasks.reset, list[TripRecord]()

    async def tripping_before(tasks: Tasks, key: TaskKey) -> tuple[Task, TripRecord | None]:
        if not tripped:
            tripped.append(await trip(redis))
        return await resetting(tasks, key)

    monkeypatch.setattr(Tasks, "reset", tripping_before)
    answer = await governed.act("guards/reset", **OF_ACME)
    reported = await governed.events("bw.guards.>")
    assert [(event["agent"], event["rule"]) for event in reported] == [("*", None), ("writer", "max_iterations")]
    # The two may happen in one millisecond: JetStream must not take them for one.
    assert "@untripped-" in reported[0]["event_id"]
    assert reported[1] == answer.json


async def test_of_very_many_stopped_tasks_the_last_are_listed(
    governed: HttpApi, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_module, "MAX_LISTED", 2)
    for number in range(4):
        stopped = TripRecord(Trip("max_cost", "why"), "reader", "", 1_000 + number, published=True)
        await Tasks(redis).restore(TaskKey(None, f"t{number}"), stopped)
    answer = await governed.ask("GET", "/api/v1/guards")
    assert [one["task_id"] for one in answer.json["stopped"]] == ["t2", "t3"]
