"""`breakwater doctor`: is everything there, does it answer, is it set up as it should be."""

from __future__ import annotations

import textwrap
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from breakwater.cli import doctor_checks, output
from breakwater.cli.connect import run
from breakwater.cli.doctor_checks import Finding, worst
from breakwater.cli.errors import CliError, ExitCode, expected
from breakwater.cli.formats import counted
from breakwater.cli.plane import ConfigOption, DataOption, JsonOption, PlaneLocation
from breakwater.errors import ConfigError

if TYPE_CHECKING:
    from breakwater.config import Config

TIMEOUT_S = 10.0
"""For the checks of one part."""

_LEAST_WIDTH = 30


def doctor(
    config: ConfigOption = None,
    data: DataOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what is ok, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check the plane: config, servers, streams, schema, lags, clocks, providers. Changes nothing, calls no model.

    Shows what it warns of and what fails, with what to do about it. Exits with code 1 if anything fails.

    For example:

        breakwater doctor

        breakwater doctor --verbose

        breakwater doctor --json | jq '.findings[] | select(.verdict != "ok")'
    """
    plane = PlaneLocation(data)
    findings: list[Finding] = []
    settings = None
    try:
        settings = plane.config(config)
    except (CliError, ConfigError) as error:
        known = expected(error)
        findings.append(Finding("config", "fail", known.message, "Name it with --config, and correct what is listed."))
    else:
        what = f"{plane.config_file(config)} is right, {counted(len(settings.agents), 'agent')}"
        findings += [
            Finding("config", "ok", what),
            *doctor_checks.secret_findings(settings, running=plane.runs_with(plane.config_file(config))),
        ]
    findings += run(all_findings(plane, settings))
    verdict = worst(findings)
    if as_json:
        output.json_document({"verdict": verdict, "findings": findings})
    else:
        _show(findings, verbose=verbose)
    if verdict == "fail":
        raise typer.Exit(ExitCode.FAILED)


async def all_findings(plane: PlaneLocation, config: Config | None) -> list[Finding]:
    """Everything but the config itself, all parts at the same time; in a fixed order."""
    import asyncio

    from breakwater.cli.doctor_bus import nats_findings
    from breakwater.cli.doctor_jobs import job_findings
    from breakwater.cli.doctor_openid import openid_findings

    checks: list[tuple[str, Callable[[], Awaitable[list[Finding]]]]] = [
        ("nats", lambda: nats_findings(plane, config)),
        ("redis", lambda: doctor_checks.redis_findings(plane)),
        ("jobs", lambda: job_findings(plane)),
        ("clickhouse", lambda: doctor_checks.clickhouse_findings(plane)),
        ("record", lambda: doctor_checks.record_findings(plane)),
        ("api", lambda: doctor_checks.api_findings(plane)),
        ("console", lambda: doctor_checks.console_findings(plane)),
        ("config", lambda: doctor_checks.config_findings(plane, config)),
    ]
    if config is not None:
        checks.append(("provider", lambda: doctor_checks.provider_findings(config)))
        checks.append(("openid", lambda: openid_findings(config)))
        checks.append(("encryption", lambda: doctor_checks.encryption_findings(plane, config)))
    found = await asyncio.gather(*(_guarded(area, check) for area, check in checks))
    return [finding for findings in found for finding in findings]


async def _guarded(area: str, check: Callable[[], Awaitable[list[Finding]]]) -> list[Finding]:
    import asyncio

    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await check()
    except TimeoutError:
        return [Finding(area, "fail", f"no answer within {TIMEOUT_S:g} s", "See its log.")]
    except Exception as error:  # noqa: BLE001  `expected` raises a bug again
        known = expected(error)
        remedy = known.remedy if "doctor" not in known.remedy else "Is it running? Is the address right?"
        return [Finding(area, "fail", known.message, remedy)]


def _show(findings: list[Finding], *, verbose: bool) -> None:
    area_width = max(len(finding.area) for finding in findings)
    indent = " " * (area_width + 8)
    for finding in findings:
        if finding.verdict == "ok" and not verbose:
            continue
        first, *more = _wrapped(finding.text, len(indent)) or [""]
        output.styled(
            output.state(finding.verdict, f"{finding.verdict:<4}"), f"  {finding.area:<{area_width}}  {first}"
        )
        for line in more:
            output.styled(f"{indent}{line}")
        if finding.verdict != "ok":
            for line in _wrapped(finding.remedy, len(indent)):
                output.styled((f"{indent}{line}", "dim"))
    counts = {name: sum(finding.verdict == name for finding in findings) for name in ("ok", "warn", "fail")}
    hint = [("; --verbose lists all", "dim")] if counts["ok"] and not verbose else []
    output.styled("", *_counts(counts), *hint)


def _wrapped(text: str, indent: int) -> list[str]:
    """The lines of a text, folded to the terminal's width; left as they are in a pipe."""
    screen = output.terminal_width()
    if screen is None or screen - indent < _LEAST_WIDTH:
        return text.splitlines()
    return [part for line in text.splitlines() for part in textwrap.wrap(line, screen - indent)]


def _counts(counts: dict[str, int]) -> list[output.Cell]:
    cells: list[output.Cell] = []
    for name, count in counts.items():
        if count:
            cells += [", " if cells else "", output.state(name, f"{count} {name}")]
    return cells
