"""Every action of operators on the command line: what is sent, and what is said where it can't be done."""

from __future__ import annotations

from breakwater.kernel.commands.errors import ExitCode
from tests.cli.api_stub import Stub, problem
from tests.cli.conftest import Run, in_thread
from tests.operator_cases import OPERATOR_CASES, OperatorCase
from tests.tables import each_row

each_action = each_row("case", OPERATOR_CASES, ids=str)


@each_action
async def test_an_unknown_target_is_refused_with_where_to_look(run: Run, stub: Stub, case: OperatorCase) -> None:
    stub.answers[f"POST {case.action}"] = (404, problem(case.unknown, "there is none"))
    stub.asked.clear()
    ran = await in_thread(run, *case.command)
    assert stub.asked == [(f"POST {case.action}", case.body)]
    assert (ran.code, ran.out) == (ExitCode.FAILED, "")
    assert ran.err.startswith(f"error: there is none\n  `{case.look}` lists ")
    error = (await in_thread(run, *case.command, "--json")).error
    assert (error["code"], error["message"]) == (case.unknown, "there is none")
    assert error["remedy"].startswith(f"`{case.look}` lists ")


@each_action
async def test_a_lost_response_says_how_to_find_out(run: Run, stub: Stub, case: OperatorCase) -> None:
    stub.answers[f"POST {case.action}"] = (200, None)
    ran = await in_thread(run, *case.command)
    assert ran.code == ExitCode.UNREACHABLE
    assert f"`{case.look}` shows whether it was done; repeating it is safe." in ran.err


@each_action
async def test_the_exit_code_distinguishes_a_wrong_call_from_an_outage(
    run: Run, stub: Stub, case: OperatorCase
) -> None:
    for status, exit_code in (
        (403, ExitCode.FAILED),
        (409, ExitCode.FAILED),
        (422, ExitCode.USAGE),
        (503, ExitCode.UNREACHABLE),
    ):
        stub.answers[f"POST {case.action}"] = (status, problem("why", "why not"))
        ran = await in_thread(run, *case.command, "--json")
        assert (ran.code, ran.error["code"], ran.error["message"]) == (exit_code, "why", "why not")
