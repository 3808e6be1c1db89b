"""Redis is emptied while jobs run: each call is still an attempt, and no text is out twice."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import DEFAULT, AsyncMock, Mock, patch

import pytest

from breakwater.calls.assignment import Checkpoint
from breakwater.jobs.rules.workers import LIVENESS, Liveness
from breakwater.jobs.store.executions import MAYBE_HELD_MS, Claim, ClaimLostError
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.process import background
from breakwater.kernel.redis.connection import KEPT_SINCE, StateUnavailableError
from breakwater.kernel.types import nano_from_usd
from breakwater.services.worker import attempts
from breakwater.services.worker.dead_workers import DeadWorkers
from breakwater.services.worker.handler import HELD_DELAY_S
from breakwater.services.worker.held_jobs import EarlierMessages
from tests.flow.kit import model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane
from tests.services.worker.test_claims import Held

ANSWER = "".join(f"{number:03d} " for number in range(60))
SLOW = {"tokens_per_s": 30}
AGENT: dict[str, Any] = {"model": "sim/m", "retry": {"max_attempts": 3, "backoff": "constant", "base_s": 0}}
JOB: dict[str, Any] = {"agent": "writer", "job_id": "j1", "prompt": "Count."}
KEY = Claim("j1", "").key


def renewed_every(seconds: float) -> Liveness:
    """The times of a worker that renews its claims at another interval."""
    return replace(LIVENESS, renew_every_s=seconds)


@pytest.fixture
def start_worker(start_worker: StartWorker) -> StartWorker:
    """Starts a worker that renews its claims ten times a second, unless a test says otherwise."""
    return partial(start_worker, liveness=renewed_every(0.1))


async def listen(plane: WorkerPlane) -> list[dict[str, Any]]:
    """The messages of chunks that are published from now on."""
    heard: list[dict[str, Any]] = []

    async def note(message: Any) -> None:
        heard.append(json.loads(message.data))

    await plane.client.subscribe("bw.chunks.>", cb=note)
    return heard


def text_of(heard: list[dict[str, Any]]) -> str:
    choices = [choice for message in heard for chunk in message["chunks"] for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def empty_redis(plane: WorkerPlane) -> None:
    await plane.worker.redis.client.flushall()


async def die(plane: WorkerPlane) -> None:
    """Ends the worker as a kill does, but for its deliveries: it releases and restores nothing."""
    gone = AsyncMock(side_effect=StateUnavailableError("the worker is dead"))
    with patch.object(plane.worker.leases, "release", gone):
        await plane.end()


async def is_restored(plane: WorkerPlane) -> Checkpoint | None:
    """The checkpoint, once Redis has all of the execution again."""
    checkpoint, digest = await plane.worker.redis.client.hmget(KEY, ["checkpoint", "digest"])
    return None if digest is None or checkpoint is None else Checkpoint.model_validate_json(checkpoint)


async def calls_of(plane: WorkerPlane) -> int:
    """The number of calls, each of which is an attempt of the result, of the log and of the record."""
    result, logged = await plane.result("j1"), await plane.attempts("writer", "j1")
    assert [one["attempt_id"] for one in result["attempts"]] == [one["attempt_id"] for one in logged]
    calls = len(plane.sim.ledger.calls)
    assert len(logged) == calls
    return calls


@pytest.mark.parametrize("on_stream_break", ["continue", "fail"])
async def test_a_streamed_answer_goes_on_where_redis_is_emptied(
    start_worker: StartWorker, on_stream_break: str
) -> None:
    agent = {**AGENT, "on_stream_break": on_stream_break}
    models = {"sim/m": model(answer=ANSWER, stream=SLOW)}
    async with start_worker(models, {"writer": agent}, liveness=renewed_every(600.0)) as plane:
        heard = await listen(plane)
        await plane.publish({**JOB, "stream": True})
        for length in (20, 60):
            await until(lambda: len(text_of(heard)) > length, "a part of the answer")  # noqa: B023
            await empty_redis(plane)
        result = await plane.result("j1")
        assert await calls_of(plane) == 1
        await until(lambda: heard[-1]["chunks"][-1]["choices"] == [])
    assert (result["output"], text_of(heard)) == (ANSWER, ANSWER)
    assert [message["number"] for message in heard] == list(range(1, len(heard) + 1))


@pytest.mark.parametrize("restored", [True, False], ids=["renewed", "stopped_before_a_renewal"])
async def test_another_worker_continues_an_answer_after_redis_was_emptied(
    start_worker: StartWorker, *, restored: bool
) -> None:
    agent = {**AGENT, "on_stream_break": "continue"}
    stalled = {"stream": "stall", "after_chunks": 30, "requests": [1, 1]}
    models = {"sim/m": model(stalled, answer=ANSWER)}
    liveness = renewed_every(0.1 if restored else 600.0)
    async with start_worker(models, {"writer": agent}, begin=False, liveness=liveness) as plane:
        heard = await listen(plane)
        plane.begin()
        await plane.publish({**JOB, "stream": True})
        await until(lambda: len(text_of(heard)) == 4 * 30, "the first part")
        await empty_redis(plane)
        if restored:
            await until(lambda: is_restored(plane), "the checkpoint")
        await plane.end()
        plane.begin()
        result = await plane.result("j1")
        assert await calls_of(plane) == 2
        await until(lambda: heard[-1]["chunks"][-1]["choices"] == [])
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["worker_lost", "success"]
    assert (result["output"], text_of(heard)) == (ANSWER, ANSWER)
    assert [message["number"] for message in heard] == list(range(1, len(heard) + 1))


async def test_a_part_that_is_about_to_be_published_is_not_taken_for_one_that_was_restored(
    start_worker: StartWorker,
) -> None:
    agent = {**AGENT, "on_stream_break": "continue"}
    stalled = {"stream": "stall", "after_chunks": 30, "requests": [1, 1]}
    begins = attempts.Attempts._answer_begins  # pyright: ignore[reportPrivateUsage]
    async with start_worker({"sim/m": model(stalled, answer=ANSWER)}, {"writer": agent}, begin=False) as plane:

        async def emptied(*arguments: Any) -> None:
            await begins(*arguments)
            await empty_redis(plane)
            await until(lambda: is_restored(plane), "the checkpoint")

        heard = await listen(plane)
        with patch.object(attempts.Attempts, "_answer_begins", emptied):
            plane.begin()
            await plane.publish({**JOB, "stream": True})
            await until(lambda: len(text_of(heard)) == 4 * 30, "the first part")
            await plane.end()
            plane.begin()
            result = await plane.result("j1")
        await until(lambda: heard[-1]["chunks"][-1]["choices"] == [])
    assert (result["output"], text_of(heard)) == (ANSWER, ANSWER)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_call_with_earlier_attempts_is_an_attempt_after_redis_was_emptied(
    start_worker: StartWorker, *, stream: bool
) -> None:
    models = {
        "sim/bad": model({"status": 500}),
        "sim/m": model({"hang_s": 60, "requests": [1, 1]}, answer=ANSWER),
    }
    agent = {**AGENT, "model": "sim/bad", "fallback_models": ["sim/m"], "retry": {**AGENT["retry"], "max_attempts": 2}}
    async with start_worker(models, {"writer": agent}) as plane:
        await plane.publish({**JOB, "stream": stream})
        await until(lambda: len(plane.sim.ledger.calls) == 3, "the call of the second model")
        await empty_redis(plane)
        await until(lambda: is_restored(plane), "the checkpoint")
        at = await is_restored(plane)
        assert at is not None
        assert at.in_flight is not None
        assert (len(at.attempts), at.in_flight.number) == (2, 3)
        await plane.end()
        plane.begin()
        result = await plane.result("j1")
        assert await calls_of(plane) == 4
    outcomes = [(attempt["model"], attempt["outcome"]) for attempt in result["attempts"]]
    assert outcomes == [("sim/bad", "error")] * 2 + [("sim/m", "worker_lost"), ("sim/m", "success")]


async def test_a_call_whose_worker_died_as_redis_was_emptied_is_an_attempt(start_worker: StartWorker) -> None:
    models = {
        "sim/bad": model({"status": 500}),
        "sim/m": model({"hang_s": 60, "requests": [1, 1]}, answer=ANSWER),
    }
    agent = {**AGENT, "model": "sim/bad", "fallback_models": ["sim/m"], "retry": {**AGENT["retry"], "max_attempts": 2}}
    async with start_worker(models, {"writer": agent}) as plane:
        await plane.publish(JOB)
        await until(lambda: len(plane.sim.ledger.calls) == 3, "the call of the second model")
        await die(plane)
        await empty_redis(plane)
        plane.begin()
        result = await plane.result("j1")
        assert await calls_of(plane) == 4
        called = {call.client_request_id: call.cost_nano for call in plane.sim.ledger.calls}
    costs = {attempt["attempt_id"]: nano_from_usd(attempt["cost"]) for attempt in result["attempts"]}
    assert called.keys() == costs.keys()
    assert all(costs[attempt_id] >= cost for attempt_id, cost in called.items())
    outcomes = [(attempt["model"], attempt["outcome"], attempt["cost_basis"]) for attempt in result["attempts"][2:]]
    assert outcomes == [("sim/m", "worker_lost", "estimated"), ("sim/m", "success", "billed")]


async def test_the_lost_call_of_a_job_that_depends_on_others_is_an_attempt(start_worker: StartWorker) -> None:
    models = {"sim/m": model({"hang_s": 60, "requests": [2, 2]})}
    async with start_worker(models, {"writer": AGENT}) as plane:
        await plane.run({**JOB, "job_id": "first"})
        await plane.publish({**JOB, "depends_on": ["first"]})
        await until(lambda: len(plane.sim.ledger.calls) == 2, "the call of the second job")
        await die(plane)
        await empty_redis(plane)
        plane.begin()
        result = await plane.result("j1")
        assert len(plane.sim.ledger.calls) == 3
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["worker_lost", "success"]


async def test_a_claim_that_recorded_nothing_leaves_the_lost_call_to_the_next_one(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model({"hang_s": 60, "requests": [1, 1]})}, {"writer": AGENT}) as plane:
        await plane.publish(JOB)
        await until(lambda: plane.sim.ledger.calls, "the call")
        await die(plane)
        await empty_redis(plane)
        with patch.object(attempts, "recover", AsyncMock(side_effect=ClaimLostError("j1"))) as resumed:
            plane.begin()
            await until(lambda: resumed.called, "the second worker")
            await die(plane)
        plane.begin()
        result = await plane.result("j1")
        assert await calls_of(plane) == 2
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["worker_lost", "success"]


@pytest.mark.parametrize("on_stream_break", ["continue", "fail"])
async def test_a_streamed_answer_whose_part_is_lost_is_not_begun_again(
    start_worker: StartWorker, on_stream_break: str
) -> None:
    agent = {**AGENT, "on_stream_break": on_stream_break}
    stalled = {"stream": "stall", "after_chunks": 30, "requests": [1, 1]}
    async with start_worker({"sim/m": model(stalled, answer=ANSWER)}, {"writer": agent}) as plane:
        heard = await listen(plane)
        await plane.publish({**JOB, "stream": True})
        await until(lambda: len(text_of(heard)) == 4 * 30, "the first part")
        await die(plane)
        await empty_redis(plane)
        plane.begin()
        result = await plane.result("j1")
        assert await calls_of(plane) == 1
    assert (result["status"], result["error"]["class"]) == ("dead_lettered", "AnswerLostError")
    assert text_of(heard) == ANSWER[: 4 * 30]


async def test_a_heartbeat_restores_what_redis_has_lost(start_worker: StartWorker) -> None:
    held, liveness = Held(), renewed_every(600.0)
    async with start_worker({"sim/m": model()}, {"writer": AGENT}, providers={"sim": held}, liveness=liveness) as plane:
        heartbeats = asyncio.create_task(DeadWorkers(plane.worker, lambda: plane.client, lambda: ["writer"]).run())
        try:
            await plane.publish(JOB)
            await until(lambda: held.calls, "the call")
            for _ in range(2):
                await until(lambda: plane.worker.redis.client.get(KEPT_SINCE), "a heartbeat")
                await empty_redis(plane)
                await until(lambda: is_restored(plane), "the checkpoint")
        finally:
            await background.stop(heartbeats)


async def test_the_next_heartbeat_restores_what_one_could_not(start_worker: StartWorker) -> None:
    held, liveness = Held(), renewed_every(600.0)
    async with start_worker({"sim/m": model()}, {"writer": AGENT}, providers={"sim": held}, liveness=liveness) as plane:
        leases = plane.worker.leases
        renew = AsyncMock(wraps=leases.renew, side_effect=[StateUnavailableError("it comes and goes"), DEFAULT])
        heartbeats = asyncio.create_task(DeadWorkers(plane.worker, lambda: plane.client, lambda: ["writer"]).run())
        try:
            await plane.publish(JOB)
            await until(lambda: held.calls, "the call")
            await until(lambda: plane.worker.redis.client.get(KEPT_SINCE), "a heartbeat")
            with patch.object(leases, "renew", renew):
                await empty_redis(plane)
                await until(lambda: is_restored(plane), "the checkpoint")
            assert renew.await_count > 1
        finally:
            await background.stop(heartbeats)


@pytest.mark.parametrize("step", ["call", "record"], ids=["before_the_call", "before_its_record"])
async def test_redis_is_emptied_just_before_a_step(start_worker: StartWorker, step: str) -> None:
    do = getattr(attempts, step)
    async with start_worker({"sim/m": model(answer=ANSWER)}, {"writer": AGENT}) as plane:

        async def emptied(*arguments: Any) -> Any:
            await empty_redis(plane)
            return await do(*arguments)

        with patch.object(attempts, step, emptied):
            result = await plane.run(JOB)
        assert await calls_of(plane) == 1
    assert (result["status"], result["output"]) == ("succeeded", ANSWER)


@asynccontextmanager
async def lost_claim(start_worker: StartWorker, *, renew_every_s: float) -> AsyncGenerator[tuple[WorkerPlane, Held]]:
    """Starts a worker with room for three jobs, which makes the call of one whose claim Redis then loses."""
    held = Held()
    agents = {"writer": {**AGENT, "concurrency": 3}}
    liveness = renewed_every(renew_every_s)
    async with start_worker({"sim/m": model()}, agents, providers={"sim": held}, liveness=liveness) as plane:
        await plane.publish(JOB)
        await until(lambda: held.calls, "the call")
        await empty_redis(plane)
        yield plane, held


async def test_a_redelivery_waits_for_the_worker_whose_claim_redis_has_lost(start_worker: StartWorker) -> None:
    async with lost_claim(start_worker, renew_every_s=1.0) as (plane, held):
        [delivery] = plane.worker.leases.deliveries
        # As NATS does after a stop that was longer than the ack wait.
        await delivery.retry_in(0)
        await until(lambda: redelivered(plane), "the redelivery")
        await until(lambda: is_restored(plane), "the checkpoint")
        held.answer.set()
        result = await plane.result("j1")
        assert (result["attempts_count"], len(held.calls)) == (1, 1)
        assert "job_taken_over" not in plane.log("worker")


async def test_a_second_message_waits_for_the_worker_whose_claim_redis_has_lost(start_worker: StartWorker) -> None:
    async with lost_claim(start_worker, renew_every_s=600.0) as (plane, held):
        # As a client that does not know whether the job was accepted.
        await plane.publish(JOB)
        await second_message_waits(plane, of=2)
        held.answer.set()
        result = await plane.result("j1")
        assert (result["attempts_count"], len(held.calls)) == (1, 1)
        await until(lambda: is_empty(plane, Stream.JOBS), "the second message to be acknowledged")
        assert "job_taken_over" not in plane.log("worker")


async def test_a_worker_that_starts_after_a_loss_knows_at_once_what_others_hold(start_worker: StartWorker) -> None:
    async with lost_claim(start_worker, renew_every_s=600.0) as (plane, held):
        kept_since_ms = await DeadWorkers(plane.worker, lambda: plane.client, lambda: ["writer"]).join()
        assert kept_since_ms is not None
        earlier_messages = EarlierMessages(plane.worker, "writer")
        await earlier_messages.look(kept_since_ms)
        plane.handlers["writer"].earlier_messages = earlier_messages
        second_look = AssertionError("a job waits for a second look")
        with patch("breakwater.services.worker.held_jobs.held_jobs", side_effect=second_look):
            await plane.publish({**JOB, "job_id": "j2"})
            await until(lambda: len(held.calls) == 2, "the call of a job that nobody held")
            await plane.publish(JOB)
            await second_message_waits(plane, of=3)
        held.answer.set()
        assert (await plane.result("j1"))["attempts_count"] == 1
        assert len(held.calls) == 2


async def test_only_what_was_held_as_the_data_began_is_an_earlier_message(start_worker: StartWorker) -> None:
    held = Held()
    async with start_worker({"sim/m": model()}, {"writer": AGENT}, providers={"sim": held}) as plane:
        sequence = await plane.publish(JOB)
        await until(lambda: held.calls, "the call")
        stored_at = (await plane.jetstream.get_msg(Stream.JOBS.value, sequence)).time
        assert stored_at is not None
        stored_ms = stored_at.timestamp() * 1000
        second_message = Mock(execution_id="j1", delivery=Mock(sequence=sequence + 1))
        for kept_since_ms, is_held in ((math.floor(stored_ms) - 1, False), (math.ceil(stored_ms) + 1, True)):
            earlier_messages = EarlierMessages(plane.worker, "writer")
            assert await earlier_messages.has_of(second_message, kept_since_ms) is is_held
        held.answer.set()


async def test_a_worker_that_starts_on_old_data_looks_for_nothing(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, {"writer": AGENT}, begin=False) as plane:
        joining = DeadWorkers(plane.worker, lambda: plane.client, lambda: ["writer"])
        client = plane.worker.redis.client
        seconds, _ = await client.time()
        for age_ms, expected in ((0, seconds * 1000), (MAYBE_HELD_MS, None)):
            await client.set(KEPT_SINCE, seconds * 1000 - age_ms)
            assert await joining.join() == expected


async def is_empty(plane: WorkerPlane, stream: Stream) -> bool:
    return not (await plane.jetstream.stream_info(stream.value)).state.messages


async def second_message_waits(plane: WorkerPlane, *, of: int) -> None:
    await until(lambda: len(plane.worker.leases.deliveries) == of, "the second message")
    await asyncio.sleep(2 * HELD_DELAY_S)
    assert len(plane.worker.leases.deliveries) == of
    assert not await redelivered(plane), "a redelivery looks like that of a job that was begun"


async def redelivered(plane: WorkerPlane) -> bool:
    info = await plane.jetstream.consumer_info(Stream.JOBS.value, "worker-writer")
    return bool(info.num_redelivered)
