"""Jobs of named programs: whose they are, in whose name they may be, and where their answers may go."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from breakwater.jobs.contract.execution import Cancellation, PendingCancel
from breakwater.jobs.rules.ids import key_of
from breakwater.kernel.ids import new_id
from breakwater.kernel.nats import subjects
from tests.flow.kit import model
from tests.services.worker.conftest import StartWorker
from tests.services.worker.harness import WorkerPlane

AGENTS: dict[str, Any] = {"writer": {"model": "sim/m"}, "critic": {"model": "sim/m"}}
PROGRAMS: dict[str, Any] = {
    "billing": {"agents": ["writer"]},
    "acme": {"agents": ["writer"], "tenants": ["acme"]},
    "both": {"agents": ["writer"], "tenants": ["acme", "rival"]},
}
FORGED = {
    "Breakwater-Owner": "key",
    "Breakwater-Submitted-By": "key",
    "breakwater-owner": "key",
    "Breakwater-Unique-Id": "1",
    "Breakwater-Execution-Id": "of-another",
    "Breakwater-Job-Id": "of-another",
    "Breakwater-Scope": "key:key",
    "Breakwater-User": "eve",
    "Breakwater-Team": "ads",
    "Breakwater-Tags": "%7B%22project%22%3A%22x%22%7D",
    "Breakwater-Queued-At": "2001-01-01T00:00:00.000Z",
}


def called(user: str, job_id: str) -> str:
    """What a job of a user is called inside the plane."""
    return key_of(None if user == "client" else user, job_id)


async def send(plane: WorkerPlane, user: str, job: Mapping[str, Any]) -> None:
    """Publishes a job as it comes from the account of a user, with all headers that a program may try."""
    subject = subjects.job_by(str(job["agent"]), user)
    await plane.jetstream.publish(subject, json.dumps(job).encode(), timeout=30, headers=FORGED)


async def test_a_job_belongs_to_who_sent_it_whatever_its_headers_say(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, AGENTS, programs=PROGRAMS, cost_tags=["project"]) as plane:
        expected = {
            "client": (None, None, None),
            "program-billing": ("program-billing", "program-billing", None),
            "program-acme": (None, "program-acme", "acme"),
        }
        for user, (owner, sender, tenant) in expected.items():
            metadata = {"user": "ada"}
            await send(plane, user, {"agent": "writer", "job_id": f"of-{user}", "prompt": user, "metadata": metadata})
            result = await plane.result(called(user, f"of-{user}"))
            assert (result["status"], result.get("owner"), result.get("tenant")) == ("succeeded", owner, tenant)
            attempt = await plane.last("EVENTS", subjects.attempt("writer", called(user, f"of-{user}"), 1))
            assert attempt is not None
            assert attempt.get("submitted_by") == sender
            assert result["submitted_by"] == sender
            assert (result["user"], result["team"], attempt["user"], attempt["cost_tags"]) == ("ada", None, "ada", {})
            assert not result["queued_at"].startswith("2001")


@pytest.mark.parametrize(
    ("user", "wrong", "path"),
    [
        ("program-acme", {"tenant": "rival"}, "tenant"),
        ("program-both", {}, "tenant"),
        ("program-both", {"tenant": "third"}, "tenant"),
        ("program-billing", {"agent": "critic"}, "agent"),
        ("program-gone", {}, "program"),
    ],
)
async def test_a_job_in_anothers_name_is_refused_and_costs_nobody(
    start_worker: StartWorker, user: str, wrong: dict[str, Any], path: str
) -> None:
    async with start_worker({"sim/m": model()}, AGENTS, programs=PROGRAMS) as plane:
        reply_to = f"bw.replies.{user}.1"
        replies = await plane.client.subscribe(reply_to)
        await send(plane, user, {"agent": "writer", "job_id": "j", "prompt": "x", "reply_to": reply_to} | wrong)
        refused = json.loads((await replies.next_msg(timeout=60)).data)
        assert (refused["status"], refused["reason"]) == ("dead_lettered", "invalid")
        assert path in refused["error"]["message"]
        assert plane.sim.ledger.totals.calls == 0


@pytest.mark.parametrize(
    ("user", "reply_to"),
    [
        ("client", "bw.replies.program-billing.orders"),
        ("client", "bw.replies.program-billing"),
        ("client", "_INBOX.program-billing.x"),
        ("client", "_INBOX.program-of-nobody.x"),
        ("program-acme", "bw.replies.program-billing.orders"),
        ("program-acme", "_INBOX.program-billing.x"),
        ("program-acme", "_INBOX.abc"),
        ("program-acme", "bw.replies.orders"),
        ("program-acme", "bw.replies.program-acme"),
        ("program-acme", "bw.replies.program-acme-2.orders"),
        ("program-acme", "bw.replies._INBOX.program-acme.x"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"prompt": 3}])
async def test_no_answer_goes_below_the_prefix_of_another(
    start_worker: StartWorker, user: str, reply_to: str, more: dict[str, Any]
) -> None:
    async with start_worker({"sim/m": model()}, AGENTS, programs=PROGRAMS) as plane:
        heard = await plane.client.subscribe(reply_to)
        await send(plane, user, {"agent": "writer", "job_id": "j", "prompt": "x", "reply_to": reply_to} | more)
        assert (await plane.result(called(user, "j")))["reason"] == "invalid"
        assert heard.pending_msgs == 0
        assert plane.sim.ledger.totals.calls == 0


async def test_an_order_of_a_program_cancels_its_own_job_alone(start_worker: StartWorker) -> None:
    async with start_worker({"sim/m": model()}, AGENTS, programs=PROGRAMS) as plane:
        await plane.end()
        by = Cancellation(by="program", name="program-billing", at=datetime.now(UTC))
        for user in ("client", "program-acme", "program-billing"):
            execution_id = called(user, f"of-{user}")
            order = PendingCancel(
                execution_id=execution_id, cancellation=by, agents=("writer",), owner="program-billing"
            )
            await plane.worker.executions.cancel(order)
            await send(plane, user, {"agent": "writer", "job_id": f"of-{user}", "prompt": user})
        plane.begin()
        for user, status in (
            ("client", "succeeded"),
            ("program-acme", "succeeded"),
            ("program-billing", "cancelled"),
        ):
            assert (await plane.result(called(user, f"of-{user}")))["status"] == status


async def test_a_tenants_program_names_jobs_of_its_tenant_that_have_ended_by_their_made_ids(
    start_worker: StartWorker,
) -> None:
    async with start_worker({"sim/m": model()}, AGENTS, programs=PROGRAMS) as plane:
        for tenant, status in (("acme", "succeeded"), ("rival", "dead_lettered")):
            made = new_id()
            await plane.run({"agent": "writer", "job_id": made, "prompt": "x", "tenant": tenant})
            child = {"agent": "writer", "job_id": f"after-{tenant}", "prompt": "y", "depends_on": [made]}
            await send(plane, "program-acme", {**child, "total_timeout_s": 1})
            assert (await plane.result(called("program-acme", f"after-{tenant}")))["status"] == status
