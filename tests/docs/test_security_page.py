"""The table of attacks: each of its lines is a test, and its figures are those of the tests."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.markdown import README, ROOT, headings, rows, section
from tests.kernel.nats.test_attacks import APART, every_request, may, victims
from tests.local.test_clickhouse_access import BY_ANYONE, BY_READERS

PAGE = ROOT / "docs" / "security.md"
TABLE = section(PAGE, "Attacks, by promise")


def test_attacks_are_grouped_by_the_guarantees_of_the_readme() -> None:
    promises = [promise for heading in headings(PAGE) for promise in re.findall(r"^(P\d+): (.+)", heading)]
    assert len(promises) > 5
    assert [f"| {number} | {text} |" in README.read_text() for number, text in promises] == [True] * len(promises)


@pytest.mark.parametrize(("attacker", "attack", "result"), rows(PAGE, "attacker"))
def test_each_attack_is_a_test(attacker: str, attack: str, result: str) -> None:
    assert all((attacker, attack))
    found = re.fullmatch(r'\[[^\]]+\]\(\.\./(tests/\S+\.py) "(test_\w+)"\)', result)
    assert found is not None, result
    file, name = found.groups()
    defined = ast.parse((ROOT / file).read_text()).body
    assert name in {one.name for one in defined if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_tests_make_as_many_attacks_as_the_page_says() -> None:
    pairs = sum(
        sum(may(grant, request.subject) for request in every_request())
        * sum(not may(grant, subject) for subject in victims())
        for grant in APART
    )
    for most, what in (
        (pairs, "pairs of a request"),
        (len(BY_ANYONE) + len(BY_READERS), "statements by POST and GET"),
        (len(BY_ANYONE), r"of these \|"),
    ):
        [said] = re.findall(rf"over ([\d,]+) {what}", TABLE)
        assert int(said.replace(",", "")) < most
