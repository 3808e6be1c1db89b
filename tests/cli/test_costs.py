"""`breakwater costs`, against a stub of the HTTP API."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml

from breakwater.kernel.commands.errors import ExitCode
from tests.cli.api_stub import Stub
from tests.cli.conftest import Run, in_thread

EXAMPLES = yaml.safe_load((files("breakwater.services.request") / "examples.yaml").read_bytes())
COSTS: dict[str, Any] = EXAMPLES["show_costs"][200]["by tenant"]
CSV: str = EXAMPLES["export_costs"][200]["by tenant"]


async def test_a_month_by_tenant_with_its_forecast_and_the_total(stub: Stub, run: Run) -> None:
    others = {**COSTS["total"], "spend": "0.000000007"}
    stub.answers["GET costs"] = (200, {**COSTS, "others": others})
    ran = await in_thread(run, "costs", "--by", "tenant", "--month", "2026-11", "--limit", "2")
    assert ran.code == ExitCode.OK
    assert stub.queries == [{"by": "tenant", "month": "2026-11", "limit": "2"}]
    heading, *lines = [line.split() for line in ran.out.splitlines()]
    assert " ".join(heading) == "tenant spend at month's end next month failed calls 2026-10 limit calls"
    assert lines == [
        ["acme", "$40.41+", "$50.00", "$50.00", "$2.18", "$50.00", "$50.00", "8,000"],
        ["none", "$8.00", "$11.43", "$12.00", "$0.00", "$11.90", "1,204"],
        ["all", "$48.41+", "$69.16", "$71.50", "$2.18", "$61.90", "$300.00", "9,204"],
    ]
    assert "others: $0.000000007" in ran.err
    assert "2026-11 in Europe/Berlin" in ran.err


async def test_a_raised_cap_is_that_of_the_budget(stub: Stub, run: Run) -> None:
    daily = {**COSTS["lines"][0], "cap": None, "daily_cap": "9.000000000", "raised_from": "2.000000000"}
    stub.answers["GET costs"] = (200, {**COSTS, "lines": [daily]})
    ran = await in_thread(run, "costs", "--by", "tenant")
    assert "$9.00 today, raised from $2.00" in ran.out


async def test_a_month_that_is_over_has_no_forecast_and_an_empty_one_no_table(stub: Stub, run: Run) -> None:
    over = {**COSTS["total"], "forecast": None, "next_month": None}
    stub.answers["GET costs"] = (200, {**COSTS, "total": over, "by": "tag", "tag": "team"})
    ran = await in_thread(run, "costs", "--by", "tag:team")
    assert stub.queries == [{"by": "tag", "tag": "team", "limit": "50"}]
    assert ran.out.splitlines()[0].split()[:2] == ["team", "spend"]
    assert "month's end" not in ran.out
    stub.answers["GET costs"] = (200, {**COSTS, "lines": []})
    assert "nothing was spent in 2026-11" in (await in_thread(run, "costs")).err


async def test_a_forecast_that_is_unknown_is_said_so(stub: Stub, run: Run) -> None:
    line = {**COSTS["lines"][0], "forecast": None, "next_month": None}
    stub.answers["GET costs"] = (200, {**COSTS, "lines": [line]})
    assert (await in_thread(run, "costs")).out.splitlines()[1].split()[:4] == ["acme", "$40.41+", "unknown", "unknown"]
    early = {**COSTS["total"], "forecast": None, "next_month": None}
    stub.answers["GET costs"] = (200, {**COSTS, "total": early, "ends_at": "2100-01-01T00:00:00.000Z"})
    assert "the forecasts are unknown: it is too early in the month" in (await in_thread(run, "costs")).err


async def test_programs_get_the_document_and_spreadsheets_the_csv_as_they_are(stub: Stub, run: Run) -> None:
    stub.answers["GET costs"], stub.answers["GET costs.csv"] = (200, COSTS), (200, CSV)
    assert (await in_thread(run, "costs", "--json")).json == COSTS
    assert (await in_thread(run, "costs", "--csv", "--by", "tenant")).out == CSV
    assert stub.queries[-1] == {"by": "tenant"}
