"""Jobs that are cancelled: while they wait, while they are called for, while they sleep, and after a crash."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from breakwater.jobs.contract.execution import Cancellation, PendingCancel
from breakwater.jobs.held_claims import CancelSignal, JobCancelledError
from breakwater.kernel.nats import subjects
from breakwater.kernel.nats.delivery import wake_early
from breakwater.services.worker import attempts
from tests.flow.kit import model, seconds_between
from tests.helpers import until
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

HANGS = {"sim/m": model({"hang_s": 60})}
AGENT: dict[str, Any] = {"writer": {"model": "sim/m", "retry": {"backoff": "constant", "base_s": 0}}}
JOB = {"agent": "writer", "job_id": "j1", "prompt": "hello"}


def order(*agents: str, job_id: str = "j1", by: str = "client", reason: str | None = "wrong prompt") -> PendingCancel:
    cancellation = Cancellation(by="program", name=by, reason=reason, at=datetime.now(UTC))
    return PendingCancel(execution_id=job_id, cancellation=cancellation, agents=agents)


async def cancel(plane: WorkerPlane, given: PendingCancel, *, heard: bool = True) -> None:
    """As the request service does. `heard`: the workers are notified, too."""
    stands = await plane.worker.executions.cancel(given)
    if heard:
        await plane.client.publish(subjects.cancel_request(given.execution_id), stands.json_bytes())
    await wake_early(plane.worker.publisher, plane.worker.lookup, given.execution_id)


async def called(plane: WorkerPlane, calls: int = 1) -> None:
    await until(lambda: len(plane.sim.ledger.calls) == calls)


async def nothing_is_held(plane: WorkerPlane) -> None:
    """No dead letter is left, and no job."""
    assert (await plane.jetstream.stream_info("DLQ")).state.messages == 0

    async def acknowledged() -> bool:
        return await plane.pending_jobs() == 0

    await until(acknowledged)


async def test_a_job_that_waits_ends_without_a_call(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, AGENT, begin=False) as plane:
        answer = await plane.client.subscribe("bw.replies.mine")
        await plane.publish(JOB | {"reply_to": "bw.replies.mine", "task_id": "t1"})
        await cancel(plane, order())
        plane.begin()
        result = await plane.result("j1")
        assert b'"cancelled"' in (await answer.next_msg(timeout=60)).data
        [record] = await plane.messages("EVENTS", subjects.execution("writer", "j1"), at_least=1)
        await nothing_is_held(plane)
        assert not plane.sim.ledger.calls
    for found in (result, record):
        assert (found["status"], found["reason"], found["attempts"]) == ("cancelled", "cancelled", [])
        assert found["error"]["message"] == "cancelled by the NATS user 'client': wrong prompt"
        said = found["cancellation"]
        assert (said["by"], said["name"], said["reason"]) == ("program", "client", "wrong prompt")


async def test_a_call_under_way_is_aborted_within_a_second_and_charged_at_most_its_reservation(
    start_worker: StartWorker,
) -> None:
    agent = {"writer": AGENT["writer"] | {"fallback_models": ["sim/n"], "budget": {"daily_usd": 5}}}
    async with start_worker(HANGS | {"sim/n": model()}, agent) as plane:
        await plane.publish(JOB)
        await called(plane)
        asked = datetime.now(UTC)
        await cancel(plane, order())
        result = await plane.result("j1")
        assert (datetime.fromisoformat(result["completed_at"]) - asked).total_seconds() < 1
        [attempt] = await plane.attempts("writer", "j1")
        await until(lambda: plane.sim.ledger.calls[0].delivered is False)
        await nothing_is_held(plane)
        assert len(plane.sim.ledger.calls) == 1
    assert (result["status"], result["attempts_count"]) == ("cancelled", 1)
    assert (attempt["outcome"], attempt["error"]["kind"]) == ("cancelled", "cancelled")
    assert (attempt["cost_basis"], attempt["cost"]) == ("estimated", attempt["reserved"])
    assert attempt["counts_for_breaker"] is False
    assert result["wasted_by_cause"] == {"cancelled": attempt["cost"]}


async def test_a_streamed_answer_is_charged_by_what_came_of_it_and_that_is_the_output(
    start_worker: StartWorker,
) -> None:
    answer = "".join(f"{number:03d} " for number in range(60))
    stalled = model({"stream": "stall", "after_chunks": 30}, answer=answer)
    async with start_worker({"sim/m": stalled}, AGENT) as plane:
        heard: list[bytes] = []

        async def note(message: Any) -> None:
            heard.append(message.data)

        await plane.client.subscribe("bw.chunks.>", cb=note)
        await plane.publish(JOB | {"stream": True})
        await until(lambda: b"".join(heard).count(b'"delta"') > 25)
        await cancel(plane, order())
        result = await plane.result("j1")
    [attempt] = result["attempts"]
    assert answer.startswith(result["output"])
    assert len(result["output"]) > 80
    assert (attempt["outcome"], attempt["cost_basis"]) == ("cancelled", "estimated")
    assert 0 < float(attempt["cost"]) < float(attempt["reserved"])


async def test_an_order_that_was_not_heard_holds_when_the_claim_is_renewed(start_worker: StartWorker) -> None:
    async with start_worker(HANGS, AGENT) as plane:
        await plane.publish(JOB)
        await called(plane)
        await cancel(plane, order(), heard=False)
        result = await plane.result("j1", timeout_s=20)
    assert result["status"] == "cancelled"


async def test_a_job_between_two_tries_makes_no_other_call(start_worker: StartWorker) -> None:
    agent = {"writer": {"model": "sim/m", "retry": {"backoff": "constant", "base_s": 5}, "breaker": "off"}}
    async with start_worker({"sim/m": model({"status": 500})}, agent) as plane:
        await plane.publish(JOB)
        await until(lambda: plane.worker.leases.claims and len(plane.sim.ledger.calls) == 1)

        async def recorded() -> bool:
            return await plane.last("EVENTS", subjects.attempt("writer", "j1", 1)) is not None

        await until(recorded)
        await cancel(plane, order())
        result = await plane.result("j1")
        assert len(plane.sim.ledger.calls) == 1
    assert result["status"] == "cancelled"
    assert [attempt["outcome"] for attempt in result["attempts"]] == ["error"]


async def test_a_job_that_sleeps_is_woken_and_ends_with_what_it_has_called(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "LONG_WAIT_S", 0.5)
    agent = {"writer": {"model": "sim/m", "total_timeout_s": 200, "breaker": "off"}}
    async with start_worker({"sim/m": model({"status": 429, "retry_after_s": 90})}, agent) as plane:
        await plane.publish(JOB)

        async def parked() -> bool:
            sleeping = (await plane.jetstream.stream_info("PARKED")).state.messages > 0
            return sleeping and await plane.pending_jobs() == 0

        await until(parked)
        await cancel(plane, order())
        result = await plane.result("j1", timeout_s=30)
        await nothing_is_held(plane)
        assert len(plane.sim.ledger.calls) == 1
    assert (result["status"], result["attempts_count"]) == ("cancelled", 1)
    assert seconds_between(result["queued_at"], result["completed_at"]) < 60


async def test_a_job_whose_worker_has_died_ends_with_the_call_that_was_lost(start_worker: StartWorker) -> None:
    async with start_worker(HANGS, AGENT) as plane:
        await plane.publish(JOB)
        await called(plane)
        await plane.end()
        await cancel(plane, order())
        plane.begin()
        result = await plane.result("j1")
        assert len(plane.sim.ledger.calls) == 1
    assert result["status"] == "cancelled"
    assert [(one["outcome"], one["cost_basis"]) for one in result["attempts"]] == [("worker_lost", "estimated")]


async def test_who_may_not_cancel_jobs_of_the_agent_cancels_none_and_holds_up_nobody_who_may(
    start_worker: StartWorker,
) -> None:
    async with start_worker({"sim/m": model({"hang_s": 1, "requests": [1, 1]}, {"hang_s": 60})}, AGENT) as plane:
        for job_id in ("j1", "j2"):
            await cancel(plane, order("support", job_id=job_id, by="program-desk"))
        assert (await plane.run(JOB))["status"] == "succeeded"
        await plane.publish(JOB | {"job_id": "j2"})
        await called(plane, 2)
        await cancel(plane, order("writer", job_id="j2", by="program-billing"))
        result = await plane.result("j2")
    assert result["cancellation"]["name"] == "program-billing"


async def test_a_job_that_is_decided_stays_as_it_is(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, AGENT) as plane:
        assert (await plane.run(JOB))["status"] == "succeeded"
        await cancel(plane, order())
        answer = await plane.client.subscribe("bw.replies.mine")
        await plane.publish(JOB | {"reply_to": "bw.replies.mine"})
        assert b'"succeeded"' in (await answer.next_msg(timeout=60)).data


async def test_one_that_waits_for_the_answer_of_another_is_cancelled_alone(start_worker: StartWorker) -> None:
    slow = model({"hang_s": 3, "requests": [1, 1]})
    agent = {"writer": AGENT["writer"] | {"cache": {"ttl_s": 60, "share_concurrent": True}}}
    async with start_worker({"sim/m": slow}, agent) as plane:
        await plane.publish(JOB)
        await called(plane)
        await plane.publish(JOB | {"job_id": "j2"})
        await until(lambda: len(plane.worker.leases.claims) == 2)
        await cancel(plane, order(job_id="j2"))
        assert (await plane.result("j2"))["status"] == "cancelled"
        assert (await plane.result("j1"))["status"] == "succeeded"
        assert len(plane.sim.ledger.calls) == 1


@pytest.mark.parametrize("kind", ["python", "process"])
async def test_a_callable_and_a_program_are_ended(
    start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    (tmp_path / "slow_agents.py").write_text(
        "import asyncio, pathlib\n"
        "async def slow(request):\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n"
        "    try:\n        await asyncio.sleep(60)\n"
        f"    finally:\n        pathlib.Path({str(ended)!r}).touch()\n"
    )
    script = f"echo $$ > {begun}.new; mv {begun}.new {begun}; sleep 60"
    local: dict[str, Any] = {"kind": "python", "callable": "slow_agents:slow"}
    if kind == "process":
        local = {"kind": "process", "command": ["/bin/sh", "-c", script]}
    agents = {"slow": {"provider": "local", "timeout_s": 50}}
    async with start_worker({"sim/m": model()}, agents, more_providers={"local": local}) as plane:
        await plane.publish({"agent": "slow", "job_id": "j1", "input": 1})
        await until(begun.exists)
        await cancel(plane, order())
        result = await plane.result("j1")
        if kind == "python":
            await until(ended.exists)
        else:
            pid = begun.read_text().strip()
            await until(lambda: not Path(f"/proc/{pid}").exists())
    [attempt] = result["attempts"]
    assert (result["status"], attempt["outcome"]) == ("cancelled", "cancelled")
    assert (attempt["cost"], attempt["cost_basis"]) == (None, "unknown")


async def test_an_end_of_the_process_is_no_cancel_of_the_job() -> None:
    signal, begun = CancelSignal("writer"), asyncio.Event()

    async def work() -> None:
        with signal.interruptible():
            begun.set()
            await asyncio.sleep(60)

    for orders in ((), (order(),)):
        begun.clear()
        task = asyncio.create_task(work())
        await begun.wait()
        signal.receive(orders)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    with pytest.raises(JobCancelledError), signal.interruptible():
        raise AssertionError("is not begun any more")
    waits = CancelSignal("writer")
    asyncio.get_running_loop().call_soon(waits.receive, [order()])
    with pytest.raises(JobCancelledError), waits.interruptible():
        await asyncio.sleep(60)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_task_that_hears_of_the_order_itself_goes_on_to_where_it_looks() -> None:
    signal = CancelSignal("writer")
    with signal.interruptible():
        signal.receive([order()])
    await asyncio.sleep(0)  # nothing is left that would hit this
    with pytest.raises(JobCancelledError):
        signal.check()
