"""The list of attacks: each of its lines is a test, and its figures are those of the tests."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.docs.markdown import README, ROOT, headings, section
from tests.kernel.nats.test_attacks import APART, every_request, may, victims
from tests.local.test_clickhouse_access import BY_ANYONE, BY_READERS
from tests.tables import each_row

PAGE = ROOT / "tests" / "attacks.md"
SUMMARY = section(ROOT / "docs" / "security.md", "Tested attacks")
ATTACKS = [line for line in PAGE.read_text().splitlines() if line.startswith("- ")]


def test_attacks_are_grouped_by_the_guarantees_of_the_readme() -> None:
    promises = [promise for heading in headings(PAGE) for promise in re.findall(r"^(P\d+): (.+)", heading)]
    assert len(promises) > 5
    assert [f"| {number} | {text} |" in README.read_text() for number, text in promises] == [True] * len(promises)


@each_row("attack", ATTACKS)
def test_each_attack_is_a_test(attack: str) -> None:
    found = re.fullmatch(r'- [^:]+: .+: \[[^\]]+\]\((\S+\.py) "(test_\w+)"\)', attack)
    assert found is not None, attack
    file, name = found.groups()
    assert name in functions_of(PAGE.parent / file)


@cache
def functions_of(file: Path) -> set[str]:
    defined = ast.parse(file.read_text()).body
    return {node.name for node in defined if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_tests_make_as_many_attacks_as_the_page_says() -> None:
    pairs = sum(
        sum(may(grant, request.subject) for request in every_request())
        * sum(not may(grant, subject) for subject in victims())
        for grant in APART
    )
    for most, what in (
        (pairs, "pairs of a request"),
        (len(BY_ANYONE) + len(BY_READERS), "statements by POST and GET"),
        (len(BY_ANYONE), "of these:"),
    ):
        [said] = re.findall(rf"over ([\d,]+) {what}", PAGE.read_text())
        assert int(said.replace(",", "")) < most


def test_the_security_page_counts_the_attacks() -> None:
    assert f"has {len(ATTACKS)}, by guarantee" in SUMMARY
