"""`breakwater doctor`: checks that all parts of the plane respond and are set up correctly."""

from __future__ import annotations

import asyncio
import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import typer

from breakwater.cli import doctor_checks, doctor_nats
from breakwater.cli.doctor_findings import Check, Finding, FindingVerdict
from breakwater.config import Config
from breakwater.kernel.commands import formats, output
from breakwater.kernel.commands.connect import run
from breakwater.kernel.commands.errors import CliError, ExitCode, as_cli_error
from breakwater.kernel.errors import ConfigError
from breakwater.local.plane import ConfigOption, DataOption, JsonOption, PlaneLocation

CHECK_TIMEOUT_S = 10.0

_LEAST_WIDTH = 30


_NATS = "BREAKWATER_NATS_URL"
_REDIS = "BREAKWATER_REDIS_URL"
_CLICKHOUSE = "BREAKWATER_CLICKHOUSE_URL"

CHECKS: tuple[tuple[str, Check, tuple[str, ...]], ...] = (
    ("nats", doctor_nats.nats_findings, (_NATS,)),
    ("redis", doctor_checks.redis_findings, (_REDIS,)),
    ("jobs", doctor_nats.job_findings, (_NATS, _REDIS)),
    ("clickhouse", doctor_checks.clickhouse_findings, (_CLICKHOUSE,)),
    ("record", doctor_checks.record_findings, (_NATS, _CLICKHOUSE)),
    ("api", doctor_checks.api_findings, ()),
    ("console", doctor_checks.console_findings, ()),
    ("config", doctor_checks.config_findings, ()),
    ("provider", doctor_checks.provider_findings, ()),
    ("calls", doctor_checks.call_findings, (_CLICKHOUSE,)),
    ("openid", doctor_checks.openid_findings, ()),
    ("identity", doctor_checks.identity_findings, ()),
    ("encryption", doctor_checks.encryption_findings, (_NATS, _CLICKHOUSE)),
)
"""All checks except those of the config file, in the report's order.

Each has the area of its findings, and the variables with the addresses of the servers that it asks.
"""

_SKIPPED_REMEDY = "Set the variable, or run `breakwater doctor` on the machine of the plane."


def doctor(
    config: ConfigOption = None,
    data: DataOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also show passed checks.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the plane: config, servers, streams, schema, lags, clocks, providers. Changes nothing, calls no model.

    Shows warnings and failures with their remedies, including failed calls of the last hour, by provider. Exits with
    code 1 if anything fails.

    For example:

        breakwater doctor

        breakwater doctor --verbose

        breakwater doctor --json | jq '.findings[] | select(.verdict != "ok")'
    """
    plane = PlaneLocation(data)
    settings = None
    file = plane.config_file(config)
    try:
        settings = plane.config(config)
    except (CliError, ConfigError) as error:
        is_elsewhere = config is None and "BREAKWATER_CONFIG" not in os.environ and not file.exists()
        if is_elsewhere and plane.lacks(_NATS):
            text = f"not checked: there is no {file} here, and BREAKWATER_URL leads to the HTTP API alone"
            findings = [Finding("config", "skip", text, "Name the config file with --config.")]
        else:
            remedy = "Name it with --config, and fix the listed errors."
            findings = [Finding("config", "fail", as_cli_error(error).message, remedy)]
    else:
        findings = [Finding("config", "ok", f"{file} is valid, {formats.quantity(len(settings.agents), 'agent')}")]
        findings += [] if plane.runs_with(file) else doctor_checks.secret_findings(settings)
    findings += run(all_findings(plane, settings))
    counts: Counter[FindingVerdict] = Counter(finding.verdict for finding in findings)
    if as_json:
        verdict = "fail" if counts["fail"] else "warn" if counts["warn"] else "ok"
        output.json_document({"verdict": verdict, "findings": findings})
    else:
        _show(findings, counts, verbose=verbose)
    if counts["fail"]:
        raise typer.Exit(ExitCode.FAILED)


async def all_findings(plane: PlaneLocation, config: Config | None) -> list[Finding]:
    """Runs all checks at the same time. Returns their findings; a failure that several checks find is listed once."""

    async def run_check(area: str, find: Check, server_variables: Sequence[str]) -> list[Finding]:
        if unset := [variable for variable in server_variables if plane.lacks(variable)]:
            text = f"not checked: {' and '.join(unset)} not set, and BREAKWATER_URL leads to the HTTP API alone"
            return [Finding(area, "skip", text, _SKIPPED_REMEDY)]
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return [finding async for finding in find(plane, config)]
        except TimeoutError:
            return [Finding(area, "fail", f"no answer within {CHECK_TIMEOUT_S:g} s", "See its log.")]
        except Exception as error:  # noqa: BLE001  `as_cli_error` raises unexpected errors again
            cli_error = as_cli_error(error)
            remedy = cli_error.remedy if "doctor" not in cli_error.remedy else "Is it running? Is the address correct?"
            return [Finding(area, "fail", cli_error.message, remedy)]

    unique_findings: dict[tuple[str, str], Finding] = {}
    for findings in await asyncio.gather(*(run_check(*check) for check in CHECKS)):
        for finding in findings:
            unique_findings.setdefault(("" if finding.verdict == "fail" else finding.area, finding.text), finding)
    return list(unique_findings.values())


def _show(findings: Sequence[Finding], counts: Counter[FindingVerdict], *, verbose: bool) -> None:
    width = max(len(finding.area) for finding in findings)
    indent = " " * (width + 8)
    for finding in findings:
        if finding.verdict in {"ok", "skip"} and not verbose:
            continue
        first, *more_lines = _fold(finding.text, len(indent)) or [""]
        output.print_styled(
            output.state(finding.verdict, f"{finding.verdict:<4}"), f"  {finding.area:<{width}}  {first}"
        )
        for line in more_lines:
            output.print_styled(indent + line)
        for line in () if finding.verdict == "ok" else _fold(finding.remedy, len(indent)):
            output.print_styled((indent + line, "dim"))
    cells: list[output.Cell] = []
    for verdict in ("ok", "skip", "warn", "fail"):
        if count := counts[verdict]:
            cells += [", " if cells else "", output.state(verdict, f"{count} {verdict}")]
    hides_some = (counts["ok"] or counts["skip"]) and not verbose
    output.print_styled(*cells, ("; --verbose lists all" if hides_some else "", "dim"))
    if skipped := ", ".join(finding.area for finding in findings if finding.verdict == "skip"):
        reason = "BREAKWATER_URL leads to the HTTP API alone. Run this on the machine of the plane to check all."
        for line in _fold(f"Skipped: {skipped}. {reason}", 0):
            output.print_styled((line, "dim"))


def _fold(text: str, indent: int) -> list[str]:
    """Splits a text into lines, which are folded to the terminal's width."""
    width = output.terminal_width()
    if width is None or width - indent < _LEAST_WIDTH:
        return text.splitlines()
    return [part for line in text.splitlines() for part in textwrap.wrap(line, width - indent)]
