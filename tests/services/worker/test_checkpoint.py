"""The checkpoint in Redis: what another worker reads after a crash."""

from __future__ import annotations

import json
from typing import Any

import pytest

from breakwater.calls.assignment import Checkpoint
from breakwater.calls.providers.base import Answer, Call, CallError
from breakwater.calls.rules.classify import HttpFailure, TransportFailure
from breakwater.calls.rules.repairs import Correction, Repairs
from breakwater.prices.rules.usage import Usage
from tests.flow.kit import model
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import ScriptedProvider

MOMENT = "2026-11-21T10:00:00.000Z"
ATTEMPT = {
    "attempt_id": "j1:1", "execution_id": "j1", "job_id": "j1", "agent": "writer", "number": 1, "model": "sim/m",
    "provider": "sim", "started_at": MOMENT, "completed_at": MOMENT,
    "duration_ms": 0, "outcome": "error", "cause": "first",
    "error": {"kind": "server", "class": "ServerError", "message": "no", "retryable": True},
}  # fmt: skip
FORMAT: dict[str, Any] = {
    "dispatched_at": MOMENT,
    "deadline": MOMENT,
    "attempts": [ATTEMPT],
    "model_index": 1,
    "model": "sim/n",
    "cause": "self_correction",
    "repairs": {"pruned": True, "keep_ratios": [0.5], "corrections": [{"answer": "no", "problems": ["is no JSON"]}]},
    "backoff_ms": 250,
    "resume_at": MOMENT,
    "in_flight": {"number": 2, "model": "sim/n", "provider": "sim", "cause": "probe", "started_at": MOMENT,
                  "backoff_ms": 250, "reserved": 2_466_300, "dropped_messages": 3, "breaker_version": 7},
}  # fmt: skip
"""As it stands in Redis, every field set: what a worker of this version must read, whoever wrote it."""


def test_a_checkpoint_of_this_format_is_read_and_written_as_it_was() -> None:
    checkpoint = Checkpoint.model_validate_json(json.dumps(FORMAT))
    assert checkpoint.attempts[0].error is not None
    assert checkpoint.repairs == Repairs(
        pruned=True, keep_ratios=(0.5,), corrections=(Correction(answer="no", problems=("is no JSON",)),)
    )
    assert checkpoint.in_flight is not None
    assert (checkpoint.in_flight.reserved, checkpoint.in_flight.breaker_version) == (2_466_300, 7)
    assert Checkpoint.model_validate_json(checkpoint.text()) == checkpoint
    written = json.loads(checkpoint.text())
    assert set(written) == set(FORMAT)
    assert written["in_flight"] == FORMAT["in_flight"]


def test_what_is_as_at_the_start_is_not_written() -> None:
    start = Checkpoint.model_validate({"dispatched_at": MOMENT, "deadline": MOMENT})
    assert set(json.loads(start.text())) == {"dispatched_at", "deadline"}


FAILURES = [
    CallError(HttpFailure(503, "not now"), maybe_billed=False),
    CallError(TransportFailure("network", "ConnectionError", "no route"), maybe_billed=False),
]


@pytest.mark.parametrize(("base_s", "backoff"), [(3.0, "constant"), (4.0, "exponential")])
async def test_retries_wait_by_the_workers_clock_and_a_job_pays_for_its_waits(
    start_worker: StartWorker, base_s: float, backoff: str
) -> None:
    retry = {"max_attempts": 3, "backoff": backoff, "base_s": base_s, "max_delay_s": 8}
    agents = {"writer": {"model": "sim/m", "breaker": "off", "retry": retry, "total_timeout_s": 60}}
    provider = ScriptedProvider(*FAILURES, Answer("done", Usage(120, 40)))
    async with start_worker({"sim/m": model()}, agents, providers={"sim": provider}, fake_clock=True) as plane:
        result = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        slept = plane.clock.slept
    assert (result["status"], result["output"], len(provider.calls)) == ("succeeded", "done", 3)
    first, second = base_s, base_s if backoff == "constant" else base_s * 2
    assert first <= slept[0] <= first + base_s / 2
    assert second <= slept[1] <= second + base_s / 2
    assert [a["backoff_ms"] for a in result["attempts"]] == [0, *(round(one * 1000) for one in slept)]
    assert result["duration_ms"] >= sum(slept) * 1000


async def test_a_wait_that_does_not_fit_the_rest_of_the_time_is_not_waited_for(start_worker: StartWorker) -> None:
    retry = {"max_attempts": 3, "backoff": "constant", "base_s": 6}
    agents = {"writer": {"model": "sim/m", "breaker": "off", "retry": retry, "total_timeout_s": 10}}
    provider = ScriptedProvider(*FAILURES)
    async with start_worker({"sim/m": model()}, agents, providers={"sim": provider}, fake_clock=True) as plane:
        result = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "hello"})
    assert (result["reason"], len(plane.clock.slept), len(provider.calls)) == ("timeout", 1, 2)


@pytest.mark.parametrize("ahead_s", [3600, -3600])
async def test_the_time_of_day_may_be_set_while_a_job_runs(start_worker: StartWorker, ahead_s: float) -> None:
    retry = {"max_attempts": 2, "backoff": "constant", "base_s": 3}
    agents = {"writer": {"model": "sim/m", "breaker": "off", "retry": retry, "total_timeout_s": 60}}

    def fails(_: Call) -> Answer:
        plane.clock.set_ahead_s = ahead_s
        raise FAILURES[0]

    provider = ScriptedProvider(fails, Answer("done", Usage(120, 40)))
    async with start_worker({"sim/m": model()}, agents, providers={"sim": provider}, fake_clock=True) as plane:
        result = await plane.run({"agent": "writer", "job_id": "j1", "prompt": "hello"})
        slept = max(plane.clock.slept)  # within an hour of midnight, a budget of the other day asks once more
    assert (result["status"], result["output"]) == ("succeeded", "done")
    assert slept * 1000 <= result["duration_ms"] < 60_000
    assert all(0 <= attempt["duration_ms"] < 60_000 for attempt in result["attempts"])
