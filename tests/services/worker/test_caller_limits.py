"""What rate limits leave to a job's caller: in its result, and in the first message of its stream."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from breakwater.calls.gate import Gate, Refused
from breakwater.jobs.contract.execution import Allowance, CallerLimits, ErrorInfo
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.subjects import Stream
from breakwater.kernel.redis.connection import Script, ScriptCommand
from breakwater.services.worker import handler
from breakwater.services.worker.admission import Gates, gates_of
from breakwater.services.worker.context import WorkerContext
from tests.flow.kit import model
from tests.services.worker.conftest import StartWorker

LIMITS = CallerLimits(requests=Allowance(limit=5, remaining=4, resets_at=datetime(2026, 11, 29, 12, tzinfo=UTC)))
ERROR = ErrorInfo(kind="rate_limit", class_="RateLimitExceededError", message="no room", retry_after_s=2.5)


class LimitGate(Gate):
    """A gate that says what is left, and refuses jobs that ask for it."""

    def ask(self) -> ScriptCommand:
        """Asks for nothing."""
        return ScriptCommand(Script.of("return 1"), [], [])

    def read(self, answer: Any) -> Refused | None:
        """Says what is left, whether it admits the call or refuses it."""
        del answer
        self.admission.limits = LIMITS
        return Refused("rate_limited", ERROR) if self.admission.job.job.prompt == "refuse" else None


async def test_a_result_and_the_first_message_of_a_stream_say_what_is_left(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gates(worker: WorkerContext) -> Gates:
        return (*gates_of(worker), LimitGate)

    monkeypatch.setattr(handler, "gates_of", gates)
    answer = "".join(f"{number:03d} " for number in range(60))
    models = {"sim/m": model(answer=answer, stream={"tokens_per_s": 100})}
    async with start_worker(models, {"writer": {"model": "sim/m"}}) as plane:
        messages: list[dict[str, Any]] = []

        async def note(message: Any) -> None:
            messages.append(json.loads(message.data))

        await plane.client.subscribe("bw.chunks.>", cb=note)
        job = {"agent": "writer", "prompt": "x"}
        whole = await plane.run(job | {"job_id": "whole"})
        refused = await plane.run(job | {"job_id": "refused", "prompt": "refuse"})
        await plane.run(job | {"job_id": "streamed", "stream": True})
        left = LIMITS.model_dump(mode="json")
        assert whole["limits"] == refused["limits"] == messages[0]["limits"] == left
        assert refused["error"]["retry_after_s"] == 2.5
        assert len(messages) > 1
        assert all("limits" not in message for message in messages[1:])
        record = await plane.worker.lookup.last(Stream.EVENTS, subjects.execution("writer", whole["execution_id"]))
        assert record is not None
        assert "limits" not in json.loads(record.data), "the figures of a moment are for the caller alone"
