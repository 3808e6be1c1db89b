"""Every action of operators from a page: what is asked for, and what is said where it can't be done."""

from __future__ import annotations

from urllib.parse import parse_qsl

from tests.api_documents import budget, dead_letter
from tests.cli.api_stub import problem
from tests.operator_cases import OPERATOR_CASES, OperatorCase
from tests.services.console.conftest import Console, Page, key_with
from tests.services.console.test_dead_letters import listed
from tests.tables import each_row

EVIL = "<script>alert(1)</script>"

each_action = each_row("case", OPERATOR_CASES, ids=str)


async def submit(console: Console, case: OperatorCase) -> Page:
    console.interface.answers["GET budgets"] = 200, {"filled": True, "budgets": [budget("agent:writer/daily")]}
    console.interface.answers["GET dlq"] = listed(dead_letter())
    path, _, fields = case.form.partition("?")
    csrf = (await console.get("/dead-letters")).csrf  # a page that has one for every key
    return await console.post(path, [("csrf", csrf), *parse_qsl(fields, keep_blank_values=True)])


def failed(case: OperatorCase) -> str:
    return "The limit was not raised: " if case.action == "budgets/raise" else "The action failed: "


@each_action
async def test_a_refusal_is_shown_on_the_page(console: Console, case: OperatorCase) -> None:
    console.interface.answers[f"POST {case.action}"] = 404, problem(case.unknown, f"there is none; {EVIL}")
    page = await submit(console, case)
    assert page.status == (422 if case.action == "budgets/raise" else 200)
    assert (f"POST {case.action}", case.body) in console.interface.asked
    assert f"{failed(case)}there is none; {EVIL}" in page.words
    assert EVIL not in page.text


@each_action
async def test_a_lost_response_is_no_success(console: Console, case: OperatorCase) -> None:
    console.interface.answers[f"POST {case.action}"] = 200, None
    page = await submit(console, case)
    assert f"{failed(case)}no response from {console.interface.url}" in page.words


@each_action
async def test_a_key_that_may_only_look_does_nothing(visited: Console, case: OperatorCase) -> None:
    visited.interface.answers["GET key"] = key_with("read", name="viewer")
    assert (await visited.sign_in()).status == 303
    page = await submit(visited, case)
    assert page.status == 403
    assert "'viewer' may not do that: it requires the scope operate" in page.words
    assert not any(asked.startswith("POST") for asked, _ in visited.interface.asked)


APPROVALS = ("guards/reset", "budgets/raise", "alerts/ack", "alerts/resolve")


@each_action
async def test_an_approver_decides_on_incidents_tasks_and_caps_alone(visited: Console, case: OperatorCase) -> None:
    visited.interface.answers["GET key"] = key_with("read", "approve", name="finance")
    assert (await visited.sign_in()).status == 303
    visited.interface.asked.clear()
    page = await submit(visited, case)
    allowed = case.action in APPROVALS
    assert (page.status == 403) is not allowed
    assert any(asked == f"POST {case.action}" for asked, _ in visited.interface.asked) is allowed
    assert "(approver)" in page.words
