"""Ids that callers choose against the redaction rules: sessions are replaced, and what jobs are found by is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from breakwater.kernel.security.encryption import Cipher
from tests.flow.kit import model
from tests.services.worker.conftest import StartWorker

RULES = {"patterns": [r"CUST-\d{6}"]}
MATCHED = ["alice@example.com", "CUST-123456", "a CUST-123456 b", "password=hunter2secret", "sk-proj-" + "made-up-" * 4]


async def test_a_session_that_a_rule_matches_is_stored_as_a_digest(
    start_worker: StartWorker, subtests: pytest.Subtests
) -> None:
    async with start_worker({"sim/m": model()}, {"writer": {"model": "sim/m"}}, redaction=RULES) as plane:
        runs: dict[str, set[str]] = {}
        for number, session in enumerate([*MATCHED, "a session"]):
            for again in ("a", "b"):
                job = {"agent": "writer", "job_id": f"j{number}{again}", "prompt": "x", "session_id": session}
                result = await plane.run({**job, "tenant": "acme"})
                runs.setdefault(session, set()).add(result["run_id"])
        stored = [message.data.decode() for message in await every_event(plane)]
    for session in MATCHED:
        with subtests.test(session=session):
            [run_id] = runs[session]
            assert run_id.startswith("acme/redacted-")
            assert not any(json.dumps(session)[1:-1] in event for event in stored)
    assert runs["a session"] == {"acme/a session"}
    assert len({run_id for run_ids in runs.values() for run_id in run_ids}) == len(MATCHED) + 1


async def every_event(plane: Any) -> list[Any]:
    info = await plane.jetstream.stream_info("EVENTS")
    sequences = range(info.state.first_seq, info.state.last_seq + 1)
    return [await plane.jetstream.get_msg("EVENTS", sequence) for sequence in sequences]


@pytest.mark.parametrize("by_header", [False, True], ids=["field", "header"])
async def test_an_id_that_a_pattern_of_the_config_matches_is_refused(
    start_worker: StartWorker, subtests: pytest.Subtests, *, by_header: bool
) -> None:
    fields = ["job_id"] if by_header else ["job_id", "tenant", "task_id", "parent_execution_id", "plan_id"]
    async with start_worker({"sim/m": model()}, {"writer": {"model": "sim/m"}}, redaction=RULES) as plane:
        for field in fields:
            job: dict[str, Any] = {"agent": "writer", "prompt": "x"}
            if by_header:
                headers = {"Nats-Msg-Id": "order of CUST-123456"}
                await plane.jetstream.publish("bw.jobs.writer", json.dumps(job).encode(), headers=headers)
            else:
                await plane.publish({"job_id": f"j-{field}", **job, field: "order of CUST-123456"})
        for result in await plane.messages("RESULTS", "bw.results.>", at_least=len(fields)):
            with subtests.test(job_id=result["job_id"]):
                assert (result["status"], result["reason"]) == ("dead_lettered", "invalid")
                assert "matches one of redaction.patterns" in result["error"]["message"]
        stored = [message.data.decode() for message in await every_event(plane)]
        calls = plane.sim.ledger.totals.calls
    assert not any("CUST-123456" in event for event in stored)
    assert calls == 0


def test_a_pseudonym_is_keyed_where_there_is_a_key() -> None:
    names = [
        cipher.pseudonym("alice@example.com") for cipher in (Cipher(), Cipher(plane_key="one"), Cipher(plane_key="two"))
    ]
    assert len(set(names)) == 3
    assert names[1] == Cipher(plane_key="one").pseudonym("alice@example.com")


async def test_a_job_with_such_an_id_leaves_the_id_of_its_message_to_a_good_job(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, {"writer": {"model": "sim/m"}}, redaction=RULES) as plane:
        for job_id in ("CUST-123456", "order-7"):
            job = {"agent": "writer", "prompt": "x", "job_id": job_id}
            headers = {"Nats-Msg-Id": "order-7"}
            await plane.jetstream.publish("bw.jobs.writer", json.dumps(job).encode(), headers=headers)
        good_result = await plane.result("order-7")
        results = await plane.messages("RESULTS", "bw.results.>", at_least=2)
    assert good_result["status"] == "succeeded"
    [refused_id] = {result["job_id"] for result in results} - {"order-7"}
    assert refused_id.startswith("job-")
