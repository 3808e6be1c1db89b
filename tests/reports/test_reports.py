"""Every case, as `python -m tests.reports` shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from tests.reports.case import Case
from tests.reports.cases import CASES
from tests.reports.plane import MAX_ATTEMPTS, Outcome, run_all
from tests.server_sources import Servers
from tests.services.worker.error_table import ROWS
from tests.tables import each_row


@pytest.fixture(scope="module")
def outcomes(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Outcome]:
    """Of all cases, by their names, from one plane."""
    found = asyncio.run(run_all(CASES, tmp_path_factory.mktemp("reports"), servers.nats(), servers.redis()))
    return {outcome.case.name: outcome for outcome in found}


@pytest.mark.long(about_s=30)
@each_row("case", CASES, ids=lambda case: case.name)
def test_what_came_back_is_what_counts(case: Case, outcomes: Mapping[str, Outcome]) -> None:
    outcome = outcomes[case.name]
    wrong = {name: (case.expected[name], outcome.seen.get(name)) for name in outcome.wrong}
    assert not wrong, f"expected and seen: {wrong}"


def test_cases_and_the_table_of_failures_agree_on_what_is_retried_and_counted() -> None:
    table = {row.kind: {(one.retried, one.counted) for one in ROWS if one.kind == row.kind} for row in ROWS}
    of_kinds = [case for case in CASES if case.expected.get("kind") in table and case.expected.get("fallback") == 1]
    assert {case.expected["kind"] for case in of_kinds} >= {"client", "context_overflow", "rate_limit", "server"}
    for case in of_kinds:
        if "retries wins" not in case.row:
            seen = case.expected["calls"] == MAX_ATTEMPTS, case.expected["counted"]
            assert seen in table[case.expected["kind"]], case.name


def test_each_case_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 99
