"""Answers whose chunks are kept: the log is what another worker continues from, whatever crashed in between."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest

from breakwater.dialects.contract.stored_response import StoredResponse
from breakwater.dialects.store.response_log import ResponseLog
from breakwater.jobs.store.executions import ClaimLostError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.errors import AlreadyDecidedError
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.security.encryption import new_key
from tests.flow.kit import model
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

ANSWER = "".join(f"{number:03d} " for number in range(60))
STALLED: dict[str, Any] = {"stream": "stall", "after_chunks": 30, "requests": [1, 1]}
JOB = {"agent": "writer", "job_id": "j1", "prompt": "Count.", "stream": True, "keep_chunks": True}
AGENTS = {"writer": {"model": "sim/m", "retry": {"backoff": "constant", "base_s": 0}}}


def log_of(plane: WorkerPlane) -> ResponseLog:
    return ResponseLog(plane.worker.publisher, plane.worker.lookup, plane.worker.cipher)


async def kept(plane: WorkerPlane) -> list[dict[str, Any]]:
    messages, _ = await log_of(plane).messages("j1", whole=True)
    return messages


def text_of(messages: list[dict[str, Any]]) -> str:
    choices = [choice for message in messages for chunk in message["chunks"] for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def dies_at(plane: WorkerPlane, step: str) -> None:
    """Runs the job until its worker dies as it comes to a function, by its module and name."""
    with patch(step, AsyncMock(side_effect=ClaimLostError("j1"))) as reached:
        await plane.publish(JOB)
        await until(lambda: reached.called, step)
        await plane.end()
    plane.begin()


async def test_another_worker_continues_from_the_log(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model(STALLED, answer=ANSWER)}, AGENTS) as plane:
        live: list[dict[str, Any]] = []

        async def note(message: Any) -> None:
            live.append(json.loads(message.data))

        await plane.client.subscribe("bw.chunks.>", cb=note)
        await plane.publish(JOB)
        await until(lambda: len(text_of(live)) == 4 * 30, "the first part")
        await plane.end()
        # All that Redis knows of the answer may be lost.
        await plane.worker.redis.client.hdel("bw:execution:j1", "partial", "partial_messages")
        plane.begin()
        result = await plane.result("j1")
        stored = await kept(plane)
        await until(lambda: len(live) == len(stored), "the last part")
    assert (result["status"], result["output"]) == ("succeeded", ANSWER)
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["worker_lost", "success"]
    assert live == stored, "what is live is in the log, and nothing else"
    assert [message["number"] for message in stored] == list(range(1, len(stored) + 1))
    assert text_of(stored) == ANSWER


async def test_a_broken_stream_is_continued_though_the_agent_would_fail(start_worker: StartWorker) -> None:
    cut = {"stream": "cut", "after_chunks": 30, "requests": [1, 1]}
    async with start_worker({"sim/m": model(cut, answer=ANSWER)}, AGENTS) as plane:
        result = await plane.run(JOB)
        stored = await kept(plane)
    assert (result["status"], result["output"], text_of(stored)) == ("succeeded", ANSWER, ANSWER)
    assert len(result["attempts"]) == 2


@pytest.mark.parametrize(
    "step", ["breakwater.services.worker.attempts.record", "breakwater.services.worker.handler.finish"]
)
async def test_an_answer_that_is_whole_in_the_log_is_not_asked_for_again(start_worker: StartWorker, step: str) -> None:
    async with start_worker({"sim/m": model(answer=ANSWER)}, AGENTS) as plane:
        await dies_at(plane, step)
        result = await plane.result("j1")
        stored = await kept(plane)
        calls = plane.sim.ledger.totals.calls
    [attempt] = result["attempts"]
    assert (result["status"], result["output"], result["finish_reason"]) == ("succeeded", ANSWER, "stop")
    assert (attempt["outcome"], attempt["cost_basis"], attempt["output_tokens"]) == ("success", "billed", 40)
    assert (text_of(stored), calls) == (ANSWER, 1)


async def test_an_answer_of_which_nothing_is_in_the_log_is_asked_for_again(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model(answer=ANSWER)}, AGENTS) as plane:
        # The checkpoint says that a part may be out; the log, that none is.
        await dies_at(plane, "breakwater.services.worker.streaming.ResponseLog.append")
        result = await plane.result("j1")
        stored = await kept(plane)
    assert (result["status"], result["output"], text_of(stored)) == ("succeeded", ANSWER, ANSWER)
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["worker_lost", "success"]


async def test_a_call_goes_on_whose_chunks_are_gone(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model(answer=ANSWER, stream={"tokens_per_s": 30})}, AGENTS) as plane:
        await plane.publish(JOB)
        await until(lambda: _has_begun(plane), "a part of the answer")
        await plane.jetstream.purge_stream(Stream.RESPONSES.value)
        result = await plane.result("j1")
        stored, calls = await kept(plane), len(plane.sim.ledger.calls)
    assert (result["status"], result["output"], result["attempts_count"], calls) == ("succeeded", ANSWER, 1, 1)
    assert stored[0]["number"] > 1, "its readers see that the beginning is gone"


@pytest.mark.parametrize("later", [True, False], ids=["with_later_chunks", "with_none"])
async def test_a_call_whose_chunks_are_gone_is_not_repeated(start_worker: StartWorker, *, later: bool) -> None:
    slow = model(answer=ANSWER, stream={"tokens_per_s": 10})
    async with start_worker({"sim/m": slow}, AGENTS) as plane:
        await plane.publish(JOB)
        await until(lambda: _has_begun(plane), "a part of the answer")
        await plane.jetstream.purge_stream(Stream.RESPONSES.value)
        if later:
            await until(lambda: kept(plane), "a later part")
        await plane.end()
        if not later:
            await plane.jetstream.purge_stream(Stream.RESPONSES.value)
        plane.begin()
        result = await plane.result("j1")
        calls = len(plane.sim.ledger.calls)
    assert (result["status"], result["reason"], calls) == ("dead_lettered", "worker_lost", 1)
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["worker_lost"]
    assert (result["error"]["class"], "limits.responses_max_bytes" in result["error"]["message"]) == (
        "AnswerLostError",
        True,
    )


async def _has_begun(plane: WorkerPlane) -> bool:
    checkpoint = await plane.worker.executions.saved_checkpoint("j1")
    return checkpoint is not None and "first_token_ms" in checkpoint


async def test_a_begun_tool_call_ends_once_with_its_worker(start_worker: StartWorker) -> None:
    calls = [{"name": "look_up", "arguments": {"a": "bcdefgh " * 20}}]
    stalled = {"stream": "stall", "after_chunks": 1, "requests": [1, 1]}
    async with start_worker({"sim/m": model(stalled, answer="", tool_calls=calls)}, AGENTS) as plane:
        tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
        await plane.publish({**JOB, "params": {"tools": [tool]}})
        await until(lambda: _begun(plane), "a part of the call")
        await plane.end()
        plane.begin()
        result = await plane.result("j1")
        made = plane.sim.ledger.totals.calls
    assert (result["status"], result["reason"], made) == ("dead_lettered", "worker_lost", 1)


async def _begun(plane: WorkerPlane) -> bool:
    return "look_up" in json.dumps(await kept(plane))


async def test_a_superseded_worker_adds_nothing_and_announces_nothing(start_worker: StartWorker) -> None:
    slow = model(answer=ANSWER, stream={"tokens_per_s": 30})
    async with start_worker({"sim/m": slow}, AGENTS) as plane:
        live: list[dict[str, Any]] = []

        async def note(message: Any) -> None:
            live.append(json.loads(message.data))

        await plane.client.subscribe("bw.chunks.>", cb=note)
        await plane.publish(JOB)
        log, last, fence = log_of(plane), 0, b""
        await until(lambda: len(live) > 2, "the first part")
        while not fence:
            messages, last = await log.messages("j1")
            marker = {**messages[-1], "number": len(messages) + 1, "chunks": []}
            with suppress(AlreadyDecidedError):
                await log.append("j1", json.dumps(marker).encode(), last)
                fence = json.dumps(marker).encode()
        await until(lambda: "job_taken_over" in plane.log("worker"), "the worker to notice")
        stored = await kept(plane)
    assert (stored[:-1], stored[-1]) == (live, json.loads(fence))


async def test_the_log_of_an_agent_that_keeps_no_texts_has_none_in_plain(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(new_key())
    for more, agent in (
        ({}, {**AGENTS["writer"], "persist_responses": False}),
        ({"encryption": {"keys": [{"file": str(tmp_path / "key")}]}}, AGENTS["writer"]),
    ):
        async with start_worker({"sim/m": model(answer=ANSWER)}, {"writer": agent}, **more) as plane:
            await plane.run(JOB)
            raw = await plane.messages("RESPONSES", "bw.>", at_least=1)
            stored = await kept(plane)
        assert "001" not in json.dumps([message.get("chunks") for message in raw])
        assert all("encrypted" in message for message in raw)
        assert text_of(stored) == ANSWER


async def test_without_a_key_no_chunks_are_kept_of_an_agent_that_keeps_no_texts(start_worker: StartWorker) -> None:
    agents = {"writer": {**AGENTS["writer"], "persist_responses": False}}
    async with start_worker({"sim/m": model(answer=ANSWER)}, agents, plane_key=None) as plane:
        result = await plane.run(JOB)
        assert result["status"] == "succeeded"
        assert await plane.messages("RESPONSES", "bw.>") == []


async def test_a_job_whose_response_was_deleted_meanwhile_adds_nothing_to_it(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model(STALLED, answer=ANSWER)}, AGENTS) as plane:
        await plane.publish(JOB)
        await until(lambda: _has(plane, 30), "the first part")
        await plane.end()
        response = StoredResponse(execution_id="j1", job_id="j1", agent="writer", created_at=plane.worker.now())
        await log_of(plane).delete(response)
        plane.begin()
        result = await plane.result("j1")
        found = await plane.worker.lookup.newest_on(Stream.RESPONSES, subjects.kept_chunks("j1"))
    assert result["status"] == "dead_lettered"
    assert found is not None
    assert json.loads(found.data) == {"type": "deleted", "execution_id": "j1"}


async def _has(plane: WorkerPlane, tokens: int) -> bool:
    return len(text_of(await kept(plane))) == 4 * tokens
