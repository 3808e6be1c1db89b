"""`breakwater cancel`, against a stub of the HTTP API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from breakwater.kernel.commands.errors import ExitCode
from tests.cli.api_stub import Stub, problem
from tests.cli.conftest import Run, in_thread

AT = "2026-11-21T10:00:00.000Z"


def answer(job_id: str, status: str, **more: Any) -> dict[str, Any]:
    cancellation = {"by": "api_key", "name": "ops", "key_id": "0" * 12, "reason": "over", "at": AT}
    known = {"job_id": job_id, "execution_id": job_id, "status": status, "cancellation": cancellation}
    return known | more


CANCELLED = answer("j1", "cancelled", reason="cancelled", total_cost="0.000042000", cost_basis="estimated")


async def test_it_asks_once_for_each_job_with_the_reason_and_shows_what_became_of_them(stub: Stub, run: Run) -> None:
    stub.answers["POST jobs/j1/cancel"] = (200, CANCELLED)
    stub.answers["POST jobs/a/b/cancel"] = (200, answer("a/b", "cancelled"))
    ran = await in_thread(run, "cancel", "j1", "a/b", "j1", "--reason", "over")
    assert ran.code == ExitCode.OK, ran.err
    assert sorted(stub.asked) == [
        ("POST jobs/a/b/cancel", {"reason": "over"}),
        ("POST jobs/j1/cancel", {"reason": "over"}),
    ]
    assert {query["wait_s"] for query in stub.queries} == {"5.0"}
    assert "$0.000042 estimated" in ran.out
    assert ran.out.index("j1") < ran.out.index("a/b")


async def test_programs_get_what_the_api_says(stub: Stub, run: Run) -> None:
    stub.answers["POST jobs/j1/cancel"] = (200, CANCELLED)
    ran = await in_thread(run, "cancel", "j1", "--json", "--wait-s", "0")
    [shown] = json.loads(ran.out)
    assert {name: shown[name] for name in CANCELLED} == CANCELLED
    assert stub.queries == [{}]


@pytest.mark.parametrize(
    ("status", "code", "remark"),
    [
        ("succeeded", ExitCode.FAILED, "had already ended"),
        ("dead_lettered", ExitCode.FAILED, "had already ended"),
        ("cancelling", ExitCode.UNDECIDED, "ends and makes no further call"),
    ],
)
async def test_what_is_not_cancelled_is_said_and_has_its_exit_code(
    stub: Stub, run: Run, status: str, code: ExitCode, remark: str
) -> None:
    stub.answers["POST jobs/j1/cancel"] = (200, CANCELLED)
    stub.answers["POST jobs/j2/cancel"] = (202, answer("j2", status))
    ran = await in_thread(run, "cancel", "j1", "j2")
    assert (ran.code, remark in ran.out) == (code, True)


async def test_one_that_fails_keeps_none_of_the_others_from_being_cancelled(stub: Stub, run: Run) -> None:
    stub.answers["POST jobs/nobody/cancel"] = (404, problem("unknown_job", "no job 'nobody' is known"))
    stub.answers["POST jobs/j1/cancel"] = (200, CANCELLED)
    ran = await in_thread(run, "cancel", "nobody", "j1")
    assert (ran.code, "cancelled" in ran.out) == (ExitCode.FAILED, True)
    assert "no job 'nobody' is known" in ran.err


async def test_a_wait_out_of_range_is_wrong_usage(stub: Stub, run: Run) -> None:
    ran = await in_thread(run, "cancel", "j1", "--wait-s", "301")
    assert (ran.code, stub.asked) == (ExitCode.USAGE, [])
